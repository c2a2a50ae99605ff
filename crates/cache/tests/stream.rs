//! What the parser makes of commands, plain and peculiar, however they are cut.

mod common;

use common::{commands, request};
use rand::{Rng, SeedableRng, rngs::StdRng};
use underpass_abi::cache::{UC_MODE_LOST, UC_STREAM_LONG, UC_STREAM_STALE, uc_stream};
use underpass_cache::stream::{Event, at_boundary, feed, key};

/// Events as text: a letter each, with the key, or the number of a flush.
fn parse<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<String>, uc_stream) {
    let (mut events, mut stream) = (Vec::new(), uc_stream::default());
    for piece in pieces {
        feed(&mut stream, piece, |s, event| {
            let key = String::from_utf8_lossy(key(s)).into_owned();
            events.push(match event {
                Event::Read => format!("r {key}"),
                Event::Write => format!("w {key}"),
                Event::Other => "o".into(),
                Event::Forget => "forget".into(),
                Event::Flush => format!("flush {}", s.number),
                Event::Lost => "lost".into(),
            });
        });
    }
    (events, stream)
}

#[track_caller]
fn check(bytes: &[u8], expected: &str) {
    let (events, _) = parse([bytes]);
    assert_eq!(events.join(", "), expected, "of {:?}", String::from_utf8_lossy(bytes));
}

#[test]
fn text_commands() {
    check(b"get a\r\n", "r a");
    check(b"gets a b\n", "r a, r b");
    check(b"get a \r\n", "r a, o");
    check(b"gat 10 a b\r\nget c\r\n", "w a, w b, r c");
    check(b"set k 0 0 5\r\nget a\r\nget b\r\n", "w k, r b");
    check(b"set k 0 0 0\r\n\r\nget b\r\n", "w k, r b");
    check(b"set k 0 0 5 noreply\r\n12345\r\nget b\r\n", "w k, r b");
    check(b"add k 0 -1 3\r\nget\r\nreplace k 1 2 1\r\nx\r\n", "w k, w k");
    check(b"append k 0 0 1\r\nx\r\nprepend k 0 0 1\r\nx\r\nget b\r\n", "w k, w k, r b");
    check(b"cas k 0 0 1 77\r\nx\r\ncas k 0 0 1 77 noreply\r\nx\r\n", "w k, w k");
    check(b"incr k 1\r\ndecr k 1 noreply\r\ndelete k\r\ndelete k 0\r\ntouch k 9\r\n", "w k, w k, w k, w k, w k");
    check(b"version\r\nstats\r\nstats items\r\nmn\r\nverbosity 1\r\n", "o, o, o, o, o");
    check(b"cache_memlimit 64\r\nslabs reassign 1 2\r\nlru_crawler metadump all\r\n", "forget, forget, forget");
    check(
        b"flush_all\r\nflush_all 0\r\nflush_all noreply\r\nflush_all 30 noreply\r\n",
        "flush 0, flush 0, flush 0, flush 30",
    );
    check(b"flush_all -5\r\nflush_all +7\r\nflush_all 9x\r\n", "flush 0, flush 7, flush 0");
}

#[test]
fn meta_commands() {
    check(b"mg k v\r\nmg k\r\nmg k t f v h l Oabc q\r\nme k\r\n", "r k, r k, r k, r k");
    check(b"mg k v T30\r\nmg k N30 v\r\nmg k R30 v\r\n", "w k, w k, w k");
    check(b"ms k 2 T0 F1 c\r\nhi\r\nmg k v\r\n", "w k, r k");
    check(b"ms k S2\r\nmg k v\r\n", "o, r k");
    check(b"ms k 2 b\r\nhi\r\nmg Zm9v b v\r\nmd Zm9v b q\r\n", "forget, forget, forget");
    check(b"md k\r\nma k D3\r\n", "w k, w k");
    assert_ne!(u32::from(parse([&b"md k I T30\r\n"[..]]).1.flags) & UC_STREAM_STALE, 0);
}

#[test]
fn what_memcached_refuses_leaves_no_value() {
    check(b"set k 0 0 5 noreply x\r\nget a\r\n", "o, r a");
    check(b"set k 0 0\r\nget a\r\n", "o, r a");
    check(b"set k x 0 5\r\nget a\r\nget b\r\n", "o, r a, r b");
    check(b"set k 0 0 -1\r\nget a\r\n", "o, r a");
    check(b"set k 0 0 2147483646\r\nget a\r\n", "o, r a");
    check(b"set k 0 0 99999999999999999999\r\nget a\r\n", "o, r a");
    check(b"cas k 0 0 5\r\nget a\r\n", "o, r a");
    check(&[b"set ", &[b'k'; 251][..], b" 0 0 5\r\nget a\r\n"].concat(), "o, r a");
    check(&[b"set ", &[b'k'; 250][..], b" 0 0 5\r\nget a\r\n"].concat(), &format!("w {}", "k".repeat(250)));
    check(&[b"get a ", &[b'k'; 251][..], b" b\r\nget c\r\n"].concat(), "r a, o, r c");
    check(b"\r\nget a\r\n", "o, r a");
    check(b"g\r\n \r\nget a\r\n", "o, o, r a");
}

