//! Control messages: the JSON documents that ride as the value of packets with a control operation. ([`crate::transfer`]
//! has those that carry keys and values, which are binary.)
//!
//! The header carries epoch, shard, session, request (echoed, so that an answer finds its question), reply address and
//! token as in every packet; the document carries the rest. Unknown fields are ignored, so that a newer peer can add one.
//!
//! Between agents and replicas, `token` is a [seal](seal): a keyed hash of the datagram under the cluster's key.

use std::{hash::Hasher, net::Ipv4Addr};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use siphasher::sip::SipHasher24;

use crate::wire::{Endpoint, HEADER_LEN, Header, MEMBERS_MAX, Op, Packet};

/// One replica of a shard, as a configuration names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberInfo {
    /// Its member index: what acknowledgements are told apart by. It stays with one incarnation.
    pub index: u8,
    /// Number of the replica, unique in the shard.
    pub id: u32,
    /// Which life of the process: a restarted replica is another one. 0 in a request to join: not known yet.
    pub incarnation: u64,
    /// Address.
    pub addr: Ipv4Addr,
    /// Port.
    pub port: u16,
    /// Whether it has all that is committed: reads go to it, and a new coordinator may believe it. Otherwise it is a learner.
    pub active: bool,
}

impl MemberInfo {
    /// Where it listens.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint { addr: self.addr, port: self.port }
    }
}

/// Who is in a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    /// Shard.
    pub shard: u32,
    /// Epoch of this configuration.
    pub epoch: u32,
    /// The epoch at which this coordinator took over: from there on its tables are the same.
    pub tenure: u32,
    /// Length of every lease, in milliseconds.
    pub lease_ms: u64,
    /// Coordinator's address.
    pub coordinator_addr: Ipv4Addr,
    /// Coordinator's port.
    pub coordinator_port: u16,
    /// Members, by ascending index.
    pub members: Vec<MemberInfo>,
}

impl Configuration {
    /// Where the coordinator listens.
    pub fn coordinator(&self) -> Endpoint {
        Endpoint { addr: self.coordinator_addr, port: self.coordinator_port }
    }

    /// The member with this index.
    pub fn member(&self, index: u8) -> Option<&MemberInfo> {
        self.members.iter().find(|member| member.index == index)
    }

    /// Refuses what cannot be meant: no or too many members, one index, address or id twice, a tenure after its epoch.
    pub fn validate(&self) -> Result<(), String> {
        let count = self.members.len();
        if count == 0 || count > MEMBERS_MAX {
            return Err(format!("shard {} has {count} members; it must have 1 to {MEMBERS_MAX}", self.shard));
        }
        if self.tenure > self.epoch {
            return Err(format!("shard {}: tenure {} begins after epoch {}", self.shard, self.tenure, self.epoch));
        }
        for (i, a) in self.members.iter().enumerate() {
            if usize::from(a.index) >= MEMBERS_MAX {
                return Err(format!("shard {}: member index {} is not below {MEMBERS_MAX}", self.shard, a.index));
            }
            for b in &self.members[..i] {
                if a.index <= b.index {
                    return Err(format!("shard {}: member indices do not ascend", self.shard));
                }
                if a.id == b.id {
                    return Err(format!("shard {}: two members have id {}", self.shard, a.id));
                }
                if (a.addr, a.port) == (b.addr, b.port) {
                    return Err(format!("shard {}: two members have address {}:{}", self.shard, a.addr, a.port));
                }
            }
            if (a.addr, a.port) == (self.coordinator_addr, self.coordinator_port) {
                return Err(format!("shard {}: member {} has the coordinator's address", self.shard, a.id));
            }
        }
        Ok(())
    }
}

/// OPEN, client to agent. The first one has token 0 and is answered by an OPENED without a session whose token the client
/// sends in its second: proof that it receives at its address. Both are padded to [`OPEN_PADDING`] bytes of document,
/// so that no answer is larger than its request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// Ignored filler.
    #[serde(default)]
    pub padding: String,
}

/// Least bytes of the document of an OPEN: at least as many as any OPENED has.
pub const OPEN_PADDING: usize = 1200;

/// OPENED, agent to client. The header's session and token are what later requests carry; session 0: send OPEN again with
/// this token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// A session not used for this long is closed.
    pub idle_ms: u64,
    /// The shard's configuration; absent in the first answer.
    pub configuration: Option<Configuration>,
}

