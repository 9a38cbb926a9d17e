//! Random weights made on the device, and `ltx2 bench`, on the CPU plugin.

use ltx2::pipeline::setup;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;
use std::sync::Arc;

use crate::support::{self, QUICK, cpu, full, needs, quick, relative_l2};
use ltx2::analysis::{Module, report};
use ltx2::av::Av;
use ltx2::config::{CliOverrides, Config, load};
use ltx2::hlo::DType;
use ltx2::kernels::Kernel;
use ltx2::models::Network;
use ltx2::models::presets::Preset;
use ltx2::models::transformer::TransformerConfig;
use ltx2::nn::{Build, Lowering, Param};
use ltx2::pipeline::configs::ModelConfigs;
use ltx2::pipeline::executor::Executor;
use ltx2::pipeline::origin::Weights;
use ltx2::pipeline::programs::Programs;
use ltx2::runtime::{Engine, EngineOptions, RandomProgram, Toolchain, compile_options, random_programs};
use ltx2::sampling::denoise::{DenoiseShape, denoise};
use ltx2::sampling::guidance::Branch;
use ltx2::tensor::Tensor;
use serde_json::Value;

const SMALL: [&str; 10] = ["--width", "64", "--height", "96", "--num-frames", "9", "--steps", "2", "--set", QUICK];

/// Runs in a folder of its own, so that no model lies there.
fn ltx2(dir: &Path, arguments: &[&str]) -> Output {
    support::ltx2().current_dir(dir).args(arguments).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).expect("a file")).expect("JSON")
}

/// The nano vocoder: it has hundreds of small parameters, several of one shape.
fn vocoder() -> Network {
    let configs = ModelConfigs::of_preset(Preset::named("nano").expect("a preset"));
    let channels = configs.vocoder().expect("a configuration").generator.in_channels;
    configs.vocoder_program([1, 1, 8, channels], &Build::new(DType::F32)).expect("builds")
}

fn drawn(seed: u64, network: &Network, client: &ltx2::pjrt::Client) -> BTreeMap<String, Tensor> {
    let mut executor = Executor::new(Engine::new(client.clone(), quick()), Weights::Random(seed));
    executor.prepare("vocoder", network).expect("ready");
    let value = |p: &Param| executor.parameter(&p.name).expect("a parameter").download().expect("downloads");
    network.params.iter().map(|p| (p.name.clone(), value(p))).collect()
}

#[needs(cpu)]
fn parameters_have_their_mean_and_deviation_and_depend_on_name_and_seed() {
    let client = cpu(1);
    let network = vocoder();
    let (one, again, other) = (drawn(1, &network, &client), drawn(1, &network, &client), drawn(2, &network, &client));
    assert_eq!(one, again);
    let mut big = 0;
    for param in &network.params {
        let values = one[&param.name].to_f32();
        let (mean, deviation) = (f64::from(param.init.mean), f64::from(param.init.std));
        if deviation == 0.0 {
            assert!(values.iter().all(|v| *v == mean as f32), "{}", param.name);
            continue;
        }
        assert_ne!(one[&param.name], other[&param.name], "another seed: {}", param.name);
        let n = values.len() as f64;
        let got = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        assert!((got - mean).abs() < 5.0 * deviation / n.sqrt(), "{}: mean {got}, {:?}", param.name, param.init);
        if n < 2000.0 {
            continue;
        }
        big += 1;
        let variance = values.iter().map(|v| (f64::from(*v) - got).powi(2)).sum::<f64>() / n;
        // The sample variance of a distribution of kurtosis 2.7 deviates by sqrt(1.7 / n).
        assert!((variance / deviation.powi(2) - 1.0).abs() < 5.0 * (1.7 / n).sqrt(), "{}: {variance}", param.name);
        // Neighbours along the innermost dimension, and halves of the tensor, have nothing to do with each other.
        let flat: Vec<f64> = values.iter().map(|v| (f64::from(*v) - mean) / deviation).collect();
        for lag in [1, flat.len() / 2] {
            let product = flat.iter().zip(&flat[lag..]).map(|(a, b)| a * b).sum::<f64>();
            let pairs = (flat.len() - lag) as f64;
            assert!(product.abs() < 5.0 * pairs.sqrt(), "{} at {lag}: {}", param.name, product / pairs);
        }
    }
    assert!(big >= 3, "{big} parameters are large enough to judge");
    // Parameters of one shape are drawn together, and differ all the same.
    let mut hashes: Vec<Vec<u8>> = one.values().filter(|t| t.len() > 16).map(|t| t.bytes().into_owned()).collect();
    hashes.sort();
    let distinct = hashes.windows(2).filter(|w| w[0] != w[1]).count() + 1;
    let drawn = network.params.iter().filter(|p| p.ty.elements() > 16 && p.init.std != 0.0);
    assert!(distinct >= drawn.count(), "{distinct} distinct of {}", hashes.len());
}

