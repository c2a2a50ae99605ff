//! The world of a scenario: pure coordinator, pure replicas, clients, and a network that delivers what it is told to.

use std::collections::{BTreeMap, BTreeSet};

use underpass_abi::abi;
use underpass_check::invariants::Applied;
use underpass_protocol::{
    agent::Tables as _,
    coordinator::{Action, Coordinator, Published, Step},
    replica::{self, Count, Replica},
    wire::{Header, Kind, Op, Packet, Reason, SessionId, Status},
};

use super::{
    Ask, BASE, COORDINATOR, NOW_MS, SESSIONS, SHARD,
    checks::{Broken, Recorded, Seen, clean_after},
    client_endpoint, member_endpoint,
    oracle::Answer,
    replica_name, request_routed_to, tables,
};

pub const MEMBERS: u8 = 3;

/// A datagram on its way, by the name that scenarios call it.
#[derive(Clone)]
struct Message {
    name: String,
    to: Place,
    from: Place,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Coordinator,
    Replica(u8),
    Client(u16),
}

/// An operation of a client.
struct Operation {
    name: String,
    request: u64,
    bytes: Vec<u8>,
    recorded: Recorded,
}

/// Everything there is.
pub struct World {
    coordinator: Coordinator,
    replicas: Vec<Option<Replica>>,
    network: Vec<Message>,
    cpus: BTreeMap<char, (Step, Message)>,
    operations: Vec<Operation>,
    now: u64,
    seen: Seen,
    settled: bool,
}

/// Why a command could not be done.
pub type Fail = String;

impl World {
    pub fn new(published: Published, replicas: replica::Published) -> Self {
        let mut coordinator = super::coordinator(MEMBERS);
        coordinator.published = published;
        let replica = |index| {
            let mut replica = super::replica(index, MEMBERS);
            replica.published = replicas;
            Some(replica)
        };
        Self {
            coordinator,
            replicas: (0..MEMBERS).map(replica).collect(),
            network: vec![],
            cpus: BTreeMap::new(),
            operations: vec![],
            now: 0,
            seen: Seen::default(),
            settled: false,
        }
    }

    /// Runs one command; what happened, as lines.
    pub fn run(&mut self, command: &str) -> Result<Vec<String>, Fail> {
        let words: Vec<_> = command.split_whitespace().collect();
        match words[..] {
            ["given", key, "=", value, "as", name] => self.given(key, value, name),
            ["deliver", "any", ..] => match self.deliver_all(&words[2..], false, None) {
                Err(_) => Ok(vec!["none is on its way".into()]),
                lines => lines,
            },
            ["deliver", ..] => self.deliver_all(&words[1..], false, None),
            ["copy", ..] => self.deliver_all(&words[1..], true, None),
            ["lose", ..] => {
                for name in names(&words[1..])? {
                    self.take(&name, false)?;
                }
                Ok(vec![])
            }
            ["crash", name] => {
                let index = replica_index(name)?;
                self.replicas[usize::from(index)] = None;
                self.network.retain(|message| message.to != Place::Replica(index));
                Ok(vec![format!("{name} is gone")])
            }
            ["heartbeat"] => self.heartbeat(),
            ["settle"] => self.settle(),
            [cpu @ ("cpu1" | "cpu2"), ref rest @ ..] => {
                let cpu = cpu.chars().last().expect("not empty");
                match rest {
                    ["continue"] => self.resume(cpu),
                    ["deliver", rest @ ..] => self.deliver_all(rest, false, Some(cpu)),
                    ["copy", rest @ ..] => self.deliver_all(rest, true, Some(cpu)),
                    [client, rest @ ..] => self.client(client, rest, Some(cpu)),
                    [] => Err("a CPU to do nothing".into()),
                }
            }
            [client, ref rest @ ..] => self.client(client, rest, None),
            [] => unreachable!("no command is empty"),
        }
    }

