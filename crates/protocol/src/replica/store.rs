//! All versions of all keys, in shards by hash, each under a lock of its own, within one budget of memory.

use std::{
    collections::{BinaryHeap, VecDeque},
    hash::Hasher,
    mem,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use hashbrown::HashTable;
use siphasher::sip::SipHasher13;

use super::{
    ItemDump, VersionDump,
    chain::{CHAIN_MAX, OLDER_COST, Outcome, Version},
};
use crate::wire::{Kind, Operand, Status};

/// Bytes charged for a version's place in the queue of unsettled ones, spare capacity included.
const QUEUE_COST: u64 = 48;

/// One part in this many of the budget is kept for writes that never grow the store.
const RESERVE_DIVISOR: u64 = 32;

/// The write found no room: neither applied nor recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// The memory budget is used up, or the key has [`CHAIN_MAX`] versions above `stable` and this would be the newest.
    Full,
    /// `stable` says that this write is resolved, or another write has its seq: no coordinator sends such a one.
    Resolved,
    /// A conditional write of a key whose chain a learner does not have yet.
    Uncopied,
    /// The session table has no place for the writer's record.
    Session,
}

/// A version above `stable`.
#[derive(Clone, Copy)]
struct Unsettled {
    seq: u64,
    hash: u64,
    /// Session index of its writer; [`NO_WRITER`] if it came without a record.
    writer: u32,
}

const NO_WRITER: u32 = u32::MAX;
const _: () = assert!(mem::size_of::<Unsettled>() * 2 == QUEUE_COST as usize);

/// A version, and the session index of its writer if the record may still be of it.
pub(super) type Written = (VersionDump, Option<u16>);

/// Memory in use, all shards together.
struct Budget {
    used: AtomicU64,
    total: u64,
}

impl Budget {
    /// Takes `bytes` if they are there. A write that never grows the store may use the reserve.
    fn charge(&self, bytes: u64, reserve: bool) -> Result<(), Refused> {
        let limit = if reserve { self.total } else { self.total - self.total / RESERVE_DIVISOR };
        // Added first, so that two threads cannot both take the last bytes; a write that fails beside another that is
        // about to give its bytes back may be refused needlessly, and is sent again.
        if self.used.fetch_add(bytes, Relaxed).saturating_add(bytes) > limit {
            self.used.fetch_sub(bytes, Relaxed);
            return Err(Refused::Full);
        }
        Ok(())
    }

    fn release(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Relaxed);
    }
}

/// The keys of one range of hashes.
#[repr(align(128))]
struct KeyShard {
    table: HashTable<Version>,
    /// Every version above `stable`, in the order of seqs.
    unsettled: VecDeque<Unsettled>,
    /// A learner: hashes of keys whose tombstone waits for the end of copying. Each key is here once.
    kept: Vec<u64>,
    /// Hashes of the keys to settle next; here for its capacity.
    settling: Vec<u64>,
    stable: u64,
    /// Keys whose newest version is not a tombstone.
    items: u64,
    /// Versions in all chains.
    versions: u64,
}

impl KeyShard {
    /// Writes arrive nearly in the order of their seqs, so a late one passes few others.
    fn queue(&mut self, seq: u64, hash: u64, writer: u32) {
        let at = match self.unsettled.back() {
            Some(last) if last.seq > seq => self.from(seq),
            _ => self.unsettled.len(),
        };
        self.unsettled.insert(at, Unsettled { seq, hash, writer });
    }

    /// Place of the first unsettled version of this seq or a higher one.
    fn from(&self, seq: u64) -> usize {
        self.unsettled.partition_point(|other| other.seq < seq)
    }

    fn unsettled(&self, seq: u64) -> Option<&Unsettled> {
        self.unsettled.get(self.from(seq)).filter(|found| found.seq == seq)
    }

    fn written(&self, version: &Version) -> Written {
        let writer = self.unsettled(version.seq).map_or(NO_WRITER, |found| found.writer);
        (version.dump(), u16::try_from(writer).ok())
    }

    /// Key of the unsettled version.
    fn key_of(&self, found: &Unsettled) -> Option<&[u8]> {
        let heads = self.table.iter_hash(found.hash);
        heads.filter(|head| head.iter().any(|version| version.seq == found.seq)).map(Version::key).next()
    }
}

