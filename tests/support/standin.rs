//! Plugin that fails, hangs or aborts on request: `standin.c`, which forwards calls to the CPU plugin.

use std::fmt::Write;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use ltx2::pjrt::discover::{self, Platform};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

const SOURCE: &str = include_str!("standin.c");
/// Source of the crate's C interface, from which function names, table slots and offsets are read.
const ABI: &str = include_str!("../../crates/pjrt/src/abi.rs");

/// Error codes of the C interface.
pub const INVALID_ARGUMENT: u32 = 3;
pub const RESOURCE_EXHAUSTED: u32 = 8;
pub const INTERNAL: u32 = 13;
pub const UNAVAILABLE: u32 = 14;

/// Fault of a call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Returns an error with this code and message.
    Fail(u32, &'static str),
    /// Delays the call by this many milliseconds.
    Delay(u64),
    Hang,
    /// Returns an event that never becomes ready.
    Drop,
    Abort,
}

/// Fault while loading the plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    Abort,
    Hang,
    /// The interface has another major version.
    Major,
    /// The interface has a minor version that is too old.
    Old,
    /// The plugin has a TPU extension, and its initialization never ends.
    Tpu,
    /// The client's platform is named `other`.
    Other,
    /// The client's platform is named `cuda`, and host memory can be mapped, so that weights can be streamed.
    Cuda,
    /// The library has no entry point.
    NoEntry,
}

/// Plan of the stand-in plugin for a command.
#[derive(Clone, Debug, Default)]
pub struct Standin {
    rules: Vec<String>,
    load: Option<Load>,
    log: Option<PathBuf>,
    calls: Option<PathBuf>,
}

impl Standin {
    /// Creates a plan without faults.
    pub fn new() -> Self {
        Standin::default()
    }

    /// Adds a fault at the `nth` call (from 1; 0: every call) of a function of the C interface.
    pub fn at(mut self, function: &str, nth: usize, fault: &Fault) -> Self {
        let known = slots().iter().any(|(name, _)| name.split('/').next() == function.split('/').next());
        assert!(known, "{function} is no function that the crate calls");
        let action = match fault {
            Fault::Fail(code, message) => format!("fail:{code}:{message}"),
            Fault::Delay(ms) => format!("delay:{ms}"),
            Fault::Hang => "hang".into(),
            Fault::Drop => "drop".into(),
            Fault::Abort => "abort".into(),
        };
        self.rules.push(format!("{function}@{nth}={action}"));
        self
    }

    /// Adds a fault at the `nth` execution (from 1) of a program.
    pub fn execution(self, program: &str, nth: usize, fault: &Fault) -> Self {
        self.at(&format!("PJRT_LoadedExecutable_Execute/{program}"), nth, fault)
    }

    /// Sets a fault while loading the plugin.
    pub fn load(self, load: Load) -> Self {
        Standin { load: Some(load), ..self }
    }

    /// Appends a line to this file when a fault occurs.
    pub fn log(self, file: &Path) -> Self {
        Standin { log: Some(file.into()), ..self }
    }

    /// Writes the number of calls per function to this file when the process exits.
    pub fn calls(self, file: &Path) -> Self {
        Standin { calls: Some(file.into()), ..self }
    }

    /// Returns the path of the plugin library.
    pub fn file(&self) -> PathBuf {
        library(self.load == Some(Load::NoEntry))
    }

