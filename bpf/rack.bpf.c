/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The switch of the virtual rack.
 *
 * rack_switch runs on every switch-side veth and forwards by destination MAC address; broadcast and multicast frames
 * are cloned to every port, and rack_flood, which runs once per clone on its way out, keeps those that belong there.
 * Both apply the faults set for the link (a directed pair of ports). A frame that must arrive later, or twice, is
 * copied to the ring `line`, from which the delay line in user space sends it out of its port when it is due.
 *
 * A port's number is the index of its interface in the switch's namespace, which holds nothing else.
 */
#include <stdbool.h>
#include <linux/types.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

/* Interface 1 is the loopback interface: ports are 2 to RACK_PORTS - 1. */
#define RACK_PORTS 128
#define RACK_LINKS (RACK_PORTS * RACK_PORTS)
#define RACK_LINE_BYTES (8 * 1024 * 1024)
#define RACK_SMALL 256
#define RACK_LARGE 2048

enum rack_link_flag {
	RACK_LINK_CONNECTED = 1, /* both ports are in one subnet */
	RACK_LINK_CUT = 2,
	RACK_LINK_RANDOM = 4, /* any of the other faults is set */
};

/* Written by user space. Probabilities are multiples of 2^-32. */
struct rack_link {
	__u64 flags; /* enum rack_link_flag */
	__u64 loss;
	__u64 duplicate;
	__u64 reorder;
	__u64 reorder_hold_ns;
	__u64 delay_ns;
	__u64 jitter_ns; /* uniform in 0 to this, added to delay_ns */
	__u64 seed;
	__u64 origin[2]; /* the link's sequence numbers when the faults were set */
};

/* Counted while a fault is set on the link; written by the kernel only. */
struct rack_link_counts {
	__u64 sequence[2]; /* IPv4, and all else: address resolution must not shift the fate of data */
	__u64 cut;
	__u64 lost;
	__u64 duplicated;
	__u64 reordered;
	__u64 delayed;
	__u64 line_full; /* the delay line's ring was full: a held frame is lost, a duplicate does not happen */
};

struct rack_port_counts {
	__u64 rx_frames;
	__u64 rx_bytes;
	__u64 tx_frames; /* those handed to the delay line included */
	__u64 tx_bytes;
	__u64 rx_malformed; /* shorter than an Ethernet header */
	__u64 rx_unknown; /* nobody in the subnet has the destination address */
};

/* Written by user space. */
struct rack_control {
	__u64 seed;
	__u64 stop; /* not 0: the delay line ends */
};

/* Written by the delay line. */
struct rack_line_counts {
	__u64 taken;
	__u64 sent;
	__u64 overflow; /* more frames held than the delay line has room for */
	__u64 failed; /* refused by the port */
	__u64 held; /* at present */
	__u64 beat_ns; /* CLOCK_MONOTONIC when the delay line last showed life */
};

struct rack_held_head {
	__u64 due_ns; /* CLOCK_MONOTONIC */
	__u32 port;
	__u16 copies;
	__u16 length;
};

struct rack_held_small {
	struct rack_held_head head;
	__u8 frame[RACK_SMALL];
};

struct rack_held_large {
	struct rack_held_head head;
	__u8 frame[RACK_LARGE];
};

struct rack_station {
	__u8 mac[6];
	__u16 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, RACK_PORTS);
	__type(key, struct rack_station);
	__type(value, __u32); /* port */
} stations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__uint(max_entries, RACK_PORTS);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
} ports SEC(".maps");

/* The same ports with rack_flood on their way out. */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__uint(max_entries, RACK_PORTS);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct bpf_devmap_val));
} flood SEC(".maps");

/* By from * RACK_PORTS + to. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RACK_LINKS);
	__type(key, __u32);
	__type(value, struct rack_link);
} links SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RACK_LINKS);
	__type(key, __u32);
	__type(value, struct rack_link_counts);
} link_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, RACK_PORTS);
	__type(key, __u32);
	__type(value, struct rack_port_counts);
} port_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rack_control);
} control SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rack_line_counts);
} line_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, RACK_LINE_BYTES);
} line SEC(".maps");

/* Never read: makes libbpf-cargo generate the Rust side of this structure too; those of the maps come by themselves. */
struct rack_held_head layout_held_head;

