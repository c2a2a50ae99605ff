//! What memcached (1.6) makes of the bytes of one connection: which keys a command names, where it ends, what it may change.
//!
//! Pure, one byte at a time, so that it cannot matter how the bytes were cut into segments and reads. The kernel's stream
//! parser (`bpf/lib/stream.h`) is a refinement of this one: same bytes, same events, same state.
//!
//! Where memcached reads a line in a peculiar way (numbers by `strtol`, what a NUL does, which errors leave the value to be
//! read as commands), so does this. Naming a key that memcached then refuses is harmless; missing one, or taking a value's
//! bytes for commands or commands for a value, is not. What is not known to be followed is [`Event::Lost`].

use underpass_abi::cache::{self as abi, uc_stream};

/// What a byte completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A command that looks at the key in [`uc_stream::key`].
    Read,
    /// A command that may change the item of that key, or its lifetime.
    Write,
    /// A command without a key, or one that memcached refuses.
    Other,
    /// A command that may change any item.
    Forget,
    /// `flush_all`: in [`uc_stream::number`] seconds, or at that time, 0 for at once.
    Flush,
    /// From here on the stream cannot be followed.
    Lost,
}

impl Event {
    /// `UC_EVENT_*`.
    pub fn to_abi(event: Option<Self>) -> u32 {
        match event {
            None => abi::UC_EVENT_NONE,
            Some(Self::Read) => abi::UC_EVENT_READ,
            Some(Self::Write) => abi::UC_EVENT_WRITE,
            Some(Self::Other) => abi::UC_EVENT_OTHER,
            Some(Self::Forget) => abi::UC_EVENT_FORGET,
            Some(Self::Flush) => abi::UC_EVENT_FLUSH,
            Some(Self::Lost) => abi::UC_EVENT_LOST,
        }
    }
}

const TEXT: u8 = abi::UC_MODE_TEXT as u8;
const BINARY: u8 = abi::UC_MODE_BINARY as u8;
const LOST: u8 = abi::UC_MODE_LOST as u8;

const IN_TOKEN: u8 = abi::UC_STREAM_IN_TOKEN as u8;
const CR: u8 = abi::UC_STREAM_CR as u8;
const NUL: u8 = abi::UC_STREAM_NUL as u8;
const BAD: u8 = abi::UC_STREAM_BAD as u8;
const WRITES: u8 = abi::UC_STREAM_WRITES as u8;
const BASE64: u8 = abi::UC_STREAM_BASE64 as u8;
const STALE: u8 = abi::UC_STREAM_STALE as u8;
const LONG: u8 = abi::UC_STREAM_LONG as u8;

const KEY_MAX: u16 = abi::UC_KEY_MAX as u16;
/// memcached's binary protocol: the first byte of a request.
const MAGIC: u8 = 0x80;
/// Most tokens that memcached takes in a meta command.
const META_TOKENS: u8 = 20;
const TOKENS_MAX: u8 = 200;

/// The key that the last event names.
pub fn key(s: &uc_stream) -> &[u8] {
    &s.key[..usize::from(s.key_len)]
}

/// Whether memcached has all of every command that it was given.
pub fn at_boundary(s: &uc_stream) -> bool {
    s.line == 0 && s.skip == 0
}

/// Feeds what one read returned; `emit` is called for each event in turn.
pub fn feed(s: &mut uc_stream, bytes: &[u8], mut emit: impl FnMut(&uc_stream, Event)) {
    let mut at = 0;
    while at < bytes.len() && s.mode != LOST {
        if s.skip > 0 {
            let pass = s.skip.min((bytes.len() - at) as u64);
            s.skip -= pass;
            at += pass as usize;
            continue;
        }
        if let Some(event) = step(s, bytes[at]) {
            emit(s, event);
        }
        at += 1;
    }
    end_of_read(s);
}

/// What the end of a read means: memcached grows its buffer for lines as long as this, and then reads on before it obeys.
pub fn end_of_read(s: &mut uc_stream) {
    if s.mode == TEXT && s.line > abi::UC_LINE_PLAIN {
        s.flags |= LONG;
    }
}

