//! An agent with the xdp data path on a veth of its own, replicas and clients behind it: it serves, dies and is succeeded,
//! and leaves nothing behind. Needs root.

mod common;

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use common::{Client, Session, WAIT, bind_at, pass_everything, run, until};
use nix::sched::{CloneFlags, setns, unshare};
use underpass_coordinator::{
    agent::{Agent, AgentHandle},
    config::{Config, DataPathKind, Mode, Shard, WritePath},
};
use underpass_protocol::wire::{Endpoint, Kind, Op, Packet, Status};
use underpass_replica::{Options, Replica};

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
        net.replicas = net.in_world(|| {
            let options = |host| Options {
                listen: format!("{host}:5550").parse().unwrap(),
                memory_mib: 16,
                ..Options::default()
            };
            HOSTS.into_iter().map(|host| Replica::start(options(host)).unwrap()).collect()
        });
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
            state: Some(self.state.path().to_owned()),
            shards: vec![Shard { id: 0, members: self.replicas.iter().map(|r| r.local_addr().into()).collect() }],
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
    for epoch in 1..=2 {
        let agent = net.agent();
        assert!(net.is_attached() && net.pins().is_some());
        let client = net.client();
        let session = client.open(1);
        for request in 1..=50 {
            serves(&session, request);
        }
        let stats = agent.stats().unwrap();
        assert_eq!((stats.datapath.as_str(), stats.shards[0].epoch), ("xdp", epoch));
        for (name, count) in [("write", 50), ("clone", 150), ("commit", 50), ("read", 50)] {
            assert_eq!(stats.counters[name], count, "{name}");
        }
        assert!(
            stats.shards[0].members.iter().all(|member| member.next_hop.as_ref().is_some_and(|hop| hop.len() == 17))
        );
        assert!(session.close().unwrap().closed);
        until("what is stable", || agent.stats().unwrap().shards[0].stable == (epoch as u64) * (1 << 40) + 50);
        assert!(agent.stop().unwrap().clean);
        assert!(!net.is_attached() && net.pins().is_none());
    }
}

#[test]
fn a_dead_agent_is_succeeded_under_the_same_epoch() {
    let Some(net) = Net::new("b") else { return };
    let agent = net.agent();
    let client = net.client();
    let session = client.open(1);
    serves(&session, 1);
    agent.abandon();

    // Nobody decides, but what was decided goes on.
    assert!(net.is_attached());
    for request in 2..=20 {
        serves(&session, request);
    }

    // Not with another configuration: its tables are of this one.
    let mut other = net.config();
    other.shards[0].members.pop();
    let error = Agent::start(other).err().unwrap().to_string();
    assert!(error.contains("other replicas"), "{error}");
    let mut other = net.config();
    other.shards[0].id = 1;
    let error = Agent::start(other).err().unwrap().to_string();
    assert!(error.contains("shard 0"), "{error}");
    let elsewhere = tempfile::tempdir().unwrap();
    let other = Config { state: Some(elsewhere.path().to_owned()), ..net.config() };
    let error = Agent::start(other).err().unwrap().to_string();
    assert!(error.contains("authority's record"), "{error}");
    serves(&session, 21);

    let agent = net.agent();
    let stats = agent.stats().unwrap();
    assert_eq!((stats.shards[0].epoch, stats.sessions_open), (1, 1));
    serves(&session, 22);
    let second = client.open(2);
    assert_ne!(second.session.index(), session.session.index());
    assert!(second.session.generation() > session.session.generation(), "never issued before");
    serves(&second, 1);
    until("what is stable", || agent.stats().unwrap().shards[0].stable == (1 << 40) + 23);
    assert!(session.close().unwrap().closed, "the first agent's session is the second one's");
    assert!(agent.stop().unwrap().clean);
    assert!(!net.is_attached() && net.pins().is_none());

    // And what all of them left is kept.
    let agent = net.agent();
    let third = net.client();
    assert_eq!(third.open(1).read(1).value, b"1");
    drop(agent);
}

#[test]
fn an_epoch_recorded_as_clean_is_not_once_it_is_taken_over() {
    let Some(net) = Net::new("e") else { return };
    let agent = net.agent();
    agent.abandon();
    // As an agent leaves it that dies, or waits in vain for another shard, between recording the end and detaching.
    let path = net.state.path().join("authority.json");
    let record = || -> serde_json::Value { serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap() };
    let mut ended = record();
    for field in ["clean_from", "clean_epoch"] {
        ended["shards"][0][field] = 1.into();
    }
    std::fs::write(&path, ended.to_string()).unwrap();

    let agent = net.agent();
    assert_eq!(agent.stats().unwrap().shards[0].epoch, 1);
    serves(&net.client().open(1), 1);
    agent.abandon();
    assert_eq!(record()["shards"][0]["clean_epoch"], 0, "writes were ordered since");
}

/// What XDP passes on because it is for another port is no ordered write, whatever it says.
#[test]
fn tc_clones_nothing_that_xdp_did_not_order() {
    let Some(mut net) = Net::new("f") else { return };
    let agent = Agent::start(Config { write_path: WritePath::Tc, ..net.config() }).unwrap();
    agent.wait_serving(WAIT).unwrap();
    net.replicas.pop().unwrap().stop().unwrap();
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
    assert!(agent.stop().unwrap().clean);
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
        stats.shards[0].members.iter().all(|member| member.next_hop.as_deref() == Some("02:00:00:00:00:77"))
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
    assert!(agent.stop().unwrap().clean);
    let missing = Config { device: Some("c9".to_owned()), ..net.config() };
    let error = format!("{:#}", Agent::start(missing).err().unwrap());
    assert!(error.contains("c9"), "{error}");
    let mut elsewhere = net.config();
    elsewhere.listen.addr = [10, 77, 0, 1].into();
    let error = format!("{:#}", Agent::start(elsewhere).err().unwrap());
    assert!(error.contains("no network device has the address 10.77.0.1"), "{error}");
}
