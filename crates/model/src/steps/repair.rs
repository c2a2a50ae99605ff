//! Section 7: stuck writes.

use super::{
    Action, Steps,
    coordinator::{answer, clear_way},
    replica::writers,
    takeover::processed,
};
use crate::{
    invariants,
    mutants::Mutant,
    state::{Goal, Kind, Message, Op, Phase, Repair, Stage, Version, bit, each},
};

impl Steps<'_> {
    pub fn repair(&mut self, by: usize) {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        if coordinator.phase != Phase::Serving || self.model.is(Mutant::LostClone) {
            return;
        }
        let Some(repair) = coordinator.repair else {
            for (session, slot) in coordinator.slots.iter().enumerate() {
                if slot.stage == Stage::Pending && state.budget.repairs > 0 {
                    let op = Op { session: session as u8, request: slot.request };
                    let (seq, epoch) = (slot.seq, coordinator.tables.epoch);
                    self.step(Action::StartRepair { by: by as u8, op }, |next, _| {
                        next.budget.repairs -= 1;
                        next.coordinators[by].repair = Some(Repair {
                            op,
                            seq,
                            epoch,
                            processed: 0,
                            absent: 0,
                            aborted: 0,
                            aborting: false,
                            result: 0,
                        });
                    });
                }
            }
            return;
        };
        let slot = coordinator.slots[repair.op.session as usize];
        if slot.stage != Stage::Pending || slot.seq != repair.seq {
            // Resolved by its client after all.
            self.step(Action::StartRepair { by: by as u8, op: repair.op }, |next, _| {
                next.coordinators[by].repair = None
            });
            return;
        }
        self.ask(by, repair);
        self.pull(by, repair);
        self.settle(by, repair);
    }

    /// Every member of `must_ack` is asked; one that has not processed the write freezes it.
    fn ask(&mut self, by: usize, repair: Repair) {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        let Repair { op, epoch, .. } = repair;
        let exact_not_needed = self.model.is(Mutant::AnswersOutliveEpoch);
        for r in each(coordinator.must_ack()) {
            let replica = &state.replicas[r];
            if replica.config.tenure != coordinator.record.tenure || replica.config.epoch != epoch && !exact_not_needed
            {
                continue;
            }
            self.step(Action::Ask { by: by as u8, replica: r as u8 }, |next, _| {
                let record = next.replicas[r].records[op.session as usize];
                let done = processed(next, r, op);
                let aborted = record.request == op.request && record.aborted;
                if !done && !aborted {
                    next.replicas[r].frozen[op.session as usize] = op.request;
                }
                if let Some(repair) = &mut next.coordinators[by].repair {
                    if done {
                        repair.processed |= bit(r);
                        if record.request == op.request {
                            repair.result = record.result;
                        }
                    } else if aborted {
                        repair.aborted |= bit(r);
                    } else {
                        repair.absent |= bit(r);
                    }
                }
            });
        }
    }

    /// Those that lack it pull the chain from one that processed it.
    fn pull(&mut self, by: usize, repair: Repair) {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        let (tenure, epoch) = (coordinator.record.tenure, repair.epoch);
        let key = self.model.scope.write_of(repair.op).1;
        for from in each(repair.processed) {
            for to in each(coordinator.must_ack() & !repair.processed) {
                let source = &state.replicas[from];
                if source.config.epoch != epoch || source.config.tenure != tenure {
                    continue;
                }
                self.step(Action::SendPulled { from: from as u8, to: to as u8, key: key as u8 }, |next, _| {
                    let chain = source.chains[key].clone();
                    let records = writers(source, &chain);
                    next.send(Message::Pulled { tenure, epoch, to: to as u8, key: key as u8, chain, records });
                });
            }
        }
    }

    fn settle(&mut self, by: usize, repair: Repair) {
        let coordinator = &self.state.coordinators[by];
        let must_ack = coordinator.must_ack();
        let Repair { op, seq, epoch, result, .. } = repair;
        let session = op.session as usize;
        let (kind, key) = self.model.scope.write_of(op);
        let counted = if self.model.is(Mutant::AbortedIsProcessed) { repair.aborted } else { 0 };
        if repair.processed != 0 && must_ack & !(repair.processed | counted) == 0 {
            self.step(Action::SettleCommitted { by: by as u8 }, |next, goals| {
                goals.reach(Goal::Repaired);
                next.coordinators[by].slots[session].result = result;
                invariants::committed(next, by, key, Version { seq, op, content: result });
                clear_way(next, by, session, key, false);
                next.coordinators[by].slots[session].stage = Stage::Committed;
                answer(next, by, op, key);
                next.coordinators[by].repair = None;
            });
        }
        // A record in state starting may get any seq above its clock, on any key.
        let lower = coordinator.slots.iter().enumerate().any(|(other, slot)| {
            let other = Op { session: other as u8, request: slot.request };
            let lower = slot.unresolved() && slot.seq < seq && other != op;
            lower && (slot.stage == Stage::Starting || self.model.scope.write_of(other).1 == key)
        });
        let none = repair.processed == 0 && must_ack & !(repair.absent | repair.aborted) == 0;
        if none && !repair.aborting && (!lower || self.model.is(Mutant::AbortOverPending)) {
            let tenure = coordinator.record.tenure;
            let forgotten = self.model.is(Mutant::ForgottenAbort);
            self.step(Action::OrderAbort { by: by as u8 }, |next, _| {
                if let Some(repair) = &mut next.coordinators[by].repair {
                    repair.aborting = true;
                }
                if forgotten {
                    next.replicas.iter_mut().for_each(|replica| replica.frozen[session] = 0);
                } else {
                    next.send(Message::Abort { tenure, epoch, op, seq });
                }
            });
        }
        let (early, forgotten) = (self.model.is(Mutant::AbortEarly), self.model.is(Mutant::ForgottenAbort));
        let all = must_ack & !repair.aborted == 0 || early && repair.aborted != 0 || forgotten;
        if repair.aborting && all {
            let frees = self.model.is(Mutant::AbortFreesWay);
            debug_assert!(kind != Kind::Put || !lower || self.model.mutant.is_some());
            self.step(Action::SettleAborted { by: by as u8 }, |next, goals| {
                goals.reach(Goal::Abort);
                clear_way(next, by, session, key, frees);
                next.coordinators[by].slots[session].stage = Stage::Aborted;
                next.coordinators[by].repair = None;
            });
        }
    }
}