/// Feeds one byte that is not part of a value.
pub fn step(s: &mut uc_stream, byte: u8) -> Option<Event> {
    debug_assert!(s.skip == 0);
    match u32::from(s.mode) {
        abi::UC_MODE_START => {
            s.mode = if byte == MAGIC { BINARY } else { TEXT };
            step(s, byte)
        }
        abi::UC_MODE_TEXT => text(s, byte),
        abi::UC_MODE_BINARY => binary(s, byte),
        _ => None,
    }
}

fn lost(s: &mut uc_stream) -> Option<Event> {
    s.mode = LOST;
    Some(Event::Lost)
}

fn begin_command(s: &mut uc_stream) {
    s.tokens = 0;
    s.flags &= STALE | LONG;
    s.command = abi::UC_COMMAND_NONE as u8;
    s.word_len = 0;
    s.key_len = 0;
    s.number = 0;
    s.body_len = 0;
    s.phase = 0;
}

// --- Text and meta commands ---

fn text(s: &mut uc_stream, byte: u8) -> Option<Event> {
    if s.line == 0 {
        begin_command(s);
    }
    s.line = s.line.saturating_add(1);
    // A carriage return before the line's end is not part of the line, unless it is all of the line.
    if s.flags & CR != 0 && (byte != b'\n' || s.line == 2) {
        s.flags &= !CR;
        character(s, b'\r');
    }
    if byte == b'\n' {
        return end_of_line(s);
    }
    if byte == b'\r' {
        s.flags |= CR;
        return None;
    }
    character(s, byte)
}

/// A character of a line, its end aside.
fn character(s: &mut uc_stream, byte: u8) -> Option<Event> {
    if s.flags & NUL != 0 {
        return None;
    }
    if byte == 0 {
        s.flags |= NUL;
        return None;
    }
    if byte == b' ' {
        return if s.flags & IN_TOKEN != 0 { end_of_token(s) } else { None };
    }
    let first = s.flags & IN_TOKEN == 0;
    s.flags |= IN_TOKEN;
    if s.tokens == 0 {
        if usize::from(s.word_len) < s.word.len() {
            s.word[usize::from(s.word_len)] = byte;
        }
        if usize::from(s.word_len) <= s.word.len() {
            s.word_len += 1;
        }
        return None;
    }
    match role(s) {
        Role::Key => {
            if first {
                s.key_len = 0;
            }
            if s.key_len < KEY_MAX {
                s.key[usize::from(s.key_len)] = byte;
            }
            if s.key_len <= KEY_MAX {
                s.key_len += 1;
            }
        }
        Role::Number => {
            if first {
                s.number = 0;
                s.phase = abi::UC_PHASE_LEADING as u8;
            }
            digit(s, byte);
        }
        Role::Flag => {
            if first {
                flag(s, byte);
            }
        }
        Role::None => {}
    }
    None
}

enum Role {
    None,
    Key,
    Number,
    Flag,
}

/// What the token that is being read is for. Not asked of the first, the command's word.
fn role(s: &uc_stream) -> Role {
    match (u32::from(s.command), s.tokens) {
        (abi::UC_COMMAND_GET, _) => Role::Key,
        (abi::UC_COMMAND_GAT, 2..) => Role::Key,
        (abi::UC_COMMAND_STORE | abi::UC_COMMAND_CAS | abi::UC_COMMAND_KEYED, 1) => Role::Key,
        (abi::UC_COMMAND_STORE, 2..=4) | (abi::UC_COMMAND_CAS, 2..=5) | (abi::UC_COMMAND_FLUSH, 1) => Role::Number,
        (abi::UC_COMMAND_MG | abi::UC_COMMAND_MS | abi::UC_COMMAND_MD | abi::UC_COMMAND_ME, 1) => Role::Key,
        (abi::UC_COMMAND_MS, 2) => Role::Number,
        (abi::UC_COMMAND_MG | abi::UC_COMMAND_MS | abi::UC_COMMAND_MD | abi::UC_COMMAND_ME, _) => Role::Flag,
        _ => Role::None,
    }
}

