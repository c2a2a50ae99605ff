//! A conversation with a client: what the rest of the world says, and what the client does.

use super::*;

/// A client, its clock, and what it has sent and finished.
pub(super) struct Talk {
    pub(super) client: Client,
    pub(super) now: u64,
    pub(super) out: Output,
}

impl Talk {
    pub(super) fn new() -> Self {
        Self {
            client: Client::new(Settings::new(SHARD, here()), &[COORDINATOR]),
            now: 1000 * MS,
            out: Output::default(),
        }
    }

    /// One that already has session `generation` 1, index 3, with token 77.
    pub(super) fn opened() -> Self {
        let mut talk = Self::new();
        talk.step(Event::Open { until: 2000 * MS });
        talk.give_session(1, 77);
        assert_eq!(talk.client.session(), Some(SessionId::new(1, 3)));
        talk
    }

    pub(super) fn step(&mut self, event: Event<'_>) {
        self.client.step(self.now, self.now ^ 0x5eed, event, &mut self.out);
    }

    pub(super) fn submit(&mut self, request: Request<'_>, tag: u64) {
        let deadline = self.now + 1000 * MS;
        self.client.submit(self.now, 99 + tag, request, tag, deadline, &mut self.out).unwrap();
    }

    pub(super) fn receive(&mut self, datagram: &[u8]) {
        let packet = Packet::parse(datagram).unwrap();
        self.step(Event::Packet(&packet));
    }

    /// The datagrams sent since the last look.
    pub(super) fn sent(&mut self) -> Vec<Vec<u8>> {
        self.sent_to().into_iter().map(|(_, datagram)| datagram).collect()
    }

    /// And where they went.
    pub(super) fn sent_to(&mut self) -> Vec<(Endpoint, Vec<u8>)> {
        let sent = self.out.datagrams().map(|(to, datagram)| (to, datagram.to_vec())).collect();
        self.out.clear_datagrams();
        sent
    }

    /// Of the datagrams sent since the last look those that are not LOCATEs.
    pub(super) fn requests(&mut self) -> Vec<Vec<u8>> {
        let mut sent = self.sent();
        sent.retain(|datagram| datagram[3] != Op::Locate.to_wire());
        sent
    }

    /// Lets time pass until something else than a LOCATE is sent.
    pub(super) fn wait_for_requests(&mut self) {
        while self.out.datagrams().all(|(_, datagram)| datagram[3] == Op::Locate.to_wire()) {
            self.wait_until_due();
        }
    }

    pub(super) fn sent_one(&mut self) -> Vec<u8> {
        let mut sent = self.sent();
        assert_eq!(sent.len(), 1, "one datagram was to be sent");
        sent.remove(0)
    }

    /// Answers an OPEN that asks for a challenge, then the one that meets it.
    pub(super) fn give_session(&mut self, generation: u64, token: u64) {
        let first = self.sent_one();
        let question = Packet::parse(&first).unwrap().header;
        assert_eq!((question.op, question.token), (Op::Open, 0));
        let challenge = Header { token: 5, ..question };
        self.receive(&control_answer(&challenge, Op::Opened, &Opened { idle_ms: 60_000, configuration: None }));
        let second = self.sent_one();
        let question = Packet::parse(&second).unwrap().header;
        assert_eq!((question.op, question.token), (Op::Open, 5));
        let answer = Header { session: SessionId::new(generation, 3), token, ..question };
        let opened = Opened { idle_ms: 60_000, configuration: Some(configuration()) };
        let answer = control_answer(&answer, Op::Opened, &opened);
        assert!(answer.len() <= second.len(), "no answer is larger than its request");
        self.receive(&answer);
    }

    pub(super) fn wait_until_due(&mut self) {
        assert_ne!(self.client.due(), NEVER, "something was to happen by itself");
        self.now = self.now.max(self.client.due());
        self.step(Event::Tick);
    }

    pub(super) fn outcome(&mut self) -> Outcome {
        assert_eq!(self.out.completions.len(), 1, "one request was to be over");
        self.out.completions.remove(0).outcome
    }

    pub(super) fn reject(&mut self, request: &[u8], reason: Reason) {
        let packet = Packet::parse(request).unwrap();
        let op = if packet.header.op == Op::Read { Op::RReject } else { Op::WReject };
        self.receive(&turned(&packet, op, reason.to_wire(), 0, packet.value));
    }

    /// Lets time pass to the end of the request's deadline, answering nothing; the last datagram sent.
    pub(super) fn wait_for_the_end(&mut self) -> Option<Vec<u8>> {
        while self.out.completions.is_empty() && self.client.due() != NEVER {
            self.wait_until_due();
        }
        self.sent().pop()
    }

    /// Lets time pass until a CLOSE is sent.
    pub(super) fn wait_for_close(&mut self) -> Header {
        loop {
            self.wait_until_due();
            for datagram in self.sent() {
                let packet = Packet::parse(&datagram).unwrap();
                match packet.header.op {
                    Op::Close => return packet.header,
                    Op::Locate => {}
                    _ => self.reject(&datagram, Reason::KeyBusy),
                }
            }
        }
    }
}
