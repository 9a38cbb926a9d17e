//! Text generation by the text encoders' language models: compared with the reference, sharded, and sampled.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::layouts::build;
use crate::support::{Case, cases, cpu, full, lowering_of, needs, plain, quick};
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
    let layouts = [("tensor", "tensor=4"), ("fsdp-ulysses", "fsdp=2,context=2")];
    for (layout, mesh) in layouts.into_iter().take(if full() { 2 } else { 1 }) {
        assert_equals_reference(&cpu(8), "gemma4_a", build(layout, mesh, 4));
    }
}

/// Repeats a row of ids [`DRAWS`] times.
fn copies(row: &[i32]) -> Tensor {
    let all = row.iter().copied().cycle().take(DRAWS * row.len()).collect();
    Tensor::from(ndarray::Array2::from_shape_vec((DRAWS, row.len()), all).expect("rows"))
}

/// Counts ids below `vocabulary`.
fn counts(ids: impl Iterator<Item = i64>, vocabulary: usize) -> Vec<usize> {
    let mut counts = vec![0; vocabulary];
    ids.for_each(|id| counts[id as usize] += 1);
    counts
}

/// Checks a statistic of Pearson's test, which has the mean `freedom` and the variance `2 freedom`: it must not exceed its
/// mean by more than four standard deviations.
fn assert_plausible(statistic: f64, freedom: f64, what: &str) {
    eprintln!("{what}: {statistic:.1}, {freedom} degrees of freedom");
    assert!(statistic <= freedom + 4.0 * (2.0 * freedom).sqrt(), "{what}: {statistic} of {freedom}");
}

/// Draws two tokens for each of [`DRAWS`] copies of a prompt. The first ones have the probabilities of the reference. The
/// second ones after the most frequent first token are distributed like the first ones of the prompt that ends with this
/// token, which shows that each token has its own random number.
#[needs(cpu)]
fn sampled_tokens_have_the_reference_distribution() {
    let case = named("sampling", "gemma4_b");
    let row = |name: &str| case.inputs[name].to_i64().iter().map(|id| *id as i32).collect::<Vec<i32>>();
    let (ids, mask) = (row("input_ids"), row("attention_mask"));
    let inputs = |ids: &[i32], mask: &[i32]| {
        BTreeMap::from([("input_ids".to_string(), copies(ids)), ("attention_mask".to_string(), copies(mask))])
    };
    // With batch invariance, the program would have separate dots for each copy.
    let lowering = Lowering { batch_invariant: false, ..lowering_of("cpu") };
    let mut writer = Writer::new(&cpu(8), &case, Build { lowering, ..Build::new(DType::F32) });
    let expected = case.outputs["probabilities"].to_f32();
    let rules = case.scalars["rules"].as_array().expect("a list");
    assert_eq!(rules.len(), 4);
    for (index, (rule, expected)) in rules.iter().zip(expected.outer_iter()).enumerate() {
        let scalar = |index: usize| rule[index].clone();
        let sampling = [("temperature", scalar(0)), ("top_k", scalar(1)), ("top_p", scalar(2)), ("limit", json!(2))];
        let mut write = |ids: &[i32], mask: &[i32], seed: u64| {
            let [tokens, lengths] =
                writer.write(&inputs(ids, mask), &[&sampling[..], &[("seed", json!(seed))]].concat());
            assert!(lengths.to_i64().iter().all(|length| *length == 2));
            tokens.to_i64().into_dimensionality::<ndarray::Ix2>().expect("rows")
        };
        let tokens = write(&ids, &mask, 5);
        let first = counts(tokens.column(0).iter().copied(), expected.len());
        let impossible = first.iter().zip(&expected).any(|(count, p)| *count > 0 && *p == 0.0);
        assert!(!impossible, "{rule}: a token that is never drawn: {first:?}");
        let part = |(count, p): (&usize, &f32)| {
            let mean = f64::from(*p) * DRAWS as f64;
            (*count as f64 - mean).powi(2) / mean
        };
        let possible = first.iter().zip(&expected).filter(|(_, p)| **p > 0.0);
        let (statistic, freedom) = (possible.clone().map(part).sum::<f64>(), possible.count() as f64 - 1.0);
        assert_plausible(statistic, freedom, &rule.to_string());
        if index != 1 {
            continue;
        }
        // The prompt has padding, so that it fits with one more token.
        assert_eq!(mask[..2], [0, 0]);
        let frequent = (0..first.len()).max_by_key(|id| first[*id]).expect("a token");
        let after = tokens.outer_iter().filter(|row| row[0] == frequent as i64).map(|row| row[1]);
        let after = counts(after, expected.len());
        let longer = [&ids[1..], &[frequent as i32]].concat();
        let alone = write(&longer, &[&mask[1..], &[1]].concat(), 50_000);
        let alone = counts(alone.column(0).iter().copied(), expected.len());
        // The statistic of two samples.
        let ratio = (first[frequent] as f64 / DRAWS as f64).sqrt();
        let seen = || after.iter().zip(&alone).filter(|(a, b)| **a + **b > 0);
        let part = |(a, b): (&usize, &usize)| (*a as f64 / ratio - *b as f64 * ratio).powi(2) / (*a + *b) as f64;
        assert_plausible(seen().map(part).sum(), seen().count() as f64 - 1.0, "second tokens");
    }
}
