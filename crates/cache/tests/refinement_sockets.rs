//! The socket programs are a refinement of the pure connection: generated commands, cut anyhow, go through real sockets of
//! this process, which plays memcached, and every word must be what it is there. Needs root.

mod common;

use std::{
    cell::RefCell,
    collections::HashMap,
    io::{IoSlice, IoSliceMut, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    rc::Rc,
    sync::{Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use libbpf_rs::{RingBuffer, RingBufferBuilder};
use nix::sys::socket::{MsgFlags, SockaddrIn, sendmsg};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use underpass_abi::cache::{
    UC_COUNT_LATE, UC_COUNT_READ_MISSED, UC_FLIGHT_MAX, UC_GENERATION, UC_PENDING_MAX, UC_UNIT_BITS, UC_WRITE,
    uc_settings, uc_slot, uc_stored,
};
use underpass_cache::{
    connection::{Change, Connection, Store},
    hash,
    kernel::{Kernel, Sizes},
    word,
};

/// What a set stores, and the words with which it is valid.
type Given = (Store, [u64; 2]);

struct Twin {
    kernel: Kernel,
    words: HashMap<(usize, usize), u64>,
    global: u64,
    changes: usize,
    ring: RingBuffer<'static>,
    /// By the kernel, and by the model.
    given: (Rc<RefCell<Vec<Given>>>, Vec<Given>),
}

/// Keys that a slot shows as read.
fn is_read(key: &[u8]) -> bool {
    matches!(key.len(), 7 | 30) && key.iter().all(|&b| b == b'k')
}

fn show_as_read(kernel: &mut Kernel) {
    let place = 1 << UC_UNIT_BITS;
    kernel.write_slot(place, &uc_slot { used: 1, ..uc_slot::default() }, b"");
    for (way, len) in [(0, 7), (1, 30)] {
        let hash = hash::hash(&vec![b'k'; len], &kernel.settings().secret);
        let set = hash::set(hash, kernel.settings().set_mask);
        kernel.way(set, way).store(u64::from(hash::tag(hash)) << 32 | u64::from(place), Ordering::SeqCst);
    }
}

fn given(bytes: &[u8]) -> Given {
    assert!(bytes.len() >= size_of::<uc_stored>());
    // SAFETY: as many bytes as the structure has; any bytes are a value.
    let uc_stored { word, global, flags, seconds, key_len, len, key, value, .. } =
        unsafe { bytes.as_ptr().cast::<uc_stored>().read_unaligned() };
    let (key, value) = (key[..key_len as usize].to_vec(), value[..len as usize].to_vec());
    (Store { key, flags, seconds, value }, [word, global])
}

impl Twin {
    fn apply(&mut self, change: Change) {
        self.changes += 1;
        let (key, next): (_, fn(u64) -> u64) = match &change {
            Change::BeginRead(key) => (key, word::begin_read),
            Change::Begin(key) => (key, word::begin),
            Change::Harden(key) => (key, |w| word::begin(word::end_read(w, true))),
            Change::EndRead(key, true) => (key, |w| word::end_read(w, true)),
            Change::EndRead(key, false) => (key, |w| word::end_read(w, false)),
            Change::End(key) => (key, word::end),
            Change::EndFailed(key) => (key, word::end_failed),
            Change::Give(store) => {
                let words = [word::stored(*self.word(&store.key)), word::asked(self.global)];
                return self.given.1.push((store.clone(), words));
            }
            Change::Forget(key) => (key, word::forget),
            Change::BeginAll => return self.global = word::begin(self.global),
            Change::EndAll => return self.global = word::end(self.global),
            Change::FlushLater => {
                // The agent's part.
                self.kernel.global().fetch_sub(UC_WRITE as u64, Ordering::SeqCst);
                return self.global += UC_GENERATION;
            }
        };
        let word = self.word(key);
        *word = next(*word);
    }

    fn word(&mut self, key: &[u8]) -> &mut u64 {
        let hash = hash::hash(key, &self.kernel.settings().secret);
        self.words.entry((hash::set(hash, self.kernel.settings().set_mask), hash::which(hash))).or_default()
    }

    #[track_caller]
    fn compare(&self, of: &str) {
        assert_eq!(self.kernel.global().load(Ordering::SeqCst), self.global, "the global word {of}");
        for (&(set, which), &word) in &self.words {
            assert_eq!(self.kernel.word(set, which).load(Ordering::SeqCst), word, "word {which} of set {set} {of}");
        }
        self.ring.consume().unwrap();
        assert_eq!(*self.given.0.borrow(), self.given.1, "what was given {of}");
    }
}

/// Commands as most are written, for the short way through the parser, and everything else.
fn stream(rng: &mut StdRng) -> Vec<u8> {
    if rng.random_bool(0.4) {
        return common::commands(rng);
    }
    if rng.random_bool(0.3) {
        let (key, len) = ("k".repeat(*[7, 8, 30].choose(rng).unwrap()), rng.random_range(0..600));
        return format!("set {key} {} {} {len}\r\n{}\r\n", len, 12 * len, "\r".repeat(len)).into_bytes();
    }
    let mut bytes = Vec::new();
    for _ in 0..rng.random_range(1..4) {
        let key = "k".repeat(*[1, 7, 8, 9, 30, 249, 250, 251].choose(rng).unwrap());
        let len = *[0, 1, 20, 480, 600].choose(rng).unwrap();
        bytes.extend(match rng.random_range(0..40) {
            // A line that makes memcached grow its buffer.
            0 => [b"get".to_vec(), b" 1234567".repeat(300), b"\r\n".to_vec()].concat(),
            1..16 => format!("get {key}\r\n").into_bytes(),
            16..24 => format!("get {key} {key}x\r\n").into_bytes(),
            _ => {
                let noreply = if rng.random_bool(0.2) { " noreply" } else { "" };
                let (flags, time) = (rng.random_range(0..3), rng.random_range(0..100));
                format!("set {key} {flags} {time} {len}{noreply}\r\n{}\r\n", "\n".repeat(len)).into_bytes()
            }
        });
    }
    bytes
}

const REPLIES: [&[u8]; 5] =
    [b"VALUE k 0 1\r\nx\r\nEND\r\n", b"END\r\n", b"\x81\0", b"STORED\r\n", b"SERVER_ERROR out of memory\r\n"];

fn twin() -> Twin {
    let settings = uc_settings { port: 1, secret: [11, 13], address_count: 1, ..uc_settings::default() };
    let mut kernel = Kernel::load(settings, Sizes::of_budget(2, 4)).unwrap();
    kernel.follow(std::process::id()).unwrap();
    show_as_read(&mut kernel);
    let by_kernel = Rc::new(RefCell::new(Vec::new()));
    let mut rings = RingBufferBuilder::new();
    let to = by_kernel.clone();
    let take = move |bytes: &[u8]| {
        to.borrow_mut().push(given(bytes));
        0
    };
    let stored = kernel.stored();
    rings.add(&stored, take).unwrap();
    let ring = rings.build().unwrap();
    Twin { kernel, words: HashMap::new(), global: 0, changes: 0, ring, given: (by_kernel, Vec::new()) }
}

/// The programs see all sockets of this process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn the_kernel_follows_a_connection_as_the_model_does() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("not run: kernel programs need root");
    }
    let _alone = alone();
    let mut rng = StdRng::seed_from_u64(common::seed());
    let mut twin = twin();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for round in 0..common::count(1500) {
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        client.set_nodelay(true).unwrap();
        let mut pure = Connection::default().giving(is_read);
        for _ in 0..rng.random_range(1..4) {
            let bytes = stream(&mut rng);
            let mut sent = 0;
            while sent < bytes.len() {
                let most = *[1, 5, 40, 2000].choose(&mut rng).unwrap();
                let least = if rng.random_bool(0.5) { most } else { 1 };
                let piece = &bytes[sent..bytes.len().min(sent + rng.random_range(least..=most))];
                client.write_all(piece).unwrap();
                sent += piece.len();
                let mut left = piece.len();
                while left > 0 {
                    let room = if rng.random_bool(0.1) { rng.random_range(1..=20) } else { 16_384 };
                    let mut buffer = vec![0; room];
                    let got = server.read(&mut buffer).unwrap();
                    pure.receive(Some(&buffer[..got]), got == room, &mut |change| twin.apply(change));
                    left -= got;
                    let of = format!("in round {round} after {:?}", String::from_utf8_lossy(&buffer[..got]));
                    twin.compare(&of);
                    if left == 0 && rng.random_bool(0.05) {
                        assert!(server.read(&mut buffer).is_err());
                        pure.receive(None, false, &mut |change| twin.apply(change));
                        twin.compare(&of);
                    }
                    if rng.random_bool(0.5) {
                        let reply = *REPLIES.choose(&mut rng).unwrap();
                        let sent = match rng.random_range(0..2) {
                            0 => nix::unistd::write(&server, reply).unwrap(),
                            _ => send(&server, reply),
                        };
                        assert_eq!(sent, reply.len());
                        pure.replied(reply, &mut |change| twin.apply(change));
                        twin.compare(&format!("{of}, answered {:?}", String::from_utf8_lossy(reply)));
                    }
                }
            }
        }
        drop(client);
        // memcached reads the end, and closes.
        let end = server.read(&mut [0; 16]);
        assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
        pure.receive(None, false, &mut |change| twin.apply(change));
        pure.ended(&mut |change| twin.apply(change));
        twin.compare("at the end");
        drop(server);
    }
    assert!(twin.changes > 1000 && twin.given.1.len() > 50, "{} {}", twin.changes, twin.given.1.len());
}

/// The programs at this process's own sockets, and a connection whose server it is.
struct Own {
    twin: Twin,
    listener: TcpListener,
    _alone: MutexGuard<'static, ()>,
}

impl Own {
    fn new() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("not run: kernel programs need root");
            return None;
        }
        let _alone = alone();
        Some(Self { twin: twin(), listener: TcpListener::bind("127.0.0.1:0").unwrap(), _alone })
    }

    fn connect(&self) -> [TcpStream; 2] {
        let client = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        client.set_nodelay(true).unwrap();
        [client, self.listener.accept().unwrap().0]
    }

    fn word(&self, key: &[u8]) -> &std::sync::atomic::AtomicU64 {
        let hash = hash::hash(key, &self.twin.kernel.settings().secret);
        self.twin.kernel.word(hash::set(hash, self.twin.kernel.settings().set_mask), hash::which(hash))
    }

    /// Reads, and writes, in flight for a key; writes in flight for all.
    fn flight(&self, key: &[u8]) -> [u64; 3] {
        let [word, global] = [self.word(key), self.twin.kernel.global()].map(|word| word.load(Ordering::SeqCst));
        [word::reads(word), word::writes(word), word::writes(global)]
    }

    #[track_caller]
    fn becomes(&self, key: &[u8], flight: [u64; 3]) {
        let until = Instant::now() + Duration::from_secs(5);
        while self.flight(key) != flight && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.flight(key), flight);
    }
}