/// Numbers are strtol's, cut to 32 bits; NUL ends a line for its reader, not for its finder.
#[test]
fn peculiarities() {
    check(b"set k 0 0 4294967301\r\n12345\r\nget b\r\n", "w k, r b");
    check(b"set k 0 0 -4294967291\r\n12345\r\nget b\r\n", "w k, r b");
    check(b"set k 0 0 \t+5\r\n12345\r\nget b\r\n", "w k, r b");
    check(b"set k 0 0 5\x0b9\r\n12345\r\nget b\r\n", "w k, r b");
    check(b"set k -5 0 5\r\nget b\r\n", "o, r b");
    check(b"set k 0 0 5\0 x y z\r\n12345\r\nget b\r\n", "w k, r b");
    check(b"get a\0 b\r\nget c\r\n", "r a, r c");
    check(b"get a\r\r\n", "r a\r");
    check(b"get a\rb\r\n", "r a\rb");
    check(b"   get    a\r\n", "r a");
}

#[test]
fn what_is_not_known_is_not_followed() {
    check(b"SET k 0 0 5\r\nget a\r\n", "lost");
    check(b"get a\r\nGET / HTTP/1.0\r\nset k 0 0 1\r\n", "r a, lost");
    check(b"\x80\x77", "");
}

#[test]
fn binary_commands() {
    check(&[request(0, b"", b"a", b""), request(0x0d, b"", b"b", b"")].concat(), "r a, r b");
    let get = request(0, b"", b"b", b"");
    for opcode in [1, 2, 3, 0x11, 0x12, 0x13] {
        check(&[&request(opcode, &[0; 8], b"k", &get)[..], &get].concat(), "w k, r b");
    }
    for opcode in [0x0e, 0x0f, 0x19, 0x1a] {
        check(&[&request(opcode, b"", b"k", b"value")[..], &get].concat(), "w k, r b");
    }
    for (opcode, extras) in [(4, 0), (0x14, 0), (5, 20), (6, 20), (0x15, 20), (0x1c, 4), (0x1d, 4), (0x24, 4)] {
        check(&[&request(opcode, &vec![0; extras], b"k", b"")[..], &get].concat(), "w k, r b");
    }
    check(&[request(8, b"", b"", b""), request(0x18, &[0, 0, 0, 7], b"", b"")].concat(), "flush 0, flush 7");
    check(&[request(0x0a, b"", b"", b""), request(0x10, b"", b"items", b"")].concat(), "o, o");
    // Errors after which memcached closes the connection, or reads on where a request does not begin.
    check(&request(0, b"", b"k", b"value"), "lost");
    check(&request(0, b"", &[b'k'; 251], b""), "lost");
    check(&request(0x77, b"", b"k", b""), "lost");
    check(&[&get[..], b"get a\r\n"].concat(), "r b, lost");
    let mut lying = request(0, b"", b"key", b"");
    lying[11] = 2;
    check(&lying, "lost");
}

/// Lines that make memcached grow its buffer, after which it may read before it obeys.
#[test]
fn long_lines_are_remembered() {
    let long = [b"get ".to_vec(), b"key ".repeat(600)].concat();
    let (_, stream) = parse([&long[..], b"\r\n", b"get a\r\n"]);
    assert_ne!(u32::from(stream.flags) & UC_STREAM_LONG, 0);
    let (_, stream) = parse([&[&long[..], b"\r\n"].concat()[..], b"get a\r\n"]);
    assert_eq!(u32::from(stream.flags) & UC_STREAM_LONG, 0);
}

#[test]
fn segmentation_does_not_matter() {
    let mut rng = StdRng::seed_from_u64(7);
    let (mut lost, mut boundary) = (0, 0);
    for _ in 0..3000 {
        let bytes = commands(&mut rng);
        let whole = parse([&bytes[..]]);
        assert_eq!(parse(bytes.chunks(1)), whole);
        for at in 0..=bytes.len() {
            assert_eq!(parse([&bytes[..at], &bytes[at..]]), whole, "{bytes:?} cut at {at}");
        }
        lost += usize::from(u32::from(whole.1.mode) == UC_MODE_LOST);
        boundary += usize::from(at_boundary(&whole.1));
    }
    assert!(lost > 50 && boundary > 1000, "{lost} lost, {boundary} whole");
}

/// The next connection's commands are seen whatever this one's were: no byte makes the parser stop.
#[test]
fn any_bytes_are_survived() {
    let mut rng = StdRng::seed_from_u64(8);
    for _ in 0..2000 {
        let mut bytes = vec![0; rng.random_range(0..400)];
        rng.fill(&mut bytes[..]);
        if rng.random_bool(0.5) {
            bytes.insert(0, 0x80);
        }
        parse(bytes.chunks(7));
    }
}
