//! Selects the audio track of an MP4 and its timing. The timing comes from edit lists (ISO/IEC 14496-12, 8.6.6),
//! fragment times (8.8.12), and the encoder priming in iTunes' `iTunSMPB` tag.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use mp4_atom::{Atom, Elst, Header, Mdhd, Mvhd, ReadFrom, Tfdt, Tfhd, Tkhd};

/// Maximum start time of a file's first stream, in seconds, for which times count from 0. If the stream starts later,
/// the file is treated as an excerpt of a longer recording, and times count from the start of the stream.
const MAX_START_TIME: f64 = 60.0;

/// Returns the time in seconds that counts as the start of a file; `first` is the start time of its first stream.
pub(super) fn zero_of(first: f64) -> f64 {
    if first > MAX_START_TIME { first } else { 0.0 }
}

/// The timing of a track: how much silence to insert, and how many decoded samples to skip. Times are in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Edit {
    /// Silence before the first audible sample.
    silence: f64,
    /// Decoded audio to skip at the start.
    skip: f64,
}

impl Edit {
    /// Returns the timing of a track whose first decoded sample is at second `seconds`: a positive start becomes
    /// silence, and samples before second 0 are skipped.
    pub(super) fn starting_at(seconds: f64) -> Self {
        Edit { silence: seconds.max(0.0), skip: (-seconds).max(0.0) }
    }

    /// Shifts the timing so that second `zero` becomes second 0.
    pub(super) fn counted_from(self, zero: f64) -> Self {
        let silence = self.silence - zero;
        Edit { silence: silence.max(0.0), skip: self.skip + (-silence).max(0.0) }
    }

    /// Adjusts the timing for a track whose first sample is at second `start` of the media instead of second 0.
    fn for_media_start(self, start: f64) -> Self {
        let late = (start - self.skip).max(0.0);
        Edit { silence: self.silence + late, skip: (self.skip - start).max(0.0) }
    }

    /// Returns the seconds of decoded audio to skip at the start.
    pub(super) fn skipped(&self) -> f64 {
        self.skip
    }

    /// Returns the seconds of silence at the start, at most `end`.
    pub(super) fn gap(&self, end: Option<f64>) -> f64 {
        self.silence.min(end.unwrap_or(f64::INFINITY))
    }

    /// Returns the number of decoded samples per channel to drop so that the sound begins at second `start` of the
    /// audible sound. `end` limits the silence at the start.
    pub(super) fn before(&self, start: f64, rate: u32, end: Option<f64>) -> usize {
        if start == 0.0 {
            return 0;
        }
        samples(self.skip, rate).saturating_add(place(start, rate).saturating_sub(samples(self.gap(end), rate)))
    }

    /// Trims the planes (the samples of each channel) so that they begin at second `start` of the audible sound, with
    /// at most `end` seconds of leading silence. `dropped` is the number of samples per channel that were already
    /// removed at the start. Returns the length of the audible sound from second 0, in samples.
    pub(super) fn apply(
        &self,
        planes: &mut [Vec<f32>],
        rate: u32,
        start: f64,
        end: Option<f64>,
        dropped: usize,
    ) -> usize {
        let (skip, gap, start) = (samples(self.skip, rate), samples(self.gap(end), rate), place(start, rate));
        let decoded = dropped + planes.first().map_or(0, Vec::len);
        let first = skip.saturating_add(start.saturating_sub(gap)).max(dropped);
        for plane in planes {
            plane.drain(..(first - dropped).min(plane.len()));
            plane.splice(..0, std::iter::repeat_n(0.0, gap.saturating_sub(start)));
        }
        gap + decoded.saturating_sub(skip)
    }
}

fn samples(seconds: f64, rate: u32) -> usize {
    (seconds * f64::from(rate)).round() as usize
}

/// Returns the index of the sample at a time in seconds, rounded as in [`super::audio::Audio::span`].
fn place(seconds: f64, rate: u32) -> usize {
    (seconds * f64::from(rate)).round_ties_even() as usize
}

