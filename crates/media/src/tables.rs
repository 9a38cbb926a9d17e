//! Reads the size and the times of an MP4's frames from its tables (ISO/IEC 14496-12, 8.5 and 8.6), without decoding
//! and without ffmpeg.

use std::io;
use std::path::Path;

use super::edit_list::{boxes, movie, number, timescale, within};

/// Size of a video, and the presentation times of its frames in ticks, in ascending order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tables {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) times: Vec<i64>,
    /// Ticks per second.
    pub(super) timescale: usize,
}

/// Reads the tables of an MP4's video track. Returns `None` if the file is not an MP4, or if the tables alone do not
/// determine which frames are shown and how. That is the case for fragments, an edit list that removes frames, several
/// codecs, non-square pixels, HDR, or a rotation that is not a multiple of 90 degrees.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub(super) fn of_file(path: &Path) -> io::Result<Option<Tables>> {
    Ok(movie(path)?.and_then(|movie| of_movie(&movie)))
}

/// Returns whether a track's matrix (ISO/IEC 14496-12, 8.3.2) swaps rows and columns. `None`: the rotation is not a
/// multiple of 90 degrees.
fn is_sideways(track: &[u8]) -> Option<bool> {
    let head = within(track, &[b"tkhd"])?;
    let at = if head.first() == Some(&1) { 52 } else { 40 };
    let entry = |n: usize| Some(number(head.get(at + 4 * n..at + 4 * n + 4)?) as i32);
    match [entry(0)?, entry(1)?, entry(3)?, entry(4)?] {
        [_, 0, 0, _] => Some(false),
        [0, _, _, 0] => Some(true),
        _ => None,
    }
}

/// Returns whether a codec's boxes specify non-square pixels or an HDR transfer function (ISO/IEC 14496-12, 12.1.4 and
/// 12.1.5).
fn is_unusual(codec: &[u8]) -> bool {
    const HDR: [&[u8]; 2] = [&[0, 16], &[0, 18]];
    let pixel = within(codec, &[b"pasp"]);
    let colour = within(codec, &[b"colr"]).filter(|colour| colour.starts_with(b"nclx") || colour.starts_with(b"nclc"));
    pixel.is_some_and(|sides| sides.get(..4) != sides.get(4..8))
        || colour.and_then(|colour| colour.get(6..8)).is_some_and(|transfer| HDR.contains(&transfer))
}

/// Returns the video track that is shown: the first enabled one, or else the first.
fn video_track(movie: &[u8]) -> Option<&[u8]> {
    let is_video = |track: &[u8]| within(track, &[b"mdia", b"hdlr"]).and_then(|h| h.get(8..12)) == Some(b"vide");
    let is_enabled =
        |track: &[u8]| within(track, &[b"tkhd"]).and_then(|head| head.get(3)).is_some_and(|flags| flags & 1 == 1);
    let tracks = || boxes(movie).filter(|(name, body)| name == b"trak" && is_video(body)).map(|(_, body)| body);
    tracks().find(|track| is_enabled(track)).or_else(|| tracks().next())
}

fn of_movie(movie: &[u8]) -> Option<Tables> {
    if within(movie, &[b"mvex"]).is_some() {
        return None;
    }
    let track = video_track(movie)?;
    let ticks = timescale(within(track, &[b"mdia", b"mdhd"])?)?;
    let table = within(track, &[b"mdia", b"minf", b"stbl"])?;
    let described = within(table, &[b"stsd"])?;
    if number(described.get(4..8)?) != 1 {
        return None;
    }
    // Skips the headers of the list and of its entry, and the first 24 bytes of the entry.
    let size = |at: usize| described.get(at..at + 2).map(|b| usize::from(u16::from_be_bytes([b[0], b[1]])));
    let (mut width, mut height) = (size(40)?, size(42)?);
    // The codec's boxes follow the fields that all video codecs have.
    if is_unusual(described.get(94..)?) {
        return None;
    }
    if is_sideways(track)? {
        (width, height) = (height, width);
    }
    let mut times = shown(table)?;
    times.sort_unstable();
    let [first, .., last] = times[..] else { return None };
    let scale = timescale(within(movie, &[b"mvhd"])?)?;
    let cuts = within(track, &[b"edts", b"elst"]).is_some_and(|list| cuts(list, first, last, ticks / scale));
    (!cuts && width > 0 && height > 0).then_some(Tables { width, height, times, timescale: ticks as usize })
}

