//! Reads the size and the times of an MP4's frames from its tables (ISO/IEC 14496-12, 8.5 and 8.6), without decoding
//! and without ffmpeg.

use std::io;
use std::path::Path;

use mp4_atom::{Colr, Ctts, Decode, Elst, Mdhd, Mvhd, Pasp, Stsz, StszSamples, Stts, Tkhd, Visual};

use super::edit_list::{decode_box, movie, number, played_track, scale, within};

/// Size of a video, and the presentation times of its frames in ticks, in ascending order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FrameTable {
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
pub(super) fn of_file(path: &Path) -> io::Result<Option<FrameTable>> {
    Ok(movie(path)?.and_then(|movie| of_movie(&movie)))
}

/// Returns whether a track's matrix (ISO/IEC 14496-12, 8.3.2) swaps rows and columns. `None`: the rotation is not a
/// multiple of 90 degrees.
fn is_sideways(track: &[u8]) -> Option<bool> {
    let matrix = decode_box::<Tkhd>(track, &[])?.matrix;
    match [matrix.a, matrix.b, matrix.c, matrix.d] {
        [_, 0, 0, _] => Some(false),
        [0, _, _, 0] => Some(true),
        _ => None,
    }
}

/// Returns whether a codec's boxes specify non-square pixels or an HDR transfer function (ISO/IEC 14496-12, 12.1.4 and
/// 12.1.5).
fn is_unusual(codec: &[u8]) -> bool {
    let transfer = match decode_box(codec, &[]) {
        Some(Colr::Nclx { transfer_characteristics, .. } | Colr::Nclc { transfer_characteristics, .. }) => {
            transfer_characteristics
        }
        _ => 0,
    };
    matches!(transfer, 16 | 18) || decode_box(codec, &[]).is_some_and(|pixel: Pasp| pixel.h_spacing != pixel.v_spacing)
}

fn of_movie(movie: &[u8]) -> Option<FrameTable> {
    if within(movie, &[b"mvex"]).is_some() {
        return None;
    }
    let track = played_track(movie, b"vide")?;
    let ticks = scale(decode_box::<Mdhd>(track, &[b"mdia"])?.timescale)?;
    let table = within(track, &[b"mdia", b"minf", b"stbl"])?;
    let described = within(table, &[b"stsd"])?;
    if number(described.get(4..8)?) != 1 {
        return None;
    }
    // Skips the headers of the list and of its entry. The codec's boxes follow the fields that all video codecs have.
    let mut entry = described.get(16..)?;
    let visual = Visual::decode(&mut entry).ok()?;
    if is_unusual(entry) {
        return None;
    }
    let (mut width, mut height) = (usize::from(visual.width), usize::from(visual.height));
    if is_sideways(track)? {
        (width, height) = (height, width);
    }
    let mut times = shown(table)?;
    times.sort_unstable();
    let [first, .., last] = times[..] else { return None };
    let ratio = ticks / scale(decode_box::<Mvhd>(movie, &[])?.timescale)?;
    let cuts =
        within(track, &[b"edts", b"elst"]).is_some() && cuts(&decode_box(track, &[b"edts"])?, first, last, ratio);
    (!cuts && width > 0 && height > 0).then_some(FrameTable { width, height, times, timescale: ticks as usize })
}

/// Returns the presentation times of the frames in storage order.
fn shown(table: &[u8]) -> Option<Vec<i64>> {
    // Each frame has an entry in the size table, so a damaged count cannot request more memory than the file is long.
    let StszSamples::Different { sizes } = decode_box::<Stsz>(table, &[])?.samples else { return None };
    let stts: Stts = decode_box(table, &[])?;
    let deltas = expanded(stts.entries.iter().map(|run| (run.sample_count, run.sample_delta.into())), sizes.len())?;
    let offsets = match within(table, &[b"ctts"]) {
        Some(_) => {
            // Offsets are signed regardless of the stated version: a frame may be shown before its decoding time.
            let ctts: Ctts = decode_box(table, &[])?;
            let runs = ctts.entries.iter().map(|run| (run.sample_count, i64::from(run.sample_offset as i32)));
            expanded(runs, sizes.len())?
        }
        None => vec![0; sizes.len()],
    };
    let mut end = 0;
    let starts = deltas.iter().map(|delta| {
        end += delta;
        end - delta
    });
    Some(starts.zip(offsets).map(|(start, offset)| start + offset).collect())
}

