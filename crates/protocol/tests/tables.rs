//! The coordinator's tables as its agent changes them (`agent::Tables`), and what that does to packets.

use underpass_abi::abi::{self, up_config, up_session};
use underpass_protocol::{
    agent::{Settlement, Tables},
    coordinator::{Action, CloseOutcome, Coordinator, Published, Scan, Settings, Step, slot},
    wire::{Endpoint, Header, Kind, Op, Operand, Packet, Reason, SessionId, Status},
};

const SHARD: u32 = 3;
const OTHER: u32 = 4;
const BUCKETS: usize = 2;

fn member(index: u8) -> Endpoint {
    Endpoint { addr: [10, 0, 1, index].into(), port: 5550 }
}

fn client(index: u16) -> Endpoint {
    Endpoint { addr: [10, 0, 2, index as u8].into(), port: 4000 }
}

fn session(index: u16) -> SessionId {
    SessionId::new((1 << 24) + 7 + u64::from(index), index)
}

fn config(shard: u32, epoch: u32, members: &[u8]) -> up_config {
    let mut config = up_config {
        shard,
        epoch,
        lease_until_ms: 2000,
        must_ack_count: members.len() as u8,
        serving_count: members.len() as u8,
        ..up_config::default()
    };
    for (at, &index) in members.iter().enumerate() {
        config.must_ack |= 1 << index;
        config.must_ack_list[at] = index;
        config.serving_list[at] = index;
        config.members[usize::from(index)].addr = u32::from(member(index).addr).to_be();
        config.members[usize::from(index)].port = member(index).port.to_be();
    }
    config.serving = config.must_ack;
    config
}

/// Shards [`SHARD`] and [`OTHER`] with members 0 and 2; sessions 0 to 2 are the first's, 3 the other's.
fn tables() -> Coordinator {
    let mut tables = Coordinator::new(Settings {
        buckets: BUCKETS as u32,
        sessions: 8,
        bucket_key: [1; 64],
        fingerprint_key: [2, 3],
    });
    tables.configure(&config(SHARD, 1, &[0, 2]));
    tables.configure(&config(OTHER, 1, &[0, 2]));
    for index in 0..4 {
        let shard = if index == 3 { OTHER } else { SHARD };
        assert!(tables.open_session(0, session(index), shard, 9, client(index)));
    }
    tables
}

fn request(op: Op, index: u16, request: u64) -> Header {
    let shard = if index == 3 { OTHER } else { SHARD };
    let mut header = Header { shard, session: session(index), token: 9, request, ..Header::new(op) };
    header.set_reply_to(client(index));
    header
}

fn step(tables: &mut Coordinator, now_ms: u64, from: Endpoint, header: Header, value: &[u8]) -> Action {
    let header = Header { key_len: 1, value_len: value.len() as u32, ..header };
    tables.step(now_ms, from, &Packet { header, key: b"k", value })
}

fn write(tables: &mut Coordinator, index: u16, number: u64) -> Action {
    step(tables, 1000, client(index), request(Op::Write, index, number), b"v")
}

/// The header of an ordered write.
fn ordered(action: Action) -> Header {
    match action {
        Action::ToMembers { header } => header,
        other => panic!("not ordered: {other:?}"),
    }
}

fn acknowledge(tables: &mut Coordinator, header: Header, index: u8) -> Action {
    step(tables, 1000, member(index), Header { op: Op::WReply, cnt: index, ..header }, &[])
}

fn reason(action: Action) -> Option<Reason> {
    match action {
        Action::ToSender { header, .. } => Reason::from_wire(header.status),
        _ => None,
    }
}

fn dirty(tables: &Coordinator, shard: u32) -> bool {
    let (buckets, words) = tables.buckets();
    let own = slot(shard) * BUCKETS..(slot(shard) + 1) * BUCKETS;
    let taken = buckets[own.clone()].iter().any(|bucket| bucket.ways.iter().any(|way| way.last != 0));
    assert_eq!(taken, words[own].iter().any(|word| word & 1 != 0));
    taken
}

