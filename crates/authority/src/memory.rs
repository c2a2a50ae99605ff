//! Records that last as long as the process: for tests and benchmarks, with an authority that misbehaves on demand.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use underpass_protocol::wire::Endpoint;

use crate::{Authority, LEAVE_TO_MAX, Notice, Record, Request, StoreOutcome, Trouble, mailbox::Mailbox};

const PART: &str = "the authority in memory";

/// What is lost of a request to an authority that cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The request: nothing is stored.
    Request,
    /// The answer: it is stored.
    Answer,
}

/// What several agents share.
#[derive(Clone, Debug, Default)]
pub struct Memory(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    revision: u64,
    records: BTreeMap<u32, (u64, Record)>,
    agents: BTreeMap<u64, Agent>,
    agents_ever: u64,
    /// Shard to who has the role.
    roles: BTreeMap<u32, u64>,
    delay: Duration,
}

#[derive(Debug)]
struct Agent {
    address: Endpoint,
    mailbox: Mailbox,
    lost: Option<Lost>,
    follows: BTreeSet<u32>,
    /// Shards that it wants the role of, each from then on.
    campaigns: BTreeMap<u32, Instant>,
    /// Records to be told when it is reached again.
    asked: BTreeSet<u32>,
}

impl Memory {
    /// With no record.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A handle for the agent known by this address.
    pub fn authority(&self, me: Endpoint) -> MemoryAuthority {
        let mailbox = Mailbox::new().expect("an eventfd for a test");
        let mut state = self.state();
        state.agents_ever += 1;
        let id = state.agents_ever;
        let agent = Agent {
            address: me,
            mailbox: mailbox.clone(),
            lost: None,
            follows: BTreeSet::new(),
            campaigns: BTreeMap::new(),
            asked: BTreeSet::new(),
        };
        state.agents.insert(id, agent);
        MemoryAuthority { memory: self.clone(), id, mailbox }
    }

    /// What is on record, and its revision.
    pub fn record(&self, shard: u32) -> Option<(u64, Record)> {
        self.state().records.get(&shard).cloned()
    }

    /// Replaces a record if its revision is still `expected`; 0: there must be none. As somebody who is no agent.
    pub fn store(&self, expected: u64, record: Record) -> StoreOutcome {
        self.state().store(None, expected, record)
    }

    /// Takes every request this much later, from now on.
    pub fn slow(&self, delay: Duration) {
        self.state().delay = delay;
    }

    /// Cuts an agent off: it has no role any more, and does not know what becomes of what it stores.
    pub fn disconnect(&self, address: Endpoint, lost: Lost) {
        let mut state = self.state();
        for agent in state.at(address) {
            agent.lost = Some(lost);
            agent.mailbox.trouble(PART, "unreachable, as the test wants it".into());
        }
        state.elect();
    }

    /// Ends [`Memory::disconnect`].
    pub fn connect(&self, address: Endpoint) {
        let mut state = self.state();
        let mut owed = Vec::new();
        for agent in state.at(address) {
            agent.lost = None;
            agent.mailbox.recovered(PART);
            owed.push((agent.mailbox.clone(), std::mem::take(&mut agent.asked)));
        }
        for (mailbox, shards) in owed {
            shards.iter().for_each(|&shard| mailbox.push(state.notice(shard)));
        }
        state.elect();
    }

    /// Tells an agent something that need not be true.
    pub fn lie(&self, address: Endpoint, notice: &Notice) {
        self.state().at(address).for_each(|agent| agent.mailbox.push(notice.clone()));
    }

    /// Runs a step later, on a thread of its own.
    fn later(&self, delay: Duration, step: impl FnOnce(&mut State) + Send + 'static) {
        let shared = Arc::downgrade(&self.0);
        thread::spawn(move || {
            thread::sleep(delay);
            if let Some(shared) = shared.upgrade() {
                step(&mut shared.lock().unwrap_or_else(PoisonError::into_inner));
            }
        });
    }
}

impl State {
    fn at(&mut self, address: Endpoint) -> impl Iterator<Item = &mut Agent> {
        self.agents.values_mut().filter(move |agent| agent.address == address)
    }

    fn notice(&self, shard: u32) -> Notice {
        let (revision, record) = self.records.get(&shard).cloned().map_or((0, None), |(n, record)| (n, Some(record)));
        Notice::Record { shard, revision, record }
    }

    /// Tells the record now, or when the agent is reached again.
    fn tell(&mut self, id: u64, shard: u32) {
        let notice = self.notice(shard);
        let Some(agent) = self.agents.get_mut(&id) else { return };
        if agent.lost.is_some() {
            agent.asked.insert(shard);
        } else {
            agent.mailbox.push(notice);
        }
    }

