//! A medium-sized model with random weights on NVIDIA GPUs, compared with the CPU plugin and across layouts (`make
//! test-gpu`).

use std::path::{Path, PathBuf};

use crate::support::{ltx2, needs, relative_l2};
use ltx2::models::presets::Preset;
use ltx2::tensor::Tensor;
use ltx2::weights::Checkpoint;
use serde_json::{Value, json};

/// Maximum distance between f32 runs.
const F32: f64 = 1e-4;
/// Factor by which a GPU's bf16 error may exceed the CPU's: rounding differs in place, not in amount.
const SPREAD: f64 = 1.5;

/// Dumped tensors: latents before decoding, frames and samples after.
const DUMPED: [&str; 4] = ["latents.video", "latents.audio", "video", "audio"];

/// A single GPU, whatever layout `auto` would choose.
const ONE: &[&str] = &["--layout", "replicated"];

/// Writes the nano model's configurations with a transformer of eight blocks with 16 heads of the published video and
/// audio sizes.
fn model(dir: &Path) -> PathBuf {
    let preset = Preset::named("nano").expect("a preset");
    let folder = dir.join("middle");
    for part in ["transformer", "connectors", "text_encoder", "vae", "audio_vae", "vocoder", "scheduler"] {
        let mut config = preset.config(part).expect("a configuration").clone();
        if part == "transformer" {
            let sizes = json!({
                "num_layers": 8, "num_attention_heads": 16, "attention_head_dim": 128, "cross_attention_dim": 2048,
                "audio_num_attention_heads": 16, "audio_attention_head_dim": 64, "audio_cross_attention_dim": 1024,
            });
            let (Value::Object(all), Value::Object(sizes)) = (&mut config, sizes) else { panic!("objects") };
            all.extend(sizes);
        }
        let at = folder.join(part);
        std::fs::create_dir_all(&at).expect("a folder");
        let name = if part == "scheduler" { "scheduler_config.json" } else { "config.json" };
        std::fs::write(at.join(name), config.to_string()).expect("writes");
    }
    std::fs::write(folder.join("model_index.json"), preset.config("model_index").expect("an index").to_string())
        .expect("writes");
    folder
}

/// Value of `--set` that selects loops over layers.
const LOOP: &str = "runtime.layers=loop";

struct Run {
    dump: Checkpoint,
    sha256: Value,
}

impl Run {
    fn get(&self, name: &str) -> Tensor {
        self.dump.get(name).expect("in the dump").to_tensor().expect("reads")
    }
}

fn run(dir: &Path, name: &str, platform: &str, dtype: &str, more: &[&str]) -> Run {
    let model = model(dir);
    let dump = dir.join(format!("{name}.safetensors"));
    let out = dir.join(format!("{name}.mp4"));
    let mut command = ltx2();
    command.args(["generate", "-c", "nano_2_0", "--weights", "random", "--platform", platform, "--dtype", dtype]);
    command.args(["--width", "256", "--height", "192", "--num-frames", "25", "--steps", "3", "--seed", "3"]);
    command.args(["--guidance-scale", "3", "--prompt", "a lighthouse", "--force"]);
    command.arg("--model").arg(model).arg("--dump").arg(&dump).arg("-o").arg(&out).args(more);
    // `auto` would choose loops for runs this short, but servers and longer runs unroll layers.
    if platform == "cuda" && !more.contains(&LOOP) {
        command.args(["--set", "runtime.layers=unrolled"]);
    }
    let done = command.output().expect("runs");
    assert!(done.status.success(), "{name}: {}", String::from_utf8_lossy(&done.stderr));
    let sidecar = std::fs::read_to_string(out.with_extension("json")).expect("a sidecar");
    let sidecar: Value = serde_json::from_str(&sidecar).expect("JSON");
    Run { dump: Checkpoint::open(&dump).expect("a dump"), sha256: sidecar["sha256"].clone() }
}

#[needs(cpu, gpu)]
fn one_gpu_agrees_with_the_cpu() {
    let dir = tempfile::tempdir().expect("a folder");
    let exact = run(dir.path(), "cpu", "cpu", "f32", &[]);
    let wide = run(dir.path(), "gpu", "cuda", "f32", ONE);
    let cpu = run(dir.path(), "cpu16", "cpu", "bf16", &[]);
    let gpu = run(dir.path(), "gpu16", "cuda", "bf16", ONE);
    let looped = ["f32", "bf16"]
        .map(|dtype| run(dir.path(), &format!("loop_{dtype}"), "cuda", dtype, &[ONE, &["--set", LOOP]].concat()));
    for name in DUMPED {
        let far = |run: &Run| relative_l2(&run.get(name), &exact.get(name));
        let (f32, own, other) = (far(&wide), far(&cpu), far(&gpu));
        eprintln!("{name}: f32 {f32:.1e}; bf16 {other:.4}, the CPU's {own:.4}");
        assert!(f32 <= F32, "{name}: {f32:e}");
        assert!(other <= SPREAD * own, "{name}: {other} of {own}");
        let [f32, other] = [&looped[0], &looped[1]].map(far);
        assert!(f32 <= F32 && other <= SPREAD * own, "{name} with loops over layers: f32 {f32:e}; {other} of {own}");
    }
}

