//! Job store that keeps each job in a folder of plain files.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ltx2_base::{failpoint, file_lock, threads};
use rustix::fs::FallocateFlags;

use super::folder::{Folder, TEMPORARY};
use super::reading::{self, NEW, ORDER, RECORD, REQUEST};
use super::{JobStore, KEPT, STEPS, StoredJob, Usage, Variant};
use crate::id::VideoId;
use crate::job::{AcceptedJob, JobState, Record};

/// Contents of the file `format`. The number is incremented when a YAML key that stored requests contain is renamed.
const FORMAT: &str = "2\n";
/// Size in bytes of the reserve file, which is deleted to free space when the disk is full.
const RESERVE: u64 = 16 << 20;
/// Minimum age of an unused input file before it is removed. Input files are stored before the job that uses them.
const MIN_INPUT_AGE: Duration = Duration::from_secs(3600);

/// Job store in a folder that is locked for this process.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    root: Folder,
    jobs: Folder,
    trash: Folder,
    damaged: Folder,
    inputs: Folder,
    bytes: Mutex<HashMap<VideoId, u64>>,
    total: AtomicU64,
    input_bytes: AtomicU64,
    /// Channel to the thread that empties the trash.
    emptier: mpsc::Sender<()>,
    _lock: File,
}

impl FileStore {
    /// Opens the store in a folder. Creates the folder if it does not exist.
    ///
    /// # Errors
    /// Returns an error if another server is using the folder, another release wrote it, or it is not writable.
    pub fn open(path: &Path) -> io::Result<Self> {
        let root = Folder::at(path)?;
        let lock = root.create("lock")?;
        match file_lock::lock(&lock) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another server is using this folder"));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        check_format(&root)?;
        let trash = root.child_or_new("trash")?;
        for name in root.child_or_new("tmp")?.names()? {
            drop(std::fs::remove_file(path.join("tmp").join(name)));
        }
        let store = FileStore {
            emptier: emptier(path.join("trash")),
            jobs: root.child_or_new("jobs")?,
            damaged: root.child_or_new("damaged")?,
            inputs: root.child_or_new("inputs")?,
            path: path.into(),
            root,
            trash,
            bytes: Mutex::default(),
            total: AtomicU64::new(0),
            input_bytes: AtomicU64::new(0),
            _lock: lock,
        };
        store.empty_trash();
        store.give_reserve(false);
        store.root.sync()?;
        Ok(store)
    }

    /// Returns the folder of input files.
    pub fn inputs(&self) -> PathBuf {
        self.path.join("inputs")
    }

    /// Returns the folder of temporary files, which is emptied at each start.
    pub fn temporaries(&self) -> PathBuf {
        self.path.join("tmp")
    }

    fn sizes(&self) -> MutexGuard<'_, HashMap<VideoId, u64>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the recorded size of a job. `None`: the job was removed.
    fn count(&self, id: &VideoId, bytes: Option<u64>) {
        let mut sizes = self.sizes();
        let before = match bytes {
            Some(bytes) => sizes.insert(id.clone(), bytes),
            None => sizes.remove(id),
        };
        self.total.fetch_add(bytes.unwrap_or(0), Ordering::Relaxed);
        self.total.fetch_sub(before.unwrap_or(0), Ordering::Relaxed);
    }

    fn empty_trash(&self) {
        // The receiving thread lives as long as this store, so sending cannot fail.
        let _ = self.emptier.send(());
    }

    fn make(&self, new: &str, accepted: &AcceptedJob) -> io::Result<u64> {
        let text = serde_json::to_vec(accepted)?;
        let folder = self.jobs.new_child(new)?;
        folder.write(REQUEST, &text)?;
        folder.sync()?;
        failpoint::reach("create", "request.json");
        let id = accepted.id.as_str();
        self.jobs.move_to(Path::new(new), &self.jobs, Path::new(id))?;
        failpoint::reach("create", "folder");
        self.jobs.sync()?;
        failpoint::reach("create", "done");
        Ok(folder.bytes())
    }

