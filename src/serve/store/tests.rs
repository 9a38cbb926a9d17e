//! Machines that stop at any call of the store: what the disk has by then is made, with whatever of it had not been synchronized, and
//! a store is opened on it. No call that synchronizes can be left out.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::{FileStore, JobStore, Stored};
use crate::config::Config;
use crate::serve::id::{Ids, VideoId};
use crate::serve::job::{Accepted, Record, State};

/// A call as a file system sees it, or what a client knows from there on.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Call {
    Folder(PathBuf),
    File(PathBuf),
    Bytes(PathBuf, Vec<u8>),
    SyncFile(PathBuf),
    Rename(PathBuf, PathBuf),
    Unlink(PathBuf),
    SyncFolder(PathBuf),
    /// The job is in one of these states; in none it may be gone.
    Known(VideoId, Vec<Option<State>>),
}

thread_local! {
    static CALLS: RefCell<Option<Vec<Call>>> = const { RefCell::new(None) };
}

/// The path of an open folder.
pub(super) fn path(folder: &OwnedFd) -> PathBuf {
    std::fs::read_link(format!("/proc/self/fd/{}", folder.as_raw_fd())).expect("an open folder")
}

/// Keeps a call at a folder, where this thread's are kept.
pub(super) fn note(folder: &OwnedFd, call: impl FnOnce(PathBuf) -> Call) {
    CALLS.with_borrow_mut(|calls| {
        if let Some(calls) = calls {
            calls.push(call(path(folder)));
        }
    });
}

fn known(id: &VideoId, states: &[Option<State>]) {
    CALLS.with_borrow_mut(|calls| {
        if let Some(calls) = calls {
            calls.push(Call::Known(id.clone(), states.to_vec()));
        }
    });
}

/// Files and folders by number.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Names(BTreeMap<PathBuf, usize>);

