//! A shard in a rack, and clients that record what they saw.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tempfile::TempDir;
use underpass_check::{
    history::{Operation, Outcome, Request as Op},
    invariants::linearizable,
};
use underpass_client::{Call, Client, Config, ShardConfig};
use underpass_drill::operation;
use underpass_rack::{Config as RackConfig, Rack};

const PROGRAM: &str = env!("CARGO_BIN_EXE_underpass");
const REPLICAS: usize = 3;
const PORT: u16 = 5550;

/// What the coordinator runs as.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    pub name: &'static str,
    pub datapath: &'static str,
    pub write_path: &'static str,
    pub mode: &'static str,
    /// Shards that the one coordinator serves, with three replicas each.
    pub shards: u32,
    /// Replicas are in another subnet, behind a router.
    pub routed: bool,
}

impl Variant {
    pub const XDP: Self =
        Self { name: "xdp", datapath: "xdp", write_path: "broadcast", mode: "native", shards: 1, routed: false };

    fn rack(&self) -> RackConfig {
        let name = format!("sys-{}", self.name);
        let (near, far) = if self.routed { ("near", "far") } else { ("near", "near") };
        let mut text = format!("name = {name:?}\n[[subnet]]\nname = \"near\"\nrange = \"10.77.0.0/24\"\n");
        if self.routed {
            text += "[[subnet]]\nname = \"far\"\nrange = \"10.78.0.0/24\"\n";
            text += "[[router]]\nname = \"router\"\nlink = [{ subnet = \"near\" }, { subnet = \"far\" }]\n";
        }
        let replicas = (0..self.replicas()).map(|index| (replica_name(index), far));
        for (host, subnet) in [("coord".into(), near), ("client".into(), near)].into_iter().chain(replicas) {
            text += &format!("[[host]]\nname = {host:?}\nsubnet = {subnet:?}\n");
        }
        text.parse().unwrap()
    }

    fn replicas(&self) -> usize {
        REPLICAS * self.shards as usize
    }
}

/// A coordinator, three replicas and a host for clients.
pub struct System {
    pub rack: Rack,
    variant: Variant,
    folder: TempDir,
    agent: Option<Child>,
    replicas: Vec<Option<Child>>,
}

fn replica_name(index: usize) -> String {
    format!("r{index}")
}

impl System {
    pub fn start(variant: Variant) -> Self {
        let folder = TempDir::new().unwrap();
        let rack = variant.rack();
        underpass_rack::down(&rack.name).unwrap();
        let rack = Rack::up(&rack).unwrap();
        let mut system = Self { rack, variant, folder, agent: None, replicas: Vec::new() };
        for index in 0..variant.replicas() {
            system.replicas.push(None);
            system.start_replica(index);
        }
        system.agent = Some(system.start_agent());
        system
    }

    /// Starts a replica, in place of one that ran before.
    pub fn start_replica(&mut self, index: usize) {
        let name = replica_name(index);
        let host = self.rack.host(&name).unwrap();
        let mut command = host.command(PROGRAM).unwrap();
        command.args(["replica", "--memory", "256", "--listen", &format!("{}:{PORT}", host.addr), "--control"]);
        command.arg(self.control(&name)).stderr(self.log(&name));
        if let Some(mut before) = self.replicas[index].replace(command.spawn().unwrap()) {
            let _ = before.wait();
        }
    }

    fn control(&self, of: &str) -> PathBuf {
        self.folder.path().join(format!("{of}.sock"))
    }

    fn log(&self, of: &str) -> Stdio {
        let path = self.folder.path().join(format!("{of}.log"));
        fs::OpenOptions::new().create(true).append(true).open(path).unwrap().into()
    }

    /// What the processes said; shown when something fails.
    fn logs(&self) -> String {
        let mut logs = String::new();
        for entry in fs::read_dir(self.folder.path()).unwrap().flatten() {
            if entry.path().extension().is_some_and(|e| e == "log") {
                let text = fs::read_to_string(entry.path()).unwrap_or_default();
                logs += &format!("--- {}\n{text}", entry.path().display());
            }
        }
        logs
    }

