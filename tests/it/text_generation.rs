//! Text generation by the text encoders' language models: compared with the reference, sharded, and sampled.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::layouts::build;
use crate::support::{Case, cases, cpu, lowering_of, needs, plain, quick};
use ltx2::hlo::DType;
use ltx2::nn::{Build, Lowering};
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::programs::component::run_component;
use ltx2::pipeline::programs::configs::ModelConfigs;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pjrt::Client;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ltx2::weights::{ModelSource, Overrides};
use serde_json::{Value, json};

/// Draws per sampling rule.
const DRAWS: usize = 1000;

/// A model on the devices, which generates texts with programs that are compiled once.
struct Writer {
    executor: Executor,
    configs: ModelConfigs,
    build: Build,
}

impl Writer {
    fn new(client: &Client, case: &Case, build: Build) -> Self {
        let model = case.model.to_str().expect("a path");
        let source = Arc::new(ModelSource::open(model, &Overrides::default()).expect("a model"));
        let executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
        Writer { executor, configs: ModelConfigs::from_source(&source), build }
    }

    /// Returns `tokens` and `lengths`.
    fn write(&mut self, inputs: &BTreeMap<String, Tensor>, scalars: &[(&str, Value)]) -> [Tensor; 2] {
        let scalars = scalars.iter().map(|(name, value)| ((*name).to_string(), value.clone())).collect();
        let (kind, inputs) = (ProgramKind::PromptEnhancer, inputs.clone());
        let results = run_component(kind, &self.configs, &mut self.executor, inputs, &scalars, &self.build);
        let mut results: BTreeMap<String, Tensor> = results.expect("runs").into_iter().collect();
        ["tokens", "lengths"].map(|name| results.remove(name).expect("a result"))
    }
}

fn named(component: &str, name: &str) -> Case {
    let wanted = format!("{component}/{name}");
    cases(component).into_iter().find(|case| case.name == wanted).unwrap_or_else(|| panic!("no case {wanted}"))
}

/// Compares the greedy texts of a case with the reference, without and with stop tokens. One of the two prompts is
/// longer than the window of the sliding-window layers, the other is padded.
fn assert_equals_reference(client: &Client, name: &str, build: Build) {
    let case = named("generation", name);
    let mut writer = Writer::new(client, &case, build);
    let same = ["limit", "no_repeat_ngram_size"].map(|key| (key, case.scalars.get(key).cloned().unwrap_or(json!(0))));
    // -1 is no token; the program is the same as with two stop tokens.
    let runs =
        [("tokens", "lengths", json!([-1, -1])), ("stopped", "stopped_lengths", case.scalars["stop_tokens"].clone())];
    for (tokens, lengths, stops) in runs {
        let got = writer.write(&case.inputs, &[&same[..], &[("stop_tokens", stops)]].concat());
        for (got, want) in got.iter().zip([tokens, lengths]) {
            assert_eq!(got.to_i64(), case.outputs[want].to_i64(), "{name} {want}");
        }
    }
}

#[needs(cpu)]
fn gemma_3_greedy_text_equals_reference() {
    assert_equals_reference(&cpu(8), "tiny_a", plain(DType::F32));
}

#[needs(cpu)]
fn gemma_4_greedy_text_equals_reference() {
    assert_equals_reference(&cpu(8), "gemma4_a", plain(DType::F32));
}

/// The layers are unrolled and the attention is that of CUDA programs. No sequence of three tokens occurs twice.
#[needs(cpu)]
fn unrolled_greedy_text_without_repetition_equals_reference() {
    let lowering = Lowering { mixed_precision_dot: false, ..lowering_of("cuda") };
    assert_equals_reference(&cpu(8), "tiny_b", Build { lowering, ..Build::new(DType::F32) });
}

