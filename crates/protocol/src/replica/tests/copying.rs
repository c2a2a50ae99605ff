//! A learner and its donor, beside writes, over a network that loses, duplicates and reorders.

use std::{
    sync::{Mutex, atomic::AtomicU64},
    thread,
};

use super::*;
use crate::{
    control::{Answer, Fate},
    transfer::{Fetch, Fetched},
};

const DONOR: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 2), port: 5550 };
const LEARNER: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 3), port: 5550 };

fn learning(epoch: u32, active: bool) -> Configuration {
    let members = vec![member(0, 999, true), member(1, 42, active)];
    Configuration { tenure: EPOCH, lease_ms: 1 << 40, members, ..configuration(epoch, 42) }
}

fn donor(budget_bytes: u64) -> Replica {
    let donor = Replica::new(Settings::simulated(999, budget_bytes));
    let request = Install { incarnation: 999, index: 0, ..asking(learning(EPOCH, false), 42) };
    assert_eq!(install(&donor, &request).refusal, "");
    heartbeat(&donor, 0);
    donor
}

fn learner(budget_bytes: u64) -> Replica {
    let learner = Replica::new(Settings { key_shards: 2, ..Settings::simulated(42, budget_bytes) });
    assert_eq!(install(&learner, &asking(learning(EPOCH, false), 42)).refusal, "");
    learner
}

fn heartbeat_at(now_ms: u64, stable: u64, donor: Option<Endpoint>) -> Vec<u8> {
    let header = Header { shard: 1, epoch: EPOCH, ..Header::new(Op::Heartbeat) };
    let donor = donor.map(|donor| (donor.addr, donor.port));
    control::emit(header, &Heartbeat { donor, echo: Some(now_ms), ..beat(stable) })
}

/// Both, what is on its way between them, and what they acknowledged.
struct Pair {
    donor: Replica,
    learner: Replica,
    now_ms: u64,
    network: Vec<(Endpoint, Vec<u8>)>,
    /// What each acknowledged, by seq: status and value.
    outcomes: [BTreeMap<u64, (u8, Vec<u8>)>; 2],
    /// Sent to both, not acknowledged by both.
    pending: Vec<Write>,
    seq: u64,
    requests: BTreeMap<u16, u64>,
    copying: Option<Endpoint>,
}

impl Pair {
    fn new() -> Self {
        Self {
            donor: donor(16 << 20),
            learner: learner(16 << 20),
            now_ms: NOW_MS,
            network: vec![],
            outcomes: Default::default(),
            pending: vec![],
            seq: 0,
            requests: BTreeMap::new(),
            copying: None,
        }
    }

    fn absorb(&mut self, who: usize, actions: Vec<Action>) {
        for (to, bytes) in sent(&actions) {
            let packet = Packet::parse(bytes).expect("a replica sends packets");
            match packet.header.op {
                Op::WReply => {
                    let outcome = (packet.header.status, packet.value.to_vec());
                    let first = self.outcomes[who].entry(packet.header.seq).or_insert(outcome.clone());
                    assert_eq!(*first, outcome, "a duplicate is acknowledged as recorded");
                }
                Op::Fetch | Op::Fetched => self.network.push((to, bytes.to_vec())),
                Op::HeartbeatAck => {}
                op => panic!("{op} from replica {who}"),
            }
        }
    }

    fn to(&mut self, who: usize, from: Endpoint, bytes: &[u8]) {
        let replica = if who == 0 { &self.donor } else { &self.learner };
        let actions = at(replica, self.now_ms, from, bytes);
        self.absorb(who, actions);
    }

    fn heartbeats(&mut self) {
        let stable = self.pending.iter().map(|write| write.seq - 1).min().unwrap_or(BASE + self.seq);
        self.to(0, COORDINATOR, &heartbeat_at(self.now_ms, stable, None));
        self.to(1, COORDINATOR, &heartbeat_at(self.now_ms, stable, self.copying));
    }

    fn tick(&mut self, ms: u64) {
        self.now_ms += ms;
        let actions = self.learner.tick(self.now_ms);
        self.absorb(1, actions);
    }

