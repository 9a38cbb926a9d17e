//! Summarizes a trace: device time by category and name scope, and how much communication overlaps with other work.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::category::{OpCategory, Purpose, of_category, of_name};
use super::collective::trim;
use super::intervals::Intervals;
use super::module::Module;
use super::xplane::{XEvent, XLine, XPlane, XSpace};

/// Summary of a trace. Times are in milliseconds, averaged over all devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trace {
    /// Number of denoising steps in the trace; `None` if unknown.
    pub steps: Option<usize>,
    /// Time from the start of the first operation to the end of the last.
    pub window_ms: f64,
    /// Time in which at least one operation ran.
    pub busy_ms: f64,
    /// Part of `window_ms` in which no operation ran.
    pub idle_ms: f64,
    /// `idle_ms` as a fraction of `window_ms`.
    pub idle_share: f64,
    /// Time by category, in the order of [`OpCategory`].
    #[serde(rename = "activities")]
    pub categories: Vec<CategoryTime>,
    /// Time by name scope, longest first.
    pub scopes: Vec<ScopeTime>,
    /// Fraction of the operations' time that belongs to operations without a name scope.
    pub without_scope: f64,
    /// Times of each device.
    pub devices: Vec<DeviceTime>,
    /// Operations of all devices, longest first.
    pub operations: Vec<Operation>,
    /// Errors and warnings of the profiler, and messages about HLO modules that cannot be decoded.
    pub warnings: Vec<String>,
}

/// Time of the operations of one category.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CategoryTime {
    /// Category of the operations.
    #[serde(rename = "activity")]
    pub category: OpCategory,
    /// Sum over the operations of the category. Operations that run at the same time each count in full.
    pub ms: f64,
    /// Fraction of the trace's `window_ms`. While operations of several categories run, the time counts only for the
    /// category that is first in [`OpCategory`], so that all shares and the idle share add up to 1. Transfers
    /// (collectives and copies from host memory) are last, so their share contains only time that other work does not
    /// hide.
    pub share: f64,
    /// For a transfer, the time in which no work other than transfers ran on the device.
    pub exposed_ms: Option<f64>,
    /// For a transfer, the time in which other work ran on the same device.
    pub overlapped_ms: Option<f64>,
}

/// Time of the operations of one name scope.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScopeTime {
    /// Name scope; empty for operations that have none.
    pub scope: String,
    /// Sum over the operations, in milliseconds. Operations that run at the same time each count in full.
    pub ms: f64,
    /// `ms` as a fraction of the trace's `window_ms`.
    pub share: f64,
    /// Milliseconds by category; they add up to `ms`.
    #[serde(rename = "activities")]
    pub categories: BTreeMap<OpCategory, f64>,
}

/// Times of one device, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceTime {
    /// Name of the device's plane in the trace, such as `/device:GPU:0`.
    pub device: String,
    /// Time from the start of the first operation to the end of the last.
    pub window_ms: f64,
    /// Time in which at least one operation ran.
    pub busy_ms: f64,
    /// Part of `window_ms` in which no operation ran.
    pub idle_ms: f64,
    /// Time by category, in the order of [`OpCategory`].
    #[serde(rename = "activities")]
    pub categories: Vec<CategoryTime>,
}

/// An instruction or a kernel, with sums over all devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Operation {
    /// Name of the instruction. If the trace does not have it, the name of the kernel.
    pub name: String,
    /// Category of the operation.
    #[serde(rename = "activity")]
    pub category: OpCategory,
    /// Name scope; empty if unknown.
    pub scope: String,
    /// Number of times that the operation ran.
    pub count: u64,
    /// Time in milliseconds, without the time of operations nested in this one.
    pub ms: f64,
}

/// Number of picoseconds in a millisecond.
const MS: f64 = 1e9;

/// Maximum distance of an event from the start of the first line, in picoseconds (2.5 hours). More distant events are
/// ignored.
const LONGEST: i64 = 1 << 53;

/// Category and scope of an operation, and the sums over its events so far.
struct OperationTotals {
    purpose: Purpose,
    count: u64,
    ps: i64,
}

/// A span of time in which an operation runs but no operation nested in it does.
struct Slice {
    operation: usize,
    span: (i64, i64),
}

