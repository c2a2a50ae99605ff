//! `underpass bench cache`: GETs over UDP from a stock memcached, alone and with the cache in front of it; and what the cache
//! costs those who do not use it.
//!
//! The server's side (its device's receive work, memcached, the cache's agent) has core 0, everything that plays clients
//! core 1. GETs come from the generator in the kernel, SETs over TCP from a thread beside it, so many for each GET.

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream, UdpSocket},
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use rustix::{
    net::{ipproto, sockopt},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use serde::Serialize;

use crate::{
    bed::{COORDINATOR_CORE as SERVER_CORE, LOAD_CORE},
    cache_load::{CacheLoad, Counts, ITEMS_MAX, attach_pass},
    cpu::{self, KeepAwake, Meter},
    load::Macs,
    netns::{self, Netns},
    process::{self, Daemon, Directory, STOP},
    report::{self, Machine, Ratio, Spread, Table},
    worker::Worker,
    workload::{Items, Popularity, key},
};

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 97, 0, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 97, 0, 2);
const PORT: u16 = 11211;
const CLIENT_PORT: u16 = 40_000;
const KEY_MIN: usize = 16;
const KEY_MAX: usize = 64;
const VALUE_MIN: f64 = 10.0;
const VALUE_MAX: f64 = 1000.0;
/// Bytes of a value of the traffic that the cache does not serve.
const LARGE_VALUE: usize = 16 * 1024;
/// Connections of those who write, or of other traffic, and requests on each where it is several at a time.
const CONNECTIONS: usize = 16;
const PIPELINE: usize = 16;
/// Bytes of memcached's UDP receive buffer: a frame takes a page and more.
const RECEIVE_BUFFER: usize = 4 << 20;

/// Microseconds for which the clients' device gathers frames: other machines' processors are not woken by the server's.
pub const COALESCE_US: u64 = 50;

/// Options of `underpass bench cache`.
#[derive(Clone, Debug, Args)]
pub struct CacheArgs {
    /// Seconds of each measurement
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// Seconds under load before it
    #[arg(long, default_value_t = 4.0)]
    pub warmup: f64,
    /// Rounds: in each, every server takes its turn; medians count
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Number of items
    #[arg(long, default_value_t = 100_000)]
    pub items: u64,
    /// Popularity of items: uniform, or zipf and an exponent
    #[arg(long, default_value = "zipf0.99")]
    pub workload: Popularity,
    /// GETs for each SET, in as many measurements; 0: no SETs
    #[arg(long, value_delimiter = ',', default_values_t = [0, 30])]
    pub gets_per_set: Vec<u64>,
    /// Sizes of the cache to measure, in MiB
    #[arg(long, value_delimiter = ',', default_values_t = [6, 16, 64])]
    pub memory: Vec<u32>,
    /// Microseconds for which the clients' device gathers frames, lest the server's core is charged with waking theirs; 0: none
    #[arg(long, default_value_t = COALESCE_US)]
    pub coalesce: u64,
    /// Items that a set of the cache holds; several to compare
    #[arg(long, value_delimiter = ',', default_values_t = [4])]
    pub ways: Vec<u32>,
    /// What to measure: GETs, the traffic of others, or both
    #[arg(long, value_enum, default_value_t = Part::Both)]
    pub part: Part,
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

/// Part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// GETs over UDP.
    Gets,
    /// Traffic that the cache does not serve.
    Others,
    /// Both.
    Both,
}

/// A server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Contender {
    threads: usize,
    /// MiB and ways of the cache in front.
    cache: Option<(u32, u32)>,
}

impl Contender {
    fn name(&self) -> String {
        match self.cache {
            None => format!("memcached -t {}", self.threads),
            Some((mib, ways)) => format!("cache of {mib} MiB, {ways} way{}", if ways == 1 { "" } else { "s" }),
        }
    }
}

/// What one measurement of GETs showed.
#[derive(Clone, Copy, Debug)]
struct Sample {
    rate: f64,
    busy_per_get: f64,
    utilisation: f64,
    hit_ratio: f64,
    found: f64,
    sets: f64,
    lost: f64,
    /// At a rate that every server bears: median, 99th percentile.
    latency: [f64; 2],
}

