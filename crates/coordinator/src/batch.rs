//! Batches of datagrams through `recvmmsg` and `sendmmsg`, with every buffer allocated once.

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsRawFd, BorrowedFd},
};

use underpass_protocol::wire::{Endpoint, HEADER_LEN, MEMBERS_MAX};

/// Datagrams received at most at a time.
pub const BATCH: usize = 64;
/// Room for one: more than the longest datagram of the protocol, so that a longer one is seen to be longer.
pub const BUFFER_LEN: usize = 2048;
/// Datagrams sent at most for one batch: every one received goes to every member. The kernel takes 1024 a call.
const SEND_MAX: usize = BATCH * MEMBERS_MAX;

/// What a batch of datagrams comes in and goes out through.
pub struct Batch {
    buffers: Box<[[u8; BUFFER_LEN]]>,
    senders: Box<[libc::sockaddr_in]>,
    received: Box<[libc::mmsghdr]>,
    receive_parts: Box<[libc::iovec]>,
    sends: Vec<Send>,
    /// Headers of clones: the payload behind them is shared.
    headers: Box<[[u8; HEADER_LEN]]>,
    headers_used: usize,
    send_names: Box<[libc::sockaddr_in]>,
    send_parts: Box<[[libc::iovec; 2]]>,
    sent: Box<[libc::mmsghdr]>,
}

/// One datagram to be sent.
#[derive(Clone, Copy)]
struct Send {
    to: Endpoint,
    /// Index of the received datagram that it is made of.
    from: u16,
    /// Bytes of it.
    len: u16,
    /// A header of its own in front of that datagram's payload.
    header: Option<u16>,
}

// SAFETY: the pointers in the header and part arrays are set from this value's own boxes before each system call and not
// read otherwise.
unsafe impl std::marker::Send for Batch {}

/// A datagram of a batch.
pub struct Received<'a> {
    /// Its sender; `None`: not IPv4.
    pub from: Option<Endpoint>,
    /// Its bytes.
    pub datagram: &'a [u8],
    /// It was longer than the buffer.
    pub cut: bool,
}

impl Batch {
    /// Buffers for [`BATCH`] datagrams.
    pub fn new() -> Self {
        // SAFETY: all-zero bytes are valid values of these plain C structures.
        let (name, header, part) = unsafe {
            (
                std::mem::zeroed::<libc::sockaddr_in>(),
                std::mem::zeroed::<libc::mmsghdr>(),
                std::mem::zeroed::<libc::iovec>(),
            )
        };
        Self {
            buffers: vec![[0; BUFFER_LEN]; BATCH].into(),
            senders: vec![name; BATCH].into(),
            received: vec![header; BATCH].into(),
            receive_parts: vec![part; BATCH].into(),
            sends: Vec::with_capacity(SEND_MAX),
            headers: vec![[0; HEADER_LEN]; SEND_MAX].into(),
            headers_used: 0,
            send_names: vec![name; SEND_MAX].into(),
            send_parts: vec![[part; 2]; SEND_MAX].into(),
            sent: vec![header; SEND_MAX].into(),
        }
    }

