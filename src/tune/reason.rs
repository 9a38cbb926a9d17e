//! Infers the reason for a collective: the property of the tensors' shardings that requires it.

use std::fmt;

use crate::analysis::{Collective, CollectiveKind};
use crate::nn::{Axis, Role, ValuePlacement};

/// Reason for a collective, inferred from its name scope, mesh axes and kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// An FSDP-sharded parameter is gathered before it is used.
    FsdpSharded,
    /// A matmul's contracting dimension is sharded, so each device has a partial sum.
    Contracting {
        axis: String,
    },
    /// Two operands are sharded over the same devices, but along different dimensions.
    ShardingMismatch {
        /// The tensor that is moved, and its sharded dimension.
        moved: String,
        other: String,
    },
    ContextParallel,
    /// An operation reduces over a sharded dimension, for example in a norm or in guidance.
    Reduction,
    /// The size of a dimension is not divisible by the size of the mesh axis that shards it.
    Padding {
        note: String,
    },
    /// The next operation requires a sharded dimension to be replicated.
    RequiresReplicated {
        axis: String,
    },
    /// No tensor with a known sharding is near the collective.
    Unknown,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::FsdpSharded => f.write_str("FSDP-sharded parameter, gathered before use"),
            Reason::Contracting { axis } => write!(f, "contracting dimension sharded: a matmul reduces over {axis}"),
            Reason::ShardingMismatch { moved, other } => write!(f, "sharding mismatch: {moved}, {other}"),
            Reason::ContextParallel => f.write_str("context-parallel attention"),
            Reason::Reduction => f.write_str("reduction over a sharded dimension"),
            Reason::Padding { note } => write!(f, "padding: {note}"),
            Reason::RequiresReplicated { axis } => write!(f, "the next operation requires {axis} replicated"),
            Reason::Unknown => f.write_str("compiler-inserted: no annotated tensor nearby"),
        }
    }
}

/// Infers the reason for a collective. `cause` is the placement of the tensor that it moves; `notes` lists dimensions
/// that the layout could not shard.
pub(crate) fn reason(
    c: &Collective,
    cause: Option<&ValuePlacement>,
    all: &[ValuePlacement],
    notes: &[String],
) -> Reason {
    let Some(p) = cause else { return Reason::Unknown };
    if let Some(note) = notes.iter().find(|n| n.contains(&format!("'{}'", p.tensor))) {
        return Reason::Padding { note: note.clone() };
    }
    let axis = split_axis(p, c).map_or_else(|| "a dimension".to_string(), Axis::name);
    let sums = matches!(c.kind, CollectiveKind::AllReduce | CollectiveKind::ReduceScatter);
    if c.scope.split('/').any(|s| s == "sdpa") {
        return Reason::ContextParallel;
    }
    match p.role {
        Role::FsdpSharded => Reason::FsdpSharded,
        _ if is_vector(p) && sums => Reason::Reduction,
        Role::Parameter if sums => Reason::Contracting { axis },
        Role::Parameter => match meets(p, c, all) {
            Some((other, its)) => Reason::ShardingMismatch {
                moved: format!("the weight is sharded over {} along {axis}", c.axes.join("+")),
                other: format!("its operand ({}) along {}", other.tensor, its.name()),
            },
            None => Reason::RequiresReplicated { axis },
        },
        Role::Activation if sums => Reason::Reduction,
        Role::Activation => Reason::RequiresReplicated { axis },
    }
}

fn is_vector(p: &ValuePlacement) -> bool {
    p.axes.iter().filter(|a| **a != Axis::Layers).count() < 2
}

/// Returns the logical axis along which a tensor is sharded over the collective's devices.
fn split_axis(p: &ValuePlacement, c: &Collective) -> Option<Axis> {
    p.axes.iter().zip(&p.sharding.0).find(|(_, s)| s.iter().any(|a| c.axes.contains(a))).map(|(axis, _)| *axis)
}

