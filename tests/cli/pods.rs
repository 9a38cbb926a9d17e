//! `docs/guides/pods.md`, followed word for word: its command blocks are typed into a shell whose `gcloud`, `gcsfuse`,
//! `docker`, `kubectl`, `sbatch` are the stand-ins of `tests/fixtures/pods`. They start real processes of `ltx2`, each in a
//! folder and an environment of its own. Nothing but the loopback network is used.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::support::{self, needs};
use ltx2::pjrt::discover::{self, Platform};
use serde_json::Value;
use tempfile::TempDir;

const PAGE: &str = "docs/guides/pods.md";
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pods");
/// After that a command hangs, however busy the machine is.
const HANGS: Duration = Duration::from_secs(120);

/// A command block of the page.
struct Block {
    heading: String,
    text: String,
}

fn page() -> String {
    fs::read_to_string(PAGE).expect("the page")
}

/// All fenced blocks of a page, each with the heading above it. They are commands, all of them.
fn blocks(page: &str) -> Vec<Block> {
    let (mut all, mut heading, mut open): (Vec<Block>, String, Option<String>) = (Vec::new(), String::new(), None);
    for line in page.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(language)) => {
                assert_eq!(language, "sh", "every block of {PAGE} is a command block");
                open = Some(String::new());
            }
            (Some(_), Some(_)) => all.extend(open.take().map(|text| Block { heading: heading.clone(), text })),
            (Some(text), None) => *text += &format!("{line}\n"),
            (None, None) if line.starts_with('#') => heading = line.trim_start_matches(['#', ' ']).into(),
            (None, None) => {}
        }
    }
    all
}

/// The machine of the rehearsal: below its folder are the laptop, the workers, buckets, images.
struct Rehearsal {
    folder: TempDir,
    /// The first three numbers of the loopback addresses that are this rehearsal's: others may run beside it.
    network: String,
}

impl Rehearsal {
    fn new() -> Self {
        // In the binary's file system, so that links to it can be made.
        let folder = tempfile::Builder::new().prefix("pods-").tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        let id = std::process::id();
        let network = format!("127.{}.{}", 1 + id / 250 % 250, 1 + id % 250);
        let rehearsal = Rehearsal { folder: folder.expect("a folder"), network };
        let laptop = rehearsal.path("laptop");
        for below in ["home", "models", "plugins", "scripts"] {
            fs::create_dir_all(laptop.join(below)).expect("a folder");
        }
        copy("Cargo.toml", &laptop.join("Cargo.toml"));
        copy("scripts/pod", &laptop.join("scripts/pod"));
        copy("tests/fixtures/models/tiny_a", &laptop.join("models/LTX-2"));
        std::os::unix::fs::symlink(plugin(), laptop.join("plugins/cpu")).expect("a link");
        let flags = std::env::var("XLA_FLAGS").unwrap_or_default();
        fs::write(rehearsal.path("on-workers"), format!("LTX2_REHEARSE_PROCESSES=1\nXLA_FLAGS={flags}\n")).unwrap();
        rehearsal
    }

    fn path(&self, below: &str) -> PathBuf {
        self.folder.path().join(below)
    }

