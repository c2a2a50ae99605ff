//! The xdp data path on a veth, driven as its agent drives it: members come and go while writes are under way, on every
//! write path. Whatever leaves the device is looked at on its peer. Needs root; runs under Debian's kernels too.

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use common::{WAIT, pass_everything, raw::Port, run};
use nix::sched::{CloneFlags, unshare};
use underpass_abi::abi::{self, up_config};
use underpass_coordinator::{
    config::WritePath,
    datapath::DataPath,
    xdp::{XdpDataPath, XdpOptions},
};
use underpass_datapath::{
    attach::Mode,
    frame::{self, Addresses},
};
use underpass_protocol::{
    agent::Tables as _,
    coordinator::{Settings, opened},
    wire::{Endpoint, Header, Op, Packet, Reason, SessionId, Status},
};

const SHARD: u32 = 3;
const COORDINATOR: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 1, 0, 1), port: 5550 };
const COORDINATOR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const CLIENT: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 1, 0, 9), port: 4000 };
const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const TOKEN: u64 = 77;
/// How long nothing must come.
const MOMENT: Duration = Duration::from_millis(30);

fn member(index: u8) -> (Endpoint, [u8; 6]) {
    (Endpoint { addr: Ipv4Addr::new(10, 1, 0, 20 + index), port: 5600 + u16::from(index) }, [2, 0, 0, 0, 1, index])
}

fn config(epoch: u32, members: &[u8]) -> up_config {
    let mut config = up_config {
        shard: SHARD,
        epoch,
        lease_until_ms: u64::MAX,
        must_ack_count: members.len() as u8,
        serving_count: members.len() as u8,
        ..up_config::default()
    };
    for (at, &index) in members.iter().enumerate() {
        config.must_ack |= 1 << index;
        (config.must_ack_list[at], config.serving_list[at]) = (index, index);
        let (to, at) = (member(index).0, &mut config.members[usize::from(index)]);
        (at.addr, at.port) = (u32::from(to.addr).to_be(), to.port.to_be());
    }
    config.serving = config.must_ack;
    config
}

fn hops(but: Option<u8>) -> BTreeMap<Ipv4Addr, [u8; 6]> {
    (0..8).filter(|index| Some(*index) != but).map(|index| (member(index).0.addr, member(index).1)).collect()
}

/// The coordinator, and the wire that its device is on.
struct Bed {
    path: XdpDataPath,
    wire: Port,
    session: SessionId,
    request: u64,
}

impl Bed {
    /// `None`, said aloud, without the privilege that it takes.
    fn new(write_path: WritePath) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("not run: kernel programs need root");
            return None;
        }
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        run("ip link add c0 address 02:00:00:00:00:01 type veth peer name p0");
        run("ip addr add 10.1.0.1/24 dev c0");
        run("ethtool -K c0 tx off gso off");
        for device in ["lo", "c0", "p0"] {
            run(&format!("ip link set {device} up"));
        }
        // The published design's user space sends by the kernel's own tables.
        for (to, mac) in (0..8).map(member) {
            let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
            run(&format!("ip neigh add {} lladdr {mac} dev c0", to.addr));
        }
        pass_everything("p0");
        let settings = Settings { buckets: 64, sessions: 64, bucket_key: [5; 64], fingerprint_key: [6, 7] };
        let options = XdpOptions {
            listen: COORDINATOR,
            device: "c0".to_owned(),
            mode: Mode::Native,
            write_path,
            pinned: false,
            settings,
        };
        let mut path = XdpDataPath::start(options).unwrap();
        path.set_next_hops(hops(None));
        let session = SessionId::new(1 << 24, 5);
        assert_eq!(path.load(5, &opened(0, session, SHARD, TOKEN, CLIENT)), Ok(true));
        Some(Self { path, wire: Port::open("p0"), session, request: 0 })
    }

    fn send(&self, from: (Endpoint, [u8; 6]), datagram: &[u8]) {
        let addresses = Addresses {
            source_mac: from.1,
            destination_mac: COORDINATOR_MAC,
            source: (from.0.addr, from.0.port),
            destination: (COORDINATOR.addr, COORDINATOR.port),
        };
        self.wire.send(&frame::build(&addresses, datagram));
    }

    /// The client sends its write, the last one again or a new one.
    fn write(&mut self, again: bool) {
        self.request += u64::from(!again);
        let mut header = Header {
            shard: SHARD,
            session: self.session,
            token: TOKEN,
            request: self.request,
            ..Header::new(Op::Write)
        };
        header.set_reply_to(CLIENT);
        self.send((CLIENT, CLIENT_MAC), &header.datagram(b"key", b"value"));
    }

    /// What the coordinator sends until there were `count` frames, and then for a moment more.
    fn sent(&self, count: usize) -> Vec<(Addresses, Header)> {
        let mut sent = Vec::new();
        let mut until = Instant::now() + if count == 0 { MOMENT } else { WAIT };
        while let Some(bytes) = self.wire.receive(until) {
            let Some((addresses, datagram)) = frame::parse(&bytes) else { continue };
            if addresses.source != (COORDINATOR.addr, COORDINATOR.port) {
                continue;
            }
            assert!(frame::checksums_hold(&bytes), "{addresses:?}");
            assert_eq!(addresses.source_mac, COORDINATOR_MAC);
            let packet = Packet::parse(datagram).unwrap();
            assert_eq!(packet.key, b"key");
            sent.push((addresses, packet.header));
            if sent.len() == count {
                until = Instant::now() + MOMENT;
            }
        }
        sent
    }

    /// Takes the clones of the write, one for each of these members, and nothing else.
    fn clones(&self, epoch: u32, members: &[u8]) -> Header {
        let sent = self.sent(members.len());
        let to: BTreeSet<_> = sent.iter().map(|(to, _)| (to.destination, to.destination_mac)).collect();
        let expected = members.iter().map(|index| member(*index));
        let expected: BTreeSet<_> = expected.map(|(to, mac)| ((to.addr, to.port), mac)).collect();
        assert_eq!((sent.len(), to), (members.len(), expected));
        for (to, header) in &sent {
            assert_eq!((header.op, header.epoch, header.request), (Op::Write, epoch, self.request));
            assert_eq!(to.destination.0, member(header.cnt).0.addr, "its clone carries a member's own index");
        }
        sent[0].1
    }

    fn acknowledge(&self, ordered: Header, index: u8) {
        let header = Header { op: Op::WReply, cnt: index, status: Status::Ok.to_wire(), ..ordered };
        self.send(member(index), &header.datagram(b"key", b""));
    }

    fn answer(&self) -> Header {
        let sent = self.sent(1);
        assert_eq!(sent.len(), 1);
        assert_eq!((sent[0].0.destination, sent[0].0.destination_mac), ((CLIENT.addr, CLIENT.port), CLIENT_MAC));
        sent[0].1
    }

    /// A write from its order to its reply, under these members.
    fn commits(&mut self, epoch: u32, members: &[u8]) {
        self.write(false);
        let ordered = self.clones(epoch, members);
        for (at, index) in members.iter().enumerate() {
            if at + 1 == members.len() {
                assert!(self.sent(0).is_empty(), "not before the last member's acknowledgement");
            }
            self.acknowledge(ordered, *index);
        }
        let answer = self.answer();
        assert_eq!((answer.op, answer.seq, answer.request), (Op::WReply, ordered.seq, self.request));
    }

    fn count(&mut self, counter: u32) -> u64 {
        self.path.counters().unwrap()[counter as usize]
    }
}

