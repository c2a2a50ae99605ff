//! The search for one order of a key's operations.
//!
//! It sweeps through calls and returns in time and keeps the set of *configurations* that explain everything so far: the
//! item's state and which of the open operations have taken effect. When an operation returns, every configuration must
//! have placed it; one that has not is extended by open operations until it has, or is dropped. No configuration left: the
//! history is not linearizable, and this return is where it shows. (Just-in-time linearization: Wing and Gong's search
//! with Lowe's memory of configurations, bounded by what is open at a time instead of by the length of the history.)
//!
//! What keeps the set small, without losing an order that exists:
//!
//! - *Observers at once.* An operation that changes nothing is placed as soon as it fits: moving it forward to there
//!   disturbs nobody.
//! - *Sequence numbers force the order.* A write that tells its number, and a read that tells the cas it saw, have a fixed
//!   place among each other. Numbers that contradict the answers or real time leave no configuration; they are never
//!   trusted beyond that.
//! - *No useless step.* An operation that need not take effect (unknown, or absorbed: see below) is placed only where the
//!   step after it needs it: dropping a useless one from an order leaves an order.
//! - *Seen is bound.* An unknown write whose value was read, under a number that nobody else can have written it, took
//!   effect there: it is placed by that number ([`bind`]).
//! - *Alike is one.* Unknown operations with the same arguments are taken in the order of their calls. Contents that
//!   nobody ever saw are one content.
//! - *Absorbed.* A PUT that could have come directly before a step without changing its outcome is thereby satisfied; it
//!   may still take effect later.
//! - *Fewer used is better.* Of two configurations that differ only in the unknown operations used, the one that used
//!   fewer of them can do all that the other can.

use std::collections::{HashMap, HashSet};

use memchr::memmem;

use super::model::{ABSENT, Content, Contents, Interner, JUNK, NEVER, Op, State, Store, may_be_number};
use crate::history::{Outcome, Request};

/// Configurations kept at a time.
const CONFIGURATIONS_MAX: usize = 1 << 14;
/// Bytes to be compared, at most, to find the contents that nobody ever saw on a key with APPENDs.
const OBSERVED_WORK_MAX: usize = 1 << 30;

/// What a search found.
#[derive(Debug)]
pub(super) enum Verdict {
    Linearizable,
    /// No configuration places the operation at this index before it returned.
    Violation(Stuck),
    /// The budget ended at this index.
    Undecided(usize),
}

/// Where and with what a search came to its end.
#[derive(Debug)]
pub(super) struct Stuck {
    /// Index of the operation whose return nothing explains.
    pub(super) at: usize,
    /// The last moment before at which only one configuration was left and no answer was outstanding.
    pub(super) quiet: Quiet,
}

/// A moment at which the item's state was certain.
#[derive(Clone, Debug)]
pub(super) struct Quiet {
    /// Operations from this index on were called after it.
    pub(super) from: usize,
    pub(super) state: State,
    /// The bytes of its content, unless junk or none.
    pub(super) content: Option<Vec<u8>>,
    /// The sequence numbers that its version was found not to have.
    pub(super) refused: Vec<u64>,
    /// Unknown operations from before it that may still take effect.
    pub(super) outstanding: Vec<usize>,
}

#[derive(Clone, Debug)]
struct Config {
    state: State,
    /// Open operations that have taken effect, ascending. Of the unknown ones see `used`.
    done: Vec<u32>,
    /// Open PUTs that need not take effect any more, ascending.
    absorbed: Vec<u32>,
    /// How many unknown operations of each class have taken effect, beyond those that did so in every configuration.
    used: Used,
}

/// Number of operations by class, ascending by class.
type Used = Vec<(u32, u32)>;

/// Whether `fewer` has no operation used that `more` has not.
fn covers(fewer: &Used, more: &Used) -> bool {
    let count = |class| more.binary_search_by_key(&class, |&(class, _)| class).map_or(0, |at| more[at].1);
    fewer.len() <= more.len() && fewer.iter().all(|&(class, used)| used <= count(class))
}

