//! Control messages: the JSON documents that ride as the value of packets with a control operation.
//!
//! The header carries epoch, shard, session, request (echoed, so that an answer finds its question), reply address and
//! token as in every packet; the document carries the rest. Unknown fields are ignored, so that a newer peer can add one.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::wire::{Header, MEMBERS_MAX, Op, Packet};

/// One replica of a shard, as a configuration names it. Its index in the list is its member index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberInfo {
    /// Number of the replica, unique in the shard.
    pub id: u32,
    /// Which life of the process: a restarted replica is another one. 0 in a request to join: not known yet.
    pub incarnation: u64,
    /// Address.
    pub addr: Ipv4Addr,
    /// Port.
    pub port: u16,
    /// Whether reads go to it.
    pub active: bool,
}

/// Who is in a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    /// Shard.
    pub shard: u32,
    /// Epoch of this configuration.
    pub epoch: u32,
    /// Coordinator's address.
    pub coordinator_addr: Ipv4Addr,
    /// Coordinator's port.
    pub coordinator_port: u16,
    /// Members by index.
    pub members: Vec<MemberInfo>,
}

impl Configuration {
    /// Refuses what cannot be meant: no or too many members, one address or id twice.
    pub fn validate(&self) -> Result<(), String> {
        let count = self.members.len();
        if count == 0 || count > MEMBERS_MAX {
            return Err(format!("shard {} has {count} members; it must have 1 to {MEMBERS_MAX}", self.shard));
        }
        for (i, a) in self.members.iter().enumerate() {
            for b in &self.members[..i] {
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

/// INSTALL, agent to replica: take part under this configuration, as the member of this index. It is obeyed only if the
/// configuration names the receiver's own incarnation there, so a late copy cannot put a restarted, empty replica to work;
/// the agent learns the incarnation from the answer to a first INSTALL that names 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Install {
    /// The receiver's index.
    pub index: u8,
    /// The configuration.
    pub configuration: Configuration,
    /// Sessions that the coordinator's table can hold: the replica's table is as large.
    pub sessions: u32,
    /// The epoch that ended with every write resolved (a clean shutdown of the coordinator), so that all its replicas
    /// hold the same; 0: none. A replica that holds data of another epoch refuses.
    pub clean_epoch: u32,
}

/// INSTALLED, replica to agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// This life of the replica.
    pub incarnation: u64,
    /// The epoch it now takes part in; 0: none.
    pub epoch: u32,
    /// Empty, or why it does not take part and what to do. Empty with epoch 0: the configuration named incarnation 0 or
    /// another life of this replica; name this one.
    pub refusal: String,
    /// Items held.
    pub items: u64,
}

/// HEARTBEAT, agent to replica, every few milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Every write up to here is resolved on every member.
    pub stable: u64,
    /// The coordinator's time, in milliseconds since 1970.
    pub time: u64,
}

/// HEARTBEAT_ACK, replica to agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatAck {
    /// This life of the replica.
    pub incarnation: u64,
    /// Bytes of its budget in use.
    pub used_bytes: u64,
    /// Its budget.
    pub budget_bytes: u64,
    /// Items held.
    pub items: u64,
}

/// Least bytes of the document of a HEARTBEAT: as many as any HEARTBEAT_ACK has, since a replica that does not know its
/// coordinator yet answers whoever asks, and no answer to a stranger is larger than its request.
pub const HEARTBEAT_PADDING: usize = 136;

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
