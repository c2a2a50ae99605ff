//! The invariants, checked while a run goes on. The judges are those of `underpass_check::invariants`; here is what they are
//! shown.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use underpass_check::{
    history::Text,
    invariants::{
        Applied, Committed, Violation, bounded, clean_after, committed_everywhere, monotone, one_coordinator,
        one_effect, read_committed, same_outcome,
    },
};
use underpass_protocol::{
    replica::{CHAIN_MAX, Dump, ItemDump, VersionDump},
    wire::{Header, Kind, Packet, SessionId, Status},
};

/// What a coordinator ordered.
#[derive(Clone, Debug)]
struct Ordered {
    key: Text,
    session: SessionId,
    request: u64,
    tenure: u32,
    at: u64,
}

/// When and by whom a read was routed: goes along with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routed {
    /// Tenure of the coordinator.
    pub tenure: u32,
    /// Simulated time.
    pub at: u64,
    /// The read's bound.
    pub bound: u64,
}

/// A replica and all that it holds.
pub struct Seen<'a> {
    /// Number of its host.
    pub replica: u8,
    /// Its life.
    pub incarnation: u64,
    /// What it holds.
    pub dump: &'a Dump,
}

type Result<T = (), E = Violation> = std::result::Result<T, E>;

/// All that was seen of one shard.
#[derive(Default)]
pub struct Watch {
    ordered: HashMap<u64, Ordered>,
    committed: read_committed::Monitor,
    one_effect: one_effect::Monitor,
    same_outcome: same_outcome::Monitor,
    one_coordinator: one_coordinator::Monitor,
    monotone: monotone::Monitor,
    /// Content of every version that any replica was seen to hold.
    versions: HashMap<(Text, u64), VersionDump>,
    /// Writes that left no item, by key.
    tombstones: HashMap<Text, BTreeSet<u64>>,
    /// Writes without effect for good, by seq.
    aborted: BTreeSet<u64>,
    /// Tenures that have served.
    begun: BTreeSet<u32>,
    /// Every member of some record has lost what it held.
    pub lost_at: Option<u64>,
}

fn text(key: &[u8]) -> Text {
    Text(key.to_vec())
}

fn violation<T>(invariant: &'static str, what: String) -> Result<T> {
    Err(Violation { invariant, what })
}

impl Watch {
    /// Whether this is the first thing that a tenure does for clients.
    pub fn begins(&mut self, tenure: u32) -> bool {
        self.begun.insert(tenure)
    }

    /// A new coordinator serves: what members hold counts as committed, so it must be the same.
    pub fn begun(&mut self, tenure: u32, active: &[Seen<'_>]) -> Result {
        let floor = u64::from(tenure) << 40;
        // The newest version of each key from before, with what it holds.
        let newest = |seen: &Seen<'_>| -> BTreeMap<Vec<u8>, VersionDump> {
            let of = |item: &ItemDump| item.versions.iter().find(|version| version.seq < floor).cloned();
            let items = seen.dump.items.iter().filter_map(|item| Some((item.key.clone(), of(item)?)));
            // A tombstone may be dropped by one and not yet by another.
            items.filter(|(_, version)| version.data.is_some()).collect()
        };
        let Some((first, others)) = active.split_first() else { return Ok(()) };
        let here = newest(first);
        for other in others {
            let there = newest(other);
            if let Some(key) = here.keys().chain(there.keys()).find(|key| here.get(*key) != there.get(*key)) {
                return violation(
                    "committed-everywhere",
                    format!(
                        "the coordinator of tenure {tenure} serves, and of key {:?} replica {} holds {:?}, replica {} {:?}",
                        text(key),
                        first.replica,
                        here.get(key),
                        other.replica,
                        there.get(key)
                    ),
                );
            }
        }
        // Tombstones, too, where they are held.
        for item in active.iter().flat_map(|seen| &seen.dump.items) {
            if let Some(version) = item.versions.iter().find(|version| version.seq < floor) {
                self.committed.committed(&Committed { key: text(&item.key), seq: version.seq });
            }
        }
        Ok(())
    }

    /// A coordinator sends a write to its members; true: for the first time.
    pub fn orders(&mut self, header: &Header, key: &[u8], tenure: u32, at: u64) -> bool {
        if self.ordered.contains_key(&header.seq) {
            return false;
        }
        self.one_coordinator.acted(tenure, at);
        let Header { session, request, .. } = *header;
        self.ordered.insert(header.seq, Ordered { key: text(key), session, request, tenure, at });
        true
    }

