//! A replica over loopback, with the test in the place of coordinator and client.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    thread,
    time::Duration,
};

use underpass_protocol::{
    control::{self, ClusterKey, Configuration, Heartbeat, HeartbeatAck, Install, Installed, MemberInfo},
    replica::Verdict,
    wire::{Endpoint, HEADER_LEN, Header, Kind, Op, Operand, Packet, Reason, SessionId, Status},
};
use underpass_replica::{Error, Options, Replica};

const EPOCH: u32 = 5;
const BASE: u64 = (EPOCH as u64) << 40;

fn start(options: Options) -> Replica {
    Replica::start(Options { listen: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0), ..options }).expect("a replica starts")
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    socket.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout is allowed");
    socket
}

fn endpoint(socket: &UdpSocket) -> Endpoint {
    match socket.local_addr().expect("bound") {
        std::net::SocketAddr::V4(address) => address.into(),
        std::net::SocketAddr::V6(_) => unreachable!("bound to IPv4"),
    }
}

fn sealed<T: serde::Serialize>(header: Header, message: &T) -> Vec<u8> {
    control::seal(control::emit(header, message), ClusterKey::default())
}

fn beat(stable: u64) -> Heartbeat {
    Heartbeat { stable, time: 0, echo: None, donor: None }
}

/// Coordinator and client of one replica.
struct Peer {
    replica: SocketAddrV4,
    coordinator: UdpSocket,
    client: UdpSocket,
}

impl Peer {
    fn new(replica: &Replica) -> Self {
        Self { replica: replica.local_addr(), coordinator: socket(), client: socket() }
    }

    fn send(&self, bytes: &[u8]) {
        self.coordinator.send_to(bytes, self.replica).expect("loopback takes it");
    }

    fn ask(&self, bytes: &[u8]) -> Vec<u8> {
        self.send(bytes);
        receive(&self.coordinator).expect("an answer")
    }

    fn install(&self, incarnation: u64) -> Installed {
        let coordinator = endpoint(&self.coordinator);
        let (addr, port) = (*self.replica.ip(), self.replica.port());
        let member = MemberInfo { index: 0, id: 1, incarnation, addr, port, active: true };
        let configuration = Configuration {
            shard: 2,
            epoch: EPOCH,
            tenure: EPOCH,
            lease_ms: 1 << 40,
            coordinator_addr: coordinator.addr,
            coordinator_port: coordinator.port,
            members: vec![member],
        };
        let install = Install { incarnation, index: 0, reset: false, configuration, sessions: 1024 };
        let header = Header { shard: 2, epoch: EPOCH, ..Header::new(Op::Install) };
        let answer = self.ask(&sealed(header, &install));
        let packet = Packet::parse(&answer).expect("a packet");
        assert_eq!(packet.header.op, Op::Installed);
        control::parse(&packet).expect("INSTALLED")
    }

    /// Asks for the incarnation, then installs.
    fn join(&self) {
        let told = self.install(0);
        assert_eq!((told.epoch, told.refusal.as_str()), (0, ""));
        assert_eq!(self.install(told.incarnation).epoch, EPOCH);
        let stamp = self.heartbeat(0).stamp;
        self.beat(Heartbeat { echo: Some(stamp), ..beat(0) });
    }

    fn heartbeat(&self, stable: u64) -> HeartbeatAck {
        self.beat(beat(stable))
    }

    fn beat(&self, heartbeat: Heartbeat) -> HeartbeatAck {
        let header = Header { shard: 2, epoch: EPOCH, ..Header::new(Op::Heartbeat) };
        let answer = self.ask(&sealed(header, &heartbeat));
        let packet = Packet::parse(&answer).expect("a packet");
        assert_eq!(packet.header.op, Op::HeartbeatAck);
        control::parse(&packet).expect("HEARTBEAT_ACK")
    }

