//! INSTALL, leases, seals, LOCATE.

use super::*;
use crate::control::{Located, OPEN_PADDING};

const OTHER: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 77), port: 5550 };

/// Another epoch of the tenure.
fn later(epoch: u32) -> Configuration {
    Configuration { epoch, tenure: EPOCH, lease_ms: 1 << 40, ..configuration(epoch, 42) }
}

/// Another coordinator.
fn taken_over(epoch: u32) -> Configuration {
    Configuration { coordinator_addr: OTHER.addr, ..configuration(epoch, 42) }
}

/// The answer to an INSTALL from the coordinator that it names.
fn told(replica: &Replica, install: &Install) -> Installed {
    let configuration = &install.configuration;
    let header = Header { shard: 1, epoch: configuration.epoch, ..Header::new(Op::Install) };
    let actions = datagram(replica, configuration.coordinator(), &control::emit(header, install));
    control::parse(&only(&actions).1).expect("INSTALLED parses")
}

fn with_epoch(bytes: &[u8], epoch: u32) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[8..12].copy_from_slice(&epoch.to_be_bytes());
    bytes
}

#[test]
fn an_install_keeps_everything() {
    let replica = started(1 << 20);
    for seq in 1..=5 {
        let mut write = Write::new(Kind::Put, "k", &seq.to_string(), seq);
        write.index = seq as u16;
        write.outcome(&replica);
    }
    heartbeat(&replica, BASE + 2);
    let before = replica.dump();
    assert_eq!((before.items[0].versions.len(), before.sessions.len()), (4, 5));
    let installed = told(&replica, &asking(taken_over(EPOCH + 1), 42));
    assert_eq!((installed.epoch, installed.items, installed.time), (EPOCH + 1, 1, 1000));
    assert_eq!(replica.dump(), Dump { epoch: EPOCH + 1, ..before });
    replica.assert_accounts();
}

#[test]
fn packets_of_the_tenure_are_obeyed_and_none_before_it() {
    let replica = started(1 << 20);
    assert_eq!(told(&replica, &asking(later(EPOCH + 3), 42)).epoch, EPOCH + 3);
    // Late ones of an epoch of this tenure are answered under their own epoch.
    for (epoch, seq) in [(EPOCH, 1), (EPOCH + 2, 2), (EPOCH + 3, 3)] {
        let write = Write::new(Kind::Put, "k", "v", seq);
        let actions = datagram(&replica, COORDINATOR, &with_epoch(&write.bytes(), epoch));
        assert_eq!((only(&actions).1.header.op, only(&actions).1.header.epoch), (Op::WReply, epoch));
        let (_, read) = read_packet(b"k", u64::MAX, 0);
        let actions = datagram(&replica, COORDINATOR, &with_epoch(&read, epoch));
        assert_eq!((only(&actions).1.header.op, only(&actions).1.header.epoch), (Op::RReply, epoch));
    }
    for epoch in [EPOCH - 1, EPOCH + 4] {
        let write = Write::new(Kind::Put, "k", "w", 9);
        let actions = datagram(&replica, COORDINATOR, &with_epoch(&write.bytes(), epoch));
        assert_eq!(counted(&actions), Count::Drop(Drop::Epoch));
        let (_, read) = read_packet(b"k", u64::MAX, 0);
        let actions = datagram(&replica, COORDINATOR, &with_epoch(&read, epoch));
        let header = only(&actions).1.header;
        assert_eq!((header.op, header.status, header.epoch), (Op::RReject, Reason::Epoch.to_wire(), EPOCH + 3));
    }
    // Another tenure: nothing of the one before, whoever sends it.
    assert_eq!(told(&replica, &asking(taken_over(EPOCH + 4), 42)).epoch, EPOCH + 4);
    let write = Write::new(Kind::Put, "k", "w", 9);
    for from in [COORDINATOR, OTHER] {
        let actions = datagram(&replica, from, &with_epoch(&write.bytes(), EPOCH + 3));
        assert_eq!(counted(&actions), Count::Drop(Drop::Epoch));
    }
    let actions = datagram(&replica, COORDINATOR, &with_epoch(&write.bytes(), EPOCH + 4));
    assert_eq!(counted(&actions), Count::Drop(Drop::NotCoordinator));
    assert_eq!(counted(&heartbeat(&replica, BASE + 9)), Count::ControlReject(Reason::Epoch));
    assert_eq!(replica.stable(), 0);
}

