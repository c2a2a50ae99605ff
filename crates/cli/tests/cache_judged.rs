//! The cache, judged from outside: whatever clients do, memcached with it answers as memcached without, and what concurrent
//! clients are told is linearizable.

use std::time::Duration;

use underpass_bench::process::Directory;
use underpass_cachecheck::{
    judge::{Verdict, judge},
    mixed::Mix,
    server::{self, Options, Server},
    stream::{self, Speech, Stream, Way},
    twin::Twin,
};

/// What the cache takes to take up what was missed.
const SETTLE: Duration = Duration::from_millis(1);

/// Items that the cache answered with by itself.
fn hits(server: &Server) -> u64 {
    let stats = server.stats().unwrap();
    stats["kernel"]["hits"].as_u64().unwrap_or_else(|| panic!("no count of hits in {stats}"))
}

fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root");
    }
    root
}

/// A number for repeated runs, from the environment.
fn count(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

/// The cache must answer something in nine of ten streams of which that can be said (it may pause: after a flush, say), and so
/// much in all of them.
fn no_different(name: &str, streams: &[(Stream, bool)], hits_min: u64) {
    if !is_root() {
        return;
    }
    let rack = server::rack(name).unwrap();
    let logs = Directory::new().unwrap();
    let options = Options { still: true, ..Options::default() };
    let start = |name: &str| Server::start(&rack.host(name).unwrap(), &options, &logs).unwrap();
    let (plain, mut fast) = (start("plain"), start("fast"));
    fast.attach(&[]).unwrap();
    let (from, to) = (plain.address(), fast.address());
    let client = rack.host("client").unwrap();
    let mut twin = client.enter(|| Twin::new(from, to, SETTLE).unwrap()).unwrap();
    let (mut before, mut idle) = (0, Vec::new());
    for (stream, useful) in streams {
        if let Some(difference) = client.enter(|| twin.replay(stream).unwrap()).unwrap() {
            panic!("{difference}\n{:#}", fast.stats().unwrap());
        }
        let now = hits(&fast);
        if *useful && now == before {
            idle.push(&stream.name[..]);
        }
        before = now;
    }
    let useful = streams.iter().filter(|(_, useful)| *useful).count();
    assert!(idle.len() * 10 <= useful, "no hits in {idle:?}: {:#}", fast.stats().unwrap());
    assert!(before >= hits_min, "only {before} hits: {:#}", fast.stats().unwrap());
    println!("{name}: {} answers are the same, {before} of them from the cache", twin.compared);
    plain.end().unwrap();
    fast.end().unwrap();
    rack.down().unwrap();
}

#[test]
fn every_command_with_every_segmentation() {
    let templates = stream::templates();
    let streams: Vec<(Stream, bool)> = templates
        .iter()
        .enumerate()
        .flat_map(|(number, template)| {
            let mut all = vec![stream::directed(template, Way::Tcp(template.speech), &format!("t{number}"))];
            if template.speech == Speech::Text && template.request(b"k").len() < 1300 {
                all.push(stream::directed(template, Way::Udp, &format!("u{number}")));
            }
            all.into_iter().map(|stream| (stream, !template.marks_stale()))
        })
        .collect();
    no_different("cache-commands", &streams, 5000);
}

#[test]
fn anything_in_any_order() {
    let streams = (0..count("UNDERPASS_STREAMS", 150)).map(|seed| (stream::random(seed, 60, true), false));
    no_different("cache-random", &streams.collect::<Vec<_>>(), 500);
}

#[test]
fn lifetimes_end() {
    no_different("cache-lifetimes", &[(stream::lifetimes("life"), true)], 10);
}

fn linearizable(name: &str, mix: &Mix, hits_min: u64) {
    if !is_root() {
        return;
    }
    let mix = Mix { rounds: count("UNDERPASS_ROUNDS", mix.rounds as u64) as usize, ..mix.clone() };
    let Verdict { judged, hits, stats } = judge(name, &mix, |rounds, _| rounds == mix.rounds).unwrap();
    println!(
        "{name}: {} operations, {} of them without an answer; {hits} reads answered by the cache",
        judged.operations, judged.unknown
    );
    if let Some(report) = judged.bad.first() {
        panic!("{report}\nThe history is {}\n{stats:#}", judged.keep(name).unwrap().display());
    }
    assert!(hits > hits_min, "the cache was of little use: {stats:#}");
}

fn all() -> Mix {
    Mix { local: 2, rounds: 5, ..Mix::default() }
}

#[test]
fn what_all_clients_are_told_is_linearizable() {
    linearizable("cache-mixed", &all(), 2000);
}

#[test]
fn also_when_frames_are_lost_and_overtaken() {
    linearizable("cache-rough", &Mix { lossy: true, operations: 1000, ..all() }, 500);
}

#[test]
fn also_when_items_expire() {
    linearizable("cache-lives", &Mix { lifetimes: true, operations: 8000, rounds: 2, ..all() }, 1000);
}

#[test]
fn also_when_memcached_evicts() {
    linearizable("cache-evicts", &Mix { pressure: 2, udp: 6, keys: 300, local: 2, rounds: 5, ..Mix::default() }, 500);
}

#[test]
fn also_when_everything_is_flushed() {
    linearizable("cache-flushes", &Mix { flushes: true, ..all() }, 1000);
}
