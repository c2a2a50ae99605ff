//! A real memcached behind a veth: its UDP readers are answered by the kernel, and never with what its writers have replaced.
//! Needs root, and memcached.

mod common;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddrV4, TcpStream, UdpSocket},
    os::fd::{AsFd, AsRawFd},
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{atomic::Ordering, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, setns},
};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::Value;
use underpass_cache::{
    agent::{Agent, Options},
    hash,
    kernel::Kernel,
    memcached::Memcached,
    stats::report,
    word,
};
use underpass_datapath::attach::Mode;

const ADDR: &str = "10.77.0.1:11211";
const WAIT: Duration = Duration::from_secs(60);

fn run(command: &str) {
    let mut words = command.split_whitespace();
    let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(status.success(), "{command}");
}

/// A namespace for memcached and one for clients, and a cable.
struct Net {
    server: String,
    clients: String,
}

impl Net {
    /// `None`, said aloud, without the privilege to make namespaces.
    fn new(name: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("not run: kernel programs need root");
            return None;
        }
        let [server, clients] = ["s", "c"].map(|side| format!("upca-{}-{name}-{side}", std::process::id()));
        for name in [&server, &clients] {
            run(&format!("ip netns add {name}"));
            run(&format!("ip -n {name} link set lo up"));
        }
        let net = Self { server, clients };
        let Self { server, clients } = &net;
        run(&format!("ip link add s0 netns {server} type veth peer name c0 netns {clients}"));
        for (name, device, addr) in [(server, "s0", "10.77.0.1/24"), (clients, "c0", "10.77.0.2/24")] {
            run(&format!("ip -n {name} addr add {addr} dev {device}"));
            run(&format!("ip -n {name} link set {device} up"));
        }
        // A veth takes frames that XDP sends only if it has a program itself.
        enter(clients, || common::pass_everything("c0"));
        Some(net)
    }

    fn memcached(&self, arguments: &str) -> Server {
        let mut command = Command::new("ip");
        command.args([
            "netns",
            "exec",
            &self.server,
            "memcached",
            "-u",
            "root",
            "-l",
            "0.0.0.0",
            "-p",
            "11211",
            "-U",
            "11211",
        ]);
        let child = command.args(arguments.split_whitespace()).spawn().unwrap();
        enter(&self.server, || {
            let until = Instant::now() + WAIT;
            while TcpStream::connect(ADDR).is_err() {
                assert!(Instant::now() < until, "memcached does not start");
                thread::sleep(Duration::from_millis(10));
            }
        });
        Server(child)
    }

    /// Attaches, and serves until dropped.
    fn attach(&self, mib: u32) -> Attached {
        let path = namespace(&self.server);
        let (ask, asked) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let (ready, attached) = mpsc::channel();
        let thread = thread::spawn(move || {
            setns(std::fs::File::open(path).unwrap().as_fd(), CloneFlags::CLONE_NEWNET).unwrap();
            let mut agent = agent(mib);
            ready.send(()).unwrap();
            loop {
                agent.step().unwrap();
                match asked.recv_timeout(Duration::from_micros(200)) {
                    Ok(()) => tell.send(report(&agent).unwrap()).unwrap(),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
            }
        });
        attached.recv_timeout(WAIT).expect("attached");
        Attached { ask: Some(ask), told, thread: Some(thread) }
    }

    fn client(&self) -> Client {
        enter(&self.clients, || Client::new(ADDR))
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for name in [&self.server, &self.clients] {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

fn namespace(name: &str) -> PathBuf {
    Path::new("/run/netns").join(name)
}

/// Runs `f` on a thread in a namespace; what it makes stays there.
fn enter<T: Send>(name: &str, f: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            setns(std::fs::File::open(namespace(name)).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
            f()
        });
        thread.join().unwrap()
    })
}

struct Server(Child);

impl Server {
    fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.0.id() as i32)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Attached in the caller's namespace; whoever has it does its steps.
fn agent(mib: u32) -> Agent {
    let options = Options { device: "s0".into(), mode: Mode::Native, mib, ways: 4, trusted: Vec::new(), limit: 0 };
    Agent::attach(options, Memcached::find(ADDR.parse().unwrap()).unwrap()).unwrap()
}

struct Attached {
    ask: Option<mpsc::Sender<()>>,
    told: mpsc::Receiver<Value>,
    thread: Option<JoinHandle<()>>,
}

impl Attached {
    /// What it has counted.
    fn report(&self) -> Value {
        self.ask.as_ref().unwrap().send(()).unwrap();
        self.told.recv_timeout(WAIT).expect("a report")
    }

