//! A coherent in-kernel cache in front of a stock memcached.
//!
//! [`stream`], [`model`] and [`limit`] are pure: what memcached makes of a connection's bytes, why a hit is never stale, and how much
//! a source is sent. The rest
//! loads the kernel programs, fills the cache and shows what it does. `docs/cache.md` tells the whole story.

pub mod admission;
pub mod agent;
pub mod cli;
pub mod connection;
pub mod hash;
pub mod kernel;
pub mod limit;
pub mod memcached;
pub mod model;
pub mod stats;
pub mod stream;
pub mod table;
pub mod word;
