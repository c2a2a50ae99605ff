// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The cache at XDP: answers `get` and `gets` of one key over UDP for items that the directory has and whose word is what it is
 * to be, as noted when memcached was asked or a set read; passes everything else on, untouched. docs/cache.md argues why no
 * answer is stale.
 *
 * Nothing here takes a lock. Slots do not change while the directory shows them, and are not used again before every run of
 * this program that may have seen them has ended.
 *
 * Of several keys memcached answers each in a datagram of its own, which a program that has one frame cannot: passed on.
 */
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include "lib/cache.h"
#include "lib/checksum.h"
#include "lib/clock.h"

_Static_assert(TICK_SHIFT == UC_TICK_SHIFT, "the agent and the clock agree");

#define UC_IP_FRAGMENT 0x3fff /* more fragments, or an offset */
#define UC_UDP (sizeof(struct ethhdr) + sizeof(struct iphdr))
/* memcached's own header in front of a datagram: request, sequence number, datagrams in all, reserved. */
#define UC_FRAME 8
#define UC_TEXT (sizeof(struct udphdr) + UC_FRAME)
#define UC_TTL 64
/* Every driver keeps so much free in front of a frame, the kernel's own notes aside. */
#define UC_FRONT_MAX 192
#define UC_END_LEN 5 /* "END" and a line break */
#define UC_KEY_WORDS (UC_KEY_ROOM / 8)
/* Reports of one key are this far apart. */
#define UC_REPORT_MS 20
#define UC_RECENT 4096

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} misses SEC(".maps");

/* Keys reported a moment ago: tag << 32 | milliseconds. Races lose a report or make one too many. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, UC_RECENT);
	__type(key, __u32);
	__type(value, __u64);
} recent SEC(".maps");

/*
 * When a source will have made up for what it was sent, in bytes of settings.limit since time began: a leaky bucket. Sources that
 * share one have one limit. The agent sets max_entries before loading: 1 if there is no limit.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sources SEC(".maps");

/* A request on its way through, for each CPU. */
struct uc_request {
	__u8 text[UC_REQUEST_MAX + UC_KEY_ROOM]; /* UDP header, memcached's, and the command */
	__u32 len; /* of text */
	__u32 cas; /* gets */
	__u64 now_ms;
	__u64 global;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct uc_request);
} requests SEC(".maps");

/* Whether 0 < x <= most, in comparisons that the verifier understands, not in the one that the compiler makes of them. */
#define within(x, most)                      \
	({                                   \
		bool within_x;               \
		barrier_var(x);              \
		within_x = (x) <= (most);    \
		if (within_x) {              \
			barrier_var(x);      \
			within_x = (x) != 0; \
		}                            \
		within_x;                    \
	})

static __always_inline int pass(__u32 counter)
{
	count(counter);
	return XDP_PASS;
}

/* Whether the slot's key is the request's. */
static __always_inline bool same_key(const struct uc_slot *slot, const struct uc_request *r, __u32 at, __u32 len)
{
	/* Behind "VALUE ". */
	const __u8 *key = (const __u8 *)(slot + 1) + 6;

	if (slot->key_len != len)
		return false;
	for (__u32 i = 0; i < UC_KEY_WORDS; i++) {
		__u64 ours = *(const __u64 *)(key + 8 * i);
		__u64 theirs;
		__u32 from = at + 8 * i;

		if (from > UC_REQUEST_MAX + UC_KEY_ROOM - 8)
			return false;
		theirs = *(const __u64 *)(r->text + from);
		if (len < 8)
			return len == 0 || low_bytes(ours ^ theirs, len) == 0;
		if (ours != theirs)
			return false;
		len -= 8;
	}
	return false;
}

