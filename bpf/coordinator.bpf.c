// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The coordinator in XDP: routes reads, orders writes and multicasts them, collects acknowledgements, commits.
 *
 * A refinement of crates/protocol/src/coordinator: for every packet the same verdict, bytes and tables, or the packet is
 * passed on untouched. Steps are cited by their names in docs/protocol.md, section 3; docs/concurrency.md argues why any
 * interleaving of packets on many CPUs is safe.
 *
 * One lock is held at a time: a session record's, then a bucket's, then the record's again. The verifier demands it, and
 * the states "starting" and "committing" are what makes it safe.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <underpass/abi.h>
#include "lib/hash.h"
#include "lib/packet.h"
#include "lib/tables.h"
#include "lib/clock.h"

_Static_assert(TICK_SHIFT == UP_TICK_SHIFT, "the agent and the clock agree");

/* The agent sets max_entries of these two before loading. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct up_bucket);
} buckets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} words SEC(".maps");

/* Which clone of which write egress addressed last, on this CPU. */
struct up_clone_state {
	__u64 seq;
	__u32 shard;
	__u32 index;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct up_clone_state);
} clone_state SEC(".maps");

/* A broadcast goes to every entry of a devmap: one map for each number of members, every entry the same interface. */
#define UP_FANOUT(n)                                  \
	struct {                                      \
		__uint(type, BPF_MAP_TYPE_DEVMAP);    \
		__uint(max_entries, n);               \
		__type(key, __u32);                   \
		__type(value, struct bpf_devmap_val); \
	} fanout_##n SEC(".maps")

UP_FANOUT(1);
UP_FANOUT(2);
UP_FANOUT(3);
UP_FANOUT(4);
UP_FANOUT(5);
UP_FANOUT(6);
UP_FANOUT(7);
UP_FANOUT(8);

static __always_inline int drop(__u32 counter)
{
	count(counter);
	return XDP_DROP;
}

static __always_inline int pass(__u32 counter)
{
	count(counter);
	return XDP_PASS;
}

static __always_inline bool unresolved(__u8 state)
{
	return state >= UP_STATE_STARTING && state <= UP_STATE_COMMITTING;
}

static __always_inline struct up_way *find_way(struct up_bucket *bucket, const struct up_fingerprint *fingerprint)
{
#pragma unroll
	for (int i = 0; i < UP_WAYS; i++) {
		struct up_way *way = &bucket->ways[i];

		if (way->last && way->fingerprint[0] == fingerprint->word[0] &&
		    way->fingerprint[1] == fingerprint->word[1])
			return way;
	}
	return NULL;
}

/* A 64-bit field of our header in network order, its change added to sum. */
#define UP_SET64(sum, field, value)                     \
	do {                                            \
		__be64 set_to = bpf_cpu_to_be64(value); \
		sum = up_sum64(sum, field, set_to);     \
		field = set_to;                         \
	} while (0)

#define UP_SET32(sum, field, value)                 \
	do {                                        \
		__be32 set_to = bpf_htonl(value);   \
		sum = up_sum32(sum, field, set_to); \
		field = set_to;                     \
	} while (0)

/* The header's bytes 0 to 7 as two words: version and op, and kind, status, cnt and flags, change together. */
struct up_head_words {
	__u32 word[2];
};

static __always_inline struct up_head_words head_words(const struct up_header *header)
{
	const __u32 *word = (const __u32 *)header;
	struct up_head_words words = {{word[0], word[1]}};

	return words;
}

static __always_inline __u64 sum_head(__u64 sum, const struct up_head_words *before, const struct up_header *header)
{
	const __u32 *word = (const __u32 *)header;

	return up_sum32(up_sum32(sum, before->word[0], word[0]), before->word[1], word[1]);
}

static __always_inline int reject(struct up_frame *f, const struct up_config *config, __u32 reason)
{
	struct up_header *header = f->header;
	struct up_head_words before = head_words(header);
	__u64 sum;

	count(UP_COUNT_REJECT + reason);
	header->op = header->op == UP_OP_READ ? UP_OP_R_REJECT : UP_OP_W_REJECT;
	header->status = reason;
	sum = sum_head(0, &before, header);
	UP_SET32(sum, header->epoch, config ? config->epoch : 0);
	up_send_back(f, sum);
	return XDP_TX;
}

static __always_inline bool owns_address(const struct up_session *record, const struct up_header *header)
{
	const __u64 *have = (const __u64 *)record->reply_addr;
	const __u64 *want = (const __u64 *)header->reply_addr;

	return have[0] == want[0] && have[1] == want[1] && record->reply_port == header->reply_port;
}