    /// Delivers the datagram at this place, or at the last; `keep`: and again later.
    fn deliver(&mut self, at: usize, keep: bool) {
        if self.network.is_empty() {
            return;
        }
        let at = at % self.network.len();
        let (to, bytes) = if keep { self.network[at].clone() } else { self.network.swap_remove(at) };
        if to == DONOR { self.to(0, LEARNER, &bytes) } else { self.to(1, DONOR, &bytes) }
    }

    /// Orders a write as a coordinator would: a conditional alone on its key, one of a session at a time.
    fn order(&mut self, mut write: Write) -> Write {
        let meets = |other: &Write| {
            other.index == write.index
                || other.key == write.key && (other.kind.is_conditional() || write.kind.is_conditional())
        };
        if self.pending.iter().any(meets) {
            self.resolve();
        }
        self.seq += 1;
        let request = self.requests.entry(write.index).or_default();
        *request += 1;
        (write.seq, write.request) = (BASE + self.seq, *request);
        self.pending.push(write.clone());
        write
    }

    /// Everything pending is sent until both have acknowledged it.
    fn resolve(&mut self) {
        for _ in 0..10_000 {
            let outcomes = &self.outcomes;
            self.pending.retain(|write| !outcomes.iter().all(|outcomes| outcomes.contains_key(&write.seq)));
            if self.pending.is_empty() {
                return;
            }
            for write in self.pending.clone() {
                for who in 0..2 {
                    if !self.outcomes[who].contains_key(&write.seq) {
                        self.to(who, COORDINATOR, &write.bytes());
                    }
                }
            }
            // Told even now: a conditional waits for its chain, and that for the donor to be named.
            self.copying = Some(DONOR);
            self.heartbeats();
            self.tick(20);
            while !self.network.is_empty() {
                self.deliver(0, false);
            }
        }
        panic!("{} writes are never acknowledged: {:?}", self.pending.len(), self.learner.copying());
    }

    /// The faults are over: copies all, makes the learner active, and compares.
    fn finish(&mut self) {
        self.copying = Some(DONOR);
        for turn in 0.. {
            self.heartbeats();
            self.tick(20);
            while !self.network.is_empty() {
                self.deliver(0, false);
            }
            if self.learner.copying().is_some_and(|copying| copying.done) {
                break;
            }
            assert!(turn < 10_000, "{:?}", self.learner.copying());
        }
        self.resolve();
        self.learner.assert_accounts();
        self.promote();
        assert_eq!(self.learner.due_ms(), None);
        assert_eq!(self.outcomes[0], self.outcomes[1], "same-outcome");
        let (donor, learner) = (self.donor.dump(), self.learner.dump());
        assert_eq!(learner.sessions, donor.sessions);
        self.heartbeats();
        let (donor, learner) = (Dump { items: self.donor.dump().items, ..donor }, self.learner.dump());
        assert_eq!(learner.items, donor.items);
        assert_eq!(learner.stable, BASE + self.seq);
        for replica in [&self.donor, &self.learner] {
            replica.assert_accounts();
            assert_eq!(replica.usage().versions, replica.usage().items, "one version of each item is left");
        }
    }

    fn promote(&mut self) {
        for (replica, incarnation, index) in [(&self.donor, 999, 0), (&self.learner, 42, 1)] {
            let request = Install { incarnation, index, ..asking(learning(EPOCH + 1, true), 42) };
            assert_eq!(install(replica, &request).refusal, "");
        }
    }
}

fn put(key: &str, data: &str, index: u16) -> Write {
    Write { index, ..Write::new(Kind::Put, key, data, 0) }
}

/// What the network and the clients do.
#[derive(Clone, Debug)]
enum Do {
    /// A write, of which the donor gets this many copies at once, and the learner.
    Write(Write, bool, bool),
    Deliver(usize, bool),
    Lose(usize),
    Tick(u64),
    Heartbeat,
    Copy,
    /// A copy of an old write, to one of them.
    Again(usize, bool),
}