static __always_inline void report(const struct uc_request *r, __u32 at, __u32 len, __u64 hash, __u64 word)
{
	__u32 index = hash & (UC_RECENT - 1);
	__u64 *last = bpf_map_lookup_elem(&recent, &index);
	/* Once more at once if a command came since. */
	__u64 mark = (hash ^ word) >> 32 << 32 | (__u32)r->now_ms;
	struct uc_report *out;

	if (!last || ((*last ^ mark) >> 32 == 0 && (__u32)mark - (__u32)*last < UC_REPORT_MS))
		return;
	*last = mark;
	out = bpf_ringbuf_reserve(&misses, sizeof(*out), 0);
	if (!out) {
		count(UC_COUNT_REPORT_LOST);
		return;
	}
	out->hash = hash;
	out->number = r->cas;
	out->notice = UC_NOTICE_MISS;
	out->key_len = len;
	for (__u32 i = 0; i < UC_KEY_WORDS; i++) {
		__u32 from = at + 8 * i;

		if (from > UC_REQUEST_MAX + UC_KEY_ROOM - 8 || 8 * i >= len)
			break;
		*(__u64 *)(out->key + 8 * i) = *(const __u64 *)(r->text + from);
	}
	bpf_ringbuf_submit(out, 0);
	count(UC_COUNT_REPORT);
}

/* A key's valid item. If there is none, why says why. */
static __always_inline struct uc_slot *find(struct uc_request *r, __u32 at, __u32 len, __u64 hash, __u32 *why)
{
	__u32 index = hash_set(hash), tag = hash_tag(hash);
	struct uc_set *set = bpf_map_lookup_elem(&sets, &index);
	__u64 word;

	*why = UC_COUNT_MISS_ABSENT;
	if (!set)
		return NULL;
	/* This load is where a hit takes place. */
	word = *(volatile __u64 *)&set->word[hash_which(hash)];
	for (int i = 0; i < UC_WAYS; i++) {
		__u64 way = *(volatile __u64 *)&set->way[i], changed;
		struct uc_slot *slot;

		if (way >> 32 != tag || !(__u32)way)
			continue;
		slot = slot_of(way);
		if (!slot || !same_key(slot, r, at, len))
			continue;
		/* One comparison, which the verifier follows once: the words, and a number for those who ask for it. */
		changed = (slot->word ^ word) | (slot->global ^ r->global) | (r->cas & !slot->cas_len);
		barrier_var(changed);
		if (changed) {
			*why = word & UC_FLIGHT ? UC_COUNT_MISS_FLIGHT : UC_COUNT_MISS_CHANGED;
			continue;
		}
		if (r->now_ms >= slot->deadline_ms) {
			*why = UC_COUNT_MISS_EXPIRED;
			continue;
		}
		if (!slot->used)
			slot->used = 1;
		return slot;
	}
	if (!(word & UC_WRITES))
		report(r, at, len, hash, word);
	return NULL;
}

/* The length of the key at at, which ends with the request, and its hash; 0: it does not, or is none. */
static __always_inline __u32 take_key(const struct uc_request *r, __u32 at, __u64 *out)
{
	__u64 hash = settings.secret[0];
	__u32 len = 0;

	for (__u32 i = 0; i < UC_KEY_WORDS; i++) {
		__u32 from = at + 8 * i;
		__u64 word = *(const __u64 *)(r->text + from);
		/* The first byte that is no part of a key: below 0x21. */
		__u64 low = (word - 0x2121212121212121ULL) & ~word & 0x8080808080808080ULL;

		if (low) {
			__u32 bytes = (((low & -low) - 1) & 0x0101010101010101ULL) * 0x0101010101010101ULL >> 56;

			bytes = (bytes - 1) & 7;
			len = 8 * i + bytes;
			if (bytes)
				hash = hash_word(hash, low_bytes(word, bytes));
			break;
		}
		hash = hash_word(hash, word);
	}
	*out = hash_end(hash, len);
	if (len > UC_KEY_MAX || at + len + 2 != r->len ||
	    *(const __u16 *)(r->text + at + (len & 0xff)) != ('\r' | '\n' << 8))
		return 0;
	return len;
}

