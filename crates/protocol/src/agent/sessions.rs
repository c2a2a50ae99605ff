//! Who has a session: indices, generations, tokens. The records themselves are in the data path.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
    hash::Hasher,
};

use siphasher::sip::SipHasher24;
use underpass_abi::abi::up_session;

use crate::wire::{Endpoint, SessionId};

/// Bits of the counter in a generation; the epoch is above it.
const COUNTER_BITS: u32 = 24;
/// Sessions that an epoch can open.
pub const COUNTER_MAX: u32 = 1 << COUNTER_BITS;
/// Closed sessions whose end is remembered for a client that asks again.
const CLOSED_MAX: usize = 4096;
/// A secret makes tokens for this long, and its tokens of first OPENs are good for as long again.
pub const SECRET_MS: u64 = 10 * 60 * 1000;

/// Draws a secret.
pub type Random = Box<dyn FnMut() -> u64 + Send>;

/// An open session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// Its number.
    pub session: SessionId,
    /// Its shard.
    pub shard: u32,
    /// Its client.
    pub client: Endpoint,
    /// What its requests carry.
    pub token: u64,
    /// Number of the OPEN that opened it; `None` if it was taken over from an agent before.
    request: Option<u64>,
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    session: SessionId,
    token: u64,
    /// Its last request.
    pub request: u64,
    /// That one's state, `enum up_state`.
    pub state: u32,
}

/// Why no session can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSession {
    /// Every index is taken.
    Full,
    /// The epoch has issued every generation that it has.
    Generations,
}

/// Indices that one shard takes first, so that coordinators which take shards over from each other find them free: those
/// with one remainder by the number of shards.
struct Lane {
    /// Indices below `next` that may be free, lowest first.
    freed: BinaryHeap<Reverse<u16>>,
    /// Indices of the lane from here on were never used.
    next: usize,
}

/// Sessions by index.
pub struct Sessions {
    slots: Vec<Option<Open>>,
    shards: Vec<u32>,
    lanes: Vec<Lane>,
    /// No index from here on is or was in use.
    bound: usize,
    in_use: usize,
    by_open: HashMap<(Endpoint, u32, u64), u16>,
    ended: VecDeque<Ended>,
    /// Counter of the next generation.
    counter: u32,
    /// The current secret and the one before.
    secrets: [[u64; 2]; 2],
    rotate_ms: u64,
    random: Random,
}

impl Sessions {
    /// A table of `count` sessions of these shards.
    ///
    /// # Panics
    /// If there is no shard.
    pub fn new(now_ms: u64, count: u32, shards: &[u32], mut random: Random) -> Self {
        assert!(!shards.is_empty(), "an agent has at least one shard");
        Self {
            slots: vec![None; count as usize],
            shards: shards.to_vec(),
            lanes: (0..shards.len()).map(|next| Lane { freed: BinaryHeap::new(), next }).collect(),
            bound: 0,
            in_use: 0,
            by_open: HashMap::new(),
            ended: VecDeque::new(),
            counter: 0,
            secrets: [[random(), random()], [random(), random()]],
            rotate_ms: now_ms + SECRET_MS,
            random,
        }
    }

    /// Draws a new secret when the current one is old.
    pub fn rotate(&mut self, now_ms: u64) {
        if now_ms >= self.rotate_ms {
            self.secrets = [[(self.random)(), (self.random)()], self.secrets[0]];
            self.rotate_ms = now_ms + SECRET_MS;
        }
    }

    /// The token that the answer to a first OPEN carries. Never 0: that is a first OPEN's own.
    pub fn challenge(&self, client: Endpoint) -> u64 {
        token(self.secrets[0], client, SessionId(0))
    }

    /// Whether `answer` shows that its sender received a challenge at this address, not too long ago.
    pub fn is_challenge(&self, client: Endpoint, answer: u64) -> bool {
        self.secrets.iter().any(|&secret| token(secret, client, SessionId(0)) == answer)
    }

    /// The session that this OPEN opened already.
    pub fn opened_by(&self, client: Endpoint, shard: u32, request: u64) -> Option<Open> {
        self.by_open.get(&(client, shard, request)).and_then(|&index| self.slots[usize::from(index)])
    }

