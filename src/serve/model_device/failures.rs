//! Converts pipeline errors into job failures.

use super::super::descriptors::is_caused_by_exhaustion;
use super::{Failure, PipelineError, RunError, one_line};
use crate::media;
use crate::runtime::RuntimeError;

/// Classifies an error as a failure of the job or of the device. The paths of saved results and the output of other
/// programs are logged but not sent to clients.
pub(super) fn classify(error: &PipelineError) -> RunError {
    let is_shortened = media_error(error).is_some_and(|error| replacement_message(error).is_some());
    if matches!(error, PipelineError::ResultsSaved { .. }) || is_shortened {
        tracing::error!("{}", one_line(error));
    }
    match by_kind(error.cause()) {
        RunError::Job(_) if is_caused_by_exhaustion(error) => RunError::Job(Failure::out_of_files()),
        other => other,
    }
}

fn by_kind(error: &PipelineError) -> RunError {
    let job = |code: &str, message: String| RunError::Job(Failure::new(code, message));
    match error {
        PipelineError::NotFinite(what) => job("not_finite", format!("{what} contain NaN or infinite values")),
        PipelineError::TooLarge(_) => RunError::Job(Failure::field("too_large", "size", client_message(error))),
        PipelineError::Enhancement(_) => {
            // The message may contain the operator's address and the answer of another server.
            tracing::error!("{}", one_line(error));
            let why = "the prompt could not be enhanced; try again later, or set enhance_prompt to false";
            job("enhancement_failed", why.into())
        }
        PipelineError::Given { key: "request.enhance_prompt", source }
            if matches!(**source, PipelineError::Runtime(RuntimeError::OutOfMemory { .. })) =>
        {
            RunError::Job(Failure::field(
                "too_large",
                "enhance_prompt",
                "the device ran out of memory while it enhanced the prompt; set enhance_prompt to false",
            ))
        }
        PipelineError::Given { key: "request.prompt", .. } => {
            RunError::Job(Failure::field("invalid_value", "prompt", of_given(error, "prompt")))
        }
        PipelineError::Given { key: "request.enhance_prompt", .. } => {
            let field = "enhance_prompt";
            RunError::Job(Failure::field("unsupported_parameter", field, of_given(error, field)))
        }
        PipelineError::Given { key: "request.text_embeddings", .. } => {
            tracing::error!("{}", one_line(error));
            job("internal", "the server's text embeddings for HDR video cannot be used".into())
        }
        PipelineError::Given { key, .. } => {
            let (code, field) = match *key {
                "request.video" => ("invalid_video", "input_video"),
                "request.reference_videos" => ("invalid_video", "reference_videos"),
                "request.num_frames" => ("too_large", "num_frames"),
                "request.mask" => ("invalid_value", "mask"),
                "request.audio" | "request.audio_latents" => ("invalid_audio", "input_audio"),
                _ => ("invalid_image", "input_reference"),
            };
            RunError::Job(Failure::field(code, field, of_given(error, field)))
        }
        PipelineError::Runtime(RuntimeError::OutOfMemory { .. }) => RunError::Job(Failure::field(
            "too_large",
            "size",
            "the device ran out of memory for this request; use a smaller size or fewer frames",
        )),
        PipelineError::Runtime(
            RuntimeError::Plugin(_)
            | RuntimeError::Processes(_)
            | RuntimeError::Option { .. }
            | RuntimeError::Needed { .. }
            | RuntimeError::Flag { .. },
        )
        | PipelineError::Platform(_)
        | PipelineError::Processes(_)
        | PipelineError::Launch(_) => RunError::Device(one_line(error)),
        _ => job("internal", client_message(error)),
    }
}

/// Returns the error message for clients, on one line. Paths are reduced to file names, and the names of stored input
/// files are replaced.
pub(super) fn client_message(error: &PipelineError) -> String {
    without_stored(&without_places(error), "the file")
}

fn without_places(error: &PipelineError) -> String {
    media_error(error).and_then(replacement_message).map_or_else(|| without_folders(&one_line(error)), Into::into)
}

/// Returns the error message about an input file. The message contains the request field, because the client does not
/// know the name of the stored file.
fn of_given(error: &PipelineError, field: &str) -> String {
    use media::MediaError::{Clip, Image, Png, Sound, Wav};
    let why = match media_error(error) {
        Some(
            Clip { reason, .. }
            | Sound { reason, .. }
            | Wav { reason, .. }
            | Image { message: reason, .. }
            | Png { message: reason, .. },
        ) => without_folders(&reason.split_whitespace().collect::<Vec<_>>().join(" ")),
        _ => without_places(error),
    };
    let why = without_stored(&why, "it");
    let why = why.strip_prefix("it: ").unwrap_or(&why);
    format!("{field}: {why}")
}