    fn store(&mut self, by: Option<u64>, expected: u64, record: Record) -> StoreOutcome {
        let shard = record.shard;
        if let Err(why) = record.validate() {
            return StoreOutcome::Unknown(format!("not stored, it is not a valid record: {why}"));
        }
        if self.records.get(&shard).map_or(0, |(revision, _)| *revision) != expected {
            return StoreOutcome::Conflict;
        }
        self.revision += 1;
        let revision = self.revision;
        self.records.insert(shard, (revision, record));
        let others = self.agents.iter().filter(|(id, agent)| Some(**id) != by && agent.follows.contains(&shard));
        for id in others.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.tell(id, shard);
        }
        StoreOutcome::Stored(revision)
    }

    fn handle(&mut self, id: u64, request: Request) -> Option<Duration> {
        let shard = request.shard();
        let agent = self.agents.get_mut(&id)?;
        agent.follows.insert(shard);
        match request {
            Request::Store { shard, id: number, expected, record } => {
                let (lost, mailbox) = (agent.lost, agent.mailbox.clone());
                let unknown = |_| StoreOutcome::Unknown("unreachable, as the test wants it".into());
                let outcome = match lost {
                    None => self.store(Some(id), expected, record),
                    Some(Lost::Request) => unknown(StoreOutcome::Conflict),
                    Some(Lost::Answer) => unknown(self.store(Some(id), expected, record)),
                };
                let stored = matches!(outcome, StoreOutcome::Stored(_));
                mailbox.push(Notice::Stored { shard, id: number, outcome });
                if !stored {
                    self.tell(id, shard);
                }
            }
            Request::Load { shard } => self.tell(id, shard),
            Request::Campaign { shard } => {
                agent.campaigns.entry(shard).or_insert_with(Instant::now);
                self.elect();
            }
            Request::Resign { shard, leave_to } => {
                let leave_to = leave_to.min(LEAVE_TO_MAX);
                if let Some(from) = agent.campaigns.get_mut(&shard) {
                    *from = Instant::now() + leave_to;
                }
                self.elect();
                return Some(leave_to);
            }
        }
        None
    }

    /// Takes roles from those that cannot have them, and gives free ones: to whom the record names, else to any.
    fn elect(&mut self) {
        let now = Instant::now();
        let can = |agent: &Agent, shard: u32| {
            agent.lost.is_none() && agent.campaigns.get(&shard).is_some_and(|from| *from <= now)
        };
        for (shard, id) in self.roles.clone() {
            if !self.agents.get(&id).is_some_and(|agent| can(agent, shard)) {
                self.roles.remove(&shard);
                if let Some(agent) = self.agents.get(&id) {
                    agent.mailbox.push(Notice::Role { shard, held: false });
                }
            }
        }
        let shards: BTreeSet<u32> = self.agents.values().flat_map(|agent| agent.campaigns.keys().copied()).collect();
        for shard in shards.into_iter().filter(|shard| !self.roles.contains_key(shard)).collect::<Vec<_>>() {
            let named = self.records.get(&shard).and_then(|(_, record)| record.coordinator());
            let candidates = self.agents.iter().filter(|(_, agent)| can(agent, shard));
            let best = candidates.min_by_key(|(id, agent)| (Some(agent.address) != named, **id));
            if let Some((&id, agent)) = best {
                agent.mailbox.push(Notice::Role { shard, held: true });
                self.roles.insert(shard, id);
            }
        }
    }
}

/// One agent's handle.
#[derive(Debug)]
pub struct MemoryAuthority {
    memory: Memory,
    id: u64,
    mailbox: Mailbox,
}

impl MemoryAuthority {
    /// Of one agent alone.
    pub fn new(me: Endpoint) -> Self {
        Memory::new().authority(me)
    }

    /// What it shares with others.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Authority for MemoryAuthority {
    fn request(&self, request: Request) {
        let mut state = self.memory.state();
        let (id, delay) = (self.id, state.delay);
        if delay.is_zero() {
            if let Some(back) = state.handle(id, request) {
                self.memory.later(back, State::elect);
            }
        } else {
            let memory = self.memory.clone();
            self.memory.later(delay, move |state| {
                if let Some(back) = state.handle(id, request) {
                    memory.later(back, State::elect);
                }
            });
        }
    }

    fn try_next(&mut self) -> Option<Notice> {
        self.mailbox.pop()
    }

    fn name(&self) -> String {
        "memory".into()
    }

    fn troubles(&self) -> Vec<Trouble> {
        self.mailbox.troubles()
    }
}

impl AsFd for MemoryAuthority {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mailbox.as_fd()
    }
}

impl Drop for MemoryAuthority {
    fn drop(&mut self) {
        let mut state = self.memory.state();
        state.agents.remove(&self.id);
        state.elect();
    }
}

#[cfg(test)]
mod tests;
