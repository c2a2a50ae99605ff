//! What clients of memcached are told is linearizable; of a cache with a planted bug it is not.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
};

use underpass_bench::process::Directory;
use underpass_cachecheck::{
    fake::{Bug, Fake},
    mixed::{self, Judged, Mix, Place},
    server::{self, Options, PORT, Server},
};

const FRONT: u16 = PORT + 1;

/// `None`: memcached alone.
fn judge(name: &str, bug: Option<Bug>, mix: &Mix) -> Judged {
    let rack = server::rack(name).unwrap();
    if mix.lossy {
        server::make_rough(&rack).unwrap();
    }
    let logs = Directory::new().unwrap();
    // The least that memcached takes, where it is to evict.
    let memory_mib = if mix.pressure > 0 { 2 } else { 64 };
    let options = Options { threads: 4, memory_mib, still: false };
    let host = rack.host("fast").unwrap();
    let server = Server::start(&host, &options, &logs).unwrap();
    let (behind, front) = (server.address(), SocketAddrV4::new(host.addr, FRONT));
    let fake = bug.map(|bug| host.enter(|| Fake::start(front, behind, bug).unwrap()).unwrap());
    let place = Place {
        client: rack.host("client").unwrap(),
        front: if bug.is_some() { front } else { behind },
        server: (host, SocketAddrV4::new(Ipv4Addr::LOCALHOST, PORT)),
    };
    let judged = mixed::run(mix, &place).unwrap();
    println!("{name}: {} operations, {} without an answer", judged.operations, judged.unknown);
    if let Some(fake) = &fake {
        println!("{name}: {} hits", fake.hits());
        assert!(fake.hits() > 500, "{name}: the cache was of little use: {} hits", fake.hits());
    }
    let evictions = host_stats(&rack, "evictions");
    println!("{name}: {evictions} evictions");
    assert!(mix.pressure == 0 || evictions > 1000, "{name}: there was no pressure: {evictions} evictions");
    drop(fake);
    server.end().unwrap();
    rack.down().unwrap();
    judged
}

/// A counter of the memcached on the host `fast`.
fn host_stats(rack: &underpass_rack::Rack, name: &str) -> u64 {
    let text = rack.host("fast").unwrap().enter(|| {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, PORT)).unwrap();
        stream.write_all(b"stats\r\nquit\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    });
    let line = format!("STAT {name} ");
    text.unwrap().lines().find_map(|text| text.strip_prefix(&line)?.trim().parse().ok()).unwrap()
}

fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root");
    }
    root
}

fn sound(name: &str, bug: Option<Bug>, mix: &Mix) {
    if is_root() {
        let judged = judge(name, bug, mix);
        assert!(judged.found > 1000 && judged.missed > 100, "{} found, {} missed", judged.found, judged.missed);
        if let Some(report) = judged.bad.first() {
            panic!("{report}\nThe history is {}", judged.keep(name).unwrap().display());
        }
    }
}

fn caught(name: &str, bug: Bug, mix: &Mix) {
    if is_root() {
        let judged = judge(name, Some(bug), &Mix { rounds: 20, ..mix.clone() });
        let report = judged.bad.first().unwrap_or_else(|| panic!("{bug:?} was not noticed"));
        println!("{bug:?}: {report}");
        assert!(report.violating_keys > 0, "{report}");
    }
}

fn all() -> Mix {
    Mix { local: 2, rounds: 3, ..Mix::default() }
}

fn pressure() -> Mix {
    Mix { pressure: 2, udp: 6, keys: 300, ..Mix::default() }
}

#[test]
fn memcached_is_linearizable() {
    sound("plain", None, &all());
    sound("plain-lives", None, &Mix { lifetimes: true, operations: 8000, ..all() });
    sound("plain-evicts", None, &pressure());
    sound("plain-flushes", None, &Mix { flushes: true, ..all() });
    sound("plain-rough", None, &Mix { local: 2, operations: 1000, lossy: true, ..Mix::default() });
}

#[test]
fn so_is_a_cache_without_a_bug() {
    sound("none", Some(Bug::None), &Mix { local: 0, ..all() });
    sound("none-evicts", Some(Bug::None), &pressure());
    sound("none-flushes", Some(Bug::None), &Mix { local: 0, flushes: true, ..all() });
    sound("none-rough", Some(Bug::None), &Mix { operations: 1000, lossy: true, ..Mix::default() });
}

#[test]
fn a_fill_that_a_write_overtook_is_noticed() {
    caught("stale", Bug::StaleFill, &Mix::default());
}

#[test]
fn a_fill_from_before_a_write_in_flight_is_noticed() {
    caught("flight", Bug::InFlightServed, &Mix::default());
}

#[test]
fn an_eviction_that_is_undone_is_noticed() {
    caught("reads", Bug::ReadsLeave, &pressure());
}

#[test]
fn an_add_in_the_place_of_what_was_evicted_is_noticed() {
    caught("add", Bug::Blind("add "), &Mix { tcp: [4, 0, 0], ..pressure() });
}

#[test]
fn a_writer_on_the_same_host_that_is_not_seen_is_noticed() {
    // Local clients pass the fake by.
    caught("local", Bug::None, &Mix { local: 3, ..Mix::default() });
}
