//! The authority: the durable record of each shard, changed by compare-and-swap alone, and the election of who may take a
//! shard over (`docs/protocol.md`, section 7).
//!
//! An agent asks by [`Authority::request`], which never waits, and is told by [`Notice`]s: its one thread polls the file
//! descriptor beside its others. Commands that work without an agent use [`Admin`].
//!
//! What a driver promises:
//! - Each [`Request::Store`] is answered by one [`Notice::Stored`]. After [`StoreOutcome::Conflict`] or
//!   [`StoreOutcome::Unknown`] a [`Notice::Record`] follows, which tells for good whether it was stored: it is not stored later.
//!   (But for a creation in etcd, `expected` 0, which may yet arrive late.)
//! - Each [`Request::Load`] is followed by a [`Notice::Record`]. From the first request about a shard on, changes by anybody
//!   else are told unasked. Records of one shard are told in the order of their revisions; of several that nobody has taken
//!   yet, the newest alone is kept.
//! - A record that this build cannot read is never told and never overwritten: [`Notice::Trouble`] says what to do.
//! - [`Notice::Role`] tells changes alone. A role is for liveness: nothing that it allows may rest on it.

mod admin;
mod config;
mod etcd;
mod file;
mod mailbox;
mod memory;
mod record;

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use anyhow::Result;
pub use underpass_protocol::agent::{Record, StoreOutcome};
use underpass_protocol::wire::Endpoint;

pub use self::{
    admin::{Admin, Shard},
    config::{Config, EtcdConfig, FileConfig},
    etcd::EtcdAuthority,
    file::FileAuthority,
    memory::{Lost, Memory, MemoryAuthority},
};

/// The longest that a role is left to others.
const LEAVE_TO_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// What an agent asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Store a record if its revision is still this one. The next one of a shard waits for the [`Notice::Stored`] of this one.
    Store {
        /// Shard.
        shard: u32,
        /// Number for [`Notice::Stored`].
        id: u64,
        /// Revision to replace; 0: there must be none.
        expected: u64,
        /// The new record.
        record: Record,
    },
    /// Tell the record.
    Load {
        /// Shard.
        shard: u32,
    },
    /// Try to get the role of a shard's coordinator, and to keep it, from now on.
    Campaign {
        /// Shard.
        shard: u32,
    },
    /// Give up the role, and do not try to get it for a while, so that another gets it. An agent that ends waits a moment for
    /// the [`Notice::Role`] that tells the role's loss: dropped before, it has not resigned. [`Request::Campaign`] does not
    /// shorten that.
    Resign {
        /// Shard.
        shard: u32,
        /// For how long it is left to others.
        leave_to: Duration,
    },
}

impl Request {
    fn shard(&self) -> u32 {
        match *self {
            Self::Store { shard, .. }
            | Self::Load { shard }
            | Self::Campaign { shard }
            | Self::Resign { shard, .. } => shard,
        }
    }
}

/// What an agent is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// What is on record of a shard.
    Record {
        /// Shard.
        shard: u32,
        /// Number of this version, rising with each change; 0: there is none.
        revision: u64,
        /// The record.
        record: Option<Record>,
    },
    /// What became of a [`Request::Store`].
    Stored {
        /// Shard.
        shard: u32,
        /// Its number.
        id: u64,
        /// What became of it.
        outcome: StoreOutcome,
    },
    /// The role of a shard's coordinator was gained or lost.
    Role {
        /// Shard.
        shard: u32,
        /// Held now.
        held: bool,
    },
    /// Something is wrong; told once until it is over.
    Trouble {
        /// What, and what to do.
        what: String,
    },
    /// What was wrong is over.
    Recovered {
        /// What.
        what: String,
    },
}

/// Something that is wrong at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Since when.
    pub since: Instant,
    /// What, and what to do.
    pub what: String,
}

/// A connection to the authority, in the name of one agent. The file descriptor is readable while there is a notice.
///
/// Dropping it is like a crash: a role is not resigned, and runs out.
pub trait Authority: AsFd + Send {
    /// Asks for something. Never waits.
    fn request(&self, request: Request);

    /// The next notice, if there is one.
    fn try_next(&mut self) -> Option<Notice>;

    /// Which authority it is, and where.
    fn name(&self) -> String;

    /// What is wrong at the moment: empty if it answers and can be used.
    fn troubles(&self) -> Vec<Trouble>;
}

/// Connects the agent known by the address `me`. A file is locked and read; other authorities need not be reachable yet.
///
/// # Errors
/// The configuration contradicts itself, or the file cannot be used: the text says what to do.
pub fn open(config: &Config, me: Endpoint) -> Result<Box<dyn Authority>> {
    Ok(match config {
        Config::File(config) => Box::new(FileAuthority::open(&config.directory)?),
        Config::Etcd(config) => Box::new(EtcdAuthority::open(config, me)?),
    })
}