static __always_inline void count(__u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

/* SplitMix64's output function: the draws of one frame are independent, and repeat with the seed. */
static __always_inline __u64 draw(__u64 seed, __u64 n)
{
	__u64 z = seed + (n + 1) * 0x9e3779b97f4a7c15ULL;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
	return z ^ (z >> 31);
}

static __always_inline int hold(struct xdp_md *ctx, __u32 port, __u64 due_ns, __u16 copies)
{
	__u64 length = ctx->data_end - ctx->data;
	struct rack_held_small *small;
	struct rack_held_large *large;

	if (length < ETH_HLEN || length > RACK_LARGE)
		return -1;
	if (length <= RACK_SMALL) {
		small = bpf_ringbuf_reserve(&line, sizeof(*small), 0);
		if (!small)
			return -1;
		small->head.due_ns = due_ns;
		small->head.port = port;
		small->head.copies = copies;
		small->head.length = length;
		if (bpf_xdp_load_bytes(ctx, 0, small->frame, length)) {
			bpf_ringbuf_discard(small, 0);
			return -1;
		}
		bpf_ringbuf_submit(small, 0);
		return 0;
	}
	large = bpf_ringbuf_reserve(&line, sizeof(*large), 0);
	if (!large)
		return -1;
	large->head.due_ns = due_ns;
	large->head.port = port;
	large->head.copies = copies;
	large->head.length = length;
	if (bpf_xdp_load_bytes(ctx, 0, large->frame, length)) {
		bpf_ringbuf_discard(large, 0);
		return -1;
	}
	bpf_ringbuf_submit(large, 0);
	return 0;
}

/* Whether the frame goes out of the port now. If not, it is lost, or the delay line has it. */
static __always_inline bool passes(struct xdp_md *ctx, const struct rack_link *link, __u32 index, __u32 port, bool ipv4)
{
	__u64 n, seed, fates, times, now, wait = 0;
	struct rack_link_counts *counts;
	__u16 copies = 1;

	if (link->flags == RACK_LINK_CONNECTED)
		return true;
	counts = bpf_map_lookup_elem(&link_counts, &index);
	if (!counts)
		return false;
	if (link->flags & RACK_LINK_CUT) {
		count(&counts->cut);
		return false;
	}
	if (ipv4) {
		n = __sync_fetch_and_add(&counts->sequence[0], 1) - link->origin[0];
		seed = link->seed;
	} else {
		n = __sync_fetch_and_add(&counts->sequence[1], 1) - link->origin[1];
		seed = ~link->seed;
	}
	fates = draw(seed, 3 * n);
	if ((__u32)fates < link->loss) {
		count(&counts->lost);
		return false;
	}
	times = draw(seed, 3 * n + 1);
	if (link->delay_ns | link->jitter_ns) {
		/* The high half of 32 random bits times the bound is uniform below it: no division. */
		wait = link->delay_ns + (((times >> 32) * (link->jitter_ns >> 10)) >> 22);
		count(&counts->delayed);
	}
	if ((__u32)times < link->reorder) {
		wait += link->reorder_hold_ns;
		count(&counts->reordered);
	}
	if (fates >> 32 < link->duplicate)
		copies = 2;
	if (!wait && copies == 1)
		return true;
	now = bpf_ktime_get_ns();
	if (!wait) {
		if (hold(ctx, port, now, 1))
			count(&counts->line_full);
		else
			count(&counts->duplicated);
		return true;
	}
	if (hold(ctx, port, now + wait, copies))
		count(&counts->line_full);
	else if (copies == 2)
		count(&counts->duplicated);
	return false;
}

static __always_inline void count_tx(__u32 port, __u64 length)
{
	struct rack_port_counts *counts = bpf_map_lookup_elem(&port_counts, &port);

	if (counts) {
		counts->tx_frames++;
		counts->tx_bytes += length;
	}
}

SEC("xdp")
int rack_switch(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	__u32 from = ctx->ingress_ifindex, to, index, *port;
	struct rack_port_counts *counts;
	struct rack_station station = {};
	struct rack_link *link;

	counts = bpf_map_lookup_elem(&port_counts, &from);
	if (!counts)
		return XDP_ABORTED;
	if ((void *)(eth + 1) > end) {
		counts->rx_malformed++;
		return XDP_DROP;
	}
	counts->rx_frames++;
	counts->rx_bytes += ctx->data_end - ctx->data;
	if (eth->h_dest[0] & 1)
		return bpf_redirect_map(&flood, 0, BPF_F_BROADCAST | BPF_F_EXCLUDE_INGRESS);

	__builtin_memcpy(station.mac, eth->h_dest, sizeof(station.mac));
	port = bpf_map_lookup_elem(&stations, &station);
	if (!port) {
		counts->rx_unknown++;
		return XDP_DROP;
	}
	to = *port;
	index = from * RACK_PORTS + to;
	link = bpf_map_lookup_elem(&links, &index);
	if (!link || !(link->flags & RACK_LINK_CONNECTED)) {
		counts->rx_unknown++;
		return XDP_DROP;
	}
	if (!passes(ctx, link, index, to, eth->h_proto == bpf_htons(ETH_P_IP)))
		return XDP_DROP;
	count_tx(to, ctx->data_end - ctx->data);
	return bpf_redirect_map(&ports, to, XDP_DROP);
}

SEC("xdp/devmap")
int rack_flood(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	__u32 to = ctx->egress_ifindex;
	__u32 index = ctx->ingress_ifindex * RACK_PORTS + to;
	struct rack_link *link = bpf_map_lookup_elem(&links, &index);

	if ((void *)(eth + 1) > end || !link || !(link->flags & RACK_LINK_CONNECTED))
		return XDP_DROP;
	if (!passes(ctx, link, index, to, eth->h_proto == bpf_htons(ETH_P_IP)))
		return XDP_DROP;
	count_tx(to, ctx->data_end - ctx->data);
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
