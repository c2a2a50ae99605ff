//! The authority: the durable record of who is in a shard under which epoch (protocol.md, section 7). Built in is a
//! local file, for one coordinator.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use underpass_abi::wire::UP_EPOCH_MAX;
use underpass_protocol::control::Configuration;

/// What is on record about one shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The shard.
    pub shard: u32,
    /// The epoch taken last.
    pub epoch: u32,
    /// Whether the shard served in `epoch`: writes may have been ordered in it.
    pub served: bool,
    /// Replicas that hold the data of any epoch from here to `clean_epoch` hold the same; 0: none do.
    pub clean_from: u32,
    /// The latest epoch that ended with every write resolved, or began after such a one and never served; 0: none.
    pub clean_epoch: u32,
    /// Session generations of `epoch` with a counter below this may have been issued.
    pub generations: u32,
    /// The packets' time, in milliseconds since 1970, reached at the clean end: it never goes back.
    pub time_ms: u64,
    /// The configuration installed last, with the incarnations of its members.
    pub configuration: Option<Configuration>,
}

impl Record {
    /// Of a shard never served before.
    pub fn new(shard: u32) -> Self {
        Self {
            shard,
            epoch: 0,
            served: false,
            clean_from: 0,
            clean_epoch: 0,
            generations: 0,
            time_ms: 0,
            configuration: None,
        }
    }

    /// The record of the next epoch: its number, with nothing issued yet.
    ///
    /// # Errors
    /// Epochs are used up.
    pub fn next_epoch(&self) -> Result<Self> {
        let epoch = self.epoch + 1;
        ensure!(
            epoch < UP_EPOCH_MAX,
            "shard {}: all {UP_EPOCH_MAX} epochs are used up; move its data to a shard with a new id",
            self.shard
        );
        let mut next = Self { epoch, served: false, generations: 0, ..self.clone() };
        if !self.served && self.clean_epoch != 0 && self.clean_epoch + 1 == self.epoch {
            // Replicas that took part in an epoch that never served hold what the one before it left.
            next.clean_epoch = self.epoch;
        }
        Ok(next)
    }

    /// The record after this epoch ended with every write resolved.
    pub fn ended_clean(&self, time_ms: u64) -> Self {
        Self { clean_from: self.epoch, clean_epoch: self.epoch, time_ms, ..self.clone() }
    }

    /// The record of this same epoch under another agent, which takes over its tables: writes will be ordered in it again, so
    /// it is not clean even if it was recorded as that.
    pub fn taken_over(self) -> Self {
        if self.clean_epoch == self.epoch {
            return Self { clean_from: 0, clean_epoch: 0, ..self };
        }
        self
    }

    fn validate(&self) -> Result<()> {
        ensure!(self.epoch > 0 && self.epoch < UP_EPOCH_MAX, "shard {}: epoch {}", self.shard, self.epoch);
        ensure!(self.clean_epoch <= self.epoch, "shard {}: clean epoch above the epoch", self.shard);
        ensure!(self.clean_from <= self.clean_epoch, "shard {}: clean epochs end before they begin", self.shard);
        if let Some(configuration) = &self.configuration {
            configuration.validate().map_err(anyhow::Error::msg)?;
            ensure!(configuration.shard == self.shard, "shard {}: another shard's configuration", self.shard);
            ensure!(configuration.epoch <= self.epoch, "shard {}: a configuration above the epoch", self.shard);
        }
        Ok(())
    }
}

/// Keeps [`Record`]s. Whoever holds one is alone in changing the records.
pub trait Authority: Send {
    /// The record of a shard, if there is one.
    fn load(&self, shard: u32) -> Option<&Record>;

    /// Replaces a shard's record. Durable when it returns; on an error the old one or the new one is on record.
    fn store(&mut self, record: Record) -> Result<()>;
}

/// Records that last as long as the process: for tests and benchmarks.
#[derive(Debug, Default)]
pub struct MemoryAuthority(Vec<Record>);

impl Authority for MemoryAuthority {
    fn load(&self, shard: u32) -> Option<&Record> {
        self.0.iter().find(|record| record.shard == shard)
    }

    fn store(&mut self, record: Record) -> Result<()> {
        replace(&mut self.0, record);
        Ok(())
    }
}

fn replace(records: &mut Vec<Record>, record: Record) {
    records.retain(|other| other.shard != record.shard);
    records.push(record);
    records.sort_by_key(|record| record.shard);
}

/// The format that this build writes, and the newest that it reads.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    shards: Vec<Record>,
}

