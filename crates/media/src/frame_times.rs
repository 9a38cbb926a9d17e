//! Size, count and rate of a video's frames, determined from the frames' presentation times.

use std::path::Path;

use super::error::{Result, unusable};
use super::rate::FrameRate;
use super::video_track::Timing;

/// Size, frame count and frame rate of a video.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipInfo {
    /// Width of a frame in pixels, after the rotation that the container specifies.
    pub width: usize,
    /// Height of a frame in pixels, after the rotation that the container specifies.
    pub height: usize,
    /// Number of frames of the video track, or of PNG files in the folder.
    pub frames: usize,
    /// Frames per second. `None`: unknown, as for a folder of PNG frames.
    pub frame_rate: Option<f64>,
}

/// Parses ffmpeg's `framecrc` output: the headers `#tb 0: 1/24` and `#dimensions 0: 96x64`, then one line per frame.
/// The third number of a line is the frame's time.
///
/// # Errors
/// Fails for the same reasons as [`rate_of`], or if the output cannot be parsed.
pub(super) fn listed(path: &Path, text: &str, timing: &Timing) -> Result<ClipInfo> {
    let header = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let pair = |text: &str, between: char| {
        let (a, b) = text.split_once(between)?;
        Some([a.trim().parse::<usize>().ok()?, b.trim().parse::<usize>().ok()?])
    };
    let time = |line: &str| line.split(',').nth(2)?.trim().parse::<i64>().ok();
    let times: Option<Vec<i64>> = text.lines().filter(|line| !line.starts_with('#')).map(time).collect();
    let parsed = header("#dimensions 0:").and_then(|text| pair(text, 'x'));
    let tick = header("#tb 0:").and_then(|text| pair(text, '/'));
    let (Some([width, height]), Some(tick), Some(times)) = (parsed, tick, times) else {
        return Err(unusable(path, "cannot parse ffmpeg's list of frames"));
    };
    let frame_rate = Some(rate_of(path, &times, tick, timing)?);
    Ok(ClipInfo { width, height, frames: times.len(), frame_rate })
}

/// Determines the frame rate of frames at `times`, in ticks of `num / den` seconds. `timing` holds the rates from the
/// file's header.
///
/// # Errors
/// Returns an error if there are fewer than two frames or if the frame rate varies.
pub(super) fn rate_of(path: &Path, times: &[i64], [num, den]: [usize; 2], timing: &Timing) -> Result<f64> {
    let [first, .., last] = *times else {
        return Err(unusable(path, "the video has fewer than two frames; pass a still image as an image instead"));
    };
    let each = (last - first) as f64 / (times.len() - 1) as f64;
    let per_second = den as f64 / num as f64;
    let off = |each: f64| {
        let from_line = |(i, time): (usize, &i64)| ((time - first) as f64 - i as f64 * each).abs();
        times.iter().enumerate().map(from_line).fold(0.0, f64::max)
    };
    let rounding = rounding(each, off(each), per_second, timing);
    if each <= 0.0 || off(each) > rounding {
        let why = "the frame rate varies; resample the video to a constant frame rate first, e.g. \
                   ffmpeg -i IN -vf fps=24 OUT.mp4";
        return Err(unusable(path, why));
    }
    // Rounded times of few frames fit several rates. In order of preference: a common rate near one from the header,
    // any other common rate, a rate from the header, the measured rate.
    let measured = per_second / each;
    let fits = |rate: &f64| off(per_second / rate) <= rounding || (rate / measured - 1.0).abs() < SAME;
    // Rates whose deviations are within the rounding error cannot be distinguished; the first of them is used.
    let explained = if rounding > EXACT { rounding / 2.0 } else { 0.0 };
    let distance = |rate: f64| off(per_second / rate).max(explained);
    let best =
        |rates: &mut dyn Iterator<Item = f64>| rates.filter(fits).min_by(|a, b| distance(*a).total_cmp(&distance(*b)));
    let rate = best(&mut timing.rates.iter().filter_map(|rate| usual(*rate)))
        .or_else(|| best(&mut [measured.round(), ntsc(measured)].into_iter().filter(|rate| *rate >= 1.0)))
        .or_else(|| best(&mut timing.rates.iter().copied()))
        .unwrap_or(measured);
    let rate = FrameRate::from_f64(rate)?;
    Ok(f64::from(rate.num) / f64::from(rate.den))
}

