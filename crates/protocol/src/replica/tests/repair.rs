//! COLLECT, QUERY, ABORT and PULL.

use super::*;
use crate::{
    control::{Answer, Fate, Pull},
    transfer::{self, Collected, Fetch, Fetched, Held},
};

const PEER: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 2), port: 5550 };

fn header(op: Op, write: &Write) -> Header {
    let session = SessionId::new(write.generation, write.index);
    let (seq, request) = (write.seq, write.request);
    Header { shard: 1, epoch: EPOCH, session, request, seq, ..Header::new(op) }
}

fn answer(actions: &[Action]) -> (Fate, Status, Vec<u8>) {
    let (to, packet) = only(actions);
    assert_eq!((to, packet.header.op), (COORDINATOR, Op::Answer));
    let answer: Answer = control::parse(&packet).expect("ANSWER parses");
    (answer.fate, Status::from_wire(answer.status).expect("a status"), packet.key.to_vec())
}

fn query(replica: &Replica, write: &Write) -> (Fate, Status, Vec<u8>) {
    answer(&datagram(replica, COORDINATOR, &header(Op::Query, write).datagram(&[], &[])))
}

fn aborted(write: &Write) -> SessionRecord {
    SessionRecord {
        session: SessionId::new(write.generation, write.index),
        request: write.request,
        seq: write.seq,
        status: Status::Aborted.to_wire(),
        kind: write.kind.to_wire(),
        token: 77,
        client: CLIENT,
        ..SessionRecord::default()
    }
}

fn abort(replica: &Replica, write: &Write) -> (Fate, Status, Vec<u8>) {
    let value = transfer::emit_abort(&aborted(write));
    answer(&datagram(replica, COORDINATOR, &header(Op::Abort, write).datagram(&[], &value)))
}

const FROZEN: (Fate, Status, Vec<u8>) = (Fate::Frozen, Status::Ok, Vec::new());
const ABORTED: (Fate, Status, Vec<u8>) = (Fate::Aborted, Status::Aborted, Vec::new());

#[test]
fn a_query_tells_what_was_processed_and_freezes_what_was_not() {
    let replica = started(1 << 20);
    let write = Write::new(Kind::Delete, "k", "", 5);
    assert_eq!(query(&replica, &write), FROZEN);
    assert_eq!(counted(&write.to(&replica)), Count::Drop(Drop::Frozen));
    assert_eq!(query(&replica, &write), FROZEN);
    // Another session, and the next write of this one, are not meant.
    let mut other = Write::new(Kind::Put, "k", "v", 6);
    other.index = 2;
    other.outcome(&replica);
    let done = (Fate::Processed, Status::Ok, b"k".to_vec());
    assert_eq!(query(&replica, &other), done);
    heartbeat(&replica, other.seq - 1);
    assert_eq!(query(&replica, &other), done);
    heartbeat(&replica, other.seq);
    assert_eq!(query(&replica, &other), (Fate::Processed, Status::Ok, vec![]), "stable: its version needs no repair");
    let mut next = Write::new(Kind::Put, "l", "v", 7);
    next.outcome(&replica);
    assert_eq!(query(&replica, &write).0, Fate::Gone);
    next.generation = 0;
    let question = header(Op::Query, &next).datagram(&[], &[]);
    assert_eq!(counted(&datagram(&replica, COORDINATOR, &question)), Count::ControlReject(Reason::Session));
}

#[test]
fn a_failed_condition_is_processed_with_its_status() {
    let replica = started(1 << 20);
    let write = Write::new(Kind::Replace, "k", "v", 1);
    write.outcome(&replica);
    assert_eq!(query(&replica, &write), (Fate::Processed, Status::NotStored, b"k".to_vec()));
}