/* Adds the sum of a piece that begins at offset at. */
static __always_inline __u32 add_sum(__u32 sum, __u32 at, __u16 piece)
{
	/* At an odd offset the bytes fall into the other halves of the checksum's words. */
	return sum + (at & 1 ? (__u16)(piece << 8 | piece >> 8) : piece);
}

/* Writes the item into the frame and returns the sum of its bytes; 0: it could not be, which cannot be. */
static __always_inline __u32 put_item(struct xdp_md *ctx, struct uc_slot *slot, __u32 out, bool with_cas)
{
	__u32 head = slot->head_len, tail = slot->tail_len, cas = slot->cas_len, sum;
	__u8 *bytes = (__u8 *)(slot + 1);

	if (!within(head, UC_HEAD_MAX) || !within(tail, UC_ANSWER_MAX))
		return 0;
	sum = add_sum(slot->head_sum, 0, 0);
	if (!with_cas) {
		if (bpf_xdp_store_bytes(ctx, out, bytes, head + tail))
			return 0;
		return add_sum(sum, head, slot->tail_sum);
	}
	if (!within(cas, sizeof(slot->cas)))
		return 0;
	if (bpf_xdp_store_bytes(ctx, out, bytes, head) || bpf_xdp_store_bytes(ctx, out + head, slot->cas, cas) ||
	    bpf_xdp_store_bytes(ctx, out + head + cas, bytes + head, tail))
		return 0;
	sum = add_sum(sum, head, slot->cas_sum);
	return add_sum(sum, head + cas, slot->tail_sum);
}

static __always_inline bool ours(__be32 addr)
{
	for (__u32 i = 0; i < UC_ADDRESSES; i++) {
		if (i >= settings.address_count)
			break;
		if (settings.addresses[i] == addr)
			return true;
	}
	return false;
}

static __always_inline bool trusted(__be32 addr)
{
	for (__u32 i = 0; i < UC_ADDRESSES; i++) {
		if (i >= settings.prefix_count)
			break;
		if ((addr & settings.prefixes[i].mask) == settings.prefixes[i].addr)
			return true;
	}
	return false;
}

/*
 * Takes an answer's bytes from what a source may be sent; false: it has had that. crates/cache/src/limit.rs is the same. Each
 * CPU that looks at the same moment may take one answer too many.
 */
static __always_inline bool within_limit(__be32 source, __u64 now_ms, __u32 bytes)
{
	__u32 index = hash_end(hash_word(settings.secret[0], source), sizeof(source)) & (UC_SOURCES - 1);
	__u64 *bucket = bpf_map_lookup_elem(&sources, &index);
	__u64 least = now_ms * settings.limit, most = least + UC_BURST_MS * settings.limit, level;

	if (!bucket)
		return false;
	level = *(volatile __u64 *)bucket;
	if (level < least) {
		/* Whoever else raises it, raises it as far. */
		__sync_val_compare_and_swap(bucket, level, least);
		level = least;
	}
	if (level + bytes > most)
		return false;
	__sync_fetch_and_add(bucket, bytes);
	return true;
}

/*
 * Whether the request's checksums hold, as the network stack would find. A frame that never was on a wire may have only the
 * beginning of its UDP checksum, the pseudo header's sum.
 */
static __always_inline bool intact(const struct iphdr *ip, const struct udphdr *udp, const struct uc_request *r)
{
	const __u32 *word = (const __u32 *)ip;
	__u32 len = r->len;
	__u64 sum = 0, pseudo;
	__s64 text;

#pragma unroll
	for (int i = 0; i < 5; i++)
		sum += word[i];
	if (up_fold(sum) != 0xffff)
		return false;
	if (udp->check == 0)
		return true;
	pseudo = (__u64)ip->saddr + ip->daddr + bpf_htons(IPPROTO_UDP) + udp->len;
	if (udp->check == up_fold(pseudo))
		return true;
	if (!within(len, UC_REQUEST_MAX))
		return false;
	text = bpf_csum_diff(NULL, 0, (__be32 *)r->text, (len + 3) & 1020, 0);
	return text >= 0 && up_fold(pseudo + (__u32)text) == 0xffff;
}

