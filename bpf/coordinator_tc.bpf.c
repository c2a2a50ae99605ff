// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Write propagation at TC, for the two write paths in which XDP orders a write and passes it on.
 *
 * tc: cloned at TC ingress, for drivers that cannot transmit from XDP. published: user space has forwarded the packet and
 * it is cloned at TC egress, as in the published design; the baseline. Both share the maps of coordinator.bpf.c.
 *
 * A WRITE is cloned only if its session's record says that it is pending with this very seq: what XDP did not order, for
 * example because it is not attached any more, goes nowhere.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <underpass/abi.h>
#include "lib/packet.h"
#include "lib/tables.h"

#define UP_CLONE_MARK 0x55504331

#define IP_OFFSET ETH_HLEN
#define UDP_OFFSET (IP_OFFSET + sizeof(struct iphdr))
#define HEADER_OFFSET (UDP_OFFSET + sizeof(struct udphdr))
#define IP_CHECK_OFFSET (IP_OFFSET + __builtin_offsetof(struct iphdr, check))
#define UDP_CHECK_OFFSET (UDP_OFFSET + __builtin_offsetof(struct udphdr, check))
#define CNT_OFFSET (HEADER_OFFSET + __builtin_offsetof(struct up_header, cnt))

/* What is rewritten for each clone. cnt is taken with the flags byte beside it: checksums count in 16-bit words. */
struct clone {
	__u8 macs[12];
	__be32 saddr;
	__be32 daddr;
	__be16 sport;
	__be16 dport;
	__u16 cnt_flags;
};

/* The configuration under which this packet is an ordered, pending write, or NULL; from is what it says now. */
static __always_inline struct up_config *ordered_write(struct __sk_buff *skb, struct clone *from)
{
	void *data, *data_end;
	struct up_header *header;
	struct up_session *record;
	struct up_config *config;
	struct up_shard *slot;
	__u32 shard;
	struct udphdr *udp;
	struct ethhdr *eth;
	struct iphdr *ip;

	if (bpf_skb_pull_data(skb, HEADER_OFFSET + UP_HEADER_LEN))
		return NULL;
	data = (void *)(long)skb->data;
	data_end = (void *)(long)skb->data_end;
	eth = data;
	ip = (void *)(eth + 1);
	udp = (void *)(ip + 1);
	header = (void *)(udp + 1);
	if ((void *)(header + 1) > data_end || eth->h_proto != bpf_htons(ETH_P_IP) || ip->version != 4 ||
	    ip->ihl != 5 || ip->protocol != IPPROTO_UDP || header->magic != bpf_htons(UP_MAGIC) ||
	    header->version != UP_VERSION || header->op != UP_OP_WRITE)
		return NULL;
	__builtin_memcpy(from->macs, eth, sizeof(from->macs));
	from->saddr = ip->saddr;
	from->daddr = ip->daddr;
	from->sport = udp->source;
	from->dport = udp->dest;
	from->cnt_flags = *(__u16 *)&header->cnt;
	shard = bpf_ntohl(header->shard);
	slot = shard_slot(shard);
	if (!slot)
		return NULL;
	config = shard_config(slot, shard);
	record = session_record(bpf_be64_to_cpu(header->session));
	if (!record || !config || bpf_ntohl(header->epoch) != config->epoch)
		return NULL;
	if (record->session != bpf_be64_to_cpu(header->session) || record->state != UP_STATE_PENDING ||
	    record->seq != bpf_be64_to_cpu(header->seq))
		return NULL;
	return config;
}

