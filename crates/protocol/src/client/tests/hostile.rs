//! A network that loses, duplicates, delays and reorders, and coordinators that reject, forget, age, abort and take over from
//! each other: an outcome is never better or worse than what happened.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use underpass_abi::abi::UP_STATE_COMMITTED;

use super::*;

/// Chances in a thousand, and the seed of everything.
#[derive(Clone, Copy, Debug)]
struct Weather {
    seed: u64,
    loss: u64,
    duplicate: u64,
    /// Of a copy that comes much later, perhaps when its session is gone.
    straggle: u64,
    reject: u64,
    /// Of a pending write that stays pending.
    stuck: u64,
    abort: u64,
    /// For each packet that the coordinator sees, of forgetting all sessions.
    restart: u64,
    age: u64,
    /// As often, the other coordinator takes over.
    takeover: u64,
}

fn weather() -> impl Strategy<Value = Weather> {
    let chance = |most: u64| prop_oneof![Just(0), 0..most];
    let network = (chance(500), chance(400), chance(200));
    let coordinator = (chance(700), chance(900), chance(200), chance(20), chance(20), chance(30));
    (any::<u64>(), network, coordinator).prop_map(
        |(seed, (loss, duplicate, straggle), (reject, stuck, abort, restart, age, takeover))| Weather {
            seed,
            loss,
            duplicate,
            straggle,
            reject,
            stuck,
            abort,
            restart,
            age,
            takeover,
        },
    )
}

#[derive(Default)]
struct Record {
    token: u64,
    request: u64,
    state: u32,
    number: i64,
    seq: u64,
    tag: u64,
}

/// What became of the write with a tag.
#[derive(Clone, Copy, Debug, Default)]
struct Fate {
    taken: u32,
    committed: u32,
    aborted: u32,
}

struct World {
    weather: Weather,
    dice: Dice,
    now: u64,
    /// Datagrams under way by time of arrival, with where they go; `None`: to the client.
    network: BTreeMap<(u64, u64), (Option<Endpoint>, Vec<u8>)>,
    sent: u64,
    configuration: Configuration,
    sessions: HashMap<u64, Record>,
    generation: u64,
    seq: u64,
    fates: HashMap<u64, Fate>,
}

impl World {
    fn chance(&mut self, in_a_thousand: u64) -> bool {
        self.dice.number() % 1000 < in_a_thousand
    }

    fn transmit(&mut self, to: Option<Endpoint>, datagram: &[u8]) {
        let copies = 1 + u64::from(self.chance(self.weather.duplicate));
        for _ in 0..copies {
            if self.chance(self.weather.loss) {
                continue;
            }
            let delay = if self.chance(self.weather.straggle) { 3 * SECOND_NS } else { MS };
            self.sent += 1;
            let at = self.now + 1 + self.dice.number() % delay;
            self.network.insert((at, self.sent), (to, datagram.to_vec()));
        }
    }

    fn reject(&mut self, packet: &Packet<'_>, reason: Reason) {
        let op = match packet.header.op {
            Op::Read => Op::RReject,
            Op::Write => Op::WReject,
            _ => Op::ControlReject,
        };
        let mut answer = *packet;
        answer.header.epoch = self.configuration.epoch;
        let answer = turned(&answer, op, reason.to_wire(), 0, packet.value);
        self.transmit(None, &answer);
    }

    /// The other coordinator's turn. It knows the sessions of which some member has processed a write; of a pending
    /// one the members that are left either have all processed it in the end, or none ever will.
    fn take_over(&mut self) {
        let next = if self.configuration.coordinator() == COORDINATOR { OTHER } else { COORDINATOR };
        let epoch = self.configuration.epoch + 1 + (self.dice.number() % 3) as u32;
        self.configuration = Configuration { epoch, tenure: epoch, coordinator_addr: next.addr, ..configuration() };
        for record in self.sessions.values_mut().filter(|record| record.state == UP_STATE_PENDING) {
            let fate = self.fates.get_mut(&record.tag).expect("taken");
            if self.dice.number().is_multiple_of(2) {
                self.seq += 1;
                (record.state, record.seq, record.number) = (UP_STATE_COMMITTED, self.seq, record.tag as i64);
                fate.committed += 1;
            } else {
                // What the members have of this session is its write before.
                fate.taken -= 1;
                (record.request, record.state) = (record.request - 1, UP_STATE_IDLE);
            }
        }
        self.sessions.retain(|_, record| record.request > 0);
    }

