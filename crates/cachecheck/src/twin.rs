//! Replays a stream in lockstep to two servers and demands the same answers, byte for byte.
//!
//! Answers of several datagrams are compared without these' headers, as one text: memcached sends one for each key, and a
//! cache may send fewer. Not compared: of `mg` and its like the flags `h`, `l` and `t` (fetched before, seconds since, seconds left): a cache that
//! answers by itself fetches on its own account, and servers count seconds from moments of their own. Answers that a
//! connection reset cut short are compared as far as both go. Cas uniques are compared: in lockstep both servers count the
//! same writes.

use std::{
    collections::HashMap,
    fmt,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddrV4, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::{
    stream::{After, Speech, Step, Stream},
    wire::{self, TEXT_BARRIER, TEXT_BARRIER_ANSWER, TEXT_CAS, UDP_HEADER_LEN, datagram},
};

/// An answer is taken to be missing after this long.
const PATIENCE: Duration = Duration::from_secs(3);
/// Between two pieces of a command, so that the server reads them one by one.
const GAP: Duration = Duration::from_micros(150);
/// Times that a key is read to have it taken up by a cache.
const WARM_READS: usize = 3;

/// What a server said to one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The bytes, with the headers of datagrams.
    pub bytes: Vec<u8>,
    /// How it ended.
    pub end: End,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// As it should.
    #[default]
    Complete,
    /// The server closed the connection.
    Closed,
    /// It reset it: what it had said may be lost.
    Reset,
    /// It said no more for a long time.
    Silent,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", excerpt(&self.bytes), self.end)
    }
}

/// Where two servers differed.
#[derive(Clone, Debug)]
pub struct Difference {
    /// In which stream.
    pub stream: String,
    /// At which of its steps.
    pub step: usize,
    /// What was asked.
    pub asked: String,
    /// What memcached alone said.
    pub reference: Answer,
    /// What the other one said.
    pub subject: Answer,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stream, step, asked, reference, subject } = self;
        write!(f, "{stream}, step {step}: {asked}\n  memcached: {reference}\n  the other: {subject}")
    }
}

/// One server, and its clients.
struct Side {
    address: SocketAddrV4,
    connections: HashMap<(Speech, u8), TcpStream>,
    socket: UdpSocket,
    request: u16,
    cas: u64,
    /// Whether pieces are sent apart and a cache is given time; answers do not depend on either.
    paced: Option<Duration>,
}

/// Two servers.
pub struct Twin {
    reference: Side,
    subject: Side,
    /// Answers compared.
    pub compared: u64,
}

impl Twin {
    /// `settle` is how long a cache in front of `subject` may take to take up what was read. Sockets are those of the
    /// calling thread's network namespace.
    ///
    /// # Errors
    /// Without sockets.
    pub fn new(reference: SocketAddrV4, subject: SocketAddrV4, settle: Duration) -> Result<Self> {
        Ok(Self { reference: Side::new(reference, None)?, subject: Side::new(subject, Some(settle))?, compared: 0 })
    }

    /// Replays a stream. `Some`: the first difference.
    ///
    /// # Errors
    /// When a server cannot be reached.
    pub fn replay(&mut self, stream: &Stream) -> Result<Option<Difference>> {
        let found = self.steps(stream);
        // The next stream has connections of its own, whatever these were left in.
        for side in [&mut self.reference, &mut self.subject] {
            side.connections.clear();
        }
        found
    }

    fn steps(&mut self, stream: &Stream) -> Result<Option<Difference>> {
        for (number, step) in stream.steps.iter().enumerate() {
            if let Step::Sleep(length) = step {
                thread::sleep(*length);
                continue;
            }
            let context = || format!("{}, step {number}: {}", stream.name, show(step));
            let reference = self.reference.take(step).with_context(context)?;
            let subject = self.subject.take(step).with_context(context)?;
            for (reference, subject) in reference.into_iter().zip(subject) {
                self.compared += 1;
                if !same(&reference, &subject) {
                    let stream = stream.name.clone();
                    return Ok(Some(Difference { stream, step: number, asked: show(step), reference, subject }));
                }
            }
        }
        // What was left open is ended, and said its last.
        let mut open: Vec<_> = self.reference.connections.keys().copied().collect();
        open.sort_unstable();
        for connection in open {
            let step = Step::Send { connection, pieces: Vec::new(), after: After::Close };
            let (reference, subject) = (self.reference.take(&step)?.remove(0), self.subject.take(&step)?.remove(0));
            self.compared += 1;
            if !same(&reference, &subject) {
                let (stream, step, asked) = (stream.name.clone(), stream.steps.len(), format!("end of {connection:?}"));
                return Ok(Some(Difference { stream, step, asked, reference, subject }));
            }
        }
        Ok(None)
    }
}

fn show(step: &Step) -> String {
    match step {
        Step::Send { connection: (speech, number), pieces, after } => {
            let pieces: Vec<String> = pieces.iter().map(|piece| excerpt(piece)).collect();
            format!("{speech:?} connection {number}: {} then {after:?}", pieces.join(" | "))
        }
        Step::Datagram { bytes, .. } => format!("datagram: {}", excerpt(bytes)),
        Step::Warm(key) => format!("get {} over UDP, again and again", key.escape_ascii()),
        Step::Learn(key) => format!("gets {} over UDP", key.escape_ascii()),
        Step::Sleep(length) => format!("wait {length:?}"),
    }
}

