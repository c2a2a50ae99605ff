//! What an agent needs of its data path, whichever it is.

use underpass_abi::abi::{up_config, up_session};

use crate::{coordinator::Scan, wire::SessionId};

/// The tables could not be reached: the agent cannot go on. Says what was tried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TablesError(pub String);

/// How a repair ends a pending write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// Every member of `must_ack` has processed it, with this outcome.
    Committed {
        /// Status, as on the wire.
        status: u8,
        /// Result.
        result: u64,
    },
    /// Every member of `must_ack` has recorded it as without effect.
    Aborted,
}

/// The tables of a data path. Times are milliseconds of the agent's monotonic clock.
pub trait Tables {
    /// Sessions that the table holds.
    fn session_count(&self) -> u32;

    /// Makes `config` the active configuration of its shard. A higher epoch raises the clock. `floor` is filled in: the clock
    /// then if the shard was not served, else the one before. Next hops in it are the data path's own business. When it
    /// returns, no CPU acts under the one before.
    fn configure(&mut self, config: &up_config) -> Result<(), TablesError>;

    /// Stops serving a shard and empties its tables: configuration, dirty set, sessions, also those loaded before it ever
    /// served. The clock stays.
    fn clear(&mut self, shard: u32) -> Result<(), TablesError>;

    /// The active configuration of a shard, if it has one.
    fn config(&self, shard: u32) -> Option<up_config>;

    /// Puts the end of the lease in the active configuration of a shard off to `until_ms`, never nearer. Cheap: called for
    /// every heartbeat answered.
    fn extend_lease(&mut self, shard: u32, until_ms: u64) -> Result<(), TablesError>;

    /// Looks for unresolved writes of a shard among the records of the first `sessions` indices.
    fn scan(&mut self, shard: u32, sessions: usize) -> Result<Scan, TablesError>;

    /// Shows the records of the first `count` indices, one after the other.
    fn records(&mut self, count: usize, visit: &mut dyn FnMut(u16, &up_session)) -> Result<(), TablesError>;

    /// The record of one index.
    fn record(&mut self, index: u16) -> Result<up_session, TablesError>;

    /// Puts a whole record, whose write is resolved, into an index that nobody's session has: false if one has, or if it is
    /// beyond the table.
    fn load(&mut self, index: u16, record: &up_session) -> Result<bool, TablesError>;

    /// Takes a session away unless its write is unresolved; with `used_before_ms` only if not used at or after it.
    fn close(
        &mut self,
        session: SessionId,
        used_before_ms: Option<u64>,
    ) -> Result<crate::coordinator::CloseOutcome, TablesError>;

    /// Clears a member's acknowledgement in every record of a shard. The index is in no CPU's `must_ack`.
    fn forget_acks(&mut self, shard: u32, index: u8) -> Result<(), TablesError>;

    /// Ends a pending write as W_REPLY steps 1 to 3 do, but tells no client. False if it is not pending with this seq. An
    /// aborted one's record gets status ABORTED.
    fn settle(
        &mut self,
        session: SessionId,
        request: u64,
        seq: u64,
        settlement: Settlement,
    ) -> Result<bool, TablesError>;
}
