//! A shard on the loopback interface, in one thread: coordinator, agent and a replica that answers reads from a socket of
//! its own. It orders writes by executing them at once, so what it tells is linearizable.

use std::{
    collections::HashMap,
    net::{SocketAddr, SocketAddrV4, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use underpass_abi::abi::{UP_STATE_COMMITTED, UP_STATE_IDLE};
use underpass_protocol::{
    control::{self, Closed, Configuration, Located, MemberInfo, Opened},
    wire::{Header, Kind, Op, Operand, Packet, Reason, SessionId, Status},
};

/// What becomes of a request before the shard looks at it.
pub enum Fault {
    /// It is lost.
    Lose,
    /// It is handled, and its answer is lost.
    LoseAnswer,
    /// It is rejected.
    Reject(Reason),
    /// All sessions are forgotten first.
    Restart,
}

type Faults = Box<dyn FnMut(&Header) -> Option<Fault> + Send>;

/// A shard that runs until dropped.
pub struct Shard {
    pub coordinator: SocketAddrV4,
    /// Writes executed.
    pub writes: Arc<AtomicU64>,
    /// Sessions open.
    pub sessions: Arc<AtomicU64>,
    /// What it answers to LOCATE.
    located: Arc<Mutex<Option<Configuration>>>,
    faults: Arc<Mutex<Option<Faults>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Shard {
    pub fn start(id: u32) -> Self {
        let coordinator = UdpSocket::bind("127.0.0.1:0").unwrap();
        coordinator.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let SocketAddr::V4(address) = coordinator.local_addr().unwrap() else { unreachable!() };
        let mut shard = Self {
            coordinator: address,
            writes: Arc::default(),
            sessions: Arc::default(),
            located: Arc::default(),
            faults: Arc::default(),
            stop: Arc::default(),
            thread: None,
        };
        let mut state = State {
            id,
            coordinator,
            replica: UdpSocket::bind("127.0.0.1:0").unwrap(),
            // No two coordinators give the same session.
            generation: u64::from(address.port()) << 24,
            seq: 1 << 40,
            sessions: HashMap::new(),
            items: HashMap::new(),
            located: shard.located.clone(),
            writes: shard.writes.clone(),
            open: shard.sessions.clone(),
        };
        let (stop, faults) = (shard.stop.clone(), shard.faults.clone());
        let thread = thread::spawn(move || {
            let mut buffer = [0; 2048];
            while !stop.load(Ordering::Relaxed) {
                let Ok((length, from)) = state.coordinator.recv_from(&mut buffer) else { continue };
                let packet = Packet::parse(&buffer[..length]).expect("clients send packets");
                assert_eq!(packet.header.reply_to().map(SocketAddrV4::from).map(SocketAddr::V4), Some(from));
                let fault = faults.lock().unwrap().as_mut().and_then(|faults| faults(&packet.header));
                state.handle(&packet, fault);
            }
        });
        shard.thread = Some(thread);
        shard
    }

    /// From now on asks `faults` about every request.
    pub fn set_faults(&self, faults: impl FnMut(&Header) -> Option<Fault> + Send + 'static) {
        *self.faults.lock().unwrap() = Some(Box::new(faults));
    }

    /// From now on it turns requests away and tells, as `other` does, that `other` coordinates since `epoch`.
    pub fn hand_over(&self, other: &Self, epoch: u32) {
        let member = MemberInfo { index: 0, id: 1, incarnation: 7, addr: [127, 0, 0, 1].into(), port: 1, active: true };
        let (coordinator_addr, coordinator_port) = (*other.coordinator.ip(), other.coordinator.port());
        let configuration = Configuration {
            shard: 0,
            epoch,
            tenure: epoch,
            lease_ms: 1000,
            coordinator_addr,
            coordinator_port,
            members: vec![member],
        };
        for shard in [self, other] {
            *shard.located.lock().unwrap() = Some(configuration.clone());
        }
        other.clear_faults();
        self.set_faults(|header| (header.op != Op::Locate).then_some(Fault::Reject(Reason::NotCoordinator)));
    }

    pub fn clear_faults(&self) {
        *self.faults.lock().unwrap() = None;
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let result = thread.join();
            if !thread::panicking() {
                result.expect("the shard's thread panicked");
            }
        }
    }
}

#[derive(Default)]
struct Session {
    token: u64,
    request: u64,
    /// The latest write's status, seq and number.
    result: Option<(Status, u64, i64)>,
}

struct State {
    id: u32,
    coordinator: UdpSocket,
    replica: UdpSocket,
    generation: u64,
    seq: u64,
    sessions: HashMap<u64, Session>,
    items: HashMap<Vec<u8>, (Vec<u8>, u64)>,
    located: Arc<Mutex<Option<Configuration>>>,
    writes: Arc<AtomicU64>,
    open: Arc<AtomicU64>,
}

impl State {
    fn handle(&mut self, packet: &Packet<'_>, fault: Option<Fault>) {
        let header = packet.header;
        let answer = match fault {
            Some(Fault::Lose) => return,
            Some(Fault::Reject(reason)) => reject(packet, reason),
            Some(Fault::LoseAnswer) => {
                self.answer(packet);
                return;
            }
            Some(Fault::Restart) => {
                self.sessions.clear();
                self.answer(packet)
            }
            None => self.answer(packet),
        };
        self.open.store(self.sessions.len() as u64, Ordering::Relaxed);
        let Some(answer) = answer else { return };
        let socket = if answer[3] == Op::RReply.to_wire() { &self.replica } else { &self.coordinator };
        socket.send_to(&answer, SocketAddrV4::from(header.reply_to().unwrap())).unwrap();
    }

    fn answer(&mut self, packet: &Packet<'_>) -> Option<Vec<u8>> {
        let header = packet.header;
        if header.shard != self.id {
            return reject(packet, Reason::Shard);
        }
        match header.op {
            Op::Open => {
                assert!(packet.value.len() >= control::OPEN_PADDING);
                let mut answer = Header { op: Op::Opened, ..header };
                if header.token == 0 {
                    answer.token = 0x70_6b_65_6e;
                } else {
                    self.generation += 1;
                    answer.session = SessionId::new(self.generation, 0);
                    answer.token = self.generation * 1_000_003;
                    self.sessions.insert(answer.session.0, Session { token: answer.token, ..Session::default() });
                }
                let configuration = Configuration {
                    shard: self.id,
                    epoch: 1,
                    tenure: 1,
                    lease_ms: 1000,
                    coordinator_addr: [127, 0, 0, 1].into(),
                    coordinator_port: 5550,
                    members: Vec::new(),
                };
                Some(control::emit(answer, &Opened { idle_ms: 60_000, configuration: Some(configuration) }))
            }
            Op::Locate => {
                assert!(packet.value.len() >= control::OPEN_PADDING);
                let configuration = self.located.lock().unwrap().clone()?;
                let port = self.coordinator.local_addr().unwrap().port();
                let serves = configuration.coordinator_port == port;
                Some(control::emit(Header { op: Op::Located, ..header }, &Located { configuration, serves }))
            }
            Op::Close => {
                let session = self.sessions.remove(&header.session.0);
                let request = session.as_ref().map_or(0, |session| session.request);
                let done = session.as_ref().is_some_and(|session| session.result.is_some());
                let state = if done { UP_STATE_COMMITTED } else { UP_STATE_IDLE };
                let closed = Closed { closed: session.is_some(), request, state };
                Some(control::emit(Header { op: Op::Closed, ..header }, &closed))
            }
            Op::Read | Op::Write if self.sessions.get(&header.session.0).is_none_or(|s| s.token != header.token) => {
                reject(packet, Reason::Session)
            }
            Op::Read => Some(match self.items.get(packet.key) {
                Some((value, cas)) => Header { op: Op::RReply, seq: *cas, ..header }.datagram(packet.key, value),
                None => {
                    let status = Status::NotFound.to_wire();
                    Header { op: Op::RReply, status, ..header }.datagram(packet.key, b"")
                }
            }),
            Op::Write => {
                let session = &self.sessions[&header.session.0];
                if header.request < session.request {
                    return None;
                }
                let recorded = session.result.filter(|_| header.request == session.request);
                let result = recorded.unwrap_or_else(|| self.execute(packet));
                let session = self.sessions.get_mut(&header.session.0).unwrap();
                (session.request, session.result) = (header.request, Some(result));
                let (status, seq, number) = result;
                let answer = Header { op: Op::WReply, status: status.to_wire(), seq, ..header };
                Some(answer.datagram(packet.key, &number.to_be_bytes()))
            }
            _ => None,
        }
    }

    fn execute(&mut self, packet: &Packet<'_>) -> (Status, u64, i64) {
        self.seq += 1;
        self.writes.fetch_add(1, Ordering::Relaxed);
        let kind = Kind::from_wire(packet.header.kind).unwrap();
        let operand = Operand::parse(kind, packet.header.flags, packet.value).unwrap();
        let old = self.items.get(packet.key).cloned();
        let data = operand.data.to_vec();
        let result = match (kind, old) {
            (Kind::Put, _) => Ok(Some(data)),
            (Kind::Add, Some(_)) => Err(Status::NotStored),
            (Kind::Add, None) => Ok(Some(data)),
            (Kind::Replace | Kind::Append | Kind::Prepend, None) => Err(Status::NotStored),
            (_, None) => Err(Status::NotFound),
            (Kind::Delete, _) => Ok(None),
            (Kind::Replace, _) => Ok(Some(data)),
            (Kind::Cas, Some((_, cas))) if cas == operand.expected => Ok(Some(data)),
            (Kind::Cas, _) => Err(Status::Exists),
            (Kind::Append, Some((old, _))) => Ok(Some([&old[..], &data].concat())),
            (Kind::Prepend, Some((old, _))) => Ok(Some([&data[..], &old].concat())),
            (Kind::Touch, _) => return (Status::Ok, self.seq, 0),
            (Kind::Incr, Some((old, _))) => {
                match std::str::from_utf8(&old).ok().and_then(|text| text.parse::<i64>().ok()) {
                    None => Err(Status::NotANumber),
                    Some(number) => match number.checked_add(operand.delta) {
                        None => Err(Status::Overflow),
                        Some(sum) => {
                            self.items.insert(packet.key.to_vec(), (sum.to_string().into_bytes(), self.seq));
                            return (Status::Ok, self.seq, sum);
                        }
                    },
                }
            }
        };
        let status = match result {
            Ok(Some(value)) => {
                self.items.insert(packet.key.to_vec(), (value, self.seq));
                Status::Ok
            }
            Ok(None) => {
                self.items.remove(packet.key);
                Status::Ok
            }
            Err(status) => status,
        };
        (status, self.seq, 0)
    }
}

fn reject(packet: &Packet<'_>, reason: Reason) -> Option<Vec<u8>> {
    let op = match packet.header.op {
        Op::Read => Op::RReject,
        Op::Write => Op::WReject,
        _ => Op::ControlReject,
    };
    Some(Header { op, status: reason.to_wire(), ..packet.header }.datagram(packet.key, packet.value))
}
