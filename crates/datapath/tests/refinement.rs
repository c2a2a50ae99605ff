//! The kernel program is a refinement of the pure coordinator: the same generated packets go through both, and verdict,
//! bytes, counters and tables must agree. `UNDERPASS_SEED` repeats a run, `UNDERPASS_PACKETS` makes it longer.

mod common;

use common::*;
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};
use underpass_abi::abi::{self, up_config, up_session};
use underpass_datapath::{coordinator::TableSizes, frame};
use underpass_protocol::{
    agent::Settlement,
    coordinator::{Action, CloseOutcome, Coordinator, opened},
    wire::{Endpoint, FLAG_TTL, HEADER_LEN, Header, Kind, Op, Operand, Packet, Reason, SessionId, Status},
};

const CLIENTS: u8 = 12;
const SHARDS: [u32; 2] = [3, 9];

#[derive(Clone)]
struct Client {
    session: SessionId,
    token: u64,
    shard: u32,
    request: u64,
    at: Endpoint,
    mac: [u8; 6],
    generation: u64,
    /// The frame of its latest write.
    last: Option<Vec<u8>>,
}

/// What the network may still deliver: frames from whoever sent them.
struct World {
    clients: Vec<Client>,
    /// Writes that reached the members, as (header, key), to be acknowledged.
    propagated: Vec<(Header, Vec<u8>)>,
    /// Everything that was ever sent, for replay.
    sent: Vec<Vec<u8>>,
    /// Keys that are few enough to collide in buckets and with each other.
    keys: Vec<Vec<u8>>,
}

