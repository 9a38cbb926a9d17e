//! Sharding constraints and manual computations (Shardy).

use std::rc::Rc;

use crate::builder::{Builder, Captures, RegionKind, Value};
use crate::sharding::Sharding;
use crate::types::{Type, list};

impl Value {
    /// Constrains the sharding. Has no effect inside a manual region, where a value is already the device's shard.
    pub fn constrain(&self, sharding: &Sharding) -> Value {
        if self.b.is_manual() {
            return self.clone();
        }
        let mesh = self.b.0.borrow().mesh.clone();
        let Some(mesh) = mesh else {
            return self.b.poison("sharding_constraint", "the program has no mesh".into(), self.ty.clone());
        };
        if let Err(why) = sharding.local(&self.ty, &mesh) {
            return self.b.poison("sharding_constraint", why, self.ty.clone());
        }
        let text = format!("sdy.sharding_constraint {} {} : {}", self.local(), sharding.body(), self.ty);
        self.b.count_gather(self, sharding);
        self.b.op("sharding_constraint", text, self.ty.clone()).with_sharding(Some(Rc::new(sharding.clone())))
    }
}

impl Builder {
    /// Adds a manual computation over all mesh axes: `body` runs on each device's shard of the operands. `results` has
    /// the shardings of the results, which determine their global types. Other values that `body` uses are replicated:
    /// sharded values are all-gathered before `body` runs.
    pub fn manual(
        &self,
        operands: &[(&Value, Sharding)],
        results: &[Sharding],
        body: impl FnOnce(&[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let mesh = self.0.borrow().mesh.clone();
        let Some(mesh) = mesh else {
            self.fail("manual_computation", "the program has no mesh".into());
            return operands.iter().map(|(v, _)| (*v).clone()).collect();
        };
        if self.is_manual() {
            self.fail("manual_computation", "manual regions cannot be nested".into());
        }
        self.push_region(RegionKind::Manual { captures: Captures::new() });
        let mut parameters = Vec::new();
        for (v, s) in operands {
            let local = s.local(&v.ty, &mesh).unwrap_or_else(|why| {
                self.fail("manual_computation", why);
                v.ty.clone()
            });
            parameters.push(self.value(self.fresh(), local));
        }
        let outputs = body(&parameters);
        if outputs.len() != results.len() {
            let message =
                format!("there are {} result shardings, but the body returns {} values", results.len(), outputs.len());
            self.fail("manual_computation", message);
        }
        let returned = list(outputs.iter().map(|o| self.name_of(o)));
        let local_types = list(outputs.iter().map(|o| &o.ty));
        let region = self.pop_region();
        let RegionKind::Manual { captures } = region.kind else { return outputs };
        let whole = |v: &Value| Sharding(vec![Vec::new(); v.rank()]);
        let outer: Vec<(&Value, Sharding)> =
            operands.iter().cloned().chain(captures.values().map(|(v, _)| (v, whole(v)))).collect();
        let inner = parameters.iter().map(|p| (&p.name, &p.ty)).chain(captures.values().map(|(v, n)| (n, &v.ty)));
        let global: Vec<Type> = outputs
            .iter()
            .zip(results)
            .map(|(o, s)| {
                let mut ty = o.ty.clone();
                for (d, axes) in ty.dims.iter_mut().zip(&s.0) {
                    *d *= axes.iter().filter_map(|a| mesh.size(a)).product::<usize>();
                }
                ty
            })
            .collect();
        let signature = list(inner.map(|(name, ty)| format!("{name}: {ty}")));
        let text = format!(
            "sdy.manual_computation({}) in_shardings=[{}] out_shardings=[{}] manual_axes={{{}}} ({signature}) \
             {{\n{}sdy.return {returned} : {local_types}\n}} : ({}) -> ({})",
            list(outer.iter().map(|(v, _)| self.name_of(v))),
            list(outer.iter().map(|(_, s)| s.body())),
            list(results.iter().map(Sharding::body)),
            list(mesh.axes.iter().map(|(n, _)| format!("\"{n}\""))),
            region.text,
            list(outer.iter().map(|(v, _)| &v.ty)),
            list(&global)
        );
        let placed = self.op_many("manual_computation", text, &global).into_iter().zip(results);
        placed.map(|(v, sharding)| v.with_sharding(Some(Rc::new(sharding.clone())))).collect()
    }
}
