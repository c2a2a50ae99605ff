//! The coordinator: an agent that decides who is in a shard and who has a session, around a data path that orders writes
//! and routes reads.

pub mod authority;
pub mod config;
pub mod counters;
pub mod datapath;
pub mod sessions;