    /// Forgets which OPEN opened a session: one that repeats its number is another.
    pub fn forget_open(&mut self, session: SessionId) {
        if let Some(open) = &mut self.slots[usize::from(session.index())]
            && let Some(request) = open.request.take()
        {
            self.by_open.remove(&(open.client, open.shard, request));
        }
    }

    /// Takes a free index, the lowest, under a generation never issued before.
    pub fn open(&mut self, epoch: u32, shard: u32, client: Endpoint, request: Option<u64>) -> Result<Open, NoSession> {
        if self.counter >= COUNTER_MAX {
            return Err(NoSession::Generations);
        }
        let own = self.shards.iter().position(|&other| other == shard).unwrap_or(0);
        let lanes = self.lanes.len();
        let index = (0..lanes).find_map(|lane| self.free_index((own + lane) % lanes)).ok_or(NoSession::Full)?;
        let session = SessionId::new(u64::from(epoch) << COUNTER_BITS | u64::from(self.counter), index);
        self.counter += 1;
        let open = Open { session, shard, client, token: token(self.secrets[0], client, session), request };
        self.slots[usize::from(index)] = Some(open);
        self.in_use += 1;
        if let Some(request) = request {
            self.by_open.insert((client, shard, request), index);
        }
        Ok(open)
    }

    /// The lowest free index of a lane.
    fn free_index(&mut self, lane: usize) -> Option<u16> {
        let step = self.lanes.len();
        let lane = &mut self.lanes[lane];
        while let Some(Reverse(index)) = lane.freed.pop() {
            // One that was taken over meanwhile is not free any more.
            if self.slots[usize::from(index)].is_none() {
                return Some(index);
            }
        }
        while lane.next < self.slots.len() {
            let index = lane.next;
            lane.next += step;
            self.bound = self.bound.max(index + 1);
            if self.slots[index].is_none() {
                return Some(index as u16);
            }
        }
        None
    }

    /// Generations count from here on at least.
    pub fn count_from(&mut self, counter: u32) {
        self.counter = self.counter.max(counter);
    }

    /// Takes over a session that an agent before this one opened, here or elsewhere. False: its index is taken or beyond the
    /// table, or there is no session in the record.
    pub fn adopt(&mut self, index: u16, record: &up_session) -> bool {
        let to = std::net::Ipv6Addr::from(record.reply_addr).to_ipv4_mapped();
        let (true, Some(addr)) = (record.session != 0, to) else { return false };
        if self.slots.get(usize::from(index)).is_none_or(Option::is_some) {
            return false;
        }
        self.bound = self.bound.max(usize::from(index) + 1);
        self.in_use += 1;
        self.slots[usize::from(index)] = Some(Open {
            session: SessionId(record.session),
            shard: record.shard,
            client: Endpoint { addr, port: u16::from_be(record.reply_port) },
            token: record.token,
            request: None,
        });
        true
    }

    /// Forgets every session of a shard that is not served here any more.
    pub fn forget_shard(&mut self, shard: u32) {
        for index in 0..self.bound {
            if let Some(open) = self.slots[index].filter(|open| open.shard == shard) {
                self.forget_open(open.session);
                self.free(index as u16);
            }
        }
        // What was promised of closed sessions was promised by a coordinator that is one no more.
        self.ended.clear();
    }

    fn free(&mut self, index: u16) {
        self.slots[usize::from(index)] = None;
        self.in_use -= 1;
        let lane = usize::from(index) % self.lanes.len();
        // Above `next` it is come by anyway.
        if usize::from(index) < self.lanes[lane].next {
            self.lanes[lane].freed.push(Reverse(index));
        }
    }

    /// An open session.
    pub fn get(&self, session: SessionId) -> Option<Open> {
        self.slots.get(usize::from(session.index())).copied().flatten().filter(|open| open.session == session)
    }

