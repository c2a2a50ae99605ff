/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The cache's tables, which its programs at XDP and at memcached's sockets share. */
#ifndef UNDERPASS_LIB_CACHE_H
#define UNDERPASS_LIB_CACHE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <underpass/cache.h>

volatile const struct uc_settings settings = {};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct uc_control);
} control SEC(".maps");

/* The agent sets max_entries before loading. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct uc_set);
} sets SEC(".maps");

/* The agent sets max_entries before loading. */
struct uc_page {
	__u8 bytes[UC_PAGE];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct uc_page);
} pages SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct uc_counters);
} counters SEC(".maps");

static __always_inline void count_many(__u32 counter, __u64 by)
{
	__u32 zero = 0;
	struct uc_counters *c = bpf_map_lookup_elem(&counters, &zero);

	/* Kernels before 6.12 know the bound of the register that was compared, and of no copy of it. */
	barrier_var(counter);
	if (c && counter < UC_COUNT_END)
		c->count[counter] += by;
}

static __always_inline void count(__u32 counter)
{
	count_many(counter, 1);
}

static __always_inline struct uc_control *the_control(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&control, &zero);
}

/*
 * How a key finds its set, its word and its tag; crates/cache/src/hash.rs computes the same. Words of 8 bytes, little
 * endian, the last one padded with zeros. Keyed: nobody outside can aim at a set. What it is not is a fingerprint: keys
 * are compared.
 */
static __always_inline __u64 hash_word(__u64 hash, __u64 word)
{
	hash = (hash ^ word) * (settings.secret[1] | 1);
	return hash ^ hash >> 29;
}

static __always_inline __u64 hash_end(__u64 hash, __u32 len)
{
	hash = (hash ^ len) * 0x9e3779b97f4a7c15ULL;
	return hash ^ hash >> 32;
}

static __always_inline __u32 hash_set(__u64 hash)
{
	return (__u32)hash & settings.set_mask;
}

static __always_inline __u32 hash_tag(__u64 hash)
{
	return hash >> 32;
}

static __always_inline __u32 hash_which(__u64 hash)
{
	return hash >> 62;
}

/* Has a key's set fetched, which the processor seldom has at hand, while there is something else to do. */
static __always_inline void fetch_set(__u64 hash)
{
	__u32 index = hash_set(hash);
	struct uc_set *set = bpf_map_lookup_elem(&sets, &index);

	if (set)
		(void)*(volatile __u64 *)&set->word[0];
}

static __always_inline struct uc_slot *slot_of(__u32 place)
{
	__u32 page = place >> UC_UNIT_BITS;
	__u32 at = (place & ((1 << UC_UNIT_BITS) - 1)) * UC_UNIT;
	struct uc_page *bytes = bpf_map_lookup_elem(&pages, &page);

	if (!bytes || at > UC_PAGE - UC_SLOT_MAX)
		return NULL;
	return (struct uc_slot *)(bytes->bytes + at);
}

/* The lower len bytes of a word, len less than 8. */
static __always_inline __u64 low_bytes(__u64 word, __u32 len)
{
	return word & ((1ULL << (8 * (len & 7))) - 1);
}

#endif /* UNDERPASS_LIB_CACHE_H */