    /// Whoever does not coordinate: a replica, or the other coordinator.
    fn stand_by(&mut self, packet: &Packet<'_>) {
        match packet.header.op {
            Op::Locate => self.locate(packet, false),
            // It knows no session either, but checks that first.
            _ if self.chance(200) => self.reject(packet, Reason::Session),
            _ if self.chance(500) => self.reject(packet, Reason::Shard),
            _ => {}
        }
    }

    fn locate(&mut self, packet: &Packet<'_>, serves: bool) {
        let mut configuration = self.configuration.clone();
        if !serves && self.chance(300) {
            configuration = super::configuration();
        }
        let answer = control_answer(&packet.header, Op::Located, &Located { configuration, serves });
        self.transmit(None, &answer);
    }

    fn coordinate(&mut self, to: Endpoint, datagram: &[u8]) {
        let packet = Packet::parse(datagram).expect("clients send packets");
        let header = packet.header;
        if self.chance(self.weather.takeover) {
            self.take_over();
        }
        if to != self.configuration.coordinator() {
            return self.stand_by(&packet);
        }
        if self.chance(self.weather.restart) {
            self.sessions.clear();
        }
        if self.chance(self.weather.age) {
            self.sessions.retain(|_, record| record.state == UP_STATE_PENDING);
        }
        match header.op {
            Op::Open => self.open(&packet),
            Op::Close => {
                let Some(record) = self.sessions.get(&header.session.0).filter(|r| r.token == header.token) else {
                    let unknown = Closed { closed: false, request: 0, state: 0 };
                    let answer = control_answer(&header, Op::Closed, &unknown);
                    return self.transmit(None, &answer);
                };
                let closed = record.state != UP_STATE_PENDING;
                let answer = Closed { closed, request: record.request, state: record.state };
                if closed {
                    self.sessions.remove(&header.session.0);
                }
                let answer = control_answer(&header, Op::Closed, &answer);
                self.transmit(None, &answer);
            }
            Op::Read => {
                if self.sessions.get(&header.session.0).is_none_or(|record| record.token != header.token) {
                    return self.reject(&packet, Reason::Session);
                }
                if self.chance(self.weather.reject) {
                    let reasons = [Reason::VersionGone, Reason::Epoch, Reason::Lease, Reason::NotCoordinator];
                    let reason = reasons[self.dice.number() as usize % reasons.len()];
                    return self.reject(&packet, reason);
                }
                // The key is the read's tag: so is the value.
                let answer = turned(&packet, Op::RReply, 0, 1, packet.key);
                self.transmit(None, &answer);
            }
            Op::Write => self.order(&packet),
            Op::Locate => self.locate(&packet, true),
            op => panic!("a client sent {op}"),
        }
    }

    fn open(&mut self, packet: &Packet<'_>) {
        let header = packet.header;
        let opened = Opened { idle_ms: 5_000, configuration: None };
        if self.chance(self.weather.reject) {
            let reasons = [Reason::NoSession, Reason::Token, Reason::Lease];
            let reason = reasons[self.dice.number() as usize % reasons.len()];
            return self.reject(packet, reason);
        }
        let mut answer = header;
        let opened = if header.token == 0 {
            opened
        } else {
            Opened { configuration: Some(self.configuration.clone()), ..opened }
        };
        if header.token == 0 {
            answer.token = 5;
        } else {
            self.generation += 1;
            answer.session = SessionId::new(self.generation, 1);
            answer.token = self.dice.number();
            self.sessions.insert(answer.session.0, Record { token: answer.token, ..Record::default() });
        }
        let answer = control_answer(&answer, Op::Opened, &opened);
        self.transmit(None, &answer);
    }

