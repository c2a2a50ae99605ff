// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The cache at memcached's sockets: what memcached is given, in its own order, as it is given.
 *
 * Before a read of memcached's returns, a program has looked at the bytes and put every key that they name in flight. When
 * memcached has read that connection again, or has sent the reply to the one command that it had, it has obeyed: the key is
 * in flight no more. Which interface the bytes came by, in which segments, how often: none of that is to be seen here, nor
 * matters. docs/cache.md has the whole argument.
 *
 * The tracepoints are the kernel's own at the end of every receive and send on a socket; probes run with preemption off, so
 * none is skipped because another one is at work. Where the bytes are is in the registers with which memcached entered the
 * kernel.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_tracing.h>
#include "lib/cache.h"
#include "lib/stream.h"

#define MSG_PEEK 2
#define RCV_SHUTDOWN 1
#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define EAGAIN 11
#define EINTR 4
/* Pieces of UC_SCRATCH bytes that one read may return. More: not followed. */
#define UC_PIECES 8192
/* memcached's own header in front of a datagram. */
#define UC_FRAME 8

/* What the kernel calls these, as far as it is looked at here. */
#if defined(__TARGET_ARCH_arm64)
#define NR_READ 63
#define NR_WRITE 64
#define NR_RECVFROM 207
#define NR_SENDMSG 211

struct pt_regs {
	__u64 regs[31];
	__u64 orig_x0;
	__s32 syscallno;
} __attribute__((preserve_access_index));

#define SYSCALL_NR(r) ((r)->syscallno)
#define SYSCALL_ARG1(r) ((r)->orig_x0)
#define SYSCALL_ARG2(r) ((r)->regs[1])
#define SYSCALL_ARG3(r) ((r)->regs[2])
#else
#define NR_READ 0
#define NR_WRITE 1
#define NR_RECVFROM 45
#define NR_SENDMSG 46

struct pt_regs {
	unsigned long si;
	unsigned long di;
	unsigned long dx;
	unsigned long orig_ax;
} __attribute__((preserve_access_index));

#define SYSCALL_NR(r) ((r)->orig_ax)
#define SYSCALL_ARG1(r) ((r)->di)
#define SYSCALL_ARG2(r) ((r)->si)
#define SYSCALL_ARG3(r) ((r)->dx)
#endif

/* Of user space. */
struct user_iovec {
	__u64 base;
	__u64 len;
};

struct user_msghdr {
	__u64 name;
	__u32 namelen;
	__u32 reserved;
	__u64 iov;
	__u64 iovlen;
};

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
	__u8 sk_shutdown;
} __attribute__((preserve_access_index));

struct tcp_sock {
	__u32 rcv_nxt;
	__u32 copied_seq;
	__u64 bytes_received;
} __attribute__((preserve_access_index));

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct uc_conn);
} connections SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__type(key, struct uc_datagrams);
	__type(value, struct uc_conn);
} datagrams SEC(".maps");

/* A fresh connection: too large for the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct uc_conn);
} blank SEC(".maps");

/* Few and important, so not among the misses. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 14);
} notices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} stored SEC(".maps");

/* --- Words --- */

static __always_inline __u64 *word_of(__u32 which)
{
	__u32 index = which / UC_SET_WORDS;
	struct uc_set *set = bpf_map_lookup_elem(&sets, &index);

	return set ? &set->word[which % UC_SET_WORDS] : NULL;
}

/* False: there are too many already to be counted. */
static __always_inline bool word_begin(__u32 which, bool read)
{
	__u64 *word = word_of(which), by = read ? UC_READ : UC_GENERATION + UC_WRITE, was;

	if (!word)
		return false;
	was = __sync_fetch_and_add(word, by);
	if ((read ? was & UC_READS : (was & UC_WRITES) >> 16) < UC_FLIGHT_MAX)
		return true;
	__sync_fetch_and_add(word, -by);
	return false;
}

static __always_inline void word_add(__u32 which, __u64 by)
{
	__u64 *word = word_of(which);

	if (word)
		__sync_fetch_and_add(word, by);
}

static __always_inline void global_begin(void)
{
	struct uc_control *c = the_control();

	if (c)
		__sync_fetch_and_add(&c->global, UC_GENERATION + UC_WRITE);
}