/// Results of one server.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The server's name.
    pub server: String,
    /// GETs for each SET; 0: no SETs.
    pub gets_per_set: u64,
    /// GETs answered in a second.
    pub rate: Spread,
    /// Nanoseconds of its core for each, SETs and the cache's agent included.
    pub busy_ns_per_get: Spread,
    /// Share of its core that it used, 0 to 1.
    pub utilisation: Spread,
    /// Share of GETs that the cache answered.
    pub hit_ratio: Spread,
    /// Share of GETs that found their item.
    pub found: Spread,
    /// SETs in a second.
    pub sets: Spread,
    /// Share of requests without an answer.
    pub lost: Spread,
    /// At a rate that all bear: median latency, in nanoseconds.
    pub latency_median_ns: Spread,
    /// And the 99th percentile.
    pub latency_p99_ns: Spread,
}

impl Cell {
    fn new(contender: &Contender, gets_per_set: u64, samples: &[Sample]) -> Self {
        let spread = |pick: fn(&Sample) -> f64| Spread::of(samples.iter().map(pick));
        Self {
            server: contender.name(),
            gets_per_set,
            rate: spread(|s| s.rate),
            busy_ns_per_get: spread(|s| s.busy_per_get),
            utilisation: spread(|s| s.utilisation),
            hit_ratio: spread(|s| s.hit_ratio),
            found: spread(|s| s.found),
            sets: spread(|s| s.sets),
            lost: spread(|s| s.lost),
            latency_median_ns: spread(|s| s.latency[0]),
            latency_p99_ns: spread(|s| s.latency[1]),
        }
    }
}

fn mix(gets_per_set: u64) -> String {
    match gets_per_set {
        0 => "GETs alone".into(),
        gets => format!("{gets} GETs to a SET"),
    }
}

/// Traffic that the cache does not serve.
#[derive(Clone, Debug, Serialize)]
pub struct Bystander {
    /// What it is.
    pub traffic: String,
    /// Requests in a second of the server's core without the cache.
    pub without: Spread,
    /// With a program that passes everything on: a veth copies every frame for any program, which other devices do not.
    pub program: Spread,
    /// And with it.
    pub with: Spread,
}

/// Everything that `underpass bench cache` found.
#[derive(Clone, Debug, Serialize)]
pub struct CacheReport {
    /// Where.
    pub machine: Machine,
    /// Number of items.
    pub items: u64,
    /// Their keys and values together, in bytes.
    pub data_bytes: u64,
    /// Their popularity.
    pub popularity: Popularity,
    /// Rounds.
    pub rounds: usize,
    /// Seconds of each measurement.
    pub seconds: f64,
    /// GETs in a second at which latencies were taken.
    pub steady_rate: f64,
    /// Results of GETs.
    pub cells: Vec<Cell>,
    /// Results of other traffic.
    pub bystanders: Vec<Bystander>,
    /// What they come to.
    pub ratios: Vec<Ratio>,
}