impl Trace {
    /// Summarizes a trace. Categories and name scopes come from the HLO modules in the trace.
    ///
    /// # Errors
    /// Returns an error if the trace contains no device operations.
    pub fn from_space(space: &XSpace, steps: Option<usize>) -> Result<Trace, String> {
        let mut reader = TraceReader::new(space);
        let planes: Vec<&XPlane> = space.planes.iter().filter(|p| is_device(&p.name)).collect();
        // Timestamps are large, so count from the start of the first line.
        let starts = planes.iter().flat_map(|plane| lines(plane)).map(|(line, _)| line.timestamp_ns);
        let origin = starts.min().unwrap_or(0);
        let mut devices = Vec::new();
        for plane in planes {
            let mut pieces = Vec::new();
            for (line, background) in lines(plane) {
                reader.line(plane, line, origin, background, &mut pieces);
            }
            devices.extend(reader.device(&plane.name, &pieces));
        }
        if devices.is_empty() {
            let said: Vec<&str> = space.errors.iter().chain(&space.warnings).map(String::as_str).collect();
            let said = if said.is_empty() { String::new() } else { format!("; profiler: {}", said.join("; ")) };
            return Err(format!("the trace contains no device operations{said}"));
        }
        let warnings = [&space.errors[..], &space.warnings[..], &reader.unread[..]].concat();
        Ok(reader.summary(devices, steps, warnings))
    }
}

/// Returns whether a plane belongs to a device. Planes of the host, and of TPU units other than the core, do not.
fn is_device(name: &str) -> bool {
    name.starts_with("/device:") && !name.contains(' ') && !name.contains("CUSTOM")
}

/// Returns the lines that contain operations: the streams of a GPU, or the operations and asynchronous operations of a
/// TPU. The flag is true for asynchronous operations.
fn lines(plane: &XPlane) -> Vec<(&XLine, bool)> {
    let streams: Vec<_> = plane.lines.iter().filter(|l| l.name.starts_with("Stream")).map(|l| (l, false)).collect();
    if !streams.is_empty() {
        return streams;
    }
    let of_tpu = |line: &'_ XLine| match line.name.as_str() {
        "XLA Ops" => Some(false),
        "Async XLA Ops" => Some(true),
        _ => None,
    };
    plane.lines.iter().filter_map(|line| Some((line, of_tpu(line)?))).collect()
}

/// Collector of a trace's operations from its events.
struct TraceReader {
    /// Category and scope of each instruction, by module name and instruction name.
    programs: HashMap<String, HashMap<String, Purpose>>,
    unread: Vec<String>,
    numbers: HashMap<(String, String), usize>,
    operations: Vec<(String, OperationTotals)>,
}

impl TraceReader {
    fn new(space: &XSpace) -> Self {
        let (mut programs, mut unread) = (HashMap::new(), Vec::new());
        for bytes in space.programs() {
            match Module::decode("hlo_with_config", bytes) {
                Ok(m) => drop(programs.insert(m.name().to_string(), m.purposes())),
                Err(e) => unread.push(format!("cannot decode an HLO module in the trace: {e}")),
            }
        }
        TraceReader { programs, unread, numbers: HashMap::new(), operations: Vec::new() }
    }

    /// Adds the time of each event of a line, without the time of events that are nested in it.
    fn line(&mut self, plane: &XPlane, line: &XLine, origin: i64, background: bool, pieces: &mut Vec<Slice>) {
        let start = line.timestamp_ns.saturating_sub(origin).saturating_mul(1000);
        let mut spans: Vec<(i64, i64, usize)> = Vec::new();
        for event in line.events.iter().filter(|event| event.duration_ps > 0) {
            let from = start.saturating_add(event.offset_ps);
            let to = from.saturating_add(event.duration_ps);
            if from < -LONGEST || to > LONGEST {
                continue;
            }
            let operation = self.operation(plane, event);
            let known = &mut self.operations[operation].1;
            // On a TPU, prefetch copies run in the background all the time, so they are ignored.
            if background && !known.purpose.category.is_transfer() {
                continue;
            }
            known.count += 1;
            spans.push((from, to, operation));
        }
        spans.sort_unstable_by_key(|(from, to, _)| (*from, -to));
        let mut open: Vec<(i64, usize)> = Vec::new();
        let mut at = i64::MIN;
        let mut take = |operation: usize, span: (i64, i64)| {
            if span.0 < span.1 {
                pieces.push(Slice { operation, span });
            }
        };
        for (from, to, operation) in spans {
            while let Some((end, of)) = open.pop_if(|(end, _)| *end <= from) {
                take(of, (at, end));
                at = at.max(end);
            }
            if let Some((_, of)) = open.last() {
                take(*of, (at, from));
            }
            at = at.max(from);
            open.push((to, operation));
        }
        while let Some((end, of)) = open.pop() {
            take(of, (at, end));
            at = at.max(end);
        }
    }

