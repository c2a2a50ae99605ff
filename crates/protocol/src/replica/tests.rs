//! Sequential meaning of every kind against a simple model; replicas that hear the same writes in different orders; budget,
//! sessions, installing.

mod configurations;
mod copying;
mod repair;

use std::{collections::BTreeMap, net::Ipv4Addr, sync::atomic::Ordering::SeqCst};

use proptest::prelude::*;

use super::*;
use crate::{
    control::{self, Configuration, Heartbeat, HeartbeatAck, Install, Installed, MemberInfo},
    wire::SessionId,
};

const EPOCH: u32 = 3;
const BASE: u64 = (EPOCH as u64) << 40;
const COORDINATOR: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 1), port: 5550 };
const CLIENT: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 9), port: 4000 };

/// The replica's own clock in tests that do not care.
const NOW_MS: u64 = 5000;
const LEASE_MS: u64 = 1000;

fn member(index: u8, incarnation: u64, active: bool) -> MemberInfo {
    let addr = Ipv4Addr::new(10, 0, 0, 2 + index);
    MemberInfo { index, id: 7 + u32::from(index), incarnation, addr, port: 5550, active }
}

/// Member 0 is life 999 of somebody else, member 1 the given one.
fn configuration(epoch: u32, incarnation: u64) -> Configuration {
    Configuration {
        shard: 1,
        epoch,
        tenure: epoch,
        lease_ms: LEASE_MS,
        coordinator_addr: COORDINATOR.addr,
        coordinator_port: COORDINATOR.port,
        members: vec![member(0, 999, true), member(1, incarnation, true)],
    }
}

fn asking(configuration: Configuration, incarnation: u64) -> Install {
    Install { incarnation, index: 1, reset: false, configuration, sessions: 64 }
}

fn sent(actions: &[Action]) -> Vec<(Endpoint, &[u8])> {
    let send = |action| match action {
        &Action::Send { to, ref bytes } => Some((to, &bytes[..])),
        _ => None,
    };
    actions.iter().filter_map(send).collect()
}

fn only<'a>(actions: &'a [Action]) -> (Endpoint, Packet<'a>) {
    let sent = sent(actions);
    assert_eq!(sent.len(), 1, "{actions:?}");
    (sent[0].0, Packet::parse(sent[0].1).expect("a replica sends packets"))
}

fn datagram(replica: &Replica, from: Endpoint, bytes: &[u8]) -> Vec<Action> {
    at(replica, NOW_MS, from, bytes)
}

/// As an agent or replica sends it, if it is theirs to send.
fn at(replica: &Replica, now_ms: u64, from: Endpoint, bytes: &[u8]) -> Vec<Action> {
    replica.step(now_ms, Event::Datagram { from, bytes: &sealed(bytes) })
}

fn sealed(bytes: &[u8]) -> Vec<u8> {
    let client = |op| matches!(op, Op::Open | Op::Close | Op::Locate);
    match Packet::parse(bytes) {
        Ok(Packet { header: Header { op, .. }, .. }) if op.is_control() && !client(op) => {
            control::seal(bytes.to_vec(), ClusterKey::default())
        }
        _ => bytes.to_vec(),
    }
}

fn install(replica: &Replica, install: &Install) -> Installed {
    let Configuration { shard, epoch, .. } = install.configuration;
    let header = Header { shard, epoch, request: 5, ..Header::new(Op::Install) };
    let actions = datagram(replica, COORDINATOR, &control::emit(header, install));
    let (to, packet) = only(&actions);
    assert_eq!((to, packet.header.op, packet.header.request), (COORDINATOR, Op::Installed, 5));
    assert_eq!(packet.header.epoch, install.configuration.epoch, "echoed, so that the answer finds its question");
    control::parse(&packet).expect("INSTALLED parses")
}

fn started(budget_bytes: u64) -> Replica {
    let replica = Replica::new(Settings::simulated(42, budget_bytes));
    take_part(&replica);
    replica
}

/// As member 1 of epoch [`EPOCH`], with a lease that lasts.
fn take_part(replica: &Replica) {
    let mut configuration = configuration(EPOCH, 42);
    configuration.lease_ms = 1 << 40;
    let refusal = String::new();
    let installed = Installed { incarnation: 42, shard: 1, epoch: EPOCH, refusal, items: 0, time: 0 };
    assert_eq!(install(replica, &asking(configuration, 42)), installed);
    heartbeat(replica, 0);
}

fn beat(stable: u64) -> Heartbeat {
    Heartbeat { stable, time: 0, echo: Some(NOW_MS), donor: None }
}

fn heartbeat(replica: &Replica, stable: u64) -> Vec<Action> {
    let header = Header { shard: 1, epoch: EPOCH, ..Header::new(Op::Heartbeat) };
    datagram(replica, COORDINATOR, &control::emit(header, &beat(stable)))
}

/// A write as a test states it.
#[derive(Clone, Debug)]
struct Write {
    kind: Kind,
    key: Vec<u8>,
    data: Vec<u8>,
    ttl_ms: Option<u64>,
    expected: u64,
    delta: i64,
    seq: u64,
    time: u64,
    index: u16,
    generation: u64,
    request: u64,
}