/// What a store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Keys whose newest version is an item.
    pub items: u64,
    /// Keys with any version: tombstones not yet stable included.
    pub keys: u64,
    /// Versions, tombstones included.
    pub versions: u64,
    /// Versions above `stable`.
    pub unsettled: u64,
    /// Bytes of the budget in use.
    pub used_bytes: u64,
    /// The budget in bytes.
    pub budget_bytes: u64,
}

pub(super) struct Store {
    shards: Box<[Mutex<KeyShard>]>,
    hash_key: [u8; 16],
    budget: Budget,
}

impl Store {
    /// `shards` is a power of two up to 512.
    pub fn new(shards: usize, hash_key: [u8; 16], budget_bytes: u64) -> Self {
        assert!(shards.is_power_of_two() && shards <= 512, "{shards} key shards: a power of two up to 512");
        let shard = || KeyShard {
            table: HashTable::new(),
            unsettled: VecDeque::new(),
            kept: Vec::new(),
            settling: Vec::new(),
            stable: 0,
            items: 0,
            versions: 0,
        };
        Self {
            shards: (0..shards).map(|_| Mutex::new(shard())).collect(),
            hash_key,
            budget: Budget { used: AtomicU64::new(0), total: budget_bytes },
        }
    }

    /// The keyed hash of a key: nobody outside can make keys that collide.
    pub fn hash(&self, key: &[u8]) -> u64 {
        let mut hasher = SipHasher13::new_with_key(&self.hash_key);
        hasher.write(key);
        hasher.finish()
    }

    fn index(&self, hash: u64) -> usize {
        // The table takes its tag from the top seven bits and its slot from the bottom ones.
        (hash >> 48) as usize & (self.shards.len() - 1)
    }