    /// Until the kernel answers for a key by itself.
    #[track_caller]
    fn warm(&self, client: &mut Client, key: &str) {
        let until = Instant::now() + WAIT;
        loop {
            let before = kernel(&self.report(), "hits");
            client.get(key);
            if kernel(&self.report(), "hits") > before {
                return;
            }
            assert!(Instant::now() < until, "{key} is never answered by the kernel: {:#}", self.report());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends it and tells what it counted.
    fn end(self) -> Value {
        self.report()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.ask.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Client {
    udp: UdpSocket,
    tcp: BufReader<TcpStream>,
    request: u16,
}

impl Client {
    fn new(addr: &str) -> Self {
        let udp = UdpSocket::bind(if addr.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" }).unwrap();
        udp.connect(addr).unwrap();
        udp.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let tcp = TcpStream::connect(addr).unwrap();
        tcp.set_nodelay(true).unwrap();
        tcp.set_read_timeout(Some(WAIT)).unwrap();
        Self { udp, tcp: BufReader::new(tcp), request: 0 }
    }

    /// Binary requests over TCP, of which the last is a noop: until that is answered.
    fn until_noop(&mut self, pieces: &[&[u8]]) {
        self.tcp(pieces, 0);
        loop {
            let mut header = [0; 24];
            self.tcp.read_exact(&mut header).unwrap();
            let len = u32::from_be_bytes(header[8..12].try_into().unwrap());
            self.tcp.read_exact(&mut vec![0; len as usize]).unwrap();
            if header[1] == 0x0a {
                return;
            }
        }
    }

    /// Over TCP, in pieces; the lines of the answer.
    fn tcp(&mut self, pieces: &[&[u8]], lines: usize) -> Vec<u8> {
        for piece in pieces {
            self.tcp.get_mut().write_all(piece).unwrap();
            if pieces.len() > 1 {
                thread::sleep(Duration::from_micros(300));
            }
        }
        let mut answer = Vec::new();
        for _ in 0..lines {
            self.tcp.read_until(b'\n', &mut answer).unwrap();
        }
        answer
    }

    /// The answer to one line, of however many lines.
    fn until_mn(&mut self, line: &str) -> Vec<u8> {
        let mut answer = self.tcp(&[format!("{line}\r\nmn\r\n").as_bytes()], 0);
        while !answer.ends_with(b"MN\r\n") {
            self.tcp.read_until(b'\n', &mut answer).unwrap();
        }
        answer.truncate(answer.len() - 4);
        answer
    }

    fn udp(&mut self, text: &[u8]) -> Vec<u8> {
        for _ in 0..10 {
            self.request = self.request.wrapping_add(1);
            let id = self.request.to_be_bytes();
            self.udp.send(&[&id[..], &[0, 0, 0, 1, 0, 0], text].concat()).unwrap();
            let mut answer = [0; 2048];
            while let Ok(len) = self.udp.recv(&mut answer) {
                if answer[..2] == id {
                    return answer[8..len].to_vec();
                }
            }
        }
        panic!("no answer to {:?}", String::from_utf8_lossy(text));
    }

    fn get(&mut self, key: &str) -> Vec<u8> {
        self.udp(format!("get {key}\r\n").as_bytes())
    }

    /// Until the kernel answers, or for so many times.
    fn warm(&mut self, key: &str) {
        for _ in 0..20 {
            self.get(key);
            thread::sleep(Duration::from_millis(2));
        }
    }
}

fn kernel(report: &Value, name: &str) -> u64 {
    report["kernel"][name].as_u64().unwrap()
}

#[test]
fn hits_come_from_the_kernel_and_every_command_is_heeded() {
    let Some(net) = Net::new("all") else { return };
    let _server = net.memcached("-t 2");
    let mut old = net.client();
    // A connection that is older than the cache.
    old.tcp(&[b"set old 0 0 1\r\nx\r\n"], 1);
    let attached = net.attach(4);
    let mut client = net.client();
    let value = |n: usize| format!("VALUE k 0 {}\r\n{n}\r\nEND\r\n", n.to_string().len()).into_bytes();
    assert_eq!(client.tcp(&[b"set k 0 0 1\r\n0\r\n"], 1), b"STORED\r\n");
    client.warm("k");
    // Each command, over TCP whole and in pieces: what a reader sees next is what memcached has.
    let commands: &[(&[u8], &[u8], &[u8])] = &[
        (b"set k 0 0 1\r\n1\r\n", b"STORED\r\n", &value(1)),
        (b"replace k 0 0 1\r\n2\r\n", b"STORED\r\n", &value(2)),
        (b"append k 0 0 1\r\n0\r\n", b"STORED\r\n", &value(20)),
        (b"prepend k 0 0 1\r\n1\r\n", b"STORED\r\n", &value(120)),
        (b"incr k 5\r\n", b"125\r\n", &value(125)),
        (b"decr k 25\r\n", b"100\r\n", &value(100)),
        (b"touch k 0\r\n", b"TOUCHED\r\n", &value(100)),
        (b"delete k\r\n", b"DELETED\r\n", b"END\r\n"),
        (b"add k 0 0 1\r\n3\r\n", b"STORED\r\n", &value(3)),
        (b"ms k 1\r\n4\r\n", b"HD\r\n", &value(4)),
        (b"ma k\r\n", b"HD\r\n", &value(5)),
        (b"mg k T0\r\n", b"HD\r\n", &value(5)),
        (b"md k\r\n", b"HD\r\n", b"END\r\n"),
        (b"ms aw== 1 b\r\n6\r\n", b"HD\r\n", &value(6)),
        (b"gat -1 k\r\n", b"VALUE k 0 1\r\n6\r\nEND\r\n", b"END\r\n"),
        (b"set k 0 0 1\r\n7\r\n", b"STORED\r\n", &value(7)),
        (b"flush_all\r\n", b"OK\r\n", b"END\r\n"),
        (b"set k 0 0 1\r\n8\r\n", b"STORED\r\n", &value(8)),
    ];
    for cut in [0, 1, 3] {
        for (command, answer, seen) in commands {
            let pieces: Vec<&[u8]> = if cut == 0 { vec![command] } else { command.chunks(cut).collect() };
            let lines = answer.iter().filter(|&&b| b == b'\n').count();
            let got = client.tcp(&pieces, lines);
            let command = String::from_utf8_lossy(command);
            if !answer.starts_with(b"STORED") {
                assert_eq!(String::from_utf8_lossy(&got), String::from_utf8_lossy(answer), "{command}");
            }
            for _ in 0..3 {
                assert_eq!(String::from_utf8_lossy(&client.get("k")), String::from_utf8_lossy(seen), "after {command}");
                thread::sleep(Duration::from_millis(3));
            }
        }
        client.tcp(&[b"delete k\r\n"], 1);
        client.tcp(&[b"set k 0 0 1\r\n0\r\n"], 1);
    }
    // Over UDP, with a value that looks like a command.
    client.udp(b"set k 0 0 7\r\nget k\r\n\r\n");
    client.warm("k");
    assert_eq!(client.get("k"), b"VALUE k 0 7\r\nget k\r\n\r\nEND\r\n");
    // And one that no set has filled.
    client.tcp(&[b"add lines 0 0 7\r\nget k\r\n\r\n"], 1);
    client.warm("lines");
    assert_eq!(client.get("lines"), b"VALUE lines 0 7\r\nget k\r\n\r\nEND\r\n");
    // On the older connection, which is followed from its first plain line on.
    old.tcp(&[b"set k 0 0 1\r\n9\r\n"], 1);
    assert_eq!(client.get("k"), value(9));
    old.tcp(&[b"version\r\n"], 1);
    client.warm("k");
    let report = attached.end();
    println!("{report:#}");
    assert!(kernel(&report, "hits") > 20 && kernel(&report, "seen_lost") == 0 && kernel(&report, "followed_again") > 0);
    assert_eq!(kernel(&report, "gaps") + kernel(&report, "unreadable"), 0);
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a command makes of a key that holds "30": none, or a value; and whether it answers.
type Form = (Vec<u8>, Option<&'static str>, bool);

fn text_forms() -> Vec<Form> {
    let plain: &[(&str, Option<&str>)] = &[
        ("set k 0 0 2\r\n77\r\n", Some("77")),
        ("cas k 0 0 2 CAS\r\n77\r\n", Some("77")),
        ("replace k 0 0 2\r\n77\r\n", Some("77")),
        ("append k 0 0 2\r\n77\r\n", Some("3077")),
        ("prepend k 0 0 2\r\n77\r\n", Some("7730")),
        ("incr k 47\r\n", Some("77")),
        ("decr k 3\r\n", Some("27")),
        ("touch k -1\r\n", None),
        ("gat -1 k\r\n", None),
        ("gats -1 k\r\n", None),
        ("gat -1 other k\r\n", None),
        ("delete k\r\n", None),
        ("flush_all\r\n", None),
        ("flush_all 0\r\n", None),
        ("ms k 2\r\n77\r\n", Some("77")),
        ("ms k 2 MA\r\n77\r\n", Some("3077")),
        ("ms aw== 2 b\r\n77\r\n", Some("77")),
        ("md k\r\n", None),
        ("md aw== b\r\n", None),
        ("ma k D47\r\n", Some("77")),
        ("ma aw== D47 b\r\n", Some("77")),
        ("mg k T-1\r\n", None),
        ("mg k t v T-1\r\n", None),
    ];
    let mut forms: Vec<Form> = plain.iter().map(|&(text, left)| (text.into(), left, true)).collect();
    for &(text, left) in plain {
        let Some((line, rest)) = text.split_once("\r\n") else { unreachable!() };
        let quiet = if line.starts_with('m') { "q" } else { "noreply" };
        if !line.starts_with("gat") && !line.starts_with("mg") {
            forms.push((format!("{line} {quiet}\r\n{rest}").into(), left, false));
        }
    }
    forms
}

fn binary_forms() -> Vec<Form> {
    let set: &[u8] = &[0; 8];
    let mut by = [0; 20];
    by[7] = 3;
    // A time, long ago.
    let gone = &2_592_001u32.to_be_bytes();
    // Opcode, and that of its quiet form.
    type Request<'a> = (u8, u8, &'a [u8], &'a [u8], Option<&'static str>);
    let requests: &[Request<'_>] = &[
        (0x01, 0x11, set, b"77", Some("77")),
        (0x03, 0x13, set, b"77", Some("77")),
        (0x04, 0x14, b"", b"", None),
        (0x05, 0x15, &by, b"", Some("33")),
        (0x06, 0x16, &by, b"", Some("27")),
        (0x08, 0x18, b"", b"", None),
        (0x0e, 0x19, b"", b"77", Some("3077")),
        (0x0f, 0x1a, b"", b"77", Some("7730")),
        (0x1c, 0x1c, gone, b"", None),
        (0x1d, 0x1e, gone, b"", None),
        (0x23, 0x24, gone, b"", None),
    ];
    let form = |opcode: u8, extras: &[u8], value: &[u8]| {
        let key = if opcode & 0x0f == 8 { &b""[..] } else { b"k" };
        let mut bytes = common::request(opcode, extras, key, value);
        bytes[16..24].fill(0); // any CAS number
        bytes
    };
    requests
        .iter()
        .flat_map(|&(loud, quiet, extras, value, left)| {
            [(form(loud, extras, value), left, true), (form(quiet, extras, value), left, false)]
        })
        .collect()
}

/// With the key's CAS number in it, if it needs one.
fn with_cas(client: &mut Client, bytes: Vec<u8>) -> Vec<u8> {
    let answer = text(&client.tcp(&[b"gets k\r\n"], 3));
    let cas = answer.lines().next().unwrap().split(' ').nth(4).unwrap();
    text(&bytes).replace("CAS", cas).into()
}

#[test]
fn every_form_of_every_command_is_heeded() {
    let Some(net) = Net::new("forms") else { return };
    let _server = net.memcached("-t 1");
    let attached = net.attach(4);
    let mut reader = net.client();
    let mut writer = net.client();
    let mut binary = net.client();
    let noop = common::request(0x0a, b"", b"", b"");
    let noticed = |reader: &mut Client, bytes: &[u8], left: Option<&str>, how: &str| {
        let seen = left.map_or("END\r\n".into(), |left| format!("VALUE k 0 {}\r\n{left}\r\nEND\r\n", left.len()));
        assert_eq!(text(&reader.get("k")), seen, "after {:?} {how}", text(bytes));
    };
    for cut in [usize::MAX, 7] {
        for (bytes, left, answers) in text_forms() {
            assert_eq!(reader.tcp(&[b"set k 0 0 2\r\n30\r\n"], 1), b"STORED\r\n");
            attached.warm(&mut reader, "k");
            let bytes = with_cas(&mut reader, bytes);
            writer.tcp(&bytes.chunks(cut).collect::<Vec<_>>(), usize::from(answers));
            // The rest of an answer of several lines, too.
            let end = writer.tcp(&[b"mn\r\n"], 1);
            if end != b"MN\r\n" {
                while writer.tcp(&[], 1) != b"MN\r\n" {}
            }
            noticed(&mut reader, &bytes, left, "over TCP");
            // In flight until the connection is read again.
            writer.tcp(&[b"mn\r\n"], 1);
        }
        for (bytes, left, _) in binary_forms() {
            assert_eq!(reader.tcp(&[b"set k 0 0 2\r\n30\r\n"], 1), b"STORED\r\n");
            attached.warm(&mut reader, "k");
            binary.until_noop(&bytes.chunks(cut).chain([&noop[..]]).collect::<Vec<_>>());
            noticed(&mut reader, &bytes, left, "in binary");
            binary.until_noop(&[&noop]);
        }
    }
    for (bytes, left, answers) in text_forms() {
        assert_eq!(reader.tcp(&[b"set k 0 0 2\r\n30\r\n"], 1), b"STORED\r\n");
        attached.warm(&mut reader, "k");
        let bytes = with_cas(&mut reader, bytes);
        if answers {
            writer.udp(&bytes);
        } else {
            writer.udp.send(&[&[0xff, 0xff, 0, 0, 0, 1, 0, 0], &bytes[..]].concat()).unwrap();
            thread::sleep(Duration::from_millis(10));
        }
        noticed(&mut reader, &bytes, left, "over UDP");
    }
    // What only looks leaves it where it is.
    for look in ["get k\r\n", "gets k\r\n", "mg k v t f\r\n", "me k\r\n", "version\r\n", "add k 0 0 1\r\nx\r\n"] {
        reader.tcp(&[b"set k 0 0 2\r\n30\r\n"], 1);
        attached.warm(&mut reader, "k");
        writer.tcp(&[look.as_bytes()], 1);
        noticed(&mut reader, look.as_bytes(), Some("30"), "over TCP");
        writer = net.client();
    }
    let report = attached.end();
    assert_eq!(kernel(&report, "seen_lost") + kernel(&report, "gaps") + kernel(&report, "unreadable"), 0, "{report:#}");
}

/// Clients of this host, which no interface's program sees.
#[test]
fn writers_of_the_same_host_are_heeded() {
    let Some(net) = Net::new("local") else { return };
    let _server = net.memcached("-t 2 -l ::");
    let attached = net.attach(2);
    let mut reader = net.client();
    let at = |addr: &str| enter(&net.server, || Client::new(addr));
    let mut version = 10;
    for addr in [ADDR, "127.0.0.1:11211", "[::1]:11211"] {
        let mut local = at(addr);
        for udp in [false, true] {
            attached.warm_value(&mut reader, version);
            version += 1;
            let set = format!("set k 0 0 2\r\n{version}\r\n");
            let stored = if udp { local.udp(set.as_bytes()) } else { local.tcp(&[set.as_bytes()], 1) };
            assert_eq!(text(&stored), "STORED\r\n");
            let seen = format!("VALUE k 0 2\r\n{version}\r\nEND\r\n");
            assert_eq!(text(&reader.get("k")), seen, "after a write to {addr}, UDP: {udp}");
        }
    }
    attached.end();
}

/// Connects from an address and a port to which other connections are bound, as long as they go elsewhere.
fn connect_from(own: SocketAddrV4, to: &str) -> TcpStream {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
    const IP_BIND_ADDRESS_NO_PORT: libc::c_int = 24;
    const IP_LOCAL_PORT_RANGE: libc::c_int = 51;
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
    let port = u32::from(own.port());
    for (option, value) in [(IP_BIND_ADDRESS_NO_PORT, 1), (IP_LOCAL_PORT_RANGE, port << 16 | port)] {
        // SAFETY: an open socket, and a number that outlives the call.
        let done = unsafe { libc::setsockopt(fd.as_raw_fd(), 0, option, (&raw const value).cast(), 4) };
        assert_eq!(done, 0, "option {option}");
    }
    bind(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(*own.ip(), 0))).unwrap();
    connect(fd.as_raw_fd(), &SockaddrIn::from(to.parse::<SocketAddrV4>().unwrap())).unwrap();
    let stream = TcpStream::from(fd);
    assert_eq!(stream.local_addr().unwrap(), own.into());
    stream
}

/// The agent's connection is known by both its ends: its own address and port may be those of a client's, too.
#[test]
fn a_client_with_the_agents_port_is_heeded() {
    let Some(net) = Net::new("port") else { return };
    let _server = net.memcached("-t 1");
    let mut client = net.client();
    assert_eq!(client.tcp(&[b"set k 0 0 2\r\n10\r\n"], 1), b"STORED\r\n");
    enter(&net.server, || {
        let mut agent = agent(2);
        let own = nix::sys::socket::getsockname::<nix::sys::socket::SockaddrIn>(agent.socket().0.as_raw_fd()).unwrap();
        let mut writer = connect_from(SocketAddrV4::new(own.ip(), own.port()), "127.0.0.1:11211");
        fill(&mut agent, &mut client, "k");
        writer.write_all(b"set k 0 0 2\r\n11\r\n").unwrap();
        writer.read_exact(&mut [0; 8]).unwrap();
        assert_eq!(text(&client.get("k")), "VALUE k 0 2\r\n11\r\nEND\r\n");
    });
}

impl Attached {
    /// Until the kernel answers with this number.
    #[track_caller]
    fn warm_value(&self, client: &mut Client, number: u32) {
        assert_eq!(client.tcp(&[format!("set k 0 0 2\r\n{number}\r\n").as_bytes()], 1), b"STORED\r\n");
        self.warm(client, "k");
    }
}

/// Reads a key until the kernel answers.
#[track_caller]
fn fill(agent: &mut Agent, client: &mut Client, key: &str) {
    let hits = |agent: &Agent| kernel(&report(agent).unwrap(), "hits");
    let (before, until) = (hits(agent), Instant::now() + WAIT);
    while hits(agent) == before {
        assert!(Instant::now() < until, "the key is not filled");
        client.get(key);
        agent.step().unwrap();
    }
}

/// Whether none of a process's threads runs any more.
fn stopped(pid: nix::unistd::Pid) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.flatten().all(|thread| std::fs::read_to_string(thread.path().join("stat")).unwrap().contains(") T "))
}

fn writes_in_flight(kernel: &Kernel, key: &[u8]) -> u64 {
    let hash = hash::hash(key, &kernel.settings().secret);
    let word = kernel.word(hash::set(hash, kernel.settings().set_mask), hash::which(hash));
    word::writes(word.load(Ordering::SeqCst))
}

/// A key that is read from the kernel is not missed for a set, unless memcached does not store.
#[test]
fn what_a_set_stores_is_served_at_once() {
    let Some(net) = Net::new("stored") else { return };
    let _server = net.memcached("-t 1 -I 1024 -o slab_chunk_max=512");
    let (mut reader, mut writer) = (net.client(), net.client());
    let large = format!("set k 0 0 1100\r\n{}\r\n", "x".repeat(1100));
    // What memcached answers, and whether the kernel serves it.
    let sets: [(&str, &[u8], bool); 7] = [
        ("set k 7 0 3\r\nnew\r\n", b"STORED\r\n", true),
        ("set k 0 0 0\r\n\r\n", b"STORED\r\n", true),
        ("set k 9 2000000 7\r\nEND\r\n..\r\n", b"STORED\r\n", true),
        // A time long ago.
        ("set k 0 3000000 3\r\nold\r\n", b"STORED\r\n", false),
        // Over before the kernel could be sure of it.
        ("set k 0 2 5\r\nbrief\r\n", b"STORED\r\n", false),
        ("set k 0 0 3\r\nabcde", b"CLIENT_ERROR bad data chunk\r\n", false),
        (&large, b"SERVER_ERROR object too large for cache\r\n", false),
    ];
    enter(&net.server, || {
        let mut agent = agent(2);
        let hits = |agent: &Agent| kernel(&report(agent).unwrap(), "hits");
        for (set, answer, served) in sets {
            writer.tcp(&[b"delete k\r\n"], 1);
            assert_eq!(writer.tcp(&[b"add k 0 0 1\r\nx\r\n"], 1), b"STORED\r\n");
            fill(&mut agent, &mut reader, "k");
            let (before, asked) = (hits(&agent), agent.counts().asked);
            assert_eq!(text(&writer.tcp(&[set.as_bytes()], 1)), text(answer));
            agent.step().unwrap();
            assert_eq!(text(&reader.get("k")), text(&writer.until_mn("get k")), "after {set:?}");
            assert_eq!((hits(&agent) - before == 1, agent.counts().asked), (served, asked), "after {set:?}");
            // The number is memcached's.
            assert_eq!(text(&reader.udp(b"gets k\r\n")), text(&writer.until_mn("gets k")), "after {set:?}");
        }
        assert_eq!(agent.counts().fills_by_set, 3);
    });
}

/// Each answer on its way to the agent, and a write, in every order: memcached is stopped meanwhile.
#[test]
fn a_fill_that_a_write_overtakes_is_refused() {
    let Some(net) = Net::new("fill") else { return };
    let server = net.memcached("-t 1");
    let pid = server.pid();
    let signal = |signal| nix::sys::signal::kill(pid, signal).unwrap();
    let mut client = net.client();
    let mut writer = net.client();
    assert_eq!(client.tcp(&[b"set k 0 0 2\r\n10\r\n"], 1), b"STORED\r\n");
    enter(&net.server, || {
        let mut agent = agent(2);
        let asked = |agent: &mut Agent, client: &mut Client| {
            // Reports of one key are so far apart.
            thread::sleep(Duration::from_millis(40));
            client.get("k");
            let before = agent.counts().asked;
            signal(nix::sys::signal::Signal::SIGSTOP);
            while !stopped(pid) {
                thread::yield_now();
            }
            agent.step().unwrap();
            signal(nix::sys::signal::Signal::SIGCONT);
            assert_eq!(agent.counts().asked, before + 1);
            // The answer is there, and not taken yet.
            let mut answered = [PollFd::new(agent.socket().0, PollFlags::POLLIN)];
            assert_eq!(poll(&mut answered, PollTimeout::from(60_000u16)).unwrap(), 1);
        };
        // Undisturbed: it is filled, and the kernel answers.
        asked(&mut agent, &mut client);
        agent.step().unwrap();
        assert_eq!(agent.counts().fills, 1);
        client.get("k");
        assert_eq!(kernel(&report(&agent).unwrap(), "hits"), 1);
        // The write comes between memcached's answer and its taking.
        for version in 11..14 {
            assert_eq!(writer.tcp(&[format!("replace k 0 0 2\r\n{}\r\n", version + 10).as_bytes()], 1), b"STORED\r\n");
            asked(&mut agent, &mut client);
            let write = match version {
                11 => format!("replace k 0 0 2\r\n{version}\r\n"),
                12 => format!("set k 0 0 2 noreply\r\n{version}\r\nmn\r\n"),
                _ => format!("flush_all\r\nset k 0 0 2\r\n{version}\r\n"),
            };
            writer.tcp(&[write.as_bytes()], if version == 13 { 2 } else { 1 });
            agent.step().unwrap();
            let seen = format!("VALUE k 0 2\r\n{version}\r\nEND\r\n");
            assert_eq!(text(&client.get("k")), seen, "after {write:?}");
            assert_eq!(agent.counts().fills, 1);
        }
        // A write that is in flight while the agent asks: it is not asked at all, or not believed.
        writer.tcp(&[b"version\r\n"], 1);
        for _ in 0..3 {
            writer.tcp(&[b"set k 0 0 2\r\n"], 0);
            let until = Instant::now() + WAIT;
            while writes_in_flight(agent.kernel(), b"k") == 0 {
                assert!(Instant::now() < until, "a half write is not in flight");
            }
            for _ in 0..10 {
                client.get("k");
                for _ in 0..3 {
                    agent.step().unwrap();
                    thread::sleep(Duration::from_millis(5));
                }
            }
            writer.tcp(&[b"99\r\n"], 1);
            assert_eq!(text(&client.get("k")), "VALUE k 0 2\r\n99\r\nEND\r\n");
            assert_eq!(agent.counts().fills, 1);
            writer.tcp(&[b"set k 0 0 2\r\n10\r\n"], 1);
        }
    });
}

/// An item that memcached has evicted does not come back once a client was told so.
#[test]
fn what_a_reader_missed_does_not_come_back() {
    let Some(net) = Net::new("evict") else { return };
    // Room for some 9000 items.
    let _server = net.memcached("-t 1 -m 2 -o slab_automove=0,no_lru_crawler,no_lru_maintainer");
    let attached = net.attach(16);
    let mut reader = net.client();
    let mut plain = net.client();
    let value = "v".repeat(150);
    let set = |client: &mut Client, key: &str| {
        assert_eq!(client.tcp(&[format!("set {key} 0 0 150\r\n{value}\r\n").as_bytes()], 1), b"STORED\r\n");
    };
    let mut compared = 0;
    for missed in ["get", "gets", "mg", "get other"] {
        let keys: Vec<_> = (0..8).map(|n| format!("k{n}")).collect();
        for key in &keys {
            set(&mut reader, key);
            attached.warm(&mut reader, key);
        }
        for batch in 0..50 {
            let sets = (0..250).map(|n| format!("set other{batch}-{n} 0 0 150\r\n{value}\r\n"));
            plain.tcp(&[sets.collect::<String>().as_bytes()], 250);
        }
        for key in &keys {
            // No contradiction yet. (Some have gone with the writes: several keys share a word.)
            if reader.get(key).starts_with(b"VALUE") {
                let answer = plain.tcp(&[format!("{missed} {key}\r\n").as_bytes()], 1);
                assert_eq!(answer[0], b'E', "memcached has evicted nothing: {}", text(&answer));
                assert_eq!(text(&reader.get(key)), "END\r\n", "after `{missed}` missed");
                compared += 1;
            }
        }
    }
    assert!(compared > 8, "only {compared} were in the kernel alone");
    attached.end();
}

#[test]
fn answers_for_which_there_is_no_room_come_from_memcached() {
    let Some(net) = Net::new("room") else { return };
    let _server = net.memcached("-t 1");
    let attached = net.attach(4);
    let mut client = net.client();
    let mut sent = 0;
    for len in (0..1300).step_by(50).chain([1299]) {
        let value = "x".repeat(len);
        client.tcp(&[format!("set k 0 0 {len}\r\n{value}\r\n").as_bytes()], 1);
        for _ in 0..10 {
            assert_eq!(text(&client.get("k")), format!("VALUE k 0 {len}\r\n{value}\r\nEND\r\n"));
            sent += 1;
            assert!(usize::from(client.request) <= sent + 2, "requests for {len} bytes had to be sent again");
            thread::sleep(Duration::from_millis(1));
        }
    }
    let report = attached.end();
    assert!(kernel(&report, "passed_no_room") > 20 && kernel(&report, "hits") > 20, "{report:#}");
}

/// The first to read an item that was marked stale is told to make it anew: the agent must not be that one.
#[test]
fn marks_of_staleness_are_left_for_clients() {
    let Some(net) = Net::new("stale") else { return };
    let _server = net.memcached("-t 1");
    let attached = net.attach(2);
    let mut client = net.client();
    client.tcp(&[b"set k 0 0 1\r\nx\r\n"], 1);
    client.tcp(&[b"set other 0 0 1\r\nx\r\n"], 1);
    attached.warm(&mut client, "k");
    assert_eq!(client.tcp(&[b"md k I T30\r\n"], 1), b"HD\r\n");
    for _ in 0..20 {
        client.get("other");
        client.get("k");
        thread::sleep(Duration::from_millis(3));
    }
    let told = text(&client.tcp(&[b"mg k t v\r\n"], 2));
    assert!(told.contains(" W"), "{told:?}");
    attached.end();
}

#[test]
fn lifetimes_end_in_the_kernel_as_they_do_in_memcached() {
    let Some(net) = Net::new("ttl") else { return };
    let _server = net.memcached("-t 1");
    let attached = net.attach(2);
    let mut client = net.client();
    client.tcp(&[b"set s 0 0 1\r\ns\r\n"], 1);
    let mut plain = net.client();
    // At ten moments of memcached's second. Of two keys that end together the kernel is asked for one, and memcached for the
    // other: that it has not the one must not be known from a read that missed.
    let mut living: Vec<_> = (0..10).collect();
    for n in &living {
        plain.tcp(&[format!("set k{n} 0 4 1\r\nx\r\nset twin{n} 0 4 1\r\nx\r\nmn\r\n").as_bytes()], 3);
        plain.tcp(&[b"mn\r\n"], 1);
        attached.warm(&mut client, &format!("k{n}"));
        thread::sleep(Duration::from_millis(80));
    }
    let until = Instant::now() + Duration::from_secs(8);
    while !living.is_empty() {
        living.retain(|n| {
            let gone = plain.tcp(&[format!("mg twin{n}\r\n").as_bytes()], 1) == b"EN\r\n";
            let seen = client.get(&format!("k{n}")) != b"END\r\n";
            assert!(!(gone && seen), "served after its end");
            !gone
        });
        assert!(Instant::now() < until, "they do not end");
        thread::sleep(Duration::from_millis(2));
    }
    // A flush that is to come.
    client.warm("s");
    client.tcp(&[b"set unread 0 0 1\r\nx\r\n"], 1);
    client.tcp(&[b"flush_all 4\r\n"], 1);
    let start = Instant::now();
    attached.warm(&mut client, "unread");
    let mut last_seen = Duration::ZERO;
    while start.elapsed() < Duration::from_secs(6) {
        if client.get("s") != b"END\r\n" {
            last_seen = start.elapsed();
        }
        thread::sleep(Duration::from_millis(5));
    }
    assert!(last_seen > Duration::from_secs(1) && last_seen < Duration::from_millis(4500), "{last_seen:?}");
    // Nobody was told meanwhile that this one is gone.
    thread::sleep(Duration::from_secs(8).saturating_sub(start.elapsed()));
    assert!(client.get("unread") == b"END\r\n", "served after the flush");
    attached.end();
}

/// An agent that is late with its notice of a flush reckons from the flush, not from the notice.
#[test]
fn a_late_agent_knows_when_a_flush_is_to_come() {
    let Some(net) = Net::new("late") else { return };
    let _server = net.memcached("-t 1");
    enter(&net.server, || {
        let mut agent = agent(2);
        let (mut client, mut plain) = (net.client(), net.client());
        client.tcp(&[b"set k 0 0 1\r\nx\r\n"], 1);
        client.tcp(&[b"set twin 0 0 1\r\nx\r\n"], 1);
        assert_eq!(client.tcp(&[b"flush_all 8\r\n"], 1), b"OK\r\n");
        let start = Instant::now();
        client.tcp(&[b"mn\r\n"], 1);
        thread::sleep(Duration::from_secs(5));
        flushes(&mut agent, &mut client, &mut plain, start + Duration::from_secs(12));
    });
}

/// So it does with the lifetime of what a set stores.
#[test]
fn a_late_agent_knows_when_what_was_set_ends() {
    let Some(net) = Net::new("delayed") else { return };
    let _server = net.memcached("-t 1");
    enter(&net.server, || {
        let mut agent = agent(2);
        let mut client = net.client();
        client.tcp(&[b"set k 0 0 1\r\nx\r\n"], 1);
        fill(&mut agent, &mut client, "k");
        client.tcp(&[b"set k 0 5 1\r\ny\r\n"], 1);
        client.tcp(&[b"set twin 0 5 1\r\ny\r\n"], 1);
        thread::sleep(Duration::from_secs(2));
        agent.step().unwrap();
        assert_eq!(agent.counts().fills_by_set, 1);
        let until = Instant::now() + WAIT;
        while client.tcp(&[b"mg twin\r\n"], 1) != b"EN\r\n" {
            assert!(Instant::now() < until, "it never ends");
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(text(&client.get("k")), "END\r\n");
    });
}

/// Keys "k" and "twin" are flushed before a time; the kernel serves "k" until then, and not after it.
#[track_caller]
fn flushes(agent: &mut Agent, client: &mut Client, plain: &mut Client, until: Instant) {
    let hits = |agent: &Agent| kernel(&report(agent).unwrap(), "hits");
    let (before, mut gone) = (hits(agent), false);
    while Instant::now() < until {
        agent.step().unwrap();
        // The two go together; what is asked of memcached is not the key that the kernel may have.
        gone = gone || plain.tcp(&[b"mg twin\r\n"], 1) == b"EN\r\n";
        assert!(client.get("k") == b"END\r\n" || !gone, "served after the flush");
        thread::sleep(Duration::from_millis(5));
    }
    assert!(gone, "nothing is flushed");
    assert!(hits(agent) > before, "nothing was served: {:#}", report(agent).unwrap());
}

#[test]
fn flushes_that_nobody_saw_asked_for_are_known() {
    let Some(net) = Net::new("unseen") else { return };
    let _server = net.memcached("-t 1");
    let mut older = [net.client(), net.client()];
    let set = |client: &mut Client| {
        client.tcp(&[b"set k 0 0 1\r\nx\r\n"], 1);
        client.tcp(&[b"set twin 0 0 1\r\nx\r\n"], 1);
    };
    set(&mut older[0]);
    older[1].tcp(&[b"version\r\n"], 1);
    enter(&net.server, || {
        // Before it is attached.
        assert_eq!(older[0].tcp(&[b"flush_all 14\r\n"], 1), b"OK\r\n");
        let mut agent = agent(2);
        let (mut client, mut plain) = (net.client(), net.client());
        flushes(&mut agent, &mut client, &mut plain, Instant::now() + Duration::from_secs(16));
        // By a connection that is not followed.
        set(&mut client);
        assert_eq!(older[1].tcp(&[b"flush_all 6\r\n"], 1), b"OK\r\n");
        flushes(&mut agent, &mut client, &mut plain, Instant::now() + Duration::from_secs(8));
    });
}

/// memcached answers that it stored what a flush has already removed: one for the second in which the set comes, asked for on
/// a connection that is not followed. Whether the agent looks at once, or when the flush is long over.
#[test]
fn what_a_flush_took_when_it_was_stored_is_not_served() {
    let Some(net) = Net::new("taken") else { return };
    let _server = net.memcached("-t 1");
    let (mut older, mut client) = (net.client(), net.client());
    older.tcp(&[b"version\r\n"], 1);
    enter(&net.server, || {
        let mut agent = agent(2);
        for late in [Duration::ZERO, Duration::from_secs(2)] {
            let until = Instant::now() + 2 * WAIT;
            loop {
                // After the second of the last one.
                thread::sleep(Duration::from_millis(1100));
                client.tcp(&[b"set k 0 0 1\r\nx\r\n"], 1);
                fill(&mut agent, &mut client, "k");
                older.tcp(&[b"flush_all 1\r\n"], 1);
                if late.is_zero() {
                    agent.step().unwrap();
                }
                assert_eq!(client.tcp(&[b"set k 0 0 1\r\ny\r\n"], 1), b"STORED\r\n");
                client.tcp(&[b"set twin 0 0 1\r\ny\r\n"], 1);
                thread::sleep(late);
                // The two go together, unless their second ended before; what is asked of memcached is not the key that the
                // kernel may have.
                if client.tcp(&[b"mg twin\r\n"], 1) == b"EN\r\n" {
                    break;
                }
                assert!(Instant::now() < until, "nothing is ever flushed");
            }
            for _ in 0..10 {
                agent.step().unwrap();
                assert_eq!(text(&client.get("k")), "END\r\n", "the agent was {late:?} late");
            }
        }
    });
}

/// A value that memcached takes from datagrams that follow, header and all; and what it makes of half a command.
#[test]
fn commands_over_udp_are_heeded_however_cut() {
    let Some(net) = Net::new("udp") else { return };
    let _server = net.memcached("-t 1");
    let attached = net.attach(2);
    let mut client = net.client();
    let raw = |client: &Client, bytes: &[u8]| assert_eq!(client.udp.send(bytes).unwrap(), bytes.len());
    let head = [0xff, 0xff, 0, 0, 0, 1, 0, 0];
    for round in 0..20 {
        assert_eq!(client.tcp(&[b"set k 0 0 1\r\nx\r\n"], 1), b"STORED\r\n");
        client.warm("k");
        assert_eq!(client.get("k"), b"VALUE k 0 1\r\nx\r\nEND\r\n", "round {round}");
        raw(&client, &[&head[..], b"set k 0 0 10\r\nabc"].concat());
        thread::sleep(Duration::from_millis(1));
        raw(&client, b"defghij\r\n");
        thread::sleep(Duration::from_millis(5));
        assert_eq!(client.get("k"), b"VALUE k 0 10\r\nabcdefghij\r\nEND\r\n", "round {round}");
        // Half a line is forgotten with the next datagram; one of several datagrams, and one too short, at once.
        raw(&client, &[&head[..], b"set k 0 0 10"].concat());
        raw(&client, &[&[0xff, 0xff, 0, 0, 0, 2, 0, 0], &b"set k 0 0 1\r\ny\r\n"[..]].concat());
        raw(&client, b"set");
        client.warm("k");
        assert_eq!(client.get("k"), b"VALUE k 0 10\r\nabcdefghij\r\nEND\r\n", "round {round}");
        raw(&client, &[&head[..], b"delete k noreply\r\n"].concat());
        thread::sleep(Duration::from_millis(5));
        assert_eq!(client.get("k"), b"END\r\n", "round {round}");
    }
    let report = attached.end();
    assert!(kernel(&report, "hits") > 100 && kernel(&report, "seen_lost") == 0, "{report:#}");
}

/// A register under many readers and writers, by TCP, UDP and `noreply`: readers see versions that only grow, and never one
/// older than what was acknowledged before they asked.
#[test]
fn readers_never_go_back() {
    let Some(net) = Net::new("race") else { return };
    let _server = net.memcached("-t 4");
    let attached = net.attach(2);
    let seed = common::seed();
    let seconds = Duration::from_secs(common::count(5) as u64);
    const KEYS: usize = 4;
    let acknowledged: Vec<_> = (0..KEYS).map(|_| std::sync::atomic::AtomicU64::new(0)).collect();
    let start = Instant::now();
    let reads = std::sync::atomic::AtomicU64::new(0);
    thread::scope(|scope| {
        for key in 0..KEYS {
            let (mut client, acknowledged) = (net.client(), &acknowledged[key]);
            let mut rng = StdRng::seed_from_u64(seed + key as u64);
            scope.spawn(move || {
                for version in 1.. {
                    if start.elapsed() > seconds {
                        return;
                    }
                    let text = format!("set k{key} 0 0 8\r\n{version:08}\r\n");
                    match rng.random_range(0..4) {
                        0 => assert_eq!(client.udp(text.as_bytes()), b"STORED\r\n"),
                        1 => {
                            let cut = rng.random_range(1..text.len());
                            client.tcp(&[&text.as_bytes()[..cut], &text.as_bytes()[cut..]], 1);
                        }
                        2 => {
                            let text = format!("set k{key} 0 0 8 noreply\r\n{version:08}\r\nmn\r\n");
                            assert_eq!(client.tcp(&[text.as_bytes()], 1), b"MN\r\n");
                        }
                        _ => assert_eq!(client.tcp(&[text.as_bytes()], 1), b"STORED\r\n"),
                    }
                    acknowledged.store(version, Ordering::SeqCst);
                    thread::sleep(Duration::from_micros(*[0, 100, 3000].choose(&mut rng).unwrap()));
                }
            });
        }
        for reader in 0..3 {
            let (mut client, acknowledged, reads) = (net.client(), &acknowledged, &reads);
            let mut rng = StdRng::seed_from_u64(seed + 100 + reader);
            scope.spawn(move || {
                let mut seen = [0; KEYS];
                while start.elapsed() < seconds {
                    let key = rng.random_range(0..KEYS);
                    let before = acknowledged[key].load(Ordering::SeqCst);
                    let answer = client.get(&format!("k{key}"));
                    let version: u64 = answer
                        .split(|&b| b == b'\n')
                        .nth(1)
                        .and_then(|line| std::str::from_utf8(line).ok()?.trim().parse().ok())
                        .unwrap_or(0);
                    assert!(version >= before.max(seen[key]), "{version} after {before} and {}", seen[key]);
                    seen[key] = version;
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let report = attached.end();
    println!("{} reads, {} hits", reads.into_inner(), kernel(&report, "hits"));
    assert!(kernel(&report, "hits") > 100, "{report:#}");
}

#[test]
fn who_cannot_be_accelerated_is_told_why() {
    let Some(net) = Net::new("refuse") else { return };
    let refusal = |arguments: &str| {
        let _server = net.memcached(arguments);
        enter(&net.server, || format!("{:#}", Memcached::find(ADDR.parse().unwrap()).unwrap_err()))
    };
    assert!(refusal("-U 0").contains("-U 11211"));
    assert!(refusal("-B ascii").contains("binding_protocol"));
    let nobody = enter(&net.server, || format!("{:#}", Memcached::find(ADDR.parse().unwrap()).unwrap_err()));
    assert!(nobody.contains("nobody listens"));
}

/// Plays the binary: run by the tests below in a process of its own.
#[test]
fn command_line() {
    #[derive(clap::Parser)]
    struct Arguments {
        #[command(subcommand)]
        command: underpass_cache::cli::Command,
    }
    if let Ok(arguments) = std::env::var("UNDERPASS_CACHE_TEST") {
        let arguments: Arguments = clap::Parser::parse_from(["cache"].into_iter().chain(arguments.split(' ')));
        if let Err(error) = underpass_cache::cli::run(arguments.command) {
            eprintln!("error: {error:#}");
            std::process::exit(1);
        }
    }
}

impl Net {
    fn cache(&self, arguments: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.server]).arg(std::env::current_exe().unwrap());
        command.args(["command_line", "--exact", "--nocapture"]).env("UNDERPASS_CACHE_TEST", arguments);
        command
    }

    /// A process in front of memcached; returns once it has said so.
    fn attached(&self) -> (Server, BufReader<std::process::ChildStdout>) {
        let mut command = self.cache(&format!("attach --dev s0 --memcached {ADDR} --memory 2"));
        let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        announced(&mut out);
        (Server(child), out)
    }

    fn hits(&self) -> u64 {
        let out = self.cache("stats --json").output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let json = &text[text.find('{').expect("a report")..=text.rfind('}').unwrap()];
        kernel(&serde_json::from_str(json).unwrap(), "hits")
    }

    fn has_program(&self) -> bool {
        let out = Command::new("ip").args(["-n", &self.server, "link", "show", "s0"]).output().unwrap();
        String::from_utf8_lossy(&out.stdout).contains("xdp")
    }
}

fn announced(out: &mut impl BufRead) {
    let mut line = String::new();
    while !line.starts_with("attached") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "it ended without a word");
    }
}

fn signal(process: &Server, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(process.pid(), signal).unwrap();
}

#[test]
fn it_follows_a_new_memcached_and_leaves_nothing_behind() {
    let Some(net) = Net::new("life") else { return };
    let server = net.memcached("-t 1");
    let (cache, mut out) = net.attached();
    let value = b"VALUE k 0 1\r\nx\r\nEND\r\n";
    let fill = || {
        let mut client = net.client();
        client.tcp(&[b"set k 0 0 1\r\nx\r\n"], 1);
        client.warm("k");
        assert_eq!(client.get("k"), value);
    };
    fill();
    assert!(net.hits() > 0);
    // Another one: what the first one had is gone.
    drop(server);
    let server = net.memcached("-t 1");
    let until = Instant::now() + Duration::from_secs(20);
    while net.client().get("k") != b"END\r\n" {
        assert!(Instant::now() < until, "what the first one had is served");
        thread::sleep(Duration::from_millis(10));
    }
    announced(&mut out);
    assert_eq!(net.client().get("k"), b"END\r\n");
    fill();
    assert!(net.hits() > 0);
    assert!(
        !net.cache(&format!("attach --dev s0 --memcached {ADDR}")).status().unwrap().success(),
        "two on one device"
    );
    // Detached in order.
    assert!(net.cache("detach").status().unwrap().success());
    assert!(!net.has_program());
    assert_eq!(net.client().get("k"), value);
    drop(cache);
    // Killed.
    let (cache, _out) = net.attached();
    fill();
    assert!(net.has_program());
    signal(&cache, nix::sys::signal::Signal::SIGKILL);
    drop(cache);
    let until = Instant::now() + WAIT;
    while net.has_program() {
        assert!(Instant::now() < until, "the program stays");
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(net.client().get("k"), value);
    // And once more, after that.
    let (cache, _out) = net.attached();
    fill();
    assert!(net.hits() > 0);
    signal(&cache, nix::sys::signal::Signal::SIGTERM);
    while net.has_program() {
        thread::sleep(Duration::from_millis(10));
    }
    drop(server);
}
