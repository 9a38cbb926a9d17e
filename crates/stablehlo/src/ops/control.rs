//! Loops, conditionals and optimization barriers.

use std::rc::Rc;

use crate::DType;
use crate::builder::{Builder, Captures, RegionKind, Value};
use crate::propagation::KnownSharding;
use crate::types::{Type, list};
use crate::work::ProgramWork;

impl Value {
    /// Adds an optimization barrier: the compiler computes the value once, before its users, instead of fusing a copy
    /// of the computation into each user.
    pub fn optimization_barrier(&self) -> Value {
        let text = format!("stablehlo.optimization_barrier {} : {}", self.local(), self.ty);
        self.b.op("optimization_barrier", text, self.ty.clone()).with_sharding(self.sharding.clone())
    }
}

impl Builder {
    /// Repeats `body` while `condition` holds. Both closures get the carried values; `body` returns the new ones, of
    /// the same types. Outer values that the closures use become carried values that do not change.
    pub fn while_loop(
        &self,
        init: &[Value],
        condition: impl FnOnce(&[Value]) -> Value,
        body: impl FnOnce(&[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        self.push_region(RegionKind::Loop { captures: Captures::new() });
        let carried: Vec<Value> =
            init.iter().map(|v| self.value(self.fresh(), v.ty.clone()).with_sharding(v.sharding.clone())).collect();
        let proceed = condition(&carried);
        if proceed.ty != Type::scalar(DType::Bool) {
            self.fail("while", format!("the condition must be a boolean scalar, got {}", proceed.ty));
        }
        self.raw_line(format!("stablehlo.return {} : {}", self.name_of(&proceed), proceed.ty));
        let condition_text = self.take_text();
        let next = body(&carried);
        for (i, (n, c)) in next.iter().zip(&carried).enumerate() {
            if n.ty != c.ty {
                self.fail("while", format!("carried value {i} has type {}, but the body returns {}", c.ty, n.ty));
            }
        }
        if next.len() != carried.len() {
            self.fail(
                "while",
                format!("the loop carries {} values, but the body returns {}", carried.len(), next.len()),
            );
        }
        let shardings: Vec<KnownSharding> = next.iter().map(|v| v.sharding.clone()).collect();
        let next: Vec<Rc<str>> = next.iter().map(|v| self.name_of(v)).collect();
        let region = self.pop_region();
        let RegionKind::Loop { captures } = region.kind else { return init.to_vec() };

        let types: Vec<Type> =
            carried.iter().map(|c| c.ty.clone()).chain(captures.values().map(|(v, _)| v.ty.clone())).collect();
        let starts = init.iter().chain(captures.values().map(|(v, _)| v)).map(|v| self.name_of(v));
        let names = carried.iter().map(|c| c.name.clone()).chain(captures.values().map(|(_, n)| n.clone()));
        let pairs = list(names.zip(starts.collect::<Vec<_>>()).map(|(n, s)| format!("{n} = {s}")));
        let returned = list(next.iter().chain(captures.values().map(|(_, n)| n)));
        let all = list(&types);
        let text = format!(
            "stablehlo.while({pairs}) : {all} cond {{\n{condition_text}}} do {{\n{}stablehlo.return {returned} : {all}\n}}",
            region.text
        );
        let mut results = self.op_many("while", text, &types);
        results.truncate(init.len());
        results.into_iter().zip(shardings).map(|(v, sharding)| v.with_sharding(sharding)).collect()
    }

    /// Runs the branch with index `index` (an i32 scalar) out of `count` branches. If the index is out of range, runs
    /// the last branch. Branches may use all outer values and must return the same types. The work and the matmul FLOPs
    /// are counted for only one branch, the most expensive one.
    pub fn case(&self, index: &Value, count: usize, mut body: impl FnMut(usize) -> Vec<Value>) -> Vec<Value> {
        if index.ty != Type::scalar(DType::I32) || count == 0 {
            self.fail(
                "case",
                format!(
                    "expected an i32 scalar index and at least one branch, got index {} and {count} branches",
                    index.ty
                ),
            );
            return Vec::new();
        }
        let index = self.name_of(index);
        let (before, mark) = (self.0.borrow().dot_flops, self.0.borrow().work.mark());
        let (mut types, mut most) = (Vec::<Type>::new(), before);
        let (mut work, mut shardings) = (ProgramWork::default(), Vec::new());
        let bodies: Vec<String> = (0..count)
            .map(|k| {
                self.0.borrow_mut().dot_flops = before;
                self.push_region(RegionKind::Choice);
                let results = body(k);
                let own: Vec<Type> = results.iter().map(|v| v.ty.clone()).collect();
                let names = list(results.iter().map(|v| self.name_of(v)));
                if k > 0 && own != types {
                    self.fail(
                        "case",
                        format!("branch {k} returns {}, but branch 0 returns {}", list(&own), list(&types)),
                    );
                }
                self.raw_line(format!("stablehlo.return {names} : {}", list(&own)));
                types = own;
                shardings = results.iter().map(|v| v.sharding.clone()).collect();
                most = most.max(self.0.borrow().dot_flops);
                let own = self.0.borrow_mut().work.take(mark);
                if own.flops() >= work.flops() {
                    work = own;
                }
                format!("{{\n{}}}", self.pop_region().text)
            })
            .collect();
        self.0.borrow_mut().dot_flops = most;
        self.0.borrow_mut().work.extend(&work);
        let text = format!("\"stablehlo.case\"({index}) ({}) : (tensor<i32>) -> ({})", list(bodies), list(&types));
        let results = self.op_many("case", text, &types).into_iter().zip(shardings);
        results.map(|(v, sharding): (Value, KnownSharding)| v.with_sharding(sharding)).collect()
    }

    /// Runs `body(i, carried)` for each `i` in `begin..end`, which are i32 scalars.
    pub fn for_loop(
        &self,
        begin: &Value,
        end: &Value,
        init: &[Value],
        body: impl FnOnce(&Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let start: Vec<Value> = std::iter::once(begin.clone()).chain(init.iter().cloned()).collect();
        let mut results = self.while_loop(
            &start,
            |c| c[0].compare(crate::Comparison::Lt, end),
            |c| {
                let mut next = vec![&c[0] + 1.0];
                next.extend(body(&c[0], &c[1..]));
                next
            },
        );
        results.remove(0);
        results
    }

    /// Runs a loop like [`Builder::for_loop`], but counts the work of the body `count` times.
    pub fn counted_loop(
        &self,
        count: usize,
        begin: &Value,
        end: &Value,
        init: &[Value],
        body: impl FnOnce(&Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let (before, mark) = (self.0.borrow().dot_flops, self.0.borrow().work.mark());
        let results = self.for_loop(begin, end, init, body);
        let mut s = self.0.borrow_mut();
        s.dot_flops = before + (s.dot_flops - before) * count as f64;
        s.work.repeat(mark, count as f64);
        drop(s);
        results
    }

    /// Runs `body(i, carried)` for each `i` in `0..count`.
    pub fn repeat(
        &self,
        count: usize,
        init: &[Value],
        body: impl FnOnce(&Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let (begin, end) = (self.scalar(0.0, DType::I32), self.scalar(count as f64, DType::I32));
        self.counted_loop(count, &begin, &end, init, body)
    }
}
