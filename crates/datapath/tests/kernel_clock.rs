//! The tick counter, read as a clock, agrees with CLOCK_MONOTONIC.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use underpass_abi::abi::UP_TICK_SHIFT;
use underpass_datapath::clock::ticks;

#[test]
fn ticks_are_the_monotonic_clock() {
    let origin = ticks().unwrap();
    // A tick is counted when it has passed and somebody has had the time to count it; drift would show all the same.
    let slack_ms = 200;
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(50));
        let clock_ms = |now: nix::sys::time::TimeSpec| (now.tv_sec() * 1000 + now.tv_nsec() / 1_000_000) as u64;
        let before = clock_ms(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap());
        let now = ticks().unwrap();
        let after = clock_ms(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap());
        let told = origin.at_ms + (((now.count - origin.count) * origin.length) >> UP_TICK_SHIFT);
        assert!(told + slack_ms >= before && told <= after + slack_ms, "told {told}, was {before} to {after}");
    }
}