/// A blank to `strtol`, other than the one that ends a token.
fn blank(byte: u8) -> bool {
    (b'\t'..=b'\r').contains(&byte)
}

fn digit(s: &mut uc_stream, byte: u8) {
    let digit = byte.wrapping_sub(b'0');
    let negative = matches!(u32::from(s.phase), abi::UC_PHASE_MINUS | abi::UC_PHASE_NEGATIVE);
    let phase = match u32::from(s.phase) {
        abi::UC_PHASE_LEADING if blank(byte) => abi::UC_PHASE_LEADING,
        abi::UC_PHASE_LEADING if byte == b'+' => abi::UC_PHASE_PLUS,
        abi::UC_PHASE_LEADING if byte == b'-' => abi::UC_PHASE_MINUS,
        abi::UC_PHASE_LEADING..=abi::UC_PHASE_NEGATIVE if digit < 10 => {
            if s.number > (u64::MAX - u64::from(digit)) / 10 {
                s.flags |= BAD;
            } else {
                s.number = s.number * 10 + u64::from(digit);
            }
            if negative { abi::UC_PHASE_NEGATIVE } else { abi::UC_PHASE_DIGITS }
        }
        abi::UC_PHASE_DIGITS if blank(byte) => abi::UC_PHASE_DONE,
        abi::UC_PHASE_NEGATIVE if blank(byte) => abi::UC_PHASE_DONE_NEGATIVE,
        done @ (abi::UC_PHASE_DONE | abi::UC_PHASE_DONE_NEGATIVE) => done,
        phase => {
            s.flags |= BAD;
            phase
        }
    };
    s.phase = phase as u8;
}

/// The number that was read, as `strtol` returns it; none: it fails, or overflows.
fn signed(s: &mut uc_stream) -> i64 {
    let negative = matches!(u32::from(s.phase), abi::UC_PHASE_NEGATIVE | abi::UC_PHASE_DONE_NEGATIVE);
    let most = if negative { 1 << 63 } else { (1 << 63) - 1 };
    if u32::from(s.phase) < abi::UC_PHASE_DIGITS || s.number > most {
        s.flags |= BAD;
    }
    if negative { (s.number as i64).wrapping_neg() } else { s.number as i64 }
}

/// The same of `safe_strtoul`: what it returns does not matter, whether it does does.
fn unsigned(s: &mut uc_stream) {
    let negative = matches!(u32::from(s.phase), abi::UC_PHASE_NEGATIVE | abi::UC_PHASE_DONE_NEGATIVE);
    if u32::from(s.phase) < abi::UC_PHASE_DIGITS || (negative && (s.number.wrapping_neg() as i64) < 0) {
        s.flags |= BAD;
    }
}

fn flag(s: &mut uc_stream, byte: u8) {
    match byte {
        b'b' => s.flags |= BASE64,
        b'I' => s.flags |= STALE | WRITES,
        // Looks at the item, or has to do with the reply. That h and l tell when it was last fetched is no change of it.
        b'O' | b'P' | b'L' | b'c' | b'f' | b'h' | b'k' | b'l' | b'q' | b's' | b't' | b'u' | b'v' => {}
        _ => s.flags |= WRITES,
    }
}

