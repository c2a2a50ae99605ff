//! The replica: holds every item of one shard in versions, applies ordered writes, answers reads straight to the client.
//!
//! [`Replica::handle`] takes one datagram in a buffer, and leaves its answer in that buffer; [`Replica::control`] takes those
//! that agents and other replicas send; [`Replica::tick`] asks again what was not answered. [`Replica::step`] is all of it, for
//! whoever wants values in and values out.
//!
//! Expiry is judged by the `time` of the packet at hand. The replica's own clock is passed in, in milliseconds, monotonic; it
//! bears on its lease, and on when to ask again.
//!
//! # Threads
//!
//! Every function takes `&self`, so several threads may drive one replica. A datagram is then handled as if alone:
//!
//! - The **role** (configuration, lease, session table) is read-locked for as long as a datagram is handled. INSTALL takes it
//!   for writing, so no write of the old tenure is half way when a new coordinator collects what is held.
//! - A write holds its **session's record** from the claim until the outcome is recorded (protocol.md, section 3, "one
//!   atomic claim"). A duplicate on another thread waits, then finds the request recorded and acknowledges it. A version
//!   and the record of its writer thus come into being together, or not at all when there is no room.
//! - Within that, the **key's shard** is locked while the version is stored. Two writes of different sessions on one key meet
//!   there and there alone; their order is that of their seqs, not of the lock.
//! - A read locks its key's shard only. `stable` is kept in each shard, under its lock: a bound raised to the very `stable` by
//!   which that shard was pruned never asks for a version that is gone. Shards raised a moment later answer with an older
//!   `stable`, which is as right: the bound in the packet alone makes a read linearizable.
//!
//! Locks are always taken in the order role, session's record, key shard, and never two of a kind, so there is no deadlock. Two
//! more are held while no other is asked for: the one of what is being fetched, and the one of the places that pages were cut
//! at.
//!
//! A version above `stable` goes out together with its writer's record though these are read one after the other: the version
//! first, then the record, whose lock the writer holds until both are there. If the record is of a later write by then, this one
//! was resolved.

mod chain;
mod donate;
mod fetch;
mod install;
mod repair;
mod sessions;
mod store;

#[cfg(test)]
mod tests;

use std::{
    cmp::Ordering,
    sync::{
        Mutex, RwLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

pub use self::{
    chain::CHAIN_MAX,
    install::{Note, SESSIONS_MAX},
    sessions::SessionRecord,
    store::Usage,
};
use self::{
    donate::Cuts,
    fetch::Fetching,
    install::Role,
    store::{Refused, Store},
};
use crate::{
    control::{ClusterKey, Copying},
    wire::{
        DATAGRAM_MAX, Endpoint, HEADER_LEN, Header, KEY_MAX, Kind, Op, Operand, PAYLOAD_MAX, Packet, Reason, SessionId,
        Status, WireError,
    },
};

/// What a replica is given at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This life of the replica: never 0, never used before.
    pub incarnation: u64,
    /// Memory for keys, values, versions and their table, in bytes. The session table is extra: 72 bytes for each session.
    pub budget_bytes: u64,
    /// Items copied a second at most when it is filled; 0: as fast as it goes.
    pub copy_rate: u32,
    /// Independently locked parts of the store: a power of two up to 512.
    pub key_shards: usize,
    /// Secret key of the hash table.
    pub hash_key: [u8; 16],
    /// Seals messages between agents and replicas.
    pub cluster_key: ClusterKey,
}

impl Settings {
    /// Settings for tests and simulation: few key shards and a hash key that is no secret.
    pub fn simulated(incarnation: u64, budget_bytes: u64) -> Self {
        let (hash_key, cluster_key) = (*b"not a secret key", ClusterKey::default());
        Self { incarnation, budget_bytes, copy_rate: 0, key_shards: 4, hash_key, cluster_key }
    }
}

/// What published protocols do instead of a rule of this one, one switch each; for tests that show what it costs.
#[cfg(feature = "published")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Published {
    /// Holes 3 and 4: a read is answered with the newest version, whatever its bound.
    pub ignore_bound: bool,
    /// Hole 7: a write that was processed before is processed again.
    pub forget_sessions: bool,
    /// Hole 13: a PUT older than the newest version is acknowledged without being kept.
    pub ignore_loser: bool,
    /// Hole 16: versions are copied without the records of their writers, and session records not at all.
    pub copy_no_records: bool,
    /// Hole 10: packets of any epoch and of any coordinator are obeyed.
    pub accept_old_tenure: bool,
    /// Hole 10: reads are answered without a lease.
    pub ignore_lease: bool,
    /// Hole 14: nothing is frozen, and a late copy of an aborted write is processed.
    pub no_freeze: bool,
    /// Hole 14: a copy of an aborted write is acknowledged as processed.
    pub abort_is_processed: bool,
    /// Hole 25: a learner acknowledges a write of which it has copied the record, and not yet the version.
    pub record_is_enough: bool,
    /// A learner drops tombstones when they are stable, so that a chain copied late brings an item back.
    pub learner_drops_tombstones: bool,
    /// A pulled version is stored even if `stable` says that a newer one has replaced it.
    pub pull_ignores_stable: bool,
    /// A learner executes a conditional write on a chain that it has not copied.
    pub execute_uncopied: bool,
    /// Hole 17: a learner takes part as active though it has not copied everything.
    pub half_learner: bool,
    /// A packet to the life before, which was a member of this tenure at the same address, is taken.
    pub accept_former_life: bool,
}

