//! **one-effect**: a (session, request) creates at most one version of its key, and none once aborted.

use std::collections::HashMap;

use underpass_protocol::wire::Status;

use super::{Applied, Violation, violated};

const NAME: &str = "one-effect";

/// Checks all that any replica ever applied.
pub fn check<'a>(applied: impl IntoIterator<Item = &'a Applied>) -> Result<(), Violation> {
    let mut first: HashMap<_, &Applied> = HashMap::new();
    for this in applied {
        let before = *first.entry((this.session, this.request)).or_insert(this);
        let name = format!("request {} of session {:#x}", this.request, this.session.0);
        if (before.status == Status::Aborted) != (this.status == Status::Aborted) {
            return violated(
                NAME,
                format!(
                    "{name} is {:?} at replica {} and {:?} at replica {}",
                    before.status, before.replica, this.status, this.replica
                ),
            );
        }
        if (before.seq, &before.key) != (this.seq, &this.key) && this.status != Status::Aborted {
            return violated(
                NAME,
                format!(
                    "{name} made version {} of key {:?} at replica {} and version {} of key {:?} at replica {}",
                    before.seq, before.key, before.replica, this.seq, this.key, this.replica
                ),
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use underpass_protocol::wire::Kind;

    use super::{super::applied, *};

    #[test]
    fn the_same_version_everywhere_holds() {
        let writes = [
            applied(0, 1, 5, Kind::Put, Status::Ok),
            applied(1, 1, 5, Kind::Put, Status::Ok),
            applied(0, 2, 6, Kind::Put, Status::Ok),
            applied(0, 3, 7, Kind::Put, Status::Aborted),
        ];
        check(&writes).unwrap();
    }

    #[test]
    fn two_versions_or_one_after_an_abort_break_it() {
        let put = |replica, seq, status| applied(replica, 1, seq, Kind::Put, status);
        let violation = check(&[put(0, 5, Status::Ok), put(1, 6, Status::Ok)]).unwrap_err();
        assert!(violation.what.contains("version 5") && violation.what.contains("version 6"), "{violation}");
        assert!(check(&[put(0, 5, Status::Aborted), put(1, 5, Status::Ok)]).is_err());
        assert!(check(&[put(0, 5, Status::Ok), Applied { key: "other".into(), ..put(1, 5, Status::Ok) }]).is_err());
    }
}
