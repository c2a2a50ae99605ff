//! The socket programs are a refinement of the pure connection: generated commands, cut anyhow, go through real sockets of
//! this process, which plays memcached, and every word must be what it is there. Needs root.

mod common;

use std::{
    collections::HashMap,
    io::{IoSlice, Read, Write},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
    sync::atomic::Ordering,
};

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use underpass_abi::cache::{UC_GENERATION, UC_WRITE, uc_settings};
use underpass_cache::{
    connection::{Change, Connection},
    hash,
    kernel::{Kernel, Sizes},
    word,
};

struct Twin {
    kernel: Kernel,
    words: HashMap<(usize, usize), u64>,
    global: u64,
    changes: usize,
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
            Change::BeginAll => return self.global = word::begin(self.global),
            Change::EndAll => return self.global = word::end(self.global),
            Change::FlushLater => {
                // The agent's part.
                self.kernel.global().fetch_sub(UC_WRITE as u64, Ordering::SeqCst);
                return self.global += UC_GENERATION;
            }
        };
        let hash = hash::hash(key, &self.kernel.settings().secret);
        let at = (hash::set(hash, self.kernel.settings().set_mask), hash::which(hash));
        let word = self.words.entry(at).or_default();
        *word = next(*word);
    }

    #[track_caller]
    fn compare(&self, of: &str) {
        assert_eq!(self.kernel.global().load(Ordering::SeqCst), self.global, "the global word {of}");
        for (&(set, which), &word) in &self.words {
            assert_eq!(self.kernel.word(set, which).load(Ordering::SeqCst), word, "word {which} of set {set} {of}");
        }
    }
}

/// Commands as most are written, for the short way through the parser, and everything else.
fn stream(rng: &mut StdRng) -> Vec<u8> {
    if rng.random_bool(0.5) {
        return common::commands(rng);
    }
    let mut bytes = Vec::new();
    for _ in 0..rng.random_range(1..4) {
        let key = "k".repeat(*[1, 7, 8, 9, 30, 249, 250, 251].choose(rng).unwrap());
        let len = *[0, 1, 20, 480, 600].choose(rng).unwrap();
        bytes.extend(match rng.random_range(0..5) {
            0 | 1 => format!("get {key}\r\n").into_bytes(),
            2 => format!("get {key} {key}x\r\n").into_bytes(),
            _ => {
                let noreply = if rng.random_bool(0.2) { " noreply" } else { "" };
                let (flags, time) = (rng.random_range(0..3), rng.random_range(0..100));
                format!("set {key} {flags} {time} {len}{noreply}\r\n{}\r\n", "\n".repeat(len)).into_bytes()
            }
        });
    }
    bytes
}

#[test]
fn the_kernel_follows_a_connection_as_the_model_does() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("not run: kernel programs need root");
    }
    let settings = uc_settings { port: 1, secret: [11, 13], address_count: 1, ..uc_settings::default() };
    let mut kernel = Kernel::load(settings, Sizes::of_budget(2, 4)).unwrap();
    kernel.follow(std::process::id()).unwrap();
    let mut rng = StdRng::seed_from_u64(common::seed());
    let mut twin = Twin { kernel, words: HashMap::new(), global: 0, changes: 0 };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for round in 0..common::count(1500) {
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        client.set_nodelay(true).unwrap();
        let mut pure = Connection::default();
        for _ in 0..rng.random_range(1..4) {
            let bytes = stream(&mut rng);
            let mut sent = 0;
            while sent < bytes.len() {
                let most = *[1, 5, 40, 2000].choose(&mut rng).unwrap();
                let piece = &bytes[sent..bytes.len().min(sent + rng.random_range(1..=most))];
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
                        let reply =
                            *[&b"VALUE k 0 1\r\nx\r\nEND\r\n"[..], b"END\r\n", b"\x81\0"].choose(&mut rng).unwrap();
                        let sent = match rng.random_range(0..2) {
                            0 => nix::unistd::write(&server, reply).unwrap(),
                            _ => send(&server, reply),
                        };
                        assert_eq!(sent, reply.len());
                        pure.replied(reply[0], &mut |change| twin.apply(change));
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
    assert!(twin.changes > 1000, "{}", twin.changes);
}

/// As memcached does: `sendmsg`, in two pieces.
fn send(stream: &TcpStream, bytes: &[u8]) -> usize {
    let (head, tail) = bytes.split_at(1);
    let pieces = [IoSlice::new(head), IoSlice::new(tail)];
    nix::sys::socket::sendmsg::<()>(stream.as_raw_fd(), &pieces, &[], nix::sys::socket::MsgFlags::empty(), None)
        .unwrap()
}
