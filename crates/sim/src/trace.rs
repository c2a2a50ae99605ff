//! What happened in a run, as lines that people read.

use underpass_protocol::wire::{Header, Kind, Op, Packet, Reason, SessionId, Status};

use crate::host::{Host, MS};

/// What to keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// Nothing.
    #[default]
    None,
    /// All but heartbeats and their answers.
    Events,
    /// Everything.
    All,
}

/// The lines of a run.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// What is kept.
    pub detail: Detail,
    /// Lines so far.
    pub lines: Vec<String>,
    hash: u64,
}

impl Trace {
    /// A trace of this detail.
    pub fn new(detail: Detail) -> Self {
        Self { detail, ..Self::default() }
    }

    /// Something happened at a host. The words are made only if they are kept.
    pub fn say(&mut self, now: u64, host: Host, what: impl FnOnce() -> String) {
        if self.detail != Detail::None {
            self.lines.push(format!("{:>6}.{:03} {host:<13}  {}", now / MS, now / 1000 % 1000, what()));
        }
    }

    /// A datagram arrives. Part of [`Trace::hash`] at any detail.
    pub fn arrives(&mut self, now: u64, host: Host, from: Host, bytes: &[u8]) {
        self.mix(now);
        self.mix(host.id() as u64 | (bytes.len() as u64) << 8);
        for chunk in bytes.chunks(64) {
            self.mix(u64::from_le_bytes(std::array::from_fn(|i| chunk.get(i).copied().unwrap_or(0))));
        }
        let quiet = self.detail == Detail::None
            || self.detail == Detail::Events
                && matches!(bytes.get(3).and_then(|op| op_of(*op)), Some(Op::Heartbeat | Op::HeartbeatAck));
        if !quiet {
            self.say(now, host, || format!("<- {from}: {}", describe(bytes)));
        }
    }

    /// Of all that arrived, and when: the same for two runs only if they were the same.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    fn mix(&mut self, number: u64) {
        self.hash = (self.hash ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

fn op_of(byte: u8) -> Option<Op> {
    Op::ALL.iter().copied().find(|op| op.to_wire() == byte)
}

/// `epoch.number` of a sequence number.
pub fn seq(seq: u64) -> String {
    format!("{}.{}", seq >> 40, seq & ((1 << 40) - 1))
}

/// A session: the generation's epoch and counter, and its index.
pub fn session(session: SessionId) -> String {
    let generation = session.generation();
    format!("s{}.{}@{}", generation >> 24, generation & 0xff_ffff, session.index())
}

/// A datagram in the protocol's words.
pub fn describe(bytes: &[u8]) -> String {
    let Ok(packet) = Packet::parse(bytes) else { return format!("{} bytes that are no packet", bytes.len()) };
    let Header { op, epoch, shard, request, status, cnt, time, .. } = packet.header;
    let key = String::from_utf8_lossy(packet.key);
    let who = format!("{}/{request}", session(packet.header.session));
    let seq = seq(packet.header.seq);
    let (kind, value) = (Kind::from_wire(packet.header.kind), excerpt(packet.value));
    let of_kind = || kind.map_or_else(|| "?".to_owned(), |kind| kind.to_string());
    let reason = || Reason::from_wire(status).map_or_else(|| "?".to_owned(), |reason| reason.to_string());
    let outcome = || Status::from_wire(status).map_or_else(|| "?".to_owned(), |status| status.to_string());
    match op {
        Op::Read => format!("READ {key} {who} bound {seq} epoch {epoch} time {time}"),
        Op::RReply => format!("R_REPLY {key} {who}: {} {value} cas {seq} from member {cnt}", outcome()),
        Op::Write => format!("WRITE {} {key} {who} seq {seq} epoch {epoch} time {time} {value}", of_kind()),
        Op::WReply => {
            format!("W_REPLY {} {key} {who} seq {seq} epoch {epoch}: {} from member {cnt}", of_kind(), outcome())
        }
        Op::RReject | Op::WReject => format!("{op} {key} {who}: {} (epoch {epoch})", reason()),
        Op::ControlReject => format!("{op} {who}: {} (epoch {epoch})", reason()),
        _ => {
            let about = if packet.key.is_empty() { String::new() } else { format!(" {key} {who} seq {seq}") };
            format!("{op} shard {shard} epoch {epoch} request {request}{about} {value}")
        }
    }
}

fn excerpt(value: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(value).chars().filter(|c| !c.is_control() && *c != '\u{fffd}').collect();
    let text = text.split("\"padding\"").next().unwrap_or_default().trim_end();
    text.chars().take(400).collect()
}
