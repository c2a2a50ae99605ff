//! Where one coordinator is measured: a host for it, one for everything else, and a cable between them.
//!
//! The coordinator's side lives on core 0: its device's receive work (threaded NAPI) and all threads of its process.
//! Everything that plays clients and replicas lives on core 1.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    os::fd::OwnedFd,
    process::{self, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use underpass_protocol::{
    control::{self, OPEN_PADDING, Open, Opened},
    replica::{Action, Event, Replica, Settings},
    wire::{DATAGRAM_MAX, Endpoint, Header, Op, Packet, Reason, SessionId},
};

use crate::{
    cpu::{self, KeepAwake, Meter},
    load::{Addresses, Counts, Load, Macs, Session},
    netns::{self, Netns},
    workload::Workload,
};

/// Core of the coordinator's side.
pub const COORDINATOR_CORE: usize = 0;
/// Core of the load generator and the sinks.
pub const LOAD_CORE: usize = 1;
/// The shard that is measured.
pub const SHARD: u32 = 1;

const PORT: u16 = 5550;
const CLIENT_PORT: u16 = 40_000;

/// A data path, or a bound on what any could do, that requests are sent to.
pub trait Contender {
    /// Name, as in reports.
    fn name(&self) -> String;
    /// Brings it up on the bed, for this load.
    ///
    /// # Errors
    /// When it does not come up.
    fn start(&self, bed: &Bed, load: &Load) -> Result<Box<dyn Started>>;
}

/// A contender that takes requests. Dropping it takes it down.
pub trait Started {
    /// Processes whose time counts as the coordinator's.
    fn processes(&self) -> Vec<u32>;
    /// Whether its network stack sends packets whose checksum it leaves to the device.
    fn offloads_checksums(&self) -> bool;
    /// Epoch that its packets carry, and sessions to send from.
    ///
    /// # Errors
    /// When sessions cannot be opened.
    fn sessions(&self, bed: &Bed) -> Result<(u32, Vec<Session>)>;
    /// Takes it down in order.
    ///
    /// # Errors
    /// When it does not go.
    fn stop(self: Box<Self>) -> Result<()>;
}

/// Two hosts and a cable.
pub struct Bed {
    /// The coordinator's host.
    pub coordinator: Arc<Netns>,
    /// The host of clients and replicas.
    pub tester: Arc<Netns>,
    /// The coordinator's device.
    pub coordinator_device: String,
    /// The tester's device.
    pub tester_device: String,
    /// Addresses of all parties.
    pub addresses: Addresses,
    macs: Macs,
    /// Keeps the port that the kernel generator sends from, so that nothing answers for it.
    client: UdpSocket,
    _replicas: Replicas,
}

impl Bed {
    /// Builds it for this number of replicas.
    ///
    /// # Errors
    /// Without root, or with fewer than two cores.
    pub fn new(replicas: u8) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        ensure!(
            cpu::count() > LOAD_CORE,
            "this machine has one core for us: the load would take the coordinator's time; two are needed"
        );
        // Kernel threads are found by their device's name, so it is unique on the machine.
        let id = process::id() % 100_000 * 100 + NUMBER.fetch_add(1, Ordering::Relaxed) % 100;
        let (coordinator_device, tester_device) = (format!("upc{id}"), format!("upt{id}"));
        let (coordinator, tester) = (Arc::new(Netns::new()?), Arc::new(Netns::new()?));
        netns::connect(&coordinator, &coordinator_device, &tester, &tester_device)?;

        let host = |last: u8| Ipv4Addr::new(10, 99, 0, last);
        let addresses = Addresses {
            coordinator: Endpoint { addr: host(1), port: PORT },
            client: Endpoint { addr: host(2), port: CLIENT_PORT },
            replica: Endpoint { addr: host(16), port: PORT },
            replicas,
        };
        coordinator.ip(&format!("addr add {}/24 dev {coordinator_device}", addresses.coordinator.addr))?;
        tester.ip(&format!("addr add {}/24 dev {tester_device}", addresses.client.addr))?;
        for index in 0..replicas {
            tester.ip(&format!("addr add {}/24 dev {tester_device}", addresses.replica(index).addr))?;
        }
        for (netns, device) in [(&coordinator, &coordinator_device), (&tester, &tester_device)] {
            netns.ip(&format!("link set {device} up"))?;
        }
        let macs = Macs { tester: tester.mac(&tester_device)?, coordinator: coordinator.mac(&coordinator_device)? };
        let client = bind(&tester, addresses.client)?;
        let replicas = Replicas::start(&tester, &addresses)?;
        Ok(Self {
            coordinator,
            tester,
            coordinator_device,
            tester_device,
            addresses,
            macs,
            client,
            _replicas: replicas,
        })
    }

    /// Starts a contender and attaches the load to it.
    ///
    /// # Errors
    /// When either fails.
    pub fn run(&self, contender: &dyn Contender) -> Result<Match<'_>> {
        let mut load = Load::attach(self.tester.clone(), &self.tester_device, self.addresses)?;
        let started = contender.start(self, &load)?;
        // Only now is there a NAPI on both devices.
        self.coordinator.write_device(&self.coordinator_device, "threaded", "1")?;
        self.tester.write_device(&self.tester_device, "threaded", "1")?;
        let receiver = cpu::napi_thread(&self.tester_device)?;
        cpu::pin(receiver, LOAD_CORE)?;
        // The sink shares its core with the generator, which never rests: it goes first, so that answers are taken as
        // soon as they come.
        cpu::prefer(receiver)?;
        let napi = cpu::napi_thread(&self.coordinator_device)?;
        cpu::pin(napi, COORDINATOR_CORE)?;
        let threads = [Some(napi), cpu::ksoftirqd(COORDINATOR_CORE)].into_iter().flatten().collect();
        let meter = Meter::new(threads, started.processes());
        let (epoch, sessions) = started.sessions(self)?;
        load.set_sessions(epoch, &sessions)?;
        Ok(Match { bed: self, load, started, meter, _awake: KeepAwake::start()? })
    }

    /// Opens sessions at the coordinator, all for the one client.
    ///
    /// # Errors
    /// When the coordinator opens none for ten seconds.
    pub fn open_sessions(&self, count: usize) -> Result<(u32, Vec<Session>)> {
        let mut epoch = 0;
        let mut sessions = Vec::with_capacity(count);
        let patience = Duration::from_secs(10);
        let mut until = Instant::now() + patience;
        let mut token = 0;
        let mut last = String::from("it does not answer");
        for request in 1u64.. {
            if sessions.len() == count {
                break;
            }
            ensure!(
                Instant::now() < until,
                "the coordinator at {} opens no more than {} of {count} sessions: {last}",
                self.addresses.coordinator,
                sessions.len()
            );
            let mut header = Header::new(Op::Open);
            header.shard = SHARD;
            header.request = request;
            header.token = token;
            header.set_reply_to(self.addresses.client);
            let datagram = control::emit(header, &Open { padding: "x".repeat(OPEN_PADDING) });
            self.client.send_to(&datagram, std::net::SocketAddrV4::from(self.addresses.coordinator))?;
            let mut buffer = [0; DATAGRAM_MAX];
            let Ok(len) = self.client.recv(&mut buffer) else { continue };
            let Ok(packet) = Packet::parse(&buffer[..len]) else { continue };
            if packet.header.request != request {
                continue;
            }
            match packet.header.op {
                Op::Opened if packet.header.session == SessionId(0) => token = packet.header.token,
                Op::Opened => {
                    let opened: Opened = control::parse(&packet).context("an OPENED that does not parse")?;
                    epoch = opened.configuration.map_or(packet.header.epoch, |configuration| configuration.epoch);
                    sessions.push(Session { id: packet.header.session, token: packet.header.token });
                    until = Instant::now() + patience;
                    token = 0;
                }
                op => {
                    let reason = Reason::from_wire(packet.header.status).map(|reason| reason.to_string());
                    last = format!("the last answer was {op}, {}", reason.unwrap_or_default());
                    // From the beginning: it may not have been ready, or the token may be too old.
                    token = 0;
                    thread::sleep(Duration::from_millis(20));
                }
            }
        }
        Ok((epoch, sessions))
    }
}

