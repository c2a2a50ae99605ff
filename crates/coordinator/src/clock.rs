//! The clocks of a coordinator.

use nix::time::{ClockId, clock_gettime};

/// Milliseconds of CLOCK_MONOTONIC: the clock of leases and of idle sessions, in the kernel's data path too.
pub fn now_ms() -> u64 {
    (read_ns(ClockId::CLOCK_MONOTONIC) / 1_000_000) as u64
}

/// From CLOCK_MONOTONIC to the system's time, in milliseconds.
pub fn wall_offset_ms() -> i64 {
    (read_ns(ClockId::CLOCK_REALTIME) - read_ns(ClockId::CLOCK_MONOTONIC)) / 1_000_000
}

fn read_ns(clock: ClockId) -> i64 {
    let now = clock_gettime(clock).expect("Linux has this clock");
    now.tv_sec() * 1_000_000_000 + now.tv_nsec()
}

/// Tells that this host was suspended: CLOCK_BOOTTIME went on, and CLOCK_MONOTONIC did not.
#[derive(Debug)]
pub struct Suspension {
    /// The least that the difference between the two can have been so far.
    least_ns: i64,
}

/// Shorter ones are not told from a late reading; the leases' clocks may differ by more.
const SUSPENSION_NS: i64 = 5_000_000;

impl Suspension {
    /// Tells of suspensions from now on.
    pub fn new() -> Self {
        // The largest lower bound of a few: one of these readings was not interrupted.
        Self { least_ns: (0..16).map(|_| difference_ns()).max().expect("there are some") }
    }

    /// Whether the host was suspended since this was asked last.
    pub fn has_been(&mut self) -> bool {
        self.is_beyond(difference_ns())
    }

    fn is_beyond(&mut self, least_ns: i64) -> bool {
        let jumped = least_ns > self.least_ns + SUSPENSION_NS;
        self.least_ns = self.least_ns.max(least_ns);
        jumped
    }
}

/// A lower bound of CLOCK_BOOTTIME less CLOCK_MONOTONIC: however long it takes to read both, it is never too high.
fn difference_ns() -> i64 {
    let boot_ns = read_ns(ClockId::CLOCK_BOOTTIME);
    boot_ns - read_ns(ClockId::CLOCK_MONOTONIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wall_clock_time_is_monotonic_time_and_the_offset() {
        let now = || now_ms() as i64 + wall_offset_ms();
        let real = || read_ns(ClockId::CLOCK_REALTIME) / 1_000_000;
        let (before, at, after) = (real(), now(), real());
        assert!((before - 2..=after + 2).contains(&at));
    }

    #[test]
    fn a_jump_of_the_boot_clock_is_a_suspension_once() {
        let mut suspension = Suspension::new();
        assert!(!suspension.has_been());
        let base_ns = suspension.least_ns;
        assert!(!suspension.is_beyond(base_ns - 1_000_000_000), "a reading that took long");
        assert!(!suspension.is_beyond(base_ns + SUSPENSION_NS));
        assert!(suspension.is_beyond(base_ns + 2 * SUSPENSION_NS + 1));
        assert!(!suspension.is_beyond(base_ns + 2 * SUSPENSION_NS + 1));
    }
}
