//! The kernel's log, where it can be read: what a driver says about a device that fails.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

/// Variable that names another file: a copy that a host keeps, for processes that may not read the kernel's own.
const VARIABLE: &str = "LTX2_KERNEL_LOG";
const DEVICE: &str = "/dev/kmsg";
/// `O_NONBLOCK` of Linux: reading at the end of the kernel's log would wait for its next line.
const NONBLOCK: i32 = 0o4000;
/// Lines that are told, at most.
const LINES: usize = 4;
/// Records that are looked at, at most: a log that is flooded has no end.
const RECORDS: usize = 100_000;

/// The kernel's log from a moment on.
pub(super) struct KernelLog(Option<File>);

impl KernelLog {
    /// Lines that are written after this.
    pub(super) fn from_now() -> Self {
        let path = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).unwrap_or_else(|| DEVICE.into());
        let file = OpenOptions::new().read(true).custom_flags(NONBLOCK).open(path);
        // Often it is not allowed, which is no fault.
        KernelLog(file.ok().filter(|mut file| file.seek(SeekFrom::End(0)).is_ok()))
    }

    /// Lines about NVIDIA's Xid errors and uncorrectable memory errors, the first ones.
    pub(super) fn read(&mut self) -> Vec<String> {
        let Some(file) = &mut self.0 else { return Vec::new() };
        let (mut text, mut block) = (Vec::new(), [0; 8192]);
        for _ in 0..RECORDS {
            match file.read(&mut block) {
                Ok(0) => break,
                Ok(count) => text.extend_from_slice(&block[..count]),
                // Records that were overwritten before they were read.
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

/// A record's text, without the numbers that the kernel puts before it.
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
    fn faults_of_devices_are_found_among_other_lines() {
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
