//! Logical axes and their mapping to mesh axes. Models refer only to logical axes.

use serde::{Deserialize, Serialize};

use super::context_parallel::ContextParallelPolicy;
use ltx2_stablehlo::{DeviceMesh, Groups, Sharding, Type};

/// Logical axis of a parameter or activation dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Videos of a batch, not multiplied by the guidance branches.
    Batch,
    /// Guidance branches: conditional, negative, …
    Branch,
    /// Videos times guidance branches, with videos as the outer factor; sharded by the rules of `batch` and `branch`.
    #[serde(rename = "rows")]
    CfgBatch,
    /// Tokens of the transformer's video stream.
    VideoSequence,
    /// Tokens of the transformer's audio stream.
    AudioSequence,
    /// Tokens of the prompt or of its text embeddings.
    TextSequence,
    /// Width of the residual stream, as the input or output axis of weights.
    Embed,
    /// Attention heads; only the query heads if keys and values use `KvHeads`.
    Heads,
    /// Key and value heads, which query heads may share.
    KvHeads,
    /// Features of one attention head.
    HeadDim,
    /// Inner width of a feed-forward layer.
    Mlp,
    /// Layers of a stacked parameter.
    Layers,
    /// Rows of an embedding table.
    Vocab,
    /// Video frames.
    Frames,
    /// Rows of video frames or latents, in the video autoencoder, the upsampler and the diffusion decoder.
    Height,
    /// Columns of video frames or latents, in the same networks as `Height`.
    Width,
    /// Channels of latents, in the per-channel mean and standard deviation that normalize them.
    Channels,
    /// Audio samples of a waveform.
    Samples,
    /// Never sharded.
    #[serde(rename = "whole")]
    Replicated,
}

impl Axis {
    /// Returns the name of the axis in layout files.
    pub fn name(self) -> String {
        let name = serde_json::to_value(self).expect("an axis has a JSON form");
        name.as_str().expect("an axis serializes as a string").into()
    }

    /// Returns whether the axis may be padded to a divisible size. This holds for batch and sequence axes, whose
    /// padding does not affect the results.
    fn is_padded(self) -> bool {
        matches!(self, Axis::CfgBatch | Axis::Batch | Axis::Branch) || self.is_sequence()
    }

    /// Returns whether the axis is a sequence of tokens.
    fn is_sequence(self) -> bool {
        matches!(self, Axis::VideoSequence | Axis::AudioSequence | Axis::TextSequence)
    }
}

/// Error of a layout that does not match the mesh or a tensor.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum LayoutError {
    /// A rule refers to a mesh axis that the mesh does not have.
    #[error("{rule}: mesh axis '{mesh_axis}' does not exist; the mesh has {mesh}")]
    UnknownMeshAxis {
        /// Rule that refers to the missing mesh axis, with its location.
        rule: Rule,
        /// Name of the missing mesh axis.
        mesh_axis: String,
        /// Axes of the mesh, as `name=size` joined by commas.
        mesh: String,
    },
    /// A mesh axis shards a tensor twice: two of its dimensions, or one dimension by two rules.
    #[error("tensor '{tensor}' {ty} is sharded twice by mesh axis '{mesh_axis}' ({rules})")]
    AxisUsedTwice {
        /// Tensor name that layout rules match, `component.name`.
        tensor: String,
        /// Global (unsharded) type, such as `tensor<8x8xbf16>`.
        ty: String,
        /// Mesh axis that is used twice.
        mesh_axis: String,
        /// The rules, as `file:line: axis: [mesh axes]` joined by semicolons.
        rules: String,
    },
}

/// A rule of a layout file: the mesh axes that shard a logical axis, outermost first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    /// Logical axis that the rule shards.
    pub axis: Axis,
    /// Names of the mesh axes, outermost first. Empty: the rule does not shard the axis.
    pub mesh_axes: Vec<String>,
    /// Location of the rule, `file:line`.
    pub place: String,
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}: [{}]", self.place, self.axis.name(), self.mesh_axes.join(", "))
    }
}

