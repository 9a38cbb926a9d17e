//! Workloads of a search: the requests whose loops a layout must run.

use super::SearchRequest;
use super::result::ComparedLoop;
use crate::config::{Case, CliOverrides, load};
use crate::pipeline::layouts::{Devices, Estimator, Extent};
use crate::pipeline::programs::ProgramKind;
use crate::request;
use crate::tune::error::Result;

/// Request of one size.
pub(super) struct Workload<'a> {
    shape: Option<String>,
    given: CliOverrides,
    /// Arguments that give a child the same.
    settings: Vec<String>,
    pub(super) estimator: Estimator<'a>,
}

/// Number of videos at a time, with a request of each size.
pub(super) struct Batch<'a> {
    pub(super) extent: Extent,
    pub(super) workloads: Vec<Workload<'a>>,
    /// Weight of the time of its steps: that of one video.
    pub(super) weight: f64,
    /// End of its layouts' labels, where numbers are compared.
    pub(super) suffix: String,
}

impl<'a> Batch<'a> {
    /// # Errors
    /// A shape that is not three numbers, a configuration that is refused, a loop that its requests do not run.
    pub(super) fn new(request: &SearchRequest, videos: Option<usize>, devices: Devices<'a>) -> Result<Self> {
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
        Ok(Batch { extent, workloads, weight: 1.0 / extent.videos.max(1) as f64, suffix })
    }

    /// Arguments, configuration and kind of each program.
    pub(super) fn each(&self) -> impl Iterator<Item = (&[String], &CliOverrides, ProgramKind)> {
        self.workloads.iter().flat_map(|w| w.estimator.loops.iter().map(|l| (&*w.settings, &w.given, l.kind)))
    }

    /// A label without its end.
    pub(super) fn without_suffix<'s>(&self, label: &'s str) -> &'s str {
        label.strip_suffix(&self.suffix).unwrap_or(label)
    }
}

/// Programs that all layouts are compared by: the same for each number of videos.
pub(super) fn parts(batches: &[Batch]) -> Vec<ComparedLoop> {
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
