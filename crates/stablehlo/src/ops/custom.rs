//! Custom calls of kernels that XLA or a plugin provides.

use std::fmt;

use crate::builder::{Builder, Value};
use crate::program::MemorySpace;
use crate::types::{Type, list};

/// A custom call. Which fields are required depends on its target.
#[derive(Clone, Debug, Default)]
pub struct CustomCall {
    /// Name under which the target is registered.
    pub target: String,
    /// Version of the calling convention (`api_version`): 1 or 2 (configuration as a string), or 4 (typed FFI).
    pub api_version: u32,
    /// Configuration as a string, usually JSON.
    pub backend_config: String,
    /// Typed configuration of version 4. If it is not empty, it replaces `backend_config`.
    pub attributes: Vec<(String, Attribute)>,
    /// Dimension order of each operand, from minor to major. Empty: the default.
    pub operand_layouts: Vec<Vec<usize>>,
    /// Dimension order of each result, from minor to major. Empty: the default.
    pub result_layouts: Vec<Vec<usize>>,
    /// Results that are written into the memory of an operand, which has the same type.
    pub aliases: Vec<ResultAlias>,
    /// Whether the call has a side effect. If so, it is not removed when its results are unused.
    pub has_side_effect: bool,
}

/// A result of a custom call that shares the memory of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResultAlias {
    /// Index of the result, of which the call has several.
    pub result: usize,
    /// Index of the operand.
    pub operand: usize,
}

/// A value in the typed configuration of a custom call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// A string attribute.
    Text(String),
    /// A 32-bit integer attribute.
    I32(i32),
    /// A 64-bit integer attribute.
    I64(i64),
    /// A boolean attribute.
    Bool(bool),
}

impl fmt::Display for Attribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attribute::Text(text) => write!(f, "\"{}\"", escape(text)),
            Attribute::I32(value) => write!(f, "{value} : i32"),
            Attribute::I64(value) => write!(f, "{value} : i64"),
            Attribute::Bool(value) => write!(f, "{value}"),
        }
    }
}

impl Value {
    /// Returns a copy of the value in another memory space. XLA turns the annotation into an asynchronous copy, and
    /// removes it if the value is already there.
    pub fn copy_to(&self, memory: MemorySpace) -> Value {
        let text = format!(
            "stablehlo.custom_call @annotate_device_placement({}) {{backend_config = \"\", has_side_effect = true, \
             mhlo.frontend_attributes = {{_xla_buffer_placement = \"{}\"}}}} : ({ty}) -> {ty}",
            self.local(),
            memory.name(),
            ty = self.ty
        );
        self.b.op("copy_to", text, self.ty.clone()).with_sharding(self.sharding.clone())
    }
}

impl Builder {
    /// Adds a custom call.
    pub fn custom_call(&self, call: &CustomCall, operands: &[&Value], results: &[Type]) -> Vec<Value> {
        let layouts = |l: &[Vec<usize>]| {
            list(l.iter().map(|o| match o.is_empty() {
                true => "dense<> : tensor<0xindex>".to_string(),
                false => format!("dense<[{}]> : tensor<{}xindex>", list(o), o.len()),
            }))
        };
        let mut attributes = vec![
            format!("api_version = {} : i32", call.api_version.max(1)),
            match call.attributes.is_empty() {
                true => format!("backend_config = \"{}\"", escape(&call.backend_config)),
                false => {
                    let pairs = call.attributes.iter().map(|(key, value)| format!("{key} = {value}"));
                    format!("backend_config = {{{}}}", list(pairs))
                }
            },
            format!("call_target_name = \"{}\"", escape(&call.target)),
        ];
        if call.has_side_effect {
            attributes.push("has_side_effect = true".into());
        }
        if !call.operand_layouts.is_empty() {
            attributes.push(format!("operand_layouts = [{}]", layouts(&call.operand_layouts)));
        }
        if !call.result_layouts.is_empty() {
            attributes.push(format!("result_layouts = [{}]", layouts(&call.result_layouts)));
        }
        if !call.aliases.is_empty() {
            let aliases = call.aliases.iter().map(|ResultAlias { result, operand }| {
                format!(
                    "#stablehlo.output_operand_alias<output_tuple_indices = [{result}], operand_index = {operand}, \
                     operand_tuple_indices = []>"
                )
            });
            attributes.push(format!("output_operand_aliases = [{}]", list(aliases)));
        }
        let text = format!(
            "\"stablehlo.custom_call\"({}) <{{{}}}> : ({}) -> ({})",
            list(operands.iter().map(|o| o.local())),
            list(attributes),
            list(operands.iter().map(|o| &o.ty)),
            list(results)
        );
        self.op_many("custom_call", text, results)
    }
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' | 0..=0x1f | 0x7f.. => out.extend(["\\", &hex::encode_upper([byte])]),
            b => out.push(char::from(b)),
        }
    }
    out
}
