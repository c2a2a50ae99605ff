//! Packets: parsing, checking and emitting the header that `bpf/include/underpass/wire.h` defines.

use std::{fmt, net::Ipv4Addr};

use underpass_abi::wire as abi;

/// Bytes of a header on the wire.
pub const HEADER_LEN: usize = abi::UP_HEADER_LEN as usize;
/// Longest key, in bytes.
pub const KEY_MAX: usize = abi::UP_KEY_MAX as usize;
/// Most bytes of key and value together in one packet.
pub const PAYLOAD_MAX: usize = abi::UP_PAYLOAD_MAX as usize;
/// Longest datagram, in bytes of UDP payload.
pub const DATAGRAM_MAX: usize = HEADER_LEN + PAYLOAD_MAX;
/// Most members of a shard.
pub const MEMBERS_MAX: usize = abi::UP_MEMBERS_MAX as usize;
/// A write whose value begins with 8 bytes of lifetime in milliseconds.
pub const FLAG_TTL: u8 = abi::UP_FLAG_TTL as u8;

macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident: $($(#[$variant_meta:meta])* $variant:ident = $value:ident, $text:literal;)+) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$variant_meta])* #[doc = $text] $variant = abi::$value as u8,)+
        }

        impl $name {
            /// Every value, in wire order.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The value with this number on the wire.
            pub fn from_wire(byte: u8) -> Option<Self> {
                match u32::from(byte) {
                    $(abi::$value => Some(Self::$variant),)+
                    _ => None,
                }
            }

            /// The number on the wire.
            pub fn to_wire(self) -> u8 {
                self as u8
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $text,)+ })
            }
        }
    };
}

wire_enum! {
    /// What a packet is.
    Op:
    Read = UP_OP_READ, "READ";
    RReply = UP_OP_R_REPLY, "R_REPLY";
    Write = UP_OP_WRITE, "WRITE";
    WReply = UP_OP_W_REPLY, "W_REPLY";
    RReject = UP_OP_R_REJECT, "R_REJECT";
    WReject = UP_OP_W_REJECT, "W_REJECT";
    Open = UP_OP_OPEN, "OPEN";
    Opened = UP_OP_OPENED, "OPENED";
    Close = UP_OP_CLOSE, "CLOSE";
    Closed = UP_OP_CLOSED, "CLOSED";
    Install = UP_OP_INSTALL, "INSTALL";
    Installed = UP_OP_INSTALLED, "INSTALLED";
    Heartbeat = UP_OP_HEARTBEAT, "HEARTBEAT";
    HeartbeatAck = UP_OP_HEARTBEAT_ACK, "HEARTBEAT_ACK";
    ControlReject = UP_OP_CONTROL_REJECT, "CONTROL_REJECT";
    Collect = UP_OP_COLLECT, "COLLECT";
    Collected = UP_OP_COLLECTED, "COLLECTED";
    Pull = UP_OP_PULL, "PULL";
    Fetch = UP_OP_FETCH, "FETCH";
    Fetched = UP_OP_FETCHED, "FETCHED";
    Query = UP_OP_QUERY, "QUERY";
    Answer = UP_OP_ANSWER, "ANSWER";
    Abort = UP_OP_ABORT, "ABORT";
    Locate = UP_OP_LOCATE, "LOCATE";
    Located = UP_OP_LOCATED, "LOCATED";
}

impl Op {
    /// Whether the agent in user space handles it; its value is then a JSON document ([`crate::control`]) or
    /// binary ([`crate::transfer`]).
    pub fn is_control(self) -> bool {
        self.to_wire() >= abi::UP_OP_CONTROL as u8
    }
}

wire_enum! {
    /// What a write does. All but PUT are conditional: exclusive on their key while pending.
    Kind:
    Put = UP_KIND_PUT, "put";
    Delete = UP_KIND_DELETE, "delete";
    Add = UP_KIND_ADD, "add";
    Replace = UP_KIND_REPLACE, "replace";
    Cas = UP_KIND_CAS, "cas";
    Incr = UP_KIND_INCR, "incr";
    Append = UP_KIND_APPEND, "append";
    Prepend = UP_KIND_PREPEND, "prepend";
    Touch = UP_KIND_TOUCH, "touch";
}

