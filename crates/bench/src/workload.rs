//! What is asked of the store: which keys, how many of the operations are writes, how large things are.

use std::{fmt, str::FromStr};

use rand::{Rng, SeedableRng, distr::Distribution as _, rngs::SmallRng};
use rand_distr::Zipf;
use serde::{Deserialize, Serialize};
use underpass_protocol::wire::{KEY_MAX, PAYLOAD_MAX};

/// How often each item is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Popularity {
    /// All items alike.
    Uniform,
    /// The i-th most popular item, from 1, with a probability proportional to `i^-exponent`.
    Zipf(f64),
}

impl fmt::Display for Popularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf(exponent) => write!(f, "zipf{exponent}"),
        }
    }
}

impl From<Popularity> for String {
    fn from(popularity: Popularity) -> Self {
        popularity.to_string()
    }
}

impl TryFrom<String> for Popularity {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Popularity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "uniform" {
            return Ok(Self::Uniform);
        }
        text.strip_prefix("zipf")
            .and_then(|exponent| exponent.parse().ok())
            .filter(|exponent| *exponent > 0.0 && *exponent < 10.0)
            .map(Self::Zipf)
            .ok_or_else(|| format!("workload {text:?}: write uniform, or zipf and an exponent above 0, as zipf0.99"))
    }
}

/// A workload. The same one with the same seed asks for the same things in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Number of items; they are numbered from 0.
    pub items: u64,
    /// How often each is asked for.
    pub popularity: Popularity,
    /// Writes among the operations, in percent.
    pub write_percent: f64,
    /// Bytes of a key.
    pub key_size: usize,
    /// Bytes of a value.
    pub value_size: usize,
    /// Seed of everything random.
    pub seed: u64,
}

impl Default for Workload {
    /// One million items of 16-byte keys and 128-byte values, 5 % writes, uniform.
    fn default() -> Self {
        Self {
            items: 1_000_000,
            popularity: Popularity::Uniform,
            write_percent: 5.0,
            key_size: 16,
            value_size: 128,
            seed: 1,
        }
    }
}

impl Workload {
    /// Refuses what cannot be run.
    pub fn validate(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.items > 0, "a workload needs at least one item");
        anyhow::ensure!(
            (0.0..=100.0).contains(&self.write_percent),
            "{} % writes: must be between 0 and 100",
            self.write_percent
        );
        let digits = digits_needed(self.items);
        anyhow::ensure!(
            (digits..=KEY_MAX).contains(&self.key_size),
            "keys of {} bytes: {} items need keys of {digits} to {KEY_MAX} bytes",
            self.key_size,
            self.items
        );
        anyhow::ensure!(
            self.key_size + self.value_size <= PAYLOAD_MAX,
            "keys of {} and values of {} bytes: together they may have {PAYLOAD_MAX}, to fit in a datagram",
            self.key_size,
            self.value_size
        );
        Ok(())
    }

    /// The name that reports use, as `uniform, 5 % writes`.
    pub fn label(&self) -> String {
        format!("{}, {} % writes", self.popularity, self.write_percent)
    }

    /// The key of an item, `key_size` bytes.
    pub fn key(&self, item: u64) -> Vec<u8> {
        key(item, self.key_size)
    }

    /// An endless stream of operations; `stream` tells several of one workload apart.
    pub fn operations(&self, stream: u64) -> Operations {
        Operations {
            random: SmallRng::seed_from_u64(self.seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            items: Items::new(self.items, self.popularity),
            write_fraction: self.write_percent / 100.0,
        }
    }
}

/// Hexadecimal digits that tell this many items apart.
fn digits_needed(items: u64) -> usize {
    format!("{:x}", items - 1).len()
}

/// The key of an item: its number in hexadecimal, as the first 16 bytes (or as many as there are), then filler.
pub fn key(item: u64, size: usize) -> Vec<u8> {
    let mut key = Vec::with_capacity(size);
    key_into(item, size, &mut key);
    key
}

/// [`key`], into a buffer.
pub fn key_into(item: u64, size: usize, out: &mut Vec<u8>) {
    numbered(item, size, b'k', out);
}

