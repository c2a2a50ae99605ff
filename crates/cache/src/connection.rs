//! What one connection of memcached's has in flight: pure. `bpf/cache_sockets.bpf.c` is a refinement of it.
//!
//! A key is in flight from the read that brought it until memcached has obeyed the command: that is known when it reads the
//! connection again (it obeys every whole command that it has first), or sends a reply and had one command only. A read's
//! reply tells besides whether it found the item.

use underpass_abi::cache::{
    UC_ANSWER_MAX, UC_KEY_MAX, UC_MODE_LOST, UC_MODE_START, UC_MODE_TEXT, UC_PENDING_MAX, UC_STREAM_LONG, uc_stream,
};

use crate::stream::{self, Event};

/// A change of words. Keys are those of the commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A read that is alone.
    BeginRead(Vec<u8>),
    /// Any other command, or a read that is not alone.
    Begin(Vec<u8>),
    /// A read that was alone is not any more.
    Harden(Vec<u8>),
    /// The read was answered, or may have been: whether by a value.
    EndRead(Vec<u8>, bool),
    /// A read that was never in flight, as its reply is looked at before it leaves, may have missed.
    Forget(Vec<u8>),
    /// The command was obeyed.
    End(Vec<u8>),
    /// The agent was given what the command in hand stores.
    Give(Store),
    /// It was obeyed, but did not store, as far as is known.
    EndFailed(Vec<u8>),
    /// What may be about any key.
    BeginAll,
    /// It is over.
    EndAll,
    /// A flush that is to come: the agent is told, and ends it.
    FlushLater,
}

/// What a set stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    /// Its key.
    pub key: Vec<u8>,
    /// Client flags.
    pub flags: u32,
    /// What it says of its lifetime.
    pub seconds: u32,
    /// The value.
    pub value: Vec<u8>,
}

impl Store {
    /// Of bytes that are one `set` in its usual form, and nothing else.
    fn of(bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().position(|&b| b == b'\r')?;
        let mut words = bytes[..end].strip_prefix(b"set ")?.split(|&b| b == b' ');
        let key = words.next().filter(|key| (1..=UC_KEY_MAX as usize).contains(&key.len()))?;
        let mut number = || -> Option<u32> {
            let digits = words.next()?;
            let plain = (1..10).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
            std::str::from_utf8(digits).ok().filter(|_| plain)?.parse().ok()
        };
        let (flags, seconds, len) = (number()?, number()?, number()? as usize);
        let value = bytes[end..].strip_prefix(b"\r\n")?;
        // What ends a value memcached looks at.
        let whole = words.next().is_none() && key.iter().all(|&b| b > b' ') && value.len() == len + 2;
        (whole && len <= UC_ANSWER_MAX as usize).then(|| Self {
            key: key.to_vec(),
            flags,
            seconds,
            value: value[..len].to_vec(),
        })
    }
}

/// One connection.
#[derive(Clone, Debug, Default)]
pub struct Connection {
    stream: uc_stream,
    pending: Vec<Vec<u8>>,
    complete: usize,
    commands: u8,
    read: bool,
    holds_all: bool,
    filled: bool,
    /// Not followed, but the last read ended with a line; and it was alone.
    line: bool,
    alone: bool,
    /// Replies are looked at before they leave, so a read that is alone is not in flight.
    early: bool,
    /// The agent has what the one command in hand stores.
    storing: bool,
    /// Whether a key is one that is read from the kernel.
    is_read: Option<fn(&[u8]) -> bool>,
}

impl Connection {
    /// Sets of these keys are given to the agent.
    pub fn giving(self, is_read: fn(&[u8]) -> bool) -> Self {
        Self { is_read: Some(is_read), ..self }
    }

    /// What a thread has of a UDP socket: its replies are looked at before they leave. Every datagram is a stream of its own.
    pub fn of_datagrams() -> Self {
        Self { early: true, ..Self::default() }
    }

    /// A datagram was received, whose header is not of `bytes`.
    pub fn receive_datagram(&mut self, bytes: &[u8], filled: bool, emit: &mut dyn FnMut(Change)) {
        self.ended(emit);
        (self.stream.mode, self.stream.flags) = (UC_MODE_START as u8, 0);
        self.receive(Some(bytes), filled, emit);
        // With half a line behind it, memcached answers the read, but nobody can tell by which reply.
        if !self.replies() {
            self.harden(emit);
        }
        // There is nothing to find the way back in.
        self.line = false;
    }

