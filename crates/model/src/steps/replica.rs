//! Sections 3, 4 and 7 at a replica.

use super::{Action, Steps};
use crate::{
    invariants,
    mutants::Mutant,
    state::{Chain, Goal, Kind, Message, Op, Record, Replica, SESSIONS, Seq, Version, bit, insert, put},
};

impl Steps<'_> {
    pub fn replica(&mut self, r: usize) {
        let state = self.state;
        for message in &state.network {
            match message {
                Message::Install(_) => self.install(r, message),
                Message::Read { .. } => self.answer_read(r, message),
                Message::Write { .. } => self.process(r, message),
                Message::Stable { .. } => self.take_stable(r, message),
                Message::Pulled { .. } => self.take_pulled(r, message),
                Message::Abort { .. } => self.record_abort(r, message),
                Message::CopiedRecords { .. } => self.take_records(r, message),
                Message::CopiedChain { .. } => self.take_chain(r, message),
                Message::WriteReply { .. } => {}
            }
        }
        if state.budget.crashes > 0 && state.replicas[r].config.epoch > 0 {
            self.step(Action::Crash { replica: r as u8 }, |next, _| {
                next.budget.crashes -= 1;
                next.replicas[r] = Replica::new(next.replicas[r].life + 1);
            });
        }
    }

    /// INSTALL: a higher epoch that names this life.
    fn install(&mut self, r: usize, message: &Message) {
        let &Message::Install(config) = message else { return };
        let replica = &self.state.replicas[r];
        if config.lives[r] != replica.life || config.epoch <= replica.config.epoch {
            return;
        }
        self.step(Action::Install { replica: r as u8, epoch: config.epoch }, |next, _| {
            let replica = &mut next.replicas[r];
            if replica.config.tenure != config.tenure {
                replica.joined = config.epoch;
            }
            replica.config = config;
            replica.frozen = Default::default();
        });
    }

    /// Is a packet of this tenure and epoch taken?
    fn takes(&self, r: usize, tenure: u8, epoch: u8) -> bool {
        let replica = &self.state.replicas[r];
        let first = if self.model.is(Mutant::OldEpochWrite) { tenure } else { replica.joined };
        replica.config.tenure == tenure && (first..=replica.config.epoch).contains(&epoch)
    }

    /// READ at a replica.
    fn answer_read(&mut self, r: usize, message: &Message) {
        let &Message::Read { tenure, epoch, to, key, bound, late, atleast } = message else { return };
        if to & bit(r) == 0 || !self.takes(r, tenure, epoch) || !self.replica_leased(r) {
            return;
        }
        let replica = &self.state.replicas[r];
        let shown = bound.max(replica.stable);
        let got = replica.chains[key as usize].iter().rfind(|version| version.seq <= shown).copied();
        let seq = got.map_or(0, |version| version.seq);
        let below = replica.chains[key as usize].last().is_some_and(|newest| newest.seq > shown);
        self.step(Action::AnswerRead { replica: r as u8, key, bound, got: seq }, |next, goals| {
            goals.reach(Goal::Read);
            if below && got.is_some() {
                goals.reach(Goal::ReadBelowPending);
            }
            if next.replicas[r].life > 1 {
                goals.reach(Goal::ReadFromPromoted);
            }
            if tenure > 1 {
                goals.reach(Goal::ReadAfterTakeOver);
            }
            invariants::read(next, key as usize, got, atleast, late);
            next.network.retain(|message| !matches!(message, Message::Read { .. }));
        });
    }

    /// Does this replica hold a lease of its coordinator? Modelled where the coordinator's own is worth nothing.
    fn replica_leased(&self, r: usize) -> bool {
        let state = self.state;
        let tenure = state.replicas[r].config.tenure;
        !self.model.scope.suspended
            || state.coordinators.iter().filter(|c| c.record.tenure == tenure).all(|coordinator| {
                (0..state.coordinators.len()).all(|later| {
                    let later_c = &state.coordinators[later];
                    later_c.record.tenure <= tenure || !later_c.wait.1 || coordinator.grants[later] & bit(r) != 0
                })
            })
    }

    /// WRITE at a replica.
    fn process(&mut self, r: usize, message: &Message) {
        let &Message::Write { tenure, epoch, to, op, seq } = message else { return };
        let replica = &self.state.replicas[r];
        if to & bit(r) == 0 || !self.takes(r, tenure, epoch) || replica.frozen[op.session as usize] == op.request {
            return;
        }
        let (kind, key) = self.model.scope.write_of(op);
        let record = replica.records[op.session as usize];
        let again = self.model.is(Mutant::RetryIsNew) && record.request == op.request && record.seq < seq;
        let new = record.request < op.request || self.is_ahead(r, &record, key);
        if record.request > op.request {
            return;
        }
        // A learner executes a conditional write on the chain that it has copied.
        if kind != Kind::Put && replica.learns(r) && replica.keys_copied & bit(key) == 0 && new {
            return;
        }
        let loser = self.model.is(Mutant::IgnoredLoser);
        self.step(Action::Process { replica: r as u8, op, seq }, |next, _| {
            let replica = &mut next.replicas[r];
            if new || again {
                let before = replica.chains[key].iter().rfind(|version| version.seq < seq).map_or(0, |v| v.content);
                let content = match kind {
                    Kind::Put => put(op),
                    Kind::Incr => before + 1,
                    Kind::Delete => 0,
                };
                if !(loser && replica.chains[key].last().is_some_and(|newest| newest.seq > seq)) {
                    insert(&mut replica.chains[key], Version { seq, op, content });
                }
                replica.records[op.session as usize] =
                    Record { request: op.request, seq, aborted: false, result: content };
            }
            let Record { aborted, result, .. } = replica.records[op.session as usize];
            next.send(Message::WriteReply { tenure, epoch, from: r as u8, op, seq, aborted, result });
        });
    }

    /// Has a learner copied the record of a write before the version that goes with it?
    fn is_ahead(&self, r: usize, record: &Record, key: usize) -> bool {
        let replica = &self.state.replicas[r];
        !self.model.is(Mutant::RecordIsEnough)
            && replica.learns(r)
            && !replica.complete(self.model.scope.keys)
            && !record.aborted
            && record.seq > replica.stable
            && replica.chains[key].iter().all(|version| version.seq != record.seq)
    }

    /// A heartbeat: versions older than the newest stable one go, and with them a stable tombstone that is alone.
    fn take_stable(&mut self, r: usize, message: &Message) {
        let &Message::Stable { tenure, epoch, stable } = message else { return };
        if !self.takes(r, tenure, epoch) {
            return;
        }
        let early = self.model.is(Mutant::TombstoneDropped);
        self.step(Action::TakeStable { replica: r as u8, stable }, |next, goals| {
            let replica = &mut next.replicas[r];
            replica.stable = replica.stable.max(stable);
            let keep_tombstones = replica.learns(r) && !early;
            for chain in &mut replica.chains {
                drop_old(chain, replica.stable);
                if !keep_tombstones && chain.first().is_some_and(|v| v.seq <= replica.stable && v.content == 0) {
                    goals.reach(Goal::TombstoneDropped);
                    chain.remove(0);
                }
            }
        });
    }

    /// A chain that another member holds, with the records that wrote it, in one step.
    fn take_pulled(&mut self, r: usize, message: &Message) {
        let Message::Pulled { tenure, epoch, to, key, chain, records } = message else { return };
        let replica = &self.state.replicas[r];
        let exact = *epoch == replica.config.epoch || self.model.is(Mutant::OldEpochPull);
        if *to as usize != r || replica.config.tenure != *tenure || !self.takes(r, *tenure, *epoch) || !exact {
            return;
        }
        let from = if self.model.is(Mutant::PullBelowStable) { 0 } else { replica.stable };
        let no_records = self.model.is(Mutant::PullWithoutRecord) || self.model.is(Mutant::ConvergeIgnoresRecords);
        self.step(Action::TakePulled { replica: r as u8, key: *key }, |next, goals| {
            let replica = &mut next.replicas[r];
            let held = replica.chains[*key as usize].len();
            merge(replica, *key as usize, chain, records, from, !no_records);
            if replica.chains[*key as usize].len() > held {
                goals.reach(Goal::Pull);
            }
        });
    }

    /// ABORT, in the exact epoch: recorded unless processed.
    fn record_abort(&mut self, r: usize, message: &Message) {
        let &Message::Abort { tenure, epoch, op, seq } = message else { return };
        let replica = &self.state.replicas[r];
        if replica.config.tenure != tenure || replica.config.epoch != epoch || replica.joined > epoch {
            return;
        }
        if replica.records[op.session as usize].request >= op.request {
            return;
        }
        self.step(Action::RecordAbort { replica: r as u8, op }, |next, _| {
            let replica = &mut next.replicas[r];
            replica.frozen[op.session as usize] = 0;
            replica.records[op.session as usize] = Record { request: op.request, seq, aborted: true, result: 0 };
        });
    }

    /// A learner takes its donor's records.
    fn take_records(&mut self, r: usize, message: &Message) {
        let Message::CopiedRecords { to, life, records } = message else { return };
        let replica = &self.state.replicas[r];
        if *to as usize != r || *life != replica.life || replica.records_copied || replica.donor.1 == 0 {
            return;
        }
        self.step(Action::TakeRecords { replica: r as u8 }, |next, _| {
            let replica = &mut next.replicas[r];
            replica.records_copied = true;
            take_newer(replica, records);
        });
    }

    /// A learner takes a chain of its donor's.
    fn take_chain(&mut self, r: usize, message: &Message) {
        let Message::CopiedChain { to, life, key, chain, records } = message else { return };
        let replica = &self.state.replicas[r];
        let k = *key as usize;
        if *to as usize != r || *life != replica.life || replica.keys_copied & bit(k) != 0 || replica.donor.1 == 0 {
            return;
        }
        let with_records = !self.model.is(Mutant::RecordsLast);
        self.step(Action::TakeChain { replica: r as u8, key: *key }, |next, _| {
            let replica = &mut next.replicas[r];
            replica.keys_copied |= bit(k);
            // All of it, also what is stable: this replica has never had it.
            merge(replica, k, chain, records, 0, with_records);
        });
    }
}