/// Why a datagram got no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Drop {
    /// Shorter than its header, or lengths that disagree.
    Truncated,
    /// Longer than a packet may be.
    TooLong,
    /// Not a packet of this protocol.
    Magic,
    /// A version that this build does not speak.
    Version,
    /// An operation that is unknown, or that nobody sends to a replica.
    Op,
    /// A write of another epoch, or before any.
    Epoch,
    /// A write that is not from the epoch's coordinator.
    NotCoordinator,
    /// A write of a shard that this replica does not serve.
    Shard,
    /// A write whose session is not in the table.
    Session,
    /// A write older than the last of its session.
    Old,
    /// A new write that `stable` says is resolved, or whose seq another one has.
    Resolved,
    /// A write of unknown kind.
    Kind,
    /// A key length that is not 1 to 250.
    KeyLength,
    /// A value shorter than its kind needs.
    ValueLength,
    /// An answer to an address that is not IPv4, or to port 0.
    ReplyAddress,
    /// A message for agents and replicas alone, without the seal of the cluster's key.
    Unsealed,
    /// A copy of a write that waits for its fate.
    Frozen,
    /// A conditional write on a key that is not copied yet, while no more can wait.
    Uncopied,
    /// FETCHED that was not asked for, or not any more.
    Unasked,
    /// FETCHED for which there is no room: it is asked for again.
    NoRoom,
}

impl Drop {
    const ALL: [(Self, &'static str); 20] = [
        (Self::Truncated, "truncated"),
        (Self::TooLong, "too_long"),
        (Self::Magic, "magic"),
        (Self::Version, "version"),
        (Self::Op, "op"),
        (Self::Epoch, "epoch"),
        (Self::NotCoordinator, "not_coordinator"),
        (Self::Shard, "shard"),
        (Self::Session, "session"),
        (Self::Old, "old"),
        (Self::Resolved, "resolved"),
        (Self::Kind, "kind"),
        (Self::KeyLength, "key_length"),
        (Self::ValueLength, "value_length"),
        (Self::ReplyAddress, "reply_address"),
        (Self::Unsealed, "unsealed"),
        (Self::Frozen, "frozen"),
        (Self::Uncopied, "uncopied"),
        (Self::Unasked, "unasked"),
        (Self::NoRoom, "no_room"),
    ];
}

/// What became of a datagram: exactly one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// A read answered with an item.
    Read,
    /// A read answered with NOT_FOUND.
    ReadNotFound,
    /// A write applied and acknowledged.
    Write(Kind),
    /// A write acknowledged as recorded before.
    WriteAgain,
    /// An INSTALL obeyed, now or before.
    Install,
    /// An INSTALL refused, or one that asked for the incarnation.
    InstallRefused,
    /// A HEARTBEAT obeyed.
    Heartbeat,
    /// Everything given up, as an INSTALL ordered.
    Reset,
    /// A COLLECT answered.
    Collect,
    /// A PULL obeyed.
    Pull,
    /// A FETCH answered.
    Fetch,
    /// A FETCHED stored.
    Fetched,
    /// A QUERY or ABORT answered.
    Answer,
    /// A LOCATE answered.
    Located,
    /// A conditional write that waits for its key's chain.
    Parked,
    /// R_REJECT.
    ReadReject(Reason),
    /// W_REJECT.
    WriteReject(Reason),
    /// CONTROL_REJECT.
    ControlReject(Reason),
    /// No answer.
    Drop(Drop),
}