static __always_inline __u32 operands_len(__u8 kind, __u8 flags)
{
	return (flags & UP_FLAG_TTL ? 8 : 0) + (kind == UP_KIND_CAS || kind == UP_KIND_INCR ? 8 : 0);
}

/* The reason for which a READ or WRITE is refused, in the specification's order, or UP_REASON_NONE. */
static __always_inline __u32 admit(const struct up_frame *f, const struct up_config *config,
				   const struct up_session *record, __u64 ms)
{
	const struct up_header *header = f->header;
	__u64 session = bpf_be64_to_cpu(header->session);
	bool read = header->op == UP_OP_READ;

	if (!config)
		return UP_REASON_SHARD;
	/*
	 * The record is read without its lock. The agent opens and closes it under the lock and writes the session's
	 * number last, and a token belongs to one session number: a packet that matches a half-written record knows
	 * the token of the session that was there a moment ago, which was its own.
	 */
	if (!record || !session || record->session != session || record->shard != bpf_ntohl(header->shard))
		return UP_REASON_SESSION;
	if (record->token != bpf_be64_to_cpu(header->token) || !owns_address(record, header))
		return UP_REASON_TOKEN;
	if (f->key_len == 0 || f->key_len > UP_KEY_MAX)
		return UP_REASON_KEY_LENGTH;
	if (read) {
		if (f->value_len)
			return UP_REASON_VALUE_LENGTH;
	} else {
		if (f->key_len + f->value_len > UP_PAYLOAD_MAX)
			return UP_REASON_VALUE_LENGTH;
		if (header->kind >= UP_KIND_END)
			return UP_REASON_KIND;
		if (f->value_len < operands_len(header->kind, header->flags))
			return UP_REASON_VALUE_LENGTH;
	}
	if (ms >= config->lease_until_ms)
		return UP_REASON_LEASE;
	if (!(read ? config->serving_count : config->must_ack_count))
		return UP_REASON_NO_MEMBER;
	return UP_REASON_NONE;
}

/* To within a second: a record read by every packet is written by few. */
static __always_inline void touch(struct up_session *record, __u64 ms)
{
	if (ms - record->used_ms >= 1000 && ms > record->used_ms)
		record->used_ms = ms;
}

static __always_inline __u32 bucket_index(const struct up_frame *f, const void *data_end, __u32 shard)
{
	__u32 hash = up_bucket_hash(f->key, data_end, f->key_len, settings.bucket_key);

	return (shard % UP_SHARD_SLOTS) * (settings.bucket_mask + 1) + (hash & settings.bucket_mask);
}

/*
 * READ step 1 for a bucket with a taken way: the key may be dirty, so look under the lock.
 * Returns false when a map look-up fails, which cannot be.
 */
static __always_inline bool bound_of_dirty(const struct up_frame *f, const void *data_end, __u32 index, __u64 *word,
					   __u64 floor, __u64 *bound, __u64 *time)
{
	struct up_bucket *bucket = bpf_map_lookup_elem(&buckets, &index);
	struct up_fingerprint fingerprint = {};
	struct up_way *way;
	bool dirty = false;
	__u64 last;
	__s32 after = 0;

	if (!bucket)
		return false;
	up_fingerprint(f->key, data_end, f->key_len, settings.fingerprint_key, &fingerprint);
	bpf_spin_lock(&bucket->lock);
	way = find_way(bucket, &fingerprint);
	if (way) {
		dirty = true;
		last = way->first - 1;
		if (way->committed > last)
			last = way->committed;
		/*
		 * Beside a conditional write a read is stamped no later than that: the write executes on the version that the
		 * read sees, so what is expired for the read must be expired for the write.
		 */
		if (way->exclusive) {
			after = (__u32)*time - way->time_low;
			if (after > 0 && way->exclusive == UP_EXCLUSIVE_OPEN) {
				way->time_low = (__u32)*time;
				after = 0;
			}
		}
	} else {
		last = *word >> UP_BUCKET_LAST_SHIFT;
		if (floor > last)
			last = floor;
	}
	bpf_spin_unlock(&bucket->lock);
	if (dirty)
		count(UP_COUNT_READ_DIRTY);
	if (after > 0)
		*time -= after;
	*bound = last;
	return true;
}

