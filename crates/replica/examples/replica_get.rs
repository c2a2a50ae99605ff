//! GETs a second of one replica core: the replica on one CPU, a batched generator in the coordinator's and client's place
//! on another.
//!
//! `cargo run --release -p underpass-replica --example replica_get -- [ITEMS [SECONDS [REPLICA_CPU GENERATOR_CPU]]]`

use std::{
    env,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use serde::de::DeserializeOwned;
use socket2::{Domain, Protocol, Socket, Type};
use underpass_protocol::{
    control::{self, ClusterKey, Configuration, Heartbeat, HeartbeatAck, Install, Installed, MemberInfo},
    wire::{Endpoint, Header, Kind, Op, Packet, SessionId, Status},
};
use underpass_replica::{
    Options, Replica,
    batch::{BATCH, Batch},
};

const EPOCH: u32 = 1;
const VALUE: [u8; 128] = [b'v'; 128];
/// Requests under way at once.
const WINDOW: usize = 8 * BATCH;

fn key(number: u64) -> [u8; 16] {
    let mut key = *b"key-000000000000";
    let digits = number.to_string();
    key[16 - digits.len()..].copy_from_slice(digits.as_bytes());
    key
}

/// Sends datagrams that `fill` makes, and takes the answers, `WINDOW` of them under way, until `enough` says so.
fn exchange(
    socket: &Socket,
    to: Endpoint,
    mut fill: impl FnMut() -> Option<(Header, [u8; 16], &'static [u8])>,
    mut check: impl FnMut(&Packet<'_>),
) -> anyhow::Result<u64> {
    let (mut sent, mut received) = (Batch::new(), Batch::new());
    let (mut answers, mut under_way, mut lost) = (0, 0, 0);
    let mut more = true;
    while more || under_way > 0 {
        while more && under_way + BATCH <= WINDOW {
            for number in 0..BATCH {
                let Some((mut header, key, value)) = fill() else {
                    more = false;
                    break;
                };
                (header.key_len, header.value_len) = (16, value.len() as u32);
                let buffer = sent.datagram(number).buffer;
                header.emit(buffer);
                buffer[80..96].copy_from_slice(&key);
                buffer[96..96 + value.len()].copy_from_slice(value);
                sent.answer(number, to, 96 + value.len());
                under_way += 1;
            }
            ensure!(sent.flush(socket.as_fd()) == 0, "the kernel refuses to send");
        }
        match received.receive(socket.as_fd()) {
            Ok(count) => {
                for number in 0..count {
                    let datagram = received.datagram(number);
                    check(&Packet::parse(&datagram.buffer[..datagram.len]).context("an answer that is no packet")?);
                }
                answers += count as u64;
                under_way = under_way.saturating_sub(count);
            }
            // A second without an answer: what is under way is lost.
            Err(_) => {
                lost += under_way;
                under_way = 0;
                ensure!(lost < 10 * WINDOW, "the replica does not answer");
            }
        }
    }
    if lost > 0 {
        println!("{lost} datagrams were lost on the way");
    }
    Ok(answers)
}

/// The document that answers a control datagram.
fn ask<T: DeserializeOwned>(socket: &Socket, to: Endpoint, datagram: &[u8]) -> anyhow::Result<T> {
    let sealed = control::seal(datagram.to_vec(), ClusterKey::default());
    socket.send_to(&sealed, &SocketAddrV4::from(to).into())?;
    let mut batch = Batch::new();
    batch.receive(socket.as_fd()).context("no answer")?;
    let answer = batch.datagram(0);
    control::parse(&Packet::parse(&answer.buffer[..answer.len])?).context("another answer than expected")
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<u64> =
        env::args().skip(1).map(|a| a.parse().context("arguments are numbers")).collect::<Result<_, _>>()?;
    let argument = |at: usize, default| arguments.get(at).copied().unwrap_or(default);
    let (items, seconds) = (argument(0, 100_000), argument(1, 2));
    let (replica_cpu, generator_cpu) = (argument(2, 0) as usize, argument(3, 1) as usize);

    let replica = Replica::start(Options {
        listen: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0),
        cpus: vec![replica_cpu],
        ..Options::default()
    })?;
    let mut cpus = CpuSet::new();
    cpus.set(generator_cpu)?;
    sched_setaffinity(Pid::from_raw(0), &cpus).context("cannot pin the generator")?;

    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.bind(&SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0).into())?;
    socket.set_recv_buffer_size(8 << 20)?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let own: Endpoint = socket.local_addr()?.as_socket_ipv4().context("bound to IPv4")?.into();
    let to = Endpoint::from(replica.local_addr());

    let incarnation = replica.core().incarnation();
    let install = Install {
        incarnation,
        index: 0,
        reset: false,
        configuration: Configuration {
            shard: 0,
            epoch: EPOCH,
            tenure: EPOCH,
            lease_ms: 1 << 40,
            coordinator_addr: own.addr,
            coordinator_port: own.port,
            members: vec![MemberInfo { index: 0, id: 1, incarnation, addr: to.addr, port: to.port, active: true }],
        },
        sessions: 1024,
    };
    let installed: Installed = ask(&socket, to, &control::emit(Header::new(Op::Install), &install))?;
    ensure!(installed.epoch == EPOCH, "the replica refuses: {}", installed.refusal);
    // A lease for ever, by an echo of its stamp.
    let header = Header { epoch: EPOCH, ..Header::new(Op::Heartbeat) };
    let mut heartbeat = Heartbeat { stable: 0, time: 0, echo: None, donor: None };
    heartbeat.echo = Some(ask::<HeartbeatAck>(&socket, to, &control::emit(header, &heartbeat))?.stamp);
    ask::<HeartbeatAck>(&socket, to, &control::emit(header, &heartbeat))?;

    let mut template = Header { epoch: EPOCH, ..Header::new(Op::Write) };
    template.set_reply_to(own);
    let started = Instant::now();
    let mut number = 0;
    let stored = exchange(
        &socket,
        to,
        || {
            (number < items).then(|| {
                number += 1;
                let seq = (u64::from(EPOCH) << 40) + number;
                let session = SessionId::new(1, (number % 1024) as u16);
                let header = Header { kind: Kind::Put.to_wire(), seq, session, request: number, ..template };
                (header, key(number - 1), &VALUE[..])
            })
        },
        |answer| assert_eq!((answer.header.op, answer.header.status), (Op::WReply, 0)),
    )?;
    let rate = stored as f64 / started.elapsed().as_secs_f64();
    let usage = replica.core().usage();
    println!("{stored} PUTs at {rate:.0}/s; {} items in {} MiB", usage.items, usage.used_bytes >> 20);
    ensure!(usage.items == items, "{} of {items} items are stored", usage.items);

    let template = Header { op: Op::Read, seq: u64::MAX >> 1, ..template };
    let started = Instant::now();
    let (mut random, mut request) = (0x9e37_79b9_7f4a_7c15_u64, 0);
    let (mut until_look, mut over) = (0, false);
    let answers = exchange(
        &socket,
        to,
        || {
            if until_look == 0 {
                over = started.elapsed() >= Duration::from_secs(seconds);
                until_look = BATCH;
            }
            until_look -= 1;
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            request += 1;
            (!over).then(|| (Header { request, ..template }, key(random % items), &VALUE[..0]))
        },
        |answer| {
            let Header { op, status, .. } = answer.header;
            assert_eq!((op, status, answer.value.len()), (Op::RReply, Status::Ok.to_wire(), VALUE.len()));
        },
    )?;
    let elapsed = started.elapsed().as_secs_f64();
    println!("{answers} GETs in {elapsed:.2} s: {:.0}/s on CPU {replica_cpu}", answers as f64 / elapsed);
    replica.stop()?;
    Ok(())
}