/// Counts without a reason or a kind.
const PLAIN: usize = 14;
const KINDS: usize = Kind::ALL.len();
const REASONS: usize = Reason::ALL.len() + 1;

impl Count {
    /// Number of different counts.
    pub const LEN: usize = PLAIN + KINDS + 3 * REASONS + Drop::ALL.len();

    /// Place of the count in an array of [`Count::LEN`].
    pub fn index(self) -> usize {
        match self {
            Self::Read => 0,
            Self::ReadNotFound => 1,
            Self::WriteAgain => 2,
            Self::Install => 3,
            Self::InstallRefused => 4,
            Self::Heartbeat => 5,
            Self::Reset => 6,
            Self::Collect => 7,
            Self::Pull => 8,
            Self::Fetch => 9,
            Self::Fetched => 10,
            Self::Answer => 11,
            Self::Located => 12,
            Self::Parked => 13,
            Self::Write(kind) => PLAIN + kind as usize,
            Self::ReadReject(reason) => PLAIN + KINDS + reason as usize,
            Self::WriteReject(reason) => PLAIN + KINDS + REASONS + reason as usize,
            Self::ControlReject(reason) => PLAIN + KINDS + 2 * REASONS + reason as usize,
            Self::Drop(reason) => PLAIN + KINDS + 3 * REASONS + reason as usize,
        }
    }

    /// Every count with its name.
    pub fn all() -> impl Iterator<Item = (Self, String)> {
        let plain = [
            (Self::Read, "read"),
            (Self::ReadNotFound, "read_not_found"),
            (Self::WriteAgain, "write_again"),
            (Self::Install, "install"),
            (Self::InstallRefused, "install_refused"),
            (Self::Heartbeat, "heartbeat"),
            (Self::Reset, "reset"),
            (Self::Collect, "collect"),
            (Self::Pull, "pull"),
            (Self::Fetch, "fetch"),
            (Self::Fetched, "fetched"),
            (Self::Answer, "answer"),
            (Self::Located, "located"),
            (Self::Parked, "parked"),
        ];
        let name = |reason: &Reason| snake_case(&format!("{reason:?}"));
        plain
            .into_iter()
            .map(|(count, name)| (count, name.to_owned()))
            .chain(Kind::ALL.iter().map(|&kind| (Self::Write(kind), format!("write_{kind}"))))
            .chain(Reason::ALL.iter().map(move |r| (Self::ReadReject(*r), format!("read_reject_{}", name(r)))))
            .chain(Reason::ALL.iter().map(move |r| (Self::WriteReject(*r), format!("write_reject_{}", name(r)))))
            .chain(Reason::ALL.iter().map(move |r| (Self::ControlReject(*r), format!("control_reject_{}", name(r)))))
            .chain(Drop::ALL.into_iter().map(|(reason, name)| (Self::Drop(reason), format!("drop_{name}"))))
    }
}

/// `DirtyFull` as `dirty_full`.
fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}

/// What to do with a datagram that was handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Dropped(Drop),
    /// Send the first `len` bytes of the buffer from the replica's own address.
    Answer {
        /// Destination.
        to: Endpoint,
        /// Bytes.
        len: usize,
        /// What it is.
        count: Count,
    },
    /// Not touched: it is for [`Replica::control`].
    Control,
    /// Kept until the chain of its key is here, which [`Replica::tick`] asks for at once.
    Parked,
}

/// Something that happens to a replica.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A datagram came in.
    Datagram {
        /// Its source.
        from: Endpoint,
        /// Its bytes.
        bytes: &'a [u8],
    },
}

/// What a replica wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a datagram from the replica's own address.
    Send {
        /// Destination.
        to: Endpoint,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// Count what became of the datagram.
    Count(Count),
    /// Tell the operator.
    Note(Note),
}

/// One key and its versions, newest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemDump {
    /// Key.
    pub key: Vec<u8>,
    /// Versions, newest first.
    pub versions: Vec<VersionDump>,
}