    /// A read came back: with bytes, that filled memcached's buffer or not; none: there were none.
    pub fn receive(&mut self, bytes: Option<&[u8]>, filled: bool, emit: &mut dyn FnMut(Change)) {
        (self.line, self.alone) = (false, false);
        if !(u32::from(self.stream.flags) & UC_STREAM_LONG != 0 && self.filled) {
            self.end_complete(false, emit);
        }
        let Some(bytes) = bytes else { return };
        self.filled = filled;
        let between =
            stream::at_boundary(&self.stream) && matches!(u32::from(self.stream.mode), UC_MODE_START | UC_MODE_TEXT);
        let alone = between && self.pending.is_empty() && self.commands == 0 && !filled && !self.holds_all;
        let mut left = bytes;
        while !left.is_empty() && !self.lost() {
            if self.stream.skip > 0 {
                let pass = self.stream.skip.min(left.len() as u64);
                self.stream.skip -= pass;
                left = &left[pass as usize..];
            } else {
                let event = stream::step(&mut self.stream, left[0]);
                left = &left[1..];
                if let Some(event) = event {
                    self.obey(event, emit);
                }
            }
            if stream::at_boundary(&self.stream) {
                self.complete = self.pending.len();
                self.commands = (self.commands + 1).min(2);
            }
        }
        if self.lost() {
            self.hold_all(emit);
            self.look(bytes);
            return;
        }
        stream::end_of_read(&mut self.stream);
        let store = self.is_read.filter(|_| alone).and_then(|is_read| Store::of(bytes).filter(|s| is_read(&s.key)));
        if let Some(store) = store {
            self.storing = true;
            emit(Change::Give(store));
        }
    }

    /// A reply was sent that begins so.
    pub fn replied(&mut self, reply: &[u8], emit: &mut dyn FnMut(Change)) {
        if std::mem::take(&mut self.line) {
            if reply[0] < 0x80 {
                self.stream.mode = UC_MODE_TEXT as u8;
                (self.stream.line, self.stream.skip) = (0, 0);
                if self.alone {
                    self.complete = self.pending.len();
                    self.end_complete(false, emit);
                }
            }
            return;
        }
        if self.replies() {
            self.end_complete(reply.starts_with(if self.storing { b"ST" } else { b"VA" }), emit);
        }
    }

    /// Whether what memcached sends is the reply to the only command that it had.
    fn replies(&self) -> bool {
        let whole = self.complete == self.pending.len() && stream::at_boundary(&self.stream);
        self.commands == 1 && whole && !self.lost()
    }

    /// The read that was alone is not any more.
    fn harden(&mut self, emit: &mut dyn FnMut(Change)) {
        if std::mem::take(&mut self.read) {
            let key = self.pending[0].clone();
            emit(if self.early { Change::Begin(key) } else { Change::Harden(key) });
        }
    }

    /// memcached has closed it.
    pub fn ended(&mut self, emit: &mut dyn FnMut(Change)) {
        self.complete = self.pending.len();
        (self.stream.line, self.stream.skip) = (0, 0);
        self.end_complete(false, emit);
    }

    fn lost(&self) -> bool {
        u32::from(self.stream.mode) == UC_MODE_LOST
    }

    fn hold_all(&mut self, emit: &mut dyn FnMut(Change)) {
        if !std::mem::replace(&mut self.holds_all, true) {
            emit(Change::BeginAll);
        }
    }

    fn obey(&mut self, event: Event, emit: &mut dyn FnMut(Change)) {
        self.harden(emit);
        match event {
            Event::Read | Event::Write if self.pending.len() == UC_PENDING_MAX as usize => self.hold_all(emit),
            Event::Read | Event::Write => {
                let key = stream::key(&self.stream).to_vec();
                self.read = event == Event::Read && self.pending.is_empty() && self.commands == 0;
                match (self.read, self.early) {
                    (false, _) => emit(Change::Begin(key.clone())),
                    (true, false) => emit(Change::BeginRead(key.clone())),
                    (true, true) => {}
                }
                self.pending.push(key);
            }
            Event::Other => {}
            Event::Forget | Event::Flush | Event::Lost => {
                if event == Event::Flush && self.stream.number > 0 {
                    emit(Change::FlushLater);
                }
                self.hold_all(emit);
            }
        }
    }

    /// `hit`: the one command's reply tells that it found, or stored.
    fn end_complete(&mut self, hit: bool, emit: &mut dyn FnMut(Change)) {
        if self.complete > 0 && std::mem::take(&mut self.storing) && !hit {
            emit(Change::EndFailed(self.pending.remove(0)));
        } else if self.complete > 0 && std::mem::take(&mut self.read) {
            let key = self.pending.remove(0);
            match (self.early, hit) {
                (false, _) => emit(Change::EndRead(key, hit)),
                (true, false) => emit(Change::Forget(key)),
                (true, true) => {}
            }
        } else {
            self.pending.drain(..self.complete).for_each(|key| emit(Change::End(key)));
        }
        self.complete = 0;
        self.commands = 0;
        if self.holds_all && (stream::at_boundary(&self.stream) || self.lost()) {
            self.holds_all = false;
            emit(Change::EndAll);
        }
    }

    /// Whether the next reply would tell that this read ended where a command did: `look()` in the kernel says why.
    fn look(&mut self, bytes: &[u8]) {
        let lines = bytes.iter().filter(|&&b| b == b'\n').count();
        if bytes.len() > 512 || !matches!(lines, 1 | 2) || bytes.last() != Some(&b'\n') {
            return;
        }
        let last = bytes.split_inclusive(|&b| b == b'\n').next_back().expect("there is a line");
        self.alone = lines == 1;
        self.line = self.alone || !b"sarpcm ".contains(&last[0]);
    }
}
