//! Records in a JSON file of a directory that one agent locks: one coordinator, which always has the role.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{Authority, LEAVE_TO_MAX, Notice, Record, Request, StoreOutcome, Trouble, mailbox::Mailbox, record};

/// The format that this build writes and reads.
const VERSION: u32 = 2;
/// Time between two tries to use a file that failed.
const RETRY: Duration = Duration::from_secs(1);
/// What is in trouble when the file is.
const PART: &str = "the authority's file";

/// The version alone, of a document of any version.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    /// The highest that was ever given to a record.
    revision: u64,
    shards: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    revision: u64,
    /// Read apart: a record of another version is refused by its own text.
    record: Box<RawValue>,
}

/// The number alone, of a record of any version.
#[derive(Deserialize)]
struct Number {
    shard: u32,
}

/// The content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Records {
    revision: u64,
    /// By ascending shard, each with its revision.
    pub(crate) shards: Vec<(u64, Record)>,
}

impl Records {
    /// Reads the file of a directory; none: there are no records.
    pub(crate) fn read(directory: &Path) -> Result<Self> {
        let path = path_of(directory);
        match fs::read(&path) {
            Ok(bytes) => Self::parse(&bytes).with_context(|| {
                format!(
                    "{} cannot be used. If it is damaged, restore it from a copy. Without one: stop every replica (they start \
                     empty, their data is lost), remove the file, and create the shards again",
                    path.display()
                )
            }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e).with_context(|| format!("reading {}: run as its owner", path.display())),
        }
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let Version { version } = serde_json::from_slice(bytes)?;
        ensure!(
            version <= VERSION,
            "it has format {version}, and this build knows format {VERSION}: start the newer build that wrote it"
        );
        ensure!(
            version == VERSION,
            "it has format {version}, of a build before shards could change their members. Data cannot be carried over: with \
             that build, copy out what you need, stop its coordinator and replicas; then move the file away and create the \
             shards again"
        );
        let document: Document = serde_json::from_slice(bytes)?;
        let mut shards: Vec<(u64, Record)> = Vec::new();
        for entry in document.shards {
            let Number { shard } = serde_json::from_str(entry.record.get())?;
            let record = record::parse(entry.record.get().as_bytes(), shard).map_err(anyhow::Error::msg)?;
            ensure!(
                entry.revision > 0 && entry.revision <= document.revision,
                "shard {shard}: its revision is impossible"
            );
            ensure!(shards.last().is_none_or(|(_, last)| last.shard < shard), "shard {shard} is not where it belongs");
            shards.push((entry.revision, record));
        }
        Ok(Self { revision: document.revision, shards })
    }

    fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let entry = |(revision, record): &(u64, Record)| {
            Ok(Entry { revision: *revision, record: serde_json::value::to_raw_value(record)? })
        };
        let shards = self.shards.iter().map(entry).collect::<io::Result<_>>()?;
        Ok(serde_json::to_vec_pretty(&Document { version: VERSION, revision: self.revision, shards })?)
    }

    /// A crash at any point leaves the old file or the new one under its name, whole. Durable when it returns; on an error
    /// either may be there.
    fn write(&self, directory: &Path) -> io::Result<()> {
        let temporary = directory.join("authority.json.new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&temporary)?;
        file.write_all(&self.to_bytes()?)?;
        file.sync_all()?;
        fs::rename(&temporary, path_of(directory))?;
        File::open(directory)?.sync_all()
    }

    /// The record of a shard and its revision.
    pub(crate) fn find(&self, shard: u32) -> Option<&(u64, Record)> {
        self.shards.iter().find(|(_, record)| record.shard == shard)
    }

    fn revision_of(&self, shard: u32) -> u64 {
        self.find(shard).map_or(0, |(revision, _)| *revision)
    }

    fn with(&self, record: Record) -> Self {
        let revision = self.revision + 1;
        let mut shards = self.shards.clone();
        shards.retain(|(_, other)| other.shard != record.shard);
        shards.push((revision, record));
        shards.sort_by_key(|(_, record)| record.shard);
        Self { revision, shards }
    }
}

fn path_of(directory: &Path) -> PathBuf {
    directory.join("authority.json")
}

/// A directory that is locked, and what is in it.
#[derive(Debug)]
pub(crate) struct Store {
    directory: PathBuf,
    pub(crate) records: Records,
    /// What is on disk may be another thing than `records`.
    unsure: bool,
    _lock: Flock<File>,
}