impl CacheReport {
    /// What is printed at the end.
    pub fn text(&self) -> String {
        let mut table = Table::new([
            "server",
            "requests",
            "GETs/s",
            "CPU/GET",
            "core busy",
            "hit ratio",
            "found",
            "SETs/s",
            "lost",
            "median",
            "99 %",
        ]);
        let percent = |spread: &Spread| format!("{:.1} %", spread.median * 100.0);
        for cell in &self.cells {
            table.row([
                cell.server.clone(),
                mix(cell.gets_per_set),
                report::count(cell.rate.median),
                report::time(cell.busy_ns_per_get.median),
                percent(&cell.utilisation),
                percent(&cell.hit_ratio),
                percent(&cell.found),
                report::count(cell.sets.median),
                percent(&cell.lost),
                report::time(cell.latency_median_ns.median),
                report::time(cell.latency_p99_ns.median),
            ]);
        }
        let mut others = Table::new(["traffic that the cache does not serve", "alone", "any program", "the cache"]);
        for bystander in &self.bystanders {
            others.row([
                bystander.traffic.clone(),
                report::count(bystander.without.median),
                report::count(bystander.program.median),
                report::count(bystander.with.median),
            ]);
        }
        // Not everything is measured each time.
        let gets = format!(
            "\n{table}\nThe server's side has one core, with the receive work of its device, all threads of memcached and \
             the cache's agent; clients have the other. Latencies are those at {} GETs a second.\n",
            report::count(self.steady_rate)
        );
        let others = format!(
            "\n{others}\nRequests in a second of the server's core; *any program*: one on the device that passes \
             everything on.\n"
        );
        format!(
            "\nGETs over UDP ({}; {} items, {}, keys of {KEY_MIN} to {KEY_MAX} and values of {VALUE_MIN} to {VALUE_MAX} \
             bytes, {} in all; SETs over TCP; medians of {} rounds of {} s)\n{}{}\n{}",
            self.machine,
            self.items,
            self.popularity,
            report::size(self.data_bytes as f64),
            self.rounds,
            self.seconds,
            if self.cells.is_empty() { "" } else { &gets },
            if self.bystanders.is_empty() { "" } else { &others },
            report::ratios_table(&self.ratios)
        )
    }
}

/// Key and length of the value of each item, always the same.
struct Dataset {
    keys: Vec<Vec<u8>>,
    lengths: Vec<usize>,
}

impl Dataset {
    fn new(args: &CacheArgs) -> Self {
        let mut random = SmallRng::seed_from_u64(args.seed);
        let keys = (0..args.items).map(|item| key(item, random.random_range(KEY_MIN..=KEY_MAX))).collect();
        // As many of 10 to 100 bytes as of 100 to 1000.
        let length = |random: &mut SmallRng| VALUE_MIN * (VALUE_MAX / VALUE_MIN).powf(random.random::<f64>());
        let lengths = (0..args.items).map(|_| length(&mut random) as usize).collect();
        Self { keys, lengths }
    }

    fn bytes(&self) -> u64 {
        self.keys.iter().map(|key| key.len() as u64).sum::<u64>() + self.lengths.iter().map(|n| *n as u64).sum::<u64>()
    }

    fn store(&self, item: u64, out: &mut Vec<u8>) {
        store(&self.keys[item as usize], self.lengths[item as usize], out);
    }
}

fn store(key: &[u8], length: usize, out: &mut Vec<u8>) {
    out.extend(b"set ");
    out.extend(key);
    out.extend(format!(" 0 0 {length}\r\n").bytes());
    out.resize(out.len() + length, b'v');
    out.extend(b"\r\n");
}

/// memcached on a host of its own, maybe with the cache; and the host of its clients.
struct Running {
    server: Arc<Netns>,
    client: Arc<Netns>,
    device: String,
    client_device: String,
    macs: Macs,
    memcached: Daemon,
    cache: Option<Daemon>,
    meter: Meter,
    // Held until the processes have ended.
    directory: Directory,
    _reserved: UdpSocket,
}