/// Returns the presentation times of the frames in storage order.
fn shown(table: &[u8]) -> Option<Vec<i64>> {
    let sizes = within(table, &[b"stsz"])?;
    let count = number(sizes.get(8..12)?) as usize;
    // Each frame has an entry in the size table, so a damaged count cannot request more memory than the file is long.
    sizes.get(12..)?.get(..count.checked_mul(4)?)?;
    let delta = |entry: &[u8]| i64::from(number(entry));
    // Offsets are signed regardless of the stated version: a frame may be shown before its decoding time.
    let offset = |entry: &[u8]| i64::from(number(entry) as i32);
    let deltas = runs(within(table, &[b"stts"])?, count, delta)?;
    let offsets = match within(table, &[b"ctts"]) {
        Some(list) => runs(list, count, offset)?,
        None => vec![0; count],
    };
    let mut end = 0;
    let starts = deltas.iter().map(|delta| {
        end += delta;
        end - delta
    });
    Some(starts.zip(offsets).map(|(start, offset)| start + offset).collect())
}

/// Expands run-length encoded values to `count` frames. `None`: the runs do not add up to `count`.
fn runs(list: &[u8], count: usize, value: impl Fn(&[u8]) -> i64) -> Option<Vec<i64>> {
    let mut all = Vec::new();
    for run in list.get(8..)?.chunks_exact(8).take(number(list.get(4..8)?) as usize) {
        let length = number(run) as usize;
        if length > count - all.len() {
            return None;
        }
        all.extend(std::iter::repeat_n(value(&run[4..]), length));
    }
    (all.len() == count).then_some(all)
}

