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
 * A coherence word: how many commands that name its keys are in memcached's hands, and how many ever were. What was asked
 * of memcached while the word was W, with none in flight, is the key's value for as long as the word is W.
 */
#define UC_FLIGHT_BITS 24
#define UC_FLIGHT_MASK ((1ULL << UC_FLIGHT_BITS) - 1)
#define UC_GENERATION (1ULL << UC_FLIGHT_BITS)

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

#endif /* UNDERPASS_CACHE_H */
