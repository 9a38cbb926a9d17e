//! Every component compared with the reference on the CPU plugin: f32 within 1e-4 relative L2, bf16 within the
//! reference's own bf16 spread.

use std::collections::BTreeMap;

use crate::support::{Case, cases, cpu, full, lowering_of, needs, quick, relative_l2, run_case};
use ltx2::hlo::DType;
use ltx2::models::upsampler;
use ltx2::nn::{Build, RoundingPoints};
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pjrt::Client;
use ltx2::tensor::Tensor;

/// Maximum distance in f32.
const F32: f64 = 1e-4;
/// Maximum distance of a single bf16 run from the f32 reference, as a multiple of the root mean square distance of the
/// reference's own bf16 runs of the component's cases: correct implementations, or one on two machines, differ by their
/// roundings.
const SPREADS: f64 = 1.5;
/// The same for the root mean square over the cases, where roundings average out and errors do not.
const MEAN_SPREADS: f64 = 1.1;

fn build(dtype: DType, numerics: RoundingPoints) -> Build {
    Build { numerics, lowering: lowering_of("cpu"), ..Build::new(dtype) }
}

fn run(
    client: &Client,
    component: ProgramKind,
    case: &Case,
    inputs: BTreeMap<String, Tensor>,
    how: &Build,
) -> BTreeMap<String, Tensor> {
    run_case(client, component, case, inputs, quick(), how)
}

fn within(limit: f64, component: ProgramKind, cases: Vec<Case>, outputs: &[&str]) {
    let client = cpu(8);
    for case in cases {
        let got = run(&client, component, &case, case.inputs.clone(), &build(DType::F32, RoundingPoints::Default));
        for name in outputs {
            case.within(name, &got[*name], limit);
        }
    }
}

/// Returns the named cases of a component, which cover the options of the inputs; whole runs cover the models. In the full test
/// every case.
fn some(folder: &str, names: &[&str]) -> Vec<Case> {
    let mut all = cases(folder);
    let is_named = |case: &Case| names.iter().any(|name| case.name == format!("{folder}/{name}"));
    assert_eq!(all.iter().filter(|case| is_named(case)).count(), names.len(), "{folder}: {names:?}");
    all.retain(|case| full() || is_named(case));
    all
}

/// Returns the first case of each model; in the full test every case.
fn one_a_model(folder: &str) -> Vec<Case> {
    let mut all = cases(folder);
    if !full() {
        all.dedup_by(|later, first| later.model == first.model);
    }
    all
}

fn root_mean_square(all: &[f64]) -> f64 {
    (all.iter().map(|v| v * v).sum::<f64>() / all.len() as f64).sqrt()
}

/// Checks a case of one model with each of both rounding orders; the full test runs all cases with a known bf16
/// spread in both orders.
fn spread(component: ProgramKind, folder: &str, outputs: &[&str]) {
    let client = cpu(8);
    let of = |case: &Case, name: &str| case.number(&format!("bf16_spread.{name}"));
    let spread = |case: &Case| outputs.iter().all(|name| of(case, name).is_some());
    let mut cases: Vec<Case> = one_a_model(folder).into_iter().filter(spread).collect();
    cases.truncate(if full() { usize::MAX } else { 2 });
    assert!(!cases.is_empty(), "no case of {folder} has a spread");
    for (turn, numerics) in [RoundingPoints::Default, RoundingPoints::Official].into_iter().enumerate() {
        let chosen = |n: &usize| n % 2 == turn || full();
        let cases: Vec<&Case> = (0..cases.len()).filter(chosen).map(|n| &cases[n]).collect();
        let runs: Vec<_> = cases
            .iter()
            .map(|case| run(&client, component, case, case.inputs.clone(), &build(DType::BF16, numerics)))
            .collect();
        for name in outputs {
            let spreads: Vec<f64> = cases.iter().filter_map(|c| of(c, name)).collect();
            let distances: Vec<f64> = cases.iter().zip(&runs).map(|(c, got)| c.distance(name, &got[*name])).collect();
            let (spread, mean) = (root_mean_square(&spreads), root_mean_square(&distances));
            for ((case, distance), own) in cases.iter().zip(&distances).zip(&spreads) {
                eprintln!("{} {name} {numerics:?}: {distance:.4}, the reference {own:.4}", case.name);
                let spread = spread.max(*own);
                assert!(*distance <= SPREADS * spread, "{} {name} {numerics:?}: {distance} of {spread}", case.name);
            }
            eprintln!("{folder} {name} {numerics:?}: {mean:.4}, the reference {spread:.4}");
            assert!(mean <= MEAN_SPREADS * spread, "{folder} {name} {numerics:?}: {mean} of {spread}");
        }
    }
}