impl Config {
    fn is_done(&self, op: u32) -> bool {
        self.done.binary_search(&op).is_ok()
    }

    fn is_absorbed(&self, op: u32) -> bool {
        !self.absorbed.is_empty() && self.absorbed.binary_search(&op).is_ok()
    }

    fn used(&self, class: u32) -> u32 {
        self.used.binary_search_by_key(&class, |&(class, _)| class).map_or(0, |at| self.used[at].1)
    }

    fn set_done(&mut self, op: u32) {
        if let Err(at) = self.done.binary_search(&op) {
            self.done.insert(at, op);
        }
        remove(&mut self.absorbed, op);
    }

    fn set_used(&mut self, class: u32) {
        match self.used.binary_search_by_key(&class, |&(class, _)| class) {
            Ok(at) => self.used[at].1 += 1,
            Err(at) => self.used.insert(at, (class, 1)),
        }
    }
}

fn remove(sorted: &mut Vec<u32>, value: u32) -> bool {
    sorted.binary_search(&value).map(|at| sorted.remove(at)).is_ok()
}

/// A configuration on the way to placing an operation.
#[derive(Clone, Debug)]
struct Node {
    config: Config,
    /// The state before the last step, if that step need not have been taken.
    without: Option<State>,
}

/// Unknown operations with the same effect.
#[derive(Debug, Default)]
struct Class {
    /// In the order of their calls.
    called: Vec<u32>,
    /// How many have taken effect in every configuration.
    settled: u32,
}

/// Arguments by which unknown operations are told apart. One with a lifetime is like no other: its end depends on its call.
#[derive(PartialEq, Eq, Hash)]
struct ClassKey {
    request: Request,
    value: Content,
    delta: i64,
    expected: u64,
    only: Option<u32>,
}

#[derive(Clone, Copy)]
enum Step {
    Known(u32),
    Unknown(u32),
    Expire,
}

struct OverBudget;

pub(super) struct Search<'a> {
    ops: &'a [Op],
    contents: Contents<'a>,
    /// Sequence numbers told by writes, ascending.
    owned: Vec<u64>,
    /// Numbers that somebody saw and no write told, ascending.
    orphans: Vec<u64>,
    /// Others than GET and PUT may take effect or observe: some other request, or the end of a lifetime.
    conditional: bool,
    /// Contents of which nobody ever sees a trace are alike: `None` if that cannot be told on this key.
    observed: Option<Observed<'a>>,
    // What is open at the current moment of the sweep.
    /// (place by sequence number, reads after writes, operation), ascending.
    fixed: Vec<(u64, bool, u32)>,
    /// Those with an answer but without a sequence number.
    loose: Vec<u32>,
    classes: Vec<Class>,
    /// Classes with members that may still take effect in some configuration.
    live: Vec<u32>,
    /// Unknown operations that have taken effect in every configuration, in the order in which that became certain.
    settled: Vec<u32>,
    class_ids: HashMap<ClassKey, u32>,
    classes_by_value: HashMap<Content, Vec<u32>>,
    /// The classes that make an item into junk, out of any state, of an item, and of none.
    junk_put: Option<u32>,
    junk_replace: Option<u32>,
    junk_add: Option<u32>,
    /// Items may end by themselves.
    expiring: bool,
    /// What reads found under each number.
    seen: HashMap<u64, Content>,
    /// On keys with PUTs without a sequence number: when each value was read for the last time.
    last_read: HashMap<Content, u64>,
    work: u64,
    budget: u64,
}

/// Which contents somebody saw, entirely or as a part.
struct Observed<'a> {
    whole: HashSet<Content>,
    /// On keys with APPEND or PREPEND: all contents seen.
    parts: Option<Vec<&'a [u8]>>,
    /// On keys with INCR numbers count as seen.
    numbers: bool,
    /// What was found out before.
    known: HashMap<Content, bool>,
}