/// Rules for tensors whose names match a pattern, in which `*` matches any text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Override {
    /// Pattern for `component.name`, such as `*.ff.net.0.proj.weight`.
    pub pattern: String,
    /// Rules that take precedence over the general rules for the same axes.
    pub rules: Vec<Rule>,
}

impl Override {
    /// Returns whether the pattern matches `tensor`, a name of the form `component.name`.
    pub fn covers(&self, tensor: &str) -> bool {
        matches(&self.pattern, tensor)
    }
}

/// A mesh and the rules that map logical axes to it. The default is a single device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Devices, arranged along named axes.
    pub mesh: DeviceMesh,
    /// Rules for the sharding of tensors during computation.
    pub rules: Vec<Rule>,
    /// Additional sharding of weights while they are not in use (FSDP); each weight is gathered right before its use.
    pub storage: Vec<Rule>,
    /// Rules for individual tensors; they take precedence over the general rules.
    pub overrides: Vec<Override>,
    /// Context parallelism of sharded sequences.
    pub context_parallel: ContextParallelPolicy,
}

/// Placement of a tensor and the rules that determine it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedPlacement {
    /// Mesh axes of each dimension.
    pub sharding: Sharding,
    /// Rules that shard a dimension.
    pub rules: Vec<Rule>,
    /// One line for each dimension that stays replicated because its size is not divisible by the number of shards:
    /// tensor, sizes and rule.
    pub notes: Vec<String>,
}

/// A dimension of a tensor and its logical axis.
struct Dimension<'a> {
    tensor: &'a str,
    ty: &'a Type,
    dim: usize,
    axis: Axis,
}

impl Layout {
    /// Creates a layout and checks that its rules refer to existing mesh axes.
    ///
    /// # Errors
    /// Returns [`LayoutError::UnknownMeshAxis`] if a rule refers to a mesh axis that does not exist.
    pub fn new(
        mesh: DeviceMesh,
        rules: Vec<Rule>,
        storage: Vec<Rule>,
        overrides: Vec<Override>,
        context_parallel: ContextParallelPolicy,
    ) -> Result<Self, LayoutError> {
        let all = rules.iter().chain(&storage).chain(overrides.iter().flat_map(|e| &e.rules));
        for rule in all {
            if let Some(bad) = rule.mesh_axes.iter().find(|a| mesh.size(a).is_none()) {
                let names = mesh.axes.iter().map(|(n, s)| format!("{n}={s}")).collect::<Vec<_>>().join(",");
                return Err(LayoutError::UnknownMeshAxis { rule: rule.clone(), mesh_axis: bad.clone(), mesh: names });
            }
        }
        Ok(Layout { mesh, rules, storage, overrides, context_parallel })
    }

    /// Returns the layout for programs with a single guidance branch: the mesh axes that shard guidance branches shard
    /// video tokens instead, unless another rule also uses these mesh axes. Weights keep their placement, so that
    /// programs of both layouts share them.
    #[must_use]
    pub(crate) fn for_single_branch(&self) -> Layout {
        let of = |axis: Axis| self.rules.iter().find(|r| r.axis == axis);
        let Some(branch) = of(Axis::Branch).filter(|r| !r.mesh_axes.is_empty()) else { return self.clone() };
        // The transformer's tensors have no frame, height or width axes, and rules for other components do not affect
        // it.
        let apart = [Axis::Branch, Axis::Frames, Axis::Height, Axis::Width];
        let of_transformer = |e: &&Override| {
            let fixed = e.pattern.split('*').next().unwrap_or_default();
            "transformer.".starts_with(fixed) || fixed.starts_with("transformer.")
        };
        let special = self.overrides.iter().filter(of_transformer).flat_map(|e| &e.rules);
        let others = self.rules.iter().chain(&self.storage).chain(special);
        let mut others = others.filter(|r| !apart.contains(&r.axis));
        if others.any(|r| r.mesh_axes.iter().any(|a| branch.mesh_axes.contains(a))) {
            return self.clone();
        }
        let free = |rules: &[Rule]| -> Vec<Rule> {
            let sequence = |r: &Rule| r.axis == Axis::VideoSequence && !r.mesh_axes.is_empty();
            let rules = rules.iter().filter(|r| r.axis != Axis::Branch).map(|r| match sequence(r) {
                true => Rule { mesh_axes: [&branch.mesh_axes[..], &r.mesh_axes].concat(), ..r.clone() },
                false => r.clone(),
            });
            rules.collect()
        };
        let mut rules = free(&self.rules);
        if of(Axis::VideoSequence).is_none() {
            rules.push(Rule { axis: Axis::VideoSequence, ..branch.clone() });
        }
        let overrides = self.overrides.iter().map(|e| Override { rules: free(&e.rules), ..e.clone() }).collect();
        Layout { rules, overrides, ..self.clone() }
    }

