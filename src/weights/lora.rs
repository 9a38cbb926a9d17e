//! LoRAs of a model's weights: `W + strength · (alpha / rank) · B·A`, merged when `W` is read.
//!
//! Files name what they update in one of two ways. diffusers and PEFT: `transformer.<module>.lora_A.weight [rank, in]` and
//! `….lora_B.weight [out, rank]`. Lightricks and ComfyUI: `diffusion_model.<module>…` with the single file's module names.
//! Older trainers write `lora_down` and `lora_up`, and a scalar `<module>.alpha`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use half::{bf16, f16};
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, Ix2, s};
use rayon::prelude::*;
use serde_json::Value;

use super::checkpoint::{Checkpoint, TensorView};
use super::error::WeightsError;
use super::hub::HubCache;
use super::keys::SingleFileKeys;
use super::source::ModelSource;
use super::{Component, check_finite};
use crate::hlo::{DType, F8};

/// Where diffusers keeps what the tensors do not say.
const METADATA: &str = "lora_adapter_metadata";
/// Rows that are merged at once: enough of them that a product reads `A` seldom, few enough that all cores have some.
const ROWS: usize = 128;

/// One update of one weight.
#[derive(Clone, Debug)]
pub struct Update {
    /// `A`: `[rank, in]`.
    down: TensorView,
    /// `B`: `[out, rank]`.
    up: TensorView,
    /// `alpha / rank`.
    scale: f32,
}

/// A file of updates.
#[derive(Debug)]
pub struct LoraFile {
    path: PathBuf,
    /// Tells files apart: the same path may hold another file tomorrow.
    identity: (PathBuf, u64, Option<std::time::SystemTime>),
    updates: BTreeMap<(Component, String), Update>,
}

/// A file of updates, and how strongly they are applied.
#[derive(Clone, Debug)]
pub struct Lora {
    pub file: Rc<LoraFile>,
    /// Factor of its updates; 0 is none.
    pub strength: f32,
}

/// Role of a tensor in its update, by the end of its name.
enum Role {
    Down,
    Up,
    Alpha,
}

const ROLES: [(&str, Role); 5] = [
    (".lora_A.weight", Role::Down),
    (".lora_down.weight", Role::Down),
    (".lora_B.weight", Role::Up),
    (".lora_up.weight", Role::Up),
    (".alpha", Role::Alpha),
];

