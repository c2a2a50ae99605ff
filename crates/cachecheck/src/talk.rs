//! One request on one key, in each of memcached's protocols, and what its answer says: for histories.

use underpass_check::history::{Operation, Outcome, Request};

use crate::wire::{BINARY_HEADER_LEN, Binary, line, meta_set, opcode, store};

/// A protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tongue {
    /// `get`, `set` and so on.
    Text,
    /// `mg`, `ms` and so on.
    Meta,
    /// The binary one.
    Binary,
}

/// What an answer says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// How it went; `None`: the server could not do it, and has removed the item.
    pub outcome: Option<Outcome>,
    /// GET: the value.
    pub value: Option<Vec<u8>>,
    /// The item's cas unique, if told.
    pub cas: Option<u64>,
    /// INCR: the sum.
    pub number: Option<i64>,
}

impl Told {
    fn of(outcome: Outcome) -> Self {
        Self { outcome: Some(outcome), value: None, cas: None, number: None }
    }
}

impl Tongue {
    /// The request for an operation that has not been called yet.
    pub fn request(self, op: &Operation) -> Vec<u8> {
        let value = op.value.as_ref().map_or(&[][..], |value| &value.0);
        let seconds = op.ttl_ms.unwrap_or(0) / 1000;
        let (key, delta) = (&op.key.0[..], op.delta.unwrap_or(0));
        match self {
            Self::Text => {
                let with_value = |verb| store(verb, key, 0, seconds as i64, value, "");
                match op.op {
                    Request::Get => line("gets", key, ""),
                    Request::Put => with_value("set"),
                    Request::Add => with_value("add"),
                    Request::Replace => with_value("replace"),
                    Request::Append => with_value("append"),
                    Request::Prepend => with_value("prepend"),
                    Request::Cas => {
                        let end = format!(" {seconds} {} {}", value.len(), op.expected.unwrap_or(0));
                        [&line("cas", key, &format!(" 0{end}"))[..], value, b"\r\n"].concat()
                    }
                    Request::Incr if delta < 0 => line("decr", key, &format!(" {}", -delta)),
                    Request::Incr => line("incr", key, &format!(" {delta}")),
                    Request::Touch => line("touch", key, &format!(" {seconds}")),
                    Request::Delete => line("delete", key, ""),
                    Request::Flush => b"flush_all\r\n".to_vec(),
                }
            }
            Self::Meta => {
                let with_value = |flags: &str| meta_set(key, value, &format!("{flags} T{seconds} c"));
                match op.op {
                    Request::Get => line("mg", key, " v c"),
                    Request::Put => with_value(""),
                    Request::Add => with_value(" ME"),
                    Request::Replace => with_value(" MR"),
                    Request::Append => meta_set(key, value, " MA c"),
                    Request::Prepend => meta_set(key, value, " MP c"),
                    Request::Cas => with_value(&format!(" C{}", op.expected.unwrap_or(0))),
                    Request::Incr if delta < 0 => line("ma", key, &format!(" MD D{} v", -delta)),
                    Request::Incr => line("ma", key, &format!(" D{delta} v")),
                    Request::Touch => line("mg", key, &format!(" T{seconds}")),
                    Request::Delete => line("md", key, ""),
                    Request::Flush => b"flush_all\r\n".to_vec(),
                }
            }
            Self::Binary => {
                let with_value = |opcode| Binary::new(opcode, key).extras(&[0, seconds as u32]).value(value);
                let request = match op.op {
                    Request::Get => Binary::new(opcode::GET, key),
                    Request::Put => with_value(opcode::SET),
                    Request::Add => with_value(opcode::ADD),
                    Request::Replace => with_value(opcode::REPLACE),
                    Request::Append => Binary::new(opcode::APPEND, key).value(value),
                    Request::Prepend => Binary::new(opcode::PREPEND, key).value(value),
                    Request::Cas => with_value(opcode::SET).cas(op.expected.unwrap_or(0)),
                    Request::Incr => {
                        let opcode = if delta < 0 { opcode::DECREMENT } else { opcode::INCREMENT };
                        Binary::new(opcode, key).amount(delta.unsigned_abs(), 0, u32::MAX)
                    }
                    Request::Touch => Binary::new(opcode::TOUCH, key).extras(&[seconds as u32]),
                    Request::Delete => Binary::new(opcode::DELETE, key),
                    Request::Flush => Binary::new(opcode::FLUSH, b""),
                };
                request.bytes()
            }
        }
    }