/// One version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionDump {
    /// The write that stored it.
    pub seq: u64,
    /// The last write that changed the content.
    pub cas: u64,
    /// When it expires, in milliseconds of packet time; 0: never.
    pub expiry: u64,
    /// The item's data; `None`: a tombstone.
    pub data: Option<Vec<u8>>,
}

/// All that a replica knows: two that hold the same have equal dumps, up to `index`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dump {
    /// Epoch it takes part in; 0: none.
    pub epoch: u32,
    /// Its member index.
    pub index: u8,
    /// Every write up to here is resolved.
    pub stable: u64,
    /// Keys in their order.
    pub items: Vec<ItemDump>,
    /// Session records in use, by index.
    pub sessions: Vec<(u16, SessionRecord)>,
}

/// The part that a replica takes in its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Shard.
    pub shard: u32,
    /// Epoch.
    pub epoch: u32,
    /// Member index.
    pub index: u8,
    /// The epoch's coordinator.
    pub coordinator: Endpoint,
    /// The epoch at which that coordinator took over.
    pub tenure: u32,
    /// Whether it may answer reads, given a lease.
    pub active: bool,
    /// End of its lease by its own clock; 0: none yet.
    pub lease_until_ms: u64,
}

/// A replica of one shard.
pub struct Replica {
    /// Changed while the role is locked for writing.
    incarnation: AtomicU64,
    cluster_key: ClusterKey,
    copy_rate: u32,
    role: RwLock<Option<Role>>,
    store: Store,
    /// The highest `stable` heard; each key shard has the one by which it was pruned.
    stable: AtomicU64,
    /// The latest packet time seen.
    time: AtomicU64,
    fetching: Mutex<Fetching>,
    cuts: Mutex<Cuts>,
    /// Published behaviours switched in.
    #[cfg(feature = "published")]
    pub published: Published,
}

impl Replica {
    /// An empty replica that takes part in nothing until an INSTALL.
    ///
    /// # Panics
    /// If the incarnation is 0 or the number of key shards is not a power of two up to 512.
    pub fn new(settings: Settings) -> Self {
        assert_ne!(settings.incarnation, 0, "incarnation 0 means unknown");
        Self {
            incarnation: AtomicU64::new(settings.incarnation),
            cluster_key: settings.cluster_key,
            copy_rate: settings.copy_rate,
            role: RwLock::new(None),
            store: Store::new(settings.key_shards, settings.hash_key, settings.budget_bytes),
            stable: AtomicU64::new(0),
            time: AtomicU64::new(0),
            fetching: Mutex::default(),
            cuts: Mutex::default(),
            #[cfg(feature = "published")]
            published: Published::default(),
        }
    }

    /// Handles one event.
    pub fn step(&self, now_ms: u64, event: Event<'_>) -> Vec<Action> {
        let Event::Datagram { from, bytes } = event;
        if is_control(bytes) {
            return self.control(now_ms, from, bytes);
        }
        if bytes.len() > DATAGRAM_MAX {
            return vec![Action::Count(Count::Drop(Drop::TooLong))];
        }
        let mut buffer = [0; DATAGRAM_MAX];
        buffer[..bytes.len()].copy_from_slice(bytes);
        match self.handle(now_ms, from, &mut buffer, bytes.len()) {
            Verdict::Parked => [vec![Action::Count(Count::Parked)], self.tick(now_ms)].concat(),
            verdict => actions(verdict, &buffer),
        }
    }

    /// Handles the datagram in the first `len` bytes of `buffer`, and turns it into its answer in place. Neither allocates
    /// nor blocks on a read, but for a key shard's lock.
    ///
    /// # Panics
    /// If the buffer is shorter than [`DATAGRAM_MAX`] or `len` is not within it.
    pub fn handle(&self, now_ms: u64, from: Endpoint, buffer: &mut [u8], len: usize) -> Verdict {
        assert!(buffer.len() >= DATAGRAM_MAX, "a buffer of {} bytes has no room for an answer", buffer.len());
        let packet = match Packet::parse(&buffer[..len]) {
            Ok(packet) => packet,
            Err(error) => {
                return Verdict::Dropped(match error {
                    WireError::Truncated => Drop::Truncated,
                    WireError::Magic => Drop::Magic,
                    WireError::Version(_) => Drop::Version,
                    WireError::Op(_) => Drop::Op,
                });
            }
        };
        let header = packet.header;
        if header.op.is_control() {
            return Verdict::Control;
        }
        if len > DATAGRAM_MAX {
            return Verdict::Dropped(Drop::TooLong);
        }
        match header.op {
            Op::Read => self.read(now_ms, from, header, buffer),
            Op::Write => self.write(from, header, buffer),
            _ => Verdict::Dropped(Drop::Op),
        }
    }

