//! A client as raw as can be, and replicas that misbehave on demand, for tests of a coordinator from outside.

#![allow(dead_code, reason = "each test uses a part")]

pub mod raw;

use std::{
    net::{SocketAddr, SocketAddrV4, UdpSocket},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use underpass_protocol::{
    control::{self, Closed, ClusterKey, HeartbeatAck, OPEN_PADDING, Open, Opened},
    replica::{self, Action, Event, Settings},
    wire::{Endpoint, Header, Kind, Op, Packet, Reason, SessionId},
};

pub const WAIT: Duration = Duration::from_secs(10);

pub fn bind() -> (UdpSocket, Endpoint) {
    bind_at("127.0.0.1:0")
}

pub fn bind_at(address: &str) -> (UdpSocket, Endpoint) {
    let socket = UdpSocket::bind(address).unwrap();
    let SocketAddr::V4(address) = socket.local_addr().unwrap() else { panic!() };
    (socket, address.into())
}

/// A client with one socket.
pub struct Client {
    pub socket: UdpSocket,
    pub me: Endpoint,
    pub coordinator: SocketAddrV4,
}

/// A received packet.
pub struct Answer {
    pub header: Header,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    pub len: usize,
}

impl Client {
    pub fn new(coordinator: Endpoint) -> Self {
        Self::with(bind(), coordinator)
    }

    pub fn with((socket, me): (UdpSocket, Endpoint), coordinator: Endpoint) -> Self {
        socket.set_read_timeout(Some(WAIT)).unwrap();
        Self { socket, me, coordinator: coordinator.into() }
    }

    pub fn send(&self, datagram: &[u8]) {
        self.socket.send_to(datagram, self.coordinator).unwrap();
    }

    /// Sends until something comes back: what a client's library does.
    pub fn insist(&self, datagram: &[u8]) -> Answer {
        self.socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut buffer = [0; 2048];
        let mut answer = None;
        until("an answer that is no reject", || {
            self.send(datagram);
            let Ok(len) = self.socket.recv(&mut buffer) else { return false };
            let packet = Packet::parse(&buffer[..len]).unwrap();
            let asked = Packet::parse(datagram).unwrap().header;
            if matches!(packet.header.op, Op::WReply | Op::RReply) && packet.header.request == asked.request {
                let (key, value) = (packet.key.to_vec(), packet.value.to_vec());
                answer = Some(Answer { header: packet.header, key, value, len });
            }
            answer.is_some()
        });
        self.socket.set_read_timeout(Some(WAIT)).unwrap();
        answer.unwrap()
    }

    pub fn receive(&self) -> Answer {
        let mut buffer = [0; 2048];
        let len = loop {
            match self.socket.recv(&mut buffer) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                received => break received.expect("an answer"),
            }
        };
        let packet = Packet::parse(&buffer[..len]).unwrap();
        Answer { header: packet.header, key: packet.key.to_vec(), value: packet.value.to_vec(), len }
    }

    pub fn ask(&self, datagram: &[u8]) -> Answer {
        self.send(datagram);
        self.receive()
    }

    pub fn nothing_comes(&self) {
        self.socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let mut buffer = [0; 2048];
        assert!(self.socket.recv(&mut buffer).is_err(), "nothing was to come");
        self.socket.set_read_timeout(Some(WAIT)).unwrap();
    }

    pub fn header(&self, op: Op) -> Header {
        let mut header = Header::new(op);
        header.set_reply_to(self.me);
        header
    }

    pub fn open_datagram(&self, request: u64, token: u64) -> Vec<u8> {
        let mut header = self.header(Op::Open);
        (header.request, header.token) = (request, token);
        control::emit(header, &Open { padding: "x".repeat(OPEN_PADDING) })
    }

    pub fn challenge(&self) -> u64 {
        let datagram = self.open_datagram(1, 0);
        let answer = self.ask(&datagram);
        assert_eq!((answer.header.op, answer.header.session), (Op::Opened, SessionId(0)));
        assert!(answer.len <= datagram.len());
        answer.header.token
    }

    pub fn open(&self, request: u64) -> Session<'_> {
        let challenge = self.challenge();
        let answer = self.ask(&self.open_datagram(request, challenge));
        assert_eq!(answer.header.op, Op::Opened, "status {}", answer.header.status);
        let opened: Opened = serde_json::from_slice(&answer.value).unwrap();
        assert_eq!(opened.configuration.unwrap().epoch, answer.header.epoch);
        Session { client: self, session: answer.header.session, token: answer.header.token }
    }
}

