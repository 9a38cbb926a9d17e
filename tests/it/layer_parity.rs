//! Parts for bisecting a wrong result: tables, adaLN, one block, guidance, roundings, token ids.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::support::{Case, cases, cpu, full, needs, quick, relative_l2};
use ltx2::av::Av;
use ltx2::hlo::{Builder, DType, ProgramOutput, Type, Value};
use ltx2::models::Network;
use ltx2::models::tokenizer::{GEMMA, Tokenizer};
use ltx2::models::transformer::{
    BlockInputs, Isolation, LayerContext, StreamInputs, StreamModulation, TransformerConfig, adaln, block,
};
use ltx2::nn::rope::{grid, table};
use ltx2::nn::{Axis, Build, Heads, Params, Rope};
use ltx2::pipeline::programs::executor::{Executor, Inputs};
use ltx2::pjrt::Client;
use ltx2::runtime::{Engine, Outputs};
use ltx2::sampling::guidance::{Branch, MaskedStatistics, RescaleExtent, StreamGuidance, combine};
use ltx2::sampling::guiders::GuiderKind;
use ltx2::tensor::Tensor;
use ltx2::weights::{Component, ModelSource, Overrides};
use ndarray::{Array1, Array3, Array4, ArrayD, Ix4, s};

#[needs(nothing)]
fn rope_tables_match_reference_within_1e_6() {
    let mut checked = 0;
    for case in cases("rope") {
        let number = |key: &str, default: f64| case.scalars.get(key).and_then(|v| v.as_f64()).unwrap_or(default);
        let text = |key: &str| case.scalars[key].as_str().expect("text");
        let (dim, count) = (number("dim", 0.0) as usize, number("num_attention_heads", 32.0) as usize);
        let heads = Heads { count, dim: dim / count };
        let coords = case.inputs["coords"].to_f32().into_dimensionality::<Ix4>().expect("four dimensions");
        let frames = number("base_num_frames", 20.0) as f32;
        let cross = case.scalars["cross"].as_bool().expect("a switch");
        let positions = match text("modality") == "video" && !cross {
            true => grid(
                coords.view(),
                &[frames, number("base_height", 2048.0) as f32, number("base_width", 2048.0) as f32],
                DType::F32,
            ),
            false => grid(coords.slice(s![.., 0..1, .., ..]), &[frames], DType::F32),
        };
        let double = case.scalars.get("double_precision").and_then(serde_json::Value::as_bool).unwrap_or(true);
        let ours = table(positions.view(), heads, number("theta", 10000.0), double);
        for (name, got) in [("cos", &ours.cos), ("sin", &ours.sin)] {
            let got = as_reference(got, text("rope_type"));
            let want = case.outputs[name].to_f32();
            assert_eq!(got.shape(), want.shape(), "{} {name}", case.name);
            let limit = 1e-6;
            let far = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).find(|d| d.is_nan() || *d > limit);
            assert_eq!(far, None, "{} {name}", case.name);
            checked += 1;
        }
    }
    assert!(checked >= 20, "{checked} tables");
}

/// Converts our pairs `[b, t, heads, half]` to the reference's layout.
fn as_reference(pairs: &Array4<f32>, kind: &str) -> ArrayD<f32> {
    if kind == "split" {
        return pairs.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned().into_dyn();
    }
    let (b, t, h, d) = pairs.dim();
    ArrayD::from_shape_fn(vec![b, t, 2 * h * d], |i| pairs[[i[0], i[1], i[2] / 2 / d, i[2] / 2 % d]])
}

struct Tiny {
    executor: Executor,
    config: TransformerConfig,
}

fn tiny(client: &Client, case: &Case) -> Tiny {
    let source = ModelSource::open(case.model.to_str().expect("a path"), &Overrides::default()).expect("a model");
    let source = Arc::new(source);
    let config = source.config(Component::Transformer).expect("a configuration");
    let executor = Executor::new(Engine::new(client.clone(), quick()), source);
    Tiny { executor, config: TransformerConfig::from_json(&config).expect("valid") }
}

fn run(executor: &mut Executor, network: &Network, case: &Case) -> Outputs {
    let program = executor.prepare("part", network).expect("compiles");
    let given = case.inputs.iter().map(|(n, t)| (n.clone(), t.clone()));
    let inputs = executor.give_all(&program, Inputs::default(), given).expect("uploads");
    executor.run(&program, &inputs).expect("runs")
}

