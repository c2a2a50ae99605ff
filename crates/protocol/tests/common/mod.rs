//! One shard under epoch 1: a coordinator, three replicas, and sessions of clients.

#![allow(dead_code)]

pub mod checks;
pub mod oracle;
pub mod tables;
pub mod world;

use std::net::Ipv4Addr;

use underpass_abi::abi::up_config;
use underpass_protocol::{
    control::{self, ClusterKey, Configuration, Heartbeat, Install, MemberInfo},
    coordinator::{Coordinator, Settings, hash},
    replica::{self, Replica},
    wire::{Endpoint, Header, Kind, Op, Operand, SessionId},
};

pub const EPOCH: u32 = 1;
pub const SHARD: u32 = 1;
/// The clock when the epoch began; numbers in scenarios count from here.
pub const BASE: u64 = (EPOCH as u64) << 40;
pub const SESSIONS: u32 = 8;
pub const COORDINATOR: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 1), port: 5550 };
pub const NOW_MS: u64 = 1000;

pub fn member_endpoint(index: u8) -> Endpoint {
    Endpoint { addr: Ipv4Addr::new(10, 0, 1, index), port: 5550 }
}

pub fn client_endpoint(client: u16) -> Endpoint {
    Endpoint { addr: Ipv4Addr::new(10, 0, 2, client as u8), port: 40000 }
}

pub fn session(client: u16) -> SessionId {
    SessionId::new((u64::from(EPOCH) << 24) + u64::from(client) + 1, client)
}

pub fn token(client: u16) -> u64 {
    0x7000 + u64::from(client)
}

/// A coordinator of `members` replicas with a session for each of [`SESSIONS`] clients. Every key is in one bucket.
pub fn coordinator(members: u8) -> Coordinator {
    let mut coordinator =
        Coordinator::new(Settings { buckets: 1, sessions: SESSIONS, bucket_key: [1; 64], fingerprint_key: [2, 3] });
    let all = ((1u16 << members) - 1) as u8;
    let mut config = up_config {
        shard: SHARD,
        epoch: EPOCH,
        lease_until_ms: u64::MAX,
        must_ack: all,
        serving: all,
        must_ack_count: members,
        serving_count: members,
        ..up_config::default()
    };
    for index in 0..members {
        let at = usize::from(index);
        config.must_ack_list[at] = index;
        config.serving_list[at] = index;
        config.members[at].addr = u32::from(member_endpoint(index).addr).to_be();
        config.members[at].port = member_endpoint(index).port.to_be();
        config.members[at].next_hop = [2, 0, 0, 0, 0, index];
    }
    coordinator.configure(&config);
    for client in 0..SESSIONS as u16 {
        assert!(coordinator.open_session(0, session(client), SHARD, token(client), client_endpoint(client)));
    }
    coordinator
}

/// An empty replica that takes part as the member of this index, and has a lease for ever.
pub fn replica(index: u8, members: u8) -> Replica {
    let incarnation = 100 + u64::from(index);
    let replica = Replica::new(replica::Settings::simulated(incarnation, 1 << 20));
    let member = |index: u8| MemberInfo {
        index,
        id: u32::from(index),
        incarnation: 100 + u64::from(index),
        addr: member_endpoint(index).addr,
        port: member_endpoint(index).port,
        active: true,
    };
    let configuration = Configuration {
        shard: SHARD,
        epoch: EPOCH,
        tenure: EPOCH,
        lease_ms: 1 << 40,
        coordinator_addr: COORDINATOR.addr,
        coordinator_port: COORDINATOR.port,
        members: (0..members).map(member).collect(),
    };
    let install = Install { incarnation, index, reset: false, configuration, sessions: SESSIONS };
    let header = Header { shard: SHARD, epoch: EPOCH, ..Header::new(Op::Install) };
    let bytes = control::seal(control::emit(header, &install), ClusterKey::default());
    replica.step(NOW_MS, replica::Event::Datagram { from: COORDINATOR, bytes: &bytes });
    let bytes = heartbeat(0, Some(NOW_MS));
    replica.step(NOW_MS, replica::Event::Datagram { from: COORDINATOR, bytes: &bytes });
    assert_eq!(replica.membership().map(|membership| (membership.epoch, membership.index)), Some((EPOCH, index)));
    replica
}

/// A heartbeat; with `echo`, a lease for ever.
pub fn heartbeat(stable: u64, echo: Option<u64>) -> Vec<u8> {
    let header = Header { shard: SHARD, epoch: EPOCH, ..Header::new(Op::Heartbeat) };
    let heartbeat = Heartbeat { stable, time: NOW_MS, echo, donor: None };
    control::seal(control::emit(header, &heartbeat), ClusterKey::default())
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    Get,
    Put(String),
    Add(String),
    Replace(String),
    Append(String),
    Prepend(String),
    Delete,
    Incr(i64),
}

impl Ask {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Get | Self::Put(_) => Kind::Put,
            Self::Add(_) => Kind::Add,
            Self::Replace(_) => Kind::Replace,
            Self::Append(_) => Kind::Append,
            Self::Prepend(_) => Kind::Prepend,
            Self::Delete => Kind::Delete,
            Self::Incr(_) => Kind::Incr,
        }
    }

    pub fn data(&self) -> &str {
        match self {
            Self::Put(v) | Self::Add(v) | Self::Replace(v) | Self::Append(v) | Self::Prepend(v) => v,
            Self::Get | Self::Delete | Self::Incr(_) => "",
        }
    }

    /// The client's datagram.
    pub fn datagram(&self, client: u16, request: u64, key: &str) -> Vec<u8> {
        let mut header = Header {
            shard: SHARD,
            session: session(client),
            token: token(client),
            request,
            ..Header::new(if *self == Self::Get { Op::Read } else { Op::Write })
        };
        header.set_reply_to(client_endpoint(client));
        if *self == Self::Get {
            return header.datagram(key.as_bytes(), &[]);
        }
        header.kind = self.kind().to_wire();
        let delta = if let Self::Incr(delta) = self { *delta } else { 0 };
        let mut value = vec![];
        let operand = Operand { ttl_ms: None, expected: 0, delta, data: self.data().as_bytes() };
        header.flags = operand.emit(self.kind(), &mut value);
        header.datagram(key.as_bytes(), &value)
    }
}

/// The first request number from `from` on whose read goes to the member of this index.
pub fn request_routed_to(client: u16, from: u64, index: u8, members: u8) -> u64 {
    let goes_there = |request: &u64| hash::spread(session(client).0, *request, NOW_MS, members) == index;
    (from..).find(goes_there).expect("requests are spread over all members")
}

/// A, B, C, ...
pub fn replica_name(index: u8) -> char {
    char::from(b'A' + index)
}
