//! Log of results: one JSON line per job, appended atomically, so that a killed run loses only the jobs in progress.
//! Only measurements are read back; compile reports are derived from the stored modules.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{Result, TuneError};
use crate::file_lock;
use crate::runtime::CompileKey;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum JobKind {
    Compile,
    /// Compilation into the compile cache, before a measurement on the same devices.
    Ahead,
    Measure,
}

/// A line of the log: the result of one job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogRecord {
    /// Hash that identifies the job: of the command and the program for a compilation, of the program and the options
    /// for a measurement. If several lines have the same key, the last one counts.
    pub key: String,
    #[serde(rename = "work")]
    pub(crate) kind: JobKind,
    pub(crate) label: String,
    pub(crate) command: Vec<String>,
    pub(crate) seconds: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<CompileKey>,
    /// JSON report; `None` if the job failed.
    pub result: Option<Value>,
    /// Message of a failure, or the statement that the program does not fit into device memory.
    pub error: Option<String>,
}

/// Name of the results file.
pub(crate) const LOG: &str = "results.jsonl";

/// The results file, which only one process can lock at a time.
pub struct Store {
    path: PathBuf,
    file: File,
    records: HashMap<String, LogRecord>,
}

impl Store {
    /// Opens or creates `results.jsonl` in a folder. Removes an incomplete last line.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be written to or another process holds the lock.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(TuneError::file(folder))?;
        let path = folder.join(LOG);
        let fail = || TuneError::file(&path);
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(fail())?;
        match file_lock::lock(&file) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(TuneError::Busy(folder.into())),
            Err(TryLockError::Error(e)) => return Err(fail()(e)),
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(fail())?;
        let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        if whole < bytes.len() {
            file.set_len(whole as u64).map_err(fail())?;
            file.seek(SeekFrom::End(0)).map_err(fail())?;
        }
        let lines = bytes[..whole].split(|b| *b == b'\n');
        // Ignores lines that other versions of this program wrote and this one cannot parse.
        let known = lines.filter_map(|line| serde_json::from_slice::<LogRecord>(line).ok());
        let records = known.map(|r| (r.key.clone(), r)).collect();
        Ok(Store { path, file, records })
    }

    pub(crate) fn get(&self, key: &str) -> Option<&LogRecord> {
        self.records.get(key)
    }

    pub(crate) fn add(&mut self, record: LogRecord) -> Result<()> {
        let mut line = serde_json::to_vec(&record).expect("structs of strings and numbers serialize to JSON");
        line.push(b'\n');
        let written = self.file.write_all(&line).and_then(|()| self.file.sync_data());
        written.map_err(TuneError::file(&self.path))?;
        self.records.insert(record.key.clone(), record);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str) -> LogRecord {
        LogRecord {
            key: key.into(),
            kind: JobKind::Compile,
            label: "a".into(),
            command: vec![],
            seconds: 1.0,
            identity: None,
            result: None,
            error: Some("it\nended".into()),
        }
    }

    #[test]
    fn partial_last_line_is_discarded() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(folder.path()).unwrap();
        assert!(matches!(Store::open(folder.path()), Err(TuneError::Busy(_))));
        store.add(record("one")).unwrap();
        store.add(record("two")).unwrap();
        let path = store.path.clone();
        drop(store);
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 9]).unwrap();
        let mut store = Store::open(folder.path()).unwrap();
        assert_eq!(store.get("one"), Some(&record("one")));
        assert_eq!(store.get("two"), None);
        store.add(record("two")).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), text);
    }
}
