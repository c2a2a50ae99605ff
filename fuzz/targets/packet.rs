//! A datagram from anybody: parsing never panics, and what parses is what was sent.

#![no_main]

use libfuzzer_sys::fuzz_target;
use underpass_protocol::wire::{HEADER_LEN, Kind, Operand, Packet};

fuzz_target!(|datagram: &[u8]| {
    let Ok(packet) = Packet::parse(datagram) else { return };
    assert_eq!(packet.header.datagram_len(), datagram.len());
    assert_eq!(packet.header.datagram(packet.key, packet.value), datagram, "parsing loses nothing");
    if let Some(endpoint) = packet.header.reply_to() {
        let mut header = packet.header;
        header.set_reply_to(endpoint);
        assert_eq!(header, packet.header);
    }
    let Some(kind) = Kind::from_wire(packet.header.kind) else { return };
    check_operand(kind, packet.header.flags, packet.value);
    assert!(datagram.len() >= HEADER_LEN);
});

fn check_operand(kind: Kind, flags: u8, value: &[u8]) {
    let Some(operand) = Operand::parse(kind, flags, value) else {
        assert!(value.len() < Operand::prefix_len(kind, flags), "long enough, and refused");
        return;
    };
    assert_eq!(operand.data.len() + Operand::prefix_len(kind, flags), value.len());
    let mut again = Vec::new();
    let flags_again = operand.emit(kind, &mut again);
    assert_eq!(again, value, "parsing loses nothing");
    assert_eq!(Operand::parse(kind, flags_again, &again), Some(operand));
}
