//! An agent with the xdp data path on a veth of its own, replicas and clients behind it: it serves, dies and is succeeded,
//! and leaves nothing behind. Needs root.

mod common;

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::Ordering::Relaxed,
    time::Duration,
};

use common::{Client, Replica, Session, WAIT, bind_at, is_rejected, pass_everything, run, until};
use nix::sched::{CloneFlags, setns, unshare};
use underpass_authority::{Config as Authority, FileConfig};
use underpass_coordinator::{
    agent::{Agent, AgentHandle},
    config::{Config, DataPathKind, Mode, Shard, WritePath},
};
use underpass_protocol::{
    control::ClusterKey,
    wire::{Endpoint, Kind, Op, Packet, Reason, Status},
};

/// The calling thread in a namespace of its own with the coordinator's device; the rest of the world in another.
struct Net {
    world: String,
    replicas: Vec<Replica>,
    state: tempfile::TempDir,
}

/// The replicas' hosts; one device has all their addresses.
const HOSTS: [&str; 3] = ["10.1.0.2", "10.1.0.3", "10.1.0.4"];

impl Net {
    /// `None`, said aloud, without the privilege to make namespaces.
    fn new(name: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("not run: kernel programs need root");
            return None;
        }
        let world = format!("upco-{}-{name}", std::process::id());
        run(&format!("ip netns add {world}"));
        let mut net = Self { world, replicas: Vec::new(), state: tempfile::tempdir().unwrap() };
        let world = &net.world;
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        run(&format!("ip link add c0 type veth peer name p0 netns {world}"));
        run("ip addr add 10.1.0.1/24 dev c0");
        run("ip link set c0 up");
        for host in HOSTS.iter().chain(&["10.1.0.9"]) {
            run(&format!("ip -n {world} addr add {host}/24 dev p0"));
        }
        run(&format!("ip -n {world} link set p0 up"));
        // Complete checksums, as on a wire.
        run(&format!("ip netns exec {world} ethtool -K p0 tx off gso off"));
        net.in_world(|| pass_everything("p0"));
        run(&format!("ip -n {world} link set lo up"));
        let replica = |host| Replica::at(&format!("{host}:5550"), ClusterKey::default());
        net.replicas = net.in_world(|| HOSTS.into_iter().map(replica).collect());
        Some(net)
    }

    /// Runs `f` on a thread in the other namespace; what it makes stays there.
    fn in_world<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let path = Path::new("/run/netns").join(&self.world);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(std::fs::File::open(path).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
                f()
            });
            thread.join().unwrap()
        })
    }

    fn config(&self) -> Config {
        let listen = Endpoint { addr: [10, 1, 0, 1].into(), port: 5550 };
        Config {
            listen,
            datapath: DataPathKind::Xdp,
            buckets: 64,
            sessions: 64,
            authority: Some(Authority::File(FileConfig { directory: self.state.path().to_owned() })),
            shards: vec![Shard { id: 0, members: self.replicas.iter().map(|replica| replica.endpoint).collect() }],
            // A machine under load is no failure.
            suspect_ms: 300,
            lost_ms: 1500,
            lease_ms: 2000,
            stuck_ms: 60_000,
            ..Config::default()
        }
    }

    fn agent(&self) -> AgentHandle {
        let agent = Agent::start(self.config()).unwrap();
        agent.wait_serving(WAIT).unwrap();
        agent
    }

    fn client(&self) -> Client {
        Client::with(self.in_world(|| bind_at("10.1.0.9:0")), self.config().listen)
    }

    /// Pins of this namespace's device.
    fn pins(&self) -> Option<PathBuf> {
        let ifindex = nix::net::if_::if_nametoindex("c0").unwrap();
        let pins = underpass_datapath::coordinator::pin_directory(ifindex).unwrap();
        pins.exists().then_some(pins)
    }

    fn is_attached(&self) -> bool {
        run("ip link show dev c0").contains("xdp")
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        if let Some(pins) = self.pins() {
            underpass_datapath::coordinator::unpin(&pins);
        }
        let _ = Command::new("ip").args(["netns", "del", &self.world]).status();
    }
}

/// Writes and reads; the kernel's data path and no other handles them.
fn serves(session: &Session<'_>, request: u64) {
    let written = session.client.ask(&session.write_datagram(request, Kind::Put, request.to_string().as_bytes()));
    assert_eq!((written.header.op, written.header.status), (Op::WReply, Status::Ok.to_wire()));
    let read = session.read(request);
    assert_eq!((read.header.op, read.value), (Op::RReply, request.to_string().into_bytes()));
    assert_eq!(read.header.seq, written.header.seq, "cas");
}

