//! The checker against a brute-force oracle on small histories.
//!
//! The oracle shares nothing with the checker: it decides first which unknown writes took effect and which number each
//! write without one had, then tries every permutation and runs it on an item of its own.

use rand::{
    Rng, SeedableRng,
    rngs::StdRng,
    seq::{IndexedMutRandom, IndexedRandom},
};
use underpass_check::{
    history::{Operation, Outcome, Request, Text},
    linearizability::{Checker, Options, Store, Verdict},
};

const MS: u64 = 1_000_000;

// ---- The oracle ----

struct Oracle<'a> {
    store: Store,
    history: Vec<&'a Operation>,
    /// The number of each write, if it has one.
    numbers: Vec<Option<u64>>,
}

#[derive(Clone)]
struct Item {
    value: Vec<u8>,
    number: Option<u64>,
    /// (stamped end in ms, earliest end in ns, latest end in ns)
    end: Option<(Option<u64>, u64, u64)>,
    ended: bool,
}

fn oracle(history: &[Operation], store: Store) -> bool {
    let certain: Vec<&Operation> =
        history.iter().filter(|op| !matches!(op.outcome, Outcome::Failed | Outcome::Unknown)).collect();
    let unknown: Vec<&Operation> =
        history.iter().filter(|op| op.outcome == Outcome::Unknown && op.op != Request::Get).collect();
    let told: Vec<u64> = certain.iter().filter(|op| op.op != Request::Get).filter_map(|op| op.cas).collect();
    let replaces = |op: &Operation| matches!(op.outcome, Outcome::Ok | Outcome::Unknown);
    let mut free: Vec<u64> = (certain.iter().chain(&unknown))
        .flat_map(|op| [op.cas.filter(|_| op.op == Request::Get), op.expected.filter(|_| replaces(op))])
        .flatten()
        .filter(|number| !told.contains(number))
        .collect();
    free.sort_unstable();
    free.dedup();
    (0..1u32 << unknown.len()).any(|chosen| {
        let mut taken = certain.clone();
        taken.extend(unknown.iter().enumerate().filter(|(i, _)| chosen >> i & 1 == 1).map(|(_, op)| *op));
        let numbers = taken.iter().map(|op| op.cas.filter(|_| op.op != Request::Get)).collect();
        number_and_order(Oracle { store, history: taken, numbers }, 0, &free)
    })
}

fn number_and_order(oracle: Oracle<'_>, from: usize, free: &[u64]) -> bool {
    let open = (from..oracle.history.len()).find(|&i| {
        let op = oracle.history[i];
        op.op != Request::Get && op.cas.is_none() && matches!(op.outcome, Outcome::Ok | Outcome::Unknown)
    });
    let Some(i) = open else { return oracle.order(&mut Vec::new(), None, 0) };
    std::iter::once(None).chain(free.iter().copied().map(Some)).any(|number| {
        if number.is_some() && oracle.numbers.contains(&number) {
            return false;
        }
        let mut numbers = oracle.numbers.clone();
        numbers[i] = number;
        number_and_order(Oracle { history: oracle.history.clone(), numbers, ..oracle }, i + 1, free)
    })
}

impl Oracle<'_> {
    fn order(&self, placed: &mut Vec<usize>, item: Option<Item>, highest: u64) -> bool {
        if placed.len() == self.history.len() {
            return true;
        }
        for i in 0..self.history.len() {
            if placed.contains(&i) {
                continue;
            }
            let op = self.history[i];
            let overtakes = (0..self.history.len()).any(|j| {
                let other = self.history[j];
                j != i && !placed.contains(&j) && answered(other).is_some_and(|ret| ret < op.call_ns)
            });
            if overtakes {
                continue;
            }
            let number = self.numbers[i];
            if number.is_some_and(|number| number <= highest) {
                continue;
            }
            let highest = number.unwrap_or(0).max(highest);
            let mut before = vec![(item.clone(), false)];
            if item.as_ref().is_some_and(|item| item.end.is_some() && !item.ended) {
                before.push((item.clone(), true));
            }
            if self.store.evicts && item.is_some() {
                before.push((None, false));
            }
            for (item, ends) in before {
                if let Some(after) = run(op, number, item, ends, self.store) {
                    placed.push(i);
                    let found = self.order(placed, after, highest);
                    placed.pop();
                    if found {
                        return true;
                    }
                }
            }
        }
        false
    }
}

