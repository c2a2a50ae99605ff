//! The agent's process: one thread that drives the pure [`underpass_protocol::agent::Agent`] beside a data path.
//!
//! It hands it control datagrams, the authority's notices, the operator's commands and the time, and does what it says. What
//! the pure agent does not know of is here: next hops, clocks, and how a process begins and ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    os::fd::AsFd,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use tracing::{debug, error, info, warn};
use underpass_authority::{Authority, MemoryAuthority, Notice, Record, Request, StoreOutcome};
use underpass_datapath::{attach, features::transmits_redirected, next_hop::NextHops};
use underpass_protocol::{
    agent::{self, Action, Event, Level, Wanted},
    coordinator,
    wire::Endpoint,
};

use crate::{
    admin::{Answer, Command, Request as AdminRequest, Server},
    clock::{Suspension, now_ms, wall_offset_ms},
    config::{Config, DataPathKind, Mode, Shard, WritePath},
    counters,
    datapath::{ControlPort, DataPath},
    socket::SocketPath,
    stats::Stats,
    xdp::{XdpDataPath, XdpOptions},
};

/// Time between attempts to resolve a next hop.
const PROBE_MS: u64 = 1000;
/// Time between looks whether the data path is still attached.
const ATTACHED_MS: u64 = 100;
/// Control packets handled between two looks at everything else.
const CONTROL_BURST: usize = 256;
/// How long a stop waits until it is on record that nothing is served any more.
const STOP_MS: u64 = 2000;
/// How long the role is left to others after a hand-over.
const LEAVE_TO: Duration = Duration::from_secs(1);
/// Number of the driver's own compare-and-swap, which makes a record; the pure agent's count from 1.
const CREATE: u64 = 0;

/// How an agent ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopReport {
    /// It is on record that nothing is served any more: whoever takes over need not wait for leases.
    pub recorded: bool,
}

enum Order {
    Stats(SyncSender<Result<Stats>>),
    Change { shard: u32, command: Command, reply: SyncSender<Result<String, String>> },
    Stop,
    Leave,
    Abandon,
}

/// Starts agents.
pub struct Agent;

/// A running agent. Dropped without [`AgentHandle::stop`], it is stopped all the same.
pub struct AgentHandle {
    orders: Sender<Order>,
    wake: Arc<EventFd>,
    thread: Option<JoinHandle<Result<StopReport>>>,
    listen: Endpoint,
}

impl Agent {
    /// Starts an agent with the data path and the authority that `config` names, in the calling thread's network namespace.
    /// When it returns, the address is bound; each shard is served when its replicas take part and this agent has the role.
    ///
    /// # Errors
    /// The configuration cannot be meant, or what it needs is not there: says which and what to do.
    pub fn start(config: Config) -> Result<AgentHandle> {
        let authority = config.authority.clone();
        Self::start_with(config, move |me| match authority {
            Some(authority) => underpass_authority::open(&authority, me),
            None => Ok(Box::new(MemoryAuthority::new(me))),
        })
    }

    /// The same with an authority of the caller's, connected under the agent's address.
    pub fn start_with(
        config: Config,
        authority: impl FnOnce(Endpoint) -> Result<Box<dyn Authority>> + Send + 'static,
    ) -> Result<AgentHandle> {
        config.validate()?;
        let (orders, inbox) = channel();
        let wake = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?);
        let (started, starting) = sync_channel(1);
        let thread = std::thread::Builder::new().name("agent".to_owned()).spawn({
            let wake = wake.clone();
            move || {
                let driver = match Driver::new(config, authority, inbox, wake) {
                    Ok(driver) => driver,
                    Err(error) => {
                        let _ = started.send(Err(error));
                        return Ok(StopReport { recorded: true });
                    }
                };
                let _ = started.send(Ok(driver.datapath.listen()));
                driver.run()
            }
        })?;
        match starting.recv() {
            Ok(Ok(listen)) => Ok(AgentHandle { orders, wake, thread: Some(thread), listen }),
            Ok(Err(error)) => {
                let _ = thread.join();
                Err(error)
            }
            Err(_) => bail!("the agent's thread panicked while starting"),
        }
    }
}