#[test]
fn a_read_needs_a_lease_that_its_coordinator_has_granted() {
    let replica = Replica::new(Settings::simulated(42, 1 << 20));
    install(&replica, &asking(configuration(EPOCH, 42), 42));
    let read_at = |now_ms| {
        let (_, read) = read_packet(b"k", 0, 0);
        counted(&at(&replica, now_ms, COORDINATOR, &read))
    };
    let beat_at = |now_ms, epoch, echo| {
        let header = Header { shard: 1, epoch, ..Header::new(Op::Heartbeat) };
        let heartbeat = Heartbeat { stable: 0, time: 0, echo, donor: None };
        let actions = at(&replica, now_ms, COORDINATOR, &control::emit(header, &heartbeat));
        control::parse::<HeartbeatAck>(&only(&actions).1).expect("an answer").stamp
    };
    let over = Count::ReadReject(Reason::Lease);
    assert_eq!(read_at(NOW_MS), over, "none before the first echo");
    let stamp = beat_at(NOW_MS + 3, EPOCH, None);
    assert_eq!((stamp, read_at(NOW_MS + 3)), (NOW_MS + 3, over));
    // A delayed grant is a short one.
    beat_at(NOW_MS + 500, EPOCH, Some(stamp));
    assert_eq!(read_at(stamp + LEASE_MS - 1), Count::ReadNotFound);
    assert_eq!(read_at(stamp + LEASE_MS), over);
    beat_at(NOW_MS + 900, EPOCH, Some(NOW_MS));
    assert_eq!(read_at(stamp + LEASE_MS - 1), Count::ReadNotFound, "an older echo takes nothing away");
    // Stamps that this replica cannot have given in this tenure grant nothing.
    beat_at(NOW_MS + 900, EPOCH, Some(NOW_MS + 901));
    beat_at(NOW_MS + 900, EPOCH, Some(NOW_MS - 1));
    assert_eq!(read_at(stamp + LEASE_MS), over);
    // The tenure goes on, and so does its lease.
    let configuration = Configuration { lease_ms: LEASE_MS, ..later(EPOCH + 1) };
    at(&replica, NOW_MS + 950, COORDINATOR, &control::emit(Header::new(Op::Install), &asking(configuration, 42)));
    assert_eq!(replica.membership().map(|membership| membership.epoch), Some(EPOCH + 1));
    assert_eq!(read_at(stamp + LEASE_MS - 1), Count::ReadNotFound);
    // Another one begins without, though it be of the same coordinator.
    let next = configuration_at(EPOCH + 2);
    at(&replica, NOW_MS + 960, COORDINATOR, &control::emit(Header::new(Op::Install), &asking(next, 42)));
    let (_, read) = read_packet(b"k", 0, 0);
    let read = with_epoch(&read, EPOCH + 2);
    assert_eq!(counted(&at(&replica, NOW_MS + 960, COORDINATOR, &read)), over);
    beat_at(NOW_MS + 961, EPOCH + 2, Some(NOW_MS + 950));
    assert_eq!(counted(&at(&replica, NOW_MS + 961, COORDINATOR, &read)), over, "a stamp of the tenure before");
    beat_at(NOW_MS + 962, EPOCH + 2, Some(NOW_MS + 961));
    assert_eq!(counted(&at(&replica, NOW_MS + 962, COORDINATOR, &read)), Count::ReadNotFound);
}

fn configuration_at(epoch: u32) -> Configuration {
    configuration(epoch, 42)
}

#[test]
fn what_agents_and_replicas_say_is_obeyed_under_the_seal_alone() {
    let key = ClusterKey([3, 4]);
    let replica = Replica::new(Settings { cluster_key: key, ..Settings::simulated(42, 1 << 20) });
    let ask = |bytes: &[u8]| replica.step(NOW_MS, Event::Datagram { from: COORDINATOR, bytes });
    let install = control::emit(Header::new(Op::Install), &asking(configuration(EPOCH, 42), 42));
    let sealed_otherwise = control::seal(install.clone(), ClusterKey::default());
    for bytes in [&install, &sealed_otherwise] {
        assert_eq!(ask(bytes), [Action::Count(Count::Drop(Drop::Unsealed))]);
    }
    assert_eq!(replica.membership(), None);
    let actions = ask(&control::seal(install, key));
    assert!(control::is_sealed(sent(&actions)[0].1, key));
    assert!(replica.membership().is_some());
    for op in [Op::Install, Op::Heartbeat, Op::Collect, Op::Pull, Op::Fetch, Op::Fetched, Op::Query, Op::Abort] {
        let header = Header { shard: 1, epoch: EPOCH, session: SessionId::new(1, 1), request: 1, ..Header::new(op) };
        let bytes = header.datagram(b"k", &[b' '; 400]);
        assert_eq!(ask(&bytes), [Action::Count(Count::Drop(Drop::Unsealed))], "{op}");
        let actions = ask(&control::seal(bytes, key));
        assert_ne!(actions, [Action::Count(Count::Drop(Drop::Unsealed))], "{op}");
        for (_, answer) in sent(&actions) {
            assert!(control::is_sealed(answer, key), "{op}");
        }
    }
}

