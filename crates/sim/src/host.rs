//! Who takes part: hosts, their addresses, their clocks.

use std::{fmt, net::Ipv4Addr};

use underpass_protocol::wire::Endpoint;

/// Coordinators, replicas and clients at most.
pub const COORDINATORS_MAX: usize = 3;
/// Replicas of all shards.
pub const REPLICAS_MAX: usize = 10;
/// Clients of all shards.
pub const CLIENTS_MAX: usize = 6;
/// Hosts of all kinds.
pub const HOSTS: usize = 1 + COORDINATORS_MAX + REPLICAS_MAX + CLIENTS_MAX;
/// A millisecond, in the unit of simulated time.
pub const MS: u64 = 1_000_000;

/// A host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Host {
    /// Where the records are.
    Authority,
    /// An agent beside a data path.
    Coordinator(u8),
    /// A replica.
    Replica(u8),
    /// A client.
    Client(u8),
}

impl Host {
    /// Its place among [`HOSTS`].
    pub fn id(self) -> usize {
        match self {
            Self::Authority => 0,
            Self::Coordinator(i) => 1 + usize::from(i),
            Self::Replica(i) => 1 + COORDINATORS_MAX + usize::from(i),
            Self::Client(i) => 1 + COORDINATORS_MAX + REPLICAS_MAX + usize::from(i),
        }
    }

    /// Its address. (Nobody reaches the authority by datagrams.)
    pub fn endpoint(self) -> Endpoint {
        let at = |net, i, port| Endpoint { addr: Ipv4Addr::new(10, 0, net, i + 1), port };
        match self {
            Self::Authority => at(3, 0, 2379),
            Self::Coordinator(i) => at(0, i, 5550),
            Self::Replica(i) => at(1, i, 5550),
            Self::Client(i) => at(2, i, 40_000),
        }
    }

    /// Whose address this is.
    pub fn at(endpoint: Endpoint) -> Option<Self> {
        let [_, _, net, i] = endpoint.addr.octets();
        let i = i.checked_sub(1)?;
        let host = match net {
            0 => Self::Coordinator(i),
            1 => Self::Replica(i),
            2 => Self::Client(i),
            _ => return None,
        };
        (host.endpoint() == endpoint).then_some(host)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Authority => f.pad("authority"),
            Self::Coordinator(i) => f.pad(&format!("coordinator {i}")),
            Self::Replica(i) => f.pad(&format!("replica {i}")),
            Self::Client(i) => f.pad(&format!("client {i}")),
        }
    }
}

/// A monotonic clock: it began somewhere and runs at a rate of its own. Within the assumption of protocol.md, section 7: any
/// two run at rates that differ by less than 1/16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// What it showed when the run began, in milliseconds.
    pub offset_ms: u64,
    /// How much faster than true time it is, in millionths.
    pub fast_ppm: i64,
}

impl Clock {
    /// What it shows, in milliseconds.
    pub fn ms(&self, now: u64) -> u64 {
        self.offset_ms + (u128::from(now) * self.rate() / 1_000_000 / u128::from(MS)) as u64
    }

    /// The first moment of true time at which it shows `ms`.
    pub fn when(&self, ms: u64) -> u64 {
        let passed = u128::from(ms.saturating_sub(self.offset_ms)) * u128::from(MS) * 1_000_000;
        u64::try_from(passed.div_ceil(self.rate())).unwrap_or(u64::MAX)
    }

    fn rate(&self) -> u128 {
        (1_000_000 + self.fast_ppm) as u128
    }
}

/// A host's clock in a run: it stands still while the whole machine does.
#[derive(Clone, Copy, Debug)]
pub struct Timepiece {
    clock: Clock,
    stood: u64,
    /// Since when it stands still, and how many times over.
    stopped: (u64, u32),
}

impl Timepiece {
    /// A clock that runs.
    pub fn new(clock: Clock) -> Self {
        Self { clock, stood: 0, stopped: (0, 0) }
    }

    /// What it shows, in milliseconds.
    pub fn ms(&self, now: u64) -> u64 {
        let now = if self.stands() { self.stopped.0 } else { now };
        self.clock.ms(now - self.stood)
    }

    /// The first moment of true time at which it shows `ms`, if it stands still no more.
    pub fn when(&self, ms: u64) -> u64 {
        self.clock.when(ms).saturating_add(self.stood)
    }

    /// Whether it stands still.
    pub fn stands(&self) -> bool {
        self.stopped.1 > 0
    }

    /// Stands still from now on.
    pub fn stop(&mut self, now: u64) {
        if !self.stands() {
            self.stopped.0 = now;
        }
        self.stopped.1 += 1;
    }

    /// Goes on, if nothing else has stopped it.
    pub fn go(&mut self, now: u64) {
        self.stopped.1 -= 1;
        if !self.stands() {
            self.stood += now - self.stopped.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_shows_a_time_no_sooner_than_it_is_woken_for_it() {
        for fast_ppm in [-30_000, 0, 17, 30_000] {
            let clock = Clock { offset_ms: 77, fast_ppm };
            for ms in [0, 77, 78, 100, 12_345, 1 << 40] {
                let at = clock.when(ms);
                assert!(clock.ms(at) >= ms);
                assert!(at == 0 || clock.ms(at - 1) < ms, "{fast_ppm} {ms}");
            }
        }
    }

    #[test]
    fn a_clock_that_stood_still_goes_on_where_it_was() {
        let mut clock = Timepiece::new(Clock { offset_ms: 77, fast_ppm: 0 });
        clock.stop(3 * MS);
        clock.stop(4 * MS);
        clock.go(5 * MS);
        assert_eq!((clock.ms(6 * MS), clock.stands()), (80, true));
        clock.go(10 * MS);
        assert_eq!((clock.ms(10 * MS), clock.ms(12 * MS), clock.when(82)), (80, 82, 12 * MS));
    }

    #[test]
    fn addresses_are_told_apart() {
        let hosts = (0..3).map(Host::Coordinator).chain((0..10).map(Host::Replica)).chain((0..6).map(Host::Client));
        for host in hosts {
            assert_eq!(Host::at(host.endpoint()), Some(host));
            assert!(host.id() < HOSTS);
        }
    }
}