impl Running {
    fn start(args: &CacheArgs, contender: Contender) -> Result<Self> {
        use std::sync::atomic::AtomicU32;
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let id = std::process::id() % 100_000 * 100 + NUMBER.fetch_add(1, Ordering::Relaxed) % 100;
        let (device, client_device) = (format!("upm{id}"), format!("upl{id}"));
        let (server, client) = (Arc::new(Netns::new()?), Arc::new(Netns::new()?));
        netns::connect(&server, &device, &client, &client_device)?;
        for (host, device, addr) in [(&server, &device, SERVER), (&client, &client_device, CLIENT)] {
            host.ip(&format!("addr add {addr}/24 dev {device}"))?;
            host.ip(&format!("link set {device} up"))?;
            // Gives a veth a NAPI also where it has no program, so that all have the same receive path.
            host.set_gro(device, true)?;
        }
        // Else, without a program, the server's receive work would be done on the clients' core.
        client.set_tso(&client_device, false)?;
        let directory = Directory::new()?;
        let mut command = Command::new(&args.memcached);
        command.args(["-u", "root", "-m", "2048", "-l", &SERVER.to_string()]);
        command.args(["-p", &PORT.to_string(), "-U", &PORT.to_string(), "-t", &contender.threads.to_string()]);
        server.apply(&mut command);
        cpu::pin_command(&mut command, SERVER_CORE)?;
        let memcached = Daemon::start("memcached", command, directory.path.join("memcached.log"))
            .context("is memcached installed? (apt-get install memcached)")?;
        let reserved = client.run(|| Ok(UdpSocket::bind(SocketAddrV4::new(CLIENT, CLIENT_PORT))?))?;
        let macs = Macs { tester: client.mac(&client_device)?, coordinator: server.mac(&device)? };
        let meter = Meter::new(Vec::new(), Vec::new());
        let mut running = Self {
            server,
            client,
            device,
            client_device,
            macs,
            memcached,
            cache: None,
            meter,
            directory,
            _reserved: reserved,
        };
        running.connect()?;
        grow_receive_buffer(running.memcached.id())?;
        if let Some((mib, ways)) = contender.cache {
            running.attach(mib, ways)?;
        }
        Ok(running)
    }

    /// Gives each side's receive work a thread on its core: once all programs are attached.
    fn pin_receivers(&mut self, coalesce: u64) -> Result<()> {
        for (host, device, core) in
            [(&self.server, &self.device, SERVER_CORE), (&self.client, &self.client_device, LOAD_CORE)]
        {
            host.write_device(device, "threaded", "1")?;
            cpu::pin(cpu::napi_thread(device)?, core)?;
        }
        if coalesce > 0 {
            // Having received something, it looks again after so long, and is not interrupted before.
            self.client.write_device(&self.client_device, "gro_flush_timeout", &(coalesce * 1000).to_string())?;
            self.client.write_device(&self.client_device, "napi_defer_hard_irqs", "1")?;
        }
        self.meter = self.new_meter()?;
        Ok(())
    }

    fn new_meter(&self) -> Result<Meter> {
        let threads = [Some(cpu::napi_thread(&self.device)?), cpu::ksoftirqd(SERVER_CORE)];
        let processes = [Some(&self.memcached), self.cache.as_ref()].into_iter().flatten().map(Daemon::id).collect();
        Ok(Meter::new(threads.into_iter().flatten().collect(), processes))
    }

    fn attach(&mut self, mib: u32, ways: u32) -> Result<()> {
        let mut command = Command::new(process::program()?);
        command.args(["cache", "attach", "--dev", &self.device, "--memcached", &format!("{SERVER}:{PORT}")]);
        command.args(["--memory", &mib.to_string(), "--ways", &ways.to_string()]);
        self.server.apply(&mut command);
        cpu::pin_command(&mut command, SERVER_CORE)?;
        let log = self.directory.path.join("cache.log");
        let mut cache = Daemon::start("the cache", command, log)?;
        cache.wait_for_line("attached", STOP)?;
        self.cache = Some(cache);
        Ok(())
    }

    fn detach(&mut self) -> Result<()> {
        self.cache.take().map_or(Ok(()), |mut cache| cache.stop(STOP))
    }

    /// A connection to memcached, from the clients' host.
    fn connect(&mut self) -> Result<TcpStream> {
        let until = Instant::now() + STOP;
        loop {
            let stream = self.client.run(|| Ok(TcpStream::connect((SERVER, PORT))?));
            match stream {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(stream);
                }
                Err(_) => {
                    self.memcached.check()?;
                    ensure!(Instant::now() < until, "memcached does not listen; it said:\n{}", self.memcached.said());
                    process::sleep(Duration::from_millis(10))?;
                }
            }
        }
    }

    fn fill(&mut self, dataset: &Dataset) -> Result<()> {
        let mut stream = self.connect()?;
        let mut out = Vec::new();
        for chunk in (0..dataset.keys.len() as u64).collect::<Vec<_>>().chunks(64) {
            out.clear();
            chunk.iter().for_each(|&item| dataset.store(item, &mut out));
            exchange(&mut stream, &out, chunk.len() * b"STORED\r\n".len())?;
        }
        Ok(())
    }

    /// Items that the cache has answered with.
    fn hits(&self) -> Result<u64> {
        if self.cache.is_none() {
            return Ok(0);
        }
        let mut command = Command::new(process::program()?);
        command.args(["cache", "stats", "--json", "--dev", &self.device]);
        self.server.apply(&mut command);
        let output = command.output()?;
        ensure!(output.status.success(), "underpass cache stats: {}", String::from_utf8_lossy(&output.stderr));
        let stats: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        stats["kernel"]["hits"].as_u64().with_context(|| format!("no count of hits in {stats}"))
    }

    fn stop(mut self) -> Result<()> {
        self.detach()?;
        self.memcached.crash()
    }
}

