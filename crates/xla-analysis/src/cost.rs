//! The work of single instructions: FLOPs of matmuls and convolutions, and bytes read and written.
//!
//! The compilers' own estimates are not used, because those for TPUs ignore loops and those for CUDA require a device.
//! Elementwise arithmetic counts only by the bytes that it moves. If a custom call states its cost, that cost is used.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::category::OpCategory;
use super::collective::{CollectiveKind, is_async_marker};
use super::module::Module;
use super::proto::{ComputationProto, InstructionProto, ShapeProto, WindowDimensionProto};
use super::shape::{self, elements};

/// FLOPs and memory traffic on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// FLOPs of matmuls and convolutions; a multiply-add counts as two.
    pub flops: f64,
    /// FLOPs with 8-bit float operands; `flops` includes them.
    pub fp8: f64,
    /// Operations with 8-bit integer operands; `flops` includes them.
    pub int8: f64,
    /// FLOPs of f32 matmuls and convolutions at full precision; `flops` includes them.
    pub f32: f64,
    /// FLOPs of fused attention kernels; `flops` includes them.
    pub attention: f64,
    /// FLOPs that idle multiprocessors could do while the others compute the last tiles of fused attention; 0 if the
    /// number of multiprocessors is unknown.
    pub idle: f64,
    /// Bytes that are read from and written to device memory, without those of copies from and to host memory.
    pub bytes: f64,
    /// Bytes that are copied between host memory and the device.
    pub host: f64,
    /// Number of kernels; a fusion is one kernel.
    pub kernels: f64,
}

impl Work {
    pub(super) fn add(&mut self, other: Work, times: f64) {
        self.flops += other.flops * times;
        self.fp8 += other.fp8 * times;
        self.int8 += other.int8 * times;
        self.f32 += other.f32 * times;
        self.attention += other.attention * times;
        self.idle += other.idle * times;
        self.bytes += other.bytes * times;
        self.host += other.host * times;
        self.kernels += other.kernels * times;
    }
}

/// Returns whether an instruction causes no memory traffic. Such instructions are aliases and the ends of asynchronous
/// operations; the traffic of an asynchronous operation is counted at its start.
fn is_free(opcode: &str) -> bool {
    const FREE: [&str; 13] = [
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "add-dependency",
        "partition-id",
        "replica-id",
        "optimization-barrier",
        "opt-barrier",
        "iota",
        "async-update",
    ];
    FREE.contains(&opcode) || opcode.ends_with("-done")
}

/// Calculator of the work of instructions.
#[derive(Clone, Copy)]
pub(super) struct Counter<'a> {
    pub module: &'a Module,
    /// Whether memory space 1 is on-chip memory, as on TPUs. Accesses to it use no device memory bandwidth.
    pub on_chip: bool,
    /// Number of multiprocessors, each of which processes a tile of attention at a time; `None` if unknown.
    pub processors: Option<usize>,
}

impl<'a> Counter<'a> {
    /// Returns the work of an instruction, including the instructions fused into it. The work of a loop, call or
    /// conditional is zero, because the instructions of the called computations are counted separately.
    pub(crate) fn work(&self, i: &InstructionProto) -> Work {
        let work = self.alone(i);
        let runs = work.flops > 0.0 || work.bytes > 0.0;
        Work { kernels: if runs { 1.0 } else { 0.0 }, ..work }
    }

    fn alone(&self, i: &InstructionProto) -> Work {
        let host = self.host_bytes(i);
        if host > 0 {
            return Work { host: host as f64, ..Work::default() };
        }
        match i.opcode.as_str() {
            "while" | "call" | "conditional" => Work::default(),
            opcode if is_free(opcode) || CollectiveKind::of_any(opcode).is_some() => Work::default(),
            "fusion" => self.fusion_work(i),
            "custom-call" => self.custom_call_work(i),
            _ => Work { bytes: self.instruction_bytes(i), ..self.operations(i, self.flops(i)) },
        }
    }