/// What a set stores is the key's value once it has ended, unless another command may come in between.
#[test]
fn a_set_is_given_to_the_agent_if_nothing_else_is_in_hand() {
    let Some(own) = Own::new() else { return };
    let set = b"set kkkkkkk 5 0 2\r\nab\r\n";
    let hands: [(&str, u64); 5] = [
        ("", 1),
        ("set kkkkkkk 0 0 9\r\nhalf", 0),
        ("set other 0 0 9\r\nhalf", 1),
        ("get kkkkkkk\r\n", 1),
        ("??\r\n", 0),
    ];
    for (in_hand, more) in hands {
        let [mut other, mut other_server] = own.connect();
        other.write_all(in_hand.as_bytes()).unwrap();
        take(&mut other_server, in_hand.len());
        let [mut client, mut server] = own.connect();
        client.write_all(set).unwrap();
        own.twin.given.0.borrow_mut().clear();
        // There is room for more: memcached reads on only then before it obeys.
        assert_eq!(server.read(&mut [0; 64]).unwrap(), set.len());
        own.twin.ring.consume().unwrap();
        let given = own.twin.given.0.borrow();
        assert_eq!(given.len() as u64, more, "{in_hand:?} in hand");
        let word = own.word(b"kkkkkkk").load(Ordering::SeqCst);
        assert!(given.iter().all(|(_, words)| words[0] == word::stored(word)));
        drop(other_server);
        drop(server);
        own.becomes(b"kkkkkkk", [0, 0, 0]);
    }
    // memcached's buffer is full: it may grow it and read on.
    let [mut client, mut server] = own.connect();
    client.write_all(set).unwrap();
    own.twin.given.0.borrow_mut().clear();
    take(&mut server, set.len());
    own.twin.ring.consume().unwrap();
    assert!(own.twin.given.0.borrow().is_empty());
}

