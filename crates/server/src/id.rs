//! Video ids: `video_` plus a ULID. Ids sort by creation time.

use std::fmt;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Digits of Crockford's base 32, in lower case.
const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const PREFIX: &str = "video_";

/// Video id: `video_` and 26 base-32 digits. Ids sort by creation time.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VideoId(String);

impl VideoId {
    /// Parses an id; `None` if the text is not a valid id.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix(PREFIX)?;
        // The 26 digits hold 130 bits but an id has 128, so the first digit is at most 7.
        let legal = digits.len() == 26 && digits.bytes().all(|b| DIGITS.contains(&b)) && digits.as_bytes()[0] <= b'7';
        legal.then(|| VideoId(text.into()))
    }

    /// Returns the id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn from_parts(millis: u64, random: u128) -> Self {
        let bits = (u128::from(millis) << 80) | (random & ((1 << 80) - 1));
        let digit = |at: u32| DIGITS[(bits >> (5 * at) & 31) as usize] as char;
        VideoId(PREFIX.chars().chain((0..26).rev().map(digit)).collect())
    }
}

impl fmt::Display for VideoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for VideoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for VideoId {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        VideoId::parse(&text).ok_or_else(|| format!("invalid video id: {text}"))
    }
}

impl From<VideoId> for String {
    fn from(id: VideoId) -> String {
        id.0
    }
}

/// Id generator. Each id sorts after all earlier ones, even if the clock is set back.
#[derive(Debug)]
pub struct Ids {
    last: Mutex<(u64, u128)>,
}

impl Ids {
    /// Returns a generator whose ids sort after `last`. `None`: there are no earlier ids.
    pub fn after(last: Option<&VideoId>) -> Self {
        let bits = last.map_or(0, |id| {
            let digit = |b: u8| DIGITS.iter().position(|d| *d == b).expect("ids contain only these digits") as u128;
            id.0.bytes().skip(PREFIX.len()).fold(0, |bits: u128, b| bits << 5 | digit(b))
        });
        Ids { last: Mutex::new(((bits >> 80) as u64, bits & ((1 << 80) - 1))) }
    }

    /// Returns a new id. Its low bits are random, so clients cannot guess the next id.
    ///
    /// # Errors
    /// Returns an error if the system's random number generator fails.
    pub fn next(&self) -> std::io::Result<VideoId> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|error| std::io::Error::other(error.to_string()))?;
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Keep the top bit clear, so that incrementing the random bits for ids of the same millisecond does not
        // overflow.
        let drawn = u128::from_le_bytes(random) & ((1 << 79) - 1);
        let (millis, low) = *last;
        *last = if now > millis { (now, drawn) } else { (millis, low + 1 + (drawn & ((1 << 60) - 1))) };
        Ok(VideoId::from_parts(last.0, last.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_stay_sorted_when_the_clock_is_set_back() {
        let future = VideoId::from_parts(1 << 46, 7);
        let ids = Ids::after(Some(&future));
        let made: Vec<VideoId> = (0..1000).map(|_| ids.next().expect("an id")).collect();
        assert!(made[0] > future);
        assert!(made.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(made.iter().all(|id| VideoId::parse(id.as_str()).as_ref() == Some(id)));
    }

    #[test]
    fn invalid_ids_are_rejected() {
        let good = Ids::after(None).next().expect("an id").to_string();
        assert_eq!(good.len(), 32);
        for bad in ["", "video_", "video_../../../etc/passwd", &good.to_uppercase(), &good[1..], &format!("{good}0")] {
            assert_eq!(VideoId::parse(bad), None, "{bad}");
        }
        assert_eq!(VideoId::parse("video_8zzzzzzzzzzzzzzzzzzzzzzzzz"), None);
        assert_eq!(VideoId::parse("video_0000000000000000000000000u"), None);
    }
}
