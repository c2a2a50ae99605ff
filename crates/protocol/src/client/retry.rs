//! When to send again: round-trip estimates, exponential backoff, jitter.

use super::Settings;

/// Randomness derived from the one number that a step is given (splitmix64).
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(random: u64) -> Self {
        Self(random)
    }

    pub(super) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between half of `length` and one and a half of it.
    pub(super) fn around(&mut self, length: u64) -> u64 {
        length / 2 + self.number() % length.max(1)
    }
}

/// `base` doubled `doublings` times, at most `max`.
pub(super) fn doubled(base: u64, doublings: u32, max: u64) -> u64 {
    base.saturating_mul(1 << doublings.min(20)).min(max)
}

/// Smoothed round-trip time and its deviation, as TCP keeps them (RFC 6298). Only requests sent once are measured, since
/// it cannot be told which copy a reply answers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundTrip {
    smoothed: u64,
    deviation: u64,
}

impl RoundTrip {
    pub(super) fn measure(&mut self, sample: u64) {
        if self.smoothed == 0 {
            *self = Self { smoothed: sample.max(1), deviation: sample / 2 };
            return;
        }
        self.deviation = (self.deviation * 3 + self.smoothed.abs_diff(sample)) / 4;
        self.smoothed = (self.smoothed * 7 + sample) / 8;
    }

    /// How long to wait for a reply before sending again, after `sends` copies.
    pub(super) fn timeout(&self, settings: &Settings, sends: u32) -> u64 {
        let base = if self.smoothed == 0 { settings.resend_first_ns } else { self.smoothed + 4 * self.deviation };
        doubled(base.max(settings.resend_min_ns), sends.saturating_sub(1), settings.resend_max_ns)
    }
}
