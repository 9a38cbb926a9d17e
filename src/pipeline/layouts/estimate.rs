//! Estimate of a layout on a mesh: the loops of a configuration are written as programs, which takes milliseconds, and
//! summed up, each by its evaluations.

use super::super::batch::videos_at_once;
use super::super::error::Result;
use super::super::programs::{ProgramKind, Programs};
use super::super::setup;
use super::bound::{bound, needed};
use super::space::Point;
use super::time::{StepTime, received};
use crate::analysis::Chip;
use crate::config::Config;
use crate::hlo;
use crate::models::Network;
use crate::nn::{Build, Lowering, Quantization};
use crate::runtime::{Toolchain, device_bytes};

/// Devices that a layout is for.
#[derive(Clone, Copy)]
pub(crate) struct Devices<'a> {
    pub(crate) toolchain: &'a Toolchain,
    pub(crate) count: usize,
    /// Bytes a program may use on each, where there is a limit.
    pub(crate) capacity: Option<i64>,
    /// Figures that times are predicted with.
    pub(crate) chip: Option<&'a Chip>,
}

/// Loop of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loop {
    pub(crate) kind: ProgramKind,
    /// Evaluations of the transformer.
    pub(crate) steps: usize,
}

/// Layout on a mesh, with what its loops need.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Estimate {
    pub(crate) layout: String,
    pub(crate) mesh: hlo::Mesh,
    /// Milliseconds of all evaluations for all videos; received bytes where the chip is unknown.
    pub(crate) cost: f64,
    /// FLOPs of a device's matmuls in all evaluations.
    pub(crate) flops: f64,
    /// Lower bound of `cost`.
    pub(crate) bound: f64,
    /// Runs of each program: the videos that it makes at a time are those that the layout splits a batch over.
    pub(crate) runs: usize,
    /// Bytes of each loop's parameters on a device.
    pub(crate) parameters: Vec<i64>,
    /// Bytes of the loops' arguments and results on a device, but for their parameters.
    pub(crate) values: i64,
    /// Whether it fits beside the run's other parameters.
    pub(super) fits: bool,
}

/// Programs of a configuration that layouts are estimated by.
pub(crate) struct Estimator<'a> {
    pub(super) devices: Devices<'a>,
    /// Videos that are asked for.
    pub(super) videos: usize,
    programs: Programs,
    /// Build of programs, but for the layout.
    build: Build,
    pub(crate) loops: Vec<Loop>,
}

impl<'a> Estimator<'a> {
    /// Estimator of all loops of a configuration's first request, or of one.
    ///
    /// # Errors
    /// A configuration whose programs cannot be written; a loop that its requests do not run.
    pub(crate) fn new(config: &Config, devices: Devices<'a>, only: Option<ProgramKind>) -> Result<Self> {
        let alone = Config { layout: "replicated".into(), mesh: None, ..config.clone() };
        let build = setup::build_for(&alone, 1, devices.toolchain)?;
        // Blocks in a loop: the same arguments and placements, in a fraction of the time to write them one by one. Those of
        // other weights than bf16 differ from each other.
        let unroll_layers = build.lowering.unroll_layers && build.quantization != Quantization::None;
        let build = Build { lowering: Lowering { unroll_layers, ..build.lowering }, ..build };
        let programs = Programs::of(&alone, None)?;
        let all = programs.loops(config.sampler.steps);
        let asked = match only {
            Some(kind) => match all.into_iter().find(|(k, _)| *k == kind) {
                Some(of_run) => vec![of_run],
                // No layout can give the configuration a program that it does not have.
                None => programs.network(kind, &build).map(|_| vec![(kind, 1)])?,
            },
            None => all,
        };
        let loops = asked.into_iter().map(|(kind, steps)| Loop { kind, steps }).collect();
        Ok(Estimator { devices, videos: config.request.num_videos, programs, build, loops })
    }

