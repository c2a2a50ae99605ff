//! `underpass get`, `put`, `delete`, `add`, `replace`, `cas`, `incr`, `append`, `prepend` and `touch`.
//!
//! Exit codes: [`EXIT_OK`], [`EXIT_UNMET`], [`EXIT_FAILED`], [`EXIT_UNKNOWN`], [`EXIT_USAGE`], [`EXIT_IO`].

use std::{
    io::{self, Read, Write},
    net::SocketAddrV4,
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use underpass_protocol::{
    client::{Item, Request},
    wire::{Kind, Operand, PAYLOAD_MAX},
};

use crate::{
    blocking::{Client, Reply, Unmet, lifetime_ms, unmet},
    config::{Config, parse_coordinator},
    error::Error,
    placement::place,
};

/// It was done.
pub const EXIT_OK: u8 = 0;
/// There is no such key, or the write's condition did not hold: nothing was changed.
pub const EXIT_UNMET: u8 = 1;
/// It failed, definitely without effect.
pub const EXIT_FAILED: u8 = 2;
/// A write whose outcome is unknown: it may have taken effect, or may yet.
pub const EXIT_UNKNOWN: u8 = 3;
/// The command line or the configuration is wrong.
pub const EXIT_USAGE: u8 = 64;
/// The value could not be read from the standard input, so nothing was sent; or the result could not be printed.
pub const EXIT_IO: u8 = 74;

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 no such key or condition not met; 2 failed, without effect; \
3 unknown: the write may or may not have taken effect; 64 wrong command line or configuration; \
74 standard input or output failed";

/// Commands that read and change items.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print the value of a key
    #[command(after_help = EXIT_CODES)]
    Get(Get),
    /// Set the value of a key
    #[command(after_help = EXIT_CODES)]
    Put(Set),
    /// Remove a key
    #[command(after_help = EXIT_CODES)]
    Delete(Delete),
    /// Set the value of a key that does not exist
    #[command(after_help = EXIT_CODES)]
    Add(Set),
    /// Set the value of a key that exists
    #[command(after_help = EXIT_CODES)]
    Replace(Set),
    /// Set the value of a key that nobody has changed since `get --json` told its cas
    #[command(after_help = EXIT_CODES)]
    Cas(Cas),
    /// Add to a number and print the result
    #[command(after_help = EXIT_CODES)]
    Incr(Incr),
    /// Add data behind a value
    #[command(after_help = EXIT_CODES)]
    Append(Set),
    /// Add data in front of a value
    #[command(after_help = EXIT_CODES)]
    Prepend(Set),
    /// Give a key another lifetime
    #[command(after_help = EXIT_CODES)]
    Touch(Touch),
}

/// How to reach the shards.
#[derive(Args, Debug)]
pub struct Target {
    /// Configuration of the shards, a TOML file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["coordinator", "shard"])]
    config: Option<PathBuf>,
    /// The coordinator of the only shard, or several of which one serves; port 5550 unless given
    #[arg(
        long,
        value_name = "ADDR[:PORT],...",
        value_parser = parse_coordinator,
        value_delimiter = ',',
        required_unless_present = "config"
    )]
    coordinator: Vec<SocketAddrV4>,
    /// Number of the only shard
    #[arg(long, value_name = "N", default_value_t = 0)]
    shard: u32,
    /// How long it may take, such as 500ms or 2s; 1s, or what the configuration says, unless given
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    deadline: Option<Duration>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `get`.
#[derive(Args, Debug)]
pub struct Get {
    /// Key, 1 to 250 bytes
    key: String,
    #[command(flatten)]
    target: Target,
}

/// Arguments of `put`, `add`, `replace`, `append` and `prepend`.
#[derive(Args, Debug)]
pub struct Set {
    /// Key, 1 to 250 bytes
    key: String,
    /// Value; `-`: read it from the standard input
    #[arg(allow_hyphen_values = true)]
    value: String,
    /// Lifetime, such as 500ms, 5s, 10m, 1h, 7d, or forever
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Option<Ttl>,
    #[command(flatten)]
    target: Target,
}