    /// Returns the index of an event's operation. Adds the operation if it is new.
    fn operation(&mut self, plane: &XPlane, event: &XEvent) -> usize {
        let kernel = plane.name_of(event);
        let program = plane.fact(event, "hlo_module").unwrap_or_default();
        let path = plane.fact(event, "hlo_op").filter(|op| !op.is_empty());
        let name = path.map_or_else(|| kernel.clone(), |path| self.innermost(&program, &path));
        let key = (program, name);
        if let Some(number) = self.numbers.get(&key) {
            return *number;
        }
        let purpose = self.purpose(&key.0, &key.1).unwrap_or_else(|| {
            let category = plane.fact(event, "hlo_category").and_then(|category| of_category(&category));
            let category = category.unwrap_or_else(|| match of_name(&kernel) {
                OpCategory::Other => of_name(&key.1),
                known => known,
            });
            Purpose { category, scope: plane.fact(event, "tf_op").map(|op| trim(&op)).unwrap_or_default() }
        });
        let number = self.operations.len();
        self.operations.push((key.1.clone(), OperationTotals { purpose, count: 0, ps: 0 }));
        self.numbers.insert(key, number);
        number
    }

    /// Returns the instruction to which a kernel belongs. `path` lists nested instructions in either order, for example
    /// `while.3/fusion.5`.
    fn innermost(&self, program: &str, path: &str) -> String {
        let works = |name: &&str| self.purpose(program, name).is_some_and(|p| p.category != OpCategory::Other);
        let found = path.rsplit('/').find(works).or_else(|| path.rsplit('/').next());
        found.unwrap_or_default().to_string()
    }

    /// Returns the category and the scope of an instruction. If the program is unknown, returns those from the first
    /// module that has the instruction.
    fn purpose(&self, program: &str, name: &str) -> Option<Purpose> {
        // Some profilers append the program id to the name: `denoise(42)`.
        let bare = program.split('(').next().unwrap_or_default();
        match self.programs.get(program).or_else(|| self.programs.get(bare)) {
            Some(known) => known.get(name).cloned(),
            None => self.programs.values().find_map(|known| known.get(name)).cloned(),
        }
    }

    /// Returns the times of a device, and adds its slices to the times of the operations. `None`: no operation ran on
    /// the device.
    fn device(&mut self, name: &str, pieces: &[Slice]) -> Option<DeviceTime> {
        let mut spans: BTreeMap<OpCategory, Vec<(i64, i64)>> = BTreeMap::new();
        let mut sums: BTreeMap<OpCategory, i64> = BTreeMap::new();
        for Slice { operation, span } in pieces {
            let known = &mut self.operations[*operation].1;
            known.ps = known.ps.saturating_add(span.1 - span.0);
            let category = known.purpose.category;
            spans.entry(category).or_default().push(*span);
            let sum = sums.entry(category).or_default();
            *sum = sum.saturating_add(span.1 - span.0);
        }
        let busy: BTreeMap<OpCategory, Intervals> = spans.into_iter().map(|(a, s)| (a, Intervals::union(s))).collect();
        let work = busy.iter().filter(|(a, _)| !a.is_transfer()).fold(Intervals::default(), |all, (_, i)| all.or(i));
        let all = busy.values().fold(Intervals::default(), |all, i| all.or(i));
        let (start, end) = all.hull()?;
        let window = (end - start) as f64;
        let mut taken = Intervals::default();
        let mut categories = Vec::new();
        // Categories are in order: transfers come last and get only their exposed time.
        for (category, time) in &busy {
            let own = time.without(&taken).length() as f64;
            taken = taken.or(time);
            let ps = sums.get(category).copied().unwrap_or_default();
            let overlapped = category.is_transfer().then(|| time.and(&work).length());
            categories.push(CategoryTime {
                category: *category,
                ms: ps as f64 / MS,
                share: own / window,
                exposed_ms: overlapped.map(|ps| (time.length() - ps) as f64 / MS),
                overlapped_ms: overlapped.map(|ps| ps as f64 / MS),
            });
        }
        let (window_ms, busy_ms) = (window / MS, all.length() as f64 / MS);
        Some(DeviceTime { device: name.into(), window_ms, busy_ms, idle_ms: window_ms - busy_ms, categories })
    }

