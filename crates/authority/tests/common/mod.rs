//! An etcd of a test's own, a line to it that can be cut, and an agent's view.

use std::{
    fs::File,
    io,
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use etcd_client::{Client, ConnectOptions};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use underpass_authority::{Authority, EtcdAuthority, EtcdConfig, Notice, Record, Request, StoreOutcome};
use underpass_protocol::{control::MemberInfo, wire::Endpoint};

/// How long a busy machine may take for what should be at once.
pub const SOON: Duration = Duration::from_secs(30);
/// The shortest that etcd grants.
pub const TTL: Duration = Duration::from_secs(2);

/// An etcd process with a data directory of its own on loopback. It ends with this.
pub struct Etcd {
    process: Child,
    directory: tempfile::TempDir,
    ports: [u16; 2],
    arguments: Vec<String>,
}

/// With time for a busy machine.
pub fn patient(endpoints: Vec<String>) -> EtcdConfig {
    EtcdConfig { timeout_ms: 5000, ..EtcdConfig::new(endpoints) }
}

/// Ports that were free just now.
fn free_ports() -> [u16; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

impl Etcd {
    pub fn start() -> Self {
        Self::start_with("http", &[])
    }

    /// `scheme` is that of clients.
    pub fn start_with(scheme: &str, extra: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let ports = free_ports();
        let [client, peer] = ports;
        let mut arguments = vec![
            format!("--listen-client-urls={scheme}://127.0.0.1:{client}"),
            format!("--advertise-client-urls={scheme}://127.0.0.1:{client}"),
            format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
            format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
            format!("--initial-cluster=default=http://127.0.0.1:{peer}"),
            "--heartbeat-interval=50".into(),
            "--election-timeout=500".into(),
        ];
        arguments.extend(extra.iter().map(|&argument| argument.to_owned()));
        let process = Self::spawn(directory.path(), &arguments);
        let mut etcd = Self { process, directory, ports, arguments };
        etcd.await_port();
        etcd
    }

    fn spawn(directory: &Path, arguments: &[String]) -> Child {
        let log = File::create(directory.join("log")).unwrap();
        Command::new("etcd")
            .arg(format!("--data-dir={}", directory.join("data").display()))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|e| {
                panic!("starting etcd: {e}: these tests need Debian's package etcd-server: run ./dev setup as root")
            })
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    fn await_port(&mut self) {
        let started = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.ports[0])).is_err() {
            if let Some(status) = self.process.try_wait().unwrap() {
                panic!("etcd ended with {status}: {}", self.log());
            }
            assert!(started.elapsed() < SOON, "etcd does not listen: {}", self.log());
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.ports[0])
    }

    pub fn config(&self) -> EtcdConfig {
        patient(vec![self.address()])
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id() as i32), signal).unwrap();
    }

    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// After `kill`.
    pub fn restart(&mut self) {
        self.process = Self::spawn(self.directory.path(), &self.arguments);
        self.await_port();
    }

    /// After `kill`: loses everything.
    pub fn forget(&self) {
        std::fs::remove_dir_all(self.directory.path().join("data")).unwrap();
    }

    /// Does something as another client.
    pub fn with<T>(&self, step: impl AsyncFnOnce(&mut Client) -> Result<T, etcd_client::Error>) -> T {
        self.with_options(None, step)
    }

    pub fn with_options<T>(
        &self,
        options: Option<ConnectOptions>,
        step: impl AsyncFnOnce(&mut Client) -> Result<T, etcd_client::Error>,
    ) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let run = async { step(&mut Client::connect([self.address()], options).await?).await };
        runtime.block_on(async { tokio::time::timeout(SOON, run).await }).expect("etcd does not answer").unwrap()
    }

    pub fn put(&self, key: &str, value: &str) {
        self.with(async |client| client.put(key, value, None).await);
    }

    pub fn value(&self, key: &str) -> Option<String> {
        self.with(async |client| client.get(key, None).await).kvs().first().map(|kv| kv.value_str().unwrap().to_owned())
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A line to a server that can be cut.
pub struct Line {
    address: SocketAddr,
    state: Arc<Mutex<LineState>>,
}

#[derive(Default)]
struct LineState {
    cut: bool,
    streams: Vec<TcpStream>,
}

impl Line {
    pub fn to(server: &str) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(LineState::default()));
        let (server, shared) = (server.to_owned(), Arc::downgrade(&state));
        thread::spawn(move || {
            for near in listener.incoming() {
                let Some(state) = shared.upgrade() else { return };
                let mut state = state.lock().unwrap();
                if state.cut {
                    continue;
                }
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(&server)) else { continue };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                state.streams.extend([near, far]);
            }
        });
        Self { address, state }
    }

    pub fn address(&self) -> String {
        self.address.to_string()
    }

    pub fn cut(&self) {
        let mut state = self.state.lock().unwrap();
        state.cut = true;
        for stream in state.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub fn mend(&self) {
        self.state.lock().unwrap().cut = false;
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.cut();
        // Wakes the thread, which ends.
        let state = std::mem::take(&mut self.state);
        drop(state);
        let _ = TcpStream::connect(self.address);
    }
}