/// The audio track to decode from an MP4, with its timing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mp4Sound {
    pub(super) track: u32,
    pub(super) edit: Edit,
    /// Media time in seconds at which reading stops. Like ffmpeg, the reader decodes the packet that contains this time
    /// completely. `None`: all packets are read.
    end: Option<f64>,
    /// Whether `end` equals the end of the media up to rounding to the movie's ticks.
    is_rounded_end: bool,
    /// Ticks per second of the track.
    pub(super) timescale: f64,
    /// Whether the samples are in fragments.
    pub(super) is_fragmented: bool,
    /// Start of the file in seconds, on the timeline of `edit`.
    pub(super) zero: f64,
    /// Whether the encoder priming is stated in the `iTunSMPB` tag and nowhere else.
    pub(super) is_itunes: bool,
    /// Number of media segments in the edit list.
    segments: usize,
}

impl Mp4Sound {
    /// Returns a warning about segments of the edit list that the built-in reader ignores; `None` if it uses all
    /// segments.
    pub(super) fn ignored_edits_warning(&self) -> Option<String> {
        let more = self.segments.checked_sub(1).filter(|more| *more > 0)?;
        let last = self.end.unwrap_or(self.edit.skip);
        Some(format!(
            "the audio edit list has {} segments, of which only the first is used (seconds {:.3} to {last:.3} of the \
             track; {more} ignored): install ffmpeg, or export the file without edits",
            self.segments, self.edit.skip
        ))
    }

    /// Returns the media time in seconds at which reading stops. A time that was rounded to the movie's ticks applies
    /// only if packets are longer than these ticks (`has_long_packets`).
    pub(super) fn end(&self, has_long_packets: bool) -> Option<f64> {
        self.end.filter(|_| has_long_packets || !self.is_rounded_end)
    }
}

/// Returns the audio track to decode from an MP4: the first enabled one, or else the first. `None`: the file is not an
/// MP4 or has no audio track.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub(super) fn mp4_sound(path: &Path) -> io::Result<Option<Mp4Sound>> {
    let Some(movie) = movie(path)? else { return Ok(None) };
    let Some(sound) = of_movie(&movie) else { return Ok(None) };
    if within(&movie, &[b"mvex"]).is_none() {
        return Ok(Some(sound));
    }
    let times = fragment_times(path, &movie)?;
    let own = times.iter().find(|(track, _)| *track == sound.track).map_or(0.0, |(_, seconds)| *seconds);
    let first = times.iter().map(|(_, seconds)| *seconds).fold(own, f64::min);
    let edit = sound.edit.for_media_start(own);
    Ok(Some(Mp4Sound { edit, end: None, zero: zero_of(first), is_fragmented: true, ..sound }))
}

/// Returns the body of an MP4's `moov` box; `None` if the file is not an MP4.
///
/// # Errors
/// Returns an error if the file cannot be read.
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

/// Returns whether a box of an MP4 extends beyond the end of the file.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub(super) fn is_cut(path: &Path) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut at = 0;
    while let Some((_, _, end)) = header(&mut file, at, size)? {
        at = end;
    }
    Ok(at > size)
}

/// Returns the name, body offset and declared end of the box at offset `at`. `None`: no box follows.
fn header(file: &mut File, at: u64, size: u64) -> io::Result<Option<([u8; 4], u64, u64)>> {
    if at.checked_add(8).is_none_or(|body| body > size) {
        return Ok(None);
    }
    file.seek(SeekFrom::Start(at))?;
    let header = match Header::read_from(file) {
        Err(mp4_atom::Error::Io(error)) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(error),
        Err(_) => return Ok(None),
        Ok(header) => header,
    };
    let body = file.stream_position()?;
    let end = header.size.map_or(size, |length| body.saturating_add(length as u64));
    Ok(Some((header.kind.into(), body, end)))
}

