/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the cache's kernel programs and its agent in user space share: directory, slots, streams, settings, counters.
 *
 * This is the only definition. crates/abi/src/cache.rs is generated from it (`./dev fix`). Host byte order unless a
 * __be type says otherwise. Every structure is free of hidden padding: the generator refuses any.
 */
#ifndef UNDERPASS_CACHE_H
#define UNDERPASS_CACHE_H

#include <linux/types.h>

#define UC_KEY_MAX 250
#define UC_KEY_ROOM 256

/*
 * A coherence word: how many reads of its keys memcached has in hand, how many other commands, and a generation. What was
 * asked of memcached while no other command was in hand is what the key holds for as long as the word is the same, without
 * reads.
 */
#define UC_READ 1ULL
#define UC_WRITE (1ULL << 16)
#define UC_GENERATION (1ULL << 32)
#define UC_READS 0xffffULL
#define UC_WRITES 0xffff0000ULL
#define UC_FLIGHT (UC_READS | UC_WRITES)
/* No more than so many of each are counted. */
#define UC_FLIGHT_MAX 0x7fff

/* --- The stream of commands of one connection, as memcached reads it --- */

enum uc_mode {
	UC_MODE_START = 0, /* nothing read: the first byte tells the protocol */
	UC_MODE_TEXT = 1,
	UC_MODE_BINARY = 2,
	UC_MODE_LOST = 3, /* not followed any more */
};

enum uc_event {
	UC_EVENT_NONE = 0,
	UC_EVENT_READ = 1, /* a command that looks at the key in key */
	UC_EVENT_WRITE = 2, /* a command that may change it, or its lifetime */
	UC_EVENT_OTHER = 3, /* a command without a key, or one that memcached refuses */
	UC_EVENT_FORGET = 4, /* a command that may change any key */
	UC_EVENT_FLUSH = 5, /* flush_all, in number seconds or at that time */
	UC_EVENT_LOST = 6, /* from here on the stream cannot be followed */
	UC_EVENT_END = 7,
};

/* How far a number has been read, the way of strtol(): blanks, a sign, digits, a blank that ends it. */
enum uc_phase {
	UC_PHASE_LEADING = 0,
	UC_PHASE_PLUS = 1,
	UC_PHASE_MINUS = 2,
	UC_PHASE_DIGITS = 3,
	UC_PHASE_NEGATIVE = 4,
	UC_PHASE_DONE = 5,
	UC_PHASE_DONE_NEGATIVE = 6,
};

enum uc_command {
	UC_COMMAND_NONE = 0,
	UC_COMMAND_GET = 1, /* get, gets, bget */
	UC_COMMAND_GAT = 2, /* gat, gats */
	UC_COMMAND_STORE = 3, /* set, add, replace, append, prepend */
	UC_COMMAND_CAS = 4,
	UC_COMMAND_KEYED = 5, /* delete, incr, decr, touch */
	UC_COMMAND_MG = 6,
	UC_COMMAND_MS = 7,
	UC_COMMAND_MD = 8, /* md, ma */
	UC_COMMAND_ME = 9,
	UC_COMMAND_FLUSH = 10,
	UC_COMMAND_QUIET = 11, /* leaves items alone */
	UC_COMMAND_GLOBAL = 12, /* may make memcached evict, or shows what it holds */
	UC_COMMAND_UNKNOWN = 13,
};

#define UC_STREAM_IN_TOKEN 1
#define UC_STREAM_CR 2 /* a carriage return was read that may belong to the line's end */
#define UC_STREAM_NUL 4 /* memcached reads the line no further than this */
#define UC_STREAM_BAD 8 /* memcached takes a number for none */
#define UC_STREAM_WRITES 16 /* a meta flag that changes the item */
#define UC_STREAM_BASE64 32
#define UC_STREAM_STALE 64 /* a meta flag that marks items stale was seen; stays */
#define UC_STREAM_LONG 128 /* memcached may have read on before it obeyed; stays */

/* The longest line that memcached reads without growing its buffer. */
#define UC_LINE_PLAIN 2048
#define UC_BINARY_HEADER 24

struct uc_stream {
	__u64 skip; /* bytes to pass over: a value */
	__u64 number; /* of the token that is being read; of a storage command: the value's length */
	__u32 line; /* bytes of the command read so far, without its value; 0: between commands */
	__u16 key_len; /* UC_KEY_MAX + 1: too long for memcached */
	__u8 mode; /* enum uc_mode */
	__u8 command; /* enum uc_command */
	__u8 tokens; /* completed, of the line */
	__u8 flags; /* UC_STREAM_* */
	__u8 phase; /* of number: enum uc_phase */
	__u8 word_len; /* of word; sizeof(word) + 1: longer */
	__u8 opcode; /* binary */
	__u8 extras_len;
	__u16 body_key_len;
	__u32 body_len; /* text: the value's length */
	__u32 reserved;
	__u8 word[16]; /* the command's word, or the extras' first bytes */
	__u8 key[UC_KEY_ROOM];
};