/* What an answer takes over from its request, the other way around. */
struct uc_route {
	__u8 to_mac[6];
	__u8 from_mac[6];
	__be32 to;
	__be32 from;
	__be16 to_port;
	__be16 from_port;
	__be16 request;
};

/*
 * Makes the frame longer by a number of bytes, or shorter: behind, or where a driver has no room there (veth, of frames
 * that come from a socket), in front. What the frame holds is lost if it succeeds.
 */
static __always_inline bool resize(struct xdp_md *ctx, int by)
{
	int front;

	if (!bpf_xdp_adjust_tail(ctx, by))
		return true;
	front = by < UC_FRONT_MAX ? by : UC_FRONT_MAX;
	if (by <= 0 || bpf_xdp_adjust_head(ctx, -front))
		return false;
	if (by == front || !bpf_xdp_adjust_tail(ctx, by - front))
		return true;
	/* Back to where it was. */
	bpf_xdp_adjust_head(ctx, front);
	return false;
}

/* Headers of the answer. The item's own bytes are in the frame and the sum of all behind the headers in items. */
static __always_inline int send(struct xdp_md *ctx, const struct uc_route *route, __u32 items, __u32 payload)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct iphdr *ip = (void *)(eth + 1);
	struct udphdr *udp = (void *)(ip + 1);
	__be16 *frame = (void *)(udp + 1);
	__u16 udp_len = sizeof(*udp) + payload;
	__u64 sum;

	if ((void *)(frame + 4) > data_end)
		return XDP_ABORTED;
	__builtin_memcpy(eth->h_dest, route->to_mac, 6);
	__builtin_memcpy(eth->h_source, route->from_mac, 6);
	eth->h_proto = bpf_htons(ETH_P_IP);
	*(__u16 *)ip = bpf_htons(0x4500);
	ip->tot_len = bpf_htons(sizeof(*ip) + udp_len);
	ip->id = 0;
	ip->frag_off = bpf_htons(0x4000);
	ip->ttl = UC_TTL;
	ip->protocol = IPPROTO_UDP;
	ip->check = 0;
	ip->saddr = route->from;
	ip->daddr = route->to;
	sum = 0;
#pragma unroll
	for (int i = 0; i < 5; i++)
		sum += ((const __u32 *)ip)[i];
	ip->check = ~up_fold(sum);
	udp->source = route->from_port;
	udp->dest = route->to_port;
	udp->len = bpf_htons(udp_len);
	frame[0] = route->request;
	frame[1] = 0;
	frame[2] = bpf_htons(1);
	frame[3] = 0;
	sum = (__u64)items + ip->saddr + ip->daddr + bpf_htons(IPPROTO_UDP) + udp->len;
	sum += udp->source + udp->dest + udp->len + frame[0] + frame[2];
	udp->check = ~up_fold(sum);
	if (!udp->check)
		udp->check = 0xffff;
	count(UC_COUNT_HIT);
	return XDP_TX;
}

/*
 * Whether nothing is served now; notes the global word. The agent moves that before it lets serving go on, so who finds it the
 * same before and after has not looked on both sides of a flush (tests/blind.rs).
 */
static __always_inline bool blind(volatile struct uc_control *c, struct uc_request *r)
{
	r->global = c->global;
	return r->global & UC_FLIGHT || r->now_ms >= c->serve_until_ms || c->let_go != c->looked ||
	       c->global != r->global;
}