fn take(server: &mut TcpStream, bytes: usize) {
    server.read_exact(&mut vec![0; bytes]).unwrap();
}

#[test]
fn what_is_too_much_to_count_holds_everything() {
    let Some(own) = Own::new() else { return };
    let [mut client, mut server] = own.connect();
    // More keys than a connection has room for, in one read.
    let most = UC_PENDING_MAX as usize;
    for (keys, global) in [(most, 0), (most + 1, 1), (most, 0)] {
        let line = [b"get".to_vec(), b" k".repeat(keys), b"\r\n".to_vec()].concat();
        client.write_all(&line).unwrap();
        let mut buffer = vec![0; 65_536];
        assert_eq!(server.read(&mut buffer).unwrap(), line.len());
        assert_eq!(own.flight(b"k"), [0, most as u64, global], "{keys} keys");
    }
    // And more commands for a key than its word has room for.
    let full = u64::from(UC_FLIGHT_MAX);
    client.write_all(b"get a\r\n").unwrap();
    take(&mut server, 7);
    assert_eq!(own.flight(b"k"), [0, 0, 0]);
    for (word, command) in [(full, "get k\r\n"), (full << 16, "set k 0 0 1\r\nx\r\n")] {
        for (word, held) in [(word - (word & word.wrapping_neg()), 0), (word, 1)] {
            own.word(b"k").store(word, Ordering::SeqCst);
            client.write_all(command.as_bytes()).unwrap();
            take(&mut server, command.len());
            assert_eq!(own.flight(b"k")[2], held, "{command:?} at {word:#x}");
            client.write_all(b"get a\r\n").unwrap();
            take(&mut server, 7);
            own.word(b"k").store(0, Ordering::SeqCst);
        }
    }
}

