//! **committed-everywhere**: a committed write, or a newer version of its key, is held (or marked left out) by every active
//! replica, and by every learner once it has copied that key.

use std::collections::HashMap;

use super::{Committed, Violation, violated};
use crate::history::Text;

/// What a replica that serves holds of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Index of the replica.
    pub replica: u8,
    /// The key.
    pub key: Text,
    /// Sequence number of the newest version it holds.
    pub newest: u64,
    /// Highest sequence number that it left out, knowing so; 0: none.
    pub lost_high: u64,
}

/// Checks that each of `replicas` holds what is committed. A key is in `held` once for each replica that has anything of
/// it; a tombstone that was dropped because it was stable must be reported with its sequence number, or its commit left out.
pub fn check(replicas: &[u8], committed: &[Committed], held: &[Held]) -> Result<(), Violation> {
    let held: HashMap<(u8, &Text), &Held> = held.iter().map(|held| ((held.replica, &held.key), held)).collect();
    for Committed { key, seq } in committed {
        for &replica in replicas {
            let newest = held.get(&(replica, key)).map_or(0, |held| held.newest.max(held.lost_high));
            if newest < *seq {
                return violated(
                    "committed-everywhere",
                    format!("write {seq} of key {key:?} is committed, but replica {replica} holds only {newest}"),
                );
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{super::committed, *};

    fn held(replica: u8, newest: u64, lost_high: u64) -> Held {
        Held { replica, key: "k".into(), newest, lost_high }
    }

    #[test]
    fn the_write_a_newer_one_or_a_mark_will_do() {
        check(&[0, 1, 2], &[committed(5)], &[held(0, 5, 0), held(1, 6, 0), held(2, 3, 5)]).unwrap();
    }

    #[test]
    fn an_older_version_or_nothing_will_not() {
        let violation = check(&[0, 1], &[committed(5)], &[held(0, 5, 0), held(1, 4, 0)]).unwrap_err();
        assert!(violation.what.contains("replica 1 holds only 4"), "{violation}");
        assert!(check(&[0, 1], &[committed(5)], &[held(0, 5, 0)]).is_err());
    }
}
