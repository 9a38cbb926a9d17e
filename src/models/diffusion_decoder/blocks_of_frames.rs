//! Blocks of frames on devices, of which each is as large as its windows reach: what is beyond a neighbour's cannot be fetched.

use super::COMPONENT;
use super::config::DiffusionDecoderConfig;
use super::neighborhood::{block, ends_at_neighbors};
use crate::nn::{Axis, Build};

/// The same choices with rows and columns of latents of `[frames, rows, columns]` over as many of their mesh axes, outer ones
/// first, as leave large enough blocks; and what was left out, a line each.
pub(super) fn with_large_blocks(
    c: &DiffusionDecoderConfig,
    latents: [usize; 3],
    build: &Build,
) -> (Build, Vec<String>) {
    let (mut build, mut notes) = (build.clone(), Vec::new());
    let tensor = format!("{COMPONENT}.latents");
    for (axis, dim) in [(Axis::Height, 1), (Axis::Width, 2)] {
        let all = build.layout.mesh_axes(&tensor, axis).len();
        let over = |n: usize| build.layout.with_outer_axes(&format!("{COMPONENT}.*"), &tensor, axis, n);
        let fits = |n: &usize| is_local(c, &build, dim, latents[dim], over(*n).parts(&tensor, axis));
        let Some(n) = (0..all).rev().find(fits).filter(|_| !fits(&all)) else { continue };
        let whole = build.layout.mesh_axes(&tensor, axis);
        let name = if dim == 1 { "rows" } else { "columns" };
        notes.push(format!(
            "{COMPONENT}: {} {name} of latents over {} have blocks that windows reach beyond; over {} alone",
            latents[dim],
            whole.join(" x "),
            if n == 0 { "no axis".into() } else { whole[..n].join(" x ") }
        ));
        build = Build { layout: over(n), ..build.clone() };
    }
    (build, notes)
}

/// Whether every stage's windows see no further than neighbours' cells, where `size` latents are split over `parts` devices.
fn is_local(c: &DiffusionDecoderConfig, build: &Build, dim: usize, size: usize, parts: usize) -> bool {
    let latents = size.div_ceil(parts);
    let mut stages = c.stages.iter().map(|stage| (stage.kernel, stage.stride)).chain([(c.kernel, [1; 3])]);
    let (mut own, even) = (latents, latents * parts == size);
    let fits = |(kernel, stride): ([usize; 3], [usize; 3])| {
        let fits = ends_at_neighbors(own, even, kernel[dim], block(build.lowering)[dim]);
        own *= stride[dim];
        fits
    };
    parts == 1 || stages.all(fits)
}
