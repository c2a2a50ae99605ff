/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What memcached makes of the bytes of one connection. A refinement of crates/cache/src/stream.rs, function by function,
 * which says why; crates/cache/tests/refinement_stream.rs holds the two together.
 */
#ifndef UNDERPASS_LIB_STREAM_H
#define UNDERPASS_LIB_STREAM_H

#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <underpass/cache.h>

#define UC_MAGIC 0x80
#define UC_META_TOKENS 20
#define UC_TOKENS_MAX 200

enum uc_role {
	UC_ROLE_NONE,
	UC_ROLE_KEY,
	UC_ROLE_NUMBER,
	UC_ROLE_FLAG,
};

static __always_inline __u32 stream_lost(struct uc_stream *s)
{
	s->mode = UC_MODE_LOST;
	return UC_EVENT_LOST;
}

static __always_inline void stream_begin(struct uc_stream *s)
{
	s->tokens = 0;
	s->flags &= UC_STREAM_STALE | UC_STREAM_LONG;
	s->command = UC_COMMAND_NONE;
	s->word_len = 0;
	s->key_len = 0;
	s->number = 0;
	s->body_len = 0;
	s->phase = 0;
}

/* --- Text and meta commands --- */

static __always_inline __u32 stream_role(const struct uc_stream *s)
{
	__u32 token = s->tokens;

	switch (s->command) {
	case UC_COMMAND_GET:
		return UC_ROLE_KEY;
	case UC_COMMAND_GAT:
		return token >= 2 ? UC_ROLE_KEY : UC_ROLE_NONE;
	case UC_COMMAND_STORE:
	case UC_COMMAND_CAS:
		if (token == 1)
			return UC_ROLE_KEY;
		return token <= 4 || (token == 5 && s->command == UC_COMMAND_CAS) ? UC_ROLE_NUMBER : UC_ROLE_NONE;
	case UC_COMMAND_KEYED:
		return token == 1 ? UC_ROLE_KEY : UC_ROLE_NONE;
	case UC_COMMAND_FLUSH:
		return token == 1 ? UC_ROLE_NUMBER : UC_ROLE_NONE;
	case UC_COMMAND_MS:
		return token == 1 ? UC_ROLE_KEY : token == 2 ? UC_ROLE_NUMBER : UC_ROLE_FLAG;
	case UC_COMMAND_MG:
	case UC_COMMAND_MD:
	case UC_COMMAND_ME:
		return token == 1 ? UC_ROLE_KEY : UC_ROLE_FLAG;
	default:
		return UC_ROLE_NONE;
	}
}

static __always_inline bool stream_blank(__u8 byte)
{
	return byte >= '\t' && byte <= '\r';
}

static __always_inline bool stream_negative(const struct uc_stream *s)
{
	return s->phase == UC_PHASE_NEGATIVE || s->phase == UC_PHASE_DONE_NEGATIVE;
}

static __always_inline void stream_digit(struct uc_stream *s, __u8 byte)
{
	__u8 digit = byte - '0';

	if (s->phase <= UC_PHASE_NEGATIVE && digit < 10) {
		if (s->number > (~0ULL - digit) / 10)
			s->flags |= UC_STREAM_BAD;
		else
			s->number = s->number * 10 + digit;
		s->phase = s->phase == UC_PHASE_MINUS || s->phase == UC_PHASE_NEGATIVE ? UC_PHASE_NEGATIVE
										       : UC_PHASE_DIGITS;
	} else if (s->phase == UC_PHASE_LEADING && stream_blank(byte)) {
		/* Goes on. */
	} else if (s->phase == UC_PHASE_LEADING && byte == '+') {
		s->phase = UC_PHASE_PLUS;
	} else if (s->phase == UC_PHASE_LEADING && byte == '-') {
		s->phase = UC_PHASE_MINUS;
	} else if (s->phase == UC_PHASE_DIGITS && stream_blank(byte)) {
		s->phase = UC_PHASE_DONE;
	} else if (s->phase == UC_PHASE_NEGATIVE && stream_blank(byte)) {
		s->phase = UC_PHASE_DONE_NEGATIVE;
	} else if (s->phase < UC_PHASE_DONE) {
		s->flags |= UC_STREAM_BAD;
	}
}

