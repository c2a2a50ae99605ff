//! The invariants of `docs/protocol.md`, section 8: one file each, by its name. They are pure functions over plain
//! observations, so that simulations, tests and end-to-end checks use the same ones.
//!
//! **one-coordinator** is about leases, which configurations do not have yet.

pub mod linearizable;

use std::fmt;

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
