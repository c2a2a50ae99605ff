//! A shard with everything that it needs, in a rack: real processes, which can be ended and started again.

use std::{
    collections::BTreeMap,
    fmt, fs,
    net::SocketAddrV4,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde::Deserialize;
use underpass_bench::process::{self, Daemon, Directory};
use underpass_datapath::{attach::Link, coordinator as kernel};
use underpass_rack::{self as rack, Fault, Host, Links, Probability, Rack};

/// The shard of all drills.
pub const SHARD: u32 = 0;
/// Coordinators: one serves, the other stands by.
pub const COORDINATORS: usize = 2;
/// Replicas that take part between drills.
pub const REPLICAS: usize = 3;
/// Replicas that run: the last one is a spare.
pub const REPLICA_HOSTS: usize = REPLICAS + 1;
/// The host of all clients.
pub const CLIENT: &str = "client";

const PORT: u16 = 5550;
const AUTHORITY_PORT: u16 = 2379;
/// Racks of drills are named after this and the process.
const RACK_PREFIX: &str = "drill-";
/// How long a process may take to come up or to end in order.
const PROCESS_MAX: Duration = Duration::from_secs(15);
/// Time between looks at something that is waited for.
const LOOK: Duration = Duration::from_millis(20);

/// What handles the coordinator's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DataPath {
    /// In the kernel.
    Xdp,
    /// Sockets.
    Socket,
}

impl fmt::Display for DataPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Xdp => "xdp",
            Self::Socket => "socket",
        })
    }
}

/// A process of the shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// etcd.
    Authority,
    /// A replica.
    Replica(usize),
    /// A coordinator's agent.
    Coordinator(usize),
}

impl Role {
    /// The host that it runs on, which has its name.
    pub fn host(self) -> String {
        match self {
            Self::Authority => "authority".into(),
            Self::Coordinator(index) => format!("coordinator-{index}"),
            Self::Replica(index) => format!("replica-{index}"),
        }
    }

    fn all() -> impl Iterator<Item = Self> {
        let coordinators = (0..COORDINATORS).map(Self::Coordinator);
        std::iter::once(Self::Authority).chain((0..REPLICA_HOSTS).map(Self::Replica)).chain(coordinators)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.host())
    }
}

/// What an agent says of the shard, as far as drills look at it.
#[derive(Clone, Debug, Deserialize)]
pub struct Status {
    /// In a word.
    pub state: String,
    /// Epoch at which the coordinator took over.
    pub tenure: u32,
    /// Until the lease is over.
    pub lease_left_ms: Option<i64>,
    /// A compare-and-swap is under way.
    pub storing: bool,
    /// What is wrong.
    pub trouble: String,
    /// Who takes part.
    pub members: Vec<Member>,
    /// Who shall and does not.
    pub candidates: Vec<serde_json::Value>,
}

/// A replica that takes part.
#[derive(Clone, Debug, Deserialize)]
pub struct Member {
    /// Number: one more than its index here.
    pub id: u32,
    /// Not a learner.
    pub active: bool,
    /// Gets reads.
    pub serving: bool,
    /// Items held.
    pub items: u64,
    /// What is wrong.
    pub trouble: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Status(Agent),
}

#[derive(Deserialize)]
struct Agent {
    shards: Vec<Status>,
}

impl Status {
    fn serves(&self) -> bool {
        matches!(self.state.as_str(), "serving" | "changing") && self.lease_left_ms.is_some_and(|left_ms| left_ms > 0)
    }

    /// Whether it is served by the agent that says so, as it should be between drills, by these replicas.
    fn objection(&self, replicas: &[usize]) -> Option<String> {
        if self.state != "serving" {
            return Some(format!("is {}", self.state));
        }
        if !self.trouble.is_empty() {
            return Some(self.trouble.clone());
        }
        if self.storing || !self.candidates.is_empty() {
            return Some("is changing".into());
        }
        for &replica in replicas {
            match self.members.iter().find(|member| member.id == id(replica)) {
                None => return Some(format!("is without replica {replica}")),
                Some(member) if !member.trouble.is_empty() => {
                    return Some(format!("replica {replica} {}", member.trouble));
                }
                Some(member) if !(member.active && member.serving) => {
                    return Some(format!("replica {replica} is not serving"));
                }
                Some(_) => {}
            }
        }
        if self.members.len() != replicas.len() {
            return Some(format!("has {} members", self.members.len()));
        }
        None
    }
}

/// Number of a replica for the operator.
pub fn id(replica: usize) -> u32 {
    replica as u32 + 1
}

