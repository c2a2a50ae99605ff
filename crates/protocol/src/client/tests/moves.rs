//! A shard that changes its coordinator under a client's feet.

use underpass_abi::abi::UP_STATE_COMMITTED;

use super::{talk::Talk, *};

/// The configuration of a tenure that begins at this epoch.
fn tenure(epoch: u32, coordinator: Endpoint) -> Configuration {
    Configuration { epoch, tenure: epoch, coordinator_addr: coordinator.addr, ..configuration() }
}

/// One with a session of tenure 1 of [`COORDINATOR`], that knows of [`OTHER`].
fn two() -> Talk {
    let mut talk = Talk::new();
    talk.client = Client::new(Settings::new(SHARD, here()), &[COORDINATOR, OTHER]);
    talk.step(Event::Open { until: 2000 * MS });
    talk.give_session(1, 77);
    assert_eq!(talk.client.configuration(), Some(&configuration()));
    talk
}

fn locates(sent: &[(Endpoint, Vec<u8>)]) -> Vec<(Endpoint, Header)> {
    let header = |datagram: &[u8]| Packet::parse(datagram).unwrap().header;
    let all = sent.iter().map(|(to, datagram)| (*to, header(datagram)));
    all.filter(|(_, header)| header.op == Op::Locate).collect()
}

impl Talk {
    fn reject_as(&mut self, request: &[u8], epoch: u32, reason: Reason) {
        let packet = Packet::parse(request).unwrap();
        let op = if packet.header.op == Op::Read { Op::RReject } else { Op::WReject };
        let header = Header { op, epoch, status: reason.to_wire(), ..packet.header };
        self.receive(&header.datagram(packet.key, packet.value));
    }

    fn write_one(&mut self, tag: u64) -> Vec<u8> {
        self.submit(write(Kind::Put, b"k", b"v"), tag);
        self.sent_one()
    }

    fn answer(&mut self, request: &[u8], epoch: u32) {
        let packet = Packet::parse(request).unwrap();
        let op = if packet.header.op == Op::Read { Op::RReply } else { Op::WReply };
        self.receive(&Header { op, epoch, seq: 9, ..packet.header }.datagram(packet.key, b""));
    }

    fn tell(&mut self, question: &Header, configuration: Configuration, serves: bool) {
        self.receive(&control_answer(question, Op::Located, &Located { configuration, serves }));
    }
}

#[test]
fn a_lease_reject_is_followed_by_the_question_and_the_switch() {
    let mut talk = two();
    let request = talk.write_one(1);
    talk.submit(Request::Read { key: b"r" }, 2);
    let read = talk.sent_one();
    talk.reject_as(&request, 1, Reason::Lease);
    let asked = locates(&talk.sent_to());
    let to: Vec<Endpoint> = asked.iter().map(|(to, _)| *to).collect();
    assert_eq!(to, [COORDINATOR, OTHER, member(1).endpoint(), member(2).endpoint(), member(3).endpoint()]);
    assert!(talk.client.is_looking());
    // The answer of who serves moves everything at once, the read that was not rejected too, in the same session.
    talk.tell(&asked[1].1, tenure(2, OTHER), true);
    assert_eq!(talk.sent_to(), [(OTHER, request.clone()), (OTHER, read)]);
    assert!(!talk.client.is_looking());
    // What was under way in the session is answered; a new write goes in one of the new tenure.
    talk.answer(&request, 2);
    assert!(matches!(talk.outcome(), Outcome::Written { .. }));
    assert_eq!(talk.client.session(), Some(SessionId::new(1, 3)));
    talk.submit(write(Kind::Put, b"k", b"w"), 3);
    let (to, next) = talk.sent_to().pop().unwrap();
    assert_eq!((to, Packet::parse(&next).unwrap().header.op), (OTHER, Op::Open));
}

