//! The cache's coherence as an explicit-state model: every interleaving of commands, replies, evictions, fills, hits and
//! clocks within a bound is explored, and a hit must tell what memcached would.
//!
//! One key; its word and the global one (`word`); memcached with one item, a clock that it looks at once a second, and
//! memory pressure; connections whose commands are delivered, obeyed, answered and ended (by the next read) in steps of
//! their own; the agent, which asks and installs. What a [`Mutant`] leaves out must be found.

use std::collections::HashSet;

use crate::word;

/// Steps of time in a second.
pub const TICKS: u8 = 4;
/// Seconds that a hit keeps clear of the end of a lifetime: memcached's clock is up to two behind (it is cut to whole
/// seconds, and up to one old).
pub const SLACK: u8 = 2;
const CONNECTIONS: usize = 2;

/// A rule left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// A key is served and filled while a command is in flight: only its delivery counts.
    NothingInFlight,
    /// A command's delivery leaves the generation as it is.
    NoGeneration,
    /// A command counts as obeyed as soon as it was delivered.
    EndAtDelivery,
    /// Reads that missed are not heeded.
    MissUnseen,
    /// They are, but only once the reply was sent, and the key is served until then.
    ReadsNotInFlight,
    /// The same of reads by datagram, whose replies are looked at before they leave.
    LookedAtLate,
    /// Pipelined reads are not heeded.
    PipelinedReads,
    /// A fill is installed for the word as it is then, not as it was when memcached was asked.
    FillOfNow,
    /// memcached is asked also while a command is in flight.
    FillInFlight,
    /// A set is believed to store, whatever memcached answers.
    SetsBelieved,
    /// What a set stores is taken also while another command is in flight.
    SetsInFlight,
    /// What cannot be followed forgets nothing.
    GlobalIgnored,
    /// Lifetimes are not heeded.
    NoExpiry,
    /// The slack is one second.
    SlackOfOne,
    /// A lifetime counts from when the answer is there, not from the question.
    LifetimeFromAnswer,
}

/// All of them.
pub const MUTANTS: [Mutant; 15] = [
    Mutant::NothingInFlight,
    Mutant::NoGeneration,
    Mutant::EndAtDelivery,
    Mutant::MissUnseen,
    Mutant::ReadsNotInFlight,
    Mutant::LookedAtLate,
    Mutant::PipelinedReads,
    Mutant::FillOfNow,
    Mutant::FillInFlight,
    Mutant::SetsBelieved,
    Mutant::SetsInFlight,
    Mutant::GlobalIgnored,
    Mutant::NoExpiry,
    Mutant::SlackOfOne,
    Mutant::LifetimeFromAnswer,
];

/// How much of everything there is.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// Commands of clients.
    pub commands: u8,
    /// Times that the agent asks.
    pub fills: u8,
    /// Times that memcached evicts.
    pub evictions: u8,
    /// Steps of time; 0 leaves lifetimes out.
    pub time: u8,
}