    fn summary(self, devices: Vec<DeviceTime>, steps: Option<usize>, warnings: Vec<String>) -> Trace {
        let n = devices.len() as f64;
        let mean = |of: &dyn Fn(&DeviceTime) -> f64| devices.iter().map(of).sum::<f64>() / n;
        let (window_ms, busy_ms) = (mean(&|d| d.window_ms), mean(&|d| d.busy_ms));
        let mut operations: Vec<Operation> = self
            .operations
            .into_iter()
            .filter(|(_, known)| known.ps > 0)
            .map(|(name, OperationTotals { purpose: Purpose { category, scope }, count, ps })| Operation {
                name,
                category,
                scope,
                count,
                ms: ps as f64 / MS,
            })
            .collect();
        operations.sort_by(|a, b| b.ms.total_cmp(&a.ms).then_with(|| a.name.cmp(&b.name)));
        let mut scopes: BTreeMap<String, ScopeTime> = BTreeMap::new();
        for o in &operations {
            let empty = || ScopeTime { scope: o.scope.clone(), ms: 0.0, share: 0.0, categories: BTreeMap::new() };
            let entry = scopes.entry(o.scope.clone()).or_insert_with(empty);
            entry.ms += o.ms / n;
            *entry.categories.entry(o.category).or_default() += o.ms / n;
        }
        let all: f64 = scopes.values().map(|s| s.ms).sum();
        let unnamed = scopes.get("").map_or(0.0, |s| s.ms);
        let mut scopes: Vec<ScopeTime> =
            scopes.into_values().map(|s| ScopeTime { share: s.ms / window_ms, ..s }).collect();
        scopes.sort_by(|a, b| b.ms.total_cmp(&a.ms).then_with(|| a.scope.cmp(&b.scope)));
        let idle_ms = window_ms - busy_ms;
        Trace {
            steps,
            window_ms,
            busy_ms,
            idle_ms,
            idle_share: idle_ms / window_ms,
            categories: together(&devices, window_ms),
            scopes,
            without_scope: if all > 0.0 { unnamed / all } else { 0.0 },
            devices,
            operations,
            warnings,
        }
    }
}

