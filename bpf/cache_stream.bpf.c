// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* The stream parser alone, for BPF_PROG_TEST_RUN. Never attached. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <underpass/cache.h>
#include "lib/stream.h"

struct uc_stream_run {
	struct uc_stream stream;
	__u32 len;
	__u32 events;
	__u8 bytes[512];
	/* Event, and the low bits of what it is about: key length, or number. */
	__u32 event[256];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct uc_stream_run);
} run SEC(".maps");

static long feed(__u32 i, void *ctx)
{
	struct uc_stream_run *r = *(struct uc_stream_run **)ctx;
	__u32 event;

	if (r->stream.skip) {
		r->stream.skip--;
		return 0;
	}
	event = stream_step(&r->stream, r->bytes[i & 511]);
	if (event && r->events < 256) {
		__u32 detail = event == UC_EVENT_FLUSH ? (__u32)r->stream.number : r->stream.key_len;

		r->event[r->events & 255] = event << 16 | (detail & 0xffff);
		r->events++;
	}
	return 0;
}

SEC("xdp")
int cache_stream(struct xdp_md *ctx)
{
	__u32 zero = 0;
	struct uc_stream_run *r = bpf_map_lookup_elem(&run, &zero);

	if (!r)
		return XDP_ABORTED;
	bpf_loop(r->len & 1023, feed, &r, 0);
	stream_end_of_read(&r->stream);
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