/// Returns the cases of a layer; in `make test` that of LTX-2.3. `parity` compares whole transformers of each model.
fn layer_cases(layer: &str) -> Vec<Case> {
    let chosen: Vec<Case> = cases(layer).into_iter().filter(|c| full() || c.model.ends_with("tiny_2_3")).collect();
    assert!(!chosen.is_empty(), "{layer}");
    chosen
}

fn whole(p: &Params, name: &str, x: &Value) -> (ProgramOutput, Value) {
    p.output(name, x, &vec![Axis::Replicated; x.rank()], x.dims())
}

fn declare(p: &Params, case: &Case, name: &str) -> Value {
    p.builder().argument(name, Type::new(DType::F32, case.inputs[name].shape().to_vec()))
}

#[needs(cpu)]
fn adaln_matches_reference() {
    let client = cpu(1);
    for case in layer_cases("adaln") {
        let mut tiny = tiny(&client, &case);
        let p = Params::new("adaln", "transformer", &Build::new(DType::F32));
        let timestep = declare(&p, &case, "timestep").unsqueeze(1);
        let (video, audio) = (tiny.config.video(), tiny.config.audio());
        let modules = [
            ("time_embed", video.modulation_rows(), video.width()),
            ("audio_time_embed", audio.modulation_rows(), audio.width()),
            ("av_cross_attn_audio_scale_shift", 4, audio.width()),
            ("av_cross_attn_video_a2v_gate", 1, video.width()),
        ];
        let mut results = Vec::new();
        for (name, rows, width) in modules {
            let (all, embedded) = adaln(&p.pp(name), &timestep, rows, width);
            let n = all.dim(0);
            results.push((name.to_string(), all.reshape(vec![n, rows * width])));
            results.push((format!("{name}.embedded"), embedded.reshape(vec![n, width])));
        }
        let network = Network::finish(&p, results.iter().map(|(n, v)| whole(&p, n, v)).collect()).expect("builds");
        let outputs = run(&mut tiny.executor, &network, &case);
        for (name, _) in &results {
            let distance = case.distance(name, &outputs.tensor(name).expect("a result"));
            assert!(distance <= 1e-5, "{} {name}: {distance:e}", case.name);
        }
    }
}

#[needs(cpu)]
fn transformer_block_matches_reference() {
    let client = cpu(1);
    for case in layer_cases("block") {
        let mut tiny = tiny(&client, &case);
        let c = &tiny.config;
        let p = Params::new("block", "transformer", &Build::new(DType::F32));
        let modulation = |main: &str, cross: &str, gate: &str, prompt: &str, width: usize| {
            let rows = |name: &str| {
                let t = declare(&p, &case, name);
                t.reshape(vec![t.dim(0), t.dim(1), t.dim(2) / width, width])
            };
            let prompt = case.inputs.contains_key(prompt).then(|| rows(prompt));
            let (main, cross, gate) = (rows(main), rows(cross), rows(gate));
            // A block does not use the output layer's part.
            StreamModulation { embedded: gate.clone(), ada_params: main, cross, gate, prompt }
        };
        // The reference's split tables are [b, heads, t, half].
        let rope = |name: &str| {
            let part = |what: &str| declare(&p, &case, &format!("{name}_rotary_emb.{what}")).transpose(&[0, 2, 1, 3]);
            Rope { cos: part("cos"), sin: part("sin") }
        };
        let [video, audio] = [c.video().width(), c.audio().width()];
        let streams = Av {
            video: StreamInputs {
                modulation: modulation("temb", "temb_ca_scale_shift", "temb_ca_gate", "temb_prompt", video),
                noise_level_index: None,
                rope: rope("video"),
                cross_rope: rope("ca_video"),
                text_mask: None,
                self_mask: None,
                padding_mask: None,
            },
            audio: StreamInputs {
                modulation: modulation(
                    "temb_audio",
                    "temb_ca_audio_scale_shift",
                    "temb_ca_audio_gate",
                    "temb_prompt_audio",
                    audio,
                ),
                noise_level_index: None,
                rope: rope("audio"),
                cross_rope: rope("ca_audio"),
                text_mask: None,
                self_mask: None,
                padding_mask: None,
            },
        };
        let hidden = Av { video: "hidden_states", audio: "audio_hidden_states" }.map(|n| declare(&p, &case, n));
        let context = Av { video: "encoder_hidden_states", audio: "audio_encoder_hidden_states" }
            .map(|n| LayerContext::Projected(declare(&p, &case, n)));
        let number = case.scalars["block"].as_u64().expect("a number");
        let at = p.pp("transformer_blocks").pp(number);
        let isolation = &Isolation::None;
        let (streams, context) = (streams.as_ref().map(Some), context.as_ref().map(Some));
        let (stg_mask, updated) = (Av::default(), Av::both(true));
        let inputs = BlockInputs { streams, context, stg_mask, isolation, updated };
        let Av { video: v, audio: a } = block(&at, c, hidden.map(Some), &inputs).map(|x| x.expect("a stream"));
        let network = Network::finish(&p, vec![whole(&p, "video", &v), whole(&p, "audio", &a)]).expect("builds");
        let outputs = run(&mut tiny.executor, &network, &case);
        for name in ["video", "audio"] {
            let distance = case.distance(name, &outputs.tensor(name).expect("a result"));
            assert!(distance <= 1e-5, "{} {name}: {distance:e}", case.name);
        }
    }
}

