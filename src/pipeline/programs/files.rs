//! Reads parameters from a model's files, merges LoRAs into them, and reads the matrices of LoRAs that programs add.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::hlo::DType;
use crate::nn::{self, Param};
use crate::pipeline::plan::loras::ActiveLoras;
use crate::pjrt::SharedBytes;
use crate::runtime::{FileTensor, ParameterSource, QuantizedTensor, StoredTensor};
use crate::weights::lora_add::{AddedMatrix, LoraSide};
use crate::weights::quantize::QuantizedForm;
use crate::weights::{Checkpoint, Component, MergeOrder, ModelSource, TensorView};
use crate::weights::{check_finite, finite_tensor, lora, lora_merge, read_finite};

/// Source of parameters: a model's files, the LoRAs that are merged into their tensors, and those that programs add.
#[derive(Clone)]
pub(in crate::pipeline) struct Files {
    pub(crate) source: Arc<ModelSource>,
    pub(crate) loras: ActiveLoras,
    pub(crate) order: MergeOrder,
}

/// Returns the weight and the side of a LoRA matrix that programs add; `None` for other parameters.
pub(super) fn added_matrix(key: &str) -> Option<(String, LoraSide)> {
    let of = |name, side| Some((format!("{}weight", key.strip_suffix(name)?), side));
    of(nn::LORA_DOWN, LoraSide::Down).or_else(|| of(nn::LORA_UP, LoraSide::Up))
}

type FileResult<T> = std::result::Result<T, String>;

fn part(component: &str) -> FileResult<Component> {
    Component::from_folder(component).ok_or_else(|| format!("'{component}' is not a component of a model"))
}

/// Returns the rank of a LoRA matrix that programs add; `None` for other parameters.
pub(super) fn added_rank(param: &Param) -> Option<usize> {
    let (key, shape) = *param.source.tensors().first()?;
    let (_, side) = added_matrix(key)?;
    shape.get(usize::from(side == LoraSide::Up)).copied()
}

/// Function that reads the scale of each row of a quantized weight.
type ReadScales = Box<dyn Fn() -> FileResult<Vec<f32>>>;

/// Returns a tensor that is read piece by piece and checked for NaN and infinity.
fn file_tensor(view: TensorView) -> FileTensor {
    let (dtype, shape) = (view.dtype(), view.shape().to_vec());
    let read = move |offset: usize, into: &mut [u8]| {
        view.read_at(offset, into).and_then(|()| check_finite(&view, offset, into)).map_err(|e| e.to_string())
    };
    FileTensor { dtype, shape, read: Box::new(read) }
}

/// Returns a matrix of the LoRAs that programs add, which is read from the LoRA files piece by piece. `shape`: that of
/// the weight.
fn added_tensor(
    loras: &ActiveLoras,
    order: MergeOrder,
    weight: &str,
    shape: &[usize],
    side: LoraSide,
    dtype: DType,
) -> FileTensor {
    let rank = loras.in_programs().map_or(0, |loras| loras.rank);
    let matrix = AddedMatrix::new(&loras.added, order, weight, shape, rank, side);
    let shape = matrix.shape().to_vec();
    let read = move |offset: usize, into: &mut [u8]| matrix.read_at(dtype, offset, into).map_err(|e| e.to_string());
    FileTensor { dtype, shape, read: Box::new(read) }
}

/// Source of the LoRA matrices that programs add to random weights.
pub(super) struct AddedMatrices {
    pub(super) loras: ActiveLoras,
    pub(super) order: MergeOrder,
    /// Shapes of the matrices by checkpoint name.
    pub(super) shapes: BTreeMap<String, Vec<usize>>,
}

impl ParameterSource for AddedMatrices {
    fn in_file(&self, component: &'static str, key: &str, dtype: DType) -> FileResult<Option<FileTensor>> {
        let matrix = added_matrix(key).zip(self.shapes.get(key));
        let Some(((weight, side), shape)) = matrix else { return self.tensor(component, key).map(|_| None) };
        // A matrix has only one of the weight's dimensions, and the other is not used.
        Ok(Some(added_tensor(&self.loras, self.order, &weight, shape, side, dtype)))
    }

    fn quantized(&self, _: &'static str, _: &str, _: QuantizedForm) -> FileResult<Option<QuantizedTensor>> {
        Ok(None)
    }