static __always_inline int read(struct up_frame *f, const void *data_end, const struct up_config *config, __u64 ms)
{
	struct up_header *header = f->header;
	__u32 index = bucket_index(f, data_end, config->shard);
	__u64 *word = bpf_map_lookup_elem(&words, &index);
	const struct up_member *member;
	__u64 time = ms + config->time_offset_ms;
	struct up_head_words before;
	__u64 value, bound, sum;
	__u32 to;

	if (!word)
		return drop(UP_COUNT_DROP_INTERNAL);
	/* READ step 1: this load is the critical section of a clean bucket. */
	value = *(volatile __u64 *)word;
	bound = value >> UP_BUCKET_LAST_SHIFT;
	if (config->floor > bound)
		bound = config->floor;
	if (value & UP_BUCKET_DIRTY && !bound_of_dirty(f, data_end, index, word, config->floor, &bound, &time))
		return drop(UP_COUNT_DROP_INTERNAL);

	/* READ step 2. */
	to = up_spread(bpf_be64_to_cpu(header->session), bpf_be64_to_cpu(header->request), time, config->serving_count);
	to = config->serving_list[to & (UP_MEMBERS_MAX - 1)] & (UP_MEMBERS_MAX - 1);
	member = &config->members[to];
	if (up_no_mac(member->next_hop))
		return drop(UP_COUNT_DROP_NEXT_HOP);
	before = head_words(header);
	header->cnt = to;
	sum = sum_head(0, &before, header);
	UP_SET32(sum, header->epoch, config->epoch);
	UP_SET64(sum, header->seq, bound);
	UP_SET64(sum, header->time, time);
	up_send_on(f, member->next_hop, member->addr, member->port, sum);
	count(UP_COUNT_READ);
	return XDP_TX;
}

/*
 * WRITE step 4 on the ingress side: the frame leaves here as one, stamped, and is cloned and addressed further on: by the
 * devmap's egress program, or at TC.
 */
static __always_inline int propagate(struct up_frame *f, const struct up_config *config, __u64 seq, __u64 time)
{
	struct up_header *header = f->header;
	__u64 sum = 0;

	UP_SET32(sum, header->epoch, config->epoch);
	UP_SET64(sum, header->seq, seq);
	UP_SET64(sum, header->time, time);
	f->udp->check = up_udp_checksum(f->udp->check, sum);
	if (settings.write_path != UP_WRITE_PATH_BROADCAST)
		return XDP_PASS;
	switch (config->must_ack_count) {
	case 1:
		return bpf_redirect_map(&fanout_1, 0, BPF_F_BROADCAST);
	case 2:
		return bpf_redirect_map(&fanout_2, 0, BPF_F_BROADCAST);
	case 3:
		return bpf_redirect_map(&fanout_3, 0, BPF_F_BROADCAST);
	case 4:
		return bpf_redirect_map(&fanout_4, 0, BPF_F_BROADCAST);
	case 5:
		return bpf_redirect_map(&fanout_5, 0, BPF_F_BROADCAST);
	case 6:
		return bpf_redirect_map(&fanout_6, 0, BPF_F_BROADCAST);
	case 7:
		return bpf_redirect_map(&fanout_7, 0, BPF_F_BROADCAST);
	default:
		return bpf_redirect_map(&fanout_8, 0, BPF_F_BROADCAST);
	}
}

/* Answers a retransmission of a committed write from its record. */
static __always_inline int answer(struct up_frame *f, const void *data_end, const struct up_config *config, __u8 kind,
				  __u8 status, __u64 seq, __u64 time, __u64 result)
{
	struct up_header *header = f->header;
	struct up_head_words before = head_words(header);
	__u64 sum;

	header->op = UP_OP_W_REPLY;
	header->kind = kind;
	header->status = status;
	sum = sum_head(0, &before, header);
	UP_SET32(sum, header->epoch, config->epoch);
	UP_SET64(sum, header->seq, seq);
	UP_SET64(sum, header->time, time);
	if (kind == UP_KIND_INCR && status == UP_STATUS_OK && f->value_len >= 8) {
		__u32 key_len = up_key_len(f);
		__be64 *number = (__be64 *)(f->key + key_len);
		__be64 to = bpf_cpu_to_be64(result);

		if ((const void *)(number + 1) <= data_end) {
			__u16 change = up_fold(up_sum64(0, *number, to));

			/* At an odd offset the bytes fall into the other halves of the checksum's words. */
			sum += key_len & 1 ? (__u16)(change << 8 | change >> 8) : change;
			*number = to;
		}
	}
	up_send_back(f, sum);
	count(UP_COUNT_WRITE_ANSWERED);
	return XDP_TX;
}

