//! A coordinator's host: an agent's process, what it asks of the authority, and the tables of its data path.

use std::collections::{BTreeMap, VecDeque};

use underpass_abi::abi::{up_config, up_session};
use underpass_protocol::{
    agent::{Agent, Command, Settlement, Tables, TablesError},
    coordinator::{CloseOutcome, Coordinator, Scan},
    wire::{Endpoint, SessionId},
};

use crate::{
    authority::{Answer, Question},
    host::Timepiece,
    plan::CoordinatorShape,
};

/// What waits for an agent.
#[derive(Clone, Debug)]
pub enum Input {
    /// A control datagram.
    Datagram(Endpoint, Vec<u8>),
    /// An answer of the authority to the question of this number.
    Answer(u64, Answer),
    /// No answer came in time.
    Timeout(u64),
    /// A record has changed, or a role is free.
    News,
    /// The machine has stood still.
    Suspended,
    /// An operator asks.
    Command {
        /// Shard.
        shard: u32,
        /// Number.
        id: u64,
        /// What for.
        command: Command,
    },
}

/// What a process keeps of one shard.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standing {
    /// The agent believes that it has the role.
    pub role: bool,
    /// By its own clock.
    pub role_until_ms: u64,
    /// The latest revision that the agent was told.
    pub told: u64,
    /// The record has to be loaded.
    pub load: bool,
    /// The agent has to be told whatever is loaded next, also the same revision again.
    pub owed: bool,
}

/// An agent's process.
pub struct Process {
    /// The agent.
    pub agent: Agent,
    /// By shard, from 0.
    pub standing: Vec<Standing>,
    /// Questions without an answer.
    pub asked: BTreeMap<u64, Question>,
    /// When to ask for the role again, by its own clock.
    pub campaign_ms: u64,
    /// Queued while it stands still.
    pub inbox: VecDeque<Input>,
    /// When it is to be woken; stale wake-ups name another time.
    pub wake: u64,
}

/// The tables, and what is known of them from outside.
pub struct DataPath {
    /// The tables.
    pub tables: Coordinator,
    /// By shard: the epoch at which these tables were first configured.
    pub tenure: BTreeMap<u32, u32>,
    /// Data packets that wait while a `socket` process stands still.
    pub inbox: VecDeque<(Endpoint, Vec<u8>)>,
}

/// A coordinator's host.
pub struct Host {
    /// What it is.
    pub shape: CoordinatorShape,
    /// Counts its processes.
    pub life: u32,
    /// The agent's process.
    pub process: Option<Process>,
    /// The data path.
    pub data_path: Option<DataPath>,
    /// Its clock.
    pub clock: Timepiece,
    /// It stands still, this many times over.
    pub paused: u32,
    /// It is down, this many times over.
    pub down: u32,
}

/// What an agent does to its tables that outsiders want to know of.
#[derive(Clone, Copy, Debug)]
pub enum Done {
    /// Another configuration: shard, epoch.
    Configured(up_config),
    /// A write is over.
    Settled(SessionId, u64, u64, Settlement),
    /// A shard is not served any more.
    Cleared(u32),
}

/// Tables that tell what is done to them.
pub struct Watched<'a> {
    /// The tables.
    pub data_path: &'a mut DataPath,
    /// What was done.
    pub done: Vec<Done>,
}

impl Tables for Watched<'_> {
    fn session_count(&self) -> u32 {
        self.data_path.tables.session_count()
    }

    fn configure(&mut self, config: &up_config) -> Result<(), TablesError> {
        let DataPath { tables, tenure, .. } = &mut *self.data_path;
        if tables.config(config.shard).is_none() {
            tenure.insert(config.shard, config.epoch);
        }
        self.done.push(Done::Configured(*config));
        Tables::configure(tables, config)
    }

    fn clear(&mut self, shard: u32) -> Result<(), TablesError> {
        self.done.push(Done::Cleared(shard));
        self.data_path.tables.clear(shard)
    }

    fn config(&self, shard: u32) -> Option<up_config> {
        Tables::config(&self.data_path.tables, shard)
    }

    fn extend_lease(&mut self, shard: u32, until_ms: u64) -> Result<(), TablesError> {
        self.data_path.tables.extend_lease(shard, until_ms)
    }

    fn scan(&mut self, shard: u32, sessions: usize) -> Result<Scan, TablesError> {
        self.data_path.tables.scan(shard, sessions)
    }

    fn records(&mut self, count: usize, visit: &mut dyn FnMut(u16, &up_session)) -> Result<(), TablesError> {
        self.data_path.tables.records(count, visit)
    }

    fn record(&mut self, index: u16) -> Result<up_session, TablesError> {
        self.data_path.tables.record(index)
    }

    fn load(&mut self, index: u16, record: &up_session) -> Result<bool, TablesError> {
        self.data_path.tables.load(index, record)
    }

    fn close(&mut self, session: SessionId, used_before_ms: Option<u64>) -> Result<CloseOutcome, TablesError> {
        self.data_path.tables.close(session, used_before_ms)
    }

    fn forget_acks(&mut self, shard: u32, index: u8) -> Result<(), TablesError> {
        self.data_path.tables.forget_acks(shard, index)
    }

    fn settle(&mut self, session: SessionId, request: u64, seq: u64, how: Settlement) -> Result<bool, TablesError> {
        let settled = self.data_path.tables.settle(session, request, seq, how)?;
        if settled {
            self.done.push(Done::Settled(session, request, seq, how));
        }
        Ok(settled)
    }
}
