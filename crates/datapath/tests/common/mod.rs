//! A coordinator in the kernel and its pure twin, with the same secrets, configuration and sessions.

#![allow(dead_code)]

use std::net::Ipv4Addr;

use rand::{Rng, SeedableRng, rngs::StdRng};
use underpass_abi::abi::{self, up_config, up_session_command, up_settings};
use underpass_datapath::{
    coordinator::{CoordinatorKernel, Run, TableSizes},
    frame::{self, Addresses},
};
use underpass_protocol::{
    coordinator::{Coordinator, Settings},
    wire::{Endpoint, Header, Op, SessionId},
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

pub fn config(shard: u32, epoch: u32, members: u8) -> up_config {
    let mut config = up_config {
        shard,
        epoch,
        lease_until_ms: u64::MAX,
        time_offset_ms: 1_700_000_000_000,
        must_ack: ((1u16 << members) - 1) as u8,
        serving: ((1u16 << members) - 1) as u8,
        must_ack_count: members,
        serving_count: members,
        ..up_config::default()
    };
    for i in 0..members {
        let at = usize::from(i);
        config.must_ack_list[at] = i;
        config.serving_list[at] = i;
        config.members[at].addr = u32::from(member_endpoint(shard, i).addr).to_be();
        config.members[at].port = member_endpoint(shard, i).port.to_be();
        config.members[at].next_hop = member_mac(shard, i);
    }
    config
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
        let kernel = CoordinatorKernel::load(settings, sizes, None).expect("loading (needs root)");
        let pure = Coordinator::new(Settings {
            buckets: sizes.buckets,
            sessions: sizes.sessions,
            bucket_key,
            fingerprint_key,
        });
        Self { kernel, pure, sizes }
    }

    pub fn configure(&mut self, config: up_config) {
        let floor = self.kernel.configure(&config);
        self.pure.configure(&config);
        assert_eq!(floor, self.pure.config(config.shard).unwrap().floor);
    }

    pub fn open(&mut self, session: SessionId, shard: u32, token: u64, to: Endpoint) {
        let mut header = Header::new(Op::Open);
        header.set_reply_to(to);
        let command = up_session_command {
            op: abi::UP_SESSION_OP_OPEN,
            session: session.0,
            token,
            shard,
            reply_addr: header.reply_addr,
            reply_port: to.port.to_be(),
            ..up_session_command::default()
        };
        let kernel = self.kernel.session_command(&command).unwrap().result == abi::UP_SESSION_DONE;
        assert_eq!(kernel, self.pure.open_session(0, session, shard, token, to), "opening {session:?}");
    }

    pub fn close(&mut self, session: SessionId) -> u32 {
        let command = up_session_command {
            op: abi::UP_SESSION_OP_CLOSE,
            session: session.0,
            used_before_ms: u64::MAX,
            ..up_session_command::default()
        };
        let answer = self.kernel.session_command(&command).unwrap();
        let pure = self.pure.close_session(session, u64::MAX);
        use underpass_protocol::coordinator::CloseOutcome;
        match answer.result {
            abi::UP_SESSION_DONE => {
                assert_eq!(pure, CloseOutcome::Closed { request: answer.request, state: answer.state })
            }
            abi::UP_SESSION_UNRESOLVED => assert_eq!(pure, CloseOutcome::Unresolved),
            _ => assert_eq!(pure, CloseOutcome::NotYours),
        }
        answer.result
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
            // Link-layer addresses and wall clocks are the kernel's alone. A closed record keeps what nobody reads.
            if pure.session == 0 {
                assert_eq!((kernel.session, kernel.state), (0, 0), "closed session {index}: {context}");
                continue;
            }
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
