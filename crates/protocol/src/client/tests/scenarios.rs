//! One behaviour each, told as a conversation.

use super::{talk::Talk, *};
use crate::wire::PAYLOAD_MAX;

#[test]
fn a_session_is_opened_on_demand_and_a_write_is_answered() {
    let mut talk = Talk::new();
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    talk.give_session(1, 77);
    let datagram = talk.sent_one();
    let packet = Packet::parse(&datagram).unwrap();
    assert_eq!((packet.header.op, packet.header.request, packet.header.token), (Op::Write, 1, 77));
    assert_eq!((packet.key, packet.value), (&b"k"[..], &b"v"[..]));
    assert_eq!(packet.header.reply_to(), Some(here()));
    talk.receive(&turned(&packet, Op::WReply, 0, 42, b""));
    assert_eq!(talk.outcome(), Outcome::Written { status: Status::Ok, seq: 42, number: None });
    assert!(talk.client.is_idle());
}

#[test]
fn documents_of_open_are_padded() {
    let mut talk = Talk::new();
    talk.step(Event::Open { until: NEVER });
    assert!(talk.sent_one().len() >= HEADER_LEN + OPEN_PADDING);
}

#[test]
fn a_retransmission_is_the_same_packet_and_waits_longer_each_time() {
    let mut talk = Talk::opened();
    talk.submit(write(Kind::Incr, b"k", b""), 1);
    let first = talk.sent_one();
    let mut waits = Vec::new();
    for _ in 0..4 {
        let before = talk.now;
        talk.wait_for_requests();
        assert_eq!(talk.requests(), std::slice::from_ref(&first));
        waits.push(talk.now - before);
    }
    assert!(waits.is_sorted(), "{waits:?}");
}

#[test]
fn an_increment_takes_its_number_from_the_first_eight_bytes() {
    let mut talk = Talk::opened();
    talk.submit(write(Kind::Incr, b"k", b""), 1);
    let datagram = talk.sent_one();
    let packet = Packet::parse(&datagram).unwrap();
    // Without a number it is no answer.
    talk.receive(&turned(&packet, Op::WReply, 0, 9, b""));
    assert!(talk.out.completions.is_empty());
    talk.receive(&turned(&packet, Op::WReply, 0, 9, &[255, 255, 255, 255, 255, 255, 255, 254, 1, 2]));
    assert_eq!(talk.outcome(), Outcome::Written { status: Status::Ok, seq: 9, number: Some(-2) });

    talk.submit(write(Kind::Incr, b"k", b""), 2);
    let datagram = talk.sent_one();
    let packet = Packet::parse(&datagram).unwrap();
    let not_a_number = Status::NotANumber.to_wire();
    talk.receive(&turned(&packet, Op::WReply, not_a_number, 10, packet.value));
    assert_eq!(talk.outcome(), Outcome::Written { status: Status::NotANumber, seq: 10, number: None });
}

#[test]
fn replies_of_another_session_request_token_or_operation_are_ignored() {
    let mut talk = Talk::opened();
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    talk.submit(Request::Read { key: b"k" }, 2);
    let sent = talk.sent();
    let packet = Packet::parse(&sent[0]).unwrap();
    let good = Header { op: Op::WReply, ..packet.header };
    for bad in [
        Header { session: SessionId::new(2, 3), ..good },
        Header { request: 2, ..good },
        Header { token: 78, ..good },
        Header { shard: 8, ..good },
        Header { op: Op::Write, ..good },
        Header { op: Op::Heartbeat, ..good },
        Header { status: Status::Aborted.to_wire(), ..good },
        Header { status: 200, ..good },
        // The read has this number too, but reads have no W_REPLY and writes no R_REPLY.
        Header { op: Op::WReply, session: SessionId(0), ..good },
    ] {
        talk.receive(&bad.datagram(b"k", b""));
    }
    assert!(talk.out.completions.is_empty());
    talk.receive(&Header { op: Op::RReply, seq: 4, ..good }.datagram(b"k", b"old"));
    assert_eq!(talk.out.completions[0].tag, 2);
}

