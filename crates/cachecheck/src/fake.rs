//! A cache in front of memcached in user space, slow and coherent, into which bugs can be planted: those of the published
//! cache, and those that a better one might have. Whatever judges a cache has to find each of them, and nothing without.
//!
//! It passes everything on, and looks for keys in what passes: bytes from a client that contain a key put that key in
//! flight until the server's next answer to that client; what is in flight is neither served nor taken up.

use std::{
    collections::{HashMap, hash_map::Entry},
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use memchr::memmem;

use crate::wire::{BINARY_HEADER_LEN, UDP_HEADER_LEN, base64, opcode};

/// How often threads look whether they shall end.
const TICK: Duration = Duration::from_millis(20);
/// From a fill's answer to its taking up: wide enough for a write to come between.
const FILL_DELAY: Duration = Duration::from_micros(300);
/// From the looking at a client's bytes to their passing on: the time in which they are in flight for sure.
const FORWARD_DELAY: Duration = Duration::from_micros(100);
/// Threads that ask memcached for what was missed.
const FETCHERS: usize = 4;
/// Longest answer that is served, in one datagram.
const ANSWER_MAX: usize = 1400;

/// What is wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Nothing.
    None,
    /// Only what begins with a lower-case `set` invalidates.
    OnlySet,
    /// A text command is not seen: the one with this verb, blank included.
    Blind(&'static str),
    /// A binary command is not seen.
    BlindBinary(u8),
    /// Datagrams are not looked into.
    BlindDatagrams,
    /// What is cut in two is not seen.
    EachPieceAlone,
    /// A fill is taken whatever was written meanwhile.
    StaleFill,
    /// What is in flight is served, and taken up.
    InFlightServed,
    /// Expiry is ignored.
    NoExpiry,
    /// A request for several keys is answered with those that are there.
    PartialAnswer,
    /// A value ends at its first line break.
    CutValue,
    /// `gets` is answered as `get` is.
    GetsAsGet,
    /// An answer much longer than its request is dropped.
    LongAnswerDropped,
    /// Reads that pass leave the entry alone, even if they find the item gone.
    ReadsLeave,
}

struct Cached {
    flags: String,
    value: Vec<u8>,
    cas: u64,
    /// The last moment at which the item is surely there; `None`: it has no end.
    until: Option<Instant>,
}

#[derive(Default)]
struct State {
    entries: HashMap<Vec<u8>, Cached>,
    /// What each client has sent since the last answer to it.
    pending: HashMap<u64, Vec<u8>>,
    /// Keys that are being fetched, and whether they were in flight since.
    fetched: HashMap<Vec<u8>, bool>,
    /// Until then a flush is still to come, and nothing is served or taken up.
    idle_until: Option<Instant>,
    clients: u64,
    hits: u64,
}

struct Shared {
    bug: Bug,
    memcached: SocketAddrV4,
    state: Mutex<State>,
    stop: AtomicBool,
}

/// A running one. Dropping it ends it.
pub struct Fake {
    shared: Arc<Shared>,
    /// Those that hold its sockets.
    threads: Vec<thread::JoinHandle<()>>,
}

impl Fake {
    /// Listens at `front` for what is meant for `memcached`, in the calling thread's network namespace.
    ///
    /// # Errors
    /// When it cannot listen.
    pub fn start(front: SocketAddrV4, memcached: SocketAddrV4, bug: Bug) -> Result<Self> {
        let shared = Arc::new(Shared { bug, memcached, state: Mutex::default(), stop: AtomicBool::new(false) });
        let listener = TcpListener::bind(front).with_context(|| format!("cannot listen at {front}"))?;
        listener.set_nonblocking(true)?;
        let socket = UdpSocket::bind(front).with_context(|| format!("cannot bind {front}"))?;
        socket.set_read_timeout(Some(TICK))?;
        let (fetch, wanted) = mpsc::sync_channel(FETCHERS);
        let wanted = Arc::new(Mutex::new(wanted));
        let accepting = shared.clone();
        let mut threads = vec![thread::spawn(move || accepting.accept(&listener))];
        for _ in 0..FETCHERS {
            let (fetching, wanted) = (shared.clone(), wanted.clone());
            thread::spawn(move || fetching.fetch(&wanted));
        }
        let serving = shared.clone();
        threads.push(thread::spawn(move || {
            let _ = serving.serve(&socket, &fetch);
        }));
        Ok(Self { shared, threads })
    }

    /// Requests answered by itself.
    pub fn hits(&self) -> u64 {
        self.shared.lock().hits
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // The next one may bind the same port at once. A thread that panicked has said so.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    memmem::find(text, part).is_some()
}

fn names(text: &[u8], key: &[u8]) -> bool {
    contains(text, key) || contains(text, &base64(key))
}

/// Of a flush that is to come soon.
fn flush_delay(text: &[u8]) -> Option<Duration> {
    let at = memmem::find(text, b"flush_all ")? + b"flush_all ".len();
    let digits: String = text[at..].iter().take_while(|byte| byte.is_ascii_digit()).map(|byte| *byte as char).collect();
    digits.parse().ok().filter(|seconds| (1..60).contains(seconds)).map(Duration::from_secs)
}

fn flushes(text: &[u8]) -> bool {
    let binary = |opcode| contains(text, &[0x80, opcode, 0, 0]);
    contains(text, b"flush_all") || binary(opcode::FLUSH) || binary(opcode::FLUSHQ)
}

/// How many of these bytes are whole commands, as far as it can be told from lines and from binary headers.
fn complete(text: &[u8]) -> usize {
    if text.first() != Some(&0x80) {
        return memchr::memrchr(b'\n', text).map_or(0, |at| at + 1);
    }
    let mut at = 0;
    while let Some(length) = text.get(at + 8..at + 12) {
        let next = at + BINARY_HEADER_LEN + u32::from_be_bytes(length.try_into().expect("4 bytes")) as usize;
        if next > text.len() {
            break;
        }
        at = next;
    }
    at
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn new_client(&self) -> u64 {
        let mut state = self.lock();
        state.clients += 1;
        state.clients
    }

    /// Whether a bug hides these bytes.
    fn overlooks(&self, text: &[u8]) -> bool {
        let read = [&b"get"[..], b"mg"].iter().any(|verb| text.starts_with(verb))
            || (text.first() == Some(&0x80) && matches!(text.get(1), Some(0x00 | 0x09 | 0x0c | 0x0d)));
        match self.bug {
            Bug::OnlySet => !text.starts_with(b"set "),
            Bug::Blind(verb) => text.starts_with(verb.as_bytes()),
            Bug::BlindBinary(opcode) => text.starts_with(&[0x80, opcode]),
            Bug::ReadsLeave => read,
            _ => false,
        }
    }

    /// A client sent these bytes, which memcached has not seen yet.
    fn saw(&self, client: u64, piece: &[u8]) {
        let mut state = self.lock();
        let state = &mut *state;
        let pending = state.pending.entry(client).or_default();
        if self.bug == Bug::EachPieceAlone {
            pending.clear();
        }
        pending.extend(piece);
        if self.overlooks(pending) {
            pending.clear();
            return;
        }
        let text = &*pending;
        let all = flushes(text);
        if let Some(delay) = flush_delay(text) {
            state.idle_until = state.idle_until.max(Some(Instant::now() + delay + Duration::from_secs(2)));
        }
        state.entries.retain(|key, _| !all && !names(text, key));
        for (key, spoiled) in &mut state.fetched {
            *spoiled |= all || names(text, key);
        }
    }

    /// The server answered this client: what is complete is over.
    fn answered(&self, client: u64) {
        if let Some(pending) = self.lock().pending.get_mut(&client) {
            pending.drain(..complete(pending));
        }
    }

    fn left(&self, client: u64) {
        self.lock().pending.remove(&client);
    }

    fn accept(self: Arc<Self>, listener: &TcpListener) {
        while !self.stopped() {
            match listener.accept() {
                Ok((client, _)) => {
                    let shared = self.clone();
                    thread::spawn(move || shared.relay(client));
                }
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Passes a connection on. Errors end it: that is what the client sees of them.
    fn relay(self: Arc<Self>, mut from: TcpStream) -> Option<()> {
        let mut to = TcpStream::connect(self.memcached).ok()?;
        for stream in [&from, &to] {
            stream.set_nodelay(true).ok()?;
            stream.set_nonblocking(false).ok()?;
            stream.set_read_timeout(Some(TICK)).ok()?;
        }
        let client = self.new_client();
        let (mut answers, mut back, shared) = (to.try_clone().ok()?, from.try_clone().ok()?, self.clone());
        thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while !shared.stopped() {
                match answers.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(len) => {
                        shared.answered(client);
                        if back.write_all(&buffer[..len]).is_err() {
                            break;
                        }
                    }
                    Err(error) if is_timeout(&error) => {}
                    Err(_) => break,
                }
            }
            shared.left(client);
            let _ = back.shutdown(Shutdown::Write);
        });
        let mut buffer = vec![0; 1 << 16];
        while !self.stopped() {
            match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => {
                    self.saw(client, &buffer[..len]);
                    thread::sleep(FORWARD_DELAY);
                    to.write_all(&buffer[..len]).ok()?;
                }
                Err(error) if is_timeout(&error) => {}
                Err(_) => break,
            }
        }
        to.shutdown(Shutdown::Write).ok()
    }

    fn serve(self: Arc<Self>, socket: &UdpSocket, fetch: &mpsc::SyncSender<Vec<u8>>) -> Option<()> {
        let mut upstream: HashMap<SocketAddr, (u64, UdpSocket)> = HashMap::new();
        let mut buffer = vec![0; 1 << 16];
        while !self.stopped() {
            let (len, client) = match socket.recv_from(&mut buffer) {
                Ok(received) => received,
                Err(_) => continue,
            };
            let datagram = &buffer[..len];
            let keys = keys_of(datagram);
            if let Some((keys, cas)) = &keys {
                match self.answer(datagram, keys, *cas) {
                    Some(answer) if self.bug == Bug::LongAnswerDropped && answer.len() > len + 128 => continue,
                    Some(answer) => {
                        let _ = socket.send_to(&answer, client);
                        continue;
                    }
                    None => {}
                }
            }
            if let Entry::Vacant(entry) = upstream.entry(client) {
                let to = UdpSocket::bind("0.0.0.0:0").ok()?;
                to.connect(self.memcached).ok()?;
                let number = self.new_client();
                let (shared, answers, back) = (self.clone(), to.try_clone().ok()?, socket.try_clone().ok()?);
                thread::spawn(move || shared.relay_datagrams(number, &answers, &back, client));
                entry.insert((number, to));
            }
            let (number, to) = &upstream[&client];
            let blind = if keys.is_some() { Bug::ReadsLeave } else { Bug::BlindDatagrams };
            if self.bug != blind {
                self.saw(*number, datagram.get(UDP_HEADER_LEN..).unwrap_or_default());
            }
            let _ = to.send(datagram);
            for key in keys.iter().flat_map(|(keys, _)| keys) {
                // One that finds all fetchers busy is left for the next time.
                let _ = fetch.try_send(key.to_vec());
            }
        }
        Some(())
    }

    fn relay_datagrams(&self, number: u64, answers: &UdpSocket, back: &UdpSocket, client: SocketAddr) {
        let _ = answers.set_read_timeout(Some(TICK));
        let mut buffer = vec![0; 1 << 16];
        while !self.stopped() {
            if let Ok(len) = answers.recv(&mut buffer) {
                self.answered(number);
                let _ = back.send_to(&buffer[..len], client);
            }
        }
    }

    /// The answer to a request for these keys, if they are all here.
    fn answer(&self, datagram: &[u8], keys: &[&[u8]], cas: bool) -> Option<Vec<u8>> {
        let mut state = self.lock();
        let mut answer = [&datagram[..2], &[0, 0, 0, 1, 0, 0]].concat();
        let mut found = 0;
        if state.idle_until.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        for key in keys {
            let in_flight = || state.pending.values().any(|text| names(text, key) || flushes(text));
            let entry = state.entries.get(*key).filter(|entry| entry.until.is_none_or(|until| Instant::now() < until));
            let entry = entry.filter(|_| self.bug == Bug::InFlightServed || !in_flight());
            let Some(entry) = entry else {
                match self.bug {
                    Bug::PartialAnswer => continue,
                    _ => return None,
                }
            };
            found += 1;
            answer.extend(b"VALUE ");
            answer.extend(*key);
            answer.extend(format!(" {} {}", entry.flags, entry.value.len()).bytes());
            if cas && self.bug != Bug::GetsAsGet {
                answer.extend(format!(" {}", entry.cas).bytes());
            }
            answer.extend(b"\r\n");
            answer.extend(&entry.value);
            answer.extend(b"\r\n");
        }
        answer.extend(b"END\r\n");
        if found == 0 || answer.len() > ANSWER_MAX {
            return None;
        }
        state.hits += 1;
        Some(answer)
    }

    /// Waits a little for a key to be in flight no more: the read that wants it is.
    fn begin_fetch(&self, key: &[u8]) -> bool {
        for _ in 0..20 {
            let mut state = self.lock();
            let idle = state.idle_until.is_some_and(|until| Instant::now() < until);
            let in_flight = idle || state.pending.values().any(|text| names(text, key) || flushes(text));
            if !in_flight || matches!(self.bug, Bug::InFlightServed | Bug::StaleFill) {
                // Whoever asks for it already goes on.
                return state.fetched.insert(key.to_vec(), false).is_none_or(|spoiled| {
                    state.fetched.insert(key.to_vec(), spoiled);
                    false
                });
            }
            drop(state);
            thread::sleep(Duration::from_micros(100));
        }
        false
    }

    /// Asks memcached for keys, and takes up what it says.
    fn fetch(&self, wanted: &Mutex<mpsc::Receiver<Vec<u8>>>) -> Option<()> {
        let mut asking = TcpStream::connect(self.memcached).ok()?;
        asking.set_nodelay(true).ok()?;
        let mut answers = BufReader::new(asking.try_clone().ok()?);
        while !self.stopped() {
            let key = wanted.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(TICK);
            let Ok(key) = key else { continue };
            if key.iter().any(|byte| !byte.is_ascii_graphic()) {
                continue;
            }
            if !self.begin_fetch(&key) {
                continue;
            }
            let asked = Instant::now();
            let entry = ask(&mut asking, &mut answers, &key, asked).ok()?;
            thread::sleep(FILL_DELAY);
            let mut state = self.lock();
            let spoiled = state.fetched.remove(&key).unwrap_or(true) && self.bug != Bug::StaleFill;
            if let Some(mut entry) = entry
                && !spoiled
            {
                if self.bug == Bug::NoExpiry {
                    entry.until = None;
                }
                if self.bug == Bug::CutValue {
                    let end = entry.value.iter().position(|byte| *byte == b'\r').unwrap_or(entry.value.len());
                    entry.value.truncate(end);
                }
                state.entries.insert(key, entry);
            }
        }
        Some(())
    }
}

/// The keys of a datagram that asks for keys and nothing else, and whether it wants their cas uniques.
fn keys_of(datagram: &[u8]) -> Option<(Vec<&[u8]>, bool)> {
    let text = datagram.get(UDP_HEADER_LEN..)?;
    if datagram[4..6] != [0, 1] {
        return None;
    }
    let line = text.strip_suffix(b"\r\n").filter(|line| !line.contains(&b'\n') && !line.contains(&0))?;
    let mut words = line.split(|byte| *byte == b' ');
    let cas = match words.next()? {
        b"get" => false,
        b"gets" => true,
        _ => return None,
    };
    let keys: Vec<&[u8]> = words.filter(|word| !word.is_empty()).collect();
    (!keys.is_empty() && keys.iter().all(|key| key.len() <= 250)).then_some((keys, cas))
}

/// Asks for one key as it is now.
fn ask(to: &mut TcpStream, from: &mut impl BufRead, key: &[u8], asked: Instant) -> std::io::Result<Option<Cached>> {
    to.write_all(&[b"mg ", key, b" v f t c s\r\n"].concat())?;
    let mut line = String::new();
    from.read_line(&mut line)?;
    if !line.starts_with("VA ") {
        return Ok(None);
    }
    let flag = |name: char| line.split_whitespace().skip(2).find_map(|word| word.strip_prefix(name));
    let length: usize = flag('s').and_then(|word| word.parse().ok()).unwrap_or(0);
    let mut value = vec![0; length + 2];
    from.read_exact(&mut value)?;
    value.truncate(length);
    // Seconds left, by a clock that is a second late at most, and may then go two at once.
    let left: i64 = flag('t').and_then(|word| word.parse().ok()).unwrap_or(-1);
    let until = (left >= 0).then(|| asked + Duration::from_secs((left - 2).max(0) as u64));
    let flags = flag('f').unwrap_or("0").to_owned();
    let cas = flag('c').and_then(|word| word.parse().ok()).unwrap_or(0);
    Ok(Some(Cached { flags, value, cas, until }))
}
