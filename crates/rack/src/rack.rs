//! Starting, using and ending racks.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    net::Ipv4Addr,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ipnet::Ipv4Net;
use nix::{sched::CpuSet, unistd::Pid};
use serde::Serialize;

use crate::{
    Error, Result,
    config::{self, Config, HostPlan, LinkPlan, MacAddr, Topology},
    fault::{Fault, FaultCounts, LinkStatus, Links},
    line, link,
    namespace::{self, Process},
    state::{self, Line, State},
    switch::{self, LineCounts, Maps, PortCounts},
};

const LINE_START_WAIT: Duration = Duration::from_secs(5);
/// A delay line that has not shown life for this long is taken to be gone; it does so every 50 ms.
const LINE_SILENCE_MAX: Duration = Duration::from_secs(2);
const THREAD_START_WAIT: Duration = Duration::from_secs(1);

/// A rack that is up.
///
/// One from [`Rack::up`] ends when it is dropped; one from [`Rack::up_detached`] or [`Rack::open`] stays.
#[derive(Debug)]
pub struct Rack {
    topology: Topology,
    maps: Maps,
    owned: bool,
    line: Option<JoinHandle<Result<()>>>,
}

impl Rack {
    /// Starts a rack whose delay line is a thread of this process, and which ends with the returned value.
    ///
    /// # Errors
    /// Whatever is wrong with the description, a rack of this name that is up, missing rights or programs, and what the
    /// kernel refuses. Nothing is left of a rack that did not start.
    pub fn up(config: &Config) -> Result<Self> {
        let topology = config.topology()?;
        Self::start(topology, |topology| {
            let name = topology.name.clone();
            let maps = Maps::open(&name)?;
            let namespace = namespace::open(&namespace::path(&namespace::switch_name(&name)))?;
            let thread = thread::Builder::new()
                .name("rack-delay-line".into())
                .spawn(move || {
                    namespace::set(std::os::fd::AsFd::as_fd(&namespace))
                        .map_err(Error::io("cannot enter the switch's namespace"))?;
                    // The namespace shall end with the rack, not with this descriptor.
                    drop(namespace);
                    line::run(&maps)
                })
                .map_err(Error::io("cannot start the delay line's thread"))?;
            let process = Process::of(std::process::id() as i32).expect("this process runs");
            Ok((Line::Thread(process), Started::Thread(thread)))
        })
    }

    /// Starts a rack that outlives this process. Its delay line is a process started with `switch_daemon`, a command
    /// that calls [`run_switch_daemon`] with the rack's name.
    ///
    /// # Errors
    /// As [`Rack::up`], and if the command does not start the delay line.
    pub fn up_detached(config: &Config, mut switch_daemon: Command) -> Result<Self> {
        let topology = config.topology()?;
        Self::start(topology, |topology| {
            let path = state::log_path(&topology.name);
            let what = || format!("cannot write {}", path.display());
            let log = fs::File::create(&path).map_err(Error::io(what()))?;
            switch_daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
            // Not in the terminal's foreground group: Ctrl-C is for whatever else runs there.
            switch_daemon.process_group(0);
            let child =
                switch_daemon.spawn().map_err(Error::io(format!("cannot start the delay line ({switch_daemon:?})")))?;
            let process = Process::of(child.id() as i32).ok_or_else(|| no_line(&topology.name))?;
            Ok((Line::Process(process), Started::Process(child)))
        })
    }