/// One contender under load.
pub struct Match<'a> {
    bed: &'a Bed,
    load: Load,
    started: Box<dyn Started>,
    meter: Meter,
    _awake: KeepAwake,
}

/// What one run of one workload on one contender showed.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Length of the run.
    pub elapsed: Duration,
    /// Time that the coordinator's side used of its core.
    pub busy: Duration,
    /// What was counted.
    pub counts: Counts,
}

impl Sample {
    /// Requests completed in a second.
    pub fn rate(&self) -> f64 {
        self.counts.completed() as f64 / self.elapsed.as_secs_f64()
    }

    /// Share of the core that the coordinator's side used, 0 to 1.
    pub fn utilisation(&self) -> f64 {
        self.busy.as_secs_f64() / self.elapsed.as_secs_f64()
    }

    /// Requests completed in each second of the core that was used for them.
    pub fn per_core_second(&self) -> f64 {
        self.counts.completed() as f64 / self.busy.as_secs_f64()
    }
}

impl Match<'_> {
    /// Checks every packet of a short run, and that nothing was lost or made up: a contender that sends garbage is not
    /// measured.
    ///
    /// # Errors
    /// Says what was wrong.
    pub fn verify(&mut self, workload: &Workload, length: Duration) -> Result<Counts> {
        let counts = self.send(workload, length, true)?.counts;
        let reads: u64 = counts.reads.iter().sum();
        let (sent, answered) = if counts.reflected > 0 {
            (counts.reads_sent + counts.writes_sent + counts.writes_again, counts.reflected)
        } else {
            (counts.reads_sent + counts.writes_sent, reads + counts.commits + counts.rejected())
        };
        ensure!(
            answered <= sent && counts.commits <= counts.writes_sent && reads <= counts.reads_sent,
            "more came back than was sent: {counts:?}"
        );
        let lost = sent - answered;
        ensure!(
            lost * 100 <= sent,
            "{lost} of {sent} requests were lost, although no more are under way than queues hold: {counts:?}"
        );
        ensure!(counts.completed() > 0, "nothing was completed: {counts:?}");
        if workload.write_percent == 0.0 && reads >= 10_000 && counts.reflected == 0 {
            let served = counts.reads.iter().take(usize::from(self.bed.addresses.replicas));
            ensure!(
                served.clone().all(|count| *count > reads / 10),
                "reads do not go to all replicas: {:?}",
                served.collect::<Vec<_>>()
            );
        }
        Ok(counts)
    }

    /// Measures one run.
    ///
    /// # Errors
    /// When the load fails, or what comes back is wrong.
    pub fn measure(&mut self, workload: &Workload, length: Duration) -> Result<Sample> {
        self.send(workload, length, false)
    }

    fn send(&mut self, workload: &Workload, length: Duration, verify: bool) -> Result<Sample> {
        self.load.set_workload(workload, SHARD, &self.bed.macs)?;
        self.load.set_checks(verify, self.started.offloads_checksums());
        let before = self.load.counts();
        let sending = self.load.start(LOAD_CORE)?;
        // What is counted begins after caches, queues and the scheduler have settled.
        thread::sleep(length / 10);
        let (first, busy, start) = (self.load.counts(), self.meter.read(), Instant::now());
        thread::sleep(length);
        let (last, busy, elapsed) = (self.load.counts(), self.meter.read().saturating_sub(busy), start.elapsed());
        sending.stop()?;
        self.load.drain(LOAD_CORE)?;
        let all = self.load.counts().since(&before);
        self.load.check_errors(&all)?;
        ensure!(all.completed() > 0, "nothing was completed: {all:?}");
        let counts = if verify { all } else { last.since(&first) };
        Ok(Sample { elapsed, busy, counts })
    }

    /// Processes of the contender.
    pub fn processes(&self) -> Vec<u32> {
        self.started.processes()
    }

    /// Keeps the contender under load for so long, and has it looked at every `step`.
    ///
    /// # Errors
    /// As [`Self::measure`], and those of `look`.
    pub fn observe(
        &mut self,
        workload: &Workload,
        length: Duration,
        step: Duration,
        mut look: impl FnMut(Duration) -> Result<()>,
    ) -> Result<Counts> {
        self.load.set_workload(workload, SHARD, &self.bed.macs)?;
        self.load.set_checks(false, self.started.offloads_checksums());
        let before = self.load.counts();
        let sending = self.load.start(LOAD_CORE)?;
        let start = Instant::now();
        while start.elapsed() < length {
            crate::process::sleep(step.min(length.saturating_sub(start.elapsed())))?;
            ensure!(!sending.failed(), "the load generator ended");
            look(start.elapsed())?;
        }
        sending.stop()?;
        self.load.drain(LOAD_CORE)?;
        let counts = self.load.counts().since(&before);
        self.load.check_errors(&counts)?;
        Ok(counts)
    }

    /// Takes the contender down.
    ///
    /// # Errors
    /// When it does not go in order.
    pub fn stop(mut self) -> Result<()> {
        let result = self.started.stop();
        self.load.detach();
        result
    }
}

