//! Ranks layouts for given devices without compiling: determines which layout `layout: auto` chooses, and whether a
//! shipped layout would be faster than the configured one.
//!
//! The programs are built for each shipped layout on each mesh whose axes the layout uses. The step time and its lower
//! bound ([`bound()`]) are computed from the programs, which takes milliseconds per layout and mesh. Results are not
//! cached, so changes of the chip model take effect immediately.

mod bound;
mod compare;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod compiled;
mod estimate;
mod missing;
mod space;
mod time;

pub(crate) use bound::needed;
pub use bound::{Bound, bound};
pub(crate) use compare::{LayoutComparison, compare};
pub(crate) use estimate::{Estimate, Estimator, RankingDevices, step_ms};
pub(crate) use missing::{rules_text, with_rules};
pub(crate) use space::{Extent, composed, mesh_name, meshes};
pub use space::{Point, placed};

use crate::config::{AUTO, Config, Mesh, read_layout_source, resolve_mesh, shipped_layouts};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::programs::build::ProgramKind;
use crate::request;
use crate::runtime::OpenTarget;

/// The fastest layout that fits the devices, and the next fastest.
#[derive(Clone, Debug)]
pub(crate) struct Ranking {
    pub(crate) first: Estimate,
    next: Option<Estimate>,
    /// Whether costs are milliseconds. Otherwise, they are received bytes, because the chip is unknown.
    timed: bool,
    /// Number of evaluations of all passes, times the number of videos.
    steps: usize,
}

impl Ranking {
    /// Returns layout and mesh of the fastest layout. `mesh`: the mesh that the configuration sets.
    pub(crate) fn placement(&self, mesh: Option<Mesh>) -> (String, Option<Mesh>) {
        (self.first.layout.clone(), mesh.or(Some(space::file_mesh(&self.first.mesh))))
    }
}

/// If a layout needs more FLOPs per device than this factor times the minimum of all layouts, its devices are
/// considered to repeat each other's work.
const MAX_REPEATED_WORK: f64 = 1.25;

/// Ranks the shipped layouts on the mesh of the configuration, or on all meshes if it sets none. Fails if no shipped
/// layout uses the mesh.
pub(crate) fn ranking(config: &Config, devices: RankingDevices) -> Result<Ranking> {
    ranking_by(&Estimator::new(config, devices, None)?, config, config.mesh)
}

fn ranking_by(estimator: &Estimator, config: &Config, mesh: Option<Mesh>) -> Result<Ranking> {
    let devices = estimator.devices;
    let all = estimates(estimator, config, mesh)?;
    let (first, next) = estimator.fastest(all).ok_or_else(|| {
        let why = "layout auto: no shipped layout uses this mesh; set a layout, or remove the mesh";
        PipelineError::Usage(why.into())
    })?;
    Ok(Ranking { first, next, timed: devices.chip.is_some(), steps: estimator.steps() * estimator.videos })
}

/// Estimates the shipped layouts, in order of increasing number of rules, on `mesh` or on all meshes.
fn estimates(estimator: &Estimator, config: &Config, mesh: Option<Mesh>) -> Result<Vec<(Estimate, Point)>> {
    let devices = estimator.devices;
    let extent =
        Extent { devices: devices.count, videos: config.request.num_videos, branches: request::branches(config).len() };
    let meshes = match &mesh {
        Some(mesh) => vec![resolve_mesh(mesh, devices.count)?],
        None => meshes(extent),
    };
    let mut sources = Vec::new();
    for name in shipped_layouts() {
        sources.push((name, read_layout_source(name)?));
    }
    // Layouts with few rules come first, because the first of several equally fast layouts is chosen.
    sources.sort_by_key(|(_, s)| s.rules.len() + s.storage.len() + s.overrides.len());
    let mut all: Vec<(Estimate, Point)> = Vec::new();
    for (name, source) in &sources {
        let points = meshes.iter().filter_map(|mesh| placed((*name).into(), Some((*name).into()), source, mesh));
        for point in points {
            let Ok((estimate, _)) = estimator.estimate(&point) else { continue };
            all.push((estimate, point));
        }
    }
    if devices.chip.is_none() {
        // Received bytes do not reveal that devices repeat each other's work, so drop such layouts here.
        let least = all.iter().map(|(estimate, _)| estimate.flops).fold(f64::INFINITY, f64::min);
        all.retain(|(estimate, _)| estimate.flops <= MAX_REPEATED_WORK * least);
    }
    Ok(all)
}

