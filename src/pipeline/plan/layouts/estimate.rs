//! Estimates the cost of a layout on a mesh: builds the programs of a configuration's denoising loops, which takes
//! milliseconds, predicts the time of a step of each, and sums these times, weighted by the number of evaluations.

use super::bound::{bound, needed};
use super::space::Point;
use super::time::{StepTime, received};
use crate::analysis::Chip;
use crate::config::Config;
use crate::hlo;
use crate::models::Network;
use crate::nn::{Build, Lowering, Quantization};
use crate::pipeline::error::Result;
use crate::pipeline::plan::memory::Limits;
use crate::pipeline::plan::setup;
use crate::pipeline::plan::stream::{self, Decision, StreamChoice};
use crate::pipeline::programs::build::{ProgramKind, Programs};
use crate::pipeline::stages::batch::videos_at_once;
use crate::runtime::{Toolchain, device_bytes};

/// The devices for which layouts are ranked.
#[derive(Clone, Copy)]
pub(crate) struct RankingDevices<'a> {
    pub(crate) toolchain: &'a Toolchain,
    pub(crate) count: usize,
    /// Bytes that a program may use on each device. `None`: no limit.
    pub(crate) capacity: Option<i64>,
    /// Chip model for time predictions. `None`: the chip is unknown, so layouts are ranked by received bytes.
    pub(crate) chip: Option<&'a Chip>,
}

/// Denoising loop of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoopSpec {
    pub(crate) kind: ProgramKind,
    /// Number of transformer evaluations.
    pub(crate) steps: usize,
}

/// Estimated cost and size of a layout on a mesh.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Estimate {
    pub(crate) layout: String,
    pub(crate) mesh: hlo::DeviceMesh,
    /// Time of all evaluations for all videos in milliseconds; received bytes if the chip is unknown.
    pub(crate) cost: f64,
    /// FLOPs of the matmuls on one device, for all evaluations.
    pub(crate) flops: f64,
    /// Lower bound of `cost`.
    pub(crate) bound: f64,
    /// Number of executions of each program. One execution generates as many videos as the layout has shards of the
    /// batch axis.
    pub(crate) runs: usize,
    /// Bytes of parameters per device, for each loop.
    pub(crate) parameters: Vec<i64>,
    /// Bytes of arguments and results per device, without parameters, for the loop that needs the most.
    pub(crate) values: i64,
    /// Whether the loops fit in memory, if necessary with components reloaded for each video or with streamed weights.
    /// [`Estimator::estimate`] does not check this and returns `true`.
    pub(super) fits: bool,
    /// Number of resident transformer blocks if `runtime.stream: auto` streams weights; `cost` then includes their copies.
    /// `None`: no weights are streamed.
    pub(super) resident: Option<usize>,
}

/// An estimate and the programs of the loops, or the reason why the layout cannot be used.
type EstimateResult = std::result::Result<(Estimate, Vec<Network>), String>;

/// Estimates layouts for the denoising loops of a configuration.
pub(crate) struct Estimator<'a> {
    pub(super) devices: RankingDevices<'a>,
    /// Number of videos to generate.
    pub(super) videos: usize,
    config: Config,
    pub(super) limits: Limits,
    programs: Programs,
    /// Options for building programs, except for the layout.
    build: Build,
    pub(crate) loops: Vec<LoopSpec>,
}

impl<'a> Estimator<'a> {
    /// Creates an estimator for all denoising loops of a configuration's first request, or for the program `only`.
    /// Fails if the request does not have that program.
    pub(crate) fn new(config: &Config, devices: RankingDevices<'a>, only: Option<ProgramKind>) -> Result<Self> {
        let alone = Config { layout: "replicated".into(), mesh: None, ..config.clone() };
        let build = setup::build_for(&alone, 1, devices.toolchain)?;
        // Blocks in a loop have the same arguments and placements as unrolled blocks, and are built in a fraction of
        // the time. Quantized blocks differ from each other, so they must be unrolled, unless all are quantized.
        let is_same = build.quantization == Quantization::None || build.quantization.is_convrot();
        let unroll_layers = build.lowering.unroll_layers && !is_same;
        let build = Build { lowering: Lowering { unroll_layers, ..build.lowering }, ..build };
        let programs = Programs::from_config(&alone, None)?;
        let all = programs.loops(config.sampler.steps);
        // A layer that cannot be rotated would exclude every layout.
        if let Some((kind, _)) = all.first().filter(|_| build.quantization.is_convrot()) {
            programs.network(*kind, &build)?;
        }
        let asked = match only {
            Some(kind) => match all.into_iter().find(|(k, _)| *k == kind) {
                Some(of_run) => vec![of_run],
                // Fail here if the configuration has no such program, because then no layout can be estimated.
                None => programs.network(kind, &build).map(|_| vec![(kind, 1)])?,
            },
            None => all,
        };
        let loops = asked.into_iter().map(|(kind, steps)| LoopSpec { kind, steps }).collect();
        let limits = Limits::of_capacity(config, devices.capacity);
        Ok(Estimator { devices, videos: config.request.num_videos, config: alone, limits, programs, build, loops })
    }

