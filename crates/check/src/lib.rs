//! Histories and the linearizability checker.
