//! `ltx2 compile` and the analysis of optimized programs, on the CPU plugin with eight virtual devices.

use std::path::Path;
use std::process::Output;

use crate::support::{self, cpu, needs};
use ltx2::analysis::{Collective, CollectiveKind, LoopLevel, Module, Report, report};
use ltx2::hlo::DType::{F32, I32};
use ltx2::hlo::{Argument, Builder, Comparison, DType, DeviceMesh, Program, Sharding, Type, Value};
use ltx2::runtime::{EngineOptions, Toolchain, compile_options};
use serde_json::Value as Json;

const LAYERS: usize = 6;
const ROWS: usize = 64;
const WIDTH: usize = 32;

fn mesh() -> DeviceMesh {
    DeviceMesh::new(&[("cfg", 2), ("context", 4)])
}

fn argument(b: &Builder, name: &str, dims: &[usize], sharding: &[&[&str]]) -> Value {
    b.argument_with(Argument { sharding: Some(Sharding::new(sharding)), ..Argument::new(name, Type::new(F32, dims)) })
}

/// Returns a loop with dynamic bounds that contains a loop over `LAYERS` stacked weights. Each weight is gathered and
/// multiplied with rows sharded over `context`, followed by an all-reduce.
fn program() -> Program {
    let b = Builder::new("steps").with_mesh(mesh());
    let scalar = |name: &str| b.argument(name, Type::scalar(I32));
    let (begin, end) = (scalar("begin"), scalar("end"));
    let w = argument(&b, "w", &[LAYERS, WIDTH, WIDTH], &[&[], &["context"], &[]]);
    let x = argument(&b, "x", &[ROWS, WIDTH], &[&["context"], &[]]);
    let rows = Sharding::new(&[&["context"], &[]]);
    let whole = Sharding::new(&[&[], &[]]);
    let y = b.for_loop(&begin, &end, &[x], |_, x| {
        let blocks = b.scope("blocks");
        let done = b.repeat(LAYERS, x, |i, x| {
            let _scope = b.scope("ff");
            let w = w.index(i).constrain(&whole);
            vec![b.einsum("re,eo->ro", &x[0], &w, F32).tanh().constrain(&rows)]
        });
        drop(blocks);
        let _scope = b.scope("euler");
        let sums = b.manual(&[(&done[0], rows.clone())], std::slice::from_ref(&whole), |p| {
            vec![p[0].all_reduce_sum(&mesh().groups(&["context"]))]
        });
        let first = sums[0].slice(0, 0, 1);
        vec![(&done[0] + first).constrain(&rows)]
    });
    b.finish(&[("y", &y[0])]).expect("builds")
}

fn analysed(program: &Program, layers: usize) -> Report {
    let client = cpu(8);
    let ids: Vec<i32> = client.devices().iter().map(ltx2::pjrt::Device::id).collect();
    let options = compile_options(&Toolchain::from_client(&client), program, &ids, &EngineOptions::default());
    let compiled = client.compile(&program.text, &options).expect("compiles");
    let optimized = compiled.optimized_program().expect("an optimized program");
    let module = Module::decode(&optimized.format, &optimized.bytes).expect("a module");
    report(&module, &program.mesh.axes, &[layers], None)
}

#[needs(cpu)]
fn collectives_have_trip_counts_bytes_and_axes() {
    let r = analysed(&program(), LAYERS);
    assert_eq!(r.layers, LAYERS as f64, "{r:?}");
    let of = |phase: LoopLevel| r.collectives.iter().filter(|c| c.level == phase).collect::<Vec<&Collective>>();
    let [gather] = of(LoopLevel::Block)[..] else { panic!("one gather a block: {r:?}") };
    assert_eq!((gather.kind, gather.times, gather.dtype.as_str()), (CollectiveKind::AllGather, 1.0, "f32"));
    assert_eq!(gather.axes, ["context"]);
    let weight = (WIDTH * WIDTH * 4) as f64;
    assert_eq!((gather.bytes, gather.wire_bytes), (weight, weight * 3.0 / 4.0));
    assert!(gather.scope.starts_with("blocks"), "{gather:?}");

    let [sum] = of(LoopLevel::Step)[..] else { panic!("one sum a step: {r:?}") };
    let payload = (ROWS / 4 * WIDTH * 4) as f64;
    assert_eq!((sum.kind, sum.bytes, sum.wire_bytes), (CollectiveKind::AllReduce, payload, 2.0 * payload * 3.0 / 4.0));
    assert_eq!((sum.scope.as_str(), r.trips(sum), r.trips(gather)), ("euler", 1.0, LAYERS as f64));
    assert_eq!(of(LoopLevel::Outside).len(), 0);

    // Each device multiplies a quarter of the rows.
    let product = 2.0 * (ROWS / 4 * WIDTH * WIDTH) as f64;
    assert_eq!((r.layer.flops, r.step.flops), (product, product * LAYERS as f64));
    assert_eq!((r.per_layer().bytes, r.per_step().bytes), (weight, weight * LAYERS as f64 + payload));
    assert!(r.layer.bytes >= (WIDTH * WIDTH + 2 * ROWS / 4 * WIDTH) as f64 * 4.0, "{:?}", r.layer);
    assert_eq!(r.stack_copies, []);
}