/// What a cluster is made of.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Of both coordinators.
    pub data_path: DataPath,
    /// Loss, duplication and reordering of every frame of every link, each.
    pub faults: f64,
    /// Memory of each replica, in MiB.
    pub memory_mib: u64,
}

/// A shard that is up. Dropping it takes everything down.
pub struct Cluster {
    // In the order in which they must end: coordinators first, so that they can hand over in peace.
    daemons: BTreeMap<std::cmp::Reverse<Role>, Daemon>,
    rack: Option<Rack>,
    directory: Directory,
    program: PathBuf,
    settings: Settings,
    /// Processes started so far: each has a log of its own.
    starts: u32,
}

/// Removes what drills that did not end in order have left.
///
/// # Errors
/// What cannot be removed.
pub fn remove_left() -> Result<()> {
    for name in Rack::list() {
        let Some(pid) = name.strip_prefix(RACK_PREFIX).and_then(|pid| pid.parse::<u32>().ok()) else { continue };
        if !fs::exists(format!("/proc/{pid}"))? {
            if let Ok(rack) = Rack::open(&name) {
                detach_all(&rack);
            }
            rack::down(&name)?;
        }
    }
    Ok(())
}

/// Detaches what crashed agents have left on coordinators' interfaces.
fn detach_all(rack: &Rack) {
    for coordinator in 0..COORDINATORS {
        let Ok(host) = rack.host(&Role::Coordinator(coordinator).host()) else { continue };
        let _ = host.enter(|| {
            if let Ok(ifindex) = nix::net::if_::if_nametoindex(host.ifname.as_str()) {
                let _ = kernel::detach_left(ifindex);
            }
        });
    }
}

impl Cluster {
    /// Brings everything up, creates the shard and waits until it is served.
    ///
    /// # Errors
    /// Without root, or when something does not come up.
    pub fn up(settings: Settings) -> Result<Self> {
        remove_left()?;
        let program = process::program()?;
        let hosts: Vec<String> = Role::all().map(Role::host).chain([CLIENT.to_owned()]).collect();
        let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
        let directory = Directory::new()?;
        let rack = Rack::up(&rack::Config::of_hosts(&format!("{RACK_PREFIX}{}", std::process::id()), &hosts))?;
        let mut cluster = Self { daemons: BTreeMap::new(), rack: Some(rack), directory, program, settings, starts: 0 };
        cluster.heal()?;
        fs::write(cluster.cluster_key(), format!("{:032x}\n", rand::random::<u128>().max(1)))?;
        cluster.start(Role::Authority)?;
        cluster.await_authority()?;
        let members = (0..REPLICAS).map(|replica| cluster.wanted(replica));
        let mut create = vec!["shard".to_owned(), "create".to_owned(), SHARD.to_string()];
        members.for_each(|member| create.extend(["--replica".to_owned(), member]));
        create.extend(["--config".to_owned(), cluster.configure(0)?.display().to_string()]);
        cluster.underpass(&Role::Coordinator(0), &create.iter().map(String::as_str).collect::<Vec<_>>())?;
        for role in Role::all().skip(1) {
            cluster.start(role)?;
        }
        cluster.await_health(Duration::from_secs(30))?;
        Ok(cluster)
    }

    fn rack(&self) -> &Rack {
        self.rack.as_ref().expect("it is there until `down`")
    }

    /// A host by the name of its role.
    ///
    /// # Errors
    /// When the rack has none.
    pub fn host(&self, name: &str) -> Result<Host> {
        Ok(self.rack().host(name)?)
    }

    /// What its coordinators run as.
    pub fn data_path(&self) -> DataPath {
        self.settings.data_path
    }

    /// Where a process listens.
    ///
    /// # Errors
    /// When the rack is gone.
    pub fn address(&self, role: Role) -> Result<SocketAddrV4> {
        let port = if role == Role::Authority { AUTHORITY_PORT } else { PORT };
        Ok(SocketAddrV4::new(self.host(&role.host())?.addr, port))
    }

    /// A replica as the operator names it.
    pub fn wanted(&self, replica: usize) -> String {
        let address = self.address(Role::Replica(replica)).expect("hosts of all roles are there");
        format!("{}={address}", id(replica))
    }

    fn control(&self, role: Role) -> PathBuf {
        self.directory.path.join(format!("{role}.sock"))
    }

    fn cluster_key(&self) -> PathBuf {
        self.directory.path.join("cluster.key")
    }

