//! Determines the trip counts of loops: from the compiler's annotation if there is one, otherwise from the loop
//! condition.
//!
//! A condition that compares a counter with a constant determines the count. Both are traced through copies, fusions
//! and the carried values of enclosing loops. A loop whose bound depends on data has no count.

use super::module::Module;
use super::proto::{ComputationProto, InstructionProto};

/// Call stack of a computation: the instruction `by` that calls it, and the call stack `from` of the caller.
#[derive(Clone, Copy)]
pub(super) struct CallStack<'a> {
    pub by: &'a InstructionProto,
    pub from: Option<&'a CallStack<'a>>,
}

/// A scalar that equals a carried value of the innermost loop plus an offset. Without a carried value, the scalar is a
/// constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Linear {
    carried: Option<i64>,
    offset: i64,
}

/// Maximum number of instructions that are followed to determine a value.
const DEPTH: usize = 200;

impl Module {
    /// Returns the body and the condition of a `while`.
    pub(super) fn body_and_condition(&self, i: &InstructionProto) -> Option<(&ComputationProto, &ComputationProto)> {
        let called: Vec<&ComputationProto> =
            i.called_computation_ids.iter().filter_map(|&c| self.computation(c)).collect();
        match called.as_slice() {
            [body, condition] => Some((body, condition)),
            _ => None,
        }
    }

    /// Returns the trip count of a `while`; `None` if the loop's bound depends on data.
    pub(super) fn trip_count(&self, i: &InstructionProto, from: Option<&CallStack>) -> Option<u64> {
        if let Some(noted) = noted_trip_count(&i.backend_config) {
            return Some(noted);
        }
        let (_, condition) = self.body_and_condition(i)?;
        let inside = CallStack { by: i, from };
        let (compare, at) = self.comparison(self.root(condition)?, &inside)?;
        let sides = [0, 1].map(|n| self.operand(compare, n).and_then(|o| self.linear(o, Some(at.entered()), DEPTH)));
        let [left, right] = [sides[0]?, sides[1]?];
        // The counter is the side of the comparison that the body changes.
        let step = |side: Linear| side.carried.and_then(|e| self.step(i, e, &inside)).filter(|s| *s != 0);
        let (counter, bound, step, direction) = match (step(left), step(right)) {
            (Some(s), None) => (left, right, s, compare.comparison_direction.as_str()),
            (None, Some(s)) => (right, left, s, mirrored(&compare.comparison_direction)),
            _ => return None,
        };
        let bound = self.fixed(bound, i, from)?;
        let start = self.initial(i, counter.carried?, from)?.checked_add(counter.offset)?;
        count(start, bound, step, direction)
    }

