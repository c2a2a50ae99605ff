//! Ethernet, IPv4 and UDP around a datagram: building frames and taking them apart, for tests and generators.

use std::net::Ipv4Addr;

/// Bytes of Ethernet, IPv4 and UDP headers in front of a datagram.
pub const OVERHEAD: usize = 14 + 20 + 8;

/// Who a frame is from and for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Source MAC address.
    pub source_mac: [u8; 6],
    /// Destination MAC address.
    pub destination_mac: [u8; 6],
    /// Source address and port.
    pub source: (Ipv4Addr, u16),
    /// Destination address and port.
    pub destination: (Ipv4Addr, u16),
}

/// The Internet checksum's sum over bytes, folded to 16 bits and not inverted.
fn sum(bytes: &[u8], start: u32) -> u16 {
    let mut sum = u64::from(start);
    for pair in bytes.chunks(2) {
        sum += u64::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn udp_sum(ip: &[u8], udp: &[u8]) -> u16 {
    let pseudo = u32::from(sum(&ip[12..20], 17)) + udp.len() as u32;
    sum(udp, pseudo)
}

/// A frame with correct checksums.
pub fn build(to: &Addresses, datagram: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(OVERHEAD + datagram.len());
    frame.extend_from_slice(&to.destination_mac);
    frame.extend_from_slice(&to.source_mac);
    frame.extend_from_slice(&[0x08, 0x00]);
    let total = (28 + datagram.len()) as u16;
    frame.extend_from_slice(&[0x45, 0]);
    frame.extend_from_slice(&total.to_be_bytes());
    frame.extend_from_slice(&[0, 0, 0x40, 0, 63, 17, 0, 0]);
    frame.extend_from_slice(&to.source.0.octets());
    frame.extend_from_slice(&to.destination.0.octets());
    frame.extend_from_slice(&to.source.1.to_be_bytes());
    frame.extend_from_slice(&to.destination.1.to_be_bytes());
    frame.extend_from_slice(&(total - 20).to_be_bytes());
    frame.extend_from_slice(&[0, 0]);
    frame.extend_from_slice(datagram);
    let check = !sum(&frame[14..34], 0);
    frame[24..26].copy_from_slice(&check.to_be_bytes());
    let check = match !udp_sum(&frame[14..34], &frame[34..]) {
        0 => 0xffff,
        check => check,
    };
    frame[40..42].copy_from_slice(&check.to_be_bytes());
    frame
}

/// Whether IP and UDP checksums hold; a UDP checksum of zero (none) holds.
pub fn checksums_hold(frame: &[u8]) -> bool {
    sum(&frame[14..34], 0) == 0xffff && (frame[40..42] == [0, 0] || udp_sum(&frame[14..34], &frame[34..]) == 0xffff)
}

/// Who a frame is from and for, and its datagram; `None` if it is no whole IPv4 UDP frame without options.
pub fn parse(frame: &[u8]) -> Option<(Addresses, &[u8])> {
    if frame.len() < OVERHEAD || frame[12..15] != [8, 0, 0x45] || frame[23] != 17 {
        return None;
    }
    let addr = |at: usize| Ipv4Addr::new(frame[at], frame[at + 1], frame[at + 2], frame[at + 3]);
    let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let len = usize::from(port(38));
    let datagram = frame.get(OVERHEAD..34 + len)?;
    let addresses = Addresses {
        destination_mac: frame[0..6].try_into().ok()?,
        source_mac: frame[6..12].try_into().ok()?,
        source: (addr(26), port(34)),
        destination: (addr(30), port(36)),
    };
    Some((addresses, datagram))
}
