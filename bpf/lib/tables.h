/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The coordinator's tables that its XDP and TC programs share, and how to look things up in them. */
#ifndef UNDERPASS_LIB_TABLES_H
#define UNDERPASS_LIB_TABLES_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <underpass/abi.h>

volatile const struct up_settings settings = {};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, UP_SHARD_SLOTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct up_shard);
} shards SEC(".maps");

/* The agent sets max_entries before loading. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct up_session);
} sessions SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct up_counters);
} counters SEC(".maps");

static __always_inline void count(__u32 counter)
{
	__u32 zero = 0;
	struct up_counters *c = bpf_map_lookup_elem(&counters, &zero);

	/* Kernels before 6.12 know the bound of the register that was compared, and of no copy of it. */
	barrier_var(counter);
	if (c && counter < UP_COUNT_END)
		c->count[counter]++;
}

static __always_inline struct up_shard *shard_slot(__u32 shard)
{
	__u32 slot = shard % UP_SHARD_SLOTS;

	return bpf_map_lookup_elem(&shards, &slot);
}

/* The active configuration of a shard, or NULL. Read once for each packet: one packet never sees two. */
static __always_inline struct up_config *shard_config(struct up_shard *slot, __u32 shard)
{
	struct up_config *config = &slot->config[*(volatile __u32 *)&slot->active & 1];

	return config->epoch && config->shard == shard ? config : NULL;
}

static __always_inline struct up_session *session_record(__u64 session)
{
	__u32 index = (__u16)session;

	return bpf_map_lookup_elem(&sessions, &index);
}

#endif /* UNDERPASS_LIB_TABLES_H */