/// Trip counts are found in every form in which the compiler writes the counter, bound and body of a loop.
#[needs(cpu)]
fn trip_counts_are_found_for_all_loop_forms() {
    let cases = [
        (0.0, 7.0, 1.0, Comparison::Lt, 7.0),
        (1.0, 9.0, 2.0, Comparison::Le, 5.0),
        (9.0, 1.0, -2.0, Comparison::Gt, 4.0),
        (0.0, 6.0, 1.0, Comparison::Ne, 6.0),
    ];
    let b = Builder::new("counted").with_mesh(mesh());
    let rows = Sharding::new(&[&["context"], &[]]);
    let sums: Vec<Value> = cases
        .iter()
        .enumerate()
        .map(|(n, &(start, bound, step, comparison, _))| {
            let x = argument(&b, &format!("x{n}"), &[ROWS, WIDTH], &[&["context"], &[]]);
            let _scope = b.scope(format!("loop{n}"));
            let done = b.while_loop(
                &[b.scalar(start, I32), x],
                |c| c[0].compare(comparison, &b.scalar(bound, I32)),
                |c| {
                    let sum = b.manual(&[(&c[1], rows.clone())], std::slice::from_ref(&rows), |p| {
                        vec![p[0].all_reduce_sum(&mesh().groups(&["cfg", "context"])).tanh()]
                    });
                    vec![&c[0] + step, sum[0].clone()]
                },
            );
            done[1].clone()
        })
        .collect();
    let names: Vec<String> = (0..cases.len()).map(|n| format!("y{n}")).collect();
    let results: Vec<(&str, &Value)> = names.iter().map(String::as_str).zip(&sums).collect();
    let r = analysed(&b.finish(&results).expect("builds"), 1);
    assert!(r.collectives.iter().all(|sum| sum.level == LoopLevel::Step && sum.axes == ["cfg", "context"]), "{r:?}");
    assert_eq!(r.collectives.len(), cases.len());
    for (n, (start, bound, step, comparison, trips)) in cases.into_iter().enumerate() {
        let sum = r.collectives.iter().find(|sum| sum.scope.starts_with(&format!("loop{n}"))).expect("its sum");
        assert_eq!(sum.times, trips, "{start} {comparison:?} {bound} by {step}");
    }
}

#[needs(cpu)]
fn copied_stacked_weights_are_reported() {
    const LARGE: usize = 512;
    let b = Builder::new("copied").with_mesh(mesh());
    let w = argument(&b, "w", &[LAYERS, LARGE, LARGE], &[&[], &[], &[]]);
    let x = argument(&b, "x", &[ROWS, LARGE], &[&["context"], &[]]);
    // Converts the element type of the complete stack once, outside the loop.
    let other = w.to(DType::BF16);
    let y = b.repeat(LAYERS, &[x], |i, x| vec![b.einsum("re,eo->ro", &x[0], &other.index(i).to(F32), F32).tanh()]);
    let r = analysed(&b.finish(&[("y", &y[0]), ("other", &other)]).expect("builds"), LAYERS);
    let bytes = (LAYERS * LARGE * LARGE * 2) as f64;
    assert!(r.stack_copies.iter().any(|c| c.bytes == bytes && c.times == 1.0), "{:?}", r.stack_copies);
}