    fn start(topology: Topology, line: impl FnOnce(&Topology) -> Result<(Line, Started)>) -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            return Err(Error::Privilege);
        }
        let _lock = state::lock()?;
        if let Some(found) = trace_of(&topology.name) {
            return Err(Error::Exists { name: topology.name, found });
        }
        let name = topology.name.clone();
        Self::start_locked(topology, line).inspect_err(|_| {
            // What went wrong first is what the caller needs to know.
            if let Err(error) = down_locked(&name) {
                tracing::warn!(rack = name, %error, "a part of the rack that did not start is left");
            }
        })
    }

    fn start_locked(topology: Topology, line: impl FnOnce(&Topology) -> Result<(Line, Started)>) -> Result<Self> {
        let mut state = State { topology: topology.clone(), line: None, threads: BTreeMap::new() };
        state.write()?;
        link::make(&topology)?;
        switch::mount_bpffs()?;
        namespace::run(&namespace::path(&namespace::switch_name(&topology.name)), || switch::load(&topology))??;
        for host in &topology.hosts {
            link::start(&topology.name, host)?;
        }
        let maps = Maps::open(&topology.name)?;
        let (line, started) = line(&topology)?;
        state.line = Some(line);
        state.write()?;
        let (thread, child) = match started {
            Started::Thread(thread) => (Some(thread), None),
            Started::Process(child) => (None, Some(child)),
        };
        let rack = Self { topology, maps, owned: thread.is_some(), line: thread };
        if let Err(error) = rack.await_line(child) {
            // The caller removes the rack: its lock is held, so that dropping must not.
            return Err(rack.abandon(error));
        }
        for host in rack.topology.hosts.iter().filter(|host| host.threaded) {
            if let Err(error) = rack.thread_locked(&mut state, host, host.cpu) {
                return Err(rack.abandon(error));
            }
        }
        Ok(rack)
    }

    fn abandon(mut self, error: Error) -> Error {
        self.owned = false;
        let _ = self.maps.stop();
        error
    }

    fn await_line(&self, mut child: Option<Child>) -> Result<()> {
        let start = Instant::now();
        while self.maps.line_counts()?.beat_ns == 0 {
            let ended = match (&mut child, &self.line) {
                (Some(child), _) => child.try_wait().is_ok_and(|status| status.is_some()),
                (None, Some(thread)) => thread.is_finished(),
                (None, None) => true,
            };
            if ended || start.elapsed() > LINE_START_WAIT {
                return Err(no_line(self.name()));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Opens a rack that is up, started by whichever process.
    ///
    /// # Errors
    /// [`Error::NoRack`] if there is none of this name; [`Error::State`] or [`Error::Bpf`] if a part is missing.
    pub fn open(name: &str) -> Result<Self> {
        // The name becomes a part of paths.
        config::check_name("rack", name, config::RACK_NAME_MAX)?;
        if !nix::unistd::geteuid().is_root() {
            return Err(Error::Privilege);
        }
        match State::read(name)? {
            Some(state) => Ok(Self { topology: state.topology, maps: Maps::open(name)?, owned: false, line: None }),
            None => {
                let known = Self::list();
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                Err(Error::NoRack { name: name.into(), known })
            }
        }
    }

    /// The names of all racks of which anything exists.
    pub fn list() -> Vec<String> {
        let mut names: BTreeSet<String> = state::racks().into_iter().collect();
        names.extend(namespace::racks());
        names.extend(switch::racks());
        names.into_iter().collect()
    }

    /// The rack's name.
    pub fn name(&self) -> &str {
        &self.topology.name
    }

    /// What the rack consists of.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// A host or router by its name.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn host(&self, name: &str) -> Result<Host> {
        match self.topology.hosts.iter().find(|host| host.name == name) {
            Some(plan) => Ok(Host::new(&self.topology.name, plan)),
            None => Err(self.no_host(name)),
        }
    }

    fn no_host(&self, name: &str) -> Error {
        let known: Vec<_> = self.topology.hosts.iter().map(|host| host.name.as_str()).collect();
        Error::NoHost { rack: self.name().into(), host: name.into(), known: known.join(", ") }
    }

    /// All hosts, then the routers, in the file's order.
    pub fn hosts(&self) -> Vec<Host> {
        self.topology.hosts.iter().map(|plan| Host::new(&self.topology.name, plan)).collect()
    }

    /// Ends the rack, with every process that lives in its namespaces.
    ///
    /// # Errors
    /// What could not be removed; the rest is gone, and [`down`] tries again.
    pub fn down(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        self.owned = false;
        let _ = self.maps.stop();
        if let Some(Ok(Err(error))) = self.line.take().map(JoinHandle::join) {
            tracing::warn!(rack = self.name(), %error, "the delay line ended early");
        }
        down(self.name()).map(|_| ())
    }

    /// The directed pairs of ports in one subnet that `links` names.
    fn select(&self, links: Links) -> Result<Vec<(&HostPlan, &LinkPlan, &HostPlan, &LinkPlan)>> {
        for name in [links.from, links.to].into_iter().flatten() {
            self.host(name)?;
        }
        let ports = || self.topology.hosts.iter().flat_map(|host| host.links.iter().map(move |link| (host, link)));
        let named = |wanted: Option<&str>, host: &HostPlan| wanted.is_none_or(|name| name == host.name);
        let mut found = Vec::new();
        for (from_host, from) in ports().filter(|(host, _)| named(links.from, host)) {
            for (to_host, to) in ports().filter(|(host, _)| named(links.to, host)) {
                if from_host.name != to_host.name && from.subnet == to.subnet {
                    found.push((from_host, from, to_host, to));
                }
            }
        }
        if let (Some(from), Some(to), true) = (links.from, links.to, found.is_empty()) {
            return Err(Error::Fault(if from == to {
                format!("{from:?} has no link to itself: name two hosts")
            } else {
                format!("{from:?} and {to:?} share no subnet: name a link to or from the router between them")
            }));
        }
        Ok(found)
    }

    /// Changes the faults of links, each from what they are. Their random numbers start over, so that the same seed does
    /// the same to the same frames again.
    ///
    /// # Errors
    /// [`Error::NoHost`]; [`Error::Fault`] if the hosts share no subnet, or the fault needs a delay line and there is
    /// none.
    pub fn change_fault(&self, links: Links, change: impl Fn(&mut Fault)) -> Result<()> {
        let mut changes = Vec::new();
        for (_, from, _, to) in self.select(links)? {
            let mut fault = self.maps.fault(from.port, to.port)?;
            change(&mut fault);
            changes.push((from.port, to.port, fault));
        }
        if changes.iter().any(|(.., fault)| fault.needs_delay_line()) && !self.line_runs()? {
            return Err(Error::Fault(format!(
                "the delay line of rack {:?} does not run, and only loss and partitions work without: \
                 end the rack with `underpass rack down {}` and start it again",
                self.name(),
                self.name()
            )));
        }
        for (from, to, fault) in changes {
            self.maps.set_fault(from, to, &fault)?;
        }
        Ok(())
    }

    /// Replaces the faults of links.
    ///
    /// # Errors
    /// As [`Rack::change_fault`].
    pub fn set_fault(&self, links: Links, fault: &Fault) -> Result<()> {
        self.change_fault(links, |current| *current = *fault)
    }

    /// Ends all faults of all links.
    ///
    /// # Errors
    /// [`Error::Bpf`].
    pub fn clear_faults(&self) -> Result<()> {
        self.set_fault(Links::ALL, &Fault::default())
    }

    /// Cuts the links between hosts of different groups, in both directions. Hosts in no group keep all links.
    ///
    /// # Errors
    /// [`Error::NoHost`]; [`Error::Fault`] if a host is in two groups.
    pub fn partition(&self, groups: &[&[&str]]) -> Result<()> {
        self.check_groups(groups)?;
        self.cut_between(groups, |_, _| true)
    }

    /// Cuts the links from the hosts of one group to those of another; the way back stays.
    ///
    /// # Errors
    /// As [`Rack::partition`].
    pub fn partition_one_way(&self, from: &[&str], to: &[&str]) -> Result<()> {
        let groups = [from, to];
        self.check_groups(&groups)?;
        self.cut_between(&groups, |from, to| from < to)
    }

    fn check_groups(&self, groups: &[&[&str]]) -> Result<()> {
        let mut seen = BTreeSet::new();
        for &name in groups.iter().copied().flatten() {
            self.host(name)?;
            if !seen.insert(name) {
                return Err(Error::Fault(format!("{name:?} is named twice: a host is on one side of a partition")));
            }
        }
        if groups.len() < 2 || groups.iter().any(|group| group.is_empty()) {
            return Err(Error::Fault("a partition needs two groups or more, and a host in each: a,b / c".into()));
        }
        Ok(())
    }

    fn cut_between(&self, groups: &[&[&str]], cut: impl Fn(usize, usize) -> bool) -> Result<()> {
        let group_of = |host: &HostPlan| groups.iter().position(|group| group.contains(&host.name.as_str()));
        let mut changes = Vec::new();
        for (from_host, from, to_host, to) in self.select(Links::ALL)? {
            let (Some(a), Some(b)) = (group_of(from_host), group_of(to_host)) else { continue };
            if a != b && cut(a, b) {
                changes.push((from.port, to.port));
            }
        }
        if changes.is_empty() {
            return Err(Error::Fault(
                "no host of one group shares a subnet with one of another: name the router between them".into(),
            ));
        }
        for (from, to) in changes {
            let fault = Fault { cut: true, ..self.maps.fault(from, to)? };
            self.maps.set_fault(from, to, &fault)?;
        }
        Ok(())
    }

    /// Ends partitions; other faults stay.
    ///
    /// # Errors
    /// [`Error::Bpf`].
    pub fn heal(&self) -> Result<()> {
        for (_, from, _, to) in self.select(Links::ALL)? {
            let fault = self.maps.fault(from.port, to.port)?;
            if fault.cut {
                self.maps.set_fault(from.port, to.port, &Fault { cut: false, ..fault })?;
            }
        }
        Ok(())
    }

    /// Draws the random faults of all links from a seed, from the start.
    ///
    /// # Errors
    /// [`Error::Bpf`].
    pub fn set_seed(&self, seed: u64) -> Result<()> {
        self.maps.set_seed(seed)?;
        for (_, from, _, to) in self.select(Links::ALL)? {
            self.maps.set_fault(from.port, to.port, &self.maps.fault(from.port, to.port)?)?;
        }
        Ok(())
    }

    /// Every directed pair of hosts in one subnet, with its faults and what they did.
    ///
    /// # Errors
    /// [`Error::Bpf`].
    pub fn links(&self) -> Result<Vec<LinkStatus>> {
        self.links_of(Links::ALL)
    }

    /// As [`Rack::links`], for some links.
    ///
    /// # Errors
    /// As [`Rack::change_fault`].
    pub fn links_of(&self, links: Links) -> Result<Vec<LinkStatus>> {
        let label = |host: &HostPlan, link: &LinkPlan| {
            if host.router { format!("{}:{}", host.name, link.subnet) } else { host.name.clone() }
        };
        self.select(links)?
            .into_iter()
            .map(|(from_host, from, to_host, to)| {
                Ok(LinkStatus {
                    from: label(from_host, from),
                    to: label(to_host, to),
                    fault: self.maps.fault(from.port, to.port)?,
                    counts: self.maps.fault_counts(from.port, to.port)?,
                })
            })
            .collect()
    }

    /// What the faults did, summed over some links.
    ///
    /// # Errors
    /// As [`Rack::change_fault`].
    pub fn fault_counters(&self, links: Links) -> Result<FaultCounts> {
        Ok(self.links_of(links)?.iter().fold(FaultCounts::default(), |sum, link| FaultCounts {
            seen: sum.seen + link.counts.seen,
            cut: sum.cut + link.counts.cut,
            lost: sum.lost + link.counts.lost,
            duplicated: sum.duplicated + link.counts.duplicated,
            reordered: sum.reordered + link.counts.reordered,
            delayed: sum.delayed + link.counts.delayed,
            line_full: sum.line_full + link.counts.line_full,
        }))
    }

    /// What the delay line did; at most 50 ms old.
    ///
    /// # Errors
    /// [`Error::Bpf`].
    pub fn line_counters(&self) -> Result<LineCounts> {
        self.maps.line_counts()
    }

    fn line_runs(&self) -> Result<bool> {
        let beat_ns = self.maps.line_counts()?.beat_ns;
        Ok(line::monotonic_ns().saturating_sub(beat_ns) < LINE_SILENCE_MAX.as_nanos() as u64)
    }

    /// Moves a host's receive work to a kernel thread, and pins that to a processor if one is given. Calling it again
    /// pins the same thread elsewhere. Returns the thread.
    ///
    /// # Errors
    /// [`Error::NoHost`]; [`Error::Io`] if the kernel has no such processor or does not start the thread.
    pub fn threaded_napi(&self, host: &str, cpu: Option<usize>) -> Result<Process> {
        let plan = self.topology.hosts.iter().find(|plan| plan.name == host).ok_or_else(|| self.no_host(host))?;
        let _lock = state::lock()?;
        let mut state = State::read(self.name())?
            .ok_or_else(|| Error::State { path: state::path(self.name()), reason: "the file is gone".into() })?;
        self.thread_locked(&mut state, plan, cpu)
    }

    /// The kernel names these threads after the interface and a number that it shows nowhere before Linux 6.8, and
    /// racks side by side may have interfaces of the same name. So the new one is found by comparing before and after,
    /// while the lock keeps other racks still, and remembered.
    fn thread_locked(&self, state: &mut State, host: &HostPlan, cpu: Option<usize>) -> Result<Process> {
        let path = namespace::path(&namespace::host_name(self.name(), &host.name));
        let mut found = None;
        for LinkPlan { ifname, .. } in &host.links {
            let thread = match state.threads.get(ifname).filter(|thread| thread.runs()) {
                Some(thread) => thread.clone(),
                None => {
                    let thread = start_thread(&path, ifname)?;
                    state.threads.insert(ifname.clone(), thread.clone());
                    state.write()?;
                    thread
                }
            };
            if let Some(cpu) = cpu {
                let mut set = CpuSet::new();
                set.set(cpu)
                    .and_then(|()| nix::sched::sched_setaffinity(Pid::from_raw(thread.pid), &set))
                    .map_err(Error::io(format!("cannot pin the receive thread of {ifname} to processor {cpu}")))?;
            }
            found = Some(thread);
        }
        found.ok_or_else(|| self.no_host(&host.name))
    }

    /// Everything worth knowing about the rack.
    ///
    /// # Errors
    /// [`Error::State`] and [`Error::Bpf`] if a part of it cannot be read.
    pub fn status(&self) -> Result<Status> {
        let state = State::read(self.name())?
            .ok_or_else(|| Error::State { path: state::path(self.name()), reason: "the file is gone".into() })?;
        let hosts = self.topology.hosts.iter().map(|host| self.host_status(&state, host)).collect::<Result<_>>()?;
        Ok(Status {
            name: self.name().into(),
            seed: self.maps.seed()?,
            hosts,
            links: self.links()?,
            delay_line: LineStatus {
                running: self.line_runs()?,
                process: state.line.map(|line| line.process().clone()),
                counts: self.maps.line_counts()?,
            },
        })
    }

    fn host_status(&self, state: &State, plan: &HostPlan) -> Result<HostStatus> {
        let namespace = namespace::host_name(self.name(), &plan.name);
        let path = namespace::path(&namespace);
        let mut ports = Vec::new();
        for link in &plan.links {
            let read = |name: &str| {
                let text = fs::read_to_string(format!("/sys/class/net/{}/{name}", link.ifname)).unwrap_or_default();
                text.trim().to_string()
            };
            // Not operstate, which the kernel updates up to a second later. Neither an interface that is down nor a
            // namespace that is gone has a carrier to read.
            let (carrier, dropped) =
                namespace::run(&path, || (read("carrier"), read("statistics/rx_dropped"))).unwrap_or_default();
            ports.push(PortStatus {
                port: link.port,
                interface: link.ifname.clone(),
                subnet: link.range,
                address: link.address,
                extra_addresses: link.extra_addresses.clone(),
                mac: link.mac,
                up: carrier == "1",
                counts: self.maps.port_counts(link.port)?,
                host_rx_dropped: dropped.parse().unwrap_or_default(),
                thread: state.threads.get(&link.ifname).filter(|thread| thread.runs()).cloned(),
            });
        }
        Ok(HostStatus {
            name: plan.name.clone(),
            router: plan.router,
            ports,
            processes: namespace::processes(&[namespace]),
        })
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        if self.owned
            && let Err(error) = self.end()
        {
            tracing::warn!(rack = self.name(), %error, "a part of the rack is left");
        }
    }
}

enum Started {
    Thread(JoinHandle<Result<()>>),
    Process(Child),
}

fn no_line(rack: &str) -> Error {
    let said = fs::read_to_string(state::log_path(rack)).unwrap_or_default();
    let said = said.trim();
    Error::Io {
        what: "the switch's delay line did not start".into(),
        source: std::io::Error::other(if said.is_empty() { "it said nothing" } else { said }),
    }
}

/// The names and numbers of the kernel threads that poll for an interface.
fn napi_threads(ifname: &str) -> Vec<Process> {
    let prefix = format!("napi/{ifname}-");
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
            let number = name.trim_end().strip_prefix(&prefix)?;
            let process = Process::of(pid)?;
            number.parse::<u32>().ok().map(|_| Process { command: name.trim_end().into(), ..process })
        })
        .collect()
}