/* False: there is no room for it. A global function: the verifier looks at it once. */
__noinline bool tell_agent(__u32 notice, __u64 number)
{
	struct uc_report *out = bpf_ringbuf_reserve(&notices, sizeof(*out), 0);

	if (!out)
		return false;
	out->hash = bpf_ktime_get_ns() / 1000000;
	out->number = number;
	out->notice = notice;
	out->key_len = 0;
	bpf_ringbuf_submit(out, BPF_RB_FORCE_WAKEUP);
	return true;
}

static __always_inline void global_end(void)
{
	struct uc_control *c = the_control();

	if (!c)
		return;
	__sync_fetch_and_add(&c->let_go, 1);
	__sync_fetch_and_add(&c->global, -UC_WRITE);
	/* Without room for the notice it looks within its pause. */
	tell_agent(UC_NOTICE_LET_GO, 0);
}

/* The global word for a connection: held once, whatever the reasons. */
static __always_inline void hold_global(struct uc_conn *conn)
{
	if (!(conn->flags & UC_CONN_GLOBAL)) {
		conn->flags |= UC_CONN_GLOBAL;
		global_begin();
	}
}

/* --- What is in flight --- */

static __noinline __u32 key_word(const struct uc_stream *s)
{
	__u64 hash = settings.secret[0];
	__u32 len = s->key_len, left = len;

	for (__u32 i = 0; i < UC_KEY_ROOM / 8; i++) {
		__u64 word = *(const __u64 *)(s->key + 8 * i);

		if (left < 8) {
			if (left)
				hash = hash_word(hash, low_bytes(word, left));
			break;
		}
		hash = hash_word(hash, word);
		left -= 8;
	}
	hash = hash_end(hash, len);
	return hash_set(hash) * UC_SET_WORDS + hash_which(hash);
}

static __always_inline void overflow(struct uc_conn *conn)
{
	count(UC_COUNT_OVERFLOW);
	hold_global(conn);
}

/* The read that was alone is not any more: in flight like everything else. */
static __always_inline void harden(struct uc_conn *conn)
{
	if (!(conn->flags & UC_CONN_READ))
		return;
	conn->flags &= ~UC_CONN_READ;
	if (!(conn->flags & UC_CONN_EARLY)) {
		word_add(conn->words[0], UC_GENERATION + UC_WRITE - UC_READ);
	} else if (!word_begin(conn->words[0], false)) {
		conn->pending = conn->complete = 0;
		overflow(conn);
	}
}

static __always_inline void add(struct uc_conn *conn, __u32 which, bool read)
{
	__u32 pending;

	harden(conn);
	pending = conn->pending;
	read = read && pending == 0 && conn->commands == 0;
	if (pending >= UC_PENDING_MAX || (!(read && conn->flags & UC_CONN_EARLY) && !word_begin(which, read))) {
		overflow(conn);
		return;
	}
	if (read)
		conn->flags |= UC_CONN_READ;
	conn->words[pending & (UC_PENDING_MAX - 1)] = which;
	conn->pending = pending + 1;
}

static __always_inline void obey(struct uc_conn *conn, __u32 event)
{
	struct uc_control *c;

	switch (event) {
	case UC_EVENT_READ:
		count(UC_COUNT_READ);
		add(conn, key_word(&conn->stream), true);
		return;
	case UC_EVENT_WRITE:
		count(UC_COUNT_WRITE);
		add(conn, key_word(&conn->stream), false);
		if (conn->stream.flags & UC_STREAM_STALE) {
			c = the_control();
			if (c)
				c->stale = 1;
		}
		return;
	}
	harden(conn);
	switch (event) {
	case UC_EVENT_OTHER:
		count(UC_COUNT_OTHER);
		return;
	case UC_EVENT_FLUSH:
		count(UC_COUNT_FLUSH);
		if (conn->stream.number) {
			/* Held for the agent. Without room for the notice it stays so. */
			global_begin();
			tell_agent(UC_NOTICE_FLUSH, conn->stream.number);
		}
		break;
	case UC_EVENT_FORGET:
		count(UC_COUNT_FORGET);
		break;
	case UC_EVENT_LOST:
		count(UC_COUNT_LOST);
		break;
	}
	hold_global(conn);
}

/* --- Feeding --- */

struct uc_feed {
	struct uc_conn *conn;
	__u64 from; /* in memcached's memory */
	__u64 left; /* bytes there */
	__u32 at; /* in scratch */
	__u32 len; /* of scratch */
};

