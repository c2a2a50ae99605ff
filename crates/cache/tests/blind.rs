//! In which order the program in `bpf/cache.bpf.c` must look at what keeps it from serving, for every moment at which a
//! run of it may be held up between two looks.
//!
//! A client's `flush_all` takes what is stored in a certain second, also what is set in it later: memcached answers that it
//! stored it, and never shows it. Such an item is given to the agent, and installed. The agent hears of the flush from the
//! connection that asked for it, which holds the global word until then, or, where the connection is not followed, asks
//! memcached when it was told to look.

use std::collections::HashSet;

/// What a run of the program looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Look {
    Until,
    Looked,
    Global,
    LetGo,
}
use Look::{Global, LetGo, Looked, Until};

/// Where a party is in what it does, and what it has noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Party {
    step: usize,
    noted: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    generation: u8,
    in_flight: bool,
    serving: bool,
    let_go: u8,
    looked: u8,
    /// The generation under which the item was installed that memcached never shows.
    item: Option<u8>,
    second_over: bool,
    asker: Party,
    agent: Party,
    reader: usize,
    /// All that the reader saw so far allows it to answer.
    may_answer: bool,
    saw_looked: u8,
    saw_let_go: u8,
    saw_generation: Option<u8>,
}

impl State {
    /// A followed connection holds the global word until the agent has heard of the flush; another lets go of it by itself.
    fn steps(self, followed: bool, order: &[Look]) -> Vec<Self> {
        let mut next = Vec::new();
        let mut step = |change: &dyn Fn(&mut Self)| {
            let mut after = self;
            change(&mut after);
            next.push(after);
        };
        if !self.second_over {
            step(&|s| s.second_over = true);
        }
        if self.item.is_none() && !self.in_flight && !self.second_over {
            step(&|s| s.item = Some(s.generation));
        }
        match (followed, self.asker.step) {
            (false, 0) => step(&|s| (s.let_go, s.asker.step) = (s.let_go + 1, 1)),
            (false, 1) => step(&|s| (s.in_flight, s.asker.step) = (false, 2)),
            (true, 0) => step(&|s| (s.serving, s.asker.step) = (false, 1)),
            (true, 1) => step(&|s| (s.in_flight, s.asker.step) = (false, 2)),
            _ => {}
        }
        match self.agent.step {
            0 if self.let_go != self.looked => step(&|s| s.agent = Party { step: 1, noted: s.let_go }),
            1 => step(&|s| (s.serving, s.agent.step) = (s.serving && s.second_over, 2)),
            2 => step(&|s| (s.generation, s.agent.step) = (s.generation + 1, 3)),
            3 => step(&|s| (s.looked, s.agent.step) = (s.agent.noted, 0)),
            // The window is over: forget, then serve again.
            0 if !self.serving && self.second_over && !self.in_flight => {
                step(&|s| (s.generation, s.agent.step) = (s.generation + 1, 4));
            }
            4 => step(&|s| (s.serving, s.agent.step) = (true, 0)),
            _ => {}
        }
        if let Some(look) = order.get(self.reader) {
            step(&|s| {
                s.reader += 1;
                match look {
                    Until => s.may_answer &= s.serving,
                    Looked => s.saw_looked = s.looked,
                    LetGo => s.saw_let_go = s.let_go,
                    Global => {
                        s.may_answer &= !s.in_flight && s.saw_generation.is_none_or(|saw| saw == s.generation);
                        s.saw_generation = Some(s.generation);
                    }
                }
            });
        }
        next
    }

    fn answers_with_the_item(&self, order: &[Look]) -> bool {
        self.reader == order.len()
            && self.may_answer
            && self.saw_looked == self.saw_let_go
            && self.item.is_some()
            && self.item == self.saw_generation
    }
}

/// Whether a run that looks in this order can answer with what memcached never showed.
fn fails(order: &[Look]) -> bool {
    [false, true].into_iter().any(|followed| {
        let start = State {
            generation: 0,
            in_flight: true,
            serving: true,
            let_go: 0,
            looked: 0,
            item: None,
            second_over: false,
            asker: Party::default(),
            agent: Party::default(),
            reader: 0,
            may_answer: true,
            saw_looked: 0,
            saw_let_go: 0,
            saw_generation: None,
        };
        let (mut seen, mut open) = (HashSet::from([start]), vec![start]);
        while let Some(state) = open.pop() {
            if state.answers_with_the_item(order) {
                return true;
            }
            open.extend(state.steps(followed, order).into_iter().filter(|&next| seen.insert(next)));
        }
        false
    })
}

#[test]
fn the_global_word_is_the_same_before_and_after() {
    assert!(!fails(&[Global, Until, LetGo, Looked, Global]));
}

#[test]
fn every_look_and_its_place_are_needed() {
    for order in [
        &[Global, Until, LetGo, Looked][..],
        &[Until, LetGo, Looked, Global],
        // A flush may come and go between the two.
        &[Until, Looked, Global, LetGo, Until],
        &[Until, Global, LetGo, Looked, Global],
        &[LetGo, Looked, Global, Until, Global],
        &[Global, Until, Global],
        &[Global, LetGo, Looked, Global],
    ] {
        assert!(fails(order), "{order:?}");
    }
}
