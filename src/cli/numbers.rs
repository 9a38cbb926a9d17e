//! Parsers of numbers on the command line.

use serde_json::Value;

/// Parses a number of frames, or `auto`.
pub(super) fn num_frames(text: &str) -> Result<Value, String> {
    match text {
        "auto" => Ok(text.into()),
        _ => text.parse::<u64>().map(Value::from).map_err(|_| "expected an integer or auto".to_string()),
    }
}

/// Parses a finite number; rejects `nan` and `inf`.
pub(super) fn finite(text: &str) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|v| v.is_finite()).ok_or_else(|| "expected a finite number".to_string())
}

/// Parses an integer of at least 0.
pub(super) fn whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("expected an integer from 0 to {}", u64::MAX))
}