fn start_thread(namespace: &std::path::Path, ifname: &str) -> Result<Process> {
    let what = || format!("cannot move the receive work of {ifname} to a kernel thread");
    let before = napi_threads(ifname);
    let path = format!("/sys/class/net/{ifname}/threaded");
    namespace::run(namespace, || fs::write(&path, "1"))?.map_err(Error::io(what()))?;
    let start = Instant::now();
    loop {
        let after = napi_threads(ifname);
        let new: Vec<_> = after.iter().filter(|thread| !before.contains(thread)).collect();
        match (new.as_slice(), after.as_slice()) {
            ([thread], _) => return Ok((*thread).clone()),
            // Somebody had turned it on before.
            ([], [thread]) => return Ok(thread.clone()),
            _ if start.elapsed() > THREAD_START_WAIT => {
                return Err(Error::io(what())(std::io::Error::other(format!(
                    "{} kernel threads napi/{ifname}-* were there before and {} after: they cannot be told apart",
                    before.len(),
                    after.len()
                ))));
            }
            _ => thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// The first thing found of a rack, for a message.
fn trace_of(rack: &str) -> Option<String> {
    let file = state::path(rack);
    let pins = switch::pins(rack);
    if let Some(name) = namespace::of_rack(rack).first() {
        return Some(format!("network namespace {name}"));
    }
    [file, pins].into_iter().find(|path| path.exists()).map(|path| path.display().to_string())
}

/// Ends a rack, or removes what a crash left of one: its processes, interfaces, namespaces, maps and files. Returns
/// whether there was anything.
///
/// # Errors
/// [`Error::Config`] if it cannot be a rack's name; otherwise the first thing that could not be removed, when all else
/// has been.
pub fn down(rack: &str) -> Result<bool> {
    config::check_name("rack", rack, config::RACK_NAME_MAX)?;
    if !nix::unistd::geteuid().is_root() {
        return Err(Error::Privilege);
    }
    let _lock = state::lock()?;
    down_locked(rack)
}

fn down_locked(rack: &str) -> Result<bool> {
    let found = trace_of(rack).is_some();
    // A state file that a crash left half written says nothing, and nothing depends on it.
    let state = State::read(rack).ok().flatten();
    // A delay line in some process's thread sees this within 50 ms.
    let _ = Maps::open(rack).and_then(|maps| maps.stop());
    let namespaces = namespace::of_rack(rack);
    let mut processes = namespace::processes(&namespaces);
    // A daemon that has not entered its namespace yet is known by the file alone.
    if let Some(Line::Process(daemon)) = state.and_then(|state| state.line)
        && daemon.runs()
        && !processes.iter().any(|process| process.pid == daemon.pid)
    {
        processes.push(daemon);
    }
    let mut results = vec![namespace::end(processes, &namespaces)];
    results.push(link::remove(&namespace::switch_name(rack)));
    results.extend(namespaces.iter().map(|name| namespace::delete(name)));
    results.push(switch::unpin(rack));
    results.push(state::remove(rack));
    results.into_iter().collect::<Result<()>>().map(|()| found)
}

/// The delay line of a rack started with [`Rack::up_detached`]: runs until the rack is down.
///
/// # Errors
/// What keeps it from running.
pub fn run_switch_daemon(rack: &str) -> Result<()> {
    config::check_name("rack", rack, config::RACK_NAME_MAX)?;
    let maps = Maps::open(rack)?;
    let namespace = namespace::open(&namespace::path(&namespace::switch_name(rack)))?;
    namespace::set(std::os::fd::AsFd::as_fd(&namespace)).map_err(Error::io("cannot enter the switch's namespace"))?;
    drop(namespace);
    line::run(&maps)
}

/// A host of a rack that is up.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its address; a router's first.
    pub addr: Ipv4Addr,
    /// Its interface's MAC address; a router's first.
    pub mac: MacAddr,
    /// The name of its interface; a router's first.
    pub ifname: String,
    /// The range of its subnet; a router's first.
    pub subnet: Ipv4Net,
    /// The file that its namespace is bound to.
    pub netns: PathBuf,
    /// All its interfaces: one, or a router's several.
    pub links: Vec<LinkPlan>,
}

impl Host {
    fn new(rack: &str, plan: &HostPlan) -> Self {
        let first = &plan.links[0];
        Self {
            name: plan.name.clone(),
            addr: first.address,
            mac: first.mac,
            ifname: first.ifname.clone(),
            subnet: first.range,
            netns: namespace::path(&namespace::host_name(rack, &plan.name)),
            links: plan.links.clone(),
        }
    }

    /// A command that will run on this host: in its network namespace, with the interfaces of that in /sys; all else,
    /// /sys/fs/bpf included, is the machine's.
    ///
    /// # Errors
    /// [`Error::Io`] if the namespace is gone.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        namespace::command(&self.netns, program)
    }

    /// Runs a closure on this host and waits for it: on a thread of its own, whose sockets, threads and attached
    /// programs are the host's, as are those of the threads that it starts. A panic is passed on.
    ///
    /// # Errors
    /// [`Error::Io`] if the namespace is gone.
    pub fn enter<T: Send>(&self, body: impl FnOnce() -> T + Send) -> Result<T> {
        namespace::run(&self.netns, body)
    }
}

/// A rack at a moment.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// What its random faults are drawn from.
    pub seed: u64,
    /// Its hosts, then its routers.
    pub hosts: Vec<HostStatus>,
    /// Every directed pair of hosts in one subnet.
    pub links: Vec<LinkStatus>,
    /// What holds delayed frames.
    pub delay_line: LineStatus,
}

