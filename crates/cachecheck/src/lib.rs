//! Judges a cache in front of memcached from outside.
//!
//! [`stream`] makes streams of commands: every command in every protocol, with every segmentation, well-formed and not.
//! [`twin`] replays one in lockstep to two servers and demands the same answers, byte for byte. [`fake`] is a cache in user
//! space into which bugs can be planted: what judges a cache has to find each of them. [`server`] starts the servers. [`judge`] is a
//! program that goes on for as long as it is told.

pub mod demo;
pub mod fake;
pub mod judge;
pub mod mixed;
pub mod server;
pub mod stream;
pub mod talk;
pub mod twin;
pub mod wire;