    /// Moves a job that cannot be read to `damaged`.
    fn quarantine(&self, name: &OsStr, reason: &str) -> io::Result<()> {
        tracing::error!("cannot read job {}; moved it to `damaged`: {reason}", name.display());
        let mut target = PathBuf::from(name);
        for n in 1.. {
            match self.jobs.move_to(Path::new(name), &self.damaged, &target) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    target = PathBuf::from(format!("{}.{n}", name.to_string_lossy()));
                }
                other => return other,
            }
        }
        Ok(())
    }

    /// Moves the folder of a job to the trash.
    fn discard(&self, name: &str) -> io::Result<()> {
        let mut target = PathBuf::from(name);
        // The trash may still contain a folder of the same name that has not been deleted yet.
        for n in 1.. {
            match self.jobs.move_to(Path::new(name), &self.trash, &target) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => target = format!("{name}.{n}").into(),
                other => return other,
            }
        }
        Ok(())
    }
}

impl JobStore for FileStore {
    fn create(&self, accepted: &AcceptedJob) -> io::Result<()> {
        let new = format!("{NEW}{}", accepted.id);
        match self.make(&new, accepted) {
            Ok(bytes) => {
                self.count(&accepted.id, Some(bytes));
                Ok(())
            }
            Err(error) => {
                // What cannot be removed now is removed at the next start.
                drop(self.discard(&new));
                drop(self.discard(accepted.id.as_str()));
                self.empty_trash();
                Err(error)
            }
        }
    }

    fn transition(&self, id: &VideoId, record: &Record) -> io::Result<()> {
        let folder = self.jobs.child(id.as_str())?;
        if record.state == JobState::Completed {
            for variant in Variant::each().filter(|variant| folder.has_file(variant.file())) {
                folder.make_private(variant.file())?;
            }
        }
        let name = record.state.name();
        folder.put(RECORD, &serde_json::to_vec(record)?, || failpoint::reach("record", name))?;
        folder.sync()?;
        failpoint::reach("recorded", name);
        if record.state == JobState::Failed {
            Variant::each().for_each(|variant| drop(folder.unlink(variant.file())));
            reading::drop_temporaries(&folder);
        }
        self.count(id, Some(folder.bytes()));
        Ok(())
    }

    fn begin(&self, members: &[VideoId]) -> io::Result<()> {
        for id in members {
            let folder = self.jobs.child(id.as_str())?;
            if members.len() == 1 {
                folder.unlink(ORDER)?;
            } else {
                folder.put(ORDER, &serde_json::to_vec(members)?, || failpoint::reach("begin", ORDER))?;
            }
        }
        Ok(())
    }

    fn remove(&self, id: &VideoId) -> io::Result<()> {
        failpoint::reach("remove", "before");
        self.discard(id.as_str())?;
        self.count(id, None);
        failpoint::reach("remove", "moved");
        self.jobs.sync()?;
        self.empty_trash();
        Ok(())
    }

    fn load_all(&self) -> io::Result<Vec<StoredJob>> {
        let names = self.jobs.names()?;
        let path = self.path.join("jobs");
        let read = threads::in_order(&names, threads::cores(), |name| {
            let text = name.to_string_lossy();
            (!text.starts_with(NEW)).then(|| reading::read_job(&self.jobs, &path, &text))
        });
        let mut all = Vec::new();
        for (name, read) in names.iter().zip(read) {
            match read {
                None => self.discard(&name.to_string_lossy())?,
                Some(Ok((stored, bytes))) => {
                    self.count(&stored.accepted.id, Some(bytes));
                    all.push(stored);
                }
                Some(Err(reason)) => self.quarantine(name, &reason)?,
            }
        }
        self.empty_trash();
        self.input_bytes.store(self.inputs.bytes(), Ordering::Relaxed);
        all.sort_by(|a, b| a.accepted.id.cmp(&b.accepted.id));
        Ok(all)
    }

