//! An agent with the socket data path on loopback, raw sockets as clients, and replicas that do as little as a replica may:
//! they take part, acknowledge writes, and answer every read with the bound that it carried.

mod common;

use std::{
    net::{SocketAddr, SocketAddrV4},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use common::{Client, Session, WAIT, bind, is_rejected, until};
use underpass_coordinator::{
    agent::{Agent, AgentHandle},
    config::{Config, Shard},
};
use underpass_protocol::{
    control::{self, HeartbeatAck, Install, Installed, OPEN_PADDING, Open},
    wire::{Endpoint, Kind, Op, Packet, Reason, Status},
};

/// What a test changes in a replica while it runs.
#[derive(Default)]
struct Behaviour {
    stop: AtomicBool,
    silent: AtomicBool,
    keeps_acks: AtomicBool,
    incarnation: AtomicU64,
    used_bytes: AtomicU64,
    stable: AtomicU64,
    writes: AtomicU64,
}

struct Replica {
    endpoint: Endpoint,
    behaviour: Arc<Behaviour>,
    thread: Option<JoinHandle<()>>,
}

impl Replica {
    fn start() -> Self {
        let (socket, endpoint) = bind();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let behaviour = Arc::new(Behaviour::default());
        behaviour.incarnation.store(1000 + u64::from(endpoint.port), Relaxed);
        let thread = std::thread::spawn({
            let behaviour = behaviour.clone();
            move || {
                let mut buffer = [0; 2048];
                while !behaviour.stop.load(Relaxed) {
                    let Ok((len, SocketAddr::V4(from))) = socket.recv_from(&mut buffer) else { continue };
                    if behaviour.silent.load(Relaxed) {
                        continue;
                    }
                    if let Some((to, answer)) = answer(&behaviour, from, &buffer[..len]) {
                        socket.send_to(&answer, to).unwrap();
                    }
                }
            }
        });
        Self { endpoint, behaviour, thread: Some(thread) }
    }
}

fn answer(replica: &Behaviour, from: SocketAddrV4, datagram: &[u8]) -> Option<(SocketAddrV4, Vec<u8>)> {
    let packet = Packet::parse(datagram).expect("a coordinator sends packets");
    let mut header = packet.header;
    let incarnation = replica.incarnation.load(Relaxed);
    match header.op {
        Op::Install => {
            let install: Install = control::parse(&packet).unwrap();
            let named = install.configuration.members[usize::from(install.index)].incarnation == incarnation;
            header.op = Op::Installed;
            let epoch = if named { install.configuration.epoch } else { 0 };
            Some((from, control::emit(header, &Installed { incarnation, epoch, refusal: String::new(), items: 0 })))
        }
        Op::Heartbeat => {
            let heartbeat: control::Heartbeat = control::parse(&packet).unwrap();
            assert!(replica.stable.swap(heartbeat.stable, Relaxed) <= heartbeat.stable, "stable went back");
            header.op = Op::HeartbeatAck;
            let ack = HeartbeatAck {
                incarnation,
                used_bytes: replica.used_bytes.load(Relaxed),
                budget_bytes: 1 << 20,
                items: replica.writes.load(Relaxed),
            };
            Some((from, control::emit(header, &ack)))
        }
        Op::Write => {
            replica.writes.fetch_add(1, Relaxed);
            header.op = Op::WReply;
            header.status = Status::Ok.to_wire();
            let mut value = packet.value.to_vec();
            if header.kind == Kind::Incr.to_wire() {
                value[..8].copy_from_slice(&42u64.to_be_bytes());
            }
            (!replica.keeps_acks.load(Relaxed)).then(|| (from, header.datagram(packet.key, &value)))
        }
        Op::Read => {
            header.op = Op::RReply;
            let to = header.reply_to().unwrap();
            Some((to.into(), header.datagram(packet.key, b"value")))
        }
        other => panic!("a coordinator sent {other}"),
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.behaviour.stop.store(true, Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "a replica panicked");
    }
}

fn config(replicas: &[Replica]) -> Config {
    let members = replicas.iter().map(|replica| replica.endpoint).collect();
    let mut config = Config { shards: vec![Shard { id: 0, members }], cpus: vec![0], ..Config::default() };
    config.listen.port = 0;
    (config.buckets, config.sessions) = (64, 64);
    config
}

fn rack() -> ([Replica; 3], AgentHandle) {
    let replicas = std::array::from_fn(|_| Replica::start());
    let agent = Agent::start(config(&replicas)).unwrap();
    agent.wait_serving(WAIT).unwrap();
    (replicas, agent)
}

#[test]
fn reads_and_writes() {
    let (replicas, agent) = rack();
    let client = Client::new(agent.listen());
    let session = client.open(1);
    let first = session.read(1);
    assert_eq!((first.header.op, &first.key[..], &first.value[..]), (Op::RReply, &b"key"[..], &b"value"[..]));
    assert_eq!(first.header.seq, 1 << 40, "the floor of epoch 1");

    let written = session.write(1);
    assert_eq!((written.header.op, written.header.status), (Op::WReply, Status::Ok.to_wire()));
    assert_eq!(written.header.seq, (1 << 40) + 1);
    assert!(replicas.iter().all(|replica| replica.behaviour.writes.load(Relaxed) == 1));
    assert_eq!(session.read(2).header.seq, written.header.seq);

    // The same packet again is answered from the record; a number comes back with it.
    let datagram = session.write_datagram(2, Kind::Incr, &7u64.to_be_bytes());
    for _ in 0..2 {
        let answer = client.ask(&datagram);
        assert_eq!((answer.header.op, &answer.value[..8]), (Op::WReply, &42u64.to_be_bytes()[..]));
    }
    assert!(replicas.iter().all(|replica| replica.behaviour.writes.load(Relaxed) == 2));

    is_rejected(
        &client.ask(&Session { token: 5, ..session }.write_datagram(3, Kind::Put, b"")),
        Op::WReject,
        Reason::Token,
    );
    client.send(b"not of this protocol");
    client.send(&session.write_datagram(9, Kind::Put, b"cut short")[..85]);
    client.nothing_comes();

    until("stable", || replicas.iter().all(|replica| replica.behaviour.stable.load(Relaxed) == written.header.seq + 1));
    let stats = agent.stats().unwrap();
    for (name, count) in [
        ("read", 2),
        ("write", 2),
        ("clone", 6),
        ("commit", 2),
        ("ack", 4),
        ("write_answered", 1),
        ("reject_token", 1),
        ("drop_magic", 0),
        ("drop_truncated", 2),
    ] {
        assert_eq!(stats.counters[name], count, "{name}");
    }
    assert_eq!((stats.sessions_open, stats.shards[0].unresolved), (1, 0));
    let report = agent.stop().unwrap();
    assert!(report.clean);
}

#[test]
fn sessions_open_for_who_receives_at_its_address() {
    let (_replicas, agent) = rack();
    let client = Client::new(agent.listen());
    let challenge = client.challenge();

    // Guessed, or another client's.
    is_rejected(&client.ask(&client.open_datagram(1, challenge ^ 1)), Op::ControlReject, Reason::Token);
    let other = Client::new(agent.listen());
    is_rejected(&other.ask(&other.open_datagram(1, challenge)), Op::ControlReject, Reason::Token);

    // Sent again, whether or not the answer came: the same session.
    let first = client.ask(&client.open_datagram(7, challenge));
    let again = client.ask(&client.open_datagram(7, challenge));
    assert_eq!((first.header.session, first.header.token), (again.header.session, again.header.token));
    let second = client.ask(&client.open_datagram(8, challenge));
    assert_ne!(second.header.session, first.header.session);
    assert_eq!(agent.stats().unwrap().sessions_open, 2);

    // Another process at the same port numbers its OPENs from 1 as well: it must not get a session that wrote.
    let session = Session { client: &client, session: first.header.session, token: first.header.token };
    assert_eq!(session.write(1).header.op, Op::WReply);
    let newcomer = client.ask(&client.open_datagram(7, challenge));
    assert_ne!(newcomer.header.session, first.header.session);

    // What cannot be meant gets an answer no longer than itself.
    let mut datagram = client.open_datagram(9, challenge);
    datagram.truncate(datagram.len() - 200);
    let mut header = Packet::parse(&client.open_datagram(9, challenge)).unwrap().header;
    header.value_len -= 200;
    header.emit(&mut datagram);
    let answer = client.ask(&datagram);
    is_rejected(&answer, Op::ControlReject, Reason::Malformed);
    assert_eq!(answer.len, 80);
    let not_json = header.datagram(b"", &[b'x'; OPEN_PADDING]);
    is_rejected(&client.ask(&not_json), Op::ControlReject, Reason::Malformed);
    header.reply_port = 0;
    let nowhere = control::emit(header, &Open { padding: "x".repeat(OPEN_PADDING) });
    is_rejected(&client.ask(&nowhere), Op::ControlReject, Reason::Malformed);
    let mut elsewhere = client.header(Op::Open);
    elsewhere.shard = 3;
    let elsewhere = control::emit(elsewhere, &Open { padding: "x".repeat(OPEN_PADDING) });
    is_rejected(&client.ask(&elsewhere), Op::ControlReject, Reason::Shard);

    // Until there are no more.
    for request in 100..100 + 61 {
        assert_eq!(client.ask(&client.open_datagram(request, challenge)).header.op, Op::Opened);
    }
    is_rejected(&client.ask(&client.open_datagram(200, challenge)), Op::ControlReject, Reason::NoSession);
    assert!(session.close().unwrap().closed);
    assert_eq!(client.ask(&client.open_datagram(200, challenge)).header.op, Op::Opened);
}

#[test]
fn a_closed_session_tells_its_last_request() {
    let (replicas, agent) = rack();
    let client = Client::new(agent.listen());
    let session = client.open(1);
    session.write(5);
    let stranger = Session { token: session.token ^ 1, ..session };
    assert_eq!(stranger.close(), Err(Reason::Token));
    let closed = session.close().unwrap();
    assert_eq!((closed.closed, closed.request), (true, 5));
    assert_eq!(session.close().unwrap(), closed, "its answer may have been lost");
    assert_eq!(stranger.close(), Err(Reason::Session));
    is_rejected(&session.write(6), Op::WReject, Reason::Session);

    // Not while its write is unresolved.
    let session = client.open(2);
    replicas[2].behaviour.keeps_acks.store(true, Relaxed);
    let datagram = session.write_datagram(3, Kind::Put, b"value");
    client.send(&datagram);
    until("the write", || agent.stats().unwrap().shards[0].unresolved == 1);
    let closed = session.close().unwrap();
    assert_eq!((closed.closed, closed.request), (false, 3));
    replicas[2].behaviour.keeps_acks.store(false, Relaxed);
    assert_eq!(client.ask(&datagram).header.op, Op::WReply);
    assert!(session.close().unwrap().closed);
}

#[test]
fn idle_sessions_end_but_unresolved_ones_stay() {
    let replicas: [Replica; 3] = std::array::from_fn(|_| Replica::start());
    let mut config = config(&replicas);
    config.idle_ms = 5000;
    let agent = Agent::start(config).unwrap();
    agent.wait_serving(WAIT).unwrap();
    let client = Client::new(agent.listen());
    let [idle, used, unresolved] = [client.open(1), client.open(2), client.open(3)];
    replicas[0].behaviour.keeps_acks.store(true, Relaxed);
    client.send(&unresolved.write_datagram(1, Kind::Put, b"value"));
    let mut request = 0;
    until("the end of the idle session", || {
        request += 1;
        assert_eq!(used.read(request).header.op, Op::RReply);
        std::thread::sleep(Duration::from_millis(50));
        agent.stats().unwrap().sessions_open == 2
    });
    is_rejected(&idle.read(1), Op::RReject, Reason::Session);
    assert_eq!(used.read(request + 1).header.op, Op::RReply);
    replicas[0].behaviour.keeps_acks.store(false, Relaxed);
    let answer = client.ask(&unresolved.write_datagram(1, Kind::Put, b"value"));
    assert_eq!(answer.header.op, Op::WReply, "its record is still there");
}

#[test]
fn nothing_is_served_before_every_replica_takes_part() {
    let replicas: [Replica; 3] = std::array::from_fn(|_| Replica::start());
    replicas[1].behaviour.silent.store(true, Relaxed);
    let agent = Agent::start(config(&replicas)).unwrap();
    let client = Client::new(agent.listen());
    is_rejected(&client.ask(&client.open_datagram(1, 0)), Op::ControlReject, Reason::NoMember);
    let stats = agent.stats().unwrap();
    assert_eq!(stats.shards[0].state, "starting");
    assert!(stats.shards[0].members[1].trouble.contains("not answered"), "{:?}", stats.shards[0].members[1]);
    replicas[1].behaviour.silent.store(false, Relaxed);
    agent.wait_serving(WAIT).unwrap();
    assert_eq!(client.open(1).write(1).header.op, Op::WReply);
}

#[test]
fn reads_avoid_a_silent_replica_and_writes_mind_a_full_one() {
    let (replicas, agent) = rack();
    let client = Client::new(agent.listen());
    let session = client.open(1);
    replicas[2].behaviour.silent.store(true, Relaxed);
    until("the silent one's end", || !agent.stats().unwrap().shards[0].members[2].serving);
    for request in 1..50 {
        assert!(session.read(request).header.cnt < 2);
    }
    replicas[2].behaviour.silent.store(false, Relaxed);
    until("its return", || agent.stats().unwrap().shards[0].members[2].serving);
    assert!((50..150).any(|request| session.read(request).header.cnt == 2), "it gets reads again");

    replicas[0].behaviour.used_bytes.store(1 << 20, Relaxed);
    until("full", || agent.stats().unwrap().shards[0].store_full);
    is_rejected(&session.write(1), Op::WReject, Reason::StoreFull);
    assert_eq!(client.ask(&session.write_datagram(1, Kind::Delete, b"")).header.op, Op::WReply, "deletes make room");
    replicas[0].behaviour.used_bytes.store(0, Relaxed);
    until("room", || !agent.stats().unwrap().shards[0].store_full);
    assert_eq!(session.write(2).header.op, Op::WReply);

    // Restarted: it says so in its next answer, and is out for good.
    replicas[1].behaviour.incarnation.fetch_add(1, Relaxed);
    until("the restarted one's end", || !agent.stats().unwrap().shards[0].members[1].serving);
    assert!(agent.stats().unwrap().shards[0].members[1].trouble.contains("restarted"));
}

#[test]
fn a_clean_stop_waits_and_is_on_record() {
    let state = tempfile::tempdir().unwrap();
    let replicas: [Replica; 3] = std::array::from_fn(|_| Replica::start());
    let config = Config { state: Some(state.path().to_owned()), ..config(&replicas) };
    let agent = Agent::start(config.clone()).unwrap();
    agent.wait_serving(WAIT).unwrap();
    let client = Client::new(agent.listen());
    let session = client.open(1);
    // One clone's acknowledgement is lost; the client sends again while the coordinator is stopping.
    replicas[1].behaviour.keeps_acks.store(true, Relaxed);
    let datagram = session.write_datagram(1, Kind::Put, b"value");
    client.send(&datagram);
    until("the write", || replicas[1].behaviour.writes.load(Relaxed) == 1);
    replicas[1].behaviour.keeps_acks.store(false, Relaxed);
    let stopping = std::thread::spawn(move || agent.stop().unwrap());
    client.socket.set_read_timeout(Some(Duration::from_millis(30))).unwrap();
    let mut buffer = [0; 2048];
    until("the late commit", || {
        client.send(&datagram);
        client.socket.recv(&mut buffer).is_ok_and(|len| Packet::parse(&buffer[..len]).unwrap().header.op == Op::WReply)
    });
    let report = stopping.join().unwrap();
    assert!(report.clean, "{report:?}");
    assert_eq!(on_record(state.path(), "clean_epoch"), 1);

    // The next one takes a new epoch, and new generations.
    let agent = Agent::start(config.clone()).unwrap();
    agent.wait_serving(WAIT).unwrap();
    assert_eq!(agent.stats().unwrap().shards[0].epoch, 2);
    let client = Client::new(agent.listen());
    assert!(client.open(1).session.generation() > session.session.generation());
    // A crash: the record says nothing of a clean end.
    agent.abandon();
    assert_eq!((on_record(state.path(), "epoch"), on_record(state.path(), "clean_epoch")), (2, 1));

    // A stop with a write that nobody sends again.
    let agent = Agent::start(config).unwrap();
    agent.wait_serving(WAIT).unwrap();
    replicas[0].behaviour.keeps_acks.store(true, Relaxed);
    let client = Client::new(agent.listen());
    let session = client.open(1);
    client.send(&session.write_datagram(1, Kind::Put, b"value"));
    until("the write", || agent.stats().unwrap().shards[0].unresolved == 1);
    let report = agent.stop().unwrap();
    assert_eq!((report.clean, report.unresolved), (false, vec![(0, 1)]));
    assert_eq!((on_record(state.path(), "epoch"), on_record(state.path(), "clean_epoch")), (3, 1));
}

fn on_record(state: &Path, field: &str) -> u64 {
    let text = std::fs::read_to_string(state.join("authority.json")).unwrap();
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    document["shards"][0][field].as_u64().unwrap()
}

#[test]
fn what_is_taken_is_explained() {
    let (replicas, agent) = rack();
    let mut second = config(&replicas);
    second.listen = agent.listen();
    second.cpus = vec![0];
    let error = Agent::start(second).err().unwrap().to_string();
    assert!(error.contains("is in use") && error.contains("ss -ulpn"), "{error}");

    let mut elsewhere = config(&replicas);
    elsewhere.cpus = vec![4000];
    let error = Agent::start(elsewhere).err().unwrap().to_string();
    assert!(error.contains("no CPU 4000"), "{error}");
}

#[test]
fn benchmarks_open_sessions_past_the_handshake() {
    let replicas: [Replica; 3] = std::array::from_fn(|_| Replica::start());
    let config = Config { assume_installed: true, ..config(&replicas) };
    let agent = Agent::start(config).unwrap();
    agent.wait_serving(Duration::ZERO).unwrap();
    let client = Client::new(agent.listen());
    let opened = agent.open_sessions(0, &[client.me; 40]).unwrap();
    let indices: Vec<_> = opened.iter().map(|open| open.session.index()).collect();
    assert_eq!(indices, (0..40).collect::<Vec<_>>());
    let session = Session { client: &client, session: opened[39].session, token: opened[39].token };
    assert_eq!(session.write(1).header.op, Op::WReply);
    assert!(agent.open_sessions(0, &[client.me; 25]).unwrap_err().to_string().contains("all 64 sessions"));
    assert!(agent.open_sessions(1, &[client.me]).is_err());
}

/// Threads that share a port share the tables: what one orders, all know.
#[test]
fn many_threads_are_one_coordinator() {
    let replicas: [Replica; 3] = std::array::from_fn(|_| Replica::start());
    let agent = Agent::start(Config { cpus: Vec::new(), ..config(&replicas) }).unwrap();
    agent.wait_serving(WAIT).unwrap();
    let mut seqs = Vec::new();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let client = Client::new(agent.listen());
                    let session = client.open(1);
                    (1..=100)
                        .map(|request| {
                            // Retransmitted until answered: a full bucket or a lost datagram is no answer.
                            let datagram = session.write_datagram(request, Kind::Put, b"value");
                            let answer = client.ask(&datagram);
                            assert_eq!(answer.header.op, Op::WReply);
                            assert!(session.read(request).header.seq >= answer.header.seq);
                            answer.header.seq
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        for client in clients {
            seqs.extend(client.join().unwrap());
        }
    });
    seqs.sort_unstable();
    assert_eq!(seqs, (1..=400).map(|i| (1 << 40) + i).collect::<Vec<u64>>(), "each seq once");
    assert!(agent.stop().unwrap().clean);
}