/// The version alone, of a document of any version.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// Records in a JSON file of a directory that one agent locks.
#[derive(Debug)]
pub struct FileAuthority {
    directory: PathBuf,
    records: Vec<Record>,
    _lock: Flock<File>,
}

impl FileAuthority {
    /// Locks the directory, made if missing, and reads its records.
    ///
    /// # Errors
    /// Another process holds the directory; it cannot be written; or the file is not one that this build wrote.
    pub fn open(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory).with_context(|| {
            format!("making {}: make it for this user, or name another directory (`state`)", directory.display())
        })?;
        let lock = Self::lock(directory)?;
        let path = directory.join("authority.json");
        let records = match fs::read(&path) {
            Ok(bytes) => Self::parse(&bytes).with_context(|| {
                format!(
                    "{} is damaged. Restore it from a copy. Without one: stop every replica (they start empty, their data \
                     is lost), remove the file, start again",
                    path.display()
                )
            })?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
        };
        Ok(Self { directory: directory.to_owned(), records, _lock: lock })
    }

    fn lock(directory: &Path) -> Result<Flock<File>> {
        let path = directory.join("lock");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .open(&path)
            .with_context(|| {
                format!("opening {}: run as its owner, or name another directory (`state`)", path.display())
            })?;
        let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((mut file, nix::errno::Errno::EWOULDBLOCK)) => {
                let mut pid = String::new();
                let _ = file.read_to_string(&mut pid);
                bail!(
                    "another coordinator (process {}) uses {}: stop it, or give this one a directory of its own (`state`)",
                    if pid.trim().is_empty() { "unknown" } else { pid.trim() },
                    directory.display()
                );
            }
            Err((_, e)) => return Err(e).with_context(|| format!("locking {}", path.display())),
        };
        lock.set_len(0)?;
        lock.write_all(std::process::id().to_string().as_bytes())?;
        Ok(lock)
    }

    fn parse(bytes: &[u8]) -> Result<Vec<Record>> {
        let Version { version } = serde_json::from_slice(bytes)?;
        ensure!(
            version <= VERSION,
            "it has format {version}, and this build knows formats up to {VERSION}: start the newer build that wrote it"
        );
        let document: Document = serde_json::from_slice(bytes)?;
        for (i, record) in document.shards.iter().enumerate() {
            record.validate()?;
            ensure!(
                document.shards[..i].iter().all(|other| other.shard != record.shard),
                "shard {} is in it twice",
                record.shard
            );
        }
        Ok(document.shards)
    }
}

impl Authority for FileAuthority {
    fn load(&self, shard: u32) -> Option<&Record> {
        self.records.iter().find(|record| record.shard == shard)
    }

    fn store(&mut self, record: Record) -> Result<()> {
        record.validate()?;
        let mut records = self.records.clone();
        replace(&mut records, record);
        let document = Document { version: VERSION, shards: records };
        let path = self.directory.join("authority.json");
        let write = || -> std::io::Result<()> {
            // A crash at any point leaves the old file or the new one under its name, whole.
            let temporary = self.directory.join("authority.json.new");
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&temporary)?;
            file.write_all(&serde_json::to_vec_pretty(&document)?)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(&self.directory)?.sync_all()
        };
        write().with_context(|| format!("writing {}", path.display()))?;
        self.records = document.shards;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use underpass_protocol::control::MemberInfo;

    use super::*;

    fn record(shard: u32, epoch: u32) -> Record {
        let member = MemberInfo { id: 0, incarnation: 7, addr: Ipv4Addr::new(10, 0, 0, 2), port: 5550, active: true };
        let configuration = Configuration {
            shard,
            epoch,
            coordinator_addr: Ipv4Addr::new(10, 0, 0, 1),
            coordinator_port: 5550,
            members: vec![member],
        };
        Record { epoch, configuration: Some(configuration), ..Record::new(shard) }
    }

    #[test]
    fn what_is_stored_is_read_back_by_the_next_agent() {
        let directory = tempfile::tempdir().unwrap();
        let mut authority = FileAuthority::open(directory.path()).unwrap();
        assert_eq!(authority.load(0), None);
        for epoch in 1..=3 {
            authority.store(record(0, epoch)).unwrap();
        }
        authority.store(record(5, 9)).unwrap();
        drop(authority);
        let authority = FileAuthority::open(directory.path()).unwrap();
        assert_eq!(authority.load(0), Some(&record(0, 3)));
        assert_eq!(authority.load(5), Some(&record(5, 9)));
        assert_eq!(authority.load(1), None);
    }

