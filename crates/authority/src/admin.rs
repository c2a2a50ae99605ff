//! What commands do without an agent: they may wait.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context, Result, bail, ensure};
use etcd_client::{GetOptions, GetResponse};
use tokio::runtime::Runtime;

use crate::{
    Config, Record, StoreOutcome,
    etcd::{Link, Settings, compare_and_swap},
    file::{Records, Store},
    record,
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
    Etcd(Box<Etcd>),
}

struct Etcd {
    runtime: Runtime,
    link: Link<Arc<Settings>>,
}

impl Etcd {
    /// Reads a key, or several, from any member that answers.
    fn get(&mut self, key: &str, options: &GetOptions) -> Result<GetResponse> {
        self.runtime.block_on(async {
            let mut failures = Vec::new();
            for _ in 0..self.link.members() {
                match self.link.get(key, Some(options.clone())).await {
                    Ok(answer) => return Ok(answer),
                    Err(why) => failures.push(why),
                }
            }
            bail!("{}", failures.join("; "))
        })
    }

    fn shards(&mut self) -> Result<Vec<Shard>> {
        let prefix = self.link.settings().shards();
        let answer = self.get(&prefix, &GetOptions::new().with_prefix())?;
        let mut shards = Vec::new();
        for kv in answer.kvs() {
            let key = String::from_utf8_lossy(kv.key());
            let id = key.strip_prefix(&prefix).and_then(|id| id.parse().ok()).with_context(|| {
                format!(
                    "the key {key} in etcd is not a shard's: choose another `prefix` if another program uses this one"
                )
            })?;
            shards.push(Shard { id, revision: kv.mod_revision() as u64, record: record::parse(kv.value(), id) });
        }
        shards.sort_by_key(|shard| shard.id);
        Ok(shards)
    }

    fn load(&mut self, shard: u32) -> Result<Option<(u64, Record)>> {
        let key = self.link.settings().record_key(shard);
        let answer = self.get(&key, &GetOptions::new())?;
        let Some(kv) = answer.kvs().first() else { return Ok(None) };
        let record = record::parse(kv.value(), shard)
            .map_err(|why| anyhow::anyhow!("the record in etcd under {key} cannot be used: {why}"))?;
        Ok(Some((kv.mod_revision() as u64, record)))
    }

    fn store(&mut self, expected: u64, record: &Record) -> Result<StoreOutcome> {
        let key = self.link.settings().record_key(record.shard);
        // Finds a member that answers, so that the one try has a good chance.
        self.get(&key, &GetOptions::new())?;
        Ok(self.runtime.block_on(compare_and_swap(&mut self.link, &key, expected, record::to_bytes(record))))
    }
}

impl Admin {
    /// # Errors
    /// The configuration contradicts itself, or the authority cannot be reached: the text says what to do.
    pub fn open(config: &Config) -> Result<Self> {
        Ok(Self(match config {
            Config::File(config) => Kind::File(config.directory.clone()),
            Config::Etcd(config) => {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                Kind::Etcd(Box::new(Etcd { runtime, link: Link::new(Arc::new(Settings::new(config)?)) }))
            }
        }))
    }

    /// All shards, by ascending number.
    ///
    /// # Errors
    /// The authority does not answer.
    pub fn shards(&mut self) -> Result<Vec<Shard>> {
        match &mut self.0 {
            // The file is replaced as a whole: it can be read while an agent holds the lock.
            Kind::File(directory) => Ok(Records::read(directory)?
                .shards
                .into_iter()
                .map(|(revision, record)| Shard { id: record.shard, revision, record: Ok(record) })
                .collect()),
            Kind::Etcd(etcd) => etcd.shards(),
        }
    }

    /// The record of a shard, if there is one, and its revision.
    ///
    /// # Errors
    /// The authority does not answer, or the record cannot be used.
    pub fn load(&mut self, shard: u32) -> Result<Option<(u64, Record)>> {
        match &mut self.0 {
            Kind::File(directory) => Ok(Records::read(directory)?.find(shard).cloned()),
            Kind::Etcd(etcd) => etcd.load(shard),
        }
    }

    /// Replaces a record if its revision is still `expected`; 0: there must be none.
    ///
    /// # Errors
    /// It is not a record that an agent could use, or an agent holds the file. What became of a request that the authority
    /// did not answer is an outcome.
    pub fn store(&mut self, expected: u64, record: Record) -> Result<StoreOutcome> {
        record.validate().map_err(anyhow::Error::msg)?;
        Ok(match &mut self.0 {
            Kind::File(directory) => Store::open(directory)?.store(expected, record),
            Kind::Etcd(etcd) => etcd.store(expected, &record)?,
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
