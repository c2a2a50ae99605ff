//! Which items are worth a place once the cache is full: those that were missed before, not long ago.
//!
//! Of a skewed popularity most items that are missed are not asked for again soon. Each would cost memcached a second
//! read and another item its place.

/// Remembers about so many keys that were missed, by their hashes.
#[derive(Debug)]
pub struct Doorkeeper {
    bits: Vec<u64>,
    most: usize,
    kept: usize,
}

impl Doorkeeper {
    /// For a cache of about so many entries.
    pub fn new(entries: usize) -> Self {
        let most = entries.max(64);
        // An eighth of the bits set at most: then one in eight keys is taken for known that is not.
        Self { bits: vec![0; (most * 8).next_power_of_two() / 64], most, kept: 0 }
    }

    /// Whether this key was here before; it is remembered from now on.
    pub fn knows(&mut self, hash: u64) -> bool {
        let at = (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & (self.bits.len() * 64 - 1);
        let (word, bit) = (at / 64, 1 << (at % 64));
        if self.bits[word] & bit != 0 {
            return true;
        }
        if self.kept == self.most {
            self.bits.fill(0);
            self.kept = 0;
        }
        self.bits[word] |= bit;
        self.kept += 1;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_missed_lately_is_known_and_little_else() {
        let mut door = Doorkeeper::new(1000);
        let known = (0..1000u64).filter(|key| door.knows(key << 40 | key)).count();
        assert!(known < 125, "{known} strangers are taken for known");
        assert!((900..1000u64).all(|key| door.knows(key << 40 | key)));
        // It forgets: nobody is known for ever.
        for key in 1000..4000u64 {
            door.knows(key << 40 | key);
        }
        let known = (0..1000u64).filter(|key| door.knows(key << 40 | key)).count();
        assert!(known < 125, "{known} are still known");
    }
}