fn any_do() -> impl Strategy<Value = Do> {
    let key = prop_oneof![4 => 0u8..6, 1 => 6u8..60];
    let write = (any_write(), key, 0u16..6, 0usize..40).prop_map(|(write, key, index, len)| {
        let data = if write.kind == Kind::Put && len > 30 { vec![b'x'; len * 30] } else { write.data.clone() };
        Write { key: format!("key{key}").into_bytes(), data, index, time: 1000 + write.time, ..write }
    });
    prop_oneof![
        6 => (write, any::<bool>(), any::<bool>()).prop_map(|(write, a, b)| Do::Write(write, a, b)),
        8 => (any::<usize>(), prop::bool::weighted(0.2)).prop_map(|(at, keep)| Do::Deliver(at, keep)),
        1 => any::<usize>().prop_map(Do::Lose),
        2 => (0u64..30).prop_map(Do::Tick),
        1 => Just(Do::Heartbeat),
        1 => Just(Do::Copy),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(at, who)| Do::Again(at, who)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn a_copy_beside_writes_ends_with_the_same(
        before in prop::collection::vec(any_do(), 0..40),
        steps in prop::collection::vec(any_do(), 1..150),
    ) {
        let mut pair = Pair::new();
        // Before it was a member the learner missed everything, and all of it was resolved without it.
        for write in before.iter().filter_map(|step| if let Do::Write(write, ..) = step { Some(write) } else { None }) {
            let write = pair.order(write.clone());
            pair.pending.clear();
            pair.to(0, COORDINATOR, &write.bytes());
            let outcome = pair.outcomes[0][&write.seq].clone();
            pair.outcomes[1].insert(write.seq, outcome);
        }
        let mut old = Vec::new();
        for step in steps {
            match step {
                Do::Write(write, donor, learner) => {
                    let write = pair.order(write);
                    for (who, now) in [donor, learner].into_iter().enumerate() {
                        if now {
                            pair.to(who, COORDINATOR, &write.bytes());
                        }
                    }
                    old.push(write);
                }
                Do::Deliver(at, keep) => pair.deliver(at, keep),
                Do::Lose(at) if !pair.network.is_empty() => {
                    let at = at % pair.network.len();
                    pair.network.swap_remove(at);
                }
                Do::Lose(_) => {}
                Do::Tick(ms) => pair.tick(ms),
                Do::Heartbeat => {
                    let outcomes = &pair.outcomes;
                    pair.pending.retain(|write| !outcomes.iter().all(|outcomes| outcomes.contains_key(&write.seq)));
                    pair.heartbeats();
                }
                Do::Copy => pair.copying = Some(DONOR),
                Do::Again(at, who) if !old.is_empty() => {
                    let bytes = old[at % old.len()].bytes();
                    pair.to(usize::from(who), COORDINATOR, &bytes);
                }
                Do::Again(..) => {}
            }
        }
        pair.finish();
    }
}

/// A learner that has copied the record of a DELETE, and has the item, is sent the DELETE itself.
fn delete_after_its_record(pair: &mut Pair) -> Write {
    let write = pair.order(put("k", "v", 1));
    pair.to(0, COORDINATOR, &write.bytes());
    pair.to(1, COORDINATOR, &write.bytes());
    pair.resolve();
    let delete = pair.order(Write { index: 2, ..Write::new(Kind::Delete, "k", "", 0) });
    pair.to(0, COORDINATOR, &delete.bytes());
    pair.copying = Some(DONOR);
    pair.heartbeats();
    // The session records: asked for first, and told.
    pair.deliver(0, false);
    pair.deliver(0, false);
    assert_eq!(pair.learner.dump().sessions.last().map(|(_, record)| record.seq), Some(delete.seq));
    delete
}

#[test]
fn a_record_that_is_copied_before_its_version_is_no_acknowledgement() {
    let mut pair = Pair::new();
    let delete = delete_after_its_record(&mut pair);
    let session = SessionId::new(delete.generation, delete.index);
    let write =
        Header { shard: 1, epoch: EPOCH, session, request: delete.request, seq: delete.seq, ..Header::new(Op::Query) };
    let answers = at(&pair.learner, NOW_MS, COORDINATOR, &write.datagram(&[], &[]));
    let answer = control::parse::<Answer>(&Packet::parse(sent(&answers)[0].1).expect("a packet")).expect("an answer");
    assert_eq!(answer.fate, Fate::Frozen);
    let mut pair = Pair::new();
    let delete = delete_after_its_record(&mut pair);
    pair.to(1, COORDINATOR, &delete.bytes());
    assert!(!pair.outcomes[1].contains_key(&delete.seq), "it does not hold what it would acknowledge");
    pair.finish();
}

#[test]
fn everything_is_copied_page_by_page() {
    let mut pair = Pair::new();
    for n in 0..3000u16 {
        let write = pair.order(put(&format!("key{n}"), &"v".repeat(usize::from(n % 100)), n % 64));
        pair.pending.clear();
        pair.to(0, COORDINATOR, &write.bytes());
    }
    pair.outcomes[1] = pair.outcomes[0].clone();
    heartbeat(&pair.donor, BASE + 1500);
    pair.copying = Some(DONOR);
    pair.heartbeats();
    let copying = pair.learner.copying().expect("it copies");
    assert_eq!((copying.done, copying.items, copying.trouble.as_str()), (false, 0, ""));
    let mut largest = 0;
    while let Some((_, bytes)) = pair.network.first() {
        largest = largest.max(bytes.len());
        pair.deliver(0, false);
    }
    assert!(largest <= DATAGRAM_MAX, "a page of {largest} bytes");
    let copying = pair.learner.copying().expect("it has copied");
    assert_eq!((copying.done, copying.items, copying.of), (true, 3000, 3000));
    assert!(copying.bytes > 3000 * 50);
    pair.finish();
}

#[test]
fn chains_of_large_values_are_copied_in_parts() {
    let mut pair = Pair::new();
    let value = "v".repeat(PAYLOAD_MAX - 3);
    for n in 0..100u16 {
        for key in ["one", "two"] {
            let write = pair.order(put(key, &value, n % 64));
            pair.pending.clear();
            pair.to(0, COORDINATOR, &write.bytes());
        }
        // This one fits a datagram, but no page.
        if n < 10 {
            let write = pair.order(put("few", &value, n));
            pair.pending.clear();
            pair.to(0, COORDINATOR, &write.bytes());
        }
    }
    pair.outcomes[1] = pair.outcomes[0].clone();
    // Nothing is stable: what is copied are the chains.
    pair.to(1, COORDINATOR, &heartbeat_at(NOW_MS, 0, Some(DONOR)));
    let mut largest = 0;
    while let Some((_, bytes)) = pair.network.first() {
        largest = largest.max(bytes.len());
        pair.deliver(0, false);
    }
    assert!(largest > 30_000 && largest <= 65_000, "{largest} bytes");
    assert!(pair.learner.copying().expect("it copies").done);
    assert_eq!(pair.learner.dump().items, pair.donor.dump().items);
    pair.finish();
}

#[test]
fn a_conditional_waits_for_its_chain() {
    let mut pair = Pair::new();
    let mut base = pair.order(put("n", "41", 1));
    pair.to(0, COORDINATOR, &base.bytes());
    pair.outcomes[1] = pair.outcomes[0].clone();
    pair.pending.clear();
    let incr = pair.order(Write { delta: 1, ..Write::new(Kind::Incr, "n", "", 0) });
    let add = pair.order(Write { index: 2, ..Write::new(Kind::Add, "absent at the donor", "v", 0) });
    for write in [&incr, &add, &incr] {
        let actions = at(&pair.learner, pair.now_ms, COORDINATOR, &write.bytes());
        assert_eq!(actions, [Action::Count(Count::Parked)], "no donor is known yet");
    }
    // A PUT needs no chain.
    base = pair.order(put("other", "v", 3));
    pair.to(1, COORDINATOR, &base.bytes());
    assert!(pair.outcomes[1].contains_key(&base.seq));
    pair.copying = Some(DONOR);
    pair.heartbeats();
    assert_eq!(pair.network.len(), 3, "the session records and both keys are asked for");
    // What comes first are the two chains.
    while pair.outcomes[1].len() < 4 {
        pair.network.rotate_left(1);
        pair.deliver(0, false);
    }
    assert_eq!(pair.outcomes[1][&incr.seq], (0, 42u64.to_be_bytes().to_vec()));
    assert_eq!(pair.outcomes[1][&add.seq].0, 0);
    // It is asked for when it comes after the donor was named.
    let late = pair.order(Write { index: 4, ..Write::new(Kind::Touch, "late", "", 0) });
    let actions = at(&pair.learner, pair.now_ms, COORDINATOR, &late.bytes());
    let question = Packet::parse(sent(&actions)[0].1).expect("a packet");
    assert_eq!((question.header.op, question.key), (Op::Fetch, &b"late"[..]));
    pair.absorb(1, actions);
    pair.finish();
}

#[test]
fn few_writes_may_wait() {
    let learner = learner(1 << 20);
    let request = Install { sessions: 1 << 10, ..asking(learning(EPOCH + 1, false), 42) };
    install(&learner, &request);
    for index in 0..300u16 {
        let write = Write { index, ..Write::new(Kind::Delete, &format!("k{index}"), "", 1 + u64::from(index)) };
        let parked = usize::from(index) < fetch::PARKED_MAX;
        let expected = if parked { Count::Parked } else { Count::Drop(Drop::Uncopied) };
        assert_eq!(counted(&write.to(&learner)), expected);
    }
}

#[test]
fn a_join_has_one_donor_and_one_tenure() {
    let mut pair = Pair::new();
    for n in 0..200u16 {
        let write = pair.order(put(&format!("key{n}"), &"v".repeat(100), n % 64));
        pair.to(0, COORDINATOR, &write.bytes());
        pair.pending.clear();
    }
    let ask = |learner: &Replica, donor| {
        let actions = datagram(learner, COORDINATOR, &heartbeat_at(NOW_MS, 0, Some(donor)));
        let answer = sent(&actions).iter().find_map(|(_, bytes)| {
            let packet = Packet::parse(bytes).expect("a packet");
            control::parse::<HeartbeatAck>(&packet).filter(|_| packet.header.op == Op::HeartbeatAck)
        });
        answer.expect("an answer").copying.expect("it was told to copy")
    };
    let stranger = Endpoint { port: 99, ..DONOR };
    assert!(ask(&pair.learner, stranger).trouble.contains("is no active member"));
    assert_eq!(ask(&pair.learner, DONOR).trouble, "", "nothing was begun");
    // Named by a heartbeat that did not know of that yet: the choice stands.
    for named in [LEARNER, stranger, DONOR] {
        let copying = ask(&pair.learner, named);
        assert_eq!((copying.donor, copying.trouble.as_str()), (Some((DONOR.addr, DONOR.port)), ""));
    }
    assert!(pair.learner.due_ms().is_some());
    // Half a learner is none.
    let active = install(&pair.learner, &asking(learning(EPOCH + 1, true), 42));
    assert!(active.refusal.contains("has not copied everything"), "{}", active.refusal);
    Write::new(Kind::Put, "k", "v", 900).to(&pair.learner);
    let other = Configuration { tenure: EPOCH + 1, ..learning(EPOCH + 1, false) };
    let begun = install(&pair.learner, &asking(other, 42));
    assert!(begun.refusal.contains("give up its data first"), "{}", begun.refusal);

    // The donor is lost.
    let learner = learner(16 << 20);
    assert_eq!(ask(&learner, DONOR).trouble, "");
    let mut without = learning(EPOCH + 1, false);
    without.members[0].incarnation = 998;
    install(&learner, &asking(without, 42));
    assert!(learner.copying().expect("it copied").trouble.contains("no active member any more"));
    assert_eq!(learner.due_ms(), None);
}

#[test]
fn copying_keeps_to_its_rate() {
    let mut pair = Pair::new();
    let learner = Replica::new(Settings { copy_rate: 3000, ..Settings::simulated(42, 16 << 20) });
    assert_eq!(install(&learner, &asking(learning(EPOCH, false), 42)).refusal, "");
    pair.learner = learner;
    for n in 0..2000u16 {
        let write = pair.order(put(&format!("key{n}"), &"v".repeat(1000), n % 64));
        pair.to(0, COORDINATOR, &write.bytes());
        pair.pending.clear();
    }
    pair.copying = Some(DONOR);
    let (began, mut copied) = (pair.now_ms, 0);
    while !pair.learner.copying().is_some_and(|copying| copying.done) {
        pair.heartbeats();
        pair.tick(5);
        while !pair.network.is_empty() {
            pair.deliver(0, false);
        }
        // A page of each lane before anything is paid for.
        copied = pair.learner.copying().expect("it was told to copy").items;
        let lasts = pair.now_ms - began;
        assert!(copied <= 3 * lasts + 4 * 300, "{copied} items in {lasts} ms");
        assert!(lasts < 10_000, "{copied} items in {lasts} ms");
    }
    assert_eq!(copied, 2000);
}

#[test]
fn a_learner_short_of_memory_says_so_and_goes_on_when_there_is_some() {
    let mut pair = Pair::new();
    pair.learner = learner(64 << 10);
    for n in 0..45u16 {
        let write = pair.order(put(&format!("key{n}"), &"v".repeat(1000), n));
        pair.to(0, COORDINATOR, &write.bytes());
        pair.pending.clear();
    }
    let mut filler = put("filler", &"x".repeat(1000), 1);
    for n in 0..20u64 {
        (filler.seq, filler.request) = (BASE + 1000 + n, 1000 + n);
        filler.to(&pair.learner);
    }
    pair.to(1, COORDINATOR, &heartbeat_at(NOW_MS, 0, Some(DONOR)));
    for _ in 0..200 {
        pair.tick(20);
        while !pair.network.is_empty() {
            pair.deliver(0, false);
        }
    }
    let copying = pair.learner.copying().expect("it copies");
    assert!(copying.trouble.contains("--memory") && !copying.done, "{copying:?}");
    pair.learner.assert_accounts();
    // The old versions of the filler go.
    pair.to(1, COORDINATOR, &heartbeat_at(NOW_MS, filler.seq - 1, Some(DONOR)));
    pair.to(1, COORDINATOR, &heartbeat_at(NOW_MS, filler.seq, Some(DONOR)));
    for _ in 0..10 {
        pair.tick(20);
        while !pair.network.is_empty() {
            pair.deliver(0, false);
        }
    }
    let copying = pair.learner.copying().expect("it copies");
    assert!(copying.done && copying.trouble.is_empty(), "{copying:?}");
}

#[test]
fn a_reset_learner_takes_no_answer_of_its_life_before() {
    let mut pair = Pair::new();
    let write = pair.order(put("k", "v", 1));
    pair.to(0, COORDINATOR, &write.bytes());
    pair.copying = Some(DONOR);
    pair.heartbeats();
    pair.deliver(0, false);
    let (_, late) = pair.network[0].clone();
    let mut without = learning(EPOCH + 1, false);
    without.members.pop();
    install(&pair.learner, &Install { reset: true, index: 9, ..asking(without, 42) });
    assert_eq!(pair.learner.incarnation(), 43);
    let mut again = learning(EPOCH + 2, false);
    again.members[1].incarnation = 43;
    install(&pair.learner, &asking(again, 43));
    let actions = datagram(&pair.learner, DONOR, &late);
    assert_eq!(counted(&actions), Count::Drop(Drop::Unasked));
}

/// Copying, writes, heartbeats and onlookers at once: nothing waits for ever, and both end with the same.
#[test]
fn locks_are_taken_in_order() {
    const WRITERS: u64 = 2;
    const ROUNDS: u64 = 150;
    let (donor, learner) = (donor(64 << 20), learner(64 << 20));
    for n in 0..400u64 {
        let mut write = put(&format!("n{}", n % 40), "0", 60);
        (write.seq, write.request) = (BASE + 1 + n, 1 + n);
        write.outcome_any(&donor);
    }
    let clock = AtomicU64::new(BASE + 1000);
    let now_ms = AtomicU64::new(NOW_MS);
    let pending = [const { AtomicU64::new(u64::MAX) }; WRITERS as usize];
    let stop = std::sync::atomic::AtomicBool::new(false);
    let now = || now_ms.load(Relaxed);
    let stable = || pending.iter().map(|seq| seq.load(Relaxed)).min().unwrap_or(u64::MAX).min(BASE + 1000) - 1;
    let seen = Mutex::new(BTreeMap::new());
    // Turns given up before something is wrong.
    let patience = &std::sync::atomic::AtomicU64::new(1 << 28);
    thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (donor, learner, clock, pending, seen, now) = (&donor, &learner, &clock, &pending, &seen, &now);
                scope.spawn(move || {
                    for request in 1..=ROUNDS {
                        let key = format!("n{}", request * WRITERS % 40 + writer);
                        let kind = if request % 3 == 0 { Kind::Put } else { Kind::Incr };
                        let mut write = Write { delta: 1, index: writer as u16, ..Write::new(kind, &key, "5", 0) };
                        // From before it is ordered.
                        pending[writer as usize].store(clock.load(SeqCst), SeqCst);
                        (write.seq, write.request) = (clock.fetch_add(1, SeqCst), request);
                        let outcomes = [donor, learner].map(|replica| {
                            loop {
                                let actions = at(replica, now(), COORDINATOR, &write.bytes());
                                let reply = sent(&actions).into_iter().find_map(|(_, bytes)| {
                                    let packet = Packet::parse(bytes).expect("a packet");
                                    let status = packet.header.status;
                                    (packet.header.op == Op::WReply).then(|| (status, packet.value.to_vec()))
                                });
                                if let Some(reply) = reply {
                                    return reply;
                                }
                                assert!(patience.fetch_sub(1, Relaxed) > 1, "{:?} waits for ever", write);
                                thread::yield_now();
                            }
                        });
                        assert_eq!(outcomes[0], outcomes[1], "same-outcome");
                        seen.lock().expect("no panic").insert(write.seq, outcomes);
                        pending[writer as usize].store(u64::MAX, SeqCst);
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !stop.load(SeqCst) {
                let stable = stable();
                at(&donor, now(), COORDINATOR, &heartbeat_at(NOW_MS, stable, None));
                at(&learner, now(), COORDINATOR, &heartbeat_at(NOW_MS, stable, Some(DONOR)));
                let _ = (learner.usage(), donor.dump(), learner.copying(), learner.due_ms());
                thread::yield_now();
            }
        });
        let pump = || {
            while !stop.load(SeqCst) {
                now_ms.fetch_add(1, SeqCst);
                let mut actions = learner.tick(now());
                while let Some((to, bytes)) = sent(&actions).last().map(|&(to, bytes)| (to, bytes.to_vec())) {
                    if to != DONOR {
                        break;
                    }
                    let answers = at(&donor, now(), LEARNER, &bytes);
                    let Some(&(_, answer)) = sent(&answers).first() else { break };
                    actions = at(&learner, now(), DONOR, answer);
                }
                thread::yield_now();
            }
        };
        scope.spawn(pump);
        scope.spawn(pump);
        for writer in writers {
            writer.join().expect("a writer ends");
        }
        while !learner.copying().is_some_and(|copying| copying.done) {
            assert!(patience.fetch_sub(1, Relaxed) > 1, "{:?}", learner.copying());
            thread::yield_now();
        }
        stop.store(true, SeqCst);
    });
    assert_eq!(seen.lock().expect("no panic").len() as u64, WRITERS * ROUNDS);
    let last = clock.load(SeqCst);
    for replica in [&donor, &learner] {
        at(replica, NOW_MS, COORDINATOR, &heartbeat_at(NOW_MS, last, None));
        replica.assert_accounts();
    }
    assert_eq!(install(&learner, &asking(learning(EPOCH + 1, true), 42)).refusal, "");
    assert_eq!(learner.dump().items, donor.dump().items);
    assert_eq!(learner.dump().sessions, donor.dump().sessions);
}