fn answered(op: &Operation) -> Option<u64> {
    op.return_ns.filter(|_| op.outcome != Outcome::Unknown)
}

/// The item after the operation; `None` if it cannot have had its outcome. `ends`: its lifetime ends just before.
fn run(op: &Operation, number: Option<u64>, item: Option<Item>, ends: bool, store: Store) -> Option<Option<Item>> {
    let unknown = op.outcome == Outcome::Unknown;
    let put = op.op == Request::Put;
    let mut present = item.clone();
    let mut gone = None;
    if let Some(Item { end: Some((stamped, early, late)), .. }) = &item {
        let (may_be_there, may_be_gone) = match (op.time_ms, stamped) {
            (Some(time), Some(end)) => (time <= *end, time >= *end),
            _ => (op.call_ns <= *late, answered(op).is_none_or(|ret| ret >= *early)),
        };
        let ended = item.as_ref().is_some_and(|item| item.ended);
        if put {
            // Sees nothing.
        } else if ends || ended {
            if !may_be_gone {
                return None;
            }
            gone = item.clone().map(|item| Item { ended: true, ..item });
            present = None;
        } else if !may_be_there {
            return None;
        }
    }
    let end = |keep: bool| match op.ttl_ms {
        Some(0) => None,
        Some(ttl) => {
            let slack = (250 + store.clock_ms) * MS + ttl * MS / 100;
            Some((
                op.time_ms.map(|time| time + ttl),
                op.call_ns + (ttl * MS).saturating_sub(slack),
                answered(op).map_or(u64::MAX, |ret| ret + ttl * MS + slack),
            ))
        }
        None if keep => item.as_ref().and_then(|item| item.end),
        None => None,
    };
    let value = || op.value.clone().unwrap().0;
    let stored = |value, keep| Some(Item { value, number, end: end(keep), ended: false });
    let (outcome, after) = match (op.op, &present) {
        (Request::Get, None) => (Outcome::NotFound, gone),
        (Request::Get, Some(item)) => {
            let same = op.value.as_ref() == Some(&Text(item.value.clone()));
            if !same || (op.cas.is_some() && op.cas != item.number) {
                return None;
            }
            (Outcome::Ok, present.clone())
        }
        (Request::Put, _) => (Outcome::Ok, stored(value(), false)),
        (Request::Add, None) => (Outcome::Ok, stored(value(), false)),
        (Request::Add, Some(_)) => (Outcome::NotStored, present.clone()),
        (Request::Replace, Some(_)) => (Outcome::Ok, stored(value(), false)),
        (Request::Replace, None) => (Outcome::NotStored, gone),
        (Request::Delete, Some(_)) | (Request::Flush, _) => (Outcome::Ok, None),
        (Request::Cas, Some(item)) if item.number == op.expected => (Outcome::Ok, stored(value(), false)),
        (Request::Cas, Some(_)) => (Outcome::Exists, present.clone()),
        (Request::Append, Some(item)) => (Outcome::Ok, stored([item.value.clone(), value()].concat(), true)),
        (Request::Prepend, Some(item)) => (Outcome::Ok, stored([value(), item.value.clone()].concat(), true)),
        (Request::Incr, Some(item)) => match String::from_utf8(item.value.clone()).unwrap().parse::<i64>() {
            Err(_) => (Outcome::NotANumber, present.clone()),
            // `02` is a number to some and none to others.
            Ok(n) if op.outcome == Outcome::NotANumber && n.to_string().as_bytes() != item.value => {
                (Outcome::NotANumber, present.clone())
            }
            Ok(n) => match n.checked_add(op.delta.unwrap()) {
                None => (Outcome::Overflow, present.clone()),
                Some(sum) if op.number.is_some_and(|number| number != sum) => return None,
                Some(sum) => (Outcome::Ok, stored(sum.to_string().into_bytes(), true)),
            },
        },
        (Request::Touch, Some(item)) => (Outcome::Ok, Some(Item { end: end(true), ..item.clone() })),
        (
            Request::Delete | Request::Cas | Request::Append | Request::Prepend | Request::Incr | Request::Touch,
            None,
        ) => (Outcome::NotFound, gone),
    };
    (unknown || outcome == op.outcome).then_some(after)
}

// ---- Histories ----

struct Style {
    requests: &'static [Request],
    /// Chance that an answer tells its number.
    numbered: f64,
    unknown: f64,
    /// Chance that a CAS expects the version that is there.
    current: f64,
    ttl: bool,
    stamped: f64,
    values: usize,
    store: Store,
}