    fn write(&self, kind: Kind, key: &[u8], data: &[u8], seq: u64, session: u16, request: u64) -> Vec<u8> {
        let mut header = Header {
            kind: kind.to_wire(),
            shard: 2,
            epoch: EPOCH,
            seq: BASE + seq,
            session: SessionId::new(9, session),
            request,
            ..Header::new(Op::Write)
        };
        header.set_reply_to(endpoint(&self.client));
        let mut value = Vec::new();
        let operand = Operand { ttl_ms: None, expected: 0, delta: 1, data };
        header.flags = operand.emit(kind, &mut value);
        header.datagram(key, &value)
    }

    fn read(&self, key: &[u8]) -> Vec<u8> {
        let mut header =
            Header { shard: 2, epoch: EPOCH, seq: u64::MAX >> 1, request: 8, token: 6, ..Header::new(Op::Read) };
        header.set_reply_to(endpoint(&self.client));
        header.datagram(key, &[])
    }

    /// The item that a read finds.
    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.send(&self.read(key));
        let answer = receive(&self.client).expect("an answer");
        let packet = Packet::parse(&answer).expect("a packet");
        assert_eq!((packet.header.op, packet.header.request, packet.header.token), (Op::RReply, 8, 6));
        assert_eq!(packet.key, key);
        (packet.header.status == Status::Ok.to_wire()).then(|| packet.value.to_vec())
    }
}

fn receive(socket: &UdpSocket) -> Option<Vec<u8>> {
    let mut buffer = [0; 2048];
    let (len, _) = socket.recv_from(&mut buffer).ok()?;
    Some(buffer[..len].to_vec())
}

#[test]
fn installs_writes_reads_and_acknowledges_duplicates() {
    let replica = start(Options::default());
    let peer = Peer::new(&replica);
    peer.join();
    let put = peer.write(Kind::Put, b"key", b"41", 1, 3, 1);
    let answer = peer.ask(&put);
    let packet = Packet::parse(&answer).expect("a packet");
    assert_eq!((packet.header.op, packet.header.status, packet.header.seq), (Op::WReply, 0, BASE + 1));
    let incr = peer.write(Kind::Incr, b"key", b"", 2, 3, 2);
    for _ in 0..3 {
        let answer = peer.ask(&incr);
        let packet = Packet::parse(&answer).expect("a packet");
        assert_eq!((packet.header.status, packet.value), (0, &42u64.to_be_bytes()[..]));
    }
    assert_eq!(peer.get(b"key").as_deref(), Some(&b"42"[..]));
    assert_eq!(peer.get(b"other"), None);
    assert_eq!(peer.heartbeat(BASE + 2).items, 1);

    let stats = replica.stats();
    assert_eq!((stats.shard, stats.epoch, stats.items, stats.versions), (Some(2), EPOCH, 1, 1));
    let counted = |name: &str| stats.counters[name];
    assert_eq!((counted("read"), counted("read_not_found")), (1, 1));
    assert_eq!((counted("write_put"), counted("write_incr"), counted("write_again")), (1, 1, 2));
    replica.stop().expect("stops in order");
}

