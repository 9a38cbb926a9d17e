//! Numbers on the command line.

use serde_json::Value;

/// A number of frames, or the word for what the model predicts.
pub(super) fn num_frames(text: &str) -> Result<Value, String> {
    match text {
        "auto" => Ok(text.into()),
        _ => text.parse::<u64>().map(Value::from).map_err(|_| "neither a number nor auto".to_string()),
    }
}

/// A finite number; `nan` and `inf` are refused.
pub(super) fn finite(text: &str) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|v| v.is_finite()).ok_or_else(|| "not a number".to_string())
}

/// A whole number; a negative one is refused with the range.
pub(super) fn whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("give a whole number from 0 to {}", u64::MAX))
}