/// Gives memcached's UDP socket room for the whole window of requests, as an operator would by `net.core.rmem_default`. By
/// default it holds some 50, and a benchmark would measure how they are lost.
fn grow_receive_buffer(process: u32) -> Result<()> {
    let pidfd = pidfd_open(Pid::from_raw(process as i32).context("a process number")?, PidfdFlags::empty())?;
    let mut grown = 0;
    for entry in fs::read_dir(format!("/proc/{process}/fd"))?.flatten() {
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let fd = match pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()) {
            Ok(fd) => fd,
            // Closed since.
            Err(rustix::io::Errno::BADF) => continue,
            Err(error) => return Err(error).context("memcached's sockets"),
        };
        if sockopt::socket_protocol(&fd).is_ok_and(|protocol| protocol == Some(ipproto::UDP)) {
            sockopt::set_socket_recv_buffer_size_force(&fd, RECEIVE_BUFFER)?;
            grown += 1;
        }
    }
    ensure!(grown > 0, "memcached has no UDP socket");
    Ok(())
}

/// Sends requests whose answers have so many bytes in all, and takes them.
fn exchange(stream: &mut TcpStream, out: &[u8], answer: usize) -> Result<()> {
    stream.write_all(out)?;
    let mut left = answer;
    let mut buffer = vec![0; 1 << 16];
    while left > 0 {
        let len = stream.read(&mut buffer)?;
        ensure!(len > 0 && len <= left, "memcached answers something else, or closed the connection");
        left -= len;
    }
    Ok(())
}

/// Writes a share of what is read, over TCP, until it is dropped.
struct Setter {
    /// How many are owed in all; how many were done.
    owed: Arc<AtomicU64>,
    done: Arc<AtomicU64>,
    worker: Worker,
}

impl Setter {
    fn start(mut streams: Vec<TcpStream>, dataset: Arc<Dataset>, items: Items, seed: u64) -> Result<Self> {
        let (owed, done) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let counts = (owed.clone(), done.clone());
        let worker = Worker::start("setter", move |stop| {
            let (owed, done) = counts;
            cpu::pin(0, LOAD_CORE)?;
            let mut random = SmallRng::seed_from_u64(seed);
            let mut out = Vec::new();
            while !stop.is_set() {
                let count = owed.load(Ordering::Relaxed).saturating_sub(done.load(Ordering::Relaxed));
                let count = streams.len().min(count as usize);
                if count == 0 {
                    thread::sleep(Duration::from_micros(200));
                    continue;
                }
                for stream in &mut streams[..count] {
                    out.clear();
                    dataset.store(items.draw(&mut random), &mut out);
                    stream.write_all(&out)?;
                }
                for stream in &mut streams[..count] {
                    exchange(stream, b"", b"STORED\r\n".len())?;
                }
                done.fetch_add(count as u64, Ordering::Relaxed);
            }
            Ok(())
        })?;
        Ok(Self { owed, done, worker })
    }
}

/// Lets the load run for so long, and the SETs keep up with the GETs.
fn run_for(length: Duration, load: &CacheLoad, setter: &Setter, gets_per_set: u64, from: &Counts) -> Result<()> {
    let until = Instant::now() + length;
    while Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
        if let Some(owed) = (load.counts().answers - from.answers).checked_div(gets_per_set) {
            setter.owed.store(owed, Ordering::Relaxed);
        }
        process::check_interrupt()?;
    }
    Ok(())
}