    /// Makes a command use the stand-in as its CPU plugin.
    pub fn give<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let search = discover::find(Platform::Cpu, None);
        let real = search.found.first().unwrap_or_else(|| panic!("{}", search.not_found()));
        command.env("LTX2_PJRT_PLUGIN", self.file()).env("LTX2_STANDIN_PLUGIN", &real.path);
        command.env("LTX2_STANDIN_PLAN", self.rules.join(";"));
        command.env("LTX2_COMPILE_CACHE", programs());
        let load = match self.load {
            Some(Load::Abort) => "abort",
            Some(Load::Hang) => "hang",
            Some(Load::Major) => "major",
            Some(Load::Old) => "old",
            Some(Load::Tpu) => "tpu",
            Some(Load::Other) => "other",
            Some(Load::Cuda) => "cuda",
            Some(Load::NoEntry) | None => "",
        };
        command.env("LTX2_STANDIN_LOAD", load);
        if let Some(log) = &self.log {
            command.env("LTX2_STANDIN_LOG", log);
        }
        if let Some(calls) = &self.calls {
            command.env("LTX2_STANDIN_CALLS", calls);
        }
        command
    }
}

/// Returns the compile cache of all stand-ins, separate from that of the CPU plugin. It starts with the programs of
/// [`super::tiny`] as the CPU plugin compiled them: the stand-in forwards them to that plugin.
pub fn programs() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = super::programs().join("standin");
        fs::create_dir_all(&folder).expect("a folder");
        super::tiny_entries(&[]).into_values().for_each(|entry| adopt(&entry, &folder));
        folder
    });
    folder.clone()
}

/// Writes a cache entry of the CPU plugin to a folder as the entry of the stand-in (`crates/runtime/src/cache.rs`).
fn adopt(entry: &Path, folder: &Path) {
    let sha256 =
        |parts: &[&[u8]]| hex::encode(parts.iter().fold(Sha256::new(), |sum, part| sum.chain_update(part)).finalize());
    let bytes = fs::read(entry).expect("an entry");
    let end = bytes.iter().position(|byte| *byte == b'\n').expect("a header");
    let mut header: Map<String, Value> = serde_json::from_slice(&bytes[..end]).expect("JSON");
    let payload = &bytes[end + 1..];
    let library = fs::read(library(false)).expect("the library");
    let version = header["plugin"].as_str().and_then(|plugin| plugin.split(", ").nth(1)).expect("a version");
    let name = self::library(false).file_name().expect("a name").to_string_lossy().into_owned();
    header["plugin"] = format!("{name}, {version}, {} bytes, {}", library.len(), &sha256(&[&library])[..16]).into();
    let identity = ["program", "options", "plugin", "platform", "device_kind", "devices"];
    let identity: Map<String, Value> = identity.map(|key| (key.to_string(), header[key].clone())).into_iter().collect();
    let path = folder.join(format!("{}.pjrt", sha256(&[Value::from(identity).to_string().as_bytes()])));
    header.shift_remove("sha256");
    let line = Value::from(header).to_string();
    let line = line.trim_end_matches('}');
    let checksum = sha256(&[line.as_bytes(), payload]);
    let mut file = tempfile::NamedTempFile::new_in(folder).expect("a file");
    file.write_all(&[format!("{line},\"sha256\":\"{checksum}\"}}\n").as_bytes(), payload].concat()).expect("written");
    file.persist(path).expect("renamed");
}

/// Links the entries of a compile cache into a new folder, except those of one program.
pub fn link_programs_except(program: &str, cache: &Path, folder: &Path) {
    fs::create_dir(folder).expect("a folder");
    let entries: Vec<PathBuf> = fs::read_dir(cache).expect("programs").map(|e| e.expect("an entry").path()).collect();
    let compiled = |entry: &&PathBuf| entry.extension().is_some_and(|end| end == "pjrt");
    let (left_out, linked): (Vec<_>, Vec<_>) =
        entries.iter().filter(compiled).partition(|entry| super::header(entry)["name"] == program);
    assert!(!left_out.is_empty(), "an entry of {program}");
    for entry in linked {
        // A run replaces entries by renaming, so hard links keep the entries of other runs.
        fs::hard_link(entry, folder.join(entry.file_name().expect("a name"))).expect("linked");
    }
}