    /// Every invariant that is broken now.
    pub fn broken(&mut self) -> Vec<Broken> {
        let mut history: Vec<Recorded> = vec![];
        for operation in &mut self.operations {
            let Recorded { client, ref key, ref ask, called, ref answered } = operation.recorded;
            history.push(Recorded { client, key: key.clone(), ask: ask.clone(), called, answered: answered.clone() });
        }
        let mut broken = self.seen.broken(&self.replicas, &history);
        if self.cpus.is_empty() {
            broken.extend(tables::wrong(&self.coordinator).map(|what| ("tables", what)));
        }
        if self.settled {
            broken.extend(clean_after(&self.coordinator, &self.replicas));
            broken.extend(tables::left_over(&self.coordinator).map(|what| ("clean-after", what)));
        }
        broken
    }

    fn client(&mut self, who: &str, words: &[&str], cpu: Option<char>) -> Result<Vec<String>, Fail> {
        let (words, held) = match words {
            [words @ .., "held"] => (words, true),
            _ => (words, false),
        };
        if let ["again", name] = words {
            let operation =
                self.operations.iter().find(|op| op.name == *name).ok_or(format!("{name} was never sent"))?;
            let message = Message {
                name: format!("request {name}"),
                to: Place::Coordinator,
                from: Place::Client(operation.recorded.client),
                bytes: operation.bytes.clone(),
            };
            return self.send(message, held, cpu);
        }
        let (ask, key, name, via) = match *words {
            ["get", key, "as", name, "via", replica] => (Ask::Get, key, name, replica_index(replica)?),
            ["put", key, value, "as", name] => (Ask::Put(value.into()), key, name, 0),
            ["add", key, value, "as", name] => (Ask::Add(value.into()), key, name, 0),
            ["replace", key, value, "as", name] => (Ask::Replace(value.into()), key, name, 0),
            ["append", key, value, "as", name] => (Ask::Append(value.into()), key, name, 0),
            ["prepend", key, value, "as", name] => (Ask::Prepend(value.into()), key, name, 0),
            ["delete", key, "as", name] => (Ask::Delete, key, name, 0),
            ["incr", key, by, "as", name] => (Ask::Incr(by.parse().map_err(|_| "no number")?), key, name, 0),
            _ => return Err(format!("{who} cannot {:?}", words.join(" "))),
        };
        let number = who.strip_prefix('c').and_then(|number| number.parse().ok());
        let client = number.filter(|number| u32::from(*number) < SESSIONS).ok_or(format!("{who} is no client"))?;
        let is_read = |ask: &Ask| *ask == Ask::Get;
        let mine = |op: &&Operation| op.recorded.client == client && is_read(&op.recorded.ask) == is_read(&ask);
        let last = self.operations.iter().filter(mine).map(|op| op.request).max().unwrap_or(0);
        let request = if is_read(&ask) { request_routed_to(client, last + 1, via, MEMBERS) } else { last + 1 };
        let bytes = ask.datagram(client, request, key);
        self.now += 1;
        let recorded = Recorded { client, key: key.to_owned(), ask, called: self.now, answered: None };
        self.operations.push(Operation { name: name.to_owned(), request, bytes: bytes.clone(), recorded });
        let name = format!("request {name}");
        self.send(Message { name, to: Place::Coordinator, from: Place::Client(client), bytes }, held, cpu)
    }

    fn send(&mut self, message: Message, held: bool, cpu: Option<char>) -> Result<Vec<String>, Fail> {
        if held {
            self.network.push(message);
            return Ok(vec![]);
        }
        self.deliver(message, cpu)
    }

    fn take(&mut self, name: &str, copy: bool) -> Result<Message, Fail> {
        let at = self.network.iter().position(|message| message.name == name);
        let at = at.ok_or_else(|| {
            let all: Vec<_> = self.network.iter().map(|message| &*message.name).collect();
            format!("no {name:?} is on its way; these are: {}", all.join(", "))
        })?;
        Ok(if copy { self.network[at].clone() } else { self.network.remove(at) })
    }

    fn deliver_all(&mut self, words: &[&str], copy: bool, cpu: Option<char>) -> Result<Vec<String>, Fail> {
        let mut lines = vec![];
        for name in names(words)? {
            let message = self.take(&name, copy)?;
            lines.extend(self.deliver(message, cpu)?);
        }
        Ok(lines)
    }

