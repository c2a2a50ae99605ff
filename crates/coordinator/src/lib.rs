//! The coordinator: an agent that decides who is in a shard and who has a session, around a data path that orders writes
//! and routes reads.

pub mod agent;
pub mod authority;
mod batch;
pub mod cli;
mod clock;
pub mod config;
pub mod counters;
pub mod datapath;
pub mod members;
pub mod sessions;
pub mod socket;
pub mod stats;
pub mod xdp;