#[test]
fn a_settled_write_is_as_an_acknowledged_one() {
    let mut acknowledged = tables();
    let header = ordered(write(&mut acknowledged, 0, 1));
    let mut settled = acknowledged.clone();
    let reply = Header { status: Status::Ok.to_wire(), ..header };
    acknowledge(&mut acknowledged, reply, 0);
    assert!(matches!(acknowledge(&mut acknowledged, reply, 2), Action::ToClient { .. }));

    let committed = Settlement::Committed { status: Status::Ok.to_wire(), result: 5 };
    for (session, request, seq) in [
        (session(0), 1, header.seq + 1),
        (session(0), 2, header.seq),
        (session(1), 1, header.seq),
        (SessionId(0), 1, header.seq),
    ] {
        assert_eq!(settled.settle(session, request, seq, committed), Ok(false));
    }
    assert!(dirty(&settled, SHARD));
    assert_eq!(settled.settle(session(0), 1, header.seq, committed), Ok(true));
    assert_eq!(settled.settle(session(0), 1, header.seq, committed), Ok(false), "no longer pending");
    let by_acks = up_session { acks: 0, ..acknowledged.sessions()[0] };
    assert_eq!(settled.sessions()[0], by_acks);
    assert_eq!(settled.buckets(), acknowledged.buckets());
    assert!(!dirty(&settled, SHARD));
    let Action::ToSender { header: answer, .. } = write(&mut settled, 0, 1) else { panic!("answered from the record") };
    assert_eq!((answer.op, answer.status, answer.seq), (Op::WReply, Status::Ok.to_wire(), header.seq));
}

#[test]
fn a_settled_increment_keeps_its_number() {
    let mut tables = tables();
    let mut value = vec![];
    let operand = Operand { ttl_ms: None, expected: 0, delta: 1, data: &[] };
    let mut header = request(Op::Write, 0, 1);
    (header.kind, header.flags) = (Kind::Incr.to_wire(), operand.emit(Kind::Incr, &mut value));
    let seq = ordered(step(&mut tables, 1000, client(0), header, &value)).seq;
    let committed = Settlement::Committed { status: Status::Ok.to_wire(), result: 41 };
    assert_eq!(tables.settle(session(0), 1, seq, committed), Ok(true));
    let answer = step(&mut tables, 1000, client(0), header, &value);
    assert!(matches!(answer, Action::ToSender { result: Some(41), .. }), "{answer:?}");
}

#[test]
fn an_aborted_write_leaves_its_key_clean_but_for_others() {
    let mut tables = tables();
    let first = ordered(write(&mut tables, 0, 1));
    let second = ordered(write(&mut tables, 1, 1));
    assert_eq!(tables.settle(session(0), 1, first.seq, Settlement::Aborted), Ok(true));
    assert!(dirty(&tables, SHARD), "the second write is pending");
    assert_eq!(reason(write(&mut tables, 0, 1)), Some(Reason::Aborted));
    assert!(matches!(acknowledge(&mut tables, first, 0), Action::Drop(abi::UP_COUNT_DROP_ACK_STALE)));
    assert_eq!(tables.settle(session(1), 1, second.seq, Settlement::Aborted), Ok(true));
    assert!(!dirty(&tables, SHARD));
    assert_eq!(tables.record(1).unwrap().status, Status::Aborted.to_wire());
    assert_eq!(tables.close(session(0), None), Ok(CloseOutcome::Closed { request: 1, state: abi::UP_STATE_ABORTED }));
    ordered(write(&mut tables, 1, 2));
}

#[test]
fn a_settlement_can_be_interleaved() {
    let mut tables = tables();
    let header = ordered(write(&mut tables, 0, 1));
    let clear = tables.begin_settle(session(0), 1, header.seq, Settlement::Aborted).expect("pending");
    assert!(tables.begin_settle(session(0), 1, header.seq, Settlement::Aborted).is_none());
    assert!(matches!(write(&mut tables, 0, 1), Action::Drop(abi::UP_COUNT_DROP_STARTING)));
    assert_eq!(tables.close(session(0), None), Ok(CloseOutcome::Unresolved));
    let finish = tables.resume(clear);
    assert!(!dirty(&tables, SHARD));
    assert_eq!(tables.sessions()[0].state, abi::UP_STATE_COMMITTING as u8);
    assert!(matches!(tables.resume(finish), Step::Settled));
    assert_eq!(tables.sessions()[0].state, abi::UP_STATE_ABORTED as u8);
}

