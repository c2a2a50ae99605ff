//! The network: every datagram may be lost, doubled, late; every link may be cut, one way or both.
//!
//! What befalls the n-th datagram of a link depends on the seed, the link and n alone. So a plan with fewer faults is treated
//! alike wherever the run is the same.

use crate::{
    host::{HOSTS, Host, MS},
    random::{Random, mix},
};

/// How datagrams fare. Chances are in a thousand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weather {
    /// Not delivered.
    pub loss: u64,
    /// Delivered twice.
    pub duplicate: u64,
    /// Delivered after up to `slow_ms` instead of `delay_us`.
    pub slow: u64,
    /// Longest usual delay, in microseconds.
    pub delay_us: u64,
    /// Longest delay, in milliseconds.
    pub slow_ms: u64,
}

impl Weather {
    fn with(self, other: Self) -> Self {
        Self {
            loss: (self.loss + other.loss).min(1000),
            duplicate: (self.duplicate + other.duplicate).min(1000),
            slow: (self.slow + other.slow).min(1000),
            delay_us: self.delay_us.max(other.delay_us),
            slow_ms: self.slow_ms.max(other.slow_ms),
        }
    }
}

/// Datagrams of some kinds to one host fare worse than others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Their receiver.
    pub to: Host,
    /// Which: bits of the numbers of their operations.
    pub ops: u64,
    /// Not delivered, in a thousand.
    pub loss: u64,
    /// Longest additional delay, in milliseconds.
    pub late_ms: u64,
    /// That is of an additional copy.
    pub copies: bool,
}

/// All links.
pub struct Network {
    seed: u64,
    /// Datagrams sent so far, by link.
    sent: Box<[u32]>,
    /// Cuts that hold, by link.
    cuts: Box<[u16]>,
    always: Weather,
    storms: Vec<Weather>,
    filters: Vec<Filter>,
}

fn link(from: Host, to: Host) -> usize {
    from.id() * HOSTS + to.id()
}

impl Network {
    /// A whole one.
    pub fn new(seed: u64, weather: Weather) -> Self {
        let links = HOSTS * HOSTS;
        Self {
            seed,
            sent: vec![0; links].into(),
            cuts: vec![0; links].into(),
            always: weather,
            storms: Vec::new(),
            filters: Vec::new(),
        }
    }

    /// When the copies of a datagram with this operation, sent now, arrive.
    pub fn send(&mut self, now: u64, from: Host, to: Host, op: u8) -> impl Iterator<Item = u64> + use<> {
        let link = link(from, to);
        self.sent[link] += 1;
        let mut random = Random::new(self.seed, mix(link as u64, u64::from(self.sent[link])));
        let weather = self.storms.iter().fold(self.always, |all, storm| all.with(*storm));
        let mut copies = 1 + u64::from(random.chance(weather.duplicate));
        let mut cut = self.cuts[link] > 0;
        let (mut late, mut late_copy) = (0, None);
        for filter in self.filters.iter().filter(|filter| filter.to == to && filter.ops >> op & 1 != 0) {
            cut |= random.chance(filter.loss);
            let more = random.below(filter.late_ms * MS + 1);
            if filter.copies {
                (copies, late_copy) = (copies + 1, Some(more));
            } else {
                late += more;
            }
        }
        (0..copies).filter_map(move |copy| {
            let lost = random.chance(weather.loss);
            let slow = random.chance(weather.slow);
            let most = if slow { weather.slow_ms * MS } else { weather.delay_us * 1000 };
            let delay = 1_000 + random.below(most.max(1));
            (!cut && !lost).then_some(now + delay + if copy > 0 { late_copy.unwrap_or(late) } else { late })
        })
    }

    /// Whether a link is cut.
    pub fn is_cut(&self, from: Host, to: Host) -> bool {
        self.cuts[link(from, to)] > 0
    }

    /// Cuts a link, or takes one cut back.
    pub fn cut(&mut self, from: Host, to: Host, cut: bool) {
        let cuts = &mut self.cuts[link(from, to)];
        *cuts = if cut { *cuts + 1 } else { cuts.saturating_sub(1) };
    }

    /// Worse weather for a while.
    pub fn storm(&mut self, weather: Weather, begins: bool) {
        if begins {
            self.storms.push(weather);
        } else if let Some(at) = self.storms.iter().position(|storm| *storm == weather) {
            self.storms.swap_remove(at);
        }
    }

    /// Datagrams of some kinds fare worse for a while.
    pub fn filter(&mut self, filter: Filter, begins: bool) {
        if begins {
            self.filters.push(filter);
        } else if let Some(at) = self.filters.iter().position(|other| *other == filter) {
            self.filters.swap_remove(at);
        }
    }

    /// Everything is whole, and stays so.
    pub fn heal(&mut self) {
        self.filters.clear();
        self.cuts.fill(0);
        self.storms.clear();
        self.always = Weather { delay_us: self.always.delay_us.min(500), ..Weather::default() };
    }
}
