//! The replica fed by arbitrary packets: it never panics, its accounts stay true and within its budget, no answer is
//! larger than what asked for it, and a write is applied once however often it comes.
//!
//! The input is a sequence of small commands: packets of an honest coordinator, the same with bytes changed or from
//! somebody else, and arbitrary datagrams.

#![no_main]

use std::net::Ipv4Addr;

use libfuzzer_sys::{
    arbitrary::{Result, Unstructured},
    fuzz_target,
};
use underpass_protocol::{
    control::{self, ClusterKey, Configuration, Heartbeat, Install, MemberInfo},
    replica::{Action, Count, Event, Replica, Settings},
    wire::{DATAGRAM_MAX, Endpoint, FLAG_TTL, Header, Kind, Op, Operand, Packet, SessionId},
};

const SHARD: u32 = 1;
const INCARNATION: u64 = 7;
const SESSIONS: u32 = 8;
const NOW_MS: u64 = 1000;
/// Small, so that it is reached.
const BUDGET_BYTES: u64 = 16 << 10;
const COORDINATOR: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 1), port: 5550 };
const STRANGER: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 9, 9, 9), port: 99 };

struct World {
    replica: Replica,
    epoch: u32,
    clock: u64,
    time: u64,
    requests: [u64; SESSIONS as usize],
    /// The latest write and its acknowledgement.
    acknowledged: Option<(Vec<u8>, Vec<u8>)>,
}

impl World {
    fn new() -> Self {
        Self {
            replica: Replica::new(Settings::simulated(INCARNATION, BUDGET_BYTES)),
            epoch: 1,
            clock: 1 << 40,
            time: 1,
            requests: [0; SESSIONS as usize],
            acknowledged: None,
        }
    }

    fn header(&self, op: Op) -> Header {
        let mut header = Header { shard: SHARD, epoch: self.epoch, time: self.time, ..Header::new(op) };
        header.set_reply_to(Endpoint { addr: Ipv4Addr::new(10, 0, 1, 1), port: 4000 });
        header
    }

    fn deliver(&mut self, from: Endpoint, datagram: &[u8]) {
        let stable = self.replica.stable();
        let actions = self.replica.step(NOW_MS, Event::Datagram { from, bytes: datagram });
        assert!(self.replica.stable() >= stable, "stable went back");
        self.replica.assert_accounts();
        let usage = self.replica.usage();
        assert!(usage.used_bytes <= usage.budget_bytes, "bounded: {usage:?}");
        let counts = actions.iter().filter(|action| matches!(action, Action::Count(_))).count();
        assert_eq!(counts, 1, "every datagram is counted once");
        let mut answers = actions.iter().filter_map(|action| match action {
            Action::Send { to, bytes } => Some((*to, bytes)),
            _ => None,
        });
        if let Some((to, answer)) = answers.next() {
            self.check_answer(from, datagram, to, answer);
        }
        assert!(answers.next().is_none(), "one answer at most");
    }

    fn check_answer(&mut self, from: Endpoint, datagram: &[u8], to: Endpoint, answer: &[u8]) {
        assert!(answer.len() <= DATAGRAM_MAX);
        let packet = Packet::parse(answer).expect("a replica sends packets of this protocol");
        if from.addr != COORDINATOR.addr {
            assert!(answer.len() <= datagram.len(), "no amplifier for strangers");
            assert_eq!(to, from, "what a stranger says moves nothing to a third host");
        }
        if packet.header.op == Op::WReply {
            assert_eq!((from, to), (COORDINATOR, COORDINATOR));
            self.acknowledged = Some((datagram.to_vec(), answer.to_vec()));
        }
    }

    /// one-effect: the same write again changes nothing and is acknowledged as before.
    fn again(&mut self) {
        let Some((write, answer)) = self.acknowledged.take() else { return };
        if Packet::parse(&write).expect("acknowledged").header.epoch != self.replica.dump().epoch {
            return;
        }
        let before = self.replica.dump();
        let actions = self.replica.step(NOW_MS, Event::Datagram { from: COORDINATOR, bytes: &write });
        assert!(actions.contains(&Action::Count(Count::WriteAgain)), "{actions:?}");
        assert!(actions.contains(&Action::Send { to: COORDINATOR, bytes: answer }), "{actions:?}");
        assert_eq!(self.replica.dump(), before);
    }
}

