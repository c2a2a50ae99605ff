// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Load for memcached over UDP, made and swallowed in the kernel: a generator of GETs whose frames user space has prepared,
 * and a sink that counts the answers and times some of them. As in load.bpf.c, both run on one CPU with bottom halves off,
 * and every counter has one writer.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define CACHE_LOAD_ITEMS (1 << 17)
#define CACHE_LOAD_TURNS (1 << 22)
/* Headers (50 bytes), "get ", a key of up to 64 bytes, CR and LF: in whole words. */
#define CACHE_LOAD_WORDS 15
#define CACHE_LOAD_SAMPLES 1024 /* requests that may be timed at once; a power of two */
#define CACHE_LOAD_BUCKETS 512 /* of latencies: 8 for each power of two */

#define UDP_OFFSET (ETH_HLEN + sizeof(struct iphdr))
#define MEMCACHED_OFFSET (UDP_OFFSET + sizeof(struct udphdr))
#define TEXT_OFFSET (MEMCACHED_OFFSET + 8)

/* A whole frame, its checksum made for request number 0. */
struct cache_load_frame {
	__u32 len;
	__u32 reserved;
	__u64 words[CACHE_LOAD_WORDS];
};

struct cache_load_settings {
	__u32 window; /* requests that may be under way */
	__u32 write_off_us; /* they are taken for lost after so long without any answer */
	__u64 interval_ns; /* between requests; 0: as many as the window allows */
	__u32 sample_mask; /* one request in so many (less one) is timed */
	__be32 server;
	__be16 port;
	__u16 reserved[3];
};

/* Written by the generator. */
struct cache_load_sent {
	__u64 requests;
	__s64 forgiven; /* requests taken for lost */
	__u64 write_offs;
	__u64 broken; /* frames that could not be made: must stay 0 */
	__u64 late; /* requests that were not sent when due, because the window was full */
	__u64 samples;
	__u64 due_ns;
	__u64 full_since_ns;
	__u64 full_answers;
	__u32 full_count;
	__u32 full;
};

/* Written by the sink. */
struct cache_load_received {
	__u64 answers;
	__u64 found;
	__u64 missing;
	__u64 other;
	__u64 bytes; /* of answers, headers included */
	__u64 latency[CACHE_LOAD_BUCKETS];
};

struct cache_load_settings cache_load_settings = {};
struct cache_load_sent cache_load_sent = {};
struct cache_load_received cache_load_received = {};
struct cache_load_frame cache_load_frames[CACHE_LOAD_ITEMS] = {};
__u32 cache_load_turns[CACHE_LOAD_TURNS] = {}; /* items in the order in which they are asked for, over and over */
__u64 cache_load_times[CACHE_LOAD_SAMPLES] = {}; /* when the request of each number was due; 0: not under way */

