//! Weights quantized by torchao: the tensor `X.weight` is stored as `X._weight_qdata`, `X._weight_scale` and, for
//! integers, `X._weight_zero_point`. The header's metadata states the format of each weight.

use std::sync::Arc;

use serde_json::Value;

use super::view::decoder::{ByRow, Codes, NumberDecoder, RowOperator};
use super::{Checkpoint, TensorEntry};
use crate::error::WeightsError;
use ltx2_stablehlo::DType;

/// Name suffix of the quantized values.
const NUMBERS: &str = "_qdata";
/// Advice for an unsupported format.
const CURE: &str =
    "use bf16 weights, or weights saved with Int8WeightOnlyConfig or Float8WeightOnlyConfig with one scale per row";

/// Renames quantized weights to plain names. 8-bit floats keep their bytes and a separate scale tensor; integers are read
/// as dequantized floats.
///
/// # Errors
/// Returns an error for formats other than 8-bit weights with one scale per row or per tensor.
pub(super) fn restore(all: &mut Checkpoint) -> Result<(), WeightsError> {
    let quantized: Vec<String> =
        all.tensors.keys().filter_map(|key| key.strip_suffix(NUMBERS).map(Into::into)).collect();
    for stem in quantized {
        let Some((module, parameter)) = stem.rsplit_once("._") else { continue };
        all.restore_torchao(&stem, &format!("{module}.{parameter}"))?;
    }
    Ok(())
}

impl Checkpoint {
    fn restore_torchao(&mut self, stem: &str, name: &str) -> Result<(), WeightsError> {
        let form: Value = self.metadata(name).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let kind = form["_type"].as_str().unwrap_or("an unnamed type");
        let refused = |what: String| WeightsError::Config {
            path: self.file_of(&format!("{stem}{NUMBERS}")).to_path_buf(),
            key: name.into(),
            reason: format!("is quantized by torchao as {kind}{what}, which is not supported; {CURE}"),
        };
        let part = |end: &str| format!("{stem}{end}");
        let (numbers, scales) = (part(NUMBERS), part("_scale"));
        let Some(scale) = self.tensors.get(&scales).cloned() else { return Err(refused(" without a scale".into())) };
        let mut entry = self.entry(&numbers)?.clone();
        if !form["_data"]["act_quant_kwargs"].is_null() {
            return Err(refused(" with quantized activations".into()));
        }
        let is_read = matches!(kind, "Int8Tensor" | "Float8Tensor") || form.is_null();
        let is_integer = entry.type_name == "i8";
        let shape = entry.view.shape.clone();
        let [rows, columns] = *shape else { return Err(refused(format!(" of shape {shape:?}"))) };
        if !is_read || !(is_integer || entry.type_name == "f8_e4m3") {
            return Err(refused(format!(" of {}", entry.type_name)));
        }
        let is_of_rows =
            |part: &TensorEntry| matches!(*part.view.shape, [] | [1] | [1, 1]) || *part.view.shape == [rows, 1];
        if !is_of_rows(&scale) || !matches!(&*scale.type_name, "f32" | "bf16" | "f16") {
            let (scale, dtype) = (&scale.view.shape, &scale.type_name);
            return Err(refused(format!(" of shape {shape:?} with scales of {dtype} and shape {scale:?}")));
        }
        let points = part("_zero_point");
        let zero_points = self.tensors.get(&points).filter(|points| is_integer && is_of_rows(points)).cloned();
        let zero_points = zero_points.filter(|points| points.type_name == "i8");
        let read = [Some(&numbers), Some(&scales), zero_points.as_ref().map(|_| &points)];
        let is_other = |key: &&String| key.starts_with(&format!("{stem}_")) && !read.contains(&Some(*key));
        if let Some(other) = self.tensors.keys().find(is_other) {
            return Err(refused(format!(" with `{other}`")));
        }
        if let Some(other) = self.tensors.get(name) {
            let [path, other_path] = [&entry, other].map(|part| part.view.shard.path.clone());
            return Err(WeightsError::Duplicate { path, key: numbers, other_path, other: name.into() });
        }
        read.map(|key| key.cloned()).iter().flatten().for_each(|key| self.remove(key));
        if is_integer {
            let floats = match form["_data"]["dtype"]["_data"].as_str() {
                Some("float32") => DType::F32,
                Some("float16") => DType::F16,
                _ => DType::BF16,
            };
            let columns = columns.max(1);
            let mut decoder: Arc<dyn NumberDecoder> = Arc::new(Codes::Plain(DType::I8));
            if let Some(points) = zero_points {
                decoder = Arc::new(ByRow {
                    start: 0,
                    columns,
                    inner: decoder,
                    operand: points.view,
                    operator: RowOperator::Subtract,
                });
            }
            decoder = Arc::new(ByRow {
                start: 0,
                columns,
                inner: decoder,
                operand: scale.view,
                operator: RowOperator::Multiply,
            });
            entry.decode(floats.name(), floats, decoder);
        } else {
            self.put(&format!("{name}_scale"), scale);
        }
        self.put(name, entry);
        Ok(())
    }
}