pub struct Session<'a> {
    pub client: &'a Client,
    pub session: SessionId,
    pub token: u64,
}

impl Session<'_> {
    pub fn header(&self, op: Op, request: u64) -> Header {
        let mut header = self.client.header(op);
        (header.session, header.token, header.request) = (self.session, self.token, request);
        header
    }

    pub fn write_datagram(&self, request: u64, kind: Kind, value: &[u8]) -> Vec<u8> {
        let mut header = self.header(Op::Write, request);
        header.kind = kind.to_wire();
        header.datagram(b"key", value)
    }

    pub fn write(&self, request: u64) -> Answer {
        self.client.ask(&self.write_datagram(request, Kind::Put, b"value"))
    }

    /// A replica has a lease only when it has heard twice of a coordinator that has one.
    pub fn read(&self, request: u64) -> Answer {
        let datagram = self.header(Op::Read, request).datagram(b"key", b"");
        let lease = Reason::Lease.to_wire();
        let mut answer = self.client.ask(&datagram);
        let deadline = Instant::now() + WAIT;
        while (answer.header.op, answer.header.status) == (Op::RReject, lease) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
            answer = self.client.ask(&datagram);
        }
        answer
    }

    pub fn close(&self) -> Result<Closed, Reason> {
        let answer = self.client.ask(&control::emit(self.header(Op::Close, 0), &control::Close {}));
        match answer.header.op {
            Op::Closed => Ok(serde_json::from_slice(&answer.value).unwrap()),
            Op::ControlReject => Err(Reason::from_wire(answer.header.status).unwrap()),
            other => panic!("{other}"),
        }
    }
}

pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} never came");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[track_caller]
pub fn is_rejected(answer: &Answer, op: Op, reason: Reason) {
    assert_eq!((answer.header.op, Reason::from_wire(answer.header.status)), (op, Some(reason)));
}

