//! Meshes, shardings and manual regions (Shardy).

use std::fmt;

use super::builder::{Builder, RegionKind, Value};
use super::types::{Type, list};

/// Named axes over the devices, outer first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Axis names and sizes.
    pub axes: Vec<(String, usize)>,
}

impl Mesh {
    /// A mesh from its axes, outer first.
    pub fn new(axes: &[(&str, usize)]) -> Self {
        Mesh { axes: axes.iter().map(|(n, s)| ((*n).to_string(), *s)).collect() }
    }

    /// Devices in all.
    pub fn devices(&self) -> usize {
        self.axes.iter().map(|(_, s)| s).product()
    }

    /// An axis' size; `None` if there is no such axis.
    pub fn size(&self, axis: &str) -> Option<usize> {
        self.axes.iter().find(|(n, _)| n == axis).map(|(_, s)| *s)
    }

    /// A device's index along an axis.
    pub fn position(&self, device: usize, axis: &str) -> usize {
        let inner = self.axes.iter().rev().take_while(|(n, _)| n != axis).map(|(_, s)| s).product::<usize>();
        device / inner.max(1) % self.size(axis).unwrap_or(1)
    }

    /// The groups of devices that differ only along `axes`, each group ordered by these axes, outer first.
    pub fn groups(&self, axes: &[&str]) -> super::Groups {
        let strides: Vec<usize> =
            (0..self.axes.len()).map(|i| self.axes[i + 1..].iter().map(|(_, s)| s).product()).collect();
        let picked: Vec<usize> = axes.iter().filter_map(|a| self.axes.iter().position(|(name, _)| name == a)).collect();
        // Device offsets reached by stepping along the given axes, the last one fastest.
        let offsets = |along: &[usize]| {
            along.iter().fold(vec![0], |at, &i| {
                at.iter()
                    .flat_map(|&base| (0..self.axes[i].1).map(move |k| (base, k)))
                    .map(|(b, k)| b + k * strides[i])
                    .collect()
            })
        };
        let rest: Vec<usize> = (0..self.axes.len()).filter(|i| !picked.contains(i)).collect();
        let members: Vec<usize> = offsets(&picked);
        super::Groups(offsets(&rest).iter().map(|base| members.iter().map(|m| base + m).collect()).collect())
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sdy.mesh @mesh = <[{}]>", list(self.axes.iter().map(|(n, s)| format!("\"{n}\"={s}"))))
    }
}

/// Mesh axes that split each dimension, outer first; none for a replicated dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding(pub Vec<Vec<String>>);

impl Sharding {
    /// A sharding from axis names.
    pub fn new(dims: &[&[&str]]) -> Self {
        Sharding(dims.iter().map(|d| d.iter().map(|a| (*a).to_string()).collect()).collect())
    }

    fn body(&self) -> String {
        let dims = list(self.0.iter().map(|d| format!("{{{}}}", list(d.iter().map(|a| format!("\"{a}\""))))));
        format!("<@mesh, [{dims}]>")
    }

    /// Text of the attribute of an argument or result.
    pub(super) fn attribute(&self) -> String {
        format!("#sdy.sharding{}", self.body())
    }

    /// Type of one device's shard of `ty`.
    ///
    /// # Errors
    /// A dimension that its mesh axes do not divide.
    pub fn local(&self, ty: &Type, mesh: &Mesh) -> Result<Type, String> {
        if self.0.len() != ty.rank() {
            return Err(format!("{ty} has {} dimensions, the sharding {}", ty.rank(), self.0.len()));
        }
        let mut local = ty.clone();
        for (i, axes) in self.0.iter().enumerate() {
            for a in axes {
                let size = mesh.size(a).ok_or_else(|| format!("the mesh has no axis '{a}'"))?;
                if !local.dims[i].is_multiple_of(size) {
                    return Err(format!("dimension {i} of {ty} does not divide by axis '{a}' of size {size}"));
                }
                local.dims[i] /= size;
            }
        }
        Ok(local)
    }
}

impl Value {
    /// Constrains the value's sharding; no effect inside a manual region, where a value is one device's own.
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
        self.b.op("sharding_constraint", text, self.ty.clone())
    }
}

impl Builder {
    /// Manual computation: runs `body` on each device's shard of the operands, over all mesh axes. Results are named by their
    /// placement; their global type follows from it. Other values that the body uses are gathered, if they are not
    /// whole on every device, before it runs.
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
            self.fail("manual_computation", "a manual region does not nest".into());
        }
        self.push_region(RegionKind::Manual { captures: Vec::new() });
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
            let message = format!("{} results placed, the region returns {}", results.len(), outputs.len());
            self.fail("manual_computation", message);
        }
        let returned = list(outputs.iter().map(|o| self.name_of(o)));
        let local_types = list(outputs.iter().map(|o| &o.ty));
        let region = self.pop_region();
        let RegionKind::Manual { captures } = region.kind else { return outputs };
        let whole = |v: &Value| Sharding(vec![Vec::new(); v.rank()]);
        let outer: Vec<(&Value, Sharding)> =
            operands.iter().cloned().chain(captures.iter().map(|(v, _)| (v, whole(v)))).collect();
        let inner = parameters.iter().map(|p| (&p.name, &p.ty)).chain(captures.iter().map(|(v, n)| (n, &v.ty)));
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
        self.op_many("manual_computation", text, &global)
    }
}