/* `set KEY FLAGS TIME LENGTH`, at the beginning of scratch. */
struct uc_line {
	__u64 hash;
	__u64 value; /* where it begins, in memcached's memory */
	__u32 key_len;
	__u32 flags;
	__u32 seconds;
	__u32 len;
};

/* After each step: whether memcached has all of a command. */
static __always_inline void completed(struct uc_conn *conn)
{
	if (!stream_at_boundary(&conn->stream))
		return;
	conn->complete = conn->pending;
	if (conn->commands < 2)
		conn->commands++;
}

/* The length of the key behind "get " or "set " in scratch, and its hash; 0: there is none. A global function, too. */
__noinline __u32 plain_key(const struct uc_conn *conn, __u64 *out)
{
	__u64 hash = settings.secret[0];

	if (!conn || !out)
		return 0;
	for (__u32 i = 0; i < UC_KEY_ROOM / 8; i++) {
		__u64 word = *(const __u64 *)(conn->scratch + 4 + 8 * i);
		/* The first byte below 0x21. */
		__u64 low = (word - 0x2121212121212121ULL) & ~word & 0x8080808080808080ULL;

		if (low) {
			__u32 bytes = (((low & -low) - 1) & 0x0101010101010101ULL) * 0x0101010101010101ULL >> 56;

			bytes = (bytes - 1) & 7;
			if (bytes)
				hash = hash_word(hash, low_bytes(word, bytes));
			*out = hash_end(hash, 8 * i + bytes);
			return 8 * i + bytes;
		}
		hash = hash_word(hash, word);
	}
	return 0;
}

/*
 * Digits at at, nine at most, and where they end, in the upper half; 0: there are none, or more. A global function: the
 * verifier looks at it once, for any place.
 */
__noinline __u64 plain_number(const struct uc_conn *conn, __u32 at)
{
	__u32 number = 0;

	if (!conn)
		return 0;

	for (__u32 i = 0; i < 10; i++) {
		__u8 digit = conn->scratch[(at + i) & (UC_SCRATCH - 1)] - '0';

		if (digit > 9)
			return i > 0 ? (__u64)(at + i) << 32 | number : 0;
		number = number * 10 + digit;
	}
	return 0;
}

/*
 * Gives the agent what a set is to store, if its key is one that is read from here, and no other command that may change it
 * is in hand. It is not worth it for others. A global function: the verifier looks at it once.
 */
__noinline bool give(const struct uc_conn *conn, const struct uc_line *line)
{
	struct uc_control *c = the_control();
	struct uc_slot *slot = NULL;
	struct uc_stored *out;
	struct uc_set *set;
	__u64 word, global;
	__u32 index, len;

	if (!conn || !line || !c)
		return false;
	index = hash_set(line->hash);
	set = bpf_map_lookup_elem(&sets, &index);
	if (!set)
		return false;
	for (int i = 0; i < UC_WAYS && !slot; i++) {
		__u64 way = *(volatile __u64 *)&set->way[i];

		if (way >> 32 == hash_tag(line->hash) && (__u32)way)
			slot = slot_of(way);
	}
	if (!slot || !slot->used)
		return false;
	/* As when memcached is asked: both words, before it obeys. One command in hand is this one. */
	word = *(volatile __u64 *)&set->word[hash_which(line->hash)];
	global = *(volatile __u64 *)&c->global;
	if ((word & UC_WRITES) != UC_WRITE || global & UC_FLIGHT)
		return false;
	len = line->len;
	barrier_var(len);
	if (len > UC_ANSWER_MAX)
		return false;
	out = bpf_ringbuf_reserve(&stored, sizeof(*out), 0);
	if (!out)
		return false;
	barrier_var(len);
	if (bpf_probe_read_user(out->value, len, (void *)line->value)) {
		bpf_ringbuf_discard(out, 0);
		return false;
	}
	out->word = (word & ~UC_READS) - UC_WRITE;
	out->global = global;
	out->at_ms = bpf_ktime_get_ns() / 1000000;
	out->flags = line->flags;
	out->seconds = line->seconds;
	out->key_len = line->key_len;
	out->len = len;
	for (__u32 i = 0; i < UC_KEY_ROOM / 8; i++)
		*(__u64 *)(out->key + 8 * i) = *(const __u64 *)(conn->scratch + 4 + 8 * i);
	bpf_ringbuf_submit(out, 0);
	return true;
}