#[test]
fn hostile_datagrams_are_counted_and_do_nothing() {
    let replica = start(Options::default());
    let peer = Peer::new(&replica);
    peer.join();
    peer.ask(&peer.write(Kind::Put, b"key", b"value", 1, 0, 1));
    let good = peer.write(Kind::Put, b"key", b"other", 2, 0, 2);
    let altered = |at: usize, bytes: &[u8]| {
        let mut altered = good.clone();
        altered[at..at + bytes.len()].copy_from_slice(bytes);
        altered
    };
    let hostile = [
        Vec::new(),
        vec![0; 3],
        b"GET / HTTP/1.1\r\n\r\n".repeat(8),
        good[..HEADER_LEN].to_vec(),
        good[..good.len() - 1].to_vec(),
        altered(66, &[0xff, 0xff]),
        altered(68, &[0xff; 4]),
        altered(2, &[9]),
        altered(3, &[77]),
        altered(4, &[77]),
        altered(8, &[0xff; 4]),
        altered(12, &[0xff; 4]),
        altered(38, &[0xff, 0xff]),
        [&good[..], &[0; 1900]].concat(),
        vec![0x55; 5000],
    ];
    for bytes in &hostile {
        peer.send(bytes);
    }
    // A good write that did not come from the coordinator.
    peer.client.send_to(&good, peer.replica).expect("loopback takes it");
    assert_eq!(peer.get(b"key").as_deref(), Some(&b"value"[..]));
    let stats = replica.stats();
    let dropped: u64 =
        stats.counters.iter().filter(|(name, _)| name.starts_with("drop_")).map(|(_, &count)| count).sum();
    assert_eq!(dropped, hostile.len() as u64 + 1, "{:?}", stats.counters);
    for reason in ["truncated", "too_long", "magic", "version", "op", "kind", "epoch", "shard", "session"] {
        assert!(stats.counters[&format!("drop_{reason}")] > 0, "{reason}");
    }
    assert_eq!(stats.counters["drop_not_coordinator"], 1);

    // A read from a stranger is rejected to the stranger, whatever reply address it names.
    let stranger = socket();
    stranger.send_to(&peer.read(b"key"), peer.replica).expect("loopback takes it");
    let answer = receive(&stranger).expect("a reject");
    let packet = Packet::parse(&answer).expect("a packet");
    assert_eq!(
        (packet.header.op, packet.header.status, packet.header.epoch),
        (Op::RReject, Reason::NotCoordinator.to_wire(), EPOCH)
    );
}

#[test]
fn a_full_store_tells_the_client() {
    let replica = start(Options { memory_mib: 1, ..Options::default() });
    let peer = Peer::new(&replica);
    peer.join();
    let value = [7; 1000];
    let mut held = 0;
    peer.coordinator.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout is allowed");
    let refused = loop {
        let write = peer.write(Kind::Put, format!("key{held}").as_bytes(), &value, held + 1, 0, held + 1);
        peer.send(&write);
        match receive(&peer.coordinator) {
            Some(_) => held += 1,
            None => break write,
        }
        assert!(held < 1100, "1 MiB holds no 1100 items of 1000 bytes");
    };
    assert!(held > 800, "1 MiB holds more than {held} items of 1000 bytes");
    let answer = receive(&peer.client).expect("the client is told");
    let packet = Packet::parse(&answer).expect("a packet");
    assert_eq!((packet.header.op, packet.header.status), (Op::WReject, Reason::StoreFull.to_wire()));
    for key in 0..held {
        assert!(peer.get(format!("key{key}").as_bytes()).is_some(), "key{key} was evicted");
    }
    let request = held + 1;
    // What is deleted and stable makes room, and the retransmission finds it.
    for (number, key) in ["key0", "key1", "key2"].into_iter().enumerate() {
        peer.ask(&peer.write(Kind::Delete, key.as_bytes(), b"", request + 5 + number as u64, 1, 1 + number as u64));
    }
    assert_eq!(replica.stats().used_bytes, peer.heartbeat(request - 1).used_bytes);
    peer.send(&refused);
    assert!(receive(&peer.client).is_some(), "still full: the tombstones are not stable");
    let usage = peer.heartbeat(request - 1);
    assert!(usage.used_bytes <= usage.budget_bytes);
    replica.core().assert_accounts();
}

