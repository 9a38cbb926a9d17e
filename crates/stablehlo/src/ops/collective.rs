//! Collectives, which may be used only in manual regions.

use crate::builder::{Value, axis_of};
use crate::sharding::Groups;
use crate::types::{Type, list};
use crate::work::Pattern;

impl Value {
    fn channel(&self) -> String {
        let mut s = self.b.0.borrow_mut();
        s.next_channel += 1;
        format!("channel_handle = #stablehlo.channel_handle<handle = {}, type = 1>", s.next_channel - 1)
    }

    fn collective(&self, op: &'static str, attributes: &str, region: &str, ty: Type) -> Value {
        let text = format!(
            "\"stablehlo.{op}\"({}) <{{{}, {attributes}}}>{region} : ({}) -> {ty}",
            self.local(),
            self.channel(),
            self.ty
        );
        self.b.op(op, text, ty)
    }

    fn resized(&self, op: &'static str, axis: isize, times: usize, over: usize) -> Option<(usize, Type)> {
        let mut ty = self.ty.clone();
        let Some(a) = axis_of(axis, self.rank()) else {
            self.b.fail(op, format!("axis {axis} is out of range for {ty}"));
            return None;
        };
        if !(ty.dims[a] * times).is_multiple_of(over) {
            self.b.fail(op, format!("axis {axis} of {ty}: its size times {times} is not divisible by {over}"));
            return None;
        }
        ty.dims[a] = ty.dims[a] * times / over;
        Some((a, ty))
    }

    /// Adds an all-gather: concatenates the shards of all devices in a group along `axis`.
    pub fn all_gather(&self, axis: isize, groups: &Groups) -> Value {
        let Some((a, ty)) = self.resized("all_gather", axis, groups.size(), 1) else { return self.clone() };
        self.b.count_transfer(Pattern::AllGather, ty.bytes() as f64, groups);
        let attributes = format!("all_gather_dim = {a} : i64, {}, use_global_device_ids", groups.attribute());
        self.collective("all_gather", &attributes, "", ty)
    }

    /// Adds an all-to-all: splits dimension `split` among the devices of a group and concatenates the received shards
    /// along `concat`.
    pub fn all_to_all(&self, split: isize, concat: isize, groups: &Groups) -> Value {
        let n = groups.size();
        let Some((s, mut ty)) = self.resized("all_to_all", split, 1, n) else { return self.clone() };
        let Some(c) = self.axis("all_to_all", concat) else { return self.clone() };
        ty.dims[c] *= n;
        self.b.count_transfer(Pattern::AllToAll, ty.bytes() as f64, groups);
        let attributes = format!(
            "concat_dimension = {c} : i64, split_count = {n} : i64, split_dimension = {s} : i64, {}",
            groups.attribute()
        );
        self.collective("all_to_all", &attributes, "", ty)
    }

    fn reducer(&self, op: &str) -> String {
        let ty = Type::scalar(self.dtype());
        let (a, b, r) = (self.b.fresh(), self.b.fresh(), self.b.fresh());
        format!(
            " ({{\n^bb0({a}: {ty}, {b}: {ty}):\n{r} = stablehlo.{op} {a}, {b} : {ty}\nstablehlo.return {r} : {ty}\n}})"
        )
    }

    /// Adds an all-reduce that sums the values of all devices in a group.
    pub fn all_reduce_sum(&self, groups: &Groups) -> Value {
        self.all_reduce("add", groups)
    }

    /// Adds an all-reduce that takes the maximum of the values of all devices in a group.
    pub fn all_reduce_max(&self, groups: &Groups) -> Value {
        self.all_reduce("maximum", groups)
    }

    fn all_reduce(&self, op: &str, groups: &Groups) -> Value {
        self.b.count_transfer(Pattern::AllReduce, self.ty.bytes() as f64, groups);
        let attributes = format!("{}, use_global_device_ids", groups.attribute());
        self.collective("all_reduce", &attributes, &self.reducer(op), self.ty.clone())
    }

    /// Adds a reduce-scatter: sums the values of all devices in a group and returns this device's shard of the sum
    /// along `axis`.
    pub fn reduce_scatter_sum(&self, axis: isize, groups: &Groups) -> Value {
        let Some((a, ty)) = self.resized("reduce_scatter", axis, 1, groups.size()) else { return self.clone() };
        self.b.count_transfer(Pattern::ReduceScatter, ty.bytes() as f64, groups);
        let attributes = format!("scatter_dimension = {a} : i64, {}, use_global_device_ids", groups.attribute());
        self.collective("reduce_scatter", &attributes, &self.reducer("add"), ty)
    }

    /// Adds a collective permute: for each pair `(source, target)`, the target device receives the source's value. A
    /// device that is not a target gets zeros.
    pub fn collective_permute(&self, pairs: &[(usize, usize)]) -> Value {
        let bytes = self.ty.bytes();
        let smallest = self.b.0.borrow().smallest_permute.map_or(bytes, |other| other.min(bytes));
        self.b.0.borrow_mut().smallest_permute = Some(smallest);
        let pairs_of = Groups(pairs.iter().map(|&(from, to)| vec![from, to]).collect());
        self.b.count_transfer(Pattern::Permute, bytes as f64, &pairs_of);
        let rows = list(pairs.iter().map(|(a, b)| format!("[{a}, {b}]")));
        let attributes = format!("source_target_pairs = dense<[{rows}]> : tensor<{}x2xi64>", pairs.len());
        self.collective("collective_permute", &attributes, "", self.ty.clone())
    }
}