fn ltx2(arguments: &[&str]) -> Output {
    support::ltx2().args(arguments).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn fail(code: i32, arguments: &[&str]) -> String {
    let out = ltx2(&[&["compile"], arguments].concat());
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{arguments:?}: {stderr}");
    stderr.lines().filter(|l| l.starts_with("error: ")).collect()
}

#[needs(cpu)]
fn invalid_input_gives_one_error_line() {
    let nano = ["-c", "nano_2_0", "--model", "nano"];
    let message = fail(2, &[&["--target", "tpu:v9:2x2"], &nano[..]].concat());
    assert!(message.contains("unknown chip 'v9'") && message.contains("tpu:v6e:2x4"), "{message}");
    let out = ltx2(&["compile", "--target", "cpu:8", "--program", "diffuse"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(
        text(&out.stderr).contains("possible values: prompt-enhancer, text-encoder, connectors, "),
        "{}",
        text(&out.stderr)
    );
    let message = fail(2, &[&["--target", "cpu:8", "--layers", "99"], &nano[..]].concat());
    assert!(message.contains("--layers 99: this model has 4 blocks; use 1 to 4"), "{message}");
    let message = fail(1, &["--target", "cpu:8", "-c", "nano_2_0", "--model", "no/where"]);
    assert!(message.contains("no/where"), "{message}");
    let message = fail(2, &[&["--target", "cpu:8", "--set", "runtime.weights=fp8"], &nano[..]].concat());
    assert_eq!(
        message,
        "error: runtime.weights: fp8 requires cuda, but the platform is cpu; int8 works on every platform"
    );
    let message = fail(2, &[&["--target", "cpu:8", "--set", "runtime.weights=int8-convrot"], &nano[..]].concat());
    assert!(
        message.contains("transformer.transformer_blocks.") && message.contains("need a multiple of 256; use int8"),
        "{message}"
    );
    let message = fail(2, &[&["--target", "cpu:8", "--set", "runtime.activations=int8"], &nano[..]].concat());
    assert!(
        message.starts_with("error: runtime.activations = int8 (--set): ") && message.contains("runtime.weights"),
        "{message}"
    );
    let sized = |layout: &str, mesh: &str| {
        fail(2, &[&["--target", "cpu:8", "--layout", layout, "--mesh", mesh], &nano[..]].concat())
    };
    assert!(sized("cfg", "cfg=16").contains("needs 16 devices, but there are 8"));
    assert!(sized("ulysses", "cfg=3,context=-1").contains("8 devices are not divisible by 3"));
    let message = sized("cfg", "cfg=2");
    assert!(
        message.contains("layout cfg uses 2 of the 8 devices of cpu:8; pass a --mesh that uses all of them"),
        "{message}"
    );
}

#[needs(cpu)]
fn program_is_compiled_and_dumped() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    let (json, dump) = (path("f.json"), path("hlo"));
    let base =
        ["compile", "--target", "cpu:8", "-c", "nano_2_0", "--model", "nano", "--layout", "ulysses", "--layers", "2"];
    let small = ["request.width=64", "request.height=96", "request.num_frames=9", support::QUICK];
    let small: Vec<&str> = small.iter().flat_map(|s| ["--set", s]).collect();
    let out = ltx2(&[&base[..], &small, &["--json", &json, "--dump-hlo", &dump]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let table = text(&out.stdout);
    for part in
        ["target      cpu:8, 8 devices", "all-to-all", "video_sequence: [context]", "no stacked layer parameters"]
    {
        assert!(table.contains(part), "'{part}' in:\n{table}");
    }
    let figures: Json = serde_json::from_str(&std::fs::read_to_string(&json).expect("a file")).expect("JSON");
    assert_eq!((&figures["layers"], &figures["devices"]), (&2.into(), &8.into()));
    assert_eq!(figures["mesh"], serde_json::json!({"context": 8}));
    let hash = figures["hash"].as_str().expect("a hash");
    assert!(table.contains(hash), "the hash is said:\n{table}");
    let collectives = figures["collectives"]["list"].as_array().expect("a list");
    let trades = collectives.iter().find(|c| c["kind"] == "all-to-all").expect("Ulysses trades tokens for heads");
    assert_eq!((&trades["count"], &trades["trip_count"]), (&4.into(), &2.0.into()), "{trades}");
    assert_eq!(trades["axes"], serde_json::json!(["context"]));
    assert!(trades["rule"][0].as_str().expect("a rule").contains("ulysses.yml:"), "{trades}");
    let memory = &figures["memory"];
    assert!(memory["arguments"].as_i64() > Some(0) && memory["capacity"].is_null(), "{memory}");
    for file in ["denoise.mlir", "denoise.optimized.pb", "denoise.optimized.txt"] {
        assert!(Path::new(&dump).join(file).metadata().is_ok_and(|m| m.len() > 1000), "{file}");
    }
}

/// One file describes a chip that is not built in.
#[needs(cpu)]
fn example_chip_file_predicts_times() {
    let small = ["request.width=64", "request.height=96", "request.num_frames=9", support::QUICK];
    let small: Vec<&str> = small.iter().flat_map(|s| ["--set", s]).collect();
    let arguments =
        ["compile", "--json", "-", "--target", "cpu:1", "-c", "nano_2_0", "--model", "nano", "--layers", "1"];
    let modules = support::modules();
    let arguments = [&arguments[..], &["--modules", modules.to_str().expect("UTF-8")]].concat();
    let predicted = |chip: &str| -> Json {
        let out = ltx2(&[&arguments[..], &["--chip", chip], &small].concat());
        assert!(out.status.success(), "{}", text(&out.stderr));
        serde_json::from_slice(&out.stdout).expect("JSON")
    };
    let [a100, h200] = ["examples/chips/a100.toml", "h200"].map(predicted);
    assert_eq!(a100["chip"]["name"], "a100");
    // Memory capacity from the data sheets is reported for both; the file of h200 also has measured constants.
    assert_eq!(a100["chip"]["peak"], 312e12);
    assert_eq!([&a100, &h200].map(|r| r["memory"]["capacity"].as_i64()), [Some(80_000_000_000), Some(150_000_000_000)]);
    assert!(a100["predicted_ms"]["step"].as_f64() > Some(0.0), "{}", a100["predicted_ms"]);
}

#[needs(cpu)]
fn chip_file_predicts_times() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("mine.toml");
    let figures = "name = \"mine\"\ncapacity = 1_000_000_000\npeak_bf16 = 1e12\npeak_fp8 = 2e12\nbandwidth = 1e11\n";
    let path = file.to_str().expect("UTF-8");
    let arguments = ["--target", "cpu:1", "-c", "nano_2_0", "--model", "nano", "--layers", "1", "--chip", path];
    std::fs::write(&file, figures).expect("writes");
    assert!(fail(2, &arguments).contains("mine.toml: missing field `links`"));
    std::fs::write(&file, format!("{figures}links.torus.bandwidth = 1e10\n")).expect("writes");
    let small = ["request.width=64", "request.height=96", "request.num_frames=9", support::QUICK];
    let small = small.iter().flat_map(|s| ["--set", s]);
    let modules = support::modules();
    let own = ["compile", "--json", "-", "--modules", modules.to_str().expect("UTF-8")];
    let out = ltx2(&[&own, &arguments[..], &small.collect::<Vec<_>>()].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let figures: Json = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(figures["chip"], serde_json::json!({"name": "mine", "peak": 1e12, "bandwidth": 1e11}));
    assert_eq!(figures["memory"]["capacity"], 1_000_000_000);
    let flops = figures["flops"].as_f64().expect("FLOPs");
    let compute = figures["predicted_ms"]["compute"].as_f64().expect("a time");
    assert!((compute / (flops / 1e12 * 1e3) - 1.0).abs() < 1e-9, "{compute} ms for {flops} FLOPs");
    let message = fail(2, &[&arguments[..8], &["--chip", "v9"]].concat());
    assert_eq!(
        message,
        "error: runtime.chip_file = v9 (flag --chip): unknown chip 'v9'; known: v5e, v5p, v6e, tpu7x, h200, h100"
    );
}

/// Compiles the published model's denoising loop with all 48 blocks. On CUDA, layers are unrolled and weights are not
/// stacked: see `make test-cuda`.
#[needs(cpu)]
fn no_stacked_weights_are_copied_at_full_depth() {
    let arguments = ["compile", "-c", "ltx2", "--target", "cpu:4", "--layout", "ulysses", "--json", "-"];
    let out = ltx2(&[&arguments[..], &["--set", support::QUICK]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let figures: Json = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(figures["layers"], 48);
    assert_eq!(figures["stack_copies"], serde_json::json!([]));
}
