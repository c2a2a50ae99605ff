//! The sequential item: what each operation, alone, does to it. `docs/protocol.md`, section 2 "Values of writes" and
//! section 4 "Conditional kinds" and "Expiry".

use std::{collections::HashMap, sync::Arc};

use crate::history::{Operation, Outcome, Request, Text};

/// Number of a distinct content; see [`Interner`].
pub(super) type Content = u32;
/// No item.
pub(super) const ABSENT: Content = 0;
/// Some content that no operation of the key can tell from another.
pub(super) const JUNK: Content = 1;
/// A time that never comes.
pub(super) const NEVER: u64 = u64::MAX;

/// How far expiry, as seen by clients' clocks, may be off: the coordinator stamps with a clock of its own that it may read
/// once for many packets. Only used where `time_ms` is missing.
const EXPIRY_SLACK_NS: u64 = 250_000_000;
/// And a hundredth of the lifetime, for clocks of different rates.
const EXPIRY_DRIFT_DIVISOR: u64 = 100;

/// What a store may do beside what it is told to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Store {
    /// It may drop any item at any moment, as one short of memory does.
    pub evicts: bool,
    /// It counts lifetimes in units of this, in milliseconds, from moments of its own: an end may come as much earlier or
    /// later. 0: it does not.
    pub clock_ms: u64,
}

/// Byte strings by number.
#[derive(Debug)]
pub(super) struct Interner {
    by_id: Vec<Arc<[u8]>>,
    ids: HashMap<Arc<[u8]>, u32>,
}

impl Interner {
    pub(super) fn new() -> Self {
        Self { by_id: Vec::new(), ids: HashMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn id(&mut self, bytes: &[u8]) -> u32 {
        if let Some(&id) = self.ids.get(bytes) {
            return id;
        }
        let id = u32::try_from(self.by_id.len()).expect("fewer than 2^32 distinct keys and values fit in memory");
        let bytes: Arc<[u8]> = bytes.into();
        self.by_id.push(bytes.clone());
        self.ids.insert(bytes, id);
        id
    }

    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        &self.by_id[id as usize]
    }
}

/// Contents of a history, and those that arise while one key is checked.
#[derive(Debug)]
pub(super) struct Contents<'a> {
    pub(super) store: Store,
    recorded: &'a Interner,
    derived: Interner,
    /// Sets of sequence numbers, each ascending; the empty one first.
    refusals: Vec<Vec<u64>>,
    refusal_ids: HashMap<Vec<u64>, u32>,
}

/// Contents are numbered from 2: 0 and 1 are [`ABSENT`] and [`JUNK`].
const FIRST: u32 = 2;

/// The number of a recorded content.
pub(super) fn recorded_content(interner: &mut Interner, bytes: &[u8]) -> Content {
    interner.id(bytes) + FIRST
}

/// The bytes of a recorded content.
pub(super) fn recorded_bytes(interner: &Interner, content: Content) -> &[u8] {
    interner.bytes(content - FIRST)
}

impl<'a> Contents<'a> {
    pub(super) fn new(recorded: &'a Interner, store: Store) -> Self {
        let (refusals, refusal_ids) = (vec![Vec::new()], HashMap::from([(Vec::new(), 0)]));
        Self { store, recorded, derived: Interner::new(), refusals, refusal_ids }
    }

    /// A set of sequence numbers by its number.
    pub(super) fn refusals(&self, set: u32) -> &[u64] {
        &self.refusals[set as usize]
    }

    /// The set with one more sequence number in it.
    pub(super) fn refuse(&mut self, set: u32, cas: u64) -> u32 {
        let mut more = self.refusals(set).to_vec();
        let Err(at) = more.binary_search(&cas) else { return set };
        more.insert(at, cas);
        let next = self.refusals.len() as u32;
        let id = *self.refusal_ids.entry(more.clone()).or_insert(next);
        if id == next {
            self.refusals.push(more);
        }
        id
    }

    /// `None` for junk.
    pub(super) fn bytes(&self, content: Content) -> Option<&[u8]> {
        let index = content.checked_sub(FIRST)? as usize;
        Some(match index.checked_sub(self.recorded.len()) {
            None => self.recorded.bytes(index as u32),
            Some(index) => self.derived.bytes(index as u32),
        })
    }

