//! The coordinator: orders writes, collects acknowledgements, routes reads. Holds no values.
//!
//! [`Coordinator::step`] takes one datagram and says what becomes of it. Its tables are the very structures of the kernel
//! program (`abi.h`), so that the two can be compared word by word.
//!
//! A packet is handled in the critical sections of `docs/protocol.md`, section 3, one after the other. `step` runs them all;
//! [`Coordinator::begin`] and [`Coordinator::resume`] run one at a time, so that tests can interleave packets on several CPUs
//! in every way that the locks allow.

pub mod hash;
mod tables;

use underpass_abi::abi::{
    self, UP_BUCKET_DIRTY, UP_BUCKET_LAST_SHIFT, UP_EXCLUSIVE_FIXED, UP_EXCLUSIVE_NOT, UP_EXCLUSIVE_OPEN,
    UP_SHARD_SLOTS, up_bucket, up_config, up_session, up_shard, up_way,
};

use crate::agent::Settlement;
use crate::wire::{
    DATAGRAM_MAX, Endpoint, HEADER_LEN, Header, KEY_MAX, Kind, Op, Operand, Packet, Reason, SessionId, Status,
};

/// A counter of [`Coordinator::counters`], as `enum up_count`.
pub type Count = u32;

/// Sizes and secrets of the tables.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Buckets of each shard slot: a power of two.
    pub buckets: u32,
    /// Sessions: a power of two, at most 65536.
    pub sessions: u32,
    /// Key of the bucket hash.
    pub bucket_key: [u32; 64],
    /// Key of the fingerprint.
    pub fingerprint_key: [u64; 2],
}

/// What becomes of a datagram. The payload behind the header stays as it is but where said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing; the counter says why.
    Drop(Count),
    /// For the agent.
    Control,
    /// Send to one member: a routed read.
    ToMember {
        /// Member index.
        index: u8,
        /// Its address.
        to: Endpoint,
        /// New header.
        header: Header,
    },
    /// Send to every member of `must_ack` of the header's shard, `cnt` set to the member's index.
    ToMembers {
        /// New header.
        header: Header,
    },
    /// Send to the client: the reply of a committed write.
    ToClient {
        /// The client.
        to: Endpoint,
        /// New header.
        header: Header,
    },
    /// Send back to where the datagram came from: a reject, or an answer from the session's record.
    ToSender {
        /// New header.
        header: Header,
        /// What the first 8 bytes of the value become, if given.
        result: Option<u64>,
    },
}

/// A packet between two of its critical sections.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// Handled.
    Done(Action),
    /// WRITE step 2 is next.
    Order(Ordering),
    /// WRITE step 2 refused: the session goes back to idle next.
    Refuse(Ordering, Reason),
    /// A conditional write is ordered: its time is fixed next, under its bucket's lock.
    Fix(Ordering),
    /// WRITE step 3 is next.
    Record(Ordering),
    /// W_REPLY step 2 is next.
    Clear(Deciding),
    /// W_REPLY step 3 is next.
    Finish(Deciding),
    /// The published design's read looks at the dirty set next, with a bound taken before (hole 11).
    #[cfg(feature = "published")]
    LateLook(Ordering),
    /// A read that found its key clean takes its bound next.
    #[cfg(feature = "published")]
    LateBound(Ordering),
    /// What [`Coordinator::begin_settle`] began is done; nothing is sent.
    Settled,
}

/// A write being ordered.
#[derive(Clone, Copy, Debug)]
pub struct Ordering {
    header: Header,
    fingerprint: [u64; 2],
    bucket: u32,
    seq: u64,
    time: u64,
}

/// What decides the end of a write: a reply that completes its acknowledgements, or a settlement.
#[derive(Clone, Copy, Debug)]
pub struct Deciding {
    fingerprint: [u64; 2],
    bucket: u32,
    session: SessionId,
    seq: u64,
    /// The record's state in the end.
    state: u32,
    /// The reply, which goes on to the client; none of a settlement.
    reply: Option<Header>,
}