impl Store {
    /// Locks the directory, made if missing, and reads its records.
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory).with_context(|| {
            format!("making {}: make it for this user, or name another directory", directory.display())
        })?;
        let lock = lock(directory)?;
        Ok(Self { directory: directory.to_owned(), records: Records::read(directory)?, unsure: false, _lock: lock })
    }

    pub(crate) fn store(&mut self, expected: u64, record: Record) -> StoreOutcome {
        if let Err(why) = record.validate() {
            return StoreOutcome::Unknown(format!("not stored, it is not a valid record: {why}"));
        }
        if self.unsure {
            return StoreOutcome::Unknown(format!("not stored: {} could not be used before", self.directory.display()));
        }
        if self.records.revision_of(record.shard) != expected {
            return StoreOutcome::Conflict;
        }
        let next = self.records.with(record);
        match next.write(&self.directory) {
            Ok(()) => {
                self.records = next;
                StoreOutcome::Stored(self.records.revision)
            }
            Err(e) => {
                self.unsure = true;
                StoreOutcome::Unknown(self.explain(&e))
            }
        }
    }

    fn explain(&self, error: &io::Error) -> String {
        format!(
            "writing {}: {error}: make room on that disk, mount it writable or mend it; nothing changes until then",
            path_of(&self.directory).display()
        )
    }

    /// Finds out what is on disk after a failed write, and makes it durable.
    fn recover(&mut self) -> Result<()> {
        self.records = Records::read(&self.directory)?;
        self.records.write(&self.directory).map_err(|e| anyhow::Error::msg(self.explain(&e)))?;
        self.unsure = false;
        Ok(())
    }
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
        .with_context(|| format!("opening {}: run as its owner, or name another directory", path.display()))?;
    let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => lock,
        Err((mut file, nix::errno::Errno::EWOULDBLOCK)) => {
            let mut pid = String::new();
            let _ = file.read_to_string(&mut pid);
            bail!(
                "another coordinator (process {}) uses {}: stop it, or give this one a directory of its own. For several \
                 coordinators of one shard use etcd",
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

/// The authority of one coordinator: a directory.
#[derive(Debug)]
pub struct FileAuthority {
    directory: PathBuf,
    mailbox: Mailbox,
    /// `None` while it is dropped.
    requests: Option<mpsc::Sender<Request>>,
    thread: Option<JoinHandle<()>>,
}

impl FileAuthority {
    /// Locks the directory, made if missing, and reads its records.
    ///
    /// # Errors
    /// Another process holds the directory; it cannot be written; or the file is not one that this build can read.
    pub fn open(directory: &Path) -> Result<Self> {
        let store = Store::open(directory)?;
        let mailbox = Mailbox::new()?;
        let (requests, inbox) = mpsc::channel();
        let worker =
            Worker { store, mailbox: mailbox.clone(), asked: BTreeSet::new(), held: BTreeSet::new(), back: Vec::new() };
        let thread = thread::Builder::new()
            .name("authority".into())
            .spawn(move || worker.run(&inbox))
            .context("starting the authority's thread")?;
        Ok(Self { directory: directory.to_owned(), mailbox, requests: Some(requests), thread: Some(thread) })
    }
}

impl Authority for FileAuthority {
    fn request(&self, request: Request) {
        if self.requests.as_ref().is_none_or(|requests| requests.send(request).is_err()) {
            self.mailbox.trouble(PART, "the authority's thread has ended: restart this process, and report it".into());
        }
    }

    fn try_next(&mut self) -> Option<Notice> {
        self.mailbox.pop()
    }

    fn name(&self) -> String {
        format!("file {}", path_of(&self.directory).display())
    }

    fn troubles(&self) -> Vec<Trouble> {
        self.mailbox.troubles()
    }
}

impl AsFd for FileAuthority {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mailbox.as_fd()
    }
}

impl Drop for FileAuthority {
    /// Waits for what was asked for, so that the directory is free afterwards.
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Beside the agent's thread, which must not wait for a disk.
struct Worker {
    store: Store,
    mailbox: Mailbox,
    /// Shards whose record is to be told when the disk works again.
    asked: BTreeSet<u32>,
    held: BTreeSet<u32>,
    /// Roles that were resigned, and when they are taken again.
    back: Vec<(Instant, u32)>,
}

impl Worker {
    fn run(mut self, inbox: &mpsc::Receiver<Request>) {
        let mut retry = None;
        loop {
            if self.store.unsure && retry.is_none() {
                retry = Some(Instant::now() + RETRY);
            }
            let next = self.back.iter().map(|(at, _)| *at).chain(retry).min();
            let request = match next {
                Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match request {
                Ok(request) => self.handle(request),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let now = Instant::now();
            if retry.is_some_and(|at| at <= now) {
                retry = None;
                self.recover();
            }
            for (_, shard) in self.back.extract_if(.., |(at, _)| *at <= now).collect::<Vec<_>>() {
                self.hold(shard);
            }
        }
    }

    fn handle(&mut self, request: Request) {
        match request {
            Request::Store { shard, id, expected, record } => {
                let sure = !self.store.unsure;
                let outcome = if record.shard == shard {
                    self.store.store(expected, record)
                } else {
                    StoreOutcome::Unknown(format!("not stored: it is the record of shard {}", record.shard))
                };
                if let (true, true, StoreOutcome::Unknown(why)) = (sure, self.store.unsure, &outcome) {
                    self.mailbox.trouble(PART, why.clone());
                }
                let stored = matches!(outcome, StoreOutcome::Stored(_));
                self.mailbox.push(Notice::Stored { shard, id, outcome });
                if !stored {
                    self.tell(shard);
                }
            }
            Request::Load { shard } => self.tell(shard),
            Request::Campaign { shard } => {
                // A resigned role is taken again in its time.
                if !self.back.iter().any(|(_, of)| *of == shard) {
                    self.hold(shard);
                }
            }
            Request::Resign { shard, leave_to } => {
                if self.held.remove(&shard) {
                    self.mailbox.push(Notice::Role { shard, held: false });
                }
                self.back.retain(|(_, of)| *of != shard);
                self.back.push((Instant::now() + leave_to.min(LEAVE_TO_MAX), shard));
            }
        }
    }

    fn hold(&mut self, shard: u32) {
        if self.held.insert(shard) {
            self.mailbox.push(Notice::Role { shard, held: true });
        }
    }

    fn tell(&mut self, shard: u32) {
        if self.store.unsure {
            self.asked.insert(shard);
            return;
        }
        let (revision, record) =
            self.store.records.find(shard).cloned().map_or((0, None), |(n, record)| (n, Some(record)));
        self.mailbox.push(Notice::Record { shard, revision, record });
    }

    fn recover(&mut self) {
        match self.store.recover() {
            Ok(()) => {
                self.mailbox.recovered(PART);
                for shard in std::mem::take(&mut self.asked) {
                    self.tell(shard);
                }
            }
            Err(e) => self.mailbox.trouble(PART, format!("{e:#}")),
        }
    }
}

#[cfg(test)]
mod tests;