/// Parses a big-endian u32.
pub(super) fn number(bytes: &[u8]) -> u32 {
    bytes.iter().take(4).fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

/// Iterates over the names and bodies of the boxes in a body.
pub(super) fn boxes(mut bytes: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    std::iter::from_fn(move || {
        let length = (number(bytes.get(..4)?) as usize).min(bytes.len());
        let whole = bytes.get(..length).filter(|whole| whole.len() >= 8)?;
        bytes = &bytes[length..];
        Some((&whole[4..8], &whole[8..]))
    })
}

/// Returns the body of a nested box; `path` lists the box names from the outside in.
pub(super) fn within<'a>(bytes: &'a [u8], path: &[&[u8; 4]]) -> Option<&'a [u8]> {
    path.iter().try_fold(bytes, |bytes, name| boxes(bytes).find(|(own, _)| own == name).map(|(_, body)| body))
}

/// Decodes the box of type `T`; `path` lists the names of the boxes around it, from the outside in. `None`: the box is
/// missing or damaged.
///
/// `T` must be a box without nested boxes: mp4-atom decodes these recursively, so a crafted file could overflow the
/// stack, and one damaged or unknown box makes the outermost box unreadable.
pub(super) fn decode_box<T: Atom>(bytes: &[u8], path: &[&[u8; 4]]) -> Option<T> {
    let mut body = within(within(bytes, path)?, &[T::KIND.as_ref()])?;
    T::decode_body(&mut body).ok()
}

/// Returns the track to play among those with the handler type `handler` (`vide` or `soun`): the first enabled one
/// (`track_enabled`, ISO/IEC 14496-12, 8.3.2), otherwise the first. Tracks with commentary or another language are
/// usually disabled.
pub(super) fn played_track<'a>(movie: &'a [u8], handler: &[u8; 4]) -> Option<&'a [u8]> {
    let is_own = |track: &[u8]| within(track, &[b"mdia", b"hdlr"]).and_then(|h| h.get(8..12)) == Some(handler);
    let is_enabled = |track: &[u8]| decode_box::<Tkhd>(track, &[]).is_some_and(|header| header.enabled);
    let tracks = || boxes(movie).filter(|(name, body)| *name == b"trak" && is_own(body)).map(|(_, body)| body);
    tracks().find(|track| is_enabled(track)).or_else(|| tracks().next())
}

/// Converts a time scale (ticks per second) to a divisor; `None` if the scale is 0, which only damaged files have.
pub(super) fn scale(timescale: u32) -> Option<f64> {
    (timescale > 0).then_some(f64::from(timescale))
}

fn of_movie(movie: &[u8]) -> Option<Mp4Sound> {
    let movie_scale = scale(decode_box::<Mvhd>(movie, &[])?.timescale)?;
    let track = played_track(movie, b"soun")?;
    let media: Mdhd = decode_box(track, &[b"mdia"])?;
    let timescale = scale(media.timescale)?;
    let list = decode_box(track, &[b"edts"]);
    if list.is_none() && within(track, &[b"edts", b"elst"]).is_some() {
        tracing::warn!("the audio track's edit list is damaged and ignored, so the sound may be shifted");
    }
    let listed = list.and_then(|list| edits_from_list(&list, movie_scale, timescale));
    let tagged = if listed.is_none() { edit_from_itunes_tag(movie, timescale) } else { None };
    let is_itunes = tagged.is_some();
    let Edits { edit, end, segments } =
        listed.unwrap_or(Edits { edit: tagged.unwrap_or_default(), end: None, segments: 0 });
    let length = media.duration as f64 / timescale;
    let is_rounded_end = end.is_some_and(|end| (end - length).abs() <= 1.0 / movie_scale);
    let track = decode_box::<Tkhd>(track, &[])?.track_id;
    Some(Mp4Sound { track, edit, end, is_rounded_end, timescale, is_fragmented: false, zero: 0.0, is_itunes, segments })
}

/// The edits of a track.
struct Edits {
    edit: Edit,
    /// Media time in seconds at which the first media segment ends. `None`: not limited.
    end: Option<f64>,
    /// Number of media segments.
    segments: usize,
}

