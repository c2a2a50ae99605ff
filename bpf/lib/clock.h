/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * CLOCK_MONOTONIC in milliseconds, from the kernel's tick counter.
 *
 * The counter is one load, inlined into the program; asking for the coarse clock is a call and costs as much as half of
 * the read path. The kernel advances the counter by whole ticks of CLOCK_MONOTONIC, so the two do not drift apart, and
 * the coarse clock has no finer grain. What the counter was when is in the including program's `settings`.
 */
#ifndef UNDERPASS_LIB_CLOCK_H
#define UNDERPASS_LIB_CLOCK_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* Of settings.tick_length: its fraction's bits. */
#define TICK_SHIFT 24

static __always_inline __u64 now_ms(void)
{
	__u64 ticks = bpf_jiffies64() - settings.tick_origin;

	return settings.tick_origin_ms + ((ticks * settings.tick_length) >> TICK_SHIFT);
}

#endif /* UNDERPASS_LIB_CLOCK_H */
