//! Histories of operations, the linearizability checker, and the invariants of `docs/protocol.md`, section 8.
//!
//! [`history`] is what a recorded run looks like and how it is written and read; [`linearizability`] decides whether one
//! order of its operations explains it; [`invariants`] has one file for each named invariant; [`cli`] is
//! `underpass check`.

pub mod cli;
pub mod history;
pub mod invariants;
pub mod linearizability;