pub fn endpoint(port: u16) -> Endpoint {
    Endpoint { addr: Ipv4Addr::new(10, 0, 0, 1), port }
}

/// A record of shard 3 that names a coordinator.
pub fn record(epoch: u32, coordinator: Endpoint) -> Record {
    let addr = Ipv4Addr::new(10, 0, 0, 2);
    let member = MemberInfo { index: 0, id: 4, incarnation: u64::MAX - 6, addr, port: 5550, active: true };
    Record {
        epoch,
        tenure: epoch,
        coordinator: Some((coordinator.addr, coordinator.port)),
        members: vec![member],
        ..Record::new(3, Vec::new())
    }
}

/// An agent's view of the authority.
pub struct Agent {
    pub authority: EtcdAuthority,
    pub me: Endpoint,
    /// What was told, for messages of failed tests.
    told: Vec<String>,
}

impl Agent {
    pub fn new(config: &EtcdConfig, port: u16) -> Self {
        let me = endpoint(port);
        Self { authority: EtcdAuthority::open(config, me).unwrap(), me, told: Vec::new() }
    }

    pub fn campaign(&self) {
        self.authority.request(Request::Load { shard: 3 });
        self.authority.request(Request::Campaign { shard: 3 });
    }

    pub fn resign(&self, leave_to: Duration) {
        self.authority.request(Request::Resign { shard: 3, leave_to });
    }

    pub fn next(&mut self, within: Duration) -> Option<Notice> {
        let timeout = PollTimeout::try_from(within).unwrap();
        let mut fds = [PollFd::new(self.authority.as_fd(), PollFlags::POLLIN)];
        if poll(&mut fds, timeout).unwrap() == 0 {
            assert_eq!(self.authority.try_next(), None, "a notice without the descriptor being readable");
            return None;
        }
        let notice = self.authority.try_next().expect("readable without a notice");
        self.told.push(format!("{notice:?}"));
        Some(notice)
    }

    /// The first notice that `pick` wants; others are passed over.
    pub fn until<T>(&mut self, what: &str, within: Duration, mut pick: impl FnMut(Notice) -> Option<T>) -> T {
        let end = Instant::now() + within;
        loop {
            let Some(notice) = self.next(end.saturating_duration_since(Instant::now())) else {
                panic!("{}: not within {within:?}: {what}; told: {:#?}", self.me, self.told);
            };
            if let Some(picked) = pick(notice) {
                return picked;
            }
        }
    }

    pub fn until_role(&mut self, wanted: bool, within: Duration) {
        self.until(&format!("role {wanted}"), within, |notice| match notice {
            Notice::Role { shard: 3, held } => {
                assert_eq!(held, wanted);
                Some(())
            }
            _ => None,
        });
    }

    /// Fails if the role changes in this time.
    pub fn no_role(&mut self, within: Duration) {
        let end = Instant::now() + within;
        while let Some(notice) = self.next(end.saturating_duration_since(Instant::now())) {
            assert!(!matches!(notice, Notice::Role { .. }), "{}: {notice:?}; told: {:#?}", self.me, self.told);
        }
    }

    pub fn until_record(&mut self, within: Duration) -> (u64, Option<Record>) {
        self.until("a record", within, |notice| match notice {
            Notice::Record { shard: 3, revision, record } => Some((revision, record)),
            _ => None,
        })
    }

    /// The first record told, once the role is held, too: either may come first.
    pub fn until_record_and_role(&mut self, within: Duration) -> (u64, Option<Record>) {
        let (mut role, mut first) = (false, None);
        self.until("a record and the role", within, |notice| {
            match notice {
                Notice::Record { shard: 3, revision, record } => drop(first.get_or_insert((revision, record))),
                Notice::Role { held, .. } => role = held,
                _ => {}
            }
            if role { first.take() } else { None }
        })
    }

    pub fn until_trouble(&mut self, says: &[&str], within: Duration) -> String {
        self.until(&format!("trouble that says {says:?}"), within, |notice| match notice {
            Notice::Trouble { what } => says.iter().all(|word| what.contains(word)).then_some(what),
            _ => None,
        })
    }

    pub fn until_no_trouble(&mut self, within: Duration) {
        let end = Instant::now() + within;
        while !self.authority.troubles().is_empty() {
            assert!(Instant::now() < end, "{:?}", self.authority.troubles());
            self.next(Duration::from_millis(50));
        }
    }

    pub fn store(&mut self, expected: u64, record: Record) -> StoreOutcome {
        let id = self.told.len() as u64;
        self.authority.request(Request::Store { shard: 3, id, expected, record });
        self.until("what became of a store", SOON, |notice| match notice {
            Notice::Stored { shard: 3, id: of, outcome } => {
                assert_eq!(of, id);
                Some(outcome)
            }
            _ => None,
        })
    }

    pub fn stored(&mut self, expected: u64, record: Record) -> u64 {
        match self.store(expected, record) {
            StoreOutcome::Stored(revision) => revision,
            other => panic!("{other:?}; told: {:#?}", self.told),
        }
    }

    pub fn load(&mut self) -> (u64, Option<Record>) {
        self.authority.request(Request::Load { shard: 3 });
        self.until_record(SOON)
    }
}
