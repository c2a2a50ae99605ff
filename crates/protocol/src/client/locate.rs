//! Who coordinates the shard: what a client knows of it, when it asks, and whom it believes. `docs/protocol.md`, section
//! 7, "Clients".
//!
//! A client that is turned away, or not answered, *looks*: it sends rounds of LOCATE until somebody says that it serves, or a
//! request that it has sent meanwhile is answered. Whatever it is told changes nothing but where it sends: an answer that is
//! wrong costs time, never correctness.

use super::*;
use crate::{
    control::{Configuration, Locate, Located},
    wire::Endpoint,
};

/// Least pause between rounds; it grows with the time for which no request was answered, to a [`ROUND_SHARE`]th of that. All
/// pauses are jittered by half.
const ROUND_MIN_NS: u64 = 2_000_000;
/// Longest pause.
const ROUND_MAX_NS: u64 = 50_000_000;
/// So a client is back soon after its shard, however long that was gone: by an eighth of that time on average.
const ROUND_SHARE: u64 = 4;
/// Pause between rounds that only refresh what is known of a shard that answers.
const REFRESH_NS: u64 = SECOND_NS;
/// Copies without any answer at which a request makes its client look: its second retransmission.
pub(super) const UNANSWERED_MAX: u32 = 3;

/// Where a request goes, and the tenure of who is thought to be there; 0: not known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub(super) to: Endpoint,
    pub(super) tenure: u32,
}

/// What a client knows of its shard's configuration.
#[derive(Debug)]
pub(super) struct Guide {
    /// The coordinators that it was given.
    given: Vec<Endpoint>,
    /// Where requests go. Not always the address that the configuration names: that of the coordinator may be another one
    /// than it is reached at.
    current: Endpoint,
    /// The one with the highest epoch that it was told of.
    configuration: Option<Configuration>,
    /// The request number of its LOCATEs: random, so that only who saw one can answer it. It stays after the search, for the
    /// answers that are still under way. 0: none was sent.
    nonce: u64,
    looking: bool,
    /// Another client of the shard looks, and will tell.
    spared: bool,
    /// When the search began.
    began: u64,
    /// When the latest round was sent.
    asked: u64,
    /// The next round is sent no sooner, in this search or the next one.
    due: u64,
    /// When the first round was sent since a request was answered.
    since: Option<u64>,
}

/// Whether a reject says that somebody else might take the request, or this one soon.
pub(super) fn is_elsewhere(reason: Option<Reason>) -> bool {
    use Reason::{Epoch, Lease, NoMember, NotCoordinator, Shard};
    matches!(reason, Some(Lease | Epoch | Shard | NoMember | NotCoordinator))
}

impl Guide {
    pub(super) fn new(given: &[Endpoint]) -> Self {
        let current = *given.first().expect("a client must be given a coordinator");
        Self {
            given: given.to_vec(),
            current,
            configuration: None,
            nonce: 0,
            looking: false,
            spared: false,
            began: 0,
            asked: 0,
            due: 0,
            since: None,
        }
    }

    pub(super) fn route(&self) -> Route {
        Route { to: self.current, tenure: self.tenure() }
    }

    fn epoch(&self) -> u32 {
        self.configuration.as_ref().map_or(0, |configuration| configuration.epoch)
    }

    fn tenure(&self) -> u32 {
        self.configuration.as_ref().map_or(0, |configuration| configuration.tenure)
    }

    /// Whether there is nobody else to ask: then an unknown shard is a mistake in the client's configuration.
    pub(super) fn is_alone(&self) -> bool {
        self.given.len() == 1 && self.configuration.is_none()
    }

    /// Whether a reject with this epoch is of an earlier tenure, and so says nothing about the present one. Epoch 0 is none.
    pub(super) fn is_former(&self, epoch: u32) -> bool {
        epoch != 0 && epoch < self.tenure()
    }

    /// When the next round is due.
    pub(super) fn wake(&self) -> u64 {
        if self.looking && !self.spared { self.due } else { NEVER }
    }

