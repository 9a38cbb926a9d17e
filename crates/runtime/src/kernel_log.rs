//! Reads the kernel log, if permitted, for driver messages about a failing device.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

/// Environment variable with the path of a file to read instead of [`DEVICE`], such as a copy of the log for processes
/// that may not read the kernel log itself.
const VARIABLE: &str = "LTX2_KERNEL_LOG";
const DEVICE: &str = "/dev/kmsg";
/// Linux `O_NONBLOCK`: without it, a read at the end of the kernel log blocks until the next message.
const NONBLOCK: i32 = 0o4000;
/// Maximum number of lines reported.
const LINES: usize = 4;
/// Maximum number of records read, in case messages arrive faster than they are read.
const RECORDS: usize = 100_000;

/// An open kernel log, positioned after the messages that existed when it was opened. `None`: not readable.
pub(super) struct KernelLog(Option<File>);

impl KernelLog {
    /// Opens the log at its end, so that only later messages are read.
    pub(super) fn from_now() -> Self {
        let path = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).unwrap_or_else(|| DEVICE.into());
        let file = OpenOptions::new().read(true).custom_flags(NONBLOCK).open(path);
        // Reading is often not permitted, which is not an error.
        KernelLog(file.ok().filter(|mut file| file.seek(SeekFrom::End(0)).is_ok()))
    }

    /// Returns the first [`LINES`] new lines about NVIDIA Xid errors and uncorrectable memory errors.
    pub(super) fn read(&mut self) -> Vec<String> {
        let Some(file) = &mut self.0 else { return Vec::new() };
        let (mut text, mut block) = (Vec::new(), [0; 8192]);
        for _ in 0..RECORDS {
            match file.read(&mut block) {
                Ok(0) => break,
                Ok(count) => text.extend_from_slice(&block[..count]),
                // BrokenPipe: records were overwritten before they were read.
                Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) => {}
                Err(_) => break,
            }
        }
        let text = String::from_utf8_lossy(&text);
        text.lines().filter(|line| is_fault(line)).take(LINES).map(words).collect()
    }
}

fn is_fault(line: &str) -> bool {
    let lower = line.to_lowercase();
    let uncorrected = lower.contains("uncorrect") && ["ecc", "memory", "dbe"].iter().any(|word| lower.contains(word));
    lower.contains("xid (") || lower.contains("nvrm: xid") || uncorrected
}

/// Removes the numeric prefix that the kernel writes before a record's text.
fn words(line: &str) -> String {
    match line.split_once(';') {
        Some((numbers, text)) if numbers.starts_with(|c: char| c.is_ascii_digit()) => text.trim().into(),
        _ => line.trim().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_faults_are_found_in_the_kernel_log() {
        let lines = [
            ("4,1234,5678901,-;NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.", true),
            ("[ 12.5] NVRM: GPU at PCI:0000:18:00: uncorrectable ECC error", true),
            ("6,1,2,-;EDAC MC0: 1 UE uncorrected memory error", true),
            ("6,1,2,-;usb 1-1: new device", false),
            ("6,1,2,-;EDAC MC0: 1 CE corrected memory error", false),
        ];
        for (line, fault) in lines {
            assert_eq!(is_fault(line), fault, "{line}");
        }
        assert_eq!(words(lines[0].0), "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.");
        assert_eq!(words(lines[1].0), lines[1].0);
    }
}