#[test]
fn an_abort_is_recorded_of_a_frozen_write_alone() {
    let replica = started(1 << 20);
    let mut write = Write::new(Kind::Put, "k", "v", 5);
    assert_eq!(abort(&replica, &write), FROZEN, "it was not frozen: now it is");
    assert_eq!(replica.dump().sessions, []);
    assert_eq!(abort(&replica, &write), ABORTED);
    assert_eq!(abort(&replica, &write), ABORTED, "idempotent");
    assert_eq!(query(&replica, &write), ABORTED);
    assert_eq!(replica.dump().sessions, [(1, aborted(&write))]);
    let acknowledged = only(&write.to(&replica)).1.header;
    assert_eq!((acknowledged.op, acknowledged.status), (Op::WReply, Status::Aborted.to_wire()));
    assert_eq!(replica.usage().keys, 0);
    // A later write of the session is a write as any.
    (write.request, write.seq) = (6, BASE + 6);
    write.outcome(&replica);
    assert_eq!(query(&replica, &Write::new(Kind::Put, "k", "v", 5)).0, Fate::Gone);

    // One that was processed cannot be aborted.
    assert_eq!(abort(&replica, &write), (Fate::Processed, Status::Ok, b"k".to_vec()));
    let mut lied = aborted(&write);
    lied.status = 0;
    let value = transfer::emit_abort(&lied);
    let bytes = header(Op::Abort, &write).datagram(&[], &value);
    assert_eq!(counted(&datagram(&replica, COORDINATOR, &bytes)), Count::ControlReject(Reason::Malformed));
}

#[test]
fn another_epoch_thaws_and_keeps_what_was_aborted() {
    let replica = started(1 << 20);
    let (frozen, mut gone) = (Write::new(Kind::Put, "k", "v", 5), Write::new(Kind::Put, "k", "w", 6));
    gone.index = 2;
    query(&replica, &frozen);
    query(&replica, &gone);
    abort(&replica, &gone);
    let configuration = Configuration { tenure: EPOCH, ..configuration(EPOCH + 1, 42) };
    assert_eq!(install(&replica, &asking(configuration, 42)).refusal, "");
    assert_eq!(frozen.outcome(&replica).0, Status::Ok);
    assert_eq!(gone.outcome(&replica).0, Status::Aborted);
    // Answers count in the exact epoch alone, and so do questions.
    for op in [Op::Query, Op::Collect] {
        let question = header(op, &frozen).datagram(&[], &[]);
        assert_eq!(counted(&datagram(&replica, COORDINATOR, &question)), Count::ControlReject(Reason::Epoch));
        let question = Header { epoch: EPOCH + 1, ..header(op, &frozen) }.datagram(&[], &[]);
        assert_eq!(counted(&datagram(&replica, CLIENT, &question)), Count::ControlReject(Reason::NotCoordinator));
    }
}

/// All pages of COLLECTED.
fn collect(replica: &Replica) -> (Vec<Held>, usize) {
    let (mut held, mut cursor, mut pages) = (Vec::new(), 0, 0);
    loop {
        let question = Header { shard: 1, epoch: EPOCH, seq: cursor, request: 4, ..Header::new(Op::Collect) };
        let actions = datagram(replica, COORDINATOR, &question.datagram(&[], &[]));
        let (to, packet) = only(&actions);
        assert_eq!((to, packet.header.op, packet.header.seq), (COORDINATOR, Op::Collected, cursor));
        assert!(sent(&actions)[0].1.len() <= DATAGRAM_MAX);
        let page = Collected::parse(packet.value).expect("COLLECTED parses");
        assert_eq!((page.incarnation, page.stable), (42, replica.stable()));
        held.extend(page.held);
        pages += 1;
        if page.next == 0 {
            return (held, pages);
        }
        assert!(page.next > cursor);
        cursor = page.next;
    }
}