fn measure(
    args: &CacheArgs,
    dataset: &Arc<Dataset>,
    contender: Contender,
    gets_per_set: u64,
    steady: f64,
) -> Result<Sample> {
    let mut running = Running::start(args, contender)?;
    running.fill(dataset)?;
    let items = || Items::new(args.items, args.workload);
    let addresses = (SocketAddrV4::new(CLIENT, CLIENT_PORT), SocketAddrV4::new(SERVER, PORT));
    let mut load = CacheLoad::attach(
        running.client.clone(),
        &running.client_device,
        addresses,
        &running.macs,
        (args.items, &items(), args.seed),
        |item| dataset.keys[item as usize].clone(),
    )?;
    let _pass = match contender.cache {
        None => Some(attach_pass(&running.server, &running.device)?),
        Some(_) => None,
    };
    running.pin_receivers(args.coalesce)?;
    // The sink goes before the generator beside it.
    cpu::prefer(cpu::napi_thread(&running.client_device)?)?;
    let connections = (0..CONNECTIONS).map(|_| running.connect()).collect::<Result<_>>()?;
    let setter = Setter::start(connections, dataset.clone(), items(), args.seed + 1)?;

    let length = Duration::from_secs_f64(args.seconds);
    let start = load.counts();
    let sending = load.start(LOAD_CORE, None)?;
    run_for(Duration::from_secs_f64(args.warmup), &load, &setter, gets_per_set, &start)?;
    let (first, hits, sets) = (load.counts(), running.hits()?, setter.done.load(Ordering::Relaxed));
    let (busy, begun) = (running.meter.read(), Instant::now());
    run_for(length, &load, &setter, gets_per_set, &start)?;
    let (busy, elapsed) = (running.meter.read().saturating_sub(busy), begun.elapsed().as_secs_f64());
    let (counts, hits) = (load.counts().since(&first), running.hits()? - hits);
    let sets = setter.done.load(Ordering::Relaxed) - sets;
    sending.stop()?;
    ensure!(counts.broken == 0, "the load generator failed to make {} frames", counts.broken);
    ensure!(
        counts.found > 0 && counts.other * 100 <= counts.answers,
        "no answers as expected: {} requests, {} answers, {} of them strange",
        counts.requests,
        counts.answers,
        counts.other
    );

    // Again, at a rate that every server bears.
    let before = load.counts();
    let sending = load.start(LOAD_CORE, Some(steady))?;
    run_for(length.div_f64(2.0), &load, &setter, 0, &before)?;
    sending.stop()?;
    let timed = load.counts().since(&before);
    setter.worker.stop()?;
    load.detach();
    running.stop()?;
    let answers = counts.answers as f64;
    let latency = |share| timed.latency_ns(share).context("no request was timed");
    Ok(Sample {
        rate: answers / elapsed,
        busy_per_get: busy.as_secs_f64() * 1e9 / answers,
        utilisation: busy.as_secs_f64() / elapsed,
        // What was counted between the two looks at the one and at the other is not quite the same.
        hit_ratio: (hits as f64 / answers).min(1.0),
        found: counts.found as f64 / answers,
        sets: sets as f64 / elapsed,
        lost: counts.requests.saturating_sub(counts.answers) as f64 / counts.requests as f64,
        latency: [latency(0.5)?, latency(0.99)?],
    })
}

/// What others than the cache's clients do, over TCP.
#[derive(Clone, Copy, Debug)]
struct Other {
    /// GETs of large values, or else SETs of ordinary ones.
    large_gets: bool,
    /// Requests sent at once on a connection.
    pipeline: usize,
}

impl Other {
    const ALL: [Self; 4] = [
        Self { large_gets: true, pipeline: 1 },
        Self { large_gets: false, pipeline: 1 },
        Self { large_gets: true, pipeline: PIPELINE },
        Self { large_gets: false, pipeline: PIPELINE },
    ];