    /// READ at a replica.
    fn read(&self, now_ms: u64, from: Endpoint, mut header: Header, buffer: &mut [u8]) -> Verdict {
        let role = self.role.read().expect("a thread panicked while it installed an epoch");
        let Some(role) = &*role else {
            return reject(Op::RReject, Reason::Epoch, 0, from, header, buffer);
        };
        if header.shard != role.shard {
            return reject(Op::RReject, Reason::Shard, role.epoch, from, header, buffer);
        }
        let takes = self.takes(role, header.epoch);
        if from != role.coordinator && !self.accepts_old_tenure() {
            let reason = if takes { Reason::NotCoordinator } else { Reason::Epoch };
            return reject(Op::RReject, reason, role.epoch, from, header, buffer);
        }
        // What our coordinator passes on came from the client, and a reject goes back there. To anybody else's word of a
        // reply address nothing is sent.
        let Some(to) = header.reply_to().filter(|to| to.port != 0) else {
            return Verdict::Dropped(Drop::ReplyAddress);
        };
        let key_len = usize::from(header.key_len);
        let reason = if !takes {
            Some(Reason::Epoch)
        } else if !self.has_lease(role, now_ms) {
            Some(Reason::Lease)
        } else if key_len == 0 || key_len > KEY_MAX {
            Some(Reason::KeyLength)
        } else if header.value_len != 0 {
            Some(Reason::ValueLength)
        } else {
            None
        };
        if let Some(reason) = reason {
            return reject(Op::RReject, reason, role.epoch, to, header, buffer);
        }

        let (front, value) = buffer.split_at_mut(HEADER_LEN + key_len);
        let bound = self.bound(&header);
        let found = self.store.read(&front[HEADER_LEN..], bound, header.time, &mut value[..PAYLOAD_MAX - key_len]);
        let (status, cas, value_len) = match found {
            Some((cas, len)) => (Status::Ok, cas, len),
            None => (Status::NotFound, 0, 0),
        };
        header.op = Op::RReply;
        header.status = status.to_wire();
        header.cnt = role.index;
        header.seq = cas;
        header.value_len = value_len as u32;
        header.emit(front);
        let count = if status == Status::Ok { Count::Read } else { Count::ReadNotFound };
        Verdict::Answer { to, len: header.datagram_len(), count }
    }

    /// Whether packets of this epoch are obeyed: those of the present coordinator are, however late.
    fn takes(&self, role: &Role, epoch: u32) -> bool {
        let first = self.first_epoch(role);
        epoch.wrapping_sub(first) <= role.epoch - first || self.accepts_old_tenure()
    }

    fn first_epoch(&self, role: &Role) -> u32 {
        #[cfg(feature = "published")]
        if self.published.accept_former_life {
            return role.tenure;
        }
        role.first
    }

    fn accepts_old_tenure(&self) -> bool {
        #[cfg(feature = "published")]
        return self.published.accept_old_tenure;
        #[cfg(not(feature = "published"))]
        false
    }

    /// Whether reads may be answered now. A learner's never are: it has not all that is committed.
    fn has_lease(&self, role: &Role, now_ms: u64) -> bool {
        #[cfg(feature = "published")]
        if self.published.ignore_lease {
            return true;
        }
        now_ms < role.lease_until_ms.load(Relaxed) && !role.learner
    }

    fn bound(&self, header: &Header) -> u64 {
        #[cfg(feature = "published")]
        if self.published.ignore_bound {
            return u64::MAX;
        }
        header.seq
    }