static __always_inline __s64 stream_signed(struct uc_stream *s)
{
	bool negative = stream_negative(s);

	if (s->phase < UC_PHASE_DIGITS || s->number > (1ULL << 63) - !negative)
		s->flags |= UC_STREAM_BAD;
	return negative ? -s->number : s->number;
}

static __always_inline void stream_unsigned(struct uc_stream *s)
{
	if (s->phase < UC_PHASE_DIGITS || (stream_negative(s) && (__s64)-s->number < 0))
		s->flags |= UC_STREAM_BAD;
}

static __always_inline void stream_flag(struct uc_stream *s, __u8 byte)
{
	switch (byte) {
	case 'b':
		s->flags |= UC_STREAM_BASE64;
		break;
	case 'I':
		s->flags |= UC_STREAM_STALE | UC_STREAM_WRITES;
		break;
	case 'O':
	case 'P':
	case 'L':
	case 'c':
	case 'f':
	case 'h':
	case 'k':
	case 'l':
	case 'q':
	case 's':
	case 't':
	case 'u':
	case 'v':
		break;
	default:
		s->flags |= UC_STREAM_WRITES;
	}
}

/* Words as little-endian numbers. */
#define UC_W2(a, b) ((__u64)(a) | (__u64)(b) << 8)
#define UC_W4(a, b, c, d) (UC_W2(a, b) | UC_W2(c, d) << 16)
#define UC_W8(a, b, c, d, e, f, g, h) (UC_W4(a, b, c, d) | UC_W4(e, f, g, h) << 32)

static __always_inline __u32 stream_command(const struct uc_stream *s)
{
	__u32 len = s->word_len;
	__u64 low = 0, high = 0;

	if (len > sizeof(s->word))
		return UC_COMMAND_UNKNOWN;
	for (int i = 0; i < 8; i++) {
		if (i < len)
			low |= (__u64)s->word[i] << (8 * i);
		if (i + 8 < len)
			high |= (__u64)s->word[i + 8] << (8 * i);
	}
	if (len == 1)
		return UC_COMMAND_QUIET;
	if (len <= 8) {
		switch (low) {
		case UC_W4('g', 'e', 't', 0):
		case UC_W4('g', 'e', 't', 's'):
		case UC_W4('b', 'g', 'e', 't'):
			return UC_COMMAND_GET;
		case UC_W4('g', 'a', 't', 0):
		case UC_W4('g', 'a', 't', 's'):
			return UC_COMMAND_GAT;
		case UC_W4('s', 'e', 't', 0):
		case UC_W4('a', 'd', 'd', 0):
		case UC_W8('r', 'e', 'p', 'l', 'a', 'c', 'e', 0):
		case UC_W8('a', 'p', 'p', 'e', 'n', 'd', 0, 0):
		case UC_W8('p', 'r', 'e', 'p', 'e', 'n', 'd', 0):
			return UC_COMMAND_STORE;
		case UC_W4('c', 'a', 's', 0):
			return UC_COMMAND_CAS;
		case UC_W8('d', 'e', 'l', 'e', 't', 'e', 0, 0):
		case UC_W4('i', 'n', 'c', 'r'):
		case UC_W4('d', 'e', 'c', 'r'):
		case UC_W8('t', 'o', 'u', 'c', 'h', 0, 0, 0):
			return UC_COMMAND_KEYED;
		case UC_W2('m', 'g'):
			return UC_COMMAND_MG;
		case UC_W2('m', 's'):
			return UC_COMMAND_MS;
		case UC_W2('m', 'd'):
		case UC_W2('m', 'a'):
			return UC_COMMAND_MD;
		case UC_W2('m', 'e'):
			return UC_COMMAND_ME;
		case UC_W2('m', 'n'):
		case UC_W4('q', 'u', 'i', 't'):
		case UC_W8('s', 'h', 'u', 't', 'd', 'o', 'w', 'n'):
		case UC_W8('s', 't', 'a', 't', 's', 0, 0, 0):
		case UC_W8('v', 'e', 'r', 's', 'i', 'o', 'n', 0):
			return UC_COMMAND_QUIET;
		case UC_W8('e', 'x', 't', 's', 't', 'o', 'r', 'e'):
		case UC_W4('l', 'r', 'u', 0):
		case UC_W8('s', 'l', 'a', 'b', 's', 0, 0, 0):
		case UC_W8('w', 'a', 't', 'c', 'h', 0, 0, 0):
			return UC_COMMAND_GLOBAL;
		}
		return UC_COMMAND_UNKNOWN;
	}
	if (low == UC_W8('f', 'l', 'u', 's', 'h', '_', 'a', 'l') && high == 'l')
		return UC_COMMAND_FLUSH;
	if (low == UC_W8('v', 'e', 'r', 'b', 'o', 's', 'i', 't') && high == 'y')
		return UC_COMMAND_QUIET;
	if ((low == UC_W8('c', 'a', 'c', 'h', 'e', '_', 'm', 'e') &&
	     high == UC_W8('m', 'l', 'i', 'm', 'i', 't', 0, 0)) ||
	    (low == UC_W8('l', 'r', 'u', '_', 'c', 'r', 'a', 'w') && high == UC_W4('l', 'e', 'r', 0)) ||
	    (low == UC_W8('r', 'e', 'f', 'r', 'e', 's', 'h', '_') && high == UC_W8('c', 'e', 'r', 't', 's', 0, 0, 0)))
		return UC_COMMAND_GLOBAL;
	return UC_COMMAND_UNKNOWN;
}