#[test]
fn threads_hammered_with_duplicates_apply_each_write_once() {
    const SESSIONS: u16 = 16;
    const ROUNDS: u64 = 200;
    let replica = start(Options { threads: 2, ..Options::default() });
    let peer = Peer::new(&replica);
    peer.join();
    peer.coordinator.set_nonblocking(false).expect("blocking");
    for session in 0..SESSIONS {
        peer.ask(&peer.write(Kind::Put, format!("n{session}").as_bytes(), b"0", u64::from(session) + 1, session, 1));
    }
    // The kernel sends one request to one socket. To have duplicates meet on two threads, they go straight to the state
    // machine from threads of the test while the sockets deliver others.
    let coordinator = endpoint(&peer.coordinator);
    for round in 1..=ROUNDS {
        let writes: Vec<_> = (0..SESSIONS)
            .map(|session| {
                let seq = round * 100 + u64::from(session);
                peer.write(Kind::Incr, format!("n{session}").as_bytes(), b"", seq, session, round + 1)
            })
            .collect();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for write in &writes {
                        let mut buffer = [0; 2048];
                        buffer[..write.len()].copy_from_slice(write);
                        let verdict = replica.core().handle(0, coordinator, &mut buffer, write.len());
                        assert!(matches!(verdict, Verdict::Answer { .. }), "{verdict:?}");
                        let result = &buffer[HEADER_LEN + usize::from(buffer[67])..][..8];
                        assert_eq!(result, round.to_be_bytes());
                    }
                });
            }
            for write in &writes {
                peer.send(write);
                peer.send(write);
            }
        });
        let mut answers = BTreeSet::new();
        for _ in 0..2 * SESSIONS {
            let answer = receive(&peer.coordinator).expect("every copy is acknowledged");
            let packet = Packet::parse(&answer).expect("a packet");
            assert_eq!(packet.value, round.to_be_bytes(), "the outcome is the same every time");
            answers.insert(packet.header.seq);
        }
        assert_eq!(answers.len(), usize::from(SESSIONS));
    }
    for session in 0..SESSIONS {
        assert_eq!(peer.get(format!("n{session}").as_bytes()), Some(ROUNDS.to_string().into_bytes()));
    }
    replica.core().assert_accounts();
    let stats = replica.stats();
    let usage = replica.core().usage();
    assert_eq!(usage.versions, u64::from(SESSIONS) * (ROUNDS + 1));
    assert!(stats.counters["write_again"] > 0);
    peer.heartbeat(BASE + ROUNDS * 100 + 99);
    assert_eq!(replica.core().usage().versions, u64::from(SESSIONS));
}

/// monotone, and the bound: while one thread writes and another makes everything stable at once, a read is never answered
/// with less than its bound asks for, nor with nothing.
#[test]
fn reads_beside_writes_and_settling_keep_their_bound() {
    let replica = start(Options::default());
    let peer = Peer::new(&replica);
    peer.join();
    let coordinator = endpoint(&peer.coordinator);
    let handle = |bytes: &[u8]| {
        let mut buffer = [0; 2048];
        buffer[..bytes.len()].copy_from_slice(bytes);
        match replica.core().handle(0, coordinator, &mut buffer, bytes.len()) {
            Verdict::Answer { len, .. } => buffer[..len].to_vec(),
            other => panic!("{other:?}"),
        }
    };
    let committed = AtomicU64::new(1);
    handle(&peer.write(Kind::Put, b"key", &1u64.to_be_bytes(), 1, 0, 1));
    thread::scope(|scope| {
        scope.spawn(|| {
            for seq in 2..=20_000u64 {
                // Refused while the chain is at its bound, as nothing of it is stable yet.
                let put = peer.write(Kind::Put, b"key", &seq.to_be_bytes(), seq, 0, seq);
                while handle(&put)[3] != Op::WReply.to_wire() {
                    thread::yield_now();
                }
                committed.store(seq, SeqCst);
            }
            committed.store(u64::MAX >> 1, SeqCst);
        });
        scope.spawn(|| {
            loop {
                let stable = committed.load(SeqCst);
                if stable > 20_000 {
                    break;
                }
                let header = Header { shard: 2, epoch: EPOCH, ..Header::new(Op::Heartbeat) };
                replica.core().control(0, coordinator, &sealed(header, &beat(BASE + stable)));
            }
        });
        let mut read = peer.read(b"key");
        let mut last = 0;
        loop {
            let bound = committed.load(SeqCst);
            if bound > 20_000 {
                break;
            }
            read[16..24].copy_from_slice(&(BASE + bound).to_be_bytes());
            let answer = handle(&read);
            let packet = Packet::parse(&answer).expect("a packet");
            let seen = u64::from_be_bytes(packet.value.try_into().expect("an item of 8 bytes"));
            assert!(seen >= bound && seen >= last, "bound {bound}, seen {last} before, now {seen}");
            assert!(seen <= committed.load(SeqCst), "{seen} was read before it was committed");
            last = seen;
        }
    });
    replica.core().assert_accounts();
}

