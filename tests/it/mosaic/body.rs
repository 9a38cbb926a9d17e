//! Runs the body of a function, one operation after the other, and checks every declared type.

use std::collections::HashMap;

use super::text::{Element, Function, Op, Result, Type, attribute, numbers, pieces};
use super::values::{Tensor, each_index};

/// Blocks in on-chip memory, by argument name.
pub type Memory = HashMap<String, Tensor>;

/// Values of the function so far.
pub struct Body<'a> {
    values: HashMap<String, Tensor>,
    memory: &'a mut Memory,
}

impl<'a> Body<'a> {
    /// Runs a function on integers and on the blocks in `memory`; returns its integer results.
    pub fn run(function: &Function, numbers: &[i64], memory: &'a mut Memory) -> Result<Vec<i64>> {
        let mut body = Body { values: HashMap::new(), memory };
        for ((name, _), n) in function.arguments.iter().zip(numbers) {
            body.values.insert(name.clone(), Tensor::scalar(Element::I32, *n as f64));
        }
        body.ops(&function.body)?.ok_or_else(|| "a function that does not return".into())
    }

    fn ops(&mut self, ops: &[Op]) -> Result<Option<Vec<i64>>> {
        for op in ops {
            let wrong = |e: String| format!("{e}\n  in {} {}", op.name, op.text);
            match op.name.as_str() {
                "return" => {
                    let numbers = pieces(&op.text).iter().map(|n| self.value(n)?.int()).collect::<Result<_>>();
                    return numbers.map(Some).map_err(wrong);
                }
                "scf.if" => {
                    let branch =
                        if self.value(&op.text).map_err(wrong)?.int()? != 0 { &op.then } else { &op.otherwise };
                    if self.ops(branch)?.is_some() {
                        return Err("a return inside of a branch".into());
                    }
                }
                "tpu.vector_store" => self.store(op).map_err(wrong)?,
                _ => {
                    let value = self.op(op).map_err(wrong)?;
                    // The type of a comparison is that of its operands.
                    if !op.name.starts_with("arith.cmp") {
                        value.is(op.types.last().ok_or("no type")?).map_err(wrong)?;
                    }
                    self.values.insert(op.result.clone().ok_or("no name")?, value);
                }
            }
        }
        Ok(None)
    }

    fn value(&self, name: &str) -> Result<&Tensor> {
        self.values.get(name).ok_or_else(|| format!("no value {name}"))
    }

    /// Returns the operands after checking their declared types.
    fn operands<const N: usize>(&self, text: &str, types: &[Type]) -> Result<[&Tensor; N]> {
        let names = pieces(text);
        let found: Vec<&Tensor> = names.iter().map(|n| self.value(n)).collect::<Result<_>>()?;
        for (i, value) in found.iter().enumerate() {
            value.is(types.get(i).or(types.last()).ok_or("no type")?)?;
        }
        found.try_into().map_err(|_| format!("{} operands, not {N}", names.len()))
    }