/*
 * The commands that there are most of, as they are mostly written: `get KEY` and `set KEY FLAGS TIME LENGTH`, whole and at
 * the beginning of scratch. The same as stream_step() for each byte of them, in a tenth of the time. Returns the bytes
 * taken; 0: it is something else.
 */
static __always_inline __u32 plain(struct uc_feed *f, __u32 len)
{
	struct uc_conn *conn = f->conn;
	struct uc_stream *s = &conn->stream;
	__u32 first = *(const __u32 *)conn->scratch, key_len, at;
	bool get = first == UC_W4('g', 'e', 't', ' ');
	__u64 hash = 0, flags = 0, time = 0, length = 0;

	if (s->mode > UC_MODE_TEXT || s->line || s->skip || (!get && first != UC_W4('s', 'e', 't', ' ')))
		return 0;
	key_len = plain_key(conn, &hash);
	if (key_len == 0 || key_len > UC_KEY_MAX)
		return 0;
	fetch_set(hash);
	at = 4 + key_len;
	if (!get) {
		if (conn->scratch[at & (UC_SCRATCH - 1)] != ' ')
			return 0;
		flags = plain_number(conn, at + 1);
		at = flags >> 32;
		if (!flags || conn->scratch[at & (UC_SCRATCH - 1)] != ' ')
			return 0;
		time = plain_number(conn, at + 1);
		at = time >> 32;
		if (!time || conn->scratch[at & (UC_SCRATCH - 1)] != ' ')
			return 0;
		length = plain_number(conn, at + 1);
		at = length >> 32;
		if (!length)
			return 0;
	}
	if (at + 2 > len || conn->scratch[at & (UC_SCRATCH - 1)] != '\r' ||
	    conn->scratch[(at + 1) & (UC_SCRATCH - 1)] != '\n')
		return 0;
	s->mode = UC_MODE_TEXT;
	if (!get)
		s->skip = (__u64)(__u32)length + 2;
	count(get ? UC_COUNT_READ : UC_COUNT_WRITE);
	add(conn, hash_set(hash) * UC_SET_WORDS + hash_which(hash), get);
	/* All of it, and nothing else. */
	if (!get && conn->pending == 1 && conn->commands == 0 && f->left == at + 2 + s->skip &&
	    !(conn->flags & (UC_CONN_FULL | UC_CONN_GLOBAL))) {
		struct uc_line line = {
			.hash = hash,
			.value = f->from + at + 2,
			.key_len = key_len,
			.flags = flags,
			.seconds = time,
			.len = length,
		};

		if (give(conn, &line))
			conn->flags |= UC_CONN_STORING;
	}
	completed(conn);
	return at + 2;
}

static long feed_byte(__u32 index, void *ctx)
{
	struct uc_feed *f = ctx;
	struct uc_conn *conn = f->conn;
	struct uc_stream *s = &conn->stream;
	__u32 at = f->at, event;

	if (at >= f->len || s->mode == UC_MODE_LOST)
		return 1;
	if (s->skip) {
		__u64 pass = f->len - at;

		if (pass > s->skip)
			pass = s->skip;
		s->skip -= pass;
		f->at = at + pass;
	} else {
		event = stream_step(s, conn->scratch[at & (UC_SCRATCH - 1)]);
		f->at = at + 1;
		if (event)
			obey(conn, event);
	}
	completed(conn);
	return 0;
}

static long feed_piece(__u32 index, void *ctx)
{
	struct uc_feed *f = ctx;
	struct uc_conn *conn = f->conn;
	struct uc_stream *s = &conn->stream;
	__u64 len = f->left;

	if (!len || s->mode == UC_MODE_LOST)
		return 1;
	if (s->skip) {
		if (len > s->skip)
			len = s->skip;
		s->skip -= len;
		completed(conn);
	} else {
		if (len > UC_SCRATCH)
			len = UC_SCRATCH;
		if (bpf_probe_read_user(conn->scratch, len, (void *)f->from)) {
			count(UC_COUNT_UNREADABLE);
			s->mode = UC_MODE_LOST;
			return 1;
		}
		count_many(UC_COUNT_BYTES, len);
		f->at = plain(f, len);
		f->len = len;
		/* What follows is a value, or perhaps another of these. */
		if (!f->at)
			bpf_loop(UC_SCRATCH, feed_byte, f, 0);
		len = f->at;
	}
	f->from += len;
	f->left -= len;
	return 0;
}