    /// WRITE at a replica.
    fn write(&self, from: Endpoint, mut header: Header, buffer: &mut [u8]) -> Verdict {
        let role = self.role.read().expect("a thread panicked while it installed an epoch");
        let Some(role) = &*role else { return Verdict::Dropped(Drop::Epoch) };
        if header.shard != role.shard {
            return Verdict::Dropped(Drop::Shard);
        }
        if !self.takes(role, header.epoch) {
            return Verdict::Dropped(Drop::Epoch);
        }
        if from != role.coordinator && !self.accepts_old_tenure() {
            return Verdict::Dropped(Drop::NotCoordinator);
        }
        self.see_time(header.time);
        let key_len = usize::from(header.key_len);
        if key_len == 0 || key_len > KEY_MAX {
            return Verdict::Dropped(Drop::KeyLength);
        }
        let Some(kind) = Kind::from_wire(header.kind) else { return Verdict::Dropped(Drop::Kind) };
        let (key, value) = buffer[HEADER_LEN..HEADER_LEN + key_len + header.value_len as usize].split_at(key_len);
        let Some(operand) = Operand::parse(kind, header.flags, value) else {
            return Verdict::Dropped(Drop::ValueLength);
        };
        if header.session.generation() == 0 {
            return Verdict::Dropped(Drop::Session);
        }

        // The claim: the record stays locked until it says what became of the write.
        let Some(mut slot) = role.sessions.lock(header.session.index()) else {
            return Verdict::Dropped(Drop::Session);
        };
        let order = self.compare(role, &slot.record, header.session, header.request);
        #[cfg(feature = "published")]
        let order = if self.forgets(&slot.record, &header) { Ordering::Greater } else { order };
        let count = match order {
            Ordering::Less => return Verdict::Dropped(Drop::Old),
            Ordering::Equal => Count::WriteAgain,
            Ordering::Greater => {
                if slot.frozen == (header.session, header.request) {
                    return Verdict::Dropped(Drop::Frozen);
                }
                let applied = self.store.write(
                    kind,
                    key,
                    &operand,
                    header.seq,
                    header.time,
                    header.session.index(),
                    role.learner && self.lacks_chains(role),
                    #[cfg(feature = "published")]
                    self.published.ignore_loser,
                );
                match applied {
                    Ok((status, result)) => slot.set(SessionRecord {
                        session: header.session,
                        request: header.request,
                        seq: header.seq,
                        status: status.to_wire(),
                        kind: header.kind,
                        result,
                        token: header.token,
                        client: header.reply_to().unwrap_or(SessionRecord::default().client),
                    }),
                    Err(Refused::Resolved) => return Verdict::Dropped(Drop::Resolved),
                    Err(Refused::Session) => return Verdict::Dropped(Drop::Session),
                    Err(Refused::Uncopied) => return self.park(from, &header, buffer),
                    Err(Refused::Full) => {
                        // Not definite: the write is pending at the coordinator, and its retransmission may find room.
                        return match header.reply_to().filter(|to| to.port != 0) {
                            Some(to) => reject(Op::WReject, Reason::StoreFull, role.epoch, to, header, buffer),
                            None => Verdict::Dropped(Drop::ReplyAddress),
                        };
                    }
                }
                Count::Write(kind)
            }
        };
        let SessionRecord { seq, status, result, .. } = slot.record;

        header.op = Op::WReply;
        header.status = self.acknowledged(status);
        header.cnt = role.index;
        header.seq = seq;
        let value_len = if kind == Kind::Incr { 8 } else { 0 };
        header.value_len = value_len as u32;
        header.emit(buffer);
        buffer[HEADER_LEN + key_len..HEADER_LEN + key_len + value_len]
            .copy_from_slice(&result.to_be_bytes()[..value_len]);
        Verdict::Answer { to: from, len: header.datagram_len(), count }
    }

    fn acknowledged(&self, status: u8) -> u8 {
        #[cfg(feature = "published")]
        if self.published.abort_is_processed && status == Status::Aborted.to_wire() {
            return Status::Ok.to_wire();
        }
        status
    }

    /// Whether a learner may meet keys whose chain is still at the donor.
    fn lacks_chains(&self, role: &Role) -> bool {
        #[cfg(feature = "published")]
        if self.published.execute_uncopied {
            return false;
        }
        !role.copied.load(Relaxed)
    }

    /// Time is stamped in milliseconds, so this seldom writes.
    fn see_time(&self, time: u64) {
        if time > self.time.load(Relaxed) {
            self.time.fetch_max(time, Relaxed);
        }
    }