#[test]
fn reads_overlap_up_to_their_bound_and_are_matched_by_number() {
    let mut talk = Talk::opened();
    for tag in 0..32 {
        talk.submit(Request::Read { key: b"k" }, tag);
    }
    assert!(!talk.client.can_read());
    let full = talk.client.submit(talk.now, 1, Request::Read { key: b"k" }, 99, NEVER, &mut talk.out);
    assert_eq!(full, Err(Refused::Full));
    let sent = talk.sent();
    for (tag, datagram) in sent.iter().enumerate().rev() {
        let packet = Packet::parse(datagram).unwrap();
        talk.receive(&turned(&packet, Op::RReply, 0, tag as u64, &[tag as u8]));
        let done = talk.out.completions.pop().unwrap();
        assert_eq!(done.tag, tag as u64);
        assert_eq!(done.outcome, Outcome::Read(Some(Item { value: vec![tag as u8], cas: tag as u64 })));
        // A second copy of the answer finds nothing.
        talk.receive(&turned(&packet, Op::RReply, 0, tag as u64, &[tag as u8]));
        assert!(talk.out.completions.is_empty());
    }
}

#[test]
fn a_missing_key_is_an_answer() {
    let mut talk = Talk::opened();
    talk.submit(Request::Read { key: b"k" }, 1);
    let datagram = talk.sent_one();
    talk.receive(&turned(&Packet::parse(&datagram).unwrap(), Op::RReply, Status::NotFound.to_wire(), 0, b""));
    assert_eq!(talk.outcome(), Outcome::Read(None));
}

#[test]
fn passing_rejects_are_retried_after_a_backoff_that_grows() {
    for reason in [
        Reason::SessionBusy,
        Reason::KeyBusy,
        Reason::DirtyFull,
        Reason::StoreFull,
        Reason::NoMember,
        Reason::Lease,
        Reason::Epoch,
    ] {
        let mut talk = Talk::opened();
        talk.submit(write(Kind::Put, b"k", b"v"), 1);
        let datagram = talk.sent_one();
        let mut longest = 0;
        for _ in 0..8 {
            talk.reject(&datagram, reason);
            assert!(talk.requests().is_empty(), "{reason}: not at once");
            let before = talk.now;
            talk.wait_for_requests();
            longest = longest.max(talk.now - before);
            assert_eq!(talk.requests(), std::slice::from_ref(&datagram));
        }
        assert!((5 * MS..50 * MS).contains(&longest), "{longest}");
        talk.receive(&turned(&Packet::parse(&datagram).unwrap(), Op::WReply, 0, 3, b""));
        assert!(matches!(talk.outcome(), Outcome::Written { seq: 3, .. }), "{reason}");
    }
}

#[test]
fn rejects_for_the_packets_own_bytes_are_definite() {
    for reason in [Reason::KeyLength, Reason::ValueLength, Reason::Kind] {
        let mut talk = Talk::opened();
        talk.submit(write(Kind::Put, b"k", b"v"), 1);
        let datagram = talk.sent_one();
        talk.reject(&datagram, reason);
        assert_eq!(talk.outcome(), Outcome::Failed(Failure::Rejected(reason)));
        // The session lives on; the next write has the next number.
        talk.submit(write(Kind::Put, b"k", b"v"), 2);
        assert_eq!(Packet::parse(&talk.sent_one()).unwrap().header.request, 2);
    }
}

#[test]
fn a_silent_deadline_leaves_a_write_unknown_and_another_session_is_opened() {
    let mut talk = Talk::opened();
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    let end = talk.now + 1000 * MS;
    talk.wait_for_the_end();
    assert_eq!(talk.now, end);
    assert_eq!(talk.outcome(), Outcome::Unknown(Doubt::Deadline(None)));
    assert_eq!(talk.client.session(), None);
    talk.submit(write(Kind::Put, b"k", b"w"), 2);
    talk.give_session(2, 78);
    let second = talk.sent_one();
    assert_eq!(Packet::parse(&second).unwrap().header.session, SessionId::new(2, 3));
}