fn end_of_token(s: &mut uc_stream) -> Option<Event> {
    s.flags &= !IN_TOKEN;
    if s.tokens == 0 {
        s.command = command(s) as u8;
        s.tokens = 1;
        return None;
    }
    let event = match (u32::from(s.command), s.tokens) {
        // Beyond a key that is too long memcached does not look.
        (abi::UC_COMMAND_GET, _) | (abi::UC_COMMAND_GAT, 2..) if s.key_len > KEY_MAX => {
            s.command = abi::UC_COMMAND_QUIET as u8;
            None
        }
        (abi::UC_COMMAND_GET, _) => Some(Event::Read),
        (abi::UC_COMMAND_GAT, 2..) => Some(Event::Write),
        (abi::UC_COMMAND_STORE | abi::UC_COMMAND_CAS, 2 | 5) => {
            unsigned(s);
            None
        }
        (abi::UC_COMMAND_STORE | abi::UC_COMMAND_CAS, 3) => {
            signed(s);
            None
        }
        (abi::UC_COMMAND_STORE | abi::UC_COMMAND_CAS, 4) | (abi::UC_COMMAND_MS, 2) => {
            // memcached keeps the lower half.
            s.body_len = signed(s) as u32;
            if s.body_len > i32::MAX as u32 - 2 {
                s.flags |= BAD;
            }
            None
        }
        _ => None,
    };
    s.tokens = (s.tokens + 1).min(TOKENS_MAX);
    event
}

fn command(s: &uc_stream) -> u32 {
    match s.word.get(..usize::from(s.word_len)).unwrap_or(b"") {
        b"get" | b"gets" | b"bget" => abi::UC_COMMAND_GET,
        b"gat" | b"gats" => abi::UC_COMMAND_GAT,
        b"set" | b"add" | b"replace" | b"append" | b"prepend" => abi::UC_COMMAND_STORE,
        b"cas" => abi::UC_COMMAND_CAS,
        b"delete" | b"incr" | b"decr" | b"touch" => abi::UC_COMMAND_KEYED,
        b"mg" => abi::UC_COMMAND_MG,
        b"ms" => abi::UC_COMMAND_MS,
        b"md" | b"ma" => abi::UC_COMMAND_MD,
        b"me" => abi::UC_COMMAND_ME,
        b"flush_all" => abi::UC_COMMAND_FLUSH,
        b"mn" | b"quit" | b"shutdown" | b"stats" | b"verbosity" | b"version" => abi::UC_COMMAND_QUIET,
        b"cache_memlimit" | b"extstore" | b"lru" | b"lru_crawler" | b"refresh_certs" | b"slabs" | b"watch" => {
            abi::UC_COMMAND_GLOBAL
        }
        // memcached says ERROR to a word of one character whatever it is.
        [_] => abi::UC_COMMAND_QUIET,
        _ => abi::UC_COMMAND_UNKNOWN,
    }
}

fn end_of_line(s: &mut uc_stream) -> Option<Event> {
    let last = if s.flags & IN_TOKEN != 0 { end_of_token(s) } else { None };
    s.line = 0;
    // A `get` has already told its keys: its end is an event of its own only if it is the last key's.
    if last.is_some() {
        return last;
    }
    if s.tokens == 0 {
        return Some(Event::Other);
    }
    let too_long = s.key_len > KEY_MAX;
    Some(match u32::from(s.command) {
        abi::UC_COMMAND_STORE if !matches!(s.tokens, 5 | 6) => Event::Other,
        abi::UC_COMMAND_CAS if !matches!(s.tokens, 6 | 7) => Event::Other,
        abi::UC_COMMAND_MS if !matches!(s.tokens, 3..META_TOKENS) => Event::Other,
        abi::UC_COMMAND_STORE | abi::UC_COMMAND_CAS | abi::UC_COMMAND_MS if too_long || s.flags & BAD != 0 => {
            Event::Other
        }
        abi::UC_COMMAND_STORE | abi::UC_COMMAND_CAS | abi::UC_COMMAND_MS => {
            s.skip = u64::from(s.body_len) + 2;
            if s.flags & BASE64 != 0 { Event::Forget } else { Event::Write }
        }
        abi::UC_COMMAND_KEYED | abi::UC_COMMAND_MG | abi::UC_COMMAND_MD | abi::UC_COMMAND_ME
            if s.tokens < 2 || too_long =>
        {
            Event::Other
        }
        abi::UC_COMMAND_KEYED => Event::Write,
        abi::UC_COMMAND_MG | abi::UC_COMMAND_MD | abi::UC_COMMAND_ME if s.flags & BASE64 != 0 => Event::Forget,
        abi::UC_COMMAND_MG if s.flags & WRITES == 0 => Event::Read,
        abi::UC_COMMAND_ME => Event::Read,
        abi::UC_COMMAND_MG | abi::UC_COMMAND_MD => Event::Write,
        abi::UC_COMMAND_FLUSH => {
            let delay = if s.tokens > 1 { signed(s) as i32 } else { 0 };
            s.number = if s.flags & BAD != 0 || delay < 0 { 0 } else { delay as u64 };
            Event::Flush
        }
        abi::UC_COMMAND_GLOBAL => Event::Forget,
        abi::UC_COMMAND_UNKNOWN => return lost(s),
        _ => Event::Other,
    })
}