    fn op(&self, op: &Op) -> Result<Tensor> {
        let (text, types) = (op.text.as_str(), &op.types[..]);
        let to = types.last().ok_or("no type")?;
        let element = match to {
            Type::Scalar(e) | Type::Vector(e, _) | Type::Block(e, _) => *e,
        };
        let binary = |f: fn(f64, f64) -> f64| {
            let [a, b] = self.operands(text, types)?;
            a.zip(b, element, f)
        };
        let floats = matches!(element, Element::F32 | Element::BF16);
        match op.name.as_str() {
            "arith.constant" => Tensor::full(to, constant(text, floats)?),
            "arith.addi" | "arith.addf" => binary(|a, b| a + b),
            "arith.subi" | "arith.subf" => binary(|a, b| a - b),
            "arith.muli" | "arith.mulf" => binary(|a, b| a * b),
            "arith.divf" => binary(|a, b| a / b),
            "arith.divsi" => binary(|a, b| (a / b).trunc()),
            "arith.andi" => binary(|a, b| ((a as i64) & (b as i64)) as f64),
            "arith.ori" => binary(|a, b| ((a as i64) | (b as i64)) as f64),
            "arith.maximumf" => binary(|a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }),
            "math.exp2" => self.unary(text, to, f64::exp2),
            "math.exp" => self.unary(text, to, f64::exp),
            "arith.cmpi" | "arith.cmpf" => self.compared(op),
            "arith.select" => {
                let mask = if types.len() == 1 { Type::Scalar(Element::I1) } else { types[0].clone() };
                let [mask, yes, no] = self.operands(text, &[mask, to.clone()])?;
                if !mask.dims.is_empty() && mask.dims != yes.dims {
                    return Err("a mask of another shape".into());
                }
                let holds = |i: usize| mask.data[if mask.dims.is_empty() { 0 } else { i }] != 0.0;
                let data = (0..yes.data.len()).map(|i| if holds(i) { yes.data[i] } else { no.data[i] }).collect();
                Ok(Tensor::new(yes.element, yes.dims.clone(), data))
            }
            "arith.truncf" | "arith.extf" | "arith.extui" | "arith.index_cast" => {
                let [x] = self.operands(text, types)?;
                Ok(x.map(element, |x| x))
            }
            "vector.load" => self.load(op),
            "vector.shape_cast" | "vector.broadcast" => {
                let [x] = self.operands(text, types)?;
                let Type::Vector(_, dims) = to else { return Err("not to a vector".into()) };
                if op.name == "vector.broadcast" { x.broadcast(dims) } else { x.reshaped(dims) }
            }
            "vector.multi_reduction" => self.reduced(op),
            "tpu.iota" => {
                let Type::Vector(Element::I32, dims) = to else { return Err("an iota of no integers".into()) };
                let [axis] = numbers(attribute(text, "dimensions")?)?[..] else { return Err("one axis".into()) };
                let mut data = Vec::new();
                each_index(dims, |at| data.push(at[axis] as f64));
                Ok(Tensor::new(Element::I32, dims.clone(), data))
            }
            "tpu.concatenate" => self.joined(op),
            "tpu.matmul" => self.product(op),
            other => Err(format!("unknown operation {other}")),
        }
    }

    fn unary(&self, text: &str, ty: &Type, f: fn(f64) -> f64) -> Result<Tensor> {
        let [x] = self.operands(text, std::slice::from_ref(ty))?;
        Ok(x.map(x.element, f))
    }

    fn compared(&self, op: &Op) -> Result<Tensor> {
        let (how, operands) = op.text.split_once(',').ok_or("no predicate")?;
        let [a, b] = self.operands(operands, &op.types)?;
        let f: fn(f64, f64) -> bool = match how {
            "eq" | "oeq" => |a, b| a == b,
            "ne" => |a, b| a != b,
            "slt" => |a, b| a < b,
            "sle" => |a, b| a <= b,
            "sge" => |a, b| a >= b,
            "sgt" => |a, b| a > b,
            _ => return Err(format!("unknown predicate {how}")),
        };
        a.zip(b, Element::I1, |a, b| f64::from(u8::from(f(a, b))))
    }

    fn reduced(&self, op: &Op) -> Result<Tensor> {
        let (how, rest) = op.text.split_once(", ").ok_or("no kind")?;
        let operands = rest.strip_suffix(" [1]").ok_or("not over the last dimension")?;
        let [x, start] = self.operands(operands, &op.types)?;
        match how {
            "<maximumf>" => x.reduced(start, |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }),
            "<add>" => x.reduced(start, |a, b| a + b),
            _ => Err(format!("unknown reduction {how}")),
        }
    }

    fn joined(&self, op: &Op) -> Result<Tensor> {
        let operands = op.text.strip_suffix(" in 1").ok_or("not along the last dimension")?;
        let parts: Vec<&Tensor> = pieces(operands).iter().map(|n| self.value(n)).collect::<Result<_>>()?;
        let rows = parts[0].dims[0];
        if parts.iter().zip(&op.types).any(|(p, ty)| p.is(ty).is_err()) || parts.iter().any(|p| p.dims[0] != rows) {
            return Err("parts of other shapes than declared".into());
        }
        let row = |p: &Tensor, r: usize| p.data[r * p.dims[1]..(r + 1) * p.dims[1]].to_vec();
        let data = (0..rows).flat_map(|r| parts.iter().flat_map(move |p| row(p, r))).collect();
        let columns = parts.iter().map(|p| p.dims[1]).sum();
        Ok(Tensor::new(parts[0].element, vec![rows, columns], data))
    }

    fn product(&self, op: &Op) -> Result<Tensor> {
        let (operands, attributes) = op.text.split_once(" {").ok_or("no attributes")?;
        let [a, b, start] = self.operands(operands, &op.types)?;
        let turned = match attribute(attributes, "dimension_numbers")? {
            "#tpu.dot_dimension_numbers<[1], [1], [0], [0], [0, 0, 1, 0], [], []>" => true,
            "#tpu.dot_dimension_numbers<[1], [0], [0], [1], [0, 0, 1, 1], [], []>" => false,
            other => return Err(format!("unknown dimensions {other}")),
        };
        if attribute(attributes, "transpose_lhs_hint")? != "false" {
            return Err("a transposed operand".into());
        }
        let exact = attribute(attributes, "precision").ok() == Some("#tpu.contract_precision<fp32>");
        if a.element == Element::F32 && !exact {
            return Err("a product of f32 that may drop digits".into());
        }
        a.product(b, start, turned)
    }

    /// Returns the block that a load or store refers to, and checks that it covers the last two dimensions.
    fn place(&self, op: &Op) -> Result<(String, usize)> {
        let (name, rest) = op.text.split_once('[').ok_or("no index")?;
        let (index, _) = rest.split_once(']').ok_or("no index")?;
        let index: Vec<i64> = pieces(index).iter().map(|n| self.value(n)?.int()).collect::<Result<_>>()?;
        let (Some(Type::Block(element, dims)), Some(Type::Vector(_, part))) = (op.types.first(), op.types.get(1))
        else {
            return Err("not a block and a vector".into());
        };
        if dims.len() != part.len() || dims.len() != index.len() {
            return Err("ranks differ".into());
        }
        let n = dims.len();
        let tile = |axis: usize| match (n - axis, element) {
            (1, _) => 128,
            (2, Element::BF16) => 16,
            (2, _) => 8,
            _ => 1,
        };
        for (axis, ((&d, &p), &i)) in dims.iter().zip(part).zip(&index).enumerate() {
            if i < 0 || i as usize + p > d {
                return Err(format!("{p} at {i} of {d}: beyond the block"));
            }
            let whole = p == d && i == 0;
            let aligned = p.is_multiple_of(tile(axis)) && (i as usize).is_multiple_of(tile(axis));
            if !whole && !aligned {
                return Err(format!("{p} at {i} of {d}: not aligned to {}", tile(axis)));
            }
            if p != d && axis + 2 < n {
                return Err("a part of an outer dimension".into());
            }
        }
        let strides = dims.iter().skip(1).rev().fold(vec![1], |mut s, d| {
            s.push(s.last().unwrap_or(&1) * d);
            s
        });
        let start = index.iter().rev().zip(&strides).map(|(&i, &s)| i as usize * s).sum();
        if part[n - 1] != dims[n - 1] {
            return Err("a part of a row".into());
        }
        Ok((name.to_string(), start))
    }

    fn load(&self, op: &Op) -> Result<Tensor> {
        let (name, start) = self.place(op)?;
        let block = self.memory.get(&name).ok_or("no such block")?;
        let Type::Vector(element, dims) = &op.types[1] else { return Err("not a vector".into()) };
        let length: usize = dims.iter().product();
        Ok(Tensor::new(*element, dims.clone(), block.data[start..start + length].to_vec()))
    }

    fn store(&mut self, op: &Op) -> Result<()> {
        let (name, start) = self.place(op)?;
        let (_, value) = op.text.split_once("], ").ok_or("no value")?;
        let value = value.strip_suffix(" {strides = array<i32>}").ok_or("a store with strides")?;
        let value = self.value(value)?.clone();
        value.is(&op.types[1])?;
        let block = self.memory.get_mut(&name).ok_or("no such block")?;
        block.data[start..start + value.data.len()].copy_from_slice(&value.data);
        Ok(())
    }
}

/// Parses `1.0e0`, `7`, `dense<0.0>`, `0xFF800000`.
fn constant(text: &str, float: bool) -> Result<f64> {
    let text = text.trim_start_matches("dense<").trim_end_matches('>');
    if let Some(bits) = text.strip_prefix("0x").filter(|_| float) {
        return u32::from_str_radix(bits, 16).map(|b| f64::from(f32::from_bits(b))).map_err(|e| e.to_string());
    }
    // Parsing as f64 would round numbers halfway between two f32 values twice.
    text.parse::<f32>().map(f64::from).map_err(|_| format!("constant '{text}'"))
}