/// A shipped layout on a mesh, as ranked for `layout: auto`.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub layout: String,
    /// Mesh in the syntax of `--mesh`.
    pub mesh: String,
    /// Predicted time of all steps of a request in milliseconds.
    pub estimate: f64,
    /// Lower bound of the time of all steps in milliseconds.
    pub bound: f64,
    /// Whether the denoising loops fit in memory together with all parameters of the run.
    pub fits: bool,
}

/// Candidates of `layout: auto` for a target.
#[derive(Clone, Debug)]
pub struct Candidates {
    /// The candidate that `auto` chooses.
    pub chosen: Candidate,
    /// All candidates, in order of their estimates, the fastest first.
    pub all: Vec<Candidate>,
    /// Denoising loops of a request, with the number of transformer evaluations of each.
    pub loops: Vec<(ProgramKind, usize)>,
}

/// Returns the candidates of `layout: auto` for a target's devices. Benchmarks compare the choice with compiled
/// programs.
///
/// # Errors
/// Returns an error if the configuration's programs cannot be built, or if no shipped layout uses its mesh.
pub fn candidates(config: &Config, machine: &OpenTarget) -> Result<Candidates> {
    let (toolchain, chip, count) = (machine.toolchain(), machine.target.chip(), machine.devices.len());
    let devices = RankingDevices { toolchain: &toolchain, count, capacity: machine.capacity, chip: chip.as_ref() };
    let estimator = Estimator::new(config, devices, None)?;
    let of = |e: &Estimate, fits| {
        let (layout, mesh) = (e.layout.clone(), mesh_name(&e.mesh));
        Candidate { layout, mesh, estimate: e.cost, bound: e.bound, fits }
    };
    let points = estimates(&estimator, config, config.mesh)?;
    let mut all: Vec<Candidate> = points.iter().map(|(e, point)| of(e, estimator.fits(e, point))).collect();
    all.sort_by(|a, b| a.estimate.total_cmp(&b.estimate));
    let first = ranking_by(&estimator, config, config.mesh)?.first;
    let chosen = of(&first, first.fits);
    Ok(Candidates { chosen, all, loops: estimator.loops.iter().map(|l| (l.kind, l.steps)).collect() })
}

impl Ranking {
    /// Formats an estimate, e.g. `cfg (cfg=2), 310.5 ms a step`.
    fn describe(&self, e: &Estimate) -> String {
        let fits = match (e.fits, e.resident) {
            (false, _) => ", does not fit",
            (true, Some(_)) => ", with weights streamed from host memory",
            (true, None) => "",
        };
        format!("{} ({}), {}{fits}", e.layout, mesh_name(&e.mesh), self.figure(e))
    }

    /// Formats the cost of an estimate, e.g. `310.5 ms a step`.
    fn figure(&self, e: &Estimate) -> String {
        let each = e.cost / self.steps.max(1) as f64;
        let (figure, unit) = if self.timed { (each, "ms") } else { (each / 1e6, "MB received") };
        // Show more digits for small models, so that their layouts can be distinguished.
        let digits = if figure < 1.0 { 4 } else { 1 };
        format!("{figure:.digits$} {unit} a step")
    }

