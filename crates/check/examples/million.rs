//! How long the checker takes for a million operations: Zipf 0.99 over a million keys, 64 clients.
//!
//!     cargo run --release -p underpass-check --example million
//!
//! One line for each kind of history. Arguments: number of operations, seed, part of the name of the kinds to run.

use std::{collections::HashMap, time::Instant};

use rand::{Rng, SeedableRng, rngs::StdRng};
use underpass_check::{
    history::{HistoryWriter, Operation, Outcome, Request, read_file},
    linearizability::{Checker, Options, Verdict},
};

struct Mix {
    name: &'static str,
    keys: usize,
    clients: usize,
    writes: f64,
    unknown: f64,
    numbered: bool,
    /// Every write has a value of its own.
    unique: bool,
    /// Also conditional writes and deletes.
    conditional: bool,
}

const BASE: Mix = Mix {
    name: "95:5, Zipf 0.99",
    keys: 1_000_000,
    clients: 64,
    writes: 0.05,
    unknown: 0.001,
    numbered: true,
    unique: true,
    conditional: false,
};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |i: usize| args.get(i).map(|text| text.parse::<u64>().expect("arguments: operations, seed, part of a name"));
    let count = number(0).unwrap_or(1_000_000) as usize;
    let seed = number(1).unwrap_or(1);
    let part = args.get(2).map_or("", String::as_str);
    let mixes = [
        BASE,
        Mix { name: "50:50", writes: 0.5, ..BASE },
        Mix { name: "50:50, 10 % unknown", writes: 0.5, unknown: 0.1, ..BASE },
        Mix { name: "50:50, 10 % unknown, all values equal", writes: 0.5, unknown: 0.1, unique: false, ..BASE },
        Mix { name: "every kind, 1 % unknown", writes: 0.5, unknown: 0.01, conditional: true, ..BASE },
        Mix { name: "every kind, 10 % unknown", writes: 0.5, unknown: 0.1, conditional: true, ..BASE },
        Mix { name: "95:5, no numbers", numbered: false, ..BASE },
        Mix { name: "50:50, no numbers, 1 % unknown", numbered: false, writes: 0.5, unknown: 0.01, ..BASE },
        Mix { name: "one key, 64 clients, 50:50", keys: 1, writes: 0.5, ..BASE },
        Mix { name: "one key, 64 clients, every kind", keys: 1, writes: 0.5, conditional: true, ..BASE },
        Mix {
            name: "one key, 8 clients, 50:50, no numbers",
            keys: 1,
            clients: 8,
            writes: 0.5,
            numbered: false,
            ..BASE
        },
    ];
    let dir = tempfile::tempdir().expect("a temporary directory");
    println!("{count} operations, seed {seed}; seconds");
    println!("{:>7} {:>7} {:>7}  {:<45} verdict", "write", "read", "check", "history");
    for mix in mixes.into_iter().filter(|mix| mix.name.contains(part)) {
        let history = simulate(count, seed, &mix);
        let path = dir.path().join("history.jsonl");
        let start = Instant::now();
        let writer = HistoryWriter::create(&path).expect("a file");
        for operation in &history {
            writer.record(operation).expect("room");
        }
        writer.finish().expect("room");
        let write = start.elapsed().as_secs_f64();
        drop(history);
        let start = Instant::now();
        let mut checker = Checker::new();
        read_file(&path, |operation| checker.add(&operation)).expect("what was written");
        let read = start.elapsed().as_secs_f64();
        let report = checker.check(&Options::default());
        let check = report.elapsed.as_secs_f64();
        println!("{write:>7.2} {read:>7.2} {check:>7.2}  {:<45} {:?}", mix.name, report.verdict());
        if report.verdict() != Verdict::Linearizable {
            println!("{report}");
        }
    }
}

/// An item of the simulated store: value and cas.
type Item = (String, u64);