#[test]
fn a_change_of_epoch_keeps_floor_acknowledgements_and_sessions() {
    let mut tables = tables();
    let floor = tables.config(SHARD).unwrap().floor;
    assert_eq!(floor, 1 << 40);
    let header = ordered(write(&mut tables, 0, 1));
    acknowledge(&mut tables, header, 0);
    // Member 2 leaves, member 5 comes; in between both must acknowledge.
    tables.forget_acks(SHARD, 5).unwrap();
    tables.configure(&config(SHARD, 2, &[0, 2, 5]));
    assert_eq!(tables.config(SHARD).unwrap().floor, floor);
    assert_eq!(tables.shards()[slot(SHARD)].clock, 2 << 40);
    tables.configure(&config(SHARD, 2, &[0, 5]));
    assert!(matches!(acknowledge(&mut tables, header, 5), Action::Drop(abi::UP_COUNT_DROP_ACK_EPOCH)));
    let again = ordered(write(&mut tables, 0, 1));
    assert_eq!((again.epoch, again.seq, again.time), (2, header.seq, header.time));
    assert!(matches!(acknowledge(&mut tables, again, 2), Action::Drop(abi::UP_COUNT_DROP_ACK_MEMBER)));
    assert!(matches!(acknowledge(&mut tables, again, 5), Action::ToClient { .. }), "member 0's was kept");
    // A smaller `must_ack` may be covered already: the next acknowledgement decides.
    let header = ordered(write(&mut tables, 0, 2));
    acknowledge(&mut tables, header, 5);
    tables.configure(&config(SHARD, 3, &[5]));
    let again = ordered(write(&mut tables, 0, 2));
    assert!(matches!(acknowledge(&mut tables, again, 5), Action::ToClient { .. }));
}

#[test]
fn forgotten_acknowledgements_are_those_of_one_member_and_shard() {
    let mut tables = tables();
    let [header, other] = [0, 3].map(|index| ordered(write(&mut tables, index, 1)));
    acknowledge(&mut tables, header, 0);
    acknowledge(&mut tables, other, 0);
    tables.forget_acks(SHARD, 2).unwrap();
    assert_eq!((tables.sessions()[0].acks, tables.sessions()[3].acks), (1, 1));
    tables.forget_acks(SHARD, 0).unwrap();
    assert_eq!((tables.sessions()[0].acks, tables.sessions()[3].acks), (0, 1));
}

#[test]
fn a_lease_is_put_off_and_never_nearer() {
    let mut tables = tables();
    let read = |tables: &mut Coordinator, now_ms| step(tables, now_ms, client(0), request(Op::Read, 0, 1), &[]);
    assert_eq!(reason(read(&mut tables, 2000)), Some(Reason::Lease));
    tables.extend_lease(SHARD, 3000).unwrap();
    tables.extend_lease(SHARD, 2500).unwrap();
    tables.extend_lease(SHARD + 8, 9000).unwrap();
    assert!(matches!(read(&mut tables, 2999), Action::ToMember { .. }));
    assert_eq!(reason(read(&mut tables, 3000)), Some(Reason::Lease));
    assert_eq!(Tables::config(&tables, OTHER).unwrap().lease_until_ms, 2000);
}

#[test]
fn stamps_follow_the_configuration() {
    let mut tables = tables();
    let changed = up_config { time_offset_ms: -400, ..*tables.config(SHARD).unwrap() };
    tables.configure(&changed);
    assert_eq!(ordered(write(&mut tables, 0, 1)).time, 600);
    assert_eq!(ordered(write(&mut tables, 3, 1)).time, 1000);
}

#[test]
fn clearing_leaves_the_other_shard_and_the_clock() {
    let mut tables = tables();
    for index in [0, 3] {
        ordered(write(&mut tables, index, 1));
    }
    tables.clear(SHARD + 8).unwrap();
    assert!(dirty(&tables, SHARD), "another shard of that slot is not served");
    tables.clear(SHARD).unwrap();
    assert!(!dirty(&tables, SHARD) && dirty(&tables, OTHER));
    assert_eq!(Tables::config(&tables, SHARD), None);
    assert_eq!(reason(write(&mut tables, 0, 1)), Some(Reason::Shard));
    assert_eq!(tables.scan(SHARD, 8), Ok(Scan { stable: (1 << 40) + 1, unresolved: 0 }));
    assert_eq!(tables.scan(OTHER, 8).unwrap().unresolved, 1);
    assert_eq!(tables.scan(OTHER, 3).unwrap().unresolved, 0);
    assert!(tables.sessions()[..3].iter().all(|record| *record == up_session::default()));
    assert_eq!(tables.sessions()[3].session, session(3).0);
    // The next tenure's floor is above everything.
    tables.configure(&config(SHARD, 1, &[0]));
    assert_eq!(tables.config(SHARD).unwrap().floor, (1 << 40) + 1);
}

