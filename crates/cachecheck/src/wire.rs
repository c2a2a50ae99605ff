//! memcached's protocols, as far as a client needs them: requests as bytes, and where an answer ends.

/// Longest key that memcached takes, in bytes.
pub const KEY_MAX: usize = 250;
/// Bytes of the header before the text in each UDP datagram.
pub const UDP_HEADER_LEN: usize = 8;
/// Bytes of a binary request's or answer's header.
pub const BINARY_HEADER_LEN: usize = 24;

/// Where a text request's cas unique is to be filled in once it is known: as long as the longest there is, as leading zeros
/// are allowed.
pub const TEXT_CAS: &[u8; 20] = b"@@@@@@@@@@@@@@@@@@@@";
/// The same, in the header of a binary request.
pub const BINARY_CAS: u64 = u64::from_be_bytes(*b"@@@@@@@@");

/// A request to which memcached always answers at once: when the answer comes, all before it was processed.
pub const TEXT_BARRIER: &[u8] = b"mn\r\n";
/// Its answer, which no value contains that [`crate::stream`] makes.
pub const TEXT_BARRIER_ANSWER: &[u8] = b"MN\r\n";

/// Opcodes of the binary protocol that are used by name.
pub mod opcode {
    #![allow(missing_docs)]
    pub const GET: u8 = 0x00;
    pub const SET: u8 = 0x01;
    pub const ADD: u8 = 0x02;
    pub const REPLACE: u8 = 0x03;
    pub const DELETE: u8 = 0x04;
    pub const INCREMENT: u8 = 0x05;
    pub const DECREMENT: u8 = 0x06;
    pub const FLUSH: u8 = 0x08;
    pub const GETQ: u8 = 0x09;
    pub const NOOP: u8 = 0x0a;
    pub const VERSION: u8 = 0x0b;
    pub const GETK: u8 = 0x0c;
    pub const GETKQ: u8 = 0x0d;
    pub const APPEND: u8 = 0x0e;
    pub const PREPEND: u8 = 0x0f;
    pub const SETQ: u8 = 0x11;
    pub const ADDQ: u8 = 0x12;
    pub const REPLACEQ: u8 = 0x13;
    pub const DELETEQ: u8 = 0x14;
    pub const INCREMENTQ: u8 = 0x15;
    pub const DECREMENTQ: u8 = 0x16;
    pub const FLUSHQ: u8 = 0x18;
    pub const APPENDQ: u8 = 0x19;
    pub const PREPENDQ: u8 = 0x1a;
    pub const TOUCH: u8 = 0x1c;
    pub const GAT: u8 = 0x1d;
    pub const GATQ: u8 = 0x1e;
    pub const GATK: u8 = 0x23;
    pub const GATKQ: u8 = 0x24;
}

/// A binary request.
#[derive(Clone, Debug, Default)]
pub struct Binary {
    /// What is asked for.
    pub opcode: u8,
    /// Before the key: flags, lifetime, amounts.
    pub extras: Vec<u8>,
    /// The key.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
    /// 0: any.
    pub cas: u64,
    /// Comes back with the answer.
    pub opaque: u32,
}

impl Binary {
    /// A request without extras and value.
    pub fn new(opcode: u8, key: &[u8]) -> Self {
        Self { opcode, key: key.to_vec(), ..Self::default() }
    }

    /// With `words` as extras.
    pub fn extras(mut self, words: &[u32]) -> Self {
        self.extras = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        self
    }

    /// With the extras of INCREMENT and DECREMENT; a lifetime of all ones: do not create.
    pub fn amount(self, delta: u64, initial: u64, lifetime: u32) -> Self {
        let words = [(delta >> 32) as u32, delta as u32, (initial >> 32) as u32, initial as u32, lifetime];
        self.extras(&words)
    }

    /// With a value.
    pub fn value(mut self, value: &[u8]) -> Self {
        self.value = value.to_vec();
        self
    }

    /// With a cas unique.
    pub fn cas(mut self, cas: u64) -> Self {
        self.cas = cas;
        self
    }

