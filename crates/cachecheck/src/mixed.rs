//! Mixed histories: clients of all kinds at once on a few keys, and the judgement on what they were told.

use std::{
    collections::HashMap,
    io::{ErrorKind, Read, Write},
    net::{SocketAddrV4, TcpStream, UdpSocket},
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rand::{Rng, SeedableRng, rngs::SmallRng, seq::IndexedRandom};
use underpass_check::{
    history::{HistoryWriter, Operation, Outcome, Request},
    linearizability::{Checker, Options, Report, Store},
};
use underpass_rack::Host;

use crate::{
    talk::{Told, Tongue},
    wire::{TEXT_BARRIER, UDP_HEADER_LEN, datagram, line, store},
};

/// A datagram's answer is given up after this long, a connection's after more.
const UDP_PATIENCE: Duration = Duration::from_millis(40);
const TCP_PATIENCE: Duration = Duration::from_secs(10);
/// memcached sends none that is longer.
const DATAGRAM_MAX: usize = 2048;
/// memcached counts lifetimes in seconds, and its clock is a second late at most: so it may go two seconds at once.
const CLOCK_MS: u64 = 2000;
/// Where numbers start: far from where they would get shorter, which memcached pads.
const NUMBER: i64 = 500_000_000;
/// Values do not grow beyond this, so that most answers fit in a datagram.
const LENGTH_MAX: usize = 900;
/// Of all values where memcached is to evict: it does so among items of a size.
const PRESSED_LENGTH: usize = 300;

/// What is done, and by whom.
#[derive(Clone, Debug)]
pub struct Mix {
    /// What random choices come from.
    pub seed: u64,
    /// Operations of each client in a round.
    pub operations: usize,
    /// Rounds; each has keys of its own.
    pub rounds: usize,
    /// Keys of a round, half of them numbers.
    pub keys: usize,
    /// Clients that speak in datagrams; most of what they do is reading.
    pub udp: usize,
    /// Clients with a connection, by protocol.
    pub tcp: [usize; 3],
    /// Clients on the server's own host.
    pub local: usize,
    /// Whether lifetimes are given, of a few seconds.
    pub lifetimes: bool,
    /// Whether all items are removed now and then: by one client, as memcached confuses two at once. Then nothing is written that
    /// depends on what is there: memcached may find an item, be told to remove all, and store what it makes of that item.
    pub flushes: bool,
    /// Whether frames are lost: then nobody asks for several keys in a datagram. memcached answers each in a datagram of its own
    /// that claims to be the only one, and the loss of one looks like an item that is not there.
    pub lossy: bool,
    /// Writers of other items on the server's own host, so that memcached evicts; values are of one size then, and `evicts` is to be told to the
    /// checker.
    pub pressure: usize,
}

impl Default for Mix {
    fn default() -> Self {
        Self {
            seed: 1,
            operations: 2000,
            rounds: 1,
            keys: 64,
            udp: 4,
            tcp: [1, 1, 1],
            local: 0,
            lifetimes: false,
            flushes: false,
            lossy: false,
            pressure: 0,
        }
    }
}

/// Whom clients talk to.
#[derive(Clone, Debug)]
pub struct Place {
    /// Where clients are.
    pub client: Host,
    /// What they talk to.
    pub front: SocketAddrV4,
    /// Where the local clients are, and what they talk to.
    pub server: (Host, SocketAddrV4),
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Judged {
    /// Operations checked.
    pub operations: u64,
    /// Of these, reads that found something.
    pub found: u64,
    /// Reads that found nothing.
    pub missed: u64,
    /// Operations without an answer.
    pub unknown: u64,
    /// How long it took to check them, beside what was played meanwhile.
    pub checking: Duration,
    /// Reports of rounds that are not linearizable, or were not decided.
    pub bad: Vec<Report>,
    /// The history of the last of these.
    pub history: Vec<Operation>,
}

impl Judged {
    /// Takes a round's history in. False: it is bad, and is kept.
    fn add(&mut self, mix: &Mix, history: Vec<Operation>) -> bool {
        let kind = Store { evicts: mix.pressure > 0, clock_ms: if mix.lifetimes { CLOCK_MS } else { 0 } };
        let mut checker = Checker::of(kind);
        for op in &history {
            checker.add(op);
        }
        let gets = |outcome| history.iter().filter(|op| op.op == Request::Get && op.outcome == outcome).count() as u64;
        self.operations += history.len() as u64;
        self.found += gets(Outcome::Ok);
        self.missed += gets(Outcome::NotFound);
        self.unknown += history.iter().filter(|op| op.outcome == Outcome::Unknown).count() as u64;
        let report = checker.check(&Options { budget: 3_000_000, ..Options::default() });
        self.checking += report.elapsed;
        if report.verdict() == underpass_check::linearizability::Verdict::Linearizable {
            return true;
        }
        self.bad.push(report);
        self.history = history;
        false
    }

    /// Writes the bad round's history to a file that stays.
    ///
    /// # Errors
    /// Those of the file.
    pub fn keep(&self, name: &str) -> Result<PathBuf> {
        let path = std::env::temp_dir().join(format!("underpass-{name}-{}.jsonl", std::process::id()));
        let writer = HistoryWriter::create(&path)?;
        for op in &self.history {
            writer.record(op)?;
        }
        writer.finish()?;
        Ok(path)
    }
}

/// Runs all rounds; stops at the first bad one.
///
/// # Errors
/// When a server cannot be reached, or says what no memcached says.
pub fn run(mix: &Mix, place: &Place) -> Result<Judged> {
    run_until(mix, place, |rounds, _| rounds == mix.rounds)
}

/// Runs rounds until after so many rounds and operations it is enough, or one is bad. While one is played the one before is checked.
///
/// # Errors
/// As [`run`].
pub fn run_until(mix: &Mix, place: &Place, enough: impl Fn(usize, u64) -> bool) -> Result<Judged> {
    thread::scope(|scope| {
        let (played, to_check) = mpsc::sync_channel(0);
        let checker = scope.spawn(|| {
            let mut judged = Judged::default();
            let mut to_check = to_check.into_iter();
            while to_check.next().is_some_and(|history| judged.add(mix, history)) {}
            judged
        });
        let (mut rounds, mut operations) = (0, 0);
        while !enough(rounds, operations) {
            let history = play(mix, place, rounds)?;
            rounds += 1;
            operations += history.len() as u64;
            if played.send(history).is_err() {
                break;
            }
        }
        drop(played);
        Ok(checker.join().expect("the checker does not panic"))
    })
}

/// One round: everything that its clients were told.
fn play(mix: &Mix, place: &Place, round: usize) -> Result<Vec<Operation>> {
    let keys: Vec<String> = (0..mix.keys).map(|key| format!("m{:x}.{round}.{key:03}", mix.seed)).collect();
    let (started, stop) = (Instant::now(), AtomicBool::new(false));
    let histories = Mutex::new(Vec::new());
    let failure = Mutex::new(None);
    let note = |result: Result<Vec<Operation>>| match result {
        Ok(history) => histories.lock().unwrap_or_else(PoisonError::into_inner).extend(history),
        Err(error) => *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
    };
    let client = |number: usize, port: Port| {
        let seed = mix.seed.wrapping_mul(1_000_003).wrapping_add((round * 1000 + number) as u64);
        Client {
            mix,
            keys: &keys,
            number: number as u64,
            random: SmallRng::seed_from_u64(seed),
            seen: HashMap::new(),
            writes: 0,
            port,
            started,
            history: Vec::new(),
        }
        .play()
    };
    let inside = |front: SocketAddrV4, host: &Host, roles: Vec<(usize, Role)>| -> Result<()> {
        host.enter(|| {
            thread::scope(|scope| {
                let workers: Vec<_> = roles
                    .into_iter()
                    .map(|(number, role)| {
                        let (client, note) = (&client, &note);
                        scope.spawn(move || note(Port::open(front, role).and_then(|port| client(number, port))))
                    })
                    .collect();
                for worker in workers {
                    worker.join().expect("clients do not panic");
                }
            });
        })?;
        Ok(())
    };
    let tongues = [Tongue::Text, Tongue::Meta, Tongue::Binary];
    let tcp = tongues.iter().zip(mix.tcp).flat_map(|(&tongue, count)| vec![Role::Tcp(tongue); count]);
    let remote: Vec<(usize, Role)> = (0..mix.udp).map(|_| Role::Udp).chain(tcp).enumerate().collect();
    let local = (0..mix.local)
        .map(|number| (500 + number, if number % 4 == 3 { Role::Udp } else { Role::Tcp(tongues[number % 4]) }));
    let local: Vec<(usize, Role)> = local.collect();
    thread::scope(|scope| -> Result<()> {
        let pressing = scope.spawn(|| {
            place.server.0.enter(|| {
                thread::scope(|scope| {
                    for number in 0..mix.pressure {
                        let stop = &stop;
                        scope.spawn(move || press(place.server.1, number, stop));
                    }
                });
            })
        });
        let there = scope.spawn(|| inside(place.front, &place.client, remote));
        let here = inside(place.server.1, &place.server.0, local);
        let there = there.join().expect("does not panic");
        stop.store(true, Ordering::Relaxed);
        pressing.join().expect("does not panic")?;
        here.and(there)
    })?;
    if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    Ok(histories.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Stores one item after the other, each as large as those of the history, until it is told to stop.
fn press(front: SocketAddrV4, number: usize, stop: &AtomicBool) -> Option<()> {
    let mut stream = TcpStream::connect(front).ok()?;
    let value = vec![b'p'; PRESSED_LENGTH];
    let mut buffer = [0; 4096];
    for item in 0u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let batch: Vec<u8> = (0..16)
            .flat_map(|part| {
                let key = format!("press{number}.{}", (item * 16 + part) % 50_000);
                store("set", key.as_bytes(), 0, 0, &value, " noreply")
            })
            .collect();
        stream.write_all(&[&batch[..], TEXT_BARRIER].concat()).ok()?;
        if stream.read(&mut buffer).ok()? == 0 {
            break;
        }
    }
    Some(())
}

#[derive(Clone, Copy, Debug)]
enum Role {
    Udp,
    Tcp(Tongue),
}

/// How a client reaches the server.
enum Port {
    Udp { socket: UdpSocket, request: u16 },
    Tcp { front: SocketAddrV4, stream: TcpStream, tongue: Tongue },
}

impl Port {
    fn open(front: SocketAddrV4, role: Role) -> Result<Self> {
        match role {
            Role::Udp => {
                let socket = UdpSocket::bind("0.0.0.0:0")?;
                socket.connect(front)?;
                // For each datagram of an answer: they are few.
                socket.set_read_timeout(Some(UDP_PATIENCE))?;
                Ok(Self::Udp { socket, request: 0 })
            }
            Role::Tcp(tongue) => Ok(Self::Tcp { front, stream: connect(front)?, tongue }),
        }
    }

    fn tongue(&self) -> Tongue {
        match self {
            Self::Udp { .. } => Tongue::Text,
            Self::Tcp { tongue, .. } => *tongue,
        }
    }

    /// Sends, and takes what comes back until `whole` says that it is all. `None`: no answer.
    fn exchange(&mut self, bytes: &[u8], whole: &mut dyn FnMut(&[u8]) -> Result<bool>) -> Result<Option<()>> {
        match self {
            Self::Udp { socket, request } => {
                *request = request.wrapping_add(1);
                socket.send(&datagram(*request, bytes))?;
                let until = Instant::now() + UDP_PATIENCE;
                let mut parts: Vec<(u8, Vec<u8>)> = Vec::new();
                let mut buffer = [0; DATAGRAM_MAX];
                loop {
                    if Instant::now() >= until {
                        return Ok(None);
                    }
                    let Ok(len) = socket.recv(&mut buffer) else { continue };
                    let Some((header, text)) = buffer[..len].split_at_checked(UDP_HEADER_LEN) else { continue };
                    if header[..2] != request.to_be_bytes() {
                        continue;
                    }
                    // An answer in several datagrams says of each which it is; answers to several keys are all the first.
                    parts.push((header[3], text.to_vec()));
                    if header[5] > 1 {
                        parts.sort_by_key(|part| part.0);
                    }
                    if parts.len() < header[5].into() {
                        continue;
                    }
                    let text: Vec<u8> = parts.iter().flat_map(|(_, text)| text).copied().collect();
                    if whole(&text)? {
                        return Ok(Some(()));
                    }
                }
            }
            Self::Tcp { front, stream, .. } => {
                let mut answer = Vec::new();
                let mut buffer = [0; 16384];
                let mut sent = stream.write_all(bytes);
                let until = Instant::now() + TCP_PATIENCE;
                while sent.is_ok() && Instant::now() < until {
                    match stream.read(&mut buffer) {
                        Ok(0) => break,
                        Ok(len) => {
                            answer.extend(&buffer[..len]);
                            if whole(&answer)? {
                                return Ok(Some(()));
                            }
                        }
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        Err(error) => sent = Err(error),
                    }
                }
                *stream = connect(*front)?;
                Ok(None)
            }
        }
    }
}

fn connect(front: SocketAddrV4) -> Result<TcpStream> {
    let stream = TcpStream::connect(front).with_context(|| format!("cannot connect to {front}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TCP_PATIENCE))?;
    Ok(stream)
}

struct Client<'a> {
    mix: &'a Mix,
    keys: &'a [String],
    number: u64,
    random: SmallRng,
    /// Cas uniques and lengths as last read.
    seen: HashMap<usize, (u64, usize)>,
    writes: u64,
    port: Port,
    started: Instant,
    history: Vec<Operation>,
}

impl Client<'_> {
    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn play(mut self) -> Result<Vec<Operation>> {
        let mut key = 0;
        let udp = matches!(self.port, Port::Udp { .. });
        let reads = if udp { 0.85 } else { 0.3 };
        for _ in 0..self.mix.operations {
            // A cache is of no use where nothing is read twice, nor where writers leave no time between.
            if self.random.random_bool(0.4) {
                key = self.random.random_range(0..self.keys.len());
            }
            if !udp && self.random.random_bool(0.5) {
                thread::sleep(Duration::from_micros(self.random.random_range(0..1000)));
            }
            match self.random.random_range(0..1000) {
                0..3 if self.mix.flushes && self.number == 0 => self.flush()?,
                3..100 if self.port.tongue() == Tongue::Text && !(udp && self.mix.lossy) => self.read_several()?,
                100..150 if self.mix.lifetimes && self.port.tongue() == Tongue::Text => self.get_and_touch(key)?,
                150..250 if matches!(self.port, Port::Tcp { tongue: Tongue::Text, .. }) => self.silent_write(key)?,
                _ if self.random.random_bool(reads) => self.read(key)?,
                _ => self.write(key)?,
            }
        }
        Ok(self.history)
    }

    fn call(&self, request: Request, key: usize) -> Operation {
        Operation::call(self.number, request, &self.keys[key][..], self.now())
    }

    /// Has one operation done and recorded.
    fn perform(&mut self, mut op: Operation) -> Result<Option<Told>> {
        let (tongue, mut told) = (self.port.tongue(), None);
        op.call_ns = self.now();
        let asked = op.clone();
        let answered = self.port.exchange(&tongue.request(&op), &mut |answer| {
            told = tongue.told(&asked, answer).map_err(anyhow::Error::msg)?;
            Ok(told.is_some())
        })?;
        if answered.is_some()
            && let Some(told) = &told
        {
            let now = self.now();
            match told.outcome {
                Some(outcome) => {
                    op.finish(outcome, now);
                    op.cas = told.cas;
                    op.number = told.number;
                    if op.op == Request::Get {
                        op.value = told.value.clone().map(Into::into);
                    }
                }
                // No memory for it: what was there is gone.
                None => {
                    op = Operation::call(op.client, Request::Flush, op.key, op.call_ns);
                    op.finish(Outcome::Ok, now);
                }
            }
        }
        self.history.push(op);
        Ok(told)
    }

    fn read(&mut self, key: usize) -> Result<()> {
        let told = self.perform(self.call(Request::Get, key))?;
        self.doubt_last(key);
        if let Some(Told { value: Some(value), cas: Some(cas), .. }) = told {
            self.seen.insert(key, (cas, value.len()));
        }
        Ok(())
    }

    /// Of a number that is read while another client increments it, memcached may tell the old value with the new cas unique.
    fn doubt_last(&mut self, key: usize) {
        if let Some(op) = self.history.last_mut().filter(|op| Self::is_number(key) && op.op == Request::Get) {
            op.cas = None;
        }
    }

    fn is_number(key: usize) -> bool {
        key % 2 == 1
    }

    fn value(&mut self, key: usize) -> Vec<u8> {
        self.writes += 1;
        if Self::is_number(key) && self.mix.pressure == 0 {
            // Distinct, and far from all that increments make of each other.
            return (NUMBER + (self.number * 10_000 + self.writes) as i64 % 4_000_000 * 100).to_string().into_bytes();
        }
        let mut value = format!("c{}w{}.", self.number, self.writes).into_bytes();
        let length = match self.mix.pressure {
            0 => *[0, 0, 30, 300].choose(&mut self.random).expect("not empty"),
            _ => PRESSED_LENGTH,
        };
        value.resize(length.max(value.len()), b'-');
        value
    }

    fn write(&mut self, key: usize) -> Result<()> {
        use Request::*;
        let pieces = !Self::is_number(key) && self.mix.pressure == 0;
        let short = self.seen.get(&key).is_none_or(|(_, length)| *length < LENGTH_MAX / 2);
        let request = match *[Put, Put, Put, Add, Replace, Cas, Cas, Delete, Append, Touch]
            .choose(&mut self.random)
            .expect("not empty")
        {
            Append if self.mix.flushes => Add,
            Append if pieces && short && self.random.random_bool(0.5) => Prepend,
            Append if pieces && short => Append,
            Append if self.mix.pressure == 0 && !pieces => Incr,
            Append => Put,
            Touch if !self.mix.lifetimes => Delete,
            Replace | Cas if self.mix.flushes => Put,
            other => other,
        };
        let mut op = self.call(request, key);
        match request {
            Append | Prepend => op.value = Some(format!("+{}.{}", self.number, self.writes).into()),
            Incr => op.delta = Some(self.random.random_range(-40..40)),
            Delete | Touch => {}
            _ => op.value = Some(self.value(key).into()),
        }
        if request == Cas {
            op.expected = Some(self.seen.get(&key).map_or(1, |(cas, _)| *cas));
        }
        if self.mix.lifetimes
            && (request == Touch || (matches!(request, Put | Add | Replace | Cas) && self.random.random_bool(0.4)))
        {
            op.ttl_ms = Some(*[0, 1000, 3000, 4000].choose(&mut self.random).expect("not empty"));
        }
        self.perform(op)?;
        Ok(())
    }

    /// Every key is removed, and nobody says whether it was there.
    fn flush(&mut self) -> Result<()> {
        self.perform(self.call(Request::Flush, 0))?;
        let op = self.history.pop().expect("was just done");
        self.history.extend(self.keys.iter().map(|key| Operation { key: key[..].into(), ..op.clone() }));
        Ok(())
    }

    fn read_several(&mut self) -> Result<()> {
        let count = self.random.random_range(2..5);
        let keys: Vec<usize> = (0..count).map(|_| self.random.random_range(0..self.keys.len())).collect();
        let words: Vec<&str> = keys.iter().map(|&key| &self.keys[key][..]).collect();
        let request = format!("gets {}\r\n", words.join(" ")).into_bytes();
        let call = self.now();
        let mut found = Vec::new();
        let answered = self.port.exchange(&request, &mut |answer| {
            found = match several(answer) {
                Some(found) => found,
                None => return Ok(false),
            };
            Ok(true)
        })?;
        if answered.is_none() {
            return Ok(());
        }
        // In the order of the request, without those that were not there; a key asked for twice may be in it once.
        let mut found = found.into_iter().peekable();
        for key in keys {
            let mut op = Operation { call_ns: call, ..self.call(Request::Get, key) };
            match found.next_if(|(name, ..)| *name == self.keys[key].as_bytes()) {
                Some((_, value, cas)) => {
                    op.finish(Outcome::Ok, self.now());
                    op.value = Some(value.into());
                    op.cas = Some(cas);
                }
                None => op.finish(Outcome::NotFound, self.now()),
            }
            self.history.push(op);
            self.doubt_last(key);
        }
        ensure!(found.next().is_none(), "more was answered than asked for");
        Ok(())
    }

    fn get_and_touch(&mut self, key: usize) -> Result<()> {
        let seconds = self.random.random_range(0..5);
        let (mut get, mut touch) = (self.call(Request::Get, key), self.call(Request::Touch, key));
        touch.ttl_ms = Some(seconds * 1000);
        touch.call_ns = get.call_ns;
        let request = line(&format!("gats {seconds}"), self.keys[key].as_bytes(), "");
        let mut found = Vec::new();
        let answered = self.port.exchange(&request, &mut |answer| {
            found = match several(answer) {
                Some(found) => found,
                None => return Ok(false),
            };
            Ok(true)
        })?;
        if answered.is_some() {
            let outcome = if found.is_empty() { Outcome::NotFound } else { Outcome::Ok };
            let now = self.now();
            get.finish(outcome, now);
            touch.finish(outcome, now);
            if let Some((_, value, cas)) = found.pop() {
                get.value = Some(value.into());
                get.cas = Some(cas);
            }
            self.history.push(get);
            self.doubt_last(key);
        }
        self.history.push(touch);
        Ok(())
    }

    /// Without an answer of its own, but with a barrier behind.
    fn silent_write(&mut self, key: usize) -> Result<()> {
        let mut op = self.call(Request::Put, key);
        let name = self.keys[key].as_bytes();
        let request = if self.random.random_bool(0.3) || self.mix.pressure > 0 {
            op.op = Request::Flush;
            line("delete", name, " noreply")
        } else {
            let value = self.value(key);
            op.value = Some(value.clone().into());
            store("set", name, 0, 0, &value, " noreply")
        };
        op.call_ns = self.now();
        let request = [&request[..], TEXT_BARRIER].concat();
        if self.port.exchange(&request, &mut |answer| Ok(answer.ends_with(b"MN\r\n")))?.is_some() {
            op.finish(Outcome::Ok, self.now());
        }
        self.history.push(op);
        Ok(())
    }
}

/// A key, its value and its cas unique.
type Found = (Vec<u8>, Vec<u8>, u64);

/// What is in an answer to GETS, if it is all there.
fn several(answer: &[u8]) -> Option<Vec<Found>> {
    let mut found = Vec::new();
    let mut rest = answer;
    loop {
        if rest == b"END\r\n" {
            return Some(found);
        }
        let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
        let head = std::str::from_utf8(&rest[..end]).ok()?;
        let words: Vec<&str> = head.split(' ').collect();
        let ["VALUE", key, _, length, cas] = words[..] else { return None };
        let length: usize = length.parse().ok()?;
        let value = rest.get(end + 2..end + 2 + length)?;
        found.push((key.as_bytes().to_vec(), value.to_vec(), cas.parse().ok()?));
        rest = rest.get(end + 2 + length + 2..)?;
    }
}