    /// Starts a coordinator's agent and waits until its shard serves.
    pub fn start_agent(&self) -> Child {
        let host = self.rack.host("coord").unwrap();
        let mut command = host.command(PROGRAM).unwrap();
        command.args(["coordinator", "run", "--datapath", self.variant.datapath]);
        command.arg("--listen").arg(format!("{}:{PORT}", host.addr));
        if self.variant.datapath == "xdp" {
            command.args(["--device", &host.ifname, "--mode", self.variant.mode]);
            command.args(["--write-path", self.variant.write_path]);
        }
        let file = self.folder.path().join("shards.toml");
        fs::write(&file, self.shards()).unwrap();
        command.arg("--config").arg(file);
        command.arg("--state").arg(self.folder.path().join("state"));
        command.arg("--control").arg(self.control("coord")).stderr(self.log("coord"));
        let agent = command.spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while self.rack.host("client").unwrap().enter(|| Client::connect(self.config())).unwrap().is_err() {
            assert!(Instant::now() < until, "the shard does not serve after ten seconds\n{}", self.logs());
            thread::sleep(Duration::from_millis(50));
        }
        agent
    }

    /// The coordinator's configuration of its shards.
    fn shards(&self) -> String {
        let shard = |id: u32| {
            let members = (0..REPLICAS).map(|index| {
                let replica = self.rack.host(&replica_name(id as usize * REPLICAS + index)).unwrap();
                format!("\"{}:{PORT}\"", replica.addr)
            });
            format!("[[shard]]\nid = {id}\nmembers = [{}]\n", members.collect::<Vec<_>>().join(", "))
        };
        (0..self.variant.shards).map(shard).collect()
    }

    pub fn take_agent(&mut self) -> Child {
        self.agent.take().unwrap()
    }

    pub fn put_agent(&mut self, agent: Child) {
        self.agent = Some(agent);
    }

    pub fn stop_agent(&mut self) {
        let mut agent = self.take_agent();
        kill(Pid::from_raw(agent.id() as i32), Signal::SIGTERM).unwrap();
        let status = agent.wait().unwrap();
        assert!(status.success(), "the agent ended with {status}\n{}", self.logs());
    }

    /// Has an agent end and leave its kernel program at work.
    pub fn hang_up(&self, agent: &mut Child) {
        kill(Pid::from_raw(agent.id() as i32), Signal::SIGHUP).unwrap();
        let status = agent.wait().unwrap();
        assert!(status.success(), "the agent ended with {status}\n{}", self.logs());
    }

    pub fn kill_replica(&self, index: usize) {
        let replica = self.replicas[index].as_ref().unwrap();
        kill(Pid::from_raw(replica.id() as i32), Signal::SIGKILL).unwrap();
    }

    fn config(&self) -> Config {
        let coordinator = std::net::SocketAddrV4::new(self.rack.host("coord").unwrap().addr, PORT);
        let shards = (0..self.variant.shards).map(|id| ShardConfig { id, coordinators: vec![coordinator] }).collect();
        Config { sessions: 8, shards, ..Config::single(0, coordinator) }
    }

    /// Eight clients of every kind of operation on a few keys, for so long; `meanwhile` runs beside them.
    pub fn load(&self, length: Duration, meanwhile: impl FnOnce(&Self) + Send) -> History {
        let seed: u64 = rand::random::<u64>() >> 8;
        println!("{:?}, seed {seed}", self.variant);
        let history = Arc::new(Mutex::new(Vec::new()));
        thread::scope(|scope| {
            let clients = scope.spawn(|| {
                let host = self.rack.host("client").unwrap();
                let recorded = history.clone();
                host.enter(|| {
                    let recorder = move |call: &Call<'_>| recorded.lock().unwrap().push(operation(call));
                    let client = Client::connect_recorded(self.config(), Box::new(recorder)).unwrap();
                    let until = Instant::now() + length;
                    thread::scope(|scope| {
                        for thread in 0..8 {
                            let (client, mut rng) = (&client, StdRng::seed_from_u64(seed + thread));
                            scope.spawn(move || {
                                while Instant::now() < until {
                                    // Half of them only read: writers wait for what may never be answered.
                                    act(client, &mut rng, thread % 2 == 0);
                                }
                            });
                        }
                    });
                })
                .unwrap();
            });
            meanwhile(self);
            clients.join().unwrap();
        });
        History(Arc::try_unwrap(history).unwrap().into_inner().unwrap())
    }

