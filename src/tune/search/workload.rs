//! Workloads of a search: the requests whose loops a layout must run.

use super::SearchRequest;
use super::result::ComparedLoop;
use crate::config::{Case, CliOverrides, load};
use crate::pipeline::plan::layouts::{Estimator, Extent, RankingDevices};
use crate::pipeline::programs::build::ProgramKind;
use crate::request;
use crate::tune::error::Result;

/// A request of one video size.
pub(super) struct Workload<'a> {
    shape: Option<String>,
    given: CliOverrides,
    /// Arguments that give a child process the same configuration.
    settings: Vec<String>,
    pub(super) estimator: Estimator<'a>,
}

/// A batch size, with one request for each video size.
pub(super) struct WorkloadBatch<'a> {
    pub(super) extent: Extent,
    pub(super) workloads: Vec<Workload<'a>>,
    /// Factor that converts the time of a batch to the time per video.
    pub(super) weight: f64,
    /// Suffix of layout labels for this batch size; empty if there is only one batch size.
    pub(super) suffix: String,
}

impl<'a> WorkloadBatch<'a> {
    /// Creates a batch of `videos` videos (`None`: as configured), with one request for each video size.
    ///
    /// # Errors
    /// Returns an error if a shape does not consist of three numbers, if the configuration is invalid, or if the
    /// requests do not run the selected loop.
    pub(super) fn new(request: &SearchRequest, videos: Option<usize>, devices: RankingDevices<'a>) -> Result<Self> {
        let sizes = request.shapes.iter().cloned().map(Some);
        let sizes: Vec<Option<String>> = if request.shapes.is_empty() { vec![None] } else { sizes.collect() };
        let mut workloads = Vec::new();
        let mut extent = Extent { devices: devices.count, videos: 1, branches: 1 };
        for shape in sizes {
            let size = Case { shape: shape.clone(), ..Case::default() };
            let mut given = request.given.clone();
            given.set.extend(size.size_settings()?);
            given.set.extend(videos.map(|n| format!("request.num_videos={n}")));
            let config = load(&given)?.config;
            extent.videos = config.request.num_videos;
            extent.branches = request::branches(&config).len();
            let files = given.files.iter().flat_map(|file| ["-c".to_string(), file.clone()]);
            let settings = files.chain(given.set.iter().flat_map(|s| ["--set".to_string(), s.clone()])).collect();
            let estimator = Estimator::new(&config, devices, request.program)?;
            workloads.push(Workload { shape, given, settings, estimator });
        }
        let plural = if extent.videos == 1 { "" } else { "s" };
        let suffix = format!(", {} video{plural}", extent.videos);
        let suffix = if request.videos.len() > 1 { suffix } else { String::new() };
        Ok(WorkloadBatch { extent, workloads, weight: 1.0 / extent.videos.max(1) as f64, suffix })
    }

    /// Iterates over the programs. Items: the arguments of a child process, the configuration, and the program's kind.
    pub(super) fn each(&self) -> impl Iterator<Item = (&[String], &CliOverrides, ProgramKind)> {
        self.workloads.iter().flat_map(|w| w.estimator.loops.iter().map(|l| (&*w.settings, &w.given, l.kind)))
    }

    /// Removes the suffix of this batch size from a label.
    pub(super) fn without_suffix<'s>(&self, label: &'s str) -> &'s str {
        label.strip_suffix(&self.suffix).unwrap_or(label)
    }
}

/// Returns the programs by which all layouts are compared; they are the same for each batch size.
pub(super) fn parts(batches: &[WorkloadBatch]) -> Vec<ComparedLoop> {
    let workloads = batches.first().map_or(&[][..], |batch| &batch.workloads);
    let of = |w: &Workload| {
        let alone = w.estimator.loops.len() == 1;
        let shape = w.shape.clone();
        let each = w.estimator.loops.iter().map(move |l| {
            let kind = (!alone).then(|| l.kind.flag().to_string());
            let name = shape.iter().cloned().chain(kind).collect::<Vec<_>>().join(" ");
            ComparedLoop { name, steps: l.steps }
        });
        each.collect::<Vec<_>>()
    };
    workloads.iter().flat_map(of).collect()
}