/// Returns the edits of an edit list up to its first media segment, and counts all media segments. The scales are the
/// ticks per second of the movie and of the track. `None`: the list is empty.
fn edits_from_list(list: &Elst, movie_scale: f64, track_scale: f64) -> Option<Edits> {
    let mut edits = None;
    for entry in &list.entries {
        let length = entry.segment_duration as f64;
        let own: &mut Edits = edits.get_or_insert(Edits { edit: Edit::default(), end: None, segments: 0 });
        match (entry.media_time, own.segments) {
            (None, 0) => own.edit.silence += length / movie_scale,
            (None, _) => {}
            (Some(start), 0) => {
                own.edit.skip = start as f64 / track_scale;
                // The end is rounded to ticks of the track, as ffmpeg does it.
                let end = start as f64 + (length * track_scale / movie_scale).round();
                own.end = (length > 0.0).then_some(end / track_scale);
                own.segments = 1;
            }
            (Some(_), _) => own.segments += 1,
        }
    }
    edits
}

/// Maximum priming in samples that ffmpeg accepts from iTunes' tag.
const MAX_ITUNES_PRIMING: u64 = 16383;

/// Parses the encoder priming in iTunes' `iTunSMPB` tag. The tag contains hexadecimal numbers; the second is the
/// priming in samples. The fourth, the number of samples, is not used: like ffmpeg, the reader decodes all packets
/// completely.
fn edit_from_itunes_tag(movie: &[u8], rate: f64) -> Option<Edit> {
    let tags = within(within(movie, &[b"udta", b"meta"])?.get(4..)?, &[b"ilst"])?;
    let is_named = |tag: &[u8]| within(tag, &[b"name"]).and_then(|name| name.get(4..)) == Some(b"iTunSMPB");
    let (_, tag) = boxes(tags).find(|(name, tag)| *name == b"----" && is_named(tag))?;
    let text = std::str::from_utf8(within(tag, &[b"data"])?.get(8..)?).ok()?;
    let mut numbers = text.split_whitespace().map(|word| u64::from_str_radix(word.trim_matches('\0'), 16).ok());
    let priming = numbers.nth(1)??;
    (1..=MAX_ITUNES_PRIMING).contains(&priming).then_some(Edit { silence: 0.0, skip: priming as f64 / rate })
}

/// Returns track IDs and start times (seconds) of the tracks of a fragmented movie. Reads fragments until it has found
/// one of each track.
fn fragment_times(path: &Path, movie: &[u8]) -> io::Result<Vec<(u32, f64)>> {
    let scale_of = |track: &[u8]| {
        let media: Mdhd = decode_box(track, &[b"mdia"])?;
        Some((decode_box::<Tkhd>(track, &[])?.track_id, scale(media.timescale)?))
    };
    let scales: Vec<(u32, f64)> =
        boxes(movie).filter(|(name, _)| *name == b"trak").filter_map(|(_, body)| scale_of(body)).collect();
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let (mut at, mut times) = (0, Vec::new());
    while let Some((name, body, end)) = header(&mut file, at, size)? {
        if &name == b"moof" {
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(body))?;
            (&mut file).take(end - body).read_to_end(&mut bytes)?;
            let fragments = boxes(&bytes).filter(|(name, _)| *name == b"traf");
            for (track, ticks) in fragments.filter_map(|(_, body)| fragment_time(body)) {
                let scale = scales.iter().find(|(known, _)| *known == track);
                if let (Some((_, scale)), false) = (scale, times.iter().any(|(known, _)| *known == track)) {
                    times.push((track, ticks as f64 / scale));
                }
            }
            if times.len() >= scales.len() {
                break;
            }
        }
        at = end;
    }
    Ok(times)
}

/// Returns the track ID and the start time (ticks) of a fragment. `None`: the fragment states no time.
fn fragment_time(fragment: &[u8]) -> Option<(u32, u64)> {
    let time: Tfdt = decode_box(fragment, &[])?;
    Some((decode_box::<Tfhd>(fragment, &[])?.track_id, time.base_media_decode_time))
}

#[cfg(test)]
pub(super) mod test_boxes {
    use mp4_atom::Encode;

