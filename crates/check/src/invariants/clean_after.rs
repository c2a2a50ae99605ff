//! **clean-after**: with faults over and clients done, the dirty set is empty, all replicas are identical.

use std::collections::BTreeMap;

use super::{Violation, violated};
use crate::history::Text;

const NAME: &str = "clean-after";

/// What a replica holds of one key: the newest version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Sequence number of the version.
    pub seq: u64,
    /// The item's cas.
    pub cas: u64,
    /// Its content; absent for a tombstone.
    pub value: Option<Text>,
    /// When it expires, in milliseconds of the packets' time; 0: never.
    pub expires_ms: u64,
}

/// All that a replica holds, by key.
pub type Dump = BTreeMap<Text, Item>;

/// Checks the end of a run. `dirty`: the sequence numbers of the ways still taken in the dirty set.
///
/// A tombstone is the same as no item: when it is dropped depends on the heartbeat.
pub fn check(dirty: &[u64], dumps: &[Dump]) -> Result<(), Violation> {
    if let Some(seq) = dirty.first() {
        return violated(NAME, format!("{} keys are still dirty, one with the write {seq}", dirty.len()));
    }
    let Some((first, others)) = dumps.split_first() else { return Ok(()) };
    let live = |dump: &Dump| dump.iter().filter(|(_, item)| item.value.is_some()).count();
    for (i, other) in others.iter().enumerate() {
        for (key, item) in first.iter().filter(|(_, item)| item.value.is_some()) {
            if other.get(key) != Some(item) {
                let there = other.get(key);
                return violated(NAME, format!("key {key:?}: replica 0 has {item:?}, replica {} has {there:?}", i + 1));
            }
        }
        if live(first) != live(other) {
            let extra = other.iter().find(|(key, item)| item.value.is_some() && !first.contains_key(*key));
            let (held, lacking) = (live(other), live(first));
            return violated(
                NAME,
                format!("replica {} has {held} items, replica 0 has {lacking}; the first more is {extra:?}", i + 1),
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dump(items: &[(&str, Option<&str>)]) -> Dump {
        let item = |value: Option<&str>| Item { seq: 7, cas: 7, value: value.map(Text::from), expires_ms: 0 };
        items.iter().map(|(key, value)| (Text::from(*key), item(*value))).collect()
    }

    #[test]
    fn identical_replicas_and_an_empty_dirty_set_hold() {
        let full = dump(&[("a", Some("1")), ("b", Some("2"))]);
        check(&[], &[full.clone(), full.clone(), full.clone()]).unwrap();
        check(&[], &[dump(&[("a", None)]), dump(&[])]).unwrap();
        check(&[], &[]).unwrap();
    }

    #[test]
    fn any_difference_breaks_it() {
        let full = dump(&[("a", Some("1")), ("b", Some("2"))]);
        assert!(check(&[9], std::slice::from_ref(&full)).unwrap_err().what.contains("write 9"));
        let other = dump(&[("a", Some("1")), ("b", Some("3"))]);
        assert!(check(&[], &[full.clone(), full.clone(), other]).unwrap_err().what.contains("replica 2 has"));
        let fewer = dump(&[("a", Some("1")), ("b", None)]);
        assert!(check(&[], &[full.clone(), fewer.clone()]).is_err());
        assert!(check(&[], &[fewer, full]).is_err());
    }
}
