//! A whole system in a virtual rack: a coordinator, replicas and clients, each on a host of its own.

use std::{
    net::SocketAddrV4,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use underpass_client::{Config, engine::Engine};
use underpass_rack::{self as rack, Fault, HostConfig, Links, Rack};

use crate::{
    bed::{COORDINATOR_CORE, SHARD},
    coordinator::{DataPath, WritePath},
    cpu::{self, Meter},
    driver::{self, Arrival, Seen, Task},
    history::Log,
    process::{self, Daemon, Directory, STOP},
    workload::Workload,
};

const PORT: u16 = 5550;
const COORDINATOR: &str = "coordinator";
/// Most replicas and clients in one rack here.
const HOSTS_MAX: usize = 8;

/// What a system consists of.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Replicas.
    pub replicas: usize,
    /// Client hosts, each with one process' worth of sessions.
    pub clients: usize,
    /// Sessions of each client host: as many writes can be under way.
    pub sessions: usize,
    /// Memory of each replica for items, in MiB.
    pub memory_mib: u64,
}

impl Size {
    /// Enough memory for a workload's items.
    pub fn memory_for(workload: &Workload) -> u64 {
        // Versions, chains and tables come on top of what a user sees: measured at about 150 bytes an item. Loading
        // must stay clear of the last sixteenth, in which the coordinator refuses writes.
        let item = (workload.key_size + workload.value_size + 300) as u64;
        ((workload.items * item * 5 / 4) >> 20).max(64)
    }
}

/// A system that is up. Dropping it takes everything down.
pub struct System {
    // In the order in which they must end.
    coordinator: Option<Daemon>,
    replicas: Vec<Daemon>,
    rack: Option<Rack>,
    directory: Directory,
    program: PathBuf,
    size: Size,
}

impl System {
    /// Brings up rack and replicas, without a coordinator.
    ///
    /// # Errors
    /// Without root, or when something does not come up.
    pub fn up(name: &str, size: Size) -> Result<Self> {
        ensure!(
            (1..=HOSTS_MAX).contains(&size.replicas) && (1..=HOSTS_MAX).contains(&size.clients),
            "{} replicas and {} clients: there can be 1 to {HOSTS_MAX} of each",
            size.replicas,
            size.clients
        );
        let program = process::program()?;
        let directory = Directory::new()?;
        let hosts: Vec<String> = std::iter::once(COORDINATOR.to_owned())
            .chain((0..size.replicas).map(replica_name))
            .chain((0..size.clients).map(client_name))
            .collect();
        let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
        let mut config = rack::Config::of_hosts(name, &hosts);
        for host in &mut config.host {
            // The coordinator's interrupt work then has a thread to be charged to, and a core to be on.
            if host.name == COORDINATOR && cpu::count() > 1 {
                *host = HostConfig { threaded: true, cpu: Some(COORDINATOR_CORE), ..host.clone() };
            }
        }
        let rack = Rack::up(&config)?;
        let mut system = Self { coordinator: None, replicas: Vec::new(), rack: Some(rack), directory, program, size };
        for index in 0..size.replicas {
            system.start_replica(index)?;
        }
        Ok(system)
    }

    fn rack(&self) -> &Rack {
        self.rack.as_ref().expect("it is there until `down`")
    }

    fn address(&self, host: &str) -> Result<SocketAddrV4> {
        Ok(SocketAddrV4::new(self.rack().host(host)?.addr, PORT))
    }

    fn start_replica(&mut self, index: usize) -> Result<()> {
        let name = replica_name(index);
        let control = self.directory.path.join(format!("{name}.sock"));
        let mut command = self.rack().host(&name)?.command(&self.program)?;
        command.args(["replica", "--listen", &self.address(&name)?.to_string()]);
        command.args(["--memory", &self.size.memory_mib.to_string()]);
        command.arg("--control").arg(&control);
        let mut daemon = Daemon::start(&name, command, self.directory.path.join(format!("{name}.log")))?;
        daemon.wait_for(&control, Duration::from_secs(10))?;
        self.replicas.push(daemon);
        Ok(())
    }