/// Returns the nearest activation that is sharded over the same devices along an axis that the tensor does not have.
fn meets<'a>(p: &ValuePlacement, c: &Collective, all: &'a [ValuePlacement]) -> Option<(&'a ValuePlacement, Axis)> {
    let own = scope_of(p);
    // `max_by_key` returns the last of several equal elements; iterating in reverse makes that the first placement.
    let near = all.iter().rev().filter(|o| o.role == Role::Activation).filter_map(|o| {
        let axis = split_axis(o, c).filter(|a| !p.axes.contains(a))?;
        let common = own.iter().zip(scope_of(o)).take_while(|(a, b)| **a == *b).count();
        (common > 0).then_some((common, o, axis))
    });
    near.max_by_key(|(common, ..)| *common).map(|(_, o, axis)| (o, axis))
}

fn scope_of(p: &ValuePlacement) -> Vec<&str> {
    p.scope.split('/').filter(|s| !s.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlo::{DType, Sharding, Type};
    use crate::tune::cause::tests::collective;

    fn placement(scope: &str, role: Role, axes: &[Axis], sharding: &[&[&str]]) -> ValuePlacement {
        ValuePlacement {
            scope: scope.into(),
            tensor: format!("t.{scope}"),
            ty: Type::new(DType::BF16, vec![8usize; axes.len()]),
            axes: axes.to_vec(),
            sharding: Sharding::new(sharding),
            rules: vec!["l.yml:1".into()],
            role,
        }
    }

    /// The table of reasons in the tuning guide contains the text of each reason, as `ltx2 why` prints it.
    #[test]
    fn each_reason_is_in_the_tuning_guide() {
        let guide = include_str!("../../docs/guides/tuning.md");
        let text = String::new;
        let all = [
            Reason::FsdpSharded,
            Reason::Contracting { axis: text() },
            Reason::ShardingMismatch { moved: text(), other: text() },
            Reason::ContextParallel,
            Reason::Reduction,
            Reason::Padding { note: text() },
            Reason::RequiresReplicated { axis: text() },
            Reason::Unknown,
        ];
        for reason in all.map(|reason| reason.to_string()) {
            // The table leaves out what follows: tensors, notes, and the replicated axis.
            let start = reason.split([',', ':']).next().unwrap().trim_end_matches("  replicated");
            assert!(guide.contains(&format!("| {start} |")), "{start}");
        }
    }

    #[test]
    fn each_reason_is_inferred() {
        let weight = placement("blocks/ff/proj", Role::Parameter, &[Axis::Mlp, Axis::Embed], &[&[], &["context"]]);
        let tokens = placement(
            "blocks/ff",
            Role::Activation,
            &[Axis::CfgBatch, Axis::VideoSequence, Axis::Mlp],
            &[&[], &["context"], &[]],
        );
        let all = [weight.clone(), tokens.clone()];
        let gather = collective(CollectiveKind::AllGather, "blocks/ff/proj");
        let text = |c: &Collective, p: Option<&ValuePlacement>| reason(c, p, &all, &[]).to_string();
        assert_eq!(
            text(&gather, Some(&weight)),
            "sharding mismatch: the weight is sharded over context along embed, its operand (t.blocks/ff) along \
             video_sequence"
        );
        let sum = collective(CollectiveKind::AllReduce, "blocks/ff/proj");
        assert_eq!(text(&sum, Some(&weight)), "contracting dimension sharded: a matmul reduces over embed");
        let stored = ValuePlacement { role: Role::FsdpSharded, ..weight.clone() };
        assert_eq!(reason(&gather, Some(&stored), &all, &[]), Reason::FsdpSharded);
        assert_eq!(
            reason(&collective(CollectiveKind::AllGather, "blocks/attn1/sdpa"), Some(&tokens), &all, &[]),
            Reason::ContextParallel
        );
        assert_eq!(text(&gather, Some(&tokens)), "the next operation requires video_sequence replicated");
        assert_eq!(reason(&sum, Some(&tokens), &all, &[]), Reason::Reduction);
        assert_eq!(reason(&gather, None, &all, &[]), Reason::Unknown);
        let notes = ["tensor 't.blocks/ff' does not divide".to_string()];
        assert!(matches!(reason(&gather, Some(&tokens), &all, &notes), Reason::Padding { .. }));
    }
}
