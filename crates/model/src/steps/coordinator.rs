//! Section 3 at the coordinator.

use super::{Action, Steps};
use crate::{
    invariants,
    mutants::Mutant,
    state::{Goal, Kind, Message, Op, Phase, Slot, Stage, State, Tables, Version, Way, bit},
};

impl Steps<'_> {
    pub fn coordinator(&mut self, by: usize) {
        if self.state.coordinators[by].phase != Phase::Serving {
            return;
        }
        let leased = self.model.leased(self.state, by);
        for session in 0..self.model.scope.scripts.len() {
            if leased {
                self.write(by, session);
            }
            self.finish_steps(by, session);
        }
        self.write_replies(by);
        if self.model.scope.reads && leased {
            self.reads(by);
        }
        self.send_stable(by);
    }

    /// Tables that some CPU uses, and whether they are the old ones.
    fn tables(&self, by: usize) -> impl Iterator<Item = (Tables, bool)> + use<> {
        let coordinator = &self.state.coordinators[by];
        [(coordinator.tables, false)].into_iter().chain(coordinator.old_tables.map(|old| (old, true)))
    }

    /// WRITE steps 1 and 4; all of them at once where the scope is coarse.
    fn write(&mut self, by: usize, session: usize) {
        let slot = self.state.coordinators[by].slots[session];
        let script = self.model.scope.scripts[session];
        let sent = (self.state.ghost.definite[session] + 1).min(script.len() as u8);
        if !slot.known {
            return;
        }
        for request in slot.request.max(1)..=sent {
            let op = Op { session: session as u8, request };
            let newer = request > slot.request || slot.stage == Stage::Idle;
            let again = self.model.is(Mutant::RetryIsNew) && slot.stage == Stage::Pending;
            if newer && slot.unresolved() {
                continue;
            }
            for (tables, old) in self.tables(by) {
                let action = Action::Write { by: by as u8, op, old };
                if newer || again {
                    let (kind, key) = self.model.scope.write_of(op);
                    let fine = self.model.scope.fine;
                    let model = self.model;
                    self.step(action, |next, goals| {
                        let seq = next.coordinators[by].clock;
                        next.coordinators[by].slots[session] =
                            Slot { known: true, request, stage: Stage::Starting, on_old: old, seq, ..Slot::default() };
                        if !fine && order(next, by, session, kind, key, model.is(Mutant::ResidualCount), goals) {
                            propagate(next, by, session, tables);
                        }
                    });
                } else if request == slot.request {
                    match slot.stage {
                        Stage::Pending => self.step(action, |next, _| send_write(next, by, session, tables)),
                        Stage::Committed => self.step(action, |next, goals| {
                            goals.reach(Goal::AnswerAgain);
                            answer(next, by, op, self.model.scope.write_of(op).1);
                        }),
                        Stage::Aborted => self.step(action, |next, goals| {
                            goals.reach(Goal::ToldAborted);
                            if !next.ghost.aborted.contains(&op) {
                                next.ghost.aborted.push(op);
                                next.ghost.aborted.sort();
                            }
                            next.ghost.definite[session] = next.ghost.definite[session].max(request);
                        }),
                        _ => {}
                    }
                }
            }
        }
    }

    /// Steps that a CPU is in the middle of.
    fn finish_steps(&mut self, by: usize, session: usize) {
        let coordinator = &self.state.coordinators[by];
        let slot = coordinator.slots[session];
        let op = Op { session: session as u8, request: slot.request };
        let (action_by, action_session) = (by as u8, session as u8);
        let finish_first = self.model.is(Mutant::FinishFirst);
        match slot.stage {
            Stage::Starting => {
                let (kind, key) = self.model.scope.write_of(op);
                let model = self.model;
                self.step(Action::Order { by: action_by, session: action_session }, |next, goals| {
                    order(next, by, session, kind, key, model.is(Mutant::ResidualCount), goals);
                });
            }
            Stage::Ordered => {
                let tables = coordinator.old_tables.filter(|_| slot.on_old).unwrap_or(coordinator.tables);
                self.step(Action::Propagate { by: action_by, session: action_session }, |next, _| {
                    propagate(next, by, session, tables)
                });
            }
            Stage::Committing => {
                let key = self.model.scope.write_of(op).1;
                let early = self.model.is(Mutant::ClearEarly);
                self.step(Action::ClearWay { by: action_by, session: action_session }, |next, _| {
                    clear_way(next, by, session, key, early);
                });
            }
            Stage::Cleared => {
                let key = self.model.scope.write_of(op).1;
                self.step(Action::Commit { by: action_by, session: action_session }, |next, _| {
                    next.coordinators[by].slots[session].stage = Stage::Committed;
                    answer(next, by, op, key);
                });
            }
            _ => {}
        }
        // Hole 12: a retransmission is answered before the way is cleared.
        if finish_first && slot.stage == Stage::Committing {
            let key = self.model.scope.write_of(op).1;
            self.step(Action::Write { by: action_by, op, old: false }, |next, _| answer(next, by, op, key));
        }
    }

    /// W_REPLY.
    fn write_replies(&mut self, by: usize) {
        let state = self.state;
        for message in &state.network {
            let &Message::WriteReply { tenure, epoch, from, op, seq, aborted, result } = message else { continue };
            let coordinator = &state.coordinators[by];
            let slot = coordinator.slots[op.session as usize];
            if tenure != coordinator.record.tenure || slot.stage != Stage::Pending || slot.seq != seq {
                continue;
            }
            for (tables, old) in self.tables(by) {
                if tables.must_ack & bit(from as usize) == 0
                    || epoch != tables.epoch && !self.model.is(Mutant::OldEpochReply)
                    || aborted && !self.model.is(Mutant::AbortedSetsBit)
                {
                    continue;
                }
                let model = self.model;
                self.step(Action::WriteReply { by: by as u8, from, op, seq, old }, |next, goals| {
                    let slot = &mut next.coordinators[by].slots[op.session as usize];
                    slot.acks |= if model.is(Mutant::CountAcks) || model.is(Mutant::ResidualCount) {
                        let missing = tables.must_ack & !slot.acks;
                        missing & missing.wrapping_neg()
                    } else {
                        bit(from as usize)
                    };
                    if !aborted {
                        slot.result = result;
                    }
                    if tables.must_ack & !slot.acks == 0 {
                        goals.reach(Goal::Commit);
                        slot.stage = Stage::Committing;
                        slot.on_old = old;
                        let (kind, key) = model.scope.write_of(op);
                        if kind != Kind::Put {
                            goals.reach(Goal::Conditional);
                        }
                        if by > 0 {
                            goals.reach(Goal::CommitAfterTakeOver);
                        }
                        let result = slot.result;
                        invariants::committed(next, by, key, Version { seq, op, content: result });
                        if !model.scope.fine {
                            clear_way(next, by, op.session as usize, key, model.is(Mutant::ClearEarly));
                            next.coordinators[by].slots[op.session as usize].stage = Stage::Committed;
                            answer(next, by, op, key);
                        }
                    }
                });
            }
        }
    }

    /// READ.
    fn reads(&mut self, by: usize) {
        let state = self.state;
        let coordinator = &state.coordinators[by];
        for key in 0..self.model.scope.keys {
            for (tables, old) in self.tables(by) {
                let bound = match coordinator.ways[key] {
                    Some(_) if self.model.is(Mutant::UncommittedRead) => u8::MAX,
                    Some(way) => way.committed.max(way.first - 1),
                    None if self.model.is(Mutant::LateRead) => u8::MAX,
                    None => coordinator.bucket_last.max(coordinator.floor),
                };
                let message = Message::Read {
                    tenure: coordinator.record.tenure,
                    epoch: tables.epoch,
                    to: tables.serving,
                    key: key as u8,
                    bound,
                    late: state.coordinators[by + 1..].iter().any(|later| later.phase == Phase::Serving),
                    atleast: state.ghost.known[key],
                };
                self.step(Action::RouteRead { by: by as u8, key: key as u8, old }, |next, _| {
                    send_read(next, message);
                });
            }
        }
    }

    /// A heartbeat's `stable`.
    fn send_stable(&mut self, by: usize) {
        if !self.model.scope.stable {
            return;
        }
        let coordinator = &self.state.coordinators[by];
        let unresolved = coordinator.slots.iter().filter(|slot| slot.unresolved());
        // A record that is starting may get any seq above the clock at which it started.
        let lowest = unresolved.map(|s| if s.stage == Stage::Starting { s.seq } else { s.seq - 1 }).min();
        let stable = lowest.unwrap_or(coordinator.clock);
        let message = Message::Stable { tenure: coordinator.record.tenure, epoch: coordinator.tables.epoch, stable };
        self.step(Action::SendStable { by: by as u8, stable }, |next, _| next.send(message));
    }
}

