//! Loading and attaching kernel programs, next hops, and what a machine can do.

pub mod attach;
pub mod clock;
pub mod coordinator;
pub mod features;
pub mod frame;
pub mod netlink;
pub mod next_hop;
pub mod plain;
mod tables;
pub mod tc;
