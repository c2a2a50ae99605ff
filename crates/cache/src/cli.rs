//! `underpass cache`.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddrV4},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use serde_json::Value;
use underpass_datapath::attach::{Mode, interface_index};

use crate::{
    agent::{Agent, Options},
    limit::MBIT_MAX,
    memcached::{Memcached, address_of},
    stats,
};

const DIRECTORY: &str = "/run/underpass";
/// Of what an address is sent, if more than the interface's own networks is trusted.
const LIMIT_MBIT: u64 = 100;

/// A coherent cache in the kernel, in front of a stock memcached
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Put a cache in front of a running memcached, until SIGINT or SIGTERM; its end, however it comes, leaves memcached as it was
    Attach(AttachArgs),
    /// End the cache on an interface
    Detach(WhichArgs),
    /// Show what a running cache counts
    Stats(StatsArgs),
    /// Show what a running cache does, once a second
    Top(WhichArgs),
}

/// In front of which memcached, on which interface, with how much memory.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// The interface that clients' datagrams come in by, of the caller's network namespace
    #[arg(long, value_name = "DEV")]
    dev: String,
    /// Where memcached listens
    #[arg(long, value_name = "ADDR", required_unless_present = "pid")]
    memcached: Option<SocketAddrV4>,
    /// memcached's process
    #[arg(long, value_name = "PID", conflicts_with = "memcached")]
    pid: Option<i32>,
    /// Kernel memory for items and their directory, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    memory: u32,
    /// Whom answers longer than their request are sent to; several times for several. Default: who is on the interface's own
    /// networks
    #[arg(long, value_name = "CIDR", value_parser = parse_prefix)]
    trusted: Vec<(Ipv4Addr, u8)>,
    /// What an address is sent at most in such answers, in Mbit/s; memcached answers the rest. 0: no limit. Default: none if only the
    /// interface's own networks are trusted, else 100
    #[arg(long, value_name = "MBIT/S", value_parser = clap::value_parser!(u64).range(..=MBIT_MAX))]
    limit: Option<u64>,
    /// Items that a set holds
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = parse_ways)]
    ways: usize,
    /// How the program runs: native (in the driver) or generic
    #[arg(long, default_value = "native")]
    mode: Mode,
}

/// Which of this network namespace's caches.
#[derive(Debug, Args)]
pub struct WhichArgs {
    /// Its interface, if there are several
    #[arg(long, value_name = "DEV")]
    dev: Option<String>,
}

/// Which cache to ask, and how to show the answer.
#[derive(Debug, Args)]
pub struct StatsArgs {
    #[command(flatten)]
    which: WhichArgs,
    /// As JSON
    #[arg(long)]
    json: bool,
}

fn parse_ways(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ways @ (1 | 2 | 4)) => Ok(ways),
        _ => Err("a set holds 1, 2 or 4 items".into()),
    }
}

fn parse_prefix(text: &str) -> Result<(Ipv4Addr, u8), String> {
    let (addr, len) = text.split_once('/').unwrap_or((text, "32"));
    let len = len.parse().ok().filter(|len| *len <= 32);
    match (addr.parse(), len) {
        (Ok(addr), Some(len)) => Ok((addr, len)),
        _ => Err("an IPv4 prefix looks like 10.1.0.0/16".into()),
    }
}

/// Runs it.
pub fn run(command: Command) -> Result<()> {
    match command {
        Command::Attach(args) => attach(args),
        Command::Detach(args) => detach(&args),
        Command::Stats(args) => {
            let report = ask(&socket_of(&args.which)?)?;
            println!("{}", if args.json { serde_json::to_string_pretty(&report)? } else { stats::text(&report) });
            Ok(())
        }
        Command::Top(args) => top(&args),
    }
}

fn namespace() -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(fs::metadata("/proc/thread-self/ns/net").context("asking for this network namespace")?.ino())
}

fn socket_path(ifindex: u32) -> Result<PathBuf> {
    Ok(Path::new(DIRECTORY).join(format!("cache-{}-{ifindex}.sock", namespace()?)))
}

/// Removes the control sockets of caches that were killed, in whatever network namespace.
fn remove_dead() {
    for entry in fs::read_dir(DIRECTORY).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with("cache-");
        let refused = || UnixStream::connect(entry.path()).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused);
        if ours && refused() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The control socket of the cache that is meant.
fn socket_of(which: &WhichArgs) -> Result<PathBuf> {
    if let Some(device) = &which.dev {
        return socket_path(interface_index(device)?);
    }
    let prefix = format!("cache-{}-", namespace()?);
    let mut found = Vec::new();
    for entry in fs::read_dir(DIRECTORY).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) && UnixStream::connect(entry.path()).is_ok() {
            found.push(entry.path());
        }
    }
    match found.len() {
        0 => bail!("no cache runs in this network namespace"),
        1 => Ok(found.remove(0)),
        _ => bail!("several caches run in this network namespace: say which with --dev"),
    }
}

fn ask(path: &Path) -> Result<Value> {
    let mut stream = UnixStream::connect(path).context("no cache runs on this interface")?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("the cache does not answer")?;
    serde_json::from_str(&text).context("the cache's answer")
}

