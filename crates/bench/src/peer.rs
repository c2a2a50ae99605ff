//! The two protocols that `underpass bench replica` speaks: ours, and memcached's over UDP.

use underpass_abi::wire::UP_EPOCH_SHIFT;
use underpass_protocol::wire::{Endpoint, HEADER_LEN, Header, Op, Packet, SessionId, Status};

use crate::{
    bed::SHARD,
    workload::{Workload, key, key_into, value},
};

/// Most requests under way at any time.
pub const SLOTS_MAX: usize = 1 << (u16::BITS - TURN_BITS);
const TURN_BITS: u32 = 4;

/// Names one of the requests under way, and its slot's turn: so late an answer that its slot is in use again is told from
/// the one that is waited for.
pub fn tag(slot: usize, turn: u16) -> u16 {
    (slot as u16) << TURN_BITS | turn & ((1 << TURN_BITS) - 1)
}

/// The slot of a tag.
pub fn slot_of(tag: u16) -> usize {
    usize::from(tag >> TURN_BITS)
}

/// What a server speaks.
pub trait Protocol {
    /// A request to store an item.
    fn store(&mut self, tag: u16, item: u64, out: &mut Vec<u8>);
    /// A request for an item.
    fn get(&mut self, tag: u16, item: u64, out: &mut Vec<u8>);
    /// The tag of the request that a datagram answers, and the value in it (empty: stored). `None`: it is no such answer.
    fn answer<'a>(&self, datagram: &'a [u8]) -> Option<(u16, &'a [u8])>;
}

/// The epoch that the client, as its coordinator, takes the replica into.
pub const EPOCH: u32 = 1;

/// Our own: the client plays the coordinator.
pub struct Underpass {
    workload: Workload,
    reply_to: Endpoint,
    requests: u64,
    seq: u64,
    buffer: Vec<u8>,
}

impl Underpass {
    /// Answers go to `reply_to`; writes are numbered from the epoch's floor.
    pub fn new(workload: Workload, reply_to: Endpoint) -> Self {
        Self { workload, reply_to, requests: 0, seq: u64::from(EPOCH) << UP_EPOCH_SHIFT, buffer: Vec::new() }
    }

    /// Request numbers carry the tag in their low bits; they grow in every session, as they must.
    const TAG_BITS: u32 = 16;

    fn header(&mut self, op: Op, tag: u16) -> Header {
        self.requests += 1;
        let mut header = Header::new(op);
        header.epoch = EPOCH;
        header.shard = SHARD;
        header.session = SessionId::new(1 << 24 | 1, slot_of(tag) as u16);
        header.request = self.requests << Self::TAG_BITS | u64::from(tag);
        header.time = 1_700_000_000_000;
        header.seq = self.seq;
        header.set_reply_to(self.reply_to);
        header
    }
}

impl Protocol for Underpass {
    fn store(&mut self, tag: u16, item: u64, out: &mut Vec<u8>) {
        self.seq += 1;
        value(item, self.workload.value_size, &mut self.buffer);
        let datagram = self.header(Op::Write, tag).datagram(&self.workload.key(item), &self.buffer);
        out.clear();
        out.extend(datagram);
    }

    fn get(&mut self, tag: u16, item: u64, out: &mut Vec<u8>) {
        let mut header = self.header(Op::Read, tag);
        header.key_len = self.workload.key_size as u16;
        key_into(item, self.workload.key_size, &mut self.buffer);
        out.resize(HEADER_LEN, 0);
        header.emit(out);
        out.extend(&self.buffer);
    }

    fn answer<'a>(&self, datagram: &'a [u8]) -> Option<(u16, &'a [u8])> {
        let packet = Packet::parse(datagram).ok()?;
        let tag = packet.header.request as u16;
        let ok = packet.header.status == Status::Ok.to_wire();
        match packet.header.op {
            Op::RReply if ok => Some((tag, packet.value)),
            // What it has as value is of no meaning.
            Op::WReply if ok => Some((tag, &[])),
            _ => None,
        }
    }
}

/// memcached's text protocol, behind its 8-byte UDP header.
pub struct Memcached {
    workload: Workload,
    buffer: Vec<u8>,
}

