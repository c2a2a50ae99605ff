//! The commands, from their arguments to their exit codes.

use std::net::UdpSocket;

use crate::support::{Fault, Shard};
use clap::Parser;
use underpass_client::cli::{self, Command, EXIT_FAILED, EXIT_IO, EXIT_OK, EXIT_UNKNOWN, EXIT_UNMET, EXIT_USAGE};
use underpass_protocol::wire::{Op, Reason};

#[derive(Parser)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

struct Result {
    code: u8,
    out: String,
    errors: String,
}

/// Runs `underpass WORDS --coordinator` the shard's `--deadline 200ms`.
fn run(shard: &Shard, words: &[&str], mut input: &[u8]) -> Result {
    let coordinator = shard.coordinator.to_string();
    let target = ["--coordinator", &coordinator, "--deadline", "200ms"];
    let line = Line::try_parse_from(["underpass"].iter().chain(words).chain(&target)).unwrap();
    let (mut out, mut errors) = (Vec::new(), Vec::new());
    let code = cli::run_with(line.command, &mut input, &mut out, &mut errors);
    Result { code, out: String::from_utf8(out).unwrap(), errors: String::from_utf8(errors).unwrap() }
}

#[track_caller]
fn check(shard: &Shard, words: &[&str], code: u8, out: &str, errors: &str) {
    let result = run(shard, words, b"");
    assert_eq!((result.code, &result.out[..], &result.errors[..]), (code, out, errors), "{words:?}");
}

#[test]
fn a_conversation() {
    let shard = Shard::start(0);
    check(&shard, &["get", "k"], EXIT_UNMET, "", "k: not found\n");
    check(&shard, &["append", "k", "value"], EXIT_UNMET, "", "k: not found\n");
    check(&shard, &["put", "k", "value"], EXIT_OK, "", "");
    check(&shard, &["get", "k"], EXIT_OK, "value", "");
    check(&shard, &["add", "k", "other"], EXIT_UNMET, "", "k: exists\n");
    check(&shard, &["replace", "k", "41"], EXIT_OK, "", "");
    check(&shard, &["incr", "k"], EXIT_OK, "42\n", "");
    check(&shard, &["incr", "k", "-50"], EXIT_OK, "-8\n", "");
    check(&shard, &["append", "k", "!"], EXIT_OK, "", "");
    check(&shard, &["prepend", "k", "=", "--ttl", "5s"], EXIT_OK, "", "");
    check(&shard, &["incr", "k"], EXIT_UNMET, "", "k: the value is not a decimal number\n");
    check(&shard, &["touch", "k", "--ttl", "forever"], EXIT_OK, "", "");
    check(&shard, &["delete", "k"], EXIT_OK, "", "");
    check(&shard, &["delete", "k"], EXIT_UNMET, "", "k: not found\n");
    check(&shard, &["touch", "k", "--ttl", "1h"], EXIT_UNMET, "", "k: not found\n");
}

