//! **read-committed**: a version returned to a client is committed, or superseded by a committed one, when returned.

use std::collections::HashMap;

use super::{Committed, Violation, violated};
use crate::history::Text;

/// Something that happened, in the order in which it did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The coordinator committed a write.
    Committed(Committed),
    /// A replica answered a read.
    Read {
        /// Index of the replica.
        replica: u8,
        /// The key.
        key: Text,
        /// Sequence number of the version returned; 0: there was none.
        seq: u64,
    },
}

/// Checks a run.
pub fn check<'a>(events: impl IntoIterator<Item = &'a Event>) -> Result<(), Violation> {
    let mut newest: HashMap<&Text, u64> = HashMap::new();
    for event in events {
        match event {
            Event::Committed(Committed { key, seq }) => {
                let newest = newest.entry(key).or_default();
                *newest = (*newest).max(*seq);
            }
            Event::Read { replica, key, seq } => {
                let newest = newest.get(key).copied().unwrap_or(0);
                if *seq > newest {
                    return violated(
                        "read-committed",
                        format!(
                            "replica {replica} returned version {seq} of key {key:?} while the newest committed was {newest}"
                        ),
                    );
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{super::committed, *};

    fn read(seq: u64) -> Event {
        Event::Read { replica: 1, key: "k".into(), seq }
    }

    #[test]
    fn committed_or_superseded_holds() {
        check(&[read(0), Event::Committed(committed(5)), read(5), read(3)]).unwrap();
    }

    #[test]
    fn a_pending_version_breaks_it() {
        let violation = check(&[Event::Committed(committed(5)), read(6), Event::Committed(committed(6))]).unwrap_err();
        assert!(violation.what.contains("version 6") && violation.what.contains("was 5"), "{violation}");
    }
}