/// What published protocols do instead of a rule of this one, one switch each; for tests that show what it costs.
#[cfg(feature = "published")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Published {
    /// Holes 1 and 2: replies are counted, whoever sent them.
    pub count_acks: bool,
    /// Hole 2: the count is kept for the key and goes on when a later write supersedes an earlier one.
    pub residual_count: bool,
    /// Hole 3: a read of a dirty key may see the pending write.
    pub uncommitted_read: bool,
    /// Hole 4: a read of a clean key carries no bound.
    pub late_read: bool,
    /// Hole 5: a commit clears the key although a later write is pending.
    pub clear_early: bool,
    /// Hole 6: one key may be in two slots.
    pub two_slots: bool,
    /// A draft of ours: a conditional write may be pending together with others of its key.
    pub shared_conditional: bool,
    /// Hole 7: a retransmitted write is a new write.
    pub retry_is_new: bool,
    /// Hole 11: a read takes its bound before it looks at the dirty set.
    pub bound_first: bool,
    /// Hole 11, the other way round: a read takes its bound after it found the key clean.
    pub look_first: bool,
    /// Hole 12: the record says committed before the dirty set does.
    pub finish_first: bool,
    /// Hole 15: a member's bits stay in the records when its index is given away.
    pub keep_bits: bool,
    /// Hole 10: packets are handled after the lease's end.
    pub no_lease_check: bool,
    /// Hole 15: a W_REPLY of any epoch counts.
    pub any_epoch_ack: bool,
    /// Hole 14: a W_REPLY with status ABORTED counts.
    pub count_aborted_ack: bool,
    /// A draft of ours: an aborted write's key stays dirty.
    pub abort_keeps_way: bool,
    /// Hole 9: a new epoch does not raise the clock.
    pub keep_clock: bool,
    /// Hole 22: a read beside a pending conditional write is stamped as it comes.
    pub read_stamped_freely: bool,
    /// Hole 23: a session that a take-over rebuilt takes new writes.
    pub rebuilt_take_new: bool,
}

/// How a session is closed, or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseOutcome {
    /// Closed; its last request and that one's state.
    Closed {
        /// Number.
        request: u64,
        /// `enum up_state`.
        state: u32,
    },
    /// The record holds another session, or was used since.
    NotYours,
    /// Its write is starting, pending or committing.
    Unresolved,
}

/// What a scan of a shard's session records tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Every write of the shard up to here is resolved on every member.
    pub stable: u64,
    /// Records starting, pending or committing.
    pub unresolved: u32,
}

/// The coordinator's tables.
#[derive(Clone)]
pub struct Coordinator {
    settings: Settings,
    shards: Vec<up_shard>,
    sessions: Vec<up_session>,
    buckets: Vec<up_bucket>,
    words: Vec<u64>,
    counters: abi::up_counters,
    #[cfg(feature = "published")]
    /// Published behaviours switched in.
    pub published: Published,
}

impl Coordinator {
    /// Empty tables.
    ///
    /// # Panics
    /// If `buckets` or `sessions` is not a power of two, or sessions are more than an index can tell.
    pub fn new(settings: Settings) -> Self {
        assert!(settings.buckets.is_power_of_two(), "buckets must be a power of two");
        assert!(settings.sessions.is_power_of_two() && settings.sessions <= 1 << 16, "sessions must be a power of two");
        let buckets = settings.buckets as usize * UP_SHARD_SLOTS as usize;
        Self {
            shards: vec![up_shard::default(); UP_SHARD_SLOTS as usize],
            sessions: vec![up_session::default(); settings.sessions as usize],
            buckets: vec![up_bucket::default(); buckets],
            words: vec![0; buckets],
            counters: abi::up_counters::default(),
            settings,
            #[cfg(feature = "published")]
            published: Published::default(),
        }
    }

    /// Makes `config` the active configuration of its shard. A higher epoch raises the clock. When the shard was not served
    /// before, the clock then is the floor; while it is, the floor stays, for the tables know what was ordered since.
    /// What `config.floor` says is not looked at.
    pub fn configure(&mut self, config: &up_config) {
        let clock = self.clock_for(config.shard, config.epoch);
        let floor = self.config(config.shard).map_or(clock, |before| before.floor);
        let shard = &mut self.shards[slot(config.shard)];
        shard.clock = clock;
        let inactive = 1 - shard.active as usize;
        shard.config[inactive] = up_config { floor, ..*config };
        shard.active = inactive as u32;
    }

    /// What the clock of a shard will be once it is configured under `epoch`.
    pub fn clock_for(&self, shard: u32, epoch: u32) -> u64 {
        #[cfg(feature = "published")]
        if self.published.keep_clock {
            return self.shards[slot(shard)].clock;
        }
        self.shards[slot(shard)].clock.max(u64::from(epoch) << underpass_abi::wire::UP_EPOCH_SHIFT)
    }

    /// The active configuration of a shard.
    pub fn config(&self, shard: u32) -> Option<&up_config> {
        let slot = &self.shards[slot(shard)];
        let config = &slot.config[slot.active as usize];
        (config.epoch != 0 && config.shard == shard).then_some(config)
    }