/// What was explored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Explored {
    /// Distinct states.
    pub states: usize,
    /// States in which the kernel answers.
    pub hits: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Command {
    /// Stores a new version, for so many seconds (0: for ever), unless memcached refuses, which removes what was there. Maybe
    /// the agent was given what it stores: then the reply tells whether it does.
    Set {
        version: u8,
        lifetime: u8,
        given: bool,
    },
    Delete,
    /// Alone in flight on its connection: its reply tells what it saw.
    Get,
    /// Alone in a datagram, whose reply is looked at before it leaves: never in flight.
    DatagramGet,
    /// One of several, or in a datagram with anything behind it.
    PipelinedGet,
    /// A write of this version on a connection that is not followed.
    Lost(u8),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Connection {
    #[default]
    Idle,
    Delivered(Command),
    /// With the version that a read missed although it was the last one stored, and whether it missed, or did not store.
    Obeyed(Command, Option<u8>, bool),
    /// The reply was looked at.
    LookedAt(Command, Option<u8>, bool),
    /// And whether it missed.
    Answered(Command, bool),
}

/// An item: version, and by memcached's clock when it expires; 0: never.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Item {
    version: u8,
    expires: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Entry {
    version: u8,
    words: [u64; 2],
    deadline: Option<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Fill {
    #[default]
    Idle,
    Asked {
        words: [u64; 2],
        at: u8,
    },
    /// With the time at which memcached obeyed.
    Answered(Entry, u8),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct State {
    /// The key's word and the global one.
    words: [u64; 2],
    item: Option<Item>,
    /// What a client may know to be stored: unlike `item` there until somebody was told otherwise.
    known: Option<Item>,
    entry: Option<Entry>,
    fill: Fill,
    connections: [Connection; CONNECTIONS],
    versions: u8,
    now: u8,
    /// When memcached looked at the clock.
    looked: u8,
    commands: u8,
    fills: u8,
    evictions: u8,
}

impl State {
    /// Seconds by memcached's clock.
    fn clock(&self) -> u8 {
        self.looked / TICKS
    }

    fn live(&self) -> Option<Item> {
        self.item.filter(|item| item.expires == 0 || item.expires > self.clock())
    }

    fn hit(&self, mutant: Option<Mutant>) -> Option<u8> {
        let entry = self.entry?;
        let words = match mutant {
            Some(Mutant::NothingInFlight) => self.words.map(without_flight),
            Some(Mutant::GlobalIgnored) => [self.words[0], entry.words[1]],
            _ => self.words,
        };
        let in_time = entry.deadline.is_none_or(|deadline| self.now < deadline || mutant == Some(Mutant::NoExpiry));
        (entry.words == words && in_time).then_some(entry.version)
    }

    /// Whether the last version stored is `version`, as far as anybody was told, and has not expired by any clock.
    fn may_tell(&self, version: u8) -> bool {
        self.known.is_some_and(|item| item.version == version && (item.expires == 0 || item.expires > self.now / TICKS))
    }
}

/// Explores everything. The error is the state in which the kernel answers what memcached would not.
pub fn explore(scope: Scope, mutant: Option<Mutant>) -> Result<Explored, String> {
    let mut seen = HashSet::new();
    let mut explored = Explored::default();
    let mut open = vec![State::default()];
    while let Some(state) = open.pop() {
        if !seen.insert(state.clone()) {
            continue;
        }
        if let Some(version) = state.hit(mutant) {
            explored.hits += 1;
            if !state.may_tell(version) {
                return Err(format!("the kernel answers version {version} in {state:?}"));
            }
        }
        steps(&state, scope, mutant, &mut |next| open.push(next));
    }
    explored.states = seen.len();
    Ok(explored)
}

fn steps(state: &State, scope: Scope, mutant: Option<Mutant>, emit: &mut dyn FnMut(State)) {
    for at in 0..CONNECTIONS {
        connection(state, at, scope, mutant, emit);
    }
    fill(state, scope, mutant, emit);
    if state.evictions < scope.evictions && state.item.is_some() {
        emit(State { item: None, evictions: state.evictions + 1, ..state.clone() });
    }
    if state.now < scope.time {
        // memcached looks at the clock at least once a second.
        if state.now + 1 - state.looked < TICKS {
            emit(State { now: state.now + 1, ..state.clone() });
        }
        emit(State { now: state.now + 1, looked: state.now + 1, ..state.clone() });
    }
}

fn without_flight(word: u64) -> u64 {
    word::asked(word) - (word::begin(0) - word::forget(0)) * word::writes(word)
}

/// Which word a command changes.
fn word_of(command: Command, mutant: Option<Mutant>) -> Option<usize> {
    match command {
        Command::PipelinedGet if mutant == Some(Mutant::PipelinedReads) => None,
        Command::Lost(_) => Some(1),
        _ => Some(0),
    }
}

fn connection(state: &State, at: usize, scope: Scope, mutant: Option<Mutant>, emit: &mut dyn FnMut(State)) {
    let mut next = state.clone();
    match state.connections[at] {
        Connection::Idle if state.commands == scope.commands => {}
        Connection::Idle => {
            // With lifetimes only what bears on them: the rest is explored without.
            let version = state.versions + 1;
            let (lifetimes, others): (&[u8], &[Command]) = match scope.time {
                0 => (
                    &[0],
                    &[
                        Command::Delete,
                        Command::Get,
                        Command::DatagramGet,
                        Command::PipelinedGet,
                        Command::Lost(version),
                    ],
                ),
                _ => (&[0, 2, 3], &[Command::Get, Command::DatagramGet]),
            };
            let sets = lifetimes.iter().map(|&lifetime| Command::Set { version, lifetime, given: false });
            for command in sets.chain(others.iter().copied()) {
                let mut next = state.clone();
                next.commands += 1;
                next.connections[at] = Connection::Delivered(command);
                if matches!(command, Command::Set { .. } | Command::Lost(_)) {
                    next.versions = version;
                }
                if let Some(which) = word_of(command, mutant) {
                    let word = &mut next.words[which];
                    *word = match mutant {
                        _ if command == Command::DatagramGet => *word,
                        Some(Mutant::NoGeneration) if command != Command::Get => {
                            *word + word::begin(0) - word::forget(0)
                        }
                        Some(Mutant::EndAtDelivery) if command != Command::Get => word::end(word::begin(*word)),
                        Some(Mutant::ReadsNotInFlight) if command == Command::Get => *word,
                        _ if command == Command::Get => word::begin_read(*word),
                        _ => word::begin(*word),
                    };
                }
                if let Command::Set { lifetime, .. } = command
                    && let Some(next) = give(&next, at, Item { version, expires: lifetime }, scope, mutant)
                {
                    emit(next);
                }
                emit(next);
            }
        }
        Connection::Delivered(command) => {
            let (mut missed, mut miss) = (None, false);
            match command {
                Command::Set { version, lifetime, .. } => {
                    // Refused.
                    if scope.time == 0 {
                        let mut next = State { item: None, known: None, ..state.clone() };
                        next.connections[at] = Connection::Obeyed(command, None, true);
                        emit(next);
                    }
                    let expires = if lifetime == 0 { 0 } else { state.clock() + lifetime };
                    next.item = Some(Item { version, expires });
                    next.known = next.item;
                }
                Command::Lost(version) => {
                    next.item = Some(Item { version, expires: 0 });
                    next.known = next.item;
                }
                Command::Delete => (next.item, next.known) = (None, None),
                Command::Get | Command::DatagramGet | Command::PipelinedGet => {
                    miss = state.live().is_none();
                    missed = state.known.filter(|_| miss).map(|item| item.version);
                }
            }
            next.connections[at] = Connection::Obeyed(command, missed, miss);
            emit(next);
        }
        Connection::LookedAt(command, missed, miss) => {
            next.connections[at] = Connection::Answered(command, miss);
            tell(&mut next, missed);
            emit(next);
        }
        Connection::Obeyed(command, missed, miss) => {
            if command == Command::DatagramGet && mutant != Some(Mutant::LookedAtLate) {
                ended(&mut next, command, !miss, mutant);
                next.connections[at] = Connection::LookedAt(command, missed, miss);
            } else {
                // The reply leaves, and is there before the kernel heeds that it was sent.
                next.connections[at] = Connection::Answered(command, miss);
                tell(&mut next, missed);
            }
            emit(next);
            // Or none does: memcached reads on at once. Then nobody was told.
            next = state.clone();
            ended(&mut next, command, false, mutant);
            next.connections[at] = Connection::Idle;
            emit(next);
        }
        Connection::Answered(command, miss) => {
            if command != Command::DatagramGet || mutant == Some(Mutant::LookedAtLate) {
                ended(&mut next, command, !miss, mutant);
            }
            next.connections[at] = Connection::Idle;
            emit(next);
        }
    }
}

/// A client is told that there is no item, although one was stored last.
fn tell(state: &mut State, missed: Option<u8>) {
    if missed.is_some() && state.known.map(|item| item.version) == missed {
        state.known = None;
    }
}

/// The connection's reply was sent, or it is read again. `hit`: the reply told a value.
fn ended(state: &mut State, command: Command, hit: bool, mutant: Option<Mutant>) {
    let Some(which) = word_of(command, mutant) else { return };
    let word = &mut state.words[which];
    *word = match (command, mutant) {
        (Command::Get, Some(Mutant::MissUnseen)) => word::end_read(*word, true),
        (Command::Get, Some(Mutant::ReadsNotInFlight)) => word::end_read(word::begin_read(*word), hit),
        (Command::Get, _) => word::end_read(*word, hit),
        (Command::DatagramGet, Some(Mutant::MissUnseen)) => *word,
        (Command::DatagramGet, _) if hit => *word,
        (Command::DatagramGet, _) => word::forget(*word),
        (_, Some(Mutant::EndAtDelivery)) => *word,
        (Command::Set { given: true, .. }, _) if !hit && mutant != Some(Mutant::SetsBelieved) => {
            word::end_failed(*word)
        }
        _ => word::end(*word),
    };
}

/// The agent is given what a set that was delivered stores: an item with its lifetime.
fn give(state: &State, at: usize, item: Item, scope: Scope, mutant: Option<Mutant>) -> Option<State> {
    let alone = word::writes(state.words[0]) == 1 && word::writes(state.words[1]) == 0;
    let heedless = matches!(mutant, Some(Mutant::SetsInFlight | Mutant::EndAtDelivery));
    if state.fill != Fill::Idle || state.fills == scope.fills || !(alone || heedless) {
        return None;
    }
    let Item { version, expires: lifetime } = item;
    let slack = if mutant == Some(Mutant::SlackOfOne) { 1 } else { SLACK };
    let deadline = (lifetime > 0).then(|| state.now + TICKS * lifetime.saturating_sub(slack));
    let words = match heedless {
        true => state.words.map(without_flight),
        false => [word::stored(state.words[0]), word::asked(state.words[1])],
    };
    let mut next = State { fills: state.fills + 1, ..state.clone() };
    next.fill = Fill::Answered(Entry { version, words, deadline }, state.now);
    next.connections[at] = Connection::Delivered(Command::Set { version, lifetime, given: true });
    Some(next)
}

fn fill(state: &State, scope: Scope, mutant: Option<Mutant>, emit: &mut dyn FnMut(State)) {
    match state.fill {
        Fill::Idle => {
            let idle = state.words.iter().all(|&word| word::may_ask(word));
            let heedless = matches!(mutant, Some(Mutant::FillInFlight | Mutant::NothingInFlight));
            if state.fills < scope.fills && (idle || heedless) {
                // A heedless one takes the words for what they will be once all that is in flight has ended.
                let words = state.words.map(if heedless { without_flight } else { word::asked });
                let fill = Fill::Asked { words, at: state.now };
                emit(State { fill, fills: state.fills + 1, ..state.clone() });
            }
        }
        Fill::Asked { words, at } => {
            let fill = state.live().map_or(Fill::Idle, |item| {
                let slack = if mutant == Some(Mutant::SlackOfOne) { 1 } else { SLACK };
                let left = |item: Item| item.expires.saturating_sub(state.clock()).saturating_sub(slack);
                let deadline = (item.expires > 0).then(|| at + TICKS * left(item));
                Fill::Answered(Entry { version: item.version, words, deadline }, state.now)
            });
            emit(State { fill, ..state.clone() });
        }
        Fill::Answered(mut entry, obeyed) => {
            if mutant == Some(Mutant::LifetimeFromAnswer) {
                entry.deadline = entry.deadline.map(|deadline| deadline + state.now - obeyed);
            }
            let words = if mutant == Some(Mutant::FillOfNow) { state.words.map(word::asked) } else { entry.words };
            emit(State { fill: Fill::Idle, entry: Some(Entry { words, ..entry }), ..state.clone() });
        }
    }
}
