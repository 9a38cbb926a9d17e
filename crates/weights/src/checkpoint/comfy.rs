//! Weights quantized for ComfyUI. JSON states the format of each layer, either in a byte tensor `….comfy_quant` or in
//! the header entry `_quantization_metadata`. Older files have `….scale_weight` and a tensor `scaled_fp8` instead.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::view::decoder::{ByRow, Codes, NumberDecoder, RowOperator};
use super::{Checkpoint, TensorView};
use crate::error::WeightsError;
use crate::quantize::QuantizedForm;
use crate::rotation::GROUP;
use ltx2_stablehlo::DType;

mod convrot;
mod nvfp4;

/// Suffix of a marker: a byte tensor that contains the format of a layer as JSON.
pub(crate) const MARKER: &str = ".comfy_quant";
/// Metadata key whose value contains the formats of all layers.
pub(crate) const METADATA: &str = "_quantization_metadata";
/// Maximum size of a marker in bytes; markers in published files have fewer than 100.
const MAX_MARKER: usize = 4096;

/// A format: its name in the JSON, the element type of the codes, and the function that sets a layer's decoder.
type Format = (&'static str, &'static str, fn(&mut QuantizedLayer) -> Result<(), WeightsError>);

const FORMATS: [Format; 4] = [
    // `Checkpoint` and `e5m2` read these as they read files without markers.
    ("float8_e4m3fn", "f8_e4m3", require_scale),
    ("float8_e5m2", "f8_e5m2", require_scale),
    ("int8_tensorwise", "i8", int8),
    ("nvfp4", "u8", nvfp4::restore),
];

/// A quantized layer.
struct QuantizedLayer<'a> {
    all: &'a mut Checkpoint,
    /// Name of the layer, without `.weight`.
    name: &'a str,
    /// The JSON that states the format.
    conf: &'a Value,
}

impl QuantizedLayer<'_> {
    fn refused(&self, why: &str) -> WeightsError {
        let (key, reason) = (self.weight(), format!("is quantized as {}, {why}", self.conf));
        WeightsError::Quantized { path: self.all.file_of(&key).to_path_buf(), key, reason }
    }

    fn weight(&self) -> String {
        format!("{}.weight", self.name)
    }

    /// Returns the rows and columns of the codes.
    fn matrix(&self) -> Result<[usize; 2], WeightsError> {
        let entry = self.all.entry(&self.weight())?;
        match *entry.view.shape {
            [rows, columns] if columns > 0 => Ok([rows, columns]),
            _ => Err(self.refused(&format!("but has shape {:?}", entry.view.shape))),
        }
    }

    /// Removes and returns the layer's scales, a tensor whose name ends in `end`. Returns an error if the element type
    /// is not `dtype` or the number of elements is not among `counts`.
    fn scales(&mut self, end: &str, dtype: &str, counts: &[usize]) -> Result<TensorView, WeightsError> {
        let name = format!("{}.{end}", self.name);
        let Some(entry) = self.all.tensors.get(&name).cloned() else {
            return Err(self.refused(&format!("but `{name}` is missing")));
        };
        let view = entry.view;
        if entry.type_name != dtype || !counts.contains(&view.shape.iter().product()) {
            let what = format!("but `{name}` is {} of shape {:?}", entry.type_name, view.shape);
            return Err(self.refused(&what));
        }
        self.all.remove(&name);
        Ok(view)
    }

    /// Sets the weight's decoder; its values are read as f32.
    fn decode(
        &mut self,
        type_name: &str,
        shape: [usize; 2],
        decoder: Arc<dyn NumberDecoder>,
    ) -> Result<(), WeightsError> {
        let weight = self.weight();
        let mut entry = self.all.entry(&weight)?.clone();
        entry.view.shape = shape.as_slice().into();
        entry.decode(type_name, DType::F32, decoder);
        self.all.put(&weight, entry);
        Ok(())
    }
}

/// Checks that a marked fp8 layer has its scale, without which ComfyUI cannot use the layer either. Files with
/// `scaled_fp8` mark no layers; there, as in ComfyUI, a missing scale is 1.
fn require_scale(layer: &mut QuantizedLayer) -> Result<(), WeightsError> {
    let name = format!("{}.weight_scale", layer.name);
    match layer.all.contains(&name) {
        true => Ok(()),
        false => Err(layer.refused(&format!("but `{name}` is missing"))),
    }
}

