//! What commands do without an agent: they may wait.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};

use crate::{
    Config, Record, StoreOutcome,
    file::{Records, Store},
};

/// A shard on record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its number.
    pub id: u32,
    /// Number of the record's version.
    pub revision: u64,
    /// The record, or why it cannot be used and what to do.
    pub record: Result<Record, String>,
}

/// The authority for one command.
pub struct Admin(Kind);

enum Kind {
    File(PathBuf),
}

impl Admin {
    /// # Errors
    /// The configuration contradicts itself, or the authority cannot be reached: the text says what to do.
    pub fn open(config: &Config) -> Result<Self> {
        Ok(Self(match config {
            Config::File(config) => Kind::File(config.directory.clone()),
            Config::Etcd(_) => bail!("this build has no etcd"),
        }))
    }

    /// All shards, by ascending number.
    ///
    /// # Errors
    /// The authority does not answer.
    pub fn shards(&mut self) -> Result<Vec<Shard>> {
        match &self.0 {
            // The file is replaced as a whole: it can be read while an agent holds the lock.
            Kind::File(directory) => Ok(Records::read(directory)?
                .shards
                .into_iter()
                .map(|(revision, record)| Shard { id: record.shard, revision, record: Ok(record) })
                .collect()),
        }
    }

    /// The record of a shard, if there is one, and its revision.
    ///
    /// # Errors
    /// The authority does not answer, or the record cannot be used.
    pub fn load(&mut self, shard: u32) -> Result<Option<(u64, Record)>> {
        match &self.0 {
            Kind::File(directory) => Ok(Records::read(directory)?.find(shard).cloned()),
        }
    }

    /// Replaces a record if its revision is still `expected`; 0: there must be none.
    ///
    /// # Errors
    /// It is not a record that an agent could use, or an agent holds the file. What became of a request that the authority
    /// did not answer is an outcome.
    pub fn store(&mut self, expected: u64, record: Record) -> Result<StoreOutcome> {
        record.validate().map_err(anyhow::Error::msg)?;
        Ok(match &self.0 {
            Kind::File(directory) => Store::open(directory)?.store(expected, record),
        })
    }

    /// Creates the record of a shard; its revision.
    ///
    /// # Errors
    /// There is one already, or it is not known whether it was stored; and as for [`Admin::store`].
    pub fn create(&mut self, record: Record) -> Result<u64> {
        let shard = record.shard;
        ensure!(record.epoch == 0, "shard {shard}: a new one begins with epoch 0");
        match self.store(0, record)? {
            StoreOutcome::Stored(revision) => Ok(revision),
            StoreOutcome::Conflict => {
                bail!("shard {shard} exists already: change its members, or choose another number")
            }
            StoreOutcome::Unknown(why) => {
                bail!("shard {shard} may have been created, or not: {why}. List the shards to see")
            }
        }
    }
}