    /// A coordinator routes a read.
    pub fn routes(&mut self, tenure: u32, at: u64) {
        self.one_coordinator.acted(tenure, at);
    }

    /// A coordinator commits a write; the key.
    pub fn commits(&mut self, seq: u64) -> Result<Committed> {
        let Some(Ordered { key, session, request, tenure, at, .. }) = self.ordered.get(&seq) else {
            return violation("one-effect", format!("seq {seq} is committed, and was never ordered"));
        };
        let committed = Committed { key: key.clone(), seq };
        self.one_effect.committed(*session, *request, seq)?;
        self.one_coordinator.done(&format!("write {seq}"), *tenure, *at)?;
        self.committed.committed(&committed);
        Ok(committed)
    }

    /// A coordinator aborts a write.
    pub fn aborts(&mut self, session: SessionId, request: u64, seq: u64) -> Result {
        self.aborted.insert(seq);
        self.one_effect.aborted(session, request)
    }

    /// A coordinator tells a client that its request has no effect, for good: none of its versions may be seen from then on.
    pub fn tells_aborted(&mut self, session: SessionId, request: u64) -> Result {
        let of = |ordered: &Ordered| (ordered.session, ordered.request) == (session, request);
        self.aborted.extend(self.ordered.iter().filter(|(_, ordered)| of(ordered)).map(|(seq, _)| *seq));
        self.one_effect.aborted(session, request)
    }

    /// A replica acknowledges a write.
    pub fn acknowledges(&mut self, replica: u8, incarnation: u64, packet: &Packet<'_>) -> Result {
        let Header { session, request, seq, kind, status, .. } = packet.header;
        let (Some(kind), Some(status)) = (Kind::from_wire(kind), Status::from_wire(status)) else {
            return violation(
                "same-outcome",
                format!("replica {replica} acknowledges with kind {kind}, status {status}"),
            );
        };
        if status == Status::Aborted {
            return Ok(());
        }
        let result = packet.value.first_chunk().map_or(0, |number| u64::from_be_bytes(*number));
        let key = text(packet.key);
        let none = match status {
            Status::Ok => kind == Kind::Delete,
            Status::NotFound => true,
            Status::NotStored => kind != Kind::Add,
            _ => false,
        };
        if none {
            self.tombstones.entry(key.clone()).or_default().insert(seq);
        }
        self.applied(incarnation, Applied { replica, session, request, seq, key, kind, status, result })
    }

    fn applied(&mut self, incarnation: u64, applied: Applied) -> Result {
        if let Some(ordered) = self.ordered.get(&applied.seq)
            && (ordered.session, ordered.request) != (applied.session, applied.request)
        {
            return violation(
                "one-effect",
                format!("seq {} is of two requests: {ordered:?} and {applied:?}", applied.seq),
            );
        }
        self.one_effect.applied(incarnation, &applied)?;
        self.same_outcome.applied(&applied)
    }

    /// A replica answers a read.
    pub fn answers(&mut self, replica: u8, packet: &Packet<'_>, routed: Option<Routed>) -> Result {
        let Some(routed) = routed else {
            return violation("one-coordinator", format!("replica {replica} answers a read that nobody routed"));
        };
        self.one_coordinator.done("a read", routed.tenure, routed.at)?;
        let ok = packet.header.status == Status::Ok.to_wire();
        if ok && self.aborted.contains(&packet.header.seq) {
            return violation(
                "one-effect",
                format!("write {} was aborted, and replica {replica} shows it", packet.header.seq),
            );
        }
        self.committed.read(replica, &text(packet.key), if ok { packet.header.seq } else { 0 })
    }

