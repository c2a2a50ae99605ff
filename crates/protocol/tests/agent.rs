//! An agent with its tables, one replica and a record, all in one place: what its process tells it about its host.

use std::collections::VecDeque;

use underpass_protocol::{
    agent::{Action, Agent, Event, Record, Settings, StoreOutcome, Wanted},
    control::ClusterKey,
    coordinator::{self, Coordinator},
    replica::{self, Replica},
    wire::Endpoint,
};

const COORDINATOR: Endpoint = Endpoint { addr: std::net::Ipv4Addr::new(10, 0, 0, 1), port: 5550 };
const REPLICA: Endpoint = Endpoint { addr: std::net::Ipv4Addr::new(10, 0, 0, 2), port: 5550 };

struct Rack {
    agent: Agent,
    tables: Coordinator,
    replica: Replica,
    record: Record,
    revision: u64,
    now_ms: u64,
    /// Datagrams from the replica that are not delivered yet.
    late: VecDeque<Vec<u8>>,
    delivers: bool,
}

impl Rack {
    fn new() -> Self {
        let settings = Settings {
            listen: COORDINATOR,
            cluster_key: ClusterKey::default(),
            heartbeat_ms: 10,
            suspect_ms: 40,
            lost_ms: 600,
            reach_ms: 300,
            stuck_ms: 1000,
            idle_ms: 60_000,
            wall_offset_ms: 1_700_000_000_000,
            random: Box::new(|| 7),
        };
        let tables = coordinator::Settings { buckets: 64, sessions: 64, bucket_key: [1; 64], fingerprint_key: [2; 2] };
        let wanted = Wanted { id: 0, addr: REPLICA.addr, port: REPLICA.port, replaces: None };
        let mut rack = Self {
            agent: Agent::new(settings, &[0], 64, 1000),
            tables: Coordinator::new(tables),
            replica: Replica::new(replica::Settings::simulated(5, 1 << 20)),
            record: Record::new(0, vec![wanted]),
            revision: 1,
            now_ms: 1000,
            late: VecDeque::new(),
            delivers: true,
        };
        let record = Some(rack.record.clone());
        rack.step(Event::Record { shard: 0, revision: 1, record });
        rack.step(Event::Role { shard: 0, held: true });
        rack
    }

    fn step(&mut self, event: Event<'_>) {
        for action in self.agent.step(self.now_ms, event, &mut self.tables).unwrap() {
            match action {
                Action::Send { to, bytes } if to == REPLICA => {
                    let event = replica::Event::Datagram { from: COORDINATOR, bytes: &bytes };
                    for action in self.replica.step(self.now_ms, event) {
                        if let replica::Action::Send { bytes, .. } = action {
                            self.late.push_back(bytes);
                        }
                    }
                }
                Action::Store { shard, id, expected, record } => {
                    assert_eq!(expected, self.revision);
                    self.revision += 1;
                    self.record = record;
                    self.step(Event::Stored { shard, id, outcome: StoreOutcome::Stored(self.revision) });
                }
                _ => {}
            }
        }
        while self.delivers
            && let Some(bytes) = self.late.pop_front()
        {
            self.step(Event::Datagram { from: REPLICA, bytes: &bytes });
        }
    }

    fn run(&mut self, ms: u64) {
        for _ in 0..ms {
            self.now_ms += 1;
            if self.now_ms >= self.agent.due() {
                self.step(Event::Tick);
            }
        }
    }

    fn lease_left_ms(&self) -> i64 {
        self.tables.config(0).map_or(i64::MIN, |config| config.lease_until_ms as i64 - self.now_ms as i64)
    }
}

#[test]
fn a_suspended_host_has_no_lease_until_members_answer_anew() {
    let mut rack = Rack::new();
    rack.run(100);
    assert!(rack.agent.serves(0) && rack.lease_left_ms() > 900, "{:?}", rack.agent.status(rack.now_ms));
    // Heartbeats are under way while the host sleeps.
    rack.delivers = false;
    rack.run(20);
    rack.step(Event::Suspended);
    assert!(rack.lease_left_ms() <= 0);
    let before: Vec<_> = rack.late.drain(..).collect();
    assert!(!before.is_empty());
    for bytes in before {
        rack.step(Event::Datagram { from: REPLICA, bytes: &bytes });
    }
    assert!(rack.lease_left_ms() <= 0, "their answers are older than the sleep");
    rack.delivers = true;
    rack.run(20);
    assert!(rack.lease_left_ms() > 900);
}

#[test]
fn an_agent_that_is_stopping_begins_nothing() {
    for answers in 0..3 {
        let mut rack = Rack::new();
        rack.delivers = false;
        rack.run(5);
        for _ in 0..answers {
            let bytes = rack.late.pop_front().expect("the replica was asked");
            rack.step(Event::Datagram { from: REPLICA, bytes: &bytes });
        }
        assert!((rack.record.epoch > 0) == (answers > 0) && !rack.agent.serves(0), "forming, then taking over");
        rack.step(Event::Stop);
        assert!(rack.agent.has_stopped());
        rack.delivers = true;
        rack.run(500);
        assert!(rack.agent.has_stopped() && !rack.agent.serves(0));
    }

    let mut rack = Rack::new();
    rack.run(100);
    assert!(rack.agent.serves(0));
    rack.step(Event::Stop);
    assert!(rack.agent.has_stopped() && rack.record.settled && rack.lease_left_ms() <= 0);
    rack.run(500);
    assert!(rack.agent.has_stopped() && rack.lease_left_ms() <= 0);
}
