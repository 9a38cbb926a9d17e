//! Videos that are decoded in tiles.

use serde_json::Value;

use crate::support::{self, needs};

/// Encoding frames while later tiles are decoded gives the same file as encoding all at the end, which a dump requires.
#[needs(cpu)]
fn tiled_video_is_identical_with_and_without_streaming() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let tiling = "runtime.tiling={pixels: 64, overlap: 32, frames: 16, frame_overlap: 8}";
    // Two tiles in time.
    let tiled = ["generate", "-c", support::tiny(), "--num-frames", "17", "--set", tiling];
    let dump = at("b.safetensors");
    let dumped = [&tiled[..], &["--dump", dump.to_str().expect("UTF-8")]].concat();
    for (name, more) in [("a.mp4", &tiled[..]), ("b.mp4", &dumped)] {
        let out = support::ltx2().args(more).arg("-o").arg(at(name)).output().expect("the binary runs");
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{said}");
        assert!(said.contains("encoding with embedded"), "{said}");
    }
    let read = |name: &str| std::fs::read(at(name)).expect("a video");
    assert!(read("a.mp4") == read("b.mp4"), "files differ");
    let hashes = |name: &str| serde_json::from_slice::<Value>(&read(name)).expect("JSON")["sha256"].clone();
    assert_eq!(hashes("a.json"), hashes("b.json"));
}