#[test]
fn collecting_tells_every_version_above_stable_and_every_abort() {
    let replica = started(4 << 20);
    assert_eq!(collect(&replica), (vec![], 1));
    let mut expected = Vec::new();
    for n in 0..300u64 {
        // Each session writes five times, so that four of five versions are known to be resolved.
        let (key, seq) = (format!("{}{n}", "k".repeat((n * 7 % 245) as usize)), 1 + (n * 77) % 300);
        let mut write = Write::new(Kind::Put, &key, "v", seq);
        (write.index, write.request) = ((n % 60) as u16, 1 + n / 60);
        write.outcome(&replica);
        let writer = (n >= 240).then(|| (SessionId::new(1, write.index), write.request));
        expected.push(Held::Version { key: write.key, seq: write.seq, writer });
    }
    heartbeat(&replica, BASE + 20);
    let seq_of = |held: &Held| if let Held::Version { seq, .. } = held { *seq } else { u64::MAX };
    expected.retain(|held| seq_of(held) > BASE + 20);
    expected.sort_by_key(seq_of);
    for index in 60..64 {
        let mut write = Write::new(Kind::Put, "never", "v", 1000);
        write.index = index;
        query(&replica, &write);
        abort(&replica, &write);
        expected.push(Held::Aborted(aborted(&write)));
    }
    let (held, pages) = collect(&replica);
    assert_eq!(held, expected);
    assert!(pages > 20, "{pages} pages");
    assert_eq!(collect(&replica).0, expected, "the same order every time");
}

/// A member that missed writes, and one that has them.
fn two() -> (Replica, Replica) {
    let holder = Replica::new(Settings::simulated(999, 64 << 20));
    let configuration = Configuration { lease_ms: 1 << 40, ..configuration(EPOCH, 42) };
    install(&holder, &Install { incarnation: 999, index: 0, ..asking(configuration, 42) });
    (started(64 << 20), holder)
}

/// PULL, and all that follows from it; FETCHEDs that were needed.
fn pull(replica: &Replica, holder: &Replica, key: &str) -> usize {
    let document = serde_json::to_vec(&Pull { from: (PEER.addr, PEER.port) }).expect("serialises");
    let order = Header { shard: 1, epoch: EPOCH, ..Header::new(Op::Pull) }.datagram(key.as_bytes(), &document);
    let mut actions = datagram(replica, COORDINATOR, &order);
    assert_eq!(counted(&actions), Count::Pull);
    let mut fetched = 0;
    while let Some((to, question)) = sent(&actions).first().map(|&(to, bytes)| (to, bytes.to_vec())) {
        assert_eq!(to, PEER);
        let answers = holder.step(NOW_MS, Event::Datagram { from: CLIENT, bytes: &question });
        assert_eq!(counted(&answers), Count::Fetch);
        assert!(sent(&answers)[0].1.len() <= 65_000);
        actions = datagram(replica, PEER, sent(&answers)[0].1);
        assert_eq!(counted(&actions), Count::Fetched);
        fetched += 1;
    }
    assert_eq!(replica.due_ms(), None);
    fetched
}

#[test]
fn a_pulled_chain_comes_with_its_writers_records() {
    let (replica, holder) = two();
    for (seq, session) in [(2, 1), (4, 2), (6, 3)] {
        let mut write = Write::new(Kind::Put, "k", &seq.to_string(), seq);
        (write.index, write.request) = (session, 1);
        if session != 2 {
            write.to(&holder);
        } else {
            write.outcome(&replica);
        }
    }
    let before = replica.dump();
    assert_eq!(pull(&replica, &holder, "k"), 1);
    let seqs = |replica: &Replica| -> Vec<u64> {
        replica.dump().items[0].versions.iter().map(|version| version.seq - BASE).collect()
    };
    assert_eq!(seqs(&replica), [6, 4, 2], "what was there stays");
    assert_eq!(replica.dump().sessions.len(), 3);
    assert_ne!(replica.dump(), before);
    replica.assert_accounts();
    // The client's copies find their outcome.
    let mut write = Write::new(Kind::Put, "k", "6", 6);
    (write.index, write.request) = (3, 1);
    assert_eq!(counted(&write.to(&replica)), Count::WriteAgain);
    let collected = collect(&replica).0;
    assert!(collected.iter().all(|held| matches!(held, Held::Version { writer: Some(_), .. })), "{collected:?}");
    pull(&replica, &holder, "k");
    assert_eq!(collect(&replica).0, collected, "idempotent");
    // A key that the other does not have changes nothing.
    pull(&replica, &holder, "unheard of");
    assert_eq!(collect(&replica).0, collected);
}