#[test]
fn a_client_finds_its_coordinator_through_a_replica() {
    let replica = started(1 << 20);
    let ask = |shard, len| {
        let header = Header { shard, token: 5, request: 6, ..Header::new(Op::Locate) };
        let bytes = header.datagram(&[], &vec![b' '; len]);
        let actions = datagram(&replica, CLIENT, &bytes);
        let (to, packet) = only(&actions);
        assert_eq!((to, packet.header.token, packet.header.request), (CLIENT, 5, 6));
        assert!(packet.value.len() <= len);
        match packet.header.op {
            Op::Located => Ok(control::parse::<Located>(&packet).expect("LOCATED parses")),
            _ => Err(Reason::from_wire(packet.header.status).expect("a reason")),
        }
    };
    let located = ask(1, OPEN_PADDING).expect("it knows");
    assert_eq!((located.configuration.coordinator(), located.serves), (COORDINATOR, false));
    assert_eq!(ask(1, OPEN_PADDING - 1), Err(Reason::Malformed), "no amplifier");
    assert_eq!(ask(2, OPEN_PADDING), Err(Reason::Shard));
    let mut crowd = later(EPOCH + 1);
    crowd.lease_ms = u64::MAX;
    crowd.members.extend((2..8).map(|index| MemberInfo {
        id: u32::MAX - u32::from(index),
        addr: Ipv4Addr::new(200, 200, 200, 200 + index),
        port: 65535,
        ..member(index, u64::MAX, false)
    }));
    assert_eq!(install(&replica, &asking(crowd.clone(), 42)).refusal, "");
    assert_eq!(ask(1, OPEN_PADDING).expect("the largest configuration fits").configuration, crowd);
}

#[test]
fn a_reset_empties_one_that_is_no_member() {
    let replica = started(1 << 20);
    Write::new(Kind::Put, "k", "v", 1).outcome(&replica);
    heartbeat(&replica, BASE + 1);
    Write::new(Kind::Put, "l", "v", 2).outcome(&replica);
    let before = replica.dump();
    let mut others = later(EPOCH + 1);
    others.members.pop();
    let order = |epoch, change: &dyn Fn(&mut Install)| {
        let configuration = Configuration { epoch, ..others.clone() };
        let mut order = Install { reset: true, index: u8::MAX, ..asking(configuration, 42) };
        change(&mut order);
        told(&replica, &order)
    };
    let asis = |_: &mut Install| {};
    assert!(order(EPOCH, &asis).refusal.contains("only a later one"));
    assert!(order(EPOCH - 1, &|order| order.configuration.tenure = 1).refusal.contains("is over"));
    assert!(order(EPOCH + 1, &|order| order.configuration.shard = 2).refusal.contains("keeps its data"));
    assert!(
        order(EPOCH + 1, &|order| order.configuration.members.push(member(1, 42, true)))
            .refusal
            .contains("is a member")
    );
    assert_eq!(order(EPOCH + 1, &|order| order.incarnation = 41).refusal, "", "that is for another life");
    assert_eq!(replica.dump(), before);

    let emptied = order(EPOCH + 1, &asis);
    assert_eq!((emptied.incarnation, emptied.epoch, emptied.items, emptied.refusal.as_str()), (43, 0, 0, ""));
    assert_eq!((replica.incarnation(), replica.membership(), replica.stable()), (43, None, 0));
    assert_eq!((replica.dump().items.len(), replica.dump().sessions.len()), (0, 0));
    assert_eq!(replica.usage(), Usage { budget_bytes: 1 << 20, ..Usage::default() });
    replica.assert_accounts();
    assert_eq!(order(EPOCH + 1, &asis).incarnation, 43, "the same order again is for the life that is over");
    let again = Install { incarnation: 43, ..asking(configuration(EPOCH + 2, 43), 43) };
    assert_eq!(told(&replica, &again).epoch, EPOCH + 2);
}

#[test]
fn the_session_table_grows_and_never_shrinks() {
    let replica = Replica::new(Settings::simulated(42, 1 << 20));
    let sized = |epoch, sessions| Install { sessions, ..asking(later(epoch), 42) };
    assert_eq!(install(&replica, &sized(EPOCH, 4)).refusal, "");
    let mut write = Write::new(Kind::Put, "k", "v", 1);
    write.index = 9;
    assert_eq!(counted(&write.to(&replica)), Count::Drop(Drop::Session));
    assert_eq!(install(&replica, &sized(EPOCH + 1, 16)).refusal, "");
    write.outcome(&replica);
    assert_eq!(install(&replica, &sized(EPOCH + 2, 4)).refusal, "");
    assert_eq!(counted(&write.to(&replica)), Count::WriteAgain);
}

#[test]
fn the_latest_packet_time_is_told() {
    let replica = started(1 << 20);
    let time = |epoch| told(&replica, &asking(later(epoch), 42)).time;
    let mut write = Write::new(Kind::Put, "k", "v", 1);
    write.time = 7000;
    write.outcome(&replica);
    assert_eq!(time(EPOCH + 1), 7000);
    let header = Header { shard: 1, epoch: EPOCH, ..Header::new(Op::Heartbeat) };
    for time in [9000, 8000] {
        datagram(&replica, COORDINATOR, &control::emit(header, &Heartbeat { time, ..beat(0) }));
    }
    assert_eq!(time(EPOCH + 2), 9000);
    // Of nobody but the coordinator.
    (write.seq, write.request, write.time) = (BASE + 2, 2, 10_000);
    datagram(&replica, OTHER, &write.bytes());
    assert_eq!(time(EPOCH + 3), 9000);
}