/// The bare `XDP_TX` limit.
pub struct Reflector;

impl Reflector {
    /// Its name in reports.
    pub const NAME: &str = "bare XDP_TX";
}

impl Contender for Reflector {
    fn name(&self) -> String {
        Self::NAME.into()
    }

    fn start(&self, bed: &Bed, load: &Load) -> Result<Box<dyn Started>> {
        let _link = load.attach_reflector(&bed.coordinator, &bed.coordinator_device)?;
        Ok(Box::new(StartedReflector { _link }))
    }
}

struct StartedReflector {
    _link: OwnedFd,
}

impl Started for StartedReflector {
    fn processes(&self) -> Vec<u32> {
        Vec::new()
    }

    fn offloads_checksums(&self) -> bool {
        false
    }

    fn sessions(&self, _: &Bed) -> Result<(u32, Vec<Session>)> {
        Ok((0, (0..256).map(|index| Session { id: SessionId::new(1, index), token: u64::from(index) + 1 }).collect()))
    }

    fn stop(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

fn bind(netns: &Netns, at: Endpoint) -> Result<UdpSocket> {
    let socket = netns.run(|| {
        UdpSocket::bind(std::net::SocketAddrV4::from(at)).with_context(|| format!("cannot bind a socket to {at}"))
    })?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    Ok(socket)
}

/// The replicas' answers to the coordinator's agent; data packets never come here.
struct Replicas {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Replicas {
    fn start(netns: &Netns, addresses: &Addresses) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..addresses.replicas)
            .map(|index| -> Result<_> {
                let socket = bind(netns, addresses.replica(index))?;
                let stop = stop.clone();
                Ok(thread::Builder::new().name("replica".into()).spawn(move || {
                    let (mut replica, start) = (new_replica(1), Instant::now());
                    while !stop.load(Ordering::Relaxed) {
                        answer_control(&socket, &mut replica, start);
                    }
                })?)
            })
            .collect::<Result<_>>()?;
        Ok(Self { stop, threads })
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Hears what is for it, once.
fn answer_control(socket: &UdpSocket, replica: &mut Replica, start: Instant) {
    let mut buffer = [0; DATAGRAM_MAX];
    let Ok((len, SocketAddr::V4(from))) = socket.recv_from(&mut buffer) else { return };
    let Ok(packet) = Packet::parse(&buffer[..len]) else { return };
    if !packet.header.op.is_control() {
        return;
    }
    // Each coordinator comes with a shard that is on no record yet: what there was before is given up.
    let anew = packet.header.op == Op::Install && packet.header.epoch == 0;
    if anew && replica.membership().is_some() {
        *replica = new_replica(replica.incarnation() + 1);
    }
    let event = Event::Datagram { from: from.into(), bytes: &buffer[..len] };
    for action in replica.step(1 + start.elapsed().as_millis() as u64, event) {
        if let Action::Send { to, bytes } = action {
            // A lost answer is asked for again.
            let _ = socket.send_to(&bytes, std::net::SocketAddrV4::from(to));
        }
    }
}

/// A replica that never gets a write: sinks take them.
fn new_replica(incarnation: u64) -> Replica {
    Replica::new(Settings::simulated(incarnation, 1 << 20))
}

/// Runs `underpass` with these arguments in a namespace, on the coordinator's core.
///
/// # Errors
/// When the program cannot be started.
pub fn command(netns: &Netns, program: &std::path::Path, core: usize) -> Result<Command> {
    let mut command = Command::new(program);
    netns.apply(&mut command);
    cpu::pin_command(&mut command, core)?;
    Ok(command)
}
