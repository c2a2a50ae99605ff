//! `underpass demo` and `underpass bench`, made small: that they run, that their results are complete, that what they
//! started is gone afterwards. Never how fast anything is.

use std::{
    fs,
    io::Read,
    path::Path,
    process::{Command, Output, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, geteuid},
};
use serde_json::Value;

fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_underpass"));
    command.args(line.split_whitespace());
    command
}

fn text(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs it, and returns what it wrote as JSON if the line names a file for that.
fn run(line: &str) -> String {
    let output = command(line).output().unwrap();
    let said = text(&output);
    assert!(output.status.success(), "underpass {line}: {}\n{said}", output.status);
    said
}

fn results(line: &str, folder: &Path) -> Value {
    let json = folder.join("results.json");
    run(&format!("{line} --json {}", json.display()));
    serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap()
}

/// What a process of this number may have left: namespaces, pinned maps, state files, temporary directories.
fn left_of(process: u32) -> Vec<String> {
    let number = process.to_string();
    ["/run/netns", "/run/underpass", "/sys/fs/bpf", "/sys/fs/bpf/underpass-rack", "/tmp"]
        .iter()
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flat_map(|entries| entries.flatten())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.split(['-', '.']).any(|part| part == number))
        .collect()
}

/// One at a time: each takes the machine's cores for itself, some with real-time threads. `None` without root.
fn machine() -> Option<MutexGuard<'static, ()>> {
    static MACHINE: Mutex<()> = Mutex::new(());
    if !geteuid().is_root() {
        eprintln!("skipped: needs root");
        return None;
    }
    Some(MACHINE.lock().unwrap_or_else(PoisonError::into_inner))
}

const DEMO: &str = "demo --items 3000 --seconds 0.3 --concurrency 16";

#[test]
fn the_demo_shows_checks_and_leaves_nothing() {
    let Some(_machine) = machine() else { return };
    let child = command(DEMO).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let process = child.id();
    let output = child.wait_with_output().unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    for part in ["xdp", "socket", "uniform", "zipf0.99", "linearizable: one order", "Nothing is left"] {
        assert!(said.contains(part), "{part} is missing in\n{said}");
    }
    assert_eq!(left_of(process), Vec::<String>::new());
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    let Some(_machine) = machine() else { return };
    let mut child = command("demo --items 20000 --seconds 20").stderr(Stdio::piped()).spawn().unwrap();
    let mut progress = child.stderr.take().unwrap();
    let mut said = Vec::new();
    // Far enough for everything to be up.
    while !String::from_utf8_lossy(&said).contains("at a time") {
        let mut buffer = [0; 256];
        let len = progress.read(&mut buffer).unwrap();
        assert_ne!(len, 0, "it ended early: {}", String::from_utf8_lossy(&said));
        said.extend(&buffer[..len]);
    }
    let drain = thread::spawn(move || {
        let mut rest = String::new();
        let _ = progress.read_to_string(&mut rest);
        rest
    });
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < until, "it does not end");
        thread::sleep(Duration::from_millis(20));
    };
    let rest = drain.join().unwrap();
    assert!(!status.success() && rest.contains("interrupted"), "{status}: {rest}");
    assert_eq!(left_of(child.id()), Vec::<String>::new());
}

#[test]
fn coordinators_are_compared_on_every_path() {
    let Some(_machine) = machine() else { return };
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("plot.svg");
    let line = format!("bench coordinator --seconds 0.2 --rounds 1 --items 10000 --plot {}", plot.display());
    let report = results(&line, folder.path());
    let cells = report["cells"].as_array().unwrap();
    for contender in ["bare XDP_TX", "xdp", "xdp (tc)", "xdp (published)", "socket"] {
        assert!(cells.iter().any(|cell| cell["contender"] == contender), "{contender} is missing");
    }
    // In so short a time on a busy machine one of them may complete nothing; that all is well at all is verified first.
    let rates: Vec<_> = cells.iter().map(|cell| cell["rate"]["median"].as_f64().unwrap()).collect();
    assert!(rates.iter().all(|rate| *rate >= 0.0) && rates.iter().any(|rate| *rate > 0.0), "{rates:?}");
    assert_eq!(report["ratios"].as_array().unwrap().len(), 6);
    assert!(fs::read_to_string(plot).unwrap().contains("</svg>"));
}

