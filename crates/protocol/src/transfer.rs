//! What replicas tell each other and a new coordinator of their contents: the binary values of COLLECTED, FETCH, FETCHED and
//! ABORT.
//!
//! Numbers are big-endian. A page holds as many entries as fit into [`PAGE_MAX`] bytes, and at least one: a single chain of
//! large values makes a datagram that IP fragments, which no kernel program of ours sees, since none of these goes to a
//! coordinator. COLLECTED and pages of session records always fit.

use std::net::Ipv4Addr;

use crate::{
    replica::{SessionRecord, VersionDump},
    wire::{DATAGRAM_MAX, Endpoint, HEADER_LEN, SessionId},
};

/// Bytes of a page's value beyond which nothing is added to it.
pub const PAGE_MAX: usize = DATAGRAM_MAX - HEADER_LEN;
/// Bytes of a UDP datagram's payload at most. A chain that does not fit (its versions above `stable` are many) is asked for by
/// its key, and comes in parts.
pub const FETCHED_MAX: usize = 65_000 - HEADER_LEN;
/// Session records on a page: indices are asked for in steps of this.
pub const SESSIONS_PAGE: u16 = 28;

/// Something that a replica holds and others may lack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// A version above its `stable`.
    Version {
        /// Its key.
        key: Vec<u8>,
        /// The write that stored it.
        seq: u64,
        /// That write, if its session's record is still of it; otherwise a later write of the session was taken, so it is
        /// resolved.
        writer: Option<(SessionId, u64)>,
    },
    /// The record of a write without effect.
    Aborted(SessionRecord),
}

/// COLLECTED. COLLECT has the cursor in its header's `seq`; 0 begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// This life of the replica.
    pub incarnation: u64,
    /// Every write up to here is resolved, and what it did is held.
    pub stable: u64,
    /// The latest packet time seen.
    pub time: u64,
    /// Cursor of the next page; 0: this is the last.
    pub next: u64,
    /// Entries.
    pub held: Vec<Held>,
}

/// FETCH. The header has shard, epoch and, for `Key`, the key; session and request come back. Its `seq` is the incarnation asked
/// (0: whichever), its `time` for `Key` the seq below which versions are asked for (0: all), for `Page` the cursor to stop at
/// (0: none).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// One key's chain.
    Key,
    /// Chains from this cursor on; 0 begins.
    Page(u64),
    /// Records of session indices from this one on, up to [`SESSIONS_PAGE`] of them.
    Sessions(u16),
}

/// A key with its versions, newest first, each with the record of the write that stored it if that is above `stable` and
/// still its session's latest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Key.
    pub key: Vec<u8>,
    /// Versions.
    pub versions: Vec<(VersionDump, Option<SessionRecord>)>,
}

/// FETCHED: the question again, and the answer to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// One key's chain; without versions if it holds none. If the header's `time` is not 0, versions below that seq are left.
    Key(Chain),
    /// A page of chains.
    Page {
        /// The cursor asked for.
        cursor: u64,
        /// Cursor of the next page; 0: this is the last.
        next: u64,
        /// Items that the sender holds in all.
        items: u64,
        /// Chains. One without versions did not fit: it is to be asked for by its key.
        chains: Vec<Chain>,
    },
    /// A page of session records: those in use among the indices asked for.
    Sessions {
        /// The index asked for.
        from: u16,
        /// One beyond the highest index in use, or more; nothing is to be asked from there on.
        end: u32,
        /// Records with their indices.
        records: Vec<SessionRecord>,
    },
}

impl Collected {
    /// The value of the packet.
    pub fn emit(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for number in [self.incarnation, self.stable, self.time, self.next] {
            put_u64(&mut out, number);
        }
        self.held.iter().for_each(|held| held.emit(&mut out));
        out
    }

    /// `None` for what no replica sends.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let mut value = Reader(value);
        let (incarnation, stable, time, next) = (value.u64()?, value.u64()?, value.u64()?, value.u64()?);
        let mut held = Vec::new();
        while !value.0.is_empty() {
            held.push(Held::parse(&mut value)?);
        }
        Some(Self { incarnation, stable, time, next, held })
    }
}

impl Held {
    /// Bytes that it takes on a page.
    pub fn page_len(&self) -> usize {
        match self {
            Self::Version { key, .. } => 1 + 8 + 8 + 8 + 1 + key.len(),
            Self::Aborted(_) => 1 + RECORD_LEN,
        }
    }

    fn emit(&self, out: &mut Vec<u8>) {
        match self {
            Self::Version { key, seq, writer } => {
                let (session, request) = writer.unwrap_or((SessionId(0), 0));
                out.push(1);
                put_u64(out, *seq);
                put_u64(out, session.0);
                put_u64(out, request);
                put_key(out, key);
            }
            Self::Aborted(record) => {
                out.push(2);
                put_record(out, record);
            }
        }
    }

