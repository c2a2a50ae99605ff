// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Tells the kernel's tick counter beside its clock, so that the coordinator can use the first as the second. Never attached. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("xdp")
int ticks(struct xdp_md *ctx)
{
	__u64 *out = (void *)(long)ctx->data;

	if ((void *)(out + 2) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	out[0] = bpf_jiffies64();
	out[1] = bpf_ktime_get_ns();
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
