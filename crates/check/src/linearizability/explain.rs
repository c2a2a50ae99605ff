//! Saying in human words why a history is not linearizable, with as few operations as show it.
//!
//! First the well-known contradictions of two or three operations are looked for, in the operations up to where the search
//! came to its end. If it is none of them, the operations since the last quiet moment are thinned out: an observer may
//! always be left out and a write always be called unknown without making a linearizable history into another one, so
//! what cannot be ordered after that could not be before.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    time::{Duration, Instant},
};

use super::{
    matters,
    model::{ABSENT, Interner, NEVER, Op, State, Store},
    search::{Search, Stuck, Verdict, bind},
};
use crate::history::{Operation, Outcome, Request, Text};

/// Steps for one attempt at thinning out.
const BUDGET: u64 = 200_000;
/// Time for thinning out one violation.
const TIME_MAX: Duration = Duration::from_secs(2);
/// Operations shown.
const SHOWN_MAX: usize = 25;

/// A contradiction, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    /// The key.
    pub key: Text,
    /// What kind of contradiction it is.
    pub title: String,
    /// What the item was before the operations shown, if that matters.
    pub before: Option<String>,
    /// The operations that cannot be ordered, by call.
    pub operations: Vec<Operation>,
    /// Why not. Operations are numbered from 1.
    pub reason: String,
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "VIOLATION: key {}: {}", self.key.excerpt(), self.title)?;
        if let Some(before) = &self.before {
            writeln!(f, "  before: {before}")?;
        }
        let origin = self.operations.first().map_or(0, |op| op.call_ns);
        let skipped = self.operations.len().saturating_sub(SHOWN_MAX);
        if skipped > 0 {
            writeln!(f, "  ({skipped} operations left out)")?;
        }
        for (i, operation) in self.operations.iter().enumerate().skip(skipped) {
            let us = |ns: u64| (ns - origin) as f64 / 1000.0;
            let until = match operation.return_ns {
                Some(ns) if operation.outcome != Outcome::Unknown => format!("{:.3}", us(ns)),
                _ => "?".into(),
            };
            let span = format!("{:.3} to {until} us", us(operation.call_ns));
            writeln!(f, "  {:>3}  {span:<32} {operation}", i + 1)?;
        }
        writeln!(f, "  {}", self.reason)?;
        write!(f, "  (times from {origin} ns)")
    }
}

/// A contradiction found: title, operations by index, and the reason; `%1` stands for the number of the first of them.
struct Found {
    title: &'static str,
    ops: Vec<usize>,
    reason: String,
}

/// `ops` are all the key's operations, by call; `stuck` refers to those that matter.
pub(super) fn explain(ops: &[Op], stuck: &Stuck, store: Store, keys: &Interner, values: &Interner) -> Excerpt {
    let matter: Vec<Op> = ops.iter().filter(|op| matters(op)).copied().collect();
    let end = matter[stuck.at].ret;
    let prefix: Vec<Op> = ops.iter().filter(|op| op.call <= end).copied().collect();
    let key = Text(keys.bytes(ops[0].key).to_vec());
    let show = |op: &Op| op.operation(keys, values);
    // What shows it may have been called only afterwards, if the search could tell in advance.
    let found = never_written(ops)
        .map(|found| (found, ops))
        .or_else(|| Some((known(&prefix, store)?, &prefix[..])))
        .or_else(|| Some((known(ops, store)?, ops)));
    if let Some((Found { title, ops: shown, reason }, prefix)) = found {
        let mut order = shown.clone();
        order.sort_by_key(|&i| (prefix[i].call, prefix[i].ret, i));
        let mut text = reason;
        for (place, i) in shown.iter().enumerate() {
            let number = order.iter().position(|other| other == i).expect("same set") + 1;
            text = text.replace(&format!("%{}", place + 1), &number.to_string());
        }
        let operations = order.iter().map(|&i| show(&prefix[i])).collect();
        return Excerpt { key, title: title.into(), before: None, operations, reason: text };
    }
    let shown = thin_out(&matter, stuck, store, values);
    let last = shown.iter().rposition(|op| op.ret == end).map_or(shown.len(), |at| at + 1);
    let State { content, cas, dead, .. } = stuck.quiet.state;
    let before = match &stuck.quiet.content {
        _ if content == ABSENT || dead => "no item".into(),
        None => "an item that an operation without an answer had written".into(),
        Some(bytes) if cas == 0 => format!("the item was {}", Text(bytes.clone()).excerpt()),
        Some(bytes) => format!("the item was {}, cas {cas}", Text(bytes.clone()).excerpt()),
    };
    Excerpt {
        key,
        title: "these operations fit in no order".into(),
        before: Some(before),
        operations: shown.iter().map(show).collect(),
        reason: format!(
            "No order gives each of these its answer by the return of operation {last}, whatever others do meanwhile."
        ),
    }
}

