//! Windowed attention of the diffusion decoder with its fused kernel: as close to f32 as XLA's bf16 operations.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ltx2::hlo::{DType, DeviceMesh};
use ltx2::kernels::Kernel;
use ltx2::models::diffusion_decoder::{DiffusionDecoderConfig, noise_shape, program};
use ltx2::models::pixels::Pixels;
use ltx2::nn::{Axis, Build, ContextParallelPolicy, Layout, Lowering, Rule};
use ltx2::pipeline::programs::executor::{Executor, Inputs};
use ltx2::pjrt::discover::{self, Platform};
use ltx2::pjrt::{Client, GpuOptions, Plugin};
use ltx2::runtime::Engine;
use ltx2::sampling::TorchRng;
use ltx2::tensor::Tensor;
use ltx2::weights::{ModelSource, Overrides};

use crate::support::drawn::write_component;
use crate::support::{lowering_of, needs, quick, relative_l2};

/// The published windows and strides with few channels; heads of 16.
const PUBLISHED: &str = r#"{"_class_name": "LTX2VideoDiffusionDecoderModel", "latent_channels": 8, "decoder_head_dim": 16,
    "decoder_stage_channels": [128, 64, 32, 32, 16], "decoder_stage_depths": [1, 1, 1, 1, 2], "decoder_t_emb_dim": 16}"#;

/// Latents whose grids exactly fit the windows, and latents that no block size divides.
const LATENTS: [[usize; 4]; 2] = [[1, 3, 7, 7], [2, 4, 9, 13]];

/// Latents for two shards of rows or columns; in the second case the last shard is padded.
const IN_PARTS: [[usize; 4]; 2] = [[1, 3, 14, 14], [2, 4, 18, 13]];

const FUSED: Kernel = Kernel::Cudnn { required: false };

/// A client with all GPUs of this machine: the plugin keeps the devices of a process's first client.
pub(crate) fn gpus() -> Client {
    let search = discover::find(Platform::Cuda, None);
    let plugin = Plugin::load(&search.found.first().expect("a plugin").path).expect("loads");
    let options = GpuOptions { preallocate: Some(false), ..GpuOptions::default() };
    Client::new(&plugin, &options.to_attributes(None)).expect("a client")
}

/// A decoder with its inputs.
struct Decoder {
    config: DiffusionDecoderConfig,
    latents: [usize; 4],
    source: Arc<ModelSource>,
    inputs: [(String, Tensor); 2],
}

impl Decoder {
    /// `norm_weight`: value of all weights of the query and key norms; `None`: random values near 1.
    fn new(latents: [usize; 4], norm_weight: Option<f32>, dir: &Path) -> Self {
        let config = DiffusionDecoderConfig::from_json(&serde_json::from_str(PUBLISHED).unwrap()).unwrap();
        let [b, f, h, w] = latents;
        let (from, model) = (dir.join("windows"), dir.join("model"));
        fs::create_dir_all(from.join("diffusion_decoder")).unwrap();
        fs::create_dir(&model).unwrap();
        fs::write(from.join("diffusion_decoder/config.json"), PUBLISHED).unwrap();
        let network = program(&config, latents, Pixels::Values, &Build::new(DType::F32)).expect("builds");
        let weights = [norm_weight.unwrap_or_default(); 16];
        let mut more: Vec<(&str, &[f32])> = vec![("latents_mean", &[0.0; 8]), ("latents_std", &[1.0; 8])];
        let names = network.params.iter().flat_map(|p| p.source.tensors()).map(|(name, _)| name);
        let norms = names.filter(|name| name.ends_with("norm_q.weight") || name.ends_with("norm_k.weight"));
        more.extend(norms.filter(|_| norm_weight.is_some()).map(|name| (name, &weights[..])));
        write_component(&from, "diffusion_decoder", &network, &more, &model);
        let source = Arc::new(ModelSource::open(model.to_str().unwrap(), &Overrides::default()).expect("opens"));
        let mut rng = TorchRng::new(7);
        let inputs = [("latents", vec![b, 8, f, h, w]), ("noise", noise_shape(&config, latents).to_vec())]
            .map(|(name, shape)| (name.to_string(), Tensor::F32(rng.normal_array(&shape))));
        Decoder { config, latents, source, inputs }
    }

    fn video(&self, client: &Client, dtype: DType, attention: Kernel, layout: Layout) -> Tensor {
        let build = Build { layout, lowering: Lowering { attention, ..lowering_of("cuda") }, ..Build::new(dtype) };
        let network = program(&self.config, self.latents, Pixels::Values, &build).expect("builds");
        let calls = network.program.text.matches("__gpu$xla.gpu.triton").count();
        assert_eq!(calls, if attention == FUSED && dtype == DType::BF16 { 6 } else { 0 }, "{attention:?}");
        let mut executor = Executor::new(Engine::new(client.clone(), quick()), self.source.clone());
        let prepared = executor.prepare("diffusion_decoder", &network).expect("prepares");
        let inputs = executor.give_all(&prepared, Inputs::default(), self.inputs.clone()).expect("uploads");
        executor.run(&prepared, &inputs).expect("runs").tensor("video").expect("a result")
    }
}

/// Returns a layout that shards rows and columns over a mesh; 1 x 1 is a single device.
fn blocks(rows: usize, columns: usize) -> Layout {
    let rule = |axis, mesh_axis: &str| Rule { axis, mesh_axes: vec![mesh_axis.into()], place: "blocks.yml:1".into() };
    let rules = vec![rule(Axis::Height, "context"), rule(Axis::Width, "cfg")];
    let mesh = DeviceMesh::new(&[("cfg", columns), ("context", rows)]);
    Layout::new(mesh, rules, vec![], vec![], ContextParallelPolicy::default()).expect("valid")
}

/// Checks the kernel with scores that need no maximum in the softmax, and with large scores.
fn agree(sizes: [[usize; 4]; 2], layouts: &[(usize, usize)]) {
    let gpus = gpus();
    for (latents, norm_weight) in sizes.into_iter().flat_map(|size| [(size, None), (size, Some(5.0))]) {
        let dir = tempfile::tempdir().expect("a folder");
        let decoder = Decoder::new(latents, norm_weight, dir.path());
        let video = |dtype, kernel| decoder.video(&gpus, dtype, kernel, Layout::default());
        let wide = video(DType::F32, Kernel::Plain);
        let plain = relative_l2(&video(DType::BF16, Kernel::Plain), &wide);
        for &(rows, columns) in layouts {
            let fused = relative_l2(&decoder.video(&gpus, DType::BF16, FUSED, blocks(rows, columns)), &wide);
            eprintln!("{latents:?}, norms {norm_weight:?}, {rows} x {columns}: {fused:.5} from f32, XLA {plain:.5}");
            assert!(fused <= 1.1 * plain, "{latents:?}, norms {norm_weight:?}, {rows} x {columns}: {fused} of {plain}");
        }
    }
}

#[needs(gpu)]
fn fused_window_attention_is_as_accurate_as_xla_operations() {
    agree(LATENTS, &[(1, 1)]);
}

#[needs(gpus)]
fn sharded_window_attention_is_as_accurate_as_xla_operations() {
    agree(IN_PARTS, &[(2, 1), (1, 2)]);
}