/// A host at a moment.
#[derive(Clone, Debug, Serialize)]
pub struct HostStatus {
    /// Its name.
    pub name: String,
    /// Whether it forwards between its interfaces.
    pub router: bool,
    /// Its interfaces.
    pub ports: Vec<PortStatus>,
    /// What runs on it.
    pub processes: Vec<Process>,
}

/// A host's interface at a moment.
#[derive(Clone, Debug, Serialize)]
pub struct PortStatus {
    /// The switch's port.
    pub port: u32,
    /// Its name.
    pub interface: String,
    /// The range of its subnet.
    pub subnet: Ipv4Net,
    /// Its address.
    pub address: Ipv4Addr,
    /// Its further addresses.
    pub extra_addresses: Vec<Ipv4Addr>,
    /// Its MAC address.
    pub mac: MacAddr,
    /// Whether it is up.
    pub up: bool,
    /// What went through the switch's port.
    pub counts: PortCounts,
    /// Frames that the host did not take: its queue was full, or it had no use for them.
    pub host_rx_dropped: u64,
    /// The kernel thread that receives for it.
    pub thread: Option<Process>,
}

/// The delay line at a moment.
#[derive(Clone, Debug, Serialize)]
pub struct LineStatus {
    /// Whether it has shown life in the last two seconds.
    pub running: bool,
    /// The process that it is, or is a thread of.
    pub process: Option<Process>,
    /// What it did.
    pub counts: LineCounts,
}