    /// Returns work of `flops` FLOPs, of the type of the instruction's operands and without memory traffic.
    fn operations(&self, i: &InstructionProto, flops: f64) -> Work {
        let both = |is: fn(i32) -> bool| {
            let operand = |n| self.module.operand(i, n).and_then(|o| o.shape.as_ref());
            let narrow = [0, 1].iter().all(|&n| operand(n).is_some_and(|s| is(s.element_type)));
            if narrow { flops } else { 0.0 }
        };
        let [fp8, int8, f32] = [shape::is_float8, shape::is_int8, shape::is_f32].map(both);
        Work { flops, fp8, int8, f32, ..Work::default() }
    }

    fn fusion_work(&self, i: &InstructionProto) -> Work {
        let Some(called) = self.module.called(i) else { return Work::default() };
        let parameters = called.instructions.iter().filter(|p| p.opcode == "parameter");
        let read = shape::sum(parameters.map(|p| {
            let whole = self.size(p.shape.as_ref());
            self.read_of(called, p).map_or(whole, |part| part.min(whole))
        }));
        let written = self.module.root(called).map_or(0, |root| self.written(root));
        let inside = self.fused(called);
        Work { bytes: read as f64 + written as f64 + inside.bytes, ..inside }
    }

    /// Returns the work of a fused computation and of the fusions nested in it. The work's bytes include only repeated
    /// reads of operands by custom calls.
    fn fused(&self, c: &ComputationProto) -> Work {
        let mut sum = Work::default();
        for i in &c.instructions {
            let work = match i.opcode.as_str() {
                "fusion" => self.module.called(i).map_or_else(Work::default, |c| self.fused(c)),
                "custom-call" => {
                    let work = self.custom_call_work(i);
                    Work { bytes: (work.bytes - self.instruction_bytes(i)).max(0.0), ..work }
                }
                _ => self.operations(i, self.flops(i)),
            };
            sum.add(work, 1.0);
        }
        sum
    }

    /// Returns the number of bytes of a parameter that a fusion reads if it only uses slices of it, such as one layer
    /// of weights that are stacked for all layers. `None`: the fusion reads the complete parameter.
    fn read_of(&self, c: &ComputationProto, p: &InstructionProto) -> Option<u64> {
        let outermost = c.id;
        let mut sum: u64 = 0;
        // Aliases of the parameter in this and nested fusions. The flag marks copies; only their used elements are read.
        let mut names = vec![(c, p.id, false)];
        let mut seen = HashSet::new();
        // The instruction that calls each nested fusion, to continue with the users of its result.
        let mut from = HashMap::new();
        while let Some((c, id, copied)) = names.pop() {
            if copied && c.id == outermost && c.root_id == id {
                return None;
            }
            if c.root_id == id
                && let Some(&(outer, fusion)) = from.get(&c.id)
            {
                names.extend(seen.insert(fusion).then_some((outer, fusion, copied)));
            }
            for u in c.instructions.iter().filter(|u| u.operand_ids.contains(&id)) {
                let first = u.operand_ids.first() == Some(&id);
                match u.opcode.as_str() {
                    "dynamic-slice" | "slice" | "gather" if first => {
                        sum = sum.saturating_add(u.shape.as_ref().map(shape::bytes)?);
                    }
                    // The update is in place, so the rest of the operand is not read.
                    "dynamic-update-slice" if first && !copied => {}
                    // The value is only passed on, or an overlapping collective sends it over links.
                    "tuple" if !copied => {}
                    opcode if CollectiveKind::of_any(opcode).is_some() || is_async_marker(u) => {}
                    "bitcast" => names.extend(seen.insert(u.id).then_some((c, u.id, copied))),
                    "copy" => names.extend(seen.insert(u.id).then_some((c, u.id, true))),
                    "fusion" => {
                        let called = self.module.called(u)?;
                        let at = u.operand_ids.iter().position(|o| *o == id)?;
                        let is_it = |q: &&InstructionProto| q.opcode == "parameter" && q.parameter_number == at as i64;
                        let inner = called.instructions.iter().find(is_it)?;
                        from.insert(called.id, (c, u.id));
                        names.extend(seen.insert(inner.id).then_some((called, inner.id, copied)));
                    }
                    _ => return None,
                }
            }
        }
        Some(sum)
    }