    /// Members that a write of this shard goes to, with their addresses.
    pub fn must_ack(&self, shard: u32) -> impl Iterator<Item = (u8, Endpoint)> + '_ {
        self.config(shard).into_iter().flat_map(|config| {
            config.must_ack_list[..usize::from(config.must_ack_count)].iter().map(|&i| (i, member(config, i)))
        })
    }

    /// Gives a session to a client. False: the record holds another session, or the index is beyond the table.
    pub fn open_session(&mut self, now_ms: u64, session: SessionId, shard: u32, token: u64, to: Endpoint) -> bool {
        let Some(record) = self.sessions.get_mut(usize::from(session.index())) else { return false };
        if record.session == session.0 {
            return true;
        }
        if record.session != 0 {
            return false;
        }
        *record = opened(now_ms, session, shard, token, to);
        true
    }

    /// Takes a session away, unless its write is unresolved or it was used at or after `used_before_ms`.
    pub fn close_session(&mut self, session: SessionId, used_before_ms: u64) -> CloseOutcome {
        let Some(record) = self.sessions.get_mut(usize::from(session.index())) else { return CloseOutcome::NotYours };
        if session.0 == 0 || record.session != session.0 || record.used_ms >= used_before_ms {
            return CloseOutcome::NotYours;
        }
        if unresolved(record.state) {
            return CloseOutcome::Unresolved;
        }
        let outcome = CloseOutcome::Closed { request: record.request, state: u32::from(record.state) };
        *record = up_session::default();
        outcome
    }

    /// Sessions of the table, for the agent's ageing and for comparison.
    pub fn sessions(&self) -> &[up_session] {
        &self.sessions
    }

    /// Buckets of all shard slots and their words, for comparison.
    pub fn buckets(&self) -> (&[up_bucket], &[u64]) {
        (&self.buckets, &self.words)
    }

    /// Shards by slot, for comparison.
    pub fn shards(&self) -> &[up_shard] {
        &self.shards
    }

    /// Counters by `enum up_count`.
    pub fn counters(&self) -> &[u64] {
        &self.counters.count
    }

    /// Counts a datagram that [`Packet::parse`] refused, and says what becomes of it.
    pub fn refuse(&mut self, error: crate::wire::WireError) -> Action {
        use crate::wire::WireError;
        self.drop(match error {
            WireError::Truncated => abi::UP_COUNT_DROP_TRUNCATED,
            WireError::Magic => abi::UP_COUNT_DROP_MAGIC,
            WireError::Version(_) => abi::UP_COUNT_DROP_VERSION,
            WireError::Op(_) => abi::UP_COUNT_DROP_OP,
        })
    }

    /// Handles one datagram that came from `from` at `now_ms` of the monotonic clock.
    pub fn step(&mut self, now_ms: u64, from: Endpoint, packet: &Packet<'_>) -> Action {
        let mut step = self.begin(now_ms, from, packet);
        loop {
            match step {
                Step::Done(action) => return action,
                next => step = self.resume(next),
            }
        }
    }

    /// The first critical section of a settlement; `None` if the write is not pending with this seq. The rest follow by
    /// [`Coordinator::resume`], as those of a W_REPLY that decides.
    pub fn begin_settle(&mut self, session: SessionId, request: u64, seq: u64, settlement: Settlement) -> Option<Step> {
        let record = self.sessions.get_mut(usize::from(session.index())).filter(|record| {
            session.0 != 0
                && record.session == session.0
                && u32::from(record.state) == abi::UP_STATE_PENDING
                && record.request == request
                && record.seq == seq
        })?;
        record.state = abi::UP_STATE_COMMITTING as u8;
        let state = match settlement {
            Settlement::Committed { status, result } => {
                record.status = status;
                if record.kind == Kind::Incr.to_wire() {
                    record.result = result;
                }
                abi::UP_STATE_COMMITTED
            }
            Settlement::Aborted => {
                record.status = Status::Aborted.to_wire();
                abi::UP_STATE_ABORTED
            }
        };
        let (fingerprint, bucket) = (record.fingerprint, record.bucket);
        Some(Step::Clear(Deciding { fingerprint, bucket, session, seq, state, reply: None }))
    }

    /// The first critical section of a packet.
    pub fn begin(&mut self, now_ms: u64, from: Endpoint, packet: &Packet<'_>) -> Step {
        let header = packet.header;
        match header.op {
            Op::Read | Op::Write => match self.admit(now_ms, packet) {
                Ok(config) if header.op == Op::Read => self.read(now_ms, &config, packet),
                Ok(config) => self.claim(now_ms, &config, packet),
                Err(reason) => Step::Done(self.reject(header, reason)),
            },
            Op::WReply => self.acknowledge(from, packet),
            op if op.is_control() => {
                self.count(abi::UP_COUNT_PASS_CONTROL);
                Step::Done(Action::Control)
            }
            _ => Step::Done(self.drop(abi::UP_COUNT_DROP_OP)),
        }
    }

    /// The next critical section of a packet.
    pub fn resume(&mut self, step: Step) -> Step {
        match step {
            Step::Done(_) | Step::Settled => step,
            Step::Order(write) => self.order(write),
            Step::Refuse(write, reason) => {
                self.sessions[usize::from(write.header.session.index())].state = abi::UP_STATE_IDLE as u8;
                Step::Done(self.reject(write.header, reason))
            }
            Step::Fix(write) => self.fix_time(write),
            Step::Record(write) => self.record_write(write),
            Step::Clear(deciding) => self.resolve_key(deciding),
            Step::Finish(deciding) => self.finish(deciding),
            #[cfg(feature = "published")]
            Step::LateLook(read) => self.late_look(read),
            #[cfg(feature = "published")]
            Step::LateBound(read) => self.late_bound(read),
        }
    }

    /// What every READ and WRITE must pass, in the specification's order.
    fn admit(&mut self, now_ms: u64, packet: &Packet<'_>) -> Result<up_config, Reason> {
        let header = &packet.header;
        let config = *self.config(header.shard).ok_or(Reason::Shard)?;
        let record = self.sessions.get_mut(usize::from(header.session.index())).ok_or(Reason::Session)?;
        if header.session.0 == 0 || record.session != header.session.0 || record.shard != header.shard {
            return Err(Reason::Session);
        }
        if record.token != header.token
            || record.reply_addr != header.reply_addr
            || record.reply_port != header.reply_port.to_be()
        {
            return Err(Reason::Token);
        }
        if packet.key.is_empty() || packet.key.len() > KEY_MAX {
            return Err(Reason::KeyLength);
        }
        if header.op == Op::Read {
            if !packet.value.is_empty() {
                return Err(Reason::ValueLength);
            }
        } else {
            if HEADER_LEN + packet.key.len() + packet.value.len() > DATAGRAM_MAX {
                return Err(Reason::ValueLength);
            }
            let kind = Kind::from_wire(header.kind).ok_or(Reason::Kind)?;
            if packet.value.len() < Operand::prefix_len(kind, header.flags) {
                return Err(Reason::ValueLength);
            }
        }
        #[cfg(feature = "published")]
        let lease_matters = !self.published.no_lease_check;
        #[cfg(not(feature = "published"))]
        let lease_matters = true;
        if lease_matters && now_ms >= config.lease_until_ms {
            return Err(Reason::Lease);
        }
        if (if header.op == Op::Read { config.serving_count } else { config.must_ack_count }) == 0 {
            return Err(Reason::NoMember);
        }
        // To within a second: a record read by every packet is written by few.
        if now_ms.saturating_sub(record.used_ms) >= 1000 {
            record.used_ms = now_ms;
        }
        Ok(config)
    }

    fn read(&mut self, now_ms: u64, config: &up_config, packet: &Packet<'_>) -> Step {
        let bucket = self.bucket(packet);
        // READ step 1: one load of the word is the critical section of a clean bucket.
        let word = self.words[bucket as usize];
        let clean = (word >> UP_BUCKET_LAST_SHIFT).max(config.floor);
        // Before the bound: a write ordered after it is stamped later.
        let mut time = packet_time(config, now_ms);
        let bound = if word & u64::from(UP_BUCKET_DIRTY) == 0 {
            clean
        } else {
            let fingerprint = hash::fingerprint(packet.key, self.settings.fingerprint_key);
            let ways = &mut self.buckets[bucket as usize].ways;
            match ways.iter_mut().find(|way| way.last != 0 && way.fingerprint == fingerprint) {
                Some(way) => {
                    self.counters.count[abi::UP_COUNT_READ_DIRTY as usize] += 1;
                    #[cfg(feature = "published")]
                    let stamps_freely = self.published.read_stamped_freely;
                    #[cfg(not(feature = "published"))]
                    let stamps_freely = false;
                    if !stamps_freely {
                        time = stamp_beside(way, time);
                    }
                    way.committed.max(way.first - 1)
                }
                None => clean,
            }
        };
        #[cfg(feature = "published")]
        let bound = match self.published_bound(now_ms, config, packet, bucket, bound) {
            Ok(bound) => bound,
            Err(step) => return step,
        };
        // READ step 2.
        let mut header = packet.header;
        header.seq = bound;
        header.time = time;
        Step::Done(self.route(config, header))
    }

    fn route(&mut self, config: &up_config, mut header: Header) -> Action {
        header.epoch = config.epoch;
        let index = config.serving_list
            [usize::from(hash::spread(header.session.0, header.request, header.time, config.serving_count))];
        header.cnt = index;
        self.count(abi::UP_COUNT_READ);
        Action::ToMember { index, to: member(config, index), header }
    }

    /// WRITE step 1.
    fn claim(&mut self, now_ms: u64, config: &up_config, packet: &Packet<'_>) -> Step {
        let mut header = packet.header;
        header.epoch = config.epoch;
        let clock = self.shards[slot(header.shard)].clock;
        let fingerprint = hash::fingerprint(packet.key, self.settings.fingerprint_key);
        let record = &mut self.sessions[usize::from(header.session.index())];
        let state = u32::from(record.state);
        #[cfg(feature = "published")]
        let retry_is_new = self.published.retry_is_new;
        #[cfg(not(feature = "published"))]
        let retry_is_new = false;
        if header.request < record.request {
            return Step::Done(self.drop(abi::UP_COUNT_DROP_OLD));
        }
        if header.request == record.request && state != abi::UP_STATE_IDLE && !retry_is_new {
            // Members that never saw the write must not be given another one under its seq.
            let known = record.fingerprint != [0; 2];
            let same = record.kind == header.kind && (!known || record.fingerprint == fingerprint);
            return Step::Done(match state {
                abi::UP_STATE_PENDING | abi::UP_STATE_COMMITTED if !same => self.reject(header, Reason::Malformed),
                abi::UP_STATE_COMMITTED => {
                    header.op = Op::WReply;
                    header.status = record.status;
                    header.kind = record.kind;
                    header.seq = record.seq;
                    header.time = record.time;
                    let has_number = record.kind == Kind::Incr.to_wire() && record.status == Status::Ok.to_wire();
                    let result = (has_number && header.value_len >= 8).then_some(record.result);
                    self.count(abi::UP_COUNT_WRITE_ANSWERED);
                    Action::ToSender { header, result }
                }
                abi::UP_STATE_ABORTED => self.reject(header, Reason::Aborted),
                abi::UP_STATE_PENDING => {
                    header.seq = record.seq;
                    header.time = record.time;
                    self.count(abi::UP_COUNT_WRITE_AGAIN);
                    Action::ToMembers { header }
                }
                _ => self.drop(abi::UP_COUNT_DROP_STARTING),
            });
        }
        if unresolved(record.state) && !retry_is_new {
            return Step::Done(self.reject(header, Reason::SessionBusy));
        }
        #[cfg(feature = "published")]
        let reopens = self.published.rebuilt_take_new;
        #[cfg(not(feature = "published"))]
        let reopens = false;
        if record.sealed != 0 && !reopens {
            // Rebuilt: it may have been closed before, on the promise that nothing newer is ever taken (hole 23).
            return Step::Done(self.reject(header, Reason::Aborted));
        }
        let kind = Kind::from_wire(header.kind).expect("admitted");
        if let Some(reason) = Reason::from_wire(config.refuse_writes) {
            return Step::Done(self.reject(header, reason));
        }
        if config.store_full != 0 && !kind.never_grows() {
            return Step::Done(self.reject(header, Reason::StoreFull));
        }
        record.state = abi::UP_STATE_STARTING as u8;
        record.request = header.request;
        record.seq = clock;
        let time = packet_time(config, now_ms);
        let bucket = self.bucket(packet);
        Step::Order(Ordering { header, fingerprint, bucket, seq: 0, time })
    }

    /// WRITE step 2.
    fn order(&mut self, mut write: Ordering) -> Step {
        let conditional = write.header.kind != Kind::Put.to_wire();
        let ways = &self.buckets[write.bucket as usize].ways;
        let taken = ways.iter().position(|way| way.last != 0 && way.fingerprint == write.fingerprint);
        #[cfg(feature = "published")]
        let taken = if self.published.two_slots { None } else { taken };
        #[cfg(feature = "published")]
        let conditional = conditional && !self.published.shared_conditional;
        if let Some(at) = taken
            && (ways[at].exclusive != 0 || conditional)
        {
            return Step::Refuse(write, Reason::KeyBusy);
        }
        let Some(at) = taken.or_else(|| ways.iter().position(|way| way.last == 0)) else {
            return Step::Refuse(write, Reason::DirtyFull);
        };
        let clock = &mut self.shards[slot(write.header.shard)].clock;
        *clock += 1;
        write.seq = *clock;
        let way = &mut self.buckets[write.bucket as usize].ways[at];
        if taken.is_none() {
            *way = up_way {
                fingerprint: write.fingerprint,
                first: write.seq,
                exclusive: if conditional { UP_EXCLUSIVE_OPEN } else { UP_EXCLUSIVE_NOT },
                time_low: if conditional { write.time as u32 } else { 0 },
                ..up_way::default()
            };
        }
        way.last = write.seq;
        self.words[write.bucket as usize] = write.seq << UP_BUCKET_LAST_SHIFT | u64::from(UP_BUCKET_DIRTY);
        if conditional { Step::Fix(write) } else { Step::Record(write) }
    }

    /// WRITE step 3, of a conditional write: no read that may have found the item expired was stamped later.
    fn fix_time(&mut self, mut write: Ordering) -> Step {
        let ways = &mut self.buckets[write.bucket as usize].ways;
        let way = ways.iter_mut().find(|way| way.last != 0 && way.fingerprint == write.fingerprint);
        // It is there until its write is resolved.
        let way = way.expect("a write being ordered has its way");
        write.time += u64::from(later_by(way.time_low, write.time));
        (way.time_low, way.exclusive) = (write.time as u32, UP_EXCLUSIVE_FIXED);
        Step::Record(write)
    }

    /// WRITE steps 3 and 4. A record that is starting is never reused or closed, so nothing needs checking again.
    fn record_write(&mut self, write: Ordering) -> Step {
        let mut header = write.header;
        header.seq = write.seq;
        header.time = write.time;
        let record = &mut self.sessions[usize::from(header.session.index())];
        assert!(record.session == header.session.0 && record.request == header.request, "a starting record was reused");
        #[cfg(feature = "published")]
        let acks = if self.published.residual_count {
            // The key's count: what another session's pending write of the same key has gathered so far.
            let (fingerprint, session) = (write.fingerprint, header.session.0);
            let same_key = |s: &&up_session| {
                s.fingerprint == fingerprint && s.session != session && u32::from(s.state) == abi::UP_STATE_PENDING
            };
            self.sessions.iter().find(same_key).map_or(0, |s| s.acks)
        } else {
            0
        };
        #[cfg(not(feature = "published"))]
        let acks = 0;
        let record = &mut self.sessions[usize::from(header.session.index())];
        record.state = abi::UP_STATE_PENDING as u8;
        record.kind = header.kind;
        record.status = 0;
        record.acks = acks;
        record.seq = write.seq;
        record.time = header.time;
        record.result = 0;
        record.fingerprint = write.fingerprint;
        record.bucket = write.bucket;
        self.count(abi::UP_COUNT_WRITE);
        Step::Done(Action::ToMembers { header })
    }

    /// W_REPLY step 1.
    fn acknowledge(&mut self, from: Endpoint, packet: &Packet<'_>) -> Step {
        let header = packet.header;
        let Some(config) = self.config(header.shard).copied() else {
            return Step::Done(self.drop(abi::UP_COUNT_DROP_ACK_EPOCH));
        };
        #[cfg(feature = "published")]
        let any_epoch = self.published.any_epoch_ack;
        #[cfg(not(feature = "published"))]
        let any_epoch = false;
        if header.epoch != config.epoch && !any_epoch {
            return Step::Done(self.drop(abi::UP_COUNT_DROP_ACK_EPOCH));
        }
        let is_member = header.cnt < 8 && config.must_ack & (1 << header.cnt) != 0;
        if !is_member || member(&config, header.cnt) != from {
            return Step::Done(self.drop(abi::UP_COUNT_DROP_ACK_MEMBER));
        }
        #[cfg(feature = "published")]
        let count_aborted = self.published.count_aborted_ack;
        #[cfg(not(feature = "published"))]
        let count_aborted = false;
        if header.status == Status::Aborted.to_wire() && !count_aborted {
            return Step::Done(self.drop(abi::UP_COUNT_DROP_ACK_ABORTED));
        }
        #[cfg(feature = "published")]
        let published = self.published;
        let record = self.sessions.get_mut(usize::from(header.session.index())).filter(|record| {
            record.session == header.session.0
                && record.shard == header.shard
                && u32::from(record.state) == abi::UP_STATE_PENDING
                && record.seq == header.seq
                && record.request == header.request
        });
        let Some(record) = record else { return Step::Done(self.drop(abi::UP_COUNT_DROP_ACK_STALE)) };
        #[cfg(feature = "published")]
        if published.count_acks || published.residual_count {
            // One more bit for each reply, whoever sent it.
            let next = (record.acks | config.must_ack).trailing_ones().min(7);
            let free = (0..=next).find(|i| record.acks & (1 << i) == 0).unwrap_or(0);
            record.acks |= 1 << free;
        }
        #[cfg(feature = "published")]
        let by_member = !(published.count_acks || published.residual_count);
        #[cfg(not(feature = "published"))]
        let by_member = true;
        if by_member {
            record.acks |= 1 << header.cnt;
        }
        if record.acks & config.must_ack != config.must_ack {
            return Step::Done(self.drop(abi::UP_COUNT_ACK));
        }
        record.state = abi::UP_STATE_COMMITTING as u8;
        record.status = header.status;
        if record.kind == Kind::Incr.to_wire()
            && let Some(number) = packet.value.first_chunk::<8>()
        {
            record.result = u64::from_be_bytes(*number);
        }
        let deciding = Deciding {
            fingerprint: record.fingerprint,
            bucket: record.bucket,
            session: header.session,
            seq: header.seq,
            state: abi::UP_STATE_COMMITTED,
            reply: Some(header),
        };
        #[cfg(feature = "published")]
        if published.finish_first {
            record.state = abi::UP_STATE_COMMITTED as u8;
        }
        Step::Clear(deciding)
    }

    /// W_REPLY step 2.
    fn resolve_key(&mut self, deciding: Deciding) -> Step {
        #[cfg(feature = "published")]
        if self.published.abort_keeps_way && deciding.state == abi::UP_STATE_ABORTED {
            return Step::Finish(deciding);
        }
        let bucket = &mut self.buckets[deciding.bucket as usize];
        let way = bucket.ways.iter_mut().find(|way| way.last != 0 && way.fingerprint == deciding.fingerprint);
        if let Some(way) = way {
            way.committed = way.committed.max(deciding.seq);
            #[cfg(feature = "published")]
            let clear_early = self.published.clear_early;
            #[cfg(not(feature = "published"))]
            let clear_early = false;
            if way.committed >= way.last || clear_early {
                *way = up_way::default();
                if bucket.ways.iter().all(|way| way.last == 0) {
                    self.words[deciding.bucket as usize] &= !u64::from(UP_BUCKET_DIRTY);
                }
            }
        }
        Step::Finish(deciding)
    }

    /// W_REPLY step 3.
    fn finish(&mut self, deciding: Deciding) -> Step {
        let record = &mut self.sessions[usize::from(deciding.session.index())];
        record.state = deciding.state as u8;
        let Some(mut header) = deciding.reply else { return Step::Settled };
        // What the client is told comes from the record: the replica's packet is trusted for status and result alone.
        header.reply_addr = record.reply_addr;
        header.reply_port = u16::from_be(record.reply_port);
        header.token = record.token;
        self.count(abi::UP_COUNT_COMMIT);
        let to = header.reply_to().expect("the agent opens sessions for IPv4 addresses alone");
        Step::Done(Action::ToClient { to, header })
    }

    fn bucket(&self, packet: &Packet<'_>) -> u32 {
        let within = hash::bucket_hash(packet.key, &self.settings.bucket_key) & (self.settings.buckets - 1);
        slot(packet.header.shard) as u32 * self.settings.buckets + within
    }

    fn count(&mut self, counter: Count) {
        self.counters.count[counter as usize] += 1;
    }

    fn drop(&mut self, counter: Count) -> Action {
        self.count(counter);
        Action::Drop(counter)
    }

    fn reject(&mut self, mut header: Header, reason: Reason) -> Action {
        self.count(abi::UP_COUNT_REJECT + u32::from(reason.to_wire()));
        header.op = if header.op == Op::Read { Op::RReject } else { Op::WReject };
        header.status = reason.to_wire();
        header.epoch = self.config(header.shard).map_or(0, |config| config.epoch);
        Action::ToSender { header, result: None }
    }
}