#[test]
fn a_loaded_session_goes_on_where_it_was() {
    let mut tables = tables();
    let header = ordered(write(&mut tables, 0, 1));
    let committed = Settlement::Committed { status: Status::NotFound.to_wire(), result: 0 };
    tables.settle(session(0), 1, header.seq, committed).unwrap();
    let record = tables.record(0).unwrap();
    assert_eq!(tables.load(0, &record), Ok(false), "it has a session");
    tables.clear(SHARD).unwrap();
    assert_eq!(tables.load(0, &record), Ok(true), "before it is served");
    let far = up_session { session: SessionId::new(99, 8).0, ..record };
    assert_eq!(tables.load(8, &far), Ok(false), "beyond the table");
    assert!(tables.record(8).is_err());
    tables.clear(SHARD).unwrap();
    assert_eq!(tables.record(0).unwrap().session, 0, "cleared though the shard is not served");
    tables.load(0, &record).unwrap();
    tables.configure(&config(SHARD, 5, &[0]));
    let mut seen = vec![];
    tables.records(2, &mut |index, record| seen.push((index, record.session))).unwrap();
    assert_eq!(seen, [(0, session(0).0), (1, 0)]);
    let Action::ToSender { header: answer, .. } = write(&mut tables, 0, 1) else { panic!("answered from the record") };
    assert_eq!((answer.status, answer.seq, answer.epoch), (Status::NotFound.to_wire(), header.seq, 5));
    assert_eq!(ordered(write(&mut tables, 0, 2)).seq, (5 << 40) + 1);
}

#[test]
fn a_retransmission_of_another_key_or_kind_is_refused() {
    let mut tables = tables();
    let sent = request(Op::Write, 0, 1);
    let header = ordered(step(&mut tables, 1000, client(0), sent, b"v"));
    let other_kind = Header { kind: Kind::Add.to_wire(), ..sent };
    let other_key = |tables: &mut Coordinator| {
        let header = Header { key_len: 1, value_len: 1, ..sent };
        tables.step(1000, client(0), &Packet { header, key: b"l", value: b"v" })
    };
    for committed in [false, true] {
        if committed {
            let ok = Settlement::Committed { status: Status::Ok.to_wire(), result: 0 };
            tables.settle(session(0), 1, header.seq, ok).unwrap();
        }
        let before = tables.sessions()[0];
        assert_eq!(reason(step(&mut tables, 1000, client(0), other_kind, b"v")), Some(Reason::Malformed));
        assert_eq!(reason(other_key(&mut tables)), Some(Reason::Malformed));
        assert_eq!(tables.sessions()[0], before);
    }
    // A replica does not tell the key of a write that it took.
    let loaded = up_session { fingerprint: [0; 2], ..tables.record(0).unwrap() };
    tables.clear(SHARD).unwrap();
    assert_eq!(tables.load(0, &loaded), Ok(true));
    tables.configure(&config(SHARD, 2, &[0]));
    assert!(matches!(other_key(&mut tables), Action::ToSender { header, .. } if header.op == Op::WReply));
    assert_eq!(reason(step(&mut tables, 1000, client(0), other_kind, b"v")), Some(Reason::Malformed));
}

/// Each switch does what the rule in its place forbids.
#[test]
fn published_behaviours_break_the_rules() {
    let with = |published| {
        let mut tables = tables();
        tables.published = published;
        tables
    };
    let none = Published::default();

    let mut kept = with(Published { keep_bits: true, ..none });
    let header = ordered(write(&mut kept, 0, 1));
    acknowledge(&mut kept, header, 0);
    kept.forget_acks(SHARD, 0).unwrap();
    assert_eq!(kept.sessions()[0].acks, 1);

    let mut late = with(Published { no_lease_check: true, ..none });
    let read = step(&mut late, 2000, client(0), request(Op::Read, 0, 1), &[]);
    assert!(matches!(read, Action::ToMember { .. }));

    let mut any = with(Published { any_epoch_ack: true, ..none });
    let header = ordered(write(&mut any, 0, 1));
    any.configure(&config(SHARD, 2, &[0, 2]));
    assert!(matches!(acknowledge(&mut any, header, 0), Action::Drop(abi::UP_COUNT_ACK)));

    let mut counted = with(Published { count_aborted_ack: true, ..none });
    let aborted = Header { status: Status::Aborted.to_wire(), ..ordered(write(&mut counted, 0, 1)) };
    assert!(matches!(acknowledge(&mut counted, aborted, 0), Action::Drop(abi::UP_COUNT_ACK)));

    let mut dirtied = with(Published { abort_keeps_way: true, ..none });
    let seq = ordered(write(&mut dirtied, 0, 1)).seq;
    assert_eq!(dirtied.settle(session(0), 1, seq, Settlement::Aborted), Ok(true));
    assert!(dirty(&dirtied, SHARD));

    let mut behind = with(Published { keep_clock: true, ..none });
    behind.clear(SHARD).unwrap();
    behind.configure(&config(SHARD, 2, &[0]));
    assert_eq!(behind.config(SHARD).unwrap().floor, 1 << 40);
}
