//! Section 7: change of members, and a learner's copy.

use super::{Action, Steps, replica::writers};
use crate::{
    mutants::Mutant,
    state::{Change, Config, Coordinator, EPOCH_SHIFT, Goal, Message, Phase, Replica, State, Tables, bit, each},
};

impl Steps<'_> {
    pub fn change(&mut self, by: usize) {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        if coordinator.phase != Phase::Serving {
            return;
        }
        let name = by as u8;
        let at_once = self.model.scope.at_once;
        match coordinator.change {
            Change::None if !coordinator.stepped_down => {
                if state.budget.changes > 0 {
                    self.begin_change(by);
                }
                if !coordinator.record.settled {
                    self.step(Action::Settle { by: name }, |next, _| settle(next, by));
                }
            }
            Change::None => {}
            Change::Recorded(added) => {
                let (old_bits, one_step) = (self.model.is(Mutant::OldBits), self.model.is(Mutant::OneStepSwitch));
                let outlive = self.model.is(Mutant::AnswersOutliveEpoch);
                self.step(Action::UseUnion { by: name }, |next, _| {
                    let coordinator = &mut next.coordinators[by];
                    if let Some(index) = added
                        && !old_bits
                    {
                        // It is in no CPU's must_ack.
                        coordinator.slots.iter_mut().for_each(|slot| slot.acks &= !bit(index as usize));
                    }
                    let (old, new) = (coordinator.tables, new_tables(&coordinator.record));
                    let must_ack = if one_step { new.must_ack } else { old.must_ack | new.must_ack };
                    use_tables(coordinator, Tables { must_ack, ..new }, at_once);
                    coordinator.change = if one_step { Change::New } else { Change::Union };
                    match &mut coordinator.repair {
                        Some(repair) if outlive => repair.epoch = new.epoch,
                        repair => *repair = None,
                    }
                });
            }
            Change::Union if coordinator.old_tables.is_none() => self.step(Action::UseNew { by: name }, |next, _| {
                let coordinator = &mut next.coordinators[by];
                use_tables(coordinator, new_tables(&coordinator.record), at_once);
                coordinator.change = Change::New;
            }),
            Change::New if coordinator.old_tables.is_none() => {
                self.step(Action::Settle { by: name }, |next, goals| {
                    let first = self.model.scope.members;
                    let promoted = |r: usize| next.record.lives[r] > 1 || first & bit(r) == 0;
                    let fewer = next.record.members().count_ones() < first.count_ones();
                    if each(next.record.active).any(promoted) {
                        goals.reach(Goal::Promoted);
                    }
                    if fewer {
                        goals.reach(Goal::Removed);
                    }
                    settle(next, by);
                });
            }
            _ => {}
        }
        if let Some(old) = coordinator.old_tables
            && !coordinator.slots.iter().any(|slot| slot.in_flight() && slot.on_old)
        {
            debug_assert_ne!(old, coordinator.tables);
            self.step(Action::EveryCpu { by: name }, |next, _| next.coordinators[by].old_tables = None);
        }
        self.copy(by);
    }

    fn begin_change(&mut self, by: usize) {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        let record = coordinator.record;
        for r in 0..state.replicas.len() {
            let (replica, member) = (&state.replicas[r], bit(r));
            let name = r as u8;
            if record.lives[r] == 0 {
                if self.model.leased(state, by) {
                    self.step(Action::Add { by: by as u8, replica: name }, |next, _| {
                        // A process that holds data, or has been a member, empties itself and is another one from then on.
                        if next.replicas[r] != Replica::new(next.replicas[r].life) {
                            next.replicas[r] = Replica::new(next.replicas[r].life + 1);
                        }
                        let mut new = record;
                        new.lives[r] = next.replicas[r].life;
                        next.coordinators[by].spoiled &= !member;
                        begin(next, by, new, Some(name));
                    });
                }
                continue;
            }
            if record.active & !member != 0 {
                let keys = self.model.scope.keys;
                let spoils = !self.model.is(Mutant::ChangeDonor);
                self.step(Action::Remove { by: by as u8, replica: name }, |next, _| {
                    for learner in each(record.members() & !record.active) {
                        if spoils && next.replicas[learner].donor.0 == name && !next.replicas[learner].complete(keys) {
                            next.coordinators[by].spoiled |= bit(learner);
                        }
                    }
                    let mut new = record;
                    new.lives[r] = 0;
                    new.active &= !member;
                    begin(next, by, new, None);
                });
            }
            let copied = replica.complete(self.model.scope.keys) && coordinator.spoiled & member == 0;
            if record.active & member == 0 && record.lives[r] == replica.life && record.settled && copied {
                self.step(Action::Promote { by: by as u8, replica: name }, |next, _| {
                    let mut new = record;
                    new.active |= member;
                    begin(next, by, new, None);
                });
            }
        }
    }

    /// A learner copies from its donor: records first, then chains.
    fn copy(&mut self, by: usize) {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        let record = coordinator.record;
        for r in each(record.members() & !record.active) {
            let replica = &state.replicas[r];
            if replica.life != record.lives[r] || replica.config.tenure != record.tenure || !replica.learns(r) {
                continue;
            }
            let any_donor = self.model.is(Mutant::ChangeDonor);
            let complete = replica.complete(self.model.scope.keys);
            if (replica.donor.1 == 0 || any_donor && !complete) && record.settled && coordinator.change == Change::None
            {
                for donor in each(record.active) {
                    let life = record.lives[donor];
                    self.step(Action::StartCopy { by: by as u8, replica: r as u8, donor: donor as u8 }, |next, _| {
                        next.replicas[r].donor = (donor as u8, life);
                    });
                }
            }
            let (donor, life) = replica.donor;
            let source = &state.replicas[donor as usize];
            // The donor knows that this learner is a member.
            let knows = source.config.tenure == record.tenure && source.config.epoch >= replica.joined;
            if life == 0 || source.life != life || !knows {
                continue;
            }
            let last = self.model.is(Mutant::RecordsLast);
            let all = bit(self.model.scope.keys) - 1;
            if !replica.records_copied && (!last || replica.keys_copied == all) {
                self.step(Action::SendRecords { to: r as u8 }, |next, _| {
                    let records = source.records;
                    next.send(Message::CopiedRecords { to: r as u8, life: replica.life, records });
                });
            }
            if replica.records_copied || last {
                for key in each(all & !replica.keys_copied) {
                    self.step(Action::SendChain { to: r as u8, key: key as u8 }, |next, _| {
                        let chain = source.chains[key].clone();
                        let records = writers(source, &chain);
                        let (to, life) = (r as u8, replica.life);
                        next.send(Message::CopiedChain { to, life, key: key as u8, chain, records });
                    });
                }
            }
        }
    }
}