/// A history of an atomic store: each operation takes effect at a moment between call and return.
fn generate(rng: &mut StdRng, style: &Style) -> Vec<Operation> {
    let count = rng.random_range(2..=7);
    let unit = if style.ttl { 200 * MS } else { 1 };
    let mut moments: Vec<u64> = (0..count).map(|i| (i as u64 * 4 + 20 + rng.random_range(0..3)) * unit).collect();
    moments.sort_unstable();
    let mut item: Option<(Vec<u8>, u64, Option<u64>)> = None;
    let mut seq = 0;
    let mut numbers = vec![1];
    let mut history = Vec::new();
    for moment in moments {
        let request = *style.requests.choose(rng).unwrap();
        let call = moment - rng.random_range(0..12) * unit;
        let ret = moment + rng.random_range(0..12) * unit;
        let mut op = Operation::call(rng.random_range(0..4), request, "k", call);
        let value = ["a", "b", "1", "2", "c", "d", "e", "f"][rng.random_range(0..style.values)];
        if !matches!(request, Request::Get | Request::Delete | Request::Incr | Request::Touch | Request::Flush) {
            op.value = Some(value.into());
        }
        if request == Request::Incr {
            op.delta = Some(if rng.random_bool(0.1) { i64::MAX } else { rng.random_range(-1..=2) });
        }
        if request == Request::Cas {
            let current = item.as_ref().map(|item| item.1).filter(|_| rng.random_bool(style.current));
            // A number of another version, or one that no version has: 0, one left out, or one yet to come.
            op.expected = Some(match (current, rng.random_range(0..4)) {
                (Some(current), _) => current,
                (None, 0) => 0,
                (None, 1) => rng.random_range(0..seq + 3),
                (None, _) => *numbers.choose(rng).unwrap(),
            });
        }
        let lifetimes = style.ttl && !matches!(request, Request::Get | Request::Delete | Request::Flush);
        if request == Request::Touch || (lifetimes && rng.random_bool(0.6)) {
            op.ttl_ms = Some(if style.ttl { [0, 800, 2000, 4000][rng.random_range(0..4)] } else { 0 });
        }
        let time = moment / MS;
        if item.as_ref().is_some_and(|item| item.2.is_some_and(|end| time >= end)) {
            item = None;
        }
        if style.store.evicts && rng.random_bool(0.2) {
            item = None;
        }
        let unknown = rng.random_bool(style.unknown);
        if unknown && rng.random_bool(0.5) {
            history.push(op);
            continue;
        }
        let clock_ms = style.store.clock_ms;
        let ticked = if clock_ms == 0 { 0 } else { rng.random_range(0..=clock_ms) };
        let end = |keep: Option<u64>| match op.ttl_ms {
            Some(0) => None,
            // Its clock had ticked some time before.
            Some(ttl) => Some(time + ttl - ttl.min(ticked)),
            None => keep,
        };
        let mut number = None;
        if request != Request::Get {
            seq += rng.random_range(1..3);
            number = Some(seq);
            numbers.push(seq);
        }
        let bytes = value.as_bytes().to_vec();
        let outcome = match (request, item.take()) {
            (Request::Get, None) => Outcome::NotFound,
            (Request::Get, Some(found)) => {
                op.value = Some(found.0.clone().into());
                number = Some(found.1);
                item = Some(found);
                Outcome::Ok
            }
            (Request::Put, _) | (Request::Add, None) | (Request::Replace, Some(_)) => {
                item = Some((bytes, seq, end(None)));
                Outcome::Ok
            }
            (Request::Flush, _) => Outcome::Ok,
            (Request::Add, found) => {
                item = found;
                Outcome::NotStored
            }
            (Request::Replace, None) => Outcome::NotStored,
            (_, None) => Outcome::NotFound,
            (Request::Delete, Some(_)) => Outcome::Ok,
            (Request::Cas, Some(found)) if Some(found.1) == op.expected => {
                item = Some((bytes, seq, end(None)));
                Outcome::Ok
            }
            (Request::Cas, found) => {
                item = found;
                Outcome::Exists
            }
            (Request::Append, Some(found)) => {
                item = Some(([found.0, bytes].concat(), seq, end(found.2)));
                Outcome::Ok
            }
            (Request::Prepend, Some(found)) => {
                item = Some(([bytes, found.0].concat(), seq, end(found.2)));
                Outcome::Ok
            }
            (Request::Incr, Some(found)) => match std::str::from_utf8(&found.0).unwrap().parse::<i64>() {
                Err(_) => {
                    item = Some(found);
                    Outcome::NotANumber
                }
                Ok(n) => match n.checked_add(op.delta.unwrap()) {
                    None => {
                        item = Some(found);
                        Outcome::Overflow
                    }
                    Some(sum) => {
                        op.number = Some(sum).filter(|_| rng.random_bool(0.5));
                        item = Some((sum.to_string().into_bytes(), seq, end(found.2)));
                        Outcome::Ok
                    }
                },
            },
            (Request::Touch, Some(found)) => {
                item = Some((found.0, found.1, end(found.2)));
                Outcome::Ok
            }
        };
        if unknown {
            op.value = op.value.filter(|_| request != Request::Get);
            op.number = None;
        } else {
            op.finish(outcome, ret);
            op.cas = number.filter(|_| rng.random_bool(style.numbered));
            op.time_ms = Some(time).filter(|_| rng.random_bool(style.stamped));
        }
        history.push(op);
    }
    history
}

