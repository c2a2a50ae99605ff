//! The replica's sockets: one for each thread, all at one address.

use std::{
    io, mem,
    net::{SocketAddr, SocketAddrV4},
    os::fd::AsRawFd,
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};

use crate::Error;

/// Bytes asked for, for the datagrams that wait while a thread is busy.
const RECEIVE_BUFFER: usize = 8 << 20;

/// How long a thread waits before it looks whether it is to stop.
pub const RECEIVE_TIMEOUT: Duration = Duration::from_millis(100);

fn option(socket: &Socket, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the pointer is to a c_int that lives through the call, and its length is given.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw const value).cast(),
            mem::size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Binds `count` sockets to one address, and returns them with it: the port is chosen if it is 0.
pub fn bind(listen: SocketAddrV4, count: usize, busy_poll_us: u32) -> Result<(Vec<Socket>, SocketAddrV4), Error> {
    if listen.ip().is_unspecified() {
        return Err(Error::Unspecified { listen });
    }
    let failed = |listen: SocketAddrV4| {
        move |error: io::Error| match error.kind() {
            io::ErrorKind::AddrInUse => Error::AddressInUse { listen },
            io::ErrorKind::AddrNotAvailable => Error::AddressNotHere { listen },
            io::ErrorKind::PermissionDenied => Error::Permission { listen },
            _ => Error::Socket { listen, source: error },
        }
    };
    let mut address = listen;
    let mut sockets: Vec<Socket> = Vec::with_capacity(count);
    for _ in 0..count {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).map_err(failed(address))?;
        // The first one is bound alone, so that another process at this address is found out; only then it lets the
        // others in.
        if !sockets.is_empty() {
            socket.set_reuse_port(true).map_err(failed(address))?;
        }
        socket.bind(&SocketAddr::V4(address).into()).map_err(failed(address))?;
        if sockets.is_empty() {
            let bound = socket.local_addr().map_err(failed(address))?;
            address = bound.as_socket_ipv4().expect("bound to an IPv4 address");
            if count > 1 {
                socket.set_reuse_port(true).map_err(failed(address))?;
            }
        }
        socket.set_read_timeout(Some(RECEIVE_TIMEOUT)).map_err(failed(address))?;
        // Beyond net.core.rmem_max if we may, else up to it.
        if option(&socket, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER as libc::c_int).is_err() {
            socket.set_recv_buffer_size(RECEIVE_BUFFER).map_err(failed(address))?;
        }
        if busy_poll_us > 0 {
            option(&socket, libc::SO_BUSY_POLL, busy_poll_us as libc::c_int)
                .map_err(|source| Error::BusyPoll { busy_poll_us, source })?;
        }
        sockets.push(socket);
    }
    // Linux reports twice what it grants.
    let granted = sockets[0].recv_buffer_size().map_err(failed(address))? / 2;
    if granted < RECEIVE_BUFFER {
        tracing::warn!(
            "the receive buffer is {} KiB instead of {} KiB: bursts may be lost; raise net.core.rmem_max",
            granted >> 10,
            RECEIVE_BUFFER >> 10
        );
    }
    if count > 1 {
        spread(&sockets[0], count as u32).map_err(failed(address))?;
    }
    Ok((sockets, address))
}

/// Spreads datagrams over the sockets by session and request. Everything comes from the one address of the coordinator, so
/// the kernel's own choice, a hash of addresses, would give one thread all the work.
fn spread(socket: &Socket, count: u32) -> io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    use libc::{BPF_A, BPF_ABS, BPF_ADD, BPF_ALU, BPF_K, BPF_LD, BPF_MISC, BPF_MOD, BPF_RET, BPF_TAX, BPF_W, BPF_X};
    /// Offsets of the low halves of session and request in the header.
    const SESSION: u32 = 36;
    const REQUEST: u32 = 44;
    // A datagram too short for these goes to the first socket.
    let mut filter = [
        statement(BPF_LD | BPF_W | BPF_ABS, SESSION),
        statement(BPF_MISC | BPF_TAX, 0),
        statement(BPF_LD | BPF_W | BPF_ABS, REQUEST),
        statement(BPF_ALU | BPF_ADD | BPF_X, 0),
        statement(BPF_ALU | BPF_MOD | BPF_K, count),
        statement(BPF_RET | BPF_A, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program points to `len` instructions that live through the call; the kernel copies them.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const program).cast(),
            mem::size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