#[test]
fn a_silent_read_times_out() {
    let mut talk = Talk::opened();
    talk.submit(Request::Read { key: b"k" }, 1);
    talk.wait_for_the_end();
    assert_eq!(talk.outcome(), Outcome::TimedOut { last: None, sent: true });
    assert!(talk.client.session().is_some(), "the session is still good");
}

#[test]
fn without_a_session_nothing_was_sent_so_a_write_failed() {
    let mut talk = Talk::new();
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    talk.submit(Request::Read { key: b"k" }, 2);
    while talk.out.completions.len() < 2 {
        talk.wait_until_due();
    }
    assert_eq!(talk.out.completions[0].outcome, Outcome::Failed(Failure::NeverSent(None)));
    assert_eq!(talk.out.completions[1].outcome, Outcome::TimedOut { last: None, sent: false });
    // Nobody waits any more: it stops asking.
    talk.step(Event::Tick);
    assert!(!talk.client.is_opening());
    assert_eq!(talk.client.due(), NEVER);
}

#[test]
fn no_free_session_is_retried_and_named_in_the_end() {
    let mut talk = Talk::new();
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    let mut asked = 0;
    while talk.out.completions.is_empty() {
        for datagram in talk.sent() {
            asked += 1;
            let header = Packet::parse(&datagram).unwrap().header;
            let reject = Header { op: Op::ControlReject, status: Reason::NoSession.to_wire(), ..header };
            talk.receive(&reject.datagram(b"", b"{}"));
        }
        talk.wait_until_due();
    }
    assert!((5..100).contains(&asked), "{asked}");
    assert_eq!(talk.outcome(), Outcome::Failed(Failure::NeverSent(Some(Reason::NoSession))));
}

#[test]
fn an_unknown_shard_is_told_at_once() {
    let mut talk = Talk::new();
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    let header = Packet::parse(&talk.sent_one()).unwrap().header;
    let reject = Header { op: Op::ControlReject, status: Reason::Shard.to_wire(), ..header };
    talk.receive(&reject.datagram(b"", b"{}"));
    assert_eq!(talk.outcome(), Outcome::Failed(Failure::Rejected(Reason::Shard)));
}

#[test]
fn a_lost_session_makes_a_sent_write_unknown_but_a_read_moves() {
    let mut talk = Talk::opened();
    talk.submit(Request::Read { key: b"k" }, 1);
    talk.submit(write(Kind::Put, b"k", b"v"), 2);
    let sent = talk.sent();
    talk.reject(&sent[1], Reason::Session);
    assert_eq!(talk.outcome(), Outcome::Unknown(Doubt::SessionLost(Reason::Session)));
    talk.reject(&sent[0], Reason::Session);
    assert!(talk.out.completions.is_empty());
    talk.give_session(2, 78);
    let again = talk.sent_one();
    let packet = Packet::parse(&again).unwrap();
    assert_eq!((packet.header.op, packet.header.session), (Op::Read, SessionId::new(2, 3)));
    talk.receive(&turned(&packet, Op::RReply, 0, 1, b"v"));
    assert!(matches!(talk.outcome(), Outcome::Read(Some(_))));
}

#[test]
fn a_write_that_was_never_sent_waits_for_the_next_session() {
    let mut talk = Talk::opened();
    talk.submit(Request::Read { key: b"k" }, 1);
    let read = talk.sent_one();
    talk.reject(&read, Reason::Session);
    talk.submit(write(Kind::Put, b"k", b"v"), 2);
    talk.give_session(2, 78);
    let kinds: Vec<_> = talk.sent().iter().map(|sent| Packet::parse(sent).unwrap().header.op).collect();
    assert_eq!(kinds, [Op::Write, Op::Read]);
}