fn all(network: &Network) -> Vec<&Param> {
    network.params.iter().collect()
}

/// A checkpoint tensor has the same values in a stack of layers, where layers are unrolled, and fused with others or
/// not (a layout that gathers keys has queries apart).
#[needs(cpu)]
fn values_do_not_depend_on_how_parameters_lie() {
    let client = cpu(2);
    let preset = Preset::named("nano").expect("a preset");
    let c = TransformerConfig::from_json(preset.config("transformer").expect("a transformer")).expect("valid");
    let (tokens, channels) = (Av { video: 8, audio: 4 }, Av::both(c.caption_channels));
    let shape = DenoiseShape::plain(vec![Branch::Conditional], tokens, 128, channels);
    let by_tensor = |platform: &str, layout: &str, mesh: &str| -> BTreeMap<String, Vec<f32>> {
        let config = Config {
            layout: layout.into(),
            mesh: Some(ltx2::config::parse_mesh(mesh).expect("a mesh")),
            ..Config::default()
        };
        let placed = config.placement(2).expect("a layout");
        let lowering = Lowering { attention: Kernel::Plain, ..Lowering::of(platform, "") };
        let build = Build { layout: placed, lowering, ..Build::new(DType::F32) };
        let network = denoise(&c, &shape, &build).expect("builds");
        let values = drawn(3, &network, &client);
        let tensors = network.params.iter().flat_map(|p| {
            let (names, all) = (p.source.names(), values[&p.name].to_f32());
            let each = all.len() / names.len();
            let flat: Vec<f32> = all.into_iter().collect();
            names.into_iter().enumerate().map(move |(i, n)| (n, flat[i * each..][..each].to_vec())).collect::<Vec<_>>()
        });
        tensors.collect()
    };
    let stacked = by_tensor("cpu", "replicated", "data=1");
    assert!(stacked.len() > 50, "{}", stacked.len());
    assert_eq!(stacked, by_tensor("cuda", "replicated", "data=1"));
    assert_eq!(stacked, by_tensor("cuda", "sequence", "context=2"));
    // Each device makes its part of what is split.
    assert_eq!(stacked, by_tensor("cpu", "fsdp-ulysses", "fsdp=2"));
}