#[test]
fn bytes_that_were_taken_unseen_end_the_following() {
    let Some(own) = Own::new() else { return };
    let set = b"set k 0 0 1\r\nx\r\n";
    type Take<'a> = (&'a str, &'a dyn Fn(&mut TcpStream));
    let ways: [Take<'_>; 3] = [
        ("recvmsg", &|server| {
            let mut buffer = [0; 64];
            let mut pieces = [IoSliceMut::new(&mut buffer)];
            let flags = nix::sys::socket::MsgFlags::empty();
            let got = nix::sys::socket::recvmsg::<()>(server.as_raw_fd(), &mut pieces, None, flags).unwrap();
            assert_eq!(got.bytes, set.len());
        }),
        ("readv", &|server| {
            let mut buffer = [0; 64];
            assert_eq!(server.read_vectored(&mut [IoSliceMut::new(&mut buffer)]).unwrap(), set.len());
        }),
        // No tracepoint sees these: the next read shows that they are gone.
        ("splice", &|server| {
            let (_out, into) = nix::unistd::pipe().unwrap();
            let (from, into) = (server.as_raw_fd(), into.as_raw_fd());
            // SAFETY: open descriptors and no offsets.
            let got = unsafe { libc::splice(from, std::ptr::null_mut(), into, std::ptr::null_mut(), 64, 0) };
            assert_eq!(got, set.len() as isize);
        }),
    ];
    for (name, take_unseen) in ways {
        let [mut client, mut server] = own.connect();
        client.write_all(b"get a\r\n").unwrap();
        take(&mut server, 7);
        client.write_all(set).unwrap();
        take_unseen(&mut server);
        client.write_all(b"get a\r\n").unwrap();
        take(&mut server, 7);
        assert_eq!(own.flight(b"a")[2], 1, "after {name}");
        drop(server);
        own.becomes(b"a", [0, 0, 0]);
    }
    // The other side's end, read with its last bytes, is no byte that is gone.
    let [mut client, mut server] = own.connect();
    client.write_all(b"get a\r\n").unwrap();
    take(&mut server, 7);
    client.write_all(b"md k\r\n").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(server.read(&mut [0; 64]).unwrap(), 6);
    assert_eq!(own.flight(b"k"), [0, 1, 0]);
    drop(server);
    own.becomes(b"k", [0, 0, 0]);
    // What is only looked at is not taken.
    let [mut client, mut server] = own.connect();
    client.write_all(b"set k 0 0 1\r\n").unwrap();
    assert_eq!(server.peek(&mut [0; 64]).unwrap(), 13);
    assert_eq!(own.flight(b"k"), [0, 0, 0]);
    take(&mut server, 13);
    assert_eq!(own.flight(b"k"), [0, 1, 0]);
}

