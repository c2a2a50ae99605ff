//! Stuck writes: pending, and nobody sends them again. `docs/protocol.md`, section 7.

use std::collections::BTreeMap;

use underpass_abi::abi::{UP_STATE_PENDING, UP_STATE_STARTING, up_session};

use super::{
    Level, Settlement, TablesError,
    shard::{Context, Shard},
};
use crate::{
    control::{Answer, Fate, Pull},
    coordinator::unresolved,
    replica::SessionRecord,
    transfer,
    wire::{Endpoint, Header, Op, Packet, SessionId, Status},
};

/// Time after which a question is asked again.
const ASK_MS: u64 = 20;
/// Writes repaired at once.
const REPAIRS_MAX: usize = 64;

#[derive(Debug, Default)]
struct Repair {
    seq: u64,
    since_ms: u64,
    asked_ms: Option<u64>,
    answers: BTreeMap<u8, Answer>,
    /// An answer came that says something new.
    is_new: bool,
    /// The write's key, as one told that processed it.
    key: Vec<u8>,
}

/// Writes of a shard that are pending, and what is done about those that are so for long.
#[derive(Debug, Default)]
pub(super) struct Repairs {
    writes: BTreeMap<(SessionId, u64), Repair>,
}

impl Repairs {
    /// An epoch is over: no answer counts any more.
    pub fn forget(&mut self) {
        self.writes.clear();
    }

    /// Whether no member was asked about any write.
    pub fn is_empty(&self) -> bool {
        self.writes.values().all(|repair| repair.asked_ms.is_none())
    }

    /// Notes which writes are pending, and sees to those that have been for long.
    pub fn step(
        &mut self,
        shard: &mut Shard,
        cx: &mut Context<'_>,
        epoch: u32,
        must_ack: &BTreeMap<u8, u64>,
    ) -> Result<(), TablesError> {
        let mut pending = BTreeMap::new();
        cx.tables.records(cx.sessions.bound(), &mut |_, record| {
            if record.shard == shard.id && u32::from(record.state) == UP_STATE_PENDING {
                pending.insert((SessionId(record.session), record.request), record.seq);
            }
        })?;
        self.writes.retain(|write, repair| pending.get(write) == Some(&repair.seq));
        for (write, seq) in pending {
            self.writes.entry(write).or_insert(Repair { seq, since_ms: cx.now_ms, ..Repair::default() });
        }
        self.act(shard, cx, epoch, must_ack)
    }

    /// What a member answered to QUERY or ABORT.
    pub fn answered(&mut self, index: u8, packet: &Packet<'_>, answer: &Answer) {
        let header = packet.header;
        let Some(repair) = self.writes.get_mut(&(header.session, header.request)) else { return };
        if repair.asked_ms.is_none() || repair.seq != header.seq {
            return;
        }
        if answer.fate == Fate::Processed && !packet.key.is_empty() {
            repair.key = packet.key.to_vec();
        }
        // What is processed or aborted stays so, for this epoch; a frozen one may be either by now, and an answer that
        // was under way says less than one that came before it.
        let known = repair.answers.get(&index).map(|answer| answer.fate);
        let keeps = match known {
            Some(Fate::Processed) => true,
            Some(Fate::Aborted) => answer.fate != Fate::Processed,
            _ => false,
        };
        if !keeps {
            repair.is_new |= known != Some(answer.fate);
            repair.answers.insert(index, answer.clone());
        }
    }

