//! The part of an MP4's sound that is shown: encoders put samples in front of it, and its edit list says how many
//! (ISO/IEC 14496-12, 8.6.6).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Seconds of silence that a file may put in front, where nobody says how much is read.
const MOST_SILENCE: f64 = 60.0;

/// Heard part of a track's decoded samples, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Edit {
    /// Silence in front.
    silence: f64,
    /// Decoded seconds that are left out in front.
    skip: f64,
    /// Seconds that follow, where that is said.
    length: Option<f64>,
}

impl Edit {
    /// Decoded seconds in front that are not heard.
    pub(super) fn skipped(&self) -> f64 {
        self.skip
    }

    /// Decoded samples of a channel that lie before second `start` of what is heard.
    pub(super) fn before(&self, start: f64, rate: u32, end: Option<f64>) -> usize {
        if start == 0.0 {
            return 0;
        }
        samples(self.skip, rate).saturating_add(place(start, rate).saturating_sub(samples(self.gap(end), rate)))
    }

    /// Leaves of each plane, whose first `dropped` samples are gone, what is heard from second `start` on; silence in front of
    /// `end` seconds at most. Samples that are heard in all.
    pub(super) fn apply(
        &self,
        planes: &mut [Vec<f32>],
        rate: u32,
        start: f64,
        end: Option<f64>,
        dropped: usize,
    ) -> usize {
        let (skip, gap, start) = (samples(self.skip, rate), samples(self.gap(end), rate), place(start, rate));
        let last = self.length.map_or(usize::MAX, |length| skip.saturating_add(samples(length, rate)));
        let decoded = dropped + planes.first().map_or(0, Vec::len);
        let first = skip.saturating_add(start.saturating_sub(gap)).max(dropped);
        for plane in planes {
            plane.truncate(last.saturating_sub(dropped));
            plane.drain(..(first - dropped).min(plane.len()));
            plane.splice(..0, std::iter::repeat_n(0.0, gap.saturating_sub(start)));
        }
        gap + decoded.min(last).saturating_sub(skip)
    }

    /// Seconds of silence in front.
    fn gap(&self, end: Option<f64>) -> f64 {
        self.silence.min(end.unwrap_or(MOST_SILENCE))
    }
}

fn samples(seconds: f64, rate: u32) -> usize {
    (seconds * f64::from(rate)).round() as usize
}

/// The sample at a second, as [`super::audio::Audio::span`] has it.
fn place(seconds: f64, rate: u32) -> usize {
    (seconds * f64::from(rate)).round_ties_even() as usize
}

/// The edit of the first sound track of an MP4; of any other file, all of it.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn sound_edit(path: &Path) -> io::Result<Edit> {
    Ok(movie(path)?.and_then(|movie| of_movie(&movie)).unwrap_or_default())
}

/// The body of an MP4's header; none of any other file.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn movie(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut at = 0;
    let mut first = true;
    while let Some((name, body, end)) = header(&mut file, at, size)? {
        if first && !matches!(&name, b"ftyp" | b"moov" | b"wide" | b"free" | b"skip" | b"mdat") {
            return Ok(None);
        }
        first = false;
        if &name == b"moov" {
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(body))?;
            (&mut file).take(end - body).read_to_end(&mut bytes)?;
            return Ok(Some(bytes));
        }
        at = end;
    }
    Ok(None)
}

/// Name, start of the body and end of the box at a place of a file; none behind the last.
fn header(file: &mut File, at: u64, size: u64) -> io::Result<Option<([u8; 4], u64, u64)>> {
    if at + 8 > size {
        return Ok(None);
    }
    let mut head = [0; 16];
    file.seek(SeekFrom::Start(at))?;
    let read = file.take(16).read(&mut head)?;
    let short = u64::from(number(&head[..4]));
    let (length, before) = match short {
        0 => (size - at, 8),
        1 if read == 16 => (u64::from_be_bytes(head[8..].try_into().expect("eight bytes")), 16),
        _ => (short, 8),
    };
    let name = head[4..8].try_into().expect("four bytes");
    let end = at.saturating_add(length).min(size);
    Ok((length >= before).then_some((name, at + before, end)))
}