/// What an atomic store would tell closed-loop clients.
fn simulate(count: usize, seed: u64, mix: &Mix) -> Vec<Operation> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut sum = 0.0;
    let cumulative: Vec<f64> = (1..=mix.keys)
        .map(|rank| {
            sum += (rank as f64).powf(-0.99);
            sum
        })
        .collect();
    let mut store: HashMap<usize, Item> = HashMap::new();
    let mut seq = 0;
    let mut free_at = vec![0u64; mix.clients];
    let mut plans = Vec::with_capacity(count);
    for i in 0..count {
        let client = i % mix.clients;
        let call = free_at[client] + rng.random_range(0..5_000);
        let moment = call + rng.random_range(10_000..50_000);
        let ret = moment + rng.random_range(10_000..50_000);
        free_at[client] = ret;
        plans.push((moment, client, call, ret));
    }
    plans.sort_unstable();
    let mut history = Vec::with_capacity(count);
    for (i, (_, client, call, ret)) in plans.into_iter().enumerate() {
        let at = rng.random_range(0.0..sum);
        let key = cumulative.partition_point(|&c| c < at).min(mix.keys - 1);
        let request = match rng.random_bool(mix.writes) {
            false => Request::Get,
            true if mix.conditional => Request::ALL[rng.random_range(1..Request::ALL.len())],
            true => Request::Put,
        };
        let mut op = Operation::call(client as u64, request, format!("user{key:012}"), call);
        let item = store.get(&key).cloned();
        let value = if mix.unique { format!("value-{i:026}") } else { "x".repeat(32) };
        match request {
            Request::Get | Request::Delete | Request::Flush => {}
            Request::Incr => op.delta = Some(1),
            Request::Touch => op.ttl_ms = Some(0),
            Request::Append | Request::Prepend => op.value = Some(format!(",{i}").into()),
            _ => op.value = Some(value.clone().into()),
        }
        if request == Request::Cas {
            let current = item.as_ref().map_or(1, |item| item.1);
            op.expected = Some(if rng.random_bool(0.8) { current } else { current.saturating_sub(1) });
        }
        let unknown = request != Request::Get && rng.random_bool(mix.unknown);
        if unknown && rng.random_bool(0.5) {
            history.push(op);
            continue;
        }
        if request != Request::Get {
            seq += 1;
        }
        let (outcome, after) = match (request, item) {
            (Request::Get, Some(found)) => {
                op.value = Some(found.0.clone().into());
                op.cas = Some(found.1).filter(|_| mix.numbered);
                (Outcome::Ok, Some(found))
            }
            (Request::Put, _) | (Request::Add, None) | (Request::Replace, Some(_)) => (Outcome::Ok, Some((value, seq))),
            (Request::Add, found) => (Outcome::Exists, found),
            (Request::Replace, None) => (Outcome::NotStored, None),
            (Request::Cas, Some(found)) if Some(found.1) == op.expected => (Outcome::Ok, Some((value, seq))),
            (Request::Cas, Some(found)) => (Outcome::Exists, Some(found)),
            (Request::Delete, Some(_)) | (Request::Flush, _) => (Outcome::Ok, None),
            (Request::Touch, Some(found)) => (Outcome::Ok, Some(found)),
            (Request::Incr, Some(found)) => match found.0.parse::<i64>() {
                Ok(n) => {
                    op.number = Some(n + 1).filter(|_| !unknown);
                    (Outcome::Ok, Some(((n + 1).to_string(), seq)))
                }
                Err(_) => (Outcome::NotANumber, Some(found)),
            },
            (Request::Append | Request::Prepend, Some(found)) if found.0.len() > 1000 => {
                (Outcome::TooLarge, Some(found))
            }
            (Request::Append, Some((text, _))) => (Outcome::Ok, Some((format!("{text},{i}"), seq))),
            (Request::Prepend, Some((text, _))) => (Outcome::Ok, Some((format!(",{i}{text}"), seq))),
            (_, None) => (Outcome::NotFound, None),
        };
        match after {
            Some(item) => store.insert(key, item),
            None => store.remove(&key),
        };
        if !unknown {
            op.finish(outcome, ret);
            if request != Request::Get && mix.numbered {
                op.cas = Some(seq);
            }
        }
        history.push(op);
    }
    history
}
