//! The role of one shard's coordinator: a key under a lease that its holder keeps alive.

use std::{rc::Rc, time::Duration};

use etcd_client::{Compare, CompareOp, Error, KeyValue, PutOptions, Txn, TxnOp, WatchOptions, WatchStream};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

use super::{Link, Named, PROBE, RETRY, Settings, records::next};
use crate::{LEAVE_TO_MAX, Notice, mailbox::Mailbox};

/// How long a free role is left to whom the record names.
const GRACE: Duration = Duration::from_millis(100);
/// etcd looks for leases that are over twice a second; beyond this a key that is still there is kept alive.
const EXPIRY: Duration = Duration::from_millis(1500);

/// Who holds a role: the value of its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    /// By which the agent is known.
    pub(super) address: String,
    /// Tells two processes with one address apart.
    pub(super) instance: String,
}

/// What the agent wants of it.
pub(super) enum Command {
    Campaign,
    Resign { leave_to: Duration },
}

/// An etcd lease of ours.
struct Lease {
    id: i64,
    /// When it was kept alive last: before that was asked for.
    renewed: Instant,
}

pub(super) struct Role {
    shard: u32,
    key: String,
    link: Link<Rc<Settings>>,
    mailbox: Mailbox,
    identity: Rc<Identity>,
    ttl: Duration,
    named: watch::Receiver<Named>,
    /// From when on the role is wanted; `None`: it is not.
    wanted_from: Option<Instant>,
    held: bool,
    lease: Option<Lease>,
    watch: Option<WatchStream>,
    /// Since when the key is known to be absent.
    free_since: Option<Instant>,
    /// Another process with our address that holds the role, and since when we see it.
    twin: Option<(String, Instant)>,
}

impl Role {
    pub(super) fn new(
        shard: u32,
        settings: &Rc<Settings>,
        mailbox: Mailbox,
        identity: Rc<Identity>,
        ttl: Duration,
        named: watch::Receiver<Named>,
    ) -> Self {
        Self {
            shard,
            key: settings.role_key(shard),
            link: Link::new(settings.clone()),
            mailbox,
            identity,
            ttl,
            named,
            wanted_from: None,
            held: false,
            lease: None,
            watch: None,
            free_since: None,
            twin: None,
        }
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Command>) {
        let mut step_at = Instant::now();
        loop {
            let wake = match &self.lease {
                Some(lease) if self.held => step_at.min(lease.renewed + self.ttl),
                _ => step_at,
            };
            tokio::select! {
                command = inbox.recv() => match command {
                    None => return,
                    Some(Command::Campaign) => {
                        if self.wanted_from.is_none() {
                            self.wanted_from = Some(Instant::now());
                        }
                        step_at = Instant::now();
                    }
                    Some(Command::Resign { leave_to }) => {
                        self.resign(leave_to).await;
                        step_at = Instant::now();
                    }
                },
                // Whoever named us wants us to be quick. (The sender lives as long as this.)
                Ok(()) = self.named.changed() => {
                    if !self.held && self.free_since.is_some() {
                        step_at = Instant::now();
                    }
                }
                change = next(&mut self.watch) => match change {
                    Some(change) if !change.canceled() => {
                        if !change.events().is_empty() {
                            step_at = Instant::now();
                        }
                    }
                    _ => {
                        self.watch = None;
                        step_at = step_at.min(Instant::now() + Duration::from_millis(10));
                    }
                },
                () = sleep_until(wake), if self.wanted_from.is_some() => {
                    self.check_lease();
                    if step_at <= Instant::now() {
                        step_at = self.step_and_report().await;
                    }
                }
            }
        }
    }

    fn part(&self) -> String {
        format!("the role of shard {} in etcd", self.shard)
    }

    async fn step_and_report(&mut self) -> Instant {
        match self.step().await {
            Ok(at) => {
                self.mailbox.recovered(&self.part());
                at
            }
            Err(why) => {
                self.watch = None;
                self.mailbox.trouble(&self.part(), format!("the role of shard {}: {why}", self.shard));
                self.check_lease();
                Instant::now() + RETRY
            }
        }
    }

    fn hold(&mut self, held: bool) {
        if self.held != held {
            self.held = held;
            self.mailbox.push(Notice::Role { shard: self.shard, held });
        }
    }

    /// By our own clock, counted from before the last renewal was asked for, etcd may have ended the lease.
    fn check_lease(&mut self) {
        if self.lease.as_ref().is_none_or(|lease| lease.renewed.elapsed() >= self.ttl) {
            self.hold(false);
        }
    }

