//! The XDP program answers what a memcached would, to the byte, or passes the frame on untouched. Needs root.

mod common;

use std::sync::atomic::Ordering;

use rand::{Rng, SeedableRng, rngs::StdRng};
use underpass_abi::cache::{
    UC_ANSWER_MAX, UC_BURST_MS, UC_COUNT_END, UC_GENERATION, UC_READ, UC_WRITE, uc_prefix, uc_settings,
};
use underpass_cache::{
    hash,
    kernel::{Kernel, Sizes, now_ms},
    limit,
    stats::NAMES,
    table::{Install, Item, Table},
    word,
};
use underpass_datapath::frame::{Addresses, OVERHEAD, build, checksums_hold, parse};

const PASS: u32 = 2;
const TX: u32 = 3;
const SERVER: [u8; 4] = [10, 0, 0, 1];
const REQUEST: u16 = 0x1234;
/// Of the kernel's clock: a tick, and its rounding.
const CLOCK_GRAIN_MS: u64 = 20;

struct Bed {
    kernel: Kernel,
    table: Table,
}

impl Bed {
    fn new() -> Self {
        Self::limited(0)
    }

    /// With this many bytes a millisecond for each source.
    fn limited(limit: u64) -> Self {
        let mut settings = uc_settings {
            address_count: 2,
            prefix_count: 1,
            port: 11211u16.to_be(),
            secret: [0x1234_5678_9abc_def1, 0xfeed_beef_cafe_0123],
            limit,
            ..uc_settings::default()
        };
        settings.addresses[..2].copy_from_slice(&[u32::from_ne_bytes([10, 9, 9, 9]), u32::from_ne_bytes(SERVER)]);
        settings.prefixes[0] =
            uc_prefix { addr: u32::from_ne_bytes([10, 0, 0, 0]), mask: u32::from_ne_bytes([255, 0, 0, 0]) };
        let kernel = Kernel::load(settings, Sizes::of_budget(2, 4)).unwrap();
        kernel.serve_until(u64::MAX);
        let table = Table::new(&kernel, 4);
        Self { kernel, table }
    }

    fn hash(&self, key: &[u8]) -> u64 {
        hash::hash(key, &self.kernel.settings().secret)
    }

    fn word(&self, key: &[u8]) -> &std::sync::atomic::AtomicU64 {
        let hash = self.hash(key);
        self.kernel.word(hash::set(hash, self.kernel.settings().set_mask), hash::which(hash))
    }

    fn words(&self, key: &[u8]) -> [u64; 2] {
        [self.word(key), self.kernel.global()].map(|word| word::asked(word.load(Ordering::SeqCst)))
    }

    fn install(&mut self, key: &[u8], flags: u32, cas: u64, value: &[u8]) -> Install {
        self.show(Item { key, flags, cas: Some(cas), value })
    }

    fn show(&mut self, item: Item<'_>) -> Install {
        let key = item.key;
        let words = self.words(key);
        let done = self.table.install(&mut self.kernel, &item, words, now_ms() + 60_000);
        let places = self.table.waiting();
        self.table.freed(&places);
        done
    }

    fn count(&self, name: &str) -> u64 {
        let at = NAMES.iter().position(|is| *is == name).unwrap();
        self.kernel.counters().unwrap().iter().map(|cpu: &[u64; UC_COUNT_END as usize]| cpu[at]).sum()
    }

    /// Passed on untouched, counted as `name`, or as nothing.
    #[track_caller]
    fn passes(&self, frame: &[u8], name: Option<&str>) {
        let before = name.map(|name| self.count(name));
        let (verdict, after) = self.kernel.run(frame).unwrap();
        assert_eq!(verdict, PASS);
        assert!(after == frame, "changed");
        assert_eq!(name.map(|name| self.count(name)), before.map(|count| count + 1), "{name:?}");
    }

    #[track_caller]
    fn answers(&self, frame: &[u8], text: &[u8]) {
        let (verdict, after) = self.kernel.run(frame).unwrap();
        assert_eq!(verdict, TX);
        assert_eq!(after.len(), OVERHEAD + 8 + text.len());
        assert!(checksums_hold(&after), "checksums of {text:?}");
        let (was, _) = parse(frame).unwrap();
        let (is, datagram) = parse(&after).unwrap();
        let back = Addresses {
            source_mac: was.destination_mac,
            destination_mac: was.source_mac,
            source: was.destination,
            destination: was.source,
        };
        assert_eq!(is, back);
        assert_eq!(datagram[..8], [0x12, 0x34, 0, 0, 0, 1, 0, 0]);
        assert!(datagram[8..] == *text, "{:?}", String::from_utf8_lossy(&datagram[8..]));
    }
}