#[test]
fn an_aborted_write_goes_on_in_another_session() {
    let mut talk = two();
    let request = talk.write_one(1);
    talk.reject_as(&request, 1, Reason::Aborted);
    assert!(talk.out.completions.is_empty());
    talk.give_session(9, 78);
    let again = talk.sent_one();
    let header = Packet::parse(&again).unwrap().header;
    assert_eq!((header.op, header.session, header.request), (Op::Write, SessionId::new(9, 3), 1));
    talk.answer(&again, 1);
    assert!(matches!(talk.outcome(), Outcome::Written { .. }));
}

#[test]
fn every_reject_that_names_the_place_makes_it_look_and_no_other_does() {
    for &reason in Reason::ALL {
        use Reason::{Epoch, Lease, NoMember, NotCoordinator, Shard};
        for request in [write(Kind::Put, b"k", b"v"), Request::Read { key: b"k" }] {
            let mut talk = two();
            talk.submit(request, 1);
            let datagram = talk.sent_one();
            talk.reject_as(&datagram, 1, reason);
            let elsewhere = matches!(reason, Lease | Epoch | Shard | NoMember | NotCoordinator);
            assert_eq!(talk.client.is_looking(), elsewhere, "{reason}");
        }
    }
}

#[test]
fn silence_is_followed_by_the_question_and_a_replica_knows() {
    let mut talk = two();
    let request = talk.write_one(1);
    let began = talk.now;
    let (mut copies, mut asked) = (1, Vec::new());
    while asked.is_empty() {
        talk.wait_until_due();
        let sent = talk.sent_to();
        copies += sent.iter().filter(|(to, datagram)| *to == COORDINATOR && *datagram == request).count();
        asked = locates(&sent);
    }
    assert_eq!(copies, 3, "with the second retransmission");
    assert!(talk.now - began < 250 * MS, "{}", talk.now - began);
    // The replica does not serve as coordinator: it tells where to look next.
    talk.tell(&asked[2].1, tenure(2, OTHER), false);
    let next = locates(&talk.sent_to());
    assert_eq!(next.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [OTHER]);
    assert!(talk.client.is_looking());
    // Another replica says the same: it was asked already.
    talk.tell(&asked[3].1, tenure(2, OTHER), false);
    assert!(talk.sent_to().is_empty());
    talk.tell(&next[0].1, tenure(2, OTHER), true);
    assert_eq!(talk.sent_to(), [(OTHER, request)]);
}

#[test]
fn an_open_without_an_answer_is_taken_elsewhere() {
    let mut talk = Talk::new();
    talk.client = Client::new(Settings::new(SHARD, here()), &[COORDINATOR, OTHER]);
    talk.submit(write(Kind::Put, b"k", b"v"), 1);
    talk.sent();
    let asked = loop {
        talk.wait_until_due();
        let asked = locates(&talk.sent_to());
        if !asked.is_empty() {
            break asked;
        }
    };
    assert!(talk.now <= 1100 * MS, "{}", talk.now);
    talk.tell(&asked[1].1, tenure(4, OTHER), true);
    talk.wait_until_due();
    let sent = talk.sent_to();
    assert_eq!((sent.len(), sent[0].0, Packet::parse(&sent[0].1).unwrap().header.op), (1, OTHER, Op::Open));
}

#[test]
fn a_session_that_did_not_survive_is_replaced_and_its_write_is_unknown() {
    let mut talk = two();
    let request = talk.write_one(1);
    talk.submit(Request::Read { key: b"r" }, 2);
    let read = talk.sent_one();
    talk.reject_as(&request, 1, Reason::NotCoordinator);
    let asked = locates(&talk.sent_to());
    talk.tell(&asked[1].1, tenure(2, OTHER), true);
    talk.sent();
    talk.reject_as(&request, 2, Reason::Session);
    assert_eq!(talk.outcome(), Outcome::Unknown(Doubt::SessionLost(Reason::Session)));
    talk.reject_as(&read, 2, Reason::Session);
    assert!(talk.out.completions.is_empty());
    talk.give_session(9, 78);
    let (to, again) = talk.sent_to().remove(0);
    assert_eq!((to, Packet::parse(&again).unwrap().header.session), (OTHER, SessionId::new(9, 3)));
    talk.answer(&again, 2);
    assert_eq!(talk.outcome(), Outcome::Read(Some(Item { value: Vec::new(), cas: 9 })));
}