/* --- The directory and the slots --- */

/*
 * A set: one cache line. Its words cover every key that hashes to it, cached or not. The kernel changes words, the agent
 * ways. A way is tag << 32 | place, 0: free.
 */
#define UC_SET_WORDS 4
#define UC_WAYS 4

struct uc_set {
	__u64 word[UC_SET_WORDS];
	__u64 way[UC_WAYS];
};

/* A place is page << UC_UNIT_BITS | unit. Page 0 is not used: no place is 0. */
#define UC_UNIT 64
#define UC_UNIT_BITS 10
#define UC_PAGE (UC_UNIT << UC_UNIT_BITS)
/* memcached cuts longer answers into several datagrams. */
#define UC_ANSWER_MAX 1392
#define UC_SLOT_HEAD 64
#define UC_HEAD_MAX 288
/* No slot begins closer to its page's end. */
#define UC_SLOT_MAX (UC_SLOT_HEAD + UC_HEAD_MAX + UC_ANSWER_MAX)

/*
 * An item as it is answered: "VALUE key flags length", then in cas what `gets` puts there, then line break, value, line
 * break. Never changed while the directory shows it: the agent frees it only after every program run has ended.
 */
struct uc_slot {
	__u64 word; /* what the key's has to be: as when memcached was asked, or as when the set that stored this is over */
	__u64 global;
	__u64 deadline_ms;
	__u32 used; /* by a hit since the agent looked; an item that memcached was asked for begins as such */
	__u16 key_len;
	__u16 head_len;
	__u16 tail_len;
	__u16 head_sum; /* Internet checksums, not inverted */
	__u16 cas_sum;
	__u16 tail_sum;
	__u8 cas_len; /* 0: not known, `gets` is passed on */
	__u8 cas[23];
};

/* What all keys have in common. The kernel changes global, the agent the rest. */
struct uc_control {
	__u64 global; /* a word: changed by what may have been about any key */
	__u64 serve_until_ms; /* CLOCK_MONOTONIC: of a flush that is to come; 0: nothing is served */
	__u32 tgid; /* memcached's, in the first PID namespace */
	__u32 stale; /* set by the kernel: a client marks items stale */
	/* The agent's own connection, as memcached sees it: both ends, for one end may be a client's, too. */
	__be32 agent_addr;
	__be32 memcached_addr;
	__be16 agent_port; /* 0: none */
	__u16 memcached_port;
	__u32 late; /* set by the kernel: a datagram was sent and nobody had looked at it before */
	/* How often a connection let go of the global word, after what may have asked for a flush that is to come. */
	__u32 let_go;
	__u32 looked; /* let_go when the agent last looked for such a flush: while they differ nothing is served */
};

#define UC_ADDRESSES 16
#define UC_REQUEST_MAX 512
#define UC_TICK_SHIFT 24
/* Buckets that sources share out, and how many milliseconds' worth of its limit a source has at once. */
#define UC_SOURCES_BITS 16
#define UC_SOURCES (1 << UC_SOURCES_BITS)
#define UC_BURST_MS 100

struct uc_prefix {
	__be32 addr;
	__be32 mask;
};

/* Constant for the life of the maps; in .rodata. */
struct uc_settings {
	__u32 set_mask; /* sets less one: a power of two less one */
	__u32 address_count;
	__u32 prefix_count;
	__be16 port;
	__u16 reserved;
	__u64 secret[2];
	__u64 tick_origin;
	__u64 tick_origin_ms;
	__u64 tick_length; /* milliseconds of a tick, times 2^UC_TICK_SHIFT */
	__u64 limit; /* bytes a millisecond to a source, in answers longer than their requests; 0: none */
	__be32 addresses[UC_ADDRESSES]; /* of this host, that memcached listens on */
	struct uc_prefix prefixes[UC_ADDRESSES]; /* whom answers longer than the request are sent to */
};

/* --- Connections --- */

#define UC_PENDING_MAX 512
#define UC_SCRATCH 512