#[test]
fn serves_and_leaves_nothing_behind() {
    let Some(net) = Net::new("a") else { return };
    let mut epochs = Vec::new();
    for life in 0..2 {
        let agent = net.agent();
        assert!(net.is_attached() && net.pins().is_some());
        let client = net.client();
        let session = client.open(1);
        let left = session.read(1).value;
        assert_eq!(left, if life > 0 { &b"50"[..] } else { b"" }, "it is with the replicas");
        let before = agent.stats().unwrap().counters;
        for request in 1..=50 {
            serves(&session, request);
        }
        let stats = agent.stats().unwrap();
        let epoch = stats.shards[0].epoch;
        epochs.push(epoch);
        assert_eq!(stats.datapath, "xdp");
        for (name, count) in [("write", 50), ("clone", 150), ("commit", 50)] {
            assert_eq!(stats.counters[name] - before[name], count, "{name}");
        }
        // Some of them found a replica without a lease.
        assert!(stats.counters["read"] - before["read"] >= 50);
        let hops = stats.next_hops.unwrap();
        assert!(hops.len() == 3 && hops.values().all(|hop| hop.len() == 17), "{hops:?}");
        assert!(session.close().unwrap().closed);
        until("what is stable", || agent.stats().unwrap().shards[0].stable == u64::from(epoch) * (1 << 40) + 50);
        assert!(agent.stop().unwrap().recorded);
        assert!(!net.is_attached() && net.pins().is_none());
    }
    assert!(epochs[0] < epochs[1], "{epochs:?}");
}

#[test]
fn a_dead_agent_is_succeeded_under_the_same_epoch() {
    let Some(net) = Net::new("b") else { return };
    let agent = net.agent();
    let client = net.client();
    let session = client.open(1);
    serves(&session, 1);
    agent.abandon();

    // Nobody decides, but what was decided goes on, for a lease.
    assert!(net.is_attached());
    for request in 2..=20 {
        serves(&session, request);
    }
    let agent = net.agent();
    let stats = agent.stats().unwrap();
    assert_eq!((stats.shards[0].epoch, stats.shards[0].tenure, stats.sessions_open), (1, 1, 1));
    serves(&session, 21);
    until("session counters of its own", || !agent.stats().unwrap().shards[0].storing);
    let second = client.open(2);
    assert_ne!(second.session.index(), session.session.index());
    assert!(second.session.generation() > session.session.generation(), "never issued before");
    serves(&second, 1);
    until("what is stable", || agent.stats().unwrap().shards[0].stable == (1 << 40) + 22);
    assert!(session.close().unwrap().closed, "the first agent's session is the second one's");

    // Left on purpose, and for longer than the lease: it refuses, and then goes on.
    agent.leave().unwrap();
    serves(&second, 2);
    std::thread::sleep(Duration::from_millis(2100));
    is_rejected(&second.write(3), Op::WReject, Reason::Lease);
    let agent = net.agent();
    assert_eq!(agent.stats().unwrap().shards[0].epoch, 1);
    serves(&second, 4);
    assert!(agent.stop().unwrap().recorded);
    assert!(!net.is_attached() && net.pins().is_none());
}

#[test]
fn a_dead_agents_tables_are_not_gone_on_with_if_the_record_is_anothers() {
    let Some(net) = Net::new("e") else { return };
    net.agent().abandon();
    assert!(net.is_attached());
    // Another authority, which knows nothing of that shard: replicas hold what is not its own.
    let elsewhere = tempfile::tempdir().unwrap();
    let authority = Some(Authority::File(FileConfig { directory: elsewhere.path().to_owned() }));
    let stranger = Agent::start(Config { authority, ..net.config() }).unwrap();
    until("its trouble", || stranger.stats().unwrap().shards[0].trouble.contains("is this the right authority"));
    let client = net.client();
    is_rejected(&client.ask(&client.open_datagram(1, 0)), Op::ControlReject, Reason::NotCoordinator);
    stranger.stop().unwrap();
    // The right one takes over from the replicas: the tables are gone.
    let agent = net.agent();
    assert!(agent.stats().unwrap().shards[0].epoch > 1);
    serves(&net.client().open(1), 1);
    drop(agent);

    // A shard that this agent does not serve ends.
    net.agent().abandon();
    let mut other = net.config();
    other.shards[0].id = 1;
    let agent = Agent::start(other).unwrap();
    is_rejected(&client.ask(&client.open_datagram(1, 0)), Op::ControlReject, Reason::Shard);
    drop(agent);
}

