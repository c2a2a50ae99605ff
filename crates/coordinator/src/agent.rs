//! The agent: one thread that decides, beside a data path that acts.
//!
//! It takes an epoch from the authority, has the replicas take part, opens, ages and closes sessions, tells replicas what is
//! stable, takes reads away from replicas that are silent, and stops in order. protocol.md, sections 5 and 10.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    os::fd::AsFd,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use tracing::{debug, error, info, warn};
use underpass_abi::{abi::up_config, wire::UP_EPOCH_SHIFT};
use underpass_datapath::{attach, features::transmits_redirected, next_hop::NextHops};
use underpass_protocol::{
    control::{self, Closed, HeartbeatAck, Installed, OPEN_PADDING, Opened},
    coordinator::{CloseOutcome, Settings, opened},
    wire::{Endpoint, Header, Op, Packet, Reason, SessionId},
};

use crate::{
    authority::{Authority, FileAuthority, MemoryAuthority, Record},
    clock::{now_ms, time_offset_ms},
    config::{Config, DataPathKind, Mode, WritePath},
    counters,
    datapath::{ControlPort, DataPath},
    members::{Event, Members, Phase},
    sessions::{COUNTER_MAX, NoSession, Open, Sessions},
    socket::SocketPath,
    stats::{MemberStats, Server, ShardStats, Stats},
    xdp::{XdpDataPath, XdpOptions},
};

/// Generations reserved in the authority's record at a time.
const GENERATION_BLOCK: u32 = 1 << 16;
/// Time between looks for idle sessions.
const SWEEP_MS: u64 = 1000;
/// Time between looks at members that are to be installed, are silent, or whose next hop is not known.
const TICK_MS: u64 = 10;
/// Time between attempts to resolve a next hop.
const PROBE_MS: u64 = 1000;
/// Control packets handled between two looks at the clock.
const CONTROL_BURST: usize = 256;
/// How long a clean stop waits for unresolved writes.
const DRAIN_MS: u64 = 3000;
/// While it waits: how long retransmissions may pass, then how long nothing may.
/// The lease of a coordinator that is alone: there is no other that it could overlap with (protocol.md, section 7).
const LEASE_FOR_EVER: u64 = u64::MAX;

/// How an agent ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopReport {
    /// Every shard that served ended with every write resolved, and this is on record.
    pub clean: bool,
    /// Unresolved writes by shard, of those that did not.
    pub unresolved: Vec<(u32, u32)>,
}

enum Command {
    Stats(SyncSender<Result<Stats>>),
    OpenSessions { shard: u32, clients: Vec<Endpoint>, reply: SyncSender<Result<Vec<Open>>> },
    Stop,
    Abandon,
}

/// Starts agents.
pub struct Agent;

/// A running agent. Dropped without [`AgentHandle::stop`], it is stopped all the same.
pub struct AgentHandle {
    commands: Sender<Command>,
    wake: Arc<EventFd>,
    thread: Option<JoinHandle<Result<StopReport>>>,
    listen: Endpoint,
}

impl Agent {
    /// Starts an agent with the data path that `config` names, in the calling thread's network namespace. When it returns,
    /// the address is bound; the shards serve once every replica takes part.
    ///
    /// # Errors
    /// The configuration cannot be meant, or what it needs is not there: says which and what to do.
    pub fn start(config: Config) -> Result<AgentHandle> {
        Self::start_with(config, open_datapath)
    }

    /// The same with a data path of the caller's, made on the agent's thread.
    pub fn start_with(
        config: Config,
        datapath: impl FnOnce(&Config, Settings) -> Result<Box<dyn DataPath>> + Send + 'static,
    ) -> Result<AgentHandle> {
        config.validate()?;
        let (commands, inbox) = channel();
        let wake = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?);
        let (started, starting) = sync_channel(1);
        let thread = std::thread::Builder::new().name("agent".to_owned()).spawn({
            let wake = wake.clone();
            move || {
                let mut agent = match Loop::new(config, datapath, inbox, wake) {
                    Ok(agent) => agent,
                    Err(error) => {
                        let _ = started.send(Err(error));
                        return Ok(StopReport { clean: true, unresolved: Vec::new() });
                    }
                };
                let _ = started.send(Ok(agent.datapath.listen()));
                let ended = agent.run()?;
                agent.finish(ended)
            }
        })?;
        match starting.recv() {
            Ok(Ok(listen)) => Ok(AgentHandle { commands, wake, thread: Some(thread), listen }),
            Ok(Err(error)) => {
                let _ = thread.join();
                Err(error)
            }
            Err(_) => bail!("the agent's thread panicked while starting"),
        }
    }
}

