//! Numbers drawn from a seed (splitmix64).

/// A stream of numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// One number from two.
pub fn mix(a: u64, b: u64) -> u64 {
    let z = a.wrapping_add(b.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Random {
    /// The stream of one purpose within a run.
    pub fn new(seed: u64, purpose: u64) -> Self {
        Self(mix(mix(seed, 1), purpose))
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0, 0)
    }

    /// Below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    /// From `from` up to and including `to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// True in so many cases of a thousand.
    pub fn chance(&mut self, in_a_thousand: u64) -> bool {
        self.below(1000) < in_a_thousand
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}