#[test]
fn a_pull_thaws_and_beats_an_abort() {
    let (replica, holder) = two();
    let (write, mut other) = (Write::new(Kind::Put, "k", "v", 5), Write::new(Kind::Put, "k", "w", 6));
    other.index = 2;
    write.to(&holder);
    other.to(&holder);
    query(&replica, &write);
    query(&replica, &other);
    assert_eq!(abort(&replica, &other), ABORTED);
    pull(&replica, &holder, "k");
    let processed = (Fate::Processed, Status::Ok, b"k".to_vec());
    assert_eq!((query(&replica, &write), query(&replica, &other)), (processed.clone(), processed));
    assert_eq!(counted(&write.to(&replica)), Count::WriteAgain);
}

#[test]
fn an_active_member_ignores_what_its_stable_is_above() {
    let (replica, holder) = two();
    Write::new(Kind::Put, "k", "old", 2).to(&holder);
    Write::new(Kind::Put, "k", "old", 2).outcome(&replica);
    let mut delete = Write::new(Kind::Delete, "k", "", 4);
    delete.index = 2;
    delete.outcome(&replica);
    heartbeat(&replica, BASE + 5);
    assert_eq!(replica.usage().keys, 0);
    let mut late = Write::new(Kind::Put, "k", "new", 7);
    late.index = 3;
    late.to(&holder);
    pull(&replica, &holder, "k");
    let dump = replica.dump();
    let seqs: Vec<_> = dump.items[0].versions.iter().map(|version| version.seq - BASE).collect();
    assert_eq!(seqs, [7]);
}

#[test]
fn a_chain_too_long_for_a_datagram_comes_in_parts() {
    let (replica, holder) = two();
    let value = "v".repeat(PAYLOAD_MAX - 1);
    for n in 1..=130u64 {
        let mut write = Write::new(Kind::Put, "k", &value, n);
        (write.index, write.request) = ((n % 64) as u16, 1 + n / 64);
        write.to(&holder);
    }
    assert_eq!(pull(&replica, &holder, "k"), 3);
    assert_eq!(replica.dump().items, holder.dump().items);
    assert_eq!(replica.dump().sessions, holder.dump().sessions);
    replica.assert_accounts();
}

#[test]
fn a_pull_is_asked_again_until_answered_or_another_epoch() {
    let replica = started(1 << 20);
    let document = serde_json::to_vec(&Pull { from: (PEER.addr, PEER.port) }).expect("serialises");
    let order = Header { shard: 1, epoch: EPOCH, ..Header::new(Op::Pull) }.datagram(b"k", &document);
    let actions = datagram(&replica, COORDINATOR, &order);
    let question = sent(&actions)[0].1.to_vec();
    assert_eq!(Fetch::parse(Packet::parse(&question).expect("a packet").value), Some(Fetch::Key));
    assert_eq!(sent(&datagram(&replica, COORDINATOR, &order)).len(), 0, "it is under way");
    let due = replica.due_ms().expect("it waits");
    assert_eq!(replica.tick(due - 1), []);
    assert_eq!(replica.tick(due), [Action::Send { to: PEER, bytes: question.clone() }]);
    // Answers that were not asked for.
    let packet = Packet::parse(&question).expect("a packet");
    let chain = transfer::Chain { key: b"k".to_vec(), versions: vec![] };
    let good = Header { op: Op::Fetched, ..packet.header };
    let value = Fetched::Key(chain.clone()).emit();
    let other = Fetched::Key(transfer::Chain { key: b"l".to_vec(), ..chain }).emit();
    let unasked =
        |from, header: Header, value: &[u8]| counted(&datagram(&replica, from, &header.datagram(b"k", value)));
    let dropped = Count::Drop(Drop::Unasked);
    assert_eq!(unasked(CLIENT, good, &value), dropped);
    assert_eq!(unasked(PEER, Header { request: good.request + 1, ..good }, &value), dropped);
    assert_eq!(unasked(PEER, Header { session: SessionId(41), ..good }, &value), dropped);
    assert_eq!(unasked(PEER, Header { shard: 2, ..good }, &value), dropped);
    assert_eq!(unasked(PEER, good, &other), dropped);
    assert_eq!(unasked(PEER, good, &value[1..]), dropped);
    let next = Configuration { tenure: EPOCH, ..configuration(EPOCH + 1, 42) };
    install(&replica, &asking(next, 42));
    assert_eq!(replica.due_ms(), None);
    assert_eq!(unasked(PEER, good, &value), dropped);
}