fn addresses() -> Addresses {
    Addresses {
        source_mac: [2, 0, 0, 0, 0, 2],
        destination_mac: [2, 0, 0, 0, 0, 1],
        source: ([10, 0, 0, 2].into(), 40_000),
        destination: (SERVER.into(), 11211),
    }
}

fn datagram(text: &[u8]) -> Vec<u8> {
    [&REQUEST.to_be_bytes()[..], &[0, 0, 0, 1, 0, 0], text].concat()
}

fn request(command: &str, key: &[u8]) -> Vec<u8> {
    build(&addresses(), &datagram(&[command.as_bytes(), b" ", key, b"\r\n"].concat()))
}

fn answer(key: &[u8], flags: u32, cas: Option<u64>, value: &[u8]) -> Vec<u8> {
    let cas = cas.map_or(String::new(), |cas| format!(" {cas}"));
    let head = format!(" {flags} {}{cas}\r\n", value.len());
    [b"VALUE ", key, head.as_bytes(), value, b"\r\nEND\r\n"].concat()
}

/// It was taken from a set: memcached knows its number, and nobody has read it here.
#[test]
fn an_item_without_its_number_is_no_answer_to_gets() {
    let mut bed = Bed::new();
    assert_eq!(bed.show(Item { key: b"key", flags: 7, cas: None, value: b"value" }), Install::Done);
    let hash = bed.hash(b"key");
    let place = bed.kernel.way(hash::set(hash, bed.kernel.settings().set_mask), 0).load(Ordering::SeqCst) as u32;
    bed.passes(&request("gets", b"key"), Some("misses_changed"));
    assert_eq!(bed.kernel.slot(place).used, 0);
    bed.answers(&request("get", b"key"), &answer(b"key", 7, None, b"value"));
    assert_eq!(bed.kernel.slot(place).used, 1);
}

#[test]
fn answers_are_exact_at_every_length() {
    let mut bed = Bed::new();
    let mut rng = StdRng::seed_from_u64(common::seed());
    let mut too_large = 0;
    for len in 0..1400 {
        let key: Vec<u8> = (0..len % 250 + 1).map(|_| rng.random_range(0x21..=0xff)).collect();
        let mut value = vec![0; len];
        rng.fill(&mut value[..]);
        let (flags, cas) =
            (rng.random::<u32>() >> rng.random_range(0..32), rng.random::<u64>() >> rng.random_range(0..64));
        let (get, gets) = (request("get", &key), request("gets", &key));
        match bed.install(&key, flags, cas, &value) {
            Install::TooLarge => {
                assert!(answer(&key, flags, Some(cas), &value).len() > UC_ANSWER_MAX as usize);
                bed.passes(&get, Some("misses_absent"));
                too_large += 1;
            }
            _ => {
                bed.answers(&get, &answer(&key, flags, None, &value));
                bed.answers(&gets, &answer(&key, flags, Some(cas), &value));
            }
        }
    }
    assert!(too_large > 100, "{too_large}");
    // Pieces that begin at odd and even offsets, of odd and even lengths, one by one.
    for key_len in 1..=250 {
        for value_len in 0..4 {
            let key: Vec<u8> = (0..key_len).map(|_| rng.random_range(0x21..=0xff)).collect();
            let value: Vec<u8> = (0..value_len).map(|_| rng.random()).collect();
            let cas = 10u64.pow(key_len % 18) + u64::from(key_len);
            bed.install(&key, key_len, cas, &value);
            bed.answers(&request("get", &key), &answer(&key, key_len, None, &value));
            bed.answers(&request("gets", &key), &answer(&key, key_len, Some(cas), &value));
        }
    }
}

