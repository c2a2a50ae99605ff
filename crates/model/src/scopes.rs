//! The parts of the protocol that are explored, each with its bounds.

use crate::{
    mutants::Mutant,
    state::{
        Budget, Config, Coordinator, EPOCH_SHIFT, Goal, Kind, Mask, Message, Op, Phase, Record, Replica, Slot, Stage,
        State, Tables, Version, bit, each, insert, put,
    },
};

use Kind::{Delete, Incr, Put};

/// What a session writes, in order: kind and key.
pub type Script = &'static [(Kind, usize)];

/// Bounds, and the start.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// Name.
    pub name: &'static str,
    /// Replicas that are members at the start.
    pub members: Mask,
    /// All replicas.
    pub replicas: usize,
    /// Keys, all in one bucket.
    pub keys: usize,
    /// One for each session.
    pub scripts: &'static [Script],
    /// Reads, at any time.
    pub reads: bool,
    /// The steps of WRITE and W_REPLY are apart, not one.
    pub fine: bool,
    /// Heartbeats carry `stable`, at any time.
    pub stable: bool,
    /// Coordinators, one after the other.
    pub tenures: usize,
    /// Changes of members.
    pub changes: u8,
    /// Replicas that lose their data.
    pub crashes: u8,
    /// Repairs.
    pub repairs: u8,
    /// The coordinator's machine may be suspended, its clock with it: its own lease is worth nothing.
    pub suspended: bool,
    /// The member of this index is a learner at the start, just joined.
    pub learner: Option<usize>,
    /// At the start session 0 has had its first write, a PUT, committed: every active member holds it, and a late copy of
    /// it is still on its way.
    pub filled: bool,
    /// Every CPU changes its tables in the same moment.
    pub at_once: bool,
    /// What must happen in some run.
    pub goals: &'static [Goal],
}

const STEADY: Scope = Scope {
    name: "steady",
    members: 0b11,
    replicas: 2,
    keys: 1,
    scripts: &[&[(Put, 0), (Put, 0)], &[(Put, 0)]],
    reads: true,
    fine: true,
    stable: false,
    tenures: 1,
    changes: 0,
    crashes: 0,
    repairs: 0,
    suspended: false,
    learner: None,
    filled: false,
    at_once: false,
    goals: &[Goal::Commit, Goal::AnswerAgain, Goal::Read, Goal::ReadBelowPending, Goal::Overtake],
};

const COARSE: Scope = Scope { fine: false, goals: &[], ..STEADY };