    fn deliver(&mut self, message: Message, cpu: Option<char>) -> Result<Vec<String>, Fail> {
        match message.to {
            Place::Coordinator => {
                let from = match message.from {
                    Place::Client(client) => client_endpoint(client),
                    Place::Replica(index) => member_endpoint(index),
                    Place::Coordinator => unreachable!("it sends nothing to itself"),
                };
                if let Some(cpu) = cpu
                    && self.cpus.contains_key(&cpu)
                {
                    return Err(format!("cpu{cpu} is busy with {:?}", self.cpus[&cpu].1.name));
                }
                let before = self.coordinator.counters().to_vec();
                let packet = Packet::parse(&message.bytes).expect("made by us");
                let step = self.coordinator.begin(NOW_MS, from, &packet);
                let counted = counted(&before, self.coordinator.counters());
                self.note_decided();
                match cpu {
                    None => self.finish(step, message, counted),
                    Some(cpu) => self.park(cpu, step, message, counted),
                }
            }
            Place::Replica(index) => self.at_replica(index, message),
            Place::Client(client) => self.at_client(client, message),
        }
    }

    /// All critical sections that are left, in one go.
    fn finish(&mut self, mut step: Step, message: Message, mut count: Option<u32>) -> Result<Vec<String>, Fail> {
        loop {
            if let Step::Done(action) = step {
                return Ok(self.act(action, &message, count));
            }
            let before = self.coordinator.counters().to_vec();
            step = self.coordinator.resume(step);
            count = counted(&before, self.coordinator.counters());
            self.note_decided();
        }
    }

    fn resume(&mut self, cpu: char) -> Result<Vec<String>, Fail> {
        let Some((step, message)) = self.cpus.remove(&cpu) else {
            return Ok(vec![format!("cpu{cpu} has nothing left to do")]);
        };
        let before = self.coordinator.counters().to_vec();
        let step = self.coordinator.resume(step);
        let count = counted(&before, self.coordinator.counters());
        self.note_decided();
        self.park(cpu, step, message, count)
    }

    fn park(&mut self, cpu: char, step: Step, message: Message, count: Option<u32>) -> Result<Vec<String>, Fail> {
        let line = match step {
            Step::Done(action) => {
                let lines = self.act(action, &message, count);
                return Ok(lines.into_iter().map(|line| format!("cpu{cpu}, {line}")).collect());
            }
            Step::Order(_) => "the session's record is starting; next, the bucket",
            Step::Refuse(..) => "the bucket refuses; next, the session's record",
            Step::Fix(_) => "the bucket gave a seq and is dirty; next, the bucket again, for the time",
            Step::Record(_) => "the bucket gave a seq and is dirty; next, the session's record",
            Step::Clear(_) => "every member has acknowledged, the record is committing; next, the bucket",
            Step::Finish(_) => "the bucket knows the commit; next, the session's record",
            Step::LateLook(_) => "the bound is taken; next, the bucket",
            Step::LateBound(_) => "the key looks clean; next, the bound",
            Step::Settled => unreachable!("no agent settles anything here"),
        };
        self.cpus.insert(cpu, (step, message));
        Ok(vec![format!("cpu{cpu}, coordinator: {line}")])
    }

    /// Remembers what the coordinator has decided to commit.
    fn note_decided(&mut self) {
        for record in self.coordinator.sessions() {
            if matches!(u32::from(record.state), abi::UP_STATE_COMMITTING | abi::UP_STATE_COMMITTED) {
                let operation = find(&self.operations, SessionId(record.session), record.request, false);
                let operation = operation.expect("only requests of clients are recorded");
                self.seen.decide(record.seq, &operation.recorded.key);
            }
        }
    }

