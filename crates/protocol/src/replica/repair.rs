//! What a coordinator asks when it takes over, or when a write is stuck: COLLECT, QUERY and ABORT (protocol.md, section 7).

use std::{cmp::Ordering, sync::atomic::Ordering::Relaxed};

use super::{Action, Count, Replica, install::Role, sessions::Slot};
use crate::{
    control::{Answer, Fate},
    transfer::{self, Collected, Held, PAGE_MAX},
    wire::{Endpoint, Header, Op, Packet, Reason},
};

/// Cursors from here on name the session index of an ABORTED record; lower ones the seq of a version.
const ABORTED: u64 = 1 << 63;

impl Replica {
    /// COLLECT: versions above `stable` in the order of their seqs, then ABORTED records in the order of their indices.
    pub(super) fn collect(&self, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let cursor = packet.header.seq;
        let collected = {
            let role = self.role.read().expect("a thread panicked while it installed an epoch");
            match (self.not_obeyed(role.as_ref(), from, &packet.header, true), &*role) {
                (None, Some(role)) => Ok(self.collected(role, cursor)),
                (reason, _) => Err(reason.unwrap_or(Reason::Epoch)),
            }
        };
        match collected {
            Ok(collected) => {
                let header = Header { op: Op::Collected, ..packet.header };
                vec![Action::Count(Count::Collect), self.send(from, header, &[], &collected.emit())]
            }
            Err(reason) => self.control_reject(reason, from, packet),
        }
    }

    fn collected(&self, role: &Role, cursor: u64) -> Collected {
        let mut page = Collected {
            incarnation: self.incarnation(),
            stable: self.stable(),
            time: self.time.load(Relaxed),
            ..Collected::default()
        };
        let mut room = PAGE_MAX - page.emit().len();
        let mut add = |page: &mut Collected, cursor, held: Held| {
            let fits = held.page_len() <= room;
            if fits {
                room -= held.page_len();
                page.held.push(held);
            } else {
                page.next = cursor;
            }
            fits
        };
        if cursor < ABORTED {
            // As many as a page can hold, and one more to know where the next begins.
            let shortest = Held::Version { key: vec![0], seq: 0, writer: None }.page_len();
            for (seq, key, writer) in self.store.unsettled(cursor, PAGE_MAX / shortest + 1) {
                let slot = writer.and_then(|index| role.sessions.lock(index));
                let record = slot.map(|slot| slot.record).filter(|record| record.seq == seq);
                let writer = record.map(|record| (record.session, record.request));
                if !add(&mut page, seq, Held::Version { key, seq, writer }) {
                    return page;
                }
            }
        }
        let first = if cursor < ABORTED { 0 } else { cursor as u16 };
        for (index, record) in role.sessions.records(first).filter(|(_, record)| record.is_aborted()) {
            if !add(&mut page, ABORTED | u64::from(index), Held::Aborted(record)) {
                break;
            }
        }
        page
    }

    /// QUERY: what became of a write? One that was not processed is frozen.
    pub(super) fn query(&self, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        self.decide_fate(from, packet, |slot| {
            let Header { session, request, .. } = packet.header;
            #[cfg(feature = "published")]
            if self.published.no_freeze {
                return;
            }
            slot.frozen = (session, request);
        })
    }

    /// ABORT: a write that nobody has processed shall have no effect. Taken only of one that is frozen; else it is frozen now.
    pub(super) fn abort(&self, from: Endpoint, packet: &Packet<'_>) -> Vec<Action> {
        let Header { session, request, .. } = packet.header;
        let record = transfer::parse_abort(packet.value)
            .filter(|record| record.is_aborted() && (record.session, record.request) == (session, request));
        let Some(record) = record else { return self.control_reject(Reason::Malformed, from, packet) };
        self.decide_fate(from, packet, |slot| {
            #[cfg(feature = "published")]
            if self.published.no_freeze {
                return slot.set(record);
            }
            if slot.frozen == (session, request) {
                slot.set(record);
            } else {
                slot.frozen = (session, request);
            }
        })
    }

    /// Answers with the fate of (session, request) after `unprocessed` was applied, if it was not processed.
    fn decide_fate(&self, from: Endpoint, packet: &Packet<'_>, unprocessed: impl FnOnce(&mut Slot)) -> Vec<Action> {
        let Header { session, request, .. } = packet.header;
        let reason = 'refused: {
            let guard = self.role.read().expect("a thread panicked while it installed an epoch");
            if let Some(reason) = self.not_obeyed(guard.as_ref(), from, &packet.header, true) {
                break 'refused reason;
            }
            let role = guard.as_ref().expect("obeyed by a role");
            let slot = (session.generation() != 0).then(|| role.sessions.lock(session.index())).flatten();
            let Some(mut slot) = slot else { break 'refused Reason::Session };
            if self.compare(role, &slot.record, session, request) == Ordering::Greater {
                unprocessed(&mut slot);
            }
            let record = slot.record;
            let (fate, key) = match self.compare(role, &record, session, request) {
                Ordering::Greater => (Fate::Frozen, None),
                Ordering::Less => (Fate::Gone, None),
                Ordering::Equal if record.is_aborted() => (Fate::Aborted, None),
                Ordering::Equal => (Fate::Processed, self.store.key_of(record.seq)),
            };
            let told = matches!(fate, Fate::Processed | Fate::Aborted);
            let answer = Answer {
                incarnation: self.incarnation(),
                fate,
                status: if told { record.status } else { 0 },
                result: if told { record.result } else { 0 },
            };
            let header = Header { op: Op::Answer, ..packet.header };
            let document = serde_json::to_vec(&answer).expect("an ANSWER always serialises");
            let sent = self.send(from, header, &key.unwrap_or_default(), &document);
            return vec![Action::Count(Count::Answer), sent];
        };
        self.control_reject(reason, from, packet)
    }
}
