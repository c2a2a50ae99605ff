//! The `xdp` data path: the coordinator's kernel programs, and what of it stays in user space.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result};
use underpass_abi::abi::{self, up_config, up_session, up_settings};
use underpass_datapath::{
    attach::{Mode, interface_index},
    coordinator::{CoordinatorKernel, TableSizes, ensure_bpffs, pin_directory},
};
use underpass_protocol::{
    agent::{Settlement, Tables, TablesError},
    coordinator::{CloseOutcome, Scan, Settings},
    wire::{Endpoint, Op, Packet, SessionId},
};

use crate::{
    config::WritePath,
    datapath::{ControlPort, ControlSender, DataPath},
    socket::explain_bind,
};

/// What the `xdp` data path is started with.
#[derive(Clone, Debug)]
pub struct XdpOptions {
    /// Address and port; the address must be the device's.
    pub listen: Endpoint,
    /// Interface to attach to, of the caller's network namespace.
    pub device: String,
    /// XDP mode.
    pub mode: Mode,
    /// How writes are propagated.
    pub write_path: WritePath,
    /// Whether tables and attachment are pinned, so that they outlive a crash of this process.
    pub pinned: bool,
    /// Table sizes and secrets.
    pub settings: Settings,
}

/// The coordinator in the kernel.
pub struct XdpDataPath {
    kernel: CoordinatorKernel,
    options: XdpOptions,
    ifindex: u32,
    control: Option<ControlPort>,
    forwarder: Option<Forwarder>,
}

impl XdpDataPath {
    /// Loads and attaches. If an earlier agent left its tables and attachment pinned on this interface, they are taken
    /// over: same secrets, same sessions, same dirty set.
    pub fn start(options: XdpOptions) -> Result<Self> {
        let ifindex = interface_index(&options.device)?;
        let pins = if options.pinned {
            ensure_bpffs()?;
            Some((pin_directory(ifindex).context("asking for this network namespace")?, ifindex))
        } else {
            None
        };
        let socket =
            UdpSocket::bind(SocketAddrV4::from(options.listen)).map_err(|e| explain_bind(e, options.listen))?;
        let settings = up_settings {
            write_path: match options.write_path {
                WritePath::Broadcast => abi::UP_WRITE_PATH_BROADCAST,
                WritePath::Tc => abi::UP_WRITE_PATH_TC,
                WritePath::Published => abi::UP_WRITE_PATH_PUBLISHED,
            },
            addr: u32::from(options.listen.addr).to_be(),
            port: options.listen.port.to_be(),
            fingerprint_key: options.settings.fingerprint_key,
            bucket_key: options.settings.bucket_key,
            ..up_settings::default()
        };
        let sizes = TableSizes { buckets: options.settings.buckets, sessions: options.settings.sessions };
        let mut kernel = CoordinatorKernel::load(settings, sizes, pins)?;
        let (control, forwarder) = if options.write_path == WritePath::Published {
            let (sender, port) = ControlPort::shared(socket.try_clone()?)?;
            // One forwarding thread: the published design's, given batching.
            let forwarder = Forwarder::start(socket, sender, &kernel)?;
            (port, Some(forwarder))
        } else {
            (ControlPort::own(socket)?, None)
        };
        kernel.attach(ifindex, options.mode)?;
        Ok(Self { kernel, options, ifindex, control: Some(control), forwarder })
    }
}

impl Tables for XdpDataPath {
    fn session_count(&self) -> u32 {
        self.kernel.session_count()
    }

    fn configure(&mut self, config: &up_config) -> Result<(), TablesError> {
        self.kernel.configure(config)
    }

    fn clear(&mut self, shard: u32) -> Result<(), TablesError> {
        Tables::clear(&mut self.kernel, shard)
    }

    fn config(&self, shard: u32) -> Option<up_config> {
        self.kernel.config(shard)
    }

    fn extend_lease(&mut self, shard: u32, until_ms: u64) -> Result<(), TablesError> {
        Tables::extend_lease(&mut self.kernel, shard, until_ms)
    }

    fn scan(&mut self, shard: u32, sessions: usize) -> Result<Scan, TablesError> {
        self.kernel.scan(shard, sessions)
    }

    fn records(&mut self, count: usize, visit: &mut dyn FnMut(u16, &up_session)) -> Result<(), TablesError> {
        self.kernel.records(count, visit)
    }

    fn record(&mut self, index: u16) -> Result<up_session, TablesError> {
        self.kernel.record(index)
    }

    fn load(&mut self, index: u16, record: &up_session) -> Result<bool, TablesError> {
        self.kernel.load(index, record)
    }

    fn close(&mut self, session: SessionId, used_before_ms: Option<u64>) -> Result<CloseOutcome, TablesError> {
        self.kernel.close(session, used_before_ms)
    }

    fn forget_acks(&mut self, shard: u32, index: u8) -> Result<(), TablesError> {
        Tables::forget_acks(&mut self.kernel, shard, index)
    }

    fn settle(
        &mut self,
        session: SessionId,
        request: u64,
        seq: u64,
        settlement: Settlement,
    ) -> Result<bool, TablesError> {
        self.kernel.settle(session, request, seq, settlement)
    }
}