/// A UDP checksum of 0 would say that there is none.
#[test]
fn a_checksum_of_zero_is_sent_as_its_other_form() {
    let mut bed = Bed::new();
    bed.install(b"key", 7, 1, b"value");
    let checksum = |number: u16| {
        let text = [&number.to_be_bytes()[..], &[0, 0, 0, 1, 0, 0], b"get key\r\n"].concat();
        let (verdict, frame) = bed.kernel.run(&build(&addresses(), &text)).unwrap();
        assert_eq!(verdict, TX);
        assert!(checksums_hold(&frame));
        u16::from_be_bytes([frame[40], frame[41]])
    };
    // What is left to the sum of all ones, of a request whose number adds nothing, is the number that makes it so.
    assert_eq!(checksum(checksum(0)), 0xffff);
}

#[test]
fn an_item_is_served_only_while_its_words_are_what_they_were() {
    let mut bed = Bed::new();
    let get = request("get", b"key");
    let served = answer(b"key", 7, None, b"value");
    assert_eq!(bed.install(b"key", 7, 1, b"value"), Install::Done);
    bed.answers(&get, &served);

    let (write, read) = (UC_WRITE as u64, UC_READ as u64);
    bed.word(b"key").fetch_add(read, Ordering::SeqCst);
    bed.passes(&get, Some("misses_in_flight"));
    bed.word(b"key").fetch_sub(read, Ordering::SeqCst);
    bed.answers(&get, &served);
    bed.word(b"key").fetch_add(UC_GENERATION + write, Ordering::SeqCst);
    bed.passes(&get, Some("misses_in_flight"));
    bed.word(b"key").fetch_sub(write, Ordering::SeqCst);
    bed.passes(&get, Some("misses_changed"));
    bed.install(b"key", 7, 1, b"value");
    bed.answers(&get, &served);

    bed.kernel.global().fetch_add(UC_GENERATION + write, Ordering::SeqCst);
    bed.passes(&get, Some("passed_not_serving"));
    bed.kernel.global().fetch_sub(write, Ordering::SeqCst);
    bed.passes(&get, Some("misses_changed"));
    bed.install(b"key", 7, 1, b"value");
    bed.answers(&get, &served);

    // Its clock has the grain of a tick.
    bed.kernel.serve_until(now_ms() - 20);
    bed.passes(&get, Some("passed_not_serving"));
    bed.kernel.serve_until(u64::MAX);
    bed.answers(&get, &served);

    let words = bed.words(b"brief");
    let item = Item { key: b"brief", flags: 0, cas: Some(1), value: b"" };
    bed.table.install(&mut bed.kernel, &item, words, now_ms() + 300);
    bed.answers(&request("get", b"brief"), &answer(b"brief", 0, None, b""));
    std::thread::sleep(std::time::Duration::from_millis(360));
    bed.passes(&request("get", b"brief"), Some("misses_expired"));
}