fn excerpt(bytes: &[u8]) -> String {
    const SHOWN_MAX: usize = 400;
    let more = if bytes.len() > SHOWN_MAX { format!("... ({} bytes)", bytes.len()) } else { String::new() };
    format!("\"{}\"{more}", bytes[..bytes.len().min(SHOWN_MAX)].escape_ascii())
}

fn same(a: &Answer, b: &Answer) -> bool {
    let (x, y) = (comparable(&a.bytes), comparable(&b.bytes));
    if a.end == End::Reset || b.end == End::Reset {
        let shorter = x.len().min(y.len());
        return x[..shorter] == y[..shorter];
    }
    x == y && a.end == b.end
}

/// Without the flags of meta answers that tell times.
fn comparable(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        if !line.starts_with(b"VA ") && !line.starts_with(b"HD ") {
            out.extend(line);
            continue;
        }
        for (at, word) in line.split(|byte| *byte == b' ').enumerate() {
            let told =
                at > 0 && word.len() > 1 && word[1..].iter().all(|c| c.is_ascii_digit() || c.is_ascii_whitespace());
            match word.first() {
                Some(flag @ (b'h' | b'l' | b't')) if told => {
                    out.push(*flag);
                    out.extend(word.iter().filter(|c| c.is_ascii_whitespace()));
                }
                _ => out.extend(word),
            }
            out.push(b' ');
        }
    }
    out
}

impl Side {
    fn new(address: SocketAddrV4, paced: Option<Duration>) -> Result<Self> {
        let socket = UdpSocket::bind("0.0.0.0:0").context("cannot bind a UDP socket")?;
        socket.connect(address)?;
        Ok(Self { address, connections: HashMap::new(), socket, request: 0, cas: 0, paced })
    }

    /// Takes a step; most have one answer.
    fn take(&mut self, step: &Step) -> Result<Vec<Answer>> {
        match step {
            Step::Send { connection, pieces, after } => Ok(vec![self.send(*connection, pieces, *after)?]),
            Step::Datagram { bytes, sentinel: false } => Ok(vec![self.ask(bytes)?]),
            Step::Datagram { bytes, sentinel: true } => Ok(vec![self.ask_anything(bytes)?]),
            Step::Warm(key) => {
                let bytes = datagram(0, &wire::line("get", key, ""));
                (0..WARM_READS)
                    .map(|read| {
                        if let Some(settle) = self.paced.filter(|_| read > 0) {
                            thread::sleep(settle);
                        }
                        self.ask(&bytes)
                    })
                    .collect()
            }
            Step::Learn(key) => {
                let answer = self.ask(&datagram(0, &wire::line("gets", key, "")))?;
                let head = answer.bytes.split(|byte| *byte == b'\r').next().unwrap_or_default();
                let word = head.split(|byte| *byte == b' ').nth(4).and_then(|word| std::str::from_utf8(word).ok());
                self.cas = word.and_then(|word| word.parse().ok()).unwrap_or(0);
                Ok(vec![answer])
            }
            Step::Sleep(_) => Ok(Vec::new()),
        }
    }

    fn fill_in(&self, bytes: &[u8]) -> Vec<u8> {
        let mut out = bytes.to_vec();
        // The long placeholder first: the short one is a part of it.
        for (placeholder, cas) in [
            (&TEXT_CAS[..], format!("{:020}", self.cas).into_bytes()),
            (&wire::BINARY_CAS.to_be_bytes()[..], self.cas.to_be_bytes().to_vec()),
        ] {
            let mut at = 0;
            while at + placeholder.len() <= out.len() {
                if out[at..].starts_with(placeholder) {
                    out[at..at + cas.len()].copy_from_slice(&cas);
                }
                at += 1;
            }
        }
        out
    }

    fn send(&mut self, connection: (Speech, u8), pieces: &[Vec<u8>], after: After) -> Result<Answer> {
        let whole = self.fill_in(&pieces.concat());
        let mut lengths: Vec<usize> = pieces.iter().map(Vec::len).collect();
        if self.paced.is_none() {
            lengths = vec![whole.len()];
        }
        let paced = self.paced.is_some();
        if !self.connections.contains_key(&connection) {
            let stream = TcpStream::connect_timeout(&self.address.into(), PATIENCE)
                .with_context(|| format!("cannot connect to {}", self.address))?;
            stream.set_nodelay(true)?;
            self.connections.insert(connection, stream);
        }
        let stream = self.connections.get_mut(&connection).expect("was put there");
        let mut end = End::Complete;
        let mut from = 0;
        for (number, length) in lengths.iter().enumerate() {
            if paced && number > 0 {
                thread::sleep(GAP);
            }
            // A server that has closed says so when it is read from.
            if stream.write_all(&whole[from..from + length]).is_err() {
                end = End::Reset;
                break;
            }
            from += length;
        }
        let (barrier, expected) = match connection.0 {
            Speech::Text => (TEXT_BARRIER.to_vec(), TEXT_BARRIER_ANSWER.to_vec()),
            Speech::Binary => (wire::binary_barrier(), wire::binary_barrier_answer()),
        };
        match after {
            After::Silence => return Ok(Answer { bytes: Vec::new(), end }),
            After::Barrier if stream.write_all(&barrier).is_err() => end = End::Reset,
            After::Close if stream.shutdown(Shutdown::Write).is_err() => end = End::Reset,
            _ => {}
        }
        let until = (after == After::Barrier).then_some(&expected[..]);
        let mut answer = read(stream, until)?;
        if end == End::Reset {
            answer.end = end;
        }
        if answer.end != End::Complete {
            self.connections.remove(&connection);
        }
        Ok(answer)
    }

