//! Prints the block sizes of the TPU attention kernel and the share of padding in them for the pipelines' shapes: the table
//! of docs/internals/tpu-attention.md.
//!
//! ```text
//! cargo run --example attention_blocks
//! ```

use ltx2::kernels::Tpu;

/// Name, queries, keys and head width on one device, in bf16.
const SHAPES: &[(&str, usize, usize, usize)] = &[
    ("768x512x121, video, ulysses (4 of 32 heads)", 6144, 6144, 128),
    ("768x512x121, video, gathered keys", 768, 6144, 128),
    ("768x512x121, video to text", 768, 1024, 128),
    ("768x512x121, audio to video", 768, 126, 64),
    ("768x512x121, video to audio, own keys", 126, 768, 64),
    ("audio", 126, 126, 64),
    ("audio to text", 126, 1024, 64),
    ("1280x768x121, video, ulysses", 15360, 15360, 128),
    ("1280x768x121, video, gathered keys", 1920, 15360, 128),
    ("1280x768x121, video to text", 1920, 1024, 128),
    ("first stage of 768x512x121, video, ulysses", 1536, 1536, 128),
    ("first stage of 1280x768x121, video, ulysses", 3840, 3840, 128),
];

fn main() {
    println!("| attention | queries x keys x width | v5e | v5p | v6e | tpu7x |\n|---|---|---|---|---|---|");
    for (name, queries, keys, dim) in SHAPES {
        let cells: Vec<String> = ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"]
            .iter()
            .map(|kind| {
                let step = Tpu::from_kind(kind).step(*queries, *keys, *dim);
                format!("{} x {}, {:.1} %", step.queries, step.keys, step.waste * 100.0)
            })
            .collect();
        println!("| {name} | {queries} x {keys} x {dim} | {} |", cells.join(" | "));
    }
}