/* --- Finding the way again --- */

struct uc_look {
	struct uc_conn *conn;
	__u32 len;
	__u32 lines;
	__u32 last; /* where the last line begins */
};

static long look_byte(__u32 index, void *ctx)
{
	struct uc_look *l = ctx;

	if (index >= l->len)
		return 1;
	if (l->conn->scratch[index & (UC_SCRATCH - 1)] == '\n') {
		l->lines++;
		if (index + 1 < l->len)
			l->last = index + 1;
	}
	return 0;
}

/*
 * Whether a text reply that is sent before the next read would tell that this one ended where a command did. It does if
 * the read ended with a line break, unless memcached can have sent the reply before it came to the last line, and that
 * is the first of a storage command: of two lines the first may be one whose reply is sent at once, so the last must not
 * be such a line. (Within a value, or waiting for one, memcached sends nothing.) Of one line it tells besides that
 * memcached has obeyed.
 */
static __always_inline __u16 look(struct uc_conn *conn, __u64 from, __u64 got)
{
	__u32 len = got > UC_SCRATCH ? 0 : got;
	struct uc_look l = {.conn = conn};
	__u8 first;

	barrier_var(len);
	if (len > UC_SCRATCH)
		return 0;
	barrier_var(len);
	if (len == 0 || bpf_probe_read_user(conn->scratch, len, (void *)from))
		return 0;
	l.len = len;
	bpf_loop(UC_SCRATCH, look_byte, &l, 0);
	if (l.lines == 0 || l.lines > 2 || conn->scratch[(len - 1) & (UC_SCRATCH - 1)] != '\n')
		return 0;
	if (l.lines == 1)
		return UC_CONN_LINE | UC_CONN_ALONE;
	first = conn->scratch[l.last & (UC_SCRATCH - 1)];
	/* set, add, replace, append, prepend, cas, ms, and whatever else begins like them, or with a blank. */
	if (first == 's' || first == 'a' || first == 'r' || first == 'p' || first == 'c' || first == 'm' ||
	    first == ' ')
		return 0;
	return UC_CONN_LINE;
}

/* Gives the stream what a read returned: len bytes at from. */
static __always_inline void feed(struct uc_conn *conn, __u64 from, __u64 len)
{
	struct uc_feed f = {.conn = conn, .from = from, .left = len};

	bpf_loop(UC_PIECES, feed_piece, &f, 0);
	if (f.left && conn->stream.mode != UC_MODE_LOST)
		conn->stream.mode = UC_MODE_LOST;
	if (conn->stream.mode == UC_MODE_LOST) {
		count(UC_COUNT_NOT_FOLLOWED);
		hold_global(conn);
		conn->flags |= look(conn, from, len);
		return;
	}
	stream_end_of_read(&conn->stream);
}

/* --- What memcached has done --- */

static long shift(__u32 index, void *ctx)
{
	struct uc_conn *conn = *(struct uc_conn **)ctx;
	__u32 from = conn->complete + index;

	if (from >= conn->pending)
		return 1;
	conn->words[index & (UC_PENDING_MAX - 1)] = conn->words[from & (UC_PENDING_MAX - 1)];
	return 0;
}

static long end_one(__u32 index, void *ctx)
{
	struct uc_conn *conn = *(struct uc_conn **)ctx;

	word_add(conn->words[index & (UC_PENDING_MAX - 1)], -UC_WRITE);
	return 0;
}

