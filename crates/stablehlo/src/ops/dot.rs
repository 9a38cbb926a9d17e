//! Matmuls in einsum notation.

use crate::DType;
use crate::builder::{Builder, Value};
use crate::propagation::known;
use crate::sharding::Sharding;
use crate::types::{Type, list};
use crate::work::Matmul;

impl Builder {
    /// Multiplies two tensors according to `spec`, an einsum such as `"bqhd,bkhd->bhqk"`. Letters in both operands and
    /// in the result are batch dimensions; letters in both operands but not in the result are contracted. Accumulates
    /// in f32 or a wider type and converts the result to `out`.
    pub fn einsum(&self, spec: &str, a: &Value, b: &Value, out: DType) -> Value {
        let wider = out.size() > a.dtype().size() && a.dtype() == b.dtype();
        if wider && !self.0.borrow().mixed_precision_dot {
            return self.einsum(spec, &a.to(out), &b.to(out), out);
        }
        let fail = |why: String| {
            let message = format!("einsum '{spec}' of {} and {}: {why}", a.ty, b.ty);
            self.poison("dot_general", message, Type::new(out, a.ty.dims.clone()))
        };
        let Some((la, lb, lo)) = parse(spec) else {
            return fail("expected a form like ab,bc->ac with single letters".into());
        };
        if la.len() != a.rank() || lb.len() != b.rank() {
            return fail(format!("the einsum requires operands with {} and {} dimensions", la.len(), lb.len()));
        }
        if a.dtype() != b.dtype() {
            return fail("the operands have different element types".into());
        }
        let find = |l: &[char], c: char| l.iter().position(|&x| x == c);
        let (mut batch_a, mut batch_b, mut sum_a, mut sum_b) = (vec![], vec![], vec![], vec![]);
        for (i, &c) in la.iter().enumerate() {
            if let Some(j) = find(&lb, c) {
                if a.ty.dims[i] != b.ty.dims[j] {
                    return fail(format!(
                        "'{c}' has size {} in the left operand and {} in the right",
                        a.ty.dims[i], b.ty.dims[j]
                    ));
                }
                if lo.contains(&c) {
                    batch_a.push(i);
                    batch_b.push(j);
                } else {
                    sum_a.push(i);
                    sum_b.push(j);
                }
            }
        }
        let free = |l: &[char], batch: &[usize], sum: &[usize]| -> Vec<char> {
            (0..l.len()).filter(|i| !batch.contains(i) && !sum.contains(i)).map(|i| l[i]).collect()
        };
        // The order of the result dimensions of `dot_general`: batch dimensions, then free dimensions of the left
        // operand, then free dimensions of the right operand.
        let natural: Vec<char> = batch_a
            .iter()
            .map(|&i| la[i])
            .chain(free(&la, &batch_a, &sum_a))
            .chain(free(&lb, &batch_b, &sum_b))
            .collect();
        let size = |c: char| find(&la, c).map(|i| a.ty.dims[i]).or_else(|| find(&lb, c).map(|i| b.ty.dims[i]));
        let Some(order) = lo.iter().map(|&c| find(&natural, c)).collect::<Option<Vec<_>>>() else {
            return fail("a letter of the result is in neither operand".into());
        };
        if order.len() != natural.len() {
            return fail("a letter is in only one operand and not in the result".into());
        }
        // XLA accumulates a bf16 product in f32, whatever the result type. Requesting an f32 result and converting it
        // would write the f32 result to memory.
        let product = if out.size() >= a.dtype().size() { out } else { a.dtype() };
        let ty = Type::new(product, natural.iter().filter_map(|&c| size(c)).collect::<Vec<_>>());
        let summed: usize = sum_a.iter().map(|&i| a.ty.dims[i]).product();
        let flops = 2.0 * ty.elements() as f64 * summed as f64;
        self.0.borrow_mut().dot_flops += flops;
        // For each letter, the dimensions of the two operands; letters of the result come first.
        let summed = sum_a.iter().map(|&i| la[i]);
        let dims: Vec<[Option<usize>; 2]> =
            natural.iter().copied().chain(summed).map(|c| [find(&la, c), find(&lb, c)]).collect();
        let p = self.precision().name();
        let batch = if batch_a.is_empty() {
            String::new()
        } else {
            format!("batching_dims = [{}] x [{}], ", list(&batch_a), list(&batch_b))
        };
        let text = format!(
            "stablehlo.dot_general {}, {}, {batch}contracting_dims = [{}] x [{}], precision = [{p}, {p}] : ({}, {}) -> {ty}",
            a.local(),
            b.local(),
            list(&sum_a),
            list(&sum_b),
            a.ty,
            b.ty
        );
        let result = self.op("dot_general", text, ty);
        self.count_dot([a, b], result, &dims, flops).transpose(&order).to(out)
    }

    /// Counts the work of a dot on one device and sets the sharding of its result. `dims` has the operands' dimensions
    /// for each result dimension, followed by those for each contracted dimension. A mesh axis can shard only one of
    /// these dimensions: an operand in which the axis shards a different dimension is gathered.
    fn count_dot(&self, operands: [&Value; 2], result: Value, dims: &[[Option<usize>; 2]], flops: f64) -> Value {
        let axes_of = |of: &[Option<usize>; 2]| {
            let each = operands.iter().zip(of).map(|(v, dim)| dim.map(|dim| v.axes_of(dim)).unwrap_or_default());
            each.max_by_key(|axes| self.parts(axes)).unwrap_or_default()
        };
        let split = known(dims.iter().map(axes_of).collect());
        let rank = result.rank();
        let axes: Vec<Vec<String>> = split.as_ref().map_or_else(|| vec![Vec::new(); dims.len()], |s| s.0.clone());
        for (n, v) in operands.iter().enumerate() {
            let mut own = vec![Vec::new(); v.rank()];
            for (of, axes) in dims.iter().zip(&axes) {
                if let Some(dim) = of[n] {
                    own[dim].clone_from(axes);
                }
            }
            self.count_gather(v, &Sharding(own));
        }
        let result = result.with_sharding(known(axes[..rank].to_vec()));
        let bytes = [operands[0], operands[1], &result].map(|v| self.local_bytes(v));
        let parts = self.parts(&axes.concat()).unwrap_or(1) as f64;
        let dtype = operands[0].dtype();
        let matmul = Matmul { flops: flops / parts, bytes, dtype, attention: None, times: 1.0 };
        self.0.borrow_mut().work.matmuls.push(matmul);
        self.count_sum(&result, &axes[rank..].concat());
        result
    }
}

fn parse(spec: &str) -> Option<(Vec<char>, Vec<char>, Vec<char>)> {
    let (operands, out) = spec.split_once("->")?;
    let (a, b) = operands.split_once(',')?;
    let letters = |s: &str| -> Option<Vec<char>> {
        let l: Vec<char> = s.chars().collect();
        let distinct = l.iter().enumerate().all(|(i, c)| c.is_ascii_alphabetic() && !l[..i].contains(c));
        distinct.then_some(l)
    };
    Some((letters(a)?, letters(b)?, letters(out)?))
}
