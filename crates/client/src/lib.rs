//! The client library: sessions, retries, shards.
//!
//! - [`Client`]: calls that wait, from any number of threads. What most programs want.
//! - [`engine::Engine`]: many requests in flight from one thread that never waits.
//! - [`cli`]: `underpass get`, `put` and the others.
//!
//! All operations are linearizable (`docs/protocol.md`). A write whose answer does not come in time is of *unknown*
//! outcome, [`Error::Unknown`], which is not the same as failed: after any other error it had no effect.

mod batch;
mod blocking;
pub mod cli;
pub mod config;
pub mod engine;
mod error;
pub mod placement;

pub use blocking::{Call, Client, Conditional, Number, Recorder, Reply, Stored, Unmet};
pub use config::{Config, ConfigError, ShardConfig};
pub use error::{Contact, Diagnosis, Error, Said};
pub use underpass_protocol::{
    client::{Doubt, Failure, Invalid, Item, Request},
    wire::{Kind, Operand, Reason, Status},
};