/*
 * Whether a retransmission is of the write that its record holds, as far as the record tells: members that never saw that
 * write must not be given another one under its seq.
 */
static __always_inline bool same_write(__u8 kind, const struct up_fingerprint *recorded, __u8 sent_kind,
				       const struct up_fingerprint *sent)
{
	bool known = recorded->word[0] | recorded->word[1];

	return kind == sent_kind &&
	       (!known || (recorded->word[0] == sent->word[0] && recorded->word[1] == sent->word[1]));
}

static __always_inline int write(struct up_frame *f, const void *data_end, struct up_shard *slot,
				 const struct up_config *config, struct up_session *record, __u64 ms)
{
	struct up_header *header = f->header;
	__u64 admitted = ms + config->time_offset_ms;
	__u64 session = bpf_be64_to_cpu(header->session);
	__u64 request = bpf_be64_to_cpu(header->request);
	bool conditional = header->kind != UP_KIND_PUT;
	bool may_grow = header->kind != UP_KIND_DELETE && header->kind != UP_KIND_TOUCH;
	__u64 seq, time, recorded_seq, recorded_time, recorded_request, result;
	struct up_fingerprint fingerprint = {}, recorded;
	__u8 state, kind, status;
	struct up_bucket *bucket;
	struct up_way *way, *free;
	__u32 index, refused;
	__u64 *word;

	up_fingerprint(f->key, data_end, f->key_len, settings.fingerprint_key, &fingerprint);
	/* WRITE step 1. What the record says is copied out: nothing may be called while the lock is held. */
	refused = UP_REASON_NONE;
	bpf_spin_lock(&record->lock);
	/* Both again: a CPU that orders its stores weakly may have shown admit() a new session with the old one's token. */
	if (record->session != session || record->token != bpf_be64_to_cpu(header->token)) {
		bpf_spin_unlock(&record->lock);
		return reject(f, config, UP_REASON_SESSION);
	}
	state = record->state;
	kind = record->kind;
	status = record->status;
	recorded_seq = record->seq;
	recorded_time = record->time;
	recorded_request = record->request;
	result = record->result;
	recorded.word[0] = record->fingerprint[0];
	recorded.word[1] = record->fingerprint[1];
	if (request > recorded_request || (request == recorded_request && state == UP_STATE_IDLE)) {
		if (unresolved(state)) {
			refused = UP_REASON_SESSION_BUSY;
		} else if (record->sealed) {
			/* Rebuilt: it may have been closed before, on the promise that nothing newer is ever taken. */
			refused = UP_REASON_ABORTED;
		} else if (config->refuse_writes) {
			refused = config->refuse_writes;
		} else if (config->store_full && may_grow) {
			refused = UP_REASON_STORE_FULL;
		} else {
			record->state = UP_STATE_STARTING;
			record->request = request;
			record->seq = *(volatile __u64 *)&slot->clock;
		}
		state = UP_STATE_IDLE;
	}
	bpf_spin_unlock(&record->lock);
	if (refused)
		return reject(f, config, refused);
	if (request < recorded_request)
		return drop(UP_COUNT_DROP_OLD);
	switch (state) {
	case UP_STATE_IDLE:
		break;
	case UP_STATE_PENDING:
		if (!same_write(kind, &recorded, header->kind, &fingerprint))
			return reject(f, config, UP_REASON_MALFORMED);
		count(UP_COUNT_WRITE_AGAIN);
		return propagate(f, config, recorded_seq, recorded_time);
	case UP_STATE_COMMITTED:
		if (!same_write(kind, &recorded, header->kind, &fingerprint))
			return reject(f, config, UP_REASON_MALFORMED);
		return answer(f, data_end, config, kind, status, recorded_seq, recorded_time, result);
	case UP_STATE_ABORTED:
		return reject(f, config, UP_REASON_ABORTED);
	default:
		return drop(UP_COUNT_DROP_STARTING);
	}

	/* WRITE step 2. */
	index = bucket_index(f, data_end, config->shard);
	bucket = bpf_map_lookup_elem(&buckets, &index);
	word = bpf_map_lookup_elem(&words, &index);
	if (!bucket || !word) {
		bpf_spin_lock(&record->lock);
		record->state = UP_STATE_IDLE;
		bpf_spin_unlock(&record->lock);
		return drop(UP_COUNT_DROP_INTERNAL);
	}
	bpf_spin_lock(&bucket->lock);
	way = find_way(bucket, &fingerprint);
	if (way) {
		if (way->exclusive || conditional)
			refused = UP_REASON_KEY_BUSY;
	} else {
		refused = UP_REASON_DIRTY_FULL;
#pragma unroll
		for (int i = 0; i < UP_WAYS; i++) {
			free = &bucket->ways[i];
			if (refused && !free->last) {
				way = free;
				refused = UP_REASON_NONE;
			}
		}
	}
	seq = 0;
	if (!refused && way) {
		seq = __sync_fetch_and_add(&slot->clock, 1) + 1;
		if (!way->last) {
			way->fingerprint[0] = fingerprint.word[0];
			way->fingerprint[1] = fingerprint.word[1];
			way->first = seq;
			way->committed = 0;
			way->exclusive = conditional ? UP_EXCLUSIVE_OPEN : UP_EXCLUSIVE_NOT;
			way->time_low = conditional ? (__u32)admitted : 0;
		}
		way->last = seq;
		*(volatile __u64 *)word = seq << UP_BUCKET_LAST_SHIFT | UP_BUCKET_DIRTY;
	}
	bpf_spin_unlock(&bucket->lock);
	/* Not earlier: a read that looked before this write was ordered must not be stamped later than it. */
	time = now_ms() + config->time_offset_ms;
	if (conditional && !refused) {
		/* Nor must one that looked since, and did not see it. (No clock can be read under a lock.) */
		__s32 after = 0;

		bpf_spin_lock(&bucket->lock);
		way = find_way(bucket, &fingerprint);
		if (way) {
			after = way->time_low - (__u32)time;
			if (after < 0) {
				after = 0;
				way->time_low = (__u32)time;
			}
			way->exclusive = UP_EXCLUSIVE_FIXED;
		}
		bpf_spin_unlock(&bucket->lock);
		time += after;
	}

	/* WRITE step 3. A starting record is never reused or closed, so it is still this request's. */
	bpf_spin_lock(&record->lock);
	if (refused) {
		record->state = UP_STATE_IDLE;
	} else {
		record->state = UP_STATE_PENDING;
		record->kind = header->kind;
		record->status = 0;
		record->acks = 0;
		record->seq = seq;
		record->time = time;
		record->result = 0;
		record->fingerprint[0] = fingerprint.word[0];
		record->fingerprint[1] = fingerprint.word[1];
		record->bucket = index;
		up_copy_mac(record->reply_mac, f->eth->h_source);
	}
	bpf_spin_unlock(&record->lock);
	if (refused)
		return reject(f, config, refused);
	count(UP_COUNT_WRITE);
	return propagate(f, config, seq, time);
}

