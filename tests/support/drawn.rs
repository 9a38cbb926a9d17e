//! Weights as the oracles draw them by seed, so that none are stored.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ltx2::models::Network;
use ltx2::sampling::TorchRng;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use sha2::{Digest, Sha256};

/// A weight as `randomise` of the oracles draws it, by the model's and the tensor's names.
fn drawn(model: &str, name: &str, shape: &[usize]) -> Vec<u8> {
    let digest = Sha256::digest(format!("{model}/{name}"));
    let seed = digest[..7].iter().rev().fold(0, |seed, byte| seed << 8 | u64::from(*byte));
    let [mean, std] = match (shape, name.rsplit('.').next().expect("a name")) {
        (_, "scale_shift_table") => [0.0, 0.4],
        (_, "bias") => [0.0, 0.15],
        ([_], "weight") => [1.0, 0.25],
        ([_, width], "weight") => [0.0, 1.0 / (*width as f32).sqrt()],
        ([_, rest @ ..], "weight") if rest.len() == 4 => {
            [0.0, (1.3 / (rest.iter().product::<usize>() as f64).sqrt()) as f32]
        }
        _ => panic!("{name} {shape:?}"),
    };
    let values = TorchRng::new(seed).normal_array(shape);
    values.iter().flat_map(|v| (mean + std * v).to_le_bytes()).collect()
}

/// Writes a component, `part`, into a folder: the configuration of `model`, the weights that a program reads, and `more`
/// vectors.
pub fn write_component(model: &Path, part: &str, network: &Network, more: &[(&str, &[f32])], folder: &Path) {
    let name = model.file_name().expect("a name").to_string_lossy();
    let declared = network.params.iter().flat_map(|p| p.source.tensors());
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> =
        declared.map(|(key, shape)| (key.to_string(), (shape.to_vec(), drawn(&name, key, shape)))).collect();
    for (key, values) in more {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensors.insert((*key).to_string(), (vec![values.len()], bytes));
    }
    let views = tensors
        .iter()
        .map(|(key, (shape, data))| (key, TensorView::new(Dtype::F32, shape.clone(), data).expect("a tensor")));
    let own = folder.join(part);
    fs::create_dir(&own).expect("a folder");
    fs::copy(model.join(part).join("config.json"), own.join("config.json")).expect("copies");
    let file = own.join("diffusion_pytorch_model.safetensors");
    fs::write(file, safetensors::serialize(views, None).expect("bytes")).expect("written");
}