static __always_inline __u32 stream_end_of_token(struct uc_stream *s)
{
	__u32 event = UC_EVENT_NONE, token = s->tokens;

	s->flags &= ~UC_STREAM_IN_TOKEN;
	if (token == 0) {
		s->command = stream_command(s);
		s->tokens = 1;
		return UC_EVENT_NONE;
	}
	switch (s->command) {
	case UC_COMMAND_GET:
		event = UC_EVENT_READ;
		break;
	case UC_COMMAND_GAT:
		if (token >= 2)
			event = UC_EVENT_WRITE;
		break;
	case UC_COMMAND_STORE:
	case UC_COMMAND_CAS:
		if (token == 2 || token == 5)
			stream_unsigned(s);
		else if (token == 3)
			stream_signed(s);
		break;
	}
	if (event && s->key_len > UC_KEY_MAX) {
		s->command = UC_COMMAND_QUIET;
		event = UC_EVENT_NONE;
	}
	if (((s->command == UC_COMMAND_STORE || s->command == UC_COMMAND_CAS) && token == 4) ||
	    (s->command == UC_COMMAND_MS && token == 2)) {
		s->body_len = stream_signed(s);
		if (s->body_len > 0x7fffffff - 2)
			s->flags |= UC_STREAM_BAD;
	}
	if (token < UC_TOKENS_MAX)
		s->tokens = token + 1;
	return event;
}

/* A character of a line, its end aside. */
static __always_inline __u32 stream_character(struct uc_stream *s, __u8 byte)
{
	bool first = !(s->flags & UC_STREAM_IN_TOKEN);
	__u32 len;

	if (s->flags & UC_STREAM_NUL)
		return UC_EVENT_NONE;
	if (byte == 0) {
		s->flags |= UC_STREAM_NUL;
		return UC_EVENT_NONE;
	}
	if (byte == ' ')
		return first ? UC_EVENT_NONE : stream_end_of_token(s);
	s->flags |= UC_STREAM_IN_TOKEN;
	if (s->tokens == 0) {
		len = s->word_len;
		if (len < sizeof(s->word))
			s->word[len & (sizeof(s->word) - 1)] = byte;
		if (len <= sizeof(s->word))
			s->word_len = len + 1;
		return UC_EVENT_NONE;
	}
	switch (stream_role(s)) {
	case UC_ROLE_KEY:
		len = first ? 0 : s->key_len;
		if (len < UC_KEY_MAX)
			s->key[len & (UC_KEY_ROOM - 1)] = byte;
		s->key_len = len <= UC_KEY_MAX ? len + 1 : len;
		break;
	case UC_ROLE_NUMBER:
		if (first) {
			s->number = 0;
			s->phase = UC_PHASE_LEADING;
		}
		stream_digit(s, byte);
		break;
	case UC_ROLE_FLAG:
		if (first)
			stream_flag(s, byte);
		break;
	}
	return UC_EVENT_NONE;
}