#[test]
fn a_session_is_replaced_before_a_write_meets_a_new_coordinator() {
    for wrote in [false, true] {
        let mut talk = two();
        if wrote {
            let request = talk.write_one(1);
            talk.answer(&request, 1);
            talk.outcome();
        }
        talk.submit(Request::Read { key: b"r" }, 2);
        let read = talk.sent_one();
        talk.reject_as(&read, 1, Reason::Lease);
        let asked = locates(&talk.sent_to());
        talk.tell(&asked[1].1, tenure(2, OTHER), true);
        talk.sent();
        talk.step(Event::Suspect);
        talk.submit(write(Kind::Put, b"k", b"v"), 3);
        let op = Packet::parse(&talk.sent_to().pop().unwrap().1).unwrap().header.op;
        assert_eq!(op, Op::Open, "wrote before: {wrote}");
    }
}

#[test]
fn what_a_former_coordinator_says_late_changes_nothing() {
    let mut talk = two();
    let request = talk.write_one(1);
    talk.reject_as(&request, 1, Reason::Lease);
    let asked = locates(&talk.sent_to());
    talk.tell(&asked[1].1, tenure(2, OTHER), true);
    talk.sent();
    for reason in [Reason::Session, Reason::Token, Reason::Lease, Reason::NotCoordinator, Reason::Shard] {
        talk.reject_as(&request, 1, reason);
        assert!(talk.out.completions.is_empty() && talk.sent().is_empty() && !talk.client.is_looking(), "{reason}");
    }
    assert_eq!(talk.client.coordinator(), OTHER);
    talk.answer(&request, 2);
    assert!(matches!(talk.outcome(), Outcome::Written { .. }));
}

#[test]
fn the_role_goes_to_and_fro_by_epochs_alone() {
    let mut talk = two();
    let request = talk.write_one(1);
    let mut here_and_there = [OTHER, COORDINATOR].into_iter().cycle();
    for epoch in 2..8 {
        talk.now += 100 * MS;
        talk.reject_as(&request, epoch - 1, Reason::Lease);
        let asked = locates(&talk.sent_to());
        let (next, last) = (here_and_there.next().unwrap(), tenure(epoch - 1, talk.client.coordinator()));
        // The old one still thinks that it serves, and somebody remembers times long gone.
        talk.tell(&asked[0].1, tenure(epoch, next), true);
        talk.tell(&asked[0].1, last, true);
        talk.tell(&asked[2].1, tenure(1, COORDINATOR), false);
        assert_eq!(talk.client.coordinator(), next, "epoch {epoch}");
        assert_eq!(talk.sent_to(), [(next, request.clone())]);
    }
    talk.answer(&request, 7);
    assert!(matches!(talk.outcome(), Outcome::Written { .. }));
}

#[test]
fn only_answers_to_its_own_question_that_are_newer_and_possible_are_believed() {
    let mut talk = two();
    let request = talk.write_one(1);
    // Before it asked, no number is its own.
    talk.tell(&Header { shard: SHARD, ..Header::new(Op::Locate) }, tenure(5, OTHER), true);
    talk.reject_as(&request, 1, Reason::Lease);
    let question = locates(&talk.sent_to())[0].1;
    let good = tenure(5, OTHER);
    let nowhere = Endpoint { addr: [0, 0, 0, 0].into(), port: 5550 };
    for (header, configuration) in [
        (Header { request: question.request ^ 1, ..question }, good.clone()),
        (Header { request: 0, ..question }, good.clone()),
        (Header { shard: SHARD + 1, ..question }, good.clone()),
        (question, Configuration { shard: SHARD + 1, ..good.clone() }),
        (question, Configuration { members: Vec::new(), ..good.clone() }),
        (question, Configuration { tenure: 6, ..good.clone() }),
        (question, Configuration { tenure: 0, ..good.clone() }),
        (question, Configuration { coordinator_port: 0, ..good.clone() }),
        (question, tenure(5, nowhere)),
        (question, tenure(0, OTHER)),
        // The epoch that it knows has one coordinator.
        (question, tenure(1, OTHER)),
    ] {
        talk.tell(&header, configuration.clone(), true);
        assert!(talk.client.is_looking() && talk.sent().is_empty(), "{configuration:?}");
        assert_eq!(talk.client.coordinator(), COORDINATOR);
    }
    talk.receive(&Header { op: Op::Located, ..question }.datagram(b"", b""));
    talk.receive(&Header { op: Op::Located, ..question }.datagram(b"", b"{\"serves\":true}"));
    assert!(talk.client.is_looking());
    talk.tell(&question, good, true);
    assert_eq!(talk.client.coordinator(), OTHER);
}

