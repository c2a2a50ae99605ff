//! The coordinator fed by arbitrary packets on several CPUs, held to what the specification promises about it.
//!
//! The input is a sequence of small commands: packets of honest sessions and replicas, the same with bytes changed,
//! arbitrary datagrams, sessions opened and closed, writes settled by the agent, time passing. A packet that has critical sections left waits on a CPU
//! until a command lets it go on, so the input also chooses the interleaving. Afterwards everything that is pending is
//! acknowledged, and nothing may remain.

#![no_main]

use std::{collections::BTreeMap, net::Ipv4Addr};

use libfuzzer_sys::{
    arbitrary::{Result, Unstructured},
    fuzz_target,
};
use underpass_abi::abi::{UP_BUCKET_DIRTY, up_config};
use underpass_protocol::{
    agent::{Settlement, Tables},
    coordinator::{Action, CloseOutcome, Coordinator, Settings, Step, slot, unresolved},
    wire::{Endpoint, FLAG_TTL, Header, Kind, Op, Operand, Packet, SessionId, Status},
};

const SHARD: u32 = 1;
const EPOCH: u32 = 1;
const MEMBERS: u8 = 3;
const ALL_MEMBERS: u8 = (1 << MEMBERS) - 1;
const SESSIONS: usize = 4;
const CPUS: usize = 3;
const KEYS: u8 = 12;

/// A write that the coordinator has ordered, as seen from outside.
struct Write {
    key: Vec<u8>,
    header: Header,
    /// Members whose acknowledgement has been delivered, or of which the agent knows that they processed it.
    acks: u8,
    /// Settled as without effect.
    aborted: bool,
    /// The reply has gone to the client, or it is settled.
    finished: bool,
}

impl Write {
    fn decided(&self) -> bool {
        self.aborted || self.acks == ALL_MEMBERS
    }

    fn is_conditional(&self) -> bool {
        self.header.kind != Kind::Put.to_wire()
    }
}

struct Session {
    id: SessionId,
    request: u64,
}

struct World {
    coordinator: Coordinator,
    now_ms: u64,
    sessions: Vec<Session>,
    /// By sequence number.
    writes: BTreeMap<u64, Write>,
    /// Packets between their critical sections, with their keys.
    cpus: Vec<(Step, Header, Vec<u8>)>,
}

fn member(index: u8) -> Endpoint {
    Endpoint { addr: Ipv4Addr::new(10, 0, 0, 10 + index), port: 5550 }
}

fn client(index: usize) -> Endpoint {
    Endpoint { addr: Ipv4Addr::new(10, 0, 1, index as u8), port: 4000 }
}

fn token(session: SessionId) -> u64 {
    session.0.rotate_left(17)
}

fn configuration() -> up_config {
    let mut config = up_config {
        shard: SHARD,
        epoch: EPOCH,
        lease_until_ms: u64::MAX,
        must_ack: ALL_MEMBERS,
        serving: ALL_MEMBERS,
        must_ack_count: MEMBERS,
        serving_count: MEMBERS,
        ..up_config::default()
    };
    for index in 0..MEMBERS {
        let at = usize::from(index);
        config.must_ack_list[at] = index;
        config.serving_list[at] = index;
        config.members[at].addr = u32::from(member(index).addr).to_be();
        config.members[at].port = member(index).port.to_be();
    }
    config
}

/// Switches one published behaviour in, so that the assertions below can be seen to fail: `./dev mutants`.
#[cfg(feature = "published")]
fn publish(published: &mut underpass_protocol::coordinator::Published) {
    let name = std::env::var("UNDERPASS_PUBLISHED").expect("UNDERPASS_PUBLISHED names a published behaviour");
    let switch = match &*name {
        "count_acks" => &mut published.count_acks,
        "residual_count" => &mut published.residual_count,
        "uncommitted_read" => &mut published.uncommitted_read,
        "late_read" => &mut published.late_read,
        "clear_early" => &mut published.clear_early,
        "two_slots" => &mut published.two_slots,
        "retry_is_new" => &mut published.retry_is_new,
        "bound_first" => &mut published.bound_first,
        "finish_first" => &mut published.finish_first,
        "count_aborted_ack" => &mut published.count_aborted_ack,
        "abort_keeps_way" => &mut published.abort_keeps_way,
        _ => panic!("no published behaviour is called {name}"),
    };
    *switch = true;
}