#[needs(cpu)]
fn guidance_and_euler_step_match_reference() {
    let client = cpu(1);
    let engine = Engine::new(client, quick());
    let all = cases("guidance");
    let p = Params::new("guidance", "none", &Build::new(DType::F32));
    let mut results = Vec::new();
    for case in &all {
        let input = |name: &str| {
            let ty = Type::new(DType::F32, case.inputs[name].shape().to_vec());
            p.builder().argument(&format!("{} {name}", case.name), ty)
        };
        let number = |key: &str| case.scalars[key].as_f64().expect("a number") as f32;
        let scales = [number("cfg"), number("stg"), number("modality"), number("rescale")];
        let known = [
            (Branch::Conditional, "cond", true),
            (Branch::Negative, "uncond", scales[0] != 1.0),
            (Branch::Perturbed, "perturbed", scales[1] != 0.0),
            (Branch::Isolated, "isolated", scales[2] != 1.0),
        ];
        let used: Vec<_> = known.into_iter().filter(|(.., needed)| *needed).collect();
        let branches: Vec<Branch> = used.iter().map(|(b, ..)| *b).collect();
        let (x, sigma, next) = (input("latents"), input("sigma"), input("sigma_next"));
        // The fixture contains velocities; guidance operates on clean predictions.
        let predictions: Vec<Value> = used.iter().map(|(_, name, _)| &x - input(name) * &sigma).collect();
        let row = p.builder().constant(&[scales.len()], &scales);
        let dims = [x.dim(0), x.dim(1), x.dim(2)];
        let statistics = MaskedStatistics::new(p.builder(), &x, dims);
        let (guider, rescale) = (GuiderKind::Cfg, RescaleExtent::PerSample);
        let guidance = StreamGuidance { branches: &branches, guider, rescale, statistics: &statistics };
        let (clean, _) = combine(&guidance, &predictions, &row, None);
        let velocity = (&x - &clean) / &sigma;
        let stepped = &x + &velocity * (&next - &sigma);
        for (name, y) in [("x0", clean), ("velocity", velocity), ("latents", stepped)] {
            results.push((format!("{} {name}", case.name), y));
        }
    }
    // One program for all cases.
    let named: Vec<(&str, &Value)> = results.iter().map(|(name, y)| (name.as_str(), y)).collect();
    let executable = engine.compile("guidance", &p.builder().finish(&named).expect("builds")).expect("compiles");
    let of = |name: &str| -> (&Case, String) {
        let (case, tensor) = name.split_once(' ').expect("a case and a tensor");
        (all.iter().find(|c| c.name == case).expect("the case"), tensor.into())
    };
    let upload = |name: &str| {
        let (case, tensor) = of(name);
        engine.upload(&executable, name, &case.inputs[&tensor]).expect("uploads")
    };
    let given: BTreeMap<&str, _> = executable.arguments().iter().map(|a| (a.name.as_str(), upload(&a.name))).collect();
    let outputs = engine.run(&executable, |name| given.get(name)).expect("runs");
    for (name, _) in &results {
        let (case, tensor) = of(name);
        let distance = relative_l2(&outputs.tensor(name).expect("a result"), &case.outputs[&tensor]);
        assert!(distance <= 1e-6, "{name}: {distance:e}");
    }
}

