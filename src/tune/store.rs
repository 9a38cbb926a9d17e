//! The log of results: a JSON line a piece of work, appended whole, so that a run that is killed loses only what it was
//! doing. Only measurements are read back: figures of compiled programs are made anew from their modules.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{Result, TuneError};
use crate::runtime::CompileKey;

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobKind {
    /// Compiled ahead of time.
    Compile,
    /// Compiled into the compile cache, for the devices that it will be run on.
    Ahead,
    /// Run on devices.
    Measure,
}

/// A line: what came of a piece of work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Of everything that was done: of a compilation its command and program, of a measurement the program that ran and
    /// how. The last line of a key holds.
    pub key: String,
    /// What was done.
    #[serde(rename = "work")]
    pub kind: JobKind,
    /// The case in words.
    pub label: String,
    /// The command line behind `ltx2`.
    pub command: Vec<String>,
    /// Seconds it took.
    pub seconds: f64,
    /// What a program that was compiled or ran depends on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<CompileKey>,
    /// The figures; none where it failed.
    pub result: Option<Value>,
    /// The last message of what failed, or what does not fit.
    pub error: Option<String>,
}

/// The file of results, held by one process at a time.
pub struct Store {
    path: PathBuf,
    file: File,
    records: HashMap<String, Record>,
}

impl Store {
    /// Opens or makes `results.jsonl` in a folder. What was written in part is cut off.
    ///
    /// # Errors
    /// A folder that cannot be written, or that another process holds.
    pub fn open(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(TuneError::file(folder))?;
        let path = folder.join("results.jsonl");
        let fail = || TuneError::file(&path);
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(fail())?;
        match file.try_lock() {
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
        // A line of another version of this program is work to be done again.
        let known = lines.filter_map(|line| serde_json::from_slice::<Record>(line).ok());
        let records = known.map(|r| (r.key.clone(), r)).collect();
        Ok(Store { path, file, records })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is known of a key.
    pub fn get(&self, key: &str) -> Option<&Record> {
        self.records.get(key)
    }

    /// Adds a line.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn add(&mut self, record: Record) -> Result<()> {
        let mut line = serde_json::to_vec(&record).unwrap_or_default();
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

    fn record(key: &str) -> Record {
        Record {
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
    fn what_was_written_in_part_is_done_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(folder.path()).unwrap();
        assert!(matches!(Store::open(folder.path()), Err(TuneError::Busy(_))));
        store.add(record("one")).unwrap();
        store.add(record("two")).unwrap();
        let path = store.path().to_path_buf();
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
