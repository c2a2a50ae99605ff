//! The invariants of `docs/protocol.md`, section 8: one file each, by its name. They are pure functions over plain
//! observations, so that simulations, tests and end-to-end checks use the same ones.
//!
//! `check` judges what was seen of one configuration. Where there are several, or too much to keep, a `Monitor` judges each
//! observation as it is made.

pub mod bounded;
pub mod clean_after;
pub mod committed_everywhere;
pub mod linearizable;
pub mod monotone;
pub mod one_coordinator;
pub mod one_effect;
pub mod read_committed;
pub mod same_outcome;

use std::fmt;

use underpass_protocol::wire::{Kind, SessionId, Status};

use crate::history::Text;

/// An invariant does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Its name in `docs/protocol.md`, section 8.
    pub invariant: &'static str,
    /// What was observed instead.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)
    }
}

impl std::error::Error for Violation {}

fn violated(invariant: &'static str, what: String) -> Result<(), Violation> {
    Err(Violation { invariant, what })
}

/// A replica processed a write and recorded its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Index of the replica.
    pub replica: u8,
    /// Session of the write.
    pub session: SessionId,
    /// Its number in the session.
    pub request: u64,
    /// Its sequence number: that of the version which it stored.
    pub seq: u64,
    /// Its key.
    pub key: Text,
    /// What it does.
    pub kind: Kind,
    /// The outcome recorded.
    pub status: Status,
    /// The result recorded: of INCR, the sum.
    pub result: u64,
}

/// The coordinator committed a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its key.
    pub key: Text,
    /// Its sequence number.
    pub seq: u64,
}

#[cfg(test)]
fn applied(replica: u8, request: u64, seq: u64, kind: Kind, status: Status) -> Applied {
    Applied { replica, session: SessionId::new(1, 0), request, seq, key: "k".into(), kind, status, result: 0 }
}

#[cfg(test)]
fn committed(seq: u64) -> Committed {
    Committed { key: "k".into(), seq }
}
