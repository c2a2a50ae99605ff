//! All versions of all keys, in shards by hash, each under a lock of its own, within one budget of memory.

use std::{
    collections::VecDeque,
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
const QUEUE_COST: u64 = 32;

/// One part in this many of the budget is kept for writes that never grow the store.
const RESERVE_DIVISOR: u64 = 32;

/// The write found no room: neither applied nor recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// The memory budget is used up, or the key has [`CHAIN_MAX`] versions above `stable` and this would be the newest.
    Full,
    /// `stable` says that this write is resolved, or another write has its seq: no coordinator sends such a one.
    Resolved,
}

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
    /// Every version above `stable`: (seq, hash of its key), in the order of seqs.
    unsettled: VecDeque<(u64, u64)>,
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
    fn queue(&mut self, seq: u64, hash: u64) {
        let at = match self.unsettled.back() {
            Some(&(last, _)) if last > seq => self.unsettled.partition_point(|&(other, _)| other < seq),
            _ => self.unsettled.len(),
        };
        self.unsettled.insert(at, (seq, hash));
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

    fn lock(&self, hash: u64) -> MutexGuard<'_, KeyShard> {
        // The table takes its tag from the top seven bits and its slot from the bottom ones.
        let index = (hash >> 48) as usize & (self.shards.len() - 1);
        self.shards[index].lock().expect("a thread panicked with a key shard locked")
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

    /// Applies a write: stores the version that is its outcome, and reports status and result.
    #[allow(clippy::too_many_arguments)]
    pub fn write(
        &self,
        kind: Kind,
        key: &[u8],
        operand: &Operand<'_>,
        seq: u64,
        time: u64,
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
            shard.queue(seq, hash);
            return Ok((outcome.status, outcome.result));
        };

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
        shard.queue(seq, hash);
        Ok(answer)
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

    /// Every write up to `stable` is resolved: drops the versions and tombstones that nobody can ask for any more.
    pub fn settle(&self, stable: u64) {
        for mut guard in self.each() {
            self.settle_shard(&mut guard, stable);
        }
    }

    /// The coordinator of all that is held stopped in order: everything is resolved, and so will be whatever is up to
    /// `floor`.
    pub fn settle_all(&self, floor: u64) {
        for mut guard in self.each() {
            let newest = guard.unsettled.back().map_or(0, |&(seq, _)| seq);
            self.settle_shard(&mut guard, floor.max(newest));
        }
    }

    fn settle_shard(&self, shard: &mut KeyShard, stable: u64) {
        if stable <= shard.stable {
            return;
        }
        shard.stable = stable;
        while let Some(&(seq, hash)) = shard.unsettled.front() {
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
        for hash in shard.settling.drain(..) {
            // These iterate over every key that may have this hash. To prune another one too does no harm.
            for head in shard.table.iter_hash_mut(hash) {
                let before = head.chain_len();
                self.budget.release(head.prune(stable));
                shard.versions -= (before - head.chain_len()) as u64;
            }
            while let Ok(entry) = shard.table.find_entry(hash, |head| head.vanished(stable)) {
                let (head, _) = entry.remove();
                self.budget.release(head.blob_cost());
                shard.versions -= 1;
            }
        }
        if shard.unsettled.capacity() > 1024 + 4 * shard.unsettled.len() {
            shard.unsettled.shrink_to(2 * shard.unsettled.len());
            shard.settling.shrink_to(1024);
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

    /// Everything, in the order of keys.
    pub fn dump(&self) -> Vec<ItemDump> {
        let mut items = Vec::new();
        for shard in self.each() {
            items.extend(shard.table.iter().map(|head| {
                ItemDump {
                    key: head.key().to_vec(),
                    versions: head
                        .iter()
                        .map(|version| VersionDump {
                            seq: version.seq,
                            cas: version.cas,
                            expiry: version.expiry,
                            data: (!version.tombstone).then(|| version.data().to_vec()),
                        })
                        .collect(),
                }
            }));
        }
        items.sort_by(|a, b| a.key.cmp(&b.key));
        items
    }

    /// Recounts what `usage` says from the chains themselves, for tests: `(items, versions, bytes)`.
    pub fn recount(&self) -> (u64, u64, u64) {
        let (mut items, mut versions, mut bytes) = (0, 0, 0);
        for shard in self.each() {
            bytes += shard.table.allocation_size() as u64 + shard.unsettled.len() as u64 * QUEUE_COST;
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