    /// Waits for a datagram, takes what else is there, and returns how many. Forgets what was to be sent.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.sends.clear();
        self.headers_used = 0;
        for i in 0..BATCH {
            self.receive_parts[i] = libc::iovec { iov_base: self.buffers[i].as_mut_ptr().cast(), iov_len: BUFFER_LEN };
            let header = &mut self.received[i].msg_hdr;
            header.msg_name = (&raw mut self.senders[i]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_in>() as u32;
            header.msg_iov = &raw mut self.receive_parts[i];
            header.msg_iovlen = 1;
        }
        // SAFETY: `received` holds BATCH headers whose pointers were just set to buffers that live as long as `self` and
        // are as long as stated.
        let n = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.received.as_mut_ptr(),
                BATCH as u32,
                libc::MSG_WAITFORONE,
                std::ptr::null_mut(),
            )
        };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }

    /// A datagram of the last [`Batch::receive`].
    pub fn get(&self, i: usize) -> Received<'_> {
        let (header, name) = (&self.received[i], &self.senders[i]);
        let is_ipv4 = header.msg_hdr.msg_namelen as usize >= size_of::<libc::sockaddr_in>()
            && i32::from(name.sin_family) == libc::AF_INET;
        Received {
            from: is_ipv4.then(|| Endpoint {
                addr: Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr)),
                port: u16::from_be(name.sin_port),
            }),
            datagram: &self.buffers[i][..(header.msg_len as usize).min(BUFFER_LEN)],
            cut: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
        }
    }

    /// The bytes of a received datagram, to be turned into the one that is sent.
    pub fn bytes(&mut self, i: usize) -> &mut [u8] {
        let len = (self.received[i].msg_len as usize).min(BUFFER_LEN);
        &mut self.buffers[i][..len]
    }

    /// Has a received datagram sent, as it is when [`Batch::send`] is called.
    pub fn push(&mut self, i: usize, to: Endpoint) {
        let len = self.received[i].msg_len as u16;
        self.sends.push(Send { to, from: i as u16, len, header: None });
    }

    /// Has a copy of a received datagram sent that shares its payload; the header, copied now, is the caller's to change.
    pub fn push_clone(&mut self, i: usize, to: Endpoint) -> &mut [u8; HEADER_LEN] {
        let at = self.headers_used;
        self.headers_used += 1;
        let len = self.received[i].msg_len as u16;
        self.sends.push(Send { to, from: i as u16, len, header: Some(at as u16) });
        self.headers[at].copy_from_slice(&self.buffers[i][..HEADER_LEN]);
        &mut self.headers[at]
    }

    /// Sends all that was pushed, waiting for room. Returns how many datagrams could not be sent.
    pub fn send(&mut self, socket: BorrowedFd<'_>) -> u64 {
        let count = self.sends.len();
        for (i, send) in self.sends.iter().enumerate() {
            let buffer = &mut self.buffers[usize::from(send.from)][..usize::from(send.len)];
            let parts = &mut self.send_parts[i];
            let parts_used = match send.header {
                None => {
                    parts[0] = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
                    1
                }
                Some(header) => {
                    let header = &mut self.headers[usize::from(header)];
                    let payload = &mut buffer[HEADER_LEN..];
                    parts[0] = libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: HEADER_LEN };
                    parts[1] = libc::iovec { iov_base: payload.as_mut_ptr().cast(), iov_len: payload.len() };
                    2
                }
            };
            let name = &mut self.send_names[i];
            name.sin_family = libc::AF_INET as u16;
            name.sin_port = send.to.port.to_be();
            name.sin_addr.s_addr = u32::from(send.to.addr).to_be();
            let header = &mut self.sent[i].msg_hdr;
            header.msg_name = (&raw mut *name).cast();
            header.msg_namelen = size_of::<libc::sockaddr_in>() as u32;
            header.msg_iov = parts.as_mut_ptr();
            header.msg_iovlen = parts_used;
        }
        let (mut done, mut failed) = (0, 0);
        while done < count {
            let rest = &mut self.sent[done..count];
            // SAFETY: `rest` holds headers whose pointers were just set to this value's own buffers, of the stated lengths.
            let n = unsafe { libc::sendmmsg(socket.as_raw_fd(), rest.as_mut_ptr(), rest.len() as u32, 0) };
            if n > 0 {
                done += n as usize;
            } else if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                // The first of the rest could not be sent: no route, refused by a filter. It is lost like any datagram.
                done += 1;
                failed += 1;
            }
        }
        failed
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::{net::UdpSocket, os::fd::AsFd, time::Duration};

    use super::*;

    fn endpoint(socket: &UdpSocket) -> Endpoint {
        match socket.local_addr().unwrap() {
            std::net::SocketAddr::V4(address) => address.into(),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn clones_share_a_payload_and_differ_in_their_headers() {
        let [server, client, a, b] = std::array::from_fn(|_| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            socket
        });
        let mut batch = Batch::new();
        let mut datagram = vec![7; HEADER_LEN];
        datagram.extend_from_slice(b"payload");
        client.send_to(&datagram, server.local_addr().unwrap()).unwrap();
        client.send_to(&[1; BUFFER_LEN + 1], server.local_addr().unwrap()).unwrap();
        let mut n = batch.receive(server.as_fd()).unwrap();
        assert_eq!(batch.get(0).from, Some(endpoint(&client)));
        assert_eq!((batch.get(0).datagram, batch.get(0).cut), (&datagram[..], false));
        batch.push_clone(0, endpoint(&a))[6] = 1;
        batch.push_clone(0, endpoint(&b))[6] = 2;
        batch.bytes(0)[6] = 3;
        batch.push(0, endpoint(&client));
        // Port 0 cannot be sent to; what comes after it still is.
        batch.push(0, Endpoint { addr: Ipv4Addr::LOCALHOST, port: 0 });
        batch.push(0, endpoint(&client));
        assert_eq!(batch.send(server.as_fd()), 1);
        for (socket, mark) in [(&a, 1), (&b, 2), (&client, 3), (&client, 3)] {
            let mut buffer = [0; BUFFER_LEN];
            let len = socket.recv(&mut buffer).unwrap();
            datagram[6] = mark;
            assert_eq!(&buffer[..len], &datagram[..]);
        }
        if n == 1 {
            n += batch.receive(server.as_fd()).unwrap();
            assert!(batch.get(0).cut);
        } else {
            assert!(batch.get(1).cut);
        }
        assert_eq!(n, 2);
    }
}