    #[test]
    fn a_torn_write_leaves_the_record_before() {
        let directory = tempfile::tempdir().unwrap();
        let mut authority = FileAuthority::open(directory.path()).unwrap();
        authority.store(record(0, 1)).unwrap();
        drop(authority);
        // A crash in the middle of writing the next record.
        let whole = fs::read(directory.path().join("authority.json")).unwrap();
        fs::write(directory.path().join("authority.json.new"), &whole[..whole.len() / 2]).unwrap();
        let mut authority = FileAuthority::open(directory.path()).unwrap();
        assert_eq!(authority.load(0), Some(&record(0, 1)));
        authority.store(record(0, 2)).unwrap();
        drop(authority);
        assert_eq!(FileAuthority::open(directory.path()).unwrap().load(0), Some(&record(0, 2)));
    }

    #[test]
    fn damaged_and_newer_files_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("authority.json");
        FileAuthority::open(directory.path()).unwrap().store(record(0, 1)).unwrap();
        let good = fs::read_to_string(&path).unwrap();
        for cut in 0..good.len() - 1 {
            fs::write(&path, &good[..cut]).unwrap();
            let error = format!("{:#}", FileAuthority::open(directory.path()).unwrap_err());
            assert!(error.contains("Restore it from a copy"), "{error}");
        }
        for (from, to, says) in [
            ("\"version\": 1", "\"version\": 2", "start the newer build"),
            ("\"epoch\": 1,", "\"epoch\": 0,", "epoch 0"),
            ("\"epoch\": 1,", "\"epoch\": 8388607,", "epoch 8388607"),
            ("\"clean_epoch\": 0", "\"clean_epoch\": 2", "clean epoch"),
            ("\"clean_from\": 0", "\"clean_from\": 1", "end before they begin"),
            ("\"time_ms\"", "\"time\"", "unknown field"),
        ] {
            assert!(good.contains(from), "{good}");
            fs::write(&path, good.replacen(from, to, 1)).unwrap();
            let error = format!("{:#}", FileAuthority::open(directory.path()).unwrap_err());
            assert!(error.contains(says), "{error}");
        }
        fs::write(&path, good).unwrap();
        FileAuthority::open(directory.path()).unwrap();
    }

    #[test]
    fn a_second_agent_is_told_who_the_first_is() {
        let directory = tempfile::tempdir().unwrap();
        let first = FileAuthority::open(directory.path()).unwrap();
        let error = FileAuthority::open(directory.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        drop(first);
        FileAuthority::open(directory.path()).unwrap();
    }

    #[test]
    fn epochs_only_go_up_and_end() {
        let first = Record::new(3).next_epoch().unwrap();
        assert_eq!((first.shard, first.epoch), (3, 1));
        let used = Record { generations: 99, ..first };
        let second = used.next_epoch().unwrap();
        assert_eq!((second.epoch, second.generations), (2, 0));
        let last = Record { epoch: UP_EPOCH_MAX - 1, ..second };
        assert!(last.next_epoch().is_err());
    }

    #[test]
    fn epochs_that_never_served_are_as_clean_as_the_one_before() {
        let served = |record: Record| Record { served: true, ..record };
        let clean = |record: &Record| (record.clean_from, record.clean_epoch);
        let first = served(Record::new(0).next_epoch().unwrap()).ended_clean(5);
        assert_eq!(clean(&first), (1, 1));
        let second = first.next_epoch().unwrap();
        assert_eq!(clean(&second), (1, 1), "it may serve");
        let third = second.next_epoch().unwrap();
        assert_eq!(clean(&third), (1, 2), "the second never did");
        let fourth = served(third).next_epoch().unwrap();
        assert_eq!(clean(&fourth), (1, 2), "the third served and did not end clean");
        let fifth = fourth.next_epoch().unwrap();
        assert_eq!(clean(&fifth), (1, 2), "what comes after does not heal it");
        assert_eq!(clean(&served(fifth).ended_clean(6)), (5, 5));
        let second = served(first.next_epoch().unwrap());
        assert_eq!(clean(&second.clone().taken_over()), (1, 1), "the epoch before it stays as it ended");
        assert_eq!(clean(&second.ended_clean(6).taken_over()), (0, 0), "it goes on");
        let never = Record::new(0).next_epoch().unwrap().next_epoch().unwrap();
        assert_eq!(clean(&never), (0, 0));
    }
}