    /// Returns the comparison that computes a condition. The comparison may be inside a fusion.
    fn comparison<'a>(
        &'a self,
        root: &'a InstructionProto,
        inside: &'a CallStack<'a>,
    ) -> Option<(&'a InstructionProto, ComparisonStack<'a>)> {
        let mut root = root;
        while let "copy" | "bitcast" = root.opcode.as_str() {
            root = self.operand(root, 0)?;
        }
        match root.opcode.as_str() {
            "compare" => Some((root, ComparisonStack::Here(inside))),
            "fusion" | "call" => {
                let called = self.computation(*root.called_computation_ids.first()?)?;
                let inner = self.root(called)?;
                (inner.opcode == "compare")
                    .then_some((inner, ComparisonStack::Called(CallStack { by: root, from: Some(inside) })))
            }
            _ => None,
        }
    }

    /// Returns by how much a carried value increases per iteration; `None` if this depends on data.
    fn step(&self, i: &InstructionProto, element: i64, inside: &CallStack) -> Option<i64> {
        let (body, _) = self.body_and_condition(i)?;
        let next = self.element(self.root(body)?, element)?;
        let next = self.linear(next, Some(inside), DEPTH)?;
        (next.carried == Some(element)).then_some(next.offset)
    }

    /// Returns the value if it is the same constant in every iteration of the loop `i`; `None` if it changes or depends
    /// on data.
    fn fixed(&self, value: Linear, i: &InstructionProto, from: Option<&CallStack>) -> Option<i64> {
        let Some(element) = value.carried else { return Some(value.offset) };
        let inside = CallStack { by: i, from };
        (self.step(i, element, &inside)? == 0).then_some(())?;
        self.initial(i, element, from)?.checked_add(value.offset)
    }

    /// Returns the initial value of a carried value; `None` if it depends on data.
    fn initial(&self, i: &InstructionProto, element: i64, from: Option<&CallStack>) -> Option<i64> {
        let start = self.element(self.operand(i, 0)?, element)?;
        let value = self.linear(start, from, DEPTH)?;
        match value.carried {
            None => Some(value.offset),
            // The enclosing loop carries the value, which is a constant only if this loop does not change it.
            Some(_) => {
                let outer = innermost_loop(from)?;
                self.fixed(value, outer.by, outer.from)
            }
        }
    }

    /// Returns the operand of a `tuple` instruction with this index.
    fn element<'a>(&'a self, tuple: &'a InstructionProto, index: i64) -> Option<&'a InstructionProto> {
        let mut tuple = tuple;
        while let "copy" | "optimization-barrier" | "opt-barrier" = tuple.opcode.as_str() {
            tuple = self.operand(tuple, 0)?;
        }
        (tuple.opcode == "tuple").then(|| self.operand(tuple, usize::try_from(index).ok()?))?
    }

    fn linear(&self, i: &InstructionProto, at: Option<&CallStack>, depth: usize) -> Option<Linear> {
        let depth = depth.checked_sub(1)?;
        let operand = |n: usize| self.operand(i, n).and_then(|o| self.linear(o, at, depth));
        match i.opcode.as_str() {
            "constant" => {
                let l = i.literal.as_ref()?;
                let value = l
                    .s32s
                    .first()
                    .map(|v| i64::from(*v))
                    .or(l.s64s.first().copied())
                    .or(l.u32s.first().map(|v| i64::from(*v)))
                    .or(l.u64s.first().map(|v| *v as i64))?;
                Some(Linear { carried: None, offset: value })
            }
            "copy" | "bitcast" | "convert" | "reshape" | "copy-start" | "copy-done" => operand(0),
            "add" | "subtract" => {
                // Each operand gets half of the remaining depth, so that nested sums take a limited time.
                let half = |n: usize| self.operand(i, n).and_then(|o| self.linear(o, at, depth / 2));
                let (a, b) = (half(0)?, half(1)?);
                let adds = i.opcode == "add";
                let carried = match (a.carried, b.carried) {
                    (carried, None) => carried,
                    (None, carried) if adds => carried,
                    _ => return None,
                };
                let offset = if adds { a.offset.checked_add(b.offset) } else { a.offset.checked_sub(b.offset) };
                Some(Linear { carried, offset: offset? })
            }
            "fusion" | "call" => {
                let called = self.computation(*i.called_computation_ids.first()?)?;
                self.linear(self.root(called)?, Some(&CallStack { by: i, from: at }), depth)
            }
            "parameter" => {
                let at = at?;
                match at.by.opcode.as_str() {
                    "fusion" | "call" => {
                        let given = self.operand(at.by, usize::try_from(i.parameter_number).ok()?)?;
                        self.linear(given, at.from, depth)
                    }
                    _ => None,
                }
            }
            "get-tuple-element" => {
                let tuple = self.operand(i, 0)?;
                match tuple.opcode.as_str() {
                    "parameter" if at.is_some_and(|a| a.by.opcode == "while") => {
                        Some(Linear { carried: Some(i.tuple_index), offset: 0 })
                    }
                    "tuple" => self.linear(self.element(tuple, i.tuple_index)?, at, depth),
                    "fusion" => {
                        let called = self.computation(*tuple.called_computation_ids.first()?)?;
                        let inner = self.element(self.root(called)?, i.tuple_index)?;
                        self.linear(inner, Some(&CallStack { by: tuple, from: at }), depth)
                    }
                    _ => None,
                }
            }
            _ => None,
        }
    }
}