/// Returns whether an edit list removes any of the frames between times `first` and `last`. `ratio` converts the
/// movie's ticks to the track's ticks.
fn cuts(list: &[u8], first: i64, last: i64, ratio: f64) -> bool {
    let wide = list.first() == Some(&1);
    let entries = list.get(8..).unwrap_or(&[]).chunks_exact(if wide { 20 } else { 12 });
    let long = |b: &[u8]| b.iter().take(8).fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
    let each = entries.map(|e| match wide {
        true => (long(&e[..8]), long(&e[8..16]) as i64),
        false => (u64::from(number(&e[..4])), i64::from(number(&e[4..8]) as i32)),
    });
    // An entry with start -1 only delays the entries that follow.
    let edits: Vec<(u64, i64)> = each.filter(|(_, start)| *start >= 0).collect();
    match edits[..] {
        [] => false,
        [(length, start)] => start > first || (length > 0 && start as f64 + length as f64 * ratio <= last as f64),
        _ => true,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ndarray::Array4;

    use super::*;
    use crate::{EncoderChoice, Frames, Mp4Options, write_mp4};

    fn words(all: &[i32]) -> Vec<u8> {
        all.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    fn boxed(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32 + 8).to_be_bytes()[..], name, body].concat()
    }

    #[test]
    fn mp4_tables_give_size_and_frame_times_without_decoding() {
        let file = tempfile::Builder::new().suffix(".mp4").tempfile().unwrap();
        let frames = Frames::new(Array4::zeros((9, 48, 70, 3))).unwrap();
        let options = Mp4Options { encoder: EncoderChoice::Embedded, ..Mp4Options::default() };
        write_mp4(file.path(), &frames, 23.976, None, &options).unwrap();
        let tables = of_file(file.path()).unwrap().unwrap();
        assert_eq!((tables.width, tables.height, tables.times.len()), (70, 48, 9));
        let each = tables.timescale as f64 * 1001.0 / 24000.0;
        assert!(tables.times.iter().enumerate().all(|(n, t)| (*t as f64 - n as f64 * each).abs() < 0.5), "{tables:?}");
        // A truncated header gives no tables, or only complete ones; it must not cause a panic.
        let whole = movie(file.path()).unwrap().unwrap();
        (0..whole.len()).for_each(|cut| drop(of_movie(&whole[..cut])));
        std::fs::write(file.path(), b"RIFF").unwrap();
        assert_eq!(of_file(file.path()).unwrap(), None);
    }

    /// The storage order of the frames differs from their presentation order. Some of the edit lists remove frames.
    #[test]
    fn reordered_frames_are_sorted_and_cutting_edit_lists_rejected() {
        let entry = [&words(&[0, 0, 0, 0, 0, 0])[..], &[0, 96, 0, 64], &[0; 50]].concat();
        let described = [words(&[0, 1]), boxed(b"avc1", &entry)].concat();
        let table = [
            boxed(b"stsd", &described),
            boxed(b"stsz", &words(&[0, 0, 4, 10, 20, 30, 40])),
            boxed(b"stts", &words(&[0, 1, 4, 512])),
            boxed(b"ctts", &words(&[0, 3, 1, 1024, 1, 2048, 2, 512])),
        ];
        let handler = boxed(b"hdlr", &[&words(&[0, 0])[..], b"vide"].concat());
        let header = boxed(b"mdhd", &words(&[0, 0, 0, 12288]));
        let media = boxed(b"mdia", &[header, handler, boxed(b"minf", &boxed(b"stbl", &table.concat()))].concat());
        let with = |edits: &[i32]| {
            let list = boxed(b"edts", &boxed(b"elst", &words(&[&[0, edits.len() as i32 / 3][..], edits].concat())));
            let head =
                boxed(b"tkhd", &words(&[&[1][..], &[0; 9], &[1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30]].concat()));
            let track = [head, media.clone(), if edits.is_empty() { Vec::new() } else { list }].concat();
            of_movie(&[boxed(b"mvhd", &words(&[0, 0, 0, 1000])), boxed(b"trak", &track)].concat())
        };
        let all = with(&[]).unwrap();
        assert_eq!((all.width, all.height, all.timescale), (96, 64, 12288));
        assert_eq!(all.times, [1024, 1536, 2048, 2560]);
        assert_eq!(with(&[167, 1024, 1 << 16]), Some(Tables { times: all.times.clone(), ..all }));
        assert!(with(&[500, -1, 1 << 16, 167, 1024, 1 << 16]).is_some(), "a delay");
        assert!(with(&[167, 1536, 1 << 16]).is_none() && with(&[80, 1024, 1 << 16]).is_none(), "cut");
        assert!(with(&[80, 1024, 1 << 16, 80, 2048, 1 << 16]).is_none(), "a film");
    }

    /// The matrices are those that phones write, in headers of both versions.
    #[test]
    fn rotation_matrix_swaps_width_and_height() {
        let track = |long: bool, [a, b, c, d]: [i32; 4]| {
            let before = if long { [words(&[1 << 24]), vec![0; 48]] } else { [words(&[0]), vec![0; 36]] }.concat();
            boxed(b"tkhd", &[before, words(&[a, b, 0, c, d, 0, 0, 0, 1 << 30])].concat())
        };
        let one = 1 << 16;
        for (matrix, sideways) in [
            ([one, 0, 0, one], Some(false)),
            ([0, one, -one, 0], Some(true)),
            ([-one, 0, 0, -one], Some(false)),
            ([0, -one, one, 0], Some(true)),
            ([0, one, one, 0], Some(true)),
            ([-one, 0, 0, one], Some(false)),
            ([one / 2, one / 2, -one / 2, one / 2], None),
        ] {
            assert_eq!([false, true].map(|long| is_sideways(&track(long, matrix))), [sideways; 2], "{matrix:?}");
        }
        assert_eq!((is_sideways(&boxed(b"tkhd", &words(&[0, 0]))), is_sideways(b"")), (None, None));
    }

    #[test]
    fn non_square_pixels_and_hdr_are_detected() {
        let colour = |transfer: u8| boxed(b"colr", &[&b"nclx"[..], &[0, 9, 0, transfer, 0, 9, 0]].concat());
        assert!(is_unusual(&boxed(b"pasp", &words(&[4, 3]))) && !is_unusual(&boxed(b"pasp", &words(&[1, 1]))));
        assert_eq!(
            [1, 16, 18].map(|transfer| is_unusual(&[boxed(b"avcC", b""), colour(transfer)].concat())),
            [false, true, true]
        );
        assert!(!is_unusual(b"") && !is_unusual(&boxed(b"colr", b"prof")));
    }
}
