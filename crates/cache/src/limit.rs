//! How much a source is sent in answers that are longer than their requests: a leaky bucket for each, of one word.
//!
//! A bucket's level is a time at which all that the source was sent has been made up for, counted in bytes of its limit. It is
//! never below now; what would raise it more than `UC_BURST_MS` above is passed on to memcached. Pure: bpf/cache.bpf.c
//! computes the same.

use std::net::Ipv4Addr;

use underpass_abi::cache::{UC_BURST_MS, UC_SOURCES};

use crate::hash;

/// Bytes a millisecond of one megabit a second.
pub const MBIT: u64 = 125;
/// Of the limit, in Mbit/s: years of milliseconds times this are below 2^64.
pub const MBIT_MAX: u64 = 100_000;

/// Which bucket a source has, maybe with others.
pub fn bucket(source: Ipv4Addr, secret: &[u64; 2]) -> u32 {
    hash::hash(&source.octets(), secret) as u32 & (UC_SOURCES - 1)
}

/// Takes an answer's bytes: the bucket's level afterwards, and whether the answer may be sent.
pub fn take(level: u64, limit: u64, now_ms: u64, bytes: u64) -> (u64, bool) {
    let least = now_ms * limit;
    let level = level.max(least);
    let may = level + bytes <= least + UC_BURST_MS as u64 * limit;
    (if may { level + bytes } else { level }, may)
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng, rngs::SmallRng};

    use super::*;

    /// In any stretch of time a source is sent no more than the limit and one burst; one that asks for less gets it all.
    #[test]
    fn a_source_is_sent_its_limit_and_no_more() {
        for seed in 0..200 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let limit = rng.random_range(1..1000) * MBIT;
            let (mut level, mut now) = (0, rng.random_range(0..1 << 40));
            let mut sent: Vec<(u64, u64)> = Vec::new();
            let greed = rng.random_range(1..2000);
            for _ in 0..2000 {
                now += rng.random_range(0..3) * rng.random_range(0..20);
                let bytes = rng.random_range(60..1500);
                let asked = bytes * greed / 1000;
                for _ in 0..=asked * limit / 100_000 {
                    let (after, may) = take(level, limit, now, bytes);
                    level = after;
                    if may {
                        sent.push((now, bytes));
                    }
                }
            }
            // The sum since any point, less what the limit allows for since then, is below a burst.
            let mut debt = 0u64;
            let mut last = now;
            for (i, &(at, bytes)) in sent.iter().enumerate() {
                if i > 0 {
                    debt = debt.saturating_sub((at - last) * limit);
                }
                (debt, last) = (debt + bytes, at);
                assert!(debt <= UC_BURST_MS as u64 * limit, "seed {seed}: {debt} bytes at once, limit {limit}");
            }
            assert!(sent.len() > 100, "seed {seed}: {}", sent.len());
        }
    }

    #[test]
    fn within_its_limit_a_source_is_sent_everything() {
        let (limit, mut level) = (10 * MBIT, 0);
        for now in 1_000..100_000 {
            let (after, may) = take(level, limit, now, limit);
            assert!(may);
            level = after;
        }
        // Then twice as much: half of it, once the burst is used up.
        let granted = (100_000..120_000u64).flat_map(|now| [now, now]).filter(|&now| {
            let (after, may) = take(level, limit, now, limit);
            level = after;
            may
        });
        let granted = granted.count();
        assert!((20_000..=20_000 + UC_BURST_MS as usize).contains(&granted), "{granted}");
    }
}