#[needs(gpu)]
fn runs_are_bitwise_reproducible() {
    let dir = tempfile::tempdir().expect("a folder");
    let [first, second, third] = ["a", "b", "c"].map(|name| run(dir.path(), name, "cuda", "bf16", &[]).sha256);
    assert!(first["frames"].is_string(), "{first}");
    assert_eq!((&first, &first), (&second, &third));
}

/// Every shipped layout that can use two GPUs, including the steps of the tuning history.
const TWO: [(&str, &str); 14] = [
    ("cfg", "cfg=2"),
    ("cfg-ulysses", "cfg=2"),
    ("sequence", "context=2"),
    ("ulysses", "context=2"),
    ("ring", "context=2"),
    ("hybrid", "context=2"),
    ("fsdp-ulysses", "context=2"),
    ("tensor", "tensor=2"),
    ("tensor-gathered-ffn", "tensor=2"),
    ("rope-gathered", "context=2"),
    ("before-385", "context=2"),
    ("ffn-matched", "context=2"),
    ("qkv-unsharded", "context=2"),
    ("out-unsharded", "context=2"),
];

/// Layouts whose axes or groups need four GPUs.
const FOUR: [(&str, &str); 9] = [
    ("ulysses", "context=4"),
    ("ring", "context=4"),
    ("hybrid", "context=4"),
    ("sequence", "cfg=2,context=2"),
    ("cfg-ulysses", "cfg=2,context=2"),
    ("fsdp-ulysses", "fsdp=2,context=2"),
    ("fsdp-ulysses", "cfg=2,context=2"),
    ("tensor", "cfg=2,tensor=2"),
    ("tensor", "context=2,tensor=2"),
];

fn placed(dir: &Path, dtype: &str, (layout, mesh): (&str, &str)) -> Run {
    run(dir, "several", "cuda", dtype, &["--layout", layout, "--mesh", mesh])
}

/// Compares layouts in f32, with attention as XLA operations, with one GPU.
fn agree_in_f32(layouts: &[(&str, &str)]) {
    let dir = tempfile::tempdir().expect("a folder");
    let one = run(dir.path(), "one", "cuda", "f32", ONE);
    for place @ (layout, mesh) in layouts.iter().copied() {
        let several = placed(dir.path(), "f32", place);
        for name in DUMPED {
            let distance = relative_l2(&several.get(name), &one.get(name));
            eprintln!("{layout} {mesh} f32 {name}: {distance:.1e}");
            assert!(distance <= F32, "{layout} {mesh} {name}: {distance:e}");
        }
    }
}

/// Variants of one GPU in bf16 that round differently: attention by XLA instead of cuDNN, Triton matmuls instead of
/// cuBLAS, and a third branch in the batch with a negligible weight of 1e-6.
const OTHER_KERNELS: [&[&str]; 3] = [
    &["--set", "runtime.attention=plain"],
    &["--set", "runtime.xla_flags.xla_gpu_enable_triton_gemm=true"],
    &["--set", "guidance.video.modality=1.000001"],
];

/// Compares layouts in bf16, with cuDNN attention, with one GPU. A layout rounds other partial sums, like other kernels
/// do: its distance to one GPU may be [`SPREAD`] times that of the farthest variant, and its distance to f32 [`SPREAD`]
/// times that of one GPU.
fn agree_in_bf16(layouts: &[(&str, &str)]) {
    let dir = tempfile::tempdir().expect("a folder");
    let exact = run(dir.path(), "exact", "cuda", "f32", ONE);
    let one = run(dir.path(), "one", "cuda", "bf16", ONE);
    let others = OTHER_KERNELS.map(|more| run(dir.path(), "other", "cuda", "bf16", &[ONE, more].concat()));
    let far = |a: &Run, b: &Run, name: &str| relative_l2(&a.get(name), &b.get(name));
    let spread = DUMPED.map(|name| {
        let kernels = others.iter().map(|other| far(other, &one, name)).fold(0.0, f64::max);
        let rounding = far(&one, &exact, name);
        eprintln!("one GPU, bf16 {name}: other kernels {kernels:.2e}, from f32 {rounding:.2e}");
        assert!(kernels > 0.0, "{name}: other kernels give identical bits");
        (name, kernels, rounding)
    });
    let mut too_far = Vec::new();
    for place @ (layout, mesh) in layouts.iter().copied() {
        let several = placed(dir.path(), "bf16", place);
        for (name, kernels, rounding) in spread {
            let (near, whole) = (far(&several, &one, name), far(&several, &exact, name));
            let line = format!("{layout} {mesh} bf16 {name}: {near:.2e} from one GPU, {whole:.2e} from f32");
            eprintln!("{line}");
            if near > SPREAD * kernels || whole > SPREAD * rounding {
                too_far.push(line);
            }
        }
    }
    assert_eq!(too_far, [""; 0]);
}

#[needs(gpus)]
fn layouts_on_two_gpus_agree_with_one_gpu() {
    agree_in_f32(&TWO);
}

#[needs(gpus)]
fn layouts_on_two_gpus_agree_with_one_gpu_in_bf16() {
    agree_in_bf16(&TWO);
}

#[needs(four_gpus)]
fn layouts_on_four_gpus_agree_with_one_gpu() {
    agree_in_f32(&FOUR);
}

#[needs(four_gpus)]
fn layouts_on_four_gpus_agree_with_one_gpu_in_bf16() {
    agree_in_bf16(&FOUR);
}