/// memcached grows its buffer for a long line, and reads on before it obeys what came before that.
#[test]
fn what_comes_before_a_long_line_is_not_over_when_that_is_read_on() {
    let Some(own) = Own::new() else { return };
    let [mut client, mut server] = own.connect();
    let bytes = [b"get k\r\nget".to_vec(), b" 1234567".repeat(300)].concat();
    client.write_all(&bytes).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    // As much as there was room for.
    assert_eq!(server.read(&mut vec![0; bytes.len()]).unwrap(), bytes.len());
    assert_eq!(own.flight(b"k"), [0, 1, 0]);
    for (bytes, flight) in [(&b" 12"[..], [0, 1, 0]), (b"34", [0, 0, 0])] {
        client.write_all(bytes).unwrap();
        assert_eq!(server.read(&mut [0; 64]).unwrap(), bytes.len());
        assert_eq!(own.flight(b"k"), flight, "after {:?}", text(bytes));
    }
}

/// The reply to the first of two lines is sent while the second still waits for its value, which looks like a command.
#[test]
fn a_lost_connection_is_not_followed_from_a_line_that_a_value_follows() {
    let Some(own) = Own::new() else { return };
    for (bytes, flight) in [("??\r\nset k 0 0 4\r\n", [0, 0, 1]), ("??\r\n", [0, 1, 0])] {
        let [mut client, mut server] = own.connect();
        client.write_all(bytes.as_bytes()).unwrap();
        assert_eq!(server.read(&mut [0; 64]).unwrap(), bytes.len());
        assert_eq!(own.flight(b"k"), [0, 0, 1], "after {bytes:?}");
        send(&server, b"ERROR\r\n");
        client.write_all(b"md k\r\n").unwrap();
        assert_eq!(server.read(&mut [0; 64]).unwrap(), 6);
        assert_eq!(own.flight(b"k"), flight, "after {bytes:?} and md");
        drop(server);
        own.becomes(b"k", [0, 0, 0]);
    }
}

/// memcached closes connections of its own accord, with half a command in hand.
#[test]
fn a_connection_that_is_gone_holds_nothing() {
    let Some(own) = Own::new() else { return };
    for (bytes, flight) in [(&b"set k 0 0 5\r\nab"[..], [0, 1, 0]), (b"get k\r\n", [1, 0, 0]), (b"??\r\n", [0, 0, 1])] {
        let [mut client, mut server] = own.connect();
        client.write_all(bytes).unwrap();
        take(&mut server, bytes.len());
        assert_eq!(own.flight(b"k"), flight);
        drop(server);
        own.becomes(b"k", [0, 0, 0]);
    }
}