#[test]
fn the_whole_system_is_driven_under_faults() {
    let Some(_machine) = machine() else { return };
    let folder = tempfile::tempdir().unwrap();
    let history = folder.path().join("history.jsonl");
    let line = format!(
        "bench ycsb --seconds 0.5 --rounds 1 --items 2000 --concurrency 16 --workload zipf0.99 \
         --faults loss=1%,duplicate=1%,reorder=1% --history {}",
        history.display()
    );
    let report = results(&line, folder.path());
    assert_eq!(report["checked"]["linearizable"], true);
    let recorded = fs::read_to_string(&history).unwrap().lines().count();
    assert_eq!(report["checked"]["operations"].as_u64(), Some(recorded as u64));
    let again = run(&format!("check {}", history.display()));
    assert!(again.contains("linearizable"), "{again}");
}

#[test]
fn replicas_are_compared_with_memcached() {
    let Some(_machine) = machine() else { return };
    let folder = tempfile::tempdir().unwrap();
    let line = "bench replica --seconds 0.3 --rounds 1 --items 2000";
    if Command::new("memcached").arg("-V").output().is_err() {
        let output = command(line).output().unwrap();
        assert!(!output.status.success() && text(&output).contains("apt-get install memcached"), "{}", text(&output));
        return;
    }
    let report = results(line, folder.path());
    for cell in report["cells"].as_array().unwrap() {
        assert!(cell["rate"]["median"].as_f64().unwrap() > 0.0, "{cell}");
    }
}

#[test]
fn memcached_is_compared_with_and_without_the_cache() {
    let Some(_machine) = machine() else { return };
    let folder = tempfile::tempdir().unwrap();
    let line = "bench cache --seconds 0.3 --warmup 1 --rounds 1 --items 1000 --memory 4 --gets-per-set 30";
    let report = results(line, folder.path());
    let cells = report["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 3);
    for cell in cells {
        assert!(cell["rate"]["median"].as_f64().unwrap() > 0.0, "{cell}");
        let hit_ratio = cell["hit_ratio"]["median"].as_f64().unwrap();
        assert_eq!(hit_ratio > 0.0, cell["server"].as_str().unwrap().starts_with("cache"), "{cell}");
    }
    let bystanders = report["bystanders"].as_array().unwrap();
    assert_eq!(bystanders.len(), 4);
    for part in ["without", "program", "with"] {
        assert!(bystanders.iter().all(|b| b[part]["median"].as_f64().unwrap() > 0.0), "{part}: {bystanders:?}");
    }
}

#[test]
fn the_cache_is_shown_and_judged_and_leaves_nothing() {
    let Some(_machine) = machine() else { return };
    let child = command("demo cache --seconds 0.5 --memory 4 --rounds 1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let process = child.id();
    let output = child.wait_with_output().unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    for part in ["memcached -t 1", "cache of 4 MiB", "linearizable: one order", "Detached", "Nothing is left"] {
        assert!(said.contains(part), "{part} is missing in\n{said}");
    }
    assert_eq!(left_of(process), Vec::<String>::new());
}

#[test]
fn coordinators_are_weighed() {
    let Some(_machine) = machine() else { return };
    let folder = tempfile::tempdir().unwrap();
    let report = results("bench memory --minutes 0.05 --cycles 2", folder.path());
    assert!(report["at_start"]["maps"].as_u64().unwrap() > 0);
    assert!(report["completed"].as_u64().unwrap() > 0);
}

#[test]
fn what_cannot_be_measured_is_refused_by_name() {
    for (line, part) in [
        ("bench coordinator --datapath dpdk", "dpdk"),
        ("bench coordinator --workload zipf", "zipf0.99"),
        ("bench coordinator --json /no/such/folder/x.json", "/no/such/folder"),
        ("bench coordinator --replicas 9", "1 to 8"),
        ("bench coordinator --value-size 1400", "1392"),
        ("bench ycsb --faults los=1%", "loss, duplicate"),
        ("bench ycsb --value-size 8", "16"),
        ("bench replica --outstanding 0", "--outstanding"),
        ("bench cache --items 0", "--items must be 1 to"),
        ("demo cache --rounds 0", "--rounds"),
        ("demo --items 0", "at least one item"),
        ("demo --clients 99", "1 to 8"),
    ] {
        let output = command(line).output().unwrap();
        let said = text(&output);
        assert!(!output.status.success() && said.contains(part), "underpass {line}: {said}");
    }
}
