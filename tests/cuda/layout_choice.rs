//! `layout: auto` on H100s, compared with compiled modules of all shipped layouts, without the hardware.

use ltx2::config::presets::CONFIGS;

use crate::support::layout_choice::{faults, is_chosen};
use crate::support::needs;

/// Compiles hundreds of programs of two blocks, about half a minute each: `LTX2_TEST_LAYOUTS=ltx2_3_hq:2,ltx2:7`
/// selects cases. Compiled modules are cached.
#[needs(cuda, full)]
fn auto_layout_is_nearly_as_fast_as_the_best_on_1_to_16_h100s() {
    let mut all = Vec::new();
    // The toy model is too small for an H100; generated keyframes use different passes.
    let is_published = |name: &&str| name.starts_with("ltx2") && !name.ends_with("dfr");
    for preset in CONFIGS.iter().map(|(name, _)| *name).filter(is_published) {
        for count in 1..=16 {
            if is_chosen(&format!("{preset}:{count}")) {
                all.extend(faults(preset, &[], &format!("cuda:h100:1x1x{count}")));
            }
        }
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}