#[test]
fn both_threads_get_work_from_one_coordinator() {
    let replica = start(Options { threads: 2, ..Options::default() });
    let peer = Peer::new(&replica);
    peer.join();
    // The program that spreads datagrams takes session plus request: sixteen requests of one session meet both sockets.
    for request in 1..=16 {
        peer.ask(&peer.write(Kind::Put, b"key", b"v", request, 0, request));
    }
    let answered = replica.core().usage().versions;
    assert_eq!(answered, 16);
    assert!(replica.busy_threads() == 2, "one thread got everything");
}

#[test]
fn options_that_cannot_be_are_refused() {
    let refusal = |options: Options| Replica::start(options).err().expect("refused").to_string();
    let running = start(Options::default());
    let text = refusal(Options { listen: running.local_addr(), threads: 2, ..Options::default() });
    assert!(text.contains("another process does"), "{text}");
    let several = start(Options { threads: 3, ..Options::default() });
    let text = refusal(Options { listen: several.local_addr(), threads: 3, ..Options::default() });
    assert!(text.contains("another process does"), "{text}");
    assert!(matches!(
        Replica::start(Options { listen: several.local_addr(), ..Options::default() }),
        Err(Error::AddressInUse { .. })
    ));
    let elsewhere = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 77), 5550);
    assert!(refusal(Options { listen: elsewhere, ..Options::default() }).contains("no interface of this host"));
    let any = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
    assert!(refusal(Options { listen: any, ..Options::default() }).contains("--listen"));
    assert!(refusal(Options { memory_mib: 0, ..Options::default() }).contains("at least 1"));
    assert!(refusal(Options { memory_mib: 1 << 30, ..Options::default() }).contains("more than this host's"));
    assert!(refusal(Options { threads: 0, ..Options::default() }).contains("--threads"));
    assert!(refusal(Options { cpus: vec![1000], ..Options::default() }).contains("CPU 1000"));
}

#[test]
fn the_control_socket_tells_the_stats_and_goes_away() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("run/replica.sock");
    let options = || Options { control: Some(path.clone()), ..Options::default() };
    // One left behind by a replica that was killed is no hindrance.
    std::fs::create_dir(directory.path().join("run")).expect("a directory");
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
    let replica = start(options());
    let mode = std::fs::metadata(&path).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let peer = Peer::new(&replica);
    peer.join();
    let (line, stats) = underpass_replica::cli::ask(&path).expect("stats");
    assert_eq!((stats.epoch, stats.listen), (EPOCH, replica.local_addr()));
    assert!(line.starts_with('{') && line.ends_with("}\n"));
    let other = Options { listen: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0), ..options() };
    let text = Replica::start(other).err().expect("refused").to_string();
    assert!(text.contains("another replica answers there"), "{text}");
    // Somebody who says nothing does not keep the replica from stopping.
    let _silent = UnixStream::connect(&path).expect("connects");
    replica.stop().expect("stops in order");
    assert!(!path.exists());
}