impl<'a> Search<'a> {
    /// `ops` are one key's, ascending by call, without failed ones and without reads that were never answered.
    pub(super) fn new(ops: &'a [Op], values: &'a Interner, store: Store, budget: u64) -> Self {
        let contents = Contents::new(values, store);
        let mut owned: Vec<u64> =
            ops.iter().filter(|op| op.request != Request::Get && op.cas != 0).map(|op| op.cas).collect();
        owned.sort_unstable();
        let seen = ops.iter().filter_map(|op| match (op.request, op.outcome) {
            (Request::Get, _) => Some(op.cas),
            (Request::Cas, Outcome::Ok | Outcome::Unknown) => Some(op.expected),
            _ => None,
        });
        let mut orphans: Vec<u64> = seen.filter(|&cas| cas != 0 && owned.binary_search(&cas).is_err()).collect();
        orphans.sort_unstable();
        let expiring = store.evicts || ops.iter().any(|op| op.ttl_ms.is_some_and(|ttl_ms| ttl_ms > 0));
        let conditional = expiring || ops.iter().any(|op| !matches!(op.request, Request::Get | Request::Put));
        let mut search = Self {
            ops,
            contents,
            owned,
            orphans,
            conditional,
            observed: None,
            fixed: Vec::new(),
            loose: Vec::new(),
            classes: Vec::new(),
            live: Vec::new(),
            settled: Vec::new(),
            class_ids: HashMap::new(),
            classes_by_value: HashMap::new(),
            junk_put: None,
            junk_replace: None,
            junk_add: None,
            expiring,
            seen: HashMap::new(),
            last_read: HashMap::new(),
            work: 0,
            budget,
        };
        if ops.iter().any(|op| op.request == Request::Put && op.cas == 0) {
            for op in ops.iter().filter(|op| op.request == Request::Get && op.value != ABSENT) {
                let last = search.last_read.entry(op.value).or_insert(op.ret);
                *last = op.ret.max(*last);
            }
        }
        if ops.iter().any(Op::is_unknown) {
            search.observed = search.find_observed(values);
            let reads = ops.iter().filter(|op| op.request == Request::Get && op.cas != 0);
            search.seen = reads.map(|op| (op.cas, op.value)).collect();
        }
        search
    }

