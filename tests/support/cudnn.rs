//! Stand-in for cuDNN's attention, so that CUDA programs run on the CPU: replaces each call in the program text by a
//! call of a plain function that computes what the kernel documents.

use std::collections::BTreeMap;

use ltx2::hlo::{Builder, DType, Program, Type, Value};

/// Returns the program with its cuDNN calls replaced, and their number.
pub fn replace_cudnn_calls(program: &Program, scale: f64) -> (Program, usize) {
    let mut functions = BTreeMap::new();
    let mut calls = 0;
    let mut lines = Vec::new();
    for line in program.text.lines() {
        let Some((result, call)) = line.split_once("\"stablehlo.custom_call\"(") else {
            lines.push(line.to_owned());
            continue;
        };
        assert!(call.contains(&format!("\\22fmha_scale\\22:{scale},")), "{call}");
        let (operands, rest) = call.split_once(')').expect("operands");
        let (_, signature) = rest.split_once("}> : ").expect("a signature");
        let known = functions.len();
        let (name, _) =
            functions.entry(signature.split(" loc(").next().expect("a part").to_owned()).or_insert_with_key(
                |signature| (format!("cudnn{known}"), function(&format!("cudnn{known}"), signature, scale)),
            );
        lines.push(format!("{result}func.call @{name}({operands}) : {signature}"));
        calls += 1;
    }
    let end = lines.iter().rposition(|l| l.starts_with('}')).expect("the module's end");
    lines.splice(end..end, functions.into_values().map(|(_, text)| text));
    let mut replaced = program.clone();
    replaced.text = lines.join("\n");
    (replaced, calls)
}

/// Parses the types in a parenthesized list of a signature.
fn types(list: &str) -> Vec<Type> {
    let each = list.trim_matches(['(', ')']).split(", ");
    each.map(|ty| {
        let parts: Vec<&str> = ty.trim_start_matches("tensor<").trim_end_matches('>').split('x').collect();
        let (dtype, dims) = parts.split_last().expect("an element type");
        let dtype = match *dtype {
            "bf16" => DType::BF16,
            "f32" => DType::F32,
            other => panic!("{other} of {ty}"),
        };
        Type::new(dtype, dims.iter().map(|d| d.parse::<usize>().expect("a size")).collect::<Vec<_>>())
    })
    .collect()
}

/// Returns a function with the results of attention: values `[b, h, q, d]`; with three results, also the log-sum-exp
/// `[b, h, q]`; a workspace.
fn function(name: &str, signature: &str, scale: f64) -> String {
    let (operands, results) = signature.split_once(" -> ").expect("results");
    let b = Builder::new(name);
    let x: Vec<Value> =
        types(operands).into_iter().enumerate().map(|(i, ty)| b.argument(&format!("x{i}"), ty)).collect();
    let wide = |x: &Value| x.to(DType::F32);
    let scores = b.einsum("bqhd,bkhd->bhqk", &wide(&x[0]), &wide(&x[1]), DType::F32) * scale;
    let scores = x.get(3).map_or(scores.clone(), |bias| scores + wide(bias));
    let largest = scores.max_keep(&[-1]);
    let weights = (&scores - &largest).exp();
    let sums = weights.sum_keep(&[-1]);
    let values = b.einsum("bhqk,bkhd->bhqd", &(&weights / &sums), &wide(&x[2]), DType::F32).to(x[0].dtype());
    let logarithms = (&largest + sums.log()).reshape(values.dims()[..3].to_vec());
    let workspace = b.full(0.0, Type::new(DType::U8, [0]));
    let all = match results.matches("tensor<").count() {
        2 => vec![("values", &values), ("workspace", &workspace)],
        _ => vec![("values", &values), ("sums", &logarithms), ("workspace", &workspace)],
    };
    let text = b.finish(&all).expect("builds").text;
    let body: Vec<&str> = text.lines().filter(|l| !l.starts_with("module") && !l.starts_with('}')).collect();
    body.join("\n").replace("func.func public @main", &format!("func.func private @{name}"))
}
