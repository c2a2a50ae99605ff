//! A few drills on every data path, with faults on all links: that failures are survived, and that a drill leaves nothing.

use std::{fs, process::Command};

use nix::unistd::geteuid;

/// What a process of this number may have left.
fn left_of(process: u32) -> Vec<String> {
    let number = process.to_string();
    ["/run/netns", "/run/underpass/racks", "/sys/fs/bpf/underpass-rack", "/tmp"]
        .iter()
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flat_map(|entries| entries.flatten())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.split(['-', '.']).any(|part| part == number))
        .collect()
}

fn drill(line: &str) -> String {
    if !geteuid().is_root() {
        eprintln!("skipped: needs root");
        return String::new();
    }
    let child = Command::new(env!("CARGO_BIN_EXE_underpass"))
        .arg("drill")
        .args(line.split_whitespace())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let process = child.id();
    let output = child.wait_with_output().unwrap();
    let said = format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "underpass drill {line}: {}\n{said}", output.status);
    assert!(said.contains("0 lost acknowledged writes, 0 violations, 0 failed otherwise"), "{said}");
    assert_eq!(left_of(process), Vec::<String>::new());
    said
}

#[test]
fn a_shard_behind_sockets_survives() {
    drill("replica-killed coordinator-killed handed-over --datapath socket --faults");
}

#[test]
fn a_shard_in_the_kernel_survives() {
    drill("replica-killed coordinator-killed agent-upgraded program-detached --datapath xdp --faults");
}