SEC("xdp")
int cache(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct iphdr *ip = (void *)(eth + 1);
	struct udphdr *udp = (void *)(ip + 1);
	__u8 end[UC_END_LEN + 1] = "END\r\n";
	__u32 zero = 0, frame_len, udp_len, payload, text, at, len, why, answer, sum;
	struct uc_route route;
	struct uc_control *c;
	struct uc_request *r;
	struct uc_slot *slot;
	__u64 hash;

	if ((void *)(udp + 1) > data_end)
		return XDP_PASS;
	/* To several stations: the answer would be in their name. */
	if (eth->h_dest[0] & 1)
		return XDP_PASS;
	if (eth->h_proto != bpf_htons(ETH_P_IP) || ip->version != 4 || ip->ihl != 5 || ip->protocol != IPPROTO_UDP ||
	    ip->frag_off & bpf_htons(UC_IP_FRAGMENT) || udp->dest != settings.port || !ours(ip->daddr))
		return XDP_PASS;
	udp_len = bpf_ntohs(udp->len);
	frame_len = data_end - data;
	if (bpf_ntohs(ip->tot_len) != sizeof(*ip) + udp_len || udp_len <= UC_TEXT || udp_len > UC_REQUEST_MAX ||
	    UC_UDP + udp_len > frame_len)
		return pass(UC_COUNT_PASS_REQUEST);
	r = bpf_map_lookup_elem(&requests, &zero);
	c = the_control();
	if (!r || !c)
		return XDP_PASS;
	if (!within(udp_len, UC_REQUEST_MAX) || bpf_xdp_load_bytes(ctx, UC_UDP, r->text, udp_len))
		return pass(UC_COUNT_PASS_REQUEST);
	*(__u64 *)(r->text + udp_len) = 0;
	text = *(const __u32 *)(r->text + UC_TEXT);
	if (*(const __be16 *)(r->text + sizeof(*udp) + 4) != bpf_htons(1))
		return pass(UC_COUNT_PASS_REQUEST);
	r->cas = text == ('g' | 'e' << 8 | 't' << 16 | 's' << 24);
	if (r->cas ? r->text[UC_TEXT + 4] != ' ' : text != ('g' | 'e' << 8 | 't' << 16 | ' ' << 24))
		return pass(UC_COUNT_PASS_REQUEST);
	r->len = udp_len;
	at = r->cas ? UC_TEXT + 5 : UC_TEXT + 4;
	len = take_key(r, at, &hash);
	if (!len)
		return pass(UC_COUNT_PASS_REQUEST);
	fetch_set(hash);
	if (!intact(ip, udp, r))
		return pass(UC_COUNT_PASS_REQUEST);
	r->now_ms = now_ms();
	if (blind(c, r))
		return pass(UC_COUNT_PASS_BLIND);
	slot = find(r, at, len, hash, &why);
	if (!slot) {
		count(UC_COUNT_MISS);
		return pass(why);
	}
	answer = slot->head_len + slot->tail_len + (r->cas ? slot->cas_len : 0);
	payload = UC_FRAME + answer + UC_END_LEN;
	if (sizeof(*udp) + payload > udp_len) {
		if (!trusted(ip->saddr))
			return pass(UC_COUNT_PASS_UNTRUSTED);
		if (settings.limit && !within_limit(ip->saddr, r->now_ms, UC_UDP + sizeof(*udp) + payload))
			return pass(UC_COUNT_PASS_LIMIT);
	}
	__builtin_memcpy(route.to_mac, eth->h_source, 6);
	__builtin_memcpy(route.from_mac, eth->h_dest, 6);
	route.to = ip->saddr;
	route.from = ip->daddr;
	route.to_port = udp->source;
	route.from_port = udp->dest;
	route.request = *(const __be16 *)(r->text + sizeof(*udp));
	if (!resize(ctx, (int)(UC_UDP + sizeof(*udp) + payload) - (int)frame_len))
		return pass(UC_COUNT_PASS_ROOM);
	sum = put_item(ctx, slot, UC_UDP + UC_TEXT, r->cas);
	if (!sum || bpf_xdp_store_bytes(ctx, UC_UDP + UC_TEXT + answer, end, UC_END_LEN))
		return XDP_ABORTED;
	sum = add_sum(sum, answer, (__u16)('E' | 'N' << 8) + (__u16)('D' | '\r' << 8) + (__u16)'\n');
	return send(ctx, &route, sum, payload);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