    /// Returns the number of bytes that a fusion with this root writes. An in-place update writes only the update.
    fn written(&self, root: &InstructionProto) -> u64 {
        let mut sum: u64 = 0;
        let mut parts = vec![root];
        let mut seen = HashSet::new();
        while let Some(part) = parts.pop() {
            let operands = || part.operand_ids.iter().filter_map(|&o| self.module.instruction(o));
            match part.opcode.as_str() {
                "tuple" => parts.extend(operands().filter(|o| seen.insert(o.id))),
                "bitcast" => parts.extend(operands().take(1)),
                "dynamic-update-slice" => {
                    let update = self.module.operand(part, 1).and_then(|u| u.shape.as_ref());
                    sum = sum.saturating_add(self.size(update));
                }
                "parameter" => {}
                opcode if CollectiveKind::of_any(opcode).is_some() || is_async_marker(part) => {}
                _ => sum = sum.saturating_add(self.size(part.shape.as_ref())),
            }
        }
        sum
    }

    /// Returns how many bytes of a value with this shape are in device memory, not in on-chip or host memory.
    fn size(&self, shape: Option<&ShapeProto>) -> u64 {
        shape.map_or(0, |s| shape::bytes_in_device(s, self.on_chip))
    }

    /// Returns the number of bytes that an instruction copies between host memory and the device; 0 for other
    /// instructions.
    fn host_bytes(&self, i: &InstructionProto) -> u64 {
        self.module.host_copy(i).map_or(0, shape::bytes)
    }

    fn instruction_bytes(&self, i: &InstructionProto) -> f64 {
        let size = |s: Option<&ShapeProto>| self.size(s);
        let output = size(i.shape.as_ref());
        let moved = match i.opcode.as_str() {
            "dynamic-slice" | "slice" | "gather" => {
                let from = size(self.module.operand(i, 0).and_then(|o| o.shape.as_ref()));
                output.saturating_add(from.min(i.shape.as_ref().map_or(0, shape::bytes)))
            }
            "dynamic-update-slice" => size(self.module.operand(i, 1).and_then(|u| u.shape.as_ref())).saturating_mul(2),
            "broadcast" => output,
            // The shape of an asynchronous copy contains the destination and the source.
            "copy-start" => {
                let places = i.shape.iter().flat_map(|s| s.tuple_shapes.iter().take(2));
                shape::sum(places.map(|s| size(Some(s))))
            }
            // The called computation is counted separately; a transfer uses links, not memory.
            "async-start" => 0,
            _ => {
                let operands = i.operand_ids.iter().map(|&o| self.module.instruction(o));
                let read = operands.map(|o| size(o.and_then(|o| o.shape.as_ref())));
                shape::sum(read.chain([output]))
            }
        };
        moved as f64
    }

    /// Returns the FLOPs of a matmul or convolution; 0 for other instructions.
    fn flops(&self, i: &InstructionProto) -> f64 {
        match i.opcode.as_str() {
            "dot" => {
                let Some(left) = self.module.operand(i, 0).and_then(|o| o.shape.as_ref()) else { return 0.0 };
                let contracted = i.dot.as_ref().map_or(1.0, |d| product(&left.dimensions, &d.lhs_contracting));
                2.0 * output_elements(i) * contracted
            }
            "convolution" => self.convolution_flops(i).unwrap_or(0.0),
            _ => 0.0,
        }
    }

    /// Returns the FLOPs of a convolution that use elements of the input. Padding and the gaps of a dilated input do
    /// not count: TPU programs express batched matmuls as convolutions with large gaps.
    fn convolution_flops(&self, i: &InstructionProto) -> Option<f64> {
        let (window, numbers) = (i.window.as_ref()?, i.convolution.as_ref()?);
        let [input, kernel] = [0, 1].map(|n| self.module.operand(i, n).and_then(|o| o.shape.as_ref()));
        let (input, kernel, output) = (input?, kernel?, result(i)?);
        let at = |dims: &[i64], n: i64| dims.get(usize::try_from(n).ok()?).copied();
        let mut pairs = 1.0;
        let mut positions = 1.0;
        for (n, w) in window.dimensions.iter().enumerate() {
            let from = at(&input.dimensions, *numbers.input_spatial.get(n)?)?;
            let to = at(&output.dimensions, *numbers.output_spatial.get(n)?)?;
            positions *= to as f64;
            pairs *= valid_pairs(from, to, w)?;
        }
        let features = at(&kernel.dimensions, numbers.kernel_input_feature)?;
        Some(2.0 * elements(output) as f64 / positions.max(1.0) * pairs * features as f64)
    }

