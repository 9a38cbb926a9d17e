//! LTX-2.5's diffusion decoder compared with the reference. Both generate the weights from a seed; none are stored.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::support::drawn::write_component;
use crate::support::{Case, cases, cpu, full, lowering_of, lowering_of_kind, needs, plain, quick, relative_l2};
use ltx2::hlo::{DType, DeviceMesh};
use ltx2::kernels::Kernel;
use ltx2::models::Network;
use ltx2::models::diffusion_decoder::{DiffusionDecoderConfig, noise_shape, program};
use ltx2::models::pixels::Pixels;
use ltx2::nn::{Axis, Build, ContextParallelPolicy, Layout, Lowering, Rule};
use ltx2::pipeline::programs::executor::{Executor, Inputs};
use ltx2::pjrt::Client;
use ltx2::runtime::Engine;
use ltx2::sampling::TorchRng;
use ltx2::tensor::Tensor;
use ltx2::weights::{ModelSource, Overrides};

const FOLDER: &str = "diffusion_decoder";

fn config(case: &Case) -> DiffusionDecoderConfig {
    let file = case.model.join(FOLDER).join("config.json");
    let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    DiffusionDecoderConfig::from_json(&serde_json::from_str(&text).expect("JSON")).expect("valid")
}

/// Writes the weights that a program reads to a model folder.
fn written(case: &Case, network: &Network, folder: &Path) -> Arc<ModelSource> {
    write_component(&case.model, "diffusion_decoder", network, &[], folder);
    Arc::new(ModelSource::open(folder.to_str().expect("a path"), &Overrides::default()).expect("opens"))
}

/// Decodes a case with the noise that torch's generator draws from its seed.
fn decode(client: &Client, case: &Case, build: &Build) -> Tensor {
    let config = config(case);
    let latents = &case.inputs["latents"];
    let [b, _, f, h, w] = latents.shape().try_into().expect("five axes");
    let network =
        program(&config, [b, f, h, w], Pixels::Values, build).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let folder = tempfile::tempdir().expect("a folder");
    let source = written(case, &network, folder.path());
    let mut executor = Executor::new(Engine::new(client.clone(), quick()), source);
    let prepared = executor.prepare(FOLDER, &network).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let seed = case.number("seed").expect("a seed") as u64;
    let noise = TorchRng::new(seed).normal_array(&noise_shape(&config, [b, f, h, w]));
    let inputs = [("latents".to_string(), latents.clone()), ("noise".to_string(), Tensor::F32(noise))];
    let inputs = executor.give_all(&prepared, Inputs::default(), inputs).expect("uploads");
    executor.run(&prepared, &inputs).expect("runs").tensor("video").expect("a result")
}

/// Covers two configurations, in the full test three, and latents smaller than the attention windows, which are padded as in Lightricks'
/// decoder.
#[needs(cpu)]
fn decoded_video_matches_reference() {
    let client = cpu(8);
    let all = cases("diffusion-decoder");
    assert_eq!(all.len(), 4);
    // The lowering of CUDA decodes `diffusion_a`.
    let is_short = |case: &&Case| !["diffusion_a", "diffusion_c"].iter().any(|name| case.name.ends_with(name));
    for case in all.iter().filter(|case| full() || is_short(case)) {
        let distance = case.distance("video", &decode(&client, case, &plain(DType::F32)));
        eprintln!("{}: {distance:.1e}", case.name);
        assert!(distance <= 1e-4, "{}: {distance:e}", case.name);
    }
}

/// As in CUDA programs, layers are unrolled, and RoPE swaps the two features of each pair by a reversal.
#[needs(cpu)]
fn cuda_lowering_matches_reference() {
    let case = &cases("diffusion-decoder")[0];
    let lowering = Lowering { mixed_precision_dot: false, ..lowering_of("cuda") };
    let distance = case.distance("video", &decode(&cpu(8), case, &Build { lowering, ..Build::new(DType::F32) }));
    eprintln!("{distance:.1e}");
    assert!(distance <= 1e-4, "{distance:e}");
}

/// As in TPU programs, attention windows are encoded in additional features of queries and keys. Rows and
/// columns are sharded; the full test also runs on one device.
#[needs(cpu)]
fn tpu_lowering_matches_reference() {
    let case = &cases("diffusion-decoder")[0];
    let forms = lowering_of_kind("tpu", "TPU v6 lite");
    let lowering = Lowering { mixed_precision_dot: false, attention: Kernel::Plain, ..forms };
    let one = Build { lowering, ..Build::new(DType::F32) };
    let split = Build { layout: blocks(2, 2), ..one.clone() };
    for (devices, build) in [(4, split), (1, one)].into_iter().take(if full() { 2 } else { 1 }) {
        let distance = case.distance("video", &decode(&cpu(devices), case, &build));
        eprintln!("{devices} devices: {distance:.1e}");
        assert!(distance <= 1e-4, "{devices} devices: {distance:e}");
    }
}

/// Returns a layout that shards rows over `rows` devices and columns over `columns`.
fn blocks(columns: usize, rows: usize) -> Layout {
    let rule = |axis, mesh_axis: &str| Rule { axis, mesh_axes: vec![mesh_axis.into()], place: "blocks.yml:1".into() };
    let rules = vec![rule(Axis::Height, "context"), rule(Axis::Width, "cfg")];
    let mesh = DeviceMesh::new(&[("cfg", columns), ("context", rows)]);
    Layout::new(mesh, rules, vec![], vec![], ContextParallelPolicy::default()).expect("valid")
}

/// Rows are sharded over two devices and columns over two more. The sizes do not divide evenly, and windows are shifted
/// inward only at the borders of the complete grid. With rows over eight devices, windows would extend beyond a
/// neighbouring device's block, so the rows are replicated. `make test` shards both.
#[needs(cpu)]
fn decoder_with_sharded_rows_and_columns_matches_single_device() {
    let case = &cases("diffusion-decoder")[0];
    let whole = decode(&cpu(1), case, &plain(DType::F32));
    for (columns, rows) in [(2, 2), (1, 2), (1, 8)].into_iter().take(if full() { 3 } else { 1 }) {
        let build = Build { layout: blocks(columns, rows), ..plain(DType::F32) };
        let distance = relative_l2(&decode(&cpu(columns * rows), case, &build), &whole);
        eprintln!("{rows} x {columns}: {distance:.1e}");
        assert!(distance <= 1e-5, "{rows} x {columns}: {distance:e}");
    }
}
