//! One rule relaxed at a time. Each must be caught in the scope that `scopes::CAUGHT` names.

/// A relaxed rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// Hole 1: W_REPLYs are counted.
    CountAcks,
    /// Hole 2: the count of a key's pending write goes on with the next one.
    ResidualCount,
    /// Hole 3: a dirty key's newest version is read.
    UncommittedRead,
    /// Hole 4: a read routed while its key was clean has no bound.
    LateRead,
    /// Hole 5: any commit clears the way.
    ClearEarly,
    /// Hole 7: a retransmission is ordered again.
    RetryIsNew,
    /// Hole 8: no repair of stuck writes.
    LostClone,
    /// Hole 9: a coordinator starts empty while replicas differ.
    ForgottenDirtySet,
    /// Hole 10: a new coordinator serves at once.
    TwoCoordinators,
    /// Hole 12: committed before the dirty set says so.
    FinishFirst,
    /// Hole 13: an older PUT is acknowledged and not kept.
    IgnoredLoser,
    /// Hole 14: an abort is not recorded at the members.
    ForgottenAbort,
    /// Hole 14: a take-over prefers an aborted record to nothing, and nothing to an aborted record: it leaves them as they are.
    AbortNotSpread,
    /// Hole 15: bits of an index stay when it is given to another life.
    OldBits,
    /// Hole 15: a W_REPLY of an older epoch counts.
    OldEpochReply,
    /// Hole 16: a pulled version comes without its record.
    PullWithoutRecord,
    /// Hole 16: a learner's chains come without their records, and records after all chains.
    RecordsLast,
    /// Hole 16: convergence compares versions only, and a pulled version's record comes later.
    ConvergeIgnoresRecords,
    /// Hole 17: a take-over counts learners as members with data.
    HalfLearner,
    /// Section 7: `must_ack` changes in one step.
    OneStepSwitch,
    /// Section 7: a learner goes on with another donor.
    ChangeDonor,
    /// Section 7: a puller takes versions up to its own `stable`.
    PullBelowStable,
    /// Section 7: a write is aborted while a lower one of its key is unresolved.
    AbortOverPending,
    /// Section 7: aborted as soon as one member recorded it.
    AbortEarly,
    /// Section 7: an abort frees the way.
    AbortFreesWay,
    /// Section 7: a member that recorded an abort counts as one that processed the write.
    AbortedIsProcessed,
    /// Section 3: a reply with status ABORTED sets a bit.
    AbortedSetsBit,
    /// Section 7: answers about a stuck write outlive their epoch.
    AnswersOutliveEpoch,
    /// Section 7: rule (a) without the condition on `settled`.
    SkipWaitUnsettled,
    /// Section 7: the coordinator's lease is of active members only.
    LeaseOfActive,
    /// Section 7: the coordinator does not look at its lease.
    LeaseIgnored,
    /// Section 7: a replica's lease counts from the receipt of the grant.
    DelayedGrant,
    /// Section 7: a stamp is echoed before all members answered a heartbeat sent after it came.
    EchoAtOnce,
    /// Hole 25: a learner acknowledges a write of which it has copied the record alone.
    RecordIsEnough,
    /// Section 4: a learner drops tombstones that are stable.
    TombstoneDropped,
    /// Section 7: a life takes packets of epochs before it joined.
    OldEpochWrite,
    /// Section 7: a chain pulled in an earlier epoch is taken.
    OldEpochPull,
}
