//! LTX-2.3 and 2.5 on every shipped layout give one device's results: gates, all four guidance branches, two passes,
//! conditioning frames (the first frame and appended ones), and generated keyframes, which are marked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use ltx2::av::Av;
use ltx2::hlo::DType;
use ltx2::models::transformer::CrossModalTimestep;
use ltx2::models::upsampler::Upsampling;
use ltx2::nn::Build;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::plan::origin::{Origin, Weights};
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pipeline::runner::Runner;
use ltx2::pjrt::Client;
use ltx2::request::{Condition, Content, Placement, PositionSpan, RefinePass, Request};
use ltx2::runtime::Engine;
use ltx2::sampling::Euler;
use ltx2::tensor::Tensor;
use ltx2::weights::{ModelSource, Overrides};

use crate::layouts::{build, layouts_on_meshes, limit};
use crate::support::passes::Pass;
use crate::support::{
    Case, cases, cpu, dumped, dumping, full, generate, needs, open, quick, relative_l2, request, run_case,
};

/// A model and its guided request.
struct Subject {
    model: &'static str,
    case: [&'static str; 2],
    /// Generated keyframes, which only LTX-2.5 has.
    slots: &'static [usize],
    /// Layouts in `make test`.
    layouts: &'static [&'static str],
}

const SUBJECTS: [Subject; 2] = [
    Subject {
        model: "tests/fixtures/models/tiny_2_3",
        case: ["pipeline", "tiny_2_3_guided"],
        slots: &[],
        layouts: &["tensor-sequence"],
    },
    Subject {
        model: "tests/fixtures/models/tiny_2_5",
        case: ["pipeline_2_5", "guided"],
        slots: &[4],
        layouts: &["cfg-ulysses"],
    },
];

/// A layout on a mesh: name, maximum distance, and the layout itself.
struct Placed {
    name: String,
    limit: f64,
    build: Build,
}

/// Returns every shipped layout, and `hybrid` with the other communication between its groups.
fn placed() -> Vec<Placed> {
    let shipped = std::fs::read_dir("shardings").expect("a folder").map(|entry| entry.expect("an entry").path());
    let stem = |path: &Path| path.file_stem().expect("a name").to_string_lossy().into_owned();
    let shipped: BTreeSet<String> = shipped.map(|path| stem(&path)).filter(|name| name != "replicated").collect();
    let here: BTreeSet<String> = layouts_on_meshes().iter().map(|(name, _)| (*name).to_string()).collect();
    assert_eq!(here, shipped, "layouts that no test runs");

    let of = |name: &str, layout: &str, mesh: &str, limit: f64| Placed {
        name: format!("{name} {mesh}"),
        limit,
        build: build(layout, mesh, 8),
    };
    let mut all: Vec<Placed> =
        layouts_on_meshes().into_iter().map(|(name, mesh)| of(name, name, mesh, limit(name))).collect();
    let ring = std::fs::read_to_string("shardings/hybrid.yml").expect("a layout");
    let gathering = ring.replace("outer: ring", "outer: gather_kv");
    assert_ne!(ring, gathering, "hybrid's groups pass keys around a ring");
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("hybrid-gather.yml");
    std::fs::write(&file, gathering).expect("writes");
    all.push(of("hybrid-gather", file.to_str().expect("UTF-8"), "context=8", 1e-5));
    all
}

fn case(component: &str, name: &str) -> Case {
    cases(component).into_iter().find(|c| c.name.ends_with(&format!("/{name}"))).expect("a case")
}

/// Returns a request with two passes, the first one with all four branches. Sizes do not divide evenly: 18 and 96 video
/// tokens including appended ones (LTX-2.5: 24 and 96), and 9 audio tokens.
fn requested(subject: &Subject, model: &OpenModel) -> Request {
    let image = |placement: Placement, strength: f32| Condition {
        content: Content::Image { path: "tests/fixtures/images/shapes.png".into(), crf: 0 },
        placement,
        strength,
    };
    let mut video =
        vec![image(Placement::First, 0.75), image(Placement::Appended { frame: 8, span: PositionSpan::Frame }, 1.0)];
    video.extend(subject.slots.iter().map(|frame| Condition::generated(*frame)));
    let [folder, name] = subject.case;
    let refine = RefinePass {
        upsample: vec![Upsampling::SpatialX2],
        sigmas: vec![0.909375, 0.421875, 0.0],
        sampler: Euler.into(),
        cache: None,
        keeps_audio: true,
        adain: 0.0,
        tone_map: 0.0,
        tiles: None,
    };
    Request {
        width: 192,
        height: 128,
        conditions: Av { video, audio: Vec::new() },
        refine: Some(refine),
        cross: CrossModalTimestep::GateOnly,
        ..request(&case(folder, name), model)
    }
}