static __always_inline void replace(struct __sk_buff *skb, const struct clone *from, const struct clone *to)
{
	const __u64 address = BPF_F_PSEUDO_HDR | BPF_F_MARK_MANGLED_0 | sizeof(__be32);
	const __u64 word = BPF_F_MARK_MANGLED_0 | sizeof(__be16);
	__u8 cnt = to->cnt_flags;

	bpf_l4_csum_replace(skb, UDP_CHECK_OFFSET, from->saddr, to->saddr, address);
	bpf_l4_csum_replace(skb, UDP_CHECK_OFFSET, from->daddr, to->daddr, address);
	bpf_l4_csum_replace(skb, UDP_CHECK_OFFSET, from->sport, to->sport, word);
	bpf_l4_csum_replace(skb, UDP_CHECK_OFFSET, from->dport, to->dport, word);
	bpf_l4_csum_replace(skb, UDP_CHECK_OFFSET, from->cnt_flags, to->cnt_flags, word);
	bpf_l3_csum_replace(skb, IP_CHECK_OFFSET, from->saddr, to->saddr, sizeof(__be32));
	bpf_l3_csum_replace(skb, IP_CHECK_OFFSET, from->daddr, to->daddr, sizeof(__be32));
	bpf_skb_store_bytes(skb, IP_OFFSET + __builtin_offsetof(struct iphdr, saddr), &to->saddr, 8, 0);
	bpf_skb_store_bytes(skb, UDP_OFFSET, &to->sport, 4, 0);
	bpf_skb_store_bytes(skb, CNT_OFFSET, &cnt, 1, 0);
	bpf_skb_store_bytes(skb, 0, to->macs, sizeof(to->macs), 0);
}

/*
 * Addresses the packet to every member in turn and sends a clone to each but the last, for which it is left addressed.
 * Members whose next hop is not known are left out; false: there is no other.
 */
static __always_inline bool fan_out(struct __sk_buff *skb, struct up_config *config, struct clone *now,
				    const __u8 *own_mac)
{
	__u32 members = config->must_ack_count;
	bool addressed = false;

	for (__u32 i = 0; i < UP_MEMBERS_MAX; i++) {
		struct clone to = *now;
		struct up_member *member;
		__u32 index;

		if (i >= members)
			break;
		index = config->must_ack_list[i] & (UP_MEMBERS_MAX - 1);
		member = &config->members[index];
		if (up_no_mac(member->next_hop)) {
			count(UP_COUNT_DROP_NEXT_HOP);
			continue;
		}
		if (addressed && bpf_clone_redirect(skb, skb->ifindex, 0))
			count(UP_COUNT_DROP_CLONE);
		__builtin_memcpy(to.macs, member->next_hop, 6);
		__builtin_memcpy(to.macs + 6, own_mac, 6);
		to.saddr = settings.addr;
		to.sport = settings.port;
		to.daddr = member->addr;
		to.dport = member->port;
		to.cnt_flags = (now->cnt_flags & bpf_htons(0x00ff)) | bpf_htons(index << 8);
		replace(skb, now, &to);
		*now = to;
		addressed = true;
		count(UP_COUNT_CLONE);
	}
	return addressed;
}

SEC("tc")
int coordinator_ingress(struct __sk_buff *skb)
{
	struct up_config *config;
	struct clone now = {};
	__u8 own_mac[6];

	config = ordered_write(skb, &now);
	/* What is for another address or port passed XDP unseen: nobody looked at its token or stamped it. */
	if (!config || now.daddr != settings.addr || now.dport != settings.port)
		return TC_ACT_UNSPEC;
	__builtin_memcpy(own_mac, now.macs, sizeof(own_mac));
	if (!fan_out(skb, config, &now, own_mac))
		return TC_ACT_SHOT;
	return bpf_redirect(skb->ifindex, 0);
}

SEC("tc")
int coordinator_forwarded(struct __sk_buff *skb)
{
	struct up_config *config;
	struct clone now = {};
	__u8 own_mac[6];

	/* bpf_clone_redirect comes back through here. */
	if (skb->mark == UP_CLONE_MARK) {
		skb->mark = 0;
		return TC_ACT_UNSPEC;
	}
	config = ordered_write(skb, &now);
	if (!config || now.saddr != settings.addr || now.sport != settings.port)
		return TC_ACT_UNSPEC;
	__builtin_memcpy(own_mac, now.macs + 6, sizeof(own_mac));
	skb->mark = UP_CLONE_MARK;
	if (!fan_out(skb, config, &now, own_mac))
		return TC_ACT_SHOT;
	skb->mark = 0;
	return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