    /// What an answer says, if it is all there. Values must not end in what ends an answer.
    ///
    /// # Errors
    /// When it is no answer to this.
    pub fn told(self, op: &Operation, answer: &[u8]) -> Result<Option<Told>, String> {
        match self {
            Self::Binary => binary_told(op, answer),
            _ if op.op == Request::Get && self == Self::Text => text_value(answer),
            _ => line_told(op, answer),
        }
    }
}

fn unexpected(op: &Operation, answer: &[u8]) -> String {
    format!("{op} was answered \"{}\"", answer[..answer.len().min(200)].escape_ascii())
}

fn split_line(answer: &[u8]) -> Option<(&str, &[u8])> {
    let end = answer.windows(2).position(|pair| pair == b"\r\n")?;
    Some((std::str::from_utf8(&answer[..end]).ok()?, &answer[end + 2..]))
}

fn text_value(answer: &[u8]) -> Result<Option<Told>, String> {
    if answer == b"END\r\n" {
        return Ok(Some(Told::of(Outcome::NotFound)));
    }
    if !answer.ends_with(b"\r\nEND\r\n") {
        return Ok(None);
    }
    let wrong = || format!("a GETS was answered \"{}\"", answer.escape_ascii());
    let (head, rest) = split_line(answer).ok_or_else(wrong)?;
    let words: Vec<&str> = head.split(' ').collect();
    let ["VALUE", _, _, length, cas] = words[..] else { return Err(wrong()) };
    let length: usize = length.parse().map_err(|_| wrong())?;
    if rest.len() != length + "\r\nEND\r\n".len() {
        return Err(wrong());
    }
    let cas = Some(cas.parse().map_err(|_| wrong())?);
    Ok(Some(Told { value: Some(rest[..length].to_vec()), cas, ..Told::of(Outcome::Ok) }))
}

fn line_told(op: &Operation, answer: &[u8]) -> Result<Option<Told>, String> {
    let Some((head, rest)) = split_line(answer) else { return Ok(None) };
    let mut words = head.split(' ');
    let first = words.next().unwrap_or_default();
    let mut told = match first {
        "VA" => {
            let length: usize =
                words.next().and_then(|word| word.parse().ok()).ok_or_else(|| unexpected(op, answer))?;
            if rest.len() < length + 2 {
                return Ok(None);
            }
            let mut told = Told::of(Outcome::Ok);
            if op.op == Request::Incr {
                told.number = std::str::from_utf8(&rest[..length]).ok().and_then(|text| text.trim().parse().ok());
            } else {
                told.value = Some(rest[..length].to_vec());
            }
            told
        }
        "HD" | "STORED" | "DELETED" | "TOUCHED" | "OK" => Told::of(Outcome::Ok),
        "NS" | "NOT_STORED" => Told::of(Outcome::NotStored),
        "EN" | "NF" | "NOT_FOUND" => Told::of(Outcome::NotFound),
        "EX" | "EXISTS" => Told::of(Outcome::Exists),
        "SERVER_ERROR" => Told { outcome: None, ..Told::of(Outcome::Failed) },
        "CLIENT_ERROR" if op.op == Request::Incr => Told::of(Outcome::NotANumber),
        digits if op.op == Request::Incr => {
            let number = digits.trim().parse().map_err(|_| unexpected(op, answer))?;
            Told { number: Some(number), ..Told::of(Outcome::Ok) }
        }
        _ => return Err(unexpected(op, answer)),
    };
    if told.outcome == Some(Outcome::Ok) {
        told.cas = words.find_map(|word| word.strip_prefix('c')).and_then(|word| word.parse().ok());
    }
    Ok(Some(told))
}

