//! `quantization_config` of a component's `config.json`: the tool and format of quantized weights.

use std::path::Path;

use serde_json::Value;

use super::error::WeightsError;

pub(super) const KEY: &str = "quantization_config";
/// Supported torchao configurations.
const READ: [&str; 2] = ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"];

/// Removes `quantization_config` from the configuration at `path`. For supported formats the key is not needed: the
/// weight files state the format.
///
/// # Errors
/// Returns an error for an unsupported tool or format.
pub(super) fn take(path: &Path, config: &mut Value) -> Result<(), WeightsError> {
    let Some(quantization) = config.as_object_mut().and_then(|keys| keys.remove(KEY)) else { return Ok(()) };
    if quantization.is_null() {
        return Ok(());
    }
    let method = quantization["quant_method"].as_str().unwrap_or_default();
    let tool = match method {
        "" if has(&quantization, ["load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"]) => "bitsandbytes",
        "" => "an unnamed tool",
        "torchao" => return check_torchao(path, &quantization),
        "modelopt" => "NVIDIA ModelOpt",
        "quanto" => "optimum-quanto",
        "gguf" => "GGUF",
        "fp8" => "transformers' fine-grained fp8",
        other => other,
    };
    let form = ["quant_type", "quant_algo", "bnb_4bit_quant_type", "weights_dtype", "weights", "fmt", "bits"];
    let form =
        form.into_iter().find_map(|key| quantization.get(key).filter(|value| value.is_string() || value.is_number()));
    let form = form.map(|form| format!(" ({})", form.as_str().map_or_else(|| form.to_string(), Into::into)));
    Err(refused(path, &format!("{tool}{}", form.unwrap_or_default())))
}

fn has(quantization: &Value, keys: [&str; 4]) -> bool {
    keys.iter().any(|key| quantization.get(key).is_some())
}

/// Accepts 8-bit weight-only quantization by torchao.
fn check_torchao(path: &Path, quantization: &Value) -> Result<(), WeightsError> {
    let kind = &quantization["quant_type"];
    // Older versions of torchao wrote a short name such as int8wo, but no safetensors files.
    let name = kind.as_str().or(kind["default"]["_type"].as_str()).unwrap_or("an unnamed configuration");
    let form = &kind["default"]["_data"];
    if !READ.contains(&name) {
        return Err(refused(path, &format!("torchao ({name})")));
    }
    match &form["group_size"] {
        Value::Null => Ok(()),
        size => Err(refused(path, &format!("torchao ({name} with group_size {size})"))),
    }
}

fn refused(path: &Path, tool: &str) -> WeightsError {
    let reason = format!(
        "states that the weights are quantized by {tool}, which is not supported; use the bf16 weights with runtime.weights, \
         or weights saved by torchao with {}",
        READ.join(" or ")
    );
    WeightsError::Config { path: path.to_path_buf(), key: KEY.into(), reason }
}
