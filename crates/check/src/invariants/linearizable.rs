//! **linearizable**: every history of a key is linearizable, timeouts counted as unknown.

use super::Violation;
use crate::{
    history::Operation,
    linearizability::{Checker, Options, Report, Verdict},
};

const NAME: &str = "linearizable";

/// Checks a history. Undecided is not ok.
pub fn check<'a>(history: impl IntoIterator<Item = &'a Operation>) -> Result<(), Violation> {
    let mut checker = Checker::new();
    for operation in history {
        checker.add(operation);
    }
    let report = checker.check(&Options::default());
    verify(&report).map_err(|violation| Violation { what: format!("{}\n{report}", violation.what), ..violation })
}

/// Whether a report says that a history is linearizable.
pub fn verify(report: &Report) -> Result<(), Violation> {
    let what = match report.verdict() {
        Verdict::Linearizable => return Ok(()),
        Verdict::Violation => format!("the history is not linearizable on {} of its keys", report.violating_keys),
        Verdict::Undecided => format!(
            "{} keys of the history could not be decided within the budget, so nothing is proved",
            report.undecided.len()
        ),
    };
    Err(Violation { invariant: NAME, what })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{Outcome, Request};

    #[test]
    fn a_read_of_what_was_acknowledged_holds_and_a_loss_does_not() {
        let mut put = Operation::call(1, Request::Put, "k", 0);
        put.value = Some("a".into());
        put.finish(Outcome::Ok, 10);
        let mut get = Operation::call(2, Request::Get, "k", 20);
        get.value = Some("a".into());
        get.finish(Outcome::Ok, 30);
        check([&put, &get]).unwrap();
        get.value = None;
        get.outcome = Outcome::NotFound;
        let violation = check([&put, &get]).unwrap_err();
        assert!(
            violation.to_string().starts_with("linearizable: ") && violation.what.contains("stored item"),
            "{violation}"
        );
    }
}