/// With a single row, linear layers are sums, as on CUDA devices whose element type the kernels do not support.
#[needs(cpu)]
fn greedy_text_of_a_single_row_equals_reference() {
    let case = named("generation", "tiny_b");
    let lowering = Lowering { mixed_precision_dot: false, ..lowering_of("cuda") };
    let mut writer = Writer::new(&cpu(8), &case, Build { lowering, ..Build::new(DType::F32) });
    let scalars =
        ["limit", "no_repeat_ngram_size"].map(|key| (key, case.scalars.get(key).cloned().unwrap_or(json!(0))));
    let rows = case.outputs["lengths"].to_i64().len();
    assert_eq!(rows, 2);
    for row in 0..rows {
        let own = |tensor: &Tensor| {
            let row = tensor.to_i64().index_axis(ndarray::Axis(0), row).iter().map(|id| *id as i32).collect();
            let row: Vec<i32> = row;
            Tensor::from(ndarray::Array2::from_shape_vec((1, row.len()), row).expect("a row"))
        };
        let inputs = case.inputs.iter().map(|(name, tensor)| (name.clone(), own(tensor))).collect();
        let [tokens, lengths] = writer.write(&inputs, &scalars);
        assert_eq!(tokens.to_i64(), own(&case.outputs["tokens"]).to_i64(), "row {row}");
        assert_eq!(lengths.to_i64().first(), case.outputs["lengths"].to_i64().iter().nth(row), "row {row}");
    }
}

#[needs(cpu)]
fn sharded_text_equals_reference() {
    for (layout, mesh) in [("tensor", "tensor=4"), ("fsdp-ulysses", "fsdp=2,context=2")] {
        assert_equals_reference(&cpu(8), "gemma4_a", build(layout, mesh, 4));
    }
}

/// Draws one token for each of [`DRAWS`] copies of a prompt. Pearson's statistic of the counts has the mean `n` and the
/// variance `2n` for `n + 1` possible tokens; it must not exceed its mean by more than four standard deviations.
#[needs(cpu)]
fn sampled_tokens_have_the_reference_distribution() {
    let case = named("sampling", "gemma4_b");
    let copies = |tensor: &Tensor| {
        let row = tensor.to_i64();
        let (width, all) = (row.shape()[1], row.iter().map(|id| *id as i32));
        let all: Vec<i32> = all.cycle().take(DRAWS * width).collect();
        Tensor::from(ndarray::Array2::from_shape_vec((DRAWS, width), all).expect("rows"))
    };
    let inputs = case.inputs.iter().map(|(name, tensor)| (name.clone(), copies(tensor))).collect();
    // With batch invariance, the program would have separate dots for each copy.
    let lowering = Lowering { batch_invariant: false, ..lowering_of("cpu") };
    let mut writer = Writer::new(&cpu(8), &case, Build { lowering, ..Build::new(DType::F32) });
    let expected = case.outputs["probabilities"].to_f32();
    let rules = case.scalars["rules"].as_array().expect("a list");
    assert_eq!(rules.len(), 4);
    for (rule, expected) in rules.iter().zip(expected.outer_iter()) {
        let scalar = |index: usize| rule[index].clone();
        let sampling = [("temperature", scalar(0)), ("top_k", scalar(1)), ("top_p", scalar(2)), ("seed", json!(5))];
        let [tokens, lengths] = writer.write(&inputs, &[&sampling[..], &[("limit", json!(1))]].concat());
        assert!(lengths.to_i64().iter().all(|length| *length == 1));
        let mut counts = vec![0usize; expected.len()];
        tokens.to_i64().iter().for_each(|id| counts[*id as usize] += 1);
        let impossible = counts.iter().zip(&expected).any(|(count, p)| *count > 0 && *p == 0.0);
        assert!(!impossible, "{rule}: a token that is never drawn: {counts:?}");
        let part = |(count, p): (&usize, &f32)| {
            let mean = f64::from(*p) * DRAWS as f64;
            (*count as f64 - mean).powi(2) / mean
        };
        let possible = counts.iter().zip(&expected).filter(|(_, p)| **p > 0.0);
        let (statistic, freedom) = (possible.clone().map(part).sum::<f64>(), possible.count() as f64 - 1.0);
        eprintln!("{rule}: {statistic:.1}, {freedom} degrees of freedom");
        assert!(statistic <= freedom + 4.0 * (2.0 * freedom).sqrt(), "{rule}: {statistic} of {freedom}");
    }
}
