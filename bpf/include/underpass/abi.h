/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the kernel programs of the coordinator and its agent in user space share: map values, settings, counters.
 *
 * This is the only definition. crates/abi/src/abi.rs is generated from it (`./dev fix`). Host byte order unless a
 * __be type says otherwise. Every structure is free of hidden padding: the generator refuses any.
 */
#ifndef UNDERPASS_ABI_H
#define UNDERPASS_ABI_H

#include <linux/types.h>
#include "wire.h"

/* The verifier knows a lock by its type; user space only needs its place. */
#ifdef __bpf__
#include <linux/bpf.h>
#define UP_LOCK struct bpf_spin_lock
#else
#define UP_LOCK __u32
#endif

/* Changes whenever a map value changes shape: an agent takes over pinned maps of its own version only. */
#define UP_ABI_VERSION 2

/* A shard lives in slot (id % UP_SHARD_SLOTS); one coordinator serves shards of distinct slots. */
#define UP_SHARD_SLOTS 8
#define UP_WAYS 4
/* 32-bit words of the bucket hash's key: one for each 4 bytes of a key of UP_KEY_MAX bytes, rounded up to 8. */
#define UP_BUCKET_KEY_WORDS 64

struct up_member {
	__be32 addr;
	__be16 port;
	__u8 next_hop[6]; /* MAC address; all zero: unresolved, packets for it are dropped and counted */
	__u32 reserved;
};

/* One configuration of a shard. Written by the agent while inactive, then made active by one store. */
struct up_config {
	__u32 shard;
	__u32 epoch; /* 0: no shard in this slot */
	__u64 floor; /* the clock when these tables began to serve */
	__u64 lease_until_ms; /* CLOCK_MONOTONIC; at or after it reads and writes are rejected. Raised in place */
	__s64 time_offset_ms; /* from CLOCK_MONOTONIC to the packets' time */
	__u8 must_ack; /* bitmap of member indices whose acknowledgement a write needs */
	__u8 serving; /* bitmap of member indices that reads go to */
	__u8 must_ack_count;
	__u8 serving_count;
	__u8 store_full; /* refuse writes that may grow the store */
	__u8 refuse_writes; /* enum up_reason: refuse every new write for it; those under way are still sent again */
	__u8 reserved[2];
	__u8 must_ack_list[UP_MEMBERS_MAX]; /* the indices in must_ack, ascending */
	__u8 serving_list[UP_MEMBERS_MAX];
	struct up_member members[UP_MEMBERS_MAX];
};

struct up_shard {
	__u64 clock; /* the sequence number issued last */
	__u64 reserved[7]; /* the clock has its cache line to itself */
	__u32 active; /* index into config */
	__u32 reserved2;
	struct up_config config[2];
};

enum up_state {
	UP_STATE_IDLE = 0,
	UP_STATE_STARTING = 1,
	UP_STATE_PENDING = 2,
	UP_STATE_COMMITTING = 3,
	UP_STATE_COMMITTED = 4,
	UP_STATE_ABORTED = 5,
};

/* A session's record: who may send, and the one write it may have outstanding. */
struct up_session {
	UP_LOCK lock;
	__u8 state; /* enum up_state */
	__u8 kind;
	__u8 status;
	__u8 acks; /* bitmap of member indices */
	__u64 session; /* index and generation; 0: nobody's */
	__u64 token;
	__u8 reply_addr[16];
	__be16 reply_port;
	__u8 reply_mac[6]; /* next hop to the client, learned from its latest request */
	__u64 used_ms; /* CLOCK_MONOTONIC when last used, to within a second */
	__u64 request;
	__u64 seq; /* starting: the clock when it started; then the write's sequence number */
	__u64 time; /* the write's time stamp */
	__u64 result;
	__u64 fingerprint[2]; /* of the write's key; all zero: not known, of a record that came from a replica */
	__u32 shard;
	__u32 bucket;
	__u64 sealed; /* not 0: rebuilt by a take-over. What it took is answered; anything newer is aborted */
	__u64 reserved;
};

enum up_exclusive {
	UP_EXCLUSIVE_NOT = 0,
	UP_EXCLUSIVE_OPEN = 1, /* a conditional write is ordered and not stamped yet */
	UP_EXCLUSIVE_FIXED = 2, /* and stamped */
};

/* A dirty key. Free when last is 0. */
struct up_way {
	__u64 fingerprint[2];
	__u64 first;
	__u64 last;
	__u64 committed;
	__u32 exclusive; /* enum up_exclusive */
	/* Exclusive: low half of a packet time. While open the latest that a read of the key was stamped with; once fixed the
	 * write's, and reads are stamped no later. */
	__u32 time_low;
};

/*
 * A bucket of the dirty set. Its highest ordered seq and whether any way is taken live in one 64-bit word of a map of
 * their own (UP_BUCKET_WORD): a reader of a clean bucket takes both in one load and touches 8 bytes, not 200.
 */
struct up_bucket {
	UP_LOCK lock;
	__u32 reserved;
	struct up_way ways[UP_WAYS];
};

#define UP_TICK_SHIFT 24