impl Kind {
    /// Whether the outcome depends on the version before it.
    pub fn is_conditional(self) -> bool {
        self != Self::Put
    }

    /// Whether it can never make the store larger: allowed also when a replica is nearly full.
    pub fn never_grows(self) -> bool {
        matches!(self, Self::Delete | Self::Touch)
    }
}

wire_enum! {
    /// The outcome in a reply.
    Status:
    Ok = UP_STATUS_OK, "ok";
    NotFound = UP_STATUS_NOT_FOUND, "not found";
    Exists = UP_STATUS_EXISTS, "exists";
    NotStored = UP_STATUS_NOT_STORED, "not stored";
    NotANumber = UP_STATUS_NOT_A_NUMBER, "the value is not a decimal number";
    Overflow = UP_STATUS_OVERFLOW, "the result does not fit in 64 bits";
    TooLarge = UP_STATUS_TOO_LARGE, "the result does not fit in a datagram";
    Aborted = UP_STATUS_ABORTED, "aborted";
}

wire_enum! {
    /// Why a request was rejected.
    Reason:
    Epoch = UP_REASON_EPOCH, "wrong epoch";
    Lease = UP_REASON_LEASE, "lease over";
    Session = UP_REASON_SESSION, "unknown session";
    Token = UP_REASON_TOKEN, "wrong token or reply address";
    Shard = UP_REASON_SHARD, "unknown shard";
    SessionBusy = UP_REASON_SESSION_BUSY, "the session has another write outstanding";
    KeyBusy = UP_REASON_KEY_BUSY, "a conditional write meets another write on the key";
    DirtyFull = UP_REASON_DIRTY_FULL, "too many keys being written in this bucket";
    Aborted = UP_REASON_ABORTED, "aborted: without effect";
    KeyLength = UP_REASON_KEY_LENGTH, "key length not 1 to 250";
    ValueLength = UP_REASON_VALUE_LENGTH, "value too long for a datagram, or shorter than its kind needs";
    Kind = UP_REASON_KIND, "unknown kind of write";
    StoreFull = UP_REASON_STORE_FULL, "a replica is at its memory budget";
    VersionGone = UP_REASON_VERSION_GONE, "the version asked for is no longer held";
    NoSession = UP_REASON_NO_SESSION, "no free session";
    NoMember = UP_REASON_NO_MEMBER, "the shard has no member to serve it";
    Malformed = UP_REASON_MALFORMED, "malformed request";
    NotCoordinator = UP_REASON_NOT_COORDINATOR, "not from the epoch's coordinator";
}

/// A session's number: its index in the coordinator's table and a generation that is unique for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

impl SessionId {
    /// From its parts; `generation` is (epoch of opening, counter), 24 bits each.
    pub fn new(generation: u64, index: u16) -> Self {
        Self(generation << abi::UP_SESSION_INDEX_BITS | u64::from(index))
    }

    /// Index in the coordinator's and the replicas' session tables.
    pub fn index(self) -> u16 {
        self.0 as u16
    }

    /// Generation; 0 is never issued.
    pub fn generation(self) -> u64 {
        self.0 >> abi::UP_SESSION_INDEX_BITS
    }
}

/// IPv4 address and UDP port: where a process of the shard, or a client, is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// IPv4 address.
    pub addr: Ipv4Addr,
    /// UDP port.
    pub port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.addr, self.port)
    }
}

impl From<std::net::SocketAddrV4> for Endpoint {
    fn from(address: std::net::SocketAddrV4) -> Self {
        Self { addr: *address.ip(), port: address.port() }
    }
}

impl From<Endpoint> for std::net::SocketAddrV4 {
    fn from(endpoint: Endpoint) -> Self {
        Self::new(endpoint.addr, endpoint.port)
    }
}

/// Why a datagram is not a packet of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Shorter than a header, or key and value do not add up to the rest.
    #[error("lengths disagree")]
    Truncated,
    /// Not our magic.
    #[error("not an Underpass packet")]
    Magic,
    /// A version that this build does not speak.
    #[error("protocol version {0} is not supported")]
    Version(u8),
    /// An operation that this version does not know.
    #[error("unknown operation {0}")]
    Op(u8),
}