    fn find_observed(&self, values: &'a Interner) -> Option<Observed<'a>> {
        let has = |requests: &[Request]| self.ops.iter().any(|op| requests.contains(&op.request));
        let whole: HashSet<Content> =
            self.ops.iter().filter(|op| op.request == Request::Get && op.value != ABSENT).map(|op| op.value).collect();
        let parts = has(&[Request::Append, Request::Prepend])
            .then(|| whole.iter().map(|&content| super::model::recorded_bytes(values, content)).collect::<Vec<_>>());
        let unknown = self.ops.iter().filter(|op| op.is_unknown()).count();
        let work = parts.iter().flatten().map(|part| part.len()).sum::<usize>().saturating_mul(unknown);
        (work <= OBSERVED_WORK_MAX).then_some(Observed {
            whole,
            parts,
            numbers: has(&[Request::Incr]),
            known: HashMap::new(),
        })
    }

    /// The content itself, or junk if nobody can tell it from any other.
    fn distinct(&mut self, content: Content) -> Content {
        let (Some(observed), Some(bytes)) = (&mut self.observed, self.contents.bytes(content)) else { return content };
        let seen = *observed.known.entry(content).or_insert_with(|| {
            observed.whole.contains(&content)
                || (observed.numbers && may_be_number(bytes, observed.parts.is_some()))
                || observed
                    .parts
                    .as_ref()
                    .is_some_and(|parts| parts.iter().any(|part| memmem::find(part, bytes).is_some()))
        });
        if seen { content } else { JUNK }
    }

    /// As [`Self::run`], from the state at a quiet moment of another search.
    pub(super) fn run_from(&mut self, quiet: &Quiet) -> Verdict {
        let mut state = quiet.state;
        if let Some(bytes) = &quiet.content {
            state.content = self.contents.derive(bytes);
        }
        state.cas_not = quiet.refused.iter().fold(0, |set, &cas| self.contents.refuse(set, cas));
        self.run(state)
    }

    /// Sweeps through the history, from `initial`.
    pub(super) fn run(&mut self, initial: State) -> Verdict {
        let ops = self.ops;
        let mut returns: Vec<u32> = (0..ops.len() as u32).filter(|&i| ops[i as usize].ret != NEVER).collect();
        returns.sort_by_key(|&i| (ops[i as usize].ret, i));
        let mut configs = vec![Config { state: initial, done: Vec::new(), absorbed: Vec::new(), used: Vec::new() }];
        let mut called = 0;
        let mut quiet = (0, initial, 0);
        for &at in &returns {
            let now = ops[at as usize].ret;
            if configs.len() == 1 && self.fixed.is_empty() && self.loose.is_empty() {
                quiet = (called, configs[0].state, self.settled.len());
            }
            while called < ops.len() && ops[called].call <= now {
                self.open(called as u32, &mut configs);
                called += 1;
            }
            match self.close(at, configs) {
                Ok(after) => configs = after,
                Err(OverBudget) => return Verdict::Undecided(at as usize),
            }
            if configs.is_empty() {
                return Verdict::Violation(Stuck { at: at as usize, quiet: self.quiet(quiet) });
            }
        }
        Verdict::Linearizable
    }

    fn quiet(&self, (from, state, settled): (usize, State, usize)) -> Quiet {
        let settled: HashSet<u32> = self.settled[..settled].iter().copied().collect();
        let outstanding = (0..from).filter(|&i| self.ops[i].is_unknown() && !settled.contains(&(i as u32))).collect();
        let content = self.contents.bytes(state.content).map(<[u8]>::to_vec);
        let refused = self.contents.refusals(state.cas_not).to_vec();
        Quiet { from, state, content, refused, outstanding }
    }

    /// The operation is called.
    fn open(&mut self, i: u32, configs: &mut [Config]) {
        let op = self.ops[i as usize];
        if op.is_unknown() {
            let value = self.distinct(op.value);
            let only = op.ttl_ms.is_some_and(|ttl_ms| ttl_ms > 0).then_some(i);
            // Each makes what somebody wrote into something that nobody can tell.
            let request = match op.request {
                Request::Append | Request::Prepend if value == JUNK && !self.expiring => Request::Replace,
                request => request,
            };
            let key = ClassKey { request, value, delta: op.delta, expected: op.expected, only };
            let next = self.classes.len() as u32;
            let class = *self.class_ids.entry(key).or_insert(next);
            if class == next {
                if value == JUNK && only.is_none() {
                    match request {
                        Request::Replace => self.junk_replace = Some(class),
                        Request::Add => self.junk_add = Some(class),
                        Request::Put => self.junk_put = Some(class),
                        _ => {}
                    }
                }
                self.classes.push(Class::default());
                self.classes_by_value.entry(value).or_default().push(class);
            }
            let of = &mut self.classes[class as usize];
            if of.called.len() == of.settled as usize {
                self.live.push(class);
            }
            of.called.push(i);
            return;
        }
        if op.cas == 0 {
            self.loose.push(i);
        } else {
            let entry = (op.cas, op.request == Request::Get, i);
            let at = self.fixed.partition_point(|other| *other < entry);
            self.fixed.insert(at, entry);
        }
        for config in configs {
            self.observe(config, i);
        }
    }

    /// The operation returns: places it in every configuration.
    fn close(&mut self, i: u32, configs: Vec<Config>) -> Result<Vec<Config>, OverBudget> {
        let mut after = Vec::with_capacity(configs.len());
        for config in configs {
            if config.is_done(i) {
                after.push(config);
            } else {
                if config.is_absorbed(i) && !self.may_be_read(i) {
                    after.push(config);
                    continue;
                }
                self.place(config, i, &mut after)?;
            }
        }
        for config in &mut after {
            remove(&mut config.done, i);
            remove(&mut config.absorbed, i);
        }
        self.loose.retain(|&other| other != i);
        if let Some(at) = self.fixed.iter().position(|&(_, _, other)| other == i) {
            self.fixed.remove(at);
        }
        if after.len() > 1 {
            after = minimal(after);
        }
        if after.len() > CONFIGURATIONS_MAX {
            return Err(OverBudget);
        }
        if let [only] = &mut after[..] {
            let (ops, fixed) = (self.ops, &mut self.fixed);
            only.done.retain(|&i| {
                let bound = ops[i as usize].ret == NEVER;
                if bound {
                    fixed.retain(|&(_, _, other)| other != i);
                }
                !bound
            });
            for (class, count) in only.used.drain(..) {
                let of = &mut self.classes[class as usize];
                let from = of.settled as usize;
                of.settled += count;
                self.settled.extend(&of.called[from..of.settled as usize]);
                if of.called.len() == of.settled as usize {
                    self.live.retain(|&other| other != class);
                }
            }
        }
        Ok(after)
    }

    /// Whether placing an absorbed PUT may help anybody from now on.
    fn may_be_read(&self, put: u32) -> bool {
        let Op { value, ret, .. } = self.ops[put as usize];
        self.conditional || self.last_read.get(&value).is_some_and(|&last| last >= ret)
    }

    /// Finds all ways to place `goal`, with nothing placed that does not help.
    fn place(&mut self, start: Config, goal: u32, found: &mut Vec<Config>) -> Result<(), OverBudget> {
        let goal_op = self.ops[goal as usize];
        let goal_place =
            if goal_op.cas == 0 { None } else { Some((goal_op.cas, goal_op.request == Request::Get, goal)) };
        let mut stack = vec![Node { config: start, without: None }];
        let mut visited: HashMap<_, Vec<Used>> = HashMap::new();
        let mut next = Vec::new();
        while let Some(node) = stack.pop() {
            if node.config.is_done(goal) {
                found.push(node.config);
                continue;
            }
            if node.config.is_absorbed(goal) {
                // Satisfied; but this is also its last chance to take effect.
                found.push(node.config.clone());
            }
            if self.work > self.budget {
                return Err(OverBudget);
            }
            next.clear();
            self.steps(&node, goal, goal_place, &mut next);
            if next.len() == 1 && stack.is_empty() && visited.is_empty() {
                // The usual case: one way to go on, nothing to remember.
                stack.append(&mut next);
                continue;
            }
            // Known operations come first in `next` and are to be tried first: what uses fewer unknown ones covers more.
            for node in next.drain(..).rev() {
                let Config { state, done, absorbed, used } = &node.config;
                let others = visited.entry((*state, node.without, done.clone(), absorbed.clone())).or_default();
                self.work += others.len() as u64 / 16;
                if !others.iter().any(|other| covers(other, used)) {
                    others.push(used.clone());
                    stack.push(node);
                }
            }
        }
        Ok(())
    }

    /// All nodes one step on.
    fn steps(&mut self, node: &Node, goal: u32, goal_place: Option<(u64, bool, u32)>, next: &mut Vec<Node>) {
        let config = &node.config;
        let state = config.state;
        // What comes first by number, and not after the goal, must come before anything that is further on.
        let mut open = 0;
        let mut forced = None;
        while let Some(&place) = self.fixed.get(open) {
            open += 1;
            if config.is_done(place.2) {
                continue;
            }
            let (number, is_read, op) = place;
            let made = self.ops[op as usize].makes_version();
            // Reads of the goal's own version do not end this: a write that makes none may help them and the goal.
            if goal_place.is_some_and(|goal| place > goal && (made || (is_read && number > goal.0) || !goal.1)) {
                break;
            }
            if forced.is_some() && (is_read || made) {
                // Only a write that makes no version may come before a read of a lower number: it may keep the item
                // alive that the read finds.
                if made {
                    break;
                }
                continue;
            }
            forced = forced.or(Some(place));
            let behind = number < state.seq || (number == state.seq && !is_read);
            if behind && !(is_read && (state.cas == number || state.is_unnumbered())) {
                // Its place is behind us; it will never fit.
                return;
            }
            // Placing it may decide which version this one is.
            let decides = state.is_unnumbered() && (is_read || self.ops[op as usize].request == Request::Cas);
            let placed = self.step(node, Step::Known(op), next);
            let last = goal_place.is_some() && !decides;
            if placed && last && forced == Some(place) && (is_read || !self.is_alternative_possible(config, op)) {
                return;
            }
            if !is_read {
                break;
            }
        }
        if goal_place.is_none() {
            let placed = self.step(node, Step::Known(goal), next);
            if placed && forced.is_none() && !self.is_alternative_possible(config, goal) {
                return;
            }
        }
        if self.conditional {
            for i in 0..self.loose.len() {
                let op = self.loose[i];
                if op != goal && !config.is_done(op) {
                    self.step(node, Step::Known(op), next);
                }
            }
            for i in 0..self.live.len() {
                let class = self.live[i];
                // A PUT can do what an ADD or a REPLACE can, and more: it is kept for later while they will do.
                let instead = if state.content == ABSENT { self.junk_add } else { self.junk_replace };
                let spare = Some(class) == self.junk_put
                    && !self.expiring
                    && instead.is_some_and(|instead| self.next_of_class(config, instead).is_some());
                if !spare {
                    self.step(node, Step::Unknown(class), next);
                }
            }
        } else {
            self.steps_to_values(node, goal, forced, next);
        }
        if state.expire(self.contents.store).is_some() {
            self.step(node, Step::Expire, next);
        }
    }

    /// On a key with GETs and PUTs alone, a step is of use only if some open read wants its value.
    fn steps_to_values(&mut self, node: &Node, goal: u32, forced: Option<(u64, bool, u32)>, next: &mut Vec<Node>) {
        let config = &node.config;
        let mut wanted: Vec<Content> = self
            .loose
            .iter()
            .filter(|&&op| !config.is_done(op))
            .chain(forced.iter().map(|(_, _, op)| op))
            .map(|&op| &self.ops[op as usize])
            .filter(|op| op.request == Request::Get && op.value != ABSENT && !self.is_owned(op.cas))
            .map(|op| op.value)
            .collect();
        wanted.sort_unstable();
        wanted.dedup();
        for value in wanted {
            for i in 0..self.loose.len() {
                let op = self.loose[i];
                let made = &self.ops[op as usize];
                if op != goal && made.request == Request::Put && made.value == value && !config.is_done(op) {
                    self.step(node, Step::Known(op), next);
                }
            }
            for i in 0..self.classes_by_value.get(&value).map_or(0, Vec::len) {
                let class = self.classes_by_value[&value][i];
                self.step(node, Step::Unknown(class), next);
            }
        }
    }

    fn is_owned(&self, cas: u64) -> bool {
        cas != 0 && self.owned.binary_search(&cas).is_ok()
    }

    /// Whether taking this step, possible as it is, might lose an order in which others come before it.
    fn is_alternative_possible(&self, config: &Config, i: u32) -> bool {
        let op = &self.ops[i as usize];
        let keeps = match op.request {
            Request::Append | Request::Prepend => true,
            Request::Incr => op.number.is_none(),
            Request::Touch => true,
            _ => false,
        };
        // Observers that wait for another state, and writes whose place is open.
        let waiting = self.loose.iter().any(|&other| {
            other != i
                && !config.is_done(other)
                && (self.conditional || self.ops[other as usize].request == Request::Get)
        });
        // A version that somebody saw and nobody owned to may have come before this write, which makes none.
        let orphan = op.cas != 0 && op.request != Request::Get && !op.makes_version() && {
            let after = self.orphans.partition_point(|&number| number <= config.state.seq);
            self.orphans.get(after).is_some_and(|&number| number < op.cas)
        };
        waiting || orphan || (keeps && !self.live.is_empty())
    }

    /// Takes one step, if it is possible and of use.
    fn step(&mut self, node: &Node, step: Step, next: &mut Vec<Node>) -> bool {
        self.work += 1;
        let config = &node.config;
        let before = config.state;
        let (after, optional) = match step {
            Step::Known(i) => {
                let Some(after) = self.apply(&before, i) else { return false };
                let op = &self.ops[i as usize];
                (after, op.request == Request::Put && op.cas == 0)
            }
            Step::Unknown(class) => {
                let Some(i) = self.next_of_class(config, class) else { return false };
                match self.apply(&before, i) {
                    Some(after) if after != before => (after, true),
                    _ => return false,
                }
            }
            Step::Expire => match before.expire(self.contents.store) {
                Some(after) => (after, true),
                None => return false,
            },
        };
        if after.content == JUNK && after.cas != 0 && self.seen.contains_key(&after.cas) {
            // Somebody could tell what it was.
            return false;
        }
        if let Some(without) = &node.without {
            // Was the step before this one of any use to it?
            let useless = match step {
                Step::Expire => without.expire(self.contents.store) == Some(after),
                Step::Known(i) if self.ops[i as usize].is_observer() => {
                    let there = self.apply(without, i);
                    there == Some(*without) || there == Some(after)
                }
                Step::Known(i) => self.apply(without, i) == Some(after),
                Step::Unknown(class) => {
                    self.next_of_class(config, class).and_then(|i| self.apply(without, i)) == Some(after)
                }
            };
            if useless {
                return false;
            }
        }
        let mut config = config.clone();
        config.state = after;
        self.absorb(&before, step, &after, &mut config);
        match step {
            Step::Known(i) => config.set_done(i),
            Step::Unknown(class) => config.set_used(class),
            Step::Expire => {}
        }
        let observed = self.observe_all(&mut config);
        let without = (optional && !observed).then_some(before);
        next.push(Node { config, without });
        true
    }

    fn apply(&mut self, state: &State, i: u32) -> Option<State> {
        let orphans = &self.orphans;
        let op = &self.ops[i as usize];
        let mut after = state.apply(op, &mut self.contents, &|cas| orphans.binary_search(&cas).is_ok())?;
        if op.is_unknown() {
            after.content = self.distinct(after.content);
        }
        Some(after)
    }

    fn next_of_class(&self, config: &Config, class: u32) -> Option<u32> {
        let of = &self.classes[class as usize];
        of.called.get((of.settled + config.used(class)) as usize).copied()
    }

    /// Marks the open PUTs that could have come between `before` and the step without a difference to anybody.
    fn absorb(&mut self, before: &State, step: Step, after: &State, config: &mut Config) {
        // An observer that says which version this is counts too, and the end of a lifetime.
        let i = match step {
            Step::Known(i) => Some(i),
            Step::Unknown(class) => Some(self.next_of_class(config, class).expect("the step was possible")),
            Step::Expire => None,
        };
        for at in 0..self.loose.len() {
            let put = self.loose[at];
            if Some(put) == i
                || self.ops[put as usize].request != Request::Put
                || config.is_done(put)
                || config.is_absorbed(put)
            {
                continue;
            }
            let Some(between) = self.apply(before, put) else { continue };
            let same = match i {
                Some(i) => self.apply(&between, i),
                None => between.expire(self.contents.store),
            };
            if same == Some(*after)
                && let Err(at) = config.absorbed.binary_search(&put)
            {
                config.absorbed.insert(at, put);
            }
        }
    }

    /// Places every open observer that fits the state as it is.
    fn observe_all(&mut self, config: &mut Config) -> bool {
        let mut any = false;
        if config.state.cas != 0 {
            let from = self.fixed.partition_point(|place| (place.0, place.1) < (config.state.cas, true));
            for at in from..self.fixed.len() {
                let (number, _, i) = self.fixed[at];
                if number != config.state.cas {
                    break;
                }
                any |= self.observe(config, i);
            }
        }
        for at in 0..self.loose.len() {
            any |= self.observe(config, self.loose[at]);
        }
        any
    }

    /// Places this operation if it is an observer that needs no decision: one that fits and leaves everything as it is.
    fn observe(&mut self, config: &mut Config, i: u32) -> bool {
        if !self.ops[i as usize].is_observer() || config.is_done(i) {
            return false;
        }
        let fits = self.apply(&config.state, i) == Some(config.state);
        if fits {
            config.set_done(i);
        }
        fits
    }
}

/// Gives an unknown write the sequence number under which its value was read, where no other write can have made that
/// value under that number: it then took effect, and is no choice any more.
pub(super) fn bind(ops: &mut [Op], values: &Interner) {
    if !ops.iter().any(Op::is_unknown) {
        return;
    }
    let owned: HashSet<u64> =
        ops.iter().filter(|op| op.request != Request::Get && op.cas != 0).map(|op| op.cas).collect();
    let mut read: HashMap<u64, Content> = HashMap::new();
    for op in ops.iter().filter(|op| op.request == Request::Get && op.cas != 0 && !owned.contains(&op.cas)) {
        if *read.entry(op.cas).or_insert(op.value) != op.value {
            return;
        }
    }
    let mut by_value: HashMap<Content, Vec<usize>> = HashMap::new();
    let mut composing = Vec::new();
    for (i, op) in ops.iter().enumerate().filter(|(_, op)| op.makes_version() && op.cas == 0) {
        match op.request {
            Request::Append | Request::Prepend | Request::Incr => composing.push(i),
            _ => by_value.entry(op.value).or_default().push(i),
        }
    }
    if composing.len().saturating_mul(read.len()) > OBSERVED_WORK_MAX >> 4 {
        return;
    }
    let mut times: HashMap<usize, Vec<u64>> = HashMap::new();
    for (&number, &value) in &read {
        let bytes = super::model::recorded_bytes(values, value);
        let may_compose = |i: usize| {
            let piece = || super::model::recorded_bytes(values, ops[i].value);
            match ops[i].request {
                Request::Append => bytes.ends_with(piece()),
                Request::Prepend => bytes.starts_with(piece()),
                _ => may_be_number(bytes, false),
            }
        };
        let makers = by_value.get(&value).into_iter().flatten().copied();
        let mut makers = makers.chain(composing.iter().copied().filter(|&i| may_compose(i)));
        if let (Some(only), None) = (makers.next(), makers.next()) {
            times.entry(only).or_default().push(number);
        }
    }
    for (i, numbers) in times {
        // Under two numbers: the search will find that it cannot be.
        if let ([number], true) = (&numbers[..], ops[i].is_unknown()) {
            ops[i].cas = *number;
            ops[i].outcome = Outcome::Ok;
        }
    }
}

/// Drops configurations that are no better than another: equal but for more unknown operations used.
fn minimal(configs: Vec<Config>) -> Vec<Config> {
    let mut groups: HashMap<_, Vec<Used>> = HashMap::new();
    let mut out = Vec::new();
    let mut order: Vec<Config> = configs;
    order.sort_by_key(|config| config.used.iter().map(|&(_, count)| u64::from(count)).sum::<u64>());
    for config in order {
        let group = groups.entry((config.state, config.done.clone(), config.absorbed.clone())).or_default();
        if !group.iter().any(|other| covers(other, &config.used)) {
            group.push(config.used.clone());
            out.push(config);
        }
    }
    out
}