#define UP_BUCKET_DIRTY 1ULL
#define UP_BUCKET_LAST_SHIFT 1

enum up_write_path {
	UP_WRITE_PATH_BROADCAST = 0, /* cloned inside XDP */
	UP_WRITE_PATH_TC = 1, /* cloned at TC ingress */
	UP_WRITE_PATH_PUBLISHED = 2, /* forwarded by user space, cloned at TC egress: the published design */
};

/* Constant for the life of the maps; in .rodata. */
struct up_settings {
	__u32 abi_version;
	__u32 write_path; /* enum up_write_path */
	__be32 addr; /* the coordinator's own address */
	__be16 port;
	__u16 reserved;
	__u32 bucket_mask; /* buckets for each shard slot, less one: a power of two less one */
	__u32 session_mask; /* sessions, less one: a power of two less one */
	/* The kernel's tick as a clock, see bpf/lib/clock.h: at this tick CLOCK_MONOTONIC was so many milliseconds. */
	__u64 tick_origin;
	__u64 tick_origin_ms;
	__u64 tick_length; /* milliseconds of a tick, times 2^UP_TICK_SHIFT */
	__u64 fingerprint_key[2];
	__u32 bucket_key[UP_BUCKET_KEY_WORDS];
};

/* Counters, by what became of a packet. Rejects are counted at UP_COUNT_REJECT + reason. */
enum up_count {
	UP_COUNT_READ = 0, /* reads forwarded */
	UP_COUNT_READ_DIRTY, /* of these, reads of a dirty key */
	UP_COUNT_WRITE, /* writes ordered */
	UP_COUNT_WRITE_AGAIN, /* retransmissions propagated again */
	UP_COUNT_WRITE_ANSWERED, /* retransmissions answered from the record */
	UP_COUNT_CLONE, /* write clones addressed to a replica */
	UP_COUNT_ACK, /* acknowledgements recorded that did not decide */
	UP_COUNT_COMMIT, /* acknowledgements that decided; the reply went to the client */
	UP_COUNT_PASS_FOREIGN, /* not for our address and port, or not IPv4 UDP */
	UP_COUNT_PASS_CONTROL,
	UP_COUNT_DROP_TRUNCATED, /* lengths that disagree */
	UP_COUNT_DROP_FRAGMENT,
	UP_COUNT_DROP_MAGIC,
	UP_COUNT_DROP_VERSION,
	UP_COUNT_DROP_OP,
	UP_COUNT_DROP_OLD, /* a request lower than the session's latest */
	UP_COUNT_DROP_STARTING, /* a duplicate of a write being ordered or committed at this moment */
	UP_COUNT_DROP_ACK_MEMBER, /* W_REPLY not from a member's address */
	UP_COUNT_DROP_ACK_EPOCH,
	UP_COUNT_DROP_ACK_STALE, /* W_REPLY to a write that is no longer pending */
	UP_COUNT_DROP_ACK_ABORTED,
	UP_COUNT_DROP_NEXT_HOP, /* the replica's link-layer address is not known */
	UP_COUNT_DROP_CLONE, /* a clone that egress could not address */
	UP_COUNT_DROP_INTERNAL, /* a map look-up that cannot fail did */
	UP_COUNT_REJECT,
	UP_COUNT_END = UP_COUNT_REJECT + UP_REASON_END,
};

struct up_counters {
	__u64 count[UP_COUNT_END];
};

/* Commands of the agent to the session table, run through BPF_PROG_TEST_RUN so that they take the locks. */
enum up_session_op {
	UP_SESSION_OP_LOAD = 1, /* a whole record, into an index that nobody's session has */
	UP_SESSION_OP_CLOSE = 2, /* unless its write is unresolved */
	UP_SESSION_OP_CLEAR = 3, /* whatever its write is: no CPU serves its shard any more */
	UP_SESSION_OP_FORGET = 4, /* acknowledgements */
	UP_SESSION_OP_SETTLE = 5, /* ends a pending write as a W_REPLY that decides would, but tells no client */
};

enum up_session_result {
	UP_SESSION_DONE = 0,
	UP_SESSION_BAD_INDEX = 1,
	UP_SESSION_NOT_YOURS = 2, /* the record holds another session; LOAD: any. SETTLE: or it is not pending so */
	UP_SESSION_UNRESOLVED = 3, /* its write is starting, pending or committing */
};

struct up_session_command {
	__u32 op; /* enum up_session_op */
	__u32 result; /* enum up_session_result */
	__u64 session;
	__u64 used_before_ms; /* CLOSE: only if not used since; ~0 for any */
	__u64 request; /* SETTLE: of the write. CLOSE: the session's last, out */
	__u64 seq; /* SETTLE: of the write */
	__u64 number; /* SETTLE: the result of an INCR */
	__u32 state; /* SETTLE: committed or aborted. CLOSE: of the session's last write, out */
	__u8 status; /* SETTLE: of the write */
	__u8 acks; /* FORGET: bitmap of member indices */
	__u8 reserved[2];
	struct up_session record; /* LOAD: the record. CLOSE and CLEAR: all zero */
};

#endif /* UNDERPASS_ABI_H */
