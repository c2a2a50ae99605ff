//! Datagrams in batches: `recvmmsg`, `sendmmsg`, and the socket's queue of errors.

use std::{
    io, mem,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
};

use underpass_protocol::wire::DATAGRAM_MAX;

/// Datagrams of one system call.
pub(crate) const BATCH: usize = 64;
/// Room for a datagram: more than any of ours, so that a longer one shows.
const ROOM: usize = DATAGRAM_MAX + 64;

/// Room for one batch of received datagrams.
pub(crate) struct Received {
    bytes: Box<[[u8; ROOM]]>,
    lengths: [usize; BATCH],
    sources: [libc::sockaddr_in; BATCH],
}

impl Received {
    pub(crate) fn new() -> Self {
        let nobody = sockaddr(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
        Self { bytes: vec![[0; ROOM]; BATCH].into_boxed_slice(), lengths: [0; BATCH], sources: [nobody; BATCH] }
    }

    /// The datagram at `index`, one of those that the latest [`receive`] counted.
    pub(crate) fn datagram(&self, index: usize) -> &[u8] {
        &self.bytes[index][..self.lengths[index]]
    }

    /// Where it came from.
    pub(crate) fn source(&self, index: usize) -> SocketAddrV4 {
        address(&self.sources[index])
    }
}

/// Receives what is there, without waiting, up to a batch; 0: nothing.
pub(crate) fn receive(socket: BorrowedFd<'_>, into: &mut Received) -> io::Result<usize> {
    let mut parts: [libc::iovec; BATCH] =
        std::array::from_fn(|i| libc::iovec { iov_base: into.bytes[i].as_mut_ptr().cast(), iov_len: ROOM });
    // SAFETY: an mmsghdr is plain data for which all zeroes is a valid value (null pointers, zero lengths).
    let mut headers: [libc::mmsghdr; BATCH] = unsafe { mem::zeroed() };
    for ((header, part), source) in headers.iter_mut().zip(&mut parts).zip(&mut into.sources) {
        header.msg_hdr.msg_name = (&raw mut *source).cast();
        header.msg_hdr.msg_namelen = mem::size_of::<libc::sockaddr_in>() as u32;
        header.msg_hdr.msg_iov = part;
        header.msg_hdr.msg_iovlen = 1;
    }
    // SAFETY: `headers` and the sources, `parts` and buffers that it points to live until the call returns, the lengths are
    // theirs, and each of them is borrowed by one entry alone.
    let count = unsafe {
        libc::recvmmsg(socket.as_raw_fd(), headers.as_mut_ptr(), BATCH as u32, libc::MSG_DONTWAIT as _, ptr::null_mut())
    };
    if count < 0 {
        let error = io::Error::last_os_error();
        return if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
            Ok(0)
        } else {
            Err(error)
        };
    }
    for (length, header) in into.lengths.iter_mut().zip(&headers[..count as usize]) {
        *length = header.msg_len as usize;
    }
    Ok(count as usize)
}

/// Sends datagrams in order, up to a batch, without waiting. How many were taken, less than given when the socket's buffer
/// is full or an error is in the way: [`io::ErrorKind::WouldBlock`] when none was.
pub(crate) fn send<'a>(
    socket: BorrowedFd<'_>,
    datagrams: impl Iterator<Item = (SocketAddrV4, &'a [u8])>,
) -> io::Result<usize> {
    // SAFETY: iovec, sockaddr_in and mmsghdr are plain data for which all zeroes is a valid value.
    let (mut parts, mut to, mut headers): ([libc::iovec; BATCH], [libc::sockaddr_in; BATCH], [libc::mmsghdr; BATCH]) =
        unsafe { mem::zeroed() };
    let mut count = 0;
    for (address, datagram) in datagrams.take(BATCH) {
        to[count] = sockaddr(address);
        parts[count] = libc::iovec { iov_base: datagram.as_ptr().cast_mut().cast(), iov_len: datagram.len() };
        let header = &mut headers[count].msg_hdr;
        header.msg_name = (&raw mut to[count]).cast();
        header.msg_namelen = mem::size_of::<libc::sockaddr_in>() as u32;
        header.msg_iov = &raw mut parts[count];
        header.msg_iovlen = 1;
        count += 1;
    }
    // SAFETY: the first `count` headers point into `to`, `parts` and the caller's datagrams, which all live until the call
    // returns; the kernel only reads through them.
    let sent =
        unsafe { libc::sendmmsg(socket.as_raw_fd(), headers.as_mut_ptr(), count as u32, libc::MSG_DONTWAIT as _) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
}

/// Has the kernel keep ICMP errors with the address that they are about.
pub(crate) fn keep_errors(socket: BorrowedFd<'_>) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the option's value is a C int and so is its length.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_RECVERR,
            (&raw const on).cast(),
            mem::size_of::<libc::c_int>() as u32,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes one kept error: where the datagram was going that it is about, and what it was. `None`: no more.
pub(crate) fn take_error(socket: BorrowedFd<'_>) -> Option<(SocketAddrV4, io::Error)> {
    let mut to = sockaddr(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
    // Aligned as a control message header must be.
    let mut control = [0u64; 64];
    // SAFETY: a msghdr is plain data for which all zeroes is a valid value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_name = (&raw mut to).cast();
    header.msg_namelen = mem::size_of::<libc::sockaddr_in>() as u32;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = mem::size_of_val(&control) as _;
    // SAFETY: `header` points to `to` and `control`, which live until the call returns, with their own lengths.
    let result = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut header, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
    if result < 0 {
        return None;
    }
    let mut error = io::Error::other("unreachable");
    // SAFETY: `header` was filled in by the kernel and its control buffer is still alive.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(&header) };
    while !message.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR give null or a whole header within the control buffer.
        let this = unsafe { &*message };
        if this.cmsg_level == libc::IPPROTO_IP && this.cmsg_type == libc::IP_RECVERR {
            // SAFETY: the kernel puts a sock_extended_err at the start of the data of an IP_RECVERR message.
            let extended: libc::sock_extended_err = unsafe { ptr::read_unaligned(libc::CMSG_DATA(message).cast()) };
            error = io::Error::from_raw_os_error(extended.ee_errno as i32);
        }
        // SAFETY: `message` is a header within the control buffer of `header`.
        message = unsafe { libc::CMSG_NXTHDR(&header, message) };
    }
    Some((address(&to), error))
}

fn address(socket: &libc::sockaddr_in) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::from(u32::from_be(socket.sin_addr.s_addr)), u16::from_be(socket.sin_port))
}

fn sockaddr(address: SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
        sin_zero: [0; 8],
    }
}