    /// Estimates a layout on a mesh; also returns the programs of the loops. The error says why the layout cannot be
    /// used.
    pub(crate) fn estimate(&self, point: &Point) -> EstimateResult {
        let build = self.build_on(point)?;
        let at_once = videos_at_once(&build.layout);
        let runs = self.videos.div_ceil(at_once);
        self.estimate_with(point, &build, runs)
    }

    fn estimate_with(&self, point: &Point, build: &Build, runs: usize) -> EstimateResult {
        let (mut cost, mut flops, mut least, mut values, mut parameters) = (0.0, 0.0, 0.0, 0, Vec::new());
        let mut networks = Vec::new();
        for l in &self.loops {
            let network = self.programs.network(l.kind, build).map_err(|e| e.to_string())?;
            let own: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
            values = values.max(needed(&network) - own as i64);
            parameters.push(own as i64);
            let blocks = self.programs.layers();
            let chip = self.devices.chip;
            let bound = bound(&network, &build.layout, chip, build.quantization, blocks);
            let evaluations = (l.steps * runs) as f64;
            let time = |chip| step_ms(&network, build, chip, blocks);
            cost += evaluations * chip.map_or_else(|| received(&network.program), time);
            flops += evaluations * network.program.work.flops();
            least += evaluations * bound.cost();
            networks.push(network);
        }
        let layout = point.named.clone().unwrap_or_else(|| point.label.clone());
        let mesh = point.mesh.clone();
        let resident = build.streaming.map(|streaming| streaming.resident);
        let estimate =
            Estimate { layout, mesh, cost, flops, runs, bound: least, parameters, values, fits: true, resident };
        Ok((estimate, networks))
    }

    fn build_on(&self, point: &Point) -> std::result::Result<Build, String> {
        let layout = point.source.on(point.mesh.clone()).map_err(|e| e.to_string())?;
        Ok(Build { layout, ..self.build.clone() })
    }

    /// Returns the bytes of a run's parameters per device. Slow, because it builds all programs of the run; call it for
    /// a few layouts only.
    pub(crate) fn parameters(&self, point: &Point) -> std::result::Result<i64, String> {
        let each = self.programs.parameters(&self.build_on(point)?).map_err(|e| e.to_string())?;
        Ok(each.values().sum::<usize>() as i64)
    }

    /// Returns whether the loops fit in memory together with all parameters of the run.
    pub(super) fn fits(&self, estimate: &Estimate, point: &Point) -> bool {
        let needed = self.parameters(point).map(|bytes| bytes + estimate.values);
        needed.is_ok_and(|bytes| self.has_room(bytes))
    }

    /// Returns whether `bytes` fit on a device.
    fn has_room(&self, bytes: i64) -> bool {
        self.limits.device.is_none_or(|limit| bytes <= limit as i64)
    }

    /// Estimates a layout again if its parameters do not all fit in memory at the same time. The new estimate is for
    /// streamed weights. If the layout fits with components reloaded for each video, returns `estimate` unchanged if
    /// `allows_reloading` is set, otherwise `None`. Also returns `None` if the layout does not fit at all. Slow, like
    /// [`Estimator::parameters`].
    fn with_less_memory(&self, estimate: &Estimate, point: &Point, allows_reloading: bool) -> Option<Estimate> {
        let build = self.build_on(point).ok()?;
        match Decision::new(&self.config, &self.programs, &build, self.limits).ok()?.choice {
            StreamChoice::Resident => allows_reloading.then(|| estimate.clone()),
            StreamChoice::Streamed(resident) => {
                let build = Build { streaming: Some(setup::streamed(resident)), ..build };
                Some(self.estimate_with(point, &build, estimate.runs).ok()?.0)
            }
            StreamChoice::DoesNotFit => None,
        }
    }

    /// Returns whether layouts are ranked with streamed weights.
    fn streams(&self) -> bool {
        // Bytes that other devices send are not comparable with bytes that the host sends.
        self.devices.chip.is_some() && stream::is_auto(&self.config, &self.devices.toolchain.spec())
    }