/*
 * Who is told of a commit: the record says, not the replica's packet. Copied while the record is locked: once it says
 * committed the agent may close the session and give its index, and with it another client's address and token, away.
 */
struct up_client {
	__u64 reply_addr[2];
	__u64 token;
	__be32 addr;
	__be16 port;
	__u8 mac[6];
};

static __always_inline int reply_to_client(struct up_frame *f, const struct up_client *to)
{
	struct up_header *header = f->header;
	__u64 *have = (__u64 *)header->reply_addr;
	__u64 sum = 0;

	sum = up_sum64(sum, have[0], to->reply_addr[0]);
	sum = up_sum64(sum, have[1], to->reply_addr[1]);
	have[0] = to->reply_addr[0];
	have[1] = to->reply_addr[1];
	sum = up_sum16(sum, header->reply_port, to->port);
	header->reply_port = to->port;
	UP_SET64(sum, header->token, to->token);
	up_send_on(f, to->mac, to->addr, to->port, sum);
	count(UP_COUNT_COMMIT);
	return XDP_TX;
}

/* W_REPLY step 2. Returns false when a map look-up fails, which cannot be. */
static __always_inline bool resolve_key(__u32 index, const struct up_fingerprint *fingerprint, __u64 seq)
{
	struct up_bucket *bucket = bpf_map_lookup_elem(&buckets, &index);
	__u64 *word = bpf_map_lookup_elem(&words, &index);
	struct up_way *way;

	if (!bucket || !word)
		return false;
	bpf_spin_lock(&bucket->lock);
	way = find_way(bucket, fingerprint);
	if (way) {
		if (seq > way->committed)
			way->committed = seq;
		if (way->committed >= way->last) {
			__u64 taken;

			way->fingerprint[0] = 0;
			way->fingerprint[1] = 0;
			way->first = 0;
			way->last = 0;
			way->committed = 0;
			way->exclusive = UP_EXCLUSIVE_NOT;
			way->time_low = 0;
			taken = bucket->ways[0].last | bucket->ways[1].last | bucket->ways[2].last |
				bucket->ways[3].last;
			if (!taken)
				*(volatile __u64 *)word &= ~UP_BUCKET_DIRTY;
		}
	}
	bpf_spin_unlock(&bucket->lock);
	return true;
}

