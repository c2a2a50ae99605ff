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
    let mut monitor = Monitor::default();
    observations.into_iter().try_for_each(|newest| monitor.observe(newest))
}

/// Watches all replicas.
#[derive(Clone, Debug, Default)]
pub struct Monitor(HashMap<(u8, u64), HashMap<Text, u64>>);

impl Monitor {
    /// The next observation.
    pub fn observe(&mut self, newest: &Newest) -> Result<(), Violation> {
        let Newest { replica, incarnation, ref key, seq } = *newest;
        let highest = self.0.entry((replica, incarnation)).or_default();
        match highest.get_mut(key) {
            Some(before) if seq < *before => violated(
                "monotone",
                format!("key {key:?} at replica {replica} went back from version {before} to {seq}"),
            ),
            Some(before) => {
                *before = seq;
                Ok(())
            }
            None => {
                highest.insert(key.clone(), seq);
                Ok(())
            }
        }
    }
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