fn known(ops: &[Op], store: Store) -> Option<Found> {
    same_number_twice(ops)
        .or_else(|| two_values(ops))
        .or_else(|| both_replaced_one(ops))
        .or_else(|| out_of_real_time(ops))
        .or_else(|| stale_by_value(ops))
        .or_else(|| if store.evicts { None } else { gone(ops) })
}

fn is_read(op: &Op) -> bool {
    op.request == Request::Get && op.outcome == Outcome::Ok
}

fn may_write(op: &Op) -> bool {
    !op.is_observer() && op.outcome != Outcome::Failed
}

fn only_gets_and_puts(ops: &[Op]) -> bool {
    ops.iter().all(|op| op.outcome == Outcome::Failed || matches!(op.request, Request::Get | Request::Put))
}

fn never_written(ops: &[Op]) -> Option<Found> {
    let composes = |op: &Op| matches!(op.request, Request::Append | Request::Prepend | Request::Incr) && may_write(op);
    if ops.iter().any(composes) {
        return None;
    }
    let mut earliest: HashMap<u32, u64> = HashMap::new();
    for op in ops.iter().filter(|op| may_write(op) && op.value != ABSENT && op.request != Request::Get) {
        let call = earliest.entry(op.value).or_insert(op.call);
        *call = op.call.min(*call);
    }
    let (at, read) = ops
        .iter()
        .enumerate()
        .find(|(_, op)| is_read(op) && earliest.get(&op.value).is_none_or(|&call| call > op.ret))?;
    let writes = |op: &Op| op.request != Request::Get && op.value == read.value;
    if let Some(failed) = ops.iter().position(|op| writes(op) && op.outcome == Outcome::Failed) {
        return Some(Found {
            title: "a write that had failed was read",
            ops: vec![failed, at],
            reason: "Operation %2 read the value of operation %1, whose client was told that it had no effect.".into(),
        });
    }
    if let Some(later) = ops.iter().position(writes) {
        return Some(Found {
            title: "a value was read before it was written",
            ops: vec![at, later],
            reason: "Operation %1 had returned before operation %2, the first to write this value, was called.".into(),
        });
    }
    Some(Found {
        title: "a value was read that nobody wrote",
        ops: vec![at],
        reason: "No operation on this key wrote the value that operation %1 read.".into(),
    })
}

fn same_number_twice(ops: &[Op]) -> Option<Found> {
    let mut seen: HashMap<u64, usize> = HashMap::new();
    for (i, op) in ops.iter().enumerate().filter(|(_, op)| op.request != Request::Get && op.cas != 0) {
        if let Some(first) = seen.insert(op.cas, i) {
            return Some(Found {
                title: "two writes were given one sequence number",
                ops: vec![first, i],
                reason: format!("Operations %1 and %2 were both told {}.", op.cas),
            });
        }
    }
    None
}

fn two_values(ops: &[Op]) -> Option<Found> {
    let mut seen: HashMap<u64, usize> = HashMap::new();
    for (i, op) in ops.iter().enumerate() {
        let tells = is_read(op)
            || (op.outcome == Outcome::Ok
                && matches!(op.request, Request::Put | Request::Add | Request::Replace | Request::Cas));
        if !tells || op.cas == 0 {
            continue;
        }
        let first = *seen.entry(op.cas).or_insert(i);
        if ops[first].value != op.value {
            return Some(Found {
                title: "two different values under one cas",
                ops: vec![first, i],
                reason: format!("Operations %1 and %2 give different values for version {}.", op.cas),
            });
        }
    }
    None
}

