//! `quantization_config` of a component's `config.json`: which tool quantized its weights, and how.

use std::path::Path;

use serde_json::Value;

use super::error::WeightsError;

/// The key.
const KEY: &str = "quantization_config";
/// Configurations of torchao whose weights are read.
const READ: [&str; 2] = ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"];

/// Takes the key out of a component's configuration, which is at `path`: the form of weights that are read is in their files.
///
/// # Errors
/// Weights of a tool or a form that are not read, by name.
pub(super) fn take(path: &Path, config: &mut Value) -> Result<(), WeightsError> {
    let Some(quantization) = config.as_object_mut().and_then(|keys| keys.remove(KEY)) else { return Ok(()) };
    if quantization.is_null() {
        return Ok(());
    }
    let method = quantization["quant_method"].as_str().unwrap_or_default();
    let tool = match method {
        "" if has(&quantization, ["load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"]) => "bitsandbytes",
        "" => "an unnamed tool",
        "torchao" => return of_torchao(path, &quantization),
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

/// Accepts weights alone that torchao made of 8 bits.
fn of_torchao(path: &Path, quantization: &Value) -> Result<(), WeightsError> {
    let kind = &quantization["quant_type"];
    // Older versions wrote a short name, e.g. int8wo, and no safetensors.
    let name = kind.as_str().or(kind["default"]["_type"].as_str()).unwrap_or("an unnamed form");
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
        "the weights are quantized by {tool}, which is not read: use the bf16 weights and runtime.weights, or weights that torchao \
         saved with {}",
        READ.join(" or ")
    );
    WeightsError::Config { path: path.to_path_buf(), key: KEY.into(), reason }
}