/* True when there is no room for another request. Forgives requests that are lost, lest the load dies away. */
static __always_inline bool window_full(void)
{
	__u64 answers = *(volatile __u64 *)&cache_load_received.answers;
	__s64 outstanding = cache_load_sent.requests - answers - cache_load_sent.forgiven;

	if (outstanding < 0) {
		/* Answers to what was written off. */
		cache_load_sent.forgiven += outstanding;
		outstanding = 0;
	}
	/* Refilled from a quarter, as a busy device hands over many frames at once: one for each answer would be a wake-up for each. */
	if (outstanding >= cache_load_settings.window)
		cache_load_sent.full = 1;
	else if (outstanding <= cache_load_settings.window / 4)
		cache_load_sent.full = 0;
	if (!cache_load_sent.full) {
		cache_load_sent.full_count = 0;
		return false;
	}
	/* The clock is read now and then only. */
	if (cache_load_sent.full_count++ % 1024)
		return true;
	if (cache_load_sent.full_count == 1 || cache_load_sent.full_answers != answers) {
		cache_load_sent.full_since_ns = bpf_ktime_get_ns();
		cache_load_sent.full_answers = answers;
		return true;
	}
	if (bpf_ktime_get_ns() - cache_load_sent.full_since_ns < cache_load_settings.write_off_us * 1000ULL)
		return true;
	cache_load_sent.forgiven += outstanding;
	cache_load_sent.write_offs++;
	cache_load_sent.full_count = 0;
	return false;
}

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* Run with BPF_F_TEST_XDP_LIVE_FRAMES on the sink's interface: XDP_TX leaves through it, to the server. */
SEC("xdp")
int cache_load_generate(struct xdp_md *ctx)
{
	struct cache_load_sent *sent = &cache_load_sent;
	__u64 interval = cache_load_settings.interval_ns, now = 0, *to;
	const struct cache_load_frame *frame;
	void *data, *end;
	__u32 item, number = 0;

	if (interval) {
		/* Requests are due at moments that do not depend on the answers. */
		now = bpf_ktime_get_ns();
		if (!sent->due_ns || now - sent->due_ns > 1000000000ULL)
			sent->due_ns = now;
		if (now < sent->due_ns)
			return XDP_DROP;
	}
	if (window_full()) {
		if (interval) {
			sent->late++;
			sent->due_ns += interval;
		}
		return XDP_DROP;
	}
	item = cache_load_turns[sent->requests & (CACHE_LOAD_TURNS - 1)] & (CACHE_LOAD_ITEMS - 1);
	frame = &cache_load_frames[item];
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + sizeof(frame->words) > end) {
		sent->broken++;
		return XDP_DROP;
	}
	/* Pages come back with the last packet's bytes, so all of the packet is written each time. */
	to = data;
	for (int i = 0; i < CACHE_LOAD_WORDS; i++)
		to[i] = frame->words[i];
	if (!(sent->requests & cache_load_settings.sample_mask)) {
		struct udphdr *udp = data + UDP_OFFSET;
		__u16 check;

		number = ++sent->samples & (CACHE_LOAD_SAMPLES - 1);
		cache_load_times[number] = interval ? sent->due_ns : bpf_ktime_get_ns();
		*(__be16 *)(data + MEMCACHED_OFFSET) = bpf_htons(number);
		check = ~fold((__u16)~udp->check + (__u64)bpf_htons(number));
		udp->check = check ? check : 0xffff;
	}
	if (frame->len != sizeof(frame->words) &&
	    bpf_xdp_adjust_tail(ctx, (int)frame->len - (int)sizeof(frame->words))) {
		sent->broken++;
		return XDP_DROP;
	}
	sent->requests++;
	sent->due_ns += interval;
	return XDP_TX;
}

/* Three bits behind the highest one: buckets are an eighth of a power of two wide. */
static __always_inline __u32 bucket_of(__u64 ns)
{
	__u32 high = 0;

	if (ns < 8)
		return ns;
	for (int shift = 32; shift; shift >>= 1) {
		if (ns >> (high + shift))
			high += shift;
	}
	return high * 8 + ((ns >> (high - 3)) & 7);
}

/* On the tester's interface. */
SEC("xdp")
int cache_load_sink(struct xdp_md *ctx)
{
	struct cache_load_received *received = &cache_load_received;
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct iphdr *ip = data + ETH_HLEN;
	struct udphdr *udp = data + UDP_OFFSET;
	__u32 number, bucket;
	__u64 due;

	if (data + TEXT_OFFSET + 4 > end || eth->h_proto != bpf_htons(ETH_P_IP) || *(__u8 *)ip != 0x45 ||
	    ip->protocol != IPPROTO_UDP || ip->saddr != cache_load_settings.server ||
	    udp->source != cache_load_settings.port)
		return XDP_PASS;
	received->answers++;
	received->bytes += end - data;
	/* "VALU" or "END\r" */
	switch (*(__be32 *)(data + TEXT_OFFSET)) {
	case bpf_htonl(0x56414c55):
		received->found++;
		break;
	case bpf_htonl(0x454e440d):
		received->missing++;
		break;
	default:
		received->other++;
	}
	number = bpf_ntohs(*(__be16 *)(data + MEMCACHED_OFFSET)) & (CACHE_LOAD_SAMPLES - 1);
	due = number ? cache_load_times[number] : 0;
	if (due) {
		cache_load_times[number] = 0;
		bucket = bucket_of(bpf_ktime_get_ns() - due);
		if (bucket < CACHE_LOAD_BUCKETS)
			received->latency[bucket]++;
	}
	return XDP_DROP;
}

/* On the interface of a server without a cache: all take the same way into the stack then. */
SEC("xdp")
int cache_load_pass(struct xdp_md *ctx)
{
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
