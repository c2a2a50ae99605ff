//! An agent with the socket data path on loopback, raw sockets as clients, and replicas that misbehave on demand.

mod common;

use std::{path::Path, sync::atomic::Ordering::Relaxed, time::Duration};

use common::{Client, Replica, Session, WAIT, is_rejected, until};
use underpass_authority::{Config as Authority, FileConfig, Memory};
use underpass_coordinator::{
    admin::{self, Command},
    agent::{Agent, AgentHandle},
    config::{Config, Shard},
};
use underpass_protocol::{
    agent::{MemberStatus, Record, ShardStatus},
    control::{self, ClusterKey, OPEN_PADDING, Open},
    wire::{Endpoint, Kind, Op, Packet, Reason, Status},
};

fn config(replicas: &[Replica]) -> Config {
    let members = replicas.iter().map(|replica| replica.endpoint).collect();
    let mut config = Config { shards: vec![Shard { id: 0, members }], cpus: vec![0], ..Config::default() };
    config.listen.port = 0;
    (config.buckets, config.sessions) = (64, 64);
    // A machine under load is no failure.
    (config.suspect_ms, config.lost_ms, config.lease_ms) = (300, 1500, 2000);
    // Only where a test is about it.
    config.stuck_ms = 60_000;
    config
}

fn filed(config: Config, state: &Path) -> Config {
    Config { authority: Some(Authority::File(FileConfig { directory: state.to_owned() })), ..config }
}

fn replicas() -> [Replica; 3] {
    std::array::from_fn(|_| Replica::start())
}

fn start(config: &Config) -> AgentHandle {
    let agent = Agent::start(config.clone()).unwrap();
    agent.wait_serving(WAIT).unwrap();
    agent
}

fn rack() -> ([Replica; 3], AgentHandle) {
    let replicas = replicas();
    let agent = start(&config(&replicas));
    (replicas, agent)
}

fn shard(agent: &AgentHandle) -> ShardStatus {
    agent.stats().unwrap().shards.remove(0)
}

fn member(agent: &AgentHandle, at: Endpoint) -> Option<MemberStatus> {
    shard(agent).members.into_iter().find(|member| member.address == at.to_string())
}

/// What the last write left, by a read of a client of its own.
fn value(agent: &AgentHandle) -> (Option<Status>, Vec<u8>) {
    let client = Client::new(agent.listen());
    let session = client.open(1);
    let answer = client.insist(&session.header(Op::Read, 1).datagram(b"key", b""));
    (Status::from_wire(answer.header.status), answer.value)
}

fn write(agent: &AgentHandle, value: &[u8]) {
    let client = Client::new(agent.listen());
    let session = client.open(1);
    let answer = client.insist(&session.write_datagram(1, Kind::Put, value));
    assert_eq!((answer.header.op, answer.header.status), (Op::WReply, Status::Ok.to_wire()));
}

#[test]
fn reads_and_writes() {
    let (replicas, agent) = rack();
    let client = Client::new(agent.listen());
    let session = client.open(1);
    let first = session.read(1);
    assert_eq!((first.header.op, first.header.status), (Op::RReply, Status::NotFound.to_wire()));
    let before = agent.stats().unwrap().counters;

    let written = session.client.ask(&session.write_datagram(1, Kind::Put, b"41"));
    assert_eq!((written.header.op, written.header.status), (Op::WReply, Status::Ok.to_wire()));
    assert_eq!(written.header.seq, (1 << 40) + 1, "after the floor of epoch 1");
    assert!(replicas.iter().all(|replica| replica.items() == 1));
    let read = session.read(2);
    assert_eq!((read.header.seq, &read.value[..]), (written.header.seq, &b"41"[..]));

    // The same packet again is answered from the record; a number comes back with it.
    let datagram = session.write_datagram(2, Kind::Incr, &1u64.to_be_bytes());
    for _ in 0..2 {
        let answer = client.ask(&datagram);
        assert_eq!((answer.header.op, &answer.value[..8]), (Op::WReply, &42u64.to_be_bytes()[..]));
    }
    is_rejected(
        &client.ask(&Session { token: 5, ..session }.write_datagram(3, Kind::Put, b"")),
        Op::WReject,
        Reason::Token,
    );
    client.send(b"not of this protocol");
    client.send(&session.write_datagram(9, Kind::Put, b"cut short")[..85]);
    client.nothing_comes();

    until("stable", || shard(&agent).stable == written.header.seq + 1);
    let stats = agent.stats().unwrap();
    for (name, count) in [
        ("write", 2),
        ("clone", 6),
        ("commit", 2),
        ("ack", 4),
        ("write_answered", 1),
        ("reject_token", 1),
        ("drop_magic", 0),
        ("drop_truncated", 2),
    ] {
        assert_eq!(stats.counters[name] - before[name], count, "{name}");
    }
    assert_eq!((stats.sessions_open, stats.shards[0].unresolved), (1, 0));
    assert!(agent.stop().unwrap().recorded);
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
    until("the write", || shard(&agent).unresolved == 1);
    let closed = session.close().unwrap();
    assert_eq!((closed.closed, closed.request), (false, 3));
    replicas[2].behaviour.keeps_acks.store(false, Relaxed);
    assert_eq!(client.ask(&datagram).header.op, Op::WReply);
    assert!(session.close().unwrap().closed);
}