/// Combines the categories of all devices: times are means, and shares are fractions of the mean window.
fn together(devices: &[DeviceTime], window_ms: f64) -> Vec<CategoryTime> {
    let n = devices.len() as f64;
    let mut all: BTreeMap<OpCategory, CategoryTime> = BTreeMap::new();
    for device in devices {
        for s in &device.categories {
            let zero = s.category.is_transfer().then_some(0.0);
            let empty =
                || CategoryTime { category: s.category, ms: 0.0, share: 0.0, exposed_ms: zero, overlapped_ms: zero };
            let sum = all.entry(s.category).or_insert_with(empty);
            sum.ms += s.ms / n;
            sum.share += s.share * device.window_ms / (n * window_ms);
            let add = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a + b / n);
            sum.exposed_ms = add(sum.exposed_ms, s.exposed_ms);
            sum.overlapped_ms = add(sum.overlapped_ms, s.overlapped_ms);
        }
    }
    all.into_values().collect()
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::super::xplane::{XEventMetadata, XStat, XStatMetadata, XValue};
    use super::*;
    use crate::CollectiveKind;

    /// Creates a line. An event is `(name id, start, length)`, in microseconds.
    fn line(name: &str, at_ns: i64, events: &[(i64, i64, i64)]) -> XLine {
        let event = |&(metadata_id, start, length): &(i64, i64, i64)| XEvent {
            metadata_id,
            offset_ps: start * 1_000_000,
            duration_ps: length * 1_000_000,
            stats: vec![XStat { metadata_id: 1, value: Some(XValue::Name(100 + metadata_id as u64)) }],
        };
        XLine { name: name.into(), timestamp_ns: at_ns, events: events.iter().map(event).collect(), ..XLine::default() }
    }

    fn plane(name: &str, names: &[&str], lines: Vec<XLine>) -> XPlane {
        let mut stat_metadata = BTreeMap::from([(1, XStatMetadata { id: 1, name: "hlo_op".into() })]);
        let mut event_metadata = BTreeMap::new();
        for (id, name) in (1..).zip(names) {
            event_metadata.insert(id, XEventMetadata { id, name: name.as_bytes().to_vec(), ..Default::default() });
            stat_metadata.insert(100 + id, XStatMetadata { id: 100 + id, name: (*name).into() });
        }
        XPlane { name: name.into(), lines, event_metadata, stat_metadata }
    }

    #[test]
    fn overlap_is_measured_across_streams() {
        let names = ["gemm_1", "loop_add_fusion", "all-gather-start"];
        // Timestamps are far from zero, as on real hosts.
        let epoch = 1_790_000_000_000_000_000;
        let compute = line("Stream #13(Compute)", epoch, &[(1, 0, 40), (2, 40, 10), (1, 80, 20)]);
        let collective = line("Stream #14(Compute)", epoch, &[(3, 30, 40)]);
        let idle = plane("/device:GPU:1", &names, Vec::new());
        let other = plane("/host:CPU", &names, vec![line("Stream", epoch, &[(1, 0, 500)])]);
        let space = XSpace {
            planes: vec![plane("/device:GPU:0", &names, vec![compute, collective]), idle, other],
            ..XSpace::default()
        };
        let trace = Trace::from_space(&space, Some(2)).unwrap();
        assert_eq!(trace.devices.len(), 1, "a device without operations is left out");
        // Work runs from 0 to 50 and from 80 to 100, the collective from 30 to 70. The device is idle from 70 to 80.
        assert_eq!([trace.window_ms, trace.busy_ms], [0.1, 0.09]);
        assert!((trace.idle_share - 0.1).abs() < 1e-12);
        let percent = |share: f64| (share * 100.0).round() as i64;
        let found: Vec<_> = trace.categories.iter().map(|s| (s.category.name(), s.ms, percent(s.share))).collect();
        assert_eq!(found, [("matmul", 0.06, 60), ("elementwise", 0.01, 10), ("all-gather", 0.04, 20)]);
        let gather = &trace.categories[2];
        assert_eq!(gather.category, OpCategory::Collective(CollectiveKind::AllGather));
        assert_eq!((gather.overlapped_ms, gather.exposed_ms), (Some(0.02), Some(0.02)));
    }

    #[test]
    fn copies_from_host_memory_are_exposed_while_no_kernel_runs() {
        let names = ["gemm_1", "MemcpyH2D", "MemcpyD2H"];
        let compute = line("Stream #13(Compute)", 0, &[(1, 0, 40), (3, 40, 10), (1, 80, 20)]);
        let copies = line("Stream #15(MemcpyH2D)", 0, &[(2, 10, 60)]);
        let space = XSpace { planes: vec![plane("/device:GPU:0", &names, vec![compute, copies])], ..XSpace::default() };
        let trace = Trace::from_space(&space, None).unwrap();
        let found: Vec<_> =
            trace.categories.iter().map(|c| (c.category.name(), c.ms, c.overlapped_ms, c.exposed_ms)).collect();
        let want =
            [("matmul", 0.06, None, None), ("copy", 0.01, None, None), ("host-copy", 0.06, Some(0.04), Some(0.02))];
        assert_eq!(found, want);
    }

    #[test]
    fn loop_time_excludes_its_body() {
        let names = ["while.1", "fusion.2", "copy.3"];
        let ops = line("XLA Ops", 0, &[(1, 0, 100), (2, 10, 30), (3, 50, 20), (2, 70, 30)]);
        let background = line("Async XLA Ops", 0, &[(3, 0, 90)]);
        let modules = line("XLA Modules", 0, &[(1, 0, 1000)]);
        let space = XSpace {
            planes: vec![plane("/device:TPU:0", &names, vec![ops, background, modules])],
            ..XSpace::default()
        };
        let trace = Trace::from_space(&space, None).unwrap();
        let of = |name: &str| trace.operations.iter().find(|o| o.name == name).map(|o| (o.ms, o.count)).unwrap();
        assert_eq!(of("fusion.2"), (0.06, 2));
        assert_eq!(of("copy.3"), (0.02, 1), "asynchronous copies do not count as core time");
        assert_eq!(of("while.1"), (0.02, 1));
        assert_eq!(trace.window_ms, 0.1);
    }

    #[test]
    fn trace_without_devices_reports_profiler_errors() {
        let space = XSpace { errors: vec!["CUPTI could not be loaded".into()], ..XSpace::default() };
        let space = XSpace::read(&space.encode_to_vec()).unwrap();
        let error = Trace::from_space(&space, None).unwrap_err();
        assert_eq!(error, "the trace contains no device operations; profiler: CUPTI could not be loaded");
    }
}
