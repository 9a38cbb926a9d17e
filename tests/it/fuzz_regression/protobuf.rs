//! Mutates single fields of a protobuf message and keeps the rest valid, so that readers reach the changed field.

use crate::support::needs;
use std::ops::Range;

use proptest::prelude::*;

/// Extreme numbers for sizes, positions and references.
const NUMBERS: [u64; 12] = [0, 1, 2, 3, 7, 64, 1 << 20, u32::MAX as u64, 1 << 40, i64::MAX as u64, 1 << 63, u64::MAX];

/// Strings that the readers look for.
const TEXTS: [&str; 24] = [
    "",
    "while",
    "call",
    "conditional",
    "fusion",
    "tuple",
    "get-tuple-element",
    "parameter",
    "constant",
    "copy",
    "copy-start",
    "add",
    "compare",
    "dot",
    "convolution",
    "custom-call",
    "dynamic-slice",
    "dynamic-update-slice",
    "all-reduce",
    "all-gather-start",
    "async-start",
    "async-done",
    "AsyncCollectiveStart",
    "blocks/attn1/(to_q/dot:to_k/dot)",
];

/// A mutation of a field.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// Another value from `NUMBERS` or `TEXTS`; in a packed list, one number is replaced.
    Value(usize),
    Remove,
    Repeat,
}

pub fn change() -> impl Strategy<Value = Change> {
    prop_oneof![6 => any::<usize>().prop_map(Change::Value), 1 => Just(Change::Remove), 1 => Just(Change::Repeat)]
}

/// A field: the range of tag and value, the range of the value, and its wire type.
struct Field {
    all: Range<usize>,
    value: Range<usize>,
    wire: u8,
}

/// Returns the message with one field changed and the enclosing lengths adjusted; `None` if the bytes are not a
/// message. `part` selects the field at each depth.
pub fn changed(bytes: &[u8], part: f64, change: Change) -> Option<Vec<u8>> {
    let fields = fields(bytes)?;
    let place = part * fields.len() as f64;
    let Field { all, value, wire } = fields.get(place as usize)?;
    let old = &bytes[value.clone()];
    // A packed list may look like a message, and is then mutated as one.
    let inner = if *wire == 2 { changed(old, place.fract(), change) } else { None };
    let tag = &bytes[all.start..all.start + varint(&bytes[all.start..])?.1];
    let written = |value: Vec<u8>| match wire {
        2 => [tag, &encoded(value.len() as u64), &value].concat(),
        _ => [tag, &value].concat(),
    };
    let new = match (inner, change) {
        (Some(inner), _) => written(inner),
        (None, Change::Value(choice)) => written(replaced(old, *wire, choice)),
        (None, Change::Remove) => Vec::new(),
        (None, Change::Repeat) => bytes[all.clone()].repeat(2),
    };
    Some([&bytes[..all.start], &new, &bytes[all.end..]].concat())
}

fn replaced(old: &[u8], wire: u8, choice: usize) -> Vec<u8> {
    let number = encoded(NUMBERS[choice % NUMBERS.len()]);
    match (wire, std::str::from_utf8(old)) {
        (0, _) => number,
        (2, Ok(text)) if text.chars().all(|c| !c.is_control()) => TEXTS[choice % TEXTS.len()].into(),
        (2, _) => {
            let ends: Vec<usize> = (0..old.len()).filter(|at| old[*at] < 128).map(|at| at + 1).collect();
            let Some(at) = choice.checked_rem(ends.len()) else { return number };
            let start = if at == 0 { 0 } else { ends[at - 1] };
            [&old[..start], &number, &old[ends[at]..]].concat()
        }
        _ => old.iter().map(|byte| !byte).collect(),
    }
}

/// Returns the fields of a message; `None` if there are none or the bytes are not a message.
fn fields(bytes: &[u8]) -> Option<Vec<Field>> {
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let (tag, length) = varint(&bytes[at..])?;
        let start = at + length;
        let (start, length) = match tag & 7 {
            0 => (start, varint(&bytes[start..])?.1),
            1 => (start, 8),
            2 => {
                let (length, own) = varint(&bytes[start..])?;
                (start + own, usize::try_from(length).ok()?)
            }
            5 => (start, 4),
            _ => return None,
        };
        let end = start.checked_add(length).filter(|end| *end <= bytes.len() && tag >> 3 > 0)?;
        found.push(Field { all: at..end, value: start..end, wire: (tag & 7) as u8 });
        at = end;
    }
    (!found.is_empty()).then_some(found)
}

/// Decodes a varint and returns its length in bytes.
fn varint(bytes: &[u8]) -> Option<(u64, usize)> {
    let length = bytes.iter().take(10).position(|byte| *byte < 128)? + 1;
    let number = bytes[..length].iter().rev().fold(0u64, |sum, byte| sum << 7 | u64::from(byte & 127));
    Some((number, length))
}

fn encoded(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number > 127 {
        bytes.push(number as u8 | 128);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

#[needs(nothing)]
fn mutating_a_field_keeps_the_message_valid() {
    // 1: {2: "dot", 3: [8, 300, 16]}, 9: 5.
    let message = b"\x0a\x0b\x12\x03dot\x1a\x04\x08\xac\x02\x10\x48\x05";
    let to = |part: f64, change| changed(message, part, change).expect("a message");
    assert_eq!(to(0.6, Change::Value(5)), b"\x0a\x0b\x12\x03dot\x1a\x04\x08\xac\x02\x10\x48\x40");
    assert_eq!(to(0.1, Change::Value(1)), b"\x0a\x0d\x12\x05while\x1a\x04\x08\xac\x02\x10\x48\x05");
    assert_eq!(to(0.3, Change::Value(1)), b"\x0a\x0a\x12\x03dot\x1a\x03\x08\x01\x10\x48\x05");
    assert_eq!(to(0.1, Change::Remove), b"\x0a\x06\x1a\x04\x08\xac\x02\x10\x48\x05");
    assert_eq!(to(0.6, Change::Repeat), [&message[..], b"\x48\x05"].concat());
    assert!(changed(b"{", 0.0, Change::Remove).is_none() && changed(b"", 0.0, Change::Remove).is_none());
}