/// Tables of a configuration, once every CPU uses them.
pub(super) fn new_tables(record: &Config) -> Tables {
    Tables { epoch: record.epoch, must_ack: record.members(), serving: record.active }
}

fn use_tables(coordinator: &mut Coordinator, tables: Tables, at_once: bool) {
    if tables != coordinator.tables && !at_once {
        coordinator.old_tables = Some(coordinator.tables);
        coordinator.slots.iter_mut().filter(|slot| slot.in_flight()).for_each(|slot| slot.on_old = true);
    }
    coordinator.tables = tables;
    coordinator.clock = coordinator.clock.max(tables.epoch << EPOCH_SHIFT);
}

/// Step 1: compare-and-swap. Lost: step down.
fn begin(next: &mut State, by: usize, mut new: Config, added: Option<u8>) {
    next.budget.changes -= 1;
    new.epoch += 1;
    new.settled = false;
    if compare_and_swap(next, by, new) {
        next.coordinators[by].change = Change::Recorded(added);
    }
}

/// Puts a coordinator's record in place of the one that it wrote before, and tells the members.
pub(super) fn compare_and_swap(next: &mut State, by: usize, new: Config) -> bool {
    if next.record != next.coordinators[by].record {
        next.coordinators[by].stepped_down = true;
        return false;
    }
    let install = new.epoch != next.record.epoch;
    next.record = new;
    next.coordinators[by].record = new;
    if install {
        next.send(Message::Install(Config { settled: false, ..new }));
    }
    true
}

/// Step 5.
fn settle(next: &mut State, by: usize) {
    let record = next.coordinators[by].record;
    if compare_and_swap(next, by, Config { settled: true, ..record }) {
        next.coordinators[by].change = Change::None;
    }
}