/* memcached has obeyed what it had all of. hit: the one command's reply tells that it found, or stored. */
static __always_inline void end_complete(struct uc_conn *conn, bool hit)
{
	__u32 complete = conn->complete;

	if (complete && conn->flags & UC_CONN_READ) {
		/* A read that found the item saw what a valid entry holds. One that may not have: what is gone stays gone. */
		if (!(conn->flags & UC_CONN_EARLY))
			word_add(conn->words[0], hit ? -UC_READ : UC_GENERATION - UC_READ);
		else if (!hit && !(conn->flags & UC_CONN_HEEDED))
			word_add(conn->words[0], UC_GENERATION);
		count(hit ? UC_COUNT_READ_HIT : UC_COUNT_READ_MISSED);
		conn->flags &= ~(UC_CONN_READ | UC_CONN_HEEDED);
	} else if (complete == 1 && conn->pending == 1) {
		/* What the agent was given counts only if it was stored. */
		word_add(conn->words[0], conn->flags & UC_CONN_STORING && !hit ? UC_GENERATION - UC_WRITE : -UC_WRITE);
		conn->flags &= ~UC_CONN_STORING;
	} else if (complete) {
		bpf_loop(complete, end_one, &conn, 0);
		if (conn->pending > complete)
			bpf_loop(UC_PENDING_MAX, shift, &conn, 0);
	}
	conn->pending -= complete;
	conn->complete = 0;
	conn->commands = 0;
	if (conn->flags & UC_CONN_GLOBAL && (stream_at_boundary(&conn->stream) || conn->stream.mode == UC_MODE_LOST)) {
		conn->flags &= ~UC_CONN_GLOBAL;
		global_end();
	}
}

/* And the rest it will not obey any more. */
static __always_inline void end_all(struct uc_conn *conn)
{
	conn->complete = conn->pending;
	conn->stream.line = 0;
	conn->stream.skip = 0;
	end_complete(conn, false);
}

static __always_inline bool of_memcached(void)
{
	struct uc_control *c = the_control();

	return c && c->tgid && bpf_get_current_pid_tgid() >> 32 == c->tgid;
}

static __always_inline struct pt_regs *registers(void)
{
	return (struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf());
}

/* A read came back, with got bytes that begin at the buffer's offset skip. */
static __always_inline void take(struct uc_conn *conn, const struct pt_regs *regs, __u64 skip, __u64 got)
{
	__u64 nr = SYSCALL_NR(regs);

	conn->flags &= ~UC_CONN_FULL;
	if (got >= SYSCALL_ARG3(regs))
		conn->flags |= UC_CONN_FULL;
	if (nr != NR_READ && nr != NR_RECVFROM) {
		count(UC_COUNT_UNREADABLE);
		conn->stream.mode = UC_MODE_LOST;
	}
	feed(conn, SYSCALL_ARG2(regs) + skip, got - skip);
}

/* Whether this is the agent's own: what it asks, it asks of a word that it knows. */
static __always_inline bool of_agent(struct sock *sk)
{
	struct uc_control *c = the_control();

	return c && c->agent_port && sk->__sk_common.skc_family == AF_INET &&
	       sk->__sk_common.skc_dport == c->agent_port && sk->__sk_common.skc_daddr == c->agent_addr &&
	       sk->__sk_common.skc_num == c->memcached_port && sk->__sk_common.skc_rcv_saddr == c->memcached_addr;
}

static __always_inline struct uc_conn *connection(struct sock *sk)
{
	struct uc_conn *conn = bpf_sk_storage_get(&connections, sk, 0, 0);
	__u32 zero = 0;

	if (conn)
		return conn;
	return bpf_sk_storage_get(&connections, sk, bpf_map_lookup_elem(&blank, &zero), BPF_SK_STORAGE_GET_F_CREATE);
}

static __always_inline void tcp_receive(struct sock *sk, int got)
{
	struct tcp_sock *tp = bpf_skc_to_tcp_sock(sk);
	struct uc_conn *conn = connection(sk);
	__u32 taken = got > 0 ? got : 0, end;

	if (!conn || !tp) {
		/* No memory: from here on nothing can be said, ever. */
		global_begin();
		return;
	}
	/* The other side's end of the connection, if this read came to it, counts as one. */
	end = tp->copied_seq - (sk->sk_shutdown & RCV_SHUTDOWN && tp->copied_seq == tp->rcv_nxt);
	if (!(conn->flags & UC_CONN_KNOWN)) {
		conn->flags |= UC_CONN_KNOWN;
		conn->copied = end - taken;
		if (of_agent(sk))
			conn->flags |= UC_CONN_AGENT;
		/* Bytes that were read before anybody looked. */
		else if ((__u32)tp->bytes_received - (tp->rcv_nxt - end) != taken)
			conn->stream.mode = UC_MODE_LOST;
	}
	if (conn->flags & UC_CONN_AGENT)
		return;
	conn->flags &= ~(UC_CONN_LINE | UC_CONN_ALONE);
	/* It may not have obeyed: it grew its buffer and read on. */
	if (!(conn->stream.flags & UC_STREAM_LONG && conn->flags & UC_CONN_FULL))
		end_complete(conn, false);
	if (got <= 0) {
		/* memcached closes what has ended. */
		if (got != -EAGAIN && got != -EINTR)
			end_all(conn);
		return;
	}
	if (conn->copied + got != end) {
		count(UC_COUNT_GAP);
		conn->stream.mode = UC_MODE_LOST;
	}
	conn->copied = end;
	take(conn, registers(), 0, got);
}