_Static_assert(UP_WAYS == 4, "resolve_key looks at four ways");

static __always_inline int acknowledge(struct up_frame *f, const void *data_end, const struct up_config *config,
				       struct up_session *record)
{
	struct up_header *header = f->header;
	__u64 session = bpf_be64_to_cpu(header->session);
	__u64 request = bpf_be64_to_cpu(header->request);
	__u64 seq = bpf_be64_to_cpu(header->seq);
	__u32 from = header->cnt;
	struct up_fingerprint fingerprint;
	const struct up_member *member;
	bool pending, decided = false;
	struct up_client to = {};
	__u64 result = 0;
	__u32 index;

	/* W_REPLY step 1. */
	if (!config || bpf_ntohl(header->epoch) != config->epoch)
		return drop(UP_COUNT_DROP_ACK_EPOCH);
	if (from >= UP_MEMBERS_MAX || !(config->must_ack & (1 << from)))
		return drop(UP_COUNT_DROP_ACK_MEMBER);
	member = &config->members[from & (UP_MEMBERS_MAX - 1)];
	if (member->addr != f->ip->saddr || member->port != f->udp->source)
		return drop(UP_COUNT_DROP_ACK_MEMBER);
	if (header->status == UP_STATUS_ABORTED)
		return drop(UP_COUNT_DROP_ACK_ABORTED);
	if (!record)
		return drop(UP_COUNT_DROP_ACK_STALE);
	if (f->value_len >= 8 && f->key_len <= UP_KEY_MAX) {
		const __be64 *number = (const __be64 *)(f->key + up_key_len(f));

		if ((const void *)(number + 1) <= data_end)
			result = bpf_be64_to_cpu(*number);
	}
	bpf_spin_lock(&record->lock);
	pending = record->session == session && record->shard == config->shard && record->state == UP_STATE_PENDING &&
		  record->seq == seq && record->request == request;
	if (pending) {
		record->acks |= 1 << from;
		decided = (record->acks & config->must_ack) == config->must_ack;
		if (decided) {
			record->state = UP_STATE_COMMITTING;
			record->status = header->status;
			if (record->kind == UP_KIND_INCR && f->value_len >= 8)
				record->result = result;
			fingerprint.word[0] = record->fingerprint[0];
			fingerprint.word[1] = record->fingerprint[1];
			index = record->bucket;
		}
	}
	bpf_spin_unlock(&record->lock);
	if (!pending)
		return drop(UP_COUNT_DROP_ACK_STALE);
	if (!decided)
		return drop(UP_COUNT_ACK);

	/* W_REPLY step 2. */
	if (!resolve_key(index, &fingerprint, seq))
		return drop(UP_COUNT_DROP_INTERNAL);

	/* W_REPLY step 3. Only a retransmission that arrives after this is answered from the record. */
	bpf_spin_lock(&record->lock);
	record->state = UP_STATE_COMMITTED;
	to.reply_addr[0] = ((const __u64 *)record->reply_addr)[0];
	to.reply_addr[1] = ((const __u64 *)record->reply_addr)[1];
	to.addr = *(const __be32 *)(record->reply_addr + 12);
	to.port = record->reply_port;
	to.token = record->token;
	up_copy_mac(to.mac, record->reply_mac);
	bpf_spin_unlock(&record->lock);
	return reply_to_client(f, &to);
}

static __always_inline bool known_op(__u8 op)
{
	return op <= UP_OP_W_REJECT || (op >= UP_OP_CONTROL && op < UP_OP_END);
}