    /// As it is sent.
    pub fn bytes(&self) -> Vec<u8> {
        let body = self.extras.len() + self.key.len() + self.value.len();
        let mut out = vec![0x80, self.opcode];
        out.extend((self.key.len() as u16).to_be_bytes());
        out.extend([self.extras.len() as u8, 0, 0, 0]);
        out.extend((body as u32).to_be_bytes());
        out.extend(self.opaque.to_be_bytes());
        out.extend(self.cas.to_be_bytes());
        out.extend(&self.extras);
        out.extend(&self.key);
        out.extend(&self.value);
        out
    }
}

/// Names the answer to a [`binary_barrier`].
const BARRIER_OPAQUE: u32 = 0xbade_affe;

/// As [`TEXT_BARRIER`], in binary.
pub fn binary_barrier() -> Vec<u8> {
    Binary { opcode: opcode::NOOP, opaque: BARRIER_OPAQUE, ..Binary::default() }.bytes()
}

/// Its answer.
pub fn binary_barrier_answer() -> Vec<u8> {
    let mut answer = binary_barrier();
    answer[0] = 0x81;
    answer
}

/// A UDP datagram: request number, and the text behind it.
pub fn datagram(request: u16, text: &[u8]) -> Vec<u8> {
    let mut out = request.to_be_bytes().to_vec();
    out.extend([0, 0, 0, 1, 0, 0]);
    out.extend(text);
    out
}

/// `set KEY FLAGS LIFETIME LENGTH`, and every other text command of this form.
pub fn store(verb: &str, key: &[u8], flags: u32, lifetime: i64, value: &[u8], end: &str) -> Vec<u8> {
    let mut out = verb.as_bytes().to_vec();
    out.push(b' ');
    out.extend(key);
    out.extend(format!(" {flags} {lifetime} {}{end}\r\n", value.len()).bytes());
    out.extend(value);
    out.extend(b"\r\n");
    out
}

/// `ms KEY LENGTH FLAGS`.
pub fn meta_set(key: &[u8], value: &[u8], flags: &str) -> Vec<u8> {
    let mut out = b"ms ".to_vec();
    out.extend(key);
    out.extend(format!(" {}{flags}\r\n", value.len()).bytes());
    out.extend(value);
    out.extend(b"\r\n");
    out
}

/// `VERB KEY REST`: every text command without a value.
pub fn line(verb: &str, key: &[u8], rest: &str) -> Vec<u8> {
    let mut out = verb.as_bytes().to_vec();
    out.push(b' ');
    out.extend(key);
    out.extend(rest.bytes());
    out.extend(b"\r\n");
    out
}

/// Base64, as the meta protocol takes keys with the flag `b`.
pub fn base64(bytes: &[u8]) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = Vec::new();
    for chunk in bytes.chunks(3) {
        let word = u32::from_be_bytes([0, chunk[0], *chunk.get(1).unwrap_or(&0), *chunk.get(2).unwrap_or(&0)]);
        for digit in 0..4 {
            out.push(if digit > chunk.len() { b'=' } else { DIGITS[(word >> (18 - 6 * digit) & 63) as usize] });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_as_memcached_documents_them() {
        assert_eq!(store("set", b"k", 7, -1, b"ab", " noreply"), b"set k 7 -1 2 noreply\r\nab\r\n");
        assert_eq!(meta_set(b"k", b"ab", " T5 c"), b"ms k 2 T5 c\r\nab\r\n");
        assert_eq!(line("delete", b"k", ""), b"delete k\r\n");
        let incr = Binary::new(opcode::INCREMENT, b"n").amount(1, 2, 3).bytes();
        assert_eq!(incr.len(), BINARY_HEADER_LEN + 20 + 1);
        assert_eq!(incr[..12], [0x80, 5, 0, 1, 20, 0, 0, 0, 0, 0, 0, 21]);
        assert_eq!(datagram(258, b"x"), [1, 2, 0, 0, 0, 1, 0, 0, b'x']);
        for (bytes, text) in [(&b"a"[..], "YQ=="), (b"ab", "YWI="), (b"abc", "YWJj"), (b"\xff\xfe", "//4=")] {
            assert_eq!(base64(bytes), text.as_bytes());
        }
    }
}