#[test]
fn json_tells_value_and_cas() {
    let shard = Shard::start(0);
    let stored: serde_json::Value =
        serde_json::from_str(&run(&shard, &["put", "k", "value", "--json"], b"").out).unwrap();
    let item: serde_json::Value = serde_json::from_str(&run(&shard, &["get", "k", "--json"], b"").out).unwrap();
    let expected = serde_json::json!({ "key": "k", "status": "ok", "value": "value", "cas": stored["cas"] });
    assert_eq!(item, expected);
    let cas = item["cas"].to_string();
    check(&shard, &["cas", "k", "newer", "--cas", &cas], EXIT_OK, "", "");
    check(&shard, &["cas", "k", "newest", "--cas", &cas], EXIT_UNMET, "", "k: exists\n");
    run(&shard, &["put", "k", "-"], &[0xff, 0]);
    assert!(run(&shard, &["get", "k", "--json"], b"").out.contains(r#""value_hex":"ff00""#));
    check(
        &shard,
        &["get", "none", "--json"],
        EXIT_UNMET,
        "{\"key\":\"none\",\"status\":\"not found\"}\n",
        "none: not found\n",
    );
}

#[test]
fn a_value_comes_from_the_standard_input() {
    let shard = Shard::start(0);
    assert_eq!(run(&shard, &["put", "k", "-"], b"two\nlines\n").code, EXIT_OK);
    check(&shard, &["get", "k"], EXIT_OK, "two\nlines\n", "");
    let too_long = run(&shard, &["put", "k", "-"], &[b'x'; 5000]);
    assert_eq!(too_long.code, EXIT_USAGE);
    assert!(too_long.errors.contains("at most 1391 fit in a datagram"), "{}", too_long.errors);
}

#[test]
fn unknown_and_failed_are_told_apart() {
    let shard = Shard::start(0);
    shard.set_faults(|header| (header.op == Op::Write).then_some(Fault::LoseAnswer));
    let unknown = run(&shard, &["put", "k", "v"], b"");
    assert_eq!(unknown.code, EXIT_UNKNOWN);
    assert!(unknown.errors.contains("the write may or may not have taken effect"), "{}", unknown.errors);
    shard.set_faults(|header| (header.op == Op::Write).then_some(Fault::Reject(Reason::StoreFull)));
    let failed = run(&shard, &["put", "k", "v"], b"");
    assert_eq!(failed.code, EXIT_FAILED);
    assert!(
        failed.errors.contains("it had no effect: rejected: a replica is at its memory budget"),
        "{}",
        failed.errors
    );
    shard.set_faults(|header| (header.op == Op::Read).then_some(Fault::Lose));
    let timed_out = run(&shard, &["get", "k"], b"");
    assert_eq!(timed_out.code, EXIT_FAILED);
    assert!(timed_out.errors.contains("no answer before the deadline"), "{}", timed_out.errors);
}

#[test]
fn nobody_at_the_address_is_told_with_what_to_check() {
    let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let coordinator = format!("127.0.0.1:{port}");
    let line = Line::try_parse_from(["underpass", "get", "k", "--coordinator", &coordinator]).unwrap();
    let mut errors = Vec::new();
    let code = cli::run_with(line.command, &mut &b""[..], &mut Vec::new(), &mut errors);
    assert_eq!(code, EXIT_FAILED);
    let errors = String::from_utf8(errors).unwrap();
    assert!(errors.contains("Connection refused: nothing listens at"), "{errors}");
}

#[test]
fn a_wrong_configuration_is_wrong_usage() {
    let line = Line::try_parse_from(["underpass", "get", "k", "--config", "/nonexistent/client.toml"]).unwrap();
    let mut errors = Vec::new();
    let code = cli::run_with(line.command, &mut &b""[..], &mut Vec::new(), &mut errors);
    assert_eq!(code, EXIT_USAGE);
    assert!(String::from_utf8(errors).unwrap().starts_with("error: cannot read /nonexistent/client.toml: "));
}

#[test]
fn a_result_that_cannot_be_printed_is_told() {
    struct Full;
    impl std::io::Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let shard = Shard::start(0);
    run(&shard, &["put", "n", "1"], b"");
    let line = ["underpass", "incr", "n", "--coordinator", &shard.coordinator.to_string()];
    let mut errors = Vec::new();
    let code = cli::run_with(Line::parse_from(line).command, &mut &b""[..], &mut Full, &mut errors);
    assert_eq!(code, EXIT_IO);
    assert!(String::from_utf8(errors).unwrap().starts_with("error: it was done, but cannot be printed: "));
}

#[test]
fn only_the_shard_of_the_key_is_asked() {
    let shard = Shard::start(0);
    let file = std::env::temp_dir().join(format!("underpass-client-{}.toml", std::process::id()));
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let text = format!(
        "[[shard]]\nid = 0\ncoordinator = \"{}\"\n[[shard]]\nid = 1\ncoordinator = \"{}\"\n",
        shard.coordinator,
        silent.local_addr().unwrap()
    );
    std::fs::write(&file, text).unwrap();
    let key = ["a", "b", "c", "d", "e", "f", "g", "h"]
        .into_iter()
        .find(|key| underpass_client::placement::place(key.as_bytes(), &[0, 1]) == 0)
        .unwrap();
    let line = Line::parse_from(["underpass", "put", key, "v", "--config", file.to_str().unwrap()]);
    let mut errors = Vec::new();
    let code = cli::run_with(line.command, &mut &b""[..], &mut Vec::new(), &mut errors);
    std::fs::remove_file(&file).unwrap();
    assert_eq!((code, String::from_utf8(errors).unwrap()), (EXIT_OK, String::new()));
}