#[needs(cpu)]
fn f32_transformer_matches_reference() {
    // Batches, masks, coordinates, levels per token of either convention, perturbed streams, keyframes. `newer_layouts`
    // compares a model that computes text keys once, and `official_guidance` isolated streams.
    let names = [
        "interleaved_per_token",
        "perturbed_partial",
        "tiny_a_batch_masked",
        "tiny_a_coords",
        "tiny_b_per_token_masked",
        "tiny_v2_5_audio_bias",
        "tiny_v2_5_slots",
    ];
    within(F32, ProgramKind::Transformer, some("transformer", &names), &["video", "audio"]);
}

#[needs(cpu)]
fn bf16_transformer_error_is_within_reference_spread() {
    spread(ProgramKind::Transformer, "transformer", &["video", "audio"]);
}

#[needs(cpu)]
fn connectors_match_reference() {
    let names = ["interleaved_mixed", "tiny_b_right"];
    within(F32, ProgramKind::Connectors, some("connectors", &names), &["video", "audio"]);
}

#[needs(cpu)]
fn connectors_accept_projected_text() {
    let client = cpu(8);
    // Pipelines always pass projected text; the full test runs every case.
    for case in one_a_model("connectors").into_iter().filter(|case| full() || case.model.ends_with("tiny_2_3")) {
        let mut inputs = case.inputs.clone();
        inputs.remove("text_encoder_hidden_states");
        inputs.insert("prompt_embeds".into(), case.outputs["projected"].clone());
        let got = run(&client, ProgramKind::Connectors, &case, inputs, &build(DType::F32, RoundingPoints::Default));
        for name in ["video", "audio"] {
            assert!(case.distance(name, &got[name]) <= F32, "{} {name}", case.name);
        }
    }
}

#[needs(cpu)]
fn video_decoder_matches_reference() {
    // The decoders and encoders of `layouts`, a single frame, and timestep conditioning.
    let names = ["patch1", "timestep", "tiny_a_one_frame", "tiny_b_batch"];
    within(F32, ProgramKind::VideoDecoder, some("video-decoder", &names), &["video"]);
}

#[needs(cpu)]
fn video_encoder_matches_reference() {
    let names = ["patch1", "tiny_2_3_image"];
    within(F32, ProgramKind::VideoEncoder, some("video-encoder", &names), &["latents"]);
}

#[needs(cpu)]
fn audio_encoder_matches_reference() {
    let all = cases("audio-encoder");
    assert_eq!(all.len(), 7);
    // `given_video` compares results with the encoder of LTX-2.3, and the full test those of other widths.
    within(1e-5, ProgramKind::AudioEncoder, some("audio-encoder", &["plain", "width"]), &["latents"]);
}

#[needs(cpu)]
fn audio_decoder_matches_reference() {
    // `pipeline` compares the sound of the other two models.
    within(F32, ProgramKind::AudioDecoder, some("audio-decoder", &["plain", "width"]), &["mel"]);
}

#[needs(cpu)]
fn vocoder_matches_reference() {
    // As above.
    within(F32, ProgramKind::Vocoder, some("vocoder", &["bwe_odd", "odd"]), &["audio"]);
}

#[needs(cpu)]
fn upsampler_matches_reference() {
    // `pipeline_2_5` compares two passes with an upsampler like that of `plain`.
    let names = ["broken", "frames", "rational"];
    within(F32, ProgramKind::Upsampler, some("upsampler", &names), &["latents"]);
}

/// Opens the temporal upsampler from its separate folder.
#[needs(cpu)]
fn temporal_upsampler_matches_reference() {
    let mut all = cases("upsampler");
    all.retain(|case| case.model.ends_with("upsampler_temporal"));
    assert_eq!(all.len(), 1);
    within(1e-5, ProgramKind::TemporalUpsampler, all, &["latents"]);
}

#[needs(cpu)]
fn duration_head_matches_reference() {
    let all = cases("duration-head");
    assert_eq!(all.len(), 3);
    within(1e-5, ProgramKind::DurationHead, some("duration-head", &["duration_head_queries"]), &["seconds"]);
}

/// Returns the rows of valid tokens: values at padded positions are never read.
pub fn valid(t: &Tensor, mask: &Tensor) -> Tensor {
    let (mut values, mask) = (t.to_f32(), mask.to_f32());
    for (at, keep) in mask.indexed_iter() {
        if *keep == 0.0 {
            let mut row = values.index_axis_mut(ndarray::Axis(0), at[0]);
            row.index_axis_mut(ndarray::Axis(0), at[1]).fill(0.0);
        }
    }
    Tensor::F32(values)
}

