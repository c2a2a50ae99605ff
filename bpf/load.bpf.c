// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Load for one coordinator, made and swallowed in the kernel: a generator that plays the clients, a sink that plays
 * the replicas and receives the clients' answers, and a reflector, the bare XDP_TX limit that data paths are held to.
 *
 * Generator and sink run on one CPU with bottom halves off, so neither interrupts the other. Counters still have one
 * writer each, and what is outstanding is the difference of two of them, so that nothing needs an atomic operation.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "underpass/wire.h"

#define LOAD_KEYS (1 << 20)
#define LOAD_SESSIONS (1 << UP_SESSION_INDEX_BITS)
#define LOAD_TURNS 4096
#define LOAD_SAMPLE 128
/* The part of a key that differs between keys; longer keys end in the same padding. */
#define LOAD_KEY_LEN 16

#define UDP_OFFSET (ETH_HLEN + sizeof(struct iphdr))
#define HEADER_OFFSET (UDP_OFFSET + sizeof(struct udphdr))
#define KEY_OFFSET (HEADER_OFFSET + UP_HEADER_LEN)
#define REST_OFFSET (KEY_OFFSET + LOAD_KEY_LEN)
#define REST_MAX (UP_PAYLOAD_MAX - LOAD_KEY_LEN)
#define WORDS_MAX ((KEY_OFFSET + UP_PAYLOAD_MAX) / 8)

/* One kind of request, complete but for session, request number, token, the first 16 bytes of key, and checksum. */
struct load_template {
	__u64 words[16]; /* the frame's first 128 bytes; the variable fields are zero */
	__u64 sum; /* of the 16-bit words of pseudo header and datagram without the variable fields */
	__u32 frame_len;
	__u32 rest_len;
	__u8 rest[REST_MAX + 8]; /* what follows the 16 bytes of key: the key's padding, then the value */
};

/* A session, at the coordinator's index for it. Written by user space before a run, then as marked. */
struct load_session {
	__be64 session; /* 0: not ours */
	__be64 token;
	__u64 sum; /* of the words of session and token */
	/* Written by the generator. */
	__u64 sent; /* number of the latest write */
	__u64 sent_ns;
	__u64 position; /* of its key */
	/* Written by the sink. */
	__u64 acked; /* number of the latest write that was answered; sent == acked: the session is free */
	__u64 seq; /* verification: of the write whose clones were seen last */
	__u64 cloned; /* verification: number of that write */
	__u32 replicas; /* verification: bitmap of the replicas that it reached */
	__u32 reserved;
	__u64 reserved2[6];
};

struct load_key {
	__u64 words[2];
};

/* What is checked of every packet that comes back. Anything counted here is a coordinator that does not do its work. */
enum load_error {
	LOAD_ERROR_LENGTH = 0, /* lengths disagree */
	LOAD_ERROR_IP_CHECKSUM,
	LOAD_ERROR_UDP_CHECKSUM,
	LOAD_ERROR_ADDRESS, /* not from the coordinator, or to nobody here */
	LOAD_ERROR_OP, /* an operation that this receiver does not take */
	LOAD_ERROR_SESSION, /* session, token, reply address or kind are not as sent */
	LOAD_ERROR_EPOCH,
	LOAD_ERROR_SEQ, /* no bound, or a write's number that went back or differs between its clones */
	LOAD_ERROR_TIME,
	LOAD_ERROR_MEMBER, /* a clone's index is not that of the replica it came to */
	LOAD_ERROR_REQUEST, /* an answer to a write that was not sent */
	LOAD_ERROR_EARLY, /* committed before every replica had the write */
	LOAD_ERROR_END,
};

struct load_settings {
	__u32 window; /* credits: a read costs 1 of them, a write as many as there are replicas */
	__u32 write_cost;
	__u32 write_threshold; /* a write if 32 random bits are below; all ones: always */
	__u32 turns; /* sessions in use: load_turns[0..turns], a power of two */
	__u32 retry_us;
	__u32 write_off_us;
	__be32 coordinator;
	__be32 client;
	__be32 replicas; /* address of replica 0; the others follow */
	__u32 replica_count;
	__u32 epoch;
	__u32 verify; /* check every packet in full */
	__u32 repair; /* replies need a whole new checksum: the coordinator's stack leaves it to the device */
	__u32 frame_len; /* of the frames handed to the generator */
	__u32 drain; /* nothing new: only send again what was not answered */
	__u32 reserved;
};

