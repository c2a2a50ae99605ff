//! What the model's world consists of.

use std::ops::BitOrAssign;

use crate::invariants::Invariant;

/// A set of replicas, sessions or keys, by index.
pub type Mask = u8;
/// A sequence number: `epoch << EPOCH_SHIFT` and a counter, one word.
pub type Seq = u8;
/// Bits of a sequence number that count writes.
pub const EPOCH_SHIFT: u8 = 4;
/// Most replicas of a scope.
pub const REPLICAS: usize = 3;
/// Most keys of a scope; all in one bucket.
pub const KEYS: usize = 2;
/// Most sessions of a scope.
pub const SESSIONS: usize = 3;
/// Most coordinators, one for each tenure, of a scope.
pub const TENURES: usize = 3;

/// Bit of one index.
pub fn bit(index: usize) -> Mask {
    1 << index
}

/// Indices in a mask.
pub fn each(mask: Mask) -> impl Iterator<Item = usize> {
    (0..8).filter(move |&index| mask & bit(index) != 0)
}

/// Kind of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Stores a value that no other write stores.
    Put,
    /// Conditional: stores what it finds plus one, and tells it.
    Incr,
    /// Conditional: stores a tombstone.
    Delete,
}

/// A (session, request); requests count from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Op {
    /// Session.
    pub session: u8,
    /// Request number.
    pub request: u8,
}

/// A version of a key. Content 0 is a tombstone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// Its write's sequence number.
    pub seq: Seq,
    /// Its write.
    pub op: Op,
    /// What is stored.
    pub content: u8,
}

/// What a PUT stores: the low bits count increments since.
pub fn put(op: Op) -> u8 {
    (1 + 4 * op.session + op.request) << 3
}

/// Versions of a key by ascending seq.
pub type Chain = Vec<Version>;

/// Inserts a version where it belongs.
pub fn insert(chain: &mut Chain, version: Version) {
    if let Err(at) = chain.binary_search_by_key(&version.seq, |held| held.seq) {
        chain.insert(at, version);
    }
}

/// The last write of a session that a replica processed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Record {
    /// Request; 0: none.
    pub request: u8,
    /// Its sequence number.
    pub seq: Seq,
    /// It is recorded as without effect.
    pub aborted: bool,
    /// Content that it stored.
    pub result: u8,
}

/// What the authority holds, and a configuration as replicas are told of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Config {
    /// Epoch.
    pub epoch: u8,
    /// Epoch of the take-over.
    pub tenure: u8,
    /// Life of each member; 0: no member.
    pub lives: [u8; REPLICAS],
    /// Active members; the others are learners.
    pub active: Mask,
    /// No table anywhere is older (always false in what replicas are told).
    pub settled: bool,
}

impl Config {
    /// All members.
    pub fn members(&self) -> Mask {
        (0..REPLICAS).filter(|&r| self.lives[r] != 0).map(bit).sum()
    }
}

/// One replica's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Replica {
    /// Incarnation.
    pub life: u8,
    /// Configuration that it obeys; epoch 0: none.
    pub config: Config,
    /// Epoch of the first configuration of this tenure that named this life.
    pub joined: u8,
    /// Writes up to here are resolved everywhere.
    pub stable: Seq,
    /// Versions by key.
    pub chains: [Chain; KEYS],
    /// Records by session.
    pub records: [Record; SESSIONS],
    /// Requests, by session, of which no copy is taken; 0: none.
    pub frozen: [u8; SESSIONS],
    /// As a learner: the member it copies from, and its life. Life 0: it does not copy.
    pub donor: (u8, u8),
    /// As a learner: session records are copied.
    pub records_copied: bool,
    /// As a learner: keys whose chain is copied.
    pub keys_copied: Mask,
    /// Ghost: highest committed seq held in this life, by key.
    pub newest: [Seq; KEYS],
}

impl Replica {
    /// An empty process.
    pub fn new(life: u8) -> Self {
        Self { life, ..Self::default() }
    }

    /// Has it copied everything?
    pub fn complete(&self, keys: usize) -> bool {
        self.records_copied && self.keys_copied == bit(keys) - 1
    }

    /// Is it a member, but not an active one?
    pub fn learns(&self, r: usize) -> bool {
        self.config.epoch != 0 && self.config.active & bit(r) == 0
    }
}

/// What the CPUs of a coordinator act under.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tables {
    /// Epoch.
    pub epoch: u8,
    /// Who must acknowledge.
    pub must_ack: Mask,
    /// Who answers reads.
    pub serving: Mask,
}