/// Arguments of `cas`.
#[derive(Args, Debug)]
pub struct Cas {
    /// The cas that the item must still have
    #[arg(long, value_name = "N")]
    cas: u64,
    #[command(flatten)]
    set: Set,
}

/// Arguments of `delete`.
#[derive(Args, Debug)]
pub struct Delete {
    /// Key, 1 to 250 bytes
    key: String,
    #[command(flatten)]
    target: Target,
}

/// Arguments of `incr`.
#[derive(Args, Debug)]
pub struct Incr {
    /// Key, 1 to 250 bytes
    key: String,
    /// What to add; may be negative
    #[arg(default_value_t = 1, allow_hyphen_values = true)]
    delta: i64,
    /// Lifetime, such as 500ms, 5s, 10m, 1h, 7d, or forever; unless given the item keeps its own
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Option<Ttl>,
    #[command(flatten)]
    target: Target,
}

/// Arguments of `touch`.
#[derive(Args, Debug)]
pub struct Touch {
    /// Key, 1 to 250 bytes
    key: String,
    /// Lifetime, such as 500ms, 5s, 10m, 1h, 7d, or forever
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Ttl,
    #[command(flatten)]
    target: Target,
}

/// A lifetime as the protocol has it, in milliseconds; 0: for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ttl(u64);

fn parse_ttl(text: &str) -> Result<Ttl, String> {
    if matches!(text, "forever" | "for-ever") {
        return Ok(Ttl(0));
    }
    parse_duration(text).map(|duration| Ttl(lifetime_ms(duration)))
}

/// A whole number with a unit.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let ms_per_unit = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err("give a whole number with its unit: ms, s, m, h or d, such as 500ms".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| "give a whole number with its unit, such as 5s".to_owned())?;
    let ms = number.checked_mul(ms_per_unit).ok_or("it is too long")?;
    if ms == 0 { Err("it must be longer than nothing".to_owned()) } else { Ok(Duration::from_millis(ms)) }
}

/// What to do, taken from the command line.
struct Task {
    kind: Option<Kind>,
    key: String,
    value: Vec<u8>,
    ttl: Option<Ttl>,
    expected: u64,
    delta: i64,
    target: Target,
}

/// Runs a command: prints its result to the standard output, or why there is none to the standard error, and tells the
/// exit code.
///
/// # Errors
/// None; the type is that of the program's other commands.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    // Not locked: the client's thread may have something to log.
    Ok(ExitCode::from(run_with(command, &mut io::stdin(), &mut io::stdout(), &mut io::stderr())))
}

/// As [`run`], with streams of the caller's choice; the exit code.
pub fn run_with(command: Command, input: &mut dyn Read, out: &mut dyn Write, errors: &mut dyn Write) -> u8 {
    let (message, code) = match execute(command, input, out) {
        Ok(None) => return EXIT_OK,
        Ok(Some(unmet)) => (unmet, EXIT_UNMET),
        Err((message, code)) => (format!("error: {message}"), code),
    };
    // Where would it be told that this fails?
    let _ = writeln!(errors, "{message}");
    code
}

/// Does it. Why nothing was changed or found, if so; or what went wrong and the exit code.
fn execute(command: Command, input: &mut dyn Read, out: &mut dyn Write) -> Result<Option<String>, (String, u8)> {
    let io_error = |what: &str| {
        let what = what.to_owned();
        move |error: io::Error| (format!("{what}: {error}"), EXIT_IO)
    };
    let task = task(command, input).map_err(io_error("nothing was sent: cannot read the standard input"))?;
    let request = task.request();
    // What can never be sent is told before anybody is asked for a session.
    let reply = request
        .validate()
        .map_err(Error::from)
        .and_then(|()| config(&task.target, request.key()))
        .and_then(Client::connect)
        .and_then(|client| client.request(request))
        .map_err(|error| (error.to_string(), exit_code(&error)))?;
    let (text, unmet) = task.told(&reply);
    out.write_all(&text).and_then(|()| out.flush()).map_err(io_error("it was done, but cannot be printed"))?;
    Ok(unmet.map(|unmet| format!("{}: {unmet}", task.key)))
}

