//! Loading and attaching kernel programs, next hops, and what a machine can do.

pub mod netlink;
pub mod next_hop;