#[test]
fn rounds_are_jittered_and_become_rarer() {
    let mut talk = two();
    talk.client.submit(talk.now, 5, write(Kind::Put, b"k", b"v"), 1, talk.now + 3000 * MS, &mut talk.out).unwrap();
    let request = talk.sent_one();
    talk.reject_as(&request, 1, Reason::Lease);
    let (began, mut rounds, mut copies) = (talk.now, Vec::new(), 0);
    let mut carried = Vec::new();
    assert_eq!(locates(&talk.sent_to()).len(), 5);
    while talk.now < began + 2000 * MS {
        talk.wait_until_due();
        let mut sent = std::mem::take(&mut carried);
        sent.extend(talk.sent_to());
        let asked = locates(&sent);
        if !asked.is_empty() {
            assert_eq!(asked.len(), 5, "a round asks everybody once");
            rounds.push(talk.now - began);
            // It serves, it says, and then it does not: worth another copy of the request, not another round.
            talk.tell(&asked[0].1, configuration(), true);
            let told = talk.sent_to();
            assert!(locates(&told).is_empty());
            sent.extend(told);
        }
        let again = sent.iter().filter(|(_, datagram)| *datagram == request).count();
        copies += again;
        if again > 0 {
            talk.reject_as(&request, 1, Reason::Lease);
            carried = talk.sent_to();
        }
    }
    let pauses: Vec<u64> = rounds.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.iter().all(|pause| (MS..=110 * MS).contains(pause)), "{pauses:?}");
    assert!(rounds.iter().filter(|&&at| at < 30 * MS).count() >= 4, "{rounds:?}");
    assert!((20..80).contains(&rounds.len()), "{} rounds in two seconds", rounds.len());
    assert!(copies > 60, "it keeps trying: {copies}");
}

#[test]
fn a_search_ends_when_nobody_waits_or_a_request_is_answered() {
    let mut talk = two();
    let request = talk.write_one(1);
    talk.reject_as(&request, 1, Reason::Lease);
    talk.sent();
    talk.submit(Request::Read { key: b"r" }, 2);
    let read = talk.sent_one();
    // The read is answered: whoever routed it serves, and may take the write too.
    talk.now += MS;
    talk.answer(&read, 1);
    assert!(!talk.client.is_looking());
    talk.wait_for_requests();
    assert_eq!(talk.requests(), [request]);

    let mut talk = two();
    talk.submit(Request::Read { key: b"r" }, 1);
    let read = talk.sent_one();
    talk.reject_as(&read, 1, Reason::NoMember);
    talk.wait_for_the_end();
    assert_eq!(talk.outcome(), Outcome::TimedOut { last: Some(Reason::NoMember), sent: true });
    talk.step(Event::Tick);
    assert_eq!((talk.client.is_looking(), talk.client.due()), (false, NEVER));
}

#[test]
fn a_late_answer_from_before_the_search_does_not_end_it() {
    let mut talk = two();
    talk.submit(Request::Read { key: b"a" }, 1);
    talk.submit(Request::Read { key: b"b" }, 2);
    let sent = talk.sent();
    talk.now += MS;
    talk.reject_as(&sent[0], 1, Reason::Lease);
    talk.answer(&sent[1], 1);
    assert!(talk.client.is_looking());
}

