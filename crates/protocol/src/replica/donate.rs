//! FETCH: what this replica holds, for one that lacks it (protocol.md, section 7).

use std::sync::MutexGuard;

use super::{Action, Count, Drop, Replica, install::Role, install::dropped, store::Written};
use crate::{
    transfer::{Chain, FETCHED_MAX, Fetch, Fetched, PAGE_MAX, SESSIONS_PAGE},
    wire::{Endpoint, Header, KEY_MAX, Op, Packet, Reason, SessionId},
};

/// Key shards of which the places are remembered: those that a few learners are copying.
const CUTS_MAX: usize = 16;
/// Key shards that one page may span.
const SHARDS_A_PAGE: usize = 64;

/// The places of one key shard's keys, as one learner was given them first. Keys that came later it has from their writes.
struct Cut {
    learner: (Endpoint, SessionId),
    shard: usize,
    places: Vec<u64>,
    /// Where the next shard begins.
    next: u64,
}

/// Cuts in use, the latest at the end.
#[derive(Default)]
pub(super) struct Cuts(Vec<Cut>);

impl Cuts {
    pub fn forget(&mut self) {
        self.0.clear();
    }

    fn find(&self, learner: (Endpoint, SessionId), shard: usize) -> Option<usize> {
        self.0.iter().position(|cut| (cut.learner, cut.shard) == (learner, shard))
    }
}

/// What a page is cut from: places of keys from the cursor on, and where to go on after them; 0: nowhere.
struct Places {
    keys: Vec<u64>,
    next: u64,
}

impl Replica {
    pub(super) fn cuts(&self) -> MutexGuard<'_, Cuts> {
        self.cuts.lock().expect("a thread panicked with the cuts locked")
    }

    /// FETCH. The header's `seq` may name the incarnation that is meant; `time` of a page is the cursor to stop at, and of a key
    /// the seq below which its chain goes on; so far as they are not 0.
    pub(super) fn fetch(&self, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let Header { shard, epoch, session, seq: incarnation, time, .. } = packet.header;
        let reason = 'refused: {
            let guard = self.role.read().expect("a thread panicked while it installed an epoch");
            let Some(role) = &*guard else { break 'refused Reason::Epoch };
            if shard != role.shard {
                break 'refused Reason::Shard;
            }
            if !self.takes(role, epoch) || incarnation != 0 && incarnation != self.incarnation() {
                break 'refused Reason::Epoch;
            }
            let key = packet.key;
            let mut header = Header { op: Op::Fetched, time: 0, ..packet.header };
            let fetched = match Fetch::parse(packet.value) {
                Some(Fetch::Key) if !key.is_empty() && key.len() <= KEY_MAX => {
                    let (chain, below) = self.part(role, key, self.store.chain(key), time);
                    header.time = below;
                    Fetched::Key(chain)
                }
                Some(Fetch::Page(cursor)) => self.page(role, (from, session), cursor, time),
                Some(Fetch::Sessions(first)) => {
                    let until = u32::from(first) + u32::from(SESSIONS_PAGE);
                    let records = role.sessions.records(first).take_while(|&(index, _)| u32::from(index) < until);
                    Fetched::Sessions {
                        from: first,
                        end: role.sessions.end(),
                        records: records.map(|(_, record)| record).collect(),
                    }
                }
                _ => break 'refused Reason::Malformed,
            };
            let value = fetched.emit();
            if value.len() + key.len() > FETCHED_MAX {
                return dropped(Drop::TooLong);
            }
            return vec![Action::Count(Count::Fetch), self.send(from, header, key, &value)];
        };
        self.control_reject(reason, from, packet)
    }

    /// The versions below a seq (0: all) with their writers' records, as many as a datagram takes, and the seq below which the
    /// rest goes on; 0: that is all.
    fn part(&self, role: &Role, key: &[u8], versions: Vec<Written>, below: u64) -> (Chain, u64) {
        let mut chain = Chain { key: key.to_vec(), versions: Vec::new() };
        let mut room = FETCHED_MAX - KEY_MAX - 64;
        for (version, writer) in versions.into_iter().filter(|(version, _)| below == 0 || version.seq < below) {
            let slot = writer.and_then(|index| role.sessions.lock(index));
            let record = slot.map(|slot| slot.record).filter(|record| record.seq == version.seq);
            let entry = (version, record);
            let len = Chain::version_len(&entry);
            if let (true, Some((last, _))) = (len > room, chain.versions.last()) {
                let below = last.seq;
                return (chain, below);
            }
            room -= len;
            chain.versions.push(entry);
        }
        (chain, 0)
    }

    /// Chains from a place on. One that is too long for a datagram goes without versions: it is to be asked for by its key.
    fn page(&self, role: &Role, learner: (Endpoint, SessionId), cursor: u64, until: u64) -> Fetched {
        let items = self.usage().items;
        let page = |chains, next| Fetched::Page { cursor, next, items, chains };
        let mut room = PAGE_MAX - page(Vec::new(), 0).emit().len();
        let mut chains: Vec<Chain> = Vec::new();
        let mut at = cursor;
        for _ in 0..SHARDS_A_PAGE {
            let Places { keys, next } = self.places(learner, at, 64);
            for place in keys {
                if until != 0 && place >= until {
                    return page(chains, 0);
                }
                let mut here = Vec::new();
                for (key, versions) in self.store.at(place) {
                    let (mut chain, rest) = self.part(role, &key, versions, 0);
                    if rest != 0 {
                        chain.versions.clear();
                    }
                    here.push(chain);
                }
                let len: usize = here.iter().map(Chain::len).sum();
                if len > room && !chains.is_empty() {
                    return page(chains, place);
                }
                room = room.saturating_sub(len);
                chains.append(&mut here);
            }
            if self.store.shard_of(next) != self.store.shard_of(at) {
                let mut cuts = self.cuts();
                if let Some(done) = cuts.find(learner, self.store.shard_of(at)) {
                    cuts.0.remove(done);
                }
            }
            if next == 0 || until != 0 && next >= until {
                return page(chains, 0);
            }
            at = next;
        }
        page(chains, at)
    }

    /// Places of up to `count` keys of one shard.
    fn places(&self, learner: (Endpoint, SessionId), from: u64, count: usize) -> Places {
        let shard = self.store.shard_of(from);
        let mut cuts = self.cuts();
        let cut = match cuts.find(learner, shard) {
            Some(at) => cuts.0.remove(at),
            None => {
                // Scanned without the lock: who asks the same meanwhile scans too.
                drop(cuts);
                let (places, next) = self.store.places(from);
                cuts = self.cuts();
                if cuts.0.len() >= CUTS_MAX {
                    cuts.0.remove(0);
                }
                Cut { learner, shard, places, next }
            }
        };
        let first = cut.places.partition_point(|&place| place < from);
        let keys: Vec<_> = cut.places[first..].iter().copied().take(count).collect();
        let next = cut.places.get(first + keys.len()).copied().unwrap_or(cut.next);
        cuts.0.push(cut);
        Places { keys, next }
    }
}