impl DataPath for XdpDataPath {
    fn name(&self) -> &'static str {
        "xdp"
    }

    fn mode(&self) -> String {
        let write_path = match self.options.write_path {
            WritePath::Broadcast => "broadcast",
            WritePath::Tc => "tc",
            WritePath::Published => "published",
        };
        format!("{} on {}, writes by {write_path}", self.options.mode, self.options.device)
    }

    fn listen(&self) -> Endpoint {
        self.options.listen
    }

    fn device(&self) -> Option<u32> {
        Some(self.ifindex)
    }

    fn set_next_hops(&mut self, next_hops: BTreeMap<Ipv4Addr, [u8; 6]>) {
        self.kernel.set_next_hops(next_hops);
    }

    fn adopted(&mut self) -> Result<Vec<up_config>> {
        Ok(if self.kernel.taken_over() { self.kernel.configurations().collect() } else { Vec::new() })
    }

    fn counters(&mut self) -> Result<Vec<u64>> {
        Ok(self.kernel.counters()?.to_vec())
    }

    fn take_control(&mut self) -> ControlPort {
        self.control.take().expect("called once")
    }

    fn outlives_process(&self) -> bool {
        self.options.pinned
    }

    fn stay_attached(&mut self) -> Result<bool> {
        let again = self.kernel.stay_attached(self.ifindex, self.options.mode);
        again.with_context(|| format!("the program was detached from {} by somebody else", self.options.device))
    }

    fn stop(mut self: Box<Self>) -> Result<()> {
        self.kernel.detach();
        drop(self.forwarder.take());
        Ok(())
    }
}

/// The published design's user space: takes every ordered write that XDP passes up and sends it out again; TC egress
/// clones it. What is no write goes to the agent.
struct Forwarder {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Datagrams taken and sent at once.
const BATCH: usize = 64;
/// Longest datagram taken.
const DATAGRAM: usize = 2048;

impl Forwarder {
    fn start(socket: UdpSocket, control: ControlSender, kernel: &CoordinatorKernel) -> Result<Self> {
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let stop = Arc::new(AtomicBool::new(false));
        let first = kernel.first_member();
        let addr = move |shard| first(shard).map(|(addr, port)| Endpoint { addr, port });
        let stopping = stop.clone();
        let thread = std::thread::Builder::new().name("forwarder".into()).spawn(move || {
            let mut batch = ForwardBatch::new();
            while !stopping.load(Ordering::Relaxed) {
                if let Err(error) = batch.forward(socket.as_raw_fd(), &control, &addr) {
                    tracing::warn!("forwarding writes: {error}");
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct ForwardBatch {
    buffers: Vec<[u8; DATAGRAM]>,
    from: Vec<libc::sockaddr_in>,
    to: Vec<libc::sockaddr_in>,
}

impl ForwardBatch {
    fn new() -> Self {
        // SAFETY: all-zero is a valid socket address.
        let none: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        Self { buffers: vec![[0; DATAGRAM]; BATCH], from: vec![none; BATCH], to: vec![none; BATCH] }
    }

    /// Takes what is there, up to a batch, and sends its writes on.
    fn forward(
        &mut self,
        socket: RawFd,
        control: &ControlSender,
        addr: &dyn Fn(u32) -> Option<Endpoint>,
    ) -> io::Result<()> {
        // SAFETY: all-zero is a valid value of these C structures.
        let (mut iovecs, mut messages): ([libc::iovec; BATCH], [libc::mmsghdr; BATCH]) = unsafe { std::mem::zeroed() };
        for i in 0..BATCH {
            iovecs[i] = libc::iovec { iov_base: self.buffers[i].as_mut_ptr().cast(), iov_len: DATAGRAM };
            messages[i].msg_hdr.msg_iov = &mut iovecs[i];
            messages[i].msg_hdr.msg_iovlen = 1;
            messages[i].msg_hdr.msg_name = (&raw mut self.from[i]).cast();
            messages[i].msg_hdr.msg_namelen = size_of::<libc::sockaddr_in>() as u32;
        }
        // SAFETY: every message points at a buffer, an iovec and an address that outlive the call.
        let got = unsafe {
            libc::recvmmsg(socket, messages.as_mut_ptr(), BATCH as u32, libc::MSG_WAITFORONE, std::ptr::null_mut())
        };
        if got < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
                _ => Err(error),
            };
        }
        let mut count = 0;
        for i in 0..got as usize {
            let len = messages[i].msg_len as usize;
            let Ok(packet) = Packet::parse(&self.buffers[i][..len]) else { continue };
            let from = Endpoint {
                addr: u32::from_be(self.from[i].sin_addr.s_addr).into(),
                port: u16::from_be(self.from[i].sin_port),
            };
            if packet.header.op.is_control() {
                control.send(from, &self.buffers[i][..len]);
            } else if packet.header.op == Op::Write
                && let Some(to) = addr(packet.header.shard)
            {
                self.to[count] = libc::sockaddr_in {
                    sin_family: libc::AF_INET as u16,
                    sin_port: to.port.to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from(to.addr).to_be() },
                    sin_zero: [0; 8],
                };
                iovecs[i].iov_len = len;
                messages[count].msg_hdr.msg_iov = &mut iovecs[i];
                messages[count].msg_hdr.msg_name = (&raw mut self.to[count]).cast();
                count += 1;
            }
        }
        let mut sent = 0;
        while sent < count {
            // SAFETY: as above; messages up to `count` point at received datagrams and filled addresses.
            let now = unsafe { libc::sendmmsg(socket, messages[sent..].as_mut_ptr(), (count - sent) as u32, 0) };
            if now <= 0 {
                // The rest is lost; their clients send again.
                return Err(io::Error::last_os_error());
            }
            sent += now as usize;
        }
        Ok(())
    }
}