    async fn resign(&mut self, leave_to: Duration) {
        self.wanted_from = self.wanted_from.map(|_| Instant::now() + leave_to.min(LEAVE_TO_MAX));
        if let Some(lease) = self.lease.take() {
            // Unanswered: it ends by itself.
            let _ = self.link.call(None, async |client| client.lease_revoke(lease.id).await).await;
        }
        self.hold(false);
    }

    /// Renews, looks who has the role, and tries to get it if that is nobody. Returns when to do so again.
    async fn step(&mut self) -> Result<Instant, String> {
        self.renew().await?;
        let answer = self.link.get(&self.key, None).await?;
        if self.watch.is_none() {
            let from = answer.header().map_or(0, |header| header.revision()) + 1;
            let (key, options) = (self.key.clone(), WatchOptions::new().with_start_revision(from));
            self.watch = Some(self.link.call(None, async |client| client.watch(key, Some(options)).await).await?);
        }
        let now = Instant::now();
        let Some(kv) = answer.kvs().first() else {
            self.hold(false);
            self.see_other(None)?;
            return self.try_to_get(now).await;
        };
        self.free_since = None;
        if self.lease.as_ref().is_some_and(|lease| lease.id == kv.lease()) {
            self.see_other(None)?;
            self.hold(true);
            self.check_lease();
            return Ok(now + self.ttl / 3);
        }
        self.hold(false);
        self.see_other(Some(kv))?;
        Ok(now + PROBE)
    }

    async fn renew(&mut self) -> Result<(), String> {
        let Some(Lease { id, renewed }) = self.lease else { return Ok(()) };
        if renewed.elapsed() < self.ttl / 4 {
            return Ok(());
        }
        let asked = Instant::now();
        // In time for another member to be asked, if this one does not answer.
        let alive = self
            .link
            .call(Some(self.ttl / 3), async |client| match client.lease_keep_alive(id).await {
                Ok(_) => Ok(true),
                Err(Error::LeaseKeepAliveError(_)) => Ok(false),
                Err(error) => Err(error),
            })
            .await?;
        self.lease = alive.then_some(Lease { id, renewed: asked });
        self.check_lease();
        Ok(())
    }

    /// The role is free: takes it, if it is our turn.
    async fn try_to_get(&mut self, now: Instant) -> Result<Instant, String> {
        let free_since = *self.free_since.get_or_insert(now);
        let from = match *self.named.borrow_and_update() {
            // Reading it wakes this task.
            Named::Unread => return Ok(now + PROBE),
            Named::Read(Some(other)) if other.to_string() != self.identity.address => free_since + GRACE,
            Named::Read(_) => now,
        };
        let from = from.max(self.wanted_from.unwrap_or(now + PROBE));
        if from > now {
            return Ok(from.min(now + PROBE));
        }
        let lease = match &self.lease {
            Some(lease) => lease.id,
            None => {
                let (renewed, seconds) = (Instant::now(), self.ttl.as_secs() as i64);
                let id = self.link.call(None, async |client| client.lease_grant(seconds, None).await).await?.id();
                self.lease = Some(Lease { id, renewed });
                id
            }
        };
        let value = serde_json::to_vec(&*self.identity).expect("two strings");
        let txn = Txn::new()
            .when([Compare::create_revision(self.key.as_str(), CompareOp::Equal, 0)])
            .and_then([TxnOp::put(self.key.as_str(), value, Some(PutOptions::new().with_lease(lease)))]);
        self.link.call(None, async |client| client.txn(txn).await).await?;
        // Reading the key tells who got it.
        Ok(Instant::now())
    }

    /// Somebody else holds the role, or nobody does.
    fn see_other(&mut self, kv: Option<&KeyValue>) -> Result<(), String> {
        let part = format!("the other holder of the role of shard {}", self.shard);
        let Some(kv) = kv else {
            self.twin = None;
            self.mailbox.recovered(&part);
            return Ok(());
        };
        let key = &self.key;
        let other: Identity = serde_json::from_slice(kv.value()).map_err(|e| {
            format!(
                "the key {key} in etcd holds something else: {e}. It is left as it is: choose another `prefix` if another program \
                 uses this one, or remove it (etcdctl del {key})"
            )
        })?;
        if other.address != self.identity.address || other.instance == self.identity.instance {
            self.twin = None;
            self.mailbox.recovered(&part);
            return Ok(());
        }
        // It may be what this agent was before it crashed: then it is not kept alive.
        match &self.twin {
            Some((instance, since)) if *instance == other.instance => {
                if since.elapsed() > self.ttl + EXPIRY {
                    let what = format!(
                        "another agent with this address ({}) holds the role of shard {} (instance {}): stop one of the two, or give \
                         it an address of its own",
                        other.address, self.shard, other.instance
                    );
                    self.mailbox.trouble(&part, what);
                }
            }
            _ => self.twin = Some((other.instance, Instant::now())),
        }
        Ok(())
    }
}
