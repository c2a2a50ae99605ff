//! Histories of operations and what they must satisfy.

pub mod history;