/// WRITE step 2. False: rejected.
fn order(
    next: &mut State,
    by: usize,
    session: usize,
    kind: Kind,
    key: usize,
    residual: bool,
    goals: &mut crate::state::Goals,
) -> bool {
    let coordinator = &mut next.coordinators[by];
    let conditional = kind != Kind::Put;
    if coordinator.ways[key].is_some_and(|way| way.exclusive || conditional) {
        coordinator.slots[session].stage = Stage::Idle;
        coordinator.slots[session].seq = 0;
        coordinator.slots[session].on_old = false;
        return false;
    }
    coordinator.clock += 1;
    let seq = coordinator.clock;
    coordinator.bucket_last = seq;
    let way = coordinator.ways[key].get_or_insert(Way { first: seq, ..Way::default() });
    if way.first != seq {
        goals.reach(Goal::Overtake);
    }
    if residual {
        let before = coordinator.slots.iter().filter(|slot| slot.stage == Stage::Pending).map(|slot| slot.acks).max();
        coordinator.slots[session].acks = before.unwrap_or(0);
    }
    way.last = seq;
    way.exclusive = conditional;
    let slot = &mut coordinator.slots[session];
    slot.seq = seq;
    slot.stage = Stage::Ordered;
    slot.below = seq <= next.ghost.known[key];
    true
}

