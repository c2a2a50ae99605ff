//! The record of one shard: stored, read and watched.

use std::{rc::Rc, time::Duration};

use etcd_client::{Compare, CompareOp, EventType, Txn, TxnOp, WatchOptions, WatchResponse, WatchStream};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

use super::{Link, Named, PROBE, RETRY, Settings};
use crate::{Notice, Record, StoreOutcome, mailbox::Mailbox, record};

/// What the agent wants of it.
pub(super) enum Command {
    Store { id: u64, expected: u64, record: Record },
    Load,
}

pub(super) struct Records {
    shard: u32,
    key: String,
    link: Link<Rc<Settings>>,
    mailbox: Mailbox,
    named: watch::Sender<Named>,
    /// etcd's revision up to which all changes are known.
    as_of: i64,
    /// Revision of the record that the agent knows.
    known: Option<u64>,
    /// The agent waits for the record.
    owed: bool,
    /// The revision that a store of unknown outcome would replace.
    unsettled: Option<u64>,
    watch: Option<WatchStream>,
}

impl Records {
    pub(super) fn new(shard: u32, settings: &Rc<Settings>, mailbox: Mailbox, named: watch::Sender<Named>) -> Self {
        Self {
            shard,
            key: settings.record_key(shard),
            link: Link::new(settings.clone()),
            mailbox,
            named,
            as_of: 0,
            known: None,
            owed: false,
            unsettled: None,
            watch: None,
        }
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Command>) {
        let mut look_at = Instant::now();
        loop {
            tokio::select! {
                command = inbox.recv() => {
                    match command {
                        None => return,
                        Some(Command::Load) => self.owed = true,
                        Some(Command::Store { id, expected, record }) => self.store(id, expected, record).await,
                    }
                    if self.owed {
                        look_at = Instant::now();
                    }
                }
                change = next(&mut self.watch) => {
                    if !change.is_some_and(|change| self.changed(&change)) {
                        // Cut, compacted or refused: reading again tells.
                        self.watch = None;
                        look_at = look_at.min(Instant::now() + Duration::from_millis(10));
                    }
                }
                () = sleep_until(look_at) => {
                    let part = format!("the record of shard {} in etcd", self.shard);
                    match self.look().await {
                        Ok(()) => {
                            self.mailbox.recovered(&part);
                            look_at = Instant::now() + PROBE;
                        }
                        Err(why) => {
                            self.watch = None;
                            self.mailbox.trouble(&part, format!("shard {}: {why}; it goes on, changes wait", self.shard));
                            look_at = Instant::now() + RETRY;
                        }
                    }
                }
            }
        }
    }

    async fn store(&mut self, id: u64, expected: u64, record: Record) {
        let outcome = self.try_store(expected, &record).await;
        match outcome {
            StoreOutcome::Stored(revision) => {
                self.known = Some(revision);
                self.named.send_replace(Named::Read(record.coordinator()));
            }
            _ => self.owed = true,
        }
        self.mailbox.push(Notice::Stored { shard: self.shard, id, outcome });
    }

    async fn try_store(&mut self, expected: u64, record: &Record) -> StoreOutcome {
        if let Err(why) = record.validate() {
            return StoreOutcome::Unknown(format!("not stored, it is not a valid record: {why}"));
        }
        if record.shard != self.shard {
            return StoreOutcome::Unknown(format!("not stored: it is the record of shard {}", record.shard));
        }
        let outcome = compare_and_swap(&mut self.link, &self.key, expected, record::to_bytes(record)).await;
        match outcome {
            StoreOutcome::Stored(revision) => self.as_of = self.as_of.max(revision as i64),
            StoreOutcome::Conflict => {}
            StoreOutcome::Unknown(_) => self.unsettled = Some(expected),
        }
        outcome
    }