/// A big-endian number of four bytes.
pub(super) fn number(bytes: &[u8]) -> u32 {
    bytes.iter().take(4).fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

/// Boxes of a body: names and their own bodies.
pub(super) fn boxes(mut bytes: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    std::iter::from_fn(move || {
        let length = (number(bytes.get(..4)?) as usize).min(bytes.len());
        let whole = bytes.get(..length).filter(|whole| whole.len() >= 8)?;
        bytes = &bytes[length..];
        Some((&whole[4..8], &whole[8..]))
    })
}

/// The body of the box at a path of names.
pub(super) fn within<'a>(bytes: &'a [u8], path: &[&[u8; 4]]) -> Option<&'a [u8]> {
    path.iter().try_fold(bytes, |bytes, name| boxes(bytes).find(|(own, _)| own == name).map(|(_, body)| body))
}

/// Ticks a second of a movie's or a track's header, whose version says how wide times are.
pub(super) fn timescale(header: &[u8]) -> Option<f64> {
    let at = if header.first()? == &1 { 20 } else { 12 };
    let ticks = number(header.get(at..at + 4)?);
    (ticks > 0).then_some(f64::from(ticks))
}

fn of_movie(movie: &[u8]) -> Option<Edit> {
    let movie_scale = timescale(within(movie, &[b"mvhd"])?)?;
    let is_sound = |track: &[u8]| within(track, &[b"mdia", b"hdlr"]).and_then(|h| h.get(8..12)) == Some(b"soun");
    let track = boxes(movie).find(|(name, body)| name == b"trak" && is_sound(body))?.1;
    let track_scale = timescale(within(track, &[b"mdia", b"mdhd"])?)?;
    let list = within(track, &[b"edts", b"elst"])?;
    let (wide, width) = (list.first()? == &1, if list.first()? == &1 { 20 } else { 12 });
    let mut edit = Edit::default();
    for entry in list.get(8..)?.chunks_exact(width).take(number(list.get(4..8)?) as usize) {
        let (length, start) = match wide {
            true => (
                u64::from_be_bytes(entry[..8].try_into().ok()?) as f64,
                i64::from_be_bytes(entry[8..16].try_into().ok()?),
            ),
            false => (f64::from(number(entry)), i64::from(number(&entry[4..8]) as i32)),
        };
        let seconds = length / movie_scale;
        if start < 0 {
            edit.silence += seconds;
            continue;
        }
        // A list of several pieces is an edited film's; its first one is what an encoder writes.
        edit.skip = start as f64 / track_scale;
        edit.length = (length > 0.0).then_some(seconds);
        break;
    }
    Some(edit)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn boxed(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32 + 8).to_be_bytes()[..], name, body].concat()
    }

    fn words(all: &[i32]) -> Vec<u8> {
        all.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn priming_is_skipped_and_a_gap_is_silence() {
        let handler = boxed(b"hdlr", &[&words(&[0, 0])[..], b"soun"].concat());
        let media = boxed(b"mdia", &[boxed(b"mdhd", &words(&[0, 0, 0, 44100])), handler].concat());
        let list = boxed(b"edts", &boxed(b"elst", &words(&[0, 2, 500, -1, 1 << 16, 1000, 22050, 1 << 16])));
        let track = boxed(b"trak", &[media, list].concat());
        let movie = [boxed(b"mvhd", &words(&[0, 0, 0, 1000])), track].concat();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [boxed(b"ftyp", b"isom"), boxed(b"mdat", b""), boxed(b"moov", &movie)].concat())
            .unwrap();
        let edit = sound_edit(file.path()).unwrap();
        assert_eq!(edit, Edit { silence: 0.5, skip: 0.5, length: Some(1.0) });
        let mut planes = vec![vec![1.0, 2.0, 3.0, 4.0, 5.0]];
        let all = planes.clone();
        assert_eq!(edit.apply(&mut planes, 2, 0.0, None, 0), 3);
        assert_eq!(planes, [[0.0, 2.0, 3.0]]);
        // From a later start, where what is before it is gone already.
        for (start, heard) in [(0.5, &[2.0, 3.0][..]), (1.0, &[3.0]), (1.5, &[]), (9.0, &[])] {
            let gone = edit.before(start, 2, None).min(5);
            let mut planes = vec![all[0][gone..].to_vec()];
            assert_eq!((edit.apply(&mut planes, 2, start, None, gone), &planes[0][..]), (3, heard), "{start}");
        }
        std::fs::write(file.path(), b"RIFF").unwrap();
        assert_eq!(sound_edit(file.path()).unwrap(), Edit::default());
        // Bytes that say more than they are.
        for cut in 0..movie.len() {
            std::fs::write(file.path(), boxed(b"moov", &movie[..cut])).unwrap();
            sound_edit(file.path()).unwrap();
        }
    }
}