/// Breaks something, perhaps.
fn mutate(rng: &mut StdRng, history: &mut [Operation]) {
    let donor = history.choose(rng).unwrap().clone();
    let op = history.choose_mut(rng).unwrap();
    let before = op.clone();
    match rng.random_range(0..7) {
        0 => op.value = op.value.as_ref().and(donor.value),
        1 => op.cas = op.cas.and(donor.cas),
        2 => op.cas = op.cas.map(|cas| (cas + rng.random_range(0..4)).saturating_sub(2).max(1)),
        3 => op.outcome = *Outcome::ALL.choose(rng).unwrap(),
        4 => {
            let length = op.return_ns.map(|ret| ret - op.call_ns);
            op.call_ns = donor.call_ns;
            op.return_ns = length.map(|length| op.call_ns + length);
        }
        5 => op.number = op.number.map(|number| number + 1),
        _ => op.return_ns = op.return_ns.map(|ret| op.call_ns + (ret - op.call_ns) / 4),
    }
    if op.outcome == Outcome::NotFound && op.op == Request::Get {
        op.value = None;
        op.cas = None;
    }
    if op.outcome == Outcome::Exists && op.op == Request::Add {
        // The oracle knows one name for it.
        op.outcome = Outcome::NotStored;
    }
    if op.outcome == Outcome::NotFound && op.op == Request::Replace {
        op.outcome = Outcome::NotStored;
    }
    if op.outcome == Outcome::NotStored && matches!(op.op, Request::Append | Request::Prepend) {
        op.outcome = Outcome::NotFound;
    }
    if op.outcome == Outcome::TooLarge || op.validate().is_err() {
        *op = before;
    }
}

fn check(history: &[Operation], store: Store) -> Verdict {
    let mut checker = Checker::of(store);
    for op in history {
        checker.add(op);
    }
    let report = checker.check(&Options { budget: 1_000_000, threads: 1 });
    if report.verdict() == Verdict::Violation {
        let text = report.to_string();
        assert!(text.contains("VIOLATION: key \"k\"") && !report.violations[0].operations.is_empty(), "{text}");
    }
    report.verdict()
}

fn print(history: &[Operation]) -> String {
    history.iter().map(|op| serde_json::to_string(op).unwrap() + "\n").collect()
}

fn compare(name: &str, style: &Style) {
    let rounds = std::env::var("UNDERPASS_ORACLE_ROUNDS").map_or(3000, |text| text.parse().expect("a number"));
    let base: u64 = std::env::var("UNDERPASS_SEED").map_or(1, |text| text.parse().expect("a number"));
    println!("{name}: seeds {base} to {}", base + rounds - 1);
    let (mut good, mut bad) = (0, 0);
    for seed in base..base + rounds {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut history = generate(&mut rng, style);
        assert_eq!(
            check(&history, style.store),
            Verdict::Linearizable,
            "{name}, seed {seed}: valid\n{}",
            print(&history)
        );
        for _ in 0..rng.random_range(1..12) {
            mutate(&mut rng, &mut history);
        }
        let expected = oracle(&history, style.store);
        let found = check(&history, style.store);
        let wanted = if expected { Verdict::Linearizable } else { Verdict::Violation };
        assert_eq!(found, wanted, "{name}, seed {seed}: the oracle differs\n{}", print(&history));
        if expected { good += 1 } else { bad += 1 }
    }
    println!("{name}: {good} linearizable, {bad} not");
    assert!(good > rounds / 25 && bad > rounds / 25, "{name}: one-sided: {good} good, {bad} bad");
}