/// Returns the media error that an error contains; `None` if it contains none.
fn media_error(error: &PipelineError) -> Option<&media::MediaError> {
    match error {
        PipelineError::Media(error) => Some(error),
        PipelineError::Given { source, .. } | PipelineError::ResultsSaved { source, .. } => media_error(source),
        _ => None,
    }
}

/// Returns a fixed message for an error of another program, because the program's output may contain anything; `None`
/// for other errors.
fn replacement_message(error: &media::MediaError) -> Option<&'static str> {
    match error {
        media::MediaError::Ffmpeg { .. } => Some("ffmpeg failed to decode or encode the file"),
        media::MediaError::FfmpegMissing { .. }
        | media::MediaError::NoDecoder { .. }
        | media::MediaError::ImageH264 { .. } => Some("the server has no decoder or encoder for this file"),
        _ => None,
    }
}

/// Replaces the names of stored input files (a SHA-256 with an extension) by `words`.
fn without_stored(text: &str, words: &str) -> String {
    const HASH: usize = 64;
    let (mut client_message, mut rest) = (String::new(), text);
    let is_hash = |at: usize, text: &str| {
        let hash = text.as_bytes().get(at..at + HASH);
        hash.is_some_and(|hash| hash.iter().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(b)))
    };
    while let Some(at) = (0..rest.len()).find(|at| is_hash(*at, rest)) {
        client_message.push_str(&rest[..at]);
        client_message.push_str(words);
        rest = &rest[at + HASH..];
        let extension =
            rest.strip_prefix('.').map_or(0, |rest| 1 + rest.bytes().take_while(u8::is_ascii_alphanumeric).count());
        // A period at the end of a sentence does not start an extension.
        rest = &rest[if extension > 1 { extension } else { 0 }..];
    }
    client_message + rest
}

/// Reduces absolute paths to their last component. A path may contain spaces, so it extends to the next delimiter or
/// the end of the text. Words after the path may be lost, but no folder name remains.
fn without_folders(text: &str) -> String {
    let (mut client_message, mut rest) = (String::new(), text);
    let begins = |at: usize| !char_before(text, at).is_some_and(char::is_alphanumeric);
    while let Some(at) = rest.match_indices('/').map(|(at, _)| at).find(|at| begins(text.len() - rest.len() + at)) {
        let (before, path) = rest.split_at(at);
        // A delimiter ends a path only at the end of a word, because names such as `a:b` and `anna's` contain
        // delimiters.
        let ends = |(at, mark): &(usize, char)| {
            let next = path[at + mark.len_utf8()..].chars().next();
            let opens = "'\"`".contains(*mark) && path[..*at].ends_with(char::is_whitespace);
            opens || ("'\"`:,;)]".contains(*mark) && next.is_none_or(|c| !c.is_alphanumeric() && c != '/'))
        };
        let end = path.char_indices().find(ends).map_or(path.len(), |(at, _)| at);
        let (path, behind) = path.split_at(end);
        client_message.push_str(&relative(before));
        client_message.push_str(path.trim_end_matches('/').rsplit('/').next().unwrap_or_default());
        rest = behind;
    }
    client_message + &relative(rest)
}

/// Returns the character before a byte offset.
fn char_before(text: &str, at: usize) -> Option<char> {
    text[..at].chars().next_back()
}