/* Written by the generator. */
struct load_sent {
	__u64 reads;
	__u64 writes;
	__u64 again; /* retransmissions */
	__u64 credits;
	__s64 forgiven; /* credits of requests written off */
	__u64 write_offs;
	__u64 held; /* turns skipped because the window was full or no session free */
	__u64 broken; /* frames that could not be made: must stay 0 */
	__u64 position;
	__u64 turn;
	__u64 random;
	__u64 request;
	__u64 full_since_ns;
	__u64 full_credits;
	__u32 full_count;
	__u32 due; /* the next request: 0 not drawn yet, 1 read, 2 write */
};

/* Written by the sink. */
struct load_received {
	__u64 reads[UP_MEMBERS_MAX]; /* READs that reached each replica */
	__u64 clones[UP_MEMBERS_MAX]; /* WRITEs that reached each replica */
	__u64 commits;
	__u64 stray; /* answers to writes that were answered before */
	__u64 rejects[32]; /* by reason */
	__u64 reflected;
	__u64 passed; /* left to the host: control, ARP */
	__u64 credits;
	__u64 errors[16]; /* by enum load_error */
	__u32 sample_error; /* of the first packet in error: its enum load_error */
	__u32 sampled; /* 0: none */
	__u8 sample[LOAD_SAMPLE]; /* its headers */
};

struct load_settings load_settings = {};
struct load_template load_read = {};
struct load_template load_write = {};
__u32 load_turns[LOAD_TURNS] = {};
struct load_sent load_sent = {};
struct load_received load_received = {};
struct load_key load_keys[LOAD_KEYS] = {};
struct load_session load_sessions[LOAD_SESSIONS] = {};

static __always_inline __u64 add(__u64 sum, __u64 word)
{
	return sum + (__u32)word + (word >> 32);
}

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* A checksum of 0 means none, so UDP sends the other zero. */
static __always_inline __u16 udp_checksum(__u64 sum)
{
	__u16 check = ~fold(sum);

	return check ? check : 0xffff;
}

/* True when there is no room for another request. Forgives requests that are lost, lest the load dies away. */
static __always_inline bool window_full(void)
{
	__u64 answered = *(volatile __u64 *)&load_received.credits;
	__s64 outstanding = load_sent.credits - answered - load_sent.forgiven;

	if (outstanding < 0) {
		/* Answers to what was written off. */
		load_sent.forgiven += outstanding;
		outstanding = 0;
	}
	if (outstanding < load_settings.window) {
		load_sent.full_count = 0;
		return false;
	}
	load_sent.held++;
	/* The clock is read now and then only: this runs all the time while the coordinator is the slower side. */
	if (load_sent.full_count++ % 1024)
		return true;
	if (load_sent.full_count == 1 || load_sent.full_credits != answered) {
		load_sent.full_since_ns = bpf_ktime_get_ns();
		load_sent.full_credits = answered;
		return true;
	}
	if (bpf_ktime_get_ns() - load_sent.full_since_ns < load_settings.write_off_us * 1000ULL)
		return true;
	load_sent.forgiven += outstanding;
	load_sent.write_offs++;
	load_sent.full_count = 0;
	return false;
}

static __always_inline struct load_session *next_session(void)
{
	__u32 turn = load_sent.turn++ & (load_settings.turns - 1) & (LOAD_TURNS - 1);

	return &load_sessions[load_turns[turn] & (LOAD_SESSIONS - 1)];
}

static __always_inline int emit(struct xdp_md *ctx, const struct load_template *template,
				const struct load_session *session, __u64 request, __u64 position)
{
	const struct load_key *key = &load_keys[position & (LOAD_KEYS - 1)];
	__be64 request_be = bpf_cpu_to_be64(request);
	__u32 rest_len = template->rest_len;
	void *data, *end;
	__u64 sum, *to;
	int change;

	change = (int)template->frame_len - (int)load_settings.frame_len;
	if (change && bpf_xdp_adjust_tail(ctx, change))
		goto broken;
	/* Pages come back with the last packet's bytes, so all of the packet is written each time. */
	if (rest_len) {
		/* Less one, so that kernels before 6.12 see from one comparison that it is not 0 either. */
		__u32 last = rest_len - 1;

		barrier_var(last);
		if (last >= REST_MAX || bpf_xdp_store_bytes(ctx, REST_OFFSET, (void *)template->rest, last + 1))
			goto broken;
	}
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + REST_OFFSET > end)
		goto broken;
	to = data;
	for (int i = 0; i < 16; i++)
		to[i] = template->words[i];
	*(__be64 *)(data + HEADER_OFFSET + offsetof(struct up_header, session)) = session->session;
	*(__be64 *)(data + HEADER_OFFSET + offsetof(struct up_header, request)) = request_be;
	*(__be64 *)(data + HEADER_OFFSET + offsetof(struct up_header, token)) = session->token;
	*(__u64 *)(data + KEY_OFFSET) = key->words[0];
	*(__u64 *)(data + KEY_OFFSET + 8) = key->words[1];
	sum = add(template->sum + session->sum, request_be);
	sum = add(add(sum, key->words[0]), key->words[1]);
	*(__u16 *)(data + UDP_OFFSET + offsetof(struct udphdr, check)) = udp_checksum(sum);
	return XDP_TX;