impl World {
    fn new() -> Self {
        let mut coordinator = Coordinator::new(Settings {
            // Few, so that buckets fill.
            buckets: 2,
            sessions: SESSIONS as u32,
            bucket_key: std::array::from_fn(|i| (i as u32 + 1).wrapping_mul(0x9e37_79b9)),
            fingerprint_key: [1, 2],
        });
        coordinator.configure(&configuration());
        #[cfg(feature = "published")]
        publish(&mut coordinator.published);
        let mut world =
            Self { coordinator, now_ms: 1, sessions: Vec::new(), writes: BTreeMap::new(), cpus: Vec::new() };
        for index in 0..SESSIONS {
            world.sessions.push(Session { id: SessionId::new(1, index as u16), request: 0 });
            world.open(index);
        }
        world
    }

    fn open(&mut self, index: usize) {
        let id = self.sessions[index].id;
        assert!(self.coordinator.open_session(self.now_ms, id, SHARD, token(id), client(index)));
    }

    /// Closes a session if the coordinator lets it, and opens its successor.
    fn renew(&mut self, index: usize) {
        let Session { id, .. } = self.sessions[index];
        if let CloseOutcome::Closed { .. } = self.coordinator.close_session(id, u64::MAX) {
            let left = self.writes.values().any(|write| write.header.session == id && !write.finished);
            assert!(!left, "a session was closed with a write unresolved");
            self.sessions[index] = Session { id: SessionId::new(id.generation() + 1, index as u16), request: 0 };
            self.open(index);
        }
    }

    fn request(&self, op: Op, index: usize) -> Header {
        let Session { id, request } = self.sessions[index];
        let mut header = Header::new(op);
        header.shard = SHARD;
        header.session = id;
        header.request = request;
        header.token = token(id);
        header.set_reply_to(client(index));
        header
    }

    fn acknowledgement(&self, seq: u64, index: u8, status: Status) -> Vec<u8> {
        let write = &self.writes[&seq];
        let header = Header { op: Op::WReply, cnt: index, status: status.to_wire(), ..write.header };
        header.datagram(&write.key, &[0; 8])
    }

    /// One datagram up to the end of its first critical section.
    fn deliver(&mut self, from: Endpoint, datagram: &[u8]) {
        let packet = match Packet::parse(datagram) {
            Ok(packet) => packet,
            Err(error) => {
                assert!(matches!(self.coordinator.refuse(error), Action::Drop(_)));
                return;
            }
        };
        self.note_acknowledgement(from, &packet);
        let step = self.coordinator.begin(self.now_ms, from, &packet);
        self.advance(step, packet.header, packet.key.to_vec());
    }

    /// W_REPLY step 1, in the words of the specification: what counts as an acknowledgement.
    fn note_acknowledgement(&mut self, from: Endpoint, packet: &Packet<'_>) {
        let header = &packet.header;
        let Some(write) = self.writes.get_mut(&header.seq) else { return };
        let same = (header.shard, header.epoch) == (SHARD, EPOCH)
            && (header.session, header.request) == (write.header.session, write.header.request);
        let by_member = header.cnt < MEMBERS && from == member(header.cnt);
        if header.op == Op::WReply && same && by_member && header.status != Status::Aborted.to_wire() {
            write.acks |= 1 << header.cnt;
        }
    }

    /// Puts a packet on a CPU, or sees to what became of it. With every CPU taken, the packet that waits
    /// longest is run to its end.
    fn advance(&mut self, step: Step, header: Header, key: Vec<u8>) {
        match step {
            Step::Done(action) => return self.check(action, &header, &key),
            Step::Settled => {
                let write = self.writes.get_mut(&header.seq).expect("settled by its number");
                assert!(!std::mem::replace(&mut write.finished, true), "resolved twice");
                return;
            }
            _ => {}
        }
        if self.cpus.len() == CPUS {
            self.resume_to_the_end(0);
        }
        self.cpus.push((step, header, key));
    }

    /// The next critical section of the packet on a CPU; the packet with more left is then on the last CPU.
    fn resume(&mut self, at: usize) {
        let (step, header, key) = self.cpus.remove(at);
        let next = self.coordinator.resume(step);
        if let (Step::Order(_), Step::Fix(_) | Step::Record(_)) = (step, next) {
            self.ordered(header, &key);
        }
        self.advance(next, header, key);
    }

    fn resume_to_the_end(&mut self, at: usize) {
        let others = self.cpus.len() - 1;
        self.resume(at);
        while self.cpus.len() > others {
            self.resume(others);
        }
    }

