//! The authority: keeps the records, changes them by compare-and-swap, and says who has the role of coordinator. It is never
//! wrong; but it may be slow, out of reach, or change something and fail to say so.

use underpass_protocol::agent::Record;

/// A process, told from the others that its host ran or will run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Which coordinator.
    pub coordinator: u8,
    /// Which life of its agent.
    pub life: u32,
}

/// What is asked of the authority.
#[derive(Clone, Debug)]
pub enum Question {
    /// Store a record in place of that revision.
    Store {
        /// Revision to replace.
        expected: u64,
        /// The new one.
        record: Box<Record>,
        /// The agent's number of it.
        id: u64,
    },
    /// What is on record of a shard?
    Load {
        /// The shard.
        shard: u32,
    },
    /// I am there: may I have, or keep, the role in every shard?
    Campaign,
    /// I give up the role in a shard.
    Resign {
        /// The shard.
        shard: u32,
    },
}

/// Its answer.
#[derive(Clone, Debug)]
pub enum Answer {
    /// Stored under this revision, or not.
    Stored(Option<u64>),
    /// What is on record.
    Loaded(u64, Box<Record>),
    /// Role and revision, shard by shard.
    Roles(Vec<(bool, u64)>),
    /// Resigned.
    Resigned,
}

struct Shard {
    record: Record,
    revision: u64,
    holder: Option<(Process, u64)>,
    /// Who gave the role up, and until when it does not get it back.
    spared: Option<(u8, u64)>,
}

/// See the module's documentation. Times are simulated ones.
pub struct Authority {
    shards: Vec<Shard>,
    role_ns: u64,
}

impl Authority {
    /// With these records, of shards 1, 2 and so on.
    pub fn new(records: impl IntoIterator<Item = Record>, role_ns: u64) -> Self {
        let shard = |record| Shard { record, revision: 1, holder: None, spared: None };
        Self { shards: records.into_iter().map(shard).collect(), role_ns }
    }

    fn shard(&mut self, shard: u32) -> &mut Shard {
        &mut self.shards[shard as usize - 1]
    }

    /// What is on record.
    pub fn record(&self, shard: u32) -> (&Record, u64) {
        let shard = &self.shards[shard as usize - 1];
        (&shard.record, shard.revision)
    }

    /// Who has the role.
    pub fn holder(&self, shard: u32, now: u64) -> Option<Process> {
        self.shards[shard as usize - 1].holder.filter(|(_, until)| *until > now).map(|(process, _)| process)
    }

    /// Believes the holder of the role dead.
    pub fn forget_holder(&mut self, shard: u32, now: u64) {
        let spared_until = now + self.role_ns / 2;
        let shard = self.shard(shard);
        // Often somebody else gets it next.
        shard.spared = shard.holder.take().map(|(process, _)| (process.coordinator, spared_until));
    }

    /// Answers; true: a record has changed.
    pub fn answer(&mut self, now: u64, from: Process, question: &Question) -> (Answer, bool) {
        let role_ns = self.role_ns;
        match question {
            Question::Store { expected, record, .. } => {
                let shard = self.shard(record.shard);
                if shard.revision != *expected {
                    return (Answer::Stored(None), false);
                }
                shard.revision += 1;
                shard.record = (**record).clone();
                (Answer::Stored(Some(shard.revision)), true)
            }
            Question::Load { shard } => {
                let (record, revision) = self.record(*shard);
                (Answer::Loaded(revision, Box::new(record.clone())), false)
            }
            Question::Campaign => {
                let mut held = Vec::new();
                for shard in &mut self.shards {
                    if shard.holder.is_some_and(|(_, until)| until <= now) {
                        shard.holder = None;
                    }
                    let spared = shard.spared.is_some_and(|(who, until)| who == from.coordinator && until > now);
                    let free = shard.holder.is_none() && !spared;
                    let mine = shard.holder.is_some_and(|(process, _)| process == from);
                    if free || mine {
                        shard.holder = Some((from, now + role_ns));
                    }
                    held.push((free || mine, shard.revision));
                }
                (Answer::Roles(held), false)
            }
            Question::Resign { shard } => {
                let shard = self.shard(*shard);
                if shard.holder.is_some_and(|(process, _)| process == from) {
                    shard.holder = None;
                    shard.spared = Some((from.coordinator, now + 2 * role_ns));
                }
                (Answer::Resigned, false)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Process = Process { coordinator: 0, life: 1 };
    const B: Process = Process { coordinator: 1, life: 1 };

    fn authority() -> Authority {
        Authority::new([Record::new(1, Vec::new())], 100)
    }

    #[test]
    fn a_record_changes_only_from_the_revision_expected() {
        let mut authority = authority();
        let record = Box::new(Record { lease_ms: 500, ..Record::new(1, Vec::new()) });
        let store = |expected| Question::Store { expected, record: record.clone(), id: 0 };
        assert!(matches!(authority.answer(0, A, &store(2)), (Answer::Stored(None), false)));
        assert!(matches!(authority.answer(0, A, &store(1)), (Answer::Stored(Some(2)), true)));
        assert!(matches!(authority.answer(0, B, &store(1)), (Answer::Stored(None), false)));
        assert_eq!(authority.record(1), (&*record, 2));
    }

    #[test]
    fn one_holds_the_role_until_it_is_silent_or_resigns() {
        let mut authority = authority();
        let mut held = |now, who, question: &Question| match authority.answer(now, who, question).0 {
            Answer::Roles(roles) => roles[0].0,
            _ => false,
        };
        assert!(held(0, A, &Question::Campaign) && !held(99, B, &Question::Campaign));
        assert!(held(100, B, &Question::Campaign) && !held(150, A, &Question::Campaign));
        held(160, B, &Question::Resign { shard: 1 });
        assert!(!held(170, B, &Question::Campaign) && held(171, A, &Question::Campaign));
    }
}