    fn parse(value: &mut Reader<'_>) -> Option<Self> {
        match value.u8()? {
            1 => {
                let (seq, session, request) = (value.u64()?, SessionId(value.u64()?), value.u64()?);
                let writer = (session.0 != 0).then_some((session, request));
                Some(Self::Version { key: value.key()?, seq, writer })
            }
            2 => value.record().map(Self::Aborted),
            _ => None,
        }
    }
}

impl Fetch {
    /// The value of the packet.
    pub fn emit(self) -> Vec<u8> {
        let (what, at) = match self {
            Self::Key => (1, 0),
            Self::Page(cursor) => (2, cursor),
            Self::Sessions(from) => (3, u64::from(from)),
        };
        let mut out = vec![what];
        put_u64(&mut out, at);
        out
    }

    /// `None` for what nobody asks.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let mut value = Reader(value);
        let (what, at) = (value.u8()?, value.u64()?);
        match (what, value.0) {
            (1, []) => Some(Self::Key),
            (2, []) => Some(Self::Page(at)),
            (3, []) => u16::try_from(at).ok().map(Self::Sessions),
            _ => None,
        }
    }
}

impl Fetched {
    /// The value of the packet.
    pub fn emit(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Key(chain) => {
                out.push(1);
                chain.emit(&mut out);
            }
            Self::Page { cursor, next, items, chains } => {
                out.push(2);
                put_u64(&mut out, *cursor);
                put_u64(&mut out, *next);
                put_u64(&mut out, *items);
                chains.iter().for_each(|chain| chain.emit(&mut out));
            }
            Self::Sessions { from, end, records } => {
                out.push(3);
                put_u64(&mut out, u64::from(*from));
                put_u64(&mut out, u64::from(*end));
                records.iter().for_each(|record| put_record(&mut out, record));
            }
        }
        out
    }

    /// `None` for what no replica sends.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let mut value = Reader(value);
        match value.u8()? {
            1 => {
                let chain = Chain::parse(&mut value)?;
                value.0.is_empty().then_some(Self::Key(chain))
            }
            2 => {
                let (cursor, next, items) = (value.u64()?, value.u64()?, value.u64()?);
                let mut chains = Vec::new();
                while !value.0.is_empty() {
                    chains.push(Chain::parse(&mut value)?);
                }
                Some(Self::Page { cursor, next, items, chains })
            }
            3 => {
                let (from, end) = (u16::try_from(value.u64()?).ok()?, u32::try_from(value.u64()?).ok()?);
                let mut records = Vec::new();
                while !value.0.is_empty() {
                    records.push(value.record()?);
                }
                Some(Self::Sessions { from, end, records })
            }
            _ => None,
        }
    }
}

impl Chain {
    /// Bytes on a page.
    pub fn len(&self) -> usize {
        1 + self.key.len() + 2 + self.versions.iter().map(Self::version_len).sum::<usize>()
    }

    /// Bytes that one version adds.
    pub(crate) fn version_len((version, record): &(VersionDump, Option<SessionRecord>)) -> usize {
        8 + 8 + 8 + 1 + 4 + version.data.as_ref().map_or(0, Vec::len) + record.as_ref().map_or(0, |_| RECORD_LEN)
    }

    /// Whether it has no versions.
    pub fn is_empty(&self) -> bool {
        self.versions.is_empty()
    }

    fn emit(&self, out: &mut Vec<u8>) {
        put_key(out, &self.key);
        out.extend_from_slice(&(self.versions.len() as u16).to_be_bytes());
        for (version, record) in &self.versions {
            for number in [version.seq, version.cas, version.expiry] {
                put_u64(out, number);
            }
            out.push(u8::from(version.data.is_none()) | u8::from(record.is_some()) << 1);
            let data = version.data.as_deref().unwrap_or_default();
            out.extend_from_slice(&(data.len() as u32).to_be_bytes());
            out.extend_from_slice(data);
            if let Some(record) = record {
                put_record(out, record);
            }
        }
    }

    fn parse(value: &mut Reader<'_>) -> Option<Self> {
        let key = value.key()?;
        let mut versions = Vec::new();
        for _ in 0..u16::from_be_bytes(value.take()?) {
            let (seq, cas, expiry) = (value.u64()?, value.u64()?, value.u64()?);
            let flags = value.u8()?;
            let len = u32::from_be_bytes(value.take()?) as usize;
            let data = value.bytes(len)?.to_vec();
            let record = if flags & 2 != 0 { Some(value.record()?) } else { None };
            let data = (flags & 1 == 0).then_some(data);
            versions.push((VersionDump { seq, cas, expiry, data }, record));
        }
        Some(Self { key, versions })
    }
}

