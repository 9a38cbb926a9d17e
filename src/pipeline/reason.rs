//! Why a program has a collective: what about the placements asked for it.

use std::fmt;

use crate::analysis::{Collective, Kind};
use crate::nn::{Axis, Placement, Role};

/// Why there is an exchange. As [`super::cause`], an inference from name scope, axes and kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A weight that the storage rules split is gathered before its use.
    Stored,
    /// A product sums over a dimension that is split: every device has a part of the sum.
    Contracting {
        /// What is summed over.
        axis: String,
    },
    /// Two tensors that meet are split over the same devices along different dimensions.
    Disagree {
        /// The tensor that moves, and its split dimension.
        moved: String,
        /// The one it meets.
        other: String,
    },
    /// Attention over a sequence that is split: the layout's exchange.
    Exchange,
    /// A sum over a dimension that is split: statistics of a norm, of guidance.
    Statistics,
    /// A size that does not divide.
    Padding {
        /// What the layout said of it.
        note: String,
    },
    /// An operation wants whole what is split.
    WantsWhole {
        /// The dimension.
        axis: String,
    },
    /// No placed tensor is near.
    Unknown,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Stored => f.write_str("stored in pieces, gathered before its use"),
            Reason::Contracting { axis } => write!(f, "contracting dimension sharded: a product sums over {axis}"),
            Reason::Disagree { moved, other } => write!(f, "neighbours disagree: {moved}, {other}"),
            Reason::Exchange => f.write_str("attention over a split sequence"),
            Reason::Statistics => f.write_str("a sum over a split dimension"),
            Reason::Padding { note } => write!(f, "padding: {note}"),
            Reason::WantsWhole { axis } => write!(f, "the next operation wants {axis} whole"),
            Reason::Unknown => f.write_str("the compiler's own: no placed tensor is near"),
        }
    }
}

/// Why a collective is there. `cause` is the tensor it serves, `notes` what the layout could not split.
pub fn reason(c: &Collective, cause: Option<&Placement>, all: &[Placement], notes: &[String]) -> Reason {
    let Some(p) = cause else { return Reason::Unknown };
    if let Some(note) = notes.iter().find(|n| n.contains(&format!("'{}'", p.tensor))) {
        return Reason::Padding { note: note.clone() };
    }
    let axis = split_axis(p, c).map_or_else(|| "a dimension".to_string(), Axis::name);
    let sums = matches!(c.kind, Kind::AllReduce | Kind::ReduceScatter);
    if c.scope.split('/').any(|s| s == "sdpa") {
        return Reason::Exchange;
    }
    match p.role {
        Role::Stored => Reason::Stored,
        _ if is_vector(p) && sums => Reason::Statistics,
        Role::Parameter if sums => Reason::Contracting { axis },
        Role::Parameter => match meets(p, c, all) {
            Some((other, its)) => Reason::Disagree {
                moved: format!("the weight is split over {} by {axis}", c.axes.join("+")),
                other: format!("what it meets ({}) by {}", other.tensor, its.name()),
            },
            None => Reason::WantsWhole { axis },
        },
        Role::Activation if sums => Reason::Statistics,
        Role::Activation => Reason::WantsWhole { axis },
    }
}

fn is_vector(p: &Placement) -> bool {
    p.axes.iter().filter(|a| **a != Axis::Layers).count() < 2
}

/// The logical axis of a tensor that is split over the collective's devices.
fn split_axis(p: &Placement, c: &Collective) -> Option<Axis> {
    p.axes.iter().zip(&p.sharding.0).find(|(_, s)| s.iter().any(|a| c.axes.contains(a))).map(|(axis, _)| *axis)
}

/// The nearest activation that is split over the same devices along a dimension that the tensor has not.
fn meets<'a>(p: &Placement, c: &Collective, all: &'a [Placement]) -> Option<(&'a Placement, Axis)> {
    let own = scope_of(p);
    let near = all.iter().filter(|o| o.role == Role::Activation).filter_map(|o| {
        let axis = split_axis(o, c).filter(|a| !p.axes.contains(a))?;
        let common = own.iter().zip(scope_of(o)).take_while(|(a, b)| **a == *b).count();
        (common > 0).then_some((common, o, axis))
    });
    near.fold(None, |best: Option<(usize, &Placement, Axis)>, x| match best {
        Some(b) if b.0 >= x.0 => Some(b),
        _ => Some(x),
    })
    .map(|(_, o, axis)| (o, axis))
}

fn scope_of(p: &Placement) -> Vec<&str> {
    p.scope.split('/').filter(|s| !s.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Phase;
    use crate::hlo::{DType, Sharding, Type};

    fn placement(scope: &str, role: Role, axes: &[Axis], sharding: &[&[&str]]) -> Placement {
        Placement {
            scope: scope.into(),
            tensor: format!("t.{scope}"),
            ty: Type::new(DType::BF16, vec![8usize; axes.len()]),
            axes: axes.to_vec(),
            sharding: Sharding::new(sharding),
            rules: vec!["l.yml:1".into()],
            role,
        }
    }

    fn collective(kind: Kind, scope: &str) -> Collective {
        Collective {
            kind,
            scope: scope.into(),
            dtype: "bf16".into(),
            bytes: 1.0,
            wire_bytes: 1.0,
            axes: vec!["context".into()],
            phase: Phase::Layer,
            times: 1.0,
            asynchronous: false,
            overlapped: false,
            seconds: 0.0,
        }
    }

    #[test]
    fn each_reason_is_told() {
        let weight = placement("blocks/ff/proj", Role::Parameter, &[Axis::Mlp, Axis::Embed], &[&[], &["context"]]);
        let tokens = placement(
            "blocks/ff",
            Role::Activation,
            &[Axis::CfgBatch, Axis::VideoSequence, Axis::Mlp],
            &[&[], &["context"], &[]],
        );
        let all = [weight.clone(), tokens.clone()];
        let gather = collective(Kind::AllGather, "blocks/ff/proj");
        let told = |c: &Collective, p: Option<&Placement>| reason(c, p, &all, &[]).to_string();
        assert_eq!(
            told(&gather, Some(&weight)),
            "neighbours disagree: the weight is split over context by embed, what it meets (t.blocks/ff) by \
             video_sequence"
        );
        let sum = collective(Kind::AllReduce, "blocks/ff/proj");
        assert_eq!(told(&sum, Some(&weight)), "contracting dimension sharded: a product sums over embed");
        let stored = Placement { role: Role::Stored, ..weight.clone() };
        assert_eq!(reason(&gather, Some(&stored), &all, &[]), Reason::Stored);
        assert_eq!(
            reason(&collective(Kind::AllGather, "blocks/attn1/sdpa"), Some(&tokens), &all, &[]),
            Reason::Exchange
        );
        assert_eq!(told(&gather, Some(&tokens)), "the next operation wants video_sequence whole");
        assert_eq!(reason(&sum, Some(&tokens), &all, &[]), Reason::Statistics);
        assert_eq!(reason(&gather, None, &all, &[]), Reason::Unknown);
        let notes = ["tensor 't.blocks/ff' does not divide".to_string()];
        assert!(matches!(reason(&gather, Some(&tokens), &all, &notes), Reason::Padding { .. }));
    }
}
