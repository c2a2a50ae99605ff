//! Everything that can happen.

mod change;
mod coordinator;
mod repair;
mod replica;
mod takeover;

use crate::{
    Model,
    state::{Goals, Op, Seq, Stage, State, TENURES, bit, each},
};

/// What happened. Coordinators are named by their index, in order of tenures; `old`: on a CPU that uses the old tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is a step of the protocol by its name there")]
pub enum Action {
    Start,
    // Section 3.
    Write { by: u8, op: Op, old: bool },
    Order { by: u8, session: u8 },
    Propagate { by: u8, session: u8 },
    WriteReply { by: u8, from: u8, op: Op, seq: Seq, old: bool },
    ClearWay { by: u8, session: u8 },
    Commit { by: u8, session: u8 },
    RouteRead { by: u8, key: u8, old: bool },
    AnswerRead { replica: u8, key: u8, bound: Seq, got: Seq },
    Process { replica: u8, op: Op, seq: Seq },
    SendStable { by: u8, stable: Seq },
    TakeStable { replica: u8, stable: Seq },
    // Section 7, replicas and leases.
    Crash { replica: u8 },
    Install { replica: u8, epoch: u8 },
    Heartbeat { by: u8, replica: u8 },
    Grant { by: u8, replica: u8 },
    // Section 7, change of members.
    Add { by: u8, replica: u8 },
    Remove { by: u8, replica: u8 },
    Promote { by: u8, replica: u8 },
    UseUnion { by: u8 },
    UseNew { by: u8 },
    EveryCpu { by: u8 },
    Settle { by: u8 },
    StartCopy { by: u8, replica: u8, donor: u8 },
    SendRecords { to: u8 },
    SendChain { to: u8, key: u8 },
    TakeRecords { replica: u8 },
    TakeChain { replica: u8, key: u8 },
    // Section 7, coordinator lost.
    Claim { epoch: u8 },
    Confirm { by: u8, replica: u8 },
    WaitOver { by: u8 },
    SendPulled { from: u8, to: u8, key: u8 },
    TakePulled { replica: u8, key: u8 },
    SpreadAbort { by: u8, replica: u8, session: u8 },
    Rebuild { by: u8 },
    Serve { by: u8 },
    // Section 7, stuck write.
    StartRepair { by: u8, op: Op },
    Ask { by: u8, replica: u8 },
    OrderAbort { by: u8 },
    RecordAbort { replica: u8, op: Op },
    SettleCommitted { by: u8 },
    SettleAborted { by: u8 },
}

/// Collects what can happen in one state.
pub(crate) struct Steps<'a> {
    pub model: &'a Model,
    pub state: &'a State,
    pub out: &'a mut Vec<(Action, State)>,
    pub goals: &'a mut Goals,
}

impl Steps<'_> {
    /// A step: what it does to a copy of the state.
    pub fn step(&mut self, action: Action, effect: impl FnOnce(&mut State, &mut Goals)) {
        let mut next = self.state.clone();
        effect(&mut next, self.goals);
        forget_dead(&mut next);
        note_newest(&mut next);
        if next != *self.state {
            self.out.push((action, next));
        }
    }
}

pub(crate) fn successors(model: &Model, state: &State, out: &mut Vec<(Action, State)>, goals: &mut Goals) {
    let mut steps = Steps { model, state, out, goals };
    for by in 0..state.coordinators.len() {
        steps.coordinator(by);
        steps.change(by);
        steps.takeover(by);
        steps.repair(by);
    }
    steps.claim();
    for replica in 0..state.replicas.len() {
        steps.replica(replica);
    }
}

impl Model {
    /// May coordinator `by` act, by its lease? Members' answers to heartbeats sent before a later tenure's wait began are worth
    /// nothing once that wait is over.
    pub(crate) fn leased(&self, state: &State, by: usize) -> bool {
        let coordinator = &state.coordinators[by];
        // A suspended machine's clock stands still: its lease never ends.
        if self.scope.suspended || self.is(crate::mutants::Mutant::LeaseIgnored) {
            return true;
        }
        let members = if self.is(crate::mutants::Mutant::LeaseOfActive) {
            coordinator.tables.serving
        } else {
            coordinator.must_ack()
        };
        (by + 1..state.coordinators.len())
            .all(|later| !state.coordinators[later].wait.1 || members & !coordinator.heard[later] == 0)
    }
}

/// Drops messages that can have no effect in any future, so that states which differ in them alone are one.
fn forget_dead(state: &mut State) {
    use crate::state::Message::*;
    let (replicas, coordinators) = (&state.replicas, &state.coordinators);
    // Tenures only grow at a life, and the next life starts in none: but a tenure is left for good once the record is.
    let left = |tenure: u8, to: u8| each(to).all(|r| replicas.get(r).is_none_or(|r| r.config.tenure > tenure));
    let everyone = bit(replicas.len()) - 1;
    state.network.retain(|message| match message {
        Read { tenure, to, .. } => !left(*tenure, *to),
        Write { tenure, to, .. } => !left(*tenure, *to),
        WriteReply { tenure, op, seq, .. } => coordinators.iter().any(|c| {
            let slot = &c.slots[op.session as usize];
            c.record.tenure == *tenure && slot.stage == Stage::Pending && slot.seq == *seq
        }),
        Install(config) => !left(config.tenure, config.members()),
        Stable { tenure, .. } | Abort { tenure, .. } => !left(*tenure, everyone),
        Pulled { tenure, to, .. } => !left(*tenure, bit(*to as usize)),
        CopiedRecords { to, life, .. } => {
            let replica = &replicas[*to as usize];
            replica.life == *life && !replica.records_copied
        }
        CopiedChain { to, life, key, .. } => {
            let replica = &replicas[*to as usize];
            replica.life == *life && replica.keys_copied & bit(*key as usize) == 0
        }
    });
}

/// Ghost: the newest committed version that each replica has held.
fn note_newest(state: &mut State) {
    for replica in &mut state.replicas {
        for (key, chain) in replica.chains.iter().enumerate() {
            let committed = &state.ghost.history[key];
            let held = chain.iter().rev().find(|v| committed.binary_search_by_key(&v.seq, |c| c.seq).is_ok());
            replica.newest[key] = replica.newest[key].max(held.map_or(0, |v| v.seq));
        }
    }
}

const _: () = assert!(TENURES <= 3);
