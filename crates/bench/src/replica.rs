//! `underpass bench replica`: GETs from one core of a replica, against memcached over UDP on the same core.

use std::{
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use rand::{SeedableRng, rngs::SmallRng};
use serde::Serialize;
use underpass_abi::wire::UP_EPOCH_SHIFT;
use underpass_protocol::{
    control::{self, ClusterKey, Configuration, Heartbeat, HeartbeatAck, Install, Installed, MemberInfo},
    wire::{DATAGRAM_MAX, Endpoint, Header, Op, Packet},
};

use crate::{
    bed::{COORDINATOR_CORE as SERVER_CORE, LOAD_CORE, SHARD},
    cpu::{self, KeepAwake, Meter},
    exchange::Exchange,
    netns::{self, Netns},
    peer::{EPOCH, Memcached, Protocol, SLOTS_MAX, Underpass},
    process::{self, Daemon, Directory},
    report::{self, Machine, Ratio, Spread, Table},
    system::Size,
    workload::{Items, Popularity, Workload},
};

/// Options of `underpass bench replica`.
#[derive(Clone, Debug, Args)]
pub struct ReplicaArgs {
    /// Seconds of each measurement
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// Rounds: in each, both servers take their turn; medians count
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Number of items
    #[arg(long, default_value_t = 100_000)]
    pub items: u64,
    /// Bytes of a key
    #[arg(long, default_value_t = 16)]
    pub key_size: usize,
    /// Bytes of a value
    #[arg(long, default_value_t = 128)]
    pub value_size: usize,
    /// Popularity of items: uniform, or zipf and an exponent
    #[arg(long, default_value = "uniform")]
    pub workload: Popularity,
    /// Requests under way at any time
    #[arg(long, default_value_t = 128)]
    pub outstanding: usize,
    /// Seed of everything random
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The program memcached
    #[arg(long, value_name = "PATH", default_value = "memcached")]
    pub memcached: PathBuf,
    /// Write the results here, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Results of one server.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The server's name.
    pub server: String,
    /// GETs answered in a second.
    pub rate: Spread,
    /// Share of its core that it used, 0 to 1.
    pub utilisation: Spread,
    /// GETs answered in a second of the core that was used.
    pub per_core_second: Spread,
    /// Requests without an answer, in all rounds.
    pub lost: u64,
}

/// Everything that `underpass bench replica` found.
#[derive(Clone, Debug, Serialize)]
pub struct ReplicaReport {
    /// Where.
    pub machine: Machine,
    /// What was asked for.
    pub workload: Workload,
    /// Seconds of each measurement.
    pub seconds: f64,
    /// Rounds.
    pub rounds: usize,
    /// Requests under way at any time.
    pub outstanding: usize,
    /// Results.
    pub cells: Vec<Cell>,
    /// What they come to.
    pub ratios: Vec<Ratio>,
}

impl ReplicaReport {
    /// What is printed at the end.
    pub fn text(&self) -> String {
        let mut table = Table::new(["server", "GETs/s", "core busy", "per core-second", "lowest", "highest", "lost"]);
        for cell in &self.cells {
            table.row([
                cell.server.clone(),
                report::count(cell.rate.median),
                format!("{:.0} %", cell.utilisation.median * 100.0),
                report::count(cell.per_core_second.median),
                report::count(cell.per_core_second.min),
                report::count(cell.per_core_second.max),
                cell.lost.to_string(),
            ]);
        }
        format!(
            "\nGETs over UDP from one core ({}; {} items of {} + {} bytes, {}; {} at a time; medians of {} rounds of {} s)\
             \n\n{table}\nBoth on the same core, the interrupt work of their device included; the same client on the other \
             core.\n\n{}",
            self.machine,
            self.workload.items,
            self.workload.key_size,
            self.workload.value_size,
            self.workload.popularity,
            self.outstanding,
            self.rounds,
            self.seconds,
            report::ratios_table(&self.ratios)
        )
    }
}

fn sealed<T: Serialize>(header: Header, message: &T) -> Vec<u8> {
    control::seal(control::emit(header, message), ClusterKey::default())
}

/// A server under measurement.
struct Server {
    daemon: Daemon,
    socket: UdpSocket,
    protocol: Box<dyn Protocol>,
    meter: Meter,
    // Held until the server has ended.
    _directory: Directory,
    _hosts: (Netns, Netns),
}

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 2);
const PORT: u16 = 5550;
const REPLICA: &str = "replica";
const MEMCACHED: &str = "memcached";

