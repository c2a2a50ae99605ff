//! Simulation of whole clusters: the very state machines of `crates/protocol`, in a world where time, network, crashes and the
//! authority's answers are drawn from a seed. One seed is one run, bit for bit.
//!
//! A run has two phases. In the first, faults befall it: those of its [`plan`]. Then everything heals, and the cluster has to
//! come back by itself: every request ends, every wanted replica is active, nothing is unresolved, all replicas are identical.
//! All along, the invariants of `docs/protocol.md`, section 8, are checked ([`watch`]).
//!
//! What is simulated: hosts with clocks of their own ([`host`]), the network between them ([`network`]), the authority
//! ([`authority`]), and processes that stop, start and stand still ([`world`]). What is not: several CPUs in one data path
//! (`docs/concurrency.md` and the tests named there have those).

pub mod authority;
pub mod cli;
mod coordinator;
pub mod host;
pub mod mutants;
pub mod network;
pub mod plan;
pub mod random;
pub mod runner;
pub mod shrink;
pub mod trace;
pub mod watch;
pub mod world;