/// Copying over sockets, with chains that take datagrams of tens of kilobytes, beside the daemon's own clock and ticks.
#[test]
fn a_learner_copies_from_its_donor() {
    let key = ClusterKey([1, 2]);
    let options = || Options { cluster_key: Some(key), threads: 2, ..Options::default() };
    let (donor, learner) = (start(options()), start(options()));
    let peer = Peer::new(&donor);
    let coordinator = endpoint(&peer.coordinator);
    let member = |index: u8, replica: &Replica| MemberInfo {
        index,
        id: index.into(),
        incarnation: replica.core().incarnation(),
        addr: *replica.local_addr().ip(),
        port: replica.local_addr().port(),
        active: index == 0,
    };
    let configuration = Configuration {
        shard: 2,
        epoch: EPOCH,
        tenure: EPOCH,
        lease_ms: 1000,
        coordinator_addr: coordinator.addr,
        coordinator_port: coordinator.port,
        members: vec![member(0, &donor), member(1, &learner)],
    };
    let tell = |replica: &Replica, bytes: Vec<u8>| {
        let bytes = control::seal(bytes, key);
        peer.coordinator.send_to(&bytes, replica.local_addr()).expect("loopback takes it");
        let answer = receive(&peer.coordinator).expect("an answer");
        assert!(control::is_sealed(&answer, key));
        answer
    };
    for (index, replica) in [&donor, &learner].into_iter().enumerate() {
        let (incarnation, configuration) = (replica.core().incarnation(), configuration.clone());
        let install = Install { incarnation, index: index as u8, reset: false, configuration, sessions: 256 };
        let header = Header { shard: 2, epoch: EPOCH, ..Header::new(Op::Install) };
        // Without the key nobody is obeyed.
        peer.coordinator.send_to(&sealed(header, &install), replica.local_addr()).expect("loopback takes it");
        tell(replica, control::emit(header, &install));
    }
    let counted = |replica: &Replica, name: &str| replica.stats().counters[name];
    assert_eq!((counted(&donor, "drop_unsealed"), counted(&learner, "drop_unsealed")), (1, 1));

    for n in 0..900u64 {
        // One chain fits a datagram, the other does not.
        let name = match n % 9 {
            0 if n < 300 => "tens of versions".to_owned(),
            1 | 2 if n < 600 => "hundreds of versions".to_owned(),
            _ => format!("key{n}"),
        };
        peer.ask(&peer.write(Kind::Put, name.as_bytes(), &[n as u8; 1300], n + 1, (n % 256) as u16, n + 1));
    }
    let header = Header { shard: 2, epoch: EPOCH, ..Header::new(Op::Heartbeat) };
    let donor_addr = Some((*donor.local_addr().ip(), donor.local_addr().port()));
    let mut echo = None;
    let copied = (0..1000).find_map(|_| {
        let answer = tell(&learner, control::emit(header, &Heartbeat { donor: donor_addr, echo, ..beat(0) }));
        let packet = Packet::parse(&answer).expect("a packet");
        let ack: HeartbeatAck = control::parse(&packet).expect("HEARTBEAT_ACK");
        echo = Some(ack.stamp);
        thread::sleep(Duration::from_millis(5));
        ack.copying.filter(|copying| copying.done)
    });
    assert_eq!(copied.expect("it ends").trouble, "");
    assert_eq!(learner.core().dump().items, donor.core().dump().items);
    assert_eq!(learner.core().dump().sessions, donor.core().dump().sessions);
    let stats = learner.stats();
    assert_eq!((stats.active, stats.tenure, stats.epoch), (false, EPOCH, EPOCH));
    assert!(stats.lease_ms > 0 && stats.copying.as_ref().is_some_and(|copying| copying.done));
    let text = stats.to_string();
    assert!(text.contains("learner 1 of coordinator") && text.contains(": done"), "{text}");
    let mut dropped = stats.counters.iter().filter(|(name, _)| name.starts_with("drop_"));
    assert!(dropped.all(|(name, &count)| count == 0 || name == "drop_unsealed" || name == "drop_unasked"));
    learner.core().assert_accounts();
}