#[cfg(feature = "published")]
impl Coordinator {
    /// The bound of a read under the published behaviours; `Err` when something is looked at later.
    fn published_bound(
        &self,
        now_ms: u64,
        config: &up_config,
        packet: &Packet<'_>,
        bucket: u32,
        bound: u64,
    ) -> Result<u64, Step> {
        let fingerprint = hash::fingerprint(packet.key, self.settings.fingerprint_key);
        let ways = &self.buckets[bucket as usize].ways;
        let dirty = ways.iter().any(|way| way.last != 0 && way.fingerprint == fingerprint);
        let mut header = packet.header;
        header.time = packet_time(config, now_ms);
        // Hole 11: the bound is the shard's clock, and it and the dirty set are looked at one after the other.
        header.seq = self.shards[slot(header.shard)].clock;
        let read = Ordering { header, fingerprint, bucket, seq: header.seq, time: header.time };
        if self.published.bound_first {
            return Err(Step::LateLook(read));
        }
        if self.published.look_first && !dirty {
            return Err(Step::LateBound(read));
        }
        Ok(match (dirty, self.published) {
            (true, Published { uncommitted_read: true, .. }) | (false, Published { late_read: true, .. }) => {
                u64::MAX >> 1
            }
            _ => bound,
        })
    }