fn binary_told(op: &Operation, answer: &[u8]) -> Result<Option<Told>, String> {
    let Some(header) = answer.get(..BINARY_HEADER_LEN) else { return Ok(None) };
    let body = u32::from_be_bytes(header[8..12].try_into().expect("4 bytes")) as usize;
    let Some(body) = answer.get(BINARY_HEADER_LEN..BINARY_HEADER_LEN + body) else { return Ok(None) };
    let cas = u64::from_be_bytes(header[16..24].try_into().expect("8 bytes"));
    let outcome = match u16::from_be_bytes([header[6], header[7]]) {
        0 => Outcome::Ok,
        1 => Outcome::NotFound,
        2 => Outcome::Exists,
        5 => Outcome::NotStored,
        6 => Outcome::NotANumber,
        0x03 | 0x82 => return Ok(Some(Told { outcome: None, ..Told::of(Outcome::Failed) })),
        _ => return Err(unexpected(op, answer)),
    };
    let mut told = Told::of(outcome);
    if outcome == Outcome::Ok {
        let numbered = !matches!(op.op, Request::Delete | Request::Flush | Request::Touch);
        told.cas = Some(cas).filter(|cas| numbered && *cas != 0);
        match op.op {
            Request::Get => told.value = body.get(header[4].into()..).map(<[u8]>::to_vec),
            Request::Incr => {
                let bytes: Option<[u8; 8]> = body.try_into().ok();
                told.number = Some(i64::from_be_bytes(bytes.ok_or_else(|| unexpected(op, answer))?));
            }
            _ => {}
        }
    }
    Ok(Some(told))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_understood_once_they_are_whole() {
        let get = Operation::call(1, Request::Get, "k", 0);
        let incr = Operation { delta: Some(-3), ..Operation::call(1, Request::Incr, "k", 0) };
        let put = Operation { value: Some("v".into()), ..Operation::call(1, Request::Put, "k", 0) };
        for (tongue, op, answer, told) in [
            (
                Tongue::Text,
                &get,
                &b"VALUE k 0 2 77\r\nab\r\nEND\r\n"[..],
                Told { value: Some(b"ab".to_vec()), cas: Some(77), ..Told::of(Outcome::Ok) },
            ),
            (Tongue::Text, &get, b"END\r\n", Told::of(Outcome::NotFound)),
            (Tongue::Text, &incr, b"41 \r\n", Told { number: Some(41), ..Told::of(Outcome::Ok) }),
            (
                Tongue::Text,
                &put,
                b"SERVER_ERROR out of memory storing object\r\n",
                Told { outcome: None, ..Told::of(Outcome::Ok) },
            ),
            (Tongue::Meta, &put, b"HD c9\r\n", Told { cas: Some(9), ..Told::of(Outcome::Ok) }),
            (
                Tongue::Meta,
                &get,
                b"VA 2 c8\r\nhi\r\n",
                Told { value: Some(b"hi".to_vec()), cas: Some(8), ..Told::of(Outcome::Ok) },
            ),
        ] {
            for cut in 0..answer.len() {
                assert_eq!(tongue.told(op, &answer[..cut]), Ok(None), "{}", answer[..cut].escape_ascii());
            }
            assert_eq!(tongue.told(op, answer), Ok(Some(told)));
        }
        assert!(Tongue::Text.told(&put, b"VALUE\r\n").is_err());
        assert_eq!(Tongue::Text.request(&incr), b"decr k 3\r\n");
        assert_eq!(Tongue::Meta.request(&put), b"ms k 1 T0 c\r\nv\r\n");
    }
}