/* What the calling thread has of the UDP socket that it is reading or sending by. */
static __always_inline struct uc_conn *datagram(const struct pt_regs *regs, bool create)
{
	/* memcached's process is known: of the number only the thread's half tells anything. */
	struct uc_datagrams key = {.thread = bpf_get_current_pid_tgid(), .fd = SYSCALL_ARG1(regs)};
	struct uc_conn *conn = bpf_map_lookup_elem(&datagrams, &key);
	__u32 zero = 0;
	void *none;

	if (conn || !create)
		return conn;
	none = bpf_map_lookup_elem(&blank, &zero);
	if (none)
		bpf_map_update_elem(&datagrams, &key, none, BPF_NOEXIST);
	return bpf_map_lookup_elem(&datagrams, &key);
}

/* Whether what memcached sends is the reply to the only command that it had. */
static __always_inline bool replies(const struct uc_conn *conn)
{
	return conn->commands == 1 && conn->complete == conn->pending && conn->stream.mode != UC_MODE_LOST &&
	       stream_at_boundary(&conn->stream);
}

/* Whether nobody has looked at its reply, and somebody should have. */
static __always_inline bool unheeded(const struct uc_conn *conn)
{
	return (conn->flags & (UC_CONN_READ | UC_CONN_EARLY | UC_CONN_HEEDED)) == (UC_CONN_READ | UC_CONN_EARLY);
}

/* Whether what is sent by this socket is looked at before it leaves. */
static __always_inline bool looked_at(struct sock *sk)
{
	struct uc_control *c = the_control();

	return c && !c->late && sk->__sk_common.skc_family == AF_INET;
}

static __always_inline void udp_receive(struct sock *sk, int got)
{
	struct pt_regs *regs = registers();
	struct uc_conn *conn = datagram(regs, true);
	__u8 header[UC_FRAME];

	if (!conn) {
		global_begin();
		return;
	}
	/* A datagram that memcached takes as a request is received. What it reads is the rest of a value. */
	if (SYSCALL_NR(regs) != NR_RECVFROM) {
		end_complete(conn, false);
		if (got <= 0)
			return;
		if (!conn->stream.skip)
			conn->stream.mode = UC_MODE_LOST;
		take(conn, regs, 0, got);
		return;
	}
	end_all(conn);
	conn->stream.mode = UC_MODE_START;
	conn->stream.flags = 0;
	conn->flags &= ~UC_CONN_EARLY;
	if (looked_at(sk))
		conn->flags |= UC_CONN_EARLY;
	/* memcached drops these: too short, or one of several. */
	if (got <= UC_FRAME)
		return;
	if (!bpf_probe_read_user(header, sizeof(header), (void *)SYSCALL_ARG2(regs)) && (header[4] || header[5] != 1))
		return;
	take(conn, regs, UC_FRAME, got);
	/* With half a line behind it, memcached answers the read, but nobody can tell by which reply: in flight after all. */
	if (conn->flags & UC_CONN_EARLY && !replies(conn))
		harden(conn);
}

SEC("tp_btf/sock_recv_length")
int BPF_PROG(cache_receive, struct sock *sk, int got, int flags)
{
	__u16 family;

	if (!of_memcached() || flags & MSG_PEEK)
		return 0;
	family = sk->__sk_common.skc_family;
	if ((family == AF_INET || family == AF_INET6) && sk->sk_protocol == IPPROTO_TCP)
		tcp_receive(sk, got);
	else if ((family == AF_INET || family == AF_INET6) && sk->sk_protocol == IPPROTO_UDP)
		udp_receive(sk, got);
	else if (got > 0)
		/* By a way that is not known. */
		global_begin();
	return 0;
}