use Request::*;
const ALL: &[Request] = &[Get, Get, Get, Put, Put, Delete, Add, Replace, Cas, Incr, Append, Prepend, Touch];
const SIMPLE: Style = Style {
    requests: &[Get, Get, Put],
    numbered: 1.0,
    unknown: 0.15,
    current: 0.6,
    ttl: false,
    stamped: 0.0,
    values: 3,
    store: Store { evicts: false, clock_ms: 0 },
};

#[test]
fn reads_and_writes_with_numbers() {
    compare("numbered", &SIMPLE);
}

#[test]
fn reads_and_writes_without_numbers() {
    compare("plain", &Style { numbered: 0.0, ..SIMPLE });
}

#[test]
fn reads_and_writes_with_some_numbers() {
    compare("some", &Style { numbered: 0.5, unknown: 0.3, ..SIMPLE });
}

#[test]
fn every_kind_with_numbers() {
    compare("all numbered", &Style { requests: ALL, numbered: 1.0, values: 4, ..SIMPLE });
}

#[test]
fn every_kind_without_numbers() {
    compare("all plain", &Style { requests: ALL, numbered: 0.0, unknown: 0.3, values: 4, ..SIMPLE });
}

#[test]
fn every_kind_with_some_numbers() {
    compare("all some", &Style { requests: ALL, numbered: 0.6, unknown: 0.3, values: 4, ..SIMPLE });
}

#[test]
fn conditions_on_few_states() {
    let requests = &[Get, Add, Delete, Delete, Replace, Cas, Put];
    compare("conditions", &Style { requests, numbered: 0.7, unknown: 0.4, values: 2, ..SIMPLE });
}

#[test]
fn refused_swaps_near_unknown_writes() {
    let requests = &[Get, Get, Put, Incr, Delete, Cas, Cas, Cas];
    compare("swaps", &Style { requests, numbered: 0.9, unknown: 0.4, current: 0.1, values: 4, ..SIMPLE });
}

#[test]
fn refused_swaps_of_numbers_seen() {
    let requests = &[Get, Put, Put, Cas, Cas];
    compare("few swaps", &Style { requests, numbered: 0.6, unknown: 0.5, current: 0.2, values: 2, ..SIMPLE });
}

#[test]
fn numbers_and_pieces() {
    let requests = &[Get, Get, Incr, Incr, Append, Prepend, Put, Add];
    compare("pieces", &Style { requests, numbered: 0.5, unknown: 0.3, values: 4, ..SIMPLE });
}

#[test]
fn lifetimes_with_stamps() {
    compare("stamped", &Style { requests: ALL, numbered: 0.8, ttl: true, stamped: 1.0, values: 3, ..SIMPLE });
}

#[test]
fn lifetimes_with_some_stamps() {
    let requests = &[Get, Get, Get, Put, Touch, Delete, Add];
    compare("lifetimes", &Style { requests, numbered: 0.5, ttl: true, stamped: 0.4, values: 2, ..SIMPLE });
}

#[test]
fn items_that_are_evicted() {
    let store = Store { evicts: true, clock_ms: 0 };
    let requests = &[Get, Get, Get, Put, Delete, Add, Replace, Cas, Incr, Append, Flush];
    compare("evicted", &Style { requests, numbered: 0.6, unknown: 0.2, values: 3, store, ..SIMPLE });
    compare("evicted, plain", &Style { requests, numbered: 0.0, values: 3, store, ..SIMPLE });
    compare("evicted reads and writes", &Style { numbered: 0.5, store, ..SIMPLE });
}

#[test]
fn items_that_are_flushed() {
    let requests = &[Get, Get, Put, Delete, Add, Replace, Incr, Flush, Flush];
    compare("flushed", &Style { requests, numbered: 0.5, unknown: 0.3, values: 3, ..SIMPLE });
}

#[test]
fn lifetimes_by_a_coarse_clock() {
    let requests = &[Get, Get, Get, Put, Touch, Delete, Add];
    let store = Store { evicts: false, clock_ms: 1000 };
    compare("coarse", &Style { requests, numbered: 0.5, ttl: true, values: 2, store, ..SIMPLE });
}