fn open_datapath(config: &Config, settings: coordinator::Settings) -> Result<Box<dyn DataPath>> {
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
                pinned: config.authority.is_some(),
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
    ///
    /// # Errors
    /// It has ended, or its data path's counters cannot be read.
    pub fn stats(&self) -> Result<Stats> {
        let (reply, answer) = sync_channel(1);
        self.order(Order::Stats(reply))?;
        answer.recv().map_err(|_| anyhow!("the agent has ended"))?
    }

    /// Has it change a shard, and waits for that; what was done.
    ///
    /// # Errors
    /// It has ended; or what it has against it.
    pub fn change(&self, shard: u32, command: Command) -> Result<String> {
        let (reply, answer) = sync_channel(1);
        self.order(Order::Change { shard, command, reply })?;
        answer.recv().map_err(|_| anyhow!("the agent has ended"))?.map_err(anyhow::Error::msg)
    }

    /// Waits until every shard is served here, with a lease.
    ///
    /// # Errors
    /// They are not in time; says what they wait for.
    pub fn wait_serving(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let stats = self.stats()?;
            if stats.shards.iter().all(|shard| shard.lease_left_ms.is_some_and(|left_ms| left_ms > 0)) {
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

    /// Serves nothing any more, has that recorded if the authority answers in time, and detaches. What replicas hold stays
    /// with them.
    ///
    /// # Errors
    /// Why it ended before.
    pub fn stop(mut self) -> Result<StopReport> {
        self.end(Order::Stop)
    }

    /// Ends, and leaves tables that can outlive this process at work, for an agent that goes on with them within a lease. Where
    /// they cannot, this is [`AgentHandle::stop`].
    ///
    /// # Errors
    /// Why it ended before.
    pub fn leave(mut self) -> Result<StopReport> {
        self.end(Order::Leave)
    }

    /// Ends as a crash does: nothing is waited for, recorded or detached.
    pub fn abandon(mut self) {
        let _ = self.end(Order::Abandon);
    }

    fn order(&self, order: Order) -> Result<()> {
        self.orders.send(order).map_err(|_| anyhow!("the agent has ended"))?;
        self.wake.write(1).context("waking the agent")?;
        Ok(())
    }

    fn end(&mut self, order: Order) -> Result<StopReport> {
        let _ = self.order(order);
        let thread = self.thread.take().expect("ended once");
        thread.join().map_err(|_| anyhow!("the agent's thread panicked"))?
    }
}

impl Drop for AgentHandle {
    fn drop(&mut self) {
        if self.thread.is_some()
            && let Err(error) = self.end(Order::Stop)
        {
            error!("stopping the coordinator: {error:#}");
        }
    }
}

/// Who waits for the answer to a command.
enum Asker {
    Socket(u64),
    Caller(SyncSender<Result<String, String>>),
}

/// What the driver knows of a shard's record.
struct Known {
    shard: Shard,
    /// Latest seen, or about to be stored.
    record: Option<Record>,
}

struct Driver {
    agent: agent::Agent,
    config: Config,
    datapath: Box<dyn DataPath>,
    control: ControlPort,
    authority: Box<dyn Authority>,
    shards: BTreeMap<u32, Known>,
    /// Shards whose role is held.
    roles: BTreeSet<u32>,
    next_hops: Option<NextHops>,
    /// By host; `None`: not known.
    hops: BTreeMap<Ipv4Addr, Option<[u8; 6]>>,
    /// What was said about next hops last.
    said: BTreeMap<Ipv4Addr, String>,
    probe_ms: u64,
    server: Option<Server>,
    inbox: Receiver<Order>,
    wake: Arc<EventFd>,
    askers: BTreeMap<u64, Asker>,
    asked: u64,
    suspension: Suspension,
    started_ms: u64,
    /// When to look next whether the data path is still attached.
    attached_ms: u64,
    /// A stop is under way until this moment.
    stopping_ms: Option<u64>,
    resigned: bool,
}

impl Driver {
    fn new(
        config: Config,
        authority: impl FnOnce(Endpoint) -> Result<Box<dyn Authority>>,
        inbox: Receiver<Order>,
        wake: Arc<EventFd>,
    ) -> Result<Self> {
        let cluster_key = config.cluster_key()?;
        let suspension = Suspension::new();
        // What can fail for its configuration comes before the data path, which is not to be attached in vain. With port 0 the
        // address is known only after it.
        let mut server = config.control.as_deref().map(Server::bind).transpose()?;
        let mut connect = Some(authority);
        let mut connect = |me| connect.take().expect("connected once")(me);
        let authority = if config.listen.port == 0 { None } else { Some(connect(config.listen)?) };
        let bucket_key = random::<32>()?;
        let mut datapath = open_datapath(
            &config,
            coordinator::Settings {
                buckets: config.buckets,
                sessions: config.sessions,
                bucket_key: std::array::from_fn(|i| (bucket_key[i / 2] >> (32 * (i % 2))) as u32),
                fingerprint_key: random()?,
            },
        )?;
        for left in datapath.adopted()? {
            if config.shards.iter().all(|shard| shard.id != left.shard) {
                warn!("an agent before left shard {} at work, which this one does not serve: ends it", left.shard);
                datapath.clear(left.shard)?;
            }
        }
        if let Some(server) = &mut server {
            // Not before the data path is attached: who waits for the socket waits for that.
            server.publish()?;
        }
        let listen = datapath.listen();
        let authority = authority.map_or_else(|| connect(listen), Ok)?;
        let next_hops =
            datapath.device().map(NextHops::new).transpose().context("asking the kernel about next hops")?;
        let control = datapath.take_control();
        let now_ms = now_ms();
        let settings = agent::Settings {
            listen,
            cluster_key,
            heartbeat_ms: config.heartbeat_ms,
            suspect_ms: config.suspect_ms,
            lost_ms: config.lost_ms,
            reach_ms: config.reach_ms,
            stuck_ms: config.stuck_ms,
            idle_ms: config.idle_ms,
            wall_offset_ms: wall_offset_ms(),
            random: Box::new(|| random::<1>().expect("the kernel's random numbers were there a moment ago")[0]),
        };
        let ids: Vec<u32> = config.shards.iter().map(|shard| shard.id).collect();
        let agent = agent::Agent::new(settings, &ids, datapath.session_count(), now_ms);
        info!(
            "coordinator {listen} ({}, {}): authority: {}, shards: {}, sessions: up to {}",
            datapath.name(),
            datapath.mode(),
            authority.name(),
            ids.len(),
            datapath.session_count()
        );
        for &shard in &ids {
            authority.request(Request::Load { shard });
            authority.request(Request::Campaign { shard });
        }
        Ok(Self {
            agent,
            shards: config
                .shards
                .iter()
                .map(|shard| (shard.id, Known { shard: shard.clone(), record: None }))
                .collect(),
            config,
            datapath,
            control,
            authority,
            roles: BTreeSet::new(),
            next_hops,
            hops: BTreeMap::new(),
            said: BTreeMap::new(),
            probe_ms: now_ms,
            server,
            inbox,
            wake,
            askers: BTreeMap::new(),
            asked: 0,
            suspension,
            started_ms: now_ms,
            attached_ms: 0,
            stopping_ms: None,
            resigned: false,
        })
    }

    /// An error ends the process as a crash does: what outlives one is left.
    fn run(mut self) -> Result<StopReport> {
        let mut buffer = Vec::new();
        loop {
            self.wait()?;
            if self.suspension.has_been() {
                self.step(Event::Suspended)?;
            }
            for _ in 0..CONTROL_BURST {
                match self.control.receive(&mut buffer) {
                    Ok(Some(from)) => self.step(Event::Datagram { from, bytes: &buffer })?,
                    Ok(None) => break,
                    Err(error) => {
                        warn!("receiving control packets: {error}");
                        break;
                    }
                }
            }
            while let Some(notice) = self.authority.try_next() {
                self.notice(notice)?;
            }
            let _ = self.wake.read();
            while let Ok(order) = self.inbox.try_recv() {
                match order {
                    Order::Stats(reply) => drop(reply.send(self.stats())),
                    Order::Change { shard, command, reply } => self.change(shard, command, Asker::Caller(reply))?,
                    Order::Leave if self.datapath.outlives_process() => {
                        info!("leaves its tables at work, for the agent that comes next");
                        return Ok(StopReport { recorded: false });
                    }
                    Order::Stop | Order::Leave => self.stop()?,
                    Order::Abandon => return Ok(StopReport { recorded: false }),
                }
            }
            self.serve_admin()?;
            let now_ms = now_ms();
            if self.next_hops.as_mut().is_some_and(NextHops::poll_changes) || now_ms >= self.probe_ms {
                self.resolve(now_ms);
            }
            if now_ms >= self.attached_ms {
                self.attached_ms = now_ms + ATTACHED_MS;
                if self.datapath.stay_attached()? {
                    error!("the program was detached by somebody else; it is attached again, with its tables");
                }
            }
            if now_ms >= self.agent.due() {
                self.step(Event::Tick)?;
            }
            if let Some(until_ms) = self.stopping_ms
                && (self.has_left() || now_ms >= until_ms)
            {
                let recorded = self.agent.has_stopped();
                if !recorded {
                    warn!("ends without a record of it: whoever takes over waits for a lease");
                }
                self.datapath.stop()?;
                return Ok(StopReport { recorded });
            }
        }
    }

    /// Waits for something to do.
    fn wait(&self) -> Result<()> {
        let next_ms = self.agent.due().min(self.probe_ms);
        let timeout = PollTimeout::from(next_ms.saturating_sub(now_ms()).min(1000) as u16);
        let mut fds = vec![
            PollFd::new(self.control.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.authority.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
        ];
        fds.extend(self.next_hops.iter().map(|hops| PollFd::new(hops.as_fd(), PollFlags::POLLIN)));
        fds.extend(self.server.iter().flat_map(Server::fds));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error).context("waiting for control packets"),
        }
    }

    /// Has the pure agent take an event, and does what it says.
    fn step(&mut self, event: Event<'_>) -> Result<()> {
        for action in self.agent.step(now_ms(), event, &mut *self.datapath)? {
            match action {
                Action::Send { to, bytes } => {
                    if let Err(error) = self.control.send(&bytes, to) {
                        // Lost like any datagram: whoever waits for it asks again, and silence is noticed.
                        debug!("sending to {to}: {error}");
                    }
                }
                Action::Store { shard, id, expected, record } => {
                    self.know(shard, &record);
                    self.authority.request(Request::Store { shard, id, expected, record });
                }
                Action::Load { shard } => self.authority.request(Request::Load { shard }),
                Action::Resign { shard } => self.authority.request(Request::Resign { shard, leave_to: LEAVE_TO }),
                Action::Reply { id, result } => match self.askers.remove(&id) {
                    Some(Asker::Caller(reply)) => drop(reply.send(result)),
                    Some(Asker::Socket(number)) => {
                        let answer = result.map_or_else(Answer::Refused, Answer::Done);
                        self.server.iter_mut().for_each(|server| server.answer(number, &answer));
                    }
                    None => {}
                },
                Action::Log { level: Level::Info, what } => info!("{what}"),
                Action::Log { level: Level::Warn, what } => warn!("{what}"),
                Action::Log { level: Level::Error, what } => error!("{what}"),
            }
        }
        Ok(())
    }

    // The authority.

    fn notice(&mut self, notice: Notice) -> Result<()> {
        match notice {
            Notice::Record { shard, revision, record } => {
                let Some(known) = self.shards.get(&shard) else { return Ok(()) };
                if known.record.is_none() {
                    match &record {
                        None if !known.shard.members.is_empty() => {
                            self.create(shard);
                            return Ok(());
                        }
                        None => {}
                        Some(record) => self.compare(&known.shard, record),
                    }
                }
                if let Some(record) = &record {
                    self.know(shard, record);
                }
                self.step(Event::Record { shard, revision, record })
            }
            Notice::Stored { shard, id: CREATE, outcome } => match outcome {
                StoreOutcome::Stored(revision) => {
                    let record = self.shards.get(&shard).and_then(|known| known.record.clone());
                    self.step(Event::Record { shard, revision, record })
                }
                // The record, or that there still is none, follows.
                StoreOutcome::Conflict => {
                    self.forget(shard);
                    Ok(())
                }
                StoreOutcome::Unknown(why) => {
                    warn!("shard {shard}: whether its record was made is not known ({why})");
                    self.forget(shard);
                    Ok(())
                }
            },
            Notice::Stored { shard, id, outcome } => self.step(Event::Stored { shard, id, outcome }),
            Notice::Role { shard, held } => {
                if held {
                    self.roles.insert(shard);
                } else {
                    self.roles.remove(&shard);
                }
                self.step(Event::Role { shard, held })
            }
            Notice::Trouble { what } => {
                error!("authority: {what}");
                Ok(())
            }
            Notice::Recovered { what } => {
                info!("authority: {what} works again");
                Ok(())
            }
        }
    }

    /// Makes the record of a shard that has none, from the configuration.
    fn create(&mut self, shard: u32) {
        let members = self.shards[&shard].shard.members.iter().zip(0..);
        let wanted = members.map(|(at, id)| Wanted { id, addr: at.addr, port: at.port, replaces: None });
        let record = Record { lease_ms: self.config.lease_ms, ..Record::new(shard, wanted.collect()) };
        info!("shard {shard}: has no record; makes one, with {} replicas", record.wanted.len());
        self.know(shard, &record);
        self.authority.request(Request::Store { shard, id: CREATE, expected: 0, record });
    }

    /// Says where the record differs from the configuration.
    fn compare(&self, configured: &Shard, record: &Record) {
        let shard = configured.id;
        let on_record: BTreeSet<Endpoint> = record.wanted.iter().map(Wanted::endpoint).collect();
        let here: BTreeSet<Endpoint> = configured.members.iter().copied().collect();
        if !here.is_empty() && here != on_record {
            let list = |all: &BTreeSet<Endpoint>| all.iter().map(Endpoint::to_string).collect::<Vec<_>>().join(", ");
            warn!(
                "shard {shard}: the configuration names the replicas {}, and the record wants {}. The record counts: change it \
                 with `underpass members add` and `remove`, and the configuration to match, or leave `members` out of that",
                list(&here),
                list(&on_record)
            );
        }
        if record.lease_ms <= self.config.lost_ms {
            warn!(
                "shard {shard}: its leases of {} ms, on record, are not longer than lost_ms ({}): a silent replica ends service \
                 until it is removed. Set lost_ms lower",
                record.lease_ms, self.config.lost_ms
            );
        }
    }

    /// Remembers who is in the latest record, for their next hops.
    fn know(&mut self, shard: u32, record: &Record) {
        if let Some(known) = self.shards.get_mut(&shard) {
            known.record = Some(record.clone());
            if self.hosts().iter().any(|host| !self.hops.contains_key(host)) {
                self.resolve(now_ms());
            }
        }
    }

    fn forget(&mut self, shard: u32) {
        self.shards.entry(shard).and_modify(|known| known.record = None);
    }

    // Next hops.

    /// Hosts of replicas that take part, or shall.
    fn hosts(&self) -> BTreeSet<Ipv4Addr> {
        let mut hosts = BTreeSet::new();
        if self.next_hops.is_none() {
            return hosts;
        }
        for (&shard, known) in &self.shards {
            if let Some(record) = &known.record {
                hosts.extend(record.wanted.iter().map(|wanted| wanted.addr));
                hosts.extend(record.members.iter().map(|member| member.addr));
            }
            // Those of a change that is not complete, or of tables that an agent before this one left.
            if let Some(config) = self.datapath.config(shard) {
                let members = config.must_ack_list.iter().take(usize::from(config.must_ack_count));
                hosts.extend(members.map(|&index| coordinator::member(&config, index).addr));
            }
        }
        hosts
    }

    /// Looks up next hops, has missing ones resolved, and tells the data path of changes.
    fn resolve(&mut self, now_ms: u64) {
        let hosts = self.hosts();
        let Some(next_hops) = &mut self.next_hops else {
            self.probe_ms = u64::MAX;
            return;
        };
        let probes = now_ms >= self.probe_ms;
        if probes {
            self.probe_ms = now_ms + PROBE_MS;
        }
        let mut hops = BTreeMap::new();
        for host in hosts {
            let (hop, says) = match next_hops.resolve(host) {
                Ok(Some(hop)) => (Some(hop), String::new()),
                Ok(None) => {
                    let probed = if probes { next_hops.probe(host) } else { Ok(()) };
                    let unknown = || "its link-layer address is not known yet".to_owned();
                    (None, probed.map_or_else(|error| error.to_string(), |()| unknown()))
                }
                Err(error) => (None, error.to_string()),
            };
            if self.said.get(&host).is_none_or(|said| *said != says) {
                if !says.is_empty() {
                    warn!("replicas at {host} cannot be sent to: {says}");
                } else if self.said.contains_key(&host) {
                    info!("replicas at {host} can be sent to");
                }
                self.said.insert(host, says);
            }
            hops.insert(host, hop);
        }
        if hops != self.hops {
            self.datapath.set_next_hops(hops.iter().filter_map(|(&host, hop)| hop.map(|hop| (host, hop))).collect());
            self.hops = hops;
        }
    }

    // The operator.

    fn change(&mut self, shard: u32, command: Command, asker: Asker) -> Result<()> {
        self.asked += 1;
        self.askers.insert(self.asked, asker);
        self.step(Event::Command { shard, id: self.asked, command: command.into() })
    }

    fn serve_admin(&mut self) -> Result<()> {
        let Some(server) = &mut self.server else { return Ok(()) };
        for (number, request) in server.requests() {
            match request {
                AdminRequest::Status => {
                    let answer = self.stats().map_or_else(
                        |error| Answer::Refused(format!("{error:#}")),
                        |stats| Answer::Status(Box::new(stats)),
                    );
                    self.server.iter_mut().for_each(|server| server.answer(number, &answer));
                }
                AdminRequest::Change { shard, command } => self.change(shard, command, Asker::Socket(number))?,
            }
        }
        Ok(())
    }

    fn stats(&mut self) -> Result<Stats> {
        let now_ms = now_ms();
        let counts = self.datapath.counters()?;
        let mut by_name: BTreeMap<String, u64> = counters::all()
            .into_iter()
            .map(|counter| (counter.name, counts.get(counter.index).copied().unwrap_or(0)))
            .collect();
        by_name.extend(self.datapath.extra_counters().into_iter().map(|(name, count)| (name.to_owned(), count)));
        let (sessions_open, sessions) = self.agent.sessions();
        let hop_text =
            |hop: &Option<[u8; 6]>| hop.map_or(String::new(), |mac| mac.map(|byte| format!("{byte:02x}")).join(":"));
        Ok(Stats {
            datapath: self.datapath.name().to_owned(),
            mode: self.datapath.mode(),
            listen: self.datapath.listen().to_string(),
            pid: std::process::id(),
            uptime_ms: now_ms - self.started_ms,
            sessions_open,
            sessions,
            authority: self.authority.name(),
            authority_troubles: self.authority.troubles().into_iter().map(|trouble| trouble.what).collect(),
            shards: self.agent.status(now_ms),
            next_hops: self
                .next_hops
                .is_some()
                .then(|| self.hops.iter().map(|(host, hop)| (host.to_string(), hop_text(hop))).collect()),
            counters: by_name,
        })
    }

    // The end.

    fn stop(&mut self) -> Result<()> {
        if self.stopping_ms.is_none() {
            info!("stopping: serves nothing any more");
            self.stopping_ms = Some(now_ms() + STOP_MS);
            self.step(Event::Stop)?;
        }
        Ok(())
    }

    /// It is on record that nothing is served here, and others may have the roles.
    fn has_left(&mut self) -> bool {
        if !self.agent.has_stopped() {
            return false;
        }
        if !std::mem::replace(&mut self.resigned, true) {
            for &shard in self.shards.keys() {
                self.authority.request(Request::Resign { shard, leave_to: Duration::MAX });
            }
        }
        self.roles.is_empty()
    }
}

/// Random words from the kernel.
fn random<const N: usize>() -> Result<[u64; N]> {
    let mut words = [0; N];
    for word in &mut words {
        *word = getrandom::u64().map_err(|error| anyhow!("asking the kernel for random numbers: {error}"))?;
    }
    Ok(words)
}