    /// The number of these bytes.
    pub(super) fn derive(&mut self, bytes: &[u8]) -> Content {
        match self.recorded.ids.get(bytes) {
            Some(id) => id + FIRST,
            None => self.derived.id(bytes) + self.recorded.len() as u32 + FIRST,
        }
    }
}

/// One operation as the checker keeps it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub(super) client: u64,
    pub(super) call: u64,
    /// [`NEVER`] if its effect may come at any later time.
    pub(super) ret: u64,
    /// 0 if not told: the version read, or the sequence number of a write.
    pub(super) cas: u64,
    pub(super) expected: u64,
    pub(super) delta: i64,
    pub(super) number: Option<i64>,
    pub(super) ttl_ms: Option<u64>,
    pub(super) time_ms: Option<u64>,
    pub(super) key: u32,
    /// Argument, or value read; [`ABSENT`] if neither.
    pub(super) value: Content,
    pub(super) request: Request,
    pub(super) outcome: Outcome,
}

impl Op {
    pub(super) fn new(operation: &Operation, keys: &mut Interner, values: &mut Interner) -> Self {
        let unknown = operation.outcome == Outcome::Unknown;
        Self {
            client: operation.client,
            call: operation.call_ns,
            ret: operation.return_ns.filter(|_| !unknown).unwrap_or(NEVER),
            cas: operation.cas.unwrap_or(0),
            expected: operation.expected.unwrap_or(0),
            delta: operation.delta.unwrap_or(0),
            number: operation.number,
            ttl_ms: operation.ttl_ms,
            time_ms: operation.time_ms,
            key: keys.id(&operation.key.0),
            value: operation.value.as_ref().map_or(ABSENT, |value| recorded_content(values, &value.0)),
            request: operation.op,
            outcome: operation.outcome,
        }
    }

    /// As it was recorded.
    pub(super) fn operation(&self, keys: &Interner, values: &Interner) -> Operation {
        let text = |bytes: &[u8]| Text(bytes.to_vec());
        Operation {
            client: self.client,
            op: self.request,
            key: text(keys.bytes(self.key)),
            value: (self.value != ABSENT).then(|| text(recorded_bytes(values, self.value))),
            delta: (self.request == Request::Incr).then_some(self.delta),
            expected: (self.request == Request::Cas).then_some(self.expected),
            ttl_ms: self.ttl_ms,
            call_ns: self.call,
            return_ns: (self.ret != NEVER).then_some(self.ret),
            outcome: self.outcome,
            cas: (self.cas != 0).then_some(self.cas),
            number: self.number,
            time_ms: self.time_ms,
        }
    }

    /// Whether it leaves the item as it is. A write whose condition failed does, but takes a place among the writes if
    /// its sequence number is told.
    pub(super) fn is_observer(&self) -> bool {
        self.request == Request::Get || (self.outcome != Outcome::Ok && self.outcome != Outcome::Unknown)
    }

    pub(super) fn is_unknown(&self) -> bool {
        self.outcome == Outcome::Unknown
    }

    /// Whether it gives the item a new content and cas, if it takes effect.
    pub(super) fn makes_version(&self) -> bool {
        !self.is_observer() && self.request != Request::Touch
    }
}

/// When an item with a lifetime ends. Its end is a step of its own that comes at a moment nobody sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Expiry {
    /// Nobody whose answer came before this finds it gone. [`NEVER`]: it has no lifetime.
    early: u64,
    /// Nobody who called after this finds it.
    late: u64,
    /// By the coordinator's clock, if the write was stamped.
    exact_ms: Option<u64>,
}

impl Expiry {
    const NONE: Self = Self { early: NEVER, late: NEVER, exact_ms: None };

    fn after(op: &Op, ttl_ms: u64, store: Store) -> Self {
        if ttl_ms == 0 {
            return Self::NONE;
        }
        let ttl = ttl_ms.saturating_mul(1_000_000);
        let slack = EXPIRY_SLACK_NS.saturating_add(ttl / EXPIRY_DRIFT_DIVISOR);
        let slack = slack.saturating_add(store.clock_ms.saturating_mul(1_000_000));
        Self {
            early: op.call.saturating_add(ttl.saturating_sub(slack)),
            late: op.ret.saturating_add(ttl).saturating_add(slack),
            exact_ms: op.time_ms.map(|time| time.saturating_add(ttl_ms)),
        }
    }
}

