//! Histories: what clients called, when, and what they were told. One JSON object a line; `docs/history.md` is the format.
//!
//! ```
//! use underpass_check::history::{Operation, Outcome, Request};
//!
//! let mut put = Operation::call(7, Request::Put, "colour", 1_000);
//! put.value = Some("blue".into());
//! put.finish(Outcome::Ok, 1_450);
//! put.cas = Some(3);
//! let line = serde_json::to_string(&put).unwrap();
//! assert_eq!(
//!     line,
//!     r#"{"client":7,"op":"put","key":"colour","value":"blue","call_ns":1000,"return_ns":1450,"outcome":"ok","cas":3}"#
//! );
//! assert_eq!(serde_json::from_str::<Operation>(&line).unwrap(), put);
//! ```

mod read;
mod text;
mod write;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use read::{ReadError, read, read_file};
pub use text::Text;
pub use write::HistoryWriter;

macro_rules! named_enum {
    ($(#[$meta:meta])* $name:ident: $($(#[$variant_meta:meta])* $variant:ident = $text:literal;)+) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$variant_meta])* #[serde(rename = $text)] $variant,)+
        }

        impl $name {
            /// Every value.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// Its name in a history.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

named_enum! {
    /// What a client asked for.
    Request:
    /// Read the item.
    Get = "get";
    /// Store `value`, whatever was there.
    Put = "put";
    /// Remove the item; `not_found` if there is none.
    Delete = "delete";
    /// Store `value` if there is no item; else `exists` or `not_stored`.
    Add = "add";
    /// Store `value` if there is an item; else `not_stored` or `not_found`.
    Replace = "replace";
    /// Store `value` if the item's cas is `expected`; else `exists`, or `not_found`.
    Cas = "cas";
    /// Add `delta` to the item's decimal number.
    Incr = "incr";
    /// Put `value` behind the item's.
    Append = "append";
    /// Put `value` before the item's.
    Prepend = "prepend";
    /// Give the item the lifetime `ttl_ms`, leaving its value and its cas alone.
    Touch = "touch";
    /// Remove the item if there is one, and do not say whether there was.
    Flush = "flush";
}

named_enum! {
    /// What the client was told.
    Outcome:
    /// Done.
    Ok = "ok";
    /// There was no item.
    NotFound = "not_found";
    /// ADD: there was an item. CAS: its cas was another one.
    Exists = "exists";
    /// The condition did not hold.
    NotStored = "not_stored";
    /// INCR: the item is not a decimal number.
    NotANumber = "not_a_number";
    /// INCR: the sum does not fit in 64 bits.
    Overflow = "overflow";
    /// APPEND, PREPEND: the result does not fit in a datagram.
    TooLarge = "too_large";
    /// Definitely without effect, now and ever.
    Failed = "failed";
    /// No answer: it may have taken effect at any time after the call, may still do so, or never.
    Unknown = "unknown";
}

/// One operation of one client: a line of a history. Fields that do not apply are absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operation {
    /// Who called; for people, the checker gives it no meaning.
    pub client: u64,
    /// What was asked for.
    pub op: Request,
    /// The key.
    pub key: Text,
    /// The value to write; of a get, the value read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Text>,
    /// INCR: what to add.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta: Option<i64>,
    /// CAS: the cas that the item must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<u64>,
    /// Lifetime asked for, in milliseconds; 0 is for ever. Absent: PUT, ADD, REPLACE and CAS store for ever, the other
    /// writes keep the item's expiry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// When the client called, in nanoseconds of a clock that all clients share.
    pub call_ns: u64,
    /// When the client had the answer, by the same clock; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub return_ns: Option<u64>,
    /// What the client was told.
    pub outcome: Outcome,
    /// GET: the cas of the item read. A write that was answered: its sequence number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cas: Option<u64>,
    /// INCR: the sum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<i64>,
    /// The coordinator's stamp on the answered request, in milliseconds: makes expiry exact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_ms: Option<u64>,
}

impl Operation {
    /// An operation that has just been called, at `call_ns`; its outcome is unknown until [`Self::finish`].
    pub fn call(client: u64, op: Request, key: impl Into<Text>, call_ns: u64) -> Self {
        Self {
            client,
            op,
            key: key.into(),
            value: None,
            delta: None,
            expected: None,
            ttl_ms: None,
            call_ns,
            return_ns: None,
            outcome: Outcome::Unknown,
            cas: None,
            number: None,
            time_ms: None,
        }
    }

    /// The answer came at `return_ns`.
    pub fn finish(&mut self, outcome: Outcome, return_ns: u64) {
        self.outcome = outcome;
        self.return_ns = Some(return_ns);
    }

    /// Refuses what no client can have seen, naming the field that is wrong.
    pub fn validate(&self) -> Result<(), String> {
        let op = self.op;
        let present = |field: &str, has: bool, wanted: bool| match (has, wanted) {
            (false, true) => Err(format!("{op} with outcome {} needs \"{field}\"", self.outcome)),
            (true, false) => Err(format!("{op} with outcome {} cannot have \"{field}\"", self.outcome)),
            _ => Ok(()),
        };
        if !outcome_is_possible(op, self.outcome) {
            return Err(format!("{op} cannot have outcome {}", self.outcome));
        }
        let answered = !matches!(self.outcome, Outcome::Failed | Outcome::Unknown);
        let value = match op {
            Request::Get => self.outcome == Outcome::Ok,
            Request::Delete | Request::Incr | Request::Touch | Request::Flush => false,
            _ => true,
        };
        present("value", self.value.is_some(), value)?;
        present("delta", self.delta.is_some(), op == Request::Incr)?;
        present("expected", self.expected.is_some(), op == Request::Cas)?;
        if op == Request::Touch
            || (self.ttl_ms.is_some() && matches!(op, Request::Get | Request::Delete | Request::Flush))
        {
            present("ttl_ms", self.ttl_ms.is_some(), op == Request::Touch)?;
        }
        if self.cas.is_some() {
            present("cas", true, answered && (op != Request::Get || self.outcome == Outcome::Ok))?;
        }
        if self.number.is_some() {
            present("number", true, op == Request::Incr && self.outcome == Outcome::Ok)?;
        }
        if answered {
            present("return_ns", self.return_ns.is_some(), true)?;
        }
        match self.return_ns {
            Some(return_ns) if return_ns < self.call_ns => {
                Err(format!("return_ns {return_ns} is before call_ns {}", self.call_ns))
            }
            _ => Ok(()),
        }
    }
}

fn outcome_is_possible(op: Request, outcome: Outcome) -> bool {
    use Outcome::*;
    match outcome {
        Ok | Failed | Unknown => true,
        NotFound => !matches!(op, Request::Put | Request::Add | Request::Flush),
        Exists => matches!(op, Request::Add | Request::Cas),
        NotStored => matches!(op, Request::Add | Request::Replace | Request::Append | Request::Prepend),
        NotANumber | Overflow => op == Request::Incr,
        TooLarge => matches!(op, Request::Append | Request::Prepend),
    }
}

/// How a person reads it: `client 3 put "a" -> ok, cas 17`.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "client {} {}", self.client, self.op)?;
        if self.op != Request::Get
            && let Some(value) = &self.value
        {
            write!(f, " {}", value.excerpt())?;
        }
        if let Some(delta) = self.delta {
            write!(f, " {delta:+}")?;
        }
        if let Some(expected) = self.expected {
            write!(f, " if cas is {expected}")?;
        }
        if let Some(ttl) = self.ttl_ms {
            write!(f, " for {ttl} ms")?;
        }
        write!(f, " -> ")?;
        match (self.op, self.outcome, &self.value) {
            (Request::Get, Outcome::Ok, Some(value)) => write!(f, "{}", value.excerpt())?,
            (_, Outcome::Unknown, _) => write!(f, "no answer")?,
            (_, outcome, _) => write!(f, "{}", outcome.name().replace('_', " "))?,
        }
        if let Some(number) = self.number {
            write!(f, ", now {number}")?;
        }
        if let Some(cas) = self.cas {
            write!(f, ", cas {cas}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_refused_by_the_name_of_its_field() {
        let line = |text: &str| -> Result<(), String> {
            serde_json::from_str::<Operation>(text).map_err(|e| e.to_string())?.validate()
        };
        let base = r#""client":1,"key":"k","call_ns":10"#;
        for (rest, part) in [
            (r#""op":"put","outcome":"ok","return_ns":11"#, "\"value\""),
            (r#""op":"put","value":"v","outcome":"ok""#, "\"return_ns\""),
            (r#""op":"put","value":"v","outcome":"ok","return_ns":9"#, "before call_ns"),
            (r#""op":"put","value":"v","outcome":"exists","return_ns":11"#, "cannot have outcome exists"),
            (r#""op":"put","value":"v","outcome":"unknown","cas":4"#, "\"cas\""),
            (r#""op":"get","outcome":"ok","return_ns":11"#, "\"value\""),
            (r#""op":"get","outcome":"not_found","value":"v","return_ns":11"#, "\"value\""),
            (r#""op":"get","outcome":"not_found","ttl_ms":5,"return_ns":11"#, "\"ttl_ms\""),
            (r#""op":"cas","value":"v","outcome":"ok","return_ns":11"#, "\"expected\""),
            (r#""op":"incr","outcome":"ok","return_ns":11"#, "\"delta\""),
            (r#""op":"touch","outcome":"ok","return_ns":11"#, "\"ttl_ms\""),
            (r#""op":"delete","outcome":"ok","number":1,"return_ns":11"#, "\"number\""),
            (r#""op":"steal","outcome":"ok","return_ns":11"#, "unknown variant `steal`"),
            (r#""op":"delete","outcome":"ok","return_ns":11,"colour":1"#, "unknown field `colour`"),
        ] {
            let error = line(&format!("{{{base},{rest}}}")).expect_err(rest);
            assert!(error.contains(part), "{rest}: {error}");
        }
        line(&format!(r#"{{{base},"op":"put","value":"v","outcome":"unknown","return_ns":null}}"#)).unwrap();
    }

    #[test]
    fn a_line_reads_as_a_sentence() {
        let mut cas = Operation::call(3, Request::Cas, "k", 0);
        cas.value = Some("b".into());
        cas.expected = Some(4);
        assert_eq!(cas.to_string(), r#"client 3 cas "b" if cas is 4 -> no answer"#);
        cas.finish(Outcome::NotFound, 1);
        assert_eq!(cas.to_string(), r#"client 3 cas "b" if cas is 4 -> not found"#);
    }
}