    fn late_look(&mut self, read: Ordering) -> Step {
        let ways = &self.buckets[read.bucket as usize].ways;
        let way = ways.iter().find(|way| way.last != 0 && way.fingerprint == read.fingerprint);
        let mut header = read.header;
        header.seq = way.map_or(read.seq, |way| way.committed.max(way.first - 1));
        let config = *self.config(header.shard).expect("admitted");
        Step::Done(self.route(&config, header))
    }

    fn late_bound(&mut self, read: Ordering) -> Step {
        let mut header = read.header;
        header.seq = self.shards[slot(header.shard)].clock;
        let config = *self.config(header.shard).expect("admitted");
        Step::Done(self.route(&config, header))
    }
}

/// By how much a time whose low half this is lies after `time`; 0 if it does not. They are less than 24 days apart.
fn later_by(low: u32, time: u64) -> u32 {
    let by = low.wrapping_sub(time as u32);
    if by as i32 > 0 { by } else { 0 }
}

/// The stamp of a read at `time` of a key with a pending write. Beside a conditional one it is not later than that one's: the
/// write executes on the version that the read sees, so what is expired for the read must be expired for the write.
fn stamp_beside(way: &mut up_way, time: u64) -> u64 {
    match way.exclusive {
        UP_EXCLUSIVE_OPEN => {
            if later_by(way.time_low, time) == 0 {
                way.time_low = time as u32;
            }
            time
        }
        UP_EXCLUSIVE_FIXED => {
            let after = (time as u32).wrapping_sub(way.time_low);
            if after as i32 > 0 { time - u64::from(after) } else { time }
        }
        _ => time,
    }
}