/// Every scope of the short run, which CI makes.
pub const SHORT: &[Scope] = &[
    STEADY,
    Scope {
        name: "steady, conditional",
        scripts: &[&[(Incr, 0), (Incr, 0)], &[(Put, 0)]],
        goals: &[Goal::Conditional, Goal::AnswerAgain, Goal::Read],
        ..STEADY
    },
    Scope {
        name: "steady, two keys",
        keys: 2,
        scripts: &[&[(Put, 0)], &[(Put, 1)]],
        stable: true,
        goals: &[Goal::Commit, Goal::Read],
        ..STEADY
    },
    Scope {
        name: "three replicas",
        members: 0b111,
        replicas: 3,
        scripts: &[&[(Put, 0)], &[(Put, 0)]],
        goals: &[Goal::Overtake, Goal::ReadBelowPending],
        ..COARSE
    },
    Scope {
        name: "removal",
        changes: 1,
        scripts: &[&[(Put, 0)], &[(Incr, 0)]],
        goals: &[Goal::Removed, Goal::Read, Goal::Conditional],
        ..COARSE
    },
    Scope {
        name: "join",
        members: 0b01,
        learner: Some(1),
        filled: true,
        changes: 1,
        scripts: &[&[(Put, 0), (Put, 0)], &[(Incr, 0)]],
        goals: &[Goal::Promoted, Goal::Read],
        ..COARSE
    },
    Scope {
        name: "join, tombstone",
        members: 0b01,
        learner: Some(1),
        changes: 1,
        at_once: true,
        scripts: &[&[(Put, 0), (Delete, 0)]],
        stable: true,
        reads: false,
        goals: &[Goal::Promoted, Goal::TombstoneDropped],
        ..COARSE
    },
    Scope {
        name: "rejoin, tombstone",
        filled: true,
        members: 0b01,
        changes: 2,
        at_once: true,
        scripts: &[&[(Put, 0), (Delete, 0)]],
        stable: true,
        reads: false,
        goals: &[Goal::Promoted, Goal::TombstoneDropped],
        ..COARSE
    },
    Scope {
        name: "take-over",
        tenures: 2,
        scripts: &[&[(Put, 0)], &[(Incr, 0), (Incr, 0)]],
        goals: &[
            Goal::ServeAtOnce,
            Goal::ServeAfterWait,
            Goal::Pull,
            Goal::ReadAfterTakeOver,
            Goal::CommitAfterTakeOver,
        ],
        ..COARSE
    },
    Scope {
        name: "take-over, tombstone",
        tenures: 2,
        scripts: &[&[(Put, 0), (Delete, 0)]],
        stable: true,
        reads: false,
        goals: &[Goal::Pull, Goal::TombstoneDropped, Goal::CommitAfterTakeOver],
        ..COARSE
    },
    Scope {
        name: "take-over twice",
        tenures: 3,
        scripts: &[&[(Incr, 0)]],
        goals: &[Goal::ServeAtOnce, Goal::ServeAfterWait, Goal::Pull],
        ..COARSE
    },
    Scope {
        name: "take-over in a removal",
        tenures: 2,
        changes: 1,
        scripts: &[&[(Put, 0)]],
        goals: &[Goal::ServeAtOnce, Goal::ServeAfterWait, Goal::Removed],
        ..COARSE
    },
    Scope {
        name: "take-over in a join",
        members: 0b01,
        learner: Some(1),
        tenures: 2,
        at_once: true,
        changes: 1,
        scripts: &[&[(Put, 0), (Put, 0)]],
        filled: true,
        goals: &[Goal::ServeAtOnce, Goal::ServeAfterWait],
        ..COARSE
    },
    Scope {
        name: "suspended coordinator",
        tenures: 2,
        suspended: true,
        scripts: &[&[(Put, 0), (Put, 0)]],
        goals: &[Goal::ServeAtOnce, Goal::ServeAfterWait, Goal::CommitAfterTakeOver],
        ..COARSE
    },
    Scope {
        name: "repair",
        repairs: 2,
        scripts: &[&[(Put, 0)], &[(Put, 0)]],
        goals: &[Goal::Abort, Goal::Repaired, Goal::ToldAborted],
        ..COARSE
    },
    Scope {
        name: "repair, conditional",
        repairs: 2,
        scripts: &[&[(Incr, 0)], &[(Incr, 0)]],
        goals: &[Goal::Abort, Goal::Repaired, Goal::ToldAborted],
        ..COARSE
    },
    Scope {
        name: "repair in a removal",
        repairs: 2,
        changes: 1,
        scripts: &[&[(Put, 0)]],
        goals: &[Goal::Abort, Goal::Repaired, Goal::ToldAborted],
        ..COARSE
    },
    Scope {
        name: "take-over in a repair",
        repairs: 1,
        tenures: 2,
        filled: true,
        scripts: &[&[(Put, 0), (Put, 0)]],
        goals: &[Goal::Abort, Goal::AbortSpread],
        ..COARSE
    },
    Scope {
        name: "join, donor lost",
        members: 0b011,
        replicas: 3,
        learner: Some(2),
        at_once: true,
        changes: 1,
        scripts: &[&[(Put, 0)]],
        reads: false,
        goals: &[Goal::Promoted],
        ..COARSE
    },
];

/// Scopes too large for every run.
pub const LONG: &[Scope] = &[
    Scope {
        name: "rejoin",
        changes: 3,
        filled: true,
        at_once: true,
        scripts: &[&[(Put, 0), (Incr, 0)]],
        goals: &[Goal::Promoted, Goal::Removed, Goal::ReadFromPromoted],
        ..COARSE
    },
    Scope {
        name: "repair in a removal of three",
        members: 0b111,
        replicas: 3,
        repairs: 2,
        changes: 1,
        at_once: true,
        scripts: &[&[(Put, 0)]],
        reads: false,
        goals: &[Goal::Abort, Goal::Repaired, Goal::ToldAborted],
        ..COARSE
    },
    Scope {
        name: "repair in a rejoin",
        repairs: 1,
        changes: 3,
        at_once: true,
        scripts: &[&[(Put, 0)]],
        reads: false,
        goals: &[Goal::Abort, Goal::Repaired, Goal::ToldAborted, Goal::Promoted],
        ..COARSE
    },
    Scope {
        name: "take-over twice in a repair",
        repairs: 1,
        tenures: 3,
        filled: true,
        scripts: &[&[(Put, 0), (Put, 0)]],
        reads: false,
        goals: &[Goal::Abort, Goal::AbortSpread, Goal::ToldAborted],
        ..COARSE
    },
];

impl Scope {
    /// Kind and key of a write.
    pub fn write_of(&self, op: Op) -> (Kind, usize) {
        self.scripts[op.session as usize][op.request as usize - 1]
    }