fn open_datapath(config: &Config, settings: Settings) -> Result<Box<dyn DataPath>> {
    match config.datapath {
        DataPathKind::Socket => Ok(Box::new(SocketPath::start(config.listen, &config.cpus, settings)?)),
        DataPathKind::Xdp => {
            let device = config.device.clone().map_or_else(|| device_with(config.listen.addr), Ok)?;
            let datapath = XdpDataPath::start(XdpOptions {
                listen: config.listen,
                device: device.clone(),
                mode: match config.mode {
                    Mode::Native => attach::Mode::Native,
                    Mode::Generic => attach::Mode::Generic,
                },
                write_path: config.write_path,
                pinned: config.state.is_some(),
                settings,
            })?;
            let broadcasts = config.mode == Mode::Native && config.write_path == WritePath::Broadcast;
            if broadcasts && datapath.device().and_then(transmits_redirected) == Some(false) {
                // No error: a veth's peer may get its program after this.
                warn!(
                    "{device} does not transmit what XDP redirects: as long as this is so, no write reaches a replica. On a \
                     veth, the peer needs an XDP program or GRO (`ethtool -K PEER gro on` while it is up); otherwise use \
                     write_path = \"tc\""
                );
            }
            Ok(Box::new(datapath))
        }
    }
}

/// The network device that has this address.
fn device_with(addr: Ipv4Addr) -> Result<String> {
    let has = |interface: &nix::ifaddrs::InterfaceAddress| {
        interface
            .address
            .as_ref()
            .and_then(|address| address.as_sockaddr_in())
            .is_some_and(|address| address.ip() == addr)
    };
    let mut interfaces = nix::ifaddrs::getifaddrs().context("asking for this host's addresses")?;
    let interface = interfaces.find(has).with_context(|| {
        format!("no network device has the address {addr} (`ip addr` shows them): listen on one that is there")
    })?;
    Ok(interface.interface_name)
}

impl AgentHandle {
    /// The address and port that it listens on.
    pub fn listen(&self) -> Endpoint {
        self.listen
    }

    /// What it tells about itself.
    pub fn stats(&self) -> Result<Stats> {
        let (reply, answer) = sync_channel(1);
        self.command(Command::Stats(reply))?;
        answer.recv().map_err(|_| anyhow!("the agent has ended"))?
    }

    /// Opens a session for each of `clients`, past the handshake: for benchmarks whose clients are packet generators.
    ///
    /// # Errors
    /// Unknown shard, or no free session; those opened before stay open.
    pub fn open_sessions(&self, shard: u32, clients: &[Endpoint]) -> Result<Vec<Open>> {
        let (reply, answer) = sync_channel(1);
        self.command(Command::OpenSessions { shard, clients: clients.to_vec(), reply })?;
        answer.recv().map_err(|_| anyhow!("the agent has ended"))?
    }

