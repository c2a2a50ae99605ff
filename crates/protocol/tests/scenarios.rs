//! Golden scenarios: stories of one shard, one for each hole of docs/protocol.md, section 9, that this protocol closes.
//!
//! A file in `scenarios/` is read from top to bottom. Lines with `#` are for people. A command is followed by what it brings
//! about, in lines that begin with `>`; these are compared literally, and `UNDERPASS_UPDATE=1` rewrites them, for review.
//! After every command every invariant must hold.
//!
//! The last command of a file, `published SWITCH... violates CHECK...`, runs the story again with what published protocols
//! do. What is said is then not compared, and commands about packets that are not there are passed over; but each named
//! check must find a violation, or the scenario shows nothing.

mod common;

use std::{collections::BTreeMap, fs, path::Path};

use common::world::World;
use underpass_protocol::{coordinator, replica};

/// One command with the lines before it that are for people, and what it is said to bring about.
#[derive(Default)]
struct Block {
    prose: Vec<String>,
    command: String,
    line: usize,
    expected: Vec<String>,
}

fn parse(text: &str) -> (Vec<Block>, Vec<String>) {
    let mut blocks: Vec<Block> = vec![];
    let mut prose = vec![];
    for (at, line) in text.lines().enumerate() {
        if let Some(expected) = line.strip_prefix("> ") {
            blocks.last_mut().expect("a command comes before its output").expected.push(expected.to_owned());
        } else if line.trim().is_empty() || line.starts_with('#') {
            prose.push(line.to_owned());
        } else {
            let prose = std::mem::take(&mut prose);
            blocks.push(Block { prose, command: line.to_owned(), line: at + 1, expected: vec![] });
        }
    }
    (blocks, prose)
}

/// Switches by name, for the coordinator and for replicas.
fn switches(words: &[&str]) -> (coordinator::Published, replica::Published) {
    let mut coordinator = coordinator::Published::default();
    let mut replica = replica::Published::default();
    for word in words {
        *match *word {
            "count_acks" => &mut coordinator.count_acks,
            "residual_count" => &mut coordinator.residual_count,
            "uncommitted_read" => &mut coordinator.uncommitted_read,
            "late_read" => &mut coordinator.late_read,
            "clear_early" => &mut coordinator.clear_early,
            "shared_conditional" => &mut coordinator.shared_conditional,
            "two_slots" => &mut coordinator.two_slots,
            "retry_is_new" => &mut coordinator.retry_is_new,
            "bound_first" => &mut coordinator.bound_first,
            "look_first" => &mut coordinator.look_first,
            "finish_first" => &mut coordinator.finish_first,
            "ignore_bound" => &mut replica.ignore_bound,
            "forget_sessions" => &mut replica.forget_sessions,
            "ignore_loser" => &mut replica.ignore_loser,
            other => panic!("no published behaviour is called {other}"),
        } = true;
    }
    (coordinator, replica)
}

/// Runs the story with published behaviours; what the named checks found first, or a panic if one found nothing.
fn run_published(name: &str, blocks: &[Block], command: &str) -> Vec<String> {
    let words: Vec<_> = command.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    let split = words.iter().position(|word| *word == "violates").expect("published SWITCH... violates CHECK...");
    let (coordinator, replica) = switches(&words[1..split]);
    let mut world = World::new(coordinator, replica);
    let mut found = BTreeMap::new();
    for block in blocks.iter().filter(|block| !block.command.starts_with("published")) {
        // A packet that this protocol sends and the published one does not cannot be delivered.
        let _ = world.run(&block.command);
        for (check, what) in world.broken() {
            found.entry(check).or_insert_with(|| format!("{check}, after \"{}\": {what}", block.command));
        }
    }
    let named = &words[split + 1..];
    assert!(!named.is_empty(), "{name}: {command}: which check?");
    let all: Vec<_> = found.keys().copied().collect();
    let line = |check: &&str| {
        found
            .get(*check)
            .cloned()
            .unwrap_or_else(|| panic!("{name}: {command}: {check} found nothing; only {all:?} did"))
    };
    named.iter().map(line).collect()
}

fn run(path: &Path) {
    let name = path.file_name().expect("a file").to_string_lossy().into_owned();
    let text = fs::read_to_string(path).expect("a readable scenario");
    let update = std::env::var_os("UNDERPASS_UPDATE").is_some();
    let (blocks, rest) = parse(&text);
    let mut world = World::new(coordinator::Published::default(), replica::Published::default());
    let mut out = String::new();
    let mut judged = false;
    for block in &blocks {
        let at = format!("{name}:{}: {}", block.line, block.command);
        let lines = if block.command.starts_with("published") {
            judged = true;
            run_published(&name, &blocks, &block.command)
        } else {
            assert!(!judged, "{at}: the published run comes last");
            let lines = world.run(&block.command).unwrap_or_else(|why| panic!("{at}: {why}"));
            let broken = world.broken();
            assert!(broken.is_empty(), "{at}: {broken:?}");
            lines
        };
        for line in &block.prose {
            out += &format!("{line}\n");
        }
        out += &format!("{}\n", block.command);
        for line in &lines {
            out += &format!("> {line}\n");
        }
        if !update {
            assert_eq!(lines, block.expected, "{at}\n(UNDERPASS_UPDATE=1 rewrites the file: review what changes)");
        }
    }
    assert!(judged, "{name} does not say which published behaviour it is about");
    for line in rest {
        out += &format!("{line}\n");
    }
    if update {
        fs::write(path, out).expect("a writable scenario");
    }
}

#[test]
fn every_hole_stays_closed_and_every_check_can_fail() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let mut paths: Vec<_> = fs::read_dir(folder).expect("tests/scenarios").map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
    paths.sort();
    let names: Vec<_> = paths.iter().map(|path| path.file_name().unwrap().to_string_lossy()[..2].to_owned()).collect();
    // Holes 8 to 10 and 14 on are of configurations that change, and of other data paths.
    for hole in [1, 2, 3, 4, 5, 6, 7, 11, 12, 13] {
        assert!(names.contains(&format!("{hole:02}")), "hole {hole} has no scenario");
    }
    for path in paths {
        println!("{}", path.display());
        run(&path);
    }
}
