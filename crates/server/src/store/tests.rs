//! Crash tests: the machine stops after any call of the store. For each stop, the tests construct every state in which
//! the disk may then be, with any subset of the unsynced changes that the disk may have written, and open a store on
//! it. They also check that no sync call is redundant.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::folder::Folder;
use super::{FileStore, JobStore, StoredJob, Variant};
use crate::id::{Ids, VideoId};
use crate::job::{AcceptedJob, JobState, Record};
use crate::job_config::tests::job_config;

/// A file system call, or a job state that clients know from this point on.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StoreCall {
    Folder(PathBuf),
    File(PathBuf),
    Bytes(PathBuf, Vec<u8>),
    SyncFile(PathBuf),
    Rename(PathBuf, PathBuf),
    Unlink(PathBuf),
    SyncFolder(PathBuf),
    /// Clients know that the job is in one of these states; `None`: the job may have been removed.
    Known(VideoId, Vec<Option<JobState>>),
}

/// Contents of the video file of each job.
const VIDEO: &[u8] = b"frames";

thread_local! {
    static CALLS: RefCell<Option<Vec<StoreCall>>> = const { RefCell::new(None) };
}

/// Returns the path of an open folder.
pub(super) fn path(folder: &OwnedFd) -> PathBuf {
    std::fs::read_link(format!("/proc/self/fd/{}", folder.as_raw_fd())).expect("an open folder")
}

/// Records a call on a folder if recording is enabled in this thread.
pub(super) fn note(folder: &OwnedFd, call: impl FnOnce(PathBuf) -> StoreCall) {
    CALLS.with_borrow_mut(|calls| {
        if let Some(calls) = calls {
            calls.push(call(path(folder)));
        }
    });
}

fn known(id: &VideoId, states: &[Option<JobState>]) {
    CALLS.with_borrow_mut(|calls| {
        if let Some(calls) = calls {
            calls.push(StoreCall::Known(id.clone(), states.to_vec()));
        }
    });
}

/// Halves of a rename that reach the disk: the removal of the old name, and the addition of the new name. If both names
/// are in the same folder, both halves or neither reach the disk.
#[derive(Clone, Copy)]
struct RenameHalves {
    from: bool,
    to: bool,
}

/// Numbers that identify the files and folders at each path. Each created file has a new number, because the store
/// never overwrites a file in place.
#[derive(Clone, Debug, Default)]
struct FileNumbers(BTreeMap<PathBuf, usize>);