impl LoraFile {
    /// Opens a file, or `org/name` or `org/name/file` in the local Hugging Face cache. Reads no weights.
    ///
    /// # Errors
    /// No such file, or one that holds something else than pairs of matrices whose ranks agree.
    pub fn open(name: &str) -> Result<Self, WeightsError> {
        let path = match Path::new(name).exists() || !HubCache::is_name(name) {
            true => PathBuf::from(name),
            false => HubCache::from_env().resolve(name)?,
        };
        let checkpoint = Checkpoint::open(&path)?;
        let path = checkpoint.path().to_path_buf();
        let fail = |key: &str, reason: String| WeightsError::Lora { path: path.clone(), key: key.into(), reason };
        let alpha = metadata_alpha(&checkpoint).map_err(|(key, reason)| fail(key, reason))?;

        let mut found: BTreeMap<(Component, String), [Option<TensorView>; 3]> = BTreeMap::new();
        for key in checkpoint.names() {
            let Some((module, role)) = ROLES.iter().find_map(|(end, role)| Some((key.strip_suffix(end)?, role))) else {
                let what = "is no part of a LoRA: only lora_A, lora_B (lora_down, lora_up) and alpha are read";
                return Err(fail(key, what.into()));
            };
            let Some((component, module)) = target(module) else {
                let what = "begins neither with `transformer.` or `connectors.` (diffusers) nor with `diffusion_model.` \
                            (Lightricks)";
                return Err(fail(key, what.into()));
            };
            let views = found.entry((component, format!("{module}.weight"))).or_default();
            if let Some(other) = views[match role {
                Role::Down => 0,
                Role::Up => 1,
                Role::Alpha => 2,
            }]
            .replace(checkpoint.get_float(key)?)
            {
                return Err(fail(key, format!("updates the same weight as `{}`", other.key())));
            }
        }
        let mut updates = BTreeMap::new();
        for (name, views) in found {
            let [down, up, own] = views;
            let (down, up) = match (down, up) {
                (Some(down), Some(up)) => (down, up),
                (Some(one), None) | (None, Some(one)) => return Err(fail(one.key(), "has no counterpart".into())),
                (None, None) => return Err(fail(&name.1, "has an alpha and no matrices".into())),
            };
            let (&[rank, _], &[_, inner]) = (down.shape(), up.shape()) else {
                let (a, b) = (down.shape(), up.shape());
                return Err(fail(down.key(), format!("{a:?} and `{}` {b:?} must both be matrices", up.key())));
            };
            if rank != inner || rank == 0 {
                let (a, b) = (down.shape(), up.shape());
                return Err(fail(down.key(), format!("{a:?} and `{}` {b:?} do not have one rank", up.key())));
            }
            let alpha = match own {
                Some(view) => view.to_tensor()?.to_f32().iter().next().copied(),
                None => alpha,
            };
            updates.insert(name, Update { down, up, scale: alpha.map_or(1.0, |alpha| alpha / rank as f32) });
        }
        if updates.is_empty() {
            return Err(fail("*", "holds no LoRA".into()));
        }
        let meta = std::fs::metadata(&path).map_err(WeightsError::io(&path, "cannot read its size"))?;
        let whole = std::fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
        Ok(LoraFile { identity: (whole, meta.len(), meta.modified().ok()), path, updates })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Every tensor that it updates, by component and name.
    pub fn targets(&self) -> impl Iterator<Item = (Component, &str)> {
        self.updates.keys().map(|(component, name)| (*component, name.as_str()))
    }

    pub(crate) fn get(&self, component: Component, name: &str) -> Option<&Update> {
        self.updates.get(&(component, name.to_string()))
    }

    /// Whether a model has every tensor that is updated, in the shape that the update has.
    ///
    /// # Errors
    /// The first that it has not, with file, key and both shapes.
    pub fn check(&self, model: &ModelSource) -> Result<(), WeightsError> {
        for ((component, name), update) in &self.updates {
            let fail = |view: &TensorView, reason: String| {
                let version = model.version().map_or_else(|_| String::new(), |v| format!(" (LTX-{v})"));
                let reason =
                    format!("{reason} of {}{version}; is it for another model version?", model.path().display());
                WeightsError::Lora { path: self.path.clone(), key: view.key().into(), reason }
            };
            let checkpoint = model.checkpoint(*component)?;
            let made = [update.up.shape()[0], update.down.shape()[1]];
            match checkpoint.shape(name) {
                None => {
                    let reason = format!("updates `{name}` {made:?}, which is no tensor of the {component}");
                    return Err(fail(&update.down, reason));
                }
                Some(shape) if shape != made => {
                    let both = format!("`{}` {:?}", update.up.key(), update.up.shape());
                    let reason = format!(
                        "{:?} and {both} make {made:?}, but `{name}` is {shape:?} in the {component}",
                        update.down.shape()
                    );
                    return Err(fail(&update.down, reason));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
}

/// The component and module that a module of a file belongs to.
fn target(module: &str) -> Option<(Component, String)> {
    if let Some(rest) = module.strip_prefix("transformer.") {
        return Some((Component::Transformer, rest.to_string()));
    }
    if let Some(rest) = module.strip_prefix("connectors.") {
        return Some((Component::Connectors, rest.to_string()));
    }
    let rest = module.strip_prefix("diffusion_model.").unwrap_or(module);
    if rest.starts_with("text_embedding_projection.") {
        return SingleFileKeys::new([]).map(rest);
    }
    let rest = module.strip_prefix("diffusion_model.")?;
    SingleFileKeys::new([]).map(&format!("model.diffusion_model.{rest}"))
}

/// The alpha of all updates where a header of diffusers has one.
fn metadata_alpha(checkpoint: &Checkpoint) -> Result<Option<f32>, (&'static str, String)> {
    let Some(text) = checkpoint.metadata(METADATA) else { return Ok(None) };
    let json: Value = serde_json::from_str(text).map_err(|e| (METADATA, format!("is not JSON: {e}")))?;
    let get = |key: &str| json.get(format!("transformer.{key}")).or_else(|| json.get(key)).filter(|v| !v.is_null());
    for key in ["use_rslora", "use_dora", "lora_bias"] {
        if get(key).and_then(Value::as_bool) == Some(true) {
            return Err((METADATA, format!("{key} is not supported")));
        }
    }
    if get("alpha_pattern").and_then(Value::as_object).is_some_and(|p| !p.is_empty()) {
        return Err((METADATA, "alpha_pattern is not supported".into()));
    }
    Ok(get("lora_alpha").and_then(Value::as_f64).map(|alpha| alpha as f32))
}

/// Which updates of which strengths a tensor has: equal lists make equal weights. Strengths of 0 are none.
pub fn updates<'a>(loras: &'a [Lora], component: Component, name: &str) -> Vec<(&'a LoraFile, &'a Update, f32)> {
    let active = loras.iter().filter(|l| l.strength != 0.0);
    active.filter_map(|l| Some((&*l.file, l.file.get(component, name)?, l.strength))).collect()
}

/// Every tensor whose weights differ between two sets of updates.
pub(crate) fn differing<'a>(old: &'a [Lora], new: &'a [Lora]) -> std::collections::BTreeSet<(Component, &'a str)> {
    let targets = old.iter().chain(new).flat_map(|l| l.file.targets());
    targets
        .filter(|(component, name)| {
            let known = |loras: &[Lora]| -> Vec<_> {
                let found = updates(loras, *component, name);
                found.iter().map(|(file, _, strength)| (file.identity.clone(), strength.to_bits())).collect()
            };
            known(old) != known(new)
        })
        .collect()
}

/// A merged tensor's bytes.
pub enum Merged {
    Half(DType, Vec<u16>),
    Single(Vec<f32>),
}

impl Merged {
    pub fn dtype(&self) -> DType {
        match self {
            Merged::Half(dtype, _) => *dtype,
            Merged::Single(_) => DType::F32,
        }
    }
}

impl AsRef<[u8]> for Merged {
    fn as_ref(&self) -> &[u8] {
        match self {
            Merged::Half(_, words) => bytemuck::cast_slice(words),
            Merged::Single(words) => bytemuck::cast_slice(words),
        }
    }
}

/// The matrix `weight` with its updates: added in f32 to the stored numbers, rounded once to the type they are stored in;
/// 8-bit floats, whose rows are multiplied by `scales` (one, or one a row), become bf16, and f64 f32.
///
/// # Errors
/// Not a matrix, or numbers that are not finite.
pub fn merge(
    weight: &TensorView,
    scales: Option<&[f32]>,
    updates: &[(&LoraFile, &Update, f32)],
) -> Result<Merged, WeightsError> {
    let &[rows, inner] = weight.shape() else {
        let want = vec![0; 2];
        let (path, key) = (weight.file().to_path_buf(), weight.key().to_string());
        return Err(WeightsError::Shape { path, key, got: weight.shape().to_vec(), want });
    };
    let matrices = updates.iter().map(|(_, u, strength)| Ok((matrix(&u.up)?, matrix(&u.down)?, strength * u.scale)));
    let matrices = matrices.collect::<Result<Vec<_>, WeightsError>>()?;
    let width = inner * weight.dtype().size();
    // The rows of block `i` in f32.
    let block = |i: usize| -> Vec<f32> {
        let (first, count) = (i * ROWS, ROWS.min(rows - i * ROWS));
        let bytes = &weight.bytes()[first * width..(first + count) * width];
        let mut sum = widened(weight.dtype(), bytes);
        if let Some(scales) = scales {
            for (row, values) in sum.chunks_exact_mut(inner.max(1)).enumerate() {
                let scale = scales.get(first + row).or(scales.first()).copied().unwrap_or(1.0);
                values.iter_mut().for_each(|v| *v *= scale);
            }
        }
        if let Ok(mut sum) = ArrayViewMut2::from_shape((count, inner), &mut sum) {
            for (up, down, factor) in &matrices {
                let up: ArrayView2<f32> = up.slice(s![first..first + count, ..]);
                general_mat_mul(*factor, &up, down, 1.0, &mut sum);
            }
        }
        sum
    };
    let half = |round: fn(f32) -> u16| {
        let mut words = vec![0u16; rows * inner];
        let blocks = words.par_chunks_mut(ROWS * inner.max(1)).enumerate();
        blocks.for_each(|(i, out)| out.iter_mut().zip(block(i)).for_each(|(out, v)| *out = round(v)));
        words
    };
    Ok(match weight.dtype() {
        DType::F32 | DType::F64 => {
            let mut words = vec![0f32; rows * inner];
            let blocks = words.par_chunks_mut(ROWS * inner.max(1)).enumerate();
            blocks.for_each(|(i, out)| out.copy_from_slice(&block(i)));
            Merged::Single(words)
        }
        DType::F16 => Merged::Half(DType::F16, half(|v| f16::from_f32(v).to_bits())),
        _ => Merged::Half(DType::BF16, half(|v| bf16::from_f32(v).to_bits())),
    })
}

fn matrix(view: &TensorView) -> Result<ndarray::Array2<f32>, WeightsError> {
    check_finite(view)?;
    let values = view.to_tensor()?.into_f32();
    let shape = WeightsError::Shape {
        path: view.file().to_path_buf(),
        key: view.key().into(),
        got: view.shape().to_vec(),
        want: vec![0; 2],
    };
    values.into_dimensionality::<Ix2>().map_err(|_| shape)
}

/// Little-endian numbers of any alignment in f32.
fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    fn each<const N: usize>(bytes: &[u8], wide: impl Fn([u8; N]) -> f32) -> Vec<f32> {
        bytes.as_chunks::<N>().0.iter().map(|c| wide(*c)).collect()
    }
    match dtype {
        DType::F8E4M3FN => bytes.iter().map(|b| f32::from(F8(*b))).collect(),
        DType::F16 => each::<2>(bytes, |c| f16::from_le_bytes(c).to_f32()),
        DType::F32 => each::<4>(bytes, f32::from_le_bytes),
        DType::F64 => each::<8>(bytes, |c| f64::from_le_bytes(c) as f32),
        _ => each::<2>(bytes, |c| bf16::from_le_bytes(c).to_f32()),
    }
}
