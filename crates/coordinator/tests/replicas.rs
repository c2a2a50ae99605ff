//! An agent with real replicas, all on loopback: what an epoch leaves, the next one finds, or refuses to guess.

mod common;

use std::{net::SocketAddrV4, path::Path, time::Duration};

use common::{Client, WAIT, until};
use underpass_coordinator::{
    agent::{Agent, AgentHandle},
    config::{Config, Shard},
};
use underpass_protocol::wire::{Endpoint, Kind, Op, Status};
use underpass_replica::{Options, Replica};

fn replica(listen: SocketAddrV4) -> Replica {
    Replica::start(Options { listen, memory_mib: 16, ..Options::default() }).unwrap()
}

fn replicas() -> Vec<Replica> {
    (0..3).map(|_| replica("127.0.0.1:0".parse().unwrap())).collect()
}

fn agent(replicas: &[Replica], state: &Path) -> AgentHandle {
    let members = replicas.iter().map(|replica| Endpoint::from(replica.local_addr())).collect();
    let mut config = Config {
        state: Some(state.to_owned()),
        shards: vec![Shard { id: 0, members }],
        cpus: vec![0],
        buckets: 1024,
        sessions: 64,
        ..Config::default()
    };
    config.listen.port = 0;
    Agent::start(config).unwrap()
}

fn restart(replicas: Vec<Replica>) -> Vec<Replica> {
    let addresses: Vec<_> = replicas.iter().map(Replica::local_addr).collect();
    for replica in replicas {
        replica.stop().unwrap();
    }
    addresses.into_iter().map(replica).collect()
}

/// What the last write left, by a read of a client of its own.
fn value(agent: &AgentHandle) -> (Option<Status>, Vec<u8>) {
    let client = Client::new(agent.listen());
    let answer = client.open(1).read(1);
    assert_eq!(answer.header.op, Op::RReply);
    (Status::from_wire(answer.header.status), answer.value)
}

#[test]
fn a_clean_end_keeps_everything() {
    let state = tempfile::tempdir().unwrap();
    let replicas = replicas();
    for epoch in 1..=3u64 {
        let agent = agent(&replicas, state.path());
        agent.wait_serving(WAIT).unwrap();
        if epoch > 1 {
            assert_eq!(value(&agent), (Some(Status::Ok), (epoch - 1).to_string().into_bytes()));
        }
        let client = Client::new(agent.listen());
        let session = client.open(1);
        for request in 1..=200 {
            let answer = client.ask(&session.write_datagram(request, Kind::Put, b"0"));
            assert_eq!((answer.header.op, answer.header.status), (Op::WReply, Status::Ok.to_wire()));
        }
        for request in 201..=200 + epoch {
            let answer = client.ask(&session.write_datagram(request, Kind::Incr, &1u64.to_be_bytes()));
            assert_eq!(answer.header.op, Op::WReply);
            assert_eq!(answer.value[..8], (request - 200).to_be_bytes());
        }
        assert_eq!(value(&agent), (Some(Status::Ok), epoch.to_string().into_bytes()));
        until("what is stable", || {
            let stats = agent.stats().unwrap();
            stats.shards[0].stable == (epoch << 40) + 200 + epoch
                && stats.shards[0].members.iter().all(|member| member.items == 1)
        });
        assert!(agent.stop().unwrap().clean);
    }
    for replica in replicas {
        replica.stop().unwrap();
    }
}

#[test]
fn a_crash_is_not_guessed_about() {
    let state = tempfile::tempdir().unwrap();
    let replicas = replicas();
    let first = agent(&replicas, state.path());
    first.wait_serving(WAIT).unwrap();
    let client = Client::new(first.listen());
    assert_eq!(client.open(1).write(1).header.op, Op::WReply);
    first.abandon();

    let second = agent(&replicas, state.path());
    until("the refusals", || {
        second.stats().unwrap().shards[0]
            .members
            .iter()
            .all(|member| member.trouble.contains("was committed") || member.trouble.contains("were committed"))
    });
    assert!(second.wait_serving(Duration::from_millis(200)).is_err());

    // Their operator gives the data up.
    let replicas = restart(replicas);
    second.wait_serving(WAIT).unwrap();
    assert_eq!(value(&second).0, Some(Status::NotFound));
    assert!(second.stop().unwrap().clean);
    drop(replicas);
}

#[test]
fn an_empty_replica_is_not_taken_for_a_full_one() {
    let state = tempfile::tempdir().unwrap();
    let mut replicas = replicas();
    let first = agent(&replicas, state.path());
    first.wait_serving(WAIT).unwrap();
    let client = Client::new(first.listen());
    let session = client.open(1);
    assert_eq!(session.write(1).header.op, Op::WReply);

    // While it serves: reads avoid it at once, and a write says nothing rather than something wrong.
    let last = restart(vec![replicas.pop().unwrap()]).remove(0);
    until("the restarted one's end", || {
        let member = &first.stats().unwrap().shards[0].members[2];
        !member.serving && member.trouble.contains("restarted")
    });
    for request in 1..20 {
        let answer = session.read(request);
        assert_eq!((answer.header.op, &answer.value[..]), (Op::RReply, &b"value"[..]));
    }
    assert!(first.stop().unwrap().clean, "no write is unresolved");

    // In the next epoch: it would answer "not found" for what the others hold.
    replicas.push(last);
    let second = agent(&replicas, state.path());
    assert!(second.wait_serving(Duration::from_millis(500)).is_err());
    let replicas = restart(replicas);
    second.wait_serving(WAIT).unwrap();
    assert_eq!(value(&second).0, Some(Status::NotFound));
    drop(replicas);
}