    /// Writes a coordinator's configuration.
    fn configure(&self, index: usize) -> Result<PathBuf> {
        let role = Role::Coordinator(index);
        let text = format!(
            "listen = \"{}\"\ndatapath = \"{}\"\ncontrol = {:?}\ncluster_key_file = {:?}\n\n\
             [authority]\nkind = \"etcd\"\nendpoints = [\"{}\"]\n\n[[shard]]\nid = {SHARD}\n",
            self.address(role)?,
            self.settings.data_path,
            self.control(role),
            self.cluster_key(),
            self.address(Role::Authority)?,
        );
        let path = self.directory.path.join(format!("{role}.toml"));
        fs::write(&path, text)?;
        Ok(path)
    }

    fn command(&self, role: Role) -> Result<Command> {
        let host = self.host(&role.host())?;
        let address = self.address(role)?;
        Ok(match role {
            Role::Authority => {
                let mut command = host.command("etcd")?;
                let client = format!("http://{address}");
                let peer = "http://127.0.0.1:2380";
                command.arg("--data-dir").arg(self.directory.path.join("etcd"));
                command.args(["--name", "a", "--initial-cluster", &format!("a={peer}")]);
                command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
                command.args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]);
                // One member alone elects itself; it need not wait for others.
                command.args(["--heartbeat-interval", "20", "--election-timeout", "200"]);
                command
            }
            Role::Coordinator(index) => {
                let mut command = host.command(&self.program)?;
                command.args(["coordinator", "run", "--config"]).arg(self.configure(index)?);
                command
            }
            Role::Replica(_) => {
                let mut command = host.command(&self.program)?;
                command.args(["replica", "--memory", &self.settings.memory_mib.to_string()]);
                command.args(["--listen", &address.to_string()]).arg("--control").arg(self.control(role));
                command.arg("--cluster-key-file").arg(self.cluster_key());
                command
            }
        })
    }

    /// Starts a process that does not run.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(&mut self, role: Role) -> Result<()> {
        ensure!(!self.runs(role), "{role} runs already");
        self.starts += 1;
        let log = self.directory.path.join(format!("{:04}-{role}.log", self.starts));
        let control = self.control(role);
        let _ = fs::remove_file(&control);
        let mut daemon = Daemon::start(role.host(), self.command(role)?, log)?;
        if role != Role::Authority {
            daemon.wait_for(&control, PROCESS_MAX)?;
        }
        self.daemons.insert(std::cmp::Reverse(role), daemon);
        Ok(())
    }

    fn await_authority(&self) -> Result<()> {
        let address = self.address(Role::Authority)?;
        let host = self.host(&Role::Authority.host())?;
        self.wait("etcd does not come up", PROCESS_MAX, || {
            Ok(host.enter(|| std::net::TcpStream::connect(address).is_ok())?)
        })
    }

    /// Whether a process was started and not ended since.
    pub fn runs(&self, role: Role) -> bool {
        self.daemons.contains_key(&std::cmp::Reverse(role))
    }

    fn daemon(&mut self, role: Role) -> Result<&mut Daemon> {
        self.daemons.get_mut(&std::cmp::Reverse(role)).with_context(|| format!("{role} does not run"))
    }

    /// Ends a process as a crash does.
    ///
    /// # Errors
    /// When it had ended before.
    pub fn crash(&mut self, role: Role) -> Result<()> {
        self.daemons.remove(&std::cmp::Reverse(role)).with_context(|| format!("{role} does not run"))?.crash()
    }

    /// Ends a process in order.
    ///
    /// # Errors
    /// When it ends otherwise.
    pub fn stop(&mut self, role: Role) -> Result<()> {
        self.daemons.remove(&std::cmp::Reverse(role)).with_context(|| format!("{role} does not run"))?.stop(PROCESS_MAX)
    }

    /// Sends a signal to a process.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&mut self, role: Role, signal: Signal) -> Result<()> {
        self.daemon(role)?.signal(signal)
    }

    /// Waits until a process has ended by itself; whether well.
    ///
    /// # Errors
    /// When it does not.
    pub fn await_end(&mut self, role: Role) -> Result<bool> {
        let status = self.daemon(role)?.wait(PROCESS_MAX)?;
        self.daemons.remove(&std::cmp::Reverse(role));
        Ok(status.success())
    }

    /// Starts whatever does not run.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start_all(&mut self) -> Result<()> {
        Role::all()
            .filter(|role| !self.runs(*role))
            .collect::<Vec<_>>()
            .into_iter()
            .try_for_each(|role| self.start(role))
    }

    /// Fails if a process has ended that should run.
    ///
    /// # Errors
    /// Then: with what it said.
    pub fn check(&mut self) -> Result<()> {
        self.daemons.values_mut().try_for_each(Daemon::check)
    }

    // Links.

    fn base(&self) -> Fault {
        let share = Probability::new(self.settings.faults).expect("it was checked");
        Fault { loss: share, duplicate: share, reorder: share, ..Fault::default() }
    }

    /// Cuts the link from one host to another; not the way back.
    ///
    /// # Errors
    /// When the switch cannot.
    pub fn cut(&self, from: &str, to: &str) -> Result<()> {
        Ok(self.rack().change_fault(Links::between(from, to), |fault| fault.cut = true)?)
    }

    /// Makes every frame to and from a host later.
    ///
    /// # Errors
    /// When the switch cannot.
    pub fn delay(&self, host: &str, delay: Duration) -> Result<()> {
        for links in [Links::from(host), Links::to(host)] {
            self.rack().change_fault(links, |fault| fault.delay = delay)?;
        }
        Ok(())
    }

    /// All links are as they are between drills.
    ///
    /// # Errors
    /// When the switch cannot.
    pub fn heal(&self) -> Result<()> {
        Ok(self.rack().set_fault(Links::ALL, &self.base())?)
    }

    /// Takes a host's interface down, or up again.
    ///
    /// # Errors
    /// When `ip` fails.
    pub fn set_interface(&self, host: &str, up: bool) -> Result<()> {
        let host = self.host(host)?;
        let status = host
            .command("ip")?
            .args(["link", "set", "dev", &host.ifname, if up { "up" } else { "down" }])
            .stdin(Stdio::null())
            .status()
            .context("cannot run ip: install the package iproute2")?;
        ensure!(status.success(), "ip link set dev {} ended with {status}", host.ifname);
        Ok(())
    }

    /// Detaches a coordinator's program behind its agent's back.
    ///
    /// # Errors
    /// When none is attached.
    pub fn detach_program(&self, coordinator: usize) -> Result<()> {
        let host = self.host(&Role::Coordinator(coordinator).host())?;
        host.enter(|| -> Result<()> {
            let ifindex = nix::net::if_::if_nametoindex(host.ifname.as_str())?;
            let link = kernel::pin_directory(ifindex)?.join("link");
            ensure!(Link::is_pinned_on(&link, ifindex), "no program is attached to {}", host.ifname);
            Link::detach_pinned(&link);
            Ok(())
        })?
    }

    /// Whether a coordinator's program is attached.
    ///
    /// # Errors
    /// When that cannot be told.
    pub fn is_attached(&self, coordinator: usize) -> Result<bool> {
        let host = self.host(&Role::Coordinator(coordinator).host())?;
        let output = host.command("ip")?.args(["-d", "link", "show", &host.ifname]).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).contains("prog/xdp"))
    }

    /// Names of all hosts.
    pub fn hosts(&self) -> Vec<String> {
        self.rack().hosts().into_iter().map(|host| host.name).collect()
    }

    // What is asked of agents.

    /// Runs `underpass` with these arguments on a role's host; what it printed.
    ///
    /// # Errors
    /// When it fails: with what it said.
    pub fn underpass(&self, on: &Role, arguments: &[&str]) -> Result<String> {
        let mut command = self.host(&on.host())?.command(&self.program)?;
        let output = command.args(arguments).stdin(Stdio::null()).output().context("cannot run underpass")?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        ensure!(output.status.success(), "`underpass {}`: {said}", arguments.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a command of the operator on a coordinator's host, for its agent.
    ///
    /// # Errors
    /// When it is refused, or fails.
    pub fn operator(&self, coordinator: usize, arguments: &[&str]) -> Result<String> {
        let role = Role::Coordinator(coordinator);
        let control = self.control(role).display().to_string();
        let mut all = arguments.to_vec();
        all.extend(["--control", &control]);
        self.underpass(&role, &all)
    }

    /// Begins to run a command of the operator that may have to wait.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn begin_operator(&self, coordinator: usize, arguments: &[&str]) -> Result<Child> {
        let role = Role::Coordinator(coordinator);
        let mut command = self.host(&role.host())?.command(&self.program)?;
        command.args(arguments).arg("--control").arg(self.control(role));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().context("cannot run underpass")
    }

    /// What a coordinator's agent says of the shard; `None` if it does not answer.
    pub fn status(&self, coordinator: usize) -> Option<Status> {
        let role = Role::Coordinator(coordinator);
        if !self.runs(role) {
            return None;
        }
        status_of(&self.control(role))
    }

    /// The coordinator that serves, if one does.
    pub fn leader(&self) -> Option<usize> {
        (0..COORDINATORS).find(|&index| self.status(index).is_some_and(|status| status.serves()))
    }

    /// Waits until something is so.
    ///
    /// # Errors
    /// When it takes longer.
    pub fn wait(&self, what: &str, length: Duration, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        let until = Instant::now() + length;
        while !is_so()? {
            process::check_interrupt()?;
            ensure!(Instant::now() < until, "{what} within {length:?}");
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Waits until this coordinator serves.
    ///
    /// # Errors
    /// When it does not.
    pub fn await_leader(&self, coordinator: usize, length: Duration) -> Result<()> {
        let what = format!("coordinator-{coordinator} does not serve");
        self.wait(&what, length, || Ok(self.leader() == Some(coordinator)))
    }

    /// Waits until this coordinator serves, whatever others believe of themselves.
    ///
    /// # Errors
    /// When it does not.
    pub fn await_leader_of(&self, coordinator: usize, length: Duration) -> Result<()> {
        let what = format!("coordinator-{coordinator} does not serve");
        self.wait(&what, length, || Ok(self.status(coordinator).is_some_and(|status| status.serves())))
    }

    /// Waits until everything is as it is between drills: one coordinator serves with all replicas, the other stands by.
    ///
    /// # Errors
    /// When it does not come to that: what is different.
    pub fn await_health(&self, length: Duration) -> Result<()> {
        let replicas: Vec<usize> = (0..REPLICAS).collect();
        let mut objection = String::new();
        let result = self.wait("it does not recover", length, || {
            objection = match self.leader() {
                None => "nobody serves".into(),
                Some(leader) => {
                    let others = (0..COORDINATORS).filter(|&index| index != leader);
                    let strange = others.filter_map(|index| match self.status(index) {
                        Some(status) if status.state == "standby" => None,
                        Some(status) => Some(format!("coordinator-{index} is {}", status.state)),
                        None => Some(format!("coordinator-{index} does not answer")),
                    });
                    let own = self.status(leader).and_then(|status| status.objection(&replicas));
                    own.into_iter().chain(strange).collect::<Vec<_>>().join("; ")
                }
            };
            Ok(objection.is_empty())
        });
        result.with_context(|| objection)
    }

    /// Waits until all replicas hold as many items: nothing is under way any more.
    ///
    /// # Errors
    /// When they do not.
    pub fn await_agreement(&self, length: Duration) -> Result<()> {
        let mut items = Vec::new();
        let result = self.wait("replicas do not agree", length, || {
            let status = self.leader().and_then(|leader| self.status(leader));
            items = status.map_or(Vec::new(), |status| status.members.iter().map(|member| member.items).collect());
            Ok(items.len() == REPLICAS && items.iter().all(|count| *count == items[0]))
        });
        result.with_context(|| format!("replicas hold {items:?} items"))
    }

    /// The last words of all processes that run or ran.
    pub fn logs(&self) -> BTreeMap<String, String> {
        let entries = fs::read_dir(&self.directory.path).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                name.ends_with(".log").then(|| (name, fs::read_to_string(entry.path()).unwrap_or_default()))
            })
            .collect()
    }

    /// Takes everything down in order.
    ///
    /// # Errors
    /// When something does not go, or a coordinator or a replica does not end well.
    pub fn down(mut self) -> Result<()> {
        let mut failed = Vec::new();
        while let Some((_, mut daemon)) = self.daemons.pop_first() {
            let is_ours = daemon.name() != Role::Authority.host();
            if let Err(error) = daemon.stop(PROCESS_MAX)
                && is_ours
            {
                failed.push(format!("{error:#}"));
            }
        }
        let rack = self.rack.take().expect("it is there until now");
        detach_all(&rack);
        rack.down()?;
        if !failed.is_empty() {
            bail!("{}", failed.join("\n"));
        }
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        while let Some((_, daemon)) = self.daemons.pop_first() {
            drop(daemon);
        }
        if let Some(rack) = &self.rack {
            detach_all(rack);
        }
    }
}

/// Asks the agent behind a control socket.
fn status_of(control: &std::path::Path) -> Option<Status> {
    use std::io::{BufRead, BufReader, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(control).ok()?;
    stream.set_read_timeout(Some(Duration::from_millis(300))).ok()?;
    stream.write_all(b"\"status\"\n").ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    let Answer::Status(mut agent) = serde_json::from_str(&line).ok()?;
    agent.shards.pop()
}