/// Reduces relative paths to their last component. Fractions such as `3/4` are kept.
fn relative(text: &str) -> String {
    let word = |word: &str| match word.rsplit_once('/') {
        Some((_, name)) if word.chars().any(char::is_alphabetic) => name.to_string(),
        _ => word.to_string(),
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_messages_contain_no_paths() {
        for (text, wanted) in [
            (
                "/var/lib/ltx2/inputs/ab.png: image '/a b/c.png' is cut off (see /etc/x), 3/4 of it",
                "ab.png: image 'c.png' is cut off (see x), 3/4 of it",
            ),
            ("/srv/my videos of anna/in puts/ab.png: no image", "ab.png: no image"),
            ("cannot read path=/srv/secret/ab.png, and dir=/srv/other", "cannot read path=ab.png, and dir=other"),
            ("[/srv/a b/c.mp4] of \"/srv/d e/f.mp4\" and state/inputs/g.mp4", "[c.mp4] of \"f.mp4\" and g.mp4"),
            ("/srv/a, b/c.png: no image", "a, c.png: no image"),
            ("file:///srv/a:b/c.png", "file:c.png"),
            ("/srv/anna's files/c.png", "c.png"),
            ("/srv/models/", "models"),
            ("needs 90.1 GiB of 80 GiB, 9/10 of it", "needs 90.1 GiB of 80 GiB, 9/10 of it"),
        ] {
            for error in [PipelineError::Usage(text.into()), PipelineError::TooLarge(text.into())] {
                let RunError::Job(failure) = classify(&error) else { panic!("{text}") };
                assert_eq!(failure.message, wanted, "{text}");
            }
        }
        let error = PipelineError::Usage("a".into());
        assert!(matches!(classify(&error), RunError::Job(Failure { code, .. }) if code == "internal"));
    }

    /// The message refers to an input file by its field and contains neither output of ffmpeg nor the file's name in
    /// the store.
    #[test]
    fn failure_messages_hide_stored_names_and_ffmpeg_output() {
        let hash = "0123456789abcdef".repeat(4);
        let file = std::path::PathBuf::from(format!("/srv/state/inputs/{hash}.mp4"));
        let given = |error| PipelineError::Given { key: "request.video", source: Box::new(error) };
        let message = |error: PipelineError| match classify(&error) {
            RunError::Job(failure) => failure.message,
            other => panic!("{other:?}"),
        };
        let tail = format!("[mov,mp4 @ 0x55] moov atom not found | {}: Invalid data", file.display());
        let ffmpeg =
            || media::MediaError::Ffmpeg { path: file.clone(), status: "exit status: 1".into(), tail: tail.clone() };
        assert_eq!(message(given(ffmpeg().into())), "input_video: ffmpeg failed to decode or encode the file");
        assert_eq!(message(ffmpeg().into()), "ffmpeg failed to decode or encode the file");
        let cut = media::MediaError::Clip { path: file.clone(), reason: "it is cut off\nat frame 3".into() };
        assert_eq!(message(given(cut.into())), "input_video: it is cut off at frame 3");
        let usage = format!("{}: it is cut off. See {hash}.", file.display());
        assert_eq!(message(given(PipelineError::Usage(usage.clone()))), "input_video: it is cut off. See it.");
        assert_eq!(message(PipelineError::Usage(usage)), "the file: it is cut off. See the file.");
        assert_eq!(without_stored(&format!("é{hash}é"), "it"), "éité");
    }

    #[test]
    fn descriptor_exhaustion_becomes_out_of_files() {
        let error = || std::io::Error::from_raw_os_error(24);
        let file = std::path::Path::new("/srv/a.png");
        let given = PipelineError::Given {
            key: "request.images",
            source: Box::new(media::MediaError::io("read", file)(error()).into()),
        };
        for error in [given, PipelineError::Usage(format!("a.safetensors: {}", error()))] {
            assert!(
                matches!(classify(&error), RunError::Job(failure) if failure == Failure::out_of_files()),
                "{error}"
            );
        }
    }

    #[test]
    fn failure_messages_hide_locations_of_kept_results() {
        let kept = |source| PipelineError::ResultsSaved {
            source: Box::new(source),
            what: "the latents".into(),
            kept: "a".into(),
        };
        let error = kept(kept(PipelineError::NotFinite("the decoded samples".into())));
        let RunError::Job(failure) = classify(&error) else { panic!("{error}") };
        let client_message = (failure.code.as_str(), failure.message.as_str());
        assert_eq!(client_message, ("not_finite", "the decoded samples contain NaN or infinite values"));
    }

    #[test]
    fn job_errors_do_not_fail_the_device() {
        let code = |error: PipelineError| match classify(&error) {
            RunError::Job(failure) => failure.code,
            other => format!("{other:?}"),
        };
        assert_eq!(code(PipelineError::NotFinite("the decoded frames".into())), "not_finite");
        assert_eq!(code(PipelineError::TooLarge("needs 100 GiB".into())), "too_large");
        for (key, wanted, field) in [
            ("request.images", "invalid_image", "input_reference"),
            ("request.video", "invalid_video", "input_video"),
            ("request.audio", "invalid_audio", "input_audio"),
            ("request.num_frames", "too_large", "num_frames"),
            ("request.prompt", "invalid_value", "prompt"),
            ("request.enhance_prompt", "unsupported_parameter", "enhance_prompt"),
        ] {
            let given = PipelineError::Given { key, source: Box::new(PipelineError::Usage("cut off".into())) };
            let RunError::Job(failure) = classify(&given) else { panic!("{key}") };
            assert_eq!((failure.code.as_str(), failure.param.as_deref()), (wanted, Some(field)));
            // A client that waits for the job receives the same error with status 400.
            let error = failure.to_error();
            assert_eq!((error.status, error.code, error.param.as_deref()), (400, wanted, Some(field)));
        }
    }
}