#[test]
fn an_idle_session_is_replaced_before_a_write_needs_it() {
    let mut talk = Talk::opened();
    talk.now += 31_000 * MS;
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    talk.give_session(2, 78);
    assert_eq!(Packet::parse(&talk.sent_one()).unwrap().header.session, SessionId::new(2, 3));
    // The old one is closed.
    talk.wait_until_due();
    let close = Packet::parse(&talk.sent_one()).unwrap().header;
    assert_eq!((close.op, close.session, close.token), (Op::Close, SessionId::new(1, 3), 77));
}

#[test]
fn a_suspect_session_is_replaced_before_a_write() {
    let mut talk = Talk::opened();
    talk.step(Event::Suspect);
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    talk.give_session(2, 78);
    assert_eq!(Packet::parse(&talk.sent_one()).unwrap().header.session, SessionId::new(2, 3));
}

fn closing(request: u64, state: u32, closed: bool) -> Outcome {
    let mut talk = Talk::opened();
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    let datagram = talk.sent_one();
    talk.reject(&datagram, Reason::KeyBusy);
    let close = talk.wait_for_close();
    assert_eq!((close.session, close.token), (SessionId::new(1, 3), 77));
    talk.receive(&control_answer(&close, Op::Closed, &Closed { closed, request, state }));
    if talk.out.completions.is_empty() {
        talk.wait_for_the_end();
    }
    talk.outcome()
}

#[test]
fn a_rejected_write_failed_if_the_closed_session_never_took_it() {
    let failed = Outcome::Failed(Failure::Rejected(Reason::KeyBusy));
    assert_eq!(closing(0, UP_STATE_IDLE, true), failed);
    assert_eq!(closing(1, UP_STATE_IDLE, true), failed);
    assert_eq!(closing(1, UP_STATE_ABORTED, true), Outcome::Failed(Failure::Rejected(Reason::Aborted)));
}

#[test]
fn a_rejected_write_is_unknown_if_it_may_have_been_taken() {
    let unknown = Outcome::Unknown(Doubt::Deadline(Some(Reason::KeyBusy)));
    assert_eq!(closing(1, underpass_abi::abi::UP_STATE_COMMITTED, true), unknown);
    assert_eq!(closing(1, UP_STATE_PENDING, false), unknown);
    // The agent does not know the session (any more): no proof.
    assert_eq!(closing(0, UP_STATE_IDLE, false), unknown);
}

#[test]
fn an_answer_during_the_proof_counts() {
    let mut talk = Talk::opened();
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    let datagram = talk.sent_one();
    talk.reject(&datagram, Reason::KeyBusy);
    talk.wait_for_close();
    talk.receive(&turned(&Packet::parse(&datagram).unwrap(), Op::WReply, 0, 8, b""));
    assert!(matches!(talk.outcome(), Outcome::Written { seq: 8, .. }));
    assert_eq!(talk.client.session(), None, "the session is being closed");
}

#[test]
fn a_pending_write_of_unknown_outcome_is_sent_again_until_it_is_resolved() {
    let mut talk = Talk::opened();
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    let datagram = talk.sent_one();
    talk.wait_for_the_end();
    assert!(matches!(talk.outcome(), Outcome::Unknown(_)));
    let close = talk.wait_for_close();
    let pending = Closed { closed: false, request: 1, state: UP_STATE_PENDING };
    talk.receive(&control_answer(&close, Op::Closed, &pending));
    assert_eq!(talk.sent_one(), datagram);
    // Its late answer is nobody's any more.
    talk.receive(&turned(&Packet::parse(&datagram).unwrap(), Op::WReply, 0, 8, b""));
    assert!(talk.out.completions.is_empty());
    let close = talk.wait_for_close();
    let closed = Closed { closed: true, request: 1, state: underpass_abi::abi::UP_STATE_COMMITTED };
    talk.receive(&control_answer(&close, Op::Closed, &closed));
    talk.step(Event::Tick);
    assert_eq!(talk.client.due(), NEVER);
}

