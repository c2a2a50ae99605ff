//! Many datagrams for each system call: buffers, addresses and headers are laid out once.

use std::{
    io, mem,
    net::Ipv4Addr,
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
};

use underpass_protocol::{
    transfer::FETCHED_MAX,
    wire::{DATAGRAM_MAX, Endpoint, HEADER_LEN},
};

/// Datagrams for each call.
pub const BATCH: usize = 64;

/// Bytes of a buffer: room for the longest datagram, and to see that one is longer.
const BUFFER_LEN: usize = 2048;
const _: () = assert!(BUFFER_LEN > DATAGRAM_MAX);

/// Bytes that a longer datagram may have beyond its buffer: FETCHED with a key's chain alone. These lie apart, so that the
/// buffers stay close together; memory that is never written to is never taken.
const OVERFLOW_LEN: usize = HEADER_LEN + FETCHED_MAX + 1 - BUFFER_LEN;

#[repr(align(64))]
#[derive(Clone, Copy)]
struct Buffer([u8; BUFFER_LEN]);

/// A datagram that came in.
pub struct Received<'a> {
    /// The whole buffer.
    pub buffer: &'a mut [u8],
    /// Bytes of the datagram in it.
    pub len: usize,
    /// The rest of a datagram that is longer than the buffer.
    pub rest: &'a [u8],
    /// Its source.
    pub from: Endpoint,
    /// It was longer than any that is sent here: what is beyond is lost.
    pub cut: bool,
}

/// Buffers for one batch of datagrams and their answers, each answer in the buffer of its request.
pub struct Batch {
    buffers: Vec<Buffer>,
    overflow: Vec<u8>,
    received: Vec<libc::mmsghdr>,
    answers: Vec<libc::mmsghdr>,
    sources: Vec<libc::sockaddr_in>,
    destinations: Vec<libc::sockaddr_in>,
    // Pointed to by the headers, never resized.
    _receive_io: Vec<libc::iovec>,
    answer_io: Vec<libc::iovec>,
    queued: usize,
}

fn io_vectors(buffers: &mut [Buffer]) -> Vec<libc::iovec> {
    let io = |buffer: &mut Buffer| libc::iovec { iov_base: buffer.0.as_mut_ptr().cast(), iov_len: BUFFER_LEN };
    buffers.iter_mut().map(io).collect()
}

/// A header for each address, with so many of the vectors in their turn.
fn headers(io: &mut [libc::iovec], each: usize, addresses: &mut [libc::sockaddr_in]) -> Vec<libc::mmsghdr> {
    let header = |(io, address): (&mut [libc::iovec], &mut libc::sockaddr_in)| {
        // SAFETY: an mmsghdr of zeros is valid: null pointers with lengths of 0.
        let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
        header.msg_hdr.msg_iov = io.as_mut_ptr();
        header.msg_hdr.msg_iovlen = each as _;
        header.msg_hdr.msg_name = ptr::from_mut(address).cast();
        header.msg_hdr.msg_namelen = mem::size_of::<libc::sockaddr_in>() as libc::socklen_t;
        header
    };
    io.chunks_mut(each).zip(addresses).map(header).collect()
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Batch {
    /// Allocates the buffers.
    pub fn new() -> Self {
        // SAFETY: a sockaddr_in of zeros is valid: it consists of integers.
        let address: libc::sockaddr_in = unsafe { mem::zeroed() };
        let mut buffers = vec![Buffer([0; BUFFER_LEN]); BATCH];
        let (mut sources, mut destinations) = (vec![address; BATCH], vec![address; BATCH]);
        let mut overflow = vec![0; BATCH * OVERFLOW_LEN];
        let beyond = overflow
            .chunks_mut(OVERFLOW_LEN)
            .map(|part| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: OVERFLOW_LEN });
        let mut receive_io: Vec<_> =
            io_vectors(&mut buffers).into_iter().zip(beyond).flat_map(|(a, b)| [a, b]).collect();
        let mut answer_io = io_vectors(&mut buffers);
        Self {
            received: headers(&mut receive_io, 2, &mut sources),
            answers: headers(&mut answer_io, 1, &mut destinations),
            buffers,
            overflow,
            sources,
            destinations,
            _receive_io: receive_io,
            answer_io,
            queued: 0,
        }
    }

    /// Waits for at least one datagram, or for the socket's timeout; says how many came.
    ///
    /// # Errors
    /// `WouldBlock` after the socket's timeout, `Interrupted`, and whatever else the kernel says.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        for header in &mut self.received {
            header.msg_hdr.msg_namelen = mem::size_of::<libc::sockaddr_in>() as libc::socklen_t;
        }
        // SAFETY: the headers point to buffers and addresses of the lengths they state, which live in vectors that are
        // never resized, and nothing else refers to them during the call.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.received.as_mut_ptr(),
                BATCH as libc::c_uint,
                libc::MSG_WAITFORONE,
                ptr::null_mut(),
            )
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// The datagram with this number in the batch.
    pub fn datagram(&mut self, number: usize) -> Received<'_> {
        let header = &self.received[number];
        let source = &self.sources[number];
        Received {
            len: (header.msg_len as usize).min(BUFFER_LEN),
            rest: &self.overflow[number * OVERFLOW_LEN..][..(header.msg_len as usize).saturating_sub(BUFFER_LEN)],
            cut: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
            from: Endpoint {
                addr: Ipv4Addr::from(u32::from_be(source.sin_addr.s_addr)),
                port: u16::from_be(source.sin_port),
            },
            buffer: &mut self.buffers[number].0,
        }
    }

    /// Puts the first `len` bytes of a datagram's buffer among the answers.
    pub fn answer(&mut self, number: usize, to: Endpoint, len: usize) {
        assert!(len <= BUFFER_LEN);
        let destination = &mut self.destinations[self.queued];
        destination.sin_family = libc::AF_INET as libc::sa_family_t;
        destination.sin_addr.s_addr = u32::from(to.addr).to_be();
        destination.sin_port = to.port.to_be();
        self.answer_io[self.queued] =
            libc::iovec { iov_base: self.buffers[number].0.as_mut_ptr().cast(), iov_len: len };
        self.queued += 1;
    }

    /// Sends the answers; says how many the kernel refused.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> u64 {
        let mut at = 0;
        let mut refused = 0;
        while at < self.queued {
            // SAFETY: as in `receive`; the vector `answer_io` that the headers point to was written in place, with
            // buffers of this batch and lengths within them.
            let sent = unsafe {
                libc::sendmmsg(
                    socket.as_raw_fd(),
                    self.answers.as_mut_ptr().add(at),
                    (self.queued - at) as libc::c_uint,
                    0,
                )
            };
            match usize::try_from(sent) {
                Ok(sent) => at += sent,
                Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                // The first one cannot be sent (no route, say): it is as good as lost, the others go on.
                Err(_) => {
                    refused += 1;
                    at += 1;
                }
            }
        }
        self.queued = 0;
        refused
    }
}