fn text_encoder(dtype: DType, cases: Vec<Case>, limit: impl Fn(&Case, &str) -> f64) {
    let client = cpu(8);
    let mut stacks = 0;
    for mut case in cases {
        let mask = case.inputs["attention_mask"].clone();
        for (name, stack) in [("projected", false), ("prompt_embeds", true)] {
            let Some(want) = case.outputs.get(name).cloned() else { continue };
            // The projection depends on every hidden state; the stack shows which one is wrong.
            if stack && stacks > 0 && !full() {
                continue;
            }
            case.scalars = BTreeMap::from([("output_hidden_states".to_string(), stack.into())]);
            stacks += usize::from(stack);
            let s = build(dtype, RoundingPoints::Default);
            let got = run(&client, ProgramKind::TextEncoder, &case, case.inputs.clone(), &s);
            let distance = relative_l2(&valid(&got["prompt_embeds"], &mask), &valid(&want, &mask));
            eprintln!("{} {name} {dtype}: {distance:.1e}", case.name);
            assert!(distance <= limit(&case, name), "{} {name} {dtype}: {distance:e}", case.name);
        }
    }
    assert!(stacks > 0, "some case has the stack of hidden states");
}

#[needs(cpu)]
fn f32_text_encoder_matches_reference() {
    // Projected and stacked states, and a batch of the case of `layouts`.
    let names = ["tiny_2_3_short", "tiny_a_pair"];
    text_encoder(DType::F32, some("text-encoder", &names), |_, _| F32);
}

#[needs(cpu)]
fn bf16_text_encoder_error_is_within_reference_spread() {
    let stacked = |case: &Case| case.outputs.contains_key("prompt_embeds");
    // The first case with all hidden states; in the full test all of them.
    let stacked = cases("text-encoder").into_iter().filter(|case| full() || stacked(case)).enumerate();
    let chosen = stacked.filter(|(n, _)| full() || *n == 0).map(|(_, case)| case).collect();
    text_encoder(DType::BF16, chosen, |case, name| {
        SPREADS * case.number(&format!("bf16_spread.{name}")).expect("a spread")
    });
}

/// Allows an error of 2 %, which eight-bit mantissas cause after this many layers, or a multiple of the reference's own
/// bf16 error if that is larger.
#[needs(cpu)]
fn bf16_convolutional_networks_match_reference() {
    let client = cpu(8);
    let networks = [
        (ProgramKind::VideoDecoder, "video-decoder", "video"),
        (ProgramKind::VideoEncoder, "video-encoder", "latents"),
        (ProgramKind::AudioEncoder, "audio-encoder", "latents"),
        (ProgramKind::AudioDecoder, "audio-decoder", "mel"),
        (ProgramKind::Upsampler, "upsampler", "latents"),
    ];
    // Each network with one of the models, in turn; in the full test with all.
    for (turn, (component, folder, name)) in networks.into_iter().enumerate() {
        let cases = one_a_model(folder);
        for case in cases.iter().enumerate().filter(|(n, _)| *n == turn % cases.len() || full()).map(|(_, case)| case) {
            let got = run(&client, component, case, case.inputs.clone(), &build(DType::BF16, RoundingPoints::Default));
            let distance = case.distance(name, &got[name]);
            let limit = case.number(&format!("bf16_spread.{name}")).map_or(2e-2, |own| f64::max(2e-2, SPREADS * own));
            assert!(distance <= limit, "{} {name}: {distance:e}", case.name);
        }
    }
}

/// These filters are applied to upsampled latents between two stages. The reference is diffusers, because Lightricks'
/// packages have no such filters.
#[needs(nothing)]
fn latent_filters_match_diffusers() {
    let case = cases("filters").remove(0);
    let input = |name: &str| case.inputs[name].to_f32().into_dimensionality::<ndarray::Ix5>().expect("five axes");
    let (latents, reference) = (input("latents"), input("reference"));
    for name in case.outputs.keys() {
        let (filter, strength) = name.split_once('.').expect("a strength");
        let strength: f32 = strength.parse().expect("a number");
        let got = match filter {
            "adain" => upsampler::adain(latents.view(), reference.view(), strength),
            _ => upsampler::tone_map(latents.view(), strength),
        };
        let distance = case.distance(name, &Tensor::from(got));
        eprintln!("{name}: {distance:.1e}");
        assert!(distance <= 1e-6, "{name}: {distance:e}");
    }
    assert_eq!(case.outputs.len(), 4);
}