#[test]
fn idle_sessions_end_but_unresolved_ones_stay() {
    let replicas = replicas();
    let agent = start(&Config { idle_ms: 5000, ..config(&replicas) });
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
    let replicas = replicas();
    replicas[1].behaviour.silent.store(true, Relaxed);
    let agent = Agent::start(config(&replicas)).unwrap();
    let client = Client::new(agent.listen());
    is_rejected(&client.ask(&client.open_datagram(1, 0)), Op::ControlReject, Reason::NotCoordinator);
    until("the others", || {
        let shard = shard(&agent);
        let waits = format!("replica 1 ({}) has not answered", replicas[1].endpoint);
        shard.state == "forming" && shard.trouble.contains(&waits) && shard.trouble.matches("replica").count() == 2
    });
    assert!(agent.wait_serving(Duration::ZERO).is_err());
    replicas[1].behaviour.silent.store(false, Relaxed);
    agent.wait_serving(WAIT).unwrap();
    write(&agent, b"1");
}

#[test]
fn reads_avoid_a_silent_replica_and_writes_mind_a_full_one() {
    let (replicas, agent) = rack();
    let client = Client::new(agent.listen());
    let session = client.open(1);
    let silent = &replicas[2];
    silent.behaviour.silent.store(true, Relaxed);
    until("no reads for it", || !member(&agent, silent.endpoint).is_some_and(|member| member.serving));
    for request in 1..50 {
        assert!(session.read(request).header.cnt < 2);
    }
    silent.behaviour.silent.store(false, Relaxed);
    until("reads for it", || member(&agent, silent.endpoint).is_some_and(|member| member.serving));

    replicas[0].behaviour.used_bytes.store(1 << 20, Relaxed);
    until("full", || shard(&agent).store_full);
    is_rejected(&session.write(1), Op::WReject, Reason::StoreFull);
    assert_eq!(client.ask(&session.write_datagram(1, Kind::Delete, b"")).header.op, Op::WReply, "deletes make room");
    replicas[0].behaviour.used_bytes.store(0, Relaxed);
    until("room", || !shard(&agent).store_full);
    assert_eq!(session.write(2).header.op, Op::WReply);
}

#[test]
fn a_restarted_replica_is_filled_and_takes_part_again() {
    let (replicas, agent) = rack();
    write(&agent, b"1");
    replicas[1].restart();
    let lives = |replica: &Replica| replica.behaviour.incarnation.load(Relaxed);
    // It is out, in as a learner, and active, under an epoch each.
    until("its return", || {
        member(&agent, replicas[1].endpoint)
            .is_some_and(|member| member.serving && member.incarnation == lives(&replicas[1]))
    });
    assert!(shard(&agent).epoch >= 4, "{:?}", shard(&agent));
    assert_eq!(replicas[1].items(), 1);
    // And it is believed: the others may go.
    for replica in [&replicas[0], &replicas[2]] {
        replica.behaviour.silent.store(true, Relaxed);
        until("its removal", || member(&agent, replica.endpoint).is_none());
    }
    assert_eq!(value(&agent), (Some(Status::Ok), b"1".to_vec()));
    write(&agent, b"2");
}