impl Server {
    fn start(name: &str, args: &ReplicaArgs, workload: &Workload) -> Result<Self> {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let id = std::process::id() % 100_000 * 100 + NUMBER.fetch_add(1, Ordering::Relaxed) % 100;
        let (server_device, client_device) = (format!("ups{id}"), format!("upg{id}"));
        let (server, client) = (Netns::new()?, Netns::new()?);
        netns::connect(&server, &server_device, &client, &client_device)?;
        let mut threads = Vec::new();
        for (host, device, addr, core) in
            [(&server, &server_device, SERVER, SERVER_CORE), (&client, &client_device, CLIENT, LOAD_CORE)]
        {
            host.ip(&format!("addr add {addr}/24 dev {device}"))?;
            host.ip(&format!("link set {device} up"))?;
            // GRO gives a veth a NAPI, which can then have a thread, which can be pinned and charged.
            host.set_gro(device, true)?;
            host.write_device(device, "threaded", "1")?;
            let thread = cpu::napi_thread(device)?;
            cpu::pin(thread, core)?;
            threads.push(thread);
        }
        let directory = Directory::new()?;
        let memory_mib = Size::memory_for(workload);
        let mut command = match name {
            MEMCACHED => {
                let mut command = Command::new(&args.memcached);
                command.args(["-u", "root", "-p", "0", "-t", "1", "-l", &SERVER.to_string(), "-U", &PORT.to_string()]);
                command.args(["-m", &(memory_mib * 2).to_string()]);
                command
            }
            _ => {
                let mut command = Command::new(process::program()?);
                command.args(["replica", "--listen", &format!("{SERVER}:{PORT}"), "--memory", &memory_mib.to_string()]);
                command.args(["--cpus", &SERVER_CORE.to_string()]);
                command.arg("--control").arg(directory.path.join("control.sock"));
                command
            }
        };
        server.apply(&mut command);
        cpu::pin_command(&mut command, SERVER_CORE)?;
        let daemon = Daemon::start(name, command, directory.path.join("log"))
            .with_context(|| format!("{name}: is it installed? (apt-get install memcached)"))?;
        let socket = client.run(|| {
            let socket = UdpSocket::bind(SocketAddrV4::new(CLIENT, PORT))?;
            socket.connect(SocketAddrV4::new(SERVER, PORT))?;
            Ok(socket)
        })?;
        let meter = Meter::new(
            [Some(threads[0]), cpu::ksoftirqd(SERVER_CORE)].into_iter().flatten().collect(),
            vec![daemon.id()],
        );
        let protocol: Box<dyn Protocol> = match name {
            MEMCACHED => Box::new(Memcached::new(*workload)),
            _ => Box::new(Underpass::new(*workload, Endpoint { addr: CLIENT, port: PORT })),
        };
        let mut started = Self { daemon, socket, protocol, meter, _directory: directory, _hosts: (server, client) };
        if name == MEMCACHED {
            started.await_memcached(workload)?;
        } else {
            started.install(args.outstanding)?;
        }
        started.load(args, workload)?;
        Ok(started)
    }