    fn order(&mut self, packet: &Packet<'_>) {
        let header = packet.header;
        let tag = u64::from_be_bytes(packet.key.try_into().expect("keys are tags"));
        let rejected = self.chance(self.weather.reject);
        let (stuck, aborted) = (self.chance(self.weather.stuck), self.chance(self.weather.abort));
        let before = [Reason::StoreFull, Reason::Lease, Reason::NoMember, Reason::Epoch];
        let after = [Reason::KeyBusy, Reason::DirtyFull];
        let (pick, late) = (self.dice.number() as usize, self.chance(500));
        let Some(record) = self.sessions.get_mut(&header.session.0).filter(|r| r.token == header.token) else {
            return self.reject(packet, Reason::Session);
        };
        if header.request < record.request {
            return;
        }
        let again = header.request == record.request && record.state != UP_STATE_IDLE;
        if !again {
            if record.state == UP_STATE_PENDING {
                return self.reject(packet, Reason::SessionBusy);
            }
            if rejected && !late {
                return self.reject(packet, before[pick % before.len()]);
            }
            record.request = header.request;
            record.state = UP_STATE_IDLE;
            if rejected {
                return self.reject(packet, after[pick % after.len()]);
            }
            record.state = UP_STATE_PENDING;
            record.tag = tag;
            self.fates.entry(tag).or_default().taken += 1;
        } else {
            assert_eq!(record.tag, tag, "one request number, two writes");
        }
        let fate = self.fates.get_mut(&tag).expect("taken");
        if record.state == UP_STATE_PENDING {
            if stuck {
                if rejected {
                    // A replica without room: the write stays pending.
                    self.reject(packet, Reason::StoreFull);
                }
                return;
            }
            if aborted {
                record.state = UP_STATE_ABORTED;
                fate.aborted += 1;
            } else {
                self.seq += 1;
                record.state = UP_STATE_COMMITTED;
                record.seq = self.seq;
                record.number = tag as i64;
                fate.committed += 1;
            }
        }
        if record.state == UP_STATE_ABORTED {
            return self.reject(packet, Reason::Aborted);
        }
        let answer = turned(packet, Op::WReply, 0, record.seq, &record.number.to_be_bytes());
        self.transmit(None, &answer);
    }
}