fn exit_code(error: &Error) -> u8 {
    match error {
        Error::Unknown { .. } => EXIT_UNKNOWN,
        Error::Invalid(_) | Error::Config(_) => EXIT_USAGE,
        _ => EXIT_FAILED,
    }
}

/// The configuration of one command: the key's shard alone, so that another one that is down does not matter.
fn config(target: &Target, key: &[u8]) -> Result<Config, Error> {
    let mut config = match &target.config {
        Some(path) => Config::from_file(path)?,
        None => Config::of_shard(target.shard, target.coordinator.clone()),
    };
    let ids: Vec<u32> = config.shards.iter().map(|shard| shard.id).collect();
    config.shards = vec![config.shards[place(key, &ids)].clone()];
    config.sessions = 1;
    if let Some(deadline) = target.deadline {
        config.deadline_ms = deadline.as_millis() as u64;
    }
    Ok(config)
}

fn task(command: Command, input: &mut dyn Read) -> io::Result<Task> {
    let plain = |kind, key, target| Task { kind, key, value: Vec::new(), ttl: None, expected: 0, delta: 0, target };
    let mut set = |kind, set: Set| -> io::Result<Task> {
        Ok(Task { value: value(set.value, input)?, ttl: set.ttl, ..plain(Some(kind), set.key, set.target) })
    };
    Ok(match command {
        Command::Get(get) => plain(None, get.key, get.target),
        Command::Put(args) => set(Kind::Put, args)?,
        Command::Delete(delete) => plain(Some(Kind::Delete), delete.key, delete.target),
        Command::Add(args) => set(Kind::Add, args)?,
        Command::Replace(args) => set(Kind::Replace, args)?,
        Command::Cas(cas) => Task { expected: cas.cas, ..set(Kind::Cas, cas.set)? },
        Command::Incr(incr) => {
            Task { delta: incr.delta, ttl: incr.ttl, ..plain(Some(Kind::Incr), incr.key, incr.target) }
        }
        Command::Append(args) => set(Kind::Append, args)?,
        Command::Prepend(args) => set(Kind::Prepend, args)?,
        Command::Touch(touch) => Task { ttl: Some(touch.ttl), ..plain(Some(Kind::Touch), touch.key, touch.target) },
    })
}

fn value(argument: String, input: &mut dyn Read) -> io::Result<Vec<u8>> {
    if argument != "-" {
        return Ok(argument.into_bytes());
    }
    let mut value = Vec::new();
    // A byte more than any value may have is enough to say that it is too long.
    input.take(PAYLOAD_MAX as u64 + 1).read_to_end(&mut value)?;
    Ok(value)
}

impl Task {
    fn request(&self) -> Request<'_> {
        let key = self.key.as_bytes();
        match self.kind {
            None => Request::Read { key },
            Some(kind) => {
                let ttl_ms = self.ttl.map(|ttl| ttl.0);
                let operand = Operand { ttl_ms, expected: self.expected, delta: self.delta, data: &self.value };
                Request::Write { kind, key, operand }
            }
        }
    }

    /// What to print, and why nothing was changed or found, if so.
    fn told(&self, reply: &Reply) -> (Vec<u8>, Option<Unmet>) {
        match reply {
            Reply::Read(None) => (self.json_line(json!({ "status": "not found" })), Some(Unmet::NotFound)),
            Reply::Read(Some(item)) if self.target.json => (self.json_line(item_json(item)), None),
            Reply::Read(Some(item)) => (item.value.clone(), None),
            Reply::Written { status, seq, number } => match (self.kind.and_then(|kind| unmet(kind, *status)), number) {
                (None, Some(number)) if !self.target.json => (format!("{number}\n").into_bytes(), None),
                (None, number) => {
                    let cas = (!matches!(self.kind, Some(Kind::Delete | Kind::Touch))).then_some(seq);
                    (self.json_line(json!({ "status": "ok", "cas": cas, "number": number })), None)
                }
                (Some(unmet), _) => (self.json_line(json!({ "status": unmet.to_string() })), Some(unmet)),
            },
        }
    }

    /// A line of JSON with what is known of the key, or nothing if JSON is not asked for.
    fn json_line(&self, mut what: Value) -> Vec<u8> {
        if !self.target.json {
            return Vec::new();
        }
        let fields = what.as_object_mut().expect("it is written as an object");
        fields.retain(|_, value| !value.is_null());
        fields.insert("key".to_owned(), json!(self.key));
        format!("{what}\n").into_bytes()
    }
}

