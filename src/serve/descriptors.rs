//! Open files of the process: the limit is raised at the start, and a reserve is kept for jobs.
//!
//! The kernel gives each new descriptor the lowest free number. A client's socket or file whose number is in the reserve is closed at
//! once, so clients never hold more than the numbers below it, and nothing is counted on the way of a request.

use std::error::Error;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::error::ApiError;

/// Descriptors that clients leave to jobs, ffmpeg and the store; half of the limit where that is less.
const RESERVE: u64 = 256;
/// Descriptors below the reserve that connections leave to the server's own files, and to those that clients send and fetch.
const OWN: u64 = 64;
/// A limit below which the operator is warned: a model on several GPUs opens hundreds of files.
const FEW: u64 = 4096;

/// The limit of open files, and the part of it that clients may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    limit: u64,
    /// First number that belongs to the reserve.
    ceiling: u64,
}

impl Descriptors {
    /// Raises the soft limit of open files to the hard limit.
    pub fn raise() -> Self {
        let found = getrlimit(Resource::Nofile);
        if found.current != found.maximum
            && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: found.maximum, ..found })
        {
            tracing::warn!("the limit of open files cannot be raised: {error}");
        }
        let files = Descriptors::of(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX));
        if files.limit < FEW {
            let limit = files.limit;
            tracing::warn!("at most {limit} open files (ulimit -Hn): {FEW} or more are recommended");
        }
        files
    }

    /// Those of a limit.
    pub(super) fn of(limit: u64) -> Self {
        Descriptors { limit, ceiling: limit - RESERVE.min(limit / 2) }
    }

    /// Whether a client's new descriptor is one of the reserve.
    pub(super) fn is_short(&self, new: &impl AsFd) -> bool {
        number(new) >= self.ceiling
    }

    /// Connections for which there are descriptors beside what is open now.
    pub(super) fn for_connections(&self) -> usize {
        let open = open_files().unwrap_or(0);
        usize::try_from(self.ceiling.saturating_sub(open + OWN)).unwrap_or(usize::MAX).max(1)
    }

    /// Why jobs may soon find no descriptor; `None`: there are enough.
    pub(super) fn shortage(&self) -> Option<String> {
        let scarce = self.limit - (self.limit - self.ceiling) / 2;
        match open_files() {
            Ok(open) if open >= scarce => {
                Some(format!("{open} of the {} open files of the process are in use", self.limit))
            }
            Err(error) if is_exhausted(&error) => Some(format!("no file can be opened: {error}")),
            _ => None,
        }
    }
}

/// Descriptors of this process, without the one that they are counted by.
fn open_files() -> io::Result<u64> {
    Ok((fs::read_dir("/proc/self/fd")?.count() as u64).saturating_sub(1))
}

fn number(new: &impl AsFd) -> u64 {
    u64::try_from(new.as_fd().as_raw_fd()).unwrap_or(0)
}

/// Whether an error says that the process, or the system, has no descriptor left.
pub(super) fn is_exhausted(error: &io::Error) -> bool {
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// The same of an error and its causes. Some keep of a cause only its text, in which the standard library writes the number.
pub(super) fn is_caused_by_exhaustion(error: &(dyn Error + 'static)) -> bool {
    std::iter::successors(Some(error), |&error| error.source()).any(|error| {
        let text = error.to_string();
        error.downcast_ref::<io::Error>().is_some_and(is_exhausted)
            || [Errno::MFILE, Errno::NFILE]
                .iter()
                .any(|errno| text.contains(&format!("(os error {})", errno.raw_os_error())))
    })
}

/// The answer to a request for which there is no descriptor.
pub(super) fn busy() -> ApiError {
    ApiError::new(503, "busy", "the server has too many files open: try again later").retry_after(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_leave_a_reserve() {
        for (limit, ceiling) in [(1024, 768), (1 << 20, (1 << 20) - 256), (100, 50), (1, 1)] {
            assert_eq!(Descriptors::of(limit), Descriptors { limit, ceiling });
        }
        let file = fs::File::open("/dev/null").expect("a file");
        assert!(!Descriptors::of(u64::MAX).is_short(&file) && Descriptors::of(2).is_short(&file));
        assert!(Descriptors::of(u64::MAX).shortage().is_none());
        assert!(Descriptors::of(2).shortage().expect("none are left").contains("of the 2 open files"));
        assert_eq!(
            (Descriptors::of(2).for_connections(), Descriptors::of(u64::MAX).for_connections() > 1000),
            (1, true)
        );
    }

    #[test]
    fn exhaustion_is_found_behind_other_errors() {
        for errno in [Errno::MFILE, Errno::NFILE] {
            let error = io::Error::from(errno);
            assert!(is_exhausted(&error));
            let text = format!("ffmpeg cannot be started: {error}");
            assert!(is_caused_by_exhaustion(&io::Error::other(text)));
            assert!(is_caused_by_exhaustion(&io::Error::other(crate::media::Error::io("open", "a".as_ref())(error))));
        }
        for errno in [Errno::NOENT, Errno::NOSPC] {
            assert!(!is_exhausted(&errno.into()) && !is_caused_by_exhaustion(&io::Error::from(errno)));
        }
    }
}