/// The item at one point of an order of its operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub(super) content: Content,
    /// 0: no item, or the write that made the version did not tell its sequence number; then that lies between
    /// `cas_above` and `cas_below`.
    pub(super) cas: u64,
    cas_above: u64,
    cas_below: u64,
    /// The set of numbers that it was found not to have and might be taken to have: [`Contents::refusals`].
    pub(super) cas_not: u32,
    /// The highest sequence number placed so far.
    pub(super) seq: u64,
    expiry: Expiry,
    /// Its lifetime is over; `content` no longer counts.
    pub(super) dead: bool,
}

/// What a content is to INCR.
enum Numeric {
    /// A decimal number.
    Number(i64),
    /// Read as a number by some, refused by others: `+5`, `007`.
    Doubtful(i64),
    /// Digits, but beyond 64 bits.
    Huge,
    No,
}

fn numeric(bytes: Option<&[u8]>) -> Numeric {
    let Some(text) = bytes.and_then(|bytes| std::str::from_utf8(bytes).ok()) else { return Numeric::No };
    match text.trim().parse::<i64>() {
        Ok(number) if number.to_string() == text => Numeric::Number(number),
        Ok(number) => Numeric::Doubtful(number),
        Err(error) => match error.kind() {
            std::num::IntErrorKind::PosOverflow | std::num::IntErrorKind::NegOverflow => Numeric::Huge,
            _ => Numeric::No,
        },
    }
}

/// Whether INCR might do anything but refuse it; `extended`: or anything that APPEND and PREPEND make of it.
pub(super) fn may_be_number(bytes: &[u8], extended: bool) -> bool {
    if extended {
        return bytes.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'+' | b'-') || byte.is_ascii_whitespace());
    }
    !matches!(numeric(Some(bytes)), Numeric::No)
}

impl State {
    /// Before any write.
    pub(super) const EMPTY: Self = Self {
        content: ABSENT,
        cas: 0,
        cas_above: 0,
        cas_below: NEVER,
        cas_not: 0,
        seq: 0,
        expiry: Expiry::NONE,
        dead: false,
    };

    /// A version is there whose sequence number was not told.
    pub(super) fn is_unnumbered(&self) -> bool {
        self.content != ABSENT && !self.dead && self.cas == 0
    }

    /// The item ends here by itself; `None` if it cannot.
    pub(super) fn expire(&self, store: Store) -> Option<Self> {
        if store.evicts && self.content != ABSENT {
            return Some(Self { seq: self.seq, ..Self::EMPTY });
        }
        (self.content != ABSENT && !self.dead && self.expiry.early != NEVER).then_some(Self { dead: true, ..*self })
    }

    fn found_by(&self, op: &Op) -> bool {
        if self.content == ABSENT || self.dead {
            return false;
        }
        match (op.time_ms, self.expiry.exact_ms) {
            (Some(time), Some(end)) => time <= end,
            _ => op.call <= self.expiry.late,
        }
    }

    fn not_found_by(&self, op: &Op) -> bool {
        match (op.time_ms, self.expiry.exact_ms) {
            _ if self.content == ABSENT => true,
            _ if !self.dead => false,
            (Some(time), Some(end)) => time >= end,
            _ => op.ret >= self.expiry.early,
        }
    }

    /// The same state with its version known to be `cas`, if it can be. `orphan` are the sequence numbers that somebody saw
    /// and that belong to no write which told them.
    fn with_cas(&self, cas: u64, contents: &Contents<'_>, orphan: &dyn Fn(u64) -> bool) -> Option<Self> {
        if self.cas != 0 {
            return (self.cas == cas).then_some(*self);
        }
        let refused = || contents.refusals(self.cas_not).binary_search(&cas).is_ok();
        (cas > self.cas_above && cas < self.cas_below && orphan(cas) && !refused()).then(|| Self {
            cas,
            cas_above: 0,
            cas_below: NEVER,
            cas_not: 0,
            seq: self.seq.max(cas),
            ..*self
        })
    }