/// A device makes its part of split weights without a word to the others.
#[needs(cpu)]
fn split_weights_are_made_in_their_place() {
    let client = cpu(4);
    let layout = Config {
        layout: "fsdp-ulysses".into(),
        mesh: Some(ltx2::config::parse_mesh("fsdp=2,context=2").expect("a mesh")),
        ..Config::default()
    };
    let build = Build {
        layout: layout.placement(4).expect("a layout"),
        lowering: Lowering::of("cpu", ""),
        ..Build::new(DType::F32)
    };
    let configs = ModelConfigs::of_preset(Preset::named("nano").expect("a preset"));
    let network = configs.text_encoder_program(2, 128, true, &build).expect("builds");
    let ids: Vec<i32> = client.devices().iter().map(ltx2::pjrt::Device::id).collect();
    let mut made = 0;
    for RandomProgram { program: random, runs } in random_programs(&network.program, &all(&network)).expect("builds") {
        let options = compile_options(&Toolchain::of(&client), &random, &ids, &EngineOptions::default());
        let compiled = client.compile(&random.text, &options).expect("compiles");
        let optimized = compiled.optimized_program().expect("an optimized program");
        let module = Module::decode(&optimized.format, &optimized.bytes).expect("a module");
        assert_eq!(report(&module, &random.mesh.axes, &[1], None).collectives, []);
        let memory = compiled.memory().expect("memory");
        assert!(memory.temporaries < 4 << 20, "{memory:?}");
        made += memory.outputs * runs.len() as i64;
    }
    let whole = network.parameter_bytes() as i64;
    assert!(made < whole * 2 / 3, "{made} of {whole}");
}

