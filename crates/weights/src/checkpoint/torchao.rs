//! Weights quantized by torchao: the tensor `X.weight` is stored as `X._weight_qdata`, `X._weight_scale` and, for
//! integers, `X._weight_zero_point`. The header's metadata states the format of each weight.

use std::sync::Arc;

use safetensors::Dtype;
use serde_json::Value;

use super::{Checkpoint, EightBits, Entry};
use crate::error::WeightsError;

/// Name suffix of the quantized values.
const NUMBERS: &str = "_qdata";
/// Advice for an unsupported format.
const CURE: &str =
    "use bf16 weights, or weights saved with Int8WeightOnlyConfig or Float8WeightOnlyConfig with one scale per row";

impl Checkpoint {
    /// Renames quantized weights to plain names. 8-bit floats keep their bytes and a separate scale tensor; integers
    /// are read as dequantized floats.
    ///
    /// # Errors
    /// Returns an error for formats other than 8-bit weights with one scale per row or per tensor.
    pub(super) fn with_torchao_weights(mut self) -> Result<Self, WeightsError> {
        let quantized: Vec<String> =
            self.tensors.keys().filter_map(|key| key.strip_suffix(NUMBERS).map(Into::into)).collect();
        for stem in quantized {
            let Some((module, parameter)) = stem.rsplit_once("._") else { continue };
            self.restore(&stem, &format!("{module}.{parameter}"))?;
        }
        Ok(self)
    }

    fn restore(&mut self, stem: &str, name: &str) -> Result<(), WeightsError> {
        let form: Value = self.metadata(name).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let kind = form["_type"].as_str().unwrap_or("an unnamed type");
        let refused = |what: String| WeightsError::Config {
            path: self.origin.clone(),
            key: name.into(),
            reason: format!("is quantized by torchao as {kind}{what}, which is not supported; {CURE}"),
        };
        let part = |end: &str| format!("{stem}{end}");
        let (numbers, scales) = (part(NUMBERS), part("_scale"));
        let Some(scale) = self.tensors.get(&scales).cloned() else { return Err(refused(" without a scale".into())) };
        let entry = self.tensors[&numbers].clone();
        if !form["_data"]["act_quant_kwargs"].is_null() {
            return Err(refused(" with quantized activations".into()));
        }
        let is_read = matches!(kind, "Int8Tensor" | "Float8Tensor") || form.is_null();
        let is_integer = entry.dtype == Dtype::I8;
        let [rows, _] = *entry.shape else { return Err(refused(format!(" of shape {:?}", &*entry.shape))) };
        if !is_read || !(is_integer || entry.dtype == Dtype::F8_E4M3) {
            return Err(refused(format!(" of {}", entry.dtype.to_string().to_lowercase())));
        }
        let is_of_rows = |part: &Entry| matches!(*part.shape, [] | [1] | [1, 1]) || *part.shape == [rows, 1];
        if !is_of_rows(&scale) || !matches!(scale.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            let (scale, dtype) = (&scale.shape, scale.dtype.to_string().to_lowercase());
            return Err(refused(format!(" of shape {:?} with scales of {dtype} and shape {scale:?}", &*entry.shape)));
        }
        let points = part("_zero_point");
        let zero_points = self.tensors.get(&points).filter(|points| is_integer && is_of_rows(points)).cloned();
        let zero_points = zero_points.filter(|points| points.dtype == Dtype::I8).map(Box::new);
        let read = [Some(&numbers), Some(&scales), zero_points.as_ref().map(|_| &points)];
        let is_other = |key: &&String| key.starts_with(&format!("{stem}_")) && !read.contains(&Some(*key));
        if let Some(other) = self.tensors.keys().find(is_other) {
            return Err(refused(format!(" with `{other}`")));
        }
        if let Some(other) = self.tensors.get(name) {
            let [path, other_path] = [&entry, other].map(|part| self.shards[part.shard].path.clone());
            return Err(WeightsError::Duplicate { path, key: numbers, other_path, other: name.into() });
        }
        let floats = match form["_data"]["dtype"]["_data"].as_str() {
            Some("float32") => Dtype::F32,
            Some("float16") => Dtype::F16,
            _ => Dtype::BF16,
        };
        let removed = read.map(|key| key.cloned());
        let tensors = Arc::make_mut(&mut self.tensors);
        removed.iter().flatten().for_each(|key| drop(tensors.remove(key)));
        if is_integer {
            let eight_bits = Some(EightBits::Integers { zero_points });
            tensors.insert(name.into(), Entry { dtype: floats, factors: Some(Box::new(scale)), eight_bits, ..entry });
        } else {
            tensors.insert(name.into(), entry);
            tensors.insert(format!("{name}_scale"), scale);
        }
        Ok(())
    }
}