    /// The agent begins to end a write, after it has made sure of every member.
    fn begin_settle(&mut self, seq: u64, aborts: bool) {
        let write = self.writes.get_mut(&seq).expect("chosen from them");
        let (header, key) = (write.header, write.key.clone());
        let committed = Settlement::Committed { status: Status::Ok.to_wire(), result: 0 };
        let settlement = if aborts { Settlement::Aborted } else { committed };
        if let Some(step) = self.coordinator.begin_settle(header.session, header.request, seq, settlement) {
            (write.aborted, write.acks) = if aborts { (true, write.acks) } else { (false, ALL_MEMBERS) };
            self.advance(step, header, key);
        }
    }

    fn run_all(&mut self) {
        while !self.cpus.is_empty() {
            self.resume(0);
        }
    }

    /// WRITE step 2 has given the write a number: the clock's.
    fn ordered(&mut self, mut header: Header, key: &[u8]) {
        let seq = self.coordinator.shards()[slot(SHARD)].clock;
        assert!(self.writes.last_key_value().is_none_or(|(last, _)| *last < seq), "a number was issued twice");
        let again = |write: &Write| (write.header.session, write.header.request) == (header.session, header.request);
        assert!(!self.writes.values().any(again), "one-effect: a request was ordered twice");
        header.seq = seq;
        header.epoch = EPOCH;
        let write = Write { key: key.to_vec(), header, acks: 0, aborted: false, finished: false };
        let decided = self.of_key(key).filter(|(_, write)| write.decided()).map(|(seq, _)| seq).max().unwrap_or(0);
        for (_, pending) in self.of_key(key).filter(|(seq, _)| *seq > decided) {
            assert!(!pending.is_conditional() && !write.is_conditional(), "a conditional write met a pending one");
        }
        self.writes.insert(seq, write);
    }

    fn of_key<'a>(&'a self, key: &'a [u8]) -> impl Iterator<Item = (u64, &'a Write)> {
        self.writes.iter().filter(move |(_, write)| write.key == key).map(|(seq, write)| (*seq, write))
    }

    fn check(&mut self, action: Action, request: &Header, key: &[u8]) {
        match action {
            Action::ToMember { index, to, header } => {
                assert_eq!(to, member(index));
                assert_eq!(request.op, Op::Read);
                self.check_bound(header.seq, key);
            }
            Action::ToMembers { header } => {
                let write = self.writes.get(&header.seq).expect("a number that was issued");
                assert_eq!((header.session, header.request), (write.header.session, write.header.request));
                assert!(!write.finished, "a committed write was propagated again");
            }
            Action::ToClient { to, header } => {
                let write = self.writes.get_mut(&header.seq).expect("a number that was issued");
                assert!(write.acks == ALL_MEMBERS, "committed-everywhere: a member has not acknowledged");
                assert_eq!(Some(to), write.header.reply_to());
                assert!(!std::mem::replace(&mut write.finished, true), "committed twice");
            }
            Action::ToSender { header, .. } if header.op == Op::WReply => {
                let write = self.writes.get(&header.seq).expect("a number that was issued");
                assert!(write.finished, "answered from the record before the commit was complete");
                assert!(!write.aborted, "answered, although it is without effect");
                assert_eq!((header.session, header.request), (write.header.session, write.header.request));
            }
            Action::ToSender { header, .. } => assert!(matches!(header.op, Op::RReject | Op::WReject)),
            Action::Drop(_) | Action::Control => {}
        }
    }

    /// What a read with this bound returns is committed, and nothing that a client knows to be written is missed.
    fn check_bound(&self, bound: u64, key: &[u8]) {
        assert!(bound <= self.coordinator.shards()[slot(SHARD)].clock, "the bound covers writes of the future");
        let newest = self.of_key(key).filter(|(seq, _)| *seq <= bound).last();
        assert!(newest.is_none_or(|(_, write)| write.decided()), "read-committed: the bound shows a pending write");
        let known = self.of_key(key).filter(|(_, write)| write.finished && !write.aborted).map(|(seq, _)| seq).max();
        assert!(known.is_none_or(|seq| seq <= bound), "linearizable: the bound hides a committed write");
    }

    fn check_stable(&mut self) {
        let stable = self.coordinator.scan(SHARD, SESSIONS).expect("in memory").stable;
        let early = self.writes.range(..=stable).any(|(_, write)| !write.decided());
        assert!(!early, "stable covers a write that a member has not acknowledged");
    }

    /// Faults are over: every write is acknowledged, and nothing is left.
    fn settle(&mut self) {
        self.run_all();
        let seqs: Vec<u64> = self.writes.keys().copied().collect();
        for seq in seqs {
            for index in 0..MEMBERS {
                self.deliver(member(index), &self.acknowledgement(seq, index, Status::Ok));
                self.run_all();
            }
        }
        assert!(self.writes.values().all(|write| write.finished), "clean-after: a write did not complete");
        let (buckets, words) = self.coordinator.buckets();
        assert!(words.iter().all(|word| word & u64::from(UP_BUCKET_DIRTY) == 0), "clean-after: a bucket is dirty");
        assert!(buckets.iter().flat_map(|bucket| &bucket.ways).all(|way| way.last == 0), "clean-after: a way is taken");
        assert!(!self.coordinator.sessions().iter().any(|record| unresolved(record.state)));
    }
}