    /// Everybody who may know: the coordinators given and learnt of, and the replicas.
    fn acquaintances(&self) -> Vec<Endpoint> {
        let mut all = self.given.clone();
        let learnt = self.configuration.iter().flat_map(|configuration| {
            std::iter::once(configuration.coordinator()).chain(configuration.members.iter().map(|m| m.endpoint()))
        });
        for endpoint in std::iter::once(self.current).chain(learnt) {
            if !all.contains(&endpoint) {
                all.push(endpoint);
            }
        }
        all
    }

    /// Takes in a configuration; `None` if it is not news. The flag: it is of a new tenure.
    fn learn(&mut self, shard: u32, configuration: &Configuration) -> Option<bool> {
        let plausible = configuration.shard == shard
            && configuration.epoch > self.epoch()
            && configuration.tenure > 0
            && configuration.tenure >= self.tenure()
            && configuration.validate().is_ok();
        if !plausible {
            return None;
        }
        let takes_over = configuration.tenure > self.tenure();
        self.configuration = Some(configuration.clone());
        Some(takes_over)
    }
}

impl Client {
    /// Where it sends its requests.
    pub fn coordinator(&self) -> Endpoint {
        self.guide.current
    }

    /// The latest configuration that it was told of.
    pub fn configuration(&self) -> Option<&Configuration> {
        self.guide.configuration.as_ref()
    }

    /// Whether it looks for its coordinator.
    pub fn is_looking(&self) -> bool {
        self.guide.looking
    }

    /// Request number of its latest LOCATE, which answers carry; 0: none was sent. For a driver that shares a socket among
    /// clients.
    pub fn locate_nonce(&self) -> u64 {
        self.guide.nonce
    }

    /// Begins to look, unless it does already.
    pub(super) fn look(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        if self.guide.looking {
            return;
        }
        self.guide.looking = true;
        self.guide.began = now;
        self.guide.nonce = dice.number().max(1);
        self.look_on(now, dice, out);
    }

    /// Sends a round if it is time to.
    fn look_on(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        if now >= self.guide.wake() {
            for to in self.guide.acquaintances() {
                self.send_locate(to, out);
            }
            let since = *self.guide.since.get_or_insert(now);
            let pause = (now.saturating_sub(since) / ROUND_SHARE).clamp(ROUND_MIN_NS, ROUND_MAX_NS);
            self.guide.asked = now;
            self.guide.due = now + dice.around(pause);
        }
        self.due = self.due.min(self.guide.wake());
    }

    pub(super) fn tick_look(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        if !self.guide.looking {
            return;
        }
        let wanted = !self.is_idle() || !self.retired.is_empty() || self.is_opening();
        if wanted { self.look_on(now, dice, out) } else { self.guide.looking = false }
    }

    fn send_locate(&self, to: Endpoint, out: &mut Output) {
        let mut header = Header::new(Op::Locate);
        header.shard = self.settings.shard;
        header.set_reply_to(self.settings.reply_to);
        header.request = self.guide.nonce;
        out.send(to, &control::emit(header, &Locate { take_over: 0, padding: " ".repeat(OPEN_PADDING) }));
    }

    /// Another client of the shard looks, or no longer.
    pub(super) fn spare(&mut self, spared: bool) {
        self.guide.spared = spared;
        self.due = self.due.min(self.guide.wake());
    }

    /// A request whose first copy was sent at `sent` was answered by a process of this epoch.
    pub(super) fn was_answered(&mut self, now: u64, sent: u64, epoch: u32, dice: &mut Dice, out: &mut Output) {
        if sent >= self.guide.began {
            self.guide.since = None;
            if std::mem::take(&mut self.guide.looking) {
                self.send_again(now, dice, out);
            }
        }
        // Members come and go while the coordinator stays: know them before they are all one can ask.
        let outdated = self.guide.configuration.is_some() && epoch > self.guide.epoch();
        if outdated && now >= self.guide.asked.saturating_add(REFRESH_NS) {
            self.look(now, dice, out);
        }
    }