/// CLOSE, client to agent: empty document.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Close {}

/// CLOSED, agent to client. After it nothing of the session will ever be ordered: a request number above `request` was
/// and will be without effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closed {
    /// False: the session's write is unresolved, or it is unknown; it was not closed by this.
    pub closed: bool,
    /// The highest write request number that the session's record took.
    pub request: u64,
    /// That write's state, as `up_state`.
    pub state: u32,
}

/// INSTALL, agent to replica. With the receiver's own incarnation: take part under this configuration, as the member of this
/// index, which must name that incarnation too; or, with `reset`, give up everything and become another incarnation. With any
/// other incarnation, 0 for example, it is a question: who are you? So a late copy cannot put a restarted, empty replica
/// to work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Install {
    /// The life of the receiver that this is for.
    pub incarnation: u64,
    /// The receiver's index.
    pub index: u8,
    /// Give up everything held, whatever it is: the receiver is no member of this configuration, whose epoch is above its own.
    pub reset: bool,
    /// The configuration.
    pub configuration: Configuration,
    /// Sessions that the coordinator's table can hold: the replica's table is at least as large.
    pub sessions: u32,
}

/// INSTALLED, replica to agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// This life of the replica.
    pub incarnation: u64,
    /// The shard that it takes part in; meaningless in epoch 0.
    pub shard: u32,
    /// The epoch it takes part in; 0: none.
    pub epoch: u32,
    /// Empty, or why it does not take part and what to do. Empty with another epoch than asked for: INSTALL was for another
    /// incarnation.
    pub refusal: String,
    /// Items held.
    pub items: u64,
    /// The latest packet time seen, in milliseconds since 1970.
    pub time: u64,
}

/// HEARTBEAT, agent to replica, every few milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Every write up to here is resolved on every member.
    pub stable: u64,
    /// The coordinator's time, in milliseconds since 1970.
    pub time: u64,
    /// The stamp of the receiver's latest answer: it may answer reads until a lease after that. Absent: no lease.
    pub echo: Option<u64>,
    /// The receiver is a learner, and copies from this replica.
    pub donor: Option<(Ipv4Addr, u16)>,
}

/// HEARTBEAT_ACK, replica to agent: it is in this tenure. `request` is the heartbeat's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatAck {
    /// This life of the replica.
    pub incarnation: u64,
    /// Its own clock, in milliseconds: echoed by the next heartbeat.
    pub stamp: u64,
    /// Bytes of its budget in use.
    pub used_bytes: u64,
    /// Its budget.
    pub budget_bytes: u64,
    /// Items held.
    pub items: u64,
    /// How far its copying is; absent: it was not told to copy.
    pub copying: Option<Copying>,
}

/// How far a learner is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copying {
    /// Whom it copies from.
    pub donor: Option<(Ipv4Addr, u16)>,
    /// Items copied so far.
    pub items: u64,
    /// Bytes of keys and values copied so far.
    pub bytes: u64,
    /// Items that the donor held when asked last.
    pub of: u64,
    /// Everything is copied and stored.
    pub done: bool,
    /// Why it cannot go on; empty if all is well.
    pub trouble: String,
}

/// PULL, agent to replica: FETCH the chain of the packet's key from this replica, and store what is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pull {
    /// Who holds it.
    pub from: (Ipv4Addr, u16),
}

/// What a replica knows of one write: in answer to QUERY and ABORT, whose header names (session, request, seq).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// Processed, with the outcome of [`Answer`]; the answer's key is the write's, if a version of it above `stable` is held.
    Processed,
    /// Not processed, and it will not be until a PULL, an ABORT or another epoch.
    Frozen,
    /// Recorded as without effect.
    Aborted,
    /// The session's record holds a later write or a later session: the question is old.
    Gone,
}

/// ANSWER, replica to agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// This life of the replica.
    pub incarnation: u64,
    /// What it knows.
    pub fate: Fate,
    /// Status recorded, as on the wire.
    pub status: u8,
    /// Result recorded.
    pub result: u64,
}

/// LOCATE, client or agent to agent or replica: who coordinates this shard? Padded to [`OPEN_PADDING`] bytes of document.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Locate {
    /// Asks an agent to take the shard over from the sender, which coordinates this epoch; 0: does not. Sealed.
    #[serde(default)]
    pub take_over: u32,
    /// Ignored filler.
    #[serde(default)]
    pub padding: String,
}