    fn name(self) -> String {
        let what = if self.large_gets { format!("GETs of {} KiB", LARGE_VALUE / 1024) } else { "SETs".into() };
        let how = if self.pipeline == 1 { "one at a time".into() } else { format!("{} at a time", self.pipeline) };
        format!("{what} over TCP, {how} on each connection")
    }
}

/// What is between those and memcached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Between {
    Nothing,
    /// A program that passes everything on: what a veth charges for any.
    Program,
    Cache,
}

/// Requests in a second of the server's core.
fn bystand(args: &CacheArgs, dataset: &Dataset, running: &mut Running, other: Other) -> Result<f64> {
    let mut streams = (0..CONNECTIONS).map(|_| running.connect()).collect::<Result<Vec<_>>>()?;
    let mut random = SmallRng::seed_from_u64(args.seed);
    let items = Items::new(args.items, args.workload);
    let large = |number: u64| format!("large{number:04}");
    let mut out = Vec::new();
    if other.large_gets {
        for number in 0..1000 {
            out.clear();
            store(large(number).as_bytes(), LARGE_VALUE, &mut out);
            exchange(&mut streams[0], &out, b"STORED\r\n".len())?;
        }
    }
    let mut done = 0u64;
    let mut measured = (Duration::ZERO, 0);
    let (begun, warm) = (Instant::now(), Duration::from_secs_f64(args.seconds / 4.0));
    let mut started = false;
    loop {
        let elapsed = begun.elapsed();
        if !started && elapsed >= warm {
            (started, measured) = (true, (running.meter.read(), done));
        }
        if elapsed >= warm + Duration::from_secs_f64(args.seconds) {
            break;
        }
        // All connections get their requests before the first answers are taken.
        let mut answers = [0; CONNECTIONS];
        for (stream, answer) in streams.iter_mut().zip(&mut answers) {
            out.clear();
            for _ in 0..other.pipeline {
                if other.large_gets {
                    let key = large(random.random_range(0..1000));
                    out.extend(format!("get {key}\r\n").bytes());
                    *answer += format!("VALUE {key} 0 {LARGE_VALUE}\r\n\r\nEND\r\n").len() + LARGE_VALUE;
                } else {
                    dataset.store(items.draw(&mut random), &mut out);
                    *answer += b"STORED\r\n".len();
                }
            }
            stream.write_all(&out)?;
        }
        for (stream, answer) in streams.iter_mut().zip(answers) {
            exchange(stream, b"", answer)?;
        }
        done += (CONNECTIONS * other.pipeline) as u64;
    }
    let busy = running.meter.read().saturating_sub(measured.0);
    Ok((done - measured.1) as f64 / busy.as_secs_f64())
}

/// All three in turn, on one memcached.
fn bystanders(args: &CacheArgs, dataset: &Dataset) -> Result<Vec<Bystander>> {
    let mut running = Running::start(args, Contender { threads: 1, cache: None })?;
    running.fill(dataset)?;
    running.pin_receivers(args.coalesce)?;
    cpu::pin(0, LOAD_CORE)?;
    let mut results = Vec::new();
    for other in Other::ALL {
        let mut rates = [const { Vec::new() }; 3];
        for round in 0..args.rounds {
            let mut order = [Between::Nothing, Between::Program, Between::Cache];
            order.rotate_left(round % 3);
            for between in order {
                let program = match between {
                    Between::Program => Some(attach_pass(&running.server, &running.device)?),
                    _ => None,
                };
                if between == Between::Cache {
                    running.attach(*args.memory.last().expect("checked"), args.ways[0])?;
                }
                running.meter = running.new_meter()?;
                let rate = bystand(args, dataset, &mut running, other)?;
                drop(program);
                running.detach()?;
                let name = format!("{between:?}").to_lowercase();
                eprintln!(
                    "round {}: {}, {name} between: {} a core-second",
                    round + 1,
                    other.name(),
                    report::count(rate)
                );
                rates[between as usize].push(rate);
            }
        }
        let [without, program, with] = rates.map(Spread::of);
        results.push(Bystander { traffic: other.name(), without, program, with });
    }
    running.stop()?;
    Ok(results)
}

