//! The coordinator: an agent that decides who is in a shard and who has a session, around a data path that orders writes
//! and routes reads.

pub mod admin;
pub mod agent;
mod batch;
pub mod cli;
mod clock;
pub mod config;
pub mod counters;
pub mod datapath;
pub mod socket;
pub mod stats;
pub mod xdp;