static __always_inline __u32 stream_end_of_line(struct uc_stream *s)
{
	__u32 last = s->flags & UC_STREAM_IN_TOKEN ? stream_end_of_token(s) : UC_EVENT_NONE;
	__u32 tokens = s->tokens;
	bool too_long = s->key_len > UC_KEY_MAX;
	__s32 delay;

	s->line = 0;
	if (last)
		return last;
	if (tokens == 0)
		return UC_EVENT_OTHER;
	switch (s->command) {
	case UC_COMMAND_STORE:
	case UC_COMMAND_CAS:
	case UC_COMMAND_MS:
		if (s->command == UC_COMMAND_STORE ? tokens != 5 && tokens != 6
		    : s->command == UC_COMMAND_CAS ? tokens != 6 && tokens != 7
						   : tokens < 3 || tokens >= UC_META_TOKENS)
			return UC_EVENT_OTHER;
		if (too_long || s->flags & UC_STREAM_BAD)
			return UC_EVENT_OTHER;
		s->skip = (__u64)s->body_len + 2;
		return s->flags & UC_STREAM_BASE64 ? UC_EVENT_FORGET : UC_EVENT_WRITE;
	case UC_COMMAND_KEYED:
	case UC_COMMAND_MG:
	case UC_COMMAND_MD:
	case UC_COMMAND_ME:
		if (tokens < 2 || too_long)
			return UC_EVENT_OTHER;
		if (s->command != UC_COMMAND_KEYED && s->flags & UC_STREAM_BASE64)
			return UC_EVENT_FORGET;
		if (s->command == UC_COMMAND_ME || (s->command == UC_COMMAND_MG && !(s->flags & UC_STREAM_WRITES)))
			return UC_EVENT_READ;
		return UC_EVENT_WRITE;
	case UC_COMMAND_FLUSH:
		delay = tokens > 1 ? stream_signed(s) : 0;
		s->number = s->flags & UC_STREAM_BAD || delay < 0 ? 0 : delay;
		return UC_EVENT_FLUSH;
	case UC_COMMAND_GLOBAL:
		return UC_EVENT_FORGET;
	case UC_COMMAND_UNKNOWN:
		return stream_lost(s);
	}
	return UC_EVENT_OTHER;
}

static __always_inline __u32 stream_text(struct uc_stream *s, __u8 byte)
{
	__u32 line = s->line;
	bool literal;

	if (line == 0)
		stream_begin(s);
	s->line = line == ~0U ? line : line + 1;
	/* A carriage return before the line's end is not part of the line, unless it is all of the line. */
	literal = s->flags & UC_STREAM_CR && (byte != '\n' || line == 1);
	if (literal) {
		s->flags &= ~UC_STREAM_CR;
		stream_character(s, '\r');
	}
	if (byte == '\n')
		return stream_end_of_line(s);
	if (byte == '\r') {
		s->flags |= UC_STREAM_CR;
		return UC_EVENT_NONE;
	}
	return stream_character(s, byte);
}

/* --- Binary commands --- */