    /// The start: one coordinator serves, under epoch 1.
    pub fn initial(&self) -> State {
        let mut record = Config { epoch: 1, tenure: 1, active: self.members, settled: true, ..Config::default() };
        let learner = self.learner.map_or(0, bit);
        for r in each(self.members | learner) {
            record.lives[r] = 1;
        }
        let config = Config { settled: false, ..record };
        let mut replicas: Vec<Replica> = (0..self.replicas).map(|_| Replica::new(1)).collect();
        for r in each(self.members | learner) {
            replicas[r].config = config;
            replicas[r].joined = 1;
        }
        let clock = 1 << EPOCH_SHIFT;
        let mut coordinator = Coordinator {
            phase: Phase::Serving,
            record,
            tables: Tables { epoch: 1, must_ack: record.members(), serving: self.members },
            clock,
            floor: clock,
            ..Coordinator::default()
        };
        for slot in &mut coordinator.slots[..self.scripts.len()] {
            *slot = Slot { known: true, ..Slot::default() };
        }
        let mut state = State { record, replicas, ..State::default() };
        if self.filled {
            let op = Op { session: 0, request: 1 };
            let version = Version { seq: clock, op, content: put(op) };
            for r in each(self.members) {
                insert(&mut state.replicas[r].chains[0], version);
                state.replicas[r].records[0] =
                    Record { request: 1, seq: clock, aborted: false, result: version.content };
            }
            let stage = Stage::Committed;
            coordinator.slots[0] =
                Slot { known: true, request: 1, stage, seq: clock, result: version.content, ..Slot::default() };
            coordinator.bucket_last = clock;
            insert(&mut state.ghost.history[0], version);
            state.ghost.known[0] = clock;
            state.ghost.definite[0] = 1;
            // Also to a replica that is no member any more: it may come back.
            let to = (bit(self.replicas) - 1) & !learner;
            state.send(Message::Write { tenure: 1, epoch: 1, to, op, seq: clock });
        }
        state.coordinators.push(coordinator);
        state.budget = Budget { changes: self.changes, crashes: self.crashes, repairs: self.repairs };
        state
    }
}

/// The scope that catches each mutant.
pub const CAUGHT: &[(Mutant, &str)] = &[
    (Mutant::CountAcks, "steady"),
    (Mutant::ResidualCount, "three replicas"),
    (Mutant::UncommittedRead, "steady"),
    (Mutant::LateRead, "steady"),
    (Mutant::ClearEarly, "steady"),
    (Mutant::RetryIsNew, "steady, conditional"),
    (Mutant::LostClone, "repair"),
    (Mutant::ForgottenDirtySet, "take-over"),
    (Mutant::TwoCoordinators, "take-over"),
    (Mutant::FinishFirst, "steady"),
    (Mutant::IgnoredLoser, "steady"),
    (Mutant::ForgottenAbort, "repair"),
    (Mutant::AbortNotSpread, "take-over twice in a repair"),
    (Mutant::OldBits, "rejoin"),
    (Mutant::OldEpochReply, "rejoin"),
    (Mutant::PullWithoutRecord, "take-over"),
    (Mutant::RecordsLast, "join"),
    (Mutant::ConvergeIgnoresRecords, "take-over"),
    (Mutant::RecordIsEnough, "join, tombstone"),
    (Mutant::HalfLearner, "take-over in a join"),
    (Mutant::OneStepSwitch, "removal"),
    (Mutant::ChangeDonor, "join, donor lost"),
    (Mutant::PullBelowStable, "take-over, tombstone"),
    (Mutant::AbortOverPending, "repair"),
    (Mutant::AbortEarly, "take-over in a repair"),
    (Mutant::AbortFreesWay, "repair"),
    (Mutant::AbortedIsProcessed, "repair in a removal of three"),
    (Mutant::AbortedSetsBit, "repair"),
    (Mutant::AnswersOutliveEpoch, "repair in a rejoin"),
    (Mutant::SkipWaitUnsettled, "take-over in a removal"),
    (Mutant::LeaseOfActive, "take-over in a join"),
    (Mutant::LeaseIgnored, "take-over"),
    (Mutant::DelayedGrant, "suspended coordinator"),
    (Mutant::EchoAtOnce, "suspended coordinator"),
    (Mutant::OldEpochWrite, "rejoin, tombstone"),
    (Mutant::OldEpochPull, "repair in a removal"),
];

/// Rules that the model shows to follow from the others, with the scope that was explored without them.
pub const REDUNDANT: &[(Mutant, &str)] = &[
    // A DELETE waits at a learner for the chain of its key, so what is copied late is never older than a dropped tombstone.
    (Mutant::TombstoneDropped, "rejoin, tombstone"),
    (Mutant::TombstoneDropped, "join, tombstone"),
];
