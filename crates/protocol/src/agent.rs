//! The agent: decides, beside a data path that acts. Who is in a shard, under which epoch and lease; who has a session; what
//! is repaired. `docs/protocol.md`, sections 5 and 7.
//!
//! [`Agent::step`] takes what happened and the tables of its data path, and says what to do. It does no I/O: datagrams,
//! compare-and-swaps and answers to the operator are values, and time is passed in, in milliseconds of one monotonic
//! clock.

mod record;
mod tables;

pub use self::{
    record::{LEASE_MS, RECORD_VERSION, Record, Wanted},
    tables::{Settlement, Tables, TablesError},
};
use crate::{control::ClusterKey, wire::Endpoint};

/// What an agent is given at its start.
pub struct Settings {
    /// The coordinator's own address: what it is known by.
    pub listen: Endpoint,
    /// Seals messages between agents and replicas.
    pub cluster_key: ClusterKey,
    /// Time between heartbeats.
    pub heartbeat_ms: u64,
    /// A member silent for this long gets no reads.
    pub suspect_ms: u64,
    /// A member silent for this long is removed.
    pub lost_ms: u64,
    /// How long a take-over waits for members that do not answer.
    pub reach_ms: u64,
    /// A write that is pending for this long is asked about.
    pub stuck_ms: u64,
    /// Sessions not used for this long are closed.
    pub idle_ms: u64,
    /// From the monotonic clock to this host's wall clock.
    pub wall_offset_ms: i64,
    /// Draws secrets.
    pub random: Box<dyn FnMut() -> u64 + Send>,
}

/// What the operator asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A replica shall take part.
    Add(Wanted),
    /// A replica shall no longer take part. The last active one only with `lose_data`.
    Remove {
        /// Its number.
        id: u32,
        /// Even if nobody else holds what it holds.
        lose_data: bool,
    },
    /// Make a learner active as soon as it has copied everything: what happens anyway; tells why if it cannot be now.
    Promote {
        /// Its number.
        id: u32,
    },
    /// Another replica in place of one: added, copied and promoted, then the old one removed.
    Replace {
        /// Number of the old one.
        id: u32,
        /// The new one.
        by: Wanted,
    },
    /// Hand the shard over to another coordinator.
    Transfer {
        /// Its address.
        to: Endpoint,
    },
    /// Every member has lost its data: begin empty.
    BeginEmpty,
}

/// What happens to an agent.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// [`Agent::due`] has come. Harmless at any other time.
    Tick,
    /// A control datagram came in.
    Datagram {
        /// Its source.
        from: Endpoint,
        /// Its bytes.
        bytes: &'a [u8],
    },
    /// What is on record of a shard, after a load or a change by anybody.
    Record {
        /// Shard.
        shard: u32,
        /// Number of the record's version at the authority; 0: there is none.
        revision: u64,
        /// The record.
        record: Option<Record>,
    },
    /// What became of an [`Action::Store`].
    Stored {
        /// Shard.
        shard: u32,
        /// Its number.
        id: u64,
        /// What became of it.
        outcome: StoreOutcome,
    },
    /// The role of coordinator of a shard was gained or lost.
    Role {
        /// Shard.
        shard: u32,
        /// Held now.
        held: bool,
    },
    /// The operator asks for something; answered by [`Action::Reply`].
    Command {
        /// Shard.
        shard: u32,
        /// Number of the question.
        id: u64,
        /// What is asked for.
        command: Command,
    },
}

/// What became of a compare-and-swap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreOutcome {
    /// The record is stored under this revision.
    Stored(u64),
    /// Somebody else changed the record: it was not stored. An [`Event::Record`] follows.
    Conflict,
    /// Not known; why. An [`Event::Record`] follows when the authority answers again.
    Unknown(String),
}

/// What an agent wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a datagram from the coordinator's address.
    Send {
        /// Destination.
        to: Endpoint,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// Store a record if its revision is still this one; at most one for each shard is under way.
    Store {
        /// Shard.
        shard: u32,
        /// Number for [`Event::Stored`].
        id: u64,
        /// Revision to replace; 0: there must be none.
        expected: u64,
        /// The new record.
        record: Record,
    },
    /// Ask for the record again: an [`Event::Record`] answers.
    Load {
        /// Shard.
        shard: u32,
    },
    /// Give up the role, and leave it to `to` for a while.
    Resign {
        /// Shard.
        shard: u32,
    },
    /// Answer the operator.
    Reply {
        /// Number of the question.
        id: u64,
        /// What was done, or why not and what to do.
        result: Result<String, String>,
    },
    /// Tell the log.
    Log {
        /// How bad it is.
        level: Level,
        /// What happened.
        what: String,
    },
}

/// How bad a log line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Info,
    /// Worth a look.
    Warn,
    /// Somebody should act.
    Error,
}