impl Write {
    fn new(kind: Kind, key: &str, data: &str, seq: u64) -> Self {
        Self {
            kind,
            key: key.into(),
            data: data.into(),
            ttl_ms: None,
            expected: 0,
            delta: 0,
            seq: BASE + seq,
            time: 1000,
            index: 1,
            generation: 1,
            request: seq,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut header = Header {
            kind: self.kind.to_wire(),
            epoch: EPOCH,
            shard: 1,
            seq: self.seq,
            time: self.time,
            session: SessionId::new(self.generation, self.index),
            request: self.request,
            token: 77,
            ..Header::new(Op::Write)
        };
        header.set_reply_to(CLIENT);
        let mut value = Vec::new();
        let operand = Operand { ttl_ms: self.ttl_ms, expected: self.expected, delta: self.delta, data: &self.data };
        header.flags = operand.emit(self.kind, &mut value);
        header.datagram(&self.key, &value)
    }

    fn to(&self, replica: &Replica) -> Vec<Action> {
        datagram(replica, COORDINATOR, &self.bytes())
    }

    /// Of a replica of whatever index: it must acknowledge.
    fn outcome_any(&self, replica: &Replica) {
        let actions = self.to(replica);
        assert_eq!(only(&actions).1.header.op, Op::WReply);
    }

    /// Status and result of a write that must be acknowledged.
    fn outcome(&self, replica: &Replica) -> (Status, u64) {
        let actions = self.to(replica);
        let (to, packet) = only(&actions);
        assert_eq!((to, packet.header.op, packet.header.cnt), (COORDINATOR, Op::WReply, 1));
        assert_eq!((packet.header.seq, packet.header.request), (self.seq, self.request));
        assert_eq!((packet.key, packet.header.token), (&self.key[..], 77));
        let status = Status::from_wire(packet.header.status).expect("a status");
        let result = if status == Status::Ok && self.kind == Kind::Incr {
            u64::from_be_bytes(packet.value[..8].try_into().expect("8 bytes"))
        } else {
            0
        };
        (status, result)
    }
}

fn read_packet(key: &[u8], bound: u64, time: u64) -> (Header, Vec<u8>) {
    let mut header = Header { epoch: EPOCH, shard: 1, seq: bound, time, request: 3, ..Header::new(Op::Read) };
    header.set_reply_to(CLIENT);
    (header, header.datagram(key, &[]))
}

/// Data and cas that a read sees.
fn read(replica: &Replica, key: &str, bound: u64, time: u64) -> Option<(Vec<u8>, u64)> {
    let actions = datagram(replica, COORDINATOR, &read_packet(key.as_bytes(), bound, time).1);
    let (to, packet) = only(&actions);
    assert_eq!((to, packet.header.op, packet.header.cnt), (CLIENT, Op::RReply, 1));
    assert_eq!((packet.key, packet.header.request), (key.as_bytes(), 3));
    match Status::from_wire(packet.header.status) {
        Some(Status::Ok) => Some((packet.value.to_vec(), packet.header.seq)),
        Some(Status::NotFound) => {
            assert_eq!((packet.value.len(), packet.header.seq), (0, 0));
            None
        }
        other => panic!("{other:?}"),
    }
}

fn get(replica: &Replica, key: &str) -> Option<String> {
    read(replica, key, u64::MAX, 1000).map(|(data, _)| String::from_utf8(data).expect("text"))
}

fn counted(actions: &[Action]) -> Count {
    let count = |action: &Action| match action {
        Action::Count(count) => Some(*count),
        _ => None,
    };
    let counts: Vec<_> = actions.iter().filter_map(count).collect();
    assert_eq!(counts.len(), 1, "{actions:?}");
    counts[0]
}

#[test]
fn a_read_sees_the_newest_version_up_to_its_bound_and_never_below_stable() {
    let replica = started(1 << 20);
    for seq in [10, 20, 30] {
        assert_eq!(Write::new(Kind::Put, "k", &seq.to_string(), seq).outcome(&replica), (Status::Ok, 0));
    }
    let at = |bound| read(&replica, "k", bound, 1000).map(|(data, cas)| (String::from_utf8(data).expect("text"), cas));
    assert_eq!(at(BASE + 9), None);
    assert_eq!(at(BASE + 10), Some(("10".into(), BASE + 10)));
    assert_eq!(at(BASE + 29), Some(("20".into(), BASE + 20)));
    assert_eq!(at(u64::MAX), Some(("30".into(), BASE + 30)));
    heartbeat(&replica, BASE + 25);
    assert_eq!(at(0), Some(("20".into(), BASE + 20)));
    assert_eq!(replica.usage().versions, 2);
    heartbeat(&replica, BASE + 15);
    assert_eq!(replica.stable(), BASE + 25, "stable never goes back");
    assert_eq!(at(BASE + 12), Some(("20".into(), BASE + 20)));
    replica.assert_accounts();
}

#[test]
fn a_late_put_goes_where_its_seq_belongs() {
    let replica = started(1 << 20);
    for seq in [30, 10, 20, 40, 5] {
        let mut write = Write::new(Kind::Put, "k", &seq.to_string(), seq);
        write.index = seq as u16;
        write.outcome(&replica);
    }
    let dump = replica.dump();
    let seqs: Vec<_> = dump.items[0].versions.iter().map(|version| version.seq - BASE).collect();
    assert_eq!(seqs, [40, 30, 20, 10, 5]);
    assert_eq!(read(&replica, "k", BASE + 39, 0), Some((b"30".to_vec(), BASE + 30)));
    heartbeat(&replica, BASE + 20);
    assert_eq!(replica.dump().items[0].versions.len(), 3);
    replica.assert_accounts();
}

#[test]
fn a_write_takes_effect_once_however_often_it_comes() {
    let replica = started(1 << 20);
    Write::new(Kind::Put, "n", "5", 1).outcome(&replica);
    let mut incr = Write::new(Kind::Incr, "n", "", 2);
    incr.delta = 3;
    assert_eq!(incr.outcome(&replica), (Status::Ok, 8));
    let before = replica.dump();
    let again = incr.to(&replica);
    assert_eq!(counted(&again), Count::WriteAgain);
    assert_eq!(incr.outcome(&replica), (Status::Ok, 8));
    // Lower requests, and any request of a lower generation, are dropped.
    assert_eq!(counted(&Write::new(Kind::Put, "n", "5", 1).to(&replica)), Count::Drop(Drop::Old));
    assert_eq!(replica.dump(), before);
    let mut reopened = Write::new(Kind::Put, "n", "1", 3);
    (reopened.generation, reopened.request) = (2, 1);
    reopened.outcome(&replica);
    let mut former = Write::new(Kind::Put, "n", "9", 4);
    former.request = 100;
    assert_eq!(counted(&former.to(&replica)), Count::Drop(Drop::Old));
    assert_eq!(get(&replica, "n").as_deref(), Some("1"));
}

#[test]
fn conditional_kinds_report_what_memcached_would() {
    use Kind::*;
    let replica = started(1 << 20);
    let mut seq = 0;
    let mut run = |kind, key: &str, data: &str| {
        seq += 1;
        Write::new(kind, key, data, seq).outcome(&replica).0
    };
    for (kind, status) in [
        (Delete, Status::NotFound),
        (Replace, Status::NotStored),
        (Append, Status::NotStored),
        (Prepend, Status::NotStored),
        (Incr, Status::NotFound),
        (Cas, Status::NotFound),
        (Touch, Status::NotFound),
    ] {
        assert_eq!(run(kind, "k", "x"), status, "{kind} of a missing key");
    }
    assert_eq!(get(&replica, "k"), None);
    assert_eq!(run(Add, "k", "b"), Status::Ok);
    assert_eq!(run(Add, "k", "c"), Status::NotStored);
    assert_eq!(run(Append, "k", "c"), Status::Ok);
    assert_eq!(run(Prepend, "k", "a"), Status::Ok);
    assert_eq!(get(&replica, "k").as_deref(), Some("abc"));
    assert_eq!(run(Incr, "k", ""), Status::NotANumber);
    assert_eq!(run(Cas, "k", "z"), Status::Exists);
    assert_eq!(run(Replace, "k", "7"), Status::Ok);
    assert_eq!(run(Delete, "k", ""), Status::Ok);
    assert_eq!(run(Delete, "k", ""), Status::NotFound);
    assert_eq!(get(&replica, "k"), None);
    replica.assert_accounts();
}

#[test]
fn incr_counts_in_64_bits_and_refuses_the_rest() {
    let replica = started(1 << 20);
    let mut seq = 0;
    let mut incr = |text: &str, delta| {
        seq += 2;
        Write::new(Kind::Put, "n", text, seq).outcome(&replica);
        let mut write = Write::new(Kind::Incr, "n", "", seq + 1);
        write.delta = delta;
        (write.outcome(&replica), get(&replica, "n").expect("an item"))
    };
    assert_eq!(incr("-5", 3), ((Status::Ok, (-2i64) as u64), "-2".into()));
    assert_eq!(incr("9223372036854775806", 1), ((Status::Ok, i64::MAX as u64), i64::MAX.to_string()));
    assert_eq!(incr("9223372036854775807", 1), ((Status::Overflow, 0), i64::MAX.to_string()));
    assert_eq!(incr("-9223372036854775808", -1), ((Status::Overflow, 0), i64::MIN.to_string()));
    for text in ["", "-", "+1", " 1", "1 ", "1.0", "0x1", "9223372036854775808", "\u{663}"] {
        assert_eq!(incr(text, 1), ((Status::NotANumber, 0), text.into()));
    }
}

#[test]
fn cas_is_the_last_change_of_content() {
    let replica = started(1 << 20);
    let cas = |replica: &Replica| read(replica, "k", u64::MAX, 1000).expect("an item").1;
    Write::new(Kind::Put, "k", "a", 1).outcome(&replica);
    let mut touch = Write::new(Kind::Touch, "k", "", 2);
    touch.ttl_ms = Some(50);
    assert_eq!(touch.outcome(&replica), (Status::Ok, 0));
    assert_eq!(cas(&replica), BASE + 1, "TOUCH changes no content");
    assert_eq!(Write::new(Kind::Add, "k", "b", 3).outcome(&replica).0, Status::NotStored);
    assert_eq!(cas(&replica), BASE + 1, "a failed condition changes none");
    let mut swap = Write::new(Kind::Cas, "k", "c", 4);
    swap.expected = BASE + 1;
    assert_eq!(swap.outcome(&replica).0, Status::Ok);
    assert_eq!(cas(&replica), BASE + 4);
    swap.seq += 1;
    swap.request += 1;
    assert_eq!(swap.outcome(&replica).0, Status::Exists);
}

#[test]
fn expiry_is_judged_by_the_time_in_the_packet() {
    let replica = started(1 << 20);
    let mut put = Write::new(Kind::Put, "k", "5", 1);
    put.ttl_ms = Some(100);
    put.outcome(&replica);
    assert!(read(&replica, "k", u64::MAX, 1099).is_some());
    assert_eq!(read(&replica, "k", u64::MAX, 1100), None);
    // INCR without a lifetime keeps the item's expiry.
    Write::new(Kind::Incr, "k", "", 2).outcome(&replica);
    assert_eq!(read(&replica, "k", u64::MAX, 1100), None);
    let mut touch = Write::new(Kind::Touch, "k", "", 3);
    (touch.ttl_ms, touch.time) = (Some(100), 1050);
    touch.outcome(&replica);
    assert!(read(&replica, "k", u64::MAX, 1149).is_some());
    let mut late = Write::new(Kind::Touch, "k", "", 4);
    (late.ttl_ms, late.time) = (Some(100), 1150);
    assert_eq!(late.outcome(&replica).0, Status::NotFound);
    let mut ever = Write::new(Kind::Put, "k", "5", 5);
    ever.ttl_ms = Some(u64::MAX);
    ever.outcome(&replica);
    assert!(read(&replica, "k", u64::MAX, u64::MAX - 1).is_some(), "a lifetime past the end of time saturates");
    let mut zero = Write::new(Kind::Touch, "k", "", 6);
    zero.ttl_ms = Some(0);
    zero.outcome(&replica);
    assert!(read(&replica, "k", u64::MAX, u64::MAX).is_some(), "0 is for ever");
}

#[test]
fn append_stops_at_the_datagram() {
    let replica = started(1 << 20);
    let room = PAYLOAD_MAX - 1;
    Write::new(Kind::Put, "k", &"x".repeat(room - 2), 1).outcome(&replica);
    assert_eq!(Write::new(Kind::Append, "k", "123", 2).outcome(&replica).0, Status::TooLarge);
    assert_eq!(Write::new(Kind::Prepend, "k", "123", 3).outcome(&replica).0, Status::TooLarge);
    assert_eq!(Write::new(Kind::Append, "k", "12", 4).outcome(&replica).0, Status::Ok);
    assert_eq!(get(&replica, "k").expect("an item").len(), room);
}

#[test]
fn tombstones_go_when_stable() {
    let replica = started(1 << 20);
    Write::new(Kind::Put, "k", "a", 1).outcome(&replica);
    Write::new(Kind::Delete, "k", "", 2).outcome(&replica);
    Write::new(Kind::Delete, "other", "", 3).outcome(&replica);
    assert_eq!((replica.usage().items, replica.usage().keys, replica.usage().versions), (0, 2, 3));
    assert_eq!(read(&replica, "k", BASE + 1, 0), Some((b"a".to_vec(), BASE + 1)));
    heartbeat(&replica, BASE + 2);
    assert_eq!(replica.usage().keys, 1);
    heartbeat(&replica, BASE + 3);
    assert_eq!((replica.usage().keys, replica.usage().versions, replica.usage().unsettled), (0, 0, 0));
    replica.assert_accounts();
}

#[test]
fn a_full_store_refuses_and_forgets_nothing() {
    let replica = started(64 << 10);
    let mut seq = 0;
    let refused = loop {
        seq += 1;
        let mut write = Write::new(Kind::Put, &format!("key{seq}"), &"v".repeat(100), seq);
        write.index = (seq % 64) as u16;
        let actions = write.to(&replica);
        let (to, packet) = only(&actions);
        if packet.header.op == Op::WReject {
            assert_eq!((to, packet.header.status), (CLIENT, Reason::StoreFull.to_wire()));
            assert_eq!((packet.value.len(), packet.header.epoch), (0, EPOCH));
            break write;
        }
        assert!(seq < 1000, "64 KiB hold no 1000 items");
    };
    assert!(seq > 150, "64 KiB hold more than {seq} items of 110 bytes");
    assert!(replica.usage().used_bytes <= 64 << 10);
    for held in 1..seq {
        assert!(get(&replica, &format!("key{held}")).is_some(), "key{held} was evicted");
    }
    let index = refused.index;
    assert!(replica.dump().sessions.iter().all(|(i, record)| *i != index || record.seq != refused.seq), "not recorded");
    // DELETE has a reserve; what it frees, once stable, the very same write may take.
    let mut delete = Write::new(Kind::Delete, "key1", "", seq + 1);
    delete.index = 63 - index;
    delete.request += 100;
    assert_eq!(delete.outcome(&replica).0, Status::Ok);
    let mut second = Write::new(Kind::Delete, "key2", "", seq + 2);
    (second.index, second.request) = (delete.index, delete.request + 1);
    assert_eq!(second.outcome(&replica).0, Status::Ok);
    heartbeat(&replica, seq + 2);
    assert_eq!(counted(&refused.to(&replica)), Count::WriteReject(Reason::StoreFull));
    heartbeat(&replica, refused.seq - 1);
    replica.assert_accounts();
}

#[test]
fn a_chain_has_a_bound() {
    let replica = started(64 << 20);
    let mut write = Write::new(Kind::Put, "k", "v", 0);
    for n in 1..=CHAIN_MAX as u64 {
        (write.seq, write.request) = (BASE + n, n);
        write.outcome(&replica);
    }
    (write.seq, write.request) = (BASE + 5000, 5000);
    assert_eq!(counted(&write.to(&replica)), Count::WriteReject(Reason::StoreFull));
    heartbeat(&replica, BASE + 2);
    write.outcome(&replica);
    replica.assert_accounts();
    heartbeat(&replica, BASE + 5000);
    assert_eq!(replica.usage().versions, 1);
    replica.assert_accounts();
}

/// `stable` waits for it, and everybody's room waits for `stable`: refused, it would be refused for ever.
#[test]
fn a_late_write_finds_room_in_a_full_chain() {
    let replica = started(64 << 20);
    let mut write = Write::new(Kind::Put, "k", "v", 0);
    for n in 1..=CHAIN_MAX as u64 {
        (write.seq, write.request) = (BASE + 10 + n, n);
        write.outcome(&replica);
    }
    heartbeat(&replica, BASE);
    let mut newest = Write::new(Kind::Put, "k", "v", 5000);
    newest.index = 2;
    assert_eq!(counted(&newest.to(&replica)), Count::WriteReject(Reason::StoreFull));
    let mut late = Write::new(Kind::Put, "k", "late", 1);
    late.index = 3;
    late.outcome(&replica);
    assert_eq!(read(&replica, "k", BASE + 1, 1000).map(|(data, _)| data), Some(b"late".to_vec()));
    replica.assert_accounts();
    heartbeat(&replica, newest.seq - 1);
    newest.outcome(&replica);
    replica.assert_accounts();
}

#[test]
fn strangers_and_other_epochs_are_turned_away() {
    let replica = started(1 << 20);
    let stranger = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 66), port: 5550 };
    let rejected = |from, header: Header| {
        let actions = datagram(&replica, from, &header.datagram(b"k", &[]));
        let (to, packet) = only(&actions);
        assert_eq!((packet.header.op, packet.header.epoch, packet.value.len()), (Op::RReject, EPOCH, 0));
        (to, Reason::from_wire(packet.header.status).expect("a reason"))
    };
    let (good, _) = read_packet(b"k", 0, 0);
    assert_eq!(rejected(stranger, good), (stranger, Reason::NotCoordinator));
    assert_eq!(rejected(COORDINATOR, Header { epoch: 2, ..good }), (CLIENT, Reason::Epoch));
    assert_eq!(rejected(stranger, Header { epoch: 2, ..good }), (stranger, Reason::Epoch));
    assert_eq!(rejected(COORDINATOR, Header { shard: 9, ..good }), (COORDINATOR, Reason::Shard));

    let write = Write::new(Kind::Put, "k", "v", 1);
    assert_eq!(counted(&datagram(&replica, stranger, &write.bytes())), Count::Drop(Drop::NotCoordinator));
    let altered = |at: usize, byte: u8| {
        let mut bytes = write.bytes();
        bytes[at] = byte;
        counted(&datagram(&replica, COORDINATOR, &bytes))
    };
    assert_eq!(altered(11, 9), Count::Drop(Drop::Epoch));
    assert_eq!(altered(15, 9), Count::Drop(Drop::Shard));
    assert_eq!(altered(4, 200), Count::Drop(Drop::Kind));
    assert_eq!(altered(3, 99), Count::Drop(Drop::Op));
    assert_eq!(altered(3, 16), Count::ControlReject(Reason::NotCoordinator));
    assert_eq!(altered(38, 1), Count::Drop(Drop::Session));
    assert_eq!(altered(67, 200), Count::Drop(Drop::Truncated));
    assert_eq!(altered(68, 255), Count::Drop(Drop::Truncated));
    assert_eq!(altered(0, 0), Count::Drop(Drop::Magic));
    assert_eq!(altered(2, 2), Count::Drop(Drop::Version));
    let fresh = Replica::new(Settings::simulated(1, 1 << 20));
    assert_eq!(counted(&write.to(&fresh)), Count::Drop(Drop::Epoch));
    assert_eq!(counted(&datagram(&fresh, COORDINATOR, &good.datagram(b"k", &[]))), Count::ReadReject(Reason::Epoch));
    assert_eq!(replica.usage().keys, 0);
}