/// Makes a video of the nano preset with random weights; its dump and its sidecar.
fn generate(dir: &Path, name: &str, more: &[&str]) -> (BTreeMap<String, Tensor>, Value, String) {
    let (file, dump) = (format!("{name}.mp4"), format!("{name}.safetensors"));
    let base = ["generate", "-c", "nano_2_0", "--model", "nano", "--weights", "random", "--platform", "cpu"];
    let request = ["-p", "a red ball", "-o", &file, "--dump", &dump];
    let out = ltx2(dir, &[&base[..], &request, &SMALL, more].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let tensors = ltx2::pipeline::tensors::read(&dir.join(&dump)).expect("a dump");
    (tensors, json(&dir.join(format!("{name}.json"))), text(&out.stderr))
}

#[needs(cpu)]
fn a_video_is_made_without_model_files() {
    let dir = tempfile::tempdir().expect("a folder");
    let (first, sidecar, said) = generate(dir.path(), "a", &[]);
    let loud: Vec<&str> = said.lines().filter(|l| l.contains("RANDOM WEIGHTS of nano")).collect();
    assert_eq!(loud.len(), 1, "one line says it: {said}");
    assert!(loud[0].contains("tokenizer (bytes)") && loud[0].contains("latent statistics"), "{loud:?}");
    assert_eq!((&sidecar["model"]["weights"], &sidecar["model"]["path"]), (&"random".into(), &"nano".into()));
    assert_eq!(sidecar["model"]["fingerprint"].as_str().map(str::len), Some(64));

    // The same bits from the sidecar, and in full the same numbers on four devices, weights split over them.
    let out = ltx2(dir.path(), &["generate", "-c", "a.json", "-o", "again.mp4"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(json(&dir.path().join("again.json"))["sha256"], sidecar["sha256"]);
    let layouts = [
        ("fsdp", ["--layout", "fsdp-ulysses", "--mesh", "fsdp=2,context=2"]),
        ("tensor", ["--layout", "tensor", "--mesh", "tensor=4"]),
    ];
    for (name, more) in layouts.into_iter().filter(|_| full()) {
        let (split, other, _) = generate(dir.path(), name, &more);
        assert_eq!(other["model"], sidecar["model"]);
        for tensor in ["prompt_embeds", "latents.video", "latents.audio", "video", "audio"] {
            let distance = relative_l2(&split[tensor], &first[tensor]);
            eprintln!("{name} {tensor}: {distance:.1e}");
            assert!(distance < 1e-5, "{name} {tensor}: {distance}");
        }
    }
    let (other, sidecar_of_other, _) = generate(dir.path(), "b", &["--set", "model.weights_seed=7"]);
    assert_ne!(other["prompt_embeds"], first["prompt_embeds"]);
    assert_ne!(sidecar_of_other["model"]["fingerprint"], sidecar["model"]["fingerprint"]);
}

#[needs(cpu)]
fn a_component_runs_without_model_files() {
    let dir = tempfile::tempdir().expect("a folder");
    let mel = Tensor::F32(ndarray::ArrayD::from_elem(vec![1, 2, 5, 64], 0.5));
    ltx2::pipeline::tensors::write(&dir.path().join("in.safetensors"), &[("mel".into(), mel)]).expect("written");
    let run = |output: &str, weights: &[&str]| {
        let base =
            ["run", "vocoder", "--model", "nano", "--platform", "cpu", "--inputs", "in.safetensors", "-o", output];
        let out = ltx2(dir.path(), &[&base[..], weights].concat());
        assert!(out.status.success(), "{}", text(&out.stderr));
        ltx2::pipeline::tensors::read(&dir.path().join(output)).expect("results")
    };
    let a = run("a.safetensors", &["--weights", "random"]);
    assert_eq!(a, run("b.safetensors", &["--set", "model.weights=random"]));
    assert!(a["audio"].to_f32().iter().any(|v| *v != 0.0));
}

const PROGRAMS: [&str; 9] = [
    "audio_decoder",
    "connectors",
    "denoise_loop",
    "denoise_step",
    "end_to_end",
    "prepare",
    "text_encoder",
    "video_decoder",
    "vocoder",
];

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// The parts of a whole run, on the device and on the host, are the run.
fn assert_parts_add_up(run: &Value) {
    assert!(run["program"].is_null() && run["flops_per_second"].is_null());
    let parts = run["parts"].as_object().expect("parts");
    let share = |key: &str| parts.values().map(|part| number(&part[key])).sum::<f64>();
    let last = number(&run["seconds"][2]);
    assert_eq!(parts.len(), 5);
    assert!(number(&parts["denoise"]["device"]) > 0.0, "{run}");
    let all = share("device") + share("host");
    assert!(all <= last && (all > 0.9 * last || !full()), "{all} of {last}");
}

#[needs(cpu)]
fn the_programs_of_a_run_are_timed_and_compared() {
    let dir = tempfile::tempdir().expect("a folder");
    let bench = |more: &[&str]| ltx2(dir.path(), &[&["bench", "-c", support::tiny()], more].concat());
    // A CPU has no figures of its own: those of a chip that is named.
    let out = bench(&["--runs", "3", "--json", "a.json", "--chip", "h200"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let table = text(&out.stdout);
    assert!(PROGRAMS.iter().all(|p| table.contains(p)) && table.contains("TFLOP/s"), "{table}");
    assert!(table.contains("predicted ms"), "{table}");

    let report = json(&dir.path().join("a.json"));
    assert_eq!((&report["platform"], &report["devices"], &report["videos"]), (&"cpu".into(), &1.into(), &1.into()));
    assert!(report["model"]["path"].as_str().is_some_and(|path| path.ends_with("models/tiny_a")), "{report}");
    assert_eq!(report["config"]["request"]["width"], 64);
    assert!(number(&report["matmul"]["flops_per_second"]) > 0.0, "{}", report["matmul"]);
    for key in ["mp4_seconds", "parameter_bytes", "load_seconds", "compile_seconds", "peak_memory_bytes"] {
        assert!(number(&report[key]) > 0.0, "{key}: {}", report[key]);
    }
    let programs = report["programs"].as_object().expect("programs");
    assert_eq!(programs.keys().map(String::as_str).collect::<Vec<_>>(), PROGRAMS);
    for (name, p) in programs {
        let [min, median, p90] = ["min", "median", "p90"].map(|key| number(&p[key]));
        assert!(0.0 < min && min <= median && median <= p90, "{name}: {p}");
        assert_eq!((p["seconds"].as_array().map(Vec::len), &p["warmup"]), (Some(3), &1.into()));
        let outputs = p["outputs"].as_object().expect("outputs");
        assert!(!outputs.is_empty(), "{name}");
        for (output, checked) in outputs {
            assert_eq!((&checked["finite"], &checked["constant"]), (&true.into(), &false.into()), "{name} {output}");
            assert_eq!(checked["sha256"].as_str().map(str::len), Some(64));
        }
        if name == "end_to_end" {
            assert_parts_add_up(p);
            assert!(table.contains("on the device"), "{table}");
            continue;
        }
        let flops = number(&p["program"]["flops"]);
        assert!(flops > 1e4 && (number(&p["flops_per_second"]) / (flops / median) - 1.0).abs() < 1e-9, "{name}: {p}");
        assert!(number(&p["share_of_matmul"]) > 0.0, "{name}: {p}");
        for key in ["compile_seconds", "parameter_bytes", "predicted"] {
            assert!(number(&p["program"][key]) > 0.0, "{name} {key}");
        }
        assert!(p["program"]["memory"]["arguments"].as_i64() >= p["program"]["parameter_bytes"].as_i64(), "{p}");
    }
    assert_eq!((&programs["denoise_step"]["steps"], &programs["denoise_loop"]["steps"]), (&1.into(), &3.into()));
    assert_eq!(programs["denoise_step"]["program"], programs["denoise_loop"]["program"]);
    assert_eq!(programs["end_to_end"]["outputs"]["video"]["shape"], serde_json::json!([9, 96, 64, 3]));

    // What is timed is what is compiled ahead of time, and so what `generate` executes.
    let config =
        load(&CliOverrides { files: vec![support::tiny().into()], ..CliOverrides::default() }).expect("valid").config;
    let written = Programs::of(&config, None).expect("a model");
    let build = setup::build(&config, 1, "cpu", "").expect("a build");
    for kind in written.kinds() {
        let name = if kind.name() == "denoise" { "denoise_loop" } else { kind.name() };
        let hash = written.network(kind, &build).expect("builds").program.hash();
        assert_eq!(programs[name]["program"]["hash"], hash, "{name}");
    }
    assert_eq!(written.kinds().count(), PROGRAMS.len() - 2);
    let target = ["compile", "--target", "cpu:1", "--program", "audio-decoder", "--json", "-"];
    let out = ltx2(dir.path(), &[&target[..], &["-c", support::tiny()]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let figures: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    for key in ["hash", "flops"] {
        assert_eq!(figures[key], programs["audio_decoder"]["program"][key]);
    }

    // A part alone gives the results that it gave among the others.
    let out =
        bench(&["--programs", "vocoder", "--runs", "1", "--json", "-", "--baseline", "a.json", "--tolerance", "1e9"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let alone: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(alone["programs"].as_object().map(|p| p.len()), Some(1));
    assert_eq!(alone["programs"]["vocoder"]["outputs"], programs["vocoder"]["outputs"]);

    // A baseline that was faster.
    let mut doctored = report.clone();
    doctored["programs"]["vocoder"]["median"] = 1e-9.into();
    std::fs::write(dir.path().join("fast.json"), doctored.to_string()).expect("written");
    let out = bench(&["--programs", "vocoder,audio-decoder", "--baseline", "fast.json", "--tolerance", "1e6"]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.lines().any(|l| l.starts_with("vocoder is ") && l.contains("% slower")), "{said}");
    assert!(said.contains("error: 1 slower than fast.json") && !said.contains("audio_decoder is "), "{said}");

    std::fs::write(dir.path().join("empty.json"), "{}").expect("written");
    let out = bench(&["--programs", "vocoder", "--baseline", "empty.json"]);
    assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
    assert_eq!(bench(&["--baseline", "none.json"]).status.code(), Some(2));
}

/// Files of a model that is here are read, but for its weights.
#[needs(cpu)]
fn the_configuration_of_a_model_that_is_here_is_its_own() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = ltx2(dir.path(), &["init", "--preset", "nano", "--seed", "3", "nano"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    // Without weights it is a model still.
    std::fs::remove_file(dir.path().join("nano/transformer/diffusion_pytorch_model.safetensors")).expect("removed");
    let source =
        ltx2::weights::ModelSource::open(dir.path().join("nano").to_str().expect("UTF-8"), &Default::default());
    let origin = ltx2::pipeline::origin::Origin::Files(Arc::new(source.expect("a model")));
    let models = ltx2::pipeline::model::Model::random(origin, 5).expect("opens");
    assert!(models.statistics.video.mean.iter().all(|m| *m == 0.0));
    assert!(models.statistics.video.std.iter().all(|m| *m == 1.0));
    assert_eq!(models.tokenizer.vocab_size(), 356);
    assert_eq!(models.identity(&ltx2::config::Config::default()).expect("an identity")["weights"], "random");
}

/// Small programs on two virtual devices: each is timed, and the constants are drawn through the times.
#[needs(cpu)]
fn small_programs_are_timed_and_fitted() {
    let dir = tempfile::tempdir().expect("a folder");
    let (measured, fitted) = (dir.path().join("micro.json"), dir.path().join("fit.toml"));
    let path = |p: &Path| p.to_str().expect("UTF-8").to_string();
    let flags =
        ["bench", "--micro", "--platform", "cpu", "--mesh", "context=2", "--runs", "3", "--json", &path(&measured)];
    let out = ltx2(dir.path(), &flags);
    assert!(out.status.success(), "{}", text(&out.stderr));
    // On a busy machine the clock may not tell one apart; no compiler may have changed one.
    let unseen = text(&out.stderr).matches("less than the clock can tell").count();
    assert_eq!(text(&out.stderr).matches("left out").count(), unseen, "{}", text(&out.stderr));
    let found = json(&measured);
    let samples = found["samples"].as_array().expect("a list");
    let of = |what: &str| samples.iter().filter(|s| s["what"] == what).collect::<Vec<_>>();
    // A kernel, two matmuls, two arrays, a norm, and two sizes of five collectives.
    assert_eq!(samples.len() + unseen, 16, "{found}");
    assert!(unseen <= 4 || !full(), "{unseen} of 16 are not seen");
    assert!(!samples.is_empty() && samples.iter().all(|s| s["seconds"].as_f64().is_some_and(|t| t >= 0.0)));
    let gather = of("exchange").into_iter().find(|s| s["kind"] == "all-gather").expect("one");
    // Of 64 KiB a device has half; the CPU's compiler widens what travels to f32.
    assert_eq!((gather["devices"].as_u64(), gather["wire_bytes"].as_f64()), (Some(2), Some(65536.0)));
    let product = of("product")[0];
    assert_eq!(product["flops"].as_f64(), Some(2.0 * 128.0 * 128.0 * 256.0));

    // One kind alone, for a calibration that has the rest.
    let again = dir.path().join("again.json");
    let mine = path(&again);
    let only = |kinds: &str| ltx2(dir.path(), &[&flags[..8], &["--json", &mine, "--collectives", kinds]].concat());
    let out = only("all-gather");
    assert!(out.status.success(), "{}", text(&out.stderr));
    let found = json(&again);
    let samples = found["samples"].as_array().expect("a list");
    assert!(samples.len() <= 2 && samples.iter().all(|s| s["kind"] == "all-gather"), "{found}");
    assert_eq!(samples.len() + text(&out.stderr).matches("less than the clock can tell").count(), 2, "{found}");
    let out = only("gather");
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("one of all-gather, all-reduce"), "{}", text(&out.stderr));

    // No chip is of this device, and another's data sheet is not taken for it.
    let fit = |more: &[&str]| {
        let from = ["bench", "--micro", "--from", &path(&measured), "--fit", &path(&fitted)];
        ltx2(dir.path(), &[&from, more].concat())
    };
    for (more, want) in [(&[][..], "no chip file is known of the device 'cpu'"), (&["--chip", "h200"], "device_kinds")]
    {
        let out = fit(more);
        assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
        assert!(text(&out.stderr).contains(want) && text(&out.stderr).contains("'cpu'"), "{}", text(&out.stderr));
        assert!(!fitted.exists());
    }
    let sheet = ltx2::analysis::Chip::named("v5e").expect("a chip").file_text().expect("its file");
    let mine = dir.path().join("mine.toml");
    std::fs::write(&mine, sheet.replace("\"v5e\"", "\"mine\"").replace("TPU v5e", "cpu")).expect("written");
    let out = fit(&["--chip", &path(&mine)]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let chip = ltx2::analysis::Chip::read(&fitted).expect("a chip file");
    let constants = chip.calibration.expect("constants");
    assert!(constants.matmul.rate > 0.0, "{constants:?}");
    // Beside other tests a longer collective may take less time than a shorter one: then its kind has no line.
    let least = if full() { 4 } else { 2 };
    assert!(constants.collectives.len() >= least, "{constants:?}");
    assert_eq!(constants.source[0].devices, 2);
    assert_eq!(chip.name, "mine");
    // Onto the file itself; what it was a copy of is no part of the question then.
    assert_eq!(fit(&["--chip", &path(&mine), "--force"]).status.code(), Some(2));
    assert!(text(&fit(&[]).stderr).contains("exists; overwrite it with --force"));
    assert!(fit(&["--force"]).status.success());
    assert!(std::fs::read_to_string(&fitted).expect("text").contains("# bytes that a program may use"));

    let out = ltx2(dir.path(), &["bench", "--micro", "--from", "nowhere.json"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("--from nowhere.json: "), "{}", text(&out.stderr));
}

/// Requests with known tokens are timed on them: an image behind the video's own tokens, a span that is made anew, sound alone.
#[needs(cpu, full)]
fn requests_with_conditions_are_timed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    let pattern = |(f, y, x, c): (usize, usize, usize, usize)| ((f * 11 + y * 5 + x * 3 + c * 40) % 256) as u8;
    let frames = ndarray::Array4::from_shape_fn((9, 64, 64, 3), pattern);
    let frames = ltx2::media::Frames::new(frames).expect("frames");
    std::fs::create_dir(path("video")).expect("a folder");
    ltx2::media::write_png_frames(folder.path().join("video").as_path(), &frames).expect("written");
    let video = path("video");
    let size = ["--width", "64", "--height", "64", "--num-frames", "9"];
    let image = ["--pipeline", "image_to_video", "--image", "tests/fixtures/images/shapes.png", "8", "0.5"];
    let cases: [(&[&str], &[&str]); 3] = [
        (&image, &["latents.audio", "latents.video"]),
        (&["--video", &video, "--retake", "0.1", "0.2"], &["latents.audio", "latents.video"]),
        (&["--pipeline", "text_to_audio"], &["latents.audio"]),
    ];
    for (more, want) in cases {
        let own =
            ["bench", "-m", "tests/fixtures/models/tiny_a", "--platform", "cpu", "-p", "a", "--programs", "denoise"];
        let json = path("bench.json");
        let set = ["--set", "request.max_sequence_length=64", "--set", QUICK];
        // The other two have a preset with every term.
        let blocks: &[&str] = if more == image { &[] } else { &["--set", "guidance={stg_blocks: [1]}"] };
        let runs = ["--runs", "1", "--warmup", "1", "--steps", "2", "--json", &json, "--force"];
        let size = match more[0] {
            "--video" => &[][..],
            _ if more == image => &size[..],
            _ => &size[4..],
        };
        let done = support::ltx2().args([&own[..], &set, blocks, &runs, size, more].concat()).output().expect("runs");
        assert!(done.status.success(), "{more:?}: {}", String::from_utf8_lossy(&done.stderr));
        let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).expect("a report")).expect("JSON");
        let outputs = report["programs"]["denoise_loop"]["outputs"].as_object().expect("outputs");
        assert_eq!(outputs.keys().collect::<Vec<_>>(), want, "{more:?}");
    }
}