/// Nobody knows what of a command had been read before, if only a byte of it. The other side's end is none of them.
#[test]
fn an_older_connection_is_not_followed_at_once() {
    let Some(mut own) = Own::new() else { return };
    let older: [(&[u8], &[u8], [u64; 3]); 4] = [
        (b"set k 0 0 7\r\n", b"get x\r\n\r\n", [0, 0, 1]),
        (b"m", b"d k\r\n", [0, 0, 1]),
        (b"", b"get k\r\n", [1, 0, 0]),
        (b"", b"md k\r\n", [0, 1, 0]),
    ];
    for (before, bytes, flight) in older {
        for (ends, room) in [(false, 64), (true, 64), (true, bytes.len())] {
            let [mut client, mut server] = own.connect();
            own.twin.kernel.detach();
            client.write_all(before).unwrap();
            take(&mut server, before.len());
            client.write_all(bytes).unwrap();
            if ends {
                client.shutdown(std::net::Shutdown::Write).unwrap();
            }
            std::thread::sleep(Duration::from_millis(20));
            own.twin.kernel.follow(std::process::id()).unwrap();
            assert_eq!(server.read(&mut vec![0; room]).unwrap(), bytes.len());
            let of = format!("of {:?} after {:?}, ends: {ends}, room: {room}", text(bytes), text(before));
            assert_eq!(own.flight(b"k"), flight, "{of}");
            assert_eq!(own.flight(b"x")[0], 0, "{of}");
            drop(server);
            own.becomes(b"k", [0, 0, 0]);
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// As memcached does: `sendmsg`, in two pieces.
fn send(stream: &TcpStream, bytes: &[u8]) -> usize {
    let (head, tail) = bytes.split_at(1);
    let pieces = [IoSlice::new(head), IoSlice::new(tail)];
    sendmsg::<()>(stream.as_raw_fd(), &pieces, &[], MsgFlags::empty(), None).unwrap()
}

/// memcached sends the reply, and keeps what it has of the next line: the reply is not known to be the last of the datagram.
#[test]
fn a_read_with_half_a_line_behind_it_is_heeded() {
    let Some(own) = Own::new() else { return };
    let (server, client, to) = datagrams();
    for (bytes, first) in [("get k\r\nx", "END\r\n"), ("get k\r\nset k2 0", "END\r\n"), ("get k\r\n", "END\r\n")] {
        let before = own.word(b"k").load(Ordering::SeqCst);
        client.send(&[FRAME, bytes.as_bytes()].concat()).unwrap();
        server.recv_from(&mut [0; 64]).unwrap();
        let pieces = [IoSlice::new(FRAME), IoSlice::new(first.as_bytes())];
        sendmsg(server.as_raw_fd(), &pieces, &[], MsgFlags::empty(), Some(&to)).unwrap();
        assert_ne!(own.word(b"k").load(Ordering::SeqCst), before, "{bytes:?} was answered by {first:?}");
    }
}

/// What memcached reads, not receives, is the rest of a value: until it has all of it the set is in flight.
#[test]
fn a_value_that_follows_its_datagram_is_awaited() {
    let Some(own) = Own::new() else { return };
    let (server, client, _) = datagrams();
    server.set_nonblocking(true).unwrap();
    let read = || nix::unistd::read(&server, &mut [0; 64]);
    client.send(&[FRAME, b"set k 0 0 10\r\nabc"].concat()).unwrap();
    server.recv_from(&mut [0; 64]).unwrap();
    assert_eq!(own.flight(b"k"), [0, 1, 0]);
    assert!(read().is_err());
    assert_eq!(own.flight(b"k"), [0, 1, 0], "nothing came");
    client.send(b"defghij\r\n").unwrap();
    assert_eq!(read(), Ok(9));
    assert_eq!(own.flight(b"k"), [0, 1, 0], "the rest came");
    client.send(&[FRAME, b"version\r\n"].concat()).unwrap();
    server.recv_from(&mut [0; 64]).unwrap();
    assert_eq!(own.flight(b"k"), [0, 0, 0], "the next request came");
}

fn datagrams() -> (UdpSocket, UdpSocket, SockaddrIn) {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(server.local_addr().unwrap()).unwrap();
    let to = SockaddrIn::from(match client.local_addr().unwrap() {
        SocketAddr::V4(addr) => addr,
        SocketAddr::V6(_) => unreachable!("bound to an IPv4 address"),
    });
    (server, client, to)
}

const FRAME: &[u8] = b"\0\x07\0\0\0\x01\0\0";

fn count(twin: &Twin, which: u32) -> u64 {
    twin.kernel.counters().unwrap().iter().map(|cpu| cpu[which as usize]).sum()
}

#[test]
fn the_kernel_follows_datagrams_as_the_model_does() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("not run: kernel programs need root");
    }
    let _alone = alone();
    let mut rng = StdRng::seed_from_u64(common::seed());
    let mut twin = twin();
    let (server, client, to) = datagrams();
    let mut pure = Connection::of_datagrams().giving(is_read);
    for round in 0..common::count(3000) {
        let bytes = stream(&mut rng);
        let least = if rng.random_bool(0.5) { 1400 } else { 1 };
        let piece = &bytes[..bytes.len().min(rng.random_range(least..=1400))];
        client.send(&[FRAME, piece].concat()).unwrap();
        let mut buffer = vec![0; if rng.random_bool(0.1) { rng.random_range(9..=40) } else { 2048 }];
        let (got, _) = server.recv_from(&mut buffer).unwrap();
        pure.receive_datagram(&buffer[FRAME.len()..got], got == buffer.len(), &mut |change| twin.apply(change));
        let of = format!("in round {round} after {:?}", String::from_utf8_lossy(&buffer[FRAME.len()..got]));
        twin.compare(&of);
        if rng.random_bool(0.7) {
            let reply = *REPLIES.choose(&mut rng).unwrap();
            let pieces = [IoSlice::new(FRAME), IoSlice::new(reply)];
            sendmsg(server.as_raw_fd(), &pieces, &[], MsgFlags::empty(), Some(&to)).unwrap();
            pure.replied(reply, &mut |change| twin.apply(change));
            twin.compare(&format!("{of}, answered {:?}", String::from_utf8_lossy(reply)));
        }
    }
    assert!(twin.changes > 1000 && twin.given.1.len() > 50, "{} {}", twin.changes, twin.given.1.len());
    assert!(count(&twin, UC_COUNT_READ_MISSED) > 100);
    // A send that looks up no route is not looked at before: reads are in flight from then on.
    assert_eq!(count(&twin, UC_COUNT_LATE), 0);
    server.connect(client.local_addr().unwrap()).unwrap();
    for (late, reply) in [(0, b"END\r\n"), (1, b"END\r\n"), (1, b"VALUE")] {
        assert_eq!(count(&twin, UC_COUNT_LATE), late);
        client.send(&[FRAME, b"get late\r\n"].concat()).unwrap();
        server.recv_from(&mut [0; 64]).unwrap();
        let mut emit = |change| twin.apply(change);
        if late == 0 {
            pure.receive_datagram(b"get late\r\n", false, &mut emit);
        } else {
            pure = Connection::default();
            pure.receive(Some(b"get late\r\n"), false, &mut emit);
        }
        twin.compare("of a late one");
        let pieces = [IoSlice::new(FRAME), IoSlice::new(reply)];
        sendmsg::<()>(server.as_raw_fd(), &pieces, &[], MsgFlags::empty(), None).unwrap();
        pure.replied(reply, &mut |change| twin.apply(change));
        twin.compare("of a late one, answered");
    }
}