/// The rescale statistics exclude the padding of the batch and of the tokens.
#[needs(cpu)]
fn padding_is_excluded_from_guidance_statistics() {
    let engine = Engine::new(cpu(1), quick());
    let content = [2, 5, 3];
    let wave = |(i, j, k): (usize, usize, usize)| ((i * 31 + j * 7 + k * 3) as f32 * 0.9).sin() + 0.3 * k as f32;
    let other = |at: (usize, usize, usize)| wave((at.0 + 5, at.1 + 2, at.2)) * 1.7;
    let scopes = [("sample", RescaleExtent::PerSample), ("batch", RescaleExtent::Batch)];
    let guided = |dims: [usize; 3]| {
        let b = Builder::new("guidance");
        let predictions = ["c", "u"].map(|name| b.argument(name, Type::new(DType::F32, dims)));
        let scales = b.constant(&[4], &[3.0f32, 0.0, 1.0, 0.7]);
        let statistics = MaskedStatistics::new(&b, &predictions[0], content);
        let branches = [Branch::Conditional, Branch::Negative];
        let y = scopes.map(|(name, rescale)| {
            let guidance =
                StreamGuidance { branches: &branches, guider: GuiderKind::Cfg, rescale, statistics: &statistics };
            (name, combine(&guidance, &predictions, &scales, None).0)
        });
        let program = b.finish(&y.each_ref().map(|(name, y)| (*name, y))).expect("builds");
        let executable = engine.compile("guidance", &program).expect("compiles");
        let upload = |name: &str, of: &dyn Fn((usize, usize, usize)) -> f32| {
            engine.upload(&executable, name, &Tensor::from(Array3::from_shape_fn(dims, of))).expect("uploads")
        };
        let given = [("c", upload("c", &wave)), ("u", upload("u", &other))];
        let find = |name: &str| given.iter().find(|(n, _)| *n == name).map(|(_, b)| b);
        let outputs = engine.run(&executable, find).expect("runs");
        scopes.map(|(name, _)| outputs.tensor(name).expect("a result").to_f32())
    };
    let (whole, filled) = (guided(content), guided([3, 8, 3]));
    for ((whole, filled), (scope, _)) in whole.into_iter().zip(filled).zip(scopes) {
        let part = filled.slice(s![..2, ..5, ..]).into_dyn().to_owned();
        let distance = relative_l2(&Tensor::from(part), &Tensor::from(whole));
        assert!(distance <= 1e-6, "{scope}: {distance:e}");
    }
}

/// Converting to a narrower type and back is a rounding that the compiler must keep. Runs in a child process with XLA's
/// newer emitters, the default for users; the older emitters that this process uses never remove a rounding.
#[needs(cpu)]
fn explicit_rounding_survives_compilation() {
    let mut child = std::process::Command::new(std::env::current_exe().expect("this file"));
    child
        .args(["--exact", "layer_parity::newer_emitters_keep_explicit_rounding"])
        .env("XLA_FLAGS", "")
        .env("LTX2_TEST_MEMBER", "rounds");
    let out = child.output().expect("starts");
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&out.stderr));
}

#[needs(member)]
fn newer_emitters_keep_explicit_rounding() {
    let engine = Engine::new(cpu(1), quick());
    let values = Array1::from_shape_fn(64, |i| (i as f32 * 0.7).sin() + 1.0 / 3.0);
    let b = Builder::new("rounding");
    let x = b.argument("x", Type::new(DType::F32, [64]));
    let y = (&x * 2.0).to(DType::BF16).to(DType::F32) * 0.5;
    let executable = engine.compile("rounding", &b.finish(&[("y", &y)]).expect("builds")).expect("compiles");
    let given = engine.upload(&executable, "x", &Tensor::from(values.clone())).expect("uploads");
    let got = engine.run(&executable, |_| Some(&given)).expect("runs").tensor("y").expect("a result").to_f32();
    assert_eq!(got, values.mapv(|v| half::bf16::from_f32(v).to_f32()).into_dyn());
    assert_ne!(got, values.into_dyn());
}

#[needs(nothing)]
fn token_ids_match_transformers() {
    for case in cases("tokenizer") {
        let tokenizer = Tokenizer::open(&case.model.join("tokenizer"), &GEMMA).expect("a tokenizer");
        let length = case.scalars["max_sequence_length"].as_u64().expect("a number") as usize;
        let prompts = case.scalars["prompts"].as_array().expect("prompts");
        let (ids, mask) = (case.outputs["input_ids"].to_i64(), case.outputs["attention_mask"].to_i64());
        for (row, prompt) in prompts.iter().enumerate() {
            let got = tokenizer.encode(prompt.as_str().expect("text"), length).expect("encodes");
            let row_of =
                |a: &ArrayD<i64>| a.index_axis(ndarray::Axis(0), row).iter().map(|v| *v as i32).collect::<Vec<_>>();
            assert_eq!(got.ids, row_of(&ids), "{prompt}");
            assert_eq!(got.mask, row_of(&mask), "{prompt}");
        }
    }
}