SEC("xdp")
int coordinator(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct up_session *record;
	struct up_config *config;
	struct up_shard *slot;
	struct up_frame f;
	__u32 udp_len, reason;
	__u64 ms;

	f.eth = data;
	f.ip = (void *)(f.eth + 1);
	f.udp = (void *)(f.ip + 1);
	f.header = (void *)(f.udp + 1);
	f.key = (void *)(f.header + 1);
	if ((void *)(f.udp + 1) > data_end)
		return pass(UP_COUNT_PASS_FOREIGN);
	if (f.eth->h_proto != bpf_htons(ETH_P_IP) || f.ip->version != 4 || f.ip->protocol != IPPROTO_UDP ||
	    f.ip->daddr != settings.addr)
		return pass(UP_COUNT_PASS_FOREIGN);
	if (f.ip->ihl != 5 || f.ip->frag_off & bpf_htons(UP_IP_FRAGMENT)) {
		/*
		 * Options or fragments. What is for our port must not reach the agent's socket unordered; the first
		 * fragment is enough to tell, and without it the kernel never puts the others together.
		 */
		struct udphdr *udp = (void *)f.ip + f.ip->ihl * 4;

		if (f.ip->frag_off & bpf_htons(UP_IP_OFFSET))
			return pass(UP_COUNT_PASS_FOREIGN);
		if (f.ip->ihl < 5 || (void *)(udp + 1) > data_end || udp->dest != settings.port)
			return pass(UP_COUNT_PASS_FOREIGN);
		return drop(UP_COUNT_DROP_FRAGMENT);
	}
	if (f.udp->dest != settings.port)
		return pass(UP_COUNT_PASS_FOREIGN);
	udp_len = bpf_ntohs(f.udp->len);
	if (bpf_ntohs(f.ip->tot_len) != sizeof(*f.ip) + udp_len || (void *)f.key > data_end ||
	    udp_len < sizeof(*f.udp) + UP_HEADER_LEN || udp_len > data_end - (void *)f.udp)
		return drop(UP_COUNT_DROP_TRUNCATED);
	if (f.header->magic != bpf_htons(UP_MAGIC))
		return drop(UP_COUNT_DROP_MAGIC);
	if (f.header->version != UP_VERSION)
		return drop(UP_COUNT_DROP_VERSION);
	if (!known_op(f.header->op))
		return drop(UP_COUNT_DROP_OP);
	f.key_len = bpf_ntohs(f.header->key_len);
	f.value_len = bpf_ntohl(f.header->value_len);
	if ((__u64)f.key_len + f.value_len != udp_len - sizeof(*f.udp) - UP_HEADER_LEN)
		return drop(UP_COUNT_DROP_TRUNCATED);
	if (f.header->op >= UP_OP_CONTROL)
		return pass(UP_COUNT_PASS_CONTROL);
	if (f.header->op != UP_OP_READ && f.header->op != UP_OP_WRITE && f.header->op != UP_OP_W_REPLY)
		return drop(UP_COUNT_DROP_OP);

	slot = shard_slot(bpf_ntohl(f.header->shard));
	if (!slot)
		return drop(UP_COUNT_DROP_INTERNAL);
	config = shard_config(slot, bpf_ntohl(f.header->shard));
	record = session_record(bpf_be64_to_cpu(f.header->session));
	if (f.header->op == UP_OP_W_REPLY)
		return acknowledge(&f, data_end, config, record);
	ms = now_ms();
	reason = admit(&f, config, record, ms);
	if (reason || !config || !record)
		return reject(&f, config, reason);
	touch(record, ms);
	if (f.header->op == UP_OP_READ)
		return read(&f, data_end, config, ms);
	return write(&f, data_end, slot, config, record, ms);
}

/*
 * WRITE step 4, once for each clone. Clones of one write arrive in order on one CPU, but one may have been lost to memory
 * pressure: they are told apart by (seq, index since this seq began), modulo the number of members, so that a write that
 * is sent again straight away still reaches every member.
 */
static __always_inline int address_clone(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	const struct up_member *member;
	struct up_clone_state *state;
	struct up_head_words before;
	struct up_config *config;
	struct up_shard *slot;
	__u32 zero = 0, shard;
	struct up_frame f;
	__u64 seq, sum;
	__u32 to;

	f.eth = data;
	f.ip = (void *)(f.eth + 1);
	f.udp = (void *)(f.ip + 1);
	f.header = (void *)(f.udp + 1);
	if ((void *)(f.header + 1) > data_end)
		return drop(UP_COUNT_DROP_CLONE);
	shard = bpf_ntohl(f.header->shard);
	slot = shard_slot(shard);
	state = bpf_map_lookup_elem(&clone_state, &zero);
	if (!slot || !state)
		return drop(UP_COUNT_DROP_INTERNAL);
	config = shard_config(slot, shard);
	if (!config || !config->must_ack_count || bpf_ntohl(f.header->epoch) != config->epoch)
		return drop(UP_COUNT_DROP_CLONE);
	seq = bpf_be64_to_cpu(f.header->seq);
	if (state->seq != seq || state->shard != shard) {
		state->seq = seq;
		state->shard = shard;
		state->index = 0;
	} else if (++state->index >= config->must_ack_count) {
		state->index = 0;
	}
	to = config->must_ack_list[state->index & (UP_MEMBERS_MAX - 1)] & (UP_MEMBERS_MAX - 1);
	member = &config->members[to];
	if (up_no_mac(member->next_hop))
		return drop(UP_COUNT_DROP_NEXT_HOP);
	before = head_words(f.header);
	f.header->cnt = to;
	sum = sum_head(0, &before, f.header);
	up_send_on(&f, member->next_hop, member->addr, member->port, sum);
	count(UP_COUNT_CLONE);
	return XDP_PASS;
}