/// Runs some hundred requests; what came of them in the client's words.
fn run(weather: Weather, patience: u64, check_liveness: bool) -> Result<(), TestCaseError> {
    let mut world = World {
        weather,
        dice: Dice::new(weather.seed),
        now: SECOND_NS,
        network: BTreeMap::new(),
        sent: 0,
        configuration: configuration(),
        sessions: HashMap::new(),
        generation: 0,
        seq: 0,
        fates: HashMap::new(),
    };
    let settings = Settings { reads_max: 3, ..Settings::new(SHARD, here()) };
    let mut client = Client::new(settings, &[COORDINATOR, OTHER]);
    let mut out = Output::default();
    let mut next_tag = 1u64;
    let mut outstanding: HashMap<u64, (bool, u64)> = HashMap::new();
    let mut outcomes: HashMap<u64, Outcome> = HashMap::new();
    let mut good = 0;
    const REQUESTS: u64 = 120;
    for _ in 0..200_000 {
        let random = world.dice.number();
        while next_tag <= REQUESTS && (client.can_write() || client.can_read()) {
            let tag = next_tag;
            let key = tag.to_be_bytes();
            let operand = Operand { ttl_ms: None, expected: 0, delta: tag as i64, data: b"" };
            let is_write = client.can_write() && (!client.can_read() || world.chance(500));
            let request = if is_write {
                Request::Write { kind: Kind::Incr, key: &key, operand }
            } else {
                Request::Read { key: &key }
            };
            let deadline = world.now + patience;
            client.submit(world.now, random ^ tag, request, tag, deadline, &mut out).expect("it can");
            outstanding.insert(tag, (is_write, deadline));
            next_tag += 1;
        }
        for (to, datagram) in out.datagrams() {
            world.transmit(Some(to), datagram);
        }
        out.clear_datagrams();
        for done in out.completions.drain(..) {
            let (is_write, deadline) = outstanding.remove(&done.tag).expect("each request ends once");
            let slack = settings.grace_ns + MS;
            prop_assert!(world.now <= deadline + slack, "{done:?} came late, at {}", world.now);
            let fate = world.fates.get(&done.tag).copied().unwrap_or_default();
            match &done.outcome {
                Outcome::Written { status, seq, number } => {
                    prop_assert!(is_write && *status == Status::Ok && *seq > 0);
                    prop_assert_eq!(*number, Some(done.tag as i64));
                    prop_assert_eq!(fate.committed, 1, "told as done");
                }
                Outcome::Read(item) => {
                    prop_assert!(!is_write);
                    let written = done.tag.to_be_bytes();
                    prop_assert_eq!(item.as_ref().map(|item| &item.value[..]), Some(&written[..]));
                }
                Outcome::Failed(_) => prop_assert!(is_write && fate.committed == 0, "{done:?} had its effect"),
                Outcome::Unknown(_) => prop_assert!(is_write && done.sends > 0),
                Outcome::TimedOut { .. } => prop_assert!(!is_write),
            }
            good += u32::from(matches!(done.outcome, Outcome::Written { .. } | Outcome::Read(_)));
            outcomes.insert(done.tag, done.outcome);
        }
        // What comes next: a datagram or the clock.
        let arrival = world.network.first_key_value().map_or(NEVER, |((at, _), _)| *at);
        let due = client.due();
        if arrival == NEVER && due == NEVER && next_tag > REQUESTS {
            break;
        }
        if due <= arrival {
            world.now = world.now.max(due);
            client.step(world.now, random, Event::Tick, &mut out);
        } else {
            let ((at, _), (to, datagram)) = world.network.pop_first().expect("it is there");
            world.now = world.now.max(at);
            if let Some(to) = to {
                world.coordinate(to, &datagram);
            } else {
                let packet = Packet::parse(&datagram).expect("well-formed");
                client.step(world.now, random, Event::Packet(&packet), &mut out);
            }
        }
    }
    prop_assert!(outstanding.is_empty() && next_tag > REQUESTS, "{} requests never ended", outstanding.len());
    // Stragglers have arrived: the fates are final.
    for (tag, fate) in &world.fates {
        // An aborted write may be tried again.
        prop_assert!(fate.taken <= 1 + fate.aborted, "write {tag} was ordered {} times", fate.taken);
        prop_assert!(fate.committed <= 1);
        if let Some(Outcome::Failed(why)) = outcomes.get(tag) {
            prop_assert_eq!(fate.committed, 0, "write {} failed ({}), then had its effect", tag, why);
            prop_assert_eq!(fate.taken, fate.aborted, "write {} failed ({}) but may yet have its effect", tag, why);
        }
    }
    if check_liveness {
        prop_assert_eq!(u64::from(good), REQUESTS);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn outcomes_tell_what_happened(weather in weather()) {
        run(weather, 200 * MS, false)?;
    }

    #[test]
    fn a_bearable_network_is_borne(seed: u64, loss in 0u64..30, duplicate in 0u64..30, reject in 0u64..200) {
        let weather =
            Weather { seed, loss, duplicate, reject, straggle: 0, stuck: 100, abort: 0, restart: 0, age: 0, takeover: 0 };
        run(weather, 3 * SECOND_NS, true)?;
    }
}

/// A datagram made of one that the client has sent: the fields that an answer must echo are right more often than not.
fn forged(sent: &[u8], dice: &mut Dice) -> Vec<u8> {
    let Ok(packet) = Packet::parse(sent) else { return Vec::new() };
    let mut header = packet.header;
    header.op = Op::ALL[dice.number() as usize % Op::ALL.len()];
    header.status = (dice.number() % 24) as u8;
    header.kind = (dice.number() % 12) as u8;
    header.seq = dice.number();
    match dice.number() % 8 {
        0 => header.session = SessionId(dice.number()),
        1 => header.token = dice.number(),
        2 => header.request = dice.number() % 5,
        3 => header.session = SessionId(0),
        4 => (header.session, header.token) = (SessionId(1 << 16), 7),
        _ => {}
    }
    let mut located = Located { configuration: configuration(), serves: dice.number().is_multiple_of(2) };
    located.configuration.epoch = (dice.number() % 3) as u32;
    located.configuration.coordinator_addr = [10, 9, 9, (dice.number() % 4) as u8].into();
    match dice.number() % 4 {
        0 => located.configuration.shard += 1,
        1 => located.configuration.members.clear(),
        _ => {}
    }
    let located = serde_json::to_vec(&located).expect("it serialises");
    let documents: [&[u8]; 8] = [
        b"",
        b"{\"idle_ms\":0,\"configuration\":null}",
        b"{\"idle_ms\":18446744073709551615,\"configuration\":null}",
        b"{\"closed\":true,\"request\":0,\"state\":0}",
        b"{\"closed\":false,\"request\":18446744073709551615,\"state\":4294967295}",
        b"{\"closed\":",
        b"{\"configuration\":null,\"serves\":true}",
        &located,
    ];
    header.epoch = (dice.number() % 3) as u32;
    header.datagram(packet.key, documents[dice.number() as usize % documents.len()])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn forged_answers_neither_break_it_nor_make_it_loud(seed: u64) {
        let mut dice = Dice::new(seed);
        let mut client = Client::new(Settings { reads_max: 2, ..Settings::new(SHARD, here()) }, &[COORDINATOR]);
        let (mut out, mut now, mut open, mut sent) = (Output::default(), SECOND_NS, 0u64, Vec::<Vec<u8>>::new());
        let mut asked = 0;
        for tag in 0..2_000 {
            let request = if client.can_write() {
                Some(write(Kind::Incr, b"k", b""))
            } else {
                client.can_read().then_some(Request::Read { key: b"k" })
            };
            if let Some(request) = request {
                client.submit(now, dice.number(), request, tag, now + 100 * MS, &mut out).expect("it can");
                open += 1;
            }
            client.step(now, dice.number(), Event::Tick, &mut out);
            sent.extend(out.datagrams().map(|(_, datagram)| datagram.to_vec()));
            out.clear_datagrams();
            sent.drain(..sent.len().saturating_sub(8));
            let Some(pick) = (!sent.is_empty()).then(|| dice.number() as usize % sent.len()) else { continue };
            let datagram = forged(&sent[pick], &mut dice);
            if let Ok(packet) = Packet::parse(&datagram) {
                client.step(now, dice.number(), Event::Packet(&packet), &mut out);
                // At most what waited for a session or goes to another coordinator: a write and two reads, or one OPEN or
                // CLOSE; and a round of LOCATE, to the coordinator given, another one and three replicas.
                let (locates, others): (Vec<_>, Vec<_>) =
                    out.datagrams().partition(|(_, datagram)| datagram[3] == Op::Locate.to_wire());
                prop_assert!(others.len() <= 3 && locates.len() <= 6, "{} datagrams for one", out.datagram_count());
                // A single one is no round: it goes to a coordinator that the answer has named, once for each epoch.
                if locates.len() > 1 {
                    prop_assert!(now >= asked + MS, "rounds at {asked} and {now}");
                    asked = now;
                }
            }
            now += dice.number() % (2 * MS);
            open -= out.completions.drain(..).count() as u64;
            prop_assert!(open <= 3);
        }
        client.step(now, 1, Event::End, &mut out);
        prop_assert_eq!(open, out.completions.len() as u64);
        prop_assert!(client.is_idle());
    }
}