    /// Sends what an action of the coordinator says, and says it.
    fn act(&mut self, action: Action, message: &Message, count: Option<u32>) -> Vec<String> {
        let packet = Packet::parse(&message.bytes).expect("made by us");
        let name = |header: &Header| self.name_of(header);
        let about = name(&packet.header);
        let emit = |header: Header| {
            let mut bytes = message.bytes.clone();
            header.emit(&mut bytes);
            bytes
        };
        let mut sent = vec![];
        let line = match action {
            Action::Drop(reason) => match reason {
                abi::UP_COUNT_ACK => format!("{about} is not acknowledged by all yet"),
                abi::UP_COUNT_DROP_ACK_STALE => format!("{about} is not pending, the acknowledgement is dropped"),
                abi::UP_COUNT_DROP_STARTING => format!("{about} is in other hands at this moment, dropped"),
                abi::UP_COUNT_DROP_OLD => format!("{about} is older than the session's last, dropped"),
                reason => format!("{about} is dropped, counter {reason}"),
            },
            Action::Control => unreachable!("scenarios send no control packets to the coordinator"),
            Action::ToMember { index, header, .. } => {
                sent.push(Message {
                    name: format!("read {about}"),
                    to: Place::Replica(index),
                    from: Place::Coordinator,
                    bytes: emit(header),
                });
                let dirty = if count == Some(abi::UP_COUNT_READ_DIRTY) { ", for it is dirty," } else { "," };
                let key = String::from_utf8_lossy(packet.key).into_owned();
                format!("{about} may see {key} up to {}{dirty} and goes to {}", seq(header.seq), replica_name(index))
            }
            Action::ToMembers { header } => {
                for (index, _) in self.coordinator.must_ack(SHARD) {
                    let name = format!("{about} to {}", replica_name(index));
                    let bytes = emit(Header { cnt: index, ..header });
                    sent.push(Message { name, to: Place::Replica(index), from: Place::Coordinator, bytes });
                }
                let again = if count == Some(abi::UP_COUNT_WRITE_AGAIN) { "still " } else { "" };
                format!("{about} is {again}{}, goes to A B C", seq(header.seq))
            }
            Action::ToClient { header, .. } => {
                let client = header.session.index();
                let name = format!("reply {about}");
                sent.push(Message { name, to: Place::Client(client), from: Place::Coordinator, bytes: emit(header) });
                format!("{about} is committed, to be told to {}", client_name(client))
            }
            Action::ToSender { mut header, result } => {
                header.value_len = 0;
                let value = if header.kind == Kind::Incr.to_wire() { result.map(u64::to_be_bytes) } else { None };
                let bytes = header.datagram(packet.key, value.as_ref().map_or(&[], |value| &value[..]));
                let name = format!("reply {about}");
                sent.push(Message { name, to: message.from, from: Place::Coordinator, bytes });
                match header.op {
                    Op::WReply => format!("{about} is answered from its record"),
                    _ => format!("{about} is rejected: {}", Reason::from_wire(header.status).expect("a reason")),
                }
            }
        };
        self.network.extend(sent);
        vec![format!("coordinator: {line}")]
    }

    fn at_replica(&mut self, index: u8, message: Message) -> Result<Vec<String>, Fail> {
        let name = replica_name(index);
        let Some(replica) = &self.replicas[usize::from(index)] else { return Err(format!("{name} is gone")) };
        let packet = Packet::parse(&message.bytes).expect("made by us");
        let about = self.name_of(&packet.header);
        let key = String::from_utf8_lossy(packet.key).into_owned();
        let actions = replica.step(NOW_MS, replica::Event::Datagram { from: COORDINATOR, bytes: &message.bytes });
        let mut count = None;
        let mut answer = None;
        for action in actions {
            match action {
                replica::Action::Count(what) => count = Some(what),
                replica::Action::Send { bytes, .. } => answer = Some(bytes),
                replica::Action::Note(note) => return Err(format!("{name} notes {note:?}")),
            }
        }
        let count = count.expect("a replica counts every datagram");
        let Some(answer) = answer else { return Ok(vec![format!("{name}: {about} is dropped: {count:?}")]) };
        let reply = Packet::parse(&answer).expect("a replica sends packets");
        let status = Status::from_wire(reply.header.status);
        let from = Place::Replica(index);
        let line = match count {
            Count::Write(_) | Count::WriteAgain => {
                let Header { session, request, seq, kind, .. } = reply.header;
                self.seen.acknowledge(Applied {
                    replica: index,
                    session,
                    request,
                    seq,
                    key: key.as_str().into(),
                    kind: Kind::from_wire(kind).expect("a kind"),
                    status: status.expect("a status"),
                    result: reply.value.first_chunk().map_or(0, |number| u64::from_be_bytes(*number)),
                });
                let ack = format!("ack {about} from {name}");
                self.network.push(Message { name: ack, to: Place::Coordinator, from, bytes: answer.clone() });
                let outcome = match status {
                    Some(Status::Ok) => String::new(),
                    status => format!(": {}", status.expect("a status")),
                };
                match count {
                    Count::WriteAgain => format!("has {about} already, acknowledges it as recorded{outcome}"),
                    _ => format!("stores {about} of {key}, acknowledges{outcome}; holds {}", self.chain(index, &key)),
                }
            }
            Count::Read | Count::ReadNotFound => {
                let client = packet.header.session.index();
                let name_of_reply = format!("reply {about}");
                self.network.push(Message {
                    name: name_of_reply,
                    to: Place::Client(client),
                    from,
                    bytes: answer.clone(),
                });
                if status == Some(Status::Ok) {
                    self.seen.read(index, &key, reply.header.seq);
                    format!("answers {about} with {}", String::from_utf8_lossy(reply.value))
                } else {
                    format!("answers {about}: not found")
                }
            }
            other => return Err(format!("{name} makes {other:?} of {about}")),
        };
        Ok(vec![format!("{name}: {line}")])
    }