fn both_replaced_one(ops: &[Op]) -> Option<Found> {
    let mut seen: HashMap<u64, usize> = HashMap::new();
    for (i, op) in ops.iter().enumerate() {
        if op.request == Request::Cas
            && op.outcome == Outcome::Ok
            && let Some(first) = seen.insert(op.expected, i)
        {
            return Some(Found {
                title: "lost update",
                ops: vec![first, i],
                reason: format!(
                    "Operations %1 and %2 both replaced version {}; only one of them can have.",
                    op.expected
                ),
            });
        }
    }
    // A write between the version that a CAS expected and the CAS.
    let mut writes: Vec<(u64, usize)> = (0..ops.len())
        .filter(|&i| ops[i].makes_version() && ops[i].outcome == Outcome::Ok && ops[i].cas != 0)
        .map(|i| (ops[i].cas, i))
        .collect();
    writes.sort_unstable();
    for &(number, i) in &writes {
        if ops[i].request != Request::Cas {
            continue;
        }
        let after = writes.partition_point(|&(other, _)| other <= ops[i].expected);
        if let Some(&(made, between)) = writes.get(after)
            && made < number
        {
            return Some(Found {
                title: "lost update",
                ops: vec![between, i],
                reason: format!(
                    "Operation %2 replaced version {}, but operation %1 had made version {} before it.",
                    ops[i].expected, made
                ),
            });
        }
    }
    None
}

/// Contradictions between the numbers told and who returned before whom called.
fn out_of_real_time(ops: &[Op]) -> Option<Found> {
    // The version that an operation shows to be current at some moment of it: (at least, at most).
    let shows = |op: &Op| -> Option<(u64, u64)> {
        if op.cas != 0 && is_read(op) {
            return Some((op.cas, op.cas));
        }
        (op.cas != 0 && op.makes_version()).then_some((op.cas, op.cas))
    };
    let mut by_return: Vec<usize> =
        (0..ops.len()).filter(|&i| ops[i].ret != NEVER && shows(&ops[i]).is_some()).collect();
    by_return.sort_by_key(|&i| ops[i].ret);
    let mut newest: Option<usize> = None;
    let mut returned = by_return.iter().peekable();
    for (i, op) in ops.iter().enumerate() {
        while let Some(&&earlier) = returned.peek() {
            if ops[earlier].ret >= op.call {
                break;
            }
            if newest.is_none_or(|n| ops[n].cas < ops[earlier].cas) {
                newest = Some(earlier);
            }
            returned.next();
        }
        let (Some(number), Some(newest)) = (shows(op).map(|(number, _)| number), newest) else { continue };
        if ops[newest].cas <= number {
            continue;
        }
        let (title, reason) = match (is_read(&ops[newest]), is_read(op)) {
            (false, true) => (
                "stale read",
                "Operation %2 was called after operation %1 had returned, but read an older version than that wrote.",
            ),
            (true, true) => (
                "reads went back",
                "Operation %2 was called after operation %1 had returned, but read an older version.",
            ),
            (false, false) => (
                "writes out of order",
                "Operation %2 was called after operation %1 had returned, but its sequence number is lower.",
            ),
            (true, false) => (
                "a version was read before it was written",
                "Operation %1 had read a newer version than operation %2 wrote, which was called afterwards.",
            ),
        };
        return Some(Found { title, ops: vec![newest, i], reason: reason.into() });
    }
    let writers: HashMap<u64, usize> = (0..ops.len())
        .filter(|&i| ops[i].request != Request::Get && ops[i].cas != 0)
        .map(|i| (ops[i].cas, i))
        .collect();
    for (i, op) in ops.iter().enumerate().filter(|(_, op)| is_read(op)) {
        if let Some(&writer) = writers.get(&op.cas)
            && ops[writer].call > op.ret
        {
            return Some(Found {
                title: "a version was read before it was written",
                ops: vec![i, writer],
                reason: "Operation %1 had returned before operation %2, which wrote this version, was called.".into(),
            });
        }
    }
    None
}

/// A stale read where no sequence numbers tell, but only one operation can have written the value.
fn stale_by_value(ops: &[Op]) -> Option<Found> {
    if !only_gets_and_puts(ops) {
        return None;
    }
    let mut writers: HashMap<u32, (usize, usize)> = HashMap::new();
    for (i, op) in ops.iter().enumerate().filter(|(_, op)| may_write(op)) {
        writers.entry(op.value).or_insert((i, 0)).1 += 1;
    }
    let mut puts: Vec<usize> =
        (0..ops.len()).filter(|&i| ops[i].request == Request::Put && ops[i].outcome == Outcome::Ok).collect();
    puts.sort_by_key(|&i| ops[i].ret);
    // The put with the latest call among those that returned first.
    let mut latest: Vec<usize> = Vec::with_capacity(puts.len());
    for &i in &puts {
        let best = latest.last().copied().filter(|&other| ops[other].call > ops[i].call).unwrap_or(i);
        latest.push(best);
    }
    for (i, op) in ops.iter().enumerate().filter(|(_, op)| is_read(op)) {
        let Some(&(writer, 1)) = writers.get(&op.value) else { continue };
        let before = puts.partition_point(|&put| ops[put].ret < op.call);
        let Some(&newer) = before.checked_sub(1).and_then(|at| latest.get(at)) else { continue };
        if ops[newer].call > ops[writer].ret {
            return Some(Found {
                title: "stale read",
                ops: vec![writer, newer, i],
                reason: "Operation %3 read what operation %1 wrote, though operation %2 had replaced it before.".into(),
            });
        }
    }
    None
}