/// Maximum deviation of frame times from a constant rate, in ticks, if the times were rounded only once, to ticks.
const EXACT: f64 = 1.01;
/// Relative tolerance of a frame rate if each frame duration was rounded separately, as in APNG.
const SAME: f64 = 1e-4;

/// Returns the largest deviation from a constant rate, in ticks, that rounding explains. Frames are `each` ticks apart;
/// `off` is the largest observed deviation in ticks; `per_second` is the number of ticks per second.
///
/// Containers round times to their own ticks, and files remuxed from Matroska have times in whole milliseconds. The
/// result is at most a quarter of a frame, so that a missing frame is always detected.
fn rounding(each: f64, off: f64, per_second: f64, timing: &Timing) -> f64 {
    if each < 4.0 {
        return 0.01;
    }
    let container = timing.tick.map_or(0.0, |tick| tick * per_second);
    let container = if container < each / 2.0 { container.max(EXACT) } else { EXACT };
    let rounded = if off <= EXACT { container } else { container.max(per_second / 1000.0) };
    rounded.min(each / 4.0).max(EXACT)
}

/// Returns the nearest NTSC rate (23.976, 29.97, ...).
fn ntsc(rate: f64) -> f64 {
    (rate * 1.001).round() * 1000.0 / 1001.0
}