    /// Returns the FLOPs that idle multiprocessors could do while the others compute attention scores of shape `scores`
    /// (`[…, queries, keys]`).
    fn idle(&self, scores: &[f64], flops: f64) -> f64 {
        let (Some(processors), [heads @ .., queries, _]) = (self.processors, scores) else { return 0.0 };
        idle_flops(processors, heads.iter().product(), *queries, flops)
    }

    fn custom_call_work(&self, i: &InstructionProto) -> Work {
        let bytes = self.instruction_bytes(i);
        let plain = Work { bytes, ..Work::default() };
        let of = |flops: f64| Work { bytes, ..self.operations(i, flops) };
        let attention = |flops: f64| Work { flops, attention: flops, ..plain };
        if i.custom_call_target.starts_with("__cudnn$conv") {
            return of(self.convolution_flops(i).unwrap_or(0.0));
        }
        if i.custom_call_target == "__gpu$xla.gpu.triton" {
            let flops = stated_flops(&i.backend_config).unwrap_or(0.0);
            return if self.module.category(i) == OpCategory::Attention { attention(flops) } else { of(flops) };
        }
        let Ok(config) = serde_json::from_slice::<Value>(&i.backend_config) else { return plain };
        if let Some(stated) = config.pointer("/custom_call_config/cost_estimate") {
            let number = |key: &str| stated.get(key).and_then(number);
            return Work { bytes: number("bytes_accessed").unwrap_or(bytes), ..of(number("flops").unwrap_or(0.0)) };
        }
        let shape = |n: usize| self.module.operand(i, n).and_then(|o| o.shape.as_ref());
        if let Some(contracting) =
            config.pointer("/gemm_backend_config/dot_dimension_numbers/lhs_contracting_dimensions")
        {
            let dims: Vec<i64> =
                contracting.as_array().into_iter().flatten().filter_map(number).map(|v| v as i64).collect();
            let contracted = shape(0).map_or(0.0, |s| product(&s.dimensions, &dims));
            return of(2.0 * result(i).map_or(0, elements) as f64 * contracted);
        }
        if let Some(scores) = config.pointer("/cudnn_fmha_backend_config/intermediate_tensor_shape/dimensions") {
            // Attention has two matmuls, scores and weighted sum: [.., queries, keys] by the head dimension.
            let dims: Vec<f64> = scores.as_array().into_iter().flatten().filter_map(number).collect();
            let width = shape(0).and_then(|s| s.dimensions.last()).copied().unwrap_or(0);
            let flops = 4.0 * dims.iter().product::<f64>() * width as f64;
            return Work { idle: self.idle(&dims, flops), ..attention(flops) };
        }
        plain
    }
}

/// Returns the FLOPs that idle multiprocessors could do while the others compute the last tiles of attention. Each
/// multiprocessor processes one tile of 128 queries of a head at a time. `flops`: FLOPs of the attention.
pub(super) fn idle_flops(processors: usize, heads: f64, queries: f64, flops: f64) -> f64 {
    const ROWS: f64 = 128.0;
    let tiles = heads * (queries / ROWS).ceil();
    let places = (tiles / processors as f64).ceil() * processors as f64;
    if tiles > 0.0 { flops * (places / tiles - 1.0) } else { 0.0 }
}

/// Returns the FLOPs that this project's kernels state in the MLIR attributes of their call: `flops = 12 : i64`.
fn stated_flops(attributes: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(attributes).ok()?;
    text.split_once("flops = ")?.1.split_whitespace().next()?.parse().ok()
}

/// Parses a number in the backend config of a library call, which is a JSON number or a string.
fn number(v: &Value) -> Option<f64> {
    v.as_f64().or_else(|| v.as_str()?.parse().ok())
}

fn product(dims: &[i64], which: &[i64]) -> f64 {
    which.iter().filter_map(|&d| dims.get(usize::try_from(d).ok()?)).map(|d| *d as f64).product()
}

/// Returns the result shape of an instruction; for a library call, that of the result without the workspace.
fn result(i: &InstructionProto) -> Option<&ShapeProto> {
    i.shape.as_ref().map(|s| s.tuple_shapes.first().unwrap_or(s))
}

