//! LTX-2.5's diffusion decoder against the reference. Weights are drawn by seed on both sides; none are stored.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::support::drawn::write_component;
use crate::support::{Case, cases, cpu, needs, plain, quick, relative_l2};
use ltx2::hlo::{DType, Mesh};
use ltx2::kernels::Kernel;
use ltx2::models::Network;
use ltx2::models::diffusion_decoder::{DiffusionDecoderConfig, noise_shape, program};
use ltx2::models::pixels::Pixels;
use ltx2::nn::{Axis, Build, ContextParallelPolicy, Layout, Lowering, Rule};
use ltx2::pipeline::executor::{Executor, Inputs};
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

/// A model folder with the weights that a program reads.
fn written(case: &Case, network: &Network, folder: &Path) -> Arc<ModelSource> {
    write_component(&case.model, "diffusion_decoder", network, &[], folder);
    Arc::new(ModelSource::open(folder.to_str().expect("a path"), &Overrides::default()).expect("opens"))
}

/// The video of a case, under the noise that its seed gives torch's generator.
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

/// Three configurations, and latents smaller than the windows, padded as Lightricks' decoder pads them.
#[needs(cpu)]
fn a_whole_video_is_the_reference_s() {
    let client = cpu(8);
    let all = cases("diffusion-decoder");
    assert_eq!(all.len(), 4);
    for case in &all {
        let distance = case.distance("video", &decode(&client, case, &plain(DType::F32)));
        eprintln!("{}: {distance:.1e}", case.name);
        assert!(distance <= 1e-4, "{}: {distance:e}", case.name);
    }
}

/// Unrolled layers and RoPE by reversal, as CUDA's programs have them.
#[needs(cpu)]
fn in_the_form_of_cuda_it_is_the_same() {
    let case = &cases("diffusion-decoder")[0];
    let lowering = Lowering { mixed_precision_dot: false, ..Lowering::of("cuda", "") };
    let distance = case.distance("video", &decode(&cpu(8), case, &Build { lowering, ..Build::new(DType::F32) }));
    eprintln!("{distance:.1e}");
    assert!(distance <= 1e-4, "{distance:e}");
}

/// Windows as features of queries and keys, as TPUs' programs have them: on one device, and with rows and columns sharded.
#[needs(cpu)]
fn in_the_form_of_tpus_it_is_the_same() {
    let case = &cases("diffusion-decoder")[0];
    let forms = Lowering::of("tpu", "TPU v6 lite");
    let lowering = Lowering { mixed_precision_dot: false, attention: Kernel::Plain, ..forms };
    let one = Build { lowering, ..Build::new(DType::F32) };
    let distance = case.distance("video", &decode(&cpu(8), case, &one));
    eprintln!("{distance:.1e}");
    assert!(distance <= 1e-4, "{distance:e}");
    let distance = case.distance("video", &decode(&cpu(4), case, &Build { layout: blocks(2, 2), ..one }));
    eprintln!("2 x 2: {distance:.1e}");
    assert!(distance <= 1e-4, "{distance:e}");
}

/// Frames in blocks of rows over `rows` devices and of columns over `columns`.
fn blocks(columns: usize, rows: usize) -> Layout {
    let rule = |axis, mesh_axis: &str| Rule { axis, mesh_axes: vec![mesh_axis.into()], place: "blocks.yml:1".into() };
    let rules = vec![rule(Axis::Height, "context"), rule(Axis::Width, "cfg")];
    let mesh = Mesh::new(&[("cfg", columns), ("context", rows)]);
    Layout::new(mesh, rules, vec![], vec![], ContextParallelPolicy::default()).expect("valid")
}

/// Rows over two devices, and columns over two more: blocks that do not divide, windows pushed inward at the borders of the
/// whole grid alone. Rows over eight devices would be blocks that windows reach beyond: each device has all.
#[needs(cpu)]
fn sharded_over_rows_and_columns_it_is_the_same() {
    let case = &cases("diffusion-decoder")[0];
    let whole = decode(&cpu(1), case, &plain(DType::F32));
    for (columns, rows) in [(1, 2), (2, 2), (1, 8)] {
        let build = Build { layout: blocks(columns, rows), ..plain(DType::F32) };
        let distance = relative_l2(&decode(&cpu(columns * rows), case, &build), &whole);
        eprintln!("{rows} x {columns}: {distance:.1e}");
        assert!(distance <= 1e-5, "{rows} x {columns}: {distance:e}");
    }
}
