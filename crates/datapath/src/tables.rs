//! The kernel's tables as the agent sees them.

use std::{collections::BTreeMap, fmt::Display, net::Ipv4Addr};

use underpass_abi::abi::{
    UP_SESSION_DONE, UP_SESSION_OP_CLOSE, UP_SESSION_OP_LOAD, UP_SESSION_OP_SETTLE, UP_SESSION_UNRESOLVED,
    UP_STATE_ABORTED, UP_STATE_COMMITTED, up_config, up_session, up_session_command,
};
use underpass_protocol::{
    agent::{Settlement, Tables, TablesError},
    coordinator::{CloseOutcome, Scan, scan, slot, unresolved},
    wire::{SessionId, Status},
};

use crate::coordinator::CoordinatorKernel;

fn failed<E: Display>(what: &'static str) -> impl FnOnce(E) -> TablesError {
    move |error| TablesError(format!("{what}: {error}"))
}

const COMMAND: &str = "running the session program";
const READ: &str = "reading the session table";

impl CoordinatorKernel {
    /// Says where members are sent to; who is not in here is not sent to. Configurations that this changes are made active
    /// anew.
    pub fn set_next_hops(&mut self, next_hops: BTreeMap<Ipv4Addr, [u8; 6]>) {
        self.next_hops = next_hops;
        let active: Vec<_> = self.configurations().collect();
        for (config, filled) in active.iter().map(|config| (config, self.with_next_hops(config))) {
            if filled != *config {
                self.activate(&filled);
            }
        }
    }

    fn with_next_hops(&self, config: &up_config) -> up_config {
        let mut config = *config;
        for member in &mut config.members {
            member.next_hop = self.next_hops.get(&u32::from_be(member.addr).into()).copied().unwrap_or_default();
        }
        config
    }

    fn with_records<R>(&mut self, count: usize, look: impl FnOnce(&[up_session]) -> R) -> Result<R, TablesError> {
        let mut records = std::mem::take(&mut self.records);
        let read = self.read_sessions(count as u32, &mut records);
        let result = read.map(|()| look(&records)).map_err(failed(READ));
        self.records = records;
        result
    }
}

impl Tables for CoordinatorKernel {
    fn session_count(&self) -> u32 {
        self.sizes().sessions
    }

    fn configure(&mut self, config: &up_config) -> Result<(), TablesError> {
        self.activate(&self.with_next_hops(config));
        Ok(())
    }

    fn clear(&mut self, shard: u32) -> Result<(), TablesError> {
        CoordinatorKernel::clear(self, shard).map_err(failed("clearing a shard's tables"))
    }

    fn config(&self, shard: u32) -> Option<up_config> {
        self.active(shard)
    }

    fn extend_lease(&mut self, shard: u32, until_ms: u64) -> Result<(), TablesError> {
        CoordinatorKernel::extend_lease(self, shard, until_ms);
        Ok(())
    }

    fn scan(&mut self, shard: u32, sessions: usize) -> Result<Scan, TablesError> {
        // The clock first, as `scan` demands.
        let clock = self.clock(slot(shard));
        self.with_records(sessions, |records| scan(clock, shard, records))
    }

    fn records(&mut self, count: usize, visit: &mut dyn FnMut(u16, &up_session)) -> Result<(), TablesError> {
        self.with_records(count, |records| {
            records.iter().zip(0..=u16::MAX).for_each(|(record, index)| visit(index, record));
        })
    }

    fn record(&mut self, index: u16) -> Result<up_session, TablesError> {
        self.read_session(index).map_err(failed(READ))
    }

    fn load(&mut self, index: u16, record: &up_session) -> Result<bool, TablesError> {
        assert!(SessionId(record.session).index() == index && record.session != 0, "another index's session");
        assert!(!unresolved(record.state), "an unresolved write is loaded");
        let command = up_session_command { record: *record, ..Default::default() };
        let answer = self.command(UP_SESSION_OP_LOAD, record.session, command).map_err(failed(COMMAND))?;
        Ok(answer.result == UP_SESSION_DONE)
    }

    fn close(&mut self, session: SessionId, used_before_ms: Option<u64>) -> Result<CloseOutcome, TablesError> {
        let used_before_ms = used_before_ms.unwrap_or(u64::MAX);
        let command = up_session_command { used_before_ms, ..Default::default() };
        let answer = self.command(UP_SESSION_OP_CLOSE, session.0, command).map_err(failed(COMMAND))?;
        Ok(match answer.result {
            UP_SESSION_DONE => CloseOutcome::Closed { request: answer.request, state: answer.state },
            UP_SESSION_UNRESOLVED => CloseOutcome::Unresolved,
            _ => CloseOutcome::NotYours,
        })
    }

    fn forget_acks(&mut self, shard: u32, index: u8) -> Result<(), TablesError> {
        CoordinatorKernel::forget_acks(self, shard, index).map_err(failed("clearing acknowledgements"))
    }

    fn settle(
        &mut self,
        session: SessionId,
        request: u64,
        seq: u64,
        settlement: Settlement,
    ) -> Result<bool, TablesError> {
        let (state, status, number) = match settlement {
            Settlement::Committed { status, result } => (UP_STATE_COMMITTED, status, result),
            Settlement::Aborted => (UP_STATE_ABORTED, Status::Aborted.to_wire(), 0),
        };
        let command = up_session_command { request, seq, number, state, status, ..Default::default() };
        let answer = self.command(UP_SESSION_OP_SETTLE, session.0, command).map_err(failed(COMMAND))?;
        Ok(answer.result == UP_SESSION_DONE)
    }
}
