//! What a replica keeps of each session: the last write it processed, so that none takes effect twice.

use std::{
    cmp::Ordering,
    mem,
    net::Ipv4Addr,
    sync::{Mutex, MutexGuard},
};

use crate::wire::{Endpoint, SessionId};

/// The last write processed of the session with one index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    /// The session; 0: none yet.
    pub session: SessionId,
    /// Number of the write in its session.
    pub request: u64,
    /// Its sequence number.
    pub seq: u64,
    /// Its outcome, as on the wire.
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
}

// What `Settings::budget_bytes` says about the table.
const _: () = assert!(mem::size_of::<Mutex<SessionRecord>>() == 56);

pub(super) struct SessionTable {
    records: Box<[Mutex<SessionRecord>]>,
}

impl SessionTable {
    pub fn new(sessions: usize) -> Self {
        Self { records: (0..sessions).map(|_| Mutex::default()).collect() }
    }

    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// The record of this index, locked; `None` beyond the table.
    pub fn lock(&self, index: u16) -> Option<MutexGuard<'_, SessionRecord>> {
        let record = self.records.get(usize::from(index))?;
        Some(record.lock().expect("a thread panicked with a session's record locked"))
    }

    pub fn dump(&self) -> Vec<(u16, SessionRecord)> {
        let records = self.records.iter().enumerate();
        records
            .map(|(index, record)| (index as u16, *record.lock().expect("a thread panicked with a record locked")))
            .filter(|(_, record)| record.session != SessionId(0))
            .collect()
    }
}