    /// Reads the record, and watches it from there on.
    async fn look(&mut self) -> Result<(), String> {
        let mut found = self.read().await?;
        while let Some((revision, value)) = &found
            && self.unsettled == Some(*revision)
        {
            // A store that was not answered may yet arrive. The same record under a new revision keeps it from being done. (Where
            // there is no record there is nothing to put: a late creation stays possible.)
            match compare_and_swap(&mut self.link, &self.key, *revision, value.clone()).await {
                StoreOutcome::Stored(next) => {
                    self.as_of = self.as_of.max(next as i64);
                    found = Some((next, value.clone()));
                }
                // It has just arrived, or somebody else was quicker.
                StoreOutcome::Conflict => found = self.read().await?,
                StoreOutcome::Unknown(why) => return Err(why),
            }
        }
        if found.is_some() {
            self.unsettled = None;
        }
        let (revision, value) = found.map_or((0, None), |(revision, value)| (revision, Some(value)));
        self.tell(revision, value.as_deref());
        if self.watch.is_none() {
            let (key, from) = (self.key.clone(), WatchOptions::new().with_start_revision(self.as_of + 1));
            self.watch = Some(self.link.call(None, async |client| client.watch(key, Some(from)).await).await?);
        }
        Ok(())
    }

    /// The key's revision and value.
    async fn read(&mut self) -> Result<Option<(u64, Vec<u8>)>, String> {
        let answer = self.link.get(&self.key, None).await?;
        let as_of = answer.header().map_or(0, |header| header.revision());
        if as_of < self.as_of {
            return Err(format!(
                "etcd has forgotten changes: it is at revision {as_of} and was at {}. It was restored from an old copy: stop every \
                 coordinator and replica, whose epochs it no longer knows, and start them again",
                self.as_of
            ));
        }
        self.as_of = as_of;
        Ok(answer.kvs().first().map(|kv| (kv.mod_revision() as u64, kv.value().to_vec())))
    }

    /// Takes what a watch tells; whether it goes on.
    fn changed(&mut self, change: &WatchResponse) -> bool {
        for event in change.events() {
            let Some(kv) = event.kv() else { continue };
            if kv.mod_revision() <= self.as_of {
                continue;
            }
            self.as_of = kv.mod_revision();
            match event.event_type() {
                EventType::Put => self.tell(kv.mod_revision() as u64, Some(kv.value())),
                EventType::Delete => self.tell(0, None),
            }
        }
        !change.canceled()
    }

    fn tell(&mut self, revision: u64, value: Option<&[u8]>) {
        if self.known == Some(revision) && !self.owed {
            return;
        }
        let part = format!("the record of shard {}", self.shard);
        let record = match value.map(|value| record::parse(value, self.shard)).transpose() {
            Ok(record) => record,
            Err(why) => {
                self.known = None;
                let key = &self.key;
                let what = format!(
                    "shard {}: the record in etcd under {key} cannot be used: {why}. It is left as it is. If another program wrote \
                     it, choose another `prefix`; if it is damaged, put back what it was (etcdctl put {key})",
                    self.shard
                );
                return self.mailbox.trouble(&part, what);
            }
        };
        self.mailbox.recovered(&part);
        self.named.send_replace(Named::Read(record.as_ref().and_then(Record::coordinator)));
        self.known = Some(revision);
        self.owed = false;
        self.mailbox.push(Notice::Record { shard: self.shard, revision, record });
    }
}

/// The next change; `None`: the watch is over.
pub(super) async fn next(watch: &mut Option<WatchStream>) -> Option<WatchResponse> {
    match watch {
        Some(watch) => watch.message().await.ok().flatten(),
        None => std::future::pending().await,
    }
}

/// Replaces the record of a key if its revision is still `expected`; 0: there must be none.
pub(crate) async fn compare_and_swap<S: AsRef<Settings>>(
    link: &mut Link<S>,
    key: &str,
    expected: u64,
    value: Vec<u8>,
) -> StoreOutcome {
    let put = TxnOp::put(key, value, None);
    let txn = Txn::new().when([Compare::mod_revision(key, CompareOp::Equal, expected as i64)]).and_then([put]);
    match link.call(None, async |client| client.txn(txn).await).await {
        Ok(answer) if !answer.succeeded() => StoreOutcome::Conflict,
        Ok(answer) => match answer.header() {
            Some(header) => StoreOutcome::Stored(header.revision() as u64),
            None => StoreOutcome::Unknown("etcd answered without a revision".into()),
        },
        Err(why) => StoreOutcome::Unknown(why),
    }
}