    pub(crate) fn encoded(atom: impl Encode) -> Vec<u8> {
        let mut bytes = Vec::new();
        atom.encode(&mut bytes).expect("a box");
        bytes
    }

    pub(crate) fn boxed(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32 + 8).to_be_bytes()[..], name, body].concat()
    }

    pub(crate) fn words(all: &[i32]) -> Vec<u8> {
        all.iter().flat_map(|word| word.to_be_bytes()).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::test_boxes::{boxed, encoded, words};
    use super::*;

    /// Returns a `moov` body with one audio track and its edit list.
    fn movie_of(list: &[i32]) -> Vec<u8> {
        let handler = boxed(b"hdlr", &[&words(&[0, 0])[..], b"soun"].concat());
        let media = boxed(b"mdia", &[encoded(Mdhd { timescale: 44100, ..Mdhd::default() }), handler].concat());
        let list = boxed(b"edts", &boxed(b"elst", &words(list)));
        let head = encoded(Tkhd { track_id: 7, enabled: true, ..Tkhd::default() });
        let track = boxed(b"trak", &[head, media, list].concat());
        [encoded(Mvhd { timescale: 1000, ..Mvhd::default() }), track].concat()
    }

    #[test]
    fn segments_after_the_first_are_ignored_with_a_warning() {
        let (gap, piece) = ([500, -1, 1 << 16], [1000, 22050, 1 << 16]);
        let other = [2000, 88200, 1 << 16];
        for (entries, segments) in [
            (&[gap, piece][..], 1),
            (&[gap, piece, gap], 1),
            (&[gap, piece, other], 2),
            (&[gap, piece, gap, other, piece], 3),
        ] {
            let list = [&[0, entries.len() as i32][..], &entries.concat()].concat();
            let sound = of_movie(&movie_of(&list)).unwrap();
            assert_eq!((sound.edit, sound.end(true)), (Edit { silence: 0.5, skip: 0.5 }, Some(1.5)));
            let named = format!(
                "the audio edit list has {segments} segments, of which only the first is used (seconds 0.500 to 1.500 of \
                 the track; {} ignored)",
                segments - 1
            );
            let said = sound.ignored_edits_warning();
            assert_eq!(said.as_ref().is_some_and(|said| said.starts_with(&named)), segments > 1, "{said:?}");
            assert_eq!(said.is_some(), segments > 1);
        }
    }

    #[test]
    fn priming_is_skipped_and_gap_becomes_silence() {
        let movie = movie_of(&[0, 2, 500, -1, 1 << 16, 1000, 22050, 1 << 16]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [boxed(b"ftyp", b"isom"), boxed(b"mdat", b""), boxed(b"moov", &movie)].concat())
            .unwrap();
        let edit = mp4_sound(file.path()).unwrap().unwrap().edit;
        assert_eq!(edit, Edit { silence: 0.5, skip: 0.5 });
        let mut planes = vec![vec![1.0, 2.0, 3.0]];
        let all = planes.clone();
        assert_eq!(edit.apply(&mut planes, 2, 0.0, None, 0), 3);
        assert_eq!(planes, [[0.0, 2.0, 3.0]]);
        // From a later start, after the earlier samples have been dropped.
        for (start, heard) in [(0.5, &[2.0, 3.0][..]), (1.0, &[3.0]), (1.5, &[]), (9.0, &[])] {
            let gone = edit.before(start, 2, None).min(3);
            let mut planes = vec![all[0][gone..].to_vec()];
            assert_eq!((edit.apply(&mut planes, 2, start, None, gone), &planes[0][..]), (3, heard), "{start}");
        }
        std::fs::write(file.path(), b"RIFF").unwrap();
        assert_eq!(mp4_sound(file.path()).unwrap(), None);
        // Truncated boxes must not cause a panic.
        for cut in 0..movie.len() {
            std::fs::write(file.path(), boxed(b"moov", &movie[..cut])).unwrap();
            mp4_sound(file.path()).unwrap();
        }
    }
}