#[test]
fn a_fetch_is_answered_within_the_tenure_and_the_life_that_it_names() {
    let (_, holder) = two();
    let ask = |change: &dyn Fn(&mut Header)| {
        let mut header = Header { shard: 1, epoch: EPOCH, ..Header::new(Op::Fetch) };
        change(&mut header);
        counted(&datagram(&holder, CLIENT, &header.datagram(b"k", &Fetch::Key.emit())))
    };
    assert_eq!(ask(&|_| {}), Count::Fetch);
    assert_eq!(ask(&|header| header.seq = 999), Count::Fetch);
    assert_eq!(ask(&|header| header.seq = 998), Count::ControlReject(Reason::Epoch));
    assert_eq!(ask(&|header| header.epoch = EPOCH + 1), Count::ControlReject(Reason::Epoch));
    assert_eq!(ask(&|header| header.shard = 2), Count::ControlReject(Reason::Shard));
}

/// Each broken rule shows.
#[cfg(feature = "published")]
mod published {
    use super::*;

    fn started(published: Published) -> Replica {
        let mut replica = Replica::new(Settings::simulated(42, 1 << 20));
        replica.published = published;
        take_part(&replica);
        replica
    }

    #[test]
    fn a_late_copy_is_applied_after_the_abort() {
        for (no_freeze, status) in [(false, Status::Aborted), (true, Status::Ok)] {
            let replica = started(Published { no_freeze, ..Published::default() });
            let write = Write::new(Kind::Put, "k", "v", 5);
            query(&replica, &write);
            assert_eq!(abort(&replica, &write), ABORTED);
            assert_eq!(write.outcome(&replica).0, status);
            assert_eq!(get(&replica, "k").is_some(), no_freeze);
        }
    }

    #[test]
    fn an_abort_is_taken_for_an_acknowledgement() {
        for (abort_is_processed, status) in [(false, Status::Aborted), (true, Status::Ok)] {
            let replica = started(Published { abort_is_processed, ..Published::default() });
            let write = Write::new(Kind::Put, "k", "v", 5);
            query(&replica, &write);
            abort(&replica, &write);
            assert_eq!(write.outcome(&replica).0, status);
            assert_eq!(get(&replica, "k"), None);
        }
    }

    #[test]
    fn a_pull_brings_back_what_was_deleted() {
        for (pull_ignores_stable, seen) in [(false, None), (true, Some("old"))] {
            let replica = started(Published { pull_ignores_stable, ..Published::default() });
            let (_, holder) = two();
            Write::new(Kind::Put, "k", "old", 2).to(&holder);
            Write::new(Kind::Delete, "k", "", 4).outcome(&replica);
            heartbeat(&replica, BASE + 5);
            pull(&replica, &holder, "k");
            assert_eq!(get(&replica, "k").as_deref(), seen);
        }
    }

    #[test]
    fn an_old_coordinator_is_obeyed() {
        for accept_old_tenure in [false, true] {
            let replica = started(Published { accept_old_tenure, ..Published::default() });
            let mut next = configuration(EPOCH + 1, 42);
            next.coordinator_addr = Ipv4Addr::new(10, 0, 0, 77);
            let from = next.coordinator();
            datagram(&replica, from, &control::emit(Header::new(Op::Install), &asking(next, 42)));
            let count = counted(&Write::new(Kind::Put, "k", "v", 5).to(&replica));
            let dropped = Count::Drop(Drop::Epoch);
            assert_eq!(count, if accept_old_tenure { Count::Write(Kind::Put) } else { dropped });
        }
    }

    #[test]
    fn a_read_is_answered_when_the_lease_is_over() {
        for ignore_lease in [false, true] {
            let replica = started(Published { ignore_lease, ..Published::default() });
            let (_, read) = read_packet(b"k", 0, 0);
            let count = counted(&at(&replica, u64::MAX, COORDINATOR, &read));
            assert_eq!(count, if ignore_lease { Count::ReadNotFound } else { Count::ReadReject(Reason::Lease) });
        }
    }
}
