//! Scenarios with a scripted agent and coordinator, and a property over a network and a coordinator that misbehave.

mod hostile;
mod moves;
mod scenarios;
mod talk;

use std::net::Ipv4Addr;

use super::*;
use crate::control::{Configuration, MemberInfo};
use crate::wire::Operand;

const MS: u64 = 1_000_000;
const SHARD: u32 = 7;

const COORDINATOR: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 1), port: 5550 };
/// The coordinator that takes over.
const OTHER: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 2), port: 5550 };

fn here() -> Endpoint {
    Endpoint { addr: [10, 0, 0, 9].into(), port: 4000 }
}

fn write(kind: Kind, key: &'static [u8], data: &'static [u8]) -> Request<'static> {
    Request::Write { kind, key, operand: Operand { ttl_ms: None, expected: 0, delta: 0, data } }
}

fn configuration() -> Configuration {
    Configuration {
        shard: SHARD,
        epoch: 1,
        tenure: 1,
        lease_ms: 1000,
        coordinator_addr: COORDINATOR.addr,
        coordinator_port: COORDINATOR.port,
        members: (1..4).map(member).collect(),
    }
}

fn member(id: u8) -> MemberInfo {
    let addr = [10, 0, 1, id].into();
    MemberInfo { index: id, id: id.into(), incarnation: 90 + u64::from(id), addr, port: 5551, active: true }
}

/// An answer to a control packet.
fn control_answer<T: serde::Serialize>(question: &Header, op: Op, message: &T) -> Vec<u8> {
    control::emit(Header { op, ..*question }, message)
}

/// The answer that a data path makes of a request: the packet turned round.
fn turned(question: &Packet<'_>, op: Op, status: u8, seq: u64, value: &[u8]) -> Vec<u8> {
    Header { op, status, seq, ..question.header }.datagram(question.key, value)
}