/// The slot that a shard lives in.
pub fn slot(shard: u32) -> usize {
    (shard % UP_SHARD_SLOTS) as usize
}

/// The record of a session that was just opened.
pub fn opened(now_ms: u64, session: SessionId, shard: u32, token: u64, to: Endpoint) -> up_session {
    let mut header = Header::new(Op::Open);
    header.set_reply_to(to);
    up_session {
        session: session.0,
        token,
        reply_addr: header.reply_addr,
        reply_port: to.port.to_be(),
        used_ms: now_ms,
        shard,
        ..up_session::default()
    }
}

/// A member's address.
pub fn member(config: &up_config, index: u8) -> Endpoint {
    let member = &config.members[usize::from(index)];
    Endpoint { addr: u32::from_be(member.addr).into(), port: u16::from_be(member.port) }
}

fn packet_time(config: &up_config, now_ms: u64) -> u64 {
    now_ms.wrapping_add_signed(config.time_offset_ms)
}

/// Whether a record in this state may neither be reused nor closed.
pub fn unresolved(state: u8) -> bool {
    matches!(u32::from(state), abi::UP_STATE_STARTING | abi::UP_STATE_PENDING | abi::UP_STATE_COMMITTING)
}

/// Looks through session records for unresolved writes of a shard; `clock` was read before the first record. A record
/// that is starting counts from the clock value at which it started.
pub fn scan<'a>(clock: u64, shard: u32, sessions: impl IntoIterator<Item = &'a up_session>) -> Scan {
    let mut scan = Scan { stable: clock, unresolved: 0 };
    for record in sessions {
        if record.shard == shard && unresolved(record.state) {
            scan.unresolved += 1;
            let starting = u32::from(record.state) == abi::UP_STATE_STARTING;
            scan.stable = scan.stable.min(if starting { record.seq } else { record.seq - 1 });
        }
    }
    scan
}
