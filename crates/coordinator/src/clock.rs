//! The clocks of a coordinator.

use nix::time::{ClockId, clock_gettime};

/// Milliseconds of CLOCK_MONOTONIC: the clock of leases and of idle sessions, in the kernel's data path too.
pub fn now_ms() -> u64 {
    milliseconds(ClockId::CLOCK_MONOTONIC) as u64
}

/// From CLOCK_MONOTONIC to the packets' time, in milliseconds: the system's time now, or `at_least_ms` since 1970 if the
/// system's clock was set back behind it.
pub fn time_offset_ms(at_least_ms: u64) -> i64 {
    milliseconds(ClockId::CLOCK_REALTIME).max(at_least_ms as i64) - milliseconds(ClockId::CLOCK_MONOTONIC)
}

fn milliseconds(clock: ClockId) -> i64 {
    let now = clock_gettime(clock).expect("Linux has this clock");
    now.tv_sec() * 1000 + now.tv_nsec() / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_time_does_not_go_back() {
        let real = milliseconds(ClockId::CLOCK_REALTIME);
        let ahead = real as u64 + 3_600_000;
        let time = now_ms() as i64 + time_offset_ms(ahead);
        assert!(time >= ahead as i64 && time < ahead as i64 + 1000);
        let time = now_ms() as i64 + time_offset_ms(5);
        assert!(time >= real && time < real + 1000);
    }
}
