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
    let mut monitor = Monitor::default();
    for event in events {
        match event {
            Event::Committed(committed) => monitor.committed(committed),
            Event::Read { replica, key, seq } => monitor.read(*replica, key, *seq)?,
        }
    }
    Ok(())
}

/// Watches one shard.
#[derive(Clone, Debug, Default)]
pub struct Monitor {
    newest: HashMap<Text, u64>,
}

impl Monitor {
    /// A write was committed.
    pub fn committed(&mut self, committed: &Committed) {
        match self.newest.get_mut(&committed.key) {
            Some(newest) => *newest = committed.seq.max(*newest),
            None => drop(self.newest.insert(committed.key.clone(), committed.seq)),
        }
    }

    /// The newest committed version of a key; 0: none.
    pub fn newest(&self, key: &Text) -> u64 {
        self.newest.get(key).copied().unwrap_or(0)
    }

    /// The newest committed version of every key.
    pub fn all(&self) -> impl Iterator<Item = Committed> + '_ {
        self.newest.iter().map(|(key, seq)| Committed { key: key.clone(), seq: *seq })
    }

    /// A replica answered a read with this version; 0: there was none.
    pub fn read(&self, replica: u8, key: &Text, seq: u64) -> Result<(), Violation> {
        let newest = self.newest(key);
        if seq <= newest {
            return Ok(());
        }
        violated(
            "read-committed",
            format!("replica {replica} returned version {seq} of key {key:?} while the newest committed was {newest}"),
        )
    }
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