SEC("xdp/devmap")
int coordinator_egress(struct xdp_md *ctx)
{
	return address_clone(ctx);
}

/* The same, for BPF_PROG_TEST_RUN, which refuses devmap programs. Never attached. */
SEC("xdp")
int coordinator_egress_run(struct xdp_md *ctx)
{
	return address_clone(ctx);
}

/* Under its lock. A CPU that looks at the record without the lock finds no session in it until all of it is there. */
static __always_inline void store_record(struct up_session *record, const struct up_session *from)
{
	const __u32 *words = (const __u32 *)from;
	__u32 *to = (__u32 *)record;

	*(volatile __u64 *)&record->session = 0;
	to[1] = words[1];
#pragma unroll
	for (int i = 4; i < sizeof(*record) / sizeof(*to); i++)
		to[i] = words[i];
	*(volatile __u64 *)&record->session = from->session;
}

_Static_assert(__builtin_offsetof(struct up_session, session) == 8 && __builtin_offsetof(struct up_session, state) == 4,
	       "store_record leaves the lock alone and the session to the end");

/* W_REPLY steps 1 to 3, as the agent's decision. */
static __always_inline __u32 settle(const struct up_session_command *command, struct up_session *record)
{
	struct up_fingerprint fingerprint;
	bool pending;
	__u32 index;

	bpf_spin_lock(&record->lock);
	pending = record->session == command->session && record->state == UP_STATE_PENDING &&
		  record->request == command->request && record->seq == command->seq;
	if (pending) {
		record->state = UP_STATE_COMMITTING;
		record->status = command->status;
		if (command->state == UP_STATE_COMMITTED && record->kind == UP_KIND_INCR)
			record->result = command->number;
		fingerprint.word[0] = record->fingerprint[0];
		fingerprint.word[1] = record->fingerprint[1];
		index = record->bucket;
	}
	bpf_spin_unlock(&record->lock);
	if (!pending || !resolve_key(index, &fingerprint, command->seq))
		return UP_SESSION_NOT_YOURS;
	bpf_spin_lock(&record->lock);
	record->state = command->state;
	bpf_spin_unlock(&record->lock);
	return UP_SESSION_DONE;
}

/* The agent's way into the session table: a command in, its result in the same bytes. Never attached. */
SEC("xdp")
int coordinator_session(struct xdp_md *ctx)
{
	struct up_session_command *command = (void *)(long)ctx->data;
	struct up_session *record;

	if ((void *)(command + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	record = session_record(command->session);
	if (!record || !command->session) {
		command->result = UP_SESSION_BAD_INDEX;
		return XDP_PASS;
	}
	if (command->op == UP_SESSION_OP_SETTLE) {
		command->result = settle(command, record);
		return XDP_PASS;
	}
	command->result = UP_SESSION_NOT_YOURS;
	bpf_spin_lock(&record->lock);
	if (command->op == UP_SESSION_OP_LOAD) {
		if (record->session == 0) {
			store_record(record, &command->record);
			command->result = UP_SESSION_DONE;
		}
	} else if (record->session != command->session) {
		/* Not yours. */
	} else if (command->op == UP_SESSION_OP_FORGET) {
		record->acks &= ~command->acks;
		command->result = UP_SESSION_DONE;
	} else if (command->op == UP_SESSION_OP_CLEAR) {
		store_record(record, &command->record);
		command->result = UP_SESSION_DONE;
	} else if (command->op == UP_SESSION_OP_CLOSE && record->used_ms < command->used_before_ms) {
		if (unresolved(record->state)) {
			command->result = UP_SESSION_UNRESOLVED;
		} else {
			command->request = record->request;
			command->state = record->state;
			store_record(record, &command->record);
			command->result = UP_SESSION_DONE;
		}
	}
	bpf_spin_unlock(&record->lock);
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