    fn numbered(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.request = self.request.wrapping_add(1);
        let mut bytes = self.fill_in(bytes);
        if let Some(number) = bytes.get_mut(..2) {
            number.copy_from_slice(&self.request.to_be_bytes());
        }
        bytes
    }

    fn receive(&self, until: Instant) -> Result<Option<Vec<u8>>> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        self.socket.set_read_timeout(Some(left))?;
        let mut buffer = vec![0; 65536];
        match self.socket.recv(&mut buffer) {
            Ok(len) => Ok(Some(buffer[..len].to_vec())),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(None),
            Err(error) => Err(error).context("cannot receive a datagram"),
        }
    }

    /// A request with one answer, of as many datagrams as the first one says.
    fn ask(&mut self, bytes: &[u8]) -> Result<Answer> {
        let bytes = self.numbered(bytes);
        self.socket.send(&bytes)?;
        let until = Instant::now() + PATIENCE;
        let mut parts: Vec<Vec<u8>> = Vec::new();
        while let Some(datagram) = self.receive(until)? {
            if datagram.get(..2) != bytes.get(..2) {
                continue;
            }
            let total = datagram.get(4..6).map_or(1, |word| usize::from(word[0]) << 8 | usize::from(word[1]));
            parts.push(datagram);
            if parts.len() >= total {
                parts.sort_by(|a, b| a.get(2..4).cmp(&b.get(2..4)));
                return Ok(Answer { bytes: parts.concat(), end: End::Complete });
            }
        }
        Ok(Answer { bytes: parts.concat(), end: End::Silent })
    }

    /// A request with any number of answers: all that come before that of the next request.
    fn ask_anything(&mut self, bytes: &[u8]) -> Result<Answer> {
        let bytes = self.numbered(bytes);
        self.socket.send(&bytes)?;
        let sentinel = self.numbered(&datagram(0, TEXT_BARRIER));
        self.socket.send(&sentinel)?;
        let until = Instant::now() + PATIENCE;
        let mut all = Vec::new();
        while let Some(datagram) = self.receive(until)? {
            if datagram.get(..2) == Some(&sentinel[..2]) {
                return Ok(Answer { bytes: all, end: End::Complete });
            }
            all.extend(datagram.get(UDP_HEADER_LEN..).unwrap_or(&datagram));
        }
        Ok(Answer { bytes: all, end: End::Silent })
    }
}

fn read(stream: &mut TcpStream, until: Option<&[u8]>) -> Result<Answer> {
    let deadline = Instant::now() + PATIENCE;
    let mut bytes = Vec::new();
    let mut buffer = [0; 65536];
    loop {
        if until.is_some_and(|until| bytes.ends_with(until)) {
            return Ok(Answer { bytes, end: End::Complete });
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Answer { bytes, end: End::Silent });
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(Answer { bytes, end: End::Closed }),
            Ok(len) => bytes.extend(&buffer[..len]),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => return Ok(Answer { bytes, end: End::Reset }),
                _ => return Err(error).context("cannot read an answer"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_times_are_left_out() {
        let same = |a: &str, b: &str| comparable(a.as_bytes()) == comparable(b.as_bytes());
        assert!(same("HD t99 c7 h0 l3\r\n", "HD t98 c7 h1 l0\r\n"));
        assert!(same("VA 2 t99\r\nhi\r\n", "VA 2 t98\r\nhi\r\n"));
        assert!(!same("HD t99 c7\r\n", "HD t99 c8\r\n"));
        assert!(!same("HD t-1\r\n", "HD t9\r\n"));
        assert!(!same("VALUE k 0 2 t9\r\n", "VALUE k 0 2 t8\r\n"));
        assert!(!same("HD tx\r\n", "HD ty\r\n"));
    }

    #[test]
    fn a_reset_forgives_what_was_lost_but_not_what_was_said() {
        let answer = |text: &str, end| Answer { bytes: text.into(), end };
        assert!(super::same(&answer("ERROR\r\n", End::Closed), &answer("", End::Reset)));
        assert!(!super::same(&answer("ERROR\r\n", End::Closed), &answer("OK", End::Reset)));
        assert!(!super::same(&answer("", End::Closed), &answer("", End::Silent)));
    }
}
