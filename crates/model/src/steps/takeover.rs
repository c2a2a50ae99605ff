//! Section 7: leases, and a coordinator lost.

use super::{
    Action, Steps,
    change::{compare_and_swap, new_tables},
    replica::writers,
};
use crate::{
    invariants,
    mutants::Mutant,
    state::{
        Config, Coordinator, EPOCH_SHIFT, Goal, KEYS, Message, Op, Phase, Record, SESSIONS, Slot, Stage, State, bit,
        each,
    },
};

impl Steps<'_> {
    /// Step 1. The members of the new record are the active ones of the last.
    pub fn claim(&mut self) {
        let state = self.state;
        if state.coordinators.len() >= self.model.scope.tenures {
            return;
        }
        let last = state.record;
        let half = self.model.is(Mutant::HalfLearner);
        let epoch = last.epoch + 1;
        self.step(Action::Claim { epoch }, |next, _| {
            let kept = |r: usize| half || last.active & bit(r) != 0;
            let lives = std::array::from_fn(|r| if kept(r) { last.lives[r] } else { 0 });
            let mut record = Config { epoch, tenure: epoch, lives, ..last };
            record.active = record.members();
            next.record = record;
            next.coordinators.push(Coordinator { record, ..Coordinator::default() });
            next.send(Message::Install(Config { settled: false, ..record }));
        });
    }

    pub fn takeover(&mut self, by: usize) {
        self.leases(by);
        match self.state.coordinators[by].phase {
            Phase::Claimed => {
                self.fence(by);
                self.converge(by);
            }
            Phase::Rebuilt => {
                self.fence(by);
                self.serve(by);
            }
            Phase::Serving => {}
        }
    }

    /// What matters of heartbeats: which of them are later than the beginning of a later coordinator's wait.
    fn leases(&mut self, by: usize) {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        let waits = (by + 1..state.coordinators.len()).filter(|&later| state.coordinators[later].wait.0);
        if coordinator.phase != Phase::Serving || waits.clone().next().is_none() {
            return;
        }
        for r in each(coordinator.must_ack()) {
            let replica = &state.replicas[r];
            if replica.config.tenure != coordinator.record.tenure {
                continue;
            }
            let waits = waits.clone();
            let suspended = self.model.scope.suspended;
            self.step(Action::Heartbeat { by: by as u8, replica: r as u8 }, |next, _| {
                for later in waits.clone() {
                    next.coordinators[by].heard[later] |= bit(r);
                    if suspended {
                        next.coordinators[by].stamps[later] |= bit(r);
                    }
                }
            });
            if suspended {
                let any_time = self.model.is(Mutant::DelayedGrant);
                let at_once = self.model.is(Mutant::EchoAtOnce);
                self.step(Action::Grant { by: by as u8, replica: r as u8 }, |next, _| {
                    for later in waits.clone() {
                        let coordinator = &mut next.coordinators[by];
                        let echoed = coordinator.must_ack() & !coordinator.heard[later] == 0 || at_once;
                        let stamped = coordinator.stamps[later] & bit(r) != 0 && echoed;
                        if stamped || any_time {
                            coordinator.grants[later] |= bit(r);
                        }
                    }
                });
            }
        }
    }

    /// Step 2.
    fn fence(&mut self, by: usize) {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        for r in each(coordinator.record.members() & !coordinator.confirmed) {
            let replica = &state.replicas[r];
            if replica.life == coordinator.record.lives[r] && replica.config.tenure == coordinator.record.tenure {
                self.step(Action::Confirm { by: by as u8, replica: r as u8 }, |next, _| {
                    next.coordinators[by].confirmed |= bit(r);
                    next.coordinators[by].wait.0 = true;
                });
            }
        }
        if coordinator.wait == (true, false) {
            self.step(Action::WaitOver { by: by as u8 }, |next, _| next.coordinators[by].wait.1 = true);
        }
    }

    /// Members that confirmed, and still are the life and in the tenure that did.
    fn reachable(&self, by: usize) -> Option<Vec<usize>> {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        let members: Vec<usize> = each(coordinator.confirmed).collect();
        let there = |&r: &usize| {
            let replica = &state.replicas[r];
            replica.life == coordinator.record.lives[r] && replica.config.tenure == coordinator.record.tenure
        };
        (!members.is_empty() && members.iter().all(there)).then_some(members)
    }

    /// Steps 3 and 4, and the compare-and-swap of step 5.
    fn converge(&mut self, by: usize) {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        let Some(members) = self.reachable(by) else { return };
        let (tenure, epoch) = (coordinator.record.tenure, coordinator.record.epoch);
        let versions_only = self.model.is(Mutant::ConvergeIgnoresRecords) || self.model.is(Mutant::PullWithoutRecord);
        let skip = self.model.is(Mutant::ForgottenDirtySet);
        let mut same = true;
        for (&from, &to) in members.iter().flat_map(|from| members.iter().map(move |to| (from, to))) {
            let (source, target) = (&state.replicas[from], &state.replicas[to]);
            for (key, chain) in source.chains.iter().enumerate() {
                let lacking = chain.iter().filter(|v| v.seq > target.stable).any(|version| {
                    let held = target.chains[key].contains(version);
                    let recorded = target.records[version.op.session as usize].request >= version.op.request;
                    !held || !recorded && !versions_only
                });
                if lacking && !skip {
                    same = false;
                    self.step(Action::SendPulled { from: from as u8, to: to as u8, key: key as u8 }, |next, _| {
                        let chain = chain.clone();
                        let records = writers(source, &chain);
                        next.send(Message::Pulled { tenure, epoch, to: to as u8, key: key as u8, chain, records });
                    });
                }
            }
            for session in 0..SESSIONS {
                let (theirs, own) = (source.records[session], target.records[session]);
                if theirs.aborted && own.request < theirs.request && !self.model.is(Mutant::AbortNotSpread) {
                    let op = Op { session: session as u8, request: theirs.request };
                    let processed = members.iter().any(|&r| processed(state, r, op));
                    same = false;
                    if !processed {
                        self.step(
                            Action::SpreadAbort { by: by as u8, replica: to as u8, session: session as u8 },
                            |next, goals| {
                                goals.reach(Goal::AbortSpread);
                                next.replicas[to].records[session] = theirs;
                            },
                        );
                    }
                }
                // Processed beats aborted: the chain is pulled with the record.
                same &= !(own.aborted && !theirs.aborted && own.request == theirs.request);
            }
        }
        if same {
            // Session records come from one of the members: any.
            for &source in &members {
                let left_out = coordinator.confirmed != coordinator.record.members();
                self.step(Action::Rebuild { by: by as u8 }, |next, _| {
                    if left_out {
                        let confirmed = next.coordinators[by].confirmed;
                        let mut record = next.coordinators[by].record;
                        record.epoch += 1;
                        record.settled = false;
                        record.active = confirmed;
                        (0..record.lives.len()).filter(|&r| confirmed & bit(r) == 0).for_each(|r| record.lives[r] = 0);
                        if !compare_and_swap(next, by, record) {
                            return;
                        }
                    }
                    rebuild(next, by, source);
                });
            }
        }
    }

    /// Step 6: rule (a) or (b).
    fn serve(&mut self, by: usize) {
        let coordinator = &self.state.coordinators[by];
        let every = coordinator.confirmed == coordinator.record.members();
        let settled = coordinator.record.settled || self.model.is(Mutant::SkipWaitUnsettled);
        let at_once = every && settled;
        if at_once || coordinator.wait.1 || self.model.is(Mutant::TwoCoordinators) {
            self.step(Action::Serve { by: by as u8 }, |next, goals| {
                goals.reach(if next.coordinators[by].wait.1 { Goal::ServeAfterWait } else { Goal::ServeAtOnce });
                next.coordinators[by].phase = Phase::Serving;
                invariants::all_committed(next, by);
            });
        }
    }
}

/// Has this replica processed the write, or a later one of its session?
pub(super) fn processed(state: &State, r: usize, op: Op) -> bool {
    let record = state.replicas[r].records[op.session as usize];
    record.request > op.request || record.request == op.request && !record.aborted
}

/// Step 4.
fn rebuild(next: &mut State, by: usize, source: usize) {
    let records = next.replicas[source].records;
    let coordinator = &mut next.coordinators[by];
    coordinator.tables = new_tables(&coordinator.record);
    coordinator.clock = coordinator.record.epoch << EPOCH_SHIFT;
    coordinator.floor = coordinator.clock;
    coordinator.ways = [None; KEYS];
    coordinator.slots = records.map(|Record { request, seq, aborted, result }| Slot {
        known: request > 0,
        request,
        stage: match (request, aborted) {
            (0, _) => Stage::Idle,
            (_, true) => Stage::Aborted,
            (_, false) => Stage::Committed,
        },
        seq,
        result,
        ..Slot::default()
    });
    coordinator.phase = Phase::Rebuilt;
}