/// A value that is not UTF-8 is told in hexadecimal.
fn item_json(item: &Item) -> Value {
    match std::str::from_utf8(&item.value) {
        Ok(text) => json!({ "status": "ok", "value": text, "cas": item.cas }),
        Err(_) => {
            let hex: String = item.value.iter().map(|byte| format!("{byte:02x}")).collect();
            json!({ "status": "ok", "value_hex": hex, "cas": item.cas })
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        command: Command,
    }

    fn parse(line: &str) -> Result<Task, String> {
        let words = std::iter::once("underpass").chain(line.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        task(line.command, &mut io::empty()).map_err(|error| error.to_string())
    }

    #[test]
    fn command_lines_become_requests() {
        let at = "--coordinator 10.0.0.1";
        let operand = |data| Operand { ttl_ms: None, expected: 0, delta: 0, data };
        let write = |kind, operand| Request::Write { kind, key: b"k", operand };
        for (line, expected) in [
            ("get k", Request::Read { key: b"k" }),
            ("put k v", write(Kind::Put, operand(b"v"))),
            ("put k v --ttl 5s", write(Kind::Put, Operand { ttl_ms: Some(5000), ..operand(b"v") })),
            ("put k -v", write(Kind::Put, operand(b"-v"))),
            ("delete k", write(Kind::Delete, operand(b""))),
            ("add k v", write(Kind::Add, operand(b"v"))),
            ("replace k v", write(Kind::Replace, operand(b"v"))),
            ("cas k v --cas 9", write(Kind::Cas, Operand { expected: 9, ..operand(b"v") })),
            ("incr k", write(Kind::Incr, Operand { delta: 1, ..operand(b"") })),
            ("incr k -5", write(Kind::Incr, Operand { delta: -5, ..operand(b"") })),
            ("append k v", write(Kind::Append, operand(b"v"))),
            ("prepend k v", write(Kind::Prepend, operand(b"v"))),
            ("touch k --ttl forever", write(Kind::Touch, Operand { ttl_ms: Some(0), ..operand(b"") })),
        ] {
            let task = parse(&format!("{line} {at}")).unwrap_or_else(|error| panic!("{line}: {error}"));
            assert_eq!(task.request(), expected, "{line}");
        }
    }

    #[test]
    fn wrong_command_lines_say_what_is_wrong() {
        for (line, expected) in [
            ("get k", "--coordinator"),
            ("get k --coordinator 10.0.0.1 --config f", "cannot be used with"),
            ("get k --coordinator ::1", "IPv6 is not supported"),
            ("put k --coordinator 10.0.0.1", "VALUE"),
            ("put k v --ttl 5 --coordinator 10.0.0.1", "with its unit"),
            ("put k v --ttl 0s --coordinator 10.0.0.1", "longer than nothing"),
            ("cas k v --coordinator 10.0.0.1", "--cas"),
            ("touch k --coordinator 10.0.0.1", "--ttl"),
            ("incr k x --coordinator 10.0.0.1", "invalid"),
        ] {
            let told = parse(line).map(|_| ()).expect_err(line);
            assert!(told.contains(expected), "{line:?} is told {told:?}");
        }
    }

    #[test]
    fn several_coordinators_are_given_at_once() {
        let task = parse("get k --coordinator 10.0.0.1,10.0.0.2:7").unwrap();
        let config = config(&task.target, b"k").unwrap();
        let coordinators: Vec<String> = config.shards[0].coordinators.iter().map(ToString::to_string).collect();
        assert_eq!(coordinators, ["10.0.0.1:5550", "10.0.0.2:7"]);
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_duration("7d"), Ok(Duration::from_secs(7 * 86_400)));
        for wrong in ["", "s", "5", "1.5s", "-1s", "99999999999999999999s", "999999999999999999d", "0ms"] {
            assert!(parse_duration(wrong).is_err(), "{wrong}");
        }
    }
}
