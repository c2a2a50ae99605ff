//! One request and its answers over rtnetlink, without an event loop.

use std::io;

use netlink_packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// Larger than any single message that routes, neighbours or links produce.
const BUFFER_LEN: usize = 64 << 10;

/// A blocking socket for requests. Belongs to the network namespace of the thread that made it.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens the socket. No privilege is needed for look-ups.
    pub fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0, buffer: vec![0; BUFFER_LEN] })
    }

    /// Sends one request that is no dump and returns its answer; `None` for a plain acknowledgement (`NLM_F_ACK`).
    ///
    /// # Errors
    /// The kernel's error for this request, or that of the socket.
    pub fn request(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Option<RouteNetlinkMessage>> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut request = NetlinkMessage::from(message);
        request.header.flags = NLM_F_REQUEST | flags;
        request.header.sequence_number = self.sequence;
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        loop {
            let len = self.socket.recv(&mut &mut self.buffer[..], 0)?;
            for answer in messages(&self.buffer[..len]) {
                let answer = answer?;
                // An answer to an earlier request whose reading was cut short by an error.
                if answer.header.sequence_number != self.sequence {
                    continue;
                }
                return match answer.payload {
                    NetlinkPayload::InnerMessage(message) => Ok(Some(message)),
                    NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
                    _ => Ok(None),
                };
            }
        }
    }
}

/// The messages of one datagram.
pub(crate) fn messages(
    mut datagram: &[u8],
) -> impl Iterator<Item = io::Result<NetlinkMessage<RouteNetlinkMessage>>> + '_ {
    std::iter::from_fn(move || {
        if datagram.is_empty() {
            return None;
        }
        let parsed = NetlinkMessage::<RouteNetlinkMessage>::deserialize(datagram);
        // Every message is at least a header; an unparsable one ends the datagram.
        let len = parsed.as_ref().map_or(usize::MAX, |m| (m.header.length as usize).max(16).next_multiple_of(4));
        datagram = &datagram[len.min(datagram.len())..];
        Some(parsed.map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string())))
    })
}