    /// Returns the estimate of [`Estimator::with_less_memory`] with `allows_reloading` set. If the layout does not fit
    /// at all, or if layouts are not ranked with streamed weights, returns `estimate` with `fits` cleared.
    pub(super) fn adjusted(&self, estimate: Estimate, point: &Point) -> Estimate {
        let reduced = if self.streams() { self.with_less_memory(&estimate, point, true) } else { None };
        reduced.unwrap_or(Estimate { fits: false, ..estimate })
    }

    /// Returns the fastest of the layouts whose parameters do not all fit in memory at the same time, as estimated by
    /// [`Estimator::with_less_memory`]. `limit`: cost that the layout must undercut; `None`: no limit. `order`: indices
    /// into `all`, by increasing cost.
    fn fastest_with_less_memory(
        &self,
        all: &[(Estimate, Point)],
        order: &[usize],
        limit: Option<f64>,
    ) -> Option<Estimate> {
        if !self.streams() {
            return None;
        }
        let mut best: Option<Estimate> = None;
        for (estimate, point) in order.iter().map(|n| &all[*n]) {
            // Copies from host memory only add to the cost.
            let least = best.as_ref().map(|best| best.cost).into_iter().chain(limit).fold(f64::INFINITY, f64::min);
            if estimate.cost >= least {
                break;
            }
            let reduced = self.with_less_memory(estimate, point, limit.is_none());
            best = reduced.filter(|reduced| reduced.cost < least).or(best);
        }
        best
    }

    /// Returns the fastest layout that fits in memory, and the next fastest that differs in mesh, cost or size. Among
    /// layouts whose costs differ by less than [`EQUAL`], the first in `all` counts as fastest, and one with which all
    /// parameters fit together counts as faster than one with streamed weights. If no layout fits, returns the one that
    /// needs the fewest bytes. `all` must be ordered by increasing number of rules.
    pub(super) fn fastest(&self, all: Vec<(Estimate, Point)>) -> Option<(Estimate, Option<Estimate>)> {
        let mut bytes: Vec<Option<Option<i64>>> = vec![None; all.len()];
        let mut fits = |n: usize| {
            let (estimate, point) = &all[n];
            let needed = *bytes[n].get_or_insert_with(|| Some(self.parameters(point).ok()? + estimate.values));
            needed.is_some_and(|bytes| self.has_room(bytes))
        };
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.sort_by(|a, b| all[*a].0.cost.total_cmp(&all[*b].0.cost));
        let Some(fastest) = order.iter().copied().find(|n| fits(*n)) else {
            if let Some(reduced) = self.fastest_with_less_memory(&all, &order, None) {
                return Some((reduced, None));
            }
            let (n, _) =
                bytes.iter().enumerate().filter_map(|(n, b)| Some((n, b.flatten()?))).min_by_key(|(_, b)| *b)?;
            return Some((Estimate { fits: false, ..all[n].0.clone() }, None));
        };
        let limit = all[fastest].0.cost * (1.0 - EQUAL);
        if let Some(reduced) = self.fastest_with_less_memory(&all, &order, Some(limit)) {
            return Some((reduced, Some(all[fastest].0.clone())));
        }
        let equal = |n: &usize| all[*n].0.cost <= all[fastest].0.cost * (1.0 + EQUAL);
        let first = (0..all.len()).filter(equal).find(|n| fits(*n))?;
        let of = |n: usize| (&all[n].0.mesh, all[n].0.cost, all[n].0.values);
        let next = order.into_iter().filter(|n| of(*n) != of(first)).find(|n| fits(*n));
        Some((all[first].0.clone(), next.map(|n| all[n].0.clone())))
    }

    pub(super) fn steps(&self) -> usize {
        self.loops.iter().map(|l| l.steps).sum()
    }
}

/// Predicts the time of a step of a denoising loop with `blocks` transformer blocks, in milliseconds.
pub(crate) fn step_ms(network: &Network, build: &Build, chip: &Chip, blocks: usize) -> f64 {
    let bound = bound(network, &build.layout, Some(chip), build.quantization, blocks);
    StepTime::predict(&network.program, chip, bound.weights).total()
}

/// Relative difference below which two costs count as equal, so that the layout with fewer rules is chosen. For
/// comparison: on four H100s, the costs of `ring` and `sequence` are estimated to differ by 1.2 % and were measured to
/// differ by 1.0 to 1.8 %.
const EQUAL: f64 = 0.01;