/// Each broken rule shows.
#[cfg(feature = "published")]
mod published {
    use super::*;

    fn pair(published: Published) -> Pair {
        let mut pair = Pair::new();
        pair.learner.published = published;
        pair
    }

    fn newest(replica: &Replica, key: &str) -> Option<Vec<u8>> {
        let items = replica.dump().items;
        items.into_iter().find(|item| item.key == key.as_bytes()).and_then(|item| item.versions[0].data.clone())
    }

    /// Hole 16: the client of the write sends it again to the next coordinator.
    #[test]
    fn a_retry_runs_twice_where_the_record_was_left_behind() {
        for copy_no_records in [false, true] {
            let mut pair = pair(Published { copy_no_records, ..Published::default() });
            for write in [put("n", "1", 1), Write { delta: 1, index: 2, ..Write::new(Kind::Incr, "n", "", 0) }] {
                let write = pair.order(write);
                pair.to(0, COORDINATOR, &write.bytes());
                pair.pending.clear();
            }
            pair.outcomes[1] = pair.outcomes[0].clone();
            pair.finish_copy();
            let mut retry = Write { delta: 1, index: 2, request: 1, ..Write::new(Kind::Incr, "n", "", 500) };
            retry.request = 1;
            retry.to(&pair.learner);
            assert_eq!(newest(&pair.learner, "n").as_deref(), Some(if copy_no_records { &b"3"[..] } else { b"2" }));
        }
    }