/// What XDP passes on because it is for another port is no ordered write, whatever it says.
#[test]
fn tc_clones_nothing_that_xdp_did_not_order() {
    let Some(net) = Net::new("f") else { return };
    let config = Config { write_path: WritePath::Tc, lost_ms: 20_000, lease_ms: 30_000, ..net.config() };
    let agent = Agent::start(config).unwrap();
    agent.wait_serving(WAIT).unwrap();
    net.replicas[2].behaviour.silent.store(true, Relaxed);
    let client = net.client();
    let session = client.open(1);
    let clones = || agent.stats().unwrap().counters["clone"];
    client.send(&session.write_datagram(1, Kind::Put, b"ordered"));
    until("the write's clones", || clones() == 3);

    let stranger = net.in_world(|| bind_at("10.1.0.9:0")).0;
    let mut header = Packet::parse(&session.write_datagram(1, Kind::Put, b"forged!")).unwrap().header;
    (header.epoch, header.seq, header.token) = (1, (1 << 40) + 1, 0);
    stranger.send_to(&header.datagram(b"key", b"forged!"), "10.1.0.1:9999").unwrap();
    client.send(&session.write_datagram(1, Kind::Put, b"ordered"));
    until("the clones of its retransmission", || clones() >= 6);
    assert_eq!(clones(), 6);
    let closed = session.close().unwrap();
    assert_eq!((closed.closed, closed.request), (false, 1), "one replica never acknowledges");
    agent.abandon();
}

#[test]
fn clones_at_tc_outlive_the_agent_too() {
    let Some(net) = Net::new("g") else { return };
    let config = || Config { write_path: WritePath::Tc, ..net.config() };
    let agent = Agent::start(config()).unwrap();
    agent.wait_serving(WAIT).unwrap();
    let client = net.client();
    let session = client.open(1);
    serves(&session, 1);
    agent.abandon();
    serves(&session, 2);
    let agent = Agent::start(config()).unwrap();
    agent.wait_serving(WAIT).unwrap();
    serves(&session, 3);
    assert_eq!(agent.stats().unwrap().counters["clone"], 9, "one filter");
    agent.abandon();
    // Another write path, the same tables.
    let agent = net.agent();
    serves(&session, 4);
    assert_eq!(agent.stats().unwrap().counters["clone"], 12);
    assert_eq!(run("tc filter show dev c0 ingress"), "");
    agent.abandon();
    let agent = Agent::start(config()).unwrap();
    agent.wait_serving(WAIT).unwrap();
    serves(&session, 5);
    assert!(agent.stop().unwrap().recorded);
    assert_eq!(run("tc filter show dev c0 ingress"), "");
}

#[test]
fn next_hops_are_followed() {
    let Some(net) = Net::new("c") else { return };
    let agent = net.agent();
    let client = net.client();
    let session = client.open(1);
    serves(&session, 1);
    // The replicas' host gets a new card.
    run(&format!("ip -n {} link set dev p0 address 02:00:00:00:00:77", net.world));
    run(&format!("ip netns exec {} ip neigh flush all", net.world));
    run("ip neigh flush all");
    until("the new address", || {
        let stats = agent.stats().unwrap();
        stats.next_hops.unwrap().values().all(|hop| hop == "02:00:00:00:00:77")
    });
    client.socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let datagram = session.write_datagram(2, Kind::Put, b"2");
    let mut buffer = [0; 2048];
    until("a reply", || {
        client.send(&datagram);
        client.socket.recv(&mut buffer).is_ok()
    });
}

#[test]
fn generic_mode_is_what_it_says() {
    let Some(net) = Net::new("d") else { return };
    let config = Config { mode: Mode::Generic, device: Some("c0".to_owned()), ..net.config() };
    let agent = Agent::start(config).unwrap();
    agent.wait_serving(WAIT).unwrap();
    assert!(agent.stats().unwrap().mode.contains("generic"));
    assert!(run("ip link show dev c0").contains("xdpgeneric"));
    assert!(agent.stop().unwrap().recorded);
    let missing = Config { device: Some("c9".to_owned()), ..net.config() };
    let error = format!("{:#}", Agent::start(missing).err().unwrap());
    assert!(error.contains("c9"), "{error}");
    let mut elsewhere = net.config();
    elsewhere.listen.addr = [10, 77, 0, 1].into();
    let error = format!("{:#}", Agent::start(elsewhere).err().unwrap());
    assert!(error.contains("no network device has the address 10.77.0.1"), "{error}");
}
