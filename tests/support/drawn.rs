//! Weights generated from a seed as the oracle scripts do, so that none are stored.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ltx2::Config;
use ltx2::hlo::DType;
use ltx2::models::Network;
use ltx2::models::diffusion_decoder::{DiffusionDecoderConfig, program};
use ltx2::models::pixels::Pixels;
use ltx2::models::upsampler::{self, UpsamplerConfig};
use ltx2::nn::Param;
use ltx2::pipeline::programs::build::Programs;
use ltx2::sampling::TorchRng;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use sha2::{Digest, Sha256};

use crate::support::{link_parts, plain};

/// Complete LTX-2.5 model, except for a diffusion decoder.
pub const WHOLE_2_5: &str = "tests/fixtures/models/tiny_2_5";

/// Generates a weight like `randomise` of the oracle scripts, seeded by the names of the model and the tensor.
fn drawn(model: &str, name: &str, shape: &[usize]) -> Vec<u8> {
    let digest = Sha256::digest(format!("{model}/{name}"));
    let seed = digest[..7].iter().rev().fold(0, |seed, byte| seed << 8 | u64::from(*byte));
    let [mean, std] = match (shape, name.rsplit('.').next().expect("a name")) {
        (_, table) if table.ends_with("scale_shift_table") => [0.0, 0.4],
        (_, "bias") => [0.0, 0.15],
        ([_], "weight") => [1.0, 0.25],
        ([_, width], "weight") => [0.0, 1.0 / (*width as f32).sqrt()],
        ([_, rest @ ..], "weight" | "kernel") if matches!(rest.len(), 3 | 4) => {
            [0.0, (1.3 / (rest.iter().product::<usize>() as f64).sqrt()) as f32]
        }
        _ => panic!("{name} {shape:?}"),
    };
    let values = TorchRng::new(seed).normal_array(shape);
    values.iter().flat_map(|v| (mean + std * v).to_le_bytes()).collect()
}

/// Writes a component into a folder: the configuration `part` of `model`, the weights that a program reads, and the
/// vectors `more`.
pub fn write_component(model: &Path, part: &str, network: &Network, more: &[(&str, &[f32])], folder: &Path) {
    let name = model.file_name().expect("a name").to_string_lossy();
    let config = fs::read_to_string(model.join(part).join("config.json")).expect("a file");
    write_random_component(&folder.join(part), &config, &name, &network.params, more);
}

/// Writes a component into a folder: its configuration, the weights that parameters are read from (seeded by `name`), and
/// the vectors `more`.
fn write_random_component<'a>(
    folder: &Path,
    config: &str,
    name: &str,
    params: impl IntoIterator<Item = &'a Param>,
    more: &[(&str, &[f32])],
) {
    let declared = params.into_iter().flat_map(|p| p.source.tensors());
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> =
        declared.map(|(key, shape)| (key.to_string(), (shape.to_vec(), drawn(name, key, shape)))).collect();
    for (key, values) in more {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensors.insert((*key).to_string(), (vec![values.len()], bytes));
    }
    let views = tensors
        .iter()
        .map(|(key, (shape, data))| (key, TensorView::new(Dtype::F32, shape.clone(), data).expect("a tensor")));
    fs::create_dir(folder).expect("a folder");
    fs::write(folder.join("config.json"), config).expect("written");
    let file = folder.join("diffusion_pytorch_model.safetensors");
    fs::write(file, safetensors::serialize(views, None).expect("bytes")).expect("written");
}

/// Writes a latent upsampler with this configuration into a folder, its weights seeded by `name`.
pub fn write_upsampler(folder: &Path, config: &serde_json::Value, name: &str) {
    let c = UpsamplerConfig::from_json(config).expect("valid");
    let network = upsampler::program(&c, [1, 2, 2, 2], &plain(DType::F32)).expect("builds");
    write_random_component(folder, &config.to_string(), name, &network.params, &[]);
}

/// Creates a model folder like that of `tests/fixtures/tiny.yml`, with eight transformer blocks whose feed-forward weights
/// are large enough to be streamed. Returns its path.
pub fn with_large_blocks(folder: &Path) -> String {
    let model = "tests/fixtures/models/tiny_a";
    link_parts(model, folder);
    let transformer = folder.join("transformer");
    fs::remove_file(&transformer).expect("a link");
    fs::create_dir(&transformer).expect("a folder");
    let text = fs::read_to_string(format!("{model}/transformer/config.json")).expect("a file");
    let mut sizes: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (key, value) in [("num_layers", 8), ("attention_head_dim", 128), ("cross_attention_dim", 256)] {
        sizes[key] = value.into();
    }
    fs::write(transformer.join("config.json"), sizes.to_string()).expect("written");
    let path = folder.to_str().expect("a path").to_string();
    let config = Config::load("tests/fixtures/tiny.yml", [format!("model.path={path}")]).expect("loads");
    let programs = Programs::from_config(&config, None).expect("programs");
    let networks: Vec<_> =
        programs.kinds().map(|kind| programs.network(kind, &plain(DType::F32)).expect("builds")).collect();
    let params = networks.iter().flat_map(|network| &network.params).filter(|p| p.component == "transformer");
    fs::remove_dir_all(&transformer).expect("removed");
    write_random_component(&transformer, &sizes.to_string(), "tiny_a", params, &[]);
    path
}

/// Creates a model folder like [`WHOLE_2_5`] with a diffusion decoder in addition to the convolutional one, and with
/// other latent means and standard deviations.
pub fn with_diffusion_decoder(folder: &Path) -> String {
    link_parts(WHOLE_2_5, folder);
    let model = Path::new("tests/fixtures/models/diffusion_d");
    let text = fs::read_to_string(model.join("diffusion_decoder/config.json")).expect("a file");
    let config = DiffusionDecoderConfig::from_json(&serde_json::from_str(&text).expect("JSON")).expect("valid");
    let network = program(&config, [1, 2, 2, 2], Pixels::Values, &plain(DType::F32)).expect("builds");
    let statistics: [(&str, &[f32]); 2] = [("latents_mean", &[0.25, -0.5]), ("latents_std", &[1.5, 0.75])];
    write_component(model, "diffusion_decoder", &network, &statistics, folder);
    folder.to_str().expect("a path").to_string()
}

/// Returns the settings of a complete small LTX-2.5 run with the distilled preset: ancestral steps, a second pass and
/// the diffusion decoder.
pub fn distilled_2_5(model: &str) -> Vec<String> {
    let own = [
        format!("model.path={model}"),
        format!("runtime.compile_cache={}", crate::support::programs().display()),
        crate::support::QUICK.into(),
    ];
    let rest = [
        "runtime.platform=cpu",
        "runtime.dtype=f32",
        "request.width=128",
        "request.height=64",
        "request.num_frames=9",
        "request.max_sequence_length=64",
        "request.prompt=a red ball",
    ];
    own.into_iter().chain(rest.map(String::from)).collect()
}
