//! Prometheus metrics of the server.
//!
//! Histogram buckets are fixed. Label values come from fixed sets; ids, prompts and sizes are never labels, because the
//! number of their values is unbounded.

mod observed;
mod process;

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

pub(crate) use observed::{ObservedDevice, ObservedState, ObservedStore};

use super::device::Figures;
use super::store::Usage;

/// Error codes of the rejected requests that `queue_rejected` counts.
const REJECTIONS: [&str; 4] = ["queue_full", "key_queue_full", "draining", "insufficient_storage"];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HttpLabels {
    route: &'static str,
    method: &'static str,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    route: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: String,
    pipeline: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PipelineLabel {
    pipeline: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabels {
    phase: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MemoryLabel {
    device: String,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProgramSource {
    source: &'static str,
}

type SecondsHistogram<L> = Family<L, Histogram, fn() -> Histogram>;

/// Returns a histogram with buckets from 1 ms to half a minute, for responses and state transitions.
fn short() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

/// Returns a histogram with buckets from 50 ms to four hours, for phases, runs and time in the queue.
fn long() -> Histogram {
    Histogram::new(exponential_buckets(0.05, 2.0, 19))
}

/// All metrics of the server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<HttpLabels, Counter>,
    request_seconds: SecondsHistogram<RouteLabels>,
    connections: Gauge,
    streams: Gauge,
    jobs: Family<StateLabel, Gauge>,
    jobs_ended: Family<OutcomeLabels, Counter>,
    queue_limit: Gauge,
    rejected: Family<ReasonLabels, Counter>,
    queue_seconds: Histogram,
    run_seconds: SecondsHistogram<PipelineLabel>,
    phase_seconds: SecondsHistogram<PhaseLabels>,
    step_seconds: Histogram,
    batch_videos: Histogram,
    overhead_seconds: Histogram,
    busy_seconds: Counter<f64, AtomicU64>,
    device_memory: Family<MemoryLabel, Gauge>,
    programs: Gauge,
    compiles: Family<ProgramSource, Counter>,
    compile_seconds: Histogram,
    lora_switch_seconds: Histogram,
    frames: Counter,
    video_seconds: Counter<f64, AtomicU64>,
    store_bytes: Gauge,
    store_free: Gauge,
    store_write_seconds: Histogram,
    store_errors: Counter,
    checkpoints: Counter,
    resumed: Counter,
    resident: Gauge,
    descriptors: Gauge,
    started: Gauge<f64, AtomicU64>,
    /// Number of open event streams.
    open_streams: AtomicI64,
}

/// Values that are measured when the metrics are read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MeasuredValues {
    pub(crate) connections: usize,
    pub(crate) usage: Usage,
}

impl Metrics {
    /// Creates the metrics of a server with the given platform, model and maximum queue length.
    pub(crate) fn new(platform: &str, model: &str, queue_limit: usize) -> Self {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("ltx2"),
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(short),
            connections: Gauge::default(),
            streams: Gauge::default(),
            jobs: Family::default(),
            jobs_ended: Family::default(),
            queue_limit: Gauge::default(),
            rejected: Family::default(),
            queue_seconds: long(),
            run_seconds: Family::new_with_constructor(long),
            phase_seconds: Family::new_with_constructor(long),
            step_seconds: short(),
            batch_videos: Histogram::new([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]),
            overhead_seconds: short(),
            busy_seconds: Counter::default(),
            device_memory: Family::default(),
            programs: Gauge::default(),
            compiles: Family::default(),
            compile_seconds: long(),
            lora_switch_seconds: long(),
            frames: Counter::default(),
            video_seconds: Counter::default(),
            store_bytes: Gauge::default(),
            store_free: Gauge::default(),
            store_write_seconds: short(),
            store_errors: Counter::default(),
            checkpoints: Counter::default(),
            resumed: Counter::default(),
            resident: Gauge::default(),
            descriptors: Gauge::default(),
            started: Gauge::default(),
            open_streams: AtomicI64::new(0),
        };
        metrics.queue_limit.set(i64::try_from(queue_limit).unwrap_or(i64::MAX));
        metrics.started.set(process::start_time());
        for reason in REJECTIONS {
            // Creating the series at startup makes its first increment visible to Prometheus.
            metrics.rejected.get_or_create_owned(&ReasonLabels { reason });
        }
        for source in ["compiled", "cache"] {
            metrics.compiles.get_or_create_owned(&ProgramSource { source });
        }
        metrics.register(platform, model);
        metrics
    }

    fn register(&mut self, platform: &str, model: &str) {
        let labels = [("version", env!("CARGO_PKG_VERSION")), ("platform", platform), ("model", model)];
        let build = Info::new(labels.map(|(name, value)| (name.to_string(), value.to_string())).to_vec());
        let mut registry = std::mem::take(&mut self.registry);
        let all = &mut registry;
        all.register("build", "Release, platform and model", build);
        all.register("http_requests", "Requests answered", self.requests.clone());
        all.register(
            "http_request_seconds",
            "Seconds from a request to its response headers",
            self.request_seconds.clone(),
        );
        all.register("http_connections", "Open connections", self.connections.clone());
        all.register("http_streams", "Open event streams", self.streams.clone());
        // OpenMetrics exports the counter `jobs` as `jobs_total`, so this gauge needs a different name.
        all.register("jobs_held", "Jobs by state", self.jobs.clone());
        all.register("jobs", "Finished jobs by outcome", self.jobs_ended.clone());
        all.register("queue_limit", "Maximum number of queued jobs", self.queue_limit.clone());
        all.register("queue_rejected", "Requests rejected for lack of capacity", self.rejected.clone());
        all.register("queue_seconds", "Seconds from acceptance of a job to its start", self.queue_seconds.clone());
        all.register("run_seconds", "Seconds that a batch ran on the device", self.run_seconds.clone());
        all.register("phase_seconds", "Duration of each phase of a batch in seconds", self.phase_seconds.clone());
        all.register("step_seconds", "Duration of a denoising step in seconds", self.step_seconds.clone());
        all.register("batch_videos", "Videos per batch", self.batch_videos.clone());
        all.register(
            "overhead_seconds",
            "Seconds that a job spent outside the queue, the device and encoding",
            self.overhead_seconds.clone(),
        );
        all.register("device_busy_seconds", "Seconds that the device ran jobs", self.busy_seconds.clone());
        all.register("device_memory_bytes", "Device memory in bytes, by kind", self.device_memory.clone());
        all.register("programs", "Programs loaded", self.programs.clone());
        all.register("compiles", "Programs compiled or loaded from the compile cache", self.compiles.clone());
        all.register("lora_switch_seconds", "Seconds to switch the merged LoRAs", self.lora_switch_seconds.clone());
        all.register("compile_seconds", "Seconds spent compiling for a batch", self.compile_seconds.clone());
        all.register("frames", "Frames generated", self.frames.clone());
        all.register("video_seconds", "Total duration of the generated videos in seconds", self.video_seconds.clone());
        all.register("store_bytes", "Disk space of jobs and input files in bytes", self.store_bytes.clone());
        all.register("store_free_bytes", "Free bytes of the store's disk", self.store_free.clone());
        all.register(
            "store_write_seconds",
            "Seconds to write a state transition to disk",
            self.store_write_seconds.clone(),
        );
        all.register("store_errors", "State transitions that failed", self.store_errors.clone());
        all.register("checkpoints", "Step checkpoints written", self.checkpoints.clone());
        all.register("resumed", "Batches resumed from a checkpoint", self.resumed.clone());
        all.register("process_resident_memory_bytes", "Resident memory", self.resident.clone());
        all.register("process_open_fds", "Open file descriptors", self.descriptors.clone());
        all.register(
            "process_start_time_seconds",
            "Start time of the process in seconds since 1970",
            self.started.clone(),
        );
        self.registry = registry;
    }

    /// Records a request that was answered.
    pub(crate) fn request(&self, route: &'static str, method: &'static str, status: u16, took: Duration) {
        self.requests.get_or_create(&HttpLabels { route, method, status }).inc();
        self.request_seconds.get_or_create(&RouteLabels { route }).observe(took.as_secs_f64());
    }

    /// Records a rejected request. Ignores error codes that are not in `REJECTIONS`.
    pub(crate) fn refused(&self, code: &str) {
        if let Some(reason) = REJECTIONS.into_iter().find(|reason| *reason == code) {
            self.rejected.get_or_create(&ReasonLabels { reason }).inc();
        }
    }

    /// Adds the measurements of the device.
    fn device(&self, figures: &Figures) {
        self.programs.set(i64::try_from(figures.programs).unwrap_or(i64::MAX));
        for (source, count) in [("compiled", figures.compiled), ("cache", figures.cached)] {
            self.compiles.get_or_create(&ProgramSource { source }).inc_by(count);
        }
        self.checkpoints.inc_by(figures.checkpoints);
        self.resumed.inc_by(figures.resumed);
        figures.lora_switches.iter().for_each(|took| self.lora_switch_seconds.observe(took.as_secs_f64()));
        for (device, kind, bytes) in &figures.memory {
            let label = MemoryLabel { device: device.clone(), kind };
            self.device_memory.get_or_create(&label).set(i64::try_from(*bytes).unwrap_or(i64::MAX));
        }
    }

    /// Adds `change` to the number of open event streams: 1 when one starts, -1 when one ends.
    pub(crate) fn stream(&self, change: i64) {
        self.open_streams.fetch_add(change, Ordering::Relaxed);
    }

    /// Returns all metrics in the OpenMetrics text format.
    pub(crate) fn text(&self, now: MeasuredValues) -> String {
        let whole = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.connections.set(whole(now.connections as u64));
        self.streams.set(self.open_streams.load(Ordering::Relaxed));
        self.store_bytes.set(whole(now.usage.bytes));
        self.store_free.set(whole(now.usage.free));
        process::resident_bytes().map(|bytes| self.resident.set(whole(bytes)));
        process::open_descriptors().map(|count| self.descriptors.set(whole(count)));
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_export_expected_series() {
        let metrics = Metrics::new("cpu", "nano", 64);
        metrics.request("/v1/videos", "POST", 429, Duration::from_millis(3));
        metrics.refused("queue_full");
        metrics.refused("invalid_size");
        metrics.stream(1);
        let (compiled, cached, checkpoints) = (2, 3, 4);
        let memory = vec![("0".to_string(), "peak", 5), ("1".to_string(), "in_use", 6)];
        let lora_switches = vec![Duration::from_secs(40)];
        metrics.device(&Figures { programs: 1, compiled, cached, checkpoints, resumed: 1, lora_switches, memory });
        metrics.device(&Figures { programs: 9, compiled, ..Figures::default() });
        let outcome = OutcomeLabels { outcome: "completed".into(), pipeline: "text_to_video".into() };
        metrics.jobs_ended.get_or_create(&outcome).inc();
        metrics.jobs.get_or_create(&StateLabel { state: "queued" }).set(8);
        let text = metrics.text(MeasuredValues { connections: 7, usage: Usage { bytes: 1, free: 2 } });
        for line in [
            "ltx2_http_requests_total{route=\"/v1/videos\",method=\"POST\",status=\"429\"} 1",
            "ltx2_http_request_seconds_count{route=\"/v1/videos\"} 1",
            "ltx2_queue_rejected_total{reason=\"queue_full\"} 1",
            "ltx2_queue_rejected_total{reason=\"draining\"} 0",
            "ltx2_programs 9",
            "ltx2_compiles_total{source=\"compiled\"} 4",
            "ltx2_compiles_total{source=\"cache\"} 3",
            "ltx2_checkpoints_total 4",
            "ltx2_lora_switch_seconds_sum 40.0",
            "ltx2_device_memory_bytes{device=\"0\",kind=\"peak\"} 5",
            "ltx2_device_memory_bytes{device=\"1\",kind=\"in_use\"} 6",
            "ltx2_jobs_total{outcome=\"completed\",pipeline=\"text_to_video\"} 1",
            "ltx2_jobs_held{state=\"queued\"} 8",
            "ltx2_http_connections 7",
            "ltx2_http_streams 1",
            "ltx2_queue_limit 64",
            "ltx2_store_free_bytes 2",
            "platform=\"cpu\",model=\"nano\"",
        ] {
            assert!(text.contains(line), "{line}:\n{text}");
        }
        assert!(!text.contains("invalid_size"));
        // Two metric families with the same name would be invalid OpenMetrics.
        let mut families: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE ")).collect();
        let names: std::collections::BTreeSet<&str> =
            families.iter().filter_map(|line| line.split(' ').nth(2)).collect();
        families.dedup();
        assert_eq!(families.len(), names.len(), "{text}");
        assert!(text.contains("ltx2_process_resident_memory_bytes") && !text.contains("open_fds 0\n"), "{text}");
    }
}