fn key(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let number = input.arbitrary::<u8>()? % KEYS;
    Ok(vec![b'a' + number; 1 + usize::from(number)])
}

fn read(world: &World, input: &mut Unstructured<'_>) -> Result<(Endpoint, Vec<u8>)> {
    let session = input.choose_index(SESSIONS)?;
    Ok((client(session), world.request(Op::Read, session).datagram(&key(input)?, &[])))
}

/// A new write, or with small probability a request number that was used.
fn write(world: &mut World, input: &mut Unstructured<'_>) -> Result<(Endpoint, Vec<u8>)> {
    let session = input.choose_index(SESSIONS)?;
    if input.ratio(7, 8)? {
        world.sessions[session].request += 1;
    }
    let mut header = world.request(Op::Write, session);
    let kind = if input.arbitrary()? { Kind::Put } else { *input.choose(Kind::ALL)? };
    header.kind = kind.to_wire();
    header.flags = if input.arbitrary()? { FLAG_TTL } else { 0 };
    Ok((client(session), header.datagram(&key(input)?, &vec![0; Operand::prefix_len(kind, header.flags) + 8])))
}

fn acknowledgement(world: &World, input: &mut Unstructured<'_>) -> Result<Option<(Endpoint, Vec<u8>)>> {
    if world.writes.is_empty() {
        return Ok(None);
    }
    // The recent ones are more often of interest.
    let back = input.choose_index(world.writes.len().min(8))?;
    let seq = *world.writes.keys().rev().nth(back).expect("chosen within");
    let index = input.choose_index(usize::from(MEMBERS))? as u8;
    let status = *input.choose(&[Status::Ok, Status::NotFound, Status::Aborted])?;
    Ok(Some((member(index), world.acknowledgement(seq, index, status))))
}

fn bend(datagram: &mut [u8], input: &mut Unstructured<'_>) -> Result<()> {
    let at = input.choose_index(datagram.len())?;
    datagram[at] = input.arbitrary()?;
    Ok(())
}

fn command(world: &mut World, input: &mut Unstructured<'_>) -> Result<()> {
    let code: u8 = input.arbitrary()?;
    let packet = match code & 7 {
        0 => Some(read(world, input)?),
        1 | 2 => Some(write(world, input)?),
        3 | 4 => acknowledgement(world, input)?,
        5 => {
            if !world.cpus.is_empty() {
                world.resume(input.choose_index(world.cpus.len())?);
            }
            None
        }
        6 if code & 0x80 != 0 && !world.writes.is_empty() => {
            let back = input.choose_index(world.writes.len().min(8))?;
            let seq = *world.writes.keys().rev().nth(back).expect("chosen within");
            world.begin_settle(seq, input.arbitrary()?);
            None
        }
        6 => {
            world.now_ms += u64::from(input.arbitrary::<u16>()?);
            world.renew(input.choose_index(SESSIONS)?);
            None
        }
        _ => {
            let len = input.int_in_range(0..=120)?;
            Some((member(input.choose_index(8)? as u8), input.bytes(len)?.to_vec()))
        }
    };
    if let Some((mut from, mut datagram)) = packet {
        if code & 0x18 == 0x18 && !datagram.is_empty() {
            bend(&mut datagram, input)?;
        }
        if code & 0x60 == 0x60 {
            from = member(input.choose_index(8)? as u8);
        }
        world.deliver(from, &datagram);
    }
    world.check_stable();
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Unstructured::new(bytes);
    let mut world = World::new();
    while !input.is_empty() && command(&mut world, &mut input).is_ok() {}
    world.settle();
});