    fn lock(&self, hash: u64) -> MutexGuard<'_, KeyShard> {
        self.shards[self.index(hash)].lock().expect("a thread panicked with a key shard locked")
    }

    fn each(&self) -> impl Iterator<Item = MutexGuard<'_, KeyShard>> {
        self.shards.iter().map(|shard| shard.lock().expect("a thread panicked with a key shard locked"))
    }

    /// Copies the item that a read with this bound and time sees to the front of `out`; its cas and its length.
    pub fn read(&self, key: &[u8], bound: u64, time: u64, out: &mut [u8]) -> Option<(u64, usize)> {
        let hash = self.hash(key);
        let shard = self.lock(hash);
        // `stable` as this shard was pruned by: with an older one a pruned version might be asked for.
        let bound = bound.max(shard.stable);
        let head = shard.table.find(hash, |version| version.key() == key)?;
        let version = head.at(bound).filter(|version| version.found_at(time))?;
        let data = version.data();
        out[..data.len()].copy_from_slice(data);
        Some((version.cas, data.len()))
    }

    /// Applies a write: stores the version that is its outcome, and reports status and result. With `uncopied`, chains that
    /// are not marked as copied lack what the donor has: nothing conditional is executed on them.
    #[allow(clippy::too_many_arguments)]
    pub fn write(
        &self,
        kind: Kind,
        key: &[u8],
        operand: &Operand<'_>,
        seq: u64,
        time: u64,
        writer: u16,
        uncopied: bool,
        #[cfg(feature = "published")] ignore_loser: bool,
    ) -> Result<(Status, u64), Refused> {
        let hash = self.hash(key);
        let mut guard = self.lock(hash);
        let shard = &mut *guard;
        let stable = shard.stable;
        if seq <= stable {
            return Err(Refused::Resolved);
        }
        let reserve = kind.never_grows();
        let Some(head) = shard.table.find_mut(hash, |version| version.key() == key) else {
            if uncopied && kind.is_conditional() {
                return Err(Refused::Uncopied);
            }
            let outcome = Outcome::of(kind, key.len(), operand, seq, time, None);
            let cost = outcome.blob_cost(key) + QUEUE_COST;
            self.budget.charge(cost, reserve)?;
            if let Err(refused) = self.grow(shard, reserve) {
                self.budget.release(cost);
                return Err(refused);
            }
            let version = outcome.version(key, seq);
            shard.items += u64::from(!version.tombstone);
            shard.versions += 1;
            shard.table.insert_unique(hash, version, |version| self.hash(version.key()));
            shard.queue(seq, hash, writer.into());
            return Ok((outcome.status, outcome.result));
        };
        if uncopied && kind.is_conditional() && !head.copied {
            return Err(Refused::Uncopied);
        }

        #[cfg(feature = "published")]
        if ignore_loser && head.seq > seq {
            return Ok((Status::Ok, 0));
        }
        if head.chain_len() >= CHAIN_MAX {
            let before = head.chain_len();
            self.budget.release(head.prune(stable));
            shard.versions -= (before - head.chain_len()) as u64;
            // One that newer writes of the key overtook is let in: `stable` waits for it, and with it everybody's room.
            // Of these there is at most one for each session.
            let is_newest = seq > head.seq;
            if is_newest && head.iter().take_while(|version| version.seq > stable).count() >= CHAIN_MAX {
                return Err(Refused::Full);
            }
        }
        let base = head.at(seq);
        if base.is_some_and(|version| version.seq == seq) {
            return Err(Refused::Resolved);
        }
        let outcome = Outcome::of(kind, key.len(), operand, seq, time, base);
        self.budget.charge(outcome.blob_cost(key) + OLDER_COST + QUEUE_COST, reserve)?;
        let answer = (outcome.status, outcome.result);
        let version = outcome.version(key, seq);
        shard.items -= u64::from(!head.tombstone);
        head.insert(version);
        shard.items += u64::from(!head.tombstone);
        shard.versions += 1;
        shard.queue(seq, hash, writer.into());
        Ok(answer)
    }

    /// Stores a version that another replica holds, unless it is there. One up to `stable` is ignored, but for a learner
    /// (`below_stable`): to that one it may be new, and is dropped again if a newer stable one is there.
    pub fn put(
        &self,
        key: &[u8],
        dump: &VersionDump,
        writer: Option<u16>,
        below_stable: bool,
        keep: bool,
    ) -> Result<(), Refused> {
        let hash = self.hash(key);
        let mut guard = self.lock(hash);
        let shard = &mut *guard;
        let (seq, stable) = (dump.seq, shard.stable);
        let settled = seq <= stable;
        if seq == 0 || settled && !below_stable {
            return Ok(());
        }
        let version = Version::of(key, dump);
        let queue_cost = if settled { 0 } else { QUEUE_COST };
        if let Some(head) = shard.table.find_mut(hash, |version| version.key() == key) {
            let there = |version: &Version| version.seq == seq || settled && (seq..=stable).contains(&version.seq);
            if head.iter().any(there) {
                // It may have come without its writer's record before.
                let at = shard.from(seq);
                if let (Some(found), Some(index)) = (shard.unsettled.get_mut(at).filter(|it| it.seq == seq), writer) {
                    found.writer = index.into();
                }
                return Ok(());
            }
            self.budget.charge(version.blob_cost() + OLDER_COST + queue_cost, true)?;
            shard.items -= u64::from(!head.tombstone);
            head.insert(version);
            shard.items += u64::from(!head.tombstone);
            let before = head.chain_len();
            self.budget.release(head.prune(stable));
            shard.versions += 1;
            shard.versions -= (before - head.chain_len()) as u64;
        } else {
            let cost = version.blob_cost() + queue_cost;
            self.budget.charge(cost, true)?;
            if let Err(refused) = self.grow(shard, true) {
                self.budget.release(cost);
                return Err(refused);
            }
            shard.items += u64::from(!version.tombstone);
            shard.versions += 1;
            shard.table.insert_unique(hash, version, |version| self.hash(version.key()));
        }
        if settled {
            self.vanish(shard, hash, keep);
        } else {
            shard.queue(seq, hash, writer.map_or(NO_WRITER, u32::from));
        }
        Ok(())
    }

    /// A learner: marks that the donor's versions of the key are here, all of them; there may be none.
    pub fn mark_copied(&self, key: &[u8]) -> Result<(), Refused> {
        let hash = self.hash(key);
        let mut guard = self.lock(hash);
        let shard = &mut *guard;
        if let Some(head) = shard.table.find_mut(hash, |version| version.key() == key) {
            head.copied = true;
            return Ok(());
        }
        let mut version = Version::of(key, &VersionDump { seq: 0, cas: 0, expiry: 0, data: None });
        version.copied = true;
        let cost = version.blob_cost();
        self.budget.charge(cost, true)?;
        if let Err(refused) = self.grow(shard, true) {
            self.budget.release(cost);
            return Err(refused);
        }
        shard.versions += 1;
        shard.table.insert_unique(hash, version, |version| self.hash(version.key()));
        self.vanish(shard, hash, true);
        Ok(())
    }

    /// A learner becomes active: tombstones that it kept vanish.
    pub fn forget_tombstones(&self) {
        for mut guard in self.each() {
            let shard = &mut *guard;
            for hash in mem::take(&mut shard.kept) {
                self.budget.release(QUEUE_COST);
                self.vanish(shard, hash, false);
            }
        }
    }

    /// Forgets everything. The caller lets nobody else in.
    pub fn clear(&self) {
        for mut shard in self.each() {
            let shard = &mut *shard;
            shard.table = HashTable::new();
            (shard.unsettled, shard.kept, shard.settling) = Default::default();
            (shard.stable, shard.items, shard.versions) = (0, 0, 0);
        }
        self.budget.used.store(0, Relaxed);
    }

    /// Makes room for one more key in the shard's table, or refuses if the budget does not hold the larger table.
    fn grow(&self, shard: &mut KeyShard, reserve: bool) -> Result<(), Refused> {
        if shard.table.len() < shard.table.capacity() {
            return Ok(());
        }
        let before = shard.table.allocation_size() as u64;
        // Doubling adds as much again. What is charged in the end is what the allocation really grew by.
        let expected = before.max(8 * mem::size_of::<Version>() as u64);
        self.budget.charge(expected, reserve)?;
        shard.table.reserve(1, |version| self.hash(version.key()));
        let grown = shard.table.allocation_size() as u64 - before;
        self.budget.used.fetch_add(grown, Relaxed);
        self.budget.release(expected);
        Ok(())
    }

    /// Every write up to `stable` is resolved: drops the versions and tombstones that nobody can ask for any more; with
    /// `keep` only the versions.
    pub fn settle(&self, stable: u64, keep: bool) {
        for mut guard in self.each() {
            self.settle_shard(&mut guard, stable, keep);
        }
    }

    fn settle_shard(&self, shard: &mut KeyShard, stable: u64, keep: bool) {
        if stable <= shard.stable {
            return;
        }
        shard.stable = stable;
        while let Some(&Unsettled { seq, hash, .. }) = shard.unsettled.front() {
            if seq > stable {
                break;
            }
            shard.unsettled.pop_front();
            shard.settling.push(hash);
            self.budget.release(QUEUE_COST);
        }
        // Once for each key, however many of its versions became stable.
        shard.settling.sort_unstable();
        shard.settling.dedup();
        let mut settling = mem::take(&mut shard.settling);
        for hash in settling.drain(..) {
            // These iterate over every key that may have this hash. To prune another one too does no harm.
            for head in shard.table.iter_hash_mut(hash) {
                let before = head.chain_len();
                self.budget.release(head.prune(stable));
                shard.versions -= (before - head.chain_len()) as u64;
            }
            self.vanish(shard, hash, keep);
        }
        shard.settling = settling;
        if shard.unsettled.capacity() > 1024 + 4 * shard.unsettled.len() {
            shard.unsettled.shrink_to(2 * shard.unsettled.len());
            shard.settling.shrink_to(1024);
        }
    }

    /// Takes out the tombstones of this hash that nothing needs any more, or notes them for later.
    fn vanish(&self, shard: &mut KeyShard, hash: u64, keep: bool) {
        let stable = shard.stable;
        if keep {
            let vanished = |head: &&mut Version| head.vanished(stable) && !head.kept;
            for head in shard.table.iter_hash_mut(hash).filter(vanished) {
                head.kept = true;
                // Not the hash asked for, if this one only looks alike.
                shard.kept.push(self.hash(head.key()));
                self.budget.used.fetch_add(QUEUE_COST, Relaxed);
            }
            return;
        }
        while let Ok(entry) = shard.table.find_entry(hash, |head| head.vanished(stable)) {
            let (head, _) = entry.remove();
            self.budget.release(head.blob_cost());
            shard.versions -= 1;
        }
    }

    /// Whether not a single version is held.
    pub fn is_empty(&self) -> bool {
        self.each().all(|shard| shard.table.is_empty())
    }

    pub fn usage(&self) -> Usage {
        let mut usage = Usage { budget_bytes: self.budget.total, ..Usage::default() };
        for shard in self.each() {
            usage.items += shard.items;
            usage.keys += shard.table.len() as u64;
            usage.versions += shard.versions;
            usage.unsettled += shard.unsettled.len() as u64;
        }
        usage.used_bytes = self.used_bytes();
        usage
    }

    pub fn used_bytes(&self) -> u64 {
        self.budget.used.load(Relaxed)
    }

    /// Everything, in the order of keys. What a learner notes of keys that its donor does not have is left out.
    pub fn dump(&self) -> Vec<ItemDump> {
        let mut items = Vec::new();
        for shard in self.each() {
            items.extend(shard.table.iter().map(|head| {
                let versions = head.iter().filter(|version| version.seq > 0).map(Version::dump).collect();
                ItemDump { key: head.key().to_vec(), versions }
            }));
        }
        items.retain(|item| !item.versions.is_empty());
        items.sort_by(|a, b| a.key.cmp(&b.key));
        items
    }

    /// The versions of a key, newest first.
    pub fn chain(&self, key: &[u8]) -> Vec<Written> {
        let hash = self.hash(key);
        let shard = self.lock(hash);
        let head = shard.table.find(hash, |version| version.key() == key);
        head.map_or(Vec::new(), |head| head.iter().map(|version| shard.written(version)).collect())
    }

    /// Keys have places in one order, key shard by key shard: that of their hash, turned so that the bits that choose the
    /// shard come first. The place is the shard's number in the highest bits, then the rest of the hash.
    fn turn(&self) -> u32 {
        16 - self.shards.len().trailing_zeros()
    }

    /// The places of all keys of the key shard that `place` is in, in order, and where the next shard begins; 0: there is
    /// none.
    pub fn places(&self, place: u64) -> (Vec<u64>, u64) {
        let turn = self.turn();
        // Beyond the last shard the bits run out: 0.
        let next = (self.shard_of(place) as u64 + 1).checked_shl(48 + turn).unwrap_or(0);
        let shard = self.lock(place.rotate_right(turn));
        let mut places: Vec<_> = shard.table.iter().map(|head| self.hash(head.key()).rotate_left(turn)).collect();
        drop(shard);
        places.sort_unstable();
        places.dedup();
        (places, next)
    }

    /// The key shard that a place is in.
    pub fn shard_of(&self, place: u64) -> usize {
        self.index(place.rotate_right(self.turn()))
    }

    /// The keys at a place, seldom more than one, with their versions.
    pub fn at(&self, place: u64) -> Vec<(Vec<u8>, Vec<Written>)> {
        let hash = place.rotate_right(self.turn());
        let shard = self.lock(hash);
        let heads = shard.table.iter_hash(hash).filter(|head| self.hash(head.key()) == hash);
        heads.map(|head| (head.key().to_vec(), head.iter().map(|version| shard.written(version)).collect())).collect()
    }

    /// Up to `count` versions above `stable` with the lowest seqs from `seq` on: seq, key and writer.
    pub fn unsettled(&self, seq: u64, count: usize) -> Vec<(u64, Vec<u8>, Option<u16>)> {
        let mut lowest = BinaryHeap::with_capacity(count + 1);
        for (number, shard) in self.each().enumerate() {
            for found in shard.unsettled.range(shard.from(seq)..) {
                if lowest.len() == count && lowest.peek().is_some_and(|&(highest, _)| found.seq >= highest) {
                    break;
                }
                lowest.push((found.seq, number));
                if lowest.len() > count {
                    lowest.pop();
                }
            }
        }
        let found = |(seq, number): (u64, usize)| {
            let shard = self.shards[number].lock().expect("a thread panicked with a key shard locked");
            // Gone if it became stable just now.
            let found = *shard.unsettled(seq)?;
            let key = shard.key_of(&found).expect("every unsettled version is in the table").to_vec();
            Some((seq, key, u16::try_from(found.writer).ok()))
        };
        lowest.into_sorted_vec().into_iter().filter_map(found).collect()
    }

    /// The key of the version with this seq, if it is above `stable`.
    pub fn key_of(&self, seq: u64) -> Option<Vec<u8>> {
        self.each().find_map(|shard| Some(shard.key_of(shard.unsettled(seq)?)?.to_vec()))
    }

    /// Recounts what `usage` says from the chains themselves, for tests: `(items, versions, bytes)`.
    pub fn recount(&self) -> (u64, u64, u64) {
        let (mut items, mut versions, mut bytes) = (0, 0, 0);
        for shard in self.each() {
            bytes +=
                shard.table.allocation_size() as u64 + (shard.unsettled.len() + shard.kept.len()) as u64 * QUEUE_COST;
            for head in shard.table.iter() {
                items += u64::from(!head.tombstone);
                versions += head.iter().count() as u64;
                bytes += head.iter().map(Version::blob_cost).sum::<u64>();
                bytes += (head.iter().count() as u64 - 1) * OLDER_COST;
            }
        }
        (items, versions, bytes)
    }
}
