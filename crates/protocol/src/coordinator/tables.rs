//! The coordinator's tables as the agent sees them. Nothing here can fail but what is a mistake of the agent's.

use underpass_abi::abi::{up_bucket, up_config, up_session};

use super::{CloseOutcome, Coordinator, Scan, Step, scan, slot, unresolved};
use crate::{
    agent::{Settlement, Tables, TablesError},
    wire::SessionId,
};

impl Tables for Coordinator {
    fn session_count(&self) -> u32 {
        self.settings.sessions
    }

    fn configure(&mut self, config: &up_config) -> Result<(), TablesError> {
        self.configure(config);
        Ok(())
    }

    fn clear(&mut self, shard: u32) -> Result<(), TablesError> {
        self.sessions
            .iter_mut()
            .filter(|record| record.shard == shard)
            .for_each(|record| *record = up_session::default());
        let at = slot(shard);
        let active = &self.shards[at].config[self.shards[at].active as usize];
        if active.epoch == 0 || active.shard == shard {
            // The clock stays, so that it never goes back.
            self.shards[at].config = Default::default();
            let buckets = self.settings.buckets as usize;
            self.buckets[at * buckets..][..buckets].fill(up_bucket::default());
            self.words[at * buckets..][..buckets].fill(0);
        }
        Ok(())
    }

    fn config(&self, shard: u32) -> Option<up_config> {
        self.config(shard).copied()
    }

    fn extend_lease(&mut self, shard: u32, until_ms: u64) -> Result<(), TablesError> {
        if self.config(shard).is_some() {
            let slot = &mut self.shards[slot(shard)];
            let lease_until_ms = &mut slot.config[slot.active as usize].lease_until_ms;
            *lease_until_ms = until_ms.max(*lease_until_ms);
        }
        Ok(())
    }

    fn scan(&mut self, shard: u32, sessions: usize) -> Result<Scan, TablesError> {
        let sessions = sessions.min(self.sessions.len());
        Ok(scan(self.shards[slot(shard)].clock, shard, &self.sessions[..sessions]))
    }

    fn records(&mut self, count: usize, visit: &mut dyn FnMut(u16, &up_session)) -> Result<(), TablesError> {
        self.sessions.iter().take(count).zip(0..=u16::MAX).for_each(|(record, index)| visit(index, record));
        Ok(())
    }

    fn record(&mut self, index: u16) -> Result<up_session, TablesError> {
        let record = self.sessions.get(usize::from(index)).copied();
        record.ok_or_else(|| TablesError(format!("there is no session index {index}")))
    }

    fn load(&mut self, index: u16, record: &up_session) -> Result<bool, TablesError> {
        assert!(SessionId(record.session).index() == index && record.session != 0, "another index's session");
        assert!(!unresolved(record.state), "an unresolved write is loaded");
        let free = self.sessions.get_mut(usize::from(index)).filter(|record| record.session == 0);
        Ok(free.map(|free| *free = *record).is_some())
    }

    fn close(&mut self, session: SessionId, used_before_ms: Option<u64>) -> Result<CloseOutcome, TablesError> {
        Ok(self.close_session(session, used_before_ms.unwrap_or(u64::MAX)))
    }

    fn forget_acks(&mut self, shard: u32, index: u8) -> Result<(), TablesError> {
        #[cfg(feature = "published")]
        if self.published.keep_bits {
            return Ok(());
        }
        self.sessions.iter_mut().filter(|record| record.shard == shard).for_each(|record| record.acks &= !(1 << index));
        Ok(())
    }

    fn settle(
        &mut self,
        session: SessionId,
        request: u64,
        seq: u64,
        settlement: Settlement,
    ) -> Result<bool, TablesError> {
        let Some(mut step) = self.begin_settle(session, request, seq, settlement) else { return Ok(false) };
        while !matches!(step, Step::Settled) {
            step = self.resume(step);
        }
        Ok(true)
    }
}