/// Runs a command.
pub fn run(line: &str) -> String {
    let mut words = line.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Attaches a program that passes every frame: a veth takes what its peer's XDP transmits only if it has one too.
pub fn pass_everything(device: &str) {
    use libbpf_rs::libbpf_sys::*;
    // r0 = XDP_PASS; exit
    let program = [0x2_0000_00b7_u64, 0x95];
    let ifindex = nix::net::if_::if_nametoindex(device).unwrap();
    // SAFETY: the two instructions of 8 bytes each outlive the call; name and licence are C strings.
    let fd = unsafe {
        bpf_prog_load(
            BPF_PROG_TYPE_XDP,
            c"pass".as_ptr(),
            c"Dual BSD/GPL".as_ptr(),
            program.as_ptr().cast(),
            program.len() as _,
            std::ptr::null_mut(),
        )
    };
    assert!(fd >= 0, "loading: {fd}");
    // SAFETY: takes no pointers but a null one for its options.
    let attached = unsafe { bpf_xdp_attach(ifindex as i32, fd, XDP_FLAGS_DRV_MODE, std::ptr::null()) };
    assert_eq!(attached, 0);
    // SAFETY: this function's own descriptor; the attachment keeps the program.
    unsafe { libc::close(fd) };
}

/// What a test changes in a replica while it runs.
#[derive(Default)]
pub struct Behaviour {
    stop: AtomicBool,
    /// Takes nothing, says nothing.
    pub silent: AtomicBool,
    /// Does not get writes.
    pub no_writes: AtomicBool,
    /// Its acknowledgements get lost.
    pub keeps_acks: AtomicBool,
    /// Bytes that it says to use, if not 0.
    pub used_bytes: AtomicU64,
    /// Ends its life, and begins the next one empty.
    restart: AtomicBool,
    /// Its life.
    pub incarnation: AtomicU64,
    /// Items that it holds.
    pub items: AtomicU64,
}

/// The pure replica on a socket and a thread.
pub struct Replica {
    pub endpoint: Endpoint,
    pub behaviour: Arc<Behaviour>,
    thread: Option<JoinHandle<()>>,
}

impl Replica {
    pub fn start() -> Self {
        Self::at("127.0.0.1:0", ClusterKey::default())
    }

    pub fn at(address: &str, key: ClusterKey) -> Self {
        let (socket, endpoint) = bind_at(address);
        socket.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
        let behaviour = Arc::new(Behaviour::default());
        let thread = std::thread::spawn({
            let behaviour = behaviour.clone();
            move || {
                while !behaviour.stop.load(Relaxed) {
                    live(&behaviour, &socket, key);
                }
            }
        });
        Self { endpoint, behaviour, thread: Some(thread) }
    }

    pub fn restart(&self) {
        let before = self.behaviour.incarnation.load(Relaxed);
        self.behaviour.restart.store(true, Relaxed);
        until("another life", || self.behaviour.incarnation.load(Relaxed) != before);
    }

    pub fn items(&self) -> u64 {
        self.behaviour.items.load(Relaxed)
    }
}

/// One life of a replica.
fn live(behaviour: &Behaviour, socket: &UdpSocket, key: ClusterKey) {
    let start = Instant::now();
    let incarnation = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8) >> 16 | 1;
    let settings = Settings { cluster_key: key, ..Settings::simulated(incarnation, 1 << 20) };
    let replica = replica::Replica::new(settings);
    behaviour.incarnation.store(incarnation, Relaxed);
    let mut buffer = [0; 2048];
    while !behaviour.stop.load(Relaxed) && !behaviour.restart.swap(false, Relaxed) {
        let received = socket.recv_from(&mut buffer);
        let now_ms = 1 + start.elapsed().as_millis() as u64;
        let mut actions = replica.tick(now_ms);
        if let Ok((len, SocketAddr::V4(from))) = received
            && !behaviour.silent.load(Relaxed)
        {
            let bytes = &buffer[..len];
            let is_write = Packet::parse(bytes).is_ok_and(|packet| packet.header.op == Op::Write);
            if !(is_write && behaviour.no_writes.load(Relaxed)) {
                actions.extend(replica.step(now_ms, Event::Datagram { from: from.into(), bytes }));
            }
        }
        behaviour.items.store(replica.usage().items, Relaxed);
        for action in actions {
            let Action::Send { to, bytes } = action else { continue };
            if let Some(bytes) = changed(behaviour, key, bytes) {
                socket.send_to(&bytes, SocketAddrV4::from(to)).unwrap();
            }
        }
    }
}

/// What becomes of a datagram that a replica sends.
fn changed(behaviour: &Behaviour, key: ClusterKey, bytes: Vec<u8>) -> Option<Vec<u8>> {
    let packet = Packet::parse(&bytes).unwrap();
    let used_bytes = behaviour.used_bytes.load(Relaxed);
    match packet.header.op {
        Op::WReply if behaviour.keeps_acks.load(Relaxed) => None,
        Op::HeartbeatAck if used_bytes != 0 => {
            let ack: HeartbeatAck = control::parse(&packet).unwrap();
            let header = packet.header;
            Some(control::seal(control::emit(header, &HeartbeatAck { used_bytes, ..ack }), key))
        }
        _ => Some(bytes),
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.behaviour.stop.store(true, Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "a replica panicked");
    }
}
