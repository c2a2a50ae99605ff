//! Scenarios with a scripted agent and coordinator, and a property over a network and a coordinator that misbehave.

mod hostile;
mod scenarios;

use super::*;
use crate::control::Configuration;
use crate::wire::{Endpoint, Operand};

const MS: u64 = 1_000_000;
const SHARD: u32 = 7;

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
        coordinator_addr: [10, 0, 0, 1].into(),
        coordinator_port: 5550,
        members: Vec::new(),
    }
}

/// An answer to a control packet.
fn control_answer<T: serde::Serialize>(question: &Header, op: Op, message: &T) -> Vec<u8> {
    control::emit(Header { op, ..*question }, message)
}

/// The answer that a data path makes of a request: the packet turned round.
fn turned(question: &Packet<'_>, op: Op, status: u8, seq: u64, value: &[u8]) -> Vec<u8> {
    Header { op, status, seq, ..question.header }.datagram(question.key, value)
}