/// Returns the integer or NTSC rate that matches a rate rounded to two decimals. `None`: neither matches.
fn usual(rate: f64) -> Option<f64> {
    [rate.round(), ntsc(rate)].into_iter().find(|usual| *usual >= 1.0 && (usual - rate).abs() < 0.006)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn list(times: &[i64], base: &str) -> String {
        let head = format!("#software: x\n#tb 0: {base}\n#media_type 0: video\n#dimensions 0: 96x64\n#sar 0: 1/1\n");
        let rows = times.iter().map(|t| format!("0, {t:>10}, {t:>10}, 1, 9216, 0x18179d7c\n"));
        head + &rows.collect::<String>()
    }

    fn clip_info(times: &[i64], base: &str) -> Result<ClipInfo> {
        listed(Path::new("a.mp4"), &list(times, base), &Timing::default())
    }

    /// Returns frame times at a constant rate, rounded to `1 / parts` seconds, in ticks of 1/90000 s.
    fn rounded(rate: f64, frames: i32, parts: f64) -> Vec<i64> {
        (0..frames).map(|n| ((f64::from(n) / rate * parts).round() * 90_000.0 / parts) as i64).collect()
    }

    #[test]
    fn frame_list_gives_size_count_and_rate() {
        let info = clip_info(&[0, 1, 2, 3], "1001/24000").unwrap();
        assert_eq!((info.width, info.height, info.frames), (96, 64, 4));
        assert_eq!(info.frame_rate, Some(24000.0 / 1001.0));
        // 24 fps in milliseconds; the first time is not 0.
        assert_eq!(clip_info(&[500, 542, 583, 625, 667, 708, 750], "1/1000").unwrap().frame_rate, Some(24.0));
        let fast: Vec<i64> = (0..241).map(|n| (f64::from(n) * 1000.0 / 120.0).round() as i64).collect();
        assert_eq!(clip_info(&fast, "1/1000").unwrap().frame_rate, Some(120.0));
        let varies = clip_info(&[0, 1, 3, 4, 6, 7, 9, 10], "1/24").unwrap_err().to_string();
        assert!(varies.contains("a.mp4: the frame rate varies") && varies.contains("-vf fps=24"), "{varies}");
        // An MP4 remuxed from Matroska: whole milliseconds in ticks of 1/16000 s.
        let remuxed: Vec<i64> = (0..241).map(|n| (f64::from(n) * 1000.0 / 24.0).round() as i64 * 16).collect();
        assert_eq!(clip_info(&remuxed, "1/16000").unwrap().frame_rate, Some(24.0));
        let lacks: Vec<i64> = remuxed.iter().copied().filter(|time| *time != remuxed[120]).collect();
        assert!(clip_info(&lacks, "1/16000").unwrap_err().to_string().contains("the frame rate varies"));
        // One frame per millisecond, with one frame missing.
        let quick: Vec<i64> = (0..100).filter(|n| *n != 50).map(|n| n * 16).collect();
        assert!(clip_info(&quick, "1/16000").unwrap_err().to_string().contains("the frame rate varies"));
        assert!(clip_info(&[0], "1/24").unwrap_err().to_string().contains("fewer than two frames"));
        let none = listed(Path::new("a"), "nothing", &Timing::default()).unwrap_err().to_string();
        assert!(none.contains("cannot parse"), "{none}");
    }

    #[test]
    fn rounded_frame_times_resolve_to_exact_rate() {
        let stated = |rate: f64, tick: f64| Timing { rates: vec![rate], tick: Some(1.0 / tick) };
        let ntsc = |whole: f64| whole * 1000.0 / 1001.0;
        for (rate, shown) in
            [(24.0, 24.0), (ntsc(24.0), 23.98), (25.0, 25.0), (ntsc(30.0), 29.97), (ntsc(60.0), 59.94), (12.5, 12.5)]
        {
            // Times in whole milliseconds, as in Matroska, and times rounded to 1/90000 s, the tick of the parsed list.
            for (parts, tick) in [(1000.0, 1000.0), (90_000.0, 90_000.0)] {
                for frames in [2, 9, 121] {
                    let text = list(&rounded(rate, frames, parts), "1/90000");
                    let info = listed(Path::new("a.mkv"), &text, &stated(shown, tick)).unwrap();
                    assert!((info.frame_rate.unwrap() - rate).abs() < 1e-9, "{rate} {parts} {frames}: {info:?}");
                }
            }
        }
        // Times in hundredths of a second, as in GIF.
        let gif = |times: &[i64]| listed(Path::new("a.gif"), &list(times, "1/90000"), &stated(24.08, 100.0));
        let times = rounded(24.0, 25, 100.0);
        assert_eq!([&times[..], &times[..9]].map(|times| gif(times).unwrap().frame_rate), [Some(24.0); 2]);
        let lacks: Vec<i64> = times.iter().copied().filter(|time| *time != times[7]).collect();
        assert!(gif(&lacks).unwrap_err().to_string().contains("the frame rate varies"));
    }

    #[test]
    fn frame_times_override_header_rate() {
        let timing = Timing { rates: vec![60.0, 30.0], tick: Some(0.001) };
        let info = listed(Path::new("a.mkv"), &list(&rounded(25.0, 50, 1000.0), "1/90000"), &timing).unwrap();
        assert_eq!(info.frame_rate, Some(25.0));
        // FLV states two rates; the second is ffmpeg's guess.
        let timing = Timing { rates: vec![30.0, 29.97], tick: Some(0.001) };
        let info = listed(Path::new("a.flv"), &list(&rounded(30.0, 9, 1000.0), "1/90000"), &timing).unwrap();
        assert_eq!(info.frame_rate, Some(30.0));
        // Each duration is rounded separately.
        let drifting: Vec<i64> = (0..200).map(|n| (f64::from(n) * 3750.3) as i64).collect();
        assert_eq!(clip_info(&drifting, "1/90000").unwrap().frame_rate, Some(24.0));
        // The header states no rate: the nearest common rate is used.
        assert_eq!(clip_info(&rounded(24.0, 9, 1000.0), "1/90000").unwrap().frame_rate, Some(24.0));
        assert_eq!(clip_info(&rounded(23.5, 48, 90_000.0), "1/90000").unwrap().frame_rate, Some(23.5));
    }
}
