//! Finds the tensor that a collective moves and the layout rules that shard the tensor.

use crate::analysis::{Collective, CollectiveKind};
use crate::hlo::DeviceMesh;
use crate::nn::ValuePlacement;

/// Returns the placement of the tensor that a collective most likely moves. Candidates are the tensors that are sharded
/// along the collective's axes. The best candidate shares the longest prefix of the name scope. Among equals, a tensor
/// that explains the collective's number of bytes is preferred, and then the shortest scope. `layers` is the leading
/// dimension of stacked layer weights.
///
/// This is an inference: the compiler keeps the scope of the operation that needed the collective, not the tensor's
/// name. `None` if no scope matches.
pub(crate) fn cause<'a>(
    c: &Collective,
    placements: &'a [ValuePlacement],
    mesh: &DeviceMesh,
    layers: usize,
) -> Option<&'a ValuePlacement> {
    let scope: Vec<&str> = c.scope.split('/').filter(|p| !p.is_empty()).collect();
    let score = |p: &ValuePlacement| -> Option<(usize, bool, usize)> {
        let along = |axis: &String| c.axes.contains(axis);
        if p.rules.is_empty() || !p.sharding.0.iter().flatten().any(along) {
            return None;
        }
        let of: Vec<&str> = p.scope.split('/').filter(|p| !p.is_empty()).collect();
        let common = scope.iter().zip(&of).take_while(|(a, b)| a == b).count();
        (common > 0).then(|| (common, fits(c, p, mesh, layers), usize::MAX - of.len()))
    };
    // `max_by_key` returns the last of several equal elements; iterating in reverse makes that the first placement.
    let scored = placements.iter().rev().filter_map(|p| Some((score(p)?, p)));
    scored.max_by_key(|(score, _)| *score).map(|(_, p)| p)
}

/// Returns whether a collective of this kind on the tensor would have the observed number of bytes.
fn fits(c: &Collective, p: &ValuePlacement, mesh: &DeviceMesh, layers: usize) -> bool {
    let split = |keep: &dyn Fn(&String) -> bool| -> usize {
        p.sharding.0.iter().flatten().filter(|a| keep(a)).filter_map(|a| mesh.size(a)).product()
    };
    let parts = match c.kind {
        // An all-gather's result is replicated along its axes.
        CollectiveKind::AllGather => split(&|a| !c.axes.contains(a)),
        _ => split(&|_| true),
    };
    let bytes = (p.ty.bytes() / parts.max(1)) as f64;
    let stack = p.ty.dims.first() == Some(&layers);
    c.bytes == bytes || (stack && c.bytes * layers as f64 == bytes)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::analysis::LoopLevel;
    use crate::hlo::{DType, Sharding, Type};
    use crate::nn::{Axis, Role};

    fn placement(scope: &str, tensor: &str, dims: &[usize], sharding: &[&[&str]]) -> ValuePlacement {
        ValuePlacement {
            scope: scope.into(),
            tensor: tensor.into(),
            ty: Type::new(DType::BF16, dims),
            axes: vec![Axis::Replicated; dims.len()],
            sharding: Sharding::new(sharding),
            role: Role::Parameter,
            rules: vec![format!("l.yml:1: {tensor}")],
        }
    }

    /// Returns a collective along the axis `context` in a block.
    pub(in crate::tune) fn collective(kind: CollectiveKind, scope: &str) -> Collective {
        Collective {
            kind,
            scope: scope.into(),
            dtype: "bf16".into(),
            bytes: 1.0,
            wire_bytes: 1.0,
            axes: vec!["context".into()],
            level: LoopLevel::Block,
            times: 1.0,
            asynchronous: false,
            overlapped: false,
            seconds: 0.0,
        }
    }

    #[test]
    fn cause_is_the_nearest_tensor_of_matching_size() {
        let mesh = DeviceMesh::new(&[("cfg", 2), ("fsdp", 4)]);
        let all = [
            placement("blocks/ff/proj", "w1", &[6, 64, 256], &[&[], &["fsdp"], &[]]),
            placement("blocks/ff/proj", "b1", &[6, 256], &[&[], &["fsdp"]]),
            placement("blocks/ff", "hidden", &[2, 32, 256], &[&["cfg"], &[], &[]]),
            placement("blocks/attn1", "q", &[2, 32, 64], &[&["cfg"], &["fsdp"], &[]]),
        ];
        let gather = |scope: &str, bytes: f64, axes: &[&str]| {
            let axes = axes.iter().map(|a| (*a).to_string()).collect();
            Collective { bytes, axes, ..collective(CollectiveKind::AllGather, scope) }
        };
        let named = |c: &Collective| cause(c, &all, &mesh, 6).map(|p| p.tensor.as_str());
        assert_eq!(named(&gather("blocks/ff/proj", 32768.0, &["fsdp"])), Some("w1"));
        assert_eq!(named(&gather("blocks/ff/proj", 512.0, &["fsdp"])), Some("b1"));
        assert_eq!(named(&gather("blocks/attn1/sdpa", 4096.0, &["fsdp"])), Some("q"));
        assert_eq!(named(&gather("blocks/ff", 1.0, &["cfg"])), Some("hidden"));
        assert_eq!(named(&gather("euler", 1.0, &["fsdp"])), None);
    }
}
