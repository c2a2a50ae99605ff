//! memcached, alone or with the cache in front of it, on a host of a rack.

use std::{
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use underpass_bench::process::{self, Daemon, Directory, STOP};
use underpass_rack::{Config, Fault, Host, Links, Probability, Rack};

/// Where memcached listens.
pub const PORT: u16 = 11211;
/// How long a frame is held that others are to overtake.
const REORDER_HOLD: Duration = Duration::from_micros(300);
const START: Duration = Duration::from_secs(30);

/// How memcached is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its worker threads.
    pub threads: usize,
    /// Its memory for items, in MiB.
    pub memory_mib: usize,
    /// Without the threads that tidy up: they hold items for moments in which other commands on them do something else.
    pub still: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { threads: 1, memory_mib: 256, still: false }
    }
}

/// A running memcached, perhaps with a cache attached. Dropping it ends both.
#[derive(Debug)]
pub struct Server {
    // Dropped in this order.
    cache: Option<Daemon>,
    memcached: Daemon,
    host: Host,
    log: PathBuf,
}

impl Server {
    /// Starts memcached on a host, on all its addresses.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(host: &Host, options: &Options, logs: &Directory) -> Result<Self> {
        let mut command = host.command("memcached")?;
        command.args(["-u", "root", "-l", "0.0.0.0", "-p"]).arg(PORT.to_string()).arg("-U").arg(PORT.to_string());
        command.arg("-t").arg(options.threads.to_string()).arg("-m").arg(options.memory_mib.to_string());
        if options.still {
            command.args(["-o", "no_lru_maintainer,no_lru_crawler,no_slab_reassign"]);
        }
        let log = logs.path.join(format!("memcached-{}.log", host.name));
        let mut memcached = Daemon::start(format!("memcached on {}", host.name), command, log)?;
        let until = Instant::now() + START;
        while host.enter(|| TcpStream::connect((Ipv4Addr::LOCALHOST, PORT)).is_err())? {
            memcached.check()?;
            ensure!(Instant::now() < until, "{} does not come up", memcached.name());
            process::sleep(Duration::from_millis(20))?;
        }
        let log = logs.path.join(format!("cache-{}.log", host.name));
        Ok(Self { cache: None, memcached, host: host.clone(), log })
    }

    /// Attaches the cache with these further arguments, and waits until it works.
    ///
    /// # Errors
    /// When it does not attach: with what it said.
    pub fn attach(&mut self, arguments: &[&str]) -> Result<()> {
        let mut command = self.host.command(process::program()?)?;
        command.args(["cache", "attach", "--dev", &self.host.ifname, "--memcached"]);
        command.arg(self.address().to_string()).args(arguments);
        let mut cache = Daemon::start(format!("the cache on {}", self.host.name), command, self.log.clone())?;
        cache.wait_for_line("attached", START)?;
        self.cache = Some(cache);
        Ok(())
    }

    /// Detaches the cache; memcached goes on.
    ///
    /// # Errors
    /// When it does not go in order.
    pub fn detach(&mut self) -> Result<()> {
        self.cache.take().map_or(Ok(()), |mut cache| cache.stop(STOP))
    }

    /// What `underpass cache stats --json` says.
    ///
    /// # Errors
    /// When it fails.
    pub fn stats(&self) -> Result<serde_json::Value> {
        let output = self.host.command(process::program()?)?.args(["cache", "stats", "--json"]).output()?;
        ensure!(output.status.success(), "underpass cache stats: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).context("underpass cache stats --json prints no JSON")
    }

    /// Where clients on other hosts reach it.
    pub fn address(&self) -> SocketAddrV4 {
        SocketAddrV4::new(self.host.addr, PORT)
    }

    /// memcached's process.
    pub fn process(&self) -> u32 {
        self.memcached.id()
    }

    /// The cache's process.
    pub fn cache_process(&self) -> Option<u32> {
        self.cache.as_ref().map(Daemon::id)
    }

    /// Detaches, and ends memcached at once: it takes its time otherwise.
    ///
    /// # Errors
    /// When either had ended before, or the cache does not go in order.
    pub fn end(mut self) -> Result<()> {
        self.detach()?;
        self.memcached.crash()
    }

    /// Fails if either has ended.
    ///
    /// # Errors
    /// Then: with what it said.
    pub fn check(&mut self) -> Result<()> {
        self.memcached.check()?;
        self.cache.as_mut().map_or(Ok(()), Daemon::check)
    }
}

/// A rack of a client and two servers: `plain`, to compare with, and `fast`.
///
/// # Errors
/// Without root.
pub fn rack(purpose: &str) -> Result<Rack> {
    let name = format!("{purpose}-{}", std::process::id());
    Ok(Rack::up(&Config::of_hosts(&name, &["client", "plain", "fast"]))?)
}

/// Has one frame in a hundred lost and as many overtaken, on every link; and lets TCP repeat what was lost soon, lest nothing
/// happens meanwhile.
///
/// # Errors
/// When the rack is not whole.
pub fn make_rough(rack: &Rack) -> Result<()> {
    let one_percent = Probability::new(0.01)?;
    let fault = Fault { loss: one_percent, reorder: one_percent, reorder_hold: REORDER_HOLD, ..Fault::default() };
    rack.set_fault(Links::ALL, &fault)?;
    for host in rack.hosts() {
        let route = format!("route replace {} dev {} src {} rto_min 5ms", host.subnet, host.ifname, host.addr);
        let output = host.command("ip")?.args(route.split(' ')).output()?;
        ensure!(output.status.success(), "ip {route}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
