//! The replication protocol as pure state machines.
//!
//! Nothing here does I/O, reads a clock, draws a random number or starts a thread: time and randomness come in as
//! parameters, packets and decisions go out as values. `docs/protocol.md` is the specification; comments cite its steps
//! by name.

pub mod agent;
pub mod client;
pub mod control;
pub mod coordinator;
pub mod replica;
pub mod transfer;
pub mod wire;