/// Runs the comparison.
///
/// # Errors
/// Bad options, no root, no memcached, a server that fails.
pub fn run(args: &CacheArgs) -> Result<CacheReport> {
    ensure!(args.rounds > 0 && args.seconds > 0.0, "at least one round of more than 0 seconds is needed");
    ensure!((1..=ITEMS_MAX).contains(&args.items), "--items must be 1 to {ITEMS_MAX}");
    ensure!(!args.memory.is_empty() && !args.ways.is_empty(), "--memory and --ways need at least one number each");
    report::check_output(args.json.as_deref())?;
    ensure!(cpu::count() > LOAD_CORE, "two cores are needed: one for the server, one for its clients");
    process::catch_interrupts()?;
    let _awake = KeepAwake::start()?;
    let dataset = Arc::new(Dataset::new(args));
    let mut contenders = vec![Contender { threads: 1, cache: None }, Contender { threads: 2, cache: None }];
    if args.part == Part::Others {
        contenders.clear();
    }
    for &mib in args.memory.iter().filter(|_| args.part != Part::Others) {
        contenders.extend(args.ways.iter().map(|&ways| Contender { threads: 1, cache: Some((mib, ways)) }));
    }
    let mut cells: Vec<Cell> = Vec::new();
    let mut ratios = Vec::new();
    // What memcached alone bears, by half.
    let mut steady = 20_000.0;
    let data_bytes = dataset.bytes();
    for &gets_per_set in args.gets_per_set.iter().filter(|_| args.part != Part::Others) {
        let mut samples = vec![Vec::new(); contenders.len()];
        for round in 0..args.rounds {
            for (contender, samples) in contenders.iter().zip(&mut samples) {
                let sample = measure(args, &dataset, *contender, gets_per_set, steady)
                    .with_context(|| format!("{}, {}", contender.name(), mix(gets_per_set)))?;
                eprintln!(
                    "round {} of {}, {}: {}: {} GETs/s, {} of CPU each, hit ratio {:.1} %",
                    round + 1,
                    args.rounds,
                    mix(gets_per_set),
                    contender.name(),
                    report::count(sample.rate),
                    report::time(sample.busy_per_get),
                    sample.hit_ratio * 100.0
                );
                if cells.is_empty() && samples.is_empty() && *contender == contenders[0] {
                    steady = sample.rate / 2.0;
                }
                samples.push(sample);
            }
        }
        let from = cells.len();
        for (contender, samples) in contenders.iter().zip(&samples) {
            let cell = Cell::new(contender, gets_per_set, samples);
            if let Some((mib, _)) = contender.cache {
                let share = f64::from(mib) * 1048576.0 / data_bytes as f64 * 100.0;
                let base = cells[from].busy_ns_per_get.median;
                let name = format!("{} ({share:.0} % of the data) / memcached -t 1", cell.server);
                let goal = "18 or more at a high hit ratio, 10 at a quarter of the data";
                let what = format!("GETs in a second of the core, {}: {name}", mix(gets_per_set));
                ratios.push(Ratio::new(what, base, cell.busy_ns_per_get.median, goal));
            }
            cells.push(cell);
        }
    }
    let bystanders = match args.part {
        Part::Gets => Vec::new(),
        // A thread of its own: it is pinned.
        Part::Others | Part::Both => thread::scope(|scope| scope.spawn(|| bystanders(args, &dataset)).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?,
    };

    for bystander in &bystanders {
        for (name, base, goal) in
            [("memcached alone", bystander.without, "0.97 or more"), ("any program", bystander.program, "")]
        {
            let name = format!("{}: the cache / {name}", bystander.traffic);
            ratios.push(Ratio::new(name, bystander.with.median, base.median, goal));
        }
    }
    let report = CacheReport {
        machine: Machine::here(),
        items: args.items,
        data_bytes,
        popularity: args.workload,
        rounds: args.rounds,
        seconds: args.seconds,
        steady_rate: steady,
        cells,
        bystanders,
        ratios,
    };
    if let Some(path) = &args.json {
        report::write_json(path, &report)?;
    }
    Ok(report)
}
