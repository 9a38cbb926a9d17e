//! Limit of open files. It is raised at startup, and some file descriptors are reserved for jobs.
//!
//! The kernel gives each new descriptor the lowest free number. If a client's socket or file gets a number in the
//! reserved range, the server closes it immediately. So clients can only use the numbers below that range, and the
//! server need not count descriptors.

use std::error::Error;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::error::ApiError;

/// Number of descriptors reserved for jobs, ffmpeg and the store. At most half of the limit is reserved.
const RESERVE: u64 = 256;
/// Number of unreserved descriptors that connections leave for the server's own files, uploads and downloads.
const OWN: u64 = 64;
/// Minimum recommended limit. Below it the server logs a warning, because a model on several GPUs opens hundreds of
/// files.
const FEW: u64 = 4096;

/// The process's limit of open files, and the part of it that clients may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    limit: u64,
    /// First descriptor number of the reserved range.
    ceiling: u64,
}

impl Descriptors {
    /// Raises the soft limit of open files to the hard limit.
    pub fn raise() -> Self {
        let found = getrlimit(Resource::Nofile);
        if found.current != found.maximum
            && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: found.maximum, ..found })
        {
            tracing::warn!("cannot raise the limit of open files: {error}");
        }
        let files = Descriptors::with_limit(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX));
        if files.limit < FEW {
            let limit = files.limit;
            tracing::warn!("the limit of open files is {limit} (ulimit -Hn); {FEW} or more is recommended");
        }
        files
    }

    pub(super) fn with_limit(limit: u64) -> Self {
        Descriptors { limit, ceiling: limit - RESERVE.min(limit / 2) }
    }

    /// Returns whether a new descriptor of a client is in the reserved range.
    pub(super) fn is_short(&self, new: &impl AsFd) -> bool {
        number(new) >= self.ceiling
    }

    /// Returns the number of connections that the free descriptors allow, at least 1.
    pub(super) fn connection_limit(&self) -> usize {
        let open = open_files().unwrap_or(0);
        usize::try_from(self.ceiling.saturating_sub(open + OWN)).unwrap_or(usize::MAX).max(1)
    }

    /// Returns a description of the shortage if at least half of the reserve is in use or no file can be opened.
    pub(super) fn shortage(&self) -> Option<String> {
        let scarce = self.limit - (self.limit - self.ceiling) / 2;
        match open_files() {
            Ok(open) if open >= scarce => {
                Some(format!("{open} of the {} file descriptors that the process may open are in use", self.limit))
            }
            Err(error) if is_exhausted(&error) => Some(format!("the process cannot open files: {error}")),
            _ => None,
        }
    }
}

/// Returns the number of open descriptors, excluding the one that reads the directory.
fn open_files() -> io::Result<u64> {
    Ok((fs::read_dir("/proc/self/fd")?.count() as u64).saturating_sub(1))
}

fn number(new: &impl AsFd) -> u64 {
    u64::try_from(new.as_fd().as_raw_fd()).unwrap_or(0)
}

/// Returns whether an error means that the process or the system has run out of file descriptors.
pub(super) fn is_exhausted(error: &io::Error) -> bool {
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Returns whether an error or one of its sources means that the process or the system has run out of file descriptors.
/// Also searches the messages for the OS error number, because some errors keep only the text of their cause.
pub fn is_caused_by_exhaustion(error: &(dyn Error + 'static)) -> bool {
    std::iter::successors(Some(error), |&error| error.source()).any(|error| {
        let text = error.to_string();
        error.downcast_ref::<io::Error>().is_some_and(is_exhausted)
            || [Errno::MFILE, Errno::NFILE]
                .iter()
                .any(|errno| text.contains(&format!("(os error {})", errno.raw_os_error())))
    })
}

/// Returns the error for a request that needs a file descriptor when none is free.
pub(super) fn busy() -> ApiError {
    ApiError::new(503, "busy", "the server has too many files open; try again later").retry_after(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_cannot_use_reserved_descriptors() {
        for (limit, ceiling) in [(1024, 768), (1 << 20, (1 << 20) - 256), (100, 50), (1, 1)] {
            assert_eq!(Descriptors::with_limit(limit), Descriptors { limit, ceiling });
        }
        let file = fs::File::open("/dev/null").expect("a file");
        assert!(!Descriptors::with_limit(u64::MAX).is_short(&file) && Descriptors::with_limit(2).is_short(&file));
        assert!(Descriptors::with_limit(u64::MAX).shortage().is_none());
        assert!(Descriptors::with_limit(2).shortage().expect("none are left").contains("of the 2 file descriptors"));
        assert_eq!(
            (
                Descriptors::with_limit(2).connection_limit(),
                Descriptors::with_limit(u64::MAX).connection_limit() > 1000
            ),
            (1, true)
        );
    }

    #[test]
    fn descriptor_exhaustion_is_found_in_error_chain() {
        for errno in [Errno::MFILE, Errno::NFILE] {
            let error = io::Error::from(errno);
            assert!(is_exhausted(&error));
            let text = format!("ffmpeg cannot be started: {error}");
            assert!(is_caused_by_exhaustion(&io::Error::other(text)));
            assert!(is_caused_by_exhaustion(&io::Error::other(ltx2_media::MediaError::io("open", "a".as_ref())(
                error
            ))));
        }
        for errno in [Errno::NOENT, Errno::NOSPC] {
            assert!(!is_exhausted(&errno.into()) && !is_caused_by_exhaustion(&io::Error::from(errno)));
        }
    }
}