    pub(super) fn located(&mut self, now: u64, packet: &Packet<'_>, dice: &mut Dice, out: &mut Output) {
        let header = &packet.header;
        if header.shard == self.settings.shard
            && self.guide.nonce != 0
            && header.request == self.guide.nonce
            && let Some(located) = control::parse::<Located>(packet)
        {
            self.take_word(now, &located, dice, out);
        }
    }

    /// Takes in what somebody who was asked says.
    pub(super) fn take_word(&mut self, now: u64, located: &Located, dice: &mut Dice, out: &mut Output) {
        let configuration = &located.configuration;
        let named = configuration.coordinator();
        if named.addr.is_unspecified() || named.addr.is_multicast() || named.addr.is_broadcast() || named.port == 0 {
            return;
        }
        let before = self.guide.configuration.as_ref().map(Configuration::coordinator);
        if let Some(takes_over) = self.guide.learn(self.settings.shard, configuration) {
            // One that is reached at another address than it is named by stays where it is.
            let moved = before.map_or(self.guide.current != named, |before| before != named);
            if moved {
                self.guide.current = named;
            }
            if takes_over {
                self.begin_tenure(now, dice);
                if let Link::Opening(opening) = &mut self.link {
                    *opening = Opening::new(now, opening.until);
                }
            }
            if moved && !located.serves && self.guide.looking && !self.guide.spared {
                // A place to look that this round has perhaps left out. Once for each epoch, so it is no storm.
                self.send_locate(named, out);
            }
        } else if (configuration.epoch, Some(named)) != (self.guide.epoch(), before) {
            return;
        }
        if located.serves {
            self.guide.looking = false;
            self.send_again(now, dice, out);
        }
    }

    /// What the answer to an OPEN says: whoever gives a session is the coordinator, at the address where it was asked.
    pub(super) fn learn_from_opened(&mut self, now: u64, configuration: &Configuration, dice: &mut Dice) {
        if self.guide.learn(self.settings.shard, configuration) == Some(true) {
            self.begin_tenure(now, dice);
        }
    }

    /// Another coordinator, or the same one without its tables: whatever is not a request begins anew with it. An answer
    /// of the former one to what it was asked before no longer counts.
    fn begin_tenure(&mut self, now: u64, dice: &mut Dice) {
        if let Some(Write { phase: Phase::Proving { nonce, due, .. }, .. }) = &mut self.write {
            (*nonce, *due) = (dice.number(), now);
        }
        for retired in &mut self.retired {
            (retired.nonce, retired.due, retired.tries) = (dice.number(), now, 0);
        }
        self.due = self.due.min(now);
    }

    /// Somebody serves: sends again what was sent to another one, or was turned away or lost before the latest round.
    pub(super) fn send_again(&mut self, now: u64, dice: &mut Dice, out: &mut Output) {
        let route = self.guide.route();
        // What was sent after the round is on its way to who answered it.
        let asked = if self.guide.spared { now } else { self.guide.asked };
        let stale = |operation: &Operation| {
            operation.in_session()
                && (operation.tenure != route.tenure || (operation.turned_away() && operation.sent_last < asked))
        };
        if let Some(Write { operation, phase: Phase::Trying, .. }) = &mut self.write
            && stale(operation)
        {
            (operation.unanswered, operation.elsewhere) = (0, false);
            operation.send(now, route, &self.write_trip, &self.settings, dice, out);
        }
        for read in self.reads.iter_mut().flatten().filter(|read| stale(read)) {
            (read.unanswered, read.elsewhere) = (0, false);
            read.send(now, route, &self.read_trip, &self.settings, dice, out);
        }
        if let Link::Opening(opening) = &mut self.link
            && opening.sent < asked
        {
            opening.due = now;
        }
        self.due = self.due.min(self.next_due());
    }
}