static __always_inline __u32 stream_dispatch(struct uc_stream *s)
{
	__u32 key = s->body_key_len, extras = s->extras_len;
	__u32 value = s->body_len - key - extras;
	bool whole = value == 0, valid;
	__u32 event;

	switch (s->opcode) {
	case 0x00: /* get, getq, getk, getkq */
	case 0x09:
	case 0x0c:
	case 0x0d:
		valid = extras == 0 && key && whole;
		event = UC_EVENT_READ;
		break;
	case 0x01 ... 0x03: /* set, add, replace, and quiet */
	case 0x11 ... 0x13:
		valid = extras == 8 && key;
		event = UC_EVENT_WRITE;
		break;
	case 0x0e: /* append, prepend, and quiet */
	case 0x0f:
	case 0x19:
	case 0x1a:
		valid = extras == 0 && key;
		event = UC_EVENT_WRITE;
		break;
	case 0x04: /* delete, and quiet */
	case 0x14:
		valid = extras == 0 && key && whole;
		event = UC_EVENT_WRITE;
		break;
	case 0x05: /* increment, decrement, and quiet */
	case 0x06:
	case 0x15:
	case 0x16:
		valid = extras == 20 && key && whole;
		event = UC_EVENT_WRITE;
		break;
	case 0x1c ... 0x1e: /* touch, gat, gatq, gatk, gatkq */
	case 0x23:
	case 0x24:
		valid = extras == 4 && key && whole;
		event = UC_EVENT_WRITE;
		break;
	case 0x08: /* flush, and quiet */
	case 0x18:
		valid = (extras == 0 || extras == 4) && !key && whole;
		event = UC_EVENT_FLUSH;
		if (valid)
			s->number =
				extras ? (__u32)s->word[0] << 24 | s->word[1] << 16 | s->word[2] << 8 | s->word[3] : 0;
		break;
	case 0x10: /* stat */
		valid = extras == 0 && whole;
		event = UC_EVENT_OTHER;
		break;
	case 0x07: /* quit, noop, version, quitq, the list of authentication mechanisms */
	case 0x0a:
	case 0x0b:
	case 0x17:
	case 0x20:
		valid = s->body_len == 0;
		event = UC_EVENT_OTHER;
		break;
	default:
		valid = false;
		event = UC_EVENT_NONE;
	}
	if (!valid)
		return stream_lost(s);
	s->skip = value;
	return event;
}

static __always_inline __u32 stream_binary(struct uc_stream *s, __u8 byte)
{
	__u32 at = s->line, len;

	if (at == 0) {
		stream_begin(s);
		s->body_key_len = 0;
		if (byte != UC_MAGIC) {
			s->line = 1;
			return stream_lost(s);
		}
	}
	s->line = at + 1;
	if (at >= UC_BINARY_HEADER + s->extras_len) {
		len = s->key_len;
		s->key[len & (UC_KEY_ROOM - 1)] = byte;
		s->key_len = len + 1;
	} else if (at >= UC_BINARY_HEADER) {
		at -= UC_BINARY_HEADER;
		if (at < sizeof(s->word))
			s->word[at & (sizeof(s->word) - 1)] = byte;
	} else if (at == 1) {
		s->opcode = byte;
	} else if (at == 2 || at == 3) {
		s->body_key_len = s->body_key_len << 8 | byte;
	} else if (at == 4) {
		s->extras_len = byte;
	} else if (at >= 8 && at <= 11) {
		s->body_len = s->body_len << 8 | byte;
	}
	if (s->line < UC_BINARY_HEADER)
		return UC_EVENT_NONE;
	if (s->line == UC_BINARY_HEADER &&
	    (s->body_key_len > UC_KEY_MAX || (__u32)s->body_key_len + s->extras_len > s->body_len))
		return stream_lost(s);
	if (s->line < UC_BINARY_HEADER + s->extras_len + s->body_key_len)
		return UC_EVENT_NONE;
	s->line = 0;
	return stream_dispatch(s);
}

/* Feeds one byte that is not part of a value. Returns enum uc_event. */
static __noinline __u32 stream_step(struct uc_stream *s, __u8 byte)
{
	if (s->mode == UC_MODE_START)
		s->mode = byte == UC_MAGIC ? UC_MODE_BINARY : UC_MODE_TEXT;
	if (s->mode == UC_MODE_TEXT)
		return stream_text(s, byte);
	if (s->mode == UC_MODE_BINARY)
		return stream_binary(s, byte);
	return UC_EVENT_NONE;
}

static __always_inline bool stream_at_boundary(const struct uc_stream *s)
{
	return s->line == 0 && s->skip == 0;
}

static __always_inline void stream_end_of_read(struct uc_stream *s)
{
	if (s->mode == UC_MODE_TEXT && s->line > UC_LINE_PLAIN)
		s->flags |= UC_STREAM_LONG;
}

#endif /* UNDERPASS_LIB_STREAM_H */