#[test]
fn data_outlive_agents_that_stop_and_agents_that_die() {
    let state = tempfile::tempdir().unwrap();
    let replicas = replicas();
    let config = filed(config(&replicas), state.path());
    let agent = start(&config);
    write(&agent, b"1");
    let client = Client::new(agent.listen());
    let session = client.open(1).session;
    assert!(agent.stop().unwrap().recorded);

    let agent = start(&config);
    assert_eq!(value(&agent), (Some(Status::Ok), b"1".to_vec()));
    let client = Client::new(agent.listen());
    assert!(client.open(1).session.generation() > session.generation(), "never issued before");
    write(&agent, b"2");
    let epoch = shard(&agent).epoch;
    assert!(epoch > 1);
    agent.abandon();

    let agent = start(&config);
    assert!(shard(&agent).epoch > epoch);
    assert_eq!(value(&agent), (Some(Status::Ok), b"2".to_vec()));
    // Tables of the socket data path end with the process, so leaving them is to stop.
    assert!(agent.leave().unwrap().recorded);
}

#[test]
fn a_write_that_nobody_sends_again_is_repaired() {
    let replicas = replicas();
    let agent = start(&Config { stuck_ms: 100, ..config(&replicas) });
    let client = Client::new(agent.listen());
    let session = client.open(1);
    replicas[1].behaviour.no_writes.store(true, Relaxed);
    client.send(&session.write_datagram(1, Kind::Put, b"1"));
    until("the repair", || replicas[1].items() == 1 && shard(&agent).unresolved == 0);
    assert_eq!(value(&agent), (Some(Status::Ok), b"1".to_vec()));
    // Nobody has it: it is without effect, and its client is told.
    replicas.iter().for_each(|replica| replica.behaviour.no_writes.store(true, Relaxed));
    let datagram = session.write_datagram(2, Kind::Put, b"2");
    client.send(&datagram);
    until("the write", || shard(&agent).unresolved == 1);
    until("the abort", || shard(&agent).unresolved == 0);
    replicas.iter().for_each(|replica| replica.behaviour.no_writes.store(false, Relaxed));
    is_rejected(&client.ask(&datagram), Op::WReject, Reason::Aborted);
    assert_eq!(value(&agent), (Some(Status::Ok), b"1".to_vec()));
}

/// Two agents of one shard, connected to one authority.
fn two(replicas: &[Replica], memory: &Memory) -> [AgentHandle; 2] {
    let begin = |config: Config| {
        let memory = memory.clone();
        Agent::start_with(config, move |me| Ok(Box::new(memory.authority(me)))).unwrap()
    };
    let first = begin(config(replicas));
    first.wait_serving(WAIT).unwrap();
    let second = begin(Config { shards: vec![Shard { id: 0, members: Vec::new() }], ..config(replicas) });
    [first, second]
}

#[test]
fn another_coordinator_takes_over_when_one_dies() {
    let (replicas, memory) = (replicas(), Memory::new());
    let [first, second] = two(&replicas, &memory);
    write(&first, b"1");
    assert_eq!(shard(&second).state, "standby");
    first.abandon();
    second.wait_serving(WAIT).unwrap();
    assert_eq!(value(&second), (Some(Status::Ok), b"1".to_vec()));
}

#[test]
fn a_shard_is_handed_over() {
    let (replicas, memory) = (replicas(), Memory::new());
    let [first, second] = two(&replicas, &memory);
    write(&first, b"1");
    let nowhere = Command::Transfer { to: "127.0.0.1:9".parse().unwrap() };
    assert!(first.change(0, nowhere).unwrap_err().to_string().contains("has not taken over"));
    let says = first.change(0, Command::Transfer { to: second.listen().into() }).unwrap();
    assert!(says.contains("handed over"), "{says}");
    second.wait_serving(WAIT).unwrap();
    assert_eq!(value(&second), (Some(Status::Ok), b"1".to_vec()));
    let client = Client::new(first.listen());
    is_rejected(&client.ask(&client.open_datagram(1, 0)), Op::ControlReject, Reason::NotCoordinator);
}