/// The value of ABORT: the record to keep, of a write that nobody has processed. Its status is ABORTED.
pub fn emit_abort(record: &SessionRecord) -> Vec<u8> {
    let mut out = Vec::with_capacity(RECORD_LEN);
    put_record(&mut out, record);
    out
}

/// The record of an ABORT.
pub fn parse_abort(value: &[u8]) -> Option<SessionRecord> {
    let mut value = Reader(value);
    let record = value.record()?;
    value.0.is_empty().then_some(record)
}

/// Bytes of a session record.
const RECORD_LEN: usize = 8 + 8 + 8 + 8 + 8 + 4 + 2 + 1 + 1;

fn put_u64(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_be_bytes());
}

fn put_key(out: &mut Vec<u8>, key: &[u8]) {
    out.push(key.len() as u8);
    out.extend_from_slice(key);
}

fn put_record(out: &mut Vec<u8>, record: &SessionRecord) {
    for number in [record.session.0, record.request, record.seq, record.result, record.token] {
        put_u64(out, number);
    }
    out.extend_from_slice(&record.client.addr.octets());
    out.extend_from_slice(&record.client.port.to_be_bytes());
    out.extend_from_slice(&[record.kind, record.status]);
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        Some(u8::from_be_bytes(self.take()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(self.take()?))
    }

    fn key(&mut self) -> Option<Vec<u8>> {
        let len = usize::from(self.u8()?);
        self.bytes(len).map(<[u8]>::to_vec)
    }

    fn record(&mut self) -> Option<SessionRecord> {
        let (session, request, seq) = (SessionId(self.u64()?), self.u64()?, self.u64()?);
        let (result, token) = (self.u64()?, self.u64()?);
        let client = Endpoint { addr: Ipv4Addr::from(self.take::<4>()?), port: u16::from_be_bytes(self.take()?) };
        let (kind, status) = (self.u8()?, self.u8()?);
        Some(SessionRecord { session, request, seq, status, result, kind, token, client })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> SessionRecord {
        SessionRecord {
            session: SessionId::new(3, 4),
            request: 5,
            seq: 6,
            status: 1,
            result: 7,
            kind: 2,
            token: 8,
            client: Endpoint { addr: [10, 0, 0, 9].into(), port: 1234 },
        }
    }

    fn chain() -> Chain {
        let version =
            |seq, data: Option<&[u8]>| VersionDump { seq, cas: seq - 1, expiry: 9, data: data.map(<[u8]>::to_vec) };
        Chain {
            key: b"key".to_vec(),
            versions: vec![
                (version(9, Some(b"data")), Some(record())),
                (version(8, Some(b"")), None),
                (version(7, None), None),
            ],
        }
    }

    #[test]
    fn what_is_emitted_is_parsed_and_nothing_cut_short_is() {
        let held = vec![
            Held::Version { key: b"k".to_vec(), seq: 5, writer: Some((SessionId::new(1, 2), 3)) },
            Held::Version { key: vec![7; 250], seq: 6, writer: None },
            Held::Aborted(record()),
        ];
        let collected = Collected { incarnation: 1, stable: 2, time: 3, next: 4, held };
        assert_eq!(Collected::parse(&collected.emit()), Some(collected.clone()));
        assert_eq!(collected.emit().len(), 32 + collected.held.iter().map(Held::page_len).sum::<usize>());
        for fetch in [Fetch::Key, Fetch::Page(u64::MAX), Fetch::Sessions(65535)] {
            assert_eq!(Fetch::parse(&fetch.emit()), Some(fetch));
        }
        let empty = Chain { versions: Vec::new(), ..chain() };
        for fetched in [
            Fetched::Key(chain()),
            Fetched::Key(empty),
            Fetched::Page { cursor: 1, next: 2, items: 3, chains: vec![chain(), chain()] },
            Fetched::Sessions { from: 16, end: 65536, records: vec![record(); usize::from(SESSIONS_PAGE)] },
        ] {
            let bytes = fetched.emit();
            assert_eq!(Fetched::parse(&bytes), Some(fetched.clone()));
            if let Fetched::Key(chain) = &fetched {
                assert_eq!(bytes.len(), 1 + chain.len());
                for cut in 0..bytes.len() {
                    assert_eq!(Fetched::parse(&bytes[..cut]), None, "cut at {cut}");
                }
            }
            assert!(matches!(fetched, Fetched::Page { .. }) || bytes.len() <= PAGE_MAX);
        }
    }
}