    /// Estimate of a layout, and the loops' programs in it.
    ///
    /// # Errors
    /// Why the layout cannot be taken, in words.
    pub(crate) fn estimate(&self, point: &Point) -> std::result::Result<(Estimate, Vec<Network>), String> {
        let build = self.build_on(point)?;
        let at_once = videos_at_once(&build.layout);
        let runs = self.videos.div_ceil(at_once);
        let (mut cost, mut flops, mut least, mut values, mut parameters) = (0.0, 0.0, 0.0, 0, Vec::new());
        let mut networks = Vec::new();
        for l in &self.loops {
            let network = self.programs.network(l.kind, &build).map_err(|e| e.to_string())?;
            let own: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
            values = values.max(needed(&network) - own as i64);
            parameters.push(own as i64);
            let blocks = self.programs.layers();
            let chip = self.devices.chip;
            let bound = bound(&network, &build.layout, chip, build.quantization, blocks);
            let evaluations = (l.steps * runs) as f64;
            let program = &network.program;
            let time = |chip| StepTime::of(program, chip, bound.weights).total();
            cost += evaluations * chip.map_or_else(|| received(program), time);
            flops += evaluations * program.work.flops();
            least += evaluations * bound.cost();
            networks.push(network);
        }
        let layout = point.named.clone().unwrap_or_else(|| point.label.clone());
        let mesh = point.mesh.clone();
        Ok((Estimate { layout, mesh, cost, flops, runs, bound: least, parameters, values, fits: true }, networks))
    }

    fn build_on(&self, point: &Point) -> std::result::Result<Build, String> {
        let layout = point.source.on(point.mesh.clone()).map_err(|e| e.to_string())?;
        Ok(Build { layout, ..self.build.clone() })
    }

    /// Bytes of all parameters of a run on a device. All its programs are written for that, so it is asked of few.
    ///
    /// # Errors
    /// Why one of the programs cannot take the layout, in words.
    pub(crate) fn parameters(&self, point: &Point) -> std::result::Result<i64, String> {
        let each = self.programs.parameters(&self.build_on(point)?).map_err(|e| e.to_string())?;
        Ok(each.values().sum::<usize>() as i64)
    }

    /// Whether a layout's loops fit beside the run's other parameters.
    pub(super) fn fits(&self, estimate: &Estimate, point: &Point) -> bool {
        let needed = self.parameters(point).map(|bytes| bytes + estimate.values);
        needed.is_ok_and(|bytes| self.devices.capacity.is_none_or(|capacity| bytes <= capacity))
    }

    /// The fastest of layouts, the simplest first, that fits, and the next that is not the same; where none fits, that of least
    /// bytes.
    pub(super) fn fastest(&self, all: Vec<(Estimate, Point)>) -> Option<(Estimate, Option<Estimate>)> {
        let mut bytes: Vec<Option<Option<i64>>> = vec![None; all.len()];
        let mut fits = |n: usize| {
            let (estimate, point) = &all[n];
            let needed = *bytes[n].get_or_insert_with(|| Some(self.parameters(point).ok()? + estimate.values));
            needed.is_some_and(|bytes| self.devices.capacity.is_none_or(|capacity| bytes <= capacity))
        };
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.sort_by(|a, b| all[*a].0.cost.total_cmp(&all[*b].0.cost));
        let Some(fastest) = order.iter().copied().find(|n| fits(*n)) else {
            let (n, _) =
                bytes.iter().enumerate().filter_map(|(n, b)| Some((n, b.flatten()?))).min_by_key(|(_, b)| *b)?;
            return Some((Estimate { fits: false, ..all[n].0.clone() }, None));
        };
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

/// Estimates are not told apart below this fraction: then the layout of fewer rules is taken. On four H100s `ring` and `sequence` are
/// estimated 1.2 % apart, and were measured 1.0 to 1.8 %.
const EQUAL: f64 = 0.01;