    /// Returns this layout with an additional override for the tensors that match `pattern`: it shards `axis` over only
    /// the `count` outermost of the mesh axes that shard it in `tensor`, which is one of these tensors.
    pub fn with_outer_axes(&self, pattern: &str, tensor: &str, axis: Axis, count: usize) -> Layout {
        let Some(rule) = self.rules_of(tensor, axis).first().map(|r| (*r).clone()) else { return self.clone() };
        let mesh_axes = self.mesh_axes(tensor, axis).into_iter().take(count).collect();
        let special = Override { pattern: pattern.into(), rules: vec![Rule { mesh_axes, ..rule }] };
        Layout { overrides: [std::slice::from_ref(&special), &self.overrides].concat(), ..self.clone() }
    }

    /// Returns whether the mesh is a single device.
    pub fn is_single(&self) -> bool {
        self.mesh.devices() == 1
    }

    /// Returns the rules that shard an axis of a tensor, outermost first; up to two for [`Axis::CfgBatch`].
    fn rules_of(&self, tensor: &str, axis: Axis) -> Vec<&Rule> {
        let find = |axis: Axis| {
            let special = self.overrides.iter().filter(|e| e.covers(tensor)).flat_map(|e| &e.rules);
            special.chain(&self.rules).find(|r| r.axis == axis)
        };
        match axis {
            Axis::Replicated => Vec::new(),
            Axis::CfgBatch => [Axis::Batch, Axis::Branch].into_iter().filter_map(find).collect(),
            other => find(other).into_iter().collect(),
        }
    }

    /// Returns the mesh axes that shard an axis of a tensor, outermost first.
    pub fn mesh_axes(&self, tensor: &str, axis: Axis) -> Vec<String> {
        self.rules_of(tensor, axis).iter().flat_map(|r| r.mesh_axes.iter().cloned()).collect()
    }

    /// Returns the number of shards of an axis of a tensor.
    pub fn parts(&self, tensor: &str, axis: Axis) -> usize {
        self.mesh_axes(tensor, axis).iter().filter_map(|a| self.mesh.size(a)).product()
    }

