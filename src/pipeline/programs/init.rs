//! Writes a model with random weights, in the file layout of diffusers.

use std::collections::BTreeMap;
use std::path::Path;

use super::configs::ModelConfigs;
use super::parameters::parameters;
use crate::hlo::DType;
use crate::models::presets::Preset;
use crate::models::tokenizer::write_byte_tokenizer;
use crate::nn::Init;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::Component;
use crate::runtime::{RuntimeError, fill_random};
use crate::weights::{SHARD_BYTES, TensorSpec, VersionFields, write_component, write_json};

/// Size of a model that was written.
pub(crate) struct WrittenModel {
    /// Number of parameters of all components.
    pub(crate) parameters: usize,
    /// Total size of the weight files in bytes.
    pub(crate) bytes: usize,
}

/// Writes the model of a preset, with random weights drawn from `seed`, to the folder `dir`. The folder must be empty
/// or not exist yet.
///
/// # Errors
/// Returns an error if `dir` is not empty or a file cannot be written.
pub(crate) fn init(preset: &Preset, seed: u64, dir: &Path, dtype: DType) -> Result<WrittenModel> {
    let taken = std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
    if taken {
        let reason = "exists and is not empty; use another folder or remove this one".to_string();
        return Err(PipelineError::File { path: dir.to_path_buf(), reason });
    }
    let configs = ModelConfigs::of_preset(preset.clone());
    let provenance = preset.config(Component::Transformer.folder()).and_then(VersionFields::for_transformer);
    let version = provenance.as_ref().map(|own| own.model_version);
    let mut written = WrittenModel { parameters: 0, bytes: 0 };
    for part in Component::ALL.into_iter().filter(|part| part.weights_stem().is_some()) {
        let Some(config) = preset.config(part.folder()) else { continue };
        let mut config = config.clone();
        if let Some(own) = provenance.as_ref().filter(|_| part == Component::TextEncoder) {
            config[VersionFields::GEMMA] = own.gemma_version.into();
        }
        let tensors = random_parameters(&configs, part)?;
        let specs: Vec<TensorSpec> = tensors
            .iter()
            .map(|(name, (shape, _))| TensorSpec { name: name.clone(), dtype, shape: shape.clone() })
            .collect();
        let count: usize = tensors.values().map(|(shape, _)| shape.iter().product::<usize>()).sum();
        written.parameters += count;
        written.bytes += count * dtype.size();
        write_component(dir, part, &config, &specs, SHARD_BYTES, version, |spec, from, bytes| -> Result<()> {
            let (_, init) = &tensors[&spec.name];
            let (name, first) = (format!("{}.{}", part.folder(), spec.name), from / dtype.size());
            Ok(fill_random(seed, &name, *init, dtype, first, bytes).map_err(RuntimeError::from)?)
        })?;
    }
    let scheduler = dir.join(Component::Scheduler.folder());
    std::fs::create_dir_all(&scheduler).map_err(|e| file_error(&scheduler, &e))?;
    if let Some(config) = preset.config(Component::Scheduler.folder()) {
        write_json(&scheduler.join(Component::Scheduler.config_file()), config)?;
    }
    write_byte_tokenizer(&dir.join(Component::Tokenizer.folder()))?;
    if let Some(index) = preset.config("model_index") {
        write_json(&dir.join("model_index.json"), index)?;
    }
    Ok(written)
}

fn file_error(path: &Path, e: &std::io::Error) -> PipelineError {
    PipelineError::File { path: path.to_path_buf(), reason: e.to_string() }
}

/// Returns the shape and the distribution of each tensor in a component's checkpoint.
fn random_parameters(configs: &ModelConfigs, part: Component) -> Result<BTreeMap<String, (Vec<usize>, Init)>> {
    let params = parameters(configs, part)?;
    let tensors = params.iter().flat_map(|p| p.source.tensors().into_iter().map(|(n, s)| (n, s, p.init)));
    Ok(tensors.map(|(name, shape, init)| (name.to_string(), (shape.to_vec(), init))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::{ModelSource, Overrides};

    /// The files of a written LTX-2.5 model contain the model version, so loading them logs no warning.
    #[test]
    fn written_models_record_their_version() {
        let folder = tempfile::tempdir().expect("a folder");
        let preset = Preset::named("nano_2_5").expect("a preset");
        init(&preset, 3, folder.path(), DType::BF16).expect("written");
        let path = folder.path().to_str().expect("UTF-8");
        let source = ModelSource::open(path, &Overrides::default()).expect("opens");
        assert_eq!(source.unverified().expect("readable"), [""; 0]);
    }
}