    /// Versions of a key at a replica, newest first.
    fn chain(&self, index: u8, key: &str) -> String {
        let Some(replica) = &self.replicas[usize::from(index)] else { return "nothing".into() };
        let dump = replica.dump();
        let Some(item) = dump.items.iter().find(|item| item.key == key.as_bytes()) else { return "nothing".into() };
        let version = |version: &replica::VersionDump| match &version.data {
            Some(data) => format!("{} ({})", String::from_utf8_lossy(data), seq(version.seq)),
            None => format!("nothing ({})", seq(version.seq)),
        };
        item.versions.iter().map(version).collect::<Vec<_>>().join(", ")
    }

    fn at_client(&mut self, client: u16, message: Message) -> Result<Vec<String>, Fail> {
        let packet = Packet::parse(&message.bytes).expect("made by us");
        let header = packet.header;
        let about = self.name_of(&header);
        let who = client_name(client);
        self.now += 1;
        let now = self.now;
        let is_read = matches!(header.op, Op::RReply | Op::RReject);
        let operation = find_mut(&mut self.operations, header.session, header.request, is_read);
        let recorded = &mut operation.ok_or("an answer to nothing")?.recorded;
        let (answer, text) = match header.op {
            Op::RReply if header.status == Status::Ok.to_wire() => {
                (Answer::Read(Some(packet.value.to_vec())), String::from_utf8_lossy(packet.value).into_owned())
            }
            Op::RReply => (Answer::Read(None), "not found".to_owned()),
            Op::WReply => {
                let status = Status::from_wire(header.status).expect("a status");
                let number = (header.kind == Kind::Incr.to_wire() && status == Status::Ok)
                    .then(|| i64::from_be_bytes(packet.value[..8].try_into().expect("8 bytes")));
                let text = number.map_or_else(|| status.to_string(), |number| format!("ok, {number}"));
                (Answer::Wrote(status, number), text)
            }
            _ => {
                let reason = Reason::from_wire(header.status).expect("a reason");
                return Ok(vec![format!("{who}: {about} was rejected ({reason}), its outcome is open")]);
            }
        };
        if recorded.answered.is_some() {
            return Ok(vec![format!("{who}: has its answer to {about} already")]);
        }
        recorded.answered = Some((now, answer));
        Ok(vec![format!("{who}: {about} is {text}")])
    }

    fn given(&mut self, key: &str, value: &str, name: &str) -> Result<Vec<String>, Fail> {
        self.client("c0", &["put", key, value, "as", name], None)?;
        for target in ["A", "B", "C"] {
            self.deliver_all(&[name, "to", target], false, None)?;
            self.deliver_all(&["ack", name, "from", target], false, None)?;
        }
        self.deliver_all(&["reply", name], false, None)?;
        let record = self.operations.last().expect("just sent");
        let told = record.recorded.answered.is_some();
        let clock = self.coordinator.shards()[underpass_protocol::coordinator::slot(SHARD)].clock;
        Ok(vec![format!("{name} is {}{}", seq(clock), if told { ", committed" } else { "" })])
    }

    fn heartbeat(&mut self) -> Result<Vec<String>, Fail> {
        let scan = self.coordinator.scan(SHARD, usize::MAX).unwrap();
        let bytes = super::heartbeat(scan.stable, None);
        for replica in self.replicas.iter().flatten() {
            replica.step(NOW_MS, replica::Event::Datagram { from: COORDINATOR, bytes: &bytes });
        }
        Ok(vec![format!("everything up to {} is resolved", seq(scan.stable))])
    }

