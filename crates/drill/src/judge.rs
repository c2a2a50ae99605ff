//! What a drill's history says: whether it is linearizable, which acknowledged writes are gone, how long nobody was served.

use std::{collections::HashMap, ops::Range, time::Duration};

use underpass_check::{
    history::{Operation, Outcome, Request as Op, Text},
    linearizability::{Checker, Options, Report},
};

/// Longest times without the end of any operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pauses {
    /// Of reads.
    pub reads: Duration,
    /// Of writes.
    pub writes: Duration,
}

/// Whether a client knows how it ended, and that it was served.
fn is_answered(operation: &Operation) -> bool {
    operation.return_ns.is_some() && !matches!(operation.outcome, Outcome::Failed | Outcome::Unknown)
}

/// The longest gaps between ends of operations that reach into a window, in nanoseconds.
pub fn pauses(history: &[Operation], window: &Range<u64>) -> Pauses {
    let longest = |reads: bool| {
        let ends = history.iter().filter(|operation| (operation.op == Op::Get) == reads && is_answered(operation));
        let mut ends: Vec<u64> = ends.filter_map(|operation| operation.return_ns).collect();
        ends.sort_unstable();
        let inside = ends.iter().copied().filter(|end| *end > window.start);
        let mut last = ends.iter().copied().rfind(|end| *end <= window.start).unwrap_or(window.start);
        let mut longest = 0;
        for end in inside.chain([window.end]) {
            if last >= window.end {
                break;
            }
            longest = longest.max(end.saturating_sub(last));
            last = end;
        }
        Duration::from_nanos(longest)
    };
    Pauses { reads: longest(true), writes: longest(false) }
}

/// The verdict on a history.
#[derive(Debug)]
pub struct Judgement {
    /// The checker's report.
    pub report: Report,
    /// Acknowledged writes that the last reads do not know of, in words.
    pub lost: Vec<String>,
}

impl Judgement {
    /// Whether nothing is wrong.
    #[cfg(test)]
    pub fn is_good(&self) -> bool {
        self.report.verdict() == underpass_check::linearizability::Verdict::Linearizable && self.lost.is_empty()
    }
}

/// Judges a history whose operations called at or after `last_ns` are the last reads.
pub fn judge(history: &[Operation], last_ns: u64) -> Judgement {
    let mut checker = Checker::new();
    history.iter().for_each(|operation| checker.add(operation));
    Judgement { report: checker.check(&Options::default()), lost: lost(history, last_ns) }
}

/// Acknowledged writes that are gone: beside the checker, by sequence numbers alone. An item's `cas` is the sequence number of
/// the last write that changed it, so a last read of a lower one, or of none, misses the acknowledged write with the highest.
fn lost(history: &[Operation], last_ns: u64) -> Vec<String> {
    #[derive(Default)]
    struct Key {
        /// The highest acknowledged write that changed the item: its number, and whether it removed it.
        highest: (u64, bool),
        /// A removal of unknown outcome may have come after it.
        may_be_removed: bool,
    }
    let mut keys: HashMap<&Text, Key> = HashMap::new();
    for operation in history.iter().filter(|operation| operation.op != Op::Get && operation.call_ns < last_ns) {
        let key = keys.entry(&operation.key).or_default();
        match (operation.outcome, operation.cas) {
            (Outcome::Ok, Some(seq)) if operation.op != Op::Touch => {
                key.highest = key.highest.max((seq, operation.op == Op::Delete));
            }
            (Outcome::Unknown, _) => key.may_be_removed |= operation.op == Op::Delete,
            _ => {}
        }
    }
    let last_reads = history.iter().filter(|operation| operation.op == Op::Get && operation.call_ns >= last_ns);
    let misses = last_reads.filter_map(|read| {
        let key = keys.get(&read.key)?;
        let (seq, removed) = key.highest;
        let is_lost = match read.outcome {
            Outcome::Ok => read.cas.is_some_and(|cas| cas < seq),
            Outcome::NotFound => seq > 0 && !removed && !key.may_be_removed,
            _ => false,
        };
        is_lost.then(|| format!("{read}: write {seq} of {} was acknowledged", read.key.excerpt()))
    });
    misses.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str, cas: u64, call_ns: u64) -> Operation {
        let mut put = Operation::call(1, Op::Put, key, call_ns);
        put.value = Some(format!("{cas}").as_str().into());
        put.finish(Outcome::Ok, call_ns + 5);
        put.cas = Some(cas);
        put
    }

    fn get(key: &str, cas: Option<u64>, call_ns: u64) -> Operation {
        let mut get = Operation::call(1, Op::Get, key, call_ns);
        match cas {
            Some(cas) => {
                get.value = Some(format!("{cas}").as_str().into());
                get.cas = Some(cas);
                get.finish(Outcome::Ok, call_ns + 5);
            }
            None => get.finish(Outcome::NotFound, call_ns + 5),
        }
        get
    }

    #[test]
    fn pauses_are_those_of_the_window() {
        let at = |end: u64| get("k", Some(1), end - 5);
        let history = [at(10), at(20), at(90), at(100), at(500)];
        assert_eq!(pauses(&history, &(30..95)).reads, Duration::from_nanos(70));
        assert_eq!(pauses(&history, &(95..120)).reads, Duration::from_nanos(400), "it began in the window");
        assert_eq!(pauses(&history, &(95..120)).writes, Duration::from_nanos(25), "nobody was served");
        assert_eq!(pauses(&history, &(600..700)).reads, Duration::from_nanos(200));
        let mut failed = at(50);
        failed.outcome = Outcome::Failed;
        failed.value = None;
        failed.cas = None;
        assert_eq!(pauses(&[at(20), failed, at(90)], &(30..95)).reads, Duration::from_nanos(70), "no service");
    }

    #[test]
    fn an_acknowledged_write_that_is_gone_is_found_in_two_ways() {
        let good = [put("k", 7, 0), put("k", 8, 10), get("k", Some(8), 100)];
        let judgement = judge(&good, 100);
        assert!(judgement.is_good(), "{:?}", judgement);
        for last in [Some(7), None] {
            let bad = [put("k", 7, 0), put("k", 8, 10), get("k", last, 100)];
            let judgement = judge(&bad, 100);
            assert_eq!(judgement.report.verdict(), underpass_check::linearizability::Verdict::Violation);
            assert_eq!(judgement.lost.len(), 1, "{last:?}");
            assert!(!judgement.is_good());
        }
        let mut removal = Operation::call(1, Op::Delete, "k", 20);
        assert!(judge(&[put("k", 7, 0), removal.clone(), get("k", None, 100)], 100).is_good(), "it may be removed");
        removal.finish(Outcome::Ok, 25);
        removal.cas = Some(9);
        assert!(judge(&[put("k", 7, 0), removal, get("k", None, 100)], 100).is_good(), "it was removed");
    }
}