    /// The state after `op` with the outcome that it had (for an unknown one: had it succeeded); `None` if it cannot have
    /// had that outcome here.
    pub(super) fn apply(&self, op: &Op, contents: &mut Contents<'_>, orphan: &dyn Fn(u64) -> bool) -> Option<Self> {
        if op.request == Request::Get {
            if op.outcome == Outcome::NotFound {
                return self.not_found_by(op).then_some(*self);
            }
            let seen = self.found_by(op) && self.content == op.value;
            return seen.then(|| if op.cas == 0 { Some(*self) } else { self.with_cas(op.cas, contents, orphan) })?;
        }
        let mut before = *self;
        if op.cas != 0 {
            if op.cas <= self.seq {
                return None;
            }
            before.seq = op.cas;
            if before.is_unnumbered() {
                before.cas_below = before.cas_below.min(op.cas);
            }
        }
        let store = contents.store;
        let stored = |content: Content, keep_expiry: bool| State {
            content,
            cas: op.cas,
            cas_above: if op.cas == 0 { self.seq } else { 0 },
            cas_below: NEVER,
            cas_not: 0,
            seq: before.seq,
            expiry: match op.ttl_ms {
                Some(ttl_ms) => Expiry::after(op, ttl_ms, store),
                None if keep_expiry => self.expiry,
                None => Expiry::NONE,
            },
            dead: false,
        };
        let found = self.found_by(op);
        if op.is_observer() {
            if op.request == Request::Cas
                && before.is_unnumbered()
                && before.with_cas(op.expected, contents, orphan).is_some()
            {
                before.cas_not = contents.refuse(before.cas_not, op.expected);
            }
            let possible = match op.outcome {
                // A version without a number (0) still has one, which no `expected` says for certain.
                Outcome::Exists if op.request == Request::Cas => found && (self.cas == 0 || self.cas != op.expected),
                Outcome::Exists => found,
                Outcome::NotStored if op.request == Request::Add => found,
                Outcome::NotFound | Outcome::NotStored => self.not_found_by(op),
                Outcome::TooLarge => found,
                Outcome::NotANumber => found && !matches!(numeric(contents.bytes(self.content)), Numeric::Number(_)),
                Outcome::Overflow => {
                    found
                        && match numeric(contents.bytes(self.content)) {
                            Numeric::Number(n) | Numeric::Doubtful(n) => n.checked_add(op.delta).is_none(),
                            Numeric::Huge => true,
                            Numeric::No => false,
                        }
                }
                Outcome::Ok | Outcome::Failed | Outcome::Unknown => unreachable!("not an observer"),
            };
            return possible.then_some(before);
        }
        match op.request {
            Request::Get => unreachable!("handled above"),
            Request::Put => Some(stored(op.value, false)),
            Request::Add => self.not_found_by(op).then(|| stored(op.value, false)),
            Request::Replace => found.then(|| stored(op.value, false)),
            Request::Delete => found.then_some(State { seq: before.seq, ..State::EMPTY }),
            Request::Flush => Some(State { seq: before.seq, ..State::EMPTY }),
            Request::Cas => {
                let seen = found.then(|| self.with_cas(op.expected, contents, orphan)).flatten()?;
                // The version it replaced came before it.
                (op.cas == 0 || seen.seq < op.cas).then(|| State {
                    cas_above: if op.cas == 0 { seen.seq } else { 0 },
                    seq: before.seq.max(seen.seq),
                    ..stored(op.value, false)
                })
            }
            Request::Incr => {
                let (Numeric::Number(n) | Numeric::Doubtful(n)) = numeric(contents.bytes(self.content)) else {
                    return None;
                };
                let sum = n.checked_add(op.delta)?;
                let told = op.number.is_none_or(|number| number == sum);
                (found && told).then(|| stored(contents.derive(sum.to_string().as_bytes()), true))
            }
            Request::Append | Request::Prepend => found.then(|| {
                let joined = match (contents.bytes(self.content), contents.bytes(op.value)) {
                    (Some(old), Some(new)) if op.request == Request::Append => Some([old, new].concat()),
                    (Some(old), Some(new)) => Some([new, old].concat()),
                    _ => None,
                };
                stored(joined.map_or(JUNK, |bytes| contents.derive(&bytes)), true)
            }),
            Request::Touch => found.then(|| State {
                expiry: op.ttl_ms.map_or(self.expiry, |ttl_ms| Expiry::after(op, ttl_ms, store)),
                ..before
            }),
        }
    }
}