fn key(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let number = input.int_in_range(0..=15u8)?;
    Ok(vec![b'a' + number; 1 + usize::from(number)])
}

fn install(world: &mut World, input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let incarnation = if input.ratio(1, 8)? { 0 } else { INCARNATION };
    let tenure = if input.arbitrary()? { world.epoch } else { world.epoch + 1 };
    if input.arbitrary()? {
        world.epoch += 1;
        world.clock = u64::from(world.epoch) << 40;
        world.requests = [0; SESSIONS as usize];
    }
    let member = |index: u8| MemberInfo {
        index,
        id: index.into(),
        incarnation: INCARNATION,
        addr: Ipv4Addr::new(10, 0, 0, 10 + index),
        port: 5550,
        active: true,
    };
    let configuration = Configuration {
        shard: SHARD,
        epoch: world.epoch,
        tenure,
        lease_ms: 1000,
        coordinator_addr: COORDINATOR.addr,
        coordinator_port: COORDINATOR.port,
        members: vec![member(0), member(1), member(2)],
    };
    let message = Install { incarnation, index: 1, reset: false, configuration, sessions: SESSIONS };
    Ok(sealed(world.header(Op::Install), &message))
}

fn heartbeat(world: &World, input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let stable = world.clock.saturating_sub(u64::from(input.arbitrary::<u8>()? / 8));
    let heartbeat = Heartbeat { stable, time: world.time, echo: Some(NOW_MS), donor: None };
    Ok(sealed(world.header(Op::Heartbeat), &heartbeat))
}

fn sealed<T: serde::Serialize>(header: Header, message: &T) -> Vec<u8> {
    control::seal(control::emit(header, message), ClusterKey::default())
}

/// A write as the coordinator orders them, not always in the order of their numbers.
fn write(world: &mut World, input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let session = input.choose_index(SESSIONS as usize)?;
    world.requests[session] += 1;
    world.clock += u64::from(input.int_in_range(1..=3u8)?);
    let mut header = world.header(Op::Write);
    header.session = SessionId::new(u64::from(world.epoch) << 24 | 1, session as u16);
    header.request = world.requests[session];
    header.seq = world.clock - u64::from(input.int_in_range(0..=3u8)?);
    let kind = *input.choose(Kind::ALL)?;
    header.kind = kind.to_wire();
    let data = match input.int_in_range(0..=3u8)? {
        0 => b"12".to_vec(),
        1 => b"-9223372036854775808".to_vec(),
        2 => vec![],
        _ => vec![b'x'; usize::from(input.arbitrary::<u16>()?) % 1200],
    };
    let operand = Operand {
        ttl_ms: if header.flags & FLAG_TTL != 0 || kind == Kind::Touch || input.arbitrary()? {
            Some(input.arbitrary::<u8>()?.into())
        } else {
            None
        },
        expected: world.clock.saturating_sub(input.arbitrary::<u8>()?.into()),
        delta: input.arbitrary()?,
        data: &data,
    };
    let mut value = Vec::new();
    header.flags = operand.emit(kind, &mut value);
    Ok(header.datagram(&key(input)?, &value))
}

fn read(world: &World, input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut header = world.header(Op::Read);
    header.seq = world.clock.saturating_sub(u64::from(input.arbitrary::<u8>()? / 8));
    Ok(header.datagram(&key(input)?, &[]))
}

fn command(world: &mut World, input: &mut Unstructured<'_>) -> Result<()> {
    let code: u8 = input.arbitrary()?;
    let mut datagram = match code & 7 {
        0 => install(world, input)?,
        1 => heartbeat(world, input)?,
        2..=4 => write(world, input)?,
        5 => read(world, input)?,
        6 => {
            world.time += u64::from(input.arbitrary::<u8>()?);
            world.again();
            return Ok(());
        }
        _ => {
            let len = input.arbitrary_len::<u8>()?;
            input.bytes(len)?.to_vec()
        }
    };
    if code & 0x18 == 0x18 && !datagram.is_empty() {
        let at = input.choose_index(datagram.len())?;
        datagram[at] = input.arbitrary()?;
    }
    let from = if code & 0xe0 == 0xe0 { STRANGER } else { COORDINATOR };
    world.deliver(from, &datagram);
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Unstructured::new(bytes);
    let mut world = World::new();
    while !input.is_empty() && command(&mut world, &mut input).is_ok() {}
});
