//! Derives everything that a run computes from a component's configuration before the run compiles a program.

use super::verify::schedule;
use crate::av::Av;
use crate::hlo::DType;
use crate::models::transformer::tables;
use crate::pipeline::error::Result;
use crate::pipeline::programs::configs::ModelConfigs;
use crate::pipeline::programs::parameters::parameters;
use crate::request::coordinate_grids;
use crate::sampling::latents::VideoShape;
use crate::weights::Component;

/// Derives the parameters of a component from its configuration, and the latent sizes and RoPE tables of a small
/// request. `fuzz/` calls this with damaged configurations.
///
/// # Errors
/// Returns an error if the configuration is invalid.
pub fn derive(configs: &ModelConfigs, part: Component) -> Result<()> {
    match part {
        Component::Tokenizer => Ok(()),
        Component::Scheduler => {
            // Ignore the result: sigmas that are not finite are an error of the request, not of the model.
            drop(schedule(configs)?.sigmas(8, 4096));
            Ok(())
        }
        Component::Transformer | Component::Connectors | Component::Vae | Component::AudioVae => {
            parameters(configs, part)?;
            sizes(configs)
        }
        _ => parameters(configs, part).map(drop),
    }
}

fn sizes(configs: &ModelConfigs) -> Result<()> {
    let sizes = configs.sizes()?;
    let side = 2 * sizes.video_grid.spatial_compression;
    let frames = sizes.video_grid.temporal_compression + 1;
    // Ignore the result: a size or duration that the model does not support is an error of the request, not of the
    // model.
    drop(sizes.video_grid.latents(1, sizes.video_channels, side, side, frames));
    drop(sizes.audio_grid.latents(1, sizes.audio_channels, frames, 24.0));
    let c = &sizes.transformer;
    let (video, audio) = coordinate_grids(c);
    let shape = VideoShape { batch: 1, channels: sizes.video_channels, frames: 2, height: 2, width: 2 };
    let offset = c.causal_offset as i64;
    let coords = Av {
        video: video.coords(&shape, c.vae_scale_factors, offset, 24.0),
        audio: audio.coords(1, 2, c.audio_scale_factor, c.audio_patch_size_t, offset),
    };
    drop(tables::tables(c, &coords, DType::F32));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use serde_json::Value;

    use super::*;
    use crate::models::presets::Preset;
    use crate::models::ranges::largest;

    /// Maximum time in seconds to derive a component. Debug builds are slower.
    const MAX_SECONDS: f64 = if cfg!(debug_assertions) { 5.0 } else { 1.0 };

    /// Sets each number of each configuration to zero, to its largest valid value, and to `u64::MAX`. No value may
    /// cause a panic or take more than [`MAX_SECONDS`].
    #[test]
    fn no_config_number_causes_panic_or_slow_program() {
        let (mut tried, mut refused) = (0, 0);
        for name in ["nano", "nano_2_5"] {
            let preset = Preset::named(name).unwrap();
            for part in Component::ALL {
                let folder = part.folder();
                let Some(config) = preset.config(folder).cloned() else { continue };
                assert!(derive(&ModelConfigs::of_preset(preset.clone()), part).is_ok(), "{name}: {folder}");
                let mut places = Vec::new();
                numbers(&config, String::new(), &mut places);
                for place in places {
                    let key = place.rsplit('/').find(|key| key.parse::<usize>().is_err()).unwrap_or_default();
                    let most = largest(folder, key.strip_prefix("bwe_").unwrap_or(key)).unwrap_or(1 << 20);
                    for value in [0, most, u64::MAX] {
                        let mut changed = config.clone();
                        *changed.pointer_mut(&place).unwrap() = value.into();
                        let model = ModelConfigs::of_preset(preset.clone().with(folder, changed));
                        let started = Instant::now();
                        refused += usize::from(derive(&model, part).is_err());
                        tried += 1;
                        let seconds = started.elapsed().as_secs_f64();
                        assert!(seconds < MAX_SECONDS, "{name}: {folder}{place} = {value}: {seconds:.1} s");
                    }
                }
            }
        }
        assert!(tried > 500 && refused > tried / 2, "{refused} of {tried} are refused");
    }

    /// Collects the JSON pointers of all numbers in a tree.
    fn numbers(value: &Value, place: String, all: &mut Vec<String>) {
        match value {
            Value::Number(_) => all.push(place),
            Value::Array(list) => {
                list.iter().enumerate().for_each(|(i, value)| numbers(value, format!("{place}/{i}"), all));
            }
            Value::Object(map) => map.iter().for_each(|(key, value)| numbers(value, format!("{place}/{key}"), all)),
            _ => {}
        }
    }
}
