//! An agent with its tables, replicas and a record, all in one place: what its process tells it about its host, and answers that
//! come at odd times.

use std::{collections::VecDeque, net::Ipv4Addr};

use underpass_protocol::{
    agent::{Action, Agent, Event, Record, Settings, StoreOutcome, Wanted},
    control::ClusterKey,
    coordinator::{self, Coordinator},
    replica::{self, Replica},
    wire::{Endpoint, Header, Kind, Op, SessionId},
};

const COORDINATOR: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 1), port: 5550 };

fn address(replica: usize) -> Endpoint {
    Endpoint { addr: Ipv4Addr::new(10, 0, 1, replica as u8), port: 5550 }
}

struct Rack {
    agent: Agent,
    tables: Coordinator,
    replicas: Vec<Replica>,
    record: Record,
    revision: u64,
    now_ms: u64,
    /// Datagrams for the agent that are not delivered yet, and whose they are.
    late: VecDeque<(Endpoint, Vec<u8>)>,
    delivers: bool,
}

impl Rack {
    fn new(replicas: usize) -> Self {
        let (agent, tables) = Self::process(1000);
        let wanted = (0..replicas)
            .map(|i| Wanted { id: i as u32, addr: address(i).addr, port: address(i).port, replaces: None })
            .collect();
        let mut rack = Self {
            agent,
            tables,
            replicas: (0..replicas)
                .map(|i| Replica::new(replica::Settings::simulated(5 + i as u64, 1 << 20)))
                .collect(),
            record: Record::new(0, wanted),
            revision: 1,
            now_ms: 1000,
            late: VecDeque::new(),
            delivers: true,
        };
        rack.begin();
        rack
    }

    fn process(now_ms: u64) -> (Agent, Coordinator) {
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
        (Agent::new(settings, &[0], 64, now_ms), Coordinator::new(tables))
    }

    /// The agent learns what there is.
    fn begin(&mut self) {
        let (revision, record) = (self.revision, Some(self.record.clone()));
        self.step(Event::Record { shard: 0, revision, record });
        self.step(Event::Role { shard: 0, held: true });
    }

    /// The agent's process dies with its tables; another one begins.
    fn restart(&mut self) {
        (self.agent, self.tables) = Self::process(self.now_ms);
        self.begin();
    }

    fn step(&mut self, event: Event<'_>) {
        for action in self.agent.step(self.now_ms, event, &mut self.tables).unwrap() {
            match action {
                Action::Send { to, bytes } => self.send(COORDINATOR, to, &bytes),
                Action::Store { shard, id, expected, record } => {
                    assert_eq!(expected, self.revision);
                    self.revision += 1;
                    self.record = record;
                    self.step(Event::Stored { shard, id, outcome: StoreOutcome::Stored(self.revision) });
                }
                _ => {}
            }
        }
        while self.delivers && self.deliver(|_| true) {}
    }

    /// Sends a datagram; what replicas say to each other arrives at once.
    fn send(&mut self, from: Endpoint, to: Endpoint, bytes: &[u8]) {
        let Some(at) = (0..self.replicas.len()).find(|&i| address(i) == to) else {
            return if to == COORDINATOR {
                self.late.push_back((from, bytes.to_vec()))
            };
        };
        for action in self.replicas[at].step(self.now_ms, replica::Event::Datagram { from, bytes }) {
            if let replica::Action::Send { to: next, bytes } = action {
                self.send(to, next, &bytes);
            }
        }
    }

    /// Has the agent take the oldest of the late datagrams that is wanted.
    fn deliver(&mut self, wanted: impl Fn(Endpoint) -> bool) -> bool {
        let Some(at) = self.late.iter().position(|(from, _)| wanted(*from)) else { return false };
        let (from, bytes) = self.late.remove(at).expect("it is there");
        self.step(Event::Datagram { from, bytes: &bytes });
        true
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
    let mut rack = Rack::new(1);
    rack.run(100);
    assert!(rack.agent.serves(0) && rack.lease_left_ms() > 900, "{:?}", rack.agent.status(rack.now_ms));
    // Heartbeats are under way while the host sleeps.
    rack.delivers = false;
    rack.run(20);
    rack.step(Event::Suspended);
    assert!(rack.lease_left_ms() <= 0);
    let before = rack.late.len();
    assert!(before > 0);
    for _ in 0..before {
        rack.deliver(|_| true);
    }
    assert!(rack.lease_left_ms() <= 0, "their answers are older than the sleep");
    rack.delivers = true;
    rack.run(20);
    assert!(rack.lease_left_ms() > 900);
}

#[test]
fn an_agent_that_is_stopping_begins_nothing() {
    for answers in 0..3 {
        let mut rack = Rack::new(1);
        rack.delivers = false;
        rack.run(5);
        for _ in 0..answers {
            assert!(rack.deliver(|_| true), "the replica was asked");
        }
        assert!((rack.record.epoch > 0) == (answers > 0) && !rack.agent.serves(0), "forming, then taking over");
        rack.step(Event::Stop);
        assert!(rack.agent.has_stopped());
        rack.delivers = true;
        rack.run(500);
        assert!(rack.agent.has_stopped() && !rack.agent.serves(0));
    }

    let mut rack = Rack::new(1);
    rack.run(100);
    assert!(rack.agent.serves(0));
    rack.step(Event::Stop);
    assert!(rack.agent.has_stopped() && rack.record.settled && rack.lease_left_ms() <= 0);
    rack.run(500);
    assert!(rack.agent.has_stopped() && rack.lease_left_ms() <= 0);
}

#[test]
fn a_take_over_reads_sessions_from_a_member_that_agreed() {
    // Replica 0 confirms late: it has been waited for, and so many answers of replica 1, which alone has processed a write, have
    // come since. After two it would be left out.
    for answers in 0..2 {
        let mut rack = Rack::new(2);
        rack.run(100);
        assert!(rack.agent.serves(0));
        let session = SessionId::new(1 << 24 | 1, 3);
        let epoch = rack.record.epoch;
        let (seq, kind) = (u64::from(epoch) << 40 | 1, Kind::Put.to_wire());
        let write = Header { epoch, seq, kind, session, request: 1, ..Header::new(Op::Write) };
        rack.send(COORDINATOR, address(1), &write.datagram(b"key", b"value"));
        rack.late.clear();

        rack.delivers = false;
        rack.restart();
        let fencing = |rack: &Rack| rack.agent.status(rack.now_ms)[0].state.contains("fencing");
        while fencing(&rack) {
            rack.run(1);
            while fencing(&rack) && rack.deliver(|from| from == address(1)) {}
        }
        for _ in 0..answers {
            while !rack.deliver(|from| from == address(1)) {
                rack.run(1);
            }
        }
        rack.delivers = true;
        rack.run(2000);
        assert!(rack.agent.serves(0), "{:?}", rack.agent.status(rack.now_ms));
        assert_eq!(rack.tables.sessions()[3].session, session.0, "late after {answers}: what it wrote is there");
        assert_eq!(rack.replicas[0].incarnation(), 5, "late after {answers}: it is not left out");
    }
}