/// Expands run-length encoded values to `count` frames. `None`: the runs do not add up to `count`.
fn expanded(runs: impl Iterator<Item = (u32, i64)>, count: usize) -> Option<Vec<i64>> {
    let mut all = Vec::new();
    for (length, value) in runs {
        if length as usize > count - all.len() {
            return None;
        }
        all.extend(std::iter::repeat_n(value, length as usize));
    }
    (all.len() == count).then_some(all)
}

/// Returns whether an edit list removes frames. `first` and `last` are the times of the first and the last frame in
/// ticks of the track; `ratio` converts the movie's ticks to ticks of the track.
fn cuts(list: &Elst, first: i64, last: i64, ratio: f64) -> bool {
    // An entry without a media time only delays the entries that follow.
    let edits = list.entries.iter().filter_map(|edit| Some((edit.segment_duration as f64, edit.media_time? as f64)));
    match edits.collect::<Vec<_>>()[..] {
        [] => false,
        [(length, start)] => start > first as f64 || (length > 0.0 && start + length * ratio <= last as f64),
        _ => true,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ndarray::Array4;

    use super::super::edit_list::test_boxes::{boxed, encoded, words};
    use super::*;
    use crate::{EncoderChoice, Frames, Mp4Options, write_mp4};

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
    fn frame_times_are_sorted_and_edit_lists_that_remove_frames_are_rejected() {
        let entry = [&words(&[0, 0, 0, 0, 0, 0])[..], &[0, 96, 0, 64], &[0; 50]].concat();
        let described = [words(&[0, 1]), boxed(b"avc1", &entry)].concat();
        let table = [
            boxed(b"stsd", &described),
            boxed(b"stsz", &words(&[0, 0, 4, 10, 20, 30, 40])),
            boxed(b"stts", &words(&[0, 1, 4, 512])),
            boxed(b"ctts", &words(&[0, 3, 1, 1024, 1, 2048, 2, 512])),
        ];
        let handler = boxed(b"hdlr", &[&words(&[0, 0])[..], b"vide"].concat());
        let header = encoded(Mdhd { timescale: 12288, ..Mdhd::default() });
        let media = boxed(b"mdia", &[header, handler, boxed(b"minf", &boxed(b"stbl", &table.concat()))].concat());
        let with = |edits: &[i32]| {
            let list = boxed(b"edts", &boxed(b"elst", &words(&[&[0, edits.len() as i32 / 3][..], edits].concat())));
            let head = encoded(Tkhd { enabled: true, ..Tkhd::default() });
            let track = [head, media.clone(), if edits.is_empty() { Vec::new() } else { list }].concat();
            of_movie(&[encoded(Mvhd { timescale: 1000, ..Mvhd::default() }), boxed(b"trak", &track)].concat())
        };
        let all = with(&[]).unwrap();
        assert_eq!((all.width, all.height, all.timescale), (96, 64, 12288));
        assert_eq!(all.times, [1024, 1536, 2048, 2560]);
        assert_eq!(with(&[167, 1024, 1 << 16]), Some(FrameTable { times: all.times.clone(), ..all }));
        assert!(with(&[500, -1, 1 << 16, 167, 1024, 1 << 16]).is_some(), "a delay");
        assert!(with(&[167, 1536, 1 << 16]).is_none() && with(&[80, 1024, 1 << 16]).is_none(), "cut");
        assert!(with(&[80, 1024, 1 << 16, 80, 2048, 1 << 16]).is_none(), "a film");
    }

    /// The test uses the matrices that phones write, in track headers of both versions.
    #[test]
    fn rotation_matrix_swaps_width_and_height() {
        let track = |long: bool, [a, b, c, d]: [i32; 4]| {
            let before = if long { [words(&[1 << 24]), vec![0; 48]] } else { [words(&[0]), vec![0; 36]] }.concat();
            boxed(b"tkhd", &[before, words(&[a, b, 0, c, d, 0, 0, 0, 1 << 30, 0, 0])].concat())
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
