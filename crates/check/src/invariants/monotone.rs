//! **monotone**: the newest committed version of a key at a replica never goes back within its life.

use std::collections::HashMap;

use super::{Violation, violated};
use crate::history::Text;

/// The newest committed version of a key at a replica, at some moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newest {
    /// Index of the replica.
    pub replica: u8,
    /// Its life: a replica that restarts has another one and starts empty.
    pub incarnation: u64,
    /// The key.
    pub key: Text,
    /// Sequence number of the version; 0: none.
    pub seq: u64,
}

/// Checks observations in the order in which they were made.
pub fn check<'a>(observations: impl IntoIterator<Item = &'a Newest>) -> Result<(), Violation> {
    let mut highest: HashMap<(u8, u64, &Text), u64> = HashMap::new();
    for Newest { replica, incarnation, key, seq } in observations {
        let before = highest.entry((*replica, *incarnation, key)).or_insert(*seq);
        if seq < before {
            let what = format!("key {key:?} at replica {replica} went back from version {before} to {seq}");
            return violated("monotone", what);
        }
        *before = *seq;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn newest(replica: u8, incarnation: u64, seq: u64) -> Newest {
        Newest { replica, incarnation, key: "k".into(), seq }
    }

    #[test]
    fn forwards_in_each_life_of_each_replica() {
        check(&[newest(0, 1, 3), newest(1, 1, 2), newest(0, 1, 3), newest(0, 1, 9), newest(0, 2, 1)]).unwrap();
    }

    #[test]
    fn back_within_one_life_breaks_it() {
        let violation = check(&[newest(0, 1, 3), newest(1, 1, 9), newest(0, 1, 2)]).unwrap_err();
        assert!(violation.what.contains("replica 0 went back from version 3 to 2"), "{violation}");
    }
}