    /// The variables of the page that have other values here, with those values. Everything else is typed as it stands.
    fn variables(&self) -> [(&'static str, String); 8] {
        let fixture = |name: &str| format!("{FIXTURES}/{name}");
        [
            ("PLATFORM", "cpu".into()),
            ("EIGHT_CHIPS", fixture("rehearsal.yml")),
            ("SIXTEEN_CHIPS", fixture("rehearsal.yml")),
            ("TARGET", "cpu:2".into()),
            ("EXPERIMENT", fixture("experiment.yml")),
            ("GPUS", fixture("rehearsal.yml")),
            ("GPU_MESH", "cfg=2".into()),
            ("COORDINATOR", format!("{}.250:8476", self.network)),
        ]
    }

    /// A shell in the laptop's checkout.
    fn terminal(&self) -> Terminal {
        let mut bash = Command::new("bash");
        bash.args(["--noprofile", "--norc"]).current_dir(self.path("laptop")).env_clear().envs(self.variables());
        bash.env("PATH", format!("{FIXTURES}/laptop:/usr/local/bin:/usr/bin:/bin"))
            .env("HOME", self.path("laptop/home"));
        bash.env("STANDIN", self.folder.path()).env("STANDIN_NETWORK", &self.network);
        bash.env("STANDIN_LTX2", env!("CARGO_BIN_EXE_ltx2")).env("STANDIN_TEST", std::env::current_exe().unwrap());
        bash.env("LTX2_REHEARSE_PROCESSES", "1").env("LTX2_COMPILE_CACHE", support::programs());
        bash.env("XLA_FLAGS", std::env::var("XLA_FLAGS").unwrap_or_default());
        let mut bash = bash.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("bash");
        let lines = BufReader::new(bash.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let (said, ended) = channel();
        // Ends with the shell.
        std::thread::spawn(move || lines.into_iter().try_for_each(|line| said.send(line)));
        let typed = tempfile::Builder::new().prefix("typed-").tempdir_in(self.folder.path()).expect("a folder").keep();
        Terminal { bash, ended, typed, count: 0 }
    }

    /// Processes of the rehearsal that run now: those that know of its folder.
    fn running(&self) -> Vec<String> {
        let mark = format!("STANDIN={}", self.folder.path().display());
        let processes = fs::read_dir("/proc").expect("processes").flatten().map(|p| p.path());
        let ours = processes.filter(|process| {
            let environment = fs::read(process.join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
        });
        ours.filter_map(|process| Some(process.file_name()?.to_str()?.to_string())).collect()
    }

    fn bytes(&self, below: &str) -> Vec<u8> {
        fs::read(self.path(below)).unwrap_or_else(|e| panic!("{below}: {e}"))
    }

    fn text(&self, below: &str) -> String {
        String::from_utf8_lossy(&self.bytes(below)).into_owned()
    }

    /// Names in a folder.
    fn names(&self, below: &str) -> BTreeSet<String> {
        let entries = fs::read_dir(self.path(below)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Programs that a video's run compiled and those that it took from the cache, by its sidecar.
    fn compiled_and_cached(&self, sidecar: &str) -> (u64, u64) {
        let sidecar: Value = serde_json::from_slice(&self.bytes(sidecar)).expect("JSON");
        let programs = sidecar["timings"]["programs"].as_object().expect("programs");
        let count = |key: &str| programs.values().filter_map(|program| program[key].as_u64()).sum();
        (count("compiles"), count("cache_hits"))
    }
}

impl Drop for Rehearsal {
    fn drop(&mut self) {
        // Of a failed test; after one that passed none is there.
        for process in self.running() {
            let _ = Command::new("kill").args(["-9", &process]).status();
        }
    }
}

/// Copies a file or a folder.
fn copy(from: &str, to: &Path) {
    let copied = Command::new("cp").arg("-r").arg(from).arg(to).status().expect("cp runs");
    assert!(copied.success(), "{from}");
}

/// The CPU plugin's folder, as `ltx2 plugin install cpu` leaves it: there it finds nothing to download.
fn plugin() -> PathBuf {
    let found = discover::find(Platform::Cpu, None).found;
    let installed = found.iter().flat_map(|plugin| plugin.path.ancestors()).find(|f| f.join("installed.txt").is_file());
    installed.expect("a plugin by `ltx2 plugin install cpu`").to_path_buf()
}

/// A shell in which the page's commands are typed.
struct Terminal {
    bash: Child,
    /// Its exit codes, one a block.
    ended: Receiver<String>,
    typed: PathBuf,
    count: usize,
}

/// The end of a block: the last exit code that was not 0, or 0, and what was said.
struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Terminal {
    /// Types a block; it is not waited for.
    fn start(&mut self, block: &Block) {
        self.count += 1;
        let at = |end: &str| self.typed.join(format!("{}.{end}", self.count)).display().to_string();
        fs::write(at("sh"), &block.text).expect("written");
        // As in any shell a command that fails ends nothing; it is noticed.
        let line = format!(
            "set -o pipefail; failed=0; trap 'failed=$?' ERR; . {} </dev/null >{} 2>{}; trap - ERR; echo $failed",
            at("sh"),
            at("out"),
            at("err")
        );
        writeln!(self.bash.stdin.as_mut().expect("piped"), "{line}").expect("bash reads");
    }

    fn said(&self, end: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.typed.join(format!("{}.{end}", self.count))).unwrap_or_default()).into()
    }

    /// Waits until the block says a line.
    fn wait_for(&self, line: &str) {
        let started = Instant::now();
        while !self.said("out").lines().any(|l| l == line) {
            let now = || format!("{}{}", self.said("out"), self.said("err"));
            assert!(self.ended.try_recv().is_err(), "ended without '{line}': {}", now());
            assert!(started.elapsed() < HANGS, "no '{line}': {}", now());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn finish(&self) -> Ran {
        let code = self.ended.recv_timeout(HANGS);
        let (out, err) = (self.said("out"), self.said("err"));
        let code = code.unwrap_or_else(|e| panic!("{e}: {out}{err}")).parse().expect("a code");
        Ran { code, out, err }
    }

    fn run(&mut self, block: &Block) -> Ran {
        self.start(block);
        self.finish()
    }

    /// Runs a block that has to succeed.
    fn succeeds(&mut self, block: &Block) -> Ran {
        let started = Instant::now();
        let ran = self.run(block);
        eprintln!(
            "{:5.1} s  {}: {}",
            started.elapsed().as_secs_f64(),
            block.heading,
            block.text.lines().next().unwrap()
        );
        assert_eq!(ran.code, 0, "{}\n{}{}{}", block.heading, block.text, ran.out, ran.err);
        ran
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        drop(self.bash.stdin.take());
        if std::thread::panicking() {
            let _ = self.bash.kill();
        }
        let _ = self.bash.wait();
    }
}

/// Takes half a minute: each of four workers computes the whole video, for want of a way between them, and the first run
/// of each place compiles. It is one test because the page is one course of commands.
#[needs(cpu)]
fn the_page_is_followed_word_for_word() {
    let all = blocks(&page());
    let mut left = all.iter();
    // Each block in its turn, by the heading that it is below: none is left out.
    let mut next = |heading: &str| {
        let block = left.next().unwrap_or_else(|| panic!("no more blocks, but {heading}"));
        assert_eq!(block.heading, heading, "{}", block.text);
        block
    };
    let rehearsal = Rehearsal::new();
    let mut terminal = rehearsal.terminal();

    let variables = next("Prepare");
    terminal.succeeds(variables);
    terminal.succeeds(next("Prepare"));
    let compiled = terminal.succeeds(next("Prepare"));
    assert!(compiled.out.contains("\nprogram     denoise, "), "{}", compiled.out);
    terminal.succeeds(next("Prepare"));
    let bucket = "buckets/my-project-ltx2";
    assert_eq!(rehearsal.names(bucket), ["ltx2", "models", "plugins"].map(String::from).into());

    for _ in ["create", "copy", "generate", "experiment"] {
        terminal.succeeds(next("One VM, with files copied"));
    }
    assert_eq!(rehearsal.names("tpus/ltx-one").into_iter().collect::<Vec<_>>(), ["worker-0", "zone"]);
    assert_eq!(rehearsal.bytes("laptop/fox-one-vm.mp4"), rehearsal.bytes("tpus/ltx-one/worker-0/ltx2/out/fox.mp4"));
    let results = rehearsal.text("laptop/experiment-v6e-8/results.jsonl");
    let results: Vec<Value> = results.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(results.len(), 2, "compiled and measured: {results:?}");
    assert!(results[1]["result"]["programs"]["denoise_loop"]["median"].as_f64() > Some(0.0), "{}", results[1]);
    terminal.succeeds(next("One VM, with files copied"));
    assert!(rehearsal.names("tpus").is_empty());

    let several = "Several VMs, with the bucket mounted";
    terminal.succeeds(next(several));
    let workers = ["worker-0", "worker-1", "worker-2", "worker-3", "zone"].map(String::from).into();
    assert_eq!(rehearsal.names("tpus/ltx"), workers, "v6e-16 is four VMs");
    terminal.succeeds(next(several));
    let first = terminal.succeeds(next(several));
    for worker in 0..4 {
        let met = format!("worker {worker}:  INFO process {worker} of 4 on ");
        assert!(first.out.lines().any(|line| line.starts_with(&met)), "{met}: {}", first.out);
    }
    let (compiled, cached) = rehearsal.compiled_and_cached(&format!("{bucket}/out/fox.json"));
    assert_eq!((compiled > 0, cached), (true, 0), "the first run compiles");
    terminal.succeeds(next(several));
    assert_eq!(rehearsal.compiled_and_cached("laptop/fox-again.json"), (0, compiled), "the second compiles nothing");
    let entries = rehearsal.names(&format!("{bucket}/cache"));
    assert_eq!(entries.len() as u64, compiled, "each program once: {entries:?}");
    // One process or four: the same video.
    let one = rehearsal.bytes("laptop/fox-one-vm.mp4");
    assert!(one == rehearsal.bytes("laptop/fox-again.mp4") && one == rehearsal.bytes(&format!("{bucket}/out/fox.mp4")));

    // The CPU's plugin has no profiler: the command comes so far on every worker.
    let profile = terminal.run(next(several));
    assert_ne!(profile.code, 0);
    for worker in 0..4 {
        let ended = format!("worker {worker}: error: ");
        let mut lines = profile.out.lines().filter(|line| line.starts_with(&ended));
        assert!(lines.any(|line| line.contains("this plugin has no profiler")), "{ended}: {}", profile.out);
    }

    // Worker 0 stops before the file gets its name, so that the kill comes in the middle.
    let half = |name: &str| name.starts_with(".ltx2-");
    let out = format!("{bucket}/out");
    fs::write(rehearsal.path("on-worker-0"), "LTX2_FAILPOINT=rename night.mp4\n").expect("written");
    terminal.start(next("When a worker dies"));
    terminal.wait_for("worker 0: at rename night.mp4");
    assert_eq!(rehearsal.names(&out).iter().filter(|name| half(name)).count(), 1, "a file under way");
    let mut second = rehearsal.terminal();
    second.succeeds(variables);
    second.succeeds(next("When a worker dies"));
    drop(second);
    let killed = terminal.finish();
    assert_ne!(killed.code, 0);
    for worker in [0, 1, 3] {
        let mut lines = killed.out.lines().filter_map(|line| line.strip_prefix(&format!("worker {worker}: error: ")));
        let line = lines.next().unwrap_or_else(|| panic!("worker {worker} says nothing: {}", killed.out));
        assert!(
            line.starts_with("process 2 (") && line.contains(" has not answered for 5 s: it died or hangs"),
            "{line}"
        );
        assert_eq!(lines.next(), None);
        let code = format!("worker {worker}: command failed with exit status 1");
        assert!(killed.err.lines().any(|line| line.ends_with(&code)), "{}", killed.err);
    }
    assert!(killed.err.contains("worker 2: command failed with exit status 137"), "{}", killed.err);
    assert!(!rehearsal.names(&out).iter().any(|name| half(name) || name.starts_with("night")), "nothing half-written");
    fs::remove_file(rehearsal.path("on-worker-0")).expect("removed");
    terminal.succeeds(next("When a worker dies"));
    assert!(rehearsal.names(&out).contains("night.mp4"));
    assert_eq!(rehearsal.compiled_and_cached(&format!("{out}/night.json")), (0, compiled));

    let listed = terminal.succeeds(next("Delete"));
    assert_eq!((listed.out.as_str(), rehearsal.names("tpus").len()), ("", 0), "no slice is left");

    for _ in ["image", "cluster", "account"] {
        terminal.succeeds(next("Kubernetes"));
    }
    let logs = terminal.succeeds(next("Kubernetes")).out;
    for pod in 0..2 {
        let joined = format!("process {pod} of 2 on ");
        let named = |line: &&str| line.starts_with(&format!("[pod/ltx2-slice-0-{pod}")) && line.contains(&joined);
        let line = logs.lines().find(named).unwrap_or_else(|| panic!("{joined}: {logs}"));
        assert!(line.contains("over Kubernetes JobSet)"), "{line}");
    }
    assert_eq!(
        rehearsal.compiled_and_cached(&format!("{out}/fox-gke.json")),
        (0, compiled),
        "the bucket has the programs"
    );
    assert!(one == rehearsal.bytes(&format!("{out}/fox-gke.mp4")));
    terminal.succeeds(next("Delete the rest"));
    for left in ["buckets", "cluster", "images", "tpus", "requests"] {
        assert!(rehearsal.names(left).is_empty(), "{left}: {:?}", rehearsal.names(left));
    }

    terminal.succeeds(next("GPUs"));
    let log = rehearsal.text("laptop/ltx2-4101.log");
    for process in 0..2 {
        assert!(log.contains(&format!("process {process} of 2 on ")) && log.contains(" (SLURM), "), "{log}");
    }
    terminal.succeeds(next("GPUs"));
    for video in ["fox.mp4", "fox-by-hand.mp4"] {
        assert!(!rehearsal.bytes(&format!("laptop/{video}")).is_empty());
    }
    assert!(left.next().is_none(), "every block was typed");
    drop(terminal);
    assert_eq!(rehearsal.running(), [""; 0], "nothing runs any more");
}

/// Without the variable the CPU is refused to several processes: a rehearsal is nothing that happens by chance.
#[needs(cpu)]
fn several_processes_on_the_cpu_have_to_be_asked_for() {
    let id = std::process::id();
    let place = format!("127.{}.{}.251:8476", 1 + id / 250 % 250, 1 + id % 250);
    let folder = tempfile::tempdir().expect("a folder");
    let start = |process: &str| {
        let mut run = support::ltx2();
        run.args(["generate", "-c", &format!("{FIXTURES}/rehearsal.yml"), "--coordinator", &place]);
        run.args(["--num-processes", "2", "--process-id", process, "-o"]).arg(folder.path().join("out.mp4"));
        run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts")
    };
    for process in ["0", "1"].map(start) {
        let ended = process.wait_with_output().expect("ends");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert!(said.contains("platform cpu runs in one process"), "{said}");
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "nothing is written");
}

/// The page says which variables the rehearsal sets, and those are all that can be set beforehand.
#[needs(nothing)]
fn the_page_names_what_the_rehearsal_sets() {
    let page = page();
    let said = page.split("It sets beforehand: ").nth(1).and_then(|rest| rest.split(". ").next()).expect("a list");
    let said: BTreeSet<&str> = said.split('`').skip(1).step_by(2).collect();
    let commands: String = blocks(&page).into_iter().map(|block| block.text).collect();
    let settable: BTreeSet<&str> = commands
        .match_indices("=${")
        .filter_map(|(at, _)| {
            let name = commands[..at].rsplit(|c: char| !(c.is_ascii_uppercase() || c == '_')).next()?;
            commands[at..].starts_with(&format!("=${{{name}:-")).then_some(name)
        })
        .collect();
    let rehearsal = Rehearsal { folder: tempfile::tempdir().expect("a folder"), network: String::new() };
    let set: BTreeSet<&str> = rehearsal.variables().into_iter().map(|(name, _)| name).collect();
    assert_eq!((&said, &settable), (&set, &set));
}

/// The table of slices agrees with the stand-in, which refuses others, and with the meshes of the configurations.
#[needs(nothing)]
fn the_slices_of_the_page_fit_their_configurations() {
    let known = fs::read_to_string(Path::new(FIXTURES).join("slices.tsv")).expect("slices");
    let known: Vec<Vec<&str>> = known.lines().map(|line| line.split('\t').collect()).collect();
    let page = page();
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.contains("| `tpu/"))
        .map(|line| line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`')).collect())
        .collect();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let [name, vms, chips, devices, config, version] = row[..] else { panic!("{row:?}") };
        assert!(known.contains(&vec![name, version, vms, chips]), "{row:?}");
        let number = |text: &str| text.parse::<usize>().expect("a number");
        assert_eq!(number(vms) * number(chips), number(devices), "{row:?}");
        let text = fs::read_to_string(format!("configs/{config}.yml")).expect("a configuration");
        let mesh = text.lines().find_map(|line| line.strip_prefix("mesh: {")).expect("a mesh");
        let sizes =
            mesh.trim_end_matches('}').split(',').map(|axis| number(axis.split(':').nth(1).expect("a size").trim()));
        assert_eq!(sizes.product::<usize>(), number(devices), "{row:?}");
    }
}

/// The cluster of the stand-in `kubectl`: holds the manifest of a JobSet against its node pools, buckets and images, and
/// writes a folder for each pod that it makes.
#[needs(member)]
fn cluster() {
    let root = PathBuf::from(std::env::var_os("STANDIN").expect("a folder"));
    let read = |below: &str| fs::read_to_string(root.join(below)).unwrap_or_else(|e| panic!("{below}: {e}"));
    let set: Value = serde_saphyr::from_str(&read("cluster/manifest.yml")).expect("YAML");
    assert!(root.join("cluster/jobsets").exists(), "no matches for kind JobSet");
    assert_eq!((&set["apiVersion"], &set["kind"]), (&"jobset.x-k8s.io/v1alpha2".into(), &"JobSet".into()));
    let name = text(&set["metadata"]["name"]);
    let jobs = set["spec"]["replicatedJobs"].as_array().expect("replicatedJobs");
    let [job] = &jobs[..] else { panic!("one replicated job: {jobs:?}") };
    let (replicas, template) = (number(&job["replicas"]), &job["template"]["spec"]);
    let pod = &template["template"]["spec"];
    let [container] = &pod["containers"].as_array().expect("containers")[..] else { panic!("one container") };
    known(
        pod,
        &["restartPolicy", "serviceAccountName", "nodeSelector", "containers", "volumes", "hostNetwork", "dnsPolicy"],
    );
    known(container, &["name", "image", "workingDir", "command", "args", "env", "ports", "resources", "volumeMounts"]);
    assert_eq!(text(&pod["restartPolicy"]), "Never", "the processes of a job end together");

    // Nodes: as many pods as the slice has hosts, with all chips of each.
    let topology = text(&pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]);
    assert_eq!(text(&pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"]), "tpu-v6e-slice");
    let pools = fs::read_dir(root.join("cluster")).expect("a cluster").flatten().map(|entry| entry.path());
    let pools = pools.filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("pool-")));
    let pools: Vec<Vec<String>> = pools
        .map(|path| fs::read_to_string(path).expect("a pool").split_whitespace().map(String::from).collect())
        .filter(|pool: &Vec<String>| pool[0].starts_with("ct6e-standard-") && pool[1] == topology)
        .collect();
    assert_eq!(pools.len(), replicas, "a node pool of topology {topology} for each slice");
    let chips = pools[0][0].trim_start_matches("ct6e-standard-").trim_end_matches('t').parse::<usize>().expect("chips");
    let nodes = topology.split('x').map(|n| n.parse::<usize>().expect("a topology")).product::<usize>() / chips;
    assert_eq!(pools[0][2], nodes.to_string(), "nodes of a pool with topology {topology}, {chips} chips each");
    assert_eq!(number(&container["resources"]["limits"]["google.com/tpu"]), chips, "all chips of a node");
    assert_eq!((number(&template["parallelism"]), number(&template["completions"])), (nodes, nodes), "a pod a node");

    // Bucket: mounted by the driver's sidecar, for a service account that may use it.
    let annotation = &template["template"]["metadata"]["annotations"]["gke-gcsfuse/volumes"];
    assert_eq!(annotation, "true", "the sidecar that mounts buckets");
    assert!(read("cluster/about").contains("GcsFuseCsiDriver"), "the driver is not in the cluster");
    let account = text(&pod["serviceAccountName"]);
    assert!(read("cluster/accounts").lines().any(|known| known == account), "serviceaccount {account} not found");
    let [volume] = &pod["volumes"].as_array().expect("volumes")[..] else { panic!("one volume") };
    let [mount] = &container["volumeMounts"].as_array().expect("mounts")[..] else { panic!("one mount") };
    assert_eq!((&mount["name"], &volume["csi"]["driver"]), (&volume["name"], &"gcsfuse.csi.storage.gke.io".into()));
    let bucket = text(&volume["csi"]["volumeAttributes"]["bucketName"]);
    assert!(text(&volume["csi"]["volumeAttributes"]["mountOptions"]).contains("implicit-dirs"), "folders are not seen");
    let project = read("project");
    let member = format!(
        "gs://{bucket} roles/storage.objectUser principal://iam.googleapis.com/projects/1234/locations/global/\
         workloadIdentityPools/{}.svc.id.goog/subject/ns/default/sa/{account}",
        project.trim()
    );
    assert!(
        read("bindings").lines().any(|line| line == member),
        "{account} may not use {bucket}: {}",
        read("bindings")
    );
    let folder = root.join("buckets").join(bucket);
    assert!(folder.is_dir(), "bucket {bucket} not found");
    let place = |path: &str| match path.strip_prefix(text(&mount["mountPath"])) {
        Some(below) => folder.join(below.trim_start_matches('/')),
        None => panic!("{path} is not in the mounted bucket"),
    };

    // Image: pushed, with a program to start.
    let image = text(&container["image"]).replace('/', "_");
    let images = root.join("images");
    assert!(images.join(format!("{image}.pushed")).exists(), "image {image} cannot be pulled");
    let list = |key: &str| -> Vec<String> {
        container[key].as_array().into_iter().flatten().map(|word| text(word).to_string()).collect()
    };
    let mut words = match list("command") {
        command if command.is_empty() => vec![read(&format!("images/{image}.entrypoint")).trim().to_string()],
        command => command,
    };
    words[0] = format!("{}{}", images.join(&image).display(), words[0]);
    words.extend(list("args"));

    // An address in place of the names that a cluster's DNS has for pods.
    let coordinator = format!("LTX2_COORDINATOR={}.9:8476", std::env::var("STANDIN_NETWORK").expect("a network"));
    for (index, pod) in (0..replicas).flat_map(|job| (0..nodes).map(move |pod| (job, pod))) {
        let of_field = |path: &str| match path {
            "metadata.annotations['jobset.sigs.k8s.io/jobset-name']" => name.to_string(),
            "metadata.annotations['jobset.sigs.k8s.io/replicatedjob-name']" => text(&job["name"]).to_string(),
            "metadata.annotations['jobset.sigs.k8s.io/job-index']" => index.to_string(),
            "metadata.annotations['batch.kubernetes.io/job-completion-index']" => pod.to_string(),
            other => panic!("a pod has no {other}"),
        };
        let variables = container["env"].as_array().into_iter().flatten().map(|variable| {
            let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
                Some(path) => of_field(path),
                None => text(&variable["value"]).to_string(),
            };
            format!("{}={value}", text(&variable["name"]))
        });
        let variables: Vec<String> = variables.chain([coordinator.clone()]).collect();
        for (key, wanted) in [("PROCESSES_IN_JOB", nodes), ("JOBS_IN_SET", replicas)] {
            assert!(variables.contains(&format!("{key}={wanted}")), "{key} is not {wanted}: {variables:?}");
        }
        let at = root.join(format!("cluster/pods/{name}-{}-{index}-{pod}", text(&job["name"])));
        fs::create_dir_all(&at).expect("a folder");
        fs::write(at.join("folder"), place(text(&container["workingDir"])).display().to_string()).expect("written");
        fs::write(at.join("variables"), variables.join("\n")).expect("written");
        fs::write(at.join("words"), words.join("\n")).expect("written");
    }
    fs::write(root.join("cluster/name"), name).expect("written");
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("a text, not {value}"))
}

fn number(value: &Value) -> usize {
    value.as_u64().and_then(|n| n.try_into().ok()).unwrap_or_else(|| panic!("a number, not {value}"))
}

/// Refuses keys that the server would.
fn known(value: &Value, keys: &[&str]) {
    let all = value.as_object().expect("keys");
    all.keys().for_each(|key| assert!(keys.contains(&key.as_str()), "unknown field \"{key}\""));
}