/// The value of this number; every write has one of its own, so that a read tells which write it saw.
pub fn value(number: u64, size: usize, out: &mut Vec<u8>) {
    numbered(number, size, b'v', out);
}

/// The number that a value was made from; `None` if it was not made by [`value`], or is not whole.
pub fn value_number(value: &[u8]) -> Option<u64> {
    let (digits, filler) = value.split_at(value.len().min(16));
    let number = std::str::from_utf8(digits).ok().and_then(|digits| u64::from_str_radix(digits, 16).ok())?;
    filler.iter().all(|byte| *byte == b'v').then_some(number)
}

fn numbered(number: u64, size: usize, filler: u8, out: &mut Vec<u8>) {
    out.clear();
    let digits = size.min(16);
    out.extend((0..digits).rev().map(|digit| b"0123456789abcdef"[(number >> (4 * digit)) as usize & 15]));
    out.resize(size, filler);
}

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Number of the item.
    pub item: u64,
    /// Whether it is written.
    pub write: bool,
}

/// An endless stream of operations.
pub struct Operations {
    random: SmallRng,
    items: Items,
    write_fraction: f64,
}

impl Operations {
    /// The next operation.
    pub fn next_operation(&mut self) -> Operation {
        let write = self.write_fraction > 0.0 && self.random.random::<f64>() < self.write_fraction;
        Operation { item: self.items.draw(&mut self.random), write }
    }
}

/// Draws item numbers.
pub struct Items {
    count: u64,
    zipf: Option<Zipf<f64>>,
    stride: u64,
}

impl Items {
    /// Over items `0..count`.
    ///
    /// # Panics
    /// If `count` is 0.
    pub fn new(count: u64, popularity: Popularity) -> Self {
        assert!(count > 0, "no items to draw from");
        let zipf = match popularity {
            Popularity::Uniform => None,
            Popularity::Zipf(exponent) => {
                Some(Zipf::new(count as f64, exponent).expect("the exponent was checked when it was parsed"))
            }
        };
        Self { count, zipf, stride: stride(count) }
    }

    /// The next item.
    pub fn draw(&self, random: &mut impl Rng) -> u64 {
        match &self.zipf {
            None => random.random_range(0..self.count),
            Some(zipf) => self.item_of_rank(zipf.sample(random) as u64 - 1),
        }
    }

    /// The item of a popularity rank, from 0: a bijection that spreads the popular ones over all numbers.
    pub fn item_of_rank(&self, rank: u64) -> u64 {
        (u128::from(rank.min(self.count - 1)) * u128::from(self.stride) % u128::from(self.count)) as u64
    }
}