    /// How a write compares with what was processed.
    fn compare(&self, role: &Role, record: &SessionRecord, session: SessionId, request: u64) -> Ordering {
        match record.compare(session, request) {
            Ordering::Equal if self.lacks_version(role, record) => Ordering::Greater,
            order => order,
        }
    }

    /// Whether a learner has copied this record before the version that goes with it: nothing is processed by that (hole 25).
    /// What is above `stable` is never dropped.
    fn lacks_version(&self, role: &Role, record: &SessionRecord) -> bool {
        #[cfg(feature = "published")]
        if self.published.record_is_enough {
            return false;
        }
        role.learner
            && !role.copied.load(Relaxed)
            && !record.is_aborted()
            && record.seq > self.stable()
            && self.store.key_of(record.seq).is_none()
    }

    #[cfg(feature = "published")]
    fn forgets(&self, record: &SessionRecord, header: &Header) -> bool {
        let aborted = record.is_aborted() && record.seq == header.seq;
        self.published.forget_sessions || self.published.no_freeze && aborted
    }

    /// This life of the replica.
    pub fn incarnation(&self) -> u64 {
        self.incarnation.load(Relaxed)
    }

    /// The part it takes, if any.
    pub fn membership(&self) -> Option<Membership> {
        let role = self.role.read().expect("a thread panicked while it installed an epoch");
        let role = role.as_ref()?;
        Some(Membership {
            shard: role.shard,
            epoch: role.epoch,
            index: role.index,
            coordinator: role.coordinator,
            tenure: role.tenure,
            active: !role.learner,
            lease_until_ms: role.lease_until_ms.load(Relaxed),
        })
    }

    /// How far it is with copying; `None` if it was not told to copy.
    pub fn copying(&self) -> Option<Copying> {
        self.fetching().copying()
    }

    /// Every write up to here is resolved on every member.
    pub fn stable(&self) -> u64 {
        self.stable.load(Relaxed)
    }

    /// What the store holds.
    pub fn usage(&self) -> Usage {
        self.store.usage()
    }

    /// Everything it knows, for tests, invariants and comparison. Consistent only while nobody else drives the replica.
    pub fn dump(&self) -> Dump {
        let role = self.role.read().expect("a thread panicked while it installed an epoch");
        let role = role.as_ref();
        Dump {
            epoch: role.map_or(0, |role| role.epoch),
            index: role.map_or(0, |role| role.index),
            stable: self.stable(),
            items: self.store.dump(),
            sessions: role.map_or(Vec::new(), |role| role.sessions.records(0).collect()),
        }
    }

    /// Compares the running totals of [`Replica::usage`] with a count of what is there.
    ///
    /// # Panics
    /// If they differ.
    pub fn assert_accounts(&self) {
        let usage = self.usage();
        let counted = self.store.recount();
        assert_eq!(
            (usage.items, usage.versions, usage.used_bytes),
            counted,
            "(items, versions, bytes): kept and recounted"
        );
    }
}

/// Whether the bytes are a control packet's.
fn is_control(bytes: &[u8]) -> bool {
    Packet::parse(bytes).is_ok_and(|packet| packet.header.op.is_control())
}

/// What was decided of a datagram, as values.
fn actions(verdict: Verdict, buffer: &[u8]) -> Vec<Action> {
    match verdict {
        Verdict::Dropped(reason) => vec![Action::Count(Count::Drop(reason))],
        Verdict::Answer { to, len, count } => {
            vec![Action::Count(count), Action::Send { to, bytes: buffer[..len].to_vec() }]
        }
        Verdict::Parked => vec![Action::Count(Count::Parked)],
        Verdict::Control => unreachable!("control packets are not passed on as data"),
    }
}

/// Turns a request into a reject with the replica's epoch. The value is cut off: no larger than what it answers.
fn reject(op: Op, reason: Reason, epoch: u32, to: Endpoint, mut header: Header, buffer: &mut [u8]) -> Verdict {
    header.op = op;
    header.status = reason.to_wire();
    header.epoch = epoch;
    // The key is echoed as far as it is one.
    header.key_len = header.key_len.min(KEY_MAX as u16);
    header.value_len = 0;
    header.emit(buffer);
    let count = if op == Op::RReject { Count::ReadReject(reason) } else { Count::WriteReject(reason) };
    Verdict::Answer { to, len: header.datagram_len(), count }
}
