//! The vocabulary of a client's callers: requests, outcomes, and how patient it is.

use crate::wire::{Endpoint, KEY_MAX, Kind, Operand, PAYLOAD_MAX, Reason, Status};

/// What a client is for, and its patience.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Shard.
    pub shard: u32,
    /// The client's own address, as coordinator and replicas see it.
    pub reply_to: Endpoint,
    /// Most reads outstanding; at least 1.
    pub reads_max: usize,
    /// Wait for a first reply while no round trip has been measured.
    pub resend_first_ns: u64,
    /// Least wait for a reply.
    pub resend_min_ns: u64,
    /// Longest wait for a reply before sending again.
    pub resend_max_ns: u64,
    /// Wait after a first reject; doubled with each further one.
    pub reject_min_ns: u64,
    /// Longest wait after a reject.
    pub reject_max_ns: u64,
    /// How long after its deadline a rejected write may take to prove that it failed.
    pub grace_ns: u64,
}

impl Settings {
    /// Defaults for a network of one site.
    pub fn new(shard: u32, reply_to: Endpoint) -> Self {
        Self {
            shard,
            reply_to,
            reads_max: 32,
            resend_first_ns: 50_000_000,
            resend_min_ns: 10_000_000,
            resend_max_ns: 500_000_000,
            reject_min_ns: 300_000,
            reject_max_ns: 20_000_000,
            grace_ns: 50_000_000,
        }
    }
}

/// What a caller asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// The newest committed value of a key.
    Read {
        /// Key, 1 to 250 bytes.
        key: &'a [u8],
    },
    /// A change of a key.
    Write {
        /// What it does.
        kind: Kind,
        /// Key, 1 to 250 bytes.
        key: &'a [u8],
        /// With what. Parts that the kind does not have must be empty.
        operand: Operand<'a>,
    },
}

/// Why a request cannot be sent at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Keys have 1 to 250 bytes.
    #[error("the key has {length} bytes; keys have 1 to {KEY_MAX}")]
    KeyLength {
        /// Its length in bytes.
        length: usize,
    },
    /// It would not fit in a datagram.
    #[error("the value has {length} bytes; with this key and operation at most {limit} fit in a datagram")]
    ValueLength {
        /// Its length in bytes.
        length: usize,
        /// The most that a value of this write may have, in bytes.
        limit: usize,
    },
    /// TOUCH sets a lifetime and nothing else.
    #[error("touch needs a lifetime")]
    NoLifetime,
    /// DELETE, INCR and TOUCH have no data.
    #[error("{0} takes no value")]
    NoDataAllowed(Kind),
}

impl<'a> Request<'a> {
    /// The key.
    pub fn key(&self) -> &'a [u8] {
        match *self {
            Self::Read { key } | Self::Write { key, .. } => key,
        }
    }

    /// Refuses what no coordinator would take.
    pub fn validate(&self) -> Result<(), Invalid> {
        let key_length = self.key().len();
        if key_length == 0 || key_length > KEY_MAX {
            return Err(Invalid::KeyLength { length: key_length });
        }
        let Self::Write { kind, operand, .. } = *self else { return Ok(()) };
        let prefix = 8 * (usize::from(operand.ttl_ms.is_some()) + usize::from(matches!(kind, Kind::Cas | Kind::Incr)));
        let limit = PAYLOAD_MAX - key_length - prefix;
        if operand.data.len() > limit {
            return Err(Invalid::ValueLength { length: operand.data.len(), limit });
        }
        if kind == Kind::Touch && operand.ttl_ms.is_none() {
            return Err(Invalid::NoLifetime);
        }
        if matches!(kind, Kind::Delete | Kind::Incr | Kind::Touch) && !operand.data.is_empty() {
            return Err(Invalid::NoDataAllowed(kind));
        }
        Ok(())
    }
}

/// Why a request was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It can never be.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A write is outstanding already, or as many reads as there may be.
    #[error("too many requests outstanding")]
    Full,
}

/// A value and its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Data.
    pub value: Vec<u8>,
    /// Number of the write that set the data: what a CAS compares.
    pub cas: u64,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A read's answer; `None`: there is no such key.
    Read(Option<Item>),
    /// The write was executed with this result. A status other than OK: its condition did not hold and the data is as
    /// before.
    Written {
        /// Result.
        status: Status,
        /// The write's sequence number: the item's `cas`, if this write set its data.
        seq: u64,
        /// The new number, of an INCR with status OK.
        number: Option<i64>,
    },
    /// Definitely without effect, now and later.
    Failed(Failure),
    /// A write that may have had its effect, may have it later, or never.
    Unknown(Doubt),
    /// A read without an answer.
    TimedOut {
        /// The latest reject, if there was any.
        last: Option<Reason>,
        /// Whether it was ever sent; if not, no session could be opened.
        sent: bool,
    },
}

/// Why a request definitely had no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Rejected for good, or until its deadline.
    #[error("rejected: {0}")]
    Rejected(Reason),
    /// It never left: no session could be opened before its deadline. The latest reject of an OPEN, if there was any.
    #[error("no session could be opened{}", because(*.0))]
    NeverSent(Option<Reason>),
}

/// Why a write's outcome is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Doubt {
    /// No answer until its deadline. The latest reject, if there was any.
    #[error("no answer before the deadline{}", because(*.0))]
    Deadline(Option<Reason>),
    /// The coordinator no longer knows the session that it was sent in.
    #[error("the session was lost: {0}")]
    SessionLost(Reason),
    /// The client ended before an answer came.
    #[error("the client ended before an answer came")]
    Ended,
}

fn because(reason: Option<Reason>) -> String {
    reason.map_or_else(String::new, |reason| format!(" (last reject: {reason})"))
}

/// A request that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The caller's own mark.
    pub tag: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// The coordinator's time, in milliseconds since 1970, that the answered request was stamped with: what expiry was
    /// judged by. `None`: there was no answer.
    pub time_ms: Option<u64>,
    /// When it was submitted.
    pub submitted_ns: u64,
    /// When its first copy was sent; `None`: never.
    pub sent_ns: Option<u64>,
    /// When it ended.
    pub done_ns: u64,
    /// Copies sent.
    pub sends: u32,
    /// Rejects received.
    pub rejects: u32,
}