/// LOCATED, agent or replica to client: the latest configuration that it knows of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// The configuration.
    pub configuration: Configuration,
    /// The sender is its coordinator and serves.
    pub serves: bool,
}

/// Least bytes of the document of a HEARTBEAT: as many as any HEARTBEAT_ACK has, since a replica that does not know its
/// coordinator yet answers whoever asks, and no answer to a stranger is larger than its request.
pub const HEARTBEAT_PADDING: usize = 320;

/// The whole datagram of a control message. A HEARTBEAT is padded with white space, which JSON ignores.
pub fn emit<T: Serialize>(header: Header, message: &T) -> Vec<u8> {
    let mut document = serde_json::to_vec(message).expect("control messages always serialise");
    if header.op == Op::Heartbeat && document.len() < HEARTBEAT_PADDING {
        document.resize(HEARTBEAT_PADDING, b' ');
    }
    header.datagram(&[], &document)
}

/// The document of a control packet; `None` when it does not parse.
pub fn parse<T: DeserializeOwned>(packet: &Packet<'_>) -> Option<T> {
    serde_json::from_slice(packet.value).ok()
}

/// The key that a cluster's agents and replicas share. All zeros: none was configured.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct ClusterKey(pub [u64; 2]);

impl std::str::FromStr for ClusterKey {
    type Err = String;

    /// From 32 hexadecimal digits, as `openssl rand -hex 16` prints them; white space around them is ignored.
    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let half = |digits: &str| u64::from_str_radix(digits, 16).ok();
        // `from_str_radix` takes a sign.
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let key = if digits { half(&text[..16]).zip(half(&text[16..])) } else { None };
        let (high, low) = key.ok_or("a cluster key is 32 hexadecimal digits: make one with `openssl rand -hex 16`")?;
        if (high, low) == (0, 0) {
            return Err("a cluster key of zeros is none".into());
        }
        Ok(Self([high, low]))
    }
}

impl std::fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Self::default() { "ClusterKey(none)" } else { "ClusterKey(secret)" })
    }
}

/// Puts the keyed hash of the datagram into its token.
///
/// # Panics
/// If the datagram is shorter than a header.
pub fn seal(mut datagram: Vec<u8>, key: ClusterKey) -> Vec<u8> {
    let hash = sealed_hash(&datagram, key);
    datagram[TOKEN_AT..HEADER_LEN].copy_from_slice(&hash.to_be_bytes());
    datagram
}

/// Whether the datagram carries the seal of this key.
pub fn is_sealed(datagram: &[u8], key: ClusterKey) -> bool {
    datagram.len() >= HEADER_LEN && datagram[TOKEN_AT..HEADER_LEN] == sealed_hash(datagram, key).to_be_bytes()
}

const TOKEN_AT: usize = HEADER_LEN - 8;

/// SipHash-2-4 of the datagram as if its token were zero.
fn sealed_hash(datagram: &[u8], key: ClusterKey) -> u64 {
    let mut hasher = SipHasher24::new_with_keys(key.0[0], key.0[1]);
    hasher.write(&datagram[..TOKEN_AT]);
    hasher.write(&[0; 8]);
    hasher.write(&datagram[HEADER_LEN..]);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_written_in_hexadecimal() {
        assert_eq!(
            "0123456789abcdefFEDCBA9876543210\n".parse(),
            Ok(ClusterKey([0x0123456789abcdef, 0xfedcba9876543210]))
        );
        for wrong in ["", "0123", "+123456789abcdef+edcba9876543210", &"0".repeat(32), &"g".repeat(32), &"é".repeat(16)]
        {
            assert!(wrong.parse::<ClusterKey>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_seal_covers_every_byte() {
        let key = ClusterKey([1, 2]);
        let sealed = seal(Header::new(Op::Heartbeat).datagram(b"key", b"value"), key);
        assert!(is_sealed(&sealed, key));
        assert!(!is_sealed(&sealed, ClusterKey([1, 3])));
        assert!(!is_sealed(&sealed[..40], key));
        for at in 0..sealed.len() {
            let mut other = sealed.clone();
            other[at] ^= 1;
            assert!(!is_sealed(&other, key), "byte {at}");
        }
    }
}