/// A way of the dirty set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Way {
    /// Made the key dirty.
    pub first: Seq,
    /// Highest pending.
    pub last: Seq,
    /// Highest committed since.
    pub committed: Seq,
    /// The pending write is conditional.
    pub exclusive: bool,
}

/// State of a session's record at the coordinator; the steps between the named ones are states too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Nothing under way.
    #[default]
    Idle,
    /// WRITE step 1 done.
    Starting,
    /// WRITE step 2 done.
    Ordered,
    /// WRITE step 3 done.
    Pending,
    /// W_REPLY step 1 done.
    Committing,
    /// W_REPLY step 2 done.
    Cleared,
    /// Committed.
    Committed,
    /// Without effect.
    Aborted,
}

/// A session's record at the coordinator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Slot {
    /// The session is known here.
    pub known: bool,
    /// Request.
    pub request: u8,
    /// How far it is.
    pub stage: Stage,
    /// The CPU that is at it acts under [`Coordinator::old_tables`].
    pub on_old: bool,
    /// Sequence number; while starting, the clock.
    pub seq: Seq,
    /// Who acknowledged.
    pub acks: Mask,
    /// Outcome.
    pub result: u8,
    /// Ghost: when it was ordered, something above it was known. Then it must never commit.
    pub below: bool,
}

impl Slot {
    /// Is a CPU between two steps of it?
    pub fn in_flight(&self) -> bool {
        matches!(self.stage, Stage::Starting | Stage::Ordered | Stage::Committing | Stage::Cleared)
    }

    /// Starting, pending or committing.
    pub fn unresolved(&self) -> bool {
        self.in_flight() || self.stage == Stage::Pending
    }
}

/// Repair of a stuck write, and what its members answered in `epoch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Repair {
    /// The write.
    pub op: Op,
    /// Its sequence number.
    pub seq: Seq,
    /// Answers count in this epoch.
    pub epoch: u8,
    /// Members that processed it.
    pub processed: Mask,
    /// Members that had not, and froze it.
    pub absent: Mask,
    /// Members that recorded it as aborted.
    pub aborted: Mask,
    /// They are told to.
    pub aborting: bool,
    /// Outcome.
    pub result: u8,
}

/// How far a change of members is; the numbers are those of protocol.md.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Change {
    /// None under way.
    #[default]
    None,
    /// Recorded (1); the member that was added.
    Recorded(Option<u8>),
    /// Some CPU uses the union (4).
    Union,
    /// Some CPU uses the new `must_ack` alone (4).
    New,
}

/// How far a coordinator is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    /// It has claimed the record.
    #[default]
    Claimed,
    /// Its tables are rebuilt.
    Rebuilt,
    /// It serves.
    Serving,
}

/// A coordinator of one tenure. One that takes no step is a dead one: crashes need no action of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Coordinator {
    /// How far it is.
    pub phase: Phase,
    /// It lost a race for the record: no further change.
    pub stepped_down: bool,
    /// Its record, as it wrote it last.
    pub record: Config,
    /// Members of its first record that confirmed it.
    pub confirmed: Mask,
    /// The wait of rule (b) has begun, and is over.
    pub wait: (bool, bool),
    /// By later tenure: members that answered a heartbeat sent after that tenure's wait began.
    pub heard: [Mask; TENURES],
    /// By later tenure: members whose clock stamp, made after that wait began, is here.
    pub stamps: [Mask; TENURES],
    /// By later tenure: members that were granted a lease from such a stamp.
    pub grants: [Mask; TENURES],
    /// What the CPUs act under.
    pub tables: Tables,
    /// What some of them still act under.
    pub old_tables: Option<Tables>,
    /// Change under way.
    pub change: Change,
    /// Learners whose donor was removed before they had copied everything: they must start over.
    pub spoiled: Mask,
    /// Clock.
    pub clock: Seq,
    /// Clock at the take-over.
    pub floor: Seq,
    /// Highest seq ordered through the bucket.
    pub bucket_last: Seq,
    /// Dirty set.
    pub ways: [Option<Way>; KEYS],
    /// Sessions.
    pub slots: [Slot; SESSIONS],
    /// Repair under way.
    pub repair: Option<Repair>,
}

impl Coordinator {
    /// Everyone that may have to acknowledge.
    pub fn must_ack(&self) -> Mask {
        self.tables.must_ack | self.old_tables.map_or(0, |old| old.must_ack)
    }
}

