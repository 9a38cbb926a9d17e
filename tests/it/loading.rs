//! Loading of parameters.

use std::fs::{self, File};
use std::panic::catch_unwind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use ltx2::hlo::{DType, Type};
use ltx2::models::{Network, transformer};
use ltx2::nn::{Axis, Build, Lowering, Params, Quantization, linear};
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::plan::run_plan::RunPlan;
use ltx2::pjrt::SharedBytes;
use ltx2::runtime::{Engine, FileTensor, LoadLimits, LoadedParameters, ParameterSource, QuantizedTensor, StoredTensor};
use ltx2::weights::quantize::{QuantizedForm, quantize};
use ltx2::{Config, Session};

use crate::quantized::build;
use crate::support::passes::scattered;
use crate::support::{cpu, needs, quick};

/// Returns a short run's configuration for a writable copy of a model.
fn copied(model: &Path) -> Config {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/tiny_a");
    for folder in fs::read_dir(from).expect("the fixture").map(|entry| entry.expect("an entry").path()) {
        let to = model.join(folder.file_name().expect("a name"));
        if folder.is_file() {
            fs::copy(&folder, to).expect("copied");
            continue;
        }
        fs::create_dir_all(&to).expect("made");
        for file in fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            fs::copy(&file, to.join(file.file_name().expect("a name"))).expect("copied");
        }
    }
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny.yml");
    let keys = [
        format!("model.path={}", model.display()),
        format!("runtime.compile_cache={}", crate::support::programs().display()),
    ];
    Config::load(file, keys).expect("a configuration")
}

fn weights(model: &Path, component: &str) -> std::path::PathBuf {
    let folder = fs::read_dir(model.join(component)).expect("a component").map(|entry| entry.expect("an entry").path());
    folder.into_iter().find(|file| file.extension().is_some_and(|e| e == "safetensors")).expect("weights")
}

/// The loading thread reports its error, whether the truncated tensor is needed first or last.
#[needs(cpu)]
fn file_truncated_after_the_size_check_gives_an_error() {
    for component in ["text_encoder", "vae"] {
        let folder = tempfile::tempdir().expect("a folder");
        let config = copied(folder.path());
        let model = OpenModel::from_config(&config).expect("a model");
        let mut session =
            Session::start(RunPlan::of_model(&config, &model).expect("a plan"), model, None).expect("starts");
        let file = weights(folder.path(), component);
        let size = fs::metadata(&file).expect("a file").len();
        File::options().write(true).open(&file).expect("opens").set_len(size / 2).expect("cut");
        let requests = session.requests().expect("a request");
        let ran = session.fit_memory(None).and_then(|()| session.generate(&requests[0]).map(drop));
        let said = ran.expect_err("half a file").to_string();
        let expected = format!("it had {size} bytes, now {}", size / 2);
        assert!(said.contains(&file.display().to_string()) && said.contains(&expected), "{component}: {said}");
    }
}

/// Weights of 256 x 256 values that are stored as f32 or quantized; counts what is read.
#[derive(Default)]
struct CountingSource {
    /// `None`: f32.
    form: Option<QuantizedForm>,
    /// Whether f32 weights can be read piece by piece.
    in_pieces: bool,
    /// Weight whose reads panic.
    panics: Option<&'static str>,
    /// Number of weights that were read as a whole.
    wholes: AtomicUsize,
    /// Current and largest number of bytes of weights that were read as a whole.
    memory: Arc<[AtomicUsize; 2]>,
    /// Number of bytes that were read piece by piece.
    bytes: Arc<AtomicUsize>,
}

fn values(key: &str) -> Vec<u8> {
    scattered(key, &[256, 256]).bytes().into_owned()
}

/// A weight in host memory, with the current and the largest number of bytes of all weights.
struct CountedBytes(Vec<u8>, Arc<[AtomicUsize; 2]>);

impl CountedBytes {
    fn new(bytes: Vec<u8>, memory: &Arc<[AtomicUsize; 2]>) -> Self {
        let [now, peak] = &**memory;
        peak.fetch_max(now.fetch_add(bytes.len(), Ordering::SeqCst) + bytes.len(), Ordering::SeqCst);
        CountedBytes(bytes, memory.clone())
    }
}

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.1[0].fetch_sub(self.0.len(), Ordering::SeqCst);
    }
}

impl CountingSource {
    /// Returns a tensor in a file of `stored` bytes.
    fn tensor_in_file(&self, dtype: DType, stored: Vec<u8>) -> FileTensor {
        let bytes = self.bytes.clone();
        let read = move |offset: usize, into: &mut [u8]| {
            bytes.fetch_add(into.len(), Ordering::Relaxed);
            into.copy_from_slice(&stored[offset..][..into.len()]);
            Ok(())
        };
        FileTensor { dtype, shape: vec![256, 256], read: Box::new(read) }
    }
}