impl FileNumbers {
    /// Applies the halves in `kept` of call number `n`. Skips a half whose folder does not exist.
    fn change(&mut self, n: usize, call: &StoreCall, kept: RenameHalves) {
        match call {
            StoreCall::Folder(path) | StoreCall::File(path) if kept.to && self.0.contains_key(folder(path)) => {
                self.0.insert(path.clone(), n);
            }
            StoreCall::Rename(from, to) => {
                let below: Vec<PathBuf> = self.0.keys().filter(|path| path.starts_with(from)).cloned().collect();
                for path in below {
                    let number = self.0[&path];
                    if kept.from {
                        self.0.remove(&path);
                    }
                    let end = path.strip_prefix(from).expect("it is below");
                    let to = if end == Path::new("") { to.clone() } else { to.join(end) };
                    if kept.to && self.0.contains_key(folder(&to)) {
                        self.0.insert(to, number);
                    }
                }
            }
            StoreCall::Unlink(path) if kept.from => {
                self.0.remove(path);
            }
            _ => {}
        }
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().expect("a path in the state's folder")
}

/// Disk contents after a simulated machine crash, by path: the bytes of a file, or `None` for a folder.
type DiskContents = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// Returns all states of the folder `root` that the disk may be in if the machine stops after `calls`.
fn after(root: &Path, calls: &[StoreCall]) -> BTreeSet<DiskContents> {
    // For each rename: the numbers of the folders that lose the old name and gain the new one.
    let first = FileNumbers(BTreeMap::from([(root.to_path_buf(), usize::MAX)]));
    let mut names = first.clone();
    let (mut changes, mut synced) = (Vec::new(), Vec::new());
    let (mut bytes, mut safe) = (BTreeMap::<usize, Vec<u8>>::new(), BTreeMap::<usize, usize>::new());
    for (n, call) in calls.iter().enumerate() {
        match call {
            StoreCall::Folder(path) | StoreCall::File(path) | StoreCall::Rename(path, _) | StoreCall::Unlink(path) => {
                let to = if let StoreCall::Rename(_, to) = call { to } else { path };
                changes.push((n, [path, to].map(|path| names.0[folder(path)])));
                names.change(n, call, RenameHalves { from: true, to: true });
            }
            StoreCall::Bytes(path, more) => bytes.entry(names.0[path]).or_default().extend(more),
            StoreCall::SyncFile(path) => {
                safe.insert(names.0[path], bytes.get(&names.0[path]).map_or(0, Vec::len));
            }
            StoreCall::SyncFolder(path) => synced.push((n, names.0[path])),
            StoreCall::Known(..) => {}
        }
    }
    let is_safe = |n: usize, of: usize| synced.iter().any(|(at, folder)| *at > n && of == *folder);
    // Unsynced changes of each folder. The changes within one folder reach the disk in order, up to any point;
    // different folders are independent.
    let mut open: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for (n, folders) in &changes {
        for of in folders.iter().filter(|of| !is_safe(*n, **of)) {
            open.entry(*of).or_default().insert(*n);
        }
    }
    let ends = open.iter().fold(vec![BTreeMap::new()], |ends, (of, changes)| {
        let all = || [None].into_iter().chain(changes.iter().map(Some));
        let with = |end: &BTreeMap<usize, Option<usize>>, last: Option<&usize>| {
            end.clone().into_iter().chain([(*of, last.copied())]).collect()
        };
        ends.iter().flat_map(|end| all().map(|last| with(end, last))).collect()
    });
    let mut all = BTreeSet::new();
    for end in ends {
        let mut names = first.clone();
        for (n, folders) in &changes {
            let is_kept = |of: usize| is_safe(*n, of) || end[&of].is_some_and(|last| *n <= last);
            let [from, to] = folders.map(is_kept);
            names.change(*n, &calls[*n], RenameHalves { from, to });
        }
        for part in 0..3 {
            // None, half or all of the unsynced bytes have reached the disk.
            let left = |(path, number): (&PathBuf, &usize)| {
                let is_file = matches!(calls.get(*number), Some(StoreCall::File(_)));
                let content = is_file.then(|| {
                    let whole = bytes.get(number).map_or(&[][..], Vec::as_slice);
                    let safe = safe.get(number).copied().unwrap_or(0);
                    whole[..safe + (whole.len() - safe) * part / 2].to_vec()
                });
                (path.strip_prefix(root).expect("below the root").to_path_buf(), content)
            };
            all.insert(names.0.iter().map(left).collect());
        }
    }
    all
}

/// Opens a store on the contents of a disk. Returns a description of a contradiction between the store and the states
/// that clients know; `None` if they agree.
fn wrong(left: &DiskContents, known: &BTreeMap<VideoId, (Vec<Option<JobState>>, AcceptedJob)>) -> Option<String> {
    let state = tempfile::tempdir().expect("a folder");
    for (path, content) in left {
        match content {
            None => std::fs::create_dir_all(state.path().join(path)).expect("a folder"),
            Some(bytes) => std::fs::write(state.path().join(path), bytes).expect("written"),
        }
    }
    // A sparse reserve file is enough, because its contents do not matter and allocating it is slow.
    std::fs::File::create(state.path().join("reserve")).and_then(|file| file.set_len(16 << 20)).expect("made");
    let store = match FileStore::open(state.path()) {
        Ok(store) => store,
        Err(error) => return Some(format!("it does not open: {error}")),
    };
    let found = match store.load_all() {
        Ok(found) => found,
        Err(error) => return Some(format!("it does not load: {error}")),
    };
    if std::fs::read_dir(state.path().join("damaged")).expect("a folder").next().is_some() {
        return Some("a job is damaged".into());
    }
    for (id, (states, accepted)) in known {
        let job: Option<&StoredJob> = found.iter().find(|stored| stored.accepted.id == *id);
        let state = job.map(|stored| stored.record.state);
        if !states.contains(&state) || job.is_some_and(|stored| stored.accepted != *accepted) {
            return Some(format!("{id} is {state:?}, and may be {states:?}"));
        }
        let video = store.folder(id).join(Variant::Video.file());
        if state == Some(JobState::Completed) && std::fs::read(video).ok().as_deref() != Some(VIDEO) {
            return Some(format!("{id} is completed without its video"));
        }
        let batch: Vec<&VideoId> = known.keys().collect();
        if state == Some(JobState::InProgress)
            && job.is_some_and(|stored| stored.order.iter().collect::<Vec<_>>() != batch)
        {
            return Some(format!("{id} is in progress without its batch"));
        }
    }
    None
}

/// Simulates a stop after each call in turn and returns the first contradiction.
fn first_contradiction(root: &Path, calls: &[StoreCall], jobs: &[AcceptedJob]) -> Option<String> {
    let mut known = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for n in 0..=calls.len() {
        if let Some(StoreCall::Known(id, states)) = n.checked_sub(1).map(|last| &calls[last]) {
            let job = jobs.iter().find(|job| job.id == *id).expect("one of the jobs");
            known.insert(id.clone(), (states.clone(), job.clone()));
            seen.clear();
        }
        for left in after(root, &calls[..n]) {
            if let Some(reason) = seen.insert(left.clone()).then(|| wrong(&left, &known)).flatten() {
                return Some(format!("after {:?}: {reason}: {:?}", n.checked_sub(1).map(|n| &calls[n]), left.keys()));
            }
        }
    }
    None
}

fn accepted(id: VideoId) -> AcceptedJob {
    AcceptedJob {
        id,
        created_at: 1,
        owner: String::new(),
        model: "m".into(),
        config: job_config(&serde_json::json!({})),
        expected: None,
        fields: serde_json::Map::default(),
        seconds: None,
        user: None,
        metadata: serde_json::Map::default(),
        warnings: Vec::new(),
        remixed_from: None,
        inputs: Vec::new(),
        body_sha256: String::new(),
        idempotency_key: None,
        traceparent: None,
        shape: "shape".into(),
        batch_key: "key".into(),
    }
}

#[test]
fn state_folder_symlink_is_followed_or_rejected_with_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let link = |from: &str, to: &str| std::os::unix::fs::symlink(at(to), at(from)).expect("a link");
    std::fs::create_dir(at("real")).expect("a folder");
    std::fs::write(at("file"), "").expect("a file");
    link("good", "real");
    assert!(FileStore::open(&at("good")).is_ok());
    link("dangling", "nowhere");
    link("to-a-file", "file");
    std::fs::create_dir(at("inner")).expect("a folder");
    link("inner/jobs", "real");
    for (name, why) in [
        ("dangling", "nowhere, which is not a folder"),
        ("to-a-file", "file, which is not a folder"),
        ("file", "the path is a file"),
        ("inner", "jobs is a link or a file, not a folder"),
    ] {
        let error = FileStore::open(&at(name)).expect_err(name).to_string();
        assert!(error.contains(why) && !error.contains("os error"), "{name}: {error}");
    }
}