/// A number without a common divisor with `count`, near the golden section of it.
fn stride(count: u64) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let mut stride = ((count as f64 * 0.618_033_988_75) as u64).max(1);
    while gcd(stride, count) != 1 {
        stride += 1;
    }
    stride
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn probabilities(count: u64, exponent: f64) -> Vec<f64> {
        let weights: Vec<f64> = (1..=count).map(|rank| (rank as f64).powf(-exponent)).collect();
        let total: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / total).collect()
    }

    /// Pearson's statistic of the draws against the theory, over classes of at least 100 expected draws.
    fn chi_square_per_class(popularity: Popularity, expected: &[f64]) -> f64 {
        const DRAWS: u64 = 1_000_000;
        let items = Items::new(expected.len() as u64, popularity);
        let mut counts = vec![0u64; expected.len()];
        let mut random = SmallRng::seed_from_u64(7);
        for _ in 0..DRAWS {
            counts[items.draw(&mut random) as usize] += 1;
        }
        let (mut statistic, mut classes) = (0.0, 0);
        let (mut seen, mut wanted) = (0.0, 0.0);
        for (rank, probability) in expected.iter().enumerate() {
            seen += counts[items.item_of_rank(rank as u64) as usize] as f64;
            wanted += probability * DRAWS as f64;
            if wanted >= 100.0 {
                statistic += (seen - wanted).powi(2) / wanted;
                classes += 1;
                (seen, wanted) = (0.0, 0.0);
            }
        }
        statistic / f64::from(classes)
    }

    #[test]
    fn draws_follow_the_theoretical_distribution() {
        for exponent in [0.9, 0.95, 0.99] {
            let per_class = chi_square_per_class(Popularity::Zipf(exponent), &probabilities(10_000, exponent));
            assert!((0.8..1.2).contains(&per_class), "zipf{exponent}: {per_class}");
        }
        let per_class = chi_square_per_class(Popularity::Uniform, &vec![1e-3; 1000]);
        assert!((0.8..1.2).contains(&per_class), "uniform: {per_class}");
        // The test can tell: the wrong exponent is far off.
        let wrong = chi_square_per_class(Popularity::Zipf(0.95), &probabilities(10_000, 0.99));
        assert!(wrong > 2.0, "{wrong}");
    }

    #[test]
    fn ranks_are_spread_over_all_items_and_none_is_left_out() {
        for count in [1, 2, 3, 1000, 65_536, 999_983] {
            let items = Items::new(count, Popularity::Zipf(0.99));
            let all: HashSet<u64> = (0..count).map(|rank| items.item_of_rank(rank)).collect();
            assert_eq!(all.len() as u64, count);
            assert!(all.iter().all(|item| *item < count));
        }
        let items = Items::new(1_000_000, Popularity::Zipf(0.99));
        let neighbours =
            (0..100).filter(|rank| items.item_of_rank(*rank).abs_diff(items.item_of_rank(rank + 1)) < 1000);
        assert_eq!(neighbours.count(), 0, "hot keys side by side");
    }

    #[test]
    fn a_seed_gives_the_same_operations_and_the_asked_share_of_writes() {
        let workload = Workload { write_percent: 5.0, ..Workload::default() };
        let take = |stream| {
            let mut operations = workload.operations(stream);
            (0..100_000).map(|_| operations.next_operation()).collect::<Vec<_>>()
        };
        assert_eq!(take(1), take(1));
        assert_ne!(take(1), take(2));
        let writes = take(1).iter().filter(|operation| operation.write).count();
        assert!((4_700..5_300).contains(&writes), "{writes}");
        for (percent, share) in [(0.0, 0), (100.0, 1000)] {
            let mut operations = Workload { write_percent: percent, ..workload }.operations(1);
            assert_eq!((0..1000).filter(|_| operations.next_operation().write).count(), share);
        }
    }

    #[test]
    fn keys_differ_and_have_their_size() {
        for size in [5, 16, 17, 250] {
            let keys: HashSet<_> = (0..2000).map(|item| key(item, size)).collect();
            assert_eq!(keys.len(), 2000);
            assert!(keys.iter().all(|key| key.len() == size));
        }
        assert_eq!(key(0xbeef, 18), b"000000000000beefkk");
    }

    #[test]
    fn values_tell_their_number_and_whether_they_are_whole() {
        let mut text = Vec::new();
        for size in [16, 17, 128] {
            value(0x1234_5678_9abc_def0, size, &mut text);
            assert_eq!((text.len(), value_number(&text)), (size, Some(0x1234_5678_9abc_def0)));
        }
        text[100] = 0;
        assert_eq!(value_number(&text), None);
        assert_eq!(value_number(b""), None);
    }

    #[test]
    fn workloads_that_cannot_run_are_refused_by_name() {
        let text = |workload: Workload| workload.validate().unwrap_err().to_string();
        let ok = Workload::default();
        ok.validate().unwrap();
        assert!(text(Workload { items: 0, ..ok }).contains("at least one item"));
        assert!(text(Workload { key_size: 4, ..ok }).contains("5 to 250"));
        assert!(text(Workload { value_size: 1400, ..ok }).contains("1392"));
        assert!(text(Workload { write_percent: 101.0, ..ok }).contains("between 0 and 100"));
        assert!("zipf".parse::<Popularity>().unwrap_err().contains("zipf0.99"));
        assert_eq!("zipf0.99".parse(), Ok(Popularity::Zipf(0.99)));
        assert_eq!(Popularity::Zipf(0.9).to_string(), "zipf0.9");
    }
}