    fn tensor(&self, component: &'static str, key: &str) -> FileResult<StoredTensor> {
        Err(format!("'{key}' of the {component} is not a matrix of a LoRA, and the model has no weight files"))
    }
}

impl Files {
    fn view(&self, component: Component, key: &str) -> FileResult<TensorView> {
        self.source.checkpoint(component).and_then(|c| c.get_float(key)).map_err(|e| e.to_string())
    }

    /// Returns the scales that dequantize an FP8 tensor; `None` if the files have no scales for it.
    fn scales(&self, component: Component, key: &str) -> FileResult<Option<Vec<f32>>> {
        let view = self.source.checkpoint(component).and_then(|c| c.scales_of(key)).map_err(|e| e.to_string())?;
        let Some(view) = view else { return Ok(None) };
        Ok(Some(finite_tensor(&view).map_err(|e| e.to_string())?.to_f32().into_iter().collect()))
    }
}

impl ParameterSource for Files {
    fn in_file(&self, component: &'static str, key: &str, dtype: DType) -> FileResult<Option<FileTensor>> {
        let component = part(component)?;
        if let Some((weight, side)) = added_matrix(key) {
            let view = self.view(component, &weight)?;
            return Ok(Some(added_tensor(&self.loras, self.order, &weight, view.shape(), side, dtype)));
        }
        if !lora::updates(&self.loras.merged, component, key).is_empty() {
            return Ok(None);
        }
        let is_narrow = dtype == DType::F8E4M3FN;
        let view = |files: Checkpoint| if is_narrow { files.get_float(key) } else { files.dequantized(key) };
        let view = self.source.checkpoint(component).and_then(view).map_err(|e| e.to_string())?;
        Ok(Some(file_tensor(view.converted(dtype))))
    }

    fn quantized(
        &self,
        component: &'static str,
        key: &str,
        form: QuantizedForm,
    ) -> FileResult<Option<QuantizedTensor>> {
        let component = part(component)?;
        if !lora::updates(&self.loras.merged, component, key).is_empty() {
            return Ok(None);
        }
        let view = self.view(component, key)?;
        let (codes, scales): (_, ReadScales) = match (form, view.rotated_codes()) {
            (QuantizedForm::Fp8, _) if view.dtype() == DType::F8E4M3FN => {
                let (files, key) = (self.clone(), key.to_string());
                let rows = view.shape().first().copied().unwrap_or(1);
                let scales = move || {
                    Ok(match files.scales(component, &key)?.as_deref() {
                        None => vec![1.0; rows],
                        Some([one]) => vec![*one; rows],
                        Some(each) => each.to_vec(),
                    })
                };
                (view, Box::new(scales))
            }
            (QuantizedForm::Int8Convrot, Some(codes)) => {
                let scales = move || view.rotated_scales().map(Option::unwrap_or_default).map_err(|e| e.to_string());
                (codes, Box::new(scales))
            }
            _ => return Ok(None),
        };
        Ok(Some(QuantizedTensor { codes: file_tensor(codes), scales }))
    }

    fn merge_bytes(&self, component: &'static str, key: &str) -> usize {
        let updates = part(component).map(|part| (part, lora::updates(&self.loras.merged, part, key)));
        match updates {
            Ok((part, updates)) if !updates.is_empty() => {
                self.view(part, key).map_or(0, |view| lora_merge::memory(&view, &updates))
            }
            _ => 0,
        }
    }

    fn tensor(&self, component: &'static str, key: &str) -> FileResult<StoredTensor> {
        let component = part(component)?;
        let view = self.view(component, key)?;
        let (dtype, shape) = (view.dtype(), view.shape().to_vec());
        let scales = if dtype == DType::F8E4M3FN { self.scales(component, key)? } else { None };
        let (file, name) = (view.file().to_path_buf(), view.key().to_string());
        let updates = lora::updates(&self.loras.merged, component, key);
        if updates.is_empty() {
            let bytes = read_finite(&view).map_err(|e| e.to_string())?.into();
            return Ok(StoredTensor { dtype, shape, bytes, scales, file, key: name });
        }
        let merged = lora_merge::merge(&view, scales.as_deref(), self.order, &updates).map_err(|e| e.to_string())?;
        let dtype = merged.dtype();
        Ok(StoredTensor { dtype, shape, bytes: SharedBytes::new(Arc::new(merged)), scales: None, file, key: name })
    }
}