impl ParameterSource for CountingSource {
    fn in_file(&self, part: &'static str, key: &str, dtype: DType) -> Result<Option<FileTensor>, String> {
        if self.in_pieces && dtype == DType::BF16 {
            let values = scattered(key, &[256, 256]).cast(dtype).expect("bf16");
            return Ok(Some(self.tensor_in_file(dtype, values.bytes().into_owned())));
        }
        if self.in_pieces {
            let mut weight = self.tensor_in_file(DType::F32, values(key));
            if self.panics == Some(key) {
                weight.read = Box::new(|_, _| panic!("the file cannot be read"));
            }
            return Ok(Some(weight));
        }
        let form = self.form.filter(|form| form.dtype() == dtype);
        Ok(form.map_or(Ok(None), |form| self.quantized(part, key, form))?.map(|weight| weight.codes))
    }

    fn quantized(&self, _: &'static str, key: &str, form: QuantizedForm) -> Result<Option<QuantizedTensor>, String> {
        if self.form != Some(form) {
            return Ok(None);
        }
        let stored = quantize(form, DType::F32, 256, &values(key));
        let codes = self.tensor_in_file(form.dtype(), stored.codes);
        let scales = stored.scales;
        Ok(Some(QuantizedTensor { codes, scales: Box::new(move || Ok(scales.clone())) }))
    }

    fn tensor(&self, _: &'static str, key: &str) -> Result<StoredTensor, String> {
        self.wholes.fetch_add(1, Ordering::Relaxed);
        let (dtype, shape) = (DType::F32, vec![256, 256]);
        let bytes = SharedBytes::new(Arc::new(CountedBytes::new(values(key), &self.memory)));
        // Other readers start their conversions meanwhile.
        thread::sleep(Duration::from_millis(2));
        Ok(StoredTensor { dtype, shape, bytes, scales: None, file: "weights".into(), key: key.into() })
    }
}

/// Loads `layers` weights of the form `form` (`None`: bf16), stacked or one by one.
fn loaded(
    layers: usize,
    form: Option<QuantizedForm>,
    stacked: bool,
    engine: &Engine,
    source: &CountingSource,
) -> LoadedParameters {
    let quantization = match form {
        None => Quantization::None,
        Some(QuantizedForm::Fp8) => Quantization::Fp8,
        Some(form) => Quantization::Int8 { activations: false, rotated: form == QuantizedForm::Int8Convrot },
    };
    let build = build(DType::BF16, quantization);
    let lowering = Lowering { unroll_layers: !stacked, ..build.lowering };
    let p = Params::new("layers", transformer::COMPONENT, &Build { lowering, ..build });
    let axes = [Axis::CfgBatch, Axis::VideoSequence, Axis::Replicated];
    let x = p.input("x", Type::new(DType::BF16, [1, 8, 256]), &axes);
    let layer = |p: &Params, x: &[_]| vec![linear(&p.pp("to_q"), &x[0], 256, false, [Axis::Replicated; 2])];
    let y = p.each_layer_quantized("blocks", layers, |_| true, &[x], |p, _, x| layer(p, x));
    let network = Network::finish(&p, vec![p.output("y", &y[0], &axes, y[0].dims())]).expect("builds");
    let mut loaded = LoadedParameters::default();
    loaded.load(engine, &network.program, &network.params, source, &|_| true).expect("loads");
    loaded
}

/// Loads weights as [`loaded`] does, and compares them with those of [`values`].
fn load(layers: usize, form: QuantizedForm, stacked: bool, engine: &Engine, source: &CountingSource) {
    let loaded = loaded(layers, Some(form), stacked, engine, source);
    let read = |name: String| loaded.get(&name).expect("loaded").download().expect("floats");
    for places in Vec::from_iter(0..layers).chunks(if stacked { layers } else { 1 }) {
        let name = if stacked { "*".into() } else { places[0].to_string() };
        let name = format!("transformer.blocks.{name}.to_q.weight");
        let want =
            places.iter().map(|layer| quantize(form, DType::F32, 256, &values(&format!("blocks.{layer}.to_q.weight"))));
        let (codes, scales): (Vec<_>, Vec<_>) = want.map(|weight| (weight.codes, weight.scales)).unzip();
        assert_eq!(*read(format!("{name}_scale")).to_f32().as_slice().expect("dense"), scales.concat(), "{name}");
        let stored = loaded.get(&name).expect("loaded").buffers()[0].to_host().expect("downloads");
        assert!(stored == codes.concat(), "{name}");
    }
}