impl Memcached {
    /// For this workload.
    pub fn new(workload: Workload) -> Self {
        Self { workload, buffer: Vec::new() }
    }

    fn begin(tag: u16, out: &mut Vec<u8>) {
        out.clear();
        out.extend(tag.to_be_bytes());
        out.extend([0, 0, 0, 1, 0, 0]);
    }
}

impl Protocol for Memcached {
    fn store(&mut self, tag: u16, item: u64, out: &mut Vec<u8>) {
        Self::begin(tag, out);
        value(item, self.workload.value_size, &mut self.buffer);
        out.extend(b"set ");
        out.extend(key(item, self.workload.key_size));
        out.extend(format!(" 0 0 {}\r\n", self.buffer.len()).as_bytes());
        out.extend(&self.buffer);
        out.extend(b"\r\n");
    }

    fn get(&mut self, tag: u16, item: u64, out: &mut Vec<u8>) {
        Self::begin(tag, out);
        key_into(item, self.workload.key_size, &mut self.buffer);
        out.extend(b"get ");
        out.extend(&self.buffer);
        out.extend(b"\r\n");
    }

    fn answer<'a>(&self, datagram: &'a [u8]) -> Option<(u16, &'a [u8])> {
        let (head, body) = datagram.split_first_chunk::<8>()?;
        let tag = u16::from_be_bytes([head[0], head[1]]);
        if body == b"STORED\r\n" {
            return Some((tag, &[]));
        }
        let line = body.iter().position(|byte| *byte == b'\n')?;
        let data = body.get(line + 1..line + 1 + self.workload.value_size)?;
        let whole = body.starts_with(b"VALUE ") && &body[line + 1 + data.len()..] == b"\r\nEND\r\n";
        whole.then_some((tag, data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_name_slot_and_turn() {
        assert_eq!(slot_of(tag(SLOTS_MAX - 1, 21)), SLOTS_MAX - 1);
        assert_ne!(tag(7, 0), tag(7, 15));
        assert_eq!(tag(7, 0), tag(7, 16), "turns come round");
    }

    #[test]
    fn answers_are_recognised_and_refusals_are_not() {
        let workload = Workload { value_size: 20, ..Workload::default() };
        let memcached = Memcached::new(workload);
        let head = [0, 5, 0, 0, 0, 1, 0, 0];
        let answer = |body: &[u8]| memcached.answer(&[&head[..], body].concat()).map(|(tag, data)| (tag, data.len()));
        assert_eq!(answer(b"STORED\r\n"), Some((5, 0)));
        assert_eq!(answer(b"VALUE k 0 20\r\n0000000000000007vvvv\r\nEND\r\n"), Some((5, 20)));
        for wrong in [&b"END\r\n"[..], b"VALUE k 0 20\r\n0000", b"ERROR\r\n", b"SERVER_ERROR out of memory\r\n"] {
            assert_eq!(answer(wrong), None);
        }

        let reply_to = Endpoint { addr: std::net::Ipv4Addr::LOCALHOST, port: 9 };
        let mut ours = Underpass::new(workload, reply_to);
        let mut request = Vec::new();
        ours.get(7, 0xabc, &mut request);
        let packet = Packet::parse(&request).unwrap();
        assert_eq!((packet.header.op, packet.key), (Op::Read, &b"0000000000000abc"[..]));
        let reply = Header { op: Op::RReply, ..packet.header }.datagram(packet.key, b"value");
        assert_eq!(ours.answer(&reply), Some((7, &b"value"[..])));
        let reject = Header { op: Op::RReject, ..packet.header }.datagram(packet.key, b"");
        assert_eq!(ours.answer(&reject), None);
        let missing = Header { op: Op::RReply, status: Status::NotFound.to_wire(), ..packet.header };
        assert_eq!(ours.answer(&missing.datagram(packet.key, b"")), None);
        ours.store(7, 3, &mut request);
        let packet = Packet::parse(&request).unwrap();
        assert_eq!(
            (packet.header.op, packet.header.seq, packet.value.len()),
            (Op::Write, (1 << UP_EPOCH_SHIFT) + 1, 20)
        );
    }
}
