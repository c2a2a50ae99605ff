//! Keys and values as JSON strings.

use std::{borrow::Cow, fmt};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Longest part of a value that is shown to people, in bytes.
const EXCERPT_MAX: usize = 40;

/// Bytes of a key or a value. In a history it is a string; a byte that is not part of valid UTF-8, and the percent sign
/// itself, are written `%HH` with two hexadecimal digits.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Text(pub Vec<u8>);

impl Text {
    /// The escaped form.
    pub fn escaped(&self) -> Cow<'_, str> {
        match std::str::from_utf8(&self.0) {
            Ok(text) if !text.contains('%') => return Cow::Borrowed(text),
            _ => {}
        }
        let mut out = String::with_capacity(self.0.len() + 16);
        for chunk in self.0.utf8_chunks() {
            for c in chunk.valid().chars() {
                match c {
                    '%' => out.push_str("%25"),
                    _ => out.push(c),
                }
            }
            for byte in chunk.invalid() {
                out.push_str(&format!("%{byte:02X}"));
            }
        }
        Cow::Owned(out)
    }

    /// From the escaped form; the error says what is wrong with which escape.
    pub fn from_escaped(text: &str) -> Result<Self, String> {
        if !text.contains('%') {
            return Ok(Self(text.as_bytes().to_vec()));
        }
        let mut out = Vec::with_capacity(text.len());
        let mut rest = text.as_bytes();
        while let Some((&byte, after)) = rest.split_first() {
            rest = after;
            if byte != b'%' {
                out.push(byte);
                continue;
            }
            let digits = rest.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
            let Some(byte) = digits.filter(|d| !d.starts_with('+')).and_then(|d| u8::from_str_radix(d, 16).ok()) else {
                return Err(format!(
                    "\"%\" in {text:?} is not followed by two hexadecimal digits; a percent sign is %25"
                ));
            };
            out.push(byte);
            rest = &rest[2..];
        }
        Ok(Self(out))
    }

    /// Quoted, and cut short if it is long: for people.
    pub fn excerpt(&self) -> String {
        let text = self.escaped();
        if text.len() <= EXCERPT_MAX {
            return format!("{text:?}");
        }
        let mut end = EXCERPT_MAX;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        format!("{:?}... ({} bytes)", &text[..end], self.0.len())
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.escaped())
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.escaped())
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self(text.as_bytes().to_vec())
    }
}

impl From<&[u8]> for Text {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}

impl From<Vec<u8>> for Text {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self(text.into_bytes())
    }
}

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.escaped())
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Text;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Text, E> {
                Text::from_escaped(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_string_survives() {
        for bytes in [
            &b"plain"[..],
            "schön \u{1F40D}".as_bytes(),
            b"100%",
            b"%41",
            b"\xff\x00\xc3\xa4\xc3",
            b"tab\t\"quote\"\\",
            b"",
        ] {
            let text = Text::from(bytes);
            let json = serde_json::to_string(&text).unwrap();
            assert_eq!(serde_json::from_str::<Text>(&json).unwrap(), text, "{json}");
        }
        assert_eq!(Text::from(&b"a\xffb%"[..]).escaped(), "a%FFb%25");
    }

    #[test]
    fn a_bad_escape_is_named() {
        for text in ["%", "a%4", "%zz", "%+4", "%é"] {
            assert!(Text::from_escaped(text).unwrap_err().contains("two hexadecimal digits"), "{text}");
        }
    }

    #[test]
    fn long_values_are_cut_for_people() {
        let excerpt = Text::from("é".repeat(100)).excerpt();
        assert!(excerpt.len() < 70 && excerpt.ends_with("(200 bytes)"), "{excerpt}");
    }
}
