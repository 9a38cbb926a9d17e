//! Formats an optimized module as text with one instruction per line. Computations are ordered by id.

use std::fmt::Write;

use super::module::Module;
use super::proto::{InstructionProto, ShapeProto};
use super::shape::dtype_name;

impl Module {
    /// Returns the module as text that resembles XLA's HLO text, with the name scope at the end of each line. The text
    /// is for reading only: attributes that this crate does not use are omitted.
    pub fn listing(&self) -> String {
        let mut out = String::new();
        for computation in self.computations() {
            let entry = if computation.id == self.entry() { "ENTRY " } else { "" };
            let _ = writeln!(out, "{entry}{} {{", computation.name);
            for i in self.scheduled(computation) {
                let root = if i.id == computation.root_id { "ROOT " } else { "" };
                let _ = writeln!(out, "  {root}{}", self.line(i));
            }
            out.push_str("}\n\n");
        }
        out
    }

    fn line(&self, i: &InstructionProto) -> String {
        let operands: Vec<&str> =
            i.operand_ids.iter().filter_map(|&id| self.instruction(id)).map(|o| o.name.as_str()).collect();
        let shape = i.shape.as_ref().map(shape_text).unwrap_or_default();
        let mut line = format!("{} = {shape} {}({})", i.name, i.opcode, operands.join(", "));
        for &c in &i.called_computation_ids {
            if let Some(c) = self.computation(c) {
                let _ = write!(line, ", calls={}", c.name);
            }
        }
        if i.opcode == "get-tuple-element" {
            let _ = write!(line, ", index={}", i.tuple_index);
        }
        if i.opcode == "parameter" {
            let _ = write!(line, ", number={}", i.parameter_number);
        }
        if !i.custom_call_target.is_empty() {
            let _ = write!(line, ", target={}", i.custom_call_target);
        }
        if i.channel_id > 0 {
            let _ = write!(line, ", channel={}", i.channel_id);
        }
        if !i.comparison_direction.is_empty() {
            let _ = write!(line, ", direction={}", i.comparison_direction);
        }
        if let Some(l) = &i.literal {
            let _ = write!(line, ", value={:?}", [l.s32s.first().map(|v| i64::from(*v)), l.s64s.first().copied()]);
        }
        if let Some(m) = i.metadata.as_ref().filter(|m| !m.op_name.is_empty()) {
            let _ = write!(line, ", scope={}", m.op_name);
        }
        line
    }
}

fn shape_text(s: &ShapeProto) -> String {
    if !s.tuple_shapes.is_empty() {
        return format!("({})", s.tuple_shapes.iter().map(shape_text).collect::<Vec<_>>().join(", "));
    }
    let dims: Vec<String> = s.dimensions.iter().map(ToString::to_string).collect();
    let layout = s.layout.as_ref().map_or(String::new(), |l| {
        let order: Vec<String> = l.minor_to_major.iter().map(ToString::to_string).collect();
        let space = if l.memory_space > 0 { format!(":S({})", l.memory_space) } else { String::new() };
        if order.len() > 1 || !space.is_empty() { format!("{{{}{space}}}", order.join(",")) } else { String::new() }
    });
    format!("{}[{}]{layout}", dtype_name(s.element_type), dims.join(","))
}