#[test]
fn installing_asks_for_this_very_life() {
    let replica = Replica::new(Settings::simulated(42, 1 << 20));
    let ask = |epoch, incarnation| install(&replica, &asking(configuration(epoch, incarnation), incarnation));
    for other_life in [0, 41] {
        let told = ask(3, other_life);
        assert_eq!((told.incarnation, told.epoch, told.refusal.as_str()), (42, 0, ""));
        assert_eq!(replica.membership(), None);
    }
    let not_named = install(&replica, &asking(configuration(3, 41), 42));
    assert!(not_named.refusal.contains("does not name it"), "{}", not_named.refusal);
    assert_eq!(ask(3, 42).epoch, 3);
    assert_eq!(ask(3, 42).epoch, 3, "idempotent");
    let told = ask(5, 0);
    assert_eq!((told.incarnation, told.epoch, told.refusal.as_str()), (42, 3, ""), "who asks is told, and no more");
    assert_eq!(replica.membership().map(|membership| membership.epoch), Some(3));
    assert!(ask(2, 42).refusal.contains("is over"));
    assert_eq!(ask(4, 42).epoch, 4);
    assert!(ask(0, 42).refusal.contains("not within"));
}

#[test]
fn control_that_contradicts_itself_is_refused() {
    let replica = started(1 << 20);
    let refusal = |change: &dyn Fn(&mut Install)| {
        let mut request = asking(configuration(EPOCH + 1, 42), 42);
        change(&mut request);
        install(&replica, &request).refusal
    };
    assert!(refusal(&|install| install.configuration.members[0].id = 8).contains("two members have id"));
    assert!(refusal(&|install| install.index = 5).contains("as member 5"));
    assert!(refusal(&|install| install.index = 0).contains("as member 0"));
    assert!(refusal(&|install| install.sessions = 1 << 17).contains("sessions"));
    assert!(refusal(&|install| install.configuration.shard = 6).contains("serves shard 1"));
    assert!(refusal(&|install| install.configuration.epoch = EPOCH).contains("tenure"));
    assert!(refusal(&|install| install.configuration.tenure = 1).contains("is not later than epoch"));
    let same_epoch = |install: &mut Install| {
        (install.configuration.epoch, install.configuration.tenure) = (EPOCH, EPOCH);
        install.configuration.members[0].id = 70;
    };
    assert!(refusal(&same_epoch).contains("needs a higher epoch"));
    assert!(refusal(&|install| install.configuration.members[1].active = false).contains("it is active"));

    // A replica that was restarted says so.
    let restarted = Replica::new(Settings::simulated(43, 1 << 20));
    let actions = heartbeat(&restarted, BASE + 9);
    let packet = only(&actions).1;
    assert_eq!((packet.header.op, packet.header.epoch), (Op::HeartbeatAck, EPOCH));
    assert_eq!(control::parse::<HeartbeatAck>(&packet).map(|ack| ack.incarnation), Some(43));
    assert_eq!(restarted.stable(), 0);
    // But not to whoever asks with fewer bytes than the answer has.
    let header = Header { shard: 1, epoch: EPOCH, ..Header::new(Op::Heartbeat) };
    let short =
        datagram(&restarted, CLIENT, &header.datagram(&[], br#"{"stable":1,"time":0,"echo":null,"donor":null}"#));
    assert_eq!(only(&short).1.header.status, Reason::Malformed.to_wire());
    assert!(only(&short).1.value.is_empty());

    let garbage = Header::new(Op::Install).datagram(&[], b"{\"index\":");
    assert_eq!(counted(&datagram(&replica, COORDINATOR, &garbage)), Count::ControlReject(Reason::Malformed));
    let stable = (u64::from(EPOCH) + 1) << 40;
    assert_eq!(counted(&heartbeat(&replica, stable)), Count::ControlReject(Reason::Malformed));
    let header = Header { shard: 1, epoch: EPOCH + 1, ..Header::new(Op::Heartbeat) };
    let bytes = control::emit(header, &beat(1));
    assert_eq!(counted(&datagram(&replica, COORDINATOR, &bytes)), Count::ControlReject(Reason::Epoch));
}

#[test]
fn every_count_has_a_place_and_a_name_of_its_own() {
    let all: Vec<_> = Count::all().collect();
    let mut places: Vec<_> = all.iter().map(|(count, _)| count.index()).collect();
    let mut names: Vec<_> = all.iter().map(|(_, name)| name.clone()).collect();
    places.sort_unstable();
    places.dedup();
    names.sort_unstable();
    names.dedup();
    assert_eq!((places.len(), names.len()), (all.len(), all.len()));
    assert!(places.iter().all(|&place| place < Count::LEN));
    assert!(names.contains(&"write_reject_store_full".to_owned()), "{names:?}");
}

/// What a store of one key after the other should do, as plainly as it can be said.
#[derive(Default)]
struct Model {
    items: BTreeMap<Vec<u8>, (Vec<u8>, u64, u64)>,
}

impl Model {
    fn get(&self, key: &[u8], time: u64) -> Option<(Vec<u8>, u64)> {
        let (data, cas, expiry) = self.items.get(key)?;
        (*expiry == 0 || time < *expiry).then(|| (data.clone(), *cas))
    }

    fn apply(&mut self, w: &Write) -> (Status, u64) {
        if self.get(&w.key, w.time).is_none() {
            self.items.remove(&w.key);
        }
        let ttl = |keep: u64| match w.ttl_ms {
            None => keep,
            Some(0) => 0,
            Some(ttl_ms) => w.time + ttl_ms,
        };
        let new = (w.data.clone(), w.seq, ttl(0));
        let Some(item) = self.items.get_mut(&w.key) else {
            return match w.kind {
                Kind::Put | Kind::Add => {
                    self.items.insert(w.key.clone(), new);
                    (Status::Ok, 0)
                }
                Kind::Replace | Kind::Append | Kind::Prepend => (Status::NotStored, 0),
                _ => (Status::NotFound, 0),
            };
        };
        match w.kind {
            Kind::Put | Kind::Replace => *item = new,
            Kind::Add => return (Status::NotStored, 0),
            Kind::Cas if item.1 == w.expected => *item = new,
            Kind::Cas => return (Status::Exists, 0),
            Kind::Delete => {
                self.items.remove(&w.key);
            }
            Kind::Append => *item = ([&item.0[..], &w.data].concat(), w.seq, ttl(item.2)),
            Kind::Prepend => *item = ([&w.data, &item.0[..]].concat(), w.seq, ttl(item.2)),
            Kind::Touch => item.2 = ttl(item.2),
            Kind::Incr => {
                let Some(number) = String::from_utf8(item.0.clone()).ok().and_then(|text| text.parse::<i64>().ok())
                else {
                    return (Status::NotANumber, 0);
                };
                let Some(sum) = number.checked_add(w.delta) else { return (Status::Overflow, 0) };
                *item = (sum.to_string().into_bytes(), w.seq, ttl(item.2));
                return (Status::Ok, sum as u64);
            }
        }
        (Status::Ok, 0)
    }
}

fn any_write() -> impl Strategy<Value = Write> {
    let data = prop_oneof![
        3 => (-20i64..20).prop_map(|n| n.to_string()),
        1 => Just(i64::MAX.to_string()),
        2 => "[a-c]{0,4}",
    ];
    let ttl_ms = prop_oneof![3 => Just(None), 1 => Just(Some(0)), 2 => (1u64..40).prop_map(Some)];
    (0usize..9, 0usize..3, data, ttl_ms, 0u64..12, -3i64..4, 0u64..12).prop_map(
        |(kind, key, data, ttl_ms, expected, delta, time)| Write {
            kind: Kind::ALL[kind],
            ttl_ms,
            expected: BASE + expected,
            delta,
            time,
            ..Write::new(Kind::Put, ["a", "b", "c"][key], &data, 0)
        },
    )
}

/// Cuts the writes into rounds as a coordinator would let them be pending together: any number of PUTs of a key, or one
/// conditional, and one write of a session.
fn rounds(writes: &[Write]) -> Vec<Vec<Write>> {
    let mut rounds: Vec<Vec<Write>> = vec![Vec::new()];
    for write in writes {
        let round = rounds.last().expect("never empty");
        let meets = round.iter().any(|other| {
            other.index == write.index
                || other.key == write.key && (other.kind.is_conditional() || write.kind.is_conditional())
        });
        if meets {
            rounds.push(Vec::new());
        }
        rounds.last_mut().expect("never empty").push(write.clone());
    }
    rounds
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn one_write_after_the_other_does_what_the_model_says(
        mut writes in prop::collection::vec(any_write(), 1..60),
        stable_every in 1usize..8,
    ) {
        let replica = started(1 << 20);
        let mut model = Model::default();
        let mut time = 0;
        for (n, write) in writes.iter_mut().enumerate() {
            time += write.time;
            (write.seq, write.request, write.time) = (BASE + n as u64 + 1, n as u64 + 1, time);
            prop_assert_eq!(write.outcome(&replica), model.apply(write), "{:?}", write);
            for key in ["a", "b", "c"] {
                prop_assert_eq!(read(&replica, key, write.seq, time), model.get(key.as_bytes(), time));
            }
            if n % stable_every == 0 {
                heartbeat(&replica, write.seq);
                replica.assert_accounts();
            }
        }
    }

    /// same-outcome and clean-after: three replicas hear each round of writes in orders of their own, each write once or
    /// several times, older rounds again in between, with heartbeats at different moments.
    #[test]
    fn replicas_agree_whatever_the_network_does(
        mut writes in prop::collection::vec((any_write(), 0u16..6), 1..50),
        orders in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 400),
    ) {
        let mut requests = [0u64; 6];
        let mut time = 0;
        let writes: Vec<Write> = writes
            .drain(..)
            .enumerate()
            .map(|(n, (mut write, index))| {
                time += write.time;
                requests[usize::from(index)] += 1;
                (write.seq, write.time) = (BASE + n as u64 + 1, time);
                (write.index, write.request) = (index, requests[usize::from(index)]);
                write
            })
            .collect();

        let replicas = [started(1 << 20), started(1 << 20), started(1 << 20)];
        let mut orders = orders.into_iter().cycle();
        let mut outcomes = vec![BTreeMap::new(); 3];
        let mut last = BASE;
        for round in rounds(&writes) {
            for (replica, outcomes) in replicas.iter().zip(&mut outcomes) {
                let mut waiting = round.clone();
                while !waiting.is_empty() {
                    let (at, again) = orders.next().expect("endless");
                    let write = waiting[at.index(waiting.len())].clone();
                    let actions = write.to(replica);
                    let reply = only(&actions).1;
                    let answer = (reply.header.status, reply.value.to_vec(), reply.header.seq);
                    let first = outcomes.entry(write.seq).or_insert_with(|| answer.clone());
                    prop_assert_eq!(&*first, &answer, "a duplicate is acknowledged as recorded");
                    if again {
                        // A copy from long ago, of whatever was sent up to now.
                        let old = &writes[at.index((write.seq - BASE) as usize)];
                        if outcomes.contains_key(&old.seq) {
                            let before = replica.dump();
                            old.to(replica);
                            prop_assert_eq!(replica.dump(), before);
                        }
                    } else {
                        waiting.swap_remove(at.index(waiting.len()));
                    }
                }
            }
            // Everything of the round is resolved: some replicas hear so, some don't.
            last = round.iter().map(|write| write.seq).max().expect("a round has writes");
            for replica in &replicas {
                if orders.next().expect("endless").1 {
                    heartbeat(replica, last);
                }
            }
        }
        for replica in &replicas {
            heartbeat(replica, last);
            replica.assert_accounts();
            prop_assert_eq!(replica.usage().versions, replica.usage().items, "one version of each item is left");
        }
        prop_assert_eq!(&outcomes[0], &outcomes[1]);
        prop_assert_eq!(&outcomes[0], &outcomes[2]);
        prop_assert_eq!(replicas[0].dump(), replicas[1].dump());
        prop_assert_eq!(replicas[0].dump(), replicas[2].dump());

        // And it is what the writes do one after the other: PUTs of a round by their seqs.
        let mut model = Model::default();
        for write in &writes {
            let (status, result) = model.apply(write);
            let (got, value, _) = &outcomes[0][&write.seq];
            prop_assert_eq!(*got, status.to_wire());
            if write.kind == Kind::Incr && status == Status::Ok {
                prop_assert_eq!(&value[..], &result.to_be_bytes()[..]);
            }
        }
        for key in ["a", "b", "c"] {
            prop_assert_eq!(read(&replicas[0], key, last, time), model.get(key.as_bytes(), time));
        }
    }

    /// No datagram makes a replica panic, and none but a proper write changes what it holds.
    #[test]
    fn garbage_is_harmless(
        mut bytes in prop::collection::vec(any::<u8>(), 0..400),
        op in 0u8..32,
        lengths in any::<bool>(),
        own in any::<bool>(),
    ) {
        let replica = started(1 << 20);
        Write::new(Kind::Put, "k", "v", 1).outcome(&replica);
        let before = replica.dump();
        if bytes.len() >= HEADER_LEN {
            bytes[..4].copy_from_slice(&[0x55, 0x50, 1, op]);
            if own {
                bytes[8..16].copy_from_slice(&[0, 0, 0, EPOCH as u8, 0, 0, 0, 1]);
            }
            if lengths {
                let rest = bytes.len() - HEADER_LEN;
                let key = rest / 3;
                bytes[66..68].copy_from_slice(&(key as u16).to_be_bytes());
                bytes[68..72].copy_from_slice(&((rest - key) as u32).to_be_bytes());
            }
        }
        let actions = datagram(&replica, COORDINATOR, &bytes);
        for (_, answer) in sent(&actions) {
            prop_assert!(Packet::parse(answer).is_ok());
        }
        let written = matches!(counted(&actions), Count::Write(_));
        prop_assert!(written || replica.dump() == before, "{:?}", actions);
    }
}

/// Each published behaviour breaks what the rule in its place keeps.
#[cfg(feature = "published")]
mod published {
    use super::*;

    fn started(published: Published) -> Replica {
        let mut replica = Replica::new(Settings::simulated(42, 1 << 20));
        replica.published = published;
        take_part(&replica);
        replica
    }

    /// Holes 3 and 4.
    #[test]
    fn a_read_without_its_bound_sees_a_pending_write() {
        for (ignore_bound, seen) in [(false, "old"), (true, "pending")] {
            let replica = started(Published { ignore_bound, ..Published::default() });
            Write::new(Kind::Put, "k", "old", 1).outcome(&replica);
            Write::new(Kind::Put, "k", "pending", 2).outcome(&replica);
            let (data, _) = read(&replica, "k", BASE + 1, 1000).expect("an item");
            assert_eq!(data, seen.as_bytes());
        }
    }

    /// Hole 7.
    #[test]
    fn a_retried_write_brings_the_old_value_back() {
        for (forget_sessions, seen) in [(false, "new"), (true, "old")] {
            let replica = started(Published { forget_sessions, ..Published::default() });
            let mut write = Write::new(Kind::Put, "k", "old", 1);
            write.to(&replica);
            let mut newer = Write::new(Kind::Put, "k", "new", 2);
            newer.index = 2;
            newer.to(&replica);
            // The coordinator of such a protocol orders the retry anew.
            write.seq = BASE + 3;
            write.to(&replica);
            assert_eq!(get(&replica, "k").as_deref(), Some(seen));
        }
    }

    /// Hole 13.
    #[test]
    fn a_loser_that_was_not_kept_is_missed_by_a_read_with_its_bound() {
        for (ignore_loser, seen) in [(false, Some("loser")), (true, None)] {
            let replica = started(Published { ignore_loser, ..Published::default() });
            Write::new(Kind::Put, "k", "winner", 2).outcome(&replica);
            let mut loser = Write::new(Kind::Put, "k", "loser", 1);
            loser.index = 2;
            assert_eq!(loser.outcome(&replica).0, Status::Ok);
            let data = read(&replica, "k", BASE + 1, 1000).map(|(data, _)| data);
            assert_eq!(data.as_deref(), seen.map(str::as_bytes));
        }
    }
}
