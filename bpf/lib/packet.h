/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Parsing a frame down to our header, and sending it on to somebody else in place. */
#ifndef UNDERPASS_LIB_PACKET_H
#define UNDERPASS_LIB_PACKET_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <underpass/wire.h>
#include "checksum.h"

#define UP_IP_FRAGMENT 0x3fff /* more fragments, or an offset */
#define UP_IP_OFFSET 0x1fff
#define UP_TTL 64

struct up_frame {
	struct ethhdr *eth;
	struct iphdr *ip;
	struct udphdr *udp;
	struct up_header *header;
	__u8 *key;
	__u32 key_len;
	__u32 value_len;
};

/*
 * The key's length for use as an offset. Kernels before 6.18 forget a bound that they saw on the lower half of a spilled
 * register, so the mask must stay, and the compiler must not know that it changes nothing.
 */
static __always_inline __u32 up_key_len(const struct up_frame *f)
{
	__u32 key_len = f->key_len;

	barrier_var(key_len);
	return key_len & 0xff;
}

static __always_inline void up_copy_mac(__u8 *to, const __u8 *from)
{
	__u16 *t = (__u16 *)to;
	const __u16 *f = (const __u16 *)from;

	t[0] = f[0];
	t[1] = f[1];
	t[2] = f[2];
}

static __always_inline bool up_no_mac(const __u8 *mac)
{
	const __u16 *m = (const __u16 *)mac;

	return !(m[0] | m[1] | m[2]);
}

/*
 * Rewrites Ethernet, IP and UDP so that the frame goes from us, to whom it was addressed so far, to another host. sum is
 * what the caller changed in the UDP payload. The source of the frame must still be the sender's.
 */
static __always_inline void up_send_on(struct up_frame *f, const __u8 *next_hop, __be32 addr, __be16 port, __u64 sum)
{
	struct ethhdr *eth = f->eth;
	struct iphdr *ip = f->ip;
	struct udphdr *udp = f->udp;
	__u64 ip_sum;

	/* Our own address moves from destination to source, which no checksum notices: only the two others count. */
	ip_sum = up_sum32(0, ip->saddr, addr);
	sum += ip_sum;
	sum = up_sum16(sum, udp->source, port);
	ip_sum =
		up_sum16(ip_sum, *(__u16 *)&ip->ttl, (*(__u16 *)&ip->ttl & bpf_htons(0x00ff)) | bpf_htons(UP_TTL << 8));
	ip->check = up_checksum(ip->check, ip_sum);
	ip->saddr = ip->daddr;
	ip->daddr = addr;
	ip->ttl = UP_TTL;
	udp->source = udp->dest;
	udp->dest = port;
	udp->check = up_udp_checksum(udp->check, sum);
	up_copy_mac(eth->h_source, eth->h_dest);
	up_copy_mac(eth->h_dest, next_hop);
}

/* The same back to the sender. */
static __always_inline void up_send_back(struct up_frame *f, __u64 sum)
{
	__u8 sender[6];

	up_copy_mac(sender, f->eth->h_source);
	up_send_on(f, sender, f->ip->saddr, f->udp->source, sum);
}

#endif /* UNDERPASS_LIB_PACKET_H */
