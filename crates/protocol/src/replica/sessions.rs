//! What a replica keeps of each session: the last write it processed, so that none takes effect twice.

use std::{
    cmp::Ordering,
    mem,
    net::Ipv4Addr,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use crate::wire::{Endpoint, SessionId, Status};

/// The last write processed of the session with one index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    /// The session; 0: none yet.
    pub session: SessionId,
    /// Number of the write in its session.
    pub request: u64,
    /// Its sequence number.
    pub seq: u64,
    /// Its outcome, as on the wire. ABORTED: nobody processed it, and it will never have an effect.
    pub status: u8,
    /// What the write does, as on the wire.
    pub kind: u8,
    /// INCR: the new number, as 64 bits.
    pub result: u64,
    /// The session's token: with it and the address a new coordinator knows the client again.
    pub token: u64,
    /// The client.
    pub client: Endpoint,
}

impl Default for SessionRecord {
    fn default() -> Self {
        let client = Endpoint { addr: Ipv4Addr::UNSPECIFIED, port: 0 };
        Self { session: SessionId(0), request: 0, seq: 0, status: 0, kind: 0, result: 0, token: 0, client }
    }
}

impl SessionRecord {
    /// How a write of (session, request) compares with the record: generations first, then requests.
    pub fn compare(&self, session: SessionId, request: u64) -> Ordering {
        (session.generation(), request).cmp(&(self.session.generation(), self.request))
    }

    /// Whether it is of a write without effect.
    pub fn is_aborted(&self) -> bool {
        self.status == Status::Aborted.to_wire()
    }
}

/// What is kept under one session index.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    pub record: SessionRecord,
    /// The write of which copies are ignored until its fate is decided: (session, request), newer than the record; session
    /// 0: none.
    pub frozen: (SessionId, u64),
}

impl Slot {
    /// Takes a record from elsewhere: the later one stays, and a processed write stays processed (protocol.md, section 7).
    pub fn merge(&mut self, other: &SessionRecord) {
        let newer = match self.record.compare(other.session, other.request) {
            Ordering::Greater => true,
            Ordering::Equal => self.record.is_aborted() && !other.is_aborted(),
            Ordering::Less => false,
        };
        if newer {
            self.set(*other);
        }
    }

    /// Puts a record in place, which thaws what it decides.
    pub fn set(&mut self, record: SessionRecord) {
        self.record = record;
        if record.compare(self.frozen.0, self.frozen.1) != Ordering::Greater {
            self.frozen = Default::default();
        }
    }
}

// What `Settings::budget_bytes` says about the table.
const _: () = assert!(mem::size_of::<Mutex<Slot>>() == 72);

#[derive(Default)]
pub(super) struct SessionTable {
    slots: Vec<Mutex<Slot>>,
    /// One beyond the highest index ever asked for: all records are below.
    end: AtomicU32,
}

impl SessionTable {
    /// Makes room for so many sessions. What is held stays, beyond that number too.
    pub fn grow(&mut self, sessions: usize) {
        if sessions > self.slots.len() {
            self.slots.resize_with(sessions, Mutex::default);
        }
    }

    /// Thaws every frozen write.
    pub fn thaw(&mut self) {
        for slot in &mut self.slots {
            slot.get_mut().expect("a thread panicked with a session's record locked").frozen = Default::default();
        }
    }

    /// The slot of this index, locked; `None` beyond the table.
    pub fn lock(&self, index: u16) -> Option<MutexGuard<'_, Slot>> {
        let slot = self.slots.get(usize::from(index))?;
        if u32::from(index) >= self.end() {
            self.end.fetch_max(u32::from(index) + 1, Relaxed);
        }
        Some(slot.lock().expect("a thread panicked with a session's record locked"))
    }

    /// One beyond the highest index in use, or more.
    pub fn end(&self) -> u32 {
        self.end.load(Relaxed)
    }

    /// The records in use from this index on.
    pub fn records(&self, from: u16) -> impl Iterator<Item = (u16, SessionRecord)> {
        (u32::from(from)..self.end())
            .map_while(|index| Some((index as u16, self.lock(index as u16)?.record)))
            .filter(|(_, record)| record.session != SessionId(0))
    }

    /// Whether no record is held.
    pub fn is_empty(&self) -> bool {
        self.records(0).next().is_none()
    }
}