#[test]
fn everything_else_is_passed_on_untouched() {
    let mut bed = Bed::new();
    bed.install(b"key", 0, 1, b"value");
    let whole = request("get", b"key");
    bed.answers(&whole, &answer(b"key", 0, None, b"value"));

    let other = Some("passed_other_request");
    for text in [
        &b"get key\n"[..],
        b"get  key\r\n",
        b"get key \r\n",
        b"get key key\r\n",
        b"get key\r\nget key\r\n",
        b"GET key\r\n",
        b"get key",
        b"get key\r",
        b"get \r\n",
        b"gat 0 key\r\n",
        b"getx key\r\n",
        b"set key 0 0 1\r\nx\r\n",
        b"mg key v\r\n",
        b"\x80\x00\x00\x03\x00\x00\x00\x00",
        b"get key\0\r\n",
    ] {
        bed.passes(&build(&addresses(), &datagram(text)), other);
    }
    bed.passes(&request("get", &[b'k'; 251]), other);
    bed.passes(&build(&addresses(), &datagram(&[b"get ", &[b'k'; 600][..], b"\r\n"].concat())), other);
    let several = [&REQUEST.to_be_bytes()[..], &[0, 0, 0, 2, 0, 0], b"get key\r\n"].concat();
    bed.passes(&build(&addresses(), &several), other);
    bed.passes(&build(&addresses(), b"1234567"), other);

    // Frames that the network stack would drop, or that are not for memcached.
    let bent = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = whole.clone();
        change(&mut frame);
        frame
    };
    bed.passes(&bent(&|f| f[OVERHEAD + 14] ^= 1), other);
    bed.passes(&bent(&|f| f[40] ^= 1), other);
    bed.passes(&bent(&|f| f[24] ^= 1), other);
    bed.passes(&bent(&|f| f[17] += 1), other);
    bed.passes(&bent(&|f| f[39] += 1), other);
    bed.passes(&bent(&|f| f.truncate(f.len() - 1)), other);
    for change in [
        &(|f: &mut Vec<u8>| f[12..14].copy_from_slice(&[0x86, 0xdd])) as &dyn Fn(&mut Vec<u8>),
        &|f| f[12..14].copy_from_slice(&[0x81, 0]),
        // An answer's sender would be everybody, or many.
        &|f| f[..6].fill(0xff),
        &|f| f[0] |= 1,
        &|f| f[14] = 0x46,
        &|f| f[14] = 0x65,
        &|f| f[20] = 0x20,
        &|f| f[21] = 1,
        &|f| f[23] = 6,
        &|f| f[30] = 11,
        &|f| f[37] ^= 1,
        &|f| f.truncate(30),
    ] {
        bed.passes(&bent(change), None);
    }

    // The same in frames that are whole but for what they are: their checksums hold.
    let tagged = bent(&|f| drop(f.splice(12..12, [0x81, 0, 0, 7])));
    bed.passes(&tagged, None);
    let stacked = bent(&|f| drop(f.splice(12..12, [0x88, 0xa8, 0, 7, 0x81, 0, 0, 7])));
    bed.passes(&stacked, None);
    let options = |words: u8| {
        bent(&|f| {
            f.splice(34..34, vec![1; 4 * usize::from(words)]);
            f[14] += words;
            f[17] += 4 * words;
            sum_ip(f);
        })
    };
    (1..=10).for_each(|words| bed.passes(&options(words), None));
    // A header of another length whose checksum holds for one who does not look at the length.
    for ihl in [0x40, 0x44, 0x46, 0x4f] {
        let frame = bent(&|f| {
            f[14] = ihl;
            sum_bytes(f, 34);
            f[40..42].fill(0);
        });
        bed.passes(&frame, None);
    }
    for change in [
        &(|f: &mut Vec<u8>| f[12..14].copy_from_slice(&[0x86, 0xdd])) as &dyn Fn(&mut Vec<u8>),
        // More fragments; the last one; a reserved bit; both.
        &|f| f[20] = 0x20,
        &|f| f[20..22].copy_from_slice(&[0, 1]),
        &|f| f[20..22].copy_from_slice(&[0x1f, 0xff]),
        &|f| f[20..22].copy_from_slice(&[0x20, 0xb9]),
        &|f| f[14] = 0x55,
        &|f| f[14] = 0x44,
        &|f| f[23] = 6,
        &|f| f[23] = 136,
        &|f| f[30..34].copy_from_slice(&[10, 0, 0, 9]),
        &|f| f[36..38].copy_from_slice(&11212u16.to_be_bytes()),
    ] {
        bed.passes(
            &bent(&|f| {
                change(f);
                sum_ip(f);
                f[40..42].fill(0);
            }),
            None,
        );
    }
    // Lengths that lie, of frames that have all the bytes: IP's, UDP's, both.
    let lying = |ip: i16, udp: i16| {
        bent(&|f| {
            f.extend([b'x'; 64]);
            for (at, by) in [(16, ip), (38, udp)] {
                let len = i16::from_be_bytes([f[at], f[at + 1]]) + by;
                f[at..at + 2].copy_from_slice(&len.to_be_bytes());
            }
            sum_ip(f);
            f[40..42].fill(0);
        })
    };
    bed.answers(&lying(0, 0), &answer(b"key", 0, None, b"value"));
    for by in (-25..64).filter(|by| *by != 0) {
        bed.passes(&lying(by, 0), other);
        bed.passes(&lying(0, by), other);
        bed.passes(&lying(by, by), other);
    }
    bed.passes(&lying(1000, 1000), other);
    // Cut anywhere.
    for len in 14..whole.len() {
        let named = if len < OVERHEAD { None } else { other };
        bed.passes(&whole[..len], named);
    }

    // An Ethernet trailer is not part of the request; a missing checksum is none, and half a one is a frame from this host.
    let padded = bent(&|f| f.extend([0xee; 20]));
    bed.answers(&padded, &answer(b"key", 0, None, b"value"));
    bed.answers(&bent(&|f| f[40..42].fill(0)), &answer(b"key", 0, None, b"value"));
}

