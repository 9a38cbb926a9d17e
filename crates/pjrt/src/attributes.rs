//! Named values: attributes of plugins, devices and topologies, and client options.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::slice;

use super::abi::{NamedValue, Struct, named_value_type as kind};

/// Attributes or options, ordered by name.
pub type Attributes = BTreeMap<String, AttributeValue>;

/// The value of an attribute or option.
#[derive(Clone, Debug, PartialEq)]
pub enum AttributeValue {
    /// A string. Invalid UTF-8 is replaced when the plugin's value is read.
    Text(String),
    /// A 64-bit integer.
    Int(i64),
    /// A list of 64-bit integers.
    Ints(Vec<i64>),
    /// A 32-bit float.
    Float(f32),
    /// A boolean.
    Bool(bool),
}

impl fmt::Display for AttributeValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttributeValue::Text(text) => f.write_str(text),
            AttributeValue::Int(value) => value.fmt(f),
            AttributeValue::Ints(values) => write!(f, "{values:?}"),
            AttributeValue::Float(value) => value.fmt(f),
            AttributeValue::Bool(value) => value.fmt(f),
        }
    }
}

/// Copies a C string of `size` bytes.
///
/// # Safety
/// `data` is null or points to `size` readable bytes.
pub(super) unsafe fn text(data: *const c_void, size: usize) -> String {
    // SAFETY: guaranteed by the caller.
    String::from_utf8_lossy(unsafe { list(data.cast::<u8>(), size) }).into_owned()
}

/// Returns a C array as a slice; null gives an empty slice.
///
/// # Safety
/// `data` is null or points to `len` initialized values that outlive the slice.
pub(super) unsafe fn list<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if data.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slice::from_raw_parts(data, len) }
}

/// Copies a C array of named values.
///
/// # Safety
/// `data` is null or points to `len` valid named values.
pub(super) unsafe fn read(data: *const c_void, len: usize) -> Attributes {
    let mut attributes = Attributes::new();
    // SAFETY: guaranteed by the caller.
    for value in unsafe { list(data.cast::<NamedValue>(), len) } {
        // SAFETY: names and values have the stated sizes; for strings and lists, the union holds a pointer.
        let (name, value) = unsafe {
            let pointer = value.value as usize as *const c_void;
            let content = match value.kind {
                kind::STRING => AttributeValue::Text(text(pointer, value.value_size)),
                kind::INT64 => AttributeValue::Int(value.value as i64),
                kind::INT64_LIST => AttributeValue::Ints(list(pointer.cast::<i64>(), value.value_size).to_vec()),
                kind::FLOAT => AttributeValue::Float(f32::from_bits(value.value as u32)),
                kind::BOOL => AttributeValue::Bool(value.value as u8 != 0),
                _ => continue,
            };
            (text(value.name, value.name_size), content)
        };
        attributes.insert(name, value);
    }
    attributes
}

/// Converts options to their C form. The result contains pointers to the names and values, so it must not outlive
/// `options`.
pub(super) fn write(options: &Attributes) -> Vec<NamedValue> {
    let named = |(name, value): (&String, &AttributeValue)| {
        let (kind, value, value_size) = match value {
            AttributeValue::Text(text) => (kind::STRING, text.as_ptr() as usize as u64, text.len()),
            AttributeValue::Int(value) => (kind::INT64, *value as u64, 1),
            AttributeValue::Ints(values) => (kind::INT64_LIST, values.as_ptr() as usize as u64, values.len()),
            AttributeValue::Float(value) => (kind::FLOAT, value.to_bits().into(), 1),
            AttributeValue::Bool(value) => (kind::BOOL, (*value).into(), 1),
        };
        let name_size = name.len();
        NamedValue { name: name.as_ptr().cast_mut().cast(), name_size, kind, value, value_size, ..Struct::new() }
    };
    options.iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_round_trip_through_c() {
        let options = Attributes::from([
            ("allocator".into(), AttributeValue::Text("cuda_async".into())),
            ("asynchronous".into(), AttributeValue::Bool(true)),
            ("cpu_device_count".into(), AttributeValue::Int(-8)),
            ("memory_fraction".into(), AttributeValue::Float(0.75)),
            ("visible_devices".into(), AttributeValue::Ints(vec![0, 3])),
        ]);
        let written = write(&options);
        // SAFETY: `written` and `options` outlive the call.
        assert_eq!(unsafe { read(written.as_ptr().cast(), written.len()) }, options);
    }
}
