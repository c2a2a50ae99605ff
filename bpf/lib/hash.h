/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How a key finds its bucket and how keys are told apart; crates/protocol/src/coordinator/hash.rs computes the same.
 *
 * Keys are read from the packet as little-endian 64-bit words, the last one zero-padded. All functions take packet
 * pointers and check every load against data_end, which is what lets them run on keys of any length. Secrets live in
 * .rodata and stay volatile: the compiler knows that constant's initial value, zero, and would use it.
 */
#ifndef UNDERPASS_LIB_HASH_H
#define UNDERPASS_LIB_HASH_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <underpass/abi.h>

#define UP_GOLDEN 0x9e3779b97f4a7c15ULL
#define UP_KEY_WORDS ((UP_KEY_MAX + 7) / 8)

/* The bytes left over after the whole words of a key, as a zero-padded word. */
static __always_inline __u64 up_tail_word(const __u8 *at, const void *data_end, __u32 left)
{
	__u64 word = 0;

	for (__u32 i = 0; i < 7; i++) {
		if (i >= left || (const void *)(at + i + 1) > data_end)
			break;
		word |= (__u64)at[i] << (8 * i);
	}
	return word;
}

static __always_inline __u64 up_nh(__u64 word, const volatile __u32 *secret)
{
	__u32 low = (__u32)word + secret[0];
	__u32 high = (__u32)(word >> 32) + secret[1];

	return (__u64)low * high;
}

/* NH over the key's words, with the length added and the result mixed. Keyed: nobody outside can aim at a bucket. */
static __always_inline __u32 up_bucket_hash(const void *key, const void *data_end, __u32 len,
					    const volatile __u32 *secret)
{
	__u64 sum = len * UP_GOLDEN;
	const __u8 *at = key;
	__u32 left = len;

	for (__u32 i = 0; i < UP_KEY_WORDS; i++) {
		__u64 word;

		if (left == 0)
			break;
		if (left >= 8) {
			if ((const void *)(at + 8) > data_end)
				break;
			word = *(const __u64 *)at;
			at += 8;
			left -= 8;
		} else {
			word = up_tail_word(at, data_end, left);
			left = 0;
		}
		sum += up_nh(word, &secret[2 * i]);
	}
	sum ^= sum >> 32;
	return (sum * UP_GOLDEN) >> 32;
}

struct up_fingerprint {
	__u64 word[2];
};

#define UP_ROTATE(x, bits) (((x) << (bits)) | ((x) >> (64 - (bits))))

#define UP_SIP_ROUND(v0, v1, v2, v3)    \
	do {                            \
		v0 += v1;               \
		v1 = UP_ROTATE(v1, 13); \
		v1 ^= v0;               \
		v0 = UP_ROTATE(v0, 32); \
		v2 += v3;               \
		v3 = UP_ROTATE(v3, 16); \
		v3 ^= v2;               \
		v0 += v3;               \
		v3 = UP_ROTATE(v3, 21); \
		v3 ^= v0;               \
		v2 += v1;               \
		v1 = UP_ROTATE(v1, 17); \
		v1 ^= v2;               \
		v2 = UP_ROTATE(v2, 32); \
	} while (0)

/* SipHash-2-4 with 128 bits of output. Called once for a write, and for a read only if its bucket is dirty. */
static __noinline int up_fingerprint(const void *key, const void *data_end, __u32 len, const volatile __u64 *secret,
				     struct up_fingerprint *out)
{
	__u64 v0 = secret[0] ^ 0x736f6d6570736575ULL;
	__u64 v1 = secret[1] ^ 0x646f72616e646f6dULL ^ 0xee;
	__u64 v2 = secret[0] ^ 0x6c7967656e657261ULL;
	__u64 v3 = secret[1] ^ 0x7465646279746573ULL;
	const __u8 *at = key;
	__u32 left = len;
	__u64 word;

	for (__u32 i = 0; i < UP_KEY_WORDS; i++) {
		if (left < 8)
			break;
		if ((const void *)(at + 8) > data_end)
			break;
		word = *(const __u64 *)at;
		v3 ^= word;
		UP_SIP_ROUND(v0, v1, v2, v3);
		UP_SIP_ROUND(v0, v1, v2, v3);
		v0 ^= word;
		at += 8;
		left -= 8;
	}
	word = up_tail_word(at, data_end, left) | (__u64)len << 56;
	v3 ^= word;
	UP_SIP_ROUND(v0, v1, v2, v3);
	UP_SIP_ROUND(v0, v1, v2, v3);
	v0 ^= word;
	v2 ^= 0xee;
#pragma unroll
	for (int i = 0; i < 4; i++)
		UP_SIP_ROUND(v0, v1, v2, v3);
	out->word[0] = v0 ^ v1 ^ v2 ^ v3;
	v1 ^= 0xdd;
#pragma unroll
	for (int i = 0; i < 4; i++)
		UP_SIP_ROUND(v0, v1, v2, v3);
	out->word[1] = v0 ^ v1 ^ v2 ^ v3;
	return 0;
}

/*
 * Which of count serving replicas a read goes to: spread by session and request, so that a hot key uses them all, and by
 * time, so that a read sent again may find another replica than the one that did not answer.
 */
static __always_inline __u32 up_spread(__u64 session, __u64 request, __u64 time, __u32 count)
{
	return ((((session + request + time) * UP_GOLDEN) >> 32) * count) >> 32;
}

#endif /* UNDERPASS_LIB_HASH_H */
