//! Records and roles in etcd, on a thread of its own.
//!
//! `PREFIX/shards/ID` is the record of a shard as JSON, replaced by a transaction on its `mod_revision`, which is the record's
//! revision. `PREFIX/coordinators/ID` is the role: who holds it, under an etcd lease that ends with the holder.

mod link;
mod records;
mod role;

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd},
    rc::Rc,
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result};
use tokio::{
    sync::{mpsc, watch},
    task::{JoinSet, LocalSet},
};
use underpass_protocol::wire::Endpoint;

pub(crate) use self::{
    link::{Link, Settings},
    records::compare_and_swap,
};
use crate::{Authority, EtcdConfig, Notice, Request, Trouble, mailbox::Mailbox};

/// Time between two looks at a key that is watched: it shows in time that a connection is dead, or a member cut off.
const PROBE: Duration = Duration::from_secs(1);
/// Time between two tries to reach etcd.
const RETRY: Duration = Duration::from_millis(200);

/// Whom a record names as coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    /// The record has not been read yet.
    Unread,
    /// This one, if any.
    Read(Option<Endpoint>),
}

/// One agent's connection to etcd.
#[derive(Debug)]
pub struct EtcdAuthority {
    name: String,
    mailbox: Mailbox,
    /// `None` while it is dropped.
    requests: Option<mpsc::UnboundedSender<Request>>,
    thread: Option<JoinHandle<()>>,
}

impl EtcdAuthority {
    /// For the agent known by the address `me`. etcd need not be reachable yet.
    ///
    /// # Errors
    /// The configuration contradicts itself, or a file that it names cannot be read.
    pub fn open(config: &EtcdConfig, me: Endpoint) -> Result<Self> {
        let settings = Settings::new(config)?;
        let name = settings.name();
        let ttl = Duration::from_millis(config.ttl_ms);
        let mut instance = [0; 8];
        getrandom::fill(&mut instance).map_err(|e| anyhow::anyhow!("drawing a random number: {e}"))?;
        let identity =
            role::Identity { address: me.to_string(), instance: format!("{:016x}", u64::from_ne_bytes(instance)) };
        let mailbox = Mailbox::new()?;
        let (requests, inbox) = mpsc::unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("starting the authority's thread: raise the limit of open files")?;
        let outbox = mailbox.clone();
        let thread = thread::Builder::new()
            .name("authority".into())
            .spawn(move || {
                let driver = Driver { settings: Rc::new(settings), identity: Rc::new(identity), ttl, mailbox: outbox };
                LocalSet::new().block_on(&runtime, driver.run(inbox));
                // Waits for no name that is being looked up.
                runtime.shutdown_background();
            })
            .context("starting the authority's thread")?;
        Ok(Self { name, mailbox, requests: Some(requests), thread: Some(thread) })
    }
}

impl Authority for EtcdAuthority {
    fn request(&self, request: Request) {
        if self.requests.as_ref().is_none_or(|requests| requests.send(request).is_err()) {
            ended(&self.mailbox);
        }
    }

    fn try_next(&mut self) -> Option<Notice> {
        self.mailbox.pop()
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn troubles(&self) -> Vec<Trouble> {
        self.mailbox.troubles()
    }
}

impl AsFd for EtcdAuthority {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mailbox.as_fd()
    }
}

impl Drop for EtcdAuthority {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn ended(mailbox: &Mailbox) {
    let what = "the authority's thread has ended: restart this process, and report it";
    mailbox.trouble("the authority's thread", what.into());
}

struct Driver {
    settings: Rc<Settings>,
    identity: Rc<role::Identity>,
    ttl: Duration,
    mailbox: Mailbox,
}

/// Where to send what concerns one shard.
struct Shard {
    records: mpsc::UnboundedSender<records::Command>,
    role: mpsc::UnboundedSender<role::Command>,
}

impl Driver {
    /// Returns when the agent has dropped its handle; that ends the tasks.
    async fn run(self, mut inbox: mpsc::UnboundedReceiver<Request>) {
        let mut tasks = JoinSet::new();
        let mut shards = BTreeMap::new();
        loop {
            let request = tokio::select! {
                request = inbox.recv() => request,
                // A task ends only by a panic.
                Some(_) = tasks.join_next() => {
                    ended(&self.mailbox);
                    continue;
                }
            };
            let Some(request) = request else { return };
            let shard = shards.entry(request.shard()).or_insert_with_key(|&shard| self.start(&mut tasks, shard));
            let sent = match request {
                Request::Store { id, expected, record, .. } => {
                    shard.records.send(records::Command::Store { id, expected, record }).is_ok()
                }
                Request::Load { .. } => shard.records.send(records::Command::Load).is_ok(),
                Request::Campaign { .. } => shard.role.send(role::Command::Campaign).is_ok(),
                Request::Resign { leave_to, .. } => shard.role.send(role::Command::Resign { leave_to }).is_ok(),
            };
            if !sent {
                ended(&self.mailbox);
            }
        }
    }

    /// Records and role of a shard are two tasks with a connection each, so that neither waits for the other.
    fn start(&self, tasks: &mut JoinSet<()>, shard: u32) -> Shard {
        let (named, names) = watch::channel(Named::Unread);
        let (to_records, inbox) = mpsc::unbounded_channel();
        tasks.spawn_local(records::Records::new(shard, &self.settings, self.mailbox.clone(), named).run(inbox));
        let (to_role, inbox) = mpsc::unbounded_channel();
        let role = role::Role::new(shard, &self.settings, self.mailbox.clone(), self.identity.clone(), self.ttl, names);
        tasks.spawn_local(role.run(inbox));
        Shard { records: to_records, role: to_role }
    }
}