fn output_elements(i: &InstructionProto) -> f64 {
    i.shape.as_ref().map_or(0.0, |s| elements(s) as f64)
}

/// Maximum accepted product of kernel size and base dilation. Compilers stay far below it.
const STEPS: i128 = 1 << 22;

/// Returns, for one spatial dimension of a convolution, the number of pairs of a kernel position and an output position
/// that use an element of the input. `None`: the window is larger than any that a compiler produces.
fn valid_pairs(input: i64, output: i64, w: &WindowDimensionProto) -> Option<f64> {
    let steps = [w.stride, w.window_dilation, w.base_dilation].map(|n| i128::from(n.max(1)));
    let ([stride, dilation, base], size) = (steps, i128::from(w.size));
    (size.saturating_mul(base) <= STEPS).then_some(())?;
    let last = (i128::from(input) - 1) * base;
    let pairs = (0..size).map(|k| {
        // `shift`: input position of output position 0; `from..=to`: output positions that read inside the input.
        let shift = k * dilation - i128::from(w.padding_low);
        let from = ((-shift).max(0) + stride - 1) / stride;
        let to = (last - shift).div_euclid(stride).min(i128::from(output) - 1);
        // Input elements are `base` positions apart, so the output positions that read one are evenly spaced.
        let meets = |o: &i128| (o * stride + shift) % base == 0;
        let mut met = (from..=to.min(from + 2 * base)).filter(meets);
        match (met.next(), met.next()) {
            (Some(first), Some(second)) => (to - first) / (second - first) + 1,
            (first, _) => first.iter().count() as i128,
        }
    });
    Some(pairs.sum::<i128>() as f64)
}

#[cfg(test)]
mod tests {
    use super::super::proto::{ConvolutionProto, WindowProto};
    use super::*;
    use crate::sketch::{self, computation, decode, shape};

    fn window(size: i64, stride: i64, padding: i64, base: i64) -> WindowDimensionProto {
        WindowDimensionProto {
            size,
            stride,
            padding_low: padding,
            padding_high: padding,
            window_dilation: 1,
            base_dilation: base,
        }
    }

    /// On TPU7x, a fusion copies stacked weights and slices one layer of the copy, so it reads only this layer.
    #[test]
    fn fusion_reads_only_the_sliced_layer_of_a_copied_stack() {
        let stack = [48, 16, 8];
        let instruction = |id: i64, opcode: &str, operands: &[i64], dims: &[i64], calls: &[i64]| InstructionProto {
            shape: Some(shape(16, dims)),
            called_computation_ids: calls.into(),
            ..sketch::instruction(id, opcode, operands)
        };
        let bytes = |layer: bool| {
            let copy = vec![instruction(1, "parameter", &[], &stack, &[]), instruction(2, "copy", &[1], &stack, &[])];
            let mut taken =
                vec![instruction(3, "parameter", &[], &stack, &[]), instruction(4, "fusion", &[3], &stack, &[1])];
            let dims: &[i64] = if layer { &[1, 16, 8] } else { &stack };
            taken.extend(layer.then(|| instruction(5, "dynamic-slice", &[4], dims, &[])));
            let entry = vec![instruction(6, "parameter", &[], &stack, &[]), instruction(7, "fusion", &[6], dims, &[2])];
            let computations = vec![computation(1, copy), computation(2, taken), computation(3, entry)];
            let module = decode(3, computations).expect("a module");
            let counter = Counter { module: &module, on_chip: true, processors: None };
            counter.work(module.instruction(7).expect("the fusion")).bytes
        };
        let of = |layers: f64| layers * 16.0 * 8.0 * 2.0;
        assert_eq!(bytes(true), of(1.0) + of(1.0));
        assert_eq!(bytes(false), of(48.0) + of(48.0));
    }

    #[test]
    fn idle_flops_count_multiprocessors_without_attention_tile() {
        let module = decode(1, vec![computation(1, vec![sketch::instruction(1, "parameter", &[])])]).expect("a module");
        let of = |processors| Counter { module: &module, on_chip: false, processors };
        // 32 heads with one tile each occupy 32 of 132 multiprocessors; the idle ones could do 100/32 of the work.
        assert_eq!(of(Some(132)).idle(&[1.0, 32.0, 126.0, 6144.0], 32.0), 100.0);
        // 264 tiles occupy all multiprocessors exactly twice.
        assert_eq!(of(Some(132)).idle(&[1.0, 33.0, 1024.0, 8.0], 5.0), 0.0);
        assert_eq!(of(None).idle(&[1.0, 32.0, 126.0, 6144.0], 32.0), 0.0);
    }