#[test]
fn members_are_added_and_removed_over_the_admin_socket() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("control.sock");
    let mut replicas: Vec<_> = replicas().into();
    let spare = replicas.pop().unwrap();
    let agent = start(&Config { control: Some(socket.clone()), ..config(&replicas) });
    write(&agent, b"1");
    let change = |command| admin::change(&socket, 0, command);
    change(Command::Add { id: 7, address: spare.endpoint.into() }).unwrap();
    until("the new replica", || member(&agent, spare.endpoint).is_some_and(|member| member.serving && member.id == 7));
    let taken = change(Command::Add { id: 7, address: "127.0.0.1:9".parse().unwrap() });
    assert!(taken.unwrap_err().to_string().contains("unique"));
    change(Command::Remove { id: 0, lose_data: false }).unwrap();
    until("the end of the first", || member(&agent, replicas[0].endpoint).is_none());
    let status = admin::status(&socket).unwrap();
    assert_eq!(status.shards[0].members.iter().map(|member| member.id).collect::<Vec<_>>(), [1, 7]);
    assert!(admin::change(&socket, 5, Command::BeginEmpty).unwrap_err().to_string().contains("does not know shard 5"));
    assert_eq!(value(&agent), (Some(Status::Ok), b"1".to_vec()));
}

#[test]
fn replicas_with_another_key_are_strangers() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("key");
    std::fs::write(&file, "000102030405060708090a0b0c0d0e0f\n").unwrap();
    let key = std::fs::read_to_string(&file).unwrap().parse().unwrap();
    let replicas = [Replica::at("127.0.0.1:0", key), Replica::at("127.0.0.1:0", ClusterKey::default())];
    let config = Config { cluster_key_file: Some(file), ..config(&replicas) };
    let agent = Agent::start(config.clone()).unwrap();
    until("the first", || shard(&agent).trouble.matches("replica").count() == 2);
    assert!(agent.wait_serving(Duration::from_millis(300)).is_err());
    drop(agent);
    let alone = Config { shards: vec![Shard { id: 0, members: vec![replicas[0].endpoint] }], ..config.clone() };
    write(&start(&alone), b"1");
    let missing = Config { cluster_key_file: Some(directory.path().join("none")), ..config };
    assert!(format!("{:#}", Agent::start(missing).err().unwrap()).contains("none"));
}

#[test]
fn a_shard_on_no_record_says_so() {
    let config = Config { shards: vec![Shard { id: 0, members: Vec::new() }], ..config(&[]) };
    let agent = Agent::start(config).unwrap();
    until("the word", || shard(&agent).trouble.contains("underpass shard create"));
    assert_eq!(shard(&agent).state, "standby");
    assert!(agent.stop().unwrap().recorded);
}

#[test]
fn what_is_taken_or_not_understood_is_explained() {
    let state = tempfile::tempdir().unwrap();
    let replicas = replicas();
    let config = filed(config(&replicas), state.path());
    let agent = start(&config);
    let error =
        format!("{:#}", Agent::start(Config { listen: agent.listen(), ..self::config(&replicas) }).err().unwrap());
    assert!(error.contains("is in use") && error.contains("ss -ulpn"), "{error}");
    let error = format!("{:#}", Agent::start(config.clone()).err().unwrap());
    assert!(error.contains(&format!("another coordinator (process {})", std::process::id())), "{error}");
    let elsewhere = Config { cpus: vec![4000], ..self::config(&replicas) };
    let error = Agent::start(elsewhere).err().unwrap().to_string();
    assert!(error.contains("no CPU 4000"), "{error}");
    agent.stop().unwrap();

    // Records of a newer build, and of one before shards could change their members.
    let path = state.path().join("authority.json");
    let good: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let mut newer = good.clone();
    newer["shards"][0]["record"]["version"] = (Record::new(0, Vec::new()).version + 1).into();
    let mut older = good;
    older["version"] = 1.into();
    for (document, says) in [(newer, "start the newer build"), (older, "Data cannot be carried over")] {
        std::fs::write(&path, document.to_string()).unwrap();
        let error = format!("{:#}", Agent::start(config.clone()).err().unwrap());
        assert!(error.contains(says), "{error}");
    }
}

/// Threads that share a port share the tables: what one orders, all know.
#[test]
fn many_threads_are_one_coordinator() {
    let replicas = replicas();
    let agent = start(&Config { cpus: Vec::new(), ..config(&replicas) });
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
                            let answer = client.insist(&datagram);
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
    assert!(agent.stop().unwrap().recorded);
}