/// A packet's header in host byte order. Fields as in `wire.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the packet is.
    pub op: Op,
    /// [`Kind`] of a write, as on the wire: a receiver rejects unknown ones.
    pub kind: u8,
    /// [`Status`] in replies, [`Reason`] in rejects.
    pub status: u8,
    /// Member index.
    pub cnt: u8,
    /// [`FLAG_TTL`].
    pub flags: u8,
    /// Configuration under which the packet was routed.
    pub epoch: u32,
    /// Shard.
    pub shard: u32,
    /// Sequence number of a write, bound of a read, cas of an R_REPLY.
    pub seq: u64,
    /// Milliseconds since 1970, stamped by the coordinator.
    pub time: u64,
    /// Session.
    pub session: SessionId,
    /// Number of the request in its session.
    pub request: u64,
    /// Client's IPv4-mapped address.
    pub reply_addr: [u8; 16],
    /// Client's port.
    pub reply_port: u16,
    /// Bytes of key.
    pub key_len: u16,
    /// Bytes of value.
    pub value_len: u32,
    /// Proof that the client owns its address.
    pub token: u64,
}

impl Header {
    /// A header of this operation with everything else zero.
    pub fn new(op: Op) -> Self {
        Self {
            op,
            kind: 0,
            status: 0,
            cnt: 0,
            flags: 0,
            epoch: 0,
            shard: 0,
            seq: 0,
            time: 0,
            session: SessionId(0),
            request: 0,
            reply_addr: [0; 16],
            reply_port: 0,
            key_len: 0,
            value_len: 0,
            token: 0,
        }
    }

    /// Where the reply goes; `None` for an address that is not IPv4-mapped.
    pub fn reply_to(&self) -> Option<Endpoint> {
        let addr = std::net::Ipv6Addr::from(self.reply_addr).to_ipv4_mapped()?;
        Some(Endpoint { addr, port: self.reply_port })
    }

    /// Sets where the reply goes.
    pub fn set_reply_to(&mut self, to: Endpoint) {
        self.reply_addr = to.addr.to_ipv6_mapped().octets();
        self.reply_port = to.port;
    }

    /// Bytes of the whole datagram.
    pub fn datagram_len(&self) -> usize {
        HEADER_LEN + usize::from(self.key_len) + self.value_len as usize
    }

    /// Writes the header to the front of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`HEADER_LEN`].
    pub fn emit(&self, out: &mut [u8]) {
        let out: &mut [u8; HEADER_LEN] = (&mut out[..HEADER_LEN]).try_into().expect("sliced to length");
        out[0..2].copy_from_slice(&(abi::UP_MAGIC as u16).to_be_bytes());
        out[2] = abi::UP_VERSION as u8;
        out[3] = self.op.to_wire();
        out[4] = self.kind;
        out[5] = self.status;
        out[6] = self.cnt;
        out[7] = self.flags;
        out[8..12].copy_from_slice(&self.epoch.to_be_bytes());
        out[12..16].copy_from_slice(&self.shard.to_be_bytes());
        out[16..24].copy_from_slice(&self.seq.to_be_bytes());
        out[24..32].copy_from_slice(&self.time.to_be_bytes());
        out[32..40].copy_from_slice(&self.session.0.to_be_bytes());
        out[40..48].copy_from_slice(&self.request.to_be_bytes());
        out[48..64].copy_from_slice(&self.reply_addr);
        out[64..66].copy_from_slice(&self.reply_port.to_be_bytes());
        out[66..68].copy_from_slice(&self.key_len.to_be_bytes());
        out[68..72].copy_from_slice(&self.value_len.to_be_bytes());
        out[72..80].copy_from_slice(&self.token.to_be_bytes());
    }

    /// The whole datagram. Lengths are taken from `key` and `value`.
    pub fn datagram(mut self, key: &[u8], value: &[u8]) -> Vec<u8> {
        self.key_len = key.len() as u16;
        self.value_len = value.len() as u32;
        let mut out = vec![0; self.datagram_len()];
        self.emit(&mut out);
        out[HEADER_LEN..HEADER_LEN + key.len()].copy_from_slice(key);
        out[HEADER_LEN + key.len()..].copy_from_slice(value);
        out
    }
}