    /// Starts a coordinator; of one that ran before, it takes over the replicas as they are.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start_coordinator(&mut self, data_path: DataPath, write_path: WritePath) -> Result<()> {
        self.stop_coordinator()?;
        let control = self.directory.path.join("coordinator.sock");
        let mut command = self.rack().host(COORDINATOR)?.command(&self.program)?;
        cpu::pin_command(&mut command, COORDINATOR_CORE)?;
        command.args(["coordinator", "run", "--listen", &self.address(COORDINATOR)?.to_string()]);
        command.args(["--datapath", &data_path.to_string()]);
        match data_path {
            DataPath::Xdp => command.args(["--write-path", &write_path.to_string()]),
            DataPath::Socket => command.args(["--cpus", &COORDINATOR_CORE.to_string()]),
        };
        command.args(["--shard", &SHARD.to_string()]);
        for index in 0..self.size.replicas {
            command.args(["--member", &self.address(&replica_name(index))?.to_string()]);
        }
        command.arg("--state").arg(self.directory.path.join("state"));
        command.arg("--control").arg(&control);
        let log = self.directory.path.join("coordinator.log");
        let mut daemon = Daemon::start(format!("the {data_path} coordinator"), command, log)?;
        daemon.wait_for(&control, Duration::from_secs(20))?;
        self.coordinator = Some(daemon);
        Ok(())
    }

    /// Ends the coordinator, if there is one, in order.
    ///
    /// # Errors
    /// When it does not end, or not clean.
    pub fn stop_coordinator(&mut self) -> Result<()> {
        match self.coordinator.take() {
            Some(mut daemon) => daemon.stop(STOP),
            None => Ok(()),
        }
    }

    /// What counts the time that the coordinator's side uses.
    ///
    /// # Errors
    /// When the coordinator's receive thread is not there.
    pub fn meter(&self) -> Result<Meter> {
        let thread = match cpu::count() {
            1 => None,
            _ => Some(self.rack().threaded_napi(COORDINATOR, Some(COORDINATOR_CORE))?.pid),
        };
        Ok(Meter::new(thread.into_iter().collect(), self.coordinator.iter().map(Daemon::id).collect()))
    }

    /// Sets the faults of all links.
    ///
    /// # Errors
    /// When the switch cannot.
    pub fn set_fault(&self, fault: &Fault) -> Result<()> {
        Ok(self.rack().set_fault(Links::ALL, fault)?)
    }

    /// Opens the sessions of all clients.
    ///
    /// # Errors
    /// When the coordinator opens none within ten seconds.
    pub fn clients(&self) -> Result<Vec<Engine>> {
        let coordinator = self.address(COORDINATOR)?;
        (0..self.size.clients)
            .map(|index| {
                let host = self.rack().host(&client_name(index))?;
                let mut config = Config::single(SHARD, coordinator);
                config.sessions = self.size.sessions;
                config.bind = host.addr;
                let mut engine = host.enter(|| Engine::new(&config))??;
                engine.open(Duration::from_secs(10)).with_context(|| self.said())?;
                Ok(engine)
            })
            .collect()
    }

    /// The last words of coordinator and replicas.
    pub fn said(&self) -> String {
        let daemons = self.coordinator.iter().chain(&self.replicas);
        daemons.map(Daemon::said).filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n")
    }

    /// Fails if a process has ended.
    ///
    /// # Errors
    /// Then: with what it said.
    pub fn check(&mut self) -> Result<()> {
        self.coordinator.iter_mut().chain(&mut self.replicas).try_for_each(Daemon::check)
    }

    /// Takes everything down in order.
    ///
    /// # Errors
    /// When something does not go.
    pub fn down(mut self) -> Result<()> {
        self.stop_coordinator()?;
        for mut replica in self.replicas.drain(..) {
            replica.stop(STOP)?;
        }
        self.rack.take().expect("it is there until now").down()?;
        Ok(())
    }
}

fn replica_name(index: usize) -> String {
    format!("replica-{index}")
}

fn client_name(index: usize) -> String {
    format!("client-{index}")
}

/// Shows a line of progress while clients work.
fn show(what: &str, progress: &AtomicU64, finished: impl Fn() -> bool) {
    let start = Instant::now();
    let mut shown = Instant::now();
    while !finished() {
        thread::sleep(Duration::from_millis(20));
        if shown.elapsed() >= Duration::from_secs(1) {
            shown = Instant::now();
            let count = progress.load(Ordering::Relaxed);
            let rate = count as f64 / start.elapsed().as_secs_f64();
            eprintln!("  {what}: {} answered, {}/s", crate::report::count(count as f64), crate::report::count(rate));
        }
    }
}

/// Has all clients do their share of a task at once. `logs`, one for each client, get what they did.
///
/// # Errors
/// The first client's that fails.
pub fn perform(what: &str, engines: &mut [Engine], task: &Task, logs: Option<&mut [Log]>) -> Result<Seen> {
    let shares = engines.len();
    run(what, engines, logs, |index, engine, log, progress| {
        let arrival = match task.arrival {
            Arrival::Closed(clients) => Arrival::Closed(clients / shares + usize::from(index < clients % shares)),
            Arrival::Open(rate) => Arrival::Open(rate / shares as f64),
        };
        let share = Task { arrival, stream: task.stream * 64 + index as u64, ..*task };
        driver::perform(engine, share, log, progress)
    })
}

/// Writes every item of a workload once.
///
/// # Errors
/// The first client's that fails.
pub fn load(engines: &mut [Engine], task: &Task, logs: Option<&mut [Log]>) -> Result<Seen> {
    let shares = engines.len();
    run("loading", engines, logs, |index, engine, log, progress| {
        let Arrival::Closed(clients) = task.arrival else { unreachable!("items are loaded in a closed loop") };
        let arrival = Arrival::Closed((clients / shares).max(1));
        let share = Task { arrival, stream: task.stream * 64 + index as u64, ..*task };
        let items = (index as u64..task.workload.items).step_by(shares);
        driver::load(engine, share, items, log, progress)
    })
}

fn run(
    what: &str,
    engines: &mut [Engine],
    logs: Option<&mut [Log]>,
    each: impl Fn(usize, &mut Engine, Option<&mut Log>, &AtomicU64) -> Result<Seen> + Sync,
) -> Result<Seen> {
    let progress = AtomicU64::new(0);
    let mut logs: Vec<Option<&mut Log>> = match logs {
        Some(logs) => logs.iter_mut().map(Some).collect(),
        None => engines.iter().map(|_| None).collect(),
    };
    let results: Vec<Result<Seen>> = thread::scope(|scope| {
        let threads: Vec<_> = engines
            .iter_mut()
            .zip(logs.drain(..))
            .enumerate()
            .map(|(index, (engine, log))| {
                let (each, progress) = (&each, &progress);
                scope.spawn(move || {
                    // Sleeps as short as they are asked for: a request's moment is exact to the microsecond.
                    // SAFETY: concerns this thread alone, and has no memory arguments.
                    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
                    each(index, engine, log, progress)
                })
            })
            .collect();
        show(what, &progress, || threads.iter().all(|thread| thread.is_finished()));
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let mut sum = Seen::default();
    for result in results {
        sum.merge(&result?);
    }
    Ok(sum)
}
