//! Limits the sharding of rows and columns so that attention windows extend at most into the shards of neighbouring
//! devices. Keys and values are exchanged only between neighbours.

use super::COMPONENT;
use super::config::DiffusionDecoderConfig;
use super::neighborhood::{block, reaches_neighbors_only};
use ltx2_nn::{Axis, Build};

/// Limits the sharding of the rows and columns of latents `[frames, rows, columns]`. Removes the innermost mesh axes of
/// a dimension until attention windows reach only into neighbouring shards. Returns the adjusted build options, and a
/// note for each dimension that is sharded over fewer axes than the layout specifies.
pub(super) fn limit_spatial_sharding(
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
            "{COMPONENT}: sharding {} latent {name} over {} would give shards smaller than the reach of the \
             attention windows; the {name} are sharded over {} instead",
            latents[dim],
            whole.join(" x "),
            if n == 0 { "no axis".into() } else { whole[..n].join(" x ") }
        ));
        build = Build { layout: over(n), ..build.clone() };
    }
    (build, notes)
}

/// Returns whether the attention windows of all stages extend at most into the neighbouring shards if `size` latents
/// are split over `parts` devices.
fn is_local(c: &DiffusionDecoderConfig, build: &Build, dim: usize, size: usize, parts: usize) -> bool {
    let latents = size.div_ceil(parts);
    let mut stages = c.stages.iter().map(|stage| (stage.kernel, stage.stride)).chain([(c.kernel, [1; 3])]);
    let (mut own, even) = (latents, latents * parts == size);
    let fits = |(kernel, stride): ([usize; 3], [usize; 3])| {
        let fits = reaches_neighbors_only(own, even, kernel[dim], block(build.lowering)[dim]);
        own *= stride[dim];
        fits
    };
    parts == 1 || stages.all(fits)
}