    fn ask(&mut self, datagram: &[u8]) -> Result<Vec<u8>> {
        self.socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let until = Instant::now() + Duration::from_secs(10);
        let mut buffer = [0; DATAGRAM_MAX];
        loop {
            self.daemon.check()?;
            ensure!(Instant::now() < until, "the server does not answer; it said:\n{}", self.daemon.said());
            // Until it listens, its host says so.
            match self.socket.send(datagram).and_then(|_| self.socket.recv(&mut buffer)) {
                Ok(len) => return Ok(buffer[..len].to_vec()),
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn await_memcached(&mut self, workload: &Workload) -> Result<()> {
        let mut datagram = Vec::new();
        self.protocol.store(0, 0, &mut datagram);
        let answer = self.ask(&datagram)?;
        ensure!(self.protocol.answer(&answer).is_some(), "memcached does not store {} bytes", workload.value_size);
        Ok(())
    }

    /// Takes the replica into a shard of its own, whose coordinator is this client.
    fn install(&mut self, outstanding: usize) -> Result<()> {
        let mut incarnation = 0;
        for _ in 0..2 {
            let member = MemberInfo { index: 0, id: 1, incarnation, addr: SERVER, port: PORT, active: true };
            let configuration = Configuration {
                shard: SHARD,
                epoch: EPOCH,
                tenure: EPOCH,
                // No heartbeats come while it is measured.
                lease_ms: 1 << 40,
                coordinator_addr: CLIENT,
                coordinator_port: PORT,
                members: vec![member],
            };
            let sessions = outstanding.next_power_of_two() as u32;
            let mut header = Header::new(Op::Install);
            header.epoch = EPOCH;
            header.shard = SHARD;
            header.set_reply_to(Endpoint { addr: CLIENT, port: PORT });
            let install = Install { incarnation, index: 0, reset: false, configuration, sessions };
            let answer = self.ask(&sealed(header, &install))?;
            let packet = Packet::parse(&answer).context("the replica's answer to INSTALL")?;
            let installed: Installed = control::parse(&packet).context("the replica's answer to INSTALL")?;
            ensure!(installed.refusal.is_empty(), "the replica refuses: {}", installed.refusal);
            if installed.epoch == EPOCH {
                // It answers reads once it has heard its stamp again.
                let stamp = self.heartbeat(0, None)?.stamp;
                self.heartbeat(0, Some(stamp))?;
                return Ok(());
            }
            incarnation = installed.incarnation;
        }
        bail!("the replica does not take part")
    }

    fn heartbeat(&mut self, stable: u64, echo: Option<u64>) -> Result<HeartbeatAck> {
        let mut header = Header::new(Op::Heartbeat);
        (header.epoch, header.shard) = (EPOCH, SHARD);
        let heartbeat = Heartbeat { stable, time: 1_700_000_000_000, echo, donor: None };
        let answer = self.ask(&sealed(header, &heartbeat))?;
        let packet = Packet::parse(&answer).context("the replica's answer to HEARTBEAT")?;
        control::parse(&packet).context("the replica's answer to HEARTBEAT")
    }

    fn load(&mut self, args: &ReplicaArgs, workload: &Workload) -> Result<()> {
        let mut left: Vec<u64> = (0..workload.items).rev().collect();
        for _ in 0..100 {
            let again = std::cell::RefCell::new(Vec::new());
            let mut exchange = Exchange::new(&self.socket, args.outstanding.min(64));
            exchange.run(self.protocol.as_mut(), true, || left.pop(), |item| again.borrow_mut().push(item))?;
            left = again.into_inner();
            if left.is_empty() {
                // What was written is resolved: the replica may drop what it kept for readers of the past.
                if self.daemon.name() == REPLICA {
                    self.heartbeat((u64::from(EPOCH) << UP_EPOCH_SHIFT) + workload.items, None)?;
                }
                return Ok(());
            }
        }
        bail!("{} items cannot be loaded", left.len())
    }

    /// GETs for so long: answered, lost, elapsed, time of the core used.
    fn measure(&mut self, args: &ReplicaArgs, workload: &Workload) -> Result<(u64, u64, Duration, Duration)> {
        let items = Items::new(workload.items, workload.popularity);
        let mut random = SmallRng::seed_from_u64(workload.seed);
        let length = Duration::from_secs_f64(args.seconds);
        let warm = Instant::now() + length / 10;
        let mut exchange = Exchange::new(&self.socket, args.outstanding);
        exchange.run(self.protocol.as_mut(), false, draw_until(&items, &mut random, warm), |_| {})?;
        let (answered, lost, busy, start) = (exchange.answered, exchange.lost, self.meter.read(), Instant::now());
        exchange.run(self.protocol.as_mut(), false, draw_until(&items, &mut random, start + length), |_| {})?;
        let busy = self.meter.read().saturating_sub(busy);
        Ok((exchange.answered - answered, exchange.lost - lost, start.elapsed(), busy))
    }
}

/// Items to ask for until this moment; the clock is looked at now and then.
fn draw_until(items: &Items, random: &mut SmallRng, end: Instant) -> impl FnMut() -> Option<u64> {
    let mut turn = 0u32;
    move || {
        turn = turn.wrapping_add(1);
        (!turn.is_multiple_of(64) || Instant::now() < end).then(|| items.draw(random))
    }
}

/// Runs the comparison.
///
/// # Errors
/// Bad options, no root, no memcached, a server that fails.
pub fn run(args: &ReplicaArgs) -> Result<ReplicaReport> {
    ensure!(args.rounds > 0 && args.seconds > 0.0, "at least one round of more than 0 seconds is needed");
    ensure!((1..=SLOTS_MAX).contains(&args.outstanding), "--outstanding must be 1 to {SLOTS_MAX}");
    report::check_output(args.json.as_deref())?;
    ensure!(cpu::count() > LOAD_CORE, "two cores are needed: one for the server, one for its client");
    let workload = Workload {
        items: args.items,
        popularity: args.workload,
        write_percent: 0.0,
        key_size: args.key_size,
        value_size: args.value_size,
        seed: args.seed,
    };
    workload.validate()?;
    ensure!(args.value_size >= 16, "values of {} bytes: 16 are needed to tell them apart", args.value_size);
    process::catch_interrupts()?;
    let _awake = KeepAwake::start()?;

    let names = [REPLICA, MEMCACHED];
    let mut samples = [Vec::new(), Vec::new()];
    let before = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0))?;
    for round in 0..args.rounds {
        for (name, samples) in names.iter().zip(&mut samples) {
            let result = (|| {
                let mut server = Server::start(name, args, &workload)?;
                cpu::pin(0, LOAD_CORE)?;
                let sample = server.measure(args, &workload)?;
                server.daemon.stop(Duration::from_secs(5))?;
                Ok::<_, anyhow::Error>(sample)
            })();
            // The next server is started from all cores again.
            nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &before)?;
            let sample = result.with_context(|| (*name).to_owned())?;
            let (answered, _, elapsed, busy) = sample;
            eprintln!(
                "round {} of {}: {name}: {} GETs/s, core {:.0} % busy",
                round + 1,
                args.rounds,
                report::count(answered as f64 / elapsed.as_secs_f64()),
                busy.as_secs_f64() / elapsed.as_secs_f64() * 100.0
            );
            samples.push(sample);
        }
    }
    let cells: Vec<Cell> = names
        .iter()
        .zip(&samples)
        .map(|(name, samples)| Cell {
            server: (*name).into(),
            rate: Spread::of(samples.iter().map(|(answered, _, elapsed, _)| *answered as f64 / elapsed.as_secs_f64())),
            utilisation: Spread::of(
                samples.iter().map(|(.., elapsed, busy)| busy.as_secs_f64() / elapsed.as_secs_f64()),
            ),
            per_core_second: Spread::of(
                samples.iter().map(|(answered, .., busy)| *answered as f64 / busy.as_secs_f64()),
            ),
            lost: samples.iter().map(|(_, lost, ..)| lost).sum(),
        })
        .collect();
    let of = |what: &str, pick: fn(&Cell) -> f64| {
        Ratio::new(format!("{what}: replica / memcached"), pick(&cells[0]), pick(&cells[1]), "1 or more")
    };
    let ratios =
        vec![of("GETs/s", |cell| cell.rate.median), of("GETs per core-second", |cell| cell.per_core_second.median)];
    let report = ReplicaReport {
        machine: Machine::here(),
        workload,
        seconds: args.seconds,
        rounds: args.rounds,
        outstanding: args.outstanding,
        cells,
        ratios,
    };
    if let Some(path) = &args.json {
        report::write_json(path, &report)?;
    }
    Ok(report)
}
