//! Twin runs can fail: a cache with a planted bug differs from memcached, one without does not.

use std::{net::SocketAddrV4, time::Duration};

use underpass_bench::process::Directory;
use underpass_cachecheck::{
    fake::{Bug, Fake},
    server::{self, Options, PORT, Server},
    stream::{self, Speech, Stream, Template, Way},
    twin::{Difference, Twin},
    wire::opcode,
};
use underpass_rack::Rack;

const FRONT: u16 = PORT + 1;
/// What the fake takes to take something up.
const SETTLE: Duration = Duration::from_millis(3);

/// Replays streams until one differs; also how many requests the cache answered.
fn run(rack: &Rack, bug: Bug, streams: &[Stream]) -> (Option<Difference>, u64) {
    let logs = Directory::new().unwrap();
    let options = Options { still: true, ..Options::default() };
    let start = |name: &str| Server::start(&rack.host(name).unwrap(), &options, &logs).unwrap();
    let (plain, behind) = (start("plain"), start("fast"));
    let front = SocketAddrV4::new(*behind.address().ip(), FRONT);
    let (from, to) = (plain.address(), behind.address());
    let fake = rack.host("fast").unwrap().enter(|| Fake::start(front, to, bug).unwrap()).unwrap();
    let found = rack.host("client").unwrap().enter(|| {
        let mut twin = Twin::new(from, front, SETTLE).unwrap();
        streams.iter().find_map(|stream| twin.replay(stream).unwrap())
    });
    let hits = fake.hits();
    drop(fake);
    plain.end().unwrap();
    behind.end().unwrap();
    (found.unwrap(), hits)
}

fn in_rack(name: &str, test: impl FnOnce(&Rack)) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let rack = server::rack(name).unwrap();
    test(&rack);
    rack.down().unwrap();
}

fn directed(wanted: impl Fn(&Template) -> bool) -> Vec<Stream> {
    let templates = stream::templates();
    let wanted = templates.iter().enumerate().filter(|(_, template)| wanted(template));
    wanted.map(|(number, t)| stream::directed(t, Way::Tcp(t.speech), &format!("t{number}"))).collect()
}

fn found(rack: &Rack, bug: Bug, streams: &[Stream]) {
    assert!(!streams.is_empty(), "{bug:?}");
    let (difference, hits) = run(rack, bug, streams);
    assert!(hits > 0 || matches!(bug, Bug::LongAnswerDropped), "{bug:?}: the cache was never of use");
    let difference = difference.unwrap_or_else(|| panic!("{bug:?} was not noticed"));
    println!("{bug:?}: {difference}\n");
}

#[test]
fn a_cache_without_a_bug_is_no_different() {
    in_rack("sound", |rack| {
        let mut streams: Vec<Stream> = directed(|template| template.name.len() % 4 == 0);
        streams.extend((0..40).map(|seed| stream::random(seed, 60, true)));
        streams.push(stream::lifetimes("life"));
        let (difference, hits) = run(rack, Bug::None, &streams);
        assert!(difference.is_none(), "{}", difference.unwrap());
        assert!(hits > 1000, "only {hits} hits");
    });
}

#[test]
fn a_command_that_is_overlooked_is_noticed() {
    // But for ADD: it changes nothing of an item that is there. tests/histories.rs has it, where items are evicted.
    in_rack("blind", |rack| {
        let text = [
            "set ",
            "replace ",
            "append ",
            "prepend ",
            "cas ",
            "incr ",
            "decr ",
            "touch ",
            "gat ",
            "gats ",
            "delete ",
            "flush_all",
            "ms ",
            "md ",
            "ma ",
            "mg ",
        ];
        for verb in text {
            let is_meant = |t: &Template| t.speech == Speech::Text && t.request(b"k").starts_with(verb.as_bytes());
            found(rack, Bug::Blind(verb), &directed(is_meant));
        }
        use opcode::*;
        let binary = [
            SET, REPLACE, DELETE, INCREMENT, DECREMENT, FLUSH, APPEND, PREPEND, SETQ, REPLACEQ, DELETEQ, INCREMENTQ,
            DECREMENTQ, FLUSHQ, APPENDQ, PREPENDQ, TOUCH, GAT, GATQ, GATK, GATKQ,
        ];
        for opcode in binary {
            let is_meant = |t: &Template| t.speech == Speech::Binary && t.request(b"k")[1] == opcode;
            found(rack, Bug::BlindBinary(opcode), &directed(is_meant));
        }
    });
}

#[test]
fn every_other_bug_that_shows_without_a_race_is_noticed() {
    in_rack("bugs", |rack| {
        let of = |name: &'static str| directed(move |template| template.name == name);
        found(rack, Bug::OnlySet, &of("append"));
        found(rack, Bug::EachPieceAlone, &of("set"));
        found(rack, Bug::CutValue, &of("set of lines"));
        found(rack, Bug::GetsAsGet, &of("get"));
        found(rack, Bug::LongAnswerDropped, &random(200));
        found(rack, Bug::PartialAnswer, &of("get"));
        found(rack, Bug::NoExpiry, &[stream::lifetimes("life")]);
        let set = stream::templates().into_iter().find(|template| template.name == "set").unwrap();
        found(rack, Bug::BlindDatagrams, &[stream::directed(&set, Way::Udp, "udp")]);
    });
}

fn random(count: u64) -> Vec<Stream> {
    (0..count).map(|seed| stream::random(seed, 60, true)).collect()
}
