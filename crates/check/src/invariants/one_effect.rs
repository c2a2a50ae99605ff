//! **one-effect**: a (session, request) creates at most one version of its key, and none once aborted.

use std::collections::{HashMap, HashSet};

use underpass_protocol::wire::{SessionId, Status};

use super::{Applied, Violation, violated};

const NAME: &str = "one-effect";

/// Checks all that the replicas of one configuration ever applied.
pub fn check<'a>(applied: impl IntoIterator<Item = &'a Applied>) -> Result<(), Violation> {
    let mut first: HashMap<_, &Applied> = HashMap::new();
    for this in applied {
        let before = *first.entry((this.session, this.request)).or_insert(this);
        let name = name(this.session, this.request);
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

/// Watches configurations come and go. A replica that a take-over left out may keep what it alone applied, and the request may
/// then be ordered anew; so versions are compared within one life of a replica, and those that are committed among all.
#[derive(Clone, Debug, Default)]
pub struct Monitor {
    applied: HashMap<(u8, u64, SessionId, u64), u64>,
    committed: HashMap<(SessionId, u64), u64>,
    aborted: HashSet<(SessionId, u64)>,
}

impl Monitor {
    /// A replica, in the life of this incarnation, applied a write.
    pub fn applied(&mut self, incarnation: u64, applied: &Applied) -> Result<(), Violation> {
        let Applied { replica, session, request, seq, ref key, .. } = *applied;
        let first = *self.applied.entry((replica, incarnation, session, request)).or_insert(seq);
        if first == seq {
            return Ok(());
        }
        let name = name(session, request);
        violated(NAME, format!("{name} made versions {first} and {seq} of key {key:?} at replica {replica}"))
    }

    /// A write was committed.
    pub fn committed(&mut self, session: SessionId, request: u64, seq: u64) -> Result<(), Violation> {
        let first = *self.committed.entry((session, request)).or_insert(seq);
        if first != seq {
            return violated(NAME, format!("{} was committed as {first} and as {seq}", name(session, request)));
        }
        self.exclusive(session, request)
    }

    /// A write was found to be, for good, without effect.
    pub fn aborted(&mut self, session: SessionId, request: u64) -> Result<(), Violation> {
        self.aborted.insert((session, request));
        self.exclusive(session, request)
    }

    fn exclusive(&self, session: SessionId, request: u64) -> Result<(), Violation> {
        match self.committed.get(&(session, request)) {
            Some(seq) if self.aborted.contains(&(session, request)) => {
                violated(NAME, format!("{} was aborted, and committed as {seq}", name(session, request)))
            }
            _ => Ok(()),
        }
    }
}

fn name(session: SessionId, request: u64) -> String {
    format!("request {request} of session {:#x}", session.0)
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

    #[test]
    fn lives_may_differ_in_what_was_never_committed() {
        let mut monitor = Monitor::default();
        let put = |replica, seq| applied(replica, 1, seq, Kind::Put, Status::Ok);
        monitor.applied(7, &put(0, 5)).unwrap();
        monitor.applied(8, &put(0, 6)).unwrap();
        monitor.applied(7, &put(1, 6)).unwrap();
        monitor.committed(SessionId::new(1, 0), 1, 6).unwrap();
        assert!(monitor.applied(7, &put(0, 6)).unwrap_err().what.contains("versions 5 and 6"));
        assert!(monitor.committed(SessionId::new(1, 0), 1, 5).unwrap_err().what.contains("as 6 and as 5"));
        assert!(monitor.aborted(SessionId::new(1, 0), 1).unwrap_err().what.contains("was aborted, and committed as 6"));
    }
}