/// Maximum distance of a pass, caused by another order of summation; smaller than that of complete requests.
const LIMIT: f64 = 1e-5;

type Prepared = BTreeMap<String, Tensor>;

/// Returns the first or the second pass of the request.
fn pass_of(request: &Request, second: bool) -> Request {
    let (first, refine) = request.passes();
    if second { refine.expect("two passes") } else { first }
}

/// Returns the latents of both streams of a pass and its prepared inputs, which are computed unless given.
fn latents(
    subject: &Subject,
    client: &Client,
    second: bool,
    build: &Build,
    prepared: Option<&Prepared>,
) -> (Av<Tensor>, Prepared) {
    latents_of(subject.model, subject, client, second, build, prepared)
}

/// Returns [`latents`] of a model with other files.
fn latents_of(
    model: &str,
    subject: &Subject,
    client: &Client,
    second: bool,
    build: &Build,
    prepared: Option<&Prepared>,
) -> (Av<Tensor>, Prepared) {
    let mut runner = open(client, model, build.clone());
    let source = ModelSource::open(model, &Overrides::default()).expect("a model");
    let request = pass_of(&requested(subject, &runner.model), second);
    let pass = Pass::new(&source, &runner.model, &request);
    let prepared = prepared.cloned().unwrap_or_else(|| pass.prepared(&mut runner.executor, build));
    (pass.denoised(&mut runner.executor, build, prepared.clone()), prepared)
}

/// Returns the latents of the first pass of LTX-2.3's model, with other files, by a layout.
pub fn sharded_latents(client: &Client, model: &str, layout: &str) -> Av<Tensor> {
    let one = build("replicated", "data=1", 1);
    let (_, prepared) = latents_of(model, &SUBJECTS[0], client, false, &one, None);
    let mut all = placed().into_iter();
    let Placed { build, .. } = all.find(|placed| placed.name.starts_with(&format!("{layout} "))).expect("a layout");
    latents_of(model, &SUBJECTS[0], client, false, &build, Some(&prepared)).0
}

/// Compares both denoising passes; the second only in the full test. Request inputs are prepared on one device, in the
/// full test by each layout. Each layout is a separate program: `make test` runs one of each kind.
#[needs(cpu)]
fn sharded_denoising_passes_match_single_device() {
    let client = cpu(8);
    let one = build("replicated", "data=1", 1);
    let seconds: &[bool] = if full() { &[false, true] } else { &[false] };
    for subject in &SUBJECTS {
        let whole: Vec<_> = seconds.iter().map(|second| latents(subject, &client, *second, &one, None)).collect();
        for Placed { name, build, .. } in placed() {
            let is_chosen = subject.layouts.iter().any(|l| name.starts_with(&format!("{l} ")));
            if !is_chosen && !full() {
                continue;
            }
            for (second, (whole, prepared)) in [false, true].into_iter().zip(&whole) {
                let (got, _) = latents(subject, &client, second, &build, (!full()).then_some(prepared));
                for ((stream, got), want) in Av::NAMES.zip(got.as_ref()).zip(whole.as_ref()) {
                    let (distance, which) = (relative_l2(got, want), if second { "second" } else { "first" });
                    let what = format!("{} {name} {which} pass, {stream}", subject.case[1]);
                    eprintln!("{what}: {distance:.1e}");
                    assert!(distance <= LIMIT, "{what}: {distance:e}");
                }
            }
        }
    }
}

/// Factor by which a layout's bf16 error may exceed one device's: other sums are rounded, but not more of them.
const SPREAD: f64 = 1.5;

#[needs(cpu, full)]
fn bf16_layouts_are_as_accurate_as_single_device() {
    let client = cpu(8);
    let one = build("replicated", "data=1", 1);
    let narrow = |build: &Build| Build { dtype: DType::BF16, ..build.clone() };
    for subject in &SUBJECTS {
        let (exact, _) = latents(subject, &client, false, &one, None);
        let (own, prepared) = latents(subject, &client, false, &narrow(&one), None);
        let spread = own.as_ref().zip(exact.as_ref()).map(|(own, exact)| relative_l2(own, exact));
        eprintln!("{} on one device: {spread:?}", subject.case[1]);
        for Placed { name, build, .. } in placed() {
            let (got, _) = latents(subject, &client, false, &narrow(&build), Some(&prepared));
            for (((stream, got), spread), exact) in Av::NAMES.zip(got.as_ref()).zip(spread).zip(exact.as_ref()) {
                let (distance, what) = (relative_l2(got, exact), format!("{} {name}, {stream}", subject.case[1]));
                eprintln!("{what} in bf16: {distance:.2e}");
                assert!(distance <= SPREAD * spread, "{what}: {distance:e}, one device's is {spread:e}");
            }
        }
    }
}