    /// Returns the groups of devices that differ only in their shard of an axis, ordered by shard.
    pub fn groups(&self, tensor: &str, axis: Axis) -> Groups {
        let axes = self.mesh_axes(tensor, axis);
        self.mesh.groups(&axes.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Returns the type with the CFG batch and sequences padded to sizes that are divisible by their numbers of shards.
    /// Results do not depend on the padding. A sequence whose length is not divisible is padded to a multiple of `unit`
    /// tokens per device.
    pub fn padded(&self, tensor: &str, ty: &Type, axes: &[Axis], unit: usize) -> Type {
        let mut padded = ty.clone();
        for (size, &axis) in padded.dims.iter_mut().zip(axes) {
            let parts = self.parts(tensor, axis).max(1);
            if axis.is_padded() && !size.is_multiple_of(parts) {
                *size = size.next_multiple_of(parts * if axis.is_sequence() { unit } else { 1 });
            }
        }
        padded
    }

    /// Returns the placement of a tensor during computation, or `None` on one device. A dimension whose size is not
    /// divisible by its number of shards stays replicated, with a note. This costs memory and time but does not change
    /// results.
    ///
    /// # Errors
    /// Returns [`LayoutError::AxisUsedTwice`] if a mesh axis shards two dimensions.
    pub fn place(&self, tensor: &str, ty: &Type, axes: &[Axis]) -> Result<Option<ResolvedPlacement>, LayoutError> {
        if self.is_single() {
            return Ok(None);
        }
        let mut placed =
            ResolvedPlacement { sharding: Sharding(vec![Vec::new(); axes.len()]), rules: Vec::new(), notes: vec![] };
        for (dim, &axis) in axes.iter().enumerate() {
            let rules = self.rules_of(tensor, axis);
            let split: Vec<String> = rules.iter().flat_map(|r| r.mesh_axes.iter().cloned()).collect();
            for (i, rule) in rules.iter().enumerate() {
                // The CFG batch has two rules. They must not use the same mesh axis either.
                let earlier = || placed.rules.iter().chain(rules[..i].iter().copied());
                let clash = |mesh_axis: &&String| earlier().any(|u| u.mesh_axes.contains(*mesh_axis));
                if let Some(mesh_axis) = rule.mesh_axes.iter().find(clash) {
                    let both = earlier().filter(|u| u.mesh_axes.contains(mesh_axis)).chain([*rule]);
                    let rules: Vec<String> = both.map(ToString::to_string).collect();
                    return Err(LayoutError::AxisUsedTwice {
                        tensor: tensor.into(),
                        ty: ty.to_string(),
                        mesh_axis: mesh_axis.clone(),
                        rules: rules.join("; "),
                    });
                }
            }
            let at = Dimension { tensor, ty, dim, axis };
            self.split(&mut placed, &at, split, rules.into_iter().cloned().collect());
        }
        Ok(Some(placed))
    }

    /// Returns the placement of a weight while it is not in use: [`Layout::place`], further sharded by the storage
    /// rules.
    pub(crate) fn place_weight(
        &self,
        tensor: &str,
        ty: &Type,
        axes: &[Axis],
    ) -> Result<Option<ResolvedPlacement>, LayoutError> {
        let Some(mut placed) = self.place(tensor, ty, axes)? else { return Ok(None) };
        // Sharding a vector costs a collective and saves no significant memory.
        if axes.iter().filter(|a| **a != Axis::Layers).count() < 2 {
            return Ok(Some(placed));
        }
        for (dim, &axis) in axes.iter().enumerate() {
            let Some(rule) = self.storage.iter().find(|r| r.axis == axis) else { continue };
            let taken: Vec<&String> = placed.sharding.0.iter().flatten().collect();
            let free = rule.mesh_axes.iter().filter(|a| !taken.contains(a)).cloned();
            let split: Vec<String> = placed.sharding.0[dim].iter().cloned().chain(free).collect();
            self.split(&mut placed, &Dimension { tensor, ty, dim, axis }, split, vec![rule.clone()]);
        }
        Ok(Some(placed))
    }

    /// Shards a dimension if its size is divisible by the number of shards, otherwise adds a note.
    fn split(&self, placed: &mut ResolvedPlacement, at: &Dimension, mesh_axes: Vec<String>, rules: Vec<Rule>) {
        if mesh_axes == placed.sharding.0[at.dim] {
            return;
        }
        let parts: usize = mesh_axes.iter().filter_map(|a| self.mesh.size(a)).product();
        if at.ty.dims[at.dim].is_multiple_of(parts) {
            placed.sharding.0[at.dim] = mesh_axes;
            placed.rules.extend(rules);
        } else {
            let uneven = self.uneven(at, &self.sizes(&mesh_axes), &rules);
            placed.notes.push(format!("{uneven}; replicated"));
        }
    }

    /// Returns the text of a note on a dimension whose size is not divisible by the number of shards: the tensor, the
    /// sizes and the rules.
    fn uneven<'a>(&self, at: &Dimension, sizes: &str, rules: impl IntoIterator<Item = &'a Rule>) -> String {
        let &Dimension { tensor, ty, dim, axis } = at;
        let rules = rules.into_iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let (name, size) = (axis.name(), ty.dims[dim]);
        format!("tensor '{tensor}' {ty}: {name} = {size} is not divisible by {sizes} ({rules})")
    }

    /// Returns a note if dimension `dim` of a tensor cannot be split into equal shards whose size is a multiple of
    /// `unit`.
    pub(crate) fn unevenness(&self, tensor: &str, ty: &Type, dim: usize, axis: Axis, unit: usize) -> Option<String> {
        let even = ty.dims[dim].is_multiple_of(self.parts(tensor, axis) * unit);
        (!even).then(|| {
            let at = Dimension { tensor, ty, dim, axis };
            let sizes = self.sizes(&self.mesh_axes(tensor, axis));
            let sizes = if unit > 1 { format!("{sizes} x {unit}") } else { sizes };
            self.uneven(&at, &sizes, self.rules_of(tensor, axis))
        })
    }

    fn sizes(&self, mesh_axes: &[String]) -> String {
        let size =
            |axis: &String| format!("{axis} = {}", self.mesh.size(axis).expect("rules refer to existing mesh axes"));
        mesh_axes.iter().map(size).collect::<Vec<_>>().join(" x ")
    }
}

/// Returns whether `name` matches a pattern in which `*` matches any text.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, tail)) => name.strip_prefix(head).is_some_and(|rest| {
            rest.char_indices().map(|(i, _)| i).chain([rest.len()]).any(|i| matches(tail, &rest[i..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ltx2_stablehlo::DType;

    fn rule(axis: Axis, mesh_axes: &[&str]) -> Rule {
        Rule { axis, mesh_axes: mesh_axes.iter().map(|a| (*a).to_string()).collect(), place: "x.yml:1".into() }
    }

    fn layout(rules: Vec<Rule>, storage: Vec<Rule>, overrides: Vec<Override>) -> Layout {
        let mesh = DeviceMesh::new(&[("cfg", 2), ("context", 4)]);
        Layout::new(mesh, rules, storage, overrides, ContextParallelPolicy::default()).expect("valid")
    }

    fn ty(dims: &[usize]) -> Type {
        Type::new(DType::BF16, dims)
    }

    #[test]
    fn star_in_pattern_matches_any_text() {
        assert!(matches("*.ff.*", "transformer.blocks.*.ff.net.0.proj.weight"));
        assert!(matches("*ff.hidden", "t.audio_ff.hidden") && !matches("*.ff.hidden", "t.audio_ff.hidden"));
        assert!(matches("a", "a") && !matches("a", "ab") && matches("*", ""));
    }

    #[test]
    fn overrides_take_precedence_over_rules() {
        let special = Override { pattern: "*.ff.*".into(), rules: vec![rule(Axis::Embed, &[])] };
        let l = layout(vec![rule(Axis::Embed, &["context"])], vec![], vec![special]);
        let of = |name: &str| l.place(name, &ty(&[8, 8]), &[Axis::Replicated, Axis::Embed]).unwrap().unwrap();
        assert_eq!(of("t.attn.to_q.weight").sharding, Sharding::new(&[&[], &["context"]]));
        assert_eq!(of("t.ff.net.weight").sharding, Sharding::new(&[&[], &[]]));
    }

    #[test]
    fn layout_errors_report_tensor_sizes_and_rule() {
        let l = layout(vec![rule(Axis::Heads, &["context"]), rule(Axis::Mlp, &["context"])], vec![], vec![]);
        let odd = l.place("t.w", &ty(&[6, 8]), &[Axis::Heads, Axis::Replicated]).unwrap().unwrap();
        assert_eq!(odd.sharding, Sharding::new(&[&[], &[]]));
        assert_eq!(
            odd.notes,
            ["tensor 't.w' tensor<6x8xbf16>: heads = 6 is not divisible by context = 4 (x.yml:1: heads: [context]); \
              replicated"]
        );
        let e = l.place("t.w", &ty(&[8, 8]), &[Axis::Heads, Axis::Mlp]).unwrap_err().to_string();
        assert!(e.starts_with("tensor 't.w' tensor<8x8xbf16> is sharded twice by mesh axis 'context'"), "{e}");
        let mesh = DeviceMesh::new(&[("cfg", 2)]);
        let e = Layout::new(mesh, vec![rule(Axis::Mlp, &["tensor"])], vec![], vec![], ContextParallelPolicy::default());
        let e = e.unwrap_err().to_string();
        assert_eq!(e, "x.yml:1: mlp: [tensor]: mesh axis 'tensor' does not exist; the mesh has cfg=2");
    }

    #[test]
    fn storage_rules_shard_matrices_but_not_vectors() {
        let l = layout(vec![], vec![rule(Axis::Embed, &["cfg", "context"])], vec![]);
        let place = |dims: &[usize], axes: &[Axis]| l.place_weight("t.w", &ty(dims), axes).unwrap().unwrap();
        let whole = Sharding::new(&[&[], &[]]);
        assert_eq!(place(&[3, 16], &[Axis::Mlp, Axis::Embed]).sharding, Sharding::new(&[&[], &["cfg", "context"]]));
        let vectors = place(&[3, 16], &[Axis::Layers, Axis::Embed]);
        assert_eq!((vectors.sharding, vectors.notes), (whole.clone(), vec![]));
        let odd = place(&[3, 12], &[Axis::Mlp, Axis::Embed]);
        assert_eq!(odd.sharding, whole);
        assert!(odd.notes[0].contains("embed = 12 is not divisible by cfg = 2 x context = 4"));
    }

    #[test]
    fn single_branch_layout_shards_tokens_over_branch_axes() {
        let one = layout(vec![rule(Axis::Branch, &["cfg"]), rule(Axis::VideoSequence, &["context"])], vec![], vec![]);
        let split = |l: &Layout, axis: Axis| l.mesh_axes("transformer.rows", axis);
        let of_one = one.for_single_branch();
        assert_eq!(
            (split(&of_one, Axis::CfgBatch), split(&of_one, Axis::VideoSequence).join(",")),
            (vec![], "cfg,context".into())
        );
        let alone = layout(vec![rule(Axis::Branch, &["cfg"])], vec![], vec![]).for_single_branch();
        assert_eq!(split(&alone, Axis::VideoSequence), ["cfg"]);
        // The layout is unchanged if the axis also shards another dimension of the transformer.
        let taken = layout(vec![rule(Axis::Branch, &["cfg"]), rule(Axis::Heads, &["cfg"])], vec![], vec![]);
        assert_eq!(taken.for_single_branch(), taken);
        // Overrides for other components have no effect.
        let special = |pattern: &str| {
            let rules = vec![rule(Axis::Branch, &["cfg"]), rule(Axis::VideoSequence, &["context"])];
            layout(rules, vec![], vec![Override { pattern: pattern.into(), rules: vec![rule(Axis::Heads, &["cfg"])] }])
        };
        assert_eq!(split(&special("text_encoder.*").for_single_branch(), Axis::VideoSequence).join(","), "cfg,context");
        assert_eq!(special("*.attn1.*").for_single_branch(), special("*.attn1.*"));
    }

    #[test]
    fn cfg_batch_is_sharded_by_batch_then_branch() {
        let l = layout(vec![rule(Axis::Branch, &["cfg"]), rule(Axis::Batch, &["context"])], vec![], vec![]);
        assert_eq!(l.mesh_axes("x", Axis::CfgBatch), ["context", "cfg"]);
        let placed = l.place("x", &ty(&[8, 3]), &[Axis::CfgBatch, Axis::Replicated]).unwrap().unwrap();
        assert_eq!(placed.sharding, Sharding::new(&[&["context", "cfg"], &[]]));
    }

    #[test]
    fn cfg_batch_and_sequences_are_padded() {
        let l = layout(vec![rule(Axis::Branch, &["cfg"]), rule(Axis::VideoSequence, &["context"])], vec![], vec![]);
        let axes = [Axis::CfgBatch, Axis::VideoSequence, Axis::Replicated];
        assert_eq!(l.padded("x", &ty(&[3, 35, 7]), &axes, 1), ty(&[4, 36, 7]));
        // A sequence that is not divisible is padded to a multiple of the kernel's unit on each device.
        assert_eq!(l.padded("x", &ty(&[3, 35, 7]), &axes, 8), ty(&[4, 64, 7]));
        assert_eq!(l.padded("x", &ty(&[2, 36, 7]), &axes, 8), ty(&[2, 36, 7]));
    }
}