#[test]
fn a_write_of_unknown_outcome_follows() {
    let mut talk = two();
    let request = talk.write_one(1);
    talk.wait_for_the_end();
    assert!(matches!(talk.outcome(), Outcome::Unknown(_)));
    let before = talk.wait_for_close();
    // Nobody answers: it looks.
    let asked = loop {
        talk.wait_until_due();
        let asked = locates(&talk.sent_to());
        if !asked.is_empty() {
            break asked;
        }
    };
    talk.tell(&asked[1].1, tenure(2, OTHER), true);
    talk.step(Event::Tick);
    let sent = talk.sent_to();
    let (to, close) = (sent[0].0, Packet::parse(&sent[0].1).unwrap().header);
    assert_eq!((to, close.op, close.session), (OTHER, Op::Close, SessionId::new(1, 3)));
    // What the former coordinator says of it is of no interest any more.
    assert_ne!(before.request, close.request);
    let unknown = Closed { closed: false, request: 0, state: 0 };
    talk.receive(&control_answer(&before, Op::Closed, &unknown));
    let pending = Closed { closed: false, request: 1, state: UP_STATE_PENDING };
    talk.receive(&control_answer(&close, Op::Closed, &pending));
    assert_eq!(talk.sent_to(), [(OTHER, request)]);
    let close = talk.wait_for_close();
    let closed = Closed { closed: true, request: 1, state: UP_STATE_COMMITTED };
    talk.receive(&control_answer(&close, Op::Closed, &closed));
    talk.step(Event::Tick);
    assert_eq!(talk.client.due(), NEVER);
}

#[test]
fn a_proof_is_asked_of_the_new_coordinator_alone() {
    let mut talk = two();
    let request = talk.write_one(1);
    talk.reject_as(&request, 1, Reason::Lease);
    let asked = locates(&talk.sent_to());
    let before = talk.wait_for_close();
    talk.now += MS;
    talk.tell(&asked[1].1, tenure(2, OTHER), true);
    assert!(talk.requests().iter().all(|sent| *sent != request), "its deadline is over");
    let never_taken = Closed { closed: true, request: 0, state: UP_STATE_IDLE };
    talk.receive(&control_answer(&before, Op::Closed, &never_taken));
    assert!(talk.out.completions.is_empty(), "of a coordinator that no longer is");
    talk.step(Event::Tick);
    let (to, close) = talk.sent_to().remove(0);
    assert_eq!(to, OTHER);
    talk.receive(&control_answer(&Packet::parse(&close).unwrap().header, Op::Closed, &never_taken));
    assert!(matches!(talk.outcome(), Outcome::Failed(Failure::Rejected(_))));
}

#[test]
fn a_client_that_is_spared_asks_nobody_and_goes_by_what_it_is_told() {
    let mut talk = two();
    let request = talk.write_one(1);
    talk.step(Event::Spared(true));
    talk.reject_as(&request, 1, Reason::Lease);
    assert!(locates(&talk.sent_to()).is_empty());
    talk.step(Event::Located(&Located { configuration: tenure(2, OTHER), serves: true }));
    assert_eq!(talk.sent_to(), [(OTHER, request.clone())]);
    talk.reject_as(&request, 2, Reason::Lease);
    assert!(locates(&talk.sent_to()).is_empty());
    talk.step(Event::Spared(false));
    talk.step(Event::Tick);
    assert!(!locates(&talk.sent_to()).is_empty(), "nobody else looks any more");
}

#[test]
fn an_epoch_it_does_not_know_makes_it_ask_once_in_a_while() {
    let mut talk = two();
    let mut rounds = 0;
    for tag in 0..300 {
        let mut sent = Vec::new();
        talk.submit(Request::Read { key: b"r" }, tag);
        sent.append(&mut talk.sent_to());
        let read = sent.iter().find(|(_, datagram)| datagram[3] == Op::Read.to_wire()).unwrap().1.clone();
        talk.now += 10 * MS;
        talk.answer(&read, 4);
        sent.append(&mut talk.sent_to());
        rounds += locates(&sent).len() / 5;
    }
    assert!((2..=4).contains(&rounds), "{rounds} in three seconds");
}