/// The IP header's checksum, of what it says now.
fn sum_ip(frame: &mut [u8]) {
    sum_bytes(frame, 14 + 4 * usize::from(frame[14] & 15));
}

fn sum_bytes(frame: &mut [u8], end: usize) {
    frame[24..26].fill(0);
    let mut sum: u32 = frame[14..end].chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    frame[24..26].copy_from_slice(&(!sum as u16).to_be_bytes());
}

/// A key of 24 bytes, one that begins as it does, and one that goes on after it, all with the same hash: the same set, word
/// and tag.
fn alike(secret: &[u64; 2]) -> [Vec<u8>; 3] {
    let odd = secret[1] | 1;
    // Of an odd number, right in 3 bits, and in twice as many after each step.
    let inverse = (0..5).fold(odd, |x, _| x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x))));
    let mix = |hash: u64, word: u64| {
        let hash = (hash ^ word).wrapping_mul(odd);
        hash ^ hash >> 29
    };
    let unmix = |hash: u64| (hash ^ hash >> 29 ^ hash >> 58).wrapping_mul(inverse);
    let key = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let spelt = |word: u64| word.to_le_bytes().iter().all(|&b| b > 0x20);
    let text =
        |n: u64| u64::from_str_radix(&format!("{n:08x}").bytes().map(|b| format!("{b:02x}")).collect::<String>(), 16);
    let start = mix(secret[0], text(0).unwrap());
    for n in 0..10_000 {
        let [head, other, tail] = [n, n + 10_000, n + 20_000].map(|n| text(n).unwrap());
        let state = mix(mix(start, head), tail);
        let other_tail = mix(start, head) ^ mix(start, other) ^ tail;
        // What the state must be before the length is added, one word on.
        let more = unmix(state ^ 24 ^ 32) ^ state;
        if spelt(other_tail) && spelt(more) {
            let first = text(0).unwrap();
            return [key(&[first, head, tail]), key(&[first, other, other_tail]), key(&[first, head, tail, more])];
        }
    }
    panic!("one in nine will do");
}

#[test]
fn keys_are_told_apart_by_all_their_bytes() {
    let keys = alike(&Bed::new().kernel.settings().secret);
    for shown in &keys {
        let mut bed = Bed::new();
        assert_eq!(keys.each_ref().map(|key| bed.hash(key)), [bed.hash(shown); 3]);
        bed.install(shown, 1, 1, b"value");
        for key in &keys {
            match key == shown {
                true => bed.answers(&request("get", key), &answer(key, 1, None, b"value")),
                false => bed.passes(&request("get", key), Some("misses_absent")),
            }
        }
        for key in &keys {
            bed.install(key, 2, 2, key);
        }
        keys.iter().for_each(|key| bed.answers(&request("get", key), &answer(key, 2, None, key)));
        // They share a word: what changes one may have changed the others.
        bed.word(shown).fetch_add(UC_GENERATION, Ordering::SeqCst);
        keys.iter().for_each(|key| bed.passes(&request("get", key), Some("misses_changed")));
    }
}

#[test]
fn answers_longer_than_the_request_go_to_trusted_addresses() {
    let mut bed = Bed::new();
    bed.install(b"key", 0, 1, b"value");
    let from = |source: [u8; 4]| Addresses { source: (source.into(), 40_000), ..addresses() };
    let text = datagram(b"get key\r\n");
    bed.passes(&build(&from([11, 0, 0, 2]), &text), Some("passed_untrusted"));
    bed.answers(&build(&from([10, 200, 0, 2]), &text), &answer(b"key", 0, None, b"value"));
}