fn attach(args: AttachArgs) -> Result<()> {
    // Blocked before any thread starts: all inherit the mask, and the signals are read here.
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    signals.thread_block().context("blocking signals")?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK).context("waiting for signals")?;
    let at = match (args.memcached, args.pid) {
        (Some(at), _) => at,
        (None, Some(pid)) => address_of(pid)?,
        (None, None) => bail!("say where memcached is: --memcached or --pid"),
    };
    let path = socket_path(interface_index(&args.dev)?)?;
    if UnixStream::connect(&path).is_ok() {
        bail!("a cache runs on {} already: `underpass cache detach --dev {}` ends it", args.dev, args.dev);
    }
    let options = Options {
        device: args.dev,
        mode: args.mode,
        mib: args.memory,
        ways: args.ways,
        limit: args.limit.unwrap_or(if args.trusted.is_empty() { 0 } else { LIMIT_MBIT }),
        trusted: args.trusted,
    };
    let mut agent = Agent::attach(options, Memcached::find(at)?)?;
    fs::create_dir_all(DIRECTORY).with_context(|| format!("creating {DIRECTORY}"))?;
    remove_dead();
    let control = UnixListener::bind(&path).with_context(|| format!("listening at {}", path.display()))?;
    control.set_nonblocking(true)?;
    let result = serve(&mut agent, at, &signals, &control);
    let _ = fs::remove_file(&path);
    result
}

fn announce(agent: &Agent) -> Result<()> {
    let memcached = agent.memcached();
    println!(
        "attached to {} in front of memcached {} at {} (process {}), {} MiB",
        agent.options().device,
        memcached.version,
        memcached.at,
        memcached.pid,
        agent.options().mib
    );
    Ok(std::io::stdout().flush()?)
}

fn serve(agent: &mut Agent, at: SocketAddrV4, signals: &SignalFd, control: &UnixListener) -> Result<()> {
    announce(agent)?;
    loop {
        let pause = PollTimeout::try_from(agent.pause()).expect("short");
        let (socket, more) = agent.socket();
        let wanted = if more { PollFlags::POLLIN | PollFlags::POLLOUT } else { PollFlags::POLLIN };
        // SAFETY: the ring's descriptor is open for as long as the agent is there.
        let reports = unsafe { BorrowedFd::borrow_raw(agent.reports()) };
        let mut ready = [
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(control.as_fd(), PollFlags::POLLIN),
            PollFd::new(agent.alive(), PollFlags::POLLIN),
            PollFd::new(reports, PollFlags::POLLIN),
            PollFd::new(socket, wanted),
        ];
        match poll(&mut ready, pause) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error).context("waiting"),
        }
        let [signalled, asked, ended] = [0, 1, 2].map(|i| ready[i].any().unwrap_or(true));
        if signalled && signals.read_signal().context("reading a signal")?.is_some() {
            return Ok(());
        }
        if asked && let Ok((mut stream, _)) = control.accept() {
            stream.set_write_timeout(Some(Duration::from_secs(1)))?;
            // Who does not take the answer does not get it.
            let _ = stream.write_all(stats::report(agent)?.to_string().as_bytes());
        }
        if ended || agent.step().is_err() {
            match follow(agent, at, signals)? {
                Some(next) => *agent = next,
                None => return Ok(()),
            }
            announce(agent)?;
        }
    }
}

/// memcached is gone: detached at once, attached anew to the next one at its address. None: a signal came first.
fn follow(agent: &mut Agent, at: SocketAddrV4, signals: &SignalFd) -> Result<Option<Agent>> {
    tracing::warn!("memcached (process {}) has ended: waiting for another one at {at}", agent.memcached().pid);
    agent.detach();
    let mut told = Instant::now();
    loop {
        if signals.read_signal().context("reading a signal")?.is_some() {
            return Ok(None);
        }
        match Memcached::find(at).and_then(|memcached| Agent::attach(agent.options().clone(), memcached)) {
            Ok(next) => return Ok(Some(next)),
            Err(error) if told.elapsed() > Duration::from_secs(10) => {
                told = Instant::now();
                tracing::warn!("not attached: {error:#}");
            }
            Err(_) => {}
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn detach(args: &WhichArgs) -> Result<()> {
    let path = socket_of(args)?;
    let report = ask(&path)?;
    let pid =
        report["pid"].as_i64().and_then(|pid| rustix::process::Pid::from_raw(pid as i32)).context("its process")?;
    let process =
        rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).context("finding its process")?;
    rustix::process::pidfd_send_signal(&process, rustix::process::Signal::TERM).context("ending it")?;
    let mut ended = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    let limit = PollTimeout::try_from(Duration::from_secs(10)).expect("short");
    if poll(&mut ended, limit)? == 0 {
        bail!("the cache's process {} does not end", report["pid"]);
    }
    Ok(())
}

fn top(args: &WhichArgs) -> Result<()> {
    let path = socket_of(args)?;
    let mut before: Option<(Instant, Value)> = None;
    loop {
        let (now, report) = (Instant::now(), ask(&path)?);
        if let Some((then, was)) = &before {
            let seconds = now.duration_since(*then).as_secs_f64();
            let rate = |part: &str, name: &str| {
                let count = |report: &Value| report[part][name].as_f64().unwrap_or(0.0);
                (count(&report) - count(was)) / seconds
            };
            let (hits, misses) = (rate("kernel", "hits"), rate("kernel", "misses"));
            println!(
                "hits/s {hits:>9.0}  misses/s {misses:>8.0}  hit ratio {:>6.2} %  fills/s {:>7.0}  writes/s {:>7.0}  entries {:>8}",
                if hits + misses > 0.0 { 100.0 * hits / (hits + misses) } else { 0.0 },
                rate("agent", "fills"),
                rate("kernel", "seen_writes"),
                report["memory"]["entries"],
            );
        }
        before = Some((now, report));
        std::thread::sleep(Duration::from_secs(1));
    }
}