fn seed() -> u64 {
    std::env::var("UNDERPASS_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random)
}

fn packets() -> usize {
    std::env::var("UNDERPASS_PACKETS").ok().and_then(|s| s.parse().ok()).unwrap_or(20_000)
}

fn request(rng: &mut StdRng, world: &mut World) -> Vec<u8> {
    let mut key = world.keys.choose(rng).unwrap().clone();
    if rng.random_bool(0.02) {
        key = vec![7; *[0, 251, 255, 300].choose(rng).unwrap()];
    }
    let at = rng.random_range(0..world.clients.len());
    let client = &mut world.clients[at];
    let read = rng.random_bool(0.4);
    if !read
        && rng.random_bool(0.15)
        && let Some(last) = &client.last
    {
        return last.clone();
    }
    let mut header = Header::new(if read { Op::Read } else { Op::Write });
    if !read && rng.random_bool(0.8) {
        client.request += 1;
    }
    header.request = if read { rng.random() } else { client.request.saturating_sub(rng.random_range(0..10) / 9) };
    header.shard = client.shard;
    header.session = client.session;
    header.token = client.token;
    header.set_reply_to(client.at);
    let mut value = vec![0; 0];
    if !read {
        let kind = if rng.random_bool(0.6) { Kind::Put } else { *Kind::ALL.choose(rng).unwrap() };
        header.kind = kind.to_wire();
        header.flags = if rng.random_bool(0.3) { FLAG_TTL } else { 0 };
        value.resize(Operand::prefix_len(kind, header.flags) + rng.random_range(0..64), 0);
        rng.fill(&mut value[..]);
    }
    if rng.random_bool(0.02) {
        value.resize(*[0, 1, 7, 1392 - 100, 1393].choose(rng).unwrap(), 0);
    }
    let bytes = frame(client.at, client.mac, &header.datagram(&key, &value));
    if !read {
        client.last = Some(bytes.clone());
    }
    bytes
}

fn acknowledgement(rng: &mut StdRng, world: &World, pure: &Coordinator) -> Option<Vec<u8>> {
    let recent = world.propagated.len().saturating_sub(16);
    let (mut header, key) = if rng.random_bool(0.7) {
        world.propagated[recent..].choose(rng)?.clone()
    } else {
        // Also what was left behind, or sessions whose write nobody acknowledges would pile up and the run go quiet.
        let pending = |at: &abi::up_session| u32::from(at.state) == abi::UP_STATE_PENDING;
        let pending: Vec<_> = pure.sessions().iter().filter(|s| pending(s)).map(|s| s.seq).collect();
        let seq = *pending.choose(rng)?;
        world.propagated.iter().rev().find(|(header, _)| header.seq == seq)?.clone()
    };
    let needed = pure.config(header.shard).map_or(0, |config| config.must_ack);
    let index = *(0..8).filter(|i| needed & (1 << i) != 0).collect::<Vec<_>>().choose(rng).unwrap_or(&0);
    if rng.random_bool(0.9) {
        // Else of the epoch in which it was propagated.
        header.epoch = pure.config(header.shard).map_or(0, |config| config.epoch);
    }
    header.op = Op::WReply;
    header.cnt = index;
    header.status = if rng.random_bool(0.97) { rng.random_range(0..4) } else { Status::Aborted.to_wire() };
    let mut from = member_endpoint(header.shard, index);
    if rng.random_bool(0.03) {
        // Hostile or lost: another member's index, no member at all, another epoch, another seq.
        match rng.random_range(0..5) {
            0 => header.cnt = rng.random(),
            1 => from.port += 1,
            2 => header.epoch += 1,
            3 => header.seq += 1,
            _ => header.shard = rng.random_range(0..16),
        }
    }
    let value = if header.kind == Kind::Incr.to_wire() { rng.random::<u64>().to_be_bytes().to_vec() } else { vec![] };
    Some(frame(from, member_mac(header.shard, index), &header.datagram(&key, &value)))
}

/// A frame bent in one place: header fields, lengths, checksums, foreign protocols, fragments, truncation.
fn hostile(rng: &mut StdRng, mut bytes: Vec<u8>) -> Vec<u8> {
    let header = frame::OVERHEAD;
    match rng.random_range(0..14) {
        0 => bytes.truncate(rng.random_range(14..bytes.len())),
        1 => bytes[header] ^= 1 << rng.random_range(0..8),
        2 => bytes[header + 2] = rng.random(),
        3 => bytes[header + 3] = rng.random(),
        4 => bytes[header + 4] = rng.random(),
        5 => bytes[header + 12 + rng.random_range(0..4)] ^= 1 << rng.random_range(0..8),
        6 => bytes[header + 32 + rng.random_range(0..8)] ^= 1 << rng.random_range(0..8),
        7 => bytes[header + 48 + rng.random_range(0..32)] ^= 1 << rng.random_range(0..8),
        8 => bytes[12 + rng.random_range(0..30)] = rng.random(),
        9 => bytes[40..42].copy_from_slice(&[0, 0]),
        10 => bytes.extend((0..rng.random_range(1..40)).map(|_| 0xee)),
        11 => bytes[20 + rng.random_range(0..2)] ^= 1 << rng.random_range(0..8),
        12 => {
            let at = rng.random_range(14..bytes.len());
            bytes[at] ^= 1 << rng.random_range(0..8);
        }
        _ => bytes[header + 66..header + 68].copy_from_slice(&rng.random_range(240..260u16).to_be_bytes()),
    }
    bytes
}

/// What the pure side says of a frame; `None`: not for it, to be passed on untouched.
fn pure_action(twins: &mut Twins, now_ms: u64, bytes: &[u8]) -> Option<Action> {
    // The frame layer of the specification, written down a second time: docs/protocol.md, section 6.
    if bytes.len() < frame::OVERHEAD || bytes[12..14] != [8, 0] || bytes[14] >> 4 != 4 || bytes[23] != 17 {
        return None;
    }
    if bytes[30..34] != COORDINATOR.addr.octets() {
        return None;
    }
    let ihl = usize::from(bytes[14] & 15) * 4;
    let fragment = u16::from_be_bytes([bytes[20], bytes[21]]);
    if ihl != 20 || fragment & 0x3fff != 0 {
        let port = bytes.get(14 + ihl + 2..14 + ihl + 4);
        let whole = bytes.len() >= 14 + ihl + 8 && ihl >= 20;
        let ours = whole && port == Some(&COORDINATOR.port.to_be_bytes()[..]);
        let first = fragment & 0x1fff == 0;
        return (ours && first).then_some(Action::Drop(abi::UP_COUNT_DROP_FRAGMENT));
    }
    if bytes[36..38] != COORDINATOR.port.to_be_bytes() {
        return None;
    }
    let udp_len = usize::from(u16::from_be_bytes([bytes[38], bytes[39]]));
    let total = usize::from(u16::from_be_bytes([bytes[16], bytes[17]]));
    if total != 20 + udp_len || udp_len < 8 + HEADER_LEN || 34 + udp_len > bytes.len() {
        return Some(Action::Drop(abi::UP_COUNT_DROP_TRUNCATED));
    }
    let (addresses, datagram) = frame::parse(bytes).unwrap();
    let from = Endpoint { addr: addresses.source.0, port: addresses.source.1 };
    Some(match Packet::parse(datagram) {
        Ok(packet) => twins.pure.step(now_ms, from, &packet),
        Err(error) => twins.pure.refuse(error),
    })
}

/// The frame that an action sends, built from scratch with full checksums, or `None` if it sends none.
fn expected(bytes: &[u8], action: Action) -> Option<(u32, Vec<u8>)> {
    let (was, datagram) = frame::parse(bytes)?;
    let (_, header, result, to, mac) = match action {
        Action::ToMember { index, to, header } => (0, header, None, to, member_mac(header.shard, index)),
        Action::ToClient { to, header } => (0, header, None, to, client_mac((to.port - 40000) as u8)),
        Action::ToSender { header, result } => {
            (0, header, result, Endpoint { addr: was.source.0, port: was.source.1 }, was.source_mac)
        }
        _ => return None,
    };
    let mut datagram = datagram.to_vec();
    header.emit(&mut datagram);
    if let Some(result) = result {
        let at = HEADER_LEN + usize::from(header.key_len);
        datagram[at..at + 8].copy_from_slice(&result.to_be_bytes());
    }
    let addresses = frame::Addresses {
        source_mac: COORDINATOR_MAC,
        destination_mac: mac,
        source: (COORDINATOR.addr, COORDINATOR.port),
        destination: (to.addr, to.port),
    };
    Some((XDP_TX, frame::build(&addresses, &datagram)))
}

fn step(twins: &mut Twins, world: &mut World, bytes: &[u8], context: &str) {
    let run = twins.kernel.run(bytes).unwrap();
    // The kernel's clock is not ours to set: it is read off what it stamped. Leases in this test are over since ever or
    // far from their ends, and offsets make any stamp of ours much larger than what a client puts there.
    let stamped = frame::parse(&run.frame).and_then(|(_, d)| Packet::parse(d).ok().map(|packet| packet.header));
    let offset = |shard| twins.pure.config(shard).map_or(0, |config| config.time_offset_ms);
    let now_ms = stamped.map_or(0, |header| header.time.saturating_sub(offset(header.shard) as u64));
    let action = pure_action(twins, now_ms, bytes);
    let what = format!("{context}: kernel {} pure {action:?}", verdict_name(&run));
    match action {
        None | Some(Action::Control) => {
            assert_eq!((run.verdict, &run.frame[..]), (XDP_PASS, bytes), "{what}");
        }
        Some(Action::Drop(_)) => assert_eq!(run.verdict, XDP_DROP, "{what}"),
        Some(Action::ToMembers { header }) => {
            assert_eq!(run.verdict, XDP_REDIRECT, "{what}");
            check_clones(twins, &run.frame, bytes, header, &what);
            let key = Packet::parse(frame::parse(&run.frame).unwrap().1).unwrap().key.to_vec();
            world.propagated.push((header, key));
        }
        Some(action) => {
            let (verdict, frame) = expected(bytes, action).unwrap();
            assert_eq!(run.verdict, verdict, "{what}");
            compare_frames(&run.frame, &frame, bytes, &what);
        }
    }
}

/// Same bytes up to what a checksum says; the checksum is right if the one that came in was.
fn compare_frames(kernel: &[u8], expected: &[u8], input: &[u8], what: &str) {
    let mut kernel = kernel.to_vec();
    let mut expected = expected.to_vec();
    // Identification, DSCP and trailing bytes are the sender's business: kept as they came.
    for at in [15, 18, 19, 20, 21] {
        assert_eq!(kernel[at], input[at], "IP byte {at}: {what}");
        expected[at] = kernel[at];
    }
    assert_eq!(kernel[22], 64, "TTL: {what}");
    let len = expected.len();
    assert_eq!(kernel[len..], input[len..], "trailing bytes: {what}");
    kernel.truncate(len);
    if input[40..42] == [0, 0] {
        assert_eq!(kernel[40..42], [0, 0], "no checksum was sent: {what}");
    } else if frame::checksums_hold(&input[..len]) {
        assert!(frame::checksums_hold(&kernel), "checksums: {what}");
    }
    for bytes in [&mut kernel, &mut expected] {
        bytes[22] = 0;
        bytes[24..26].fill(0);
        bytes[40..42].fill(0);
    }
    assert_eq!(kernel, expected, "{what}");
}

/// Runs the egress program on every clone, as the devmap does.
fn check_clones(twins: &Twins, ordered: &[u8], input: &[u8], header: Header, what: &str) {
    let members: Vec<_> = twins.pure.must_ack(header.shard).collect();
    let mut seen = 0u8;
    for _ in &members {
        let run = twins.kernel.run_egress(ordered).unwrap();
        assert_eq!(run.verdict, XDP_PASS, "egress: {what}");
        let (addresses, datagram) = frame::parse(&run.frame).unwrap();
        let mut header = header;
        header.cnt = Packet::parse(datagram).unwrap().header.cnt;
        let (index, to) = *members.iter().find(|(index, _)| *index == header.cnt).expect("a member's index");
        assert_eq!(
            (addresses.destination, addresses.destination_mac),
            ((to.addr, to.port), member_mac(header.shard, index))
        );
        seen |= 1 << index;
        let (was, datagram) = frame::parse(input).unwrap();
        let mut datagram = datagram.to_vec();
        header.emit(&mut datagram);
        let to = frame::Addresses { source_mac: COORDINATOR_MAC, source: was.destination, ..addresses };
        compare_frames(&run.frame, &frame::build(&to, &datagram), input, what);
    }
    assert_eq!(seen.count_ones() as usize, members.len(), "every member gets one clone: {what}");
}

fn open_all(twins: &mut Twins, rng: &mut StdRng) -> Vec<Client> {
    (0..CLIENTS)
        .map(|i| {
            let shard = SHARDS[usize::from(i) % SHARDS.len()];
            let client = Client {
                session: SessionId::new(1, u16::from(i)),
                token: rng.random(),
                shard,
                request: 0,
                at: client_endpoint(i),
                mac: client_mac(i),
                generation: 1,
                last: None,
            };
            twins.open(client.session, shard, client.token, client.at);
            client
        })
        .collect()
}

#[test]
fn kernel_and_pure_coordinator_agree() {
    let seed = seed();
    println!("UNDERPASS_SEED={seed}");
    // One bucket for all keys, some keys in a bucket, hardly any two.
    let mut reached = vec![0; abi::UP_COUNT_END as usize];
    for buckets in [1, 8, 1 << 10] {
        let counters = agree(buckets, seed);
        reached.iter_mut().zip(counters).for_each(|(sum, count)| *sum += count);
    }
    // A run that never committed, rejected or met a dirty key would show nothing.
    if packets() >= 20_000 {
        everything_was_reached(&reached, seed);
    }
}

fn everything_was_reached(reached: &[u64], seed: u64) {
    for count in [
        abi::UP_COUNT_READ,
        abi::UP_COUNT_READ_DIRTY,
        abi::UP_COUNT_WRITE,
        abi::UP_COUNT_WRITE_AGAIN,
        abi::UP_COUNT_WRITE_ANSWERED,
        abi::UP_COUNT_COMMIT,
        abi::UP_COUNT_DROP_OLD,
        abi::UP_COUNT_DROP_MAGIC,
        abi::UP_COUNT_DROP_VERSION,
        abi::UP_COUNT_DROP_FRAGMENT,
        abi::UP_COUNT_DROP_ACK_MEMBER,
        abi::UP_COUNT_DROP_ACK_EPOCH,
        abi::UP_COUNT_DROP_ACK_STALE,
        abi::UP_COUNT_DROP_ACK_ABORTED,
        abi::UP_COUNT_PASS_CONTROL,
        abi::UP_COUNT_PASS_FOREIGN,
    ] {
        assert!(reached[count as usize] > 0, "counter {count} was never reached, seed {seed}");
    }
    let reasons: Vec<_> = (1..underpass_abi::wire::UP_REASON_END)
        .filter(|reason| reached[(abi::UP_COUNT_REJECT + reason) as usize] > 0)
        .collect();
    for reason in Reason::ALL.iter().filter(|reason| of_coordinator(**reason)) {
        let reached = reasons.contains(&u32::from(reason.to_wire()));
        assert!(reached, "{reason:?} was never reached, only {reasons:?}, seed {seed}");
    }
}

/// A session is closed, if its write is resolved, and its index given to a new session, or to one that comes from another
/// coordinator.
fn renew(twins: &mut Twins, rng: &mut StdRng, world: &mut World) {
    let at = rng.random_range(0..world.clients.len());
    let client = world.clients[at].clone();
    let used_before_ms = *[None, None, None, Some(0)].choose(rng).unwrap();
    match twins.both(|tables| tables.close(client.session, used_before_ms)).unwrap() {
        CloseOutcome::Closed { .. } => {}
        // Closed before, by `clear`.
        CloseOutcome::NotYours if used_before_ms.is_none() => {}
        _ => return,
    }
    let generation = client.generation + 1;
    let session = SessionId::new(generation, at as u16);
    let (token, mut request, mut last) = (client.token ^ 1, 0, None);
    if rng.random() {
        twins.open(session, client.shard, token, client.at);
    } else {
        request = 5;
        let state = *[abi::UP_STATE_IDLE, abi::UP_STATE_COMMITTED, abi::UP_STATE_ABORTED].choose(rng).unwrap();
        let kind = *[Kind::Put, Kind::Incr].choose(rng).unwrap();
        let record = up_session {
            state: state as u8,
            kind: kind.to_wire(),
            status: rng.random_range(0..3),
            request,
            seq: rng.random::<u64>() >> 24,
            time: rng.random::<u64>() >> 24,
            result: rng.random(),
            sealed: rng.random_range(0..2),
            ..opened(0, session, client.shard, token, client.at)
        };
        assert_eq!(twins.both(|tables| tables.load(session.index(), &record)), Ok(true));
        // Its client sends what it had sent to that one.
        let mut header = Header { shard: client.shard, session, token, request, ..Header::new(Op::Write) };
        header.kind = kind.to_wire();
        header.set_reply_to(client.at);
        let key = world.keys.choose(rng).unwrap();
        last = Some(frame(client.at, client.mac, &header.datagram(key, &rng.random::<[u8; 16]>())));
    }
    let again = opened(0, SessionId::new(generation + 1, at as u16), client.shard, token, client.at);
    assert_eq!(twins.both(|tables| tables.load(at as u16, &again)), Ok(false), "the index is taken");
    world.clients[at] = Client { session, generation, token, request, last, ..client };
}

/// What the agent does to a shard: changes of all that a configuration says, settled writes, forgotten members, the end.
fn administer(twins: &mut Twins, rng: &mut StdRng, world: &mut World, epoch: &mut u32) {
    let shard = *SHARDS.choose(rng).unwrap();
    match rng.random_range(0..12) {
        // Any members to any others, also with holes between their indices; serving are some of them.
        0..6 => {
            *epoch += u32::from(rng.random_bool(0.2));
            let must_ack = *[0b111, 0b101, 0b1, 0b1010_0100, 0xff, rng.random::<u8>().max(1)].choose(rng).unwrap();
            let serving = must_ack & rng.random::<u8>();
            let mut next = config_of(shard, *epoch, must_ack, if serving == 0 { must_ack } else { serving });
            next.time_offset_ms += rng.random_range(0..1_000_000);
            match rng.random_range(0..10) {
                0 => next.store_full = 1,
                1 => next.refuse_writes = *[Reason::Lease.to_wire(), Reason::NoMember.to_wire()].choose(rng).unwrap(),
                2 => next.lease_until_ms = 0,
                3 => next = up_config { members: next.members, ..config_of(shard, *epoch, 0, 0) },
                4 => next.lease_until_ms = u64::MAX / 2,
                _ => {}
            }
            twins.configure(next);
        }
        6 => {
            let until_ms = *[0, u64::MAX / 4, u64::MAX].choose(rng).unwrap();
            twins.both(|tables| tables.extend_lease(shard, until_ms)).unwrap();
        }
        7..10 => settle(twins, rng),
        10 => {
            let index = rng.random_range(0..8);
            twins.both(|tables| tables.forget_acks(shard, index)).unwrap();
        }
        _ => {
            // Rarely of a shard: with it goes whatever is dirty or pending. Of one that is not here: any time.
            let cleared = if rng.random_bool(0.1) { shard } else { shard + abi::UP_SHARD_SLOTS };
            twins.both(|tables| tables.clear(cleared)).unwrap();
            assert_eq!(twins.both(|tables| tables.config(cleared)), None);
            if cleared == shard && rng.random() {
                // A new tenure.
                *epoch += 1;
                twins.configure(config(shard, *epoch, 3));
            }
            for client in world.clients.iter_mut().filter(|client| client.shard == cleared) {
                client.last = None;
            }
        }
    }
    let count = rng.random_range(0..20);
    twins.both(|tables| tables.scan(shard, count)).unwrap();
}

fn settle(twins: &mut Twins, rng: &mut StdRng) {
    let records = twins.pure.sessions();
    let pending: Vec<_> = records.iter().filter(|record| u32::from(record.state) == abi::UP_STATE_PENDING).collect();
    let Some(record) = pending.choose(rng).copied().or(records.choose(rng)).copied() else { return };
    let (mut session, mut request, mut seq) = (SessionId(record.session), record.request, record.seq);
    match rng.random_range(0..12) {
        0 => seq += 1,
        1 => request += 1,
        2 => session = SessionId::new(session.generation() + 1, session.index()),
        _ => {}
    }
    let committed = Settlement::Committed { status: rng.random_range(0..4), result: rng.random() };
    let settlement = *[committed, Settlement::Aborted].choose(rng).unwrap();
    twins.both(|tables| tables.settle(session, request, seq, settlement)).unwrap();
}

/// Reasons that a coordinator's data path rejects for.
fn of_coordinator(reason: Reason) -> bool {
    use Reason::*;
    matches!(
        reason,
        Shard
            | Session
            | Token
            | KeyLength
            | ValueLength
            | Kind
            | Lease
            | NoMember
            | SessionBusy
            | Aborted
            | StoreFull
            | KeyBusy
            | DirtyFull
            | Malformed
    )
}

/// Runs one sequence of packets through both; returns the kernel's counters.
fn agree(buckets: u32, seed: u64) -> Vec<u64> {
    let rng = &mut rng(seed);
    let mut twins = Twins::new(rng, TableSizes { buckets, sessions: 16 });
    for shard in SHARDS {
        twins.configure(config(shard, 7, 3));
    }
    let keys = (0..40).map(|i| {
        let len = *[1, 3, 7, 8, 9, 15, 16, 17, 31, 64, 100, 249, 250].choose(rng).unwrap();
        (0..len).map(|_| rng.random::<u8>()).chain([i]).take(250).collect()
    });
    let keys = keys.collect();
    let mut world = World { clients: open_all(&mut twins, rng), propagated: vec![], sent: vec![], keys };
    let mut epoch = 7;
    for i in 0..packets() {
        let context = format!("seed {seed}, packet {i}");
        let bytes = match rng.random_range(0..100) {
            0..45 => request(rng, &mut world),
            45..80 => match acknowledgement(rng, &world, &twins.pure) {
                Some(bytes) => bytes,
                None => continue,
            },
            80..90 => match world.sent.choose(rng) {
                Some(bytes) => bytes.clone(),
                None => continue,
            },
            90..98 => {
                let bytes = request(rng, &mut world);
                hostile(rng, bytes)
            }
            98 => {
                renew(&mut twins, rng, &mut world);
                continue;
            }
            _ => {
                administer(&mut twins, rng, &mut world, &mut epoch);
                continue;
            }
        };
        step(&mut twins, &mut world, &bytes, &context);
        if i % (64 * buckets as usize) == 0 || i + 1 == packets() {
            twins.compare_tables(&context);
        }
        if world.sent.len() < 4096 {
            world.sent.push(bytes);
        }
    }
    let kernel = twins.kernel.counters().unwrap();
    for (index, (kernel, pure)) in kernel.iter().zip(twins.pure.counters()).enumerate() {
        let of_frames = matches!(
            index as u32,
            abi::UP_COUNT_CLONE
                | abi::UP_COUNT_PASS_FOREIGN
                | abi::UP_COUNT_DROP_FRAGMENT
                | abi::UP_COUNT_DROP_TRUNCATED
        );
        assert!(of_frames || kernel == pure, "counter {index}: kernel {kernel} pure {pure}, seed {seed}");
    }
    kernel.to_vec()
}