    /// Looks at one key of the active members after its write is committed.
    pub fn after_commit(&self, committed: &Committed, active: &[Seen<'_>]) -> Result {
        active.iter().try_for_each(|seen| self.holds(committed, seen))
    }

    /// **committed-everywhere** of one write and one replica.
    fn holds(&self, committed: &Committed, seen: &Seen<'_>) -> Result {
        let item = seen.dump.items.binary_search_by(|item| item.key.as_slice().cmp(&committed.key.0));
        let newest = match item {
            Ok(at) => seen.dump.items[at].versions.first().map_or(0, |version| version.seq),
            // Dropped as the protocol wants it: a tombstone that is stable.
            Err(_) if self.is_tombstone(&committed.key, committed.seq, seen.dump.stable) => committed.seq,
            Err(_) => 0,
        };
        let held =
            committed_everywhere::Held { replica: seen.replica, key: committed.key.clone(), newest, lost_high: 0 };
        committed_everywhere::check(&[seen.replica], std::slice::from_ref(committed), &[held])
    }

    /// Whether the key's newest version up to `stable`, of those from this one on, may be a tombstone.
    fn is_tombstone(&self, key: &Text, from: u64, stable: u64) -> bool {
        from <= stable && self.tombstones.get(key).is_some_and(|seqs| seqs.range(from..=stable).next().is_some())
    }

    /// Remembers the versions that a replica holds, and compares them with what others held.
    pub fn remember(&mut self, seen: &Seen<'_>) -> Result {
        for item in &seen.dump.items {
            for version in &item.versions {
                if version.data.is_none() {
                    self.tombstones.entry(text(&item.key)).or_default().insert(version.seq);
                }
                let before = self.versions.entry((text(&item.key), version.seq)).or_insert_with(|| version.clone());
                if before != version {
                    return violation(
                        "same-outcome",
                        format!(
                            "of key {:?}, replica {} holds {version:?}, and there was {before:?}",
                            text(&item.key),
                            seen.replica
                        ),
                    );
                }
            }
        }
        Ok(())
    }

    /// Looks at all replicas of the shard, and at those that are active under the latest record.
    pub fn look(&mut self, all: &[Seen<'_>], active: &[usize]) -> Result {
        for seen in all {
            self.remember(seen)?;
            let most = CHAIN_MAX as u64 + seen.dump.sessions.len() as u64;
            for item in &seen.dump.items {
                let key = text(&item.key);
                let what = format!("versions of key {key:?} at replica {}", seen.replica);
                bounded::check([&bounded::Size { what, size: item.versions.len() as u64, max: most }])?;
                let newest = self.committed.newest(&key);
                // Without any, it was a tombstone and is dropped; or it is missing, which **committed-everywhere** tells.
                if let Some(seq) = item.versions.iter().map(|version| version.seq).find(|seq| *seq <= newest) {
                    let Seen { replica, incarnation, .. } = *seen;
                    self.monotone.observe(&monotone::Newest { replica, incarnation, key, seq })?;
                }
            }
            for (_, record) in &seen.dump.sessions {
                let kind = Kind::from_wire(record.kind);
                if let (Some(kind), Some(status)) = (kind, Status::from_wire(record.status))
                    && status != Status::Aborted
                {
                    let key = self.ordered.get(&record.seq).map_or_else(Text::default, |ordered| ordered.key.clone());
                    let (session, request, seq, result) = (record.session, record.request, record.seq, record.result);
                    let result = if kind == Kind::Incr { result } else { 0 };
                    let replica = seen.replica;
                    self.applied(
                        seen.incarnation,
                        Applied { replica, session, request, seq, key, kind, status, result },
                    )?;
                }
            }
        }
        if self.lost_at.is_some() {
            return Ok(());
        }
        for seen in active.iter().map(|&at| &all[at]) {
            self.committed.all().try_for_each(|committed| self.holds(&committed, seen))?;
            let versions = seen.dump.items.iter().flat_map(|item| &item.versions);
            if let Some(version) = versions.into_iter().find(|version| self.aborted.contains(&version.seq)) {
                let (seq, replica) = (version.seq, seen.replica);
                return violation("one-effect", format!("write {seq} was aborted, and replica {replica} holds it"));
            }
        }
        Ok(())
    }

    /// Whether the end is clean: what is still dirty, and what replicas hold.
    pub fn clean(dirty: &[u64], active: &[Seen<'_>]) -> Result {
        let dump = |seen: &Seen<'_>| -> clean_after::Dump {
            let item = |item: &ItemDump| {
                let VersionDump { seq, cas, expiry, data } = item.versions[0].clone();
                (Text(item.key.clone()), clean_after::Item { seq, cas, value: data.map(Text), expires_ms: expiry })
            };
            seen.dump.items.iter().map(item).collect()
        };
        clean_after::check(dirty, &active.iter().map(dump).collect::<Vec<_>>())
    }
}
