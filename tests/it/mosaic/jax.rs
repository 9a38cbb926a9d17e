//! Tests the interpreter on a kernel written by others: JAX's flash attention. `scripts/oracle/jax_flash.py` lowers it
//! for TPU and runs it in JAX's interpreter on the same inputs.

use std::path::{Path, PathBuf};

use crate::support::needs;
use serde::Deserialize;

use super::grid;
use super::program::distance;
use super::text::Element;
use super::values::Tensor;

#[derive(Deserialize)]
struct Case {
    name: String,
    /// File with the kernel's text.
    kernel: String,
    operands: Vec<Array>,
    /// Result of JAX's kernel.
    result: Array,
}

#[derive(Deserialize)]
struct Array {
    file: String,
    dtype: String,
    dims: Vec<usize>,
}

impl Array {
    /// The file contains f32 for every element type.
    fn read(&self, folder: &Path) -> Tensor {
        let bytes = std::fs::read(folder.join(&self.file)).expect("readable");
        let numbers = bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        let element = if self.dtype == "bf16" { Element::BF16 } else { Element::F32 };
        Tensor::new(element, self.dims.clone(), numbers.collect())
    }
}

#[needs(jax)]
fn interpreted_jax_kernel_matches_jax() {
    let folder = PathBuf::from(std::env::var_os("LTX2_JAX_FLASH").expect("the folder of JAX's kernels"));
    let cases = std::fs::read_to_string(folder.join("cases.json")).expect("cases");
    let cases: Vec<Case> = serde_json::from_str(&cases).expect("JSON");
    assert!(cases.len() >= 4, "{} cases", cases.len());
    for case in cases {
        let mut arrays: Vec<Tensor> = case.operands.iter().map(|a| a.read(&folder)).collect();
        let operands = arrays.len();
        let wanted = case.result.read(&folder);
        arrays.push(wanted.clone());
        let text = std::fs::read_to_string(folder.join(&case.kernel)).expect("a kernel");
        grid::run(&text, &mut arrays, operands).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let error = distance(&arrays[operands].data, &wanted.data);
        eprintln!("{}: {error:.1e}", case.name);
        // Both round the attention weights to bf16 before the second matmul. If weights differ in the last digit of
        // f32, about one rounding in a few thousand differs.
        let allowed = if wanted.element == Element::F32 { 1e-6 } else { 4e-3 };
        assert!(error <= allowed, "{}: {error:e}", case.name);
    }
}