#[test]
fn crash_after_any_call_loses_no_acknowledged_state() {
    let state = tempfile::tempdir().expect("a folder");
    let root = state.path().canonicalize().expect("a path");
    let ids = Ids::after(None);
    let jobs = [(); 2].map(|()| accepted(ids.next().expect("an id")));
    CALLS.set(Some(Vec::new()));
    let store = FileStore::open(&root).expect("opens");
    let [one, two] = &jobs;
    let change = |id: &VideoId, from: JobState, to: JobState| {
        known(id, &[Some(from), Some(to)]);
        store.transition(id, &Record { state: to, attempts: 1, ..Record::queued() }).expect("kept");
        known(id, &[Some(to)]);
    };
    for job in &jobs {
        store.create(job).expect("kept");
        known(&job.id, &[Some(JobState::Queued)]);
    }
    store.begin(&[one.id.clone(), two.id.clone()]).expect("kept");
    change(&one.id, JobState::Queued, JobState::InProgress);
    change(&two.id, JobState::Queued, JobState::InProgress);
    // The video is written in the same way as by `media::atomic`, which also syncs the folder.
    let made = Folder::at(&store.folder(&one.id)).expect("the job's");
    made.put(Variant::Video.file(), VIDEO, || ()).expect("written");
    change(&one.id, JobState::InProgress, JobState::Completed);
    change(&two.id, JobState::InProgress, JobState::Failed);
    known(&one.id, &[Some(JobState::Completed), None]);
    store.remove(&one.id).expect("removed");
    known(&one.id, &[None]);
    let calls = CALLS.take().expect("they were kept");
    assert_eq!(first_contradiction(&root, &calls, &jobs), None);

    let syncs = |call: &StoreCall| matches!(call, StoreCall::SyncFile(_) | StoreCall::SyncFolder(_));
    let needed: Vec<usize> = (0..calls.len()).filter(|n| syncs(&calls[*n])).collect();
    assert!(needed.len() > 15, "{calls:#?}");
    for n in needed {
        let without = [&calls[..n], &calls[n + 1..]].concat();
        assert!(first_contradiction(&root, &without, &jobs).is_some(), "{n}, {:?}, is not needed", calls[n]);
    }
}