    /// Hole 25.
    #[test]
    fn what_was_deleted_beside_a_copy_is_back() {
        for record_is_enough in [false, true] {
            let mut pair = pair(Published { record_is_enough, ..Published::default() });
            let delete = delete_after_its_record(&mut pair);
            pair.to(1, COORDINATOR, &delete.bytes());
            if record_is_enough {
                pair.pending.clear();
            }
            pair.finish_copy();
            assert_eq!(newest(&pair.learner, "k").is_some(), record_is_enough);
        }
    }

    /// Hole 17.
    #[test]
    fn half_a_learner_is_believed() {
        for half_learner in [false, true] {
            let pair = pair(Published { half_learner, ..Published::default() });
            let told = install(&pair.learner, &asking(learning(EPOCH + 1, true), 42));
            assert_eq!(told.refusal.is_empty(), half_learner);
        }
    }

    #[test]
    fn a_learner_executes_on_a_chain_that_it_lacks() {
        for execute_uncopied in [false, true] {
            let mut pair = pair(Published { execute_uncopied, ..Published::default() });
            let write = pair.order(put("n", "1", 1));
            pair.to(0, COORDINATOR, &write.bytes());
            pair.pending.clear();
            let incr = pair.order(Write { delta: 1, index: 2, ..Write::new(Kind::Incr, "n", "", 0) });
            pair.to(0, COORDINATOR, &incr.bytes());
            pair.to(1, COORDINATOR, &incr.bytes());
            pair.copying = Some(DONOR);
            pair.heartbeats();
            while !pair.network.is_empty() {
                pair.deliver(0, false);
            }
            assert_eq!(pair.outcomes[0][&incr.seq] == pair.outcomes[1][&incr.seq], !execute_uncopied);
        }
    }

