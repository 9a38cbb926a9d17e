//! Errors of the pipeline, as jobs fail by them.

use std::path::Path;

use super::{Failure, PipelineError, RunError, one_line};
use crate::runtime::RuntimeError;

/// Meaning of an error for the job, and for those behind it.
pub(super) fn of(error: &PipelineError) -> RunError {
    let job = |code: &str, message: String| RunError::Job(Failure::new(code, message));
    match error {
        PipelineError::NotFinite(what) => job("not_finite", format!("{what} hold values that are not finite")),
        PipelineError::TooLarge(why) => job("too_large", why.clone()),
        PipelineError::Given(_) => job("invalid_image", told(error)),
        PipelineError::Runtime(RuntimeError::Plugin(plugin)) => match plugin.code() {
            Some(code) if code.to_string().contains("RESOURCE_EXHAUSTED") => {
                job("too_large", "the device has too little memory for it".into())
            }
            _ => RunError::Device(one_line(error)),
        },
        PipelineError::Runtime(RuntimeError::Processes(_) | RuntimeError::Option { .. })
        | PipelineError::Platform(_)
        | PipelineError::Processes(_)
        | PipelineError::Launch(_) => RunError::Device(one_line(error)),
        _ => job("internal", told(error)),
    }
}

/// An error on one line without places on this machine: of a path, its last part.
pub(super) fn told(error: &PipelineError) -> String {
    let word = |word: &str| {
        let start = word.find('/').filter(|at| word[..*at].chars().all(|c| !c.is_alphanumeric()));
        let Some(start) = start else { return word.to_string() };
        let (before, path) = word.split_at(start);
        let end = path.trim_end_matches([':', ',', ';', ')', '\'', '"', '.']).len();
        let name = Path::new(&path[..end]).file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        format!("{before}{name}{}", &path[end..])
    };
    one_line(error).split(' ').map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_told_no_paths() {
        let text = "/var/lib/ltx2/inputs/ab.png: image '/a b/c.png' is cut off (see /etc/x), 3/4 of it";
        let error = PipelineError::Usage(text.into());
        assert_eq!(told(&error), "ab.png: image 'a b/c.png' is cut off (see x), 3/4 of it");
        assert!(matches!(of(&error), RunError::Job(Failure { code, .. }) if code == "internal"));
    }

    #[test]
    fn faults_of_a_job_are_not_the_devices() {
        let code = |error: PipelineError| match of(&error) {
            RunError::Job(failure) => failure.code,
            other => format!("{other:?}"),
        };
        assert_eq!(code(PipelineError::NotFinite("the decoded frames".into())), "not_finite");
        assert_eq!(code(PipelineError::TooLarge("needs 100 GiB".into())), "too_large");
        let given = PipelineError::Given(Box::new(PipelineError::Usage("no image".into())));
        assert_eq!(code(given), "invalid_image");
    }
}
