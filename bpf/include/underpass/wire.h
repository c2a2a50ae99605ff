/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The Underpass packet: one UDP datagram, a fixed header in network byte order, then the key, then the value.
 *
 * This is the only definition. crates/abi/src/wire.rs is generated from it (`./dev fix`).
 * docs/protocol.md, section 2, is the prose.
 */
#ifndef UNDERPASS_WIRE_H
#define UNDERPASS_WIRE_H

#include <linux/types.h>

#define UP_MAGIC 0x5550
#define UP_VERSION 1

/* UDP port of coordinators and replicas unless configured otherwise. */
#define UP_PORT_DEFAULT 5550

#define UP_HEADER_LEN 80
#define UP_KEY_MAX 250
/* Key and value together: a 1500-byte IPv4 packet less IP, UDP and our header. */
#define UP_PAYLOAD_MAX 1392
#define UP_MEMBERS_MAX 8

/* A session is (generation << UP_SESSION_INDEX_BITS) | index. Generation 0 is never issued. */
#define UP_SESSION_INDEX_BITS 16

/* A new epoch sets clock = max(clock, epoch << UP_EPOCH_SHIFT). */
#define UP_EPOCH_SHIFT 40
/* Epochs stay below this, so that a sequence number fits in 63 bits. */
#define UP_EPOCH_MAX ((1 << 23) - 1)

enum up_op {
	UP_OP_READ = 0,
	UP_OP_R_REPLY = 1,
	UP_OP_WRITE = 2,
	UP_OP_W_REPLY = 3,
	UP_OP_R_REJECT = 4,
	UP_OP_W_REJECT = 5,
	/* From here on control: never handled by a data path in the kernel. The value is a JSON document, or binary where
	 * crates/protocol/src/transfer.rs says so. */
	UP_OP_CONTROL = 16,
	UP_OP_OPEN = 16,
	UP_OP_OPENED = 17,
	UP_OP_CLOSE = 18,
	UP_OP_CLOSED = 19,
	UP_OP_INSTALL = 20,
	UP_OP_INSTALLED = 21,
	UP_OP_HEARTBEAT = 22,
	UP_OP_HEARTBEAT_ACK = 23,
	UP_OP_CONTROL_REJECT = 24,
	UP_OP_COLLECT = 25, /* agent to replica: what do you hold that may not be everywhere? */
	UP_OP_COLLECTED = 26,
	UP_OP_PULL = 27, /* agent to replica: fetch this key's chain from another replica */
	UP_OP_FETCH = 28, /* to a replica: a key's chain, a page of chains, or a page of session records */
	UP_OP_FETCHED = 29,
	UP_OP_QUERY = 30, /* agent to replica: did you process this write? If not, ignore it until told */
	UP_OP_ANSWER = 31,
	UP_OP_ABORT = 32, /* agent to replica: record it as without effect; answered by ANSWER */
	UP_OP_LOCATE = 33, /* client to anybody: who coordinates this shard? */
	UP_OP_LOCATED = 34,
	UP_OP_END = 35,
};

enum up_kind {
	UP_KIND_PUT = 0,
	/* Conditional from here on: exclusive on their key while pending. */
	UP_KIND_DELETE = 1,
	UP_KIND_ADD = 2,
	UP_KIND_REPLACE = 3,
	UP_KIND_CAS = 4,
	UP_KIND_INCR = 5,
	UP_KIND_APPEND = 6,
	UP_KIND_PREPEND = 7,
	UP_KIND_TOUCH = 8,
	UP_KIND_END = 9,
};

/* Header flags. */
/* A write whose value begins with 8 bytes, its lifetime in milliseconds from the packet's time; 0 is for ever. */
#define UP_FLAG_TTL 0x01

/* Status of an R_REPLY or W_REPLY. */
enum up_status {
	UP_STATUS_OK = 0,
	UP_STATUS_NOT_FOUND = 1,
	UP_STATUS_EXISTS = 2,
	UP_STATUS_NOT_STORED = 3,
	UP_STATUS_NOT_A_NUMBER = 4,
	UP_STATUS_OVERFLOW = 5,
	UP_STATUS_TOO_LARGE = 6,
	/* The write was made void by a repair: it has and will have no effect. */
	UP_STATUS_ABORTED = 7,
};

/* Status of an R_REJECT, W_REJECT or CONTROL_REJECT: the reason. */
enum up_reason {
	UP_REASON_NONE = 0,
	/* Packet and receiver are of different configurations; the receiver's epoch is in the header. */
	UP_REASON_EPOCH = 1,
	UP_REASON_LEASE = 2,
	UP_REASON_SESSION = 3,
	UP_REASON_TOKEN = 4,
	UP_REASON_SHARD = 5,
	/* The session has another write outstanding. */
	UP_REASON_SESSION_BUSY = 6,
	/* A conditional write and another write meet on one key: send again, with jitter. */
	UP_REASON_KEY_BUSY = 7,
	UP_REASON_DIRTY_FULL = 8,
	UP_REASON_ABORTED = 9,
	UP_REASON_KEY_LENGTH = 10,
	UP_REASON_VALUE_LENGTH = 11,
	UP_REASON_KIND = 12,
	/* A replica is near its memory budget: writes that may grow the store are refused before they are ordered. */
	UP_REASON_STORE_FULL = 13,
	/* The replica no longer holds the version that the bound asks for. */
	UP_REASON_VERSION_GONE = 14,
	UP_REASON_NO_SESSION = 15,
	/* The shard has no member to send to. */
	UP_REASON_NO_MEMBER = 16,
	/* A control request whose document does not parse or contradicts itself. */
	UP_REASON_MALFORMED = 17,
	UP_REASON_NOT_COORDINATOR = 18,
	UP_REASON_END = 19,
};

struct up_header {
	__be16 magic;
	__u8 version;
	__u8 op; /* enum up_op */
	__u8 kind; /* enum up_kind; 0 on reads */
	__u8 status; /* enum up_status in replies, enum up_reason in rejects, 0 in requests */
	__u8 cnt; /* WRITE: member index the clone is for; replies: index of the replica that replies */
	__u8 flags;
	__be32 epoch;
	__be32 shard;
	__be64 seq; /* WRITE: its sequence number; READ: the bound; R_REPLY: the item's cas */
	__be64 time; /* milliseconds since 1970 by the coordinator's clock; never goes back */
	__be64 session;
	__be64 request;
	__u8 reply_addr[16]; /* IPv4 as ::ffff:a.b.c.d */
	__be16 reply_port;
	__be16 key_len;
	__be32 value_len;
	__be64 token;
};

_Static_assert(sizeof(struct up_header) == UP_HEADER_LEN, "header size");
_Static_assert(__builtin_offsetof(struct up_header, seq) == 16, "header layout");
_Static_assert(__builtin_offsetof(struct up_header, reply_addr) == 48, "header layout");
_Static_assert(__builtin_offsetof(struct up_header, token) == 72, "header layout");

#endif /* UNDERPASS_WIRE_H */