#define UC_CONN_READ 1 /* the one pending key is a read's: its reply tells what it saw */
#define UC_CONN_GLOBAL 2 /* holds the global word */
#define UC_CONN_FULL 4 /* the last read filled memcached's buffer */
#define UC_CONN_AGENT 8
#define UC_CONN_KNOWN 16
/* Not followed, but the last read ended with a line, whose reply would tell where the stream is; and it was alone. */
#define UC_CONN_LINE 32
#define UC_CONN_ALONE 64
/* Of datagrams: what is sent is looked at before it leaves, so a read that is alone is not in flight; and it was. */
#define UC_CONN_EARLY 128
#define UC_CONN_HEEDED 256
/* The agent has the value of the set that is the one command in hand: the reply tells whether it was stored. */
#define UC_CONN_STORING 512

/* A connection of memcached's, or what one of its threads has of a UDP socket. */
struct uc_conn {
	struct uc_stream stream;
	__u32 copied; /* TCP: the sequence number up to which the stream was read */
	__u16 pending;
	__u16 complete; /* of those, of commands that memcached has all of */
	__u16 commands; /* that the last read completed */
	__u16 flags; /* UC_CONN_* */
	__u32 reserved;
	__u32 words[UC_PENDING_MAX]; /* set << 2 | word: in flight */
	__u8 scratch[UC_SCRATCH];
};

/* Which thread of memcached's, and by which UDP socket. It never closes one. */
struct uc_datagrams {
	__u32 thread;
	__u32 fd;
};

enum uc_notice {
	UC_NOTICE_MISS = 0,
	UC_NOTICE_FLUSH = 1, /* the global word is held until the agent lets go */
	/* It was let go: nothing is served until the agent has looked for flushes that are to come. */
	UC_NOTICE_LET_GO = 2,
};

struct uc_report {
	__u64 hash; /* of a notice: when it was made, CLOCK_MONOTONIC in milliseconds */
	__u64 number; /* of a miss: whether `gets` was asked for; of a flush: the command's */
	__u32 notice; /* enum uc_notice */
	__u32 key_len;
	__u8 key[UC_KEY_ROOM];
};

/*
 * What a set is to store, given to the agent when memcached has read it: it counts once memcached has obeyed, if it says that it was
 * stored; until then, and if any other command comes, the word is another.
 */
struct uc_stored {
	__u64 word; /* when memcached has obeyed */
	__u64 global;
	__u64 at_ms; /* CLOCK_MONOTONIC */
	__u32 flags;
	__u32 seconds; /* of life, or the time at which it ends, as memcached tells them apart; 0: no end */
	__u32 key_len;
	__u32 len;
	__u8 key[UC_KEY_ROOM];
	__u8 value[UC_ANSWER_MAX];
};

enum uc_count {
	UC_COUNT_HIT = 0, /* requests answered */
	UC_COUNT_MISS = 1, /* requests passed on for a key that is not there, or not valid */
	UC_COUNT_MISS_ABSENT = 2,
	UC_COUNT_MISS_CHANGED = 3, /* a command came since */
	UC_COUNT_MISS_FLIGHT = 4, /* one is in flight */
	UC_COUNT_MISS_EXPIRED = 5,
	UC_COUNT_PASS_REQUEST = 6, /* to memcached's port, but no plain get */
	UC_COUNT_PASS_UNTRUSTED = 7,
	UC_COUNT_PASS_ROOM = 8, /* the answer is longer than a datagram, or the driver has no room */
	UC_COUNT_PASS_BLIND = 9, /* nothing was served just then */
	UC_COUNT_REPORT = 10,
	UC_COUNT_REPORT_LOST = 11,
	UC_COUNT_READ = 12, /* commands seen on their way to memcached */
	UC_COUNT_WRITE = 13,
	UC_COUNT_OTHER = 14,
	UC_COUNT_FORGET = 15,
	UC_COUNT_FLUSH = 16,
	UC_COUNT_LOST = 17,
	UC_COUNT_READ_HIT = 18, /* reads seen to have hit, which change nothing */
	UC_COUNT_READ_MISSED = 19,
	UC_COUNT_OVERFLOW = 20, /* more keys in flight than a connection has room for */
	UC_COUNT_GAP = 21, /* bytes that memcached read and no program saw */
	UC_COUNT_UNREADABLE = 22,
	UC_COUNT_NOT_FOLLOWED = 23, /* reads of connections that are not followed */
	UC_COUNT_FOLLOWED = 24, /* connections that are followed again */
	UC_COUNT_BYTES = 25, /* parsed */
	UC_COUNT_PASS_LIMIT = 26, /* the source has had its share for now */
	UC_COUNT_LATE = 27, /* datagrams sent that nobody had looked at before */
	UC_COUNT_END = 28,
};

struct uc_counters {
	__u64 count[UC_COUNT_END];
};

#endif /* UNDERPASS_CACHE_H */
