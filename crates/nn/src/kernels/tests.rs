//! Tests of cuDNN calls and of unsupported operands.

use std::sync::{Arc, Mutex};

use super::*;
use ltx2_stablehlo::Builder;

const CUDNN: Kernel = Kernel::Cudnn { required: false };
const ONLY_CUDNN: Kernel = Kernel::Cudnn { required: true };

struct Operands {
    b: Builder,
    q: Value,
    k: Value,
    bias: Value,
}

/// Returns attention operands with `queries` queries, twice as many keys, and two heads.
fn operands(dtype: DType, queries: usize, dim: usize) -> Operands {
    let b = Builder::new("attention");
    let argument = |name: &str, n: usize| b.argument(name, Type::new(dtype, [3, n, 2, dim]));
    let (q, k) = (argument("q", queries), argument("k", 2 * queries));
    let bias = b.argument("bias", Type::new(DType::F32, [1, 1, 1, 2 * queries]));
    Operands { b, q, k, bias }
}

impl Operands {
    fn part(&self, kernel: Kernel, bias: Option<&Value>) -> [Value; 3] {
        PartialAttention::compute(kernel, &self.q, &self.k, &self.k, bias, 0.25).into_values()
    }

    fn text(&self, results: &[Value]) -> String {
        let names = ["acc", "max", "denom"];
        let results: Vec<_> = names.into_iter().zip(results).collect();
        self.b.finish(&results).expect("builds").text
    }

    fn error(&self, results: &[Value]) -> String {
        let results: Vec<_> = ["acc"].into_iter().zip(results).collect();
        self.b.finish(&results).expect_err("unsupported operands").to_string()
    }
}

/// The snapshot shows that the call returns the log-sum-exp and that the bias is clamped to a lower bound.
#[test]
fn partial_attention_program_matches_snapshot() {
    let o = operands(DType::BF16, 8, 16);
    insta::assert_snapshot!(o.text(&o.part(CUDNN, Some(&o.bias))));
}

#[test]
fn partial_and_full_attention_calls_differ_only_in_results() {
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

/// Returns operands that cuDNN does not support, whether to pass the mask, and the expected reason.
fn refusals() -> [(Operands, bool, &'static str); 3] {
    let of = operands;
    [
        (of(DType::F32, 8, 16), false, "element type f32 (queries tensor<3x8x2x16xf32>)"),
        (
            of(DType::BF16, 8, 20),
            false,
            "head dimension 20, which must be a multiple of 8 and at most 256 (queries tensor<3x8x2x20xbf16>)",
        ),
        (
            of(DType::BF16, 6, 16),
            true,
            "a mask whose key count, 12, is not a multiple of 8 (queries tensor<3x6x2x16xbf16>)",
        ),
    ]
}

#[test]
fn required_kernel_rejects_unsupported_operands() {
    for (o, masked, reason) in refusals() {
        let bias = Some(&o.bias).filter(|_| masked);
        let error = o.error(&o.part(ONLY_CUDNN, bias));
        assert!(
            error.ends_with(&format!("runtime.attention: cudnn does not support {reason}; use auto or plain")),
            "{error}"
        );
        assert!(!error.contains('\n'), "{error}");
    }
}

/// Full attention supports an odd number of queries with a mask; partial attention does not.
#[test]
fn partial_attention_mask_needs_even_query_count() {
    let o = operands(DType::BF16, 5, 16);
    let mask = o.b.argument("mask", Type::new(DType::F32, [1, 1, 1, 16]));
    let keys = o.b.argument("keys", Type::new(DType::BF16, [3, 16, 2, 16]));
    let all = attention(ONLY_CUDNN, &o.q, &keys, &keys, Some(&mask), 0.25);
    assert!(o.text(&[all]).contains("__cudnn$fmhaScaleBiasSoftmax"));
    let part = PartialAttention::compute(ONLY_CUDNN, &o.q, &keys, &keys, Some(&mask), 0.25).into_values();
    let error = o.error(&part);
    assert!(error.contains("partial attention with a mask whose query count, 5, is odd"), "{error}");
}

/// An in-memory log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("lock is not poisoned").write(line)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn optional_kernel_falls_back_with_one_warning() {
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
    let lines = String::from_utf8(log.0.lock().expect("lock is not poisoned").clone()).expect("text");
    let reason = "using plain XLA attention: cuDNN does not support head dimension 28, which must be a multiple of 8 and at most 256 \
                  (queries tensor<3x8x2x28xbf16>)";
    assert_eq!(lines.matches("WARN").count(), 1, "{lines}");
    assert!(lines.contains(reason), "{lines}");
}