#[test]
fn a_session_given_to_a_copy_of_our_open_is_closed() {
    let mut talk = Talk::new();
    talk.step(Event::Open { until: 5000 * MS });
    let first = Packet::parse(&talk.sent_one()).unwrap().header;
    let opened = |configuration| Opened { idle_ms: 60_000, configuration };
    let token = Header { token: 5, ..first };
    talk.receive(&control_answer(&token, Op::Opened, &opened(None)));
    let second = Packet::parse(&talk.sent_one()).unwrap().header;
    let answer = |index| Header { session: SessionId::new(1, index), token: 70 + u64::from(index), ..second };
    talk.receive(&control_answer(&answer(3), Op::Opened, &opened(Some(configuration()))));
    talk.receive(&control_answer(&answer(3), Op::Opened, &opened(Some(configuration()))));
    assert!(talk.sent().is_empty(), "a second copy of the same answer");
    talk.receive(&control_answer(&answer(4), Op::Opened, &opened(Some(configuration()))));
    let close = Packet::parse(&talk.sent_one()).unwrap().header;
    assert_eq!((close.op, close.session, close.token), (Op::Close, SessionId::new(1, 4), 74));
    assert_eq!(talk.client.session(), Some(SessionId::new(1, 3)));
}

#[test]
fn an_agent_that_challenges_for_ever_is_not_asked_in_a_tight_loop() {
    let mut talk = Talk::new();
    talk.step(Event::Open { until: NEVER });
    let start = talk.now;
    for asked in 0.. {
        let Some(datagram) = talk.sent().pop() else { break };
        assert!(asked < 10, "answered at once {asked} times");
        let header = Header { token: 5, ..Packet::parse(&datagram).unwrap().header };
        talk.receive(&control_answer(&header, Op::Opened, &Opened { idle_ms: 1, configuration: None }));
    }
    assert_eq!(talk.now, start);
    assert!(talk.client.is_opening());
}

#[test]
fn the_end_closes_the_session_and_says_what_is_not_known() {
    let mut talk = Talk::opened();
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    talk.submit(Request::Read { key: b"k" }, 2);
    talk.sent();
    talk.step(Event::End);
    assert_eq!(talk.out.completions[0].outcome, Outcome::Unknown(Doubt::Ended));
    assert_eq!(talk.out.completions[1].outcome, Outcome::TimedOut { last: None, sent: true });
    let close = Packet::parse(&talk.sent_one()).unwrap().header;
    assert_eq!((close.op, close.session), (Op::Close, SessionId::new(1, 3)));
}

#[test]
fn what_no_coordinator_would_take_is_refused() {
    let long = [b'k'; 251];
    let operand = |data, ttl_ms| Operand { ttl_ms, expected: 0, delta: 0, data };
    let big = [0; PAYLOAD_MAX];
    let check = |kind, key, operand| Request::Write { kind, key, operand }.validate();
    assert_eq!(Request::Read { key: b"" }.validate(), Err(Invalid::KeyLength { length: 0 }));
    assert_eq!(Request::Read { key: &long }.validate(), Err(Invalid::KeyLength { length: 251 }));
    assert_eq!(Request::Read { key: &long[1..] }.validate(), Ok(()));
    assert_eq!(check(Kind::Put, b"k", operand(&big[1..], None)), Ok(()));
    let too_long = |limit| Err(Invalid::ValueLength { length: PAYLOAD_MAX, limit });
    assert_eq!(check(Kind::Put, b"k", operand(&big, None)), too_long(PAYLOAD_MAX - 1));
    assert_eq!(check(Kind::Put, b"k", operand(&big, Some(1))), too_long(PAYLOAD_MAX - 9));
    assert_eq!(check(Kind::Cas, b"k", operand(&big, Some(1))), too_long(PAYLOAD_MAX - 17));
    assert_eq!(check(Kind::Touch, b"k", operand(b"", None)), Err(Invalid::NoLifetime));
    assert_eq!(check(Kind::Touch, b"k", operand(b"", Some(0))), Ok(()));
    assert_eq!(check(Kind::Delete, b"k", operand(b"x", None)), Err(Invalid::NoDataAllowed(Kind::Delete)));
}
