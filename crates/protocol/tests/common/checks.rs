//! The invariants of protocol.md, section 8, as far as a run without fail-over can break them.

use underpass_check::{
    history::{Operation, Outcome, Request, Text},
    invariants::{
        Applied, Committed, Violation, clean_after, committed_everywhere, linearizable, monotone, one_effect,
        read_committed, same_outcome,
    },
};
use underpass_protocol::{
    coordinator::Coordinator,
    replica::{Dump, Replica},
    wire::Status,
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

/// What was seen so far, in the order in which it happened. Sequence numbers count from [`BASE`].
#[derive(Default)]
pub struct Seen {
    committed: Vec<Committed>,
    applied: Vec<Applied>,
    /// Commits and reads.
    events: Vec<read_committed::Event>,
    newest: Vec<monotone::Newest>,
}

impl Seen {
    /// The coordinator has decided to commit a write.
    pub fn decide(&mut self, seq: u64, key: &str) {
        let committed = Committed { key: key.into(), seq: seq - BASE };
        if !self.committed.contains(&committed) {
            self.committed.push(committed.clone());
            self.events.push(read_committed::Event::Committed(committed));
        }
    }

    /// A replica has acknowledged a write.
    pub fn acknowledge(&mut self, applied: Applied) {
        self.applied.push(Applied { seq: applied.seq - BASE, ..applied });
    }

    /// A replica answered a read of this key with the version of this seq.
    pub fn read(&mut self, replica: u8, key: &str, seq: u64) {
        self.events.push(read_committed::Event::Read { replica, key: key.into(), seq: seq - BASE });
    }

    /// Every invariant that is broken now.
    pub fn broken(&mut self, replicas: &[Option<Replica>], history: &[Recorded]) -> Vec<Broken> {
        let mut here = vec![];
        let mut held = vec![];
        for (index, replica) in replicas.iter().enumerate() {
            let Some(replica) = replica else { continue };
            here.push(index as u8);
            self.look_at(index as u8, &replica.dump(), &mut held);
        }
        let results = [
            committed_everywhere::check(&here, &self.committed, &held),
            read_committed::check(&self.events),
            one_effect::check(&self.applied),
            same_outcome::check(&self.applied),
            monotone::check(&self.newest),
            linearizable(history),
        ];
        results.into_iter().filter_map(Result::err).map(|violation| (violation.invariant, violation.what)).collect()
    }

    /// For committed-everywhere and monotone.
    fn look_at(&mut self, replica: u8, dump: &Dump, held: &mut Vec<committed_everywhere::Held>) {
        for item in &dump.items {
            let key = Text::from(std::str::from_utf8(&item.key).expect("keys are text"));
            let seqs = item.versions.iter().map(|version| version.seq - BASE);
            let newest = seqs.clone().next().expect("no chain is empty");
            held.push(committed_everywhere::Held { replica, key: key.clone(), newest, lost_high: 0 });
            let is_committed = |seq: &u64| self.committed.contains(&Committed { key: key.clone(), seq: *seq });
            let seq = seqs.clone().find(is_committed).unwrap_or(0);
            self.newest.push(monotone::Newest { replica, incarnation: 1, key, seq });
        }
    }
}

fn linearizable(history: &[Recorded]) -> Result<(), Violation> {
    let operations: Vec<_> = history.iter().map(operation).collect();
    let lines: Vec<_> = operations.iter().map(ToString::to_string).collect();
    linearizable::check(&operations)
        .map_err(|violation| Violation { what: format!("no order explains: {}", lines.join("; ")), ..violation })
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

/// Whether the end of a run is clean: faults over, clients done.
pub fn clean_after(coordinator: &Coordinator, replicas: &[Option<Replica>]) -> Option<Broken> {
    let ways = coordinator.buckets().0.iter().flat_map(|bucket| bucket.ways);
    let dirty: Vec<_> = ways.filter(|way| way.last != 0).map(|way| way.last - BASE).collect();
    let item = |item: &underpass_protocol::replica::ItemDump| {
        let newest = &item.versions[0];
        let value = newest.data.as_ref().map(|data| Text(data.clone()));
        let (seq, cas) = (newest.seq - BASE, newest.cas - BASE);
        (Text(item.key.clone()), clean_after::Item { seq, cas, value, expires_ms: newest.expiry })
    };
    let dump = |replica: &Replica| -> clean_after::Dump { replica.dump().items.iter().map(item).collect() };
    let dumps: Vec<_> = replicas.iter().flatten().map(dump).collect();
    clean_after::check(&dirty, &dumps).err().map(|violation| (violation.invariant, violation.what))
}