/// Codes and scales come from the same conversion.
#[needs(cpu)]
fn weights_that_are_quantized_at_load_are_read_once() {
    let (layers, source) = (64, CountingSource::default());
    let engine = Engine::new(cpu(1), quick());
    load(layers, QuantizedForm::Int8Convrot, false, &engine, &source);
    assert_eq!(source.wholes.into_inner(), layers);
}

/// A conversion to int8 reserves 6 bytes per value, so the limit allows two at a time.
#[needs(cpu)]
fn weights_in_host_memory_stay_within_the_limit() {
    for (conversions, is_limited) in [(2 * 6 * 256 * 256, true), (usize::MAX, false)] {
        let limits = LoadLimits { conversions, readers: 4, ..LoadLimits::default() };
        let (engine, source) = (Engine::new(cpu(1), quick()).with_load_limits(limits), CountingSource::default());
        load(64, QuantizedForm::Int8, false, &engine, &source);
        let [now, peak] = [0, 1].map(|i| source.memory[i].load(Ordering::SeqCst));
        assert_eq!((now, peak <= 2 * 4 * 256 * 256), (0, is_limited), "{peak}");
    }
}

/// Weights of less than 1 MiB are uploaded in one copy, as tiled weights are.
#[needs(cpu)]
fn weights_that_are_uploaded_in_one_copy_are_converted_as_they_are_read() {
    let engine = Engine::new(cpu(1), quick());
    let source = CountingSource { in_pieces: true, ..CountingSource::default() };
    let loaded = loaded(4, None, false, &engine, &source);
    let read = (source.wholes.into_inner(), source.bytes.load(Ordering::Relaxed));
    assert_eq!(read, (0, 4 * 2 * 256 * 256));
    let weight = loaded.get("transformer.blocks.3.to_q.weight").expect("loaded").download().expect("floats");
    assert_eq!(weight, scattered("blocks.3.to_q.weight", &[256, 256]).cast(DType::BF16).expect("bf16"));
}

#[needs(cpu)]
fn weights_that_are_quantized_in_several_jobs_equal_unsplit_weights() {
    // Half a piece has 100 rows of f32 values, so a weight takes three jobs.
    let limits = LoadLimits { piece: 2 * 100 * 4 * 256, readers: 2, ..LoadLimits::default() };
    let engine = Engine::new(cpu(1), quick()).with_load_limits(limits);
    for form in QuantizedForm::ALL {
        for layers in [2, 7] {
            let source = CountingSource { in_pieces: true, ..CountingSource::default() };
            load(layers, form, true, &engine, &source);
            let read = (source.wholes.into_inner(), source.bytes.load(Ordering::Relaxed));
            assert_eq!(read, (0, layers * 4 * 256 * 256), "{form:?}");
        }
    }
}

/// The scales of the weight will never be known.
#[needs(cpu)]
fn panic_of_a_reader_ends_the_load() {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let ended = catch_unwind(|| {
            let limits = LoadLimits { readers: 2, ..LoadLimits::default() };
            let engine = Engine::new(cpu(1), quick()).with_load_limits(limits);
            let panics = Some("blocks.1.to_q.weight");
            let source = CountingSource { in_pieces: true, panics, ..CountingSource::default() };
            load(4, QuantizedForm::Int8, true, &engine, &source);
        });
        sender.send(ended.is_err()).expect("the test waits");
    });
    assert!(receiver.recv_timeout(Duration::from_secs(60)).expect("the load does not end"), "the load succeeds");
}

#[needs(cpu)]
fn codes_are_read_once_and_scales_are_read_separately() {
    let engine = Engine::new(cpu(1), quick());
    for form in [QuantizedForm::Fp8, QuantizedForm::Int8Convrot] {
        let source = CountingSource { form: Some(form), ..CountingSource::default() };
        load(4, form, false, &engine, &source);
        let read = (source.wholes.into_inner(), source.bytes.load(Ordering::Relaxed));
        assert_eq!(read, (0, 4 * 256 * 256), "{form:?}");
    }
    // Staging memory of at most 16 threads.
    let peak = engine.peak_load_memory();
    assert!(peak > 0 && peak <= 16 << 25, "{peak}");
}

/// Rows are quantized where they are read, and scales wait for the rows that other threads quantize.
#[needs(cpu)]
fn weights_in_files_are_quantized_row_by_row_and_read_once() {
    let engine = Engine::new(cpu(1), quick());
    for form in QuantizedForm::ALL {
        let source = CountingSource { in_pieces: true, ..CountingSource::default() };
        load(64, form, true, &engine, &source);
        let read = (source.wholes.into_inner(), source.bytes.load(Ordering::Relaxed));
        assert_eq!(read, (0, 64 * 4 * 256 * 256), "{form:?}");
    }
}
