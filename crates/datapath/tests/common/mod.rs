//! A coordinator in the kernel and its pure twin, with the same secrets, configuration and sessions.

#![allow(dead_code)]

use std::{fmt::Debug, net::Ipv4Addr};

use rand::{Rng, SeedableRng, rngs::StdRng};
use underpass_abi::abi::{self, up_config, up_settings};
use underpass_datapath::{
    coordinator::{CoordinatorKernel, Run, TableSizes},
    frame::{self, Addresses},
};
use underpass_protocol::{
    agent::Tables,
    coordinator::{CloseOutcome, Coordinator, Settings, opened},
    wire::{Endpoint, MEMBERS_MAX, SessionId},
};

pub const COORDINATOR: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 1), port: 5550 };
pub const COORDINATOR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub const XDP_DROP: u32 = 1;
pub const XDP_PASS: u32 = 2;
pub const XDP_TX: u32 = 3;
pub const XDP_REDIRECT: u32 = 4;

pub fn member_endpoint(shard: u32, index: u8) -> Endpoint {
    Endpoint { addr: Ipv4Addr::new(10, 0, 1 + shard as u8, 10 + index), port: 5550 }
}

pub fn member_mac(shard: u32, index: u8) -> [u8; 6] {
    [2, 0, 0, 1, shard as u8, index]
}

pub fn client_endpoint(client: u8) -> Endpoint {
    Endpoint { addr: Ipv4Addr::new(10, 0, 9, client), port: 40000 + u16::from(client) }
}

pub fn client_mac(client: u8) -> [u8; 6] {
    [2, 0, 0, 9, 0, client]
}

/// A configuration with the first so many members.
pub fn config(shard: u32, epoch: u32, members: u8) -> up_config {
    let all = ((1u16 << members) - 1) as u8;
    config_of(shard, epoch, all, all)
}

/// A configuration with the members of these bitmaps.
pub fn config_of(shard: u32, epoch: u32, must_ack: u8, serving: u8) -> up_config {
    let mut config = up_config {
        shard,
        epoch,
        lease_until_ms: u64::MAX,
        time_offset_ms: 1_700_000_000_000,
        must_ack,
        serving,
        must_ack_count: must_ack.count_ones() as u8,
        serving_count: serving.count_ones() as u8,
        must_ack_list: list(must_ack),
        serving_list: list(serving),
        ..up_config::default()
    };
    for i in list(must_ack | serving).into_iter().take((must_ack | serving).count_ones() as usize) {
        let at = usize::from(i);
        config.members[at].addr = u32::from(member_endpoint(shard, i).addr).to_be();
        config.members[at].port = member_endpoint(shard, i).port.to_be();
        config.members[at].next_hop = member_mac(shard, i);
    }
    config
}

/// The indices in a bitmap, ascending; zeros behind them.
fn list(bitmap: u8) -> [u8; MEMBERS_MAX] {
    let mut list = [0; MEMBERS_MAX];
    let indices = (0..MEMBERS_MAX as u8).filter(|i| bitmap & (1 << i) != 0);
    list.iter_mut().zip(indices).for_each(|(at, index)| *at = index);
    list
}

/// The link-layer addresses of every member of every shard that a test has.
pub fn all_hops() -> impl Iterator<Item = (Ipv4Addr, [u8; 6])> {
    (0..16).flat_map(|shard| (0..8).map(move |i| (member_endpoint(shard, i).addr, member_mac(shard, i))))
}

/// Both implementations.
pub struct Twins {
    pub kernel: CoordinatorKernel,
    pub pure: Coordinator,
    pub sizes: TableSizes,
}

impl Twins {
    pub fn new(rng: &mut StdRng, sizes: TableSizes) -> Self {
        let mut bucket_key = [0; 64];
        rng.fill(&mut bucket_key[..]);
        let fingerprint_key = rng.random();
        let settings = up_settings {
            addr: u32::from(COORDINATOR.addr).to_be(),
            port: COORDINATOR.port.to_be(),
            fingerprint_key,
            bucket_key,
            ..up_settings::default()
        };
        let mut kernel = CoordinatorKernel::load(settings, sizes, None).expect("loading (needs root)");
        kernel.set_next_hops(all_hops().collect());
        let pure = Coordinator::new(Settings {
            buckets: sizes.buckets,
            sessions: sizes.sessions,
            bucket_key,
            fingerprint_key,
        });
        Self { kernel, pure, sizes }
    }

    /// Does the same to both tables, with the same answer.
    pub fn both<R: Debug + PartialEq>(&mut self, what: impl Fn(&mut dyn Tables) -> R) -> R {
        let kernel = what(&mut self.kernel);
        assert_eq!(kernel, what(&mut self.pure), "the kernel's answer and the pure coordinator's");
        kernel
    }

    pub fn configure(&mut self, config: up_config) {
        self.both(|tables| tables.configure(&config)).unwrap();
    }

    pub fn open(&mut self, session: SessionId, shard: u32, token: u64, to: Endpoint) {
        let record = opened(0, session, shard, token, to);
        assert_eq!(self.both(|tables| tables.load(session.index(), &record)), Ok(true), "opening {session:?}");
    }

    pub fn close(&mut self, session: SessionId) -> CloseOutcome {
        self.both(|tables| tables.close(session, None)).unwrap()
    }

    /// Every table of both, compared word by word.
    pub fn compare_tables(&self, context: &str) {
        for (slot, pure) in self.pure.shards().iter().enumerate() {
            let kernel = self.kernel.shard(slot);
            assert_eq!(kernel.clock, pure.clock, "clock of slot {slot}: {context}");
            let active = |s: &abi::up_shard| s.config[s.active as usize];
            assert_eq!(active(&kernel), active(pure), "configuration of slot {slot}: {context}");
        }
        let mut sessions = vec![];
        self.kernel.read_sessions(self.sizes.sessions, &mut sessions).unwrap();
        for (index, (pure, mut kernel)) in self.pure.sessions().iter().zip(sessions).enumerate() {
            // Link-layer addresses and clocks are the kernel's alone.
            (kernel.reply_mac, kernel.used_ms, kernel.lock) = (pure.reply_mac, pure.used_ms, 0);
            assert_eq!(&kernel, pure, "session {index}: {context}");
        }
        let (buckets, words) = self.pure.buckets();
        for (index, (bucket, word)) in buckets.iter().zip(words).enumerate() {
            assert_eq!(self.kernel.word(index), *word, "word of bucket {index}: {context}");
            let mut kernel = self.kernel.bucket(index as u32).unwrap();
            kernel.lock = 0;
            assert_eq!(&kernel, bucket, "bucket {index}: {context}");
        }
    }
}

pub fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

pub fn frame(from: Endpoint, from_mac: [u8; 6], datagram: &[u8]) -> Vec<u8> {
    let addresses = Addresses {
        source_mac: from_mac,
        destination_mac: COORDINATOR_MAC,
        source: (from.addr, from.port),
        destination: (COORDINATOR.addr, COORDINATOR.port),
    };
    frame::build(&addresses, datagram)
}

pub fn verdict_name(run: &Run) -> &'static str {
    ["ABORTED", "DROP", "PASS", "TX", "REDIRECT"][run.verdict as usize]
}
