//! What the switch does to frames besides forwarding them.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{Error, Result};

/// The longest time that a fault can hold a frame back.
pub const HOLD_MAX: Duration = Duration::from_secs(60);

/// A probability, written `0.01` or `"1%"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Probability(f64);

impl Probability {
    /// Never.
    pub const NEVER: Self = Self(0.0);
    /// Always.
    pub const ALWAYS: Self = Self(1.0);

    /// # Errors
    /// [`Error::Fault`] unless `0 <= value <= 1`.
    pub fn new(value: f64) -> Result<Self> {
        if (0.0..=1.0).contains(&value) {
            Ok(Self(value))
        } else {
            Err(Error::Fault(format!("{value} is not a probability: give 0 to 1, or 0% to 100%")))
        }
    }

    /// From 0 to 1.
    pub fn value(self) -> f64 {
        self.0
    }

    /// In multiples of 2^-32, as the switch compares it with 32 random bits; always is one more than they can be.
    pub(crate) fn threshold(self) -> u64 {
        (self.0 * 2f64.powi(32)).round() as u64
    }

    pub(crate) fn from_threshold(threshold: u64) -> Self {
        // Nine digits tell all multiples of 2^-32 apart that a user can have meant.
        Self((threshold as f64 / 2f64.powi(32) * 1e9).round() / 1e9)
    }
}

impl FromStr for Probability {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (number, scale) = match text.trim().strip_suffix('%') {
            Some(number) => (number, 100.0),
            None => (text, 1.0),
        };
        match number.trim().parse::<f64>() {
            Ok(value) => Self::new(value / scale),
            Err(_) => Err(Error::Fault(format!("{text:?} is not a probability: give one such as 0.01 or 1%"))),
        }
    }
}

impl fmt::Display for Probability {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}%", (self.0 * 1e9).round() / 1e7)
    }
}

impl Serialize for Probability {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0)
    }
}

impl<'de> Deserialize<'de> for Probability {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a probability such as 0.01 or \"1%\"")]
        enum Form {
            Number(f64),
            Text(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(value) => Self::new(value),
            Form::Text(text) => text.parse(),
        }
        .map_err(de::Error::custom)
    }
}

/// Durations as `"200us"`.
mod duration_text {
    use super::*;

    pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_duration(*duration))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        parse_hold(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// Reads how long a fault holds a frame: `"200us"`, `"1ms 500us"`.
///
/// # Errors
/// [`Error::Fault`] if it is no duration or longer than [`HOLD_MAX`].
pub fn parse_hold(text: &str) -> Result<Duration> {
    let duration = humantime::parse_duration(text).map_err(|error| {
        Error::Fault(format!("{text:?} is not a duration ({error}): give one such as 200us or 5ms"))
    })?;
    if duration > HOLD_MAX {
        return Err(Error::Fault(format!(
            "{text} is too long: a frame can be held for {} at most",
            humantime::format_duration(HOLD_MAX)
        )));
    }
    Ok(duration)
}

/// The faults of a link: a directed pair of ports of the switch.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fault {
    /// How many frames are lost.
    pub loss: Probability,
    /// How many of the others arrive twice.
    pub duplicate: Probability,
    /// How many of the others are held for `reorder_hold`, so that later ones overtake them.
    pub reorder: Probability,
    /// How long a reordered frame is held, in addition to the delay.
    #[serde(with = "duration_text")]
    pub reorder_hold: Duration,
    /// How much later every frame arrives.
    #[serde(with = "duration_text")]
    pub delay: Duration,
    /// The longest further delay; each frame draws its own, in steps of about a microsecond.
    #[serde(with = "duration_text")]
    pub jitter: Duration,
    /// No frame passes.
    pub cut: bool,
}

impl Default for Fault {
    /// None; a `reorder_hold` of 1 ms for when `reorder` is set.
    fn default() -> Self {
        Self {
            loss: Probability::NEVER,
            duplicate: Probability::NEVER,
            reorder: Probability::NEVER,
            reorder_hold: Duration::from_millis(1),
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            cut: false,
        }
    }
}

impl Fault {
    /// Whether nothing happens to frames.
    pub fn is_none(&self) -> bool {
        !self.cut && !self.is_random()
    }

    /// Whether any fault other than the cut is set.
    pub(crate) fn is_random(&self) -> bool {
        self.loss != Probability::NEVER || self.needs_delay_line()
    }

    /// Whether the switch alone cannot do it.
    pub(crate) fn needs_delay_line(&self) -> bool {
        self.duplicate != Probability::NEVER
            || self.reorder != Probability::NEVER
            || !self.delay.is_zero()
            || !self.jitter.is_zero()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut parts = Vec::new();
        let duration = |duration| humantime::format_duration(duration).to_string().replace(' ', "");
        if self.cut {
            parts.push("cut".into());
        }
        if self.loss != Probability::NEVER {
            parts.push(format!("loss {}", self.loss));
        }
        if self.duplicate != Probability::NEVER {
            parts.push(format!("duplicate {}", self.duplicate));
        }
        if self.reorder != Probability::NEVER {
            parts.push(format!("reorder {} by {}", self.reorder, duration(self.reorder_hold)));
        }
        if !self.delay.is_zero() {
            parts.push(format!("delay {}", duration(self.delay)));
        }
        if !self.jitter.is_zero() {
            parts.push(format!("jitter {}", duration(self.jitter)));
        }
        if parts.is_empty() {
            parts.push("none".into());
        }
        f.write_str(&parts.join(", "))
    }
}

/// Which links a fault is for: those from a host (any if `None`) to a host (any if `None`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Links<'a> {
    /// The sender.
    pub from: Option<&'a str>,
    /// The receiver.
    pub to: Option<&'a str>,
}

impl<'a> Links<'a> {
    /// Every link.
    pub const ALL: Links<'static> = Links { from: None, to: None };

    /// From one host to another; not back.
    pub fn between(from: &'a str, to: &'a str) -> Self {
        Self { from: Some(from), to: Some(to) }
    }

    /// From one host to all others.
    pub fn from(host: &'a str) -> Self {
        Self { from: Some(host), to: None }
    }

    /// From all other hosts to one.
    pub fn to(host: &'a str) -> Self {
        Self { from: None, to: Some(host) }
    }
}

/// What was done to the frames of a link since the rack is up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FaultCounts {
    /// Frames seen while a fault other than the cut was set.
    pub seen: u64,
    /// Dropped because the link was cut.
    pub cut: u64,
    /// Dropped by the loss.
    pub lost: u64,
    /// Sent twice.
    pub duplicated: u64,
    /// Held so that others overtake.
    pub reordered: u64,
    /// Delayed.
    pub delayed: u64,
    /// Dropped, or not duplicated, because the delay line was full.
    pub line_full: u64,
}

/// A link with its faults and what they did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkStatus {
    /// The sender; with the subnet's name after a colon if it is a router.
    pub from: String,
    /// The receiver; with the subnet's name after a colon if it is a router.
    pub to: String,
    /// What is set.
    pub fault: Fault,
    /// What happened.
    pub counts: FaultCounts,
}