/// The kernel's limit is the pure one: from any level, at some time between before and after, to the same verdict and level.
#[test]
fn the_limit_is_a_refinement() {
    let mut rng = StdRng::seed_from_u64(common::seed());
    let (mut sent, mut held) = (0, 0);
    for limit in [1, 10, 1000, limit::MBIT_MAX].map(|mbit| mbit * limit::MBIT) {
        let mut bed = Bed::limited(limit);
        let keys: Vec<Vec<u8>> = (0..8).map(|n| format!("key{n}").into_bytes()).collect();
        for (n, key) in keys.iter().enumerate() {
            bed.install(key, 0, 1, &vec![b'v'; n * 170]);
        }
        for _ in 0..2000 {
            let n = rng.random_range(0..keys.len());
            let source = std::net::Ipv4Addr::from([10, rng.random(), rng.random(), rng.random()]);
            let frame = build(
                &Addresses { source: (source, 40_000), ..addresses() },
                &datagram(&[&b"get "[..], &keys[n], b"\r\n"].concat()),
            );
            let bytes = answer(&keys[n], 0, None, &vec![b'v'; n * 170]).len() + OVERHEAD + 8;
            let bucket = limit::bucket(source, &bed.kernel.settings().secret);
            let burst = UC_BURST_MS as u64 * limit;
            let before = now_ms() - CLOCK_GRAIN_MS;
            let level = match rng.random_range(0..4) {
                0 => rng.random_range(0..before * limit),
                1 => before * limit + burst - rng.random_range(0..burst.min(3000) + 1),
                2 => u64::MAX / 2,
                _ => before * limit + rng.random_range(0..2 * burst),
            };
            bed.kernel.set_source(bucket, level).unwrap();
            let counted = bed.count("passed_limit");
            let verdict = bed.kernel.run(&frame).unwrap().0;
            let after = bed.kernel.source(bucket).unwrap();
            assert_eq!(bed.count("passed_limit") - counted, u64::from(verdict == PASS), "{verdict}");
            let same = |now: u64| limit::take(level, limit, now, bytes as u64) == (after, verdict == TX);
            assert!(
                (before..=now_ms() + CLOCK_GRAIN_MS).any(same),
                "limit {limit}: {bytes} bytes at {before}: {level} to {after}, {verdict}"
            );
            *(if verdict == TX { &mut sent } else { &mut held }) += 1;
        }
    }
    assert!(sent > 1000 && held > 1000, "{sent} answered, {held} passed on");
}

/// Every source has a limit of its own, and gets more with time.
#[test]
fn a_source_that_had_its_share_is_passed_on() {
    let limit = limit::MBIT;
    let mut bed = Bed::limited(limit);
    bed.install(b"key", 0, 1, b"value");
    let from = |source: [u8; 4]| Addresses { source: (source.into(), 40_000), ..addresses() };
    let get = |key: &[u8]| datagram(&[b"get ", key, b"\r\n"].concat());
    let (frame, served) = (build(&from([10, 0, 0, 7]), &get(b"key")), answer(b"key", 0, None, b"value"));
    let bytes = (OVERHEAD + 8 + served.len()) as u64;
    let started = now_ms();
    let answered =
        (0..3 * UC_BURST_MS as u64 * limit / bytes).filter(|_| bed.kernel.run(&frame).unwrap().0 == TX).count() as u64;
    let most = (UC_BURST_MS as u64 + now_ms() - started + CLOCK_GRAIN_MS) * limit / bytes;
    assert!((UC_BURST_MS as u64 * limit / bytes..=most).contains(&answered), "{answered} answered, {most} at most");
    bed.answers(&build(&from([10, 0, 0, 8]), &get(b"key")), &served);
    std::thread::sleep(std::time::Duration::from_millis(40));
    bed.answers(&frame, &served);
}

/// A directory that is much too small, and more kinds of items than pages: what is served is always right.
#[test]
fn a_full_table_serves_no_wrong_item() {
    let mut bed = Bed::new();
    let mut rng = StdRng::seed_from_u64(common::seed());
    let value = |n: u32, version: u32| vec![(n ^ version) as u8; (n * 37 % 1300) as usize];
    let mut last = std::collections::HashMap::new();
    let (mut served, mut evicted) = (0, 0);
    for version in 0..40_000u32 {
        let n: u32 = rng.random_range(0..6000);
        let key = format!("key{n}");
        if rng.random_bool(0.5) {
            match bed.install(key.as_bytes(), n, u64::from(version), &value(n, version)) {
                Install::NoSlot => continue,
                Install::Evicted => evicted += 1,
                _ => {}
            }
            last.insert(n, version);
        } else {
            let (verdict, frame) = bed.kernel.run(&request("get", key.as_bytes())).unwrap();
            if verdict == TX {
                let expected = answer(key.as_bytes(), n, None, &value(n, last[&n]));
                assert!(parse(&frame).unwrap().1[8..] == expected, "{key}");
                served += 1;
            }
        }
    }
    assert!(served > 1000 && evicted > 100, "{served} served, {evicted} evicted");
    assert!(bed.table.entries() > 500);
}