/// A parsed datagram: header, key and value, borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Header.
    pub header: Header,
    /// Key.
    pub key: &'a [u8],
    /// Value.
    pub value: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses a UDP payload. The order of the checks is that of the kernel program.
    pub fn parse(datagram: &'a [u8]) -> Result<Self, WireError> {
        let (h, rest) = datagram.split_first_chunk::<HEADER_LEN>().ok_or(WireError::Truncated)?;
        let u16_at = |at: usize| u16::from_be_bytes([h[at], h[at + 1]]);
        let u32_at = |at: usize| u32::from_be_bytes(h[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_be_bytes(h[at..at + 8].try_into().expect("8 bytes"));
        if u32::from(u16_at(0)) != abi::UP_MAGIC {
            return Err(WireError::Magic);
        }
        if u32::from(h[2]) != abi::UP_VERSION {
            return Err(WireError::Version(h[2]));
        }
        let op = Op::from_wire(h[3]).ok_or(WireError::Op(h[3]))?;
        let header = Header {
            op,
            kind: h[4],
            status: h[5],
            cnt: h[6],
            flags: h[7],
            epoch: u32_at(8),
            shard: u32_at(12),
            seq: u64_at(16),
            time: u64_at(24),
            session: SessionId(u64_at(32)),
            request: u64_at(40),
            reply_addr: h[48..64].try_into().expect("16 bytes"),
            reply_port: u16_at(64),
            key_len: u16_at(66),
            value_len: u32_at(68),
            token: u64_at(72),
        };
        if u64::from(header.key_len) + u64::from(header.value_len) != rest.len() as u64 {
            return Err(WireError::Truncated);
        }
        let (key, value) = rest.split_at(usize::from(header.key_len));
        Ok(Self { header, key, value })
    }
}

/// The parts of a write's value: `[lifetime 8 if FLAG_TTL] [expected cas 8 if CAS] [delta 8 if INCR] data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand<'a> {
    /// Lifetime in milliseconds from the packet's time; `None`: not given; 0: for ever.
    pub ttl_ms: Option<u64>,
    /// CAS: the item's cas that the client saw.
    pub expected: u64,
    /// INCR: what to add.
    pub delta: i64,
    /// The data proper.
    pub data: &'a [u8],
}

impl<'a> Operand<'a> {
    /// Bytes in front of the data.
    pub fn prefix_len(kind: Kind, flags: u8) -> usize {
        8 * (usize::from(flags & FLAG_TTL != 0) + usize::from(matches!(kind, Kind::Cas | Kind::Incr)))
    }

    /// Splits a value; `None` when it is shorter than its kind and flags need.
    pub fn parse(kind: Kind, flags: u8, value: &'a [u8]) -> Option<Self> {
        let mut rest = value;
        let mut take = || -> Option<[u8; 8]> {
            let (head, tail) = rest.split_first_chunk::<8>()?;
            rest = tail;
            Some(*head)
        };
        let ttl_ms = if flags & FLAG_TTL != 0 { Some(u64::from_be_bytes(take()?)) } else { None };
        let expected = if kind == Kind::Cas { u64::from_be_bytes(take()?) } else { 0 };
        let delta = if kind == Kind::Incr { i64::from_be_bytes(take()?) } else { 0 };
        Some(Self { ttl_ms, expected, delta, data: rest })
    }

    /// Appends the value that [`Operand::parse`] splits, and returns the flags to send with it.
    pub fn emit(&self, kind: Kind, out: &mut Vec<u8>) -> u8 {
        if let Some(ttl_ms) = self.ttl_ms {
            out.extend_from_slice(&ttl_ms.to_be_bytes());
        }
        if kind == Kind::Cas {
            out.extend_from_slice(&self.expected.to_be_bytes());
        }
        if kind == Kind::Incr {
            out.extend_from_slice(&self.delta.to_be_bytes());
        }
        out.extend_from_slice(self.data);
        if self.ttl_ms.is_some() { FLAG_TTL } else { 0 }
    }
}
