//! The calls of cuDNN's kernel, and what happens where it does not take the operands.

use std::sync::{Arc, Mutex};

use super::*;
use crate::hlo::Builder;

const CUDNN: Kernel = Kernel::Cudnn { required: false };
const ONLY_CUDNN: Kernel = Kernel::Cudnn { required: true };

struct Operands {
    b: Builder,
    q: Value,
    k: Value,
    bias: Value,
}

/// `queries` and twice as many keys of two heads.
fn operands(dtype: DType, queries: usize, dim: usize) -> Operands {
    let b = Builder::new("attention");
    let argument = |name: &str, n: usize| b.argument(name, Type::new(dtype, [3, n, 2, dim]));
    let (q, k) = (argument("q", queries), argument("k", 2 * queries));
    let bias = b.argument("bias", Type::new(DType::F32, [1, 1, 1, 2 * queries]));
    Operands { b, q, k, bias }
}

impl Operands {
    fn part(&self, kernel: Kernel, bias: Option<&Value>) -> [Value; 3] {
        Partial::of(kernel, &self.q, &self.k, &self.k, bias, 0.25).into_values()
    }

    fn text(&self, results: &[Value]) -> String {
        let names = ["acc", "max", "denom"];
        let results: Vec<_> = names.into_iter().zip(results).collect();
        self.b.finish(&results).expect("builds").text
    }

    fn error(&self, results: &[Value]) -> String {
        let results: Vec<_> = ["acc"].into_iter().zip(results).collect();
        self.b.finish(&results).expect_err("is refused").to_string()
    }
}

/// With the sums of a part, and a bias that the kernel can take differences of.
#[test]
fn the_program_of_a_part() {
    let o = operands(DType::BF16, 8, 16);
    insta::assert_snapshot!(o.text(&o.part(CUDNN, Some(&o.bias))));
}

/// The calls differ in their results alone.
#[test]
fn sums_are_one_more_result() {
    let call = |text: String| text.lines().find(|l| l.contains("custom_call")).expect("a call").to_owned();
    let o = operands(DType::BF16, 8, 16);
    let part = call(o.text(&o.part(CUDNN, None)));
    let o = operands(DType::BF16, 8, 16);
    let all = call(o.text(&[attention(CUDNN, &o.q, &o.k, &o.k, None, 0.25)]));
    let with_sums = all
        .replace("%0:2", "%0:3")
        .replace(
            "[dense<[3, 1, 2, 0]> : tensor<4xindex>,",
            "[dense<[3, 1, 2, 0]> : tensor<4xindex>, dense<[2, 1, 0]> : tensor<3xindex>,",
        )
        .replace("-> (tensor<3x2x8x16xbf16>,", "-> (tensor<3x2x8x16xbf16>, tensor<3x2x8xf32>,");
    assert_eq!(part, with_sums);
    assert_ne!(all, with_sums);
}

/// Operands that cuDNN does not take, whether with a mask, and why.
fn refusals() -> [(Operands, bool, &'static str); 3] {
    let of = operands;
    [
        (of(DType::F32, 8, 16), false, "f32 elements (queries tensor<3x8x2x16xf32>)"),
        (of(DType::BF16, 8, 20), false, "heads 20 wide, only multiples of 8 up to 256 (queries tensor<3x8x2x20xbf16>)"),
        (of(DType::BF16, 6, 16), true, "a mask of 12 keys, only multiples of 8 (queries tensor<3x6x2x16xbf16>)"),
    ]
}

#[test]
fn kernel_that_is_asked_for_is_an_error_where_it_does_not_fit() {
    for (o, masked, reason) in refusals() {
        let bias = Some(&o.bias).filter(|_| masked);
        let error = o.error(&o.part(ONLY_CUDNN, bias));
        assert!(error.ends_with(&format!("runtime.attention: cudnn does not take {reason}")), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

/// Without sums any number of queries will do.
#[test]
fn a_mask_beside_sums_has_an_even_number_of_queries() {
    let o = operands(DType::BF16, 5, 16);
    let mask = o.b.argument("mask", Type::new(DType::F32, [1, 1, 1, 16]));
    let keys = o.b.argument("keys", Type::new(DType::BF16, [3, 16, 2, 16]));
    let all = attention(ONLY_CUDNN, &o.q, &keys, &keys, Some(&mask), 0.25);
    assert!(o.text(&[all]).contains("__cudnn$fmhaScaleBiasSoftmax"));
    let part = Partial::of(ONLY_CUDNN, &o.q, &keys, &keys, Some(&mask), 0.25).into_values();
    let error = o.error(&part);
    assert!(error.contains("a mask of 5 queries, only even numbers beside the sums"), "{error}");
}

/// A log in memory.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("nobody panicked").write(line)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn kernel_that_is_not_asked_for_gives_way_with_one_warning() {
    let log = Log::default();
    let writer = log.clone();
    let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(lines, || {
        for _ in 0..3 {
            let o = operands(DType::BF16, 8, 28);
            let parts = o.part(CUDNN, None);
            let text = o.text(&parts);
            assert!(!text.contains("custom_call") && text.contains("stablehlo.exponential"), "{text}");
        }
    });
    let said = String::from_utf8(log.0.lock().expect("nobody panicked").clone()).expect("text");
    let reason = "attention in XLA's own operations: cuDNN does not take heads 28 wide, only multiples of 8 up to 256 \
                  (queries tensor<3x8x2x28xbf16>)";
    assert_eq!(said.matches("WARN").count(), 1, "{said}");
    assert!(said.contains(reason), "{said}");
}
