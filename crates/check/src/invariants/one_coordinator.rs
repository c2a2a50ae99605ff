//! **one-coordinator**: no two coordinators have reads served or writes committed under overlapping leases.
//!
//! A coordinator is told from another by its tenure. It *acts* when it takes a bound for a read or orders a write, which it does
//! only within its lease. Once a later one has acted, nothing that an earlier one begins may end well: no read that it routes is
//! answered, and no write that it orders is committed. (What it began before may: it took effect before the later one acted.)

use std::collections::BTreeMap;

use super::{Violation, violated};

/// Watches one shard. Moments are times of one clock, whichever.
#[derive(Clone, Debug, Default)]
pub struct Monitor {
    /// When each tenure acted first.
    first: BTreeMap<u32, u64>,
}

impl Monitor {
    /// The coordinator of `tenure` took a bound or ordered a write.
    pub fn acted(&mut self, tenure: u32, at: u64) {
        let first = self.first.entry(tenure).or_insert(at);
        *first = at.min(*first);
    }

    /// Something that the coordinator of `tenure` began `at` that moment ended well: a read was answered, a write committed.
    pub fn done(&self, what: &str, tenure: u32, at: u64) -> Result<(), Violation> {
        match self.first.range(tenure + 1..).find(|(_, first)| **first < at) {
            None => Ok(()),
            Some((later, first)) => violated(
                "one-coordinator",
                format!(
                    "{what} that the coordinator of tenure {tenure} began at {at} ended well, but the one of tenure {later} \
                     has acted since {first}"
                ),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_began_before_the_next_one_acts_may_end_later() {
        let mut monitor = Monitor::default();
        monitor.acted(1, 10);
        monitor.acted(4, 50);
        monitor.acted(4, 60);
        monitor.done("a read", 1, 49).unwrap();
        monitor.done("a read", 4, 70).unwrap();
    }

    #[test]
    fn what_an_earlier_one_begins_after_that_may_not() {
        let mut monitor = Monitor::default();
        monitor.acted(4, 50);
        let violation = monitor.done("a read", 3, 51).unwrap_err();
        assert!(violation.what.contains("tenure 3") && violation.what.contains("tenure 4"), "{violation}");
    }
}