    /// Returns a log line with the chosen layout and the next fastest.
    pub(crate) fn decision(&self, devices: RankingDevices) -> String {
        let here = format!("{} x {}", devices.count, devices.toolchain.kind);
        let next = self.next.as_ref().map_or(String::new(), |next| format!("; next: {}", self.describe(next)));
        format!("layout auto: for {here}: {} (predicted){next}", self.describe(&self.first))
    }
}

impl RunPlan {
    /// Replaces `layout: auto` with the fastest layout for the devices, a missing mesh with that of the layout, and
    /// `runtime.layers: auto` in a rerun with the recorded form. For any other layout, logs at debug level (`-v`) whether a shipped layout is faster and which rules are missing.
    ///
    /// # Errors
    /// Returns an error for `auto` if no shipped layout uses the configuration's mesh.
    pub(crate) fn place(&mut self, devices: RankingDevices) -> Result<()> {
        self.repeat_recorded_layers(devices.toolchain);
        let (config, mesh) = (&self.config, self.config.mesh);
        if config.layout == AUTO && devices.count == 1 {
            self.config.set_layout("replicated".into(), mesh);
        } else if config.layout == AUTO {
            let ranking = ranking(config, devices)?;
            tracing::info!("{}", ranking.decision(devices));
            let (layout, mesh) = ranking.placement(mesh);
            self.config.set_layout(layout, mesh);
        } else if devices.count > 1 && tracing::enabled!(tracing::Level::DEBUG) {
            // The comparison is only a hint, so it is no error if the layout cannot be estimated.
            match compare(config, devices, None) {
                Ok(found) => found.iter().flat_map(LayoutComparison::lines).for_each(|line| tracing::debug!("{line}")),
                Err(why) => tracing::debug!("the layout is not compared with the shipped ones: {why}"),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Chip;
    use crate::hlo;
    use crate::pipeline::plan::setup;
    use crate::pipeline::programs::build::Programs;
    use crate::runtime::Toolchain;

    fn ranked(
        set: &[&str],
        platform: &str,
        kind: &str,
        count: usize,
    ) -> (Config, Toolchain, Option<&'static Chip>, usize) {
        let config = Config::load("ltx2", set.iter().copied()).unwrap();
        let toolchain = Toolchain::of_kind(platform, kind);
        (config, toolchain, Chip::of_device(kind).ok(), count)
    }

    /// Returns layout and mesh of the fastest estimate, and the log line.
    fn first(set: &[&str], platform: &str, kind: &str, count: usize) -> (String, String, String) {
        let (config, toolchain, chip, count) = ranked(set, platform, kind, count);
        let devices = RankingDevices { toolchain: &toolchain, count, capacity: chip.map(|c| c.capacity), chip };
        let all = ranking(&config, devices).unwrap();
        assert!(all.first.fits);
        (all.first.layout.clone(), mesh_name(&all.first.mesh), all.decision(devices))
    }

    /// Compares the choice with the fastest compiled modules for H100s. A layout is slower if the number of branches,
    /// tokens or heads is not divisible by the number of devices.
    #[test]
    fn auto_accounts_for_indivisible_sizes() {
        let chosen = |preset: &str, count: usize| {
            let config = Config::load(preset, std::iter::empty::<&str>()).unwrap();
            let chip = Chip::named("h100").unwrap();
            let toolchain = Toolchain::of_kind("cuda", &chip.device_kinds[0]);
            let devices =
                RankingDevices { toolchain: &toolchain, count, capacity: Some(chip.capacity), chip: Some(chip) };
            let first = ranking(&config, devices).unwrap().first;
            assert!(first.fits, "{preset} on {count}");
            (first.layout.clone(), mesh_name(&first.mesh))
        };
        // With three branches on two devices, one device would compute two branches.
        let cases = [
            ("ltx2_3_hq", 2, "ring", "context=2"),
            ("ltx2_3_hq", 4, "ulysses", "context=4"),
            // 32 heads and 6144 tokens: if they are not divisible by the number of devices, heads are repeated and
            // tokens are padded.
            ("ltx2", 3, "ulysses", "context=3"),
            ("ltx2", 5, "ulysses", "context=5"),
            ("ltx2", 6, "ulysses", "cfg=2,context=3"),
            ("ltx2", 7, "ulysses", "context=7"),
        ];
        for (preset, count, layout, mesh) in cases {
            assert_eq!(chosen(preset, count), (layout.to_string(), mesh.to_string()), "{preset} on {count}");
        }
    }

    /// For two, three and four branches on any number of devices, the devices of the chosen layout repeat little work.
    /// Three branches over `cfg: 2` cost four thirds of the work; on many devices, the smaller number of collectives
    /// outweighs this. Only the full test covers all counts.
    #[test]
    fn auto_repeats_little_work_on_any_device_count() {
        let chip = Chip::named("h200").unwrap();
        let toolchain = Toolchain::of_kind("cuda", &chip.device_kinds[0]);
        let branches: [&[&str]; 3] = [
            &[],
            &["guidance.video.stg=1", "guidance.stg_blocks=[29]"],
            &["guidance.video.stg=1", "guidance.stg_blocks=[29]", "guidance.video.modality=3"],
        ];
        for (set, number) in branches.into_iter().zip(2..) {
            let config = Config::load("ltx2", set.iter().copied().chain(["request.num_frames=33"])).unwrap();
            assert_eq!(request::branches(&config).len(), number);
            let first = |count| {
                let devices =
                    RankingDevices { toolchain: &toolchain, count, capacity: Some(chip.capacity), chip: Some(chip) };
                ranking(&config, devices).unwrap().first
            };
            let whole = first(1).flops;
            let full = std::env::var_os("LTX2_TEST_FULL").is_some();
            for count in (2..=16).step_by(if full { 1 } else { 3 }) {
                let first = first(count);
                let repeated = first.flops * count as f64 / whole;
                let what = format!("{} ({})", first.layout, mesh_name(&first.mesh));
                assert!(repeated < 1.4, "{number} branches on {count}: {what} computes {repeated:.2} times the work");
            }
        }
    }

    #[test]
    fn auto_chooses_fastest_fitting_layout_and_logs_next() {
        let (layout, mesh, line) = first(&[], "cuda", "NVIDIA H200", 2);
        assert_eq!((layout.as_str(), mesh.as_str()), ("cfg", "cfg=2"), "{line}");
        assert!(
            line.starts_with("layout auto: for 2 x NVIDIA H200: cfg (cfg=2), ")
                && line.contains(" ms a step (predicted); next: "),
            "{line}"
        );
        // As measured on H100s in benchmarks/2026-11-27-h100x4/four.txt.
        for kind in ["NVIDIA H100 80GB HBM3", "NVIDIA H200"] {
            let (layout, mesh, line) = first(&[], "cuda", kind, 4);
            assert_eq!((layout.as_str(), mesh.as_str()), ("ring", "cfg=2,context=2"), "{line}");
        }
        // Without guidance there is a single branch, which cannot be sharded.
        let (layout, _, line) = first(&["guidance.video.cfg=1", "guidance.audio.cfg=1"], "cuda", "NVIDIA H200", 2);
        assert_ne!(layout, "cfg", "{line}");
        // LTX-2.3 with four branches on four devices.
        let config = ["model.path=Lightricks/LTX-2.3", "guidance.video.stg=1", "guidance.video.modality=3"];
        let (_, mesh, line) = first(&config, "cuda", "NVIDIA H200", 4);
        assert!(mesh.contains("cfg="), "{line}");
        // The weights do not fit in the memory of one v6e chip.
        let (layout, mesh, line) = first(&[], "tpu", "TPU v6 lite", 8);
        assert!(mesh != "context=8" && layout != "cfg", "{line}");
    }

    #[test]
    fn indivisible_token_counts_keep_the_fused_kernel() {
        let (config, toolchain, chip, _) = ranked(&[], "cuda", "NVIDIA H200", 1);
        let fused = |layout: &str, context: usize| {
            let devices = RankingDevices { toolchain: &toolchain, count: context, capacity: None, chip };
            let mesh = hlo::DeviceMesh::new(&[("context", context)]);
            let point = placed(layout.into(), None, &read_layout_source(layout).unwrap(), &mesh).unwrap();
            let (_, networks) = Estimator::new(&config, devices, None).unwrap().estimate(&point).unwrap();
            let all = &networks[0].program.work.matmuls;
            all.iter().filter(|m| m.attention.is_some()).count()
        };
        // The request has 6144 tokens.
        for layout in ["sequence", "ring", "ulysses"] {
            assert_eq!(
                [5, 7].map(|context| fused(layout, context)),
                [4; 2].map(|context| fused(layout, context)),
                "{layout}"
            );
        }
    }

    #[test]
    fn plan_has_the_chosen_layout() {
        let (config, toolchain, chip, count) = ranked(&[], "cuda", "NVIDIA H200", 2);
        let devices = RankingDevices { toolchain: &toolchain, count, capacity: chip.map(|c| c.capacity), chip };
        let placed = |devices| {
            let mut plan = RunPlan::of_programs(&config, None).unwrap();
            plan.place(devices).unwrap();
            plan.config
        };
        let two = placed(devices);
        assert_eq!((two.layout.as_str(), mesh_name(&two.placement(2).unwrap().mesh).as_str()), ("cfg", "cfg=2"));
        let said = ranking(&config, devices).unwrap().decision(devices);
        assert!(
            include_str!("../../../../docs/guides/gpu.md").contains(&said),
            "the guide has another line than {said}"
        );
        // If no layout fits, the one that needs the fewest bytes is chosen; the memory plan then reports the shortage.
        let none = ranking(&config, RankingDevices { capacity: Some(1 << 30), ..devices }).unwrap();
        assert!(!none.first.fits && none.first.layout != "cfg", "{}", none.first.layout);
        assert_eq!(placed(RankingDevices { count: 1, ..devices }).layout, "replicated");
    }

    #[test]
    fn fitting_layout_is_chosen_among_equally_fast_ones() {
        let (config, toolchain, chip, count) =
            ranked(&["mesh.cfg=2", "mesh.context=2", "mesh.tensor=2"], "tpu", "TPU v6 lite", 8);
        let devices = RankingDevices { toolchain: &toolchain, count, capacity: None, chip };
        let estimator = Estimator::new(&config, devices, None).unwrap();
        let mesh = resolve_mesh(&config.mesh.unwrap(), count).unwrap();
        let bytes = ["tensor", "tensor-encoder"].map(|name| {
            let point = placed(name.into(), Some(name.into()), &read_layout_source(name).unwrap(), &mesh).unwrap();
            let (estimate, _) = estimator.estimate(&point).unwrap();
            (estimate.cost, estimator.parameters(&point).unwrap() + estimate.values)
        });
        let [(cost, whole), (same, apart)] = bytes;
        assert!(cost == same && apart < whole, "{bytes:?}");
        let first = |capacity| ranking(&config, RankingDevices { capacity: Some(capacity), ..devices }).unwrap().first;
        let (small, large) = (first((whole + apart) / 2), first(whole));
        assert_eq!((small.layout.as_str(), small.fits), ("tensor-encoder", true));
        assert!(large.layout != "tensor-encoder" && large.fits, "{large:?}");
    }

    /// On two GPUs, the transformer takes 35.2 GiB with the fastest layout, `cfg`, and half of it if weights are sharded.
    #[test]
    fn layouts_that_do_not_fit_are_ranked_with_streamed_weights() {
        let first = |gib: i64, set: &[&str]| {
            let (config, toolchain, chip, count) = ranked(set, "cuda", "NVIDIA H200", 2);
            let devices = RankingDevices { toolchain: &toolchain, count, capacity: Some(gib << 30), chip };
            ranking(&config, devices).unwrap().first
        };
        let whole = first(139, &[]);
        assert_eq!((whole.layout.as_str(), whole.resident), ("cfg", None));
        // The copies of the streamed weights take less time than the step.
        let large = first(30, &[]);
        assert_eq!((large.layout.as_str(), large.fits), ("cfg", true));
        assert!(large.resident.is_some_and(|resident| resident > 0) && large.cost < 1.01 * whole.cost, "{large:?}");
        // With `cfg`, the copies of all weights would take longer than the step with another layout.
        let small = first(10, &[]);
        assert!(small.layout != "cfg" && small.fits && small.cost > whole.cost, "{small:?}");
        // The limit of the configuration counts.
        assert_eq!(first(139, &["runtime.memory_limit=10"]), small);
        // Without streaming, the layout that needs the fewest bytes is chosen.
        let off = first(10, &["runtime.stream=off"]);
        assert!(!off.fits && off.resident.is_none(), "{off:?}");
    }

    #[test]
    fn run_count_is_videos_divided_by_data_axis() {
        let (config, toolchain, chip, count) = ranked(&["request.num_videos=4"], "cuda", "NVIDIA H200", 4);
        let estimator =
            Estimator::new(&config, RankingDevices { toolchain: &toolchain, count, capacity: None, chip }, None)
                .unwrap();
        let of = |mesh: &[(&str, usize)]| {
            let source = read_layout_source("cfg-ulysses").unwrap();
            let point = placed("x".into(), None, &source, &hlo::DeviceMesh::new(mesh)).unwrap();
            estimator.estimate(&point).unwrap().0
        };
        let (apart, together) = (of(&[("data", 4)]), of(&[("cfg", 2), ("context", 2)]));
        assert_eq!((apart.runs, together.runs), (1, 4));
        // Four videos in parallel on one device each are faster than four videos in sequence on all devices: the
        // matmuls are the same, but no collectives are needed.
        assert!(apart.cost < together.cost, "{} {}", apart.cost, together.cost);
        assert!((apart.flops / together.flops - 1.0).abs() < 0.02, "{} {}", apart.flops, together.flops);
    }

    #[test]
    fn estimator_counts_steps_of_each_tile_and_a_second_copy_for_single_pass_loras() {
        let (_, toolchain, chip, count) = ranked(&[], "cuda", "NVIDIA H200", 1);
        let devices = RankingDevices { toolchain: &toolchain, count, capacity: None, chip };
        let loops = |rounds: &str| {
            let config = Config::load("ltx2_5_dfr", [&*format!("dfr.temporal_rounds={rounds}")]).unwrap();
            let loops = Estimator::new(&config, devices, None).unwrap().loops;
            loops.iter().map(|l| (l.kind.name(), l.steps)).collect::<Vec<_>>()
        };
        assert_eq!(loops("0"), [("denoise", 8), ("refine", 3)]);
        // The first round has two tiles and the second has four, with four steps each.
        assert_eq!(loops("1"), [("denoise", 8), ("refine", 3), ("round", 8)]);
        assert_eq!(loops("2"), [("denoise", 8), ("refine", 3), ("round", 24)]);

        let source = read_layout_source("replicated").unwrap();
        let point = placed("x".into(), None, &source, &hlo::DeviceMesh::new(&[])).unwrap();
        let bytes = |loras: &str| {
            let config = Config::load("ltx2_two_stage", [&*format!("model.loras={loras}")]).unwrap();
            let build =
                setup::build_for(&Config { layout: "replicated".into(), ..config.clone() }, 1, &toolchain).unwrap();
            let each = Programs::from_config(&config, None).unwrap().parameters(&build).unwrap();
            (Estimator::new(&config, devices, None).unwrap().parameters(&point).unwrap(), each["transformer"] as i64)
        };
        let (plain, transformer) = bytes("[]");
        // A LoRA that applies to both passes does not change the size of the weights; a LoRA for one pass requires a
        // second copy of the transformer.
        assert_eq!(bytes("[{path: a}]"), (plain, transformer));
        let both = (plain + transformer, 2 * transformer);
        assert_eq!(bytes("[{path: a, stages: [2]}]"), both);
        assert_eq!(bytes("[{path: a, stages: [1]}, {path: a, strength: 0.5, stages: [2]}]"), both);
    }

    #[test]
    fn estimator_counts_the_matrices_of_added_loras_but_no_copy_of_the_weights() {
        let build = setup::build(&Config::default(), 1, "cuda", "NVIDIA H200").unwrap();
        let bytes = |entries: &[&str]| {
            let file = "path: tests/fixtures/lora/ic_tiny_a.safetensors, apply: add";
            let entries: Vec<String> = entries.iter().map(|more| format!("{{{file}{more}}}")).collect();
            let loras = format!("model.loras=[{}]", entries.join(", "));
            let config = Config::load("ltx2_two_stage", [&*loras]).unwrap();
            Programs::from_config(&config, None).unwrap().parameters(&build).unwrap()["transformer"]
        };
        let weights = bytes(&[]);
        let matrices = bytes(&[""]) - weights;
        // At rank 16, the smallest of programs, the matrices of the 19B transformer take 1 % of its weights.
        assert!((0.005..0.015).contains(&(matrices as f64 / weights as f64)), "{matrices} of {weights} bytes");
        assert_eq!(bytes(&[", stages: [2]"]), weights + matrices);
        assert_eq!(bytes(&[", stages: [1]", ", strength: 0.5, stages: [2]"]), weights + 2 * matrices);
    }

    #[test]
    fn loop_steps_are_evaluations_and_bounds_depend_on_weight_type() {
        let (_, toolchain, chip, count) = ranked(&[], "cuda", "NVIDIA H200", 1);
        let devices = RankingDevices { toolchain: &toolchain, count, capacity: None, chip };
        // A second-order sampler with 15 and 3 steps: two evaluations per step and a final one.
        let hq = Config::load("ltx2_hq", std::iter::empty::<&str>()).unwrap();
        let loops = Estimator::new(&hq, devices, None).unwrap().loops;
        assert_eq!(loops.iter().map(|l| l.steps).collect::<Vec<_>>(), [31, 7]);
        let least = |weights: &str| {
            let set = [format!("runtime.weights={weights}"), "runtime.activations=int8".into()];
            let set = set.iter().map(String::as_str).take(if weights == "int8" { 2 } else { 1 });
            let config = Config::load("ltx2", set).unwrap();
            let source = read_layout_source("replicated").unwrap();
            let point = placed("x".into(), None, &source, &hlo::DeviceMesh::new(&[])).unwrap();
            Estimator::new(&config, devices, None).unwrap().estimate(&point).unwrap().0.bound
        };
        let (bf16, fp8, int8) = (least("bf16"), least("fp8"), least("int8"));
        // Matmuls in 8 bits are at most twice as fast as in bf16.
        assert!(fp8 < 0.51 * bf16 && int8 < 0.51 * bf16 && fp8 > 0.4 * bf16, "{bf16} {fp8} {int8}");
    }

    #[test]
    fn auto_keeps_configured_mesh_and_ranks_unknown_chips_by_bytes() {
        let (_, mesh, line) = first(&["mesh.context=2", "mesh.cfg=2"], "cuda", "NVIDIA H200", 4);
        assert_eq!(mesh, "cfg=2,context=2", "{line}");
        let (layout, _, line) = first(&[], "cuda", "NVIDIA X1", 2);
        assert!(layout == "cfg" && line.contains("MB received"), "{line}");
    }
}