// --- Binary commands ---

fn binary(s: &mut uc_stream, byte: u8) -> Option<Event> {
    if s.line == 0 {
        begin_command(s);
        s.body_key_len = 0;
    }
    let at = s.line;
    s.line += 1;
    let extras_end = abi::UC_BINARY_HEADER + u32::from(s.extras_len);
    match at {
        0 if byte != MAGIC => return lost(s),
        1 => s.opcode = byte,
        2 | 3 => s.body_key_len = s.body_key_len << 8 | u16::from(byte),
        4 => s.extras_len = byte,
        8..=11 => s.body_len = s.body_len << 8 | u32::from(byte),
        0..abi::UC_BINARY_HEADER => {}
        _ if at < extras_end => {
            if let Some(room) = s.word.get_mut((at - abi::UC_BINARY_HEADER) as usize) {
                *room = byte;
            }
        }
        _ => {
            s.key[usize::from(s.key_len)] = byte;
            s.key_len += 1;
        }
    }
    if s.line < abi::UC_BINARY_HEADER {
        return None;
    }
    if s.line == abi::UC_BINARY_HEADER {
        let named = u32::from(s.body_key_len) + u32::from(s.extras_len);
        if s.body_key_len > KEY_MAX || named > s.body_len {
            return lost(s);
        }
    }
    let extras_end = abi::UC_BINARY_HEADER + u32::from(s.extras_len);
    if s.line < extras_end + u32::from(s.body_key_len) {
        return None;
    }
    s.line = 0;
    dispatch(s)
}

fn dispatch(s: &mut uc_stream) -> Option<Event> {
    let (key, extras) = (u32::from(s.body_key_len), u32::from(s.extras_len));
    let value = s.body_len - key - extras;
    let whole = value == 0;
    let event = match s.opcode {
        // get, getq, getk, getkq
        0x00 | 0x09 | 0x0c | 0x0d if extras == 0 && key > 0 && whole => Event::Read,
        // set, add, replace, and quiet
        0x01..=0x03 | 0x11..=0x13 if extras == 8 && key > 0 => Event::Write,
        // append, prepend, and quiet
        0x0e | 0x0f | 0x19 | 0x1a if extras == 0 && key > 0 => Event::Write,
        // delete, and quiet
        0x04 | 0x14 if extras == 0 && key > 0 && whole => Event::Write,
        // increment, decrement, and quiet
        0x05 | 0x06 | 0x15 | 0x16 if extras == 20 && key > 0 && whole => Event::Write,
        // touch, gat, gatq, gatk, gatkq
        0x1c..=0x1e | 0x23 | 0x24 if extras == 4 && key > 0 && whole => Event::Write,
        // flush, and quiet
        0x08 | 0x18 if (extras == 0 || extras == 4) && key == 0 && whole => {
            let at = u32::from_be_bytes([s.word[0], s.word[1], s.word[2], s.word[3]]);
            s.number = if extras == 4 { u64::from(at) } else { 0 };
            Event::Flush
        }
        // stat
        0x10 if extras == 0 && whole => Event::Other,
        // quit, noop, version, quitq, the list of authentication mechanisms
        0x07 | 0x0a | 0x0b | 0x17 | 0x20 if s.body_len == 0 => Event::Other,
        // memcached may close the connection, or go on somewhere else than one would think.
        _ => return lost(s),
    };
    s.skip = u64::from(value);
    Some(event)
}
