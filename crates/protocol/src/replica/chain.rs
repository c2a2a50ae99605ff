//! The versions of one key, and what each kind of write makes of them (protocol.md, section 4).

use std::mem;

use super::VersionDump;
use crate::wire::{Kind, Operand, PAYLOAD_MAX, Status};

/// Versions above `stable` beyond which a key takes no newer one. Older ones that come late are taken beyond it, at most
/// one for each session.
pub const CHAIN_MAX: usize = 4096;

/// One version of a key, and through `older` the chain below it.
///
/// The newest version of a chain lies in the hash table itself, so that a read of a settled key touches two places in
/// memory: the table's slot and the blob.
pub(super) struct Version {
    /// The key, then the data: one allocation.
    blob: Box<[u8]>,
    /// The write that stored it.
    pub seq: u64,
    /// The last write that changed the content.
    pub cas: u64,
    /// When it expires, in milliseconds of packet time; 0: never.
    pub expiry: u64,
    key_len: u8,
    /// The key has no item as of this version.
    pub tombstone: bool,
    /// A learner: the donor's versions of the key are in the chain. Kept at the head alone.
    pub copied: bool,
    /// A learner: the key is among those to look at when it becomes active. Kept at the head alone.
    pub kept: bool,
    /// Versions in the chain. Kept at the head alone.
    len: u32,
    older: Option<Box<Version>>,
}

/// What glibc's allocator takes for `bytes`: an 8-byte header, rounded up to 16, at least 32.
pub(super) const fn allocated(bytes: usize) -> u64 {
    let rounded = (bytes + 8).next_multiple_of(16);
    if rounded < 32 { 32 } else { rounded as u64 }
}

/// Bytes that an older version takes beside its blob.
pub(super) const OLDER_COST: u64 = allocated(mem::size_of::<Version>());

impl Version {
    /// The key.
    pub fn key(&self) -> &[u8] {
        &self.blob[..usize::from(self.key_len)]
    }

    /// The data; empty for a tombstone.
    pub fn data(&self) -> &[u8] {
        &self.blob[usize::from(self.key_len)..]
    }

    /// Whether a request stamped `time` finds an item in it.
    pub fn found_at(&self, time: u64) -> bool {
        !self.tombstone && (self.expiry == 0 || time < self.expiry)
    }

    /// Bytes that its blob takes.
    pub fn blob_cost(&self) -> u64 {
        allocated(self.blob.len())
    }

    /// This version and the older ones, newest first.
    pub fn iter(&self) -> impl Iterator<Item = &Version> {
        std::iter::successors(Some(self), |version| version.older.as_deref())
    }

    /// The newest version with a seq up to `bound`.
    pub fn at(&self, bound: u64) -> Option<&Version> {
        self.iter().find(|version| version.seq <= bound)
    }

    /// Versions in the chain that this one heads.
    pub fn chain_len(&self) -> usize {
        self.len as usize
    }

    /// Puts `version` where its seq belongs in the chain that `self` heads. The caller made sure that no version has its
    /// seq.
    pub fn insert(&mut self, mut version: Version) {
        let len = self.len + 1;
        if version.seq > self.seq {
            (version.copied, version.kept) = (self.copied, self.kept);
            version.older = Some(Box::new(mem::replace(self, version_placeholder())));
            *self = version;
        } else {
            // A PUT that arrives after a newer one: it may yet be the newest committed.
            let mut newer = &mut *self;
            while newer.older.as_ref().is_some_and(|next| next.seq > version.seq) {
                newer = newer.older.as_mut().expect("just seen");
            }
            version.older = newer.older.take();
            newer.older = Some(Box::new(version));
        }
        self.len = len;
    }

    /// Drops the versions older than the newest one up to `stable`; returns the bytes that this frees.
    pub fn prune(&mut self, stable: u64) -> u64 {
        if self.older.is_none() {
            return 0;
        }
        let mut kept = 1;
        let mut version = &mut *self;
        while version.seq > stable {
            match &mut version.older {
                Some(older) => version = older,
                None => return 0,
            }
            kept += 1;
        }
        let mut freed = 0;
        let mut dropped = version.older.take();
        while let Some(mut version) = dropped {
            freed += OLDER_COST + version.blob_cost();
            // One after the other: dropping a chain of thousands by recursion would eat the stack.
            dropped = version.older.take();
        }
        self.len = kept;
        freed
    }

    /// Whether it is a tombstone that nothing needs any more.
    pub fn vanished(&self, stable: u64) -> bool {
        self.tombstone && self.seq <= stable && self.older.is_none()
    }
}

impl Version {
    /// A version that another replica holds.
    pub fn of(key: &[u8], dump: &VersionDump) -> Self {
        let data = dump.data.as_deref().unwrap_or_default();
        let mut blob = Vec::with_capacity(key.len() + data.len());
        blob.extend_from_slice(key);
        blob.extend_from_slice(data);
        Self {
            blob: blob.into_boxed_slice(),
            seq: dump.seq,
            cas: dump.cas,
            expiry: dump.expiry,
            key_len: key.len() as u8,
            tombstone: dump.data.is_none(),
            copied: false,
            kept: false,
            len: 1,
            older: None,
        }
    }

    /// For others.
    pub fn dump(&self) -> VersionDump {
        VersionDump {
            seq: self.seq,
            cas: self.cas,
            expiry: self.expiry,
            data: (!self.tombstone).then(|| self.data().to_vec()),
        }
    }
}

