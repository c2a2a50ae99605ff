//! What the agent needs of a data path, whichever it is.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

use anyhow::Result;
use nix::sys::eventfd::{EfdFlags, EventFd};
use underpass_abi::abi::up_config;
use underpass_protocol::{agent::Tables, wire::Endpoint};

/// A coordinator's data path: it holds the tables and handles READ, WRITE and W_REPLY; the agent decides who is in a
/// shard and who has a session. Times are milliseconds of CLOCK_MONOTONIC.
pub trait DataPath: Tables {
    /// `xdp` or `socket`.
    fn name(&self) -> &'static str;

    /// How it runs, in a word or two: the XDP mode, the number of threads.
    fn mode(&self) -> String;

    /// The coordinator's address and port, as bound.
    fn listen(&self) -> Endpoint;

    /// The device whose frames need next hops; `None` if the kernel finds its own way.
    fn device(&self) -> Option<u32> {
        None
    }

    /// Says where frames for members go, on a data path with a device: every address that is missing here is not sent to.
    /// Active configurations follow at once, and so does every later one: the agent need not know.
    fn set_next_hops(&mut self, _next_hops: BTreeMap<Ipv4Addr, [u8; 6]>) {}

    /// The active configurations of live tables that an agent before this one left behind; empty if the tables are new.
    fn adopted(&mut self) -> Result<Vec<up_config>> {
        Ok(Vec::new())
    }

    /// Counters by `enum up_count`, summed over CPUs or threads.
    fn counters(&mut self) -> Result<Vec<u64>>;

    /// What the data path counts beyond `enum up_count`, by name.
    fn extra_counters(&mut self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Where control packets come from and replies to them go. Called once.
    fn take_control(&mut self) -> ControlPort;

    /// Attaches again what somebody else has detached; whether there was anything to do.
    ///
    /// # Errors
    /// It cannot be attached: packets go unhandled.
    fn stay_attached(&mut self) -> Result<bool> {
        Ok(false)
    }

    /// Detaches and leaves nothing behind. Dropping without it is a crash.
    fn stop(self: Box<Self>) -> Result<()>;

    /// Whether its tables and its attachment go on when it is dropped without [`DataPath::stop`], for the next agent.
    fn outlives_process(&self) -> bool {
        false
    }
}

/// Control packets in and out, from the coordinator's own address.
pub enum ControlPort {
    /// A socket of the agent's own, bound to the coordinator's address: the kernel program passes control packets on.
    Own(UdpSocket),
    /// Data threads own the address and hand control packets over.
    Shared {
        /// Datagrams with their senders.
        inbox: Receiver<(Endpoint, Vec<u8>)>,
        /// Readable while there may be some.
        wake: Arc<EventFd>,
        /// One of the data path's sockets, for sending.
        socket: UdpSocket,
    },
}

/// Control packets that wait for the agent at most; more are dropped, and their senders send again.
pub const CONTROL_QUEUE: usize = 1024;

/// The data threads' end of [`ControlPort::Shared`].
#[derive(Clone)]
pub struct ControlSender {
    queue: SyncSender<(Endpoint, Vec<u8>)>,
    wake: Arc<EventFd>,
}

impl ControlSender {
    /// Hands a datagram over; false when the queue is full.
    pub fn send(&self, from: Endpoint, datagram: &[u8]) -> bool {
        let sent = self.queue.try_send((from, datagram.to_vec())).is_ok();
        // The counter of an eventfd saturates only after 2^64 - 2 unread writes; a failed one leaves it readable.
        let _ = self.wake.write(1);
        sent
    }
}

impl ControlPort {
    /// A port fed by data threads, and their end of it. Replies leave through `socket`.
    pub fn shared(socket: UdpSocket) -> Result<(ControlSender, Self)> {
        let (queue, inbox) = sync_channel(CONTROL_QUEUE);
        let wake = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?);
        Ok((ControlSender { queue, wake: wake.clone() }, Self::Shared { inbox, wake, socket }))
    }

    /// A port on a socket of the agent's own.
    pub fn own(socket: UdpSocket) -> Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self::Own(socket))
    }

    /// Takes the next datagram into `buffer`; `None` when there is none now.
    pub fn receive(&mut self, buffer: &mut Vec<u8>) -> io::Result<Option<Endpoint>> {
        match self {
            Self::Own(socket) => {
                buffer.resize(2048, 0);
                loop {
                    match socket.recv_from(buffer) {
                        Ok((len, std::net::SocketAddr::V4(from))) => {
                            buffer.truncate(len);
                            return Ok(Some(from.into()));
                        }
                        Ok(_) => {}
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                        Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                        Err(e) => return Err(e),
                    }
                }
            }
            Self::Shared { inbox, wake, .. } => {
                // Cleared before looking: a datagram queued after the look makes it readable again.
                let _ = wake.read();
                match inbox.try_recv() {
                    Ok((from, datagram)) => {
                        *buffer = datagram;
                        // More may wait behind this one.
                        let _ = wake.write(1);
                        Ok(Some(from))
                    }
                    Err(_) => Ok(None),
                }
            }
        }
    }

    /// Sends a datagram from the coordinator's address.
    pub fn send(&self, datagram: &[u8], to: Endpoint) -> io::Result<()> {
        let socket = match self {
            Self::Own(socket) | Self::Shared { socket, .. } => socket,
        };
        socket.send_to(datagram, std::net::SocketAddrV4::from(to)).map(drop)
    }
}

impl AsFd for ControlPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(socket) => socket.as_fd(),
            Self::Shared { wake, .. } => wake.as_fd(),
        }
    }
}
