//! A model's files as the source of parameters, with LoRAs merged into what they update.

use std::path::Path;
use std::sync::Arc;

use crate::hlo::DType;
use crate::pjrt::SharedBytes;
use crate::runtime::{ParameterSource, StoredTensor};
use crate::weights::{Component, Lora, MergeOrder, ModelSource, TensorView, check_finite, lora, lora_merge};

/// Files and updates.
pub(super) struct Files<'a> {
    pub(crate) source: &'a ModelSource,
    pub(crate) loras: &'a [Lora],
    pub(crate) order: MergeOrder,
}

type Found<T> = std::result::Result<T, String>;

fn part(component: &str) -> Found<Component> {
    Component::from_folder(component).ok_or_else(|| format!("'{component}' is not a model folder"))
}

impl Files<'_> {
    fn view(&self, component: Component, key: &str) -> Found<TensorView> {
        self.source.checkpoint(component).and_then(|c| c.get_float(key)).map_err(|e| e.to_string())
    }

    /// Dequantization scale of a tensor's 8-bit floats, where the files hold one.
    fn scales(&self, component: Component, key: &str, shape: &[usize]) -> Found<Option<Vec<f32>>> {
        let checkpoint = self.source.checkpoint(component).map_err(|e| e.to_string())?;
        let Some(name) = checkpoint.scale_of(key) else { return Ok(None) };
        let view = self.view(component, &name)?;
        check_finite(&view).map_err(|e| e.to_string())?;
        let scales: Vec<f32> = view.to_tensor().map_err(|e| e.to_string())?.to_f32().into_iter().collect();
        let rows = shape.first().copied().unwrap_or(1);
        match scales.len() == 1 || scales.len() == rows {
            true => Ok(Some(scales)),
            false => {
                let (file, key, count) = (view.file().display(), view.key(), scales.len());
                Err(format!("{file}: tensor '{key}' has {count} scales, they must be 1 or one of {rows} rows"))
            }
        }
    }
}

impl ParameterSource for Files<'_> {
    fn tensor(&self, component: &'static str, key: &str) -> Found<StoredTensor> {
        let component = part(component)?;
        let view = self.view(component, key)?;
        check_finite(&view).map_err(|e| e.to_string())?;
        let (dtype, shape) = (view.dtype(), view.shape().to_vec());
        let scales = if dtype == DType::F8E4M3FN { self.scales(component, key, &shape)? } else { None };
        let (file, name): (&Path, &str) = (view.file(), view.key());
        let (file, name) = (file.to_path_buf(), name.to_string());
        let updates = lora::updates(self.loras, component, key);
        if updates.is_empty() {
            let bytes = SharedBytes::new(Arc::new(Mapped(view)));
            return Ok(StoredTensor { dtype, shape, bytes, scales, file, key: name });
        }
        let merged = lora_merge::merge(&view, scales.as_deref(), self.order, &updates).map_err(|e| e.to_string())?;
        let dtype = merged.dtype();
        Ok(StoredTensor { dtype, shape, bytes: SharedBytes::new(Arc::new(merged)), scales: None, file, key: name })
    }
}

/// A tensor that keeps its file mapped for as long as a transfer reads it.
struct Mapped(TensorView);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}