fn members_come_and_go(write_path: WritePath) {
    let Some(mut bed) = Bed::new(write_path) else { return };
    let all: Vec<u8> = (0..8).collect();
    // Under one epoch and under several; with holes; from one to eight and back.
    let changes: [(u32, &[u8]); 7] =
        [(1, &[0]), (1, &[0, 2]), (2, &[0, 2, 5]), (2, &all), (3, &[6]), (4, &[1, 3, 4, 7]), (5, &[0, 1, 2])];
    for (epoch, members) in changes {
        bed.path.configure(&config(epoch, members)).unwrap();
        bed.commits(epoch, members);
    }

    // A write that is under way when member 5 comes and member 1 goes: both must acknowledge, then 5 alone.
    bed.write(false);
    let old = bed.clones(5, &[0, 1, 2]);
    bed.acknowledge(old, 0);
    bed.path.forget_acks(SHARD, 5).unwrap();
    bed.path.configure(&config(6, &[0, 1, 2, 5])).unwrap();
    bed.acknowledge(old, 1);
    bed.write(true);
    let new = bed.clones(6, &[0, 1, 2, 5]);
    assert_eq!((new.seq, new.time), (old.seq, old.time));
    bed.path.configure(&config(6, &[0, 2, 5])).unwrap();
    bed.acknowledge(new, 1);
    bed.acknowledge(new, 5);
    assert!(bed.sent(0).is_empty(), "member 1 does not count any more, member 2 is missing");
    bed.acknowledge(new, 2);
    assert_eq!(bed.answer().seq, old.seq);

    // A member that cannot be sent to keeps nobody else from being sent to; wherever it is in the list.
    for unknown in [0, 2, 5] {
        bed.path.set_next_hops(hops(Some(unknown)));
        let others: Vec<u8> = [0, 2, 5].into_iter().filter(|index| *index != unknown).collect();
        let dropped = bed.count(abi::UP_COUNT_DROP_NEXT_HOP);
        bed.write(false);
        let ordered = bed.clones(6, &others);
        assert_eq!(bed.count(abi::UP_COUNT_DROP_NEXT_HOP), dropped + 1);
        bed.path.set_next_hops(hops(None));
        bed.write(true);
        assert_eq!(bed.clones(6, &[0, 2, 5]).seq, ordered.seq);
        [0, 2, 5].iter().for_each(|index| bed.acknowledge(ordered, *index));
        assert_eq!(bed.answer().seq, ordered.seq);
    }
    bed.path.set_next_hops(BTreeMap::new());
    bed.write(false);
    assert!(bed.sent(0).is_empty(), "nobody can be sent to");
    bed.path.set_next_hops(hops(None));

    // Cleared, the shard is nobody's; loaded, its session goes on.
    bed.path.clear(SHARD).unwrap();
    bed.write(true);
    assert_eq!(Reason::from_wire(bed.answer().status), Some(Reason::Shard));
    bed.path.configure(&config(7, &[4])).unwrap();
    bed.write(true);
    assert_eq!(Reason::from_wire(bed.answer().status), Some(Reason::Session));
    assert_eq!(bed.path.load(5, &opened(0, bed.session, SHARD, TOKEN, CLIENT)), Ok(true));
    bed.commits(7, &[4]);
    Box::new(bed.path).stop().unwrap();
}

#[test]
fn members_come_and_go_under_broadcast() {
    members_come_and_go(WritePath::Broadcast);
}

#[test]
fn members_come_and_go_under_tc() {
    members_come_and_go(WritePath::Tc);
}

#[test]
fn members_come_and_go_under_the_published_write_path() {
    members_come_and_go(WritePath::Published);
}
