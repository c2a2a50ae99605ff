//! **same-outcome**: all replicas that execute a conditional write report the same status and result.

use std::collections::HashMap;

use super::{Applied, Violation, violated};

/// Checks all that any replica ever applied.
pub fn check<'a>(applied: impl IntoIterator<Item = &'a Applied>) -> Result<(), Violation> {
    let mut first: HashMap<_, &Applied> = HashMap::new();
    for this in applied.into_iter().filter(|applied| applied.kind.is_conditional()) {
        let before = *first.entry((this.session, this.request)).or_insert(this);
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
}