    /// Frees the index of a session that the data path closed; what became of its last request is remembered a while.
    pub fn close(&mut self, session: SessionId, request: u64, state: u32) {
        self.forget_open(session);
        let open = self.slots[usize::from(session.index())].expect("only open sessions are closed");
        assert_eq!(open.session, session, "only open sessions are closed");
        self.free(session.index());
        if self.ended.len() == CLOSED_MAX {
            self.ended.pop_front();
        }
        self.ended.push_back(Ended { session, token: open.token, request, state });
    }

    /// How a session ended, for its owner.
    pub fn ended(&self, session: SessionId, token: u64) -> Option<Ended> {
        self.ended.iter().rev().find(|ended| ended.session == session && ended.token == token).copied()
    }

    /// Sessions open.
    pub fn in_use(&self) -> usize {
        self.in_use
    }

    /// Sessions that there can be.
    pub fn limit(&self) -> usize {
        self.slots.len()
    }

    /// No index from here on is or was in use.
    pub fn bound(&self) -> usize {
        self.bound
    }

    /// Counter of the next generation.
    pub fn counter(&self) -> u32 {
        self.counter
    }
}

/// protocol.md, section 6.
fn token(secret: [u64; 2], client: Endpoint, session: SessionId) -> u64 {
    let mut hasher = SipHasher24::new_with_keys(secret[0], secret[1]);
    hasher.write(&client.addr.to_ipv6_mapped().octets());
    hasher.write(&client.port.to_be_bytes());
    hasher.write(&session.0.to_be_bytes());
    hasher.finish().max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn random() -> Random {
        let mut state = 0u64;
        Box::new(move || {
            state += 1;
            state
        })
    }

    fn client(port: u16) -> Endpoint {
        Endpoint { addr: [10, 0, 0, 9].into(), port }
    }

    #[test]
    fn a_challenge_is_for_one_address_and_two_secrets() {
        let mut sessions = Sessions::new(0, 4, &[0], random());
        let challenge = sessions.challenge(client(1));
        assert_ne!(challenge, 0);
        assert!(sessions.is_challenge(client(1), challenge));
        assert!(!sessions.is_challenge(client(2), challenge), "another port");
        assert!(!sessions.is_challenge(Endpoint { addr: [10, 0, 0, 8].into(), port: 1 }, challenge), "another address");
        assert!(!sessions.is_challenge(client(1), 0));
        sessions.rotate(SECRET_MS - 1);
        assert_eq!(sessions.challenge(client(1)), challenge, "not old yet");
        sessions.rotate(SECRET_MS);
        assert_ne!(sessions.challenge(client(1)), challenge);
        assert!(sessions.is_challenge(client(1), challenge), "the last two secrets are good");
        sessions.rotate(2 * SECRET_MS);
        assert!(!sessions.is_challenge(client(1), challenge), "replayed too late");
    }

    #[test]
    fn indices_count_from_0_and_are_freed() {
        let mut sessions = Sessions::new(0, 2, &[0], random());
        let a = sessions.open(3, 0, client(1), Some(1)).unwrap();
        let b = sessions.open(3, 0, client(1), Some(2)).unwrap();
        assert_eq!((a.session.index(), b.session.index()), (0, 1));
        assert_eq!(a.session.generation(), 3 << 24);
        assert_eq!(sessions.open(3, 0, client(1), Some(3)), Err(NoSession::Full));
        assert_eq!(sessions.in_use(), 2);
        sessions.close(a.session, 17, 4);
        assert_eq!(sessions.get(a.session), None);
        let ended = sessions.ended(a.session, a.token).unwrap();
        assert_eq!((ended.request, ended.state), (17, 4));
        assert_eq!(sessions.ended(a.session, a.token ^ 1), None, "only its owner is told");
        let c = sessions.open(3, 0, client(1), Some(3)).unwrap();
        assert_eq!(c.session.index(), 0);
        assert_ne!(c.session, a.session);
        assert_ne!(c.token, a.token);
        assert_eq!(sessions.bound(), 2);
    }

    #[test]
    fn a_repeated_open_finds_its_session() {
        let mut sessions = Sessions::new(0, 4, &[0], random());
        let open = sessions.open(1, 0, client(1), Some(5)).unwrap();
        assert_eq!(sessions.opened_by(client(1), 0, 5), Some(open));
        assert_eq!(sessions.opened_by(client(1), 1, 5), None, "another shard");
        assert_eq!(sessions.opened_by(client(2), 0, 5), None, "another client");
        assert_eq!(sessions.opened_by(client(1), 0, 6), None, "another request");
        sessions.forget_open(open.session);
        assert_eq!(sessions.opened_by(client(1), 0, 5), None);
        let again = sessions.open(1, 0, client(1), Some(5)).unwrap();
        sessions.close(open.session, 0, 0);
        assert_eq!(sessions.opened_by(client(1), 0, 5), Some(again), "closing the first leaves the second alone");
        sessions.close(again.session, 0, 0);
        assert_eq!(sessions.opened_by(client(1), 0, 5), None);
    }

    #[test]
    fn generations_end_without_repeating() {
        let mut sessions = Sessions::new(0, 4, &[0], random());
        sessions.count_from(COUNTER_MAX - 1);
        let last = sessions.open(1, 0, client(1), None).unwrap();
        assert_eq!(last.session.generation(), (1 << 24) + u64::from(COUNTER_MAX) - 1);
        assert_eq!(sessions.open(1, 0, client(1), None), Err(NoSession::Generations));
    }

    #[test]
    fn what_is_taken_over_is_in_use() {
        let mut sessions = Sessions::new(0, 8, &[0], random());
        let mut record = up_session { session: SessionId::new(1 << 24 | 7, 2).0, token: 9, ..up_session::default() };
        record.reply_addr = client(4).addr.to_ipv6_mapped().octets();
        record.reply_port = 4u16.to_be();
        let empty = up_session::default();
        for index in 0..8 {
            assert_eq!(sessions.adopt(index, if index == 2 { &record } else { &empty }), index == 2);
        }
        assert!(!sessions.adopt(2, &record), "taken");
        assert_eq!((sessions.in_use(), sessions.bound()), (1, 3));
        assert_eq!(sessions.get(SessionId(record.session)).unwrap().client, client(4));
        let indices: Vec<_> = (0..7).map(|_| sessions.open(1, 0, client(1), None).unwrap().session.index()).collect();
        assert_eq!(indices, [0, 1, 3, 4, 5, 6, 7]);
        assert_eq!(sessions.open(1, 0, client(1), None), Err(NoSession::Full));
        sessions.forget_shard(1);
        assert_eq!(sessions.in_use(), 8);
        sessions.forget_shard(0);
        assert_eq!(sessions.in_use(), 0);
        assert_eq!(sessions.open(1, 0, client(1), None).unwrap().session.index(), 0);
    }

    #[test]
    fn shards_keep_to_their_lanes_while_there_is_room() {
        let mut sessions = Sessions::new(0, 7, &[4, 9], random());
        let mut open = |shard| sessions.open(1, shard, client(1), None).map(|open| open.session.index());
        assert_eq!([open(9), open(9), open(4), open(9)], [Ok(1), Ok(3), Ok(0), Ok(5)]);
        assert_eq!([open(9), open(9), open(9), open(9)], [Ok(2), Ok(4), Ok(6), Err(NoSession::Full)]);
    }

    proptest! {
        /// Whatever is opened and closed, no number is given twice and the count is right.
        #[test]
        fn numbers_are_unique(steps in proptest::collection::vec((any::<bool>(), 0usize..16), 0..200)) {
            let mut sessions = Sessions::new(0, 16, &[0], random());
            let mut issued = BTreeSet::new();
            let mut open = Vec::new();
            for (opens, at) in steps {
                if opens {
                    match sessions.open(2, 0, client(1), None) {
                        Ok(one) => {
                            prop_assert!(issued.insert(one.session));
                            open.push(one.session);
                        }
                        Err(e) => {
                            prop_assert_eq!(e, NoSession::Full);
                            prop_assert_eq!(open.len(), 16);
                        }
                    }
                } else if at < open.len() {
                    sessions.close(open.swap_remove(at), 0, 0);
                }
                prop_assert_eq!(sessions.in_use(), open.len());
                let indices: BTreeSet<_> = open.iter().map(|session| session.index()).collect();
                prop_assert_eq!(indices.len(), open.len());
            }
        }
    }
}
