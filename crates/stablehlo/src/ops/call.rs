//! Calls of private functions.

use crate::builder::{Builder, Function, RegionKind, Value};
use crate::types::{Type, list};

impl Builder {
    /// Calls a private function. The first call with given argument types runs `body` to define the function; later
    /// calls reuse it, so `name` and the argument types must determine the body.
    pub fn call(&self, name: &str, arguments: &[Value], body: impl FnOnce(&[Value]) -> Vec<Value>) -> Vec<Value> {
        let types: Vec<Type> = arguments.iter().map(|a| a.ty.clone()).collect();
        let key = function_name(name, &types);
        let known = self.0.borrow().functions.get(&key).map(|f| f.results.clone());
        let results = known.unwrap_or_else(|| self.define(&key, &types, body));
        let known = self.0.borrow().functions.get(&key).map(|f| (f.dot_flops, f.work.clone()));
        let (dot_flops, work) = known.unwrap_or_default();
        self.0.borrow_mut().dot_flops += dot_flops;
        self.0.borrow_mut().work.extend(&work);
        let operands = list(arguments.iter().map(|a| self.name_of(a)));
        let text = format!("func.call @\"{key}\"({operands}) : ({}) -> ({})", list(types.iter()), list(results.iter()));
        self.op_many("call", text, &results)
    }

    fn define(&self, key: &str, types: &[Type], body: impl FnOnce(&[Value]) -> Vec<Value>) -> Vec<Type> {
        let (before, mark) = (self.0.borrow().dot_flops, self.0.borrow().work.mark());
        self.push_region(RegionKind::Isolated);
        let parameters: Vec<Value> = types.iter().map(|t| self.value(self.fresh(), t.clone())).collect();
        let results = body(&parameters);
        let names = list(results.iter().map(|r| self.name_of(r)));
        let result_types: Vec<Type> = results.iter().map(|r| r.ty.clone()).collect();
        let region = self.pop_region();
        let signature = list(parameters.iter().map(|p| format!("{}: {}", p.name, p.ty)));
        let returned = list(result_types.iter());
        let text = format!(
            "  func.func private @\"{key}\"({signature}) -> ({returned}) {{\n{}    return {names} : {returned}\n  }}\n",
            region.text
        );
        let mut s = self.0.borrow_mut();
        let dot_flops = s.dot_flops - before;
        s.dot_flops = before;
        let work = s.work.take(mark);
        s.functions.insert(key.to_string(), Function { text, results: result_types.clone(), dot_flops, work });
        drop(s);
        result_types
    }
}

fn function_name(name: &str, types: &[Type]) -> String {
    let mut key = name.to_string();
    for t in types {
        key.push('_');
        for d in &t.dims {
            key.push_str(&format!("{d}x"));
        }
        key.push_str(t.dtype.name());
    }
    key
}
