//! **same-outcome**: all replicas that execute a conditional write report the same status and result.

use std::collections::HashMap;

use underpass_protocol::wire::SessionId;

use super::{Applied, Violation, violated};

/// Checks all that any replica of one configuration ever applied.
pub fn check<'a>(applied: impl IntoIterator<Item = &'a Applied>) -> Result<(), Violation> {
    let mut first: HashMap<_, &Applied> = HashMap::new();
    for this in applied.into_iter().filter(|applied| applied.kind.is_conditional()) {
        let before = *first.entry((this.session, this.request)).or_insert(this);
        same(before, this)?;
    }
    Ok(())
}

/// Watches configurations come and go: one request may be ordered again, but each time it has one outcome.
#[derive(Clone, Debug, Default)]
pub struct Monitor(HashMap<(SessionId, u64, u64), Applied>);

impl Monitor {
    /// A replica applied a write, or was found to have recorded it.
    pub fn applied(&mut self, applied: &Applied) -> Result<(), Violation> {
        if !applied.kind.is_conditional() {
            return Ok(());
        }
        match self.0.get(&(applied.session, applied.request, applied.seq)) {
            Some(before) => same(before, applied),
            None => {
                self.0.insert((applied.session, applied.request, applied.seq), applied.clone());
                Ok(())
            }
        }
    }
}

fn same(before: &Applied, this: &Applied) -> Result<(), Violation> {
    if (before.status, before.result) != (this.status, this.result) {
        return violated(
            "same-outcome",
            format!(
                "{} of key {:?}, version {}: replica {} reports {:?} and {}, replica {} {:?} and {}",
                this.kind,
                this.key,
                this.seq,
                before.replica,
                before.status,
                before.result,
                this.replica,
                this.status,
                this.result
            ),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use underpass_protocol::wire::{Kind, Status};

    use super::{super::applied, *};

    #[test]
    fn agreement_holds() {
        let incr = |replica| Applied { result: 4, ..applied(replica, 1, 5, Kind::Incr, Status::Ok) };
        check(&[incr(0), incr(1), applied(0, 2, 6, Kind::Add, Status::NotStored)]).unwrap();
    }

    #[test]
    fn another_status_or_result_breaks_it() {
        let incr = |replica, result| Applied { result, ..applied(replica, 1, 5, Kind::Incr, Status::Ok) };
        assert!(check(&[incr(0, 4), incr(1, 5)]).unwrap_err().what.contains("replica 1 Ok and 5"));
        let add = |replica, status| applied(replica, 1, 5, Kind::Add, status);
        assert!(check(&[add(0, Status::Ok), add(1, Status::NotStored)]).is_err());
    }

    #[test]
    fn ordered_again_it_may_have_another_outcome_but_only_one() {
        let mut monitor = Monitor::default();
        let add = |replica, seq, status| applied(replica, 1, seq, Kind::Add, status);
        monitor.applied(&add(0, 5, Status::Ok)).unwrap();
        monitor.applied(&add(1, 6, Status::NotStored)).unwrap();
        assert!(monitor.applied(&add(1, 5, Status::NotStored)).is_err());
    }
}