/// Sets the decoder of 8-bit integers with one scale per row or tensor, optionally rotated.
fn int8(layer: &mut QuantizedLayer) -> Result<(), WeightsError> {
    let [rows, columns] = layer.matrix()?;
    let group = match layer.conf["convrot"].as_bool() {
        Some(true) => Some(layer.conf["convrot_groupsize"].as_u64().unwrap_or(256)),
        _ => None,
    };
    let is_known = |group: u64| group == GROUP as u64 && columns.is_multiple_of(GROUP);
    if let Some(group) = group.filter(|group| !is_known(*group)) {
        let why = format!(
            "but has {columns} columns in groups of {group}; only groups of {GROUP} that divide the columns are \
             supported"
        );
        return Err(layer.refused(&why));
    }
    let operand = layer.scales("weight_scale", "f32", &[1, rows])?;
    let inner = Arc::new(Codes::Plain(DType::I8));
    let scaled = Arc::new(ByRow { start: 0, columns, inner, operand, operator: RowOperator::Multiply });
    match group {
        Some(_) => layer.decode(QuantizedForm::Int8Convrot.name(), [rows, columns], Arc::new(convrot::Rotated(scaled))),
        None => layer.decode(QuantizedForm::Int8.name(), [rows, columns], scaled),
    }
}

/// Sets the decoder of every layer whose format the file states, and of nvfp4 layers without a marker.
///
/// # Errors
/// Returns an error for an unsupported format, and for tensors whose type or shape does not match their format.
pub(super) fn restore(all: &mut Checkpoint) -> Result<(), WeightsError> {
    rename_legacy_scales(all);
    for (name, conf) in layer_formats(all)? {
        let weight = format!("{name}.weight");
        // Markers of layers in other components' files have no weight here.
        let Some(dtype) = all.dtype_name(&weight) else { continue };
        let mut layer = QuantizedLayer { all, name: &name, conf: &conf };
        let format = FORMATS.iter().find(|(format, ..)| conf["format"] == *format);
        let Some((_, codes, restore)) = format else { return Err(layer.refused("which is not supported")) };
        if dtype != *codes {
            return Err(layer.refused(&format!("but is {dtype}")));
        }
        restore(&mut layer)?;
    }
    Ok(())
}

/// Renames the scales of older files, and removes tensors that do not affect the weights.
fn rename_legacy_scales(all: &mut Checkpoint) {
    let names: Vec<String> = all.names().map(String::from).collect();
    let is_old = names.iter().any(|name| name == "scaled_fp8" || name.ends_with(".scaled_fp8"));
    for name in names {
        let (layer, leaf) = name.rsplit_once('.').unwrap_or(("", &name));
        match leaf {
            "scale_weight" if all.contains(&format!("{layer}.weight")) => {
                let scales = format!("{layer}.weight_scale");
                if let Some(entry) = all.tensors.get(&name).filter(|_| !all.contains(&scales)).cloned() {
                    all.put(&scales, entry);
                    all.remove(&name);
                }
            }
            "scaled_fp8" | "scale_input" if is_old => all.remove(&name),
            _ => {}
        }
    }
}

/// Returns the format that the file states for each layer, and removes the marker tensors.
fn layer_formats(all: &mut Checkpoint) -> Result<BTreeMap<String, Value>, WeightsError> {
    let mut layers = BTreeMap::new();
    if let Some(text) = all.metadata(METADATA) {
        let wrong = |reason: String| WeightsError::Config { path: all.path().into(), key: METADATA.into(), reason };
        let json: Value =
            serde_json::from_str(text).map_err(|e| wrong(format!("in the header's metadata is not JSON: {e}")))?;
        let stated = json["layers"].as_object().into_iter().flatten();
        layers.extend(stated.map(|(name, conf)| (name.clone(), conf.clone())));
    }
    // Lightricks' nvfp4 files may have no markers; only this format has a second scale.
    for name in all.names().filter_map(|name| name.strip_suffix(".weight_scale_2")) {
        let is_packed = all.dtype_name(&format!("{name}.weight")).as_deref() == Some("u8");
        if is_packed && !layers.contains_key(name) {
            layers.insert(name.into(), serde_json::json!({"format": "nvfp4"}));
        }
    }
    let markers: Vec<String> = all.names().filter(|name| name.ends_with(MARKER)).map(String::from).collect();
    for marker in markers {
        let entry = all.entry(&marker)?;
        let wrong = |reason: String| {
            let path = entry.view.shard.path.clone();
            WeightsError::Config { path, key: marker.clone(), reason }
        };
        if entry.type_name != "u8" || entry.view.size() > MAX_MARKER {
            return Err(wrong(format!(
                "is {} of shape {:?}, not JSON in at most {MAX_MARKER} bytes",
                entry.type_name, entry.view.shape
            )));
        }
        let bytes = entry.view.read()?;
        let conf = serde_json::from_slice(&bytes).map_err(|e| wrong(format!("is not JSON: {e}")))?;
        layers.insert(marker[..marker.len() - MARKER.len()].to_string(), conf);
        all.remove(&marker);
    }
    Ok(layers)
}