    /// Every replica holds the same items once nothing is under way.
    pub fn replicas_agree(&self) {
        let items = |index| {
            let asked = underpass_replica::cli::ask(&self.control(&replica_name(index)));
            asked.map_or(0, |(_, stats)| stats.items)
        };
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let counts: Vec<_> = (0..self.variant.replicas()).map(items).collect();
            if counts.chunks(REPLICAS).all(|shard| shard.iter().all(|count| *count == shard[0] && *count > 0)) {
                return;
            }
            assert!(Instant::now() < until, "replicas hold {counts:?} items\n{}", self.logs());
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Stops everything in order: each process ends by itself and well.
    pub fn stop(mut self) {
        self.stop_agent();
        let device = self.rack.host("coord").unwrap();
        let link = device.command("ip").unwrap().args(["-d", "link", "show", &device.ifname]).output().unwrap();
        let link = String::from_utf8_lossy(&link.stdout);
        assert!(!link.contains("prog/xdp"), "the program is still attached\n{link}\n{}", self.logs());
        for replica in &mut self.replicas {
            let mut replica = replica.take().unwrap();
            kill(Pid::from_raw(replica.id() as i32), Signal::SIGTERM).unwrap();
            assert!(replica.wait().unwrap().success());
        }
    }
}

/// Ends what still runs, in order where it can: a coordinator that is killed leaves its pinned tables to the next one.
impl Drop for System {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = kill(Pid::from_raw(agent.id() as i32), Signal::SIGTERM);
            let _ = agent.wait();
        }
        for mut replica in self.replicas.drain(..).flatten() {
            let _ = replica.kill();
            let _ = replica.wait();
        }
    }
}

fn act(client: &Client, rng: &mut StdRng, only_read: bool) {
    let key = format!("key-{}", rng.random_range(0..24));
    let key = key.as_bytes();
    let value = format!("{:x}", rng.random::<u64>());
    let value = value.as_bytes();
    // Outcomes are in the history.
    match rng.random_range(if only_read { 0..60 } else { 40..100 }) {
        0..60 => drop(client.get(key)),
        60..80 => drop(client.put(key, value)),
        80..83 => drop(client.delete(key)),
        83..86 => drop(client.add(key, value)),
        86..89 => drop(client.replace(key, value)),
        89..94 => {
            if let Ok(Some(item)) = client.get(key) {
                drop(client.cas(key, value, item.cas));
            }
        }
        94..96 => drop(client.append(key, b"+")),
        96..97 => drop(client.prepend(key, b"-")),
        _ => drop(client.incr(b"counter", rng.random_range(-5..10))),
    }
}

/// What clients saw.
pub struct History(Vec<Operation>);

impl History {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn joined(mut before: Self, after: Self) -> Self {
        before.0.extend(after.0);
        before
    }

    /// Fails unless it is linearizable.
    pub fn check(&self) {
        let unknown = self.0.iter().filter(|operation| operation.return_ns.is_none()).count();
        println!("{} operations, {unknown} of unknown outcome", self.0.len());
        for operation in &self.0 {
            operation.validate().unwrap();
        }
        if let Err(violation) = linearizable::check(&self.0) {
            panic!("{violation}");
        }
    }

    fn answered(&self) -> Vec<&Operation> {
        let answered = |operation: &&Operation| {
            operation.return_ns.is_some() && !matches!(operation.outcome, Outcome::Failed | Outcome::Unknown)
        };
        self.0.iter().filter(answered).collect()
    }

    /// Reads and writes that were both called and answered within these nanoseconds.
    pub fn called_and_answered_in(&self, when: std::ops::Range<u64>) -> (usize, usize) {
        let within = |operation: &&&Operation| {
            when.contains(&operation.call_ns) && operation.return_ns.is_some_and(|at| when.contains(&at))
        };
        let answered = self.answered();
        let reads = answered.iter().filter(within).filter(|operation| operation.op == Op::Get).count();
        (reads, answered.iter().filter(within).count() - reads)
    }
}