/// Call stack of the computation that contains the comparison: the `while` condition, or a computation that the
/// condition calls.
enum ComparisonStack<'a> {
    Here(&'a CallStack<'a>),
    Called(CallStack<'a>),
}

impl<'a> ComparisonStack<'a> {
    fn entered(&self) -> &CallStack<'a> {
        match self {
            ComparisonStack::Here(e) => e,
            ComparisonStack::Called(e) => e,
        }
    }
}

fn innermost_loop<'a>(mut at: Option<&'a CallStack<'a>>) -> Option<&'a CallStack<'a>> {
    while let Some(entered) = at {
        if entered.by.opcode == "while" {
            return Some(entered);
        }
        at = entered.from;
    }
    None
}

fn mirrored(direction: &str) -> &'static str {
    match direction {
        "LT" => "GT",
        "LE" => "GE",
        "GT" => "LT",
        "GE" => "LE",
        _ => "NE",
    }
}

fn count(start: i64, bound: i64, step: i64, direction: &str) -> Option<u64> {
    let [start, bound, step] = [start, bound, step].map(i128::from);
    let distance = match (direction, step > 0) {
        ("LT", true) | ("GT", false) | ("NE", _) => bound - start,
        ("LE", true) => bound - start + 1,
        ("GE", false) => bound - start - 1,
        _ => return None,
    };
    let trips = (distance + step - step.signum()) / step;
    u64::try_from(trips.max(0)).ok()
}

/// Parses the annotation of the CPU and GPU compilers: `{"known_trip_count":{"n":"48"}}`.
fn noted_trip_count(backend_config: &[u8]) -> Option<u64> {
    let config: serde_json::Value = serde_json::from_slice(backend_config).ok()?;
    let n = config.get("known_trip_count")?.get("n")?;
    n.as_u64().or_else(|| n.as_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::super::proto::LiteralProto;
    use super::*;
    use crate::sketch::{computation, decode, instruction};

    #[test]
    fn trip_count_follows_from_start_bound_step_and_direction() {
        assert_eq!(count(0, 48, 1, "LT"), Some(48));
        assert_eq!(count(0, 7, 2, "LT"), Some(4));
        assert_eq!(count(1, 3, 1, "LE"), Some(3));
        assert_eq!(count(5, 0, -1, "GT"), Some(5));
        assert_eq!(count(5, 0, 1, "LT"), Some(0));
        assert_eq!(count(0, 4, 1, "NE"), Some(4));
        assert_eq!(count(0, 4, 1, "GT"), None);
        assert_eq!(count(i64::MIN, i64::MAX, 1, "LT"), Some(u64::MAX));
        assert_eq!(count(i64::MAX, i64::MIN, -1, "GE"), None, "exceeds u64::MAX by one");
        assert_eq!(count(0, i64::MIN, -1, "NE"), Some(1 << 63));
    }

    #[test]
    fn overflowing_sums_are_not_constants() {
        let constant = |id: i64, value: i64| InstructionProto {
            literal: Some(LiteralProto { s64s: vec![value], ..LiteralProto::default() }),
            ..instruction(id, "constant", &[])
        };
        let instructions = vec![
            constant(1, i64::MIN),
            constant(2, 5),
            instruction(3, "add", &[1, 2]),
            instruction(4, "add", &[1, 1]),
            instruction(5, "subtract", &[2, 1]),
            instruction(6, "subtract", &[2, 2]),
        ];
        let module = decode(1, vec![computation(1, instructions)]).expect("a module");
        let value = |id: i64| module.linear(module.instruction(id).expect("it"), None, DEPTH).map(|l| l.offset);
        assert_eq!([3, 4, 5, 6].map(value), [Some(i64::MIN + 5), None, None, Some(0)]);
    }

    #[test]
    fn known_trip_count_annotation_is_read() {
        assert_eq!(noted_trip_count(br#"{"known_trip_count":{"n":"48"},"known_init_step":{"init":"0"}}"#), Some(48));
        assert_eq!(noted_trip_count(b"{}"), None);
        assert_eq!(noted_trip_count(b""), None);
    }
}