    /// The network delivers all that is on its way, and clients send again what has no answer, until nothing is left.
    fn settle(&mut self) -> Result<Vec<String>, Fail> {
        if !self.cpus.is_empty() {
            return Err("a CPU is in the middle of a packet".into());
        }
        for _ in 0..10 {
            while !self.network.is_empty() {
                let message = self.network.remove(0);
                self.deliver(message, None)?;
            }
            let open = self.operations.iter().filter(|op| op.recorded.answered.is_none());
            let again: Vec<_> = open.map(|op| (op.recorded.client, op.bytes.clone())).collect();
            if again.is_empty() {
                break;
            }
            for (client, bytes) in again {
                let message =
                    Message { name: String::new(), to: Place::Coordinator, from: Place::Client(client), bytes };
                self.deliver(message, None)?;
            }
        }
        self.settled = true;
        self.heartbeat()?;
        let keys: BTreeSet<_> = self.operations.iter().map(|op| op.recorded.key.clone()).collect();
        let mut lines = vec![];
        for key in keys {
            let held: Vec<_> = (0..MEMBERS).map(|index| self.chain(index, &key)).collect();
            if held.iter().all(|chain| *chain == held[0]) {
                lines.push(format!("A, B and C hold {key} = {}", held[0]));
            } else {
                lines.push(format!("{key} differs: A {}; B {}; C {}", held[0], held[1], held[2]));
            }
        }
        let left = tables::left_over(&self.coordinator);
        lines.push(format!("coordinator: {}", left.as_deref().unwrap_or("nothing is dirty, nothing is pending")));
        Ok(lines)
    }

    /// The operation that a packet belongs to.
    fn name_of(&self, header: &Header) -> String {
        let is_read = matches!(header.op, Op::Read | Op::RReply | Op::RReject);
        find(&self.operations, header.session, header.request, is_read).map_or("?".into(), |op| op.name.clone())
    }
}

fn client_name(client: u16) -> String {
    format!("c{client}")
}

fn find(operations: &[Operation], session: SessionId, request: u64, is_read: bool) -> Option<&Operation> {
    operations.iter().find(|op| is(op, session, request, is_read))
}

fn find_mut(operations: &mut [Operation], session: SessionId, request: u64, is_read: bool) -> Option<&mut Operation> {
    operations.iter_mut().find(|op| is(op, session, request, is_read))
}

fn is(op: &Operation, session: SessionId, request: u64, is_read: bool) -> bool {
    op.recorded.client == session.index() && op.request == request && (op.recorded.ask == Ask::Get) == is_read
}

/// `w1 to A B`: the clones of a write; `ack w1 from A B`; `reply w1`, `read r1`, `request w1`.
fn names(words: &[&str]) -> Result<Vec<String>, Fail> {
    match words {
        [name, "to", replicas @ ..] => Ok(replicas.iter().map(|replica| format!("{name} to {replica}")).collect()),
        ["ack", name, "from", replicas @ ..] => {
            Ok(replicas.iter().map(|replica| format!("ack {name} from {replica}")).collect())
        }
        [what @ ("reply" | "read" | "request"), name] => Ok(vec![format!("{what} {name}")]),
        _ => Err(format!("{:?} names no message", words.join(" "))),
    }
}

fn replica_index(name: &str) -> Result<u8, Fail> {
    match name {
        "A" => Ok(0),
        "B" => Ok(1),
        "C" => Ok(2),
        _ => Err(format!("{name} is no replica")),
    }
}

fn seq(seq: u64) -> String {
    match seq.checked_sub(BASE) {
        Some(seq) if seq < 1000 => format!("seq {seq}"),
        _ => "any seq".into(),
    }
}

/// The first of the counters that tells how a packet was handled.
fn counted(before: &[u64], after: &[u64]) -> Option<u32> {
    let grown = |count: &u32| after[*count as usize] > before[*count as usize];
    [abi::UP_COUNT_READ_DIRTY, abi::UP_COUNT_WRITE_AGAIN].into_iter().find(grown)
}