/// Not found, though it was stored before and nothing can have removed it.
fn gone(ops: &[Op]) -> Option<Found> {
    let removes = |op: &Op| matches!(op.request, Request::Delete | Request::Flush);
    if ops.iter().any(|op| may_write(op) && (removes(op) || op.ttl_ms.is_some_and(|ttl| ttl > 0))) {
        return None;
    }
    let stored = |op: &&Op| op.makes_version() && op.outcome == Outcome::Ok;
    let first = ops.iter().filter(stored).map(|op| op.ret).min()?;
    let at = ops.iter().position(|op| op.call > first && op.outcome == Outcome::NotFound)?;
    let store = ops.iter().position(|op| stored(&op) && op.ret == first)?;
    Some(Found {
        title: "a stored item was not found",
        ops: vec![store, at],
        reason: "Operation %1 had returned before operation %2 was called, and no operation removed the item.".into(),
    })
}

/// The fewest operations since the last quiet moment that still fit in no order.
fn thin_out(ops: &[Op], stuck: &Stuck, store: Store, values: &Interner) -> Vec<Op> {
    let end = ops[stuck.at].ret;
    let quiet = &stuck.quiet;
    let deadline = Instant::now() + TIME_MAX;
    let window = quiet.outstanding.iter().copied().chain(quiet.from..ops.len()).map(|i| ops[i]);
    // As it is searched, and as it was recorded. Later returns do not matter: who had not returned by then may take
    // effect later, or never.
    let mut kept: Vec<(Op, Op)> = window
        .filter(|op| op.call <= end)
        .map(|op| (if op.ret > end { unanswered(op) } else { op }, op))
        .filter(|(op, _)| matters(op))
        .collect();
    let fails = |ops: &[(Op, Op)]| {
        let mut sorted: Vec<Op> = ops.iter().map(|(op, _)| *op).collect();
        sorted.sort_by_key(|op| (op.call, op.ret));
        bind(&mut sorted, values);
        matches!(Search::new(&sorted, values, store, BUDGET).run_from(quiet), Verdict::Violation(_))
    };
    if fails(&kept) {
        let mut chunk = kept.len();
        while chunk > 0 && Instant::now() < deadline {
            let mut from = 0;
            while from < kept.len() && Instant::now() < deadline {
                let to = (from + chunk).min(kept.len());
                let certain = kept[from..to].iter().any(|(op, _)| !op.is_unknown());
                let relaxed = kept[from..to].iter().filter(|(op, _)| !op.is_observer());
                let relaxed: Vec<(Op, Op)> = relaxed.map(|(op, recorded)| (unanswered(*op), *recorded)).collect();
                let attempt = [&kept[..from], &relaxed[..], &kept[to..]].concat();
                if certain && fails(&attempt) {
                    from += relaxed.len();
                    kept = attempt;
                } else {
                    from = to;
                }
            }
            chunk /= 2;
        }
    }
    // Of the others only those are worth showing whose value somebody read.
    let read: HashSet<u32> = kept.iter().filter(|(op, _)| op.request == Request::Get).map(|(op, _)| op.value).collect();
    kept.retain(|(op, _)| !op.is_unknown() || read.contains(&op.value));
    kept.sort_by_key(|(op, _)| (op.call, op.ret));
    kept.into_iter().map(|(_, recorded)| recorded).collect()
}

/// The same operation as if its client had never heard of it again.
fn unanswered(op: Op) -> Op {
    if op.is_observer() && op.request == Request::Get {
        return Op { ret: NEVER, outcome: Outcome::Unknown, value: ABSENT, cas: 0, ..op };
    }
    Op { ret: NEVER, outcome: Outcome::Unknown, cas: 0, number: None, time_ms: None, ..op }
}