broken:
	load_sent.broken++;
	return XDP_DROP;
}

/* Run with BPF_F_TEST_XDP_LIVE_FRAMES on the sink's interface: XDP_TX leaves through it, to the coordinator. */
SEC("xdp")
int load_generate(struct xdp_md *ctx)
{
	struct load_session *session = NULL;
	__u64 now;
	int verdict;

	if (load_settings.drain) {
		load_sent.due = 2;
	} else {
		if (window_full())
			return XDP_DROP;
	}
	if (!load_sent.due) {
		load_sent.random = load_sent.random * 6364136223846793005ULL + 1442695040888963407ULL;
		load_sent.due = 1 + (load_settings.write_threshold == 0xffffffff ||
				     (__u32)(load_sent.random >> 32) < load_settings.write_threshold);
	}
	if (load_sent.due == 1) {
		session = next_session();
		verdict = emit(ctx, &load_read, session, ++load_sent.request, load_sent.position++);
		if (verdict == XDP_TX) {
			load_sent.reads++;
			load_sent.credits++;
			load_sent.due = 0;
		}
		return verdict;
	}

	/* A session has one write outstanding. The write stays due until a session is free, so the mix is kept. */
	session = next_session();
	now = bpf_ktime_get_ns();
	if (session->sent != *(volatile __u64 *)&session->acked) {
		if (now - session->sent_ns < load_settings.retry_us * 1000ULL) {
			load_sent.held++;
			return XDP_DROP;
		}
		verdict = emit(ctx, &load_write, session, session->sent, session->position);
		if (verdict == XDP_TX) {
			session->sent_ns = now;
			load_sent.again++;
		}
		return verdict;
	}
	if (load_settings.drain) {
		load_sent.held++;
		return XDP_DROP;
	}
	verdict = emit(ctx, &load_write, session, session->sent + 1, load_sent.position);
	if (verdict != XDP_TX)
		return verdict;
	session->sent_ns = now;
	session->position = load_sent.position++;
	session->sent++;
	load_sent.writes++;
	load_sent.credits += load_settings.write_cost;
	load_sent.due = 0;
	return XDP_TX;
}

static __always_inline int wrong(struct xdp_md *ctx, __u32 error)
{
	if (error < LOAD_ERROR_END)
		load_received.errors[error]++;
	if (!load_received.sampled && !bpf_xdp_load_bytes(ctx, 0, load_received.sample, KEY_OFFSET)) {
		load_received.sampled = 1;
		load_received.sample_error = error;
	}
	return XDP_DROP;
}

/* Sum of the 16-bit words of the UDP datagram. Not static: the verifier then goes through the loop once, not per caller. */
__noinline __u64 load_sum_datagram(struct xdp_md *ctx)
{
	void *at = (void *)(long)ctx->data + UDP_OFFSET;
	void *end = (void *)(long)ctx->data_end;
	__u64 sum = 0;

	for (int i = 0; i < WORDS_MAX; i++) {
		if (at + 8 > end)
			break;
		sum = add(sum, *(__u64 *)at);
		at += 8;
	}
	if (at + 4 <= end) {
		sum += *(__u32 *)at;
		at += 4;
	}
	if (at + 2 <= end) {
		sum += *(__u16 *)at;
		at += 2;
	}
	if (at + 1 <= end)
		sum += *(__u8 *)at;
	return sum;
}

static __always_inline __u64 pseudo_sum(const struct iphdr *ip, const struct udphdr *udp)
{
	return (__u64)ip->saddr + ip->daddr + bpf_htons(IPPROTO_UDP) + udp->len;
}

