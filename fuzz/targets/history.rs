//! A recorded history from anybody: reading never panics, what is read survives being written, and the checker's verdict
//! depends neither on the order of the lines nor, once it is good, on a read being left out.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use underpass_check::{
    history::{self, Operation, Request},
    linearizability::{Checker, Options, Verdict},
};

/// Longer histories say nothing more, only slower.
const CHECKED_MAX: usize = 32;
const OPTIONS: Options = Options { budget: 20_000, threads: 1 };

fuzz_target!(|bytes: &[u8]| {
    let mut operations = Vec::new();
    // What was read before a line that is refused counts too.
    let _ = history::read(bytes, Path::new("history"), |operation| operations.push(operation));
    for operation in &operations {
        assert_eq!(read_again(operation), *operation);
    }
    operations.truncate(CHECKED_MAX);
    check(&operations);
});

fn read_again(operation: &Operation) -> Operation {
    let line = serde_json::to_vec(operation).expect("operations always serialise");
    let mut again = None;
    history::read(&line[..], Path::new("again"), |operation| again = Some(operation)).expect("it was valid");
    again.expect("one line")
}

fn check(operations: &[Operation]) {
    let verdict = verdict(operations.iter());
    let reversed = self::verdict(operations.iter().rev());
    if verdict == Verdict::Undecided || reversed == Verdict::Undecided {
        return;
    }
    assert_eq!(verdict, reversed, "the order of the lines decided");
    let Some(get) = operations.iter().position(|operation| operation.op == Request::Get) else { return };
    if verdict == Verdict::Linearizable {
        let fewer = operations.iter().enumerate().filter(|(at, _)| *at != get).map(|(_, operation)| operation);
        assert_ne!(self::verdict(fewer), Verdict::Violation, "a read less, and no order explains the rest");
    }
}

fn verdict<'a>(operations: impl Iterator<Item = &'a Operation>) -> Verdict {
    let mut checker = Checker::new();
    operations.for_each(|operation| checker.add(operation));
    checker.check(&OPTIONS).verdict()
}