/// WRITE steps 3 and 4.
fn propagate(next: &mut State, by: usize, session: usize, tables: Tables) {
    let slot = &mut next.coordinators[by].slots[session];
    slot.stage = Stage::Pending;
    slot.on_old = false;
    send_write(next, by, session, tables);
}

fn send_write(next: &mut State, by: usize, session: usize, tables: Tables) {
    let coordinator = &next.coordinators[by];
    let slot = coordinator.slots[session];
    let op = Op { session: session as u8, request: slot.request };
    let (tenure, Tables { epoch, must_ack: to, .. }) = (coordinator.record.tenure, tables);
    next.send(Message::Write { tenure, epoch, to, op, seq: slot.seq });
}

/// W_REPLY step 2.
pub(super) fn clear_way(next: &mut State, by: usize, session: usize, key: usize, early: bool) {
    let coordinator = &mut next.coordinators[by];
    let seq = coordinator.slots[session].seq;
    if let Some(way) = &mut coordinator.ways[key] {
        way.committed = way.committed.max(seq);
        if way.committed >= way.last || early {
            coordinator.ways[key] = None;
        }
    }
    coordinator.slots[session].stage = Stage::Cleared;
}

/// The client learns that its write is committed.
pub(super) fn answer(next: &mut State, by: usize, op: Op, key: usize) {
    let slot = &mut next.coordinators[by].slots[op.session as usize];
    slot.on_old = false;
    let seq = slot.seq;
    next.ghost.known[key] = next.ghost.known[key].max(seq);
    let definite = &mut next.ghost.definite[op.session as usize];
    *definite = (*definite).max(op.request);
}

/// The reader has one read under way. It may give it up for another at any time; more would show nothing else, since a read is
/// judged by what was known when it started, and that is a maximum of what single reads and writes made known.
fn send_read(next: &mut State, read: Message) {
    next.network.retain(|message| !matches!(message, Message::Read { .. }));
    next.send(read);
}