/* Everything about a packet that does not depend on its operation. Returns LOAD_ERROR_END when all is well. */
static __always_inline __u32 check_packet(struct xdp_md *ctx, const struct iphdr *ip, const struct udphdr *udp,
					  const struct up_header *header, void *end)
{
	__u32 payload = bpf_ntohs(header->key_len) + bpf_ntohl(header->value_len);
	long len = end - (void *)ip;
	bool partial;
	__u64 sum;

	if (len != bpf_ntohs(ip->tot_len) || len - sizeof(*ip) != bpf_ntohs(udp->len) ||
	    len - sizeof(*ip) - sizeof(*udp) - UP_HEADER_LEN != payload)
		return LOAD_ERROR_LENGTH;
	sum = add(add(0, ((__u64 *)ip)[0]), ((__u64 *)ip)[1]) + ((__u32 *)ip)[4];
	if (fold(sum) != 0xffff)
		return LOAD_ERROR_IP_CHECKSUM;
	sum = pseudo_sum(ip, udp);
	/* The stack may leave a checksum of the pseudo header alone, for the device to complete. */
	partial = load_settings.repair && udp->check == fold(sum);
	if (!partial && fold(sum + load_sum_datagram(ctx)) != 0xffff)
		return LOAD_ERROR_UDP_CHECKSUM;
	if (ip->saddr != load_settings.coordinator)
		return LOAD_ERROR_ADDRESS;
	if (bpf_ntohl(header->epoch) != load_settings.epoch)
		return LOAD_ERROR_EPOCH;
	return LOAD_ERROR_END;
}

static __always_inline struct load_session *session_of(const struct up_header *header)
{
	struct load_session *session;
	__u64 index = bpf_be64_to_cpu(header->session);

	/* Swapped first, then masked: the other way round, verifiers before 6.18 lose the bound. */
	barrier_var(index);
	session = &load_sessions[index & (LOAD_SESSIONS - 1)];
	if (!session->session || session->session != header->session || session->token != header->token)
		return NULL;
	return session;
}

static __always_inline bool from_client(const struct up_header *header)
{
	return *(__be32 *)&header->reply_addr[12] == load_settings.client && !header->kind && !header->status;
}

/* Verification of a request that reached a replica. Returns LOAD_ERROR_END when all is well. */
static __always_inline __u32 check_request(const struct up_header *header, __u32 replica)
{
	struct load_session *session = session_of(header);
	__u64 seq = bpf_be64_to_cpu(header->seq), request = bpf_be64_to_cpu(header->request);

	if (!session || !from_client(header))
		return LOAD_ERROR_SESSION;
	if (!seq || seq >> 63)
		return LOAD_ERROR_SEQ;
	if (!header->time)
		return LOAD_ERROR_TIME;
	if (header->op == UP_OP_READ)
		return LOAD_ERROR_END;
	if (header->cnt != replica)
		return LOAD_ERROR_MEMBER;
	if (request > session->sent || request < session->cloned)
		return LOAD_ERROR_REQUEST;
	if (request == session->cloned) {
		if (seq != session->seq)
			return LOAD_ERROR_SEQ;
	} else {
		if (seq <= session->seq)
			return LOAD_ERROR_SEQ;
		session->cloned = request;
		session->seq = seq;
		session->replicas = 0;
	}
	session->replicas |= 1u << (replica & 7);
	return LOAD_ERROR_END;
}

static __always_inline void swap_macs(struct ethhdr *eth)
{
	__u16 *mac = (__u16 *)eth;

	for (int i = 0; i < 3; i++) {
		__u16 other = mac[i];

		mac[i] = mac[i + 3];
		mac[i + 3] = other;
	}
}

/* A replica's answer to a WRITE: the same packet turned round, at once. */
static __always_inline int acknowledge(struct xdp_md *ctx, struct ethhdr *eth, struct iphdr *ip, struct udphdr *udp,
				       struct up_header *header)
{
	__be32 addr = ip->saddr;
	__be16 port = udp->source;

	swap_macs(eth);
	ip->saddr = ip->daddr;
	ip->daddr = addr;
	udp->source = udp->dest;
	udp->dest = port;
	header->op = UP_OP_W_REPLY;
	if (load_settings.repair) {
		udp->check = 0;
		udp->check = udp_checksum(pseudo_sum(ip, udp) + load_sum_datagram(ctx));
	} else if (udp->check) {
		/* Addresses and ports only changed places; the operation, in the high byte of its word, went up by one. */
		udp->check = udp_checksum((__u16)~udp->check + bpf_htons(UP_OP_W_REPLY - UP_OP_WRITE));
	}
	return XDP_TX;
}