/// A datagram. What was sent may arrive any number of times, in any order, or never.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "their fields are what the protocol calls them")]
pub enum Message {
    /// To the replicas of a configuration.
    Install(Config),
    /// A read routed to any of `to`. Ghost: it may not return less than `atleast`; a later tenure served already.
    Read { tenure: u8, epoch: u8, to: Mask, key: u8, bound: Seq, late: bool, atleast: Seq },
    /// A write to each of `to`.
    Write { tenure: u8, epoch: u8, to: Mask, op: Op, seq: Seq },
    /// Its acknowledgement.
    WriteReply { tenure: u8, epoch: u8, from: u8, op: Op, seq: Seq, aborted: bool, result: u8 },
    /// A heartbeat's `stable`.
    Stable { tenure: u8, epoch: u8, stable: Seq },
    /// Record a write as aborted.
    Abort { tenure: u8, epoch: u8, op: Op, seq: Seq },
    /// A chain, and the records that wrote its versions, for a member that lacks them.
    Pulled { tenure: u8, epoch: u8, to: u8, key: u8, chain: Chain, records: [Record; SESSIONS] },
    /// A donor's records for a learner.
    CopiedRecords { to: u8, life: u8, records: [Record; SESSIONS] },
    /// A donor's chain for a learner.
    CopiedChain { to: u8, life: u8, key: u8, chain: Chain, records: [Record; SESSIONS] },
}

/// What only the observer knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ghost {
    /// Committed versions, by key.
    pub history: [Chain; KEYS],
    /// What a read that starts now may not be older than, by key.
    pub known: [Seq; KEYS],
    /// Requests with an outcome that the client may know, by session: it may send the next.
    pub definite: [u8; SESSIONS],
    /// Writes that a client was told are aborted.
    pub aborted: Vec<Op>,
    /// A step broke this.
    pub broken: Option<Invariant>,
}

/// What is left of the scope's bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Changes of members.
    pub changes: u8,
    /// Crashes of replicas.
    pub crashes: u8,
    /// Repairs.
    pub repairs: u8,
}

/// A state of the whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct State {
    /// The authority's record.
    pub record: Config,
    /// Coordinators by tenure.
    pub coordinators: Vec<Coordinator>,
    /// Replicas.
    pub replicas: Vec<Replica>,
    /// Everything sent, sorted.
    pub network: Vec<Message>,
    /// Ghost.
    pub ghost: Ghost,
    /// Bounds.
    pub budget: Budget,
}

impl State {
    /// Sends a message.
    pub fn send(&mut self, message: Message) {
        if let Err(at) = self.network.binary_search(&message) {
            self.network.insert(at, message);
        }
    }

    /// Notes a broken invariant; the first counts.
    pub fn broken(&mut self, invariant: Invariant) {
        self.ghost.broken.get_or_insert(invariant);
    }
}

/// Something that a scope must be able to do, or the search would prove nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Goal {
    /// A write is committed by its acknowledgements.
    Commit,
    /// A retransmission is answered from the session's record.
    AnswerAgain,
    /// A read returns a value.
    Read,
    /// A read of a dirty key returns a value below a pending one.
    ReadBelowPending,
    /// A second write of a key overtakes the first.
    Overtake,
    /// A conditional write is committed.
    Conditional,
    /// A member is removed and the change complete.
    Removed,
    /// A learner is active and the change complete.
    Promoted,
    /// A read is answered by a replica in its second life or later.
    ReadFromPromoted,
    /// A new coordinator serves by rule (a).
    ServeAtOnce,
    /// A new coordinator serves by rule (b).
    ServeAfterWait,
    /// A read is answered in a later tenure.
    ReadAfterTakeOver,
    /// A write is committed in a later tenure.
    CommitAfterTakeOver,
    /// A member takes a pulled version that it lacked.
    Pull,
    /// A repair ends in an abort.
    Abort,
    /// A repair ends in a commit.
    Repaired,
    /// A client learns that its write is aborted.
    ToldAborted,
    /// A tombstone is dropped.
    TombstoneDropped,
    /// A take-over records an abort that was half done.
    AbortSpread,
}

/// A set of goals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Goals(u32);

impl Goals {
    /// Adds one.
    pub fn reach(&mut self, goal: Goal) {
        self.0 |= 1 << goal as u8;
    }

    /// Is it in there?
    pub fn has(&self, goal: Goal) -> bool {
        self.0 & 1 << goal as u8 != 0
    }
}

impl BitOrAssign for Goals {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}