    #[test]
    fn padding_and_dilation_holes_cost_no_flops() {
        // A kernel of three elements over four elements with one of padding on both sides: 2 + 3 + 3 + 2 pairs.
        assert_eq!(valid_pairs(4, 4, &window(3, 1, 1, 1)), Some(10.0));
        assert_eq!(valid_pairs(4, 4, &window(1, 1, 0, 1)), Some(4.0));
        // A batch of 4 expressed as a window: with stride 3 over an input with dilation 4, only equal indices meet.
        assert_eq!(valid_pairs(4, 4, &window(4, 3, 0, 4)), Some(4.0));
    }

    #[test]
    fn convolution_element_pairs_match_brute_force_count() {
        let tried = |input: i64, output: i64, w: &WindowDimensionProto| {
            let meets = |k: i64, o: i64| {
                let at = o * w.stride - w.padding_low + k * w.window_dilation;
                (0..=(input - 1) * w.base_dilation).contains(&at) && at % w.base_dilation == 0
            };
            (0..w.size).map(|k| (0..output).filter(|o| meets(k, *o)).count()).sum::<usize>() as f64
        };
        for (input, output) in [(1, 1), (1, 5), (3, 7), (4, 4), (7, 3), (9, 20)] {
            for (size, stride, base) in (0..5).flat_map(|s| (1..5).flat_map(move |t| (1..5).map(move |b| (s, t, b)))) {
                for (padding, dilation) in (-3..5).flat_map(|p| (1..4).map(move |d| (p, d))) {
                    let w = WindowDimensionProto { window_dilation: dilation, ..window(size, stride, padding, base) };
                    assert_eq!(
                        valid_pairs(input, output, &w),
                        Some(tried(input, output, &w)),
                        "{input} {output} {w:?}"
                    );
                }
            }
        }
    }

    /// Sizes in a file are untrusted. No value may crash the analysis or make it run for long.
    #[test]
    fn work_of_extreme_sizes_is_finite() {
        let instruction = |id: i64, opcode: &str, operands: &[i64]| InstructionProto {
            shape: Some(shape(11, &[i64::MAX, i64::MAX])),
            ..sketch::instruction(id, opcode, operands)
        };
        let with = |window: WindowDimensionProto| InstructionProto {
            window: Some(WindowProto { dimensions: vec![window] }),
            convolution: Some(ConvolutionProto {
                input_spatial: vec![0],
                output_spatial: vec![0],
                ..ConvolutionProto::default()
            }),
            ..instruction(0, "convolution", &[1, 1])
        };
        let most = i64::MAX;
        let dot = super::super::proto::DotProto { lhs_contracting: vec![0, 1] };
        let mut instructions = vec![
            instruction(1, "parameter", &[]),
            instruction(2, "add", &[1, 1]),
            instruction(3, "dynamic-slice", &[1]),
            instruction(4, "dynamic-update-slice", &[1, 1]),
            InstructionProto { dot: Some(dot), ..instruction(5, "dot", &[1, 1]) },
            InstructionProto { called_computation_ids: vec![1], ..instruction(6, "fusion", &[1]) },
            with(window(1, most, i64::MIN, 1)),
            with(window(3, most, most, 5)),
            with(window(most, 1, 0, most)),
        ];
        (6..).zip(&mut instructions[5..]).for_each(|(id, i)| i.id = id);
        let fused = vec![instruction(20, "parameter", &[]), instruction(21, "negate", &[20])];
        let computations = vec![computation(1, fused), ComputationProto { root_id: 6, ..computation(2, instructions) }];
        let module = decode(2, computations).expect("a module");
        let counter = Counter { module: &module, on_chip: false, processors: None };
        for id in 2..=9 {
            let work = counter.work(module.instruction(id).expect("it"));
            assert!(work.bytes > 1e18 && work.flops >= 0.0, "{id}: {work:?}");
        }
    }
}