    /// Waits until every shard serves.
    ///
    /// # Errors
    /// They do not in time; says what they wait for.
    pub fn wait_serving(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let stats = self.stats()?;
            if stats.shards.iter().all(|shard| shard.state == "serving") {
                return Ok(());
            }
            if Instant::now() >= deadline {
                bail!("not serving after {timeout:?}:\n{}", stats.table(None));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Whether it has ended by itself, which it does for errors alone; [`AgentHandle::stop`] tells which.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Stops in order (protocol.md, section 10): takes no new writes, waits for those under way, records whether the epoch
    /// is clean, detaches.
    pub fn stop(mut self) -> Result<StopReport> {
        self.end(Command::Stop)
    }

    /// Ends as a crash does: nothing is waited for, recorded or detached.
    pub fn abandon(mut self) {
        let _ = self.end(Command::Abandon);
    }

    fn command(&self, command: Command) -> Result<()> {
        self.commands.send(command).map_err(|_| anyhow!("the agent has ended"))?;
        self.wake.write(1).context("waking the agent")?;
        Ok(())
    }

    fn end(&mut self, command: Command) -> Result<StopReport> {
        let _ = self.command(command);
        let thread = self.thread.take().expect("ended once");
        thread.join().map_err(|_| anyhow!("the agent's thread panicked"))?
    }
}

impl Drop for AgentHandle {
    fn drop(&mut self) {
        if self.thread.is_some()
            && let Err(error) = self.end(Command::Stop)
        {
            error!("stopping the coordinator: {error:#}");
        }
    }
}

/// A shard and what the data path was told about it.
struct Served {
    members: Members,
    floor: u64,
    next_hops: Vec<Option<[u8; 6]>>,
    stable: u64,
    unresolved: u32,
}

/// A stop under way: no new writes, until none is under way or this moment has come.
struct Draining {
    until_ms: u64,
}

/// Why the loop ended.
enum Ended {
    Stopped,
    Abandoned,
}

struct Loop {
    config: Config,
    datapath: Box<dyn DataPath>,
    control: ControlPort,
    authority: Box<dyn Authority>,
    sessions: Sessions,
    /// Generations below this are reserved in the records.
    reserved: u32,
    /// From CLOCK_MONOTONIC to the packets' time.
    time_offset_ms: i64,
    shards: Vec<Served>,
    next_hops: Option<NextHops>,
    server: Option<Server>,
    inbox: Receiver<Command>,
    wake: Arc<EventFd>,
    draining: Option<Draining>,
    started_ms: u64,
    heartbeat_ms: u64,
    sweep_ms: u64,
    tick_ms: u64,
    probe_ms: u64,
    /// What was said about next hops last, by member.
    said: BTreeMap<Endpoint, String>,
}

impl Loop {
    fn new(
        config: Config,
        datapath: impl FnOnce(&Config, Settings) -> Result<Box<dyn DataPath>>,
        inbox: Receiver<Command>,
        wake: Arc<EventFd>,
    ) -> Result<Self> {
        let mut authority: Box<dyn Authority> = match &config.state {
            Some(directory) => Box::new(FileAuthority::open(directory)?),
            None => Box::new(MemoryAuthority::default()),
        };
        let record = |authority: &dyn Authority, id| authority.load(id).cloned().unwrap_or_else(|| Record::new(id));
        let reached_ms = config.shards.iter().map(|shard| record(&*authority, shard.id).time_ms).max().unwrap_or(0);
        let bucket_key = random::<32>()?;
        let settings = Settings {
            buckets: config.buckets,
            sessions: config.sessions,
            bucket_key: std::array::from_fn(|i| (bucket_key[i / 2] >> (32 * (i % 2))) as u32),
            fingerprint_key: random()?,
        };
        let mut datapath = datapath(&config, settings)?;
        let server = config.control.as_deref().map(Server::bind).transpose()?;
        let now_ms = now_ms();
        let adopted = datapath.adopted()?;
        for left in &adopted {
            check_adopted(&config, &*authority, left)?;
        }
        let time_offset_ms = adopted.first().map_or_else(|| time_offset_ms(reached_ms), |left| left.time_offset_ms);
        let is_adopted = |id: u32| adopted.iter().find(|left| left.shard == id);

        let counter = config.shards.iter().filter(|shard| is_adopted(shard.id).is_some());
        let counter = counter.map(|shard| record(&*authority, shard.id).generations).max().unwrap_or(0);
        let secrets = Box::new(|| random().expect("the kernel's random numbers were there a moment ago"));
        let mut sessions = Sessions::new(now_ms, datapath.session_count(), counter, secrets);
        if !adopted.is_empty() {
            let count = datapath.session_count() as usize;
            datapath.records(count, &mut |index, record| sessions.adopt(index, record))?;
        }
        let reserved = counter + GENERATION_BLOCK;
        let mut shards = Vec::new();
        for shard in &config.shards {
            let before = record(&*authority, shard.id);
            let left = is_adopted(shard.id);
            let mut record = if left.is_some() { before.taken_over() } else { before.next_epoch()? };
            record.generations = reserved;
            record.served |= config.assume_installed;
            authority.store(record.clone())?;
            let mut members = Members::new(shard, datapath.listen(), datapath.session_count(), &record, now_ms);
            let mut floor = u64::from(record.epoch) << UP_EPOCH_SHIFT;
            if let Some(left) = left {
                members.take_over(now_ms);
                floor = left.floor;
                info!("shard {}: takes over the tables of epoch {}", shard.id, record.epoch);
            } else if config.assume_installed {
                members.assume_installed();
            }
            let next_hops = vec![None; shard.members.len()];
            shards.push(Served { members, floor, next_hops, stable: 0, unresolved: 0 });
        }
        let next_hops = match datapath.device() {
            Some(ifindex) => Some(NextHops::new(ifindex).context("asking the kernel about next hops")?),
            None => None,
        };
        let control = datapath.take_control();
        info!(
            "coordinator {} ({}, {}): shards: {}, sessions: up to {}",
            datapath.listen(),
            datapath.name(),
            datapath.mode(),
            shards.len(),
            datapath.session_count()
        );
        let mut agent = Self {
            config,
            datapath,
            control,
            authority,
            sessions,
            reserved,
            time_offset_ms,
            shards,
            next_hops,
            server,
            inbox,
            wake,
            draining: None,
            started_ms: now_ms,
            heartbeat_ms: now_ms,
            sweep_ms: now_ms + SWEEP_MS,
            tick_ms: now_ms,
            probe_ms: now_ms,
            said: BTreeMap::new(),
        };
        agent.resolve(now_ms)?;
        for at in 0..agent.shards.len() {
            if agent.shards[at].members.phase() == Phase::Serving {
                agent.configure(at)?;
            }
        }
        Ok(agent)
    }

    fn run(&mut self) -> Result<Ended> {
        let mut buffer = Vec::new();
        loop {
            self.wait()?;
            for _ in 0..CONTROL_BURST {
                match self.control.receive(&mut buffer) {
                    Ok(Some(from)) => self.control_packet(from, &buffer)?,
                    Ok(None) => break,
                    Err(error) => {
                        warn!("receiving control packets: {error}");
                        break;
                    }
                }
            }
            let _ = self.wake.read();
            while let Ok(command) = self.inbox.try_recv() {
                match command {
                    Command::Stats(reply) => drop(reply.send(self.stats())),
                    Command::OpenSessions { shard, clients, reply } => {
                        drop(reply.send(self.open_many(shard, &clients)))
                    }
                    Command::Stop if self.draining.is_none() => self.start_draining()?,
                    Command::Stop => {}
                    Command::Abandon => return Ok(Ended::Abandoned),
                }
            }
            if let Some(mut server) = self.server.take() {
                server.serve(&mut || self.stats());
                self.server = Some(server);
            }
            let now_ms = now_ms();
            if self.next_hops.as_mut().is_some_and(NextHops::poll_changes) || now_ms >= self.probe_ms {
                self.resolve(now_ms)?;
            }
            if now_ms >= self.tick_ms {
                self.tick_ms = now_ms + TICK_MS;
                self.tick(now_ms)?;
            }
            if now_ms >= self.heartbeat_ms {
                self.heartbeat(now_ms)?;
                if self.drained(now_ms) {
                    return Ok(Ended::Stopped);
                }
            }
            if now_ms >= self.sweep_ms {
                self.sweep_ms = now_ms + SWEEP_MS;
                self.sessions.rotate(now_ms);
                self.sweep(now_ms)?;
            }
        }
    }

    /// Waits for something to do.
    fn wait(&self) -> Result<()> {
        let now_ms = now_ms();
        let next_ms = [self.heartbeat_ms, self.sweep_ms, self.tick_ms].into_iter().min().expect("three timers");
        let timeout = PollTimeout::from(next_ms.saturating_sub(now_ms).min(1000) as u16);
        let mut fds = vec![
            PollFd::new(self.control.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
        ];
        fds.extend(self.next_hops.iter().map(|hops| PollFd::new(hops.as_fd(), PollFlags::POLLIN)));
        fds.extend(self.server.iter().flat_map(Server::fds).map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error).context("waiting for control packets"),
        }
    }

    fn send(&self, datagram: &[u8], to: Endpoint) {
        if let Err(error) = self.control.send(datagram, to) {
            // Lost like any datagram: whoever waits for it asks again, and silence is noticed.
            debug!("sending to {to}: {error}");
        }
    }

    fn shard_index(&self, shard: u32) -> Option<usize> {
        self.shards.iter().position(|served| served.members.shard() == shard)
    }

    // Configurations.

    /// Tells the data path what is so now of a shard that serves.
    fn configure(&mut self, at: usize) -> Result<()> {
        let served = &self.shards[at];
        let mut config = served.members.config(served.floor, LEASE_FOR_EVER, &served.next_hops);
        config.time_offset_ms = self.time_offset_ms;
        if self.draining.is_some() {
            config.refuse_writes = Reason::Lease.to_wire();
        }
        self.datapath.configure(&config).with_context(|| format!("configuring shard {}", config.shard))
    }

    fn act_on(&mut self, at: usize, event: Event) -> Result<()> {
        match event {
            Event::None => Ok(()),
            Event::Known => {
                let shard = self.shards[at].members.shard();
                let record = self.authority.load(shard).cloned().expect("stored at the start");
                let configuration = Some(self.shards[at].members.configuration());
                self.authority.store(Record { configuration, ..record })?;
                let event = self.shards[at].members.install(now_ms());
                self.send_installs(at, now_ms());
                self.act_on(at, event)
            }
            Event::TookPart => {
                // On record before the first write can be ordered.
                let shard = self.shards[at].members.shard();
                let record = self.authority.load(shard).cloned().expect("stored at the start");
                self.authority.store(Record { served: true, ..record })?;
                self.configure(at)?;
                info!("shard {shard} serves in epoch {}", self.shards[at].members.epoch());
                Ok(())
            }
            Event::Changed => self.configure(at),
        }
    }

    fn send_installs(&mut self, at: usize, now_ms: u64) {
        for (to, datagram) in self.shards[at].members.tick(now_ms) {
            self.send(&datagram, to);
        }
    }

    fn tick(&mut self, now_ms: u64) -> Result<()> {
        for at in 0..self.shards.len() {
            if self.draining.is_none() {
                self.send_installs(at, now_ms);
            }
            if !self.config.assume_installed {
                let event = self.shards[at].members.check_silence(now_ms);
                self.act_on(at, event)?;
            }
        }
        Ok(())
    }

    /// Looks up next hops, has missing ones resolved, and tells the data path of changes.
    fn resolve(&mut self, now_ms: u64) -> Result<()> {
        let Some(hops) = &mut self.next_hops else {
            self.probe_ms = u64::MAX;
            return Ok(());
        };
        let probes = now_ms >= self.probe_ms;
        if probes {
            self.probe_ms = now_ms + PROBE_MS;
        }
        let mut changed = Vec::new();
        for (at, served) in self.shards.iter_mut().enumerate() {
            let shard = served.members.shard();
            for (member, hop) in served.members.members().iter().zip(&mut served.next_hops) {
                let to = member.endpoint;
                let (resolved, says) = match hops.resolve(to.addr) {
                    Ok(Some(resolved)) => (Some(resolved), String::new()),
                    Ok(None) => {
                        let probed = if probes { hops.probe(to.addr) } else { Ok(()) };
                        (
                            None,
                            probed.map_or_else(
                                |error| error.to_string(),
                                |()| "its link-layer address is not known yet".to_owned(),
                            ),
                        )
                    }
                    Err(error) => (None, error.to_string()),
                };
                if self.said.get(&to).is_none_or(|said| *said != says) {
                    if !says.is_empty() {
                        warn!("shard {shard}: replica {to} cannot be sent to: {says}");
                    } else if self.said.contains_key(&to) {
                        info!("shard {shard}: replica {to} can be sent to");
                    }
                    self.said.insert(to, says);
                }
                if *hop != resolved {
                    *hop = resolved;
                    if changed.last() != Some(&at) {
                        changed.push(at);
                    }
                }
            }
        }
        if !changed.is_empty() {
            let hops = self.shards.iter().flat_map(|served| served.members.members().iter().zip(&served.next_hops));
            let hops = hops.filter_map(|(member, hop)| hop.map(|hop| (member.endpoint.addr, hop))).collect();
            self.datapath.set_next_hops(hops);
        }
        Ok(())
    }

    /// Tells members what is stable. A scan of a large table takes a while: heartbeats are spaced so that scanning takes a
    /// tenth of this thread's time at most.
    fn heartbeat(&mut self, now_ms: u64) -> Result<()> {
        let scanning = Instant::now();
        for at in 0..self.shards.len() {
            let served = &mut self.shards[at];
            if served.members.phase() != Phase::Serving {
                continue;
            }
            let scan = self.datapath.scan(served.members.shard(), self.sessions.bound())?;
            served.stable = served.stable.max(scan.stable);
            served.unresolved = scan.unresolved;
            if !self.config.assume_installed {
                self.send_heartbeats(at, now_ms);
            }
        }
        let spent_ms = scanning.elapsed().as_millis() as u64;
        self.heartbeat_ms = now_ms + self.config.heartbeat_ms.max(10 * spent_ms);
        Ok(())
    }

    fn send_heartbeats(&mut self, at: usize, now_ms: u64) {
        let time = self.packet_time(now_ms);
        let served = &mut self.shards[at];
        for (to, datagram) in served.members.heartbeats(served.stable, time) {
            self.send(&datagram, to);
        }
    }

    fn packet_time(&self, now_ms: u64) -> u64 {
        now_ms.saturating_add_signed(self.time_offset_ms)
    }

    // Sessions.

    /// Closes sessions that were not used for long.
    fn sweep(&mut self, now_ms: u64) -> Result<()> {
        // A record tells its last use to within a second.
        let Some(used_before_ms) = now_ms.checked_sub(self.config.idle_ms + 1000) else { return Ok(()) };
        let mut idle = Vec::new();
        self.datapath.records(self.sessions.bound(), &mut |_, record| {
            if record.session != 0 && record.used_ms < used_before_ms {
                idle.push(SessionId(record.session));
            }
        })?;
        for session in idle {
            let Some(open) = self.sessions.get(session) else { continue };
            match self.datapath.close(session, Some(used_before_ms))? {
                CloseOutcome::Closed { request, state } => {
                    debug!("session {:#x} of {} was idle", session.0, open.client);
                    self.sessions.close(session, request, state);
                }
                // Used meanwhile; or its write may still take effect, and its record is how it will be known.
                CloseOutcome::NotYours | CloseOutcome::Unresolved => {}
            }
        }
        Ok(())
    }

    /// Opens a session in the table and in the data path.
    fn open_session(&mut self, at: usize, client: Endpoint, request: Option<u64>) -> Result<Result<Open, NoSession>> {
        if self.sessions.counter() >= self.reserved && self.reserved < COUNTER_MAX {
            let reserved = (self.reserved + GENERATION_BLOCK).min(COUNTER_MAX);
            for served in &self.shards {
                let record = self.authority.load(served.members.shard()).cloned().expect("stored at the start");
                self.authority.store(Record { generations: reserved, ..record })?;
            }
            self.reserved = reserved;
        }
        let (epoch, shard) = (self.shards[at].members.epoch(), self.shards[at].members.shard());
        let open = match self.sessions.open(epoch, shard, client, request) {
            Ok(open) => open,
            Err(reason) => return Ok(Err(reason)),
        };
        let record = opened(now_ms(), open.session, shard, open.token, client);
        ensure!(self.datapath.load(open.session.index(), &record)?, "session index {} is taken", open.session.index());
        Ok(Ok(open))
    }

    fn open_many(&mut self, shard: u32, clients: &[Endpoint]) -> Result<Vec<Open>> {
        let at = self.shard_index(shard).with_context(|| format!("there is no shard {shard} here"))?;
        let mut opened = Vec::with_capacity(clients.len());
        for &client in clients {
            match self.open_session(at, client, None)? {
                Ok(open) => opened.push(open),
                Err(NoSession::Full) => bail!("all {} sessions are open", self.sessions.limit()),
                Err(NoSession::Generations) => bail!("this epoch has issued all its {COUNTER_MAX} sessions"),
            }
        }
        Ok(opened)
    }

    // Control packets.

    fn control_packet(&mut self, from: Endpoint, datagram: &[u8]) -> Result<()> {
        let Ok(packet) = Packet::parse(datagram) else { return Ok(()) };
        let header = packet.header;
        match header.op {
            Op::Open => match self.open(&packet) {
                Ok(Ok((to, answer))) if answer.len() <= datagram.len() => self.send(&answer, to),
                // An answer longer than its question would make an amplifier: the padding is missing.
                Ok(Ok(_)) => self.reject(header, Reason::Malformed, from),
                Ok(Err(reason)) => self.reject(header, reason, from),
                Err(error) => {
                    error!("opening a session: {error:#}");
                    self.reject(header, Reason::NoSession, from);
                }
            },
            Op::Close => match self.close(&packet)? {
                Ok((to, answer)) => self.send(&answer, to),
                Err(reason) => self.reject(header, reason, from),
            },
            Op::Installed | Op::HeartbeatAck => {
                let Some(at) = self.shard_index(header.shard) else { return Ok(()) };
                let (members, now_ms) = (&mut self.shards[at].members, now_ms());
                let event = if header.op == Op::Installed {
                    let Some(answer) = control::parse::<Installed>(&packet) else { return Ok(()) };
                    members.installed(from, &header, &answer, now_ms)
                } else {
                    let Some(ack) = control::parse::<HeartbeatAck>(&packet) else { return Ok(()) };
                    members.heartbeat_ack(from, &header, &ack, now_ms)
                };
                self.act_on(at, event)?;
            }
            Op::ControlReject => {
                let Some(at) = self.shard_index(header.shard) else { return Ok(()) };
                let event = self.shards[at].members.rejected(from, &header);
                self.act_on(at, event)?;
            }
            // Nothing else is for an agent.
            _ => {}
        }
        Ok(())
    }

    fn reject(&self, mut header: Header, reason: Reason, to: Endpoint) {
        header.op = Op::ControlReject;
        header.status = reason.to_wire();
        header.epoch = self.shard_index(header.shard).map_or(0, |at| self.shards[at].members.epoch());
        self.send(&header.datagram(&[], &[]), to);
    }

    /// OPEN (protocol.md, section 5): first a challenge, then a session for who answers it.
    fn open(&mut self, packet: &Packet<'_>) -> Result<Result<(Endpoint, Vec<u8>), Reason>> {
        let mut header = packet.header;
        let Some(at) = self.shard_index(header.shard) else { return Ok(Err(Reason::Shard)) };
        let client = header.reply_to().filter(is_a_hosts);
        let whole = packet.key.is_empty() && packet.value.len() >= OPEN_PADDING;
        let (Some(client), true, Some(control::Open { .. })) = (client, whole, control::parse(packet)) else {
            return Ok(Err(Reason::Malformed));
        };
        if self.draining.is_some() {
            return Ok(Err(Reason::Lease));
        }
        let members = &self.shards[at].members;
        if members.phase() != Phase::Serving {
            return Ok(Err(Reason::NoMember));
        }
        header.op = Op::Opened;
        header.epoch = members.epoch();
        let mut opened = Opened { idle_ms: self.config.idle_ms, configuration: None };
        if header.token == 0 {
            header.session = SessionId(0);
            header.token = self.sessions.challenge(client);
            return Ok(Ok((client, control::emit(header, &opened))));
        }
        if !self.sessions.is_challenge(client, header.token) {
            return Ok(Err(Reason::Token));
        }
        opened.configuration = Some(members.configuration());
        let open = match self.repeated(client, header.shard, header.request)? {
            Some(open) => open,
            None => match self.open_session(at, client, Some(header.request))? {
                Ok(open) => open,
                Err(reason) => {
                    if reason == NoSession::Generations {
                        error!(
                            "all {COUNTER_MAX} sessions of this epoch were issued: restart the coordinator in order"
                        );
                    }
                    return Ok(Err(Reason::NoSession));
                }
            },
        };
        (header.session, header.token) = (open.session, open.token);
        Ok(Ok((client, control::emit(header, &opened))))
    }

    /// The session of an OPEN that arrives again. One that wrote already is another client's, at the same address: its OPEN
    /// was answered, and its numbers are used up.
    fn repeated(&mut self, client: Endpoint, shard: u32, request: u64) -> Result<Option<Open>> {
        let Some(open) = self.sessions.opened_by(client, shard, request) else { return Ok(None) };
        if self.datapath.record(open.session.index())?.request == 0 {
            return Ok(Some(open));
        }
        self.sessions.forget_open(open.session);
        Ok(None)
    }

    /// CLOSE (protocol.md, section 5), for the session's owner alone.
    fn close(&mut self, packet: &Packet<'_>) -> Result<Result<(Endpoint, Vec<u8>), Reason>> {
        let mut header = packet.header;
        let session = header.session;
        let (client, closed) = if let Some(open) = self.sessions.get(session) {
            if open.token != header.token || open.shard != header.shard {
                return Ok(Err(Reason::Token));
            }
            match self.datapath.close(session, None)? {
                CloseOutcome::Closed { request, state } => {
                    self.sessions.close(session, request, state);
                    (open.client, Closed { closed: true, request, state })
                }
                CloseOutcome::Unresolved => {
                    let record = self.datapath.record(session.index())?;
                    (open.client, Closed { closed: false, request: record.request, state: record.state.into() })
                }
                CloseOutcome::NotYours => return Ok(Err(Reason::Session)),
            }
        } else if let Some(ended) = self.sessions.ended(session, header.token) {
            // Its answer was lost.
            let Some(client) = header.reply_to().filter(is_a_hosts) else { return Ok(Err(Reason::Malformed)) };
            (client, Closed { closed: true, request: ended.request, state: ended.state })
        } else {
            return Ok(Err(Reason::Session));
        };
        header.op = Op::Closed;
        header.epoch = self.shard_index(header.shard).map_or(0, |at| self.shards[at].members.epoch());
        (header.key_len, header.value_len) = (0, 0);
        Ok(Ok((client, control::emit(header, &closed))))
    }

    // Stopping.

    fn start_draining(&mut self) -> Result<()> {
        info!("stopping: no new writes, waiting for those under way");
        let now_ms = now_ms();
        self.draining = Some(Draining { until_ms: now_ms + DRAIN_MS });
        // At once: nothing may be under way.
        self.heartbeat_ms = now_ms;
        self.configure_serving()
    }

    fn configure_serving(&mut self) -> Result<()> {
        for at in 0..self.shards.len() {
            if self.shards[at].members.phase() == Phase::Serving {
                self.configure(at)?;
            }
        }
        Ok(())
    }

    /// Whether a stop has nothing more to wait for; called after every scan. No CPU orders a new write any more, so a scan
    /// that finds nothing means that nothing will be. Retransmissions of writes under way still pass.
    fn drained(&self, now_ms: u64) -> bool {
        let unresolved: u32 = self.shards.iter().map(|served| served.unresolved).sum();
        self.draining.as_ref().is_some_and(|draining| unresolved == 0 || now_ms >= draining.until_ms)
    }

    /// The end of a stop: the record, and the data path.
    fn finish(mut self, ended: Ended) -> Result<StopReport> {
        let mut report = StopReport { clean: true, unresolved: Vec::new() };
        if let Ended::Abandoned = ended {
            report.clean = false;
            return Ok(report);
        }
        let now_ms = now_ms();
        let time_ms = self.packet_time(now_ms);
        for at in 0..self.shards.len() {
            let served = &self.shards[at];
            let shard = served.members.shard();
            if served.members.phase() != Phase::Serving {
                info!("shard {shard} never served in epoch {}", served.members.epoch());
                continue;
            }
            if served.unresolved > 0 {
                report.clean = false;
                report.unresolved.push((shard, served.unresolved));
                error!(
                    "shard {shard}: {} writes are unresolved, so epoch {} does not end clean. They were waiting for: {}. {}",
                    served.unresolved,
                    served.members.epoch(),
                    self.waited_for(at),
                    self.datapath.after_unclean_end()
                );
                continue;
            }
            if !self.config.assume_installed {
                self.send_heartbeats(at, now_ms);
            }
            let record = self.authority.load(shard).cloned().expect("stored at the start");
            self.authority.store(record.ended_clean(time_ms))?;
            info!("shard {shard}: epoch {} ended clean", self.shards[at].members.epoch());
        }
        if report.clean {
            self.datapath.stop()?;
        } else {
            self.datapath.leave()?;
        }
        Ok(report)
    }

    /// Members that have trouble, or all: one of them did not acknowledge.
    fn waited_for(&self, at: usize) -> String {
        let members = self.shards[at].members.members();
        let troubled: Vec<_> = members.iter().filter(|member| !member.trouble.is_empty()).collect();
        if troubled.is_empty() {
            return "any of its replicas".to_owned();
        }
        troubled.iter().map(|member| format!("{} ({})", member.endpoint, member.trouble)).collect::<Vec<_>>().join(", ")
    }

    fn stats(&mut self) -> Result<Stats> {
        let now_ms = now_ms();
        let counts = self.datapath.counters()?;
        let mut by_name: BTreeMap<String, u64> = counters::all()
            .into_iter()
            .map(|counter| (counter.name, counts.get(counter.index).copied().unwrap_or(0)))
            .collect();
        by_name.extend(self.datapath.extra_counters().into_iter().map(|(name, count)| (name.to_owned(), count)));
        let has_hops = self.next_hops.is_some();
        let shards = self.shards.iter().map(|served| {
            let members = served.members.members().iter().zip(&served.next_hops).map(|(member, hop)| MemberStats {
                address: member.endpoint.to_string(),
                incarnation: member.incarnation,
                serving: member.serving,
                silent_ms: member.heard_ms.map(|heard_ms| now_ms.saturating_sub(heard_ms)),
                used_bytes: member.used_bytes,
                budget_bytes: member.budget_bytes,
                items: member.items,
                next_hop: has_hops.then(|| hop.map_or(String::new(), |mac| mac.map(|b| format!("{b:02x}")).join(":"))),
                trouble: member.trouble.clone(),
            });
            ShardStats {
                shard: served.members.shard(),
                epoch: served.members.epoch(),
                state: match (served.members.phase(), &self.draining) {
                    (Phase::Serving, None) => "serving",
                    (_, Some(_)) => "stopping",
                    (_, None) => "starting",
                }
                .to_owned(),
                stable: served.stable,
                unresolved: served.unresolved,
                store_full: served.members.store_full(),
                members: members.collect(),
            }
        });
        Ok(Stats {
            datapath: self.datapath.name().to_owned(),
            mode: self.datapath.mode(),
            listen: self.datapath.listen().to_string(),
            pid: std::process::id(),
            uptime_ms: now_ms - self.started_ms,
            sessions_open: self.sessions.in_use(),
            sessions: self.sessions.limit(),
            shards: shards.collect(),
            counters: by_name,
        })
    }
}

/// Whether one host can have this address and port, so that an answer may go there.
fn is_a_hosts(endpoint: &Endpoint) -> bool {
    let addr = endpoint.addr;
    endpoint.port != 0 && !addr.is_unspecified() && !addr.is_multicast() && !addr.is_broadcast()
}

/// Random words from the kernel.
fn random<const N: usize>() -> Result<[u64; N]> {
    let mut words = [0; N];
    for word in &mut words {
        *word = getrandom::u64().map_err(|error| anyhow!("asking the kernel for random numbers: {error}"))?;
    }
    Ok(words)
}

/// Whether tables that an agent before left behind are those of this configuration.
fn check_adopted(config: &Config, authority: &dyn Authority, left: &up_config) -> Result<()> {
    let id = left.shard;
    let advice = "start it with the configuration of before and stop it in order, then change";
    let Some(shard) = config.shards.iter().find(|shard| shard.id == id) else {
        bail!("an agent before left shard {id} being served, which is not in this configuration: {advice}");
    };
    let count = left.must_ack_list.len().min(usize::from(left.must_ack_count));
    let members: Vec<_> =
        left.must_ack_list[..count].iter().map(|&index| underpass_protocol::coordinator::member(left, index)).collect();
    ensure!(
        members == shard.members,
        "an agent before left shard {id} being served with other replicas than this configuration names: {advice}"
    );
    let epoch = authority.load(id).map_or(0, |record| record.epoch);
    ensure!(
        epoch == left.epoch,
        "an agent before left shard {id} being served in epoch {}, but the authority's record says {epoch}: start it with the \
         `state` directory of before",
        left.epoch
    );
    Ok(())
}