/// Each device of the `data` axis decodes the audio of one video; the layouts' other axes replicate it.
#[needs(cpu, full)]
fn sharded_audio_decoding_matches_single_device() {
    let client = cpu(16);
    let programs =
        [(ProgramKind::AudioDecoder, "audio-decoder", "tiny_b"), (ProgramKind::Vocoder, "vocoder", "tiny_2_3")];
    for (kind, folder, name) in programs {
        let case = case(folder, name);
        let run = |build: &Build| run_case(&client, kind, &case, case.inputs.clone(), quick(), build);
        let whole = run(&build("replicated", "data=1", 1));
        for (layout, mesh) in layouts_on_meshes() {
            let mesh = format!("data=2,{mesh}");
            let split = build(layout, &mesh, 16);
            assert_eq!(split.layout.mesh.axes[0], ("data".to_string(), 2), "{layout}");
            for (output, got) in run(&split) {
                let distance = relative_l2(&got, &whole[&output]);
                eprintln!("{} {layout} {mesh}: {distance:.1e}", case.name);
                assert!(distance <= 1e-5, "{} {layout} {mesh}: {distance:e}", case.name);
            }
        }
    }
}

/// Writes an upsampler for LTX-2.3's fixture, which has a different number of channels, and returns its path.
fn upsampler(folder: &Path) -> String {
    let upsampler = folder.join("latent_upsampler");
    std::fs::create_dir(&upsampler).expect("a folder");
    let config = "tests/fixtures/models/upsampler_rational/latent_upsampler/config.json";
    let config = std::fs::read_to_string(config).expect("a configuration");
    let config = config.replace("\"in_channels\": 8", "\"in_channels\": 2");
    std::fs::write(upsampler.join("config.json"), config).expect("writes");
    upsampler.to_str().expect("UTF-8").to_string()
}

/// Compares every tensor from prompt to frames and audio, with random weights.
#[needs(cpu, full)]
fn layouts_match_single_device_end_to_end() {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    let upsampler = upsampler(dir.path());
    for subject in &SUBJECTS {
        let upsampler = (subject.slots.is_empty()).then(|| upsampler.clone());
        let source = ModelSource::open(subject.model, &Overrides { upsampler, ..Overrides::default() });
        let source = Arc::new(source.expect("a model"));
        let made = |build: &Build| {
            let model = OpenModel::random(Origin::Files(source.clone()), 7).expect("a model");
            let request = requested(subject, &model);
            let executor = Executor::new(Engine::new(client.clone(), quick()), Weights::Random(7));
            generate(&mut Runner::new(model, executor, build.clone()), &request, &dumping(None))
        };
        let whole = made(&build("replicated", "data=1", 1));
        let names = [
            "noise.video",
            "prompt_embeds",
            "stage_1.latents.video",
            "latents.video",
            "latents.audio",
            "video",
            "audio",
        ];
        for Placed { name, limit, build } in placed() {
            let got = made(&build);
            for tensor in names {
                let distance = relative_l2(dumped(&got, tensor), dumped(&whole, tensor));
                eprintln!("{} {name} {tensor}: {distance:.1e}", subject.case[1]);
                // A vocoder with random weights amplifies the error of its input tenfold.
                let limit = if tensor == "audio" { 10.0 * limit } else { limit };
                assert!(distance <= limit, "{} {name} {tensor}: {distance:e}", subject.case[1]);
            }
        }
    }
}

/// LTX-2.5 with marked keyframe tokens, whose number the mesh does not divide evenly, and a model that computes text
/// keys once per request.
#[needs(cpu)]
fn unevenly_sharded_keyframe_tokens_match_reference() {
    let client = cpu(8);
    for name in ["tiny_v2_5_fixed_text", "tiny_v2_5"].into_iter().take(if full() { 2 } else { 1 }) {
        let case = case("transformer", name);
        let build = build("sequence", "context=8", 8);
        let made = run_case(&client, ProgramKind::Transformer, &case, case.inputs.clone(), quick(), &build);
        for stream in ["video", "audio"] {
            let distance = case.distance(stream, &made[stream]);
            assert!(distance <= 1e-5, "{name} {stream}: {distance:e}");
        }
    }
}
