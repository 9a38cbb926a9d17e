//! GPU targets without the hardware: collectives, memory and work reported by the compiler.

use crate::support::tpu::module;
use crate::support::tuning_guide::run_custom_chip_and_layout;
use crate::support::{lowering_of, ltx2, needs, published, published_text};
use ::ltx2::analysis::{Chip, CollectiveKind, Module, report};
use ::ltx2::hlo::DType;
use ::ltx2::hlo::{Argument, Builder, DeviceMesh, Sharding, Type};
use ::ltx2::nn::{Axis, Build, Lowering, Params, Quantization, linear};
use ::ltx2::runtime::{EngineOptions, RandomProgram, Target, random_programs};
use serde_json::Value;

/// The deviceless CUDA compiler accepts our description of an H200.
#[needs(cuda)]
fn program_compiles_without_the_target_gpus() {
    let target: Target = "cuda:h200:1x2x2".parse().expect("a target");
    let machine = target.open().expect("a topology");
    assert_eq!((machine.devices.len(), machine.capacity), (4, Some(150_000_000_000)));
    assert_eq!(machine.toolchain().compute_capability.as_deref(), Some("9.0"));
    let b = Builder::new("gathered").with_mesh(DeviceMesh::new(&[("context", 4)]));
    let sharding = Some(Sharding::new(&[&["context"], &[]]));
    let x = b.argument_with(Argument { sharding, ..Argument::new("x", Type::new(DType::F32, [64, 32])) });
    let y = x.tanh().constrain(&Sharding::new(&[&[], &[]]));
    let program = b.finish(&[("y", &(&y * &y))]).expect("builds");
    let optimized = module(&machine, &program).optimized;
    let module = Module::decode(&optimized.format, &optimized.bytes).expect("a module");
    let r = report(&module, &program.mesh.axes, &[1], target.chip().as_ref());
    let [gather] = &r.collectives[..] else { panic!("one gather: {r:?}") };
    assert_eq!((gather.kind, gather.bytes), (CollectiveKind::AllGather, (64 * 32 * 4) as f64));
    // Between two hosts the network limits the rate: 3/4 of the bytes at 50 GB/s.
    assert!((gather.seconds - gather.wire_bytes / 50e9).abs() < 1e-12, "{gather:?}");
    assert!(r.predicted.is_some());
}

/// XLA's Triton compiler rejects GPUs before Ampere, so on such a GPU a matmul rotates int8-convrot activations.
#[needs(cuda)]
fn gpus_before_ampere_compile_without_the_rotation_kernel() {
    let h200 = Chip::named("h200").expect("embedded").clone();
    let hopper = "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES";
    let config = h200.target_config.as_ref().map(|config| config.replace(hopper, "major: 7 minor: 5"));
    let t4 = Chip { name: "t4".into(), target_config: config, ..h200 };
    let machine = Target::parse("cuda:t4:1x1x1", Some(&t4)).expect("a target").open().expect("a topology");
    let toolchain = machine.toolchain();
    assert_eq!(toolchain.compute_capability.as_deref(), Some("7.5"));
    let compiled = |lowering: Lowering| {
        let quantization = Quantization::Int8 { activations: true, rotated: true };
        let p = Params::new("layer", "transformer", &Build { quantization, lowering, ..Build::new(DType::BF16) });
        let x = p.input("x", Type::new(DType::BF16, [1, 64, 512]), &[Axis::CfgBatch, Axis::VideoSequence, Axis::Embed]);
        let layer = |p: &Params, x: &[_]| vec![linear(&p.pp("to_q"), &x[0], 512, false, [Axis::Replicated; 2])];
        let y = p.each_layer_quantized("blocks", 1, |_| true, &[x], |p, _, x| layer(p, x));
        let program = p.builder().finish(&[("y", &y[0])]).expect("builds");
        machine.compile(&program, &EngineOptions::default()).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(compiled((toolchain.spec().lowering)(&toolchain)), Ok(()));
    let error = compiled(lowering_of("cuda")).expect_err("Triton");
    assert!(error.contains("Triton support is only enabled for Ampere GPUs"), "{error}");
}

/// Runs the guide's commands verbatim, with a GPU that is not embedded and a custom layout. Compiles six programs of
/// the published size, which takes minutes.
#[needs(cuda)]
fn search_uses_custom_chip_and_layout() {
    let (folder, done) = run_custom_chip_and_layout(&[]);
    let words = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "{words}\n{}", String::from_utf8_lossy(&done.stderr));
    let best = std::fs::read_to_string(folder.path().join("out/mine/best.yml")).expect("a layout");
    let (compiled, _) = best.split_once("# Not compiled").expect("both lists");
    assert!(compiled.contains("compiled for cuda:a100:1x1x2,") && compiled.contains("mine.yml context=2"), "{best}");
    assert!(best.contains(" of 70.00 GiB") && !best.contains("error"), "{best}");
}

/// 38 GB of random weights are generated in place, without temporaries of their size.
#[needs(cuda)]
fn random_weights_need_no_temporaries_at_full_size() {
    let machine = "cuda:h200:1x1x1".parse::<Target>().expect("a target").open().expect("a topology");
    for (name, network) in published("cuda").into_iter().chain(published_text("cuda")) {
        let (mut made, mut programs) = (0, 0);
        for RandomProgram { program: random, runs } in
            random_programs(&network.program, &network.params.iter().collect::<Vec<_>>()).expect("builds")
        {
            let started = std::time::Instant::now();
            let compiled = machine.compile(&random, &EngineOptions::default()).expect("compiles");
            let memory = compiled.memory().expect("memory");
            eprintln!(
                "{name}: {} parameters in each of {} runs, temporaries {}, compiled in {:.1} s",
                random.results.len(),
                runs.len(),
                memory.temporaries,
                started.elapsed().as_secs_f64()
            );
            made += memory.outputs * runs.len() as i64;
            programs += random.results.len();
            assert!(memory.temporaries < 64 << 20, "{name}: {memory:?}");
        }
        let weights = network.parameter_bytes() as i64;
        assert!(made >= weights, "{name}: {made} of {weights} bytes");
        assert!(programs <= network.params.len().div_ceil(4).max(160), "{name}: {programs} kernels");
    }
}

/// The FLOPs of convolutions are known both in library calls and in XLA's own operations.
#[needs(cpu, cuda)]
fn convolution_flops_match_between_cpu_and_gpu() {
    let dir = tempfile::tempdir().expect("a folder");
    let flops = |target: &str, program: &str| {
        let sizes = ["--set", "request.width=64", "--set", "request.height=96", "--set", "request.num_frames=9"];
        let what =
            ["compile", "-c", "nano_2_0", "--model", "nano", "--target", target, "--program", program, "--json", "-"];
        let out = ltx2().current_dir(dir.path()).args(what).args(sizes).output().expect("the binary runs");
        assert!(out.status.success(), "{target} {program}: {}", String::from_utf8_lossy(&out.stderr));
        let figures: Value = serde_json::from_slice(&out.stdout).expect("JSON");
        figures["flops"].as_f64().expect("a number")
    };
    for program in ["video-decoder", "audio-decoder", "vocoder"] {
        let (cpu, gpu) = (flops("cpu:1", program), flops("cuda:h200:1x1x1", program));
        eprintln!("{program}: {cpu:.3e} on a CPU, {gpu:.3e} on a GPU");
        assert!((gpu / cpu - 1.0).abs() < 0.1, "{program}: {cpu} on a CPU, {gpu} on a GPU");
    }
}
