//! What clients did, kept small in memory, to be checked for linearizability at the end.

use std::{collections::HashSet, path::Path};

use anyhow::{Context, Result as Anyhow};
use underpass_check::{
    history::{HistoryWriter, Operation, Outcome, Request},
    linearizability::{Checker, Options, Report},
};

use crate::workload::key;

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Result {
    /// Done.
    Ok,
    /// There was no item.
    NotFound,
    /// Definitely without effect.
    Failed,
    /// Without an answer.
    Unknown,
}

/// One operation of one client: a get or a put.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Who called.
    pub client: u32,
    /// A put; else a get.
    pub write: bool,
    /// How it ended.
    pub result: Result,
    /// Number of the item.
    pub item: u64,
    /// Number of the value written or read.
    pub value: u64,
    /// When it was called, in nanoseconds.
    pub call_ns: u64,
    /// When it ended.
    pub return_ns: u64,
    /// The write's sequence number, or the cas that was read; 0: none.
    pub cas: u64,
}

/// Operations, in any order.
pub type Log = Vec<Record>;

impl Record {
    /// In the words of `docs/history.md`. A value is named by its number: its other bytes were checked when it was read.
    fn operation(&self, key_size: usize) -> Operation {
        let op = if self.write { Request::Put } else { Request::Get };
        let key = String::from_utf8(key(self.item, key_size)).expect("keys are ASCII");
        let mut operation = Operation::call(self.client.into(), op, key.as_str(), self.call_ns);
        if self.write || self.result == Result::Ok {
            operation.value = Some(format!("{:x}", self.value).as_str().into());
        }
        let outcome = match self.result {
            Result::Ok => Outcome::Ok,
            Result::NotFound => Outcome::NotFound,
            Result::Failed => Outcome::Failed,
            Result::Unknown => return operation,
        };
        operation.finish(outcome, self.return_ns);
        if self.result == Result::Ok && self.cas != 0 {
            operation.cas = Some(self.cas);
        }
        operation
    }
}

/// Checks a history for linearizability, and writes it to a file if one is named. Of the items that were only loaded, and
/// never asked for again, there is nothing to check.
///
/// # Errors
/// When the file cannot be written.
pub fn check(loads: &[Log], logs: &[Log], key_size: usize, file: Option<&Path>) -> Anyhow<Report> {
    let touched: HashSet<u64> = logs.iter().flatten().map(|record| record.item).collect();
    let records = || {
        let loads = loads.iter().flatten().filter(|record| touched.contains(&record.item));
        loads.chain(logs.iter().flatten())
    };
    if let Some(path) = file {
        let writer = HistoryWriter::create(path)?;
        let in_context = || format!("cannot write {}", path.display());
        for record in records() {
            writer.record(&record.operation(key_size)).with_context(in_context)?;
        }
        writer.finish().with_context(in_context)?;
    }
    let mut checker = Checker::new();
    for record in records() {
        checker.add(&record.operation(key_size));
    }
    Ok(checker.check(&Options::default()))
}

#[cfg(test)]
mod tests {
    use underpass_check::{history::read_file, linearizability::Verdict};

    use super::*;

    fn record(write: bool, result: Result, value: u64, call_ns: u64, return_ns: u64) -> Record {
        Record { client: 1, write, result, item: 7, value, call_ns, return_ns, cas: 0 }
    }

    #[test]
    fn what_clients_saw_is_checked_against_what_was_loaded() {
        let loads =
            vec![vec![record(true, Result::Ok, 10, 0, 5), Record { item: 8, ..record(true, Result::Ok, 11, 0, 5) }]];
        let good = vec![vec![
            record(false, Result::Ok, 10, 6, 7),
            record(true, Result::Unknown, 12, 8, 9),
            record(true, Result::Failed, 13, 8, 9),
            record(false, Result::Ok, 12, 20, 21),
        ]];
        let path = std::env::temp_dir().join(format!("underpass-history-{}.jsonl", std::process::id()));
        let report = check(&loads, &good, 16, Some(&path)).unwrap();
        assert_eq!(report.verdict(), Verdict::Linearizable, "{report}");
        assert_eq!((report.operations, report.keys), (5, 1), "an item that was only loaded is left out");
        let mut lines = 0;
        read_file(&path, |_| lines += 1).unwrap();
        assert_eq!(lines, 5);
        std::fs::remove_file(&path).unwrap();

        for bad in [
            record(false, Result::NotFound, 0, 6, 7),
            record(false, Result::Ok, 13, 30, 31),
            record(false, Result::Ok, 10, 30, 31),
        ] {
            let logs = vec![[good[0].clone(), vec![bad]].concat()];
            let verdict = check(&loads, &logs, 16, None).unwrap().verdict();
            assert_eq!(verdict, Verdict::Violation, "{bad:?} was believed");
        }
    }
}