impl Drop for Version {
    fn drop(&mut self) {
        let mut dropped = self.older.take();
        while let Some(mut version) = dropped {
            dropped = version.older.take();
        }
    }
}

/// Stands in a slot for the moment in which its version moves.
fn version_placeholder() -> Version {
    Version {
        blob: Box::default(),
        seq: 0,
        cas: 0,
        expiry: 0,
        key_len: 0,
        tombstone: true,
        copied: false,
        kept: false,
        len: 0,
        older: None,
    }
}

/// Content of the version that a write stores.
enum Content<'a> {
    Tombstone,
    Data([&'a [u8]; 2]),
    Number(String),
}

/// What a write does, worked out but not stored yet.
pub(super) struct Outcome<'a> {
    /// Status to report.
    pub status: Status,
    /// For an INCR with status OK, the new number as 64 bits.
    pub result: u64,
    content: Content<'a>,
    cas: u64,
    expiry: u64,
}

impl<'a> Outcome<'a> {
    /// Executes a write on `base`, the newest version below its seq. PUT ignores it.
    pub fn of(
        kind: Kind,
        key_len: usize,
        operand: &Operand<'a>,
        seq: u64,
        time: u64,
        base: Option<&'a Version>,
    ) -> Outcome<'a> {
        let expires = |ttl_ms: u64| if ttl_ms == 0 { 0 } else { time.saturating_add(ttl_ms) };
        let found = base.filter(|version| version.found_at(time));

        // The same content again: what every failed condition stores. Not found is stored as a tombstone.
        let failed = |status| match found {
            Some(old) => Outcome {
                status,
                result: 0,
                content: Content::Data([old.data(), &[]]),
                cas: old.cas,
                expiry: old.expiry,
            },
            None => Outcome { status, result: 0, content: Content::Tombstone, cas: seq, expiry: 0 },
        };
        // Without a lifetime these kinds store for ever ...
        let stored = |data: &'a [u8]| Outcome {
            status: Status::Ok,
            result: 0,
            content: Content::Data([data, &[]]),
            cas: seq,
            expiry: expires(operand.ttl_ms.unwrap_or(0)),
        };
        // ... and these keep the item's expiry.
        let changed = |old: &Version, result, content| Outcome {
            status: Status::Ok,
            result,
            content,
            cas: seq,
            expiry: operand.ttl_ms.map_or(old.expiry, expires),
        };
        let joined = |old: &'a Version, front: &'a [u8], back: &'a [u8]| {
            if key_len + front.len() + back.len() > PAYLOAD_MAX {
                failed(Status::TooLarge)
            } else {
                changed(old, 0, Content::Data([front, back]))
            }
        };

        match (kind, found) {
            (Kind::Put, _) => stored(operand.data),
            (Kind::Add, None) => stored(operand.data),
            (Kind::Add, Some(_)) => failed(Status::NotStored),
            (Kind::Replace, Some(_)) => stored(operand.data),
            (Kind::Cas, Some(old)) if old.cas == operand.expected => stored(operand.data),
            (Kind::Cas, Some(_)) => failed(Status::Exists),
            (Kind::Replace | Kind::Append | Kind::Prepend, None) => failed(Status::NotStored),
            (Kind::Delete | Kind::Cas | Kind::Incr | Kind::Touch, None) => failed(Status::NotFound),
            (Kind::Delete, Some(_)) => {
                Outcome { status: Status::Ok, result: 0, content: Content::Tombstone, cas: seq, expiry: 0 }
            }
            (Kind::Append, Some(old)) => joined(old, old.data(), operand.data),
            (Kind::Prepend, Some(old)) => joined(old, operand.data, old.data()),
            (Kind::Incr, Some(old)) => match number(old.data()) {
                None => failed(Status::NotANumber),
                Some(number) => match number.checked_add(operand.delta) {
                    None => failed(Status::Overflow),
                    Some(sum) => changed(old, sum as u64, Content::Number(sum.to_string())),
                },
            },
            (Kind::Touch, Some(old)) => Outcome {
                status: Status::Ok,
                result: 0,
                content: Content::Data([old.data(), &[]]),
                cas: old.cas,
                expiry: operand.ttl_ms.map_or(old.expiry, expires),
            },
        }
    }

    fn parts(&self) -> [&[u8]; 2] {
        match &self.content {
            Content::Tombstone => [&[], &[]],
            Content::Data(parts) => *parts,
            Content::Number(text) => [text.as_bytes(), &[]],
        }
    }

    /// Bytes that the version's blob will take.
    pub fn blob_cost(&self, key: &[u8]) -> u64 {
        let [front, back] = self.parts();
        allocated(key.len() + front.len() + back.len())
    }

    /// The version to store.
    pub fn version(&self, key: &[u8], seq: u64) -> Version {
        let [front, back] = self.parts();
        let mut blob = Vec::with_capacity(key.len() + front.len() + back.len());
        blob.extend_from_slice(key);
        blob.extend_from_slice(front);
        blob.extend_from_slice(back);
        Version {
            blob: blob.into_boxed_slice(),
            seq,
            cas: self.cas,
            expiry: self.expiry,
            key_len: key.len() as u8,
            tombstone: matches!(self.content, Content::Tombstone),
            copied: false,
            kept: false,
            len: 1,
            older: None,
        }
    }
}

/// The decimal text of a signed 64-bit number: digits, a minus in front if need be, nothing else.
fn number(text: &[u8]) -> Option<i64> {
    if text.first() == Some(&b'+') {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}