    /// Asks, orders and settles what can be.
    pub fn act(
        &mut self,
        shard: &mut Shard,
        cx: &mut Context<'_>,
        epoch: u32,
        must_ack: &BTreeMap<u8, u64>,
    ) -> Result<(), TablesError> {
        let mut settled = Vec::new();
        #[cfg(feature = "published")]
        if cx.mutant.no_repair {
            return Ok(());
        }
        let old_ms = cx.now_ms.saturating_sub(cx.settings.stuck_ms);
        let due = self.writes.iter_mut().filter(|(_, repair)| repair.since_ms <= old_ms);
        for (&(session, request), repair) in due.take(REPAIRS_MAX) {
            let fates: BTreeMap<u8, Fate> =
                must_ack.keys().filter_map(|index| Some((*index, repair.answers.get(index)?.fate))).collect();
            let all = |fate: Fate| fates.len() == must_ack.len() && fates.values().all(|&other| other == fate);
            if fates.values().any(|&fate| fate == Fate::Gone) {
                // It was resolved meanwhile; the next scan shows it.
                repair.answers.clear();
            }
            if all(Fate::Processed) {
                let Answer { status, result, .. } = repair.answers.values().next().expect("not empty").clone();
                let settlement = Settlement::Committed { status, result };
                if cx.tables.settle(session, request, repair.seq, settlement)? {
                    cx.log(Level::Info, format!("shard {}: completed a stuck write (seq {:#x})", shard.id, repair.seq));
                }
                settled.push((session, request));
                continue;
            }
            #[cfg(feature = "published")]
            let aborted =
                all(Fate::Aborted) || (cx.mutant.abort_early && fates.values().any(|&fate| fate == Fate::Aborted));
            #[cfg(not(feature = "published"))]
            let aborted = all(Fate::Aborted);
            if aborted {
                if cx.tables.settle(session, request, repair.seq, Settlement::Aborted)? {
                    cx.log(Level::Warn, format!("shard {}: aborted a stuck write (seq {:#x})", shard.id, repair.seq));
                }
                settled.push((session, request));
                continue;
            }
            let everybody = fates.len() == must_ack.len();
            let again = repair.asked_ms.is_none_or(|asked_ms| cx.now_ms >= asked_ms + ASK_MS);
            let says_more = everybody && std::mem::take(&mut repair.is_new);
            if !again && !says_more {
                continue;
            }
            let header =
                |cx: &Context<'_>, op: Op| Header { session, request, seq: repair.seq, ..shard.header(cx, op, epoch) };
            let at = |index: &u8| shard.members.get(index).map(|member| member.endpoint());
            let holder = fates.iter().find(|(_, fate)| **fate == Fate::Processed).and_then(|(index, _)| at(index));
            let aborts = everybody && holder.is_none() && {
                #[cfg(feature = "published")]
                let despite = cx.mutant.abort_despite_lower;
                #[cfg(not(feature = "published"))]
                let despite = false;
                despite || is_lowest(cx, shard.id, session, repair.seq)?
            };
            repair.asked_ms = Some(cx.now_ms);
            for index in must_ack.keys() {
                let Some(to) = at(index) else { continue };
                match (fates.get(index), holder) {
                    (Some(Fate::Processed), _) => {}
                    (Some(Fate::Frozen | Fate::Aborted), Some(Endpoint { addr, port })) if !repair.key.is_empty() => {
                        let document = serde_json::to_vec(&Pull { from: (addr, port) }).expect("always serialises");
                        cx.send(to, shard.header(cx, Op::Pull, epoch).datagram(&repair.key, &document));
                        // Once it has pulled it answers that it has processed the write.
                        cx.send(to, header(cx, Op::Query).datagram(&[], &[]));
                    }
                    (Some(Fate::Frozen), None) if aborts => {
                        let record = aborted_record(&cx.tables.record(session.index())?, repair.seq);
                        cx.send(to, header(cx, Op::Abort).datagram(&[], &transfer::emit_abort(&record)));
                    }
                    (Some(Fate::Aborted), None) => {}
                    _ => cx.send(to, header(cx, Op::Query).datagram(&[], &[])),
                }
            }
        }
        for write in settled {
            self.writes.remove(&write);
        }
        Ok(())
    }
}

/// Whether no write of the same key with a lower seq is unresolved. One that is starting may be of any key.
fn is_lowest(cx: &mut Context<'_>, shard: u32, session: SessionId, seq: u64) -> Result<bool, TablesError> {
    let fingerprint = cx.tables.record(session.index())?.fingerprint;
    let mut lowest = true;
    cx.tables.records(cx.sessions.bound(), &mut |_, record| {
        if record.shard == shard && unresolved(record.state) && record.seq < seq {
            let starting = u32::from(record.state) == UP_STATE_STARTING;
            lowest &= !starting && record.fingerprint != fingerprint;
        }
    })?;
    Ok(lowest)
}

fn aborted_record(record: &up_session, seq: u64) -> SessionRecord {
    let addr = std::net::Ipv6Addr::from(record.reply_addr).to_ipv4_mapped();
    SessionRecord {
        session: SessionId(record.session),
        request: record.request,
        seq,
        status: Status::Aborted.to_wire(),
        kind: record.kind,
        result: 0,
        token: record.token,
        client: Endpoint {
            addr: addr.unwrap_or(std::net::Ipv4Addr::UNSPECIFIED),
            port: u16::from_be(record.reply_port),
        },
    }
}