static __always_inline int answer(struct xdp_md *ctx, const struct up_header *header)
{
	struct load_session *session = session_of(header);
	__u64 request = bpf_be64_to_cpu(header->request);
	__u32 all = (1u << load_settings.replica_count) - 1;
	__u64 sent;

	if (header->op == UP_OP_R_REJECT) {
		load_received.rejects[header->status & 31]++;
		load_received.credits++;
		return XDP_DROP;
	}
	if (!session)
		return wrong(ctx, LOAD_ERROR_SESSION);
	sent = *(volatile __u64 *)&session->sent;
	if (request > sent)
		return wrong(ctx, LOAD_ERROR_REQUEST);
	if (request < sent || session->acked == sent) {
		load_received.stray++;
		return XDP_DROP;
	}
	if (header->op == UP_OP_W_REJECT) {
		load_received.rejects[header->status & 31]++;
	} else {
		if (load_settings.verify) {
			if (session->cloned != request || session->replicas != all)
				return wrong(ctx, LOAD_ERROR_EARLY);
			if (bpf_be64_to_cpu(header->seq) != session->seq)
				return wrong(ctx, LOAD_ERROR_SEQ);
		}
		load_received.commits++;
	}
	session->acked = request;
	load_received.credits += load_settings.write_cost;
	return XDP_DROP;
}

/* On the tester's interface. */
SEC("xdp")
int load_sink(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct iphdr *ip = data + ETH_HLEN;
	struct udphdr *udp = data + UDP_OFFSET;
	struct up_header *header = data + HEADER_OFFSET;
	__u32 replica, error;

	if (data + KEY_OFFSET > end || eth->h_proto != bpf_htons(ETH_P_IP) || *(__u8 *)ip != 0x45 ||
	    ip->protocol != IPPROTO_UDP || header->magic != bpf_htons(UP_MAGIC) || header->op >= UP_OP_CONTROL) {
		load_received.passed++;
		return XDP_PASS;
	}

	if (ip->daddr == load_settings.coordinator) {
		/* The reflector sends back what it gets, and every request is answered by itself. */
		struct load_session *session = session_of(header);

		if (!session || ip->saddr != load_settings.client)
			return wrong(ctx, LOAD_ERROR_ADDRESS);
		if (load_settings.verify) {
			__u64 sum = pseudo_sum(ip, udp) + load_sum_datagram(ctx);

			if (fold(sum) != 0xffff)
				return wrong(ctx, LOAD_ERROR_UDP_CHECKSUM);
		}
		if (header->op == UP_OP_READ) {
			load_received.credits++;
		} else if (header->op == UP_OP_WRITE) {
			session->acked = bpf_be64_to_cpu(header->request);
			load_received.credits += load_settings.write_cost;
		} else {
			return wrong(ctx, LOAD_ERROR_OP);
		}
		load_received.reflected++;
		return XDP_DROP;
	}

	if (load_settings.verify) {
		error = check_packet(ctx, ip, udp, header, end);
		if (error != LOAD_ERROR_END)
			return wrong(ctx, error);
	}
	if (ip->daddr == load_settings.client) {
		if (header->op != UP_OP_W_REPLY && header->op != UP_OP_W_REJECT && header->op != UP_OP_R_REJECT)
			return wrong(ctx, LOAD_ERROR_OP);
		return answer(ctx, header);
	}
	replica = bpf_ntohl(ip->daddr) - bpf_ntohl(load_settings.replicas);
	if (replica >= load_settings.replica_count || replica >= UP_MEMBERS_MAX)
		return wrong(ctx, LOAD_ERROR_ADDRESS);
	if (load_settings.verify) {
		error = check_request(header, replica);
		if (error != LOAD_ERROR_END)
			return wrong(ctx, error);
	}
	switch (header->op) {
	case UP_OP_READ:
		load_received.reads[replica]++;
		load_received.credits++;
		return XDP_DROP;
	case UP_OP_WRITE:
		load_received.clones[replica]++;
		return acknowledge(ctx, eth, ip, udp, header);
	default:
		return wrong(ctx, LOAD_ERROR_OP);
	}
}

/* On the coordinator's interface: the least that a data path in XDP can do with a packet and send it on. */
SEC("xdp")
int load_reflect(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;

	if (data + KEY_OFFSET > end || eth->h_proto != bpf_htons(ETH_P_IP))
		return XDP_PASS;
	swap_macs(eth);
	return XDP_TX;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
