/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Incremental Internet checksums (RFC 1624). A change of the packet is collected as a 64-bit sum of one's complement
 * 32-bit words in memory order and folded once, at the end. The payload is never summed again: what a sender's checksum
 * covered end to end stays covered end to end.
 */
#ifndef UNDERPASS_LIB_CHECKSUM_H
#define UNDERPASS_LIB_CHECKSUM_H

#include <linux/types.h>

static __always_inline __u64 up_sum32(__u64 sum, __u32 from, __u32 to)
{
	return sum + (__u32)~from + to;
}

static __always_inline __u64 up_sum16(__u64 sum, __u16 from, __u16 to)
{
	return sum + (__u16)~from + to;
}

static __always_inline __u64 up_sum64(__u64 sum, __u64 from, __u64 to)
{
	sum = up_sum32(sum, from, to);
	return up_sum32(sum, from >> 32, to >> 32);
}

static __always_inline __u16 up_fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* The checksum after a change; for UDP see up_udp_checksum. */
static __always_inline __u16 up_checksum(__u16 check, __u64 sum)
{
	return ~up_fold(sum + (__u16)~check);
}

/* UDP over IPv4: 0 means that the sender made none, and none is made up; a sum of 0 is sent as 0xffff. */
static __always_inline __u16 up_udp_checksum(__u16 check, __u64 sum)
{
	__u16 next;

	if (check == 0)
		return 0;
	next = up_checksum(check, sum);
	return next ? next : 0xffff;
}

#endif /* UNDERPASS_LIB_CHECKSUM_H */