/// Returns the fields of the function table with their slots.
fn table() -> Vec<(&'static str, usize)> {
    let fields = ABI.split("pub struct Api {").nth(1).and_then(|rest| rest.split("\n}").next()).expect("the table");
    // Long fields take two lines.
    let fields = fields.split("\n    pub ").filter_map(|field| field.split(',').next()?.split_once(':'));
    let mut place = 0;
    let functions = fields.skip_while(|(name, _)| *name != "error_destroy").map(|(name, kind)| {
        let many =
            kind.trim().strip_prefix("[Slot; ").map(|n| n.trim_end_matches(']').parse::<usize>().expect("a number"));
        place += many.unwrap_or(1);
        (name, place - many.unwrap_or(1))
    });
    functions.collect()
}

/// Argument struct: name, size and, for a call, its C name and slot; then the offsets of the fields.
type ArgStruct = (Vec<&'static str>, Vec<(&'static str, &'static str)>);

fn structs() -> Vec<ArgStruct> {
    let all = ABI.split("\nstructs! {").nth(1).and_then(|rest| rest.split("\n}").next()).expect("the structs");
    all.split("\n    }")
        .filter_map(|text| text.split_once(" {"))
        .map(|(head, fields)| {
            let field = |line: &'static str| {
                let (name, rest) = line.trim().split_once(": ")?;
                Some((name, rest.trim_end_matches(',').rsplit(" = ").next()?))
            };
            (head.split_whitespace().collect(), fields.lines().filter_map(field).collect())
        })
        .collect()
}

/// Returns the C names and table slots of the functions that the crate calls.
fn slots() -> &'static [(String, usize)] {
    static SLOTS: OnceLock<Vec<(String, usize)>> = OnceLock::new();
    SLOTS.get_or_init(|| {
        let table = table();
        let place = |field: &str| table.iter().find(|(name, _)| *name == field).expect("a slot").1;
        let named = |(head, _): &ArgStruct| match head[..] {
            [_, _, name, slot] => Some((name.trim_matches('"').to_string(), place(slot))),
            _ => None,
        };
        structs().iter().filter_map(named).collect()
    })
}

/// Returns the contents of `slots.h`.
fn header() -> String {
    let mut text = String::from("#define TABLE_HEAD 40\n#define TABLE_MAJOR 32\n");
    let (mut most, mut line) = (0, |l: String| writeln!(text, "{l}").expect("a string takes all"));
    for (name, place) in table() {
        line(format!("#define SLOT_{name} {place}"));
        most = most.max(place + 1);
    }
    line(format!("#define TABLE_SLOTS {most}"));
    for (head, fields) in structs() {
        line(format!("#define AT_{}_SIZE {}", head[0], head[1].trim_matches(['[', ']'])));
        fields.iter().for_each(|(name, offset)| line(format!("#define AT_{}_{name} {offset}", head[0])));
    }
    let all: String = slots().iter().map(|(name, place)| format!(" X({name}, {place})")).collect();
    line(format!("#define SLOTS(X){all}"));
    text
}

/// Compiles the library unless this source was compiled before; tests in several processes may do so at the same time.
fn library(without_entry: bool) -> PathBuf {
    let header = header();
    let mut hasher = DefaultHasher::new();
    (SOURCE, &header, without_entry).hash(&mut hasher);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("standin");
    // The file name marks it as a CPU plugin.
    let library = folder.join(format!("pjrt_standin_cpu_{:016x}.so", hasher.finish()));
    if library.exists() {
        return library;
    }
    fs::create_dir_all(&folder).expect("a folder");
    let work = tempfile::tempdir_in(&folder).expect("a folder");
    let path = |name: &str| work.path().join(name);
    fs::write(path("standin.c"), SOURCE).expect("written");
    fs::write(path("slots.h"), header).expect("written");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-shared", "-fPIC", "-pthread"]);
    cc.args(without_entry.then_some("-DNO_ENTRY")).arg(path("standin.c")).arg("-o").arg(path("it.so")).arg("-ldl");
    let made = cc.output().expect("a C compiler, which Rust needs too");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    fs::rename(path("it.so"), &library).expect("renamed");
    library
}