/// Versions older than the newest one up to `stable` are dropped.
fn drop_old(chain: &mut Chain, stable: Seq) {
    let older = chain.iter().filter(|version| version.seq <= stable).count().saturating_sub(1);
    chain.drain(..older);
}

/// Takes the versions above `from` that this replica lacks, and their writers' records.
fn merge(
    replica: &mut Replica,
    key: usize,
    chain: &Chain,
    records: &[Record; SESSIONS],
    from: Seq,
    with_records: bool,
) {
    for &version in chain.iter().filter(|version| version.seq > from) {
        insert(&mut replica.chains[key], version);
    }
    if with_records {
        take_newer(replica, records);
    }
    drop_old(&mut replica.chains[key], replica.stable);
}

/// Takes records of later requests; what was processed replaces what was recorded as aborted.
fn take_newer(replica: &mut Replica, records: &[Record; SESSIONS]) {
    for (session, &record) in records.iter().enumerate() {
        let own = &mut replica.records[session];
        if record.request > own.request || record.request == own.request && own.aborted && !record.aborted {
            *own = record;
            if replica.frozen[session] == record.request {
                replica.frozen[session] = 0;
            }
        }
    }
}

/// The records that wrote versions of a chain, if they are still of those writes.
pub(super) fn writers(replica: &Replica, chain: &Chain) -> [Record; SESSIONS] {
    let mut writers = [Record::default(); SESSIONS];
    for Version { op: Op { session, request }, .. } in chain {
        let record = replica.records[*session as usize];
        if record.request == *request {
            writers[*session as usize] = record;
        }
    }
    writers
}
