//! The document of a control packet: parsing never panics, and a document that parses survives being sent on.

#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use serde::{Serialize, de::DeserializeOwned};
use underpass_protocol::{
    control::{self, Close, Closed, Configuration, Heartbeat, HeartbeatAck, Install, Installed, Open, Opened},
    wire::{Header, Op, Packet},
};

// The first byte chooses the type, the rest is the document.
fuzz_target!(|input: &[u8]| {
    let Some((kind, document)) = input.split_first() else { return };
    match kind % 9 {
        0 => survives::<Open>(Op::Open, document),
        1 => survives::<Opened>(Op::Opened, document),
        2 => survives::<Close>(Op::Close, document),
        3 => survives::<Closed>(Op::Closed, document),
        4 => survives::<Install>(Op::Install, document),
        5 => survives::<Installed>(Op::Installed, document),
        6 => survives::<Heartbeat>(Op::Heartbeat, document),
        7 => survives::<HeartbeatAck>(Op::HeartbeatAck, document),
        _ => survives_configuration(document),
    }
});

fn parse<T: DeserializeOwned>(op: Op, document: &[u8]) -> Option<T> {
    let datagram = Header::new(op).datagram(&[], document);
    control::parse(&Packet::parse(&datagram).expect("well-formed"))
}

fn survives<T: Serialize + DeserializeOwned + PartialEq + Debug>(op: Op, document: &[u8]) {
    let Some(message) = parse::<T>(op, document) else { return };
    let datagram = control::emit(Header::new(op), &message);
    let again = control::parse(&Packet::parse(&datagram).expect("well-formed"));
    assert_eq!(again, Some(message));
}

fn survives_configuration(document: &[u8]) {
    survives::<Configuration>(Op::Install, document);
    if let Some(configuration) = parse::<Configuration>(Op::Install, document) {
        // Any answer will do; looking must not panic.
        let _ = configuration.validate();
    }
}
