//! The invariants of protocol.md, section 8, as far as a run without fail-over can break them.

use std::collections::{BTreeMap, BTreeSet};

use underpass_check::{
    history::{Operation, Outcome, Request},
    invariants,
};
use underpass_protocol::{
    replica::{Dump, Replica},
    wire::{SessionId, Status},
};

use super::{Ask, BASE, oracle::Answer};

/// What a client did, as a line of the history.
pub struct Recorded {
    pub client: u16,
    pub key: String,
    pub ask: Ask,
    pub called: u64,
    pub answered: Option<(u64, Answer)>,
}

/// A broken invariant: its name, and what was seen.
pub type Broken = (&'static str, String);

/// What was seen of the writes so far, for the invariants that look at more than one moment.
#[derive(Default)]
pub struct Seen {
    /// Writes that the coordinator decided to commit: seq to key.
    decided: BTreeMap<u64, String>,
    /// Sequence numbers under which replicas applied a request.
    applied: BTreeMap<(SessionId, u64), BTreeSet<u64>>,
    /// Status and value of the first acknowledgement of a write.
    outcomes: BTreeMap<u64, (u8, Vec<u8>)>,
    /// The newest committed version that each replica held of each key.
    newest: BTreeMap<(u8, String), u64>,
    /// Those found when something happened.
    found: Vec<Broken>,
}

impl Seen {
    pub fn decide(&mut self, seq: u64, key: &str) {
        self.decided.insert(seq, key.to_owned());
    }

    pub fn apply(&mut self, session: SessionId, request: u64, seq: u64) {
        self.applied.entry((session, request)).or_default().insert(seq);
    }

    pub fn acknowledge(&mut self, seq: u64, status: u8, value: &[u8]) {
        let first = self.outcomes.entry(seq).or_insert_with(|| (status, value.to_vec()));
        if (first.0, &first.1[..]) != (status, value) {
            let what = format!("seq {} has status {} at one replica and {status} at another", seq - BASE, first.0);
            self.found.push(("same-outcome", what));
        }
    }

    /// A replica answered a read of this key with the version of this seq.
    pub fn read(&mut self, replica: &str, key: &str, seq: u64) {
        let committed = self.decided.range(seq..).any(|(_, decided)| decided == key);
        if !committed {
            let what = format!("{replica} answered a read of {key} with seq {}, which is not committed", seq - BASE);
            self.found.push(("read-committed", what));
        }
    }

    /// Every invariant that is broken now.
    pub fn broken(&mut self, replicas: &[Option<Replica>], history: &[Recorded]) -> Vec<Broken> {
        let mut broken = self.found.clone();
        for (request, seqs) in self.applied.iter().filter(|(_, seqs)| seqs.len() > 1) {
            let seqs: Vec<_> = seqs.iter().map(|seq| (seq - BASE).to_string()).collect();
            let what = format!("request {} of a session took effect as seq {}", request.1, seqs.join(" and seq "));
            broken.push(("one-effect", what));
        }
        for (index, replica) in replicas.iter().enumerate() {
            let Some(replica) = replica else { continue };
            self.committed_at(index as u8, &replica.dump(), &mut broken);
        }
        broken.extend(linearizable(history));
        broken
    }

    /// committed-everywhere and monotone.
    fn committed_at(&mut self, index: u8, dump: &Dump, broken: &mut Vec<Broken>) {
        let name = super::replica_name(index);
        for (seq, key) in &self.decided {
            let item = dump.items.iter().find(|item| item.key == key.as_bytes());
            let held = item.is_some_and(|item| item.versions.iter().any(|version| version.seq >= *seq));
            // A tombstone is dropped once it is stable.
            if !held && (item.is_some() || dump.stable < *seq) {
                let what =
                    format!("seq {} of {key} is committed, and {name} has neither it nor a newer one", seq - BASE);
                broken.push(("committed-everywhere", what));
            }
        }
        for item in &dump.items {
            let key = String::from_utf8_lossy(&item.key).into_owned();
            let committed = |seq: &u64| self.decided.contains_key(seq);
            let newest = item.versions.iter().map(|version| version.seq).find(committed).unwrap_or(0);
            let before = self.newest.entry((index, key.clone())).or_default();
            if newest < *before {
                broken.push(("monotone", format!("{key} at {name} went back from seq {before} to {newest}")));
            }
            *before = newest;
        }
    }
}

fn linearizable(history: &[Recorded]) -> Option<Broken> {
    let operations: Vec<_> = history.iter().map(operation).collect();
    let violation = invariants::linearizable::check(&operations).err()?;
    let lines: Vec<_> = operations.iter().map(ToString::to_string).collect();
    Some((violation.invariant, format!("no order explains: {}", lines.join("; "))))
}

fn operation(recorded: &Recorded) -> Operation {
    let request = match &recorded.ask {
        Ask::Get => Request::Get,
        Ask::Put(_) => Request::Put,
        Ask::Add(_) => Request::Add,
        Ask::Replace(_) => Request::Replace,
        Ask::Append(_) => Request::Append,
        Ask::Prepend(_) => Request::Prepend,
        Ask::Delete => Request::Delete,
        Ask::Incr(_) => Request::Incr,
    };
    let mut operation = Operation::call(u64::from(recorded.client), request, &*recorded.key, recorded.called);
    match &recorded.ask {
        Ask::Incr(delta) => operation.delta = Some(*delta),
        Ask::Get | Ask::Delete => {}
        ask => operation.value = Some(ask.data().into()),
    }
    if let Some((at, answer)) = &recorded.answered {
        let outcome = match answer {
            Answer::Read(None) => Outcome::NotFound,
            Answer::Read(Some(value)) => {
                operation.value = Some(std::str::from_utf8(value).expect("values are text").into());
                Outcome::Ok
            }
            Answer::Wrote(status, number) => {
                operation.number = *number;
                match status {
                    Status::Ok => Outcome::Ok,
                    Status::NotFound => Outcome::NotFound,
                    Status::Exists => Outcome::Exists,
                    Status::NotStored => Outcome::NotStored,
                    Status::NotANumber => Outcome::NotANumber,
                    Status::Overflow => Outcome::Overflow,
                    Status::TooLarge => Outcome::TooLarge,
                    Status::Aborted => Outcome::Failed,
                }
            }
            Answer::Failed => Outcome::Failed,
        };
        operation.finish(outcome, *at);
    }
    operation
}

/// **clean-after**: faults over, clients done.
pub fn clean_after(replicas: &[Option<Replica>]) -> Option<Broken> {
    let mut dumps = replicas.iter().flatten().map(|replica| (replica.dump().items, replica.dump().sessions));
    let first = dumps.next()?;
    dumps.any(|dump| dump != first).then(|| ("clean-after", "replicas differ though nothing is left to do".to_owned()))
}