impl Names {
    /// Makes a change of names, of the `n`th call; not where what it is about is not there.
    fn change(&mut self, n: usize, call: &Call) {
        match call {
            Call::Folder(path) | Call::File(path) if self.0.contains_key(folder(path)) => {
                self.0.insert(path.clone(), n);
            }
            Call::Rename(from, to) if self.0.contains_key(from) && self.0.contains_key(folder(to)) => {
                let below: Vec<PathBuf> = self.0.keys().filter(|path| path.starts_with(from)).cloned().collect();
                for path in below {
                    let number = self.0.remove(&path).expect("it was listed");
                    let end = path.strip_prefix(from).expect("it is below");
                    self.0.insert(if end == Path::new("") { to.clone() } else { to.join(end) }, number);
                }
            }
            Call::Unlink(path) => drop(self.0.remove(path)),
            _ => {}
        }
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().expect("a path in the state's folder")
}

/// What may be left: files with their bytes, folders with none.
type Left = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// What may be left of calls in the folder `root` when the machine stops behind them.
fn after(root: &Path, calls: &[Call]) -> BTreeSet<Left> {
    // Numbers of the folders and files that the calls are about.
    let first = Names(BTreeMap::from([(root.to_path_buf(), usize::MAX)]));
    let mut names = first.clone();
    let (mut of_folder, mut synced) = (vec![None; calls.len()], Vec::new());
    let (mut bytes, mut safe) = (BTreeMap::<usize, Vec<u8>>::new(), BTreeMap::<usize, usize>::new());
    for (n, call) in calls.iter().enumerate() {
        match call {
            Call::Folder(path) | Call::File(path) | Call::Rename(path, _) | Call::Unlink(path) => {
                of_folder[n] = Some(names.0[folder(path)]);
                names.change(n, call);
            }
            Call::Bytes(path, more) => bytes.entry(names.0[path]).or_default().extend(more),
            Call::SyncFile(path) => drop(safe.insert(names.0[path], bytes.get(&names.0[path]).map_or(0, Vec::len))),
            Call::SyncFolder(path) => synced.push((n, names.0[path])),
            Call::Known(..) => {}
        }
    }
    let is_safe = |n: usize| synced.iter().any(|(at, folder)| *at > n && of_folder[n] == Some(*folder));
    let changes: Vec<usize> = (0..calls.len()).filter(|n| of_folder[*n].is_some()).collect();
    let open = changes.iter().filter(|n| !is_safe(**n)).count();
    let mut all = BTreeSet::new();
    // Changes that are not safe yet reach the disk in their order, so far or farther; bytes in part.
    for kept in 0..=open {
        let (mut names, mut passed) = (first.clone(), 0);
        for n in &changes {
            passed += usize::from(!is_safe(*n));
            if is_safe(*n) || passed <= kept {
                names.change(*n, &calls[*n]);
            }
        }
        for part in 0..3 {
            let left = |(path, number): (&PathBuf, &usize)| {
                let is_file = matches!(calls.get(*number), Some(Call::File(_)));
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

/// Why a store on what is left is not what clients know; none where it is.
fn wrong(left: &Left, known: &BTreeMap<VideoId, (Vec<Option<State>>, Accepted)>) -> Option<String> {
    let state = tempfile::tempdir().expect("a folder");
    for (path, content) in left {
        match content {
            None => std::fs::create_dir_all(state.path().join(path)).expect("a folder"),
            Some(bytes) => std::fs::write(state.path().join(path), bytes).expect("written"),
        }
    }
    // It is not what is looked at, and takes long to be made.
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
        let job: Option<&Stored> = found.iter().find(|stored| stored.accepted.id == *id);
        let state = job.map(|stored| stored.record.state);
        if !states.contains(&state) || job.is_some_and(|stored| stored.accepted != *accepted) {
            return Some(format!("{id} is {state:?}, and may be {states:?}"));
        }
    }
    None
}

/// The first thing that is wrong where a machine stops at any of the calls.
fn first_wrong(root: &Path, calls: &[Call], jobs: &[Accepted]) -> Option<String> {
    let mut known = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for n in 0..=calls.len() {
        if let Some(Call::Known(id, states)) = n.checked_sub(1).map(|last| &calls[last]) {
            let job = jobs.iter().find(|job| job.id == *id).expect("one of the jobs");
            known.insert(id.clone(), (states.clone(), job.clone()));
            seen.clear();
        }
        for left in after(root, &calls[..n]) {
            if let Some(reason) = seen.insert(left.clone()).then(|| wrong(&left, &known)).flatten() {
                return Some(format!("behind {:?}: {reason}: {:?}", n.checked_sub(1).map(|n| &calls[n]), left.keys()));
            }
        }
    }
    None
}

fn accepted(id: VideoId) -> Accepted {
    Accepted {
        id,
        created_at: 1,
        owner: String::new(),
        model: "m".into(),
        config: Config::default(),
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
fn a_machine_that_stops_at_any_call_loses_nothing_that_a_client_was_told() {
    let state = tempfile::tempdir().expect("a folder");
    let root = state.path().canonicalize().expect("a path");
    let ids = Ids::behind(None);
    let jobs = [(); 2].map(|()| accepted(ids.next().expect("an id")));
    CALLS.set(Some(Vec::new()));
    let store = FileStore::open(&root).expect("opens");
    let [one, two] = &jobs;
    let change = |id: &VideoId, from: State, to: State| {
        known(id, &[Some(from), Some(to)]);
        store.transition(id, &Record { state: to, attempts: 1, ..Record::queued() }).expect("kept");
        known(id, &[Some(to)]);
    };
    for job in &jobs {
        store.create(job).expect("kept");
        known(&job.id, &[Some(State::Queued)]);
    }
    store.begin(&[one.id.clone(), two.id.clone()]).expect("kept");
    change(&one.id, State::Queued, State::InProgress);
    change(&two.id, State::Queued, State::InProgress);
    change(&one.id, State::InProgress, State::Completed);
    change(&two.id, State::InProgress, State::Failed);
    known(&one.id, &[Some(State::Completed), None]);
    store.remove(&one.id).expect("removed");
    known(&one.id, &[None]);
    let calls = CALLS.take().expect("they were kept");
    assert_eq!(first_wrong(&root, &calls, &jobs), None);

    // What holds a batch together may be lost: its jobs are made one by one then.
    let syncs = |call: &Call| match call {
        Call::SyncFile(path) => !path.ends_with(".ltx2-order.json"),
        Call::SyncFolder(_) => true,
        _ => false,
    };
    let needed: Vec<usize> = (0..calls.len()).filter(|n| syncs(&calls[*n])).collect();
    assert!(needed.len() > 15, "{calls:#?}");
    for n in needed {
        let without = [&calls[..n], &calls[n + 1..]].concat();
        assert!(first_wrong(&root, &without, &jobs).is_some(), "{n}, {:?}, is not needed", calls[n]);
    }
}