    fn usage(&self) -> Usage {
        let bytes = self.total.load(Ordering::Relaxed) + self.input_bytes.load(Ordering::Relaxed);
        Usage { bytes, free: self.root.free().unwrap_or(0) }
    }

    fn give_reserve(&self, free: bool) {
        let given = if free {
            self.root.unlink("reserve").and_then(|()| self.root.sync())
        } else if self.root.stat("reserve").is_some_and(|stat| stat.st_size as u64 == RESERVE) {
            Ok(())
        } else {
            allocate_reserve(&self.root).inspect_err(|_| drop(self.root.unlink("reserve")))
        };
        if let Err(error) = given {
            tracing::warn!("cannot allocate the disk reserve: {error}");
        }
    }

    fn forget_run(&self, id: &VideoId, keep_video: bool) {
        // The job has been removed and has no folder.
        let Ok(folder) = self.jobs.child(id.as_str()) else { return };
        let videos = Variant::each().filter(|_| !keep_video).map(Variant::file);
        let kept = KEPT.into_iter().filter(|_| keep_video);
        for name in [STEPS, ORDER].into_iter().chain(videos).chain(kept) {
            if let Err(error) = folder.unlink(name) {
                tracing::warn!(%id, "cannot remove {name}: {error}");
            }
        }
        self.count(id, Some(folder.bytes()));
    }

    fn sweep(&self, used: &BTreeSet<String>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        for name in self.inputs.names().into_iter().flatten() {
            let Some(name) = name.to_str().filter(|name| !used.contains(*name)) else { continue };
            let changed = self.inputs.stat(name).map_or(now, |stat| u64::try_from(stat.st_mtime).unwrap_or(0));
            if now.saturating_sub(changed) > MIN_INPUT_AGE.as_secs() {
                drop(self.inputs.unlink(name));
            }
        }
        self.input_bytes.store(self.inputs.bytes(), Ordering::Relaxed);
        self.empty_trash();
    }

    fn open(&self, id: &VideoId, variant: Variant) -> io::Result<File> {
        self.jobs.child(id.as_str())?.open(variant.file())
    }

    fn folder(&self, id: &VideoId) -> PathBuf {
        job_folder(&self.path, id)
    }
}

/// Returns the path of a job's folder in the state folder.
pub fn job_folder(state: &Path, id: &VideoId) -> PathBuf {
    state.join("jobs").join(id.as_str())
}

/// Writes the format number of a new store; rejects a store that has a different one.
fn check_format(root: &Folder) -> io::Result<()> {
    match root.read("format") {
        Ok(found) if found == FORMAT.as_bytes() => Ok(()),
        Ok(_) => Err(io::Error::other(
            "another release wrote this state folder: use another folder, or finish its videos with that release",
        )),
        Err(error) if error.kind() == io::ErrorKind::NotFound => root.put("format", FORMAT.as_bytes(), || ()),
        Err(error) => Err(error),
    }
}

fn allocate_reserve(root: &Folder) -> io::Result<()> {
    let mut file = root.create(&format!("{TEMPORARY}reserve"))?;
    if rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, RESERVE).is_err() {
        // Fallback for file systems without `fallocate`. Zeros take up space unless the file system compresses them.
        io::copy(&mut io::Read::take(io::repeat(0), RESERVE), &mut file)?;
    }
    file.sync_all()?;
    root.move_to(Path::new(&format!("{TEMPORARY}reserve")), root, Path::new("reserve"))
}

/// Starts a thread that empties the trash whenever it receives a message, until the sender is dropped.
fn emptier(trash: PathBuf) -> mpsc::Sender<()> {
    let (wake, woken) = mpsc::channel();
    std::thread::spawn(move || {
        while woken.recv().is_ok() {
            let entries = std::fs::read_dir(&trash).into_iter().flatten().flatten();
            for path in entries.map(|entry| entry.path()) {
                failpoint::reach("empty", "trash");
                // Symbolic links are removed, not followed. What cannot be removed is retried after the next message.
                drop(std::fs::remove_dir_all(&path).or_else(|_| std::fs::remove_file(&path)));
            }
        }
    });
    wake
}