    /// A page that was sent before a DELETE arrives after the tombstone was stable.
    #[test]
    fn a_late_page_brings_back_what_was_deleted() {
        for learner_drops_tombstones in [false, true] {
            let mut pair = pair(Published { learner_drops_tombstones, ..Published::default() });
            let write = pair.order(put("k", "v", 1));
            pair.to(0, COORDINATOR, &write.bytes());
            pair.pending.clear();
            pair.copying = Some(DONOR);
            pair.heartbeats();
            // The session records, then a question from each lane, all answered, no answer delivered.
            for _ in 0..2 {
                pair.deliver(0, false);
            }
            for _ in 0..4 {
                let at = pair.network.iter().position(|(to, _)| *to == DONOR).expect("a question");
                pair.deliver(at, false);
            }
            let late = std::mem::take(&mut pair.network);
            assert!(late.iter().any(|(_, bytes)| {
                let page = Fetched::parse(Packet::parse(bytes).expect("a packet").value);
                matches!(page, Some(Fetched::Page { chains, .. }) if !chains.is_empty())
            }));
            let delete = pair.order(Write { index: 2, ..Write::new(Kind::Delete, "k", "", 0) });
            pair.to(0, COORDINATOR, &delete.bytes());
            pair.to(1, COORDINATOR, &delete.bytes());
            let asked = Packet::parse(&pair.network[0].1).expect("a packet");
            assert_eq!(Fetch::parse(asked.value), Some(Fetch::Key));
            pair.deliver(0, false);
            pair.deliver(0, false);
            assert!(pair.outcomes[1].contains_key(&delete.seq));
            pair.pending.clear();
            pair.heartbeats();
            pair.network = late;
            while !pair.network.is_empty() {
                pair.deliver(0, false);
            }
            let seen = newest(&pair.learner, "k");
            assert_eq!(seen.is_some(), learner_drops_tombstones);
            assert_eq!(newest(&pair.donor, "k"), None);
        }
    }

    impl Pair {
        fn finish_copy(&mut self) {
            self.copying = Some(DONOR);
            self.heartbeats();
            while !self.network.is_empty() {
                self.deliver(0, false);
            }
            assert!(self.learner.copying().expect("it copies").done);
        }
    }
}
