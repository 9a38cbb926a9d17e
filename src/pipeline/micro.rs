//! `bench --micro`: what the devices of a configuration reach, apart from any model.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::error::Result;
use super::request;
use crate::analysis::{Measurements, Provenance};
use crate::config::Config;
use crate::runtime::{Engine, micro, platform};

/// Times small programs on all devices of the configuration's platform, each `runs` times. `command` is what was typed.
///
/// # Errors
/// No such platform; the plugin's message.
pub fn measure(config: &Config, runs: usize, command: &str) -> Result<Measurements> {
    let choice = config.platform().map_err(super::PipelineError::Input)?;
    let (plugin, client) = platform::open_with(&choice, &request::platform_options(config, None)?)?;
    let versions = json!({
        "ltx2": env!("CARGO_PKG_VERSION"),
        "plugin": plugin.path().file_name().map(|name| name.to_string_lossy()),
        "platform": client.platform_version().unwrap_or_default(),
    });
    let engine = Engine::new(client, request::engine_options(config));
    let source = Provenance {
        command: command.into(),
        device: engine.own_device().kind().to_string(),
        devices: engine.devices().len(),
        versions,
        date: today(),
    };
    let (iteration_seconds, samples) = micro::micro(&engine, runs)?;
    Ok(Measurements { source, platform: engine.platform(), iteration_seconds, samples })
}

/// The day, UTC, as `2026-01-31`.
fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let [year, month, day] = date((seconds / 86_400) as i64);
    format!("{year:04}-{month:02}-{day:02}")
}

/// Year, month and day of a number of days since 1970, in the Gregorian calendar. Years are counted from March, so that
/// a leap day is a year's last; an era of 400 years has 146097 days.
fn date(days: i64) -> [i64; 3] {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march + 2) / 5 + 1;
    let month = if march < 10 { march + 3 } else { march - 9 };
    [era * 400 + year + i64::from(month <= 2), month, day]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_dates() {
        assert_eq!(date(0), [1970, 1, 1]);
        assert_eq!(date(11_016), [2000, 2, 29]);
        assert_eq!(date(20_513), [2026, 3, 1]);
        assert_eq!(date(20_512), [2026, 2, 28]);
    }
}