#define UC_REPLY_VALUE ('V' | 'A' << 8)
#define UC_REPLY_STORED ('S' | 'T' << 8)

/* The first two bytes of the reply that was sent; 0: they cannot be read. */
static __always_inline __u16 first_of_reply(__u32 skip)
{
	struct pt_regs *regs = registers();
	__u64 at = SYSCALL_ARG2(regs);
	struct user_msghdr msg;
	struct user_iovec iov;
	__u16 first = 0;

	if (SYSCALL_NR(regs) == NR_SENDMSG) {
		if (bpf_probe_read_user(&msg, sizeof(msg), (void *)at))
			return 0;
		/* The header of a datagram is a piece of its own. */
		if (bpf_probe_read_user(&iov, sizeof(iov), (void *)(msg.iov + (skip ? sizeof(iov) : 0))))
			return 0;
		at = iov.base;
	} else if (SYSCALL_NR(regs) != NR_WRITE || skip) {
		return 0;
	}
	return bpf_probe_read_user(&first, sizeof(first), (void *)at) ? 0 : first;
}

/*
 * The kernel looks up where to send something: first of all that it does for a datagram. If memcached's thread is about to
 * send the reply to a read that was alone, and it tells no value, the word's generation moves before anybody can have been
 * told. So such a read needs not be in flight: a key that many miss at once would not be served for as long as memcached has
 * one of those reads in hand, and they would be missed for that.
 *
 * It may run in an interrupt, when its thread is anywhere in a system call. What it looks at is the thread's own message all
 * the same, and all that it does is to heed it.
 */
SEC("tp_btf/fib_table_lookup")
int cache_route(void *ctx)
{
	struct pt_regs *regs = registers();
	struct uc_conn *conn;

	if (!of_memcached() || SYSCALL_NR(regs) != NR_SENDMSG)
		return 0;
	conn = datagram(regs, false);
	if (!conn || !unheeded(conn) || !replies(conn))
		return 0;
	if (first_of_reply(UC_FRAME) != UC_REPLY_VALUE)
		word_add(conn->words[0], UC_GENERATION);
	conn->flags |= UC_CONN_HEEDED;
	return 0;
}

/*
 * A reply has been sent: if memcached had one command, it has obeyed it. A read that was answered with a value changes
 * nothing. Nobody was served the key from here between the reply's leaving and now, for it was in flight, or looked at.
 */
SEC("tp_btf/sock_send_length")
int BPF_PROG(cache_send, struct sock *sk, int sent, int flags)
{
	struct uc_conn *conn;
	__u16 first = 0;
	bool udp;

	if (sent <= 0 || !of_memcached())
		return 0;
	udp = sk->sk_protocol == IPPROTO_UDP;
	conn = udp ? datagram(registers(), false) : bpf_sk_storage_get(&connections, sk, 0, 0);
	if (!conn)
		return 0;
	if (conn->flags & UC_CONN_LINE && !udp) {
		conn->flags &= ~UC_CONN_LINE;
		first = first_of_reply(0);
		/* Text. */
		if (first && (first & 0xff) < UC_MAGIC) {
			count(UC_COUNT_FOLLOWED);
			conn->stream.mode = UC_MODE_TEXT;
			conn->stream.line = 0;
			conn->stream.skip = 0;
			if (conn->flags & UC_CONN_ALONE)
				end_all(conn);
		}
		return 0;
	}
	if (!replies(conn))
		return 0;
	if (unheeded(conn)) {
		/* Never, as far as is known. Reads are in flight from now on. */
		struct uc_control *c = the_control();

		count(UC_COUNT_LATE);
		if (c)
			c->late = 1;
	}
	if (conn->flags & (UC_CONN_READ | UC_CONN_STORING))
		first = first_of_reply(udp ? UC_FRAME : 0);
	end_complete(conn, first == (conn->flags & UC_CONN_READ ? UC_REPLY_VALUE : UC_REPLY_STORED));
	return 0;
}

/* A connection is gone: memcached had closed it. */
SEC("tp_btf/tcp_destroy_sock")
int BPF_PROG(cache_destroy, struct sock *sk)
{
	struct uc_conn *conn = bpf_sk_storage_get(&connections, sk, 0, 0);

	if (conn) {
		end_all(conn);
		bpf_sk_storage_delete(&connections, sk);
	}
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
