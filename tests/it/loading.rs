//! Loading of parameters.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ltx2::hlo::{DType, Type};
use ltx2::models::{Network, transformer};
use ltx2::nn::{Axis, Params, Quantization, linear};
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::plan::run_plan::RunPlan;
use ltx2::pjrt::SharedBytes;
use ltx2::runtime::{Engine, FileTensor, LoadedParameters, ParameterSource, QuantizedTensor, StoredTensor};
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
    /// Number of weights that were read as a whole.
    wholes: AtomicUsize,
    /// Number of codes that were read.
    codes: Arc<AtomicUsize>,
}

fn values(key: &str) -> Vec<u8> {
    scattered(key, &[256, 256]).bytes().into_owned()
}

impl ParameterSource for CountingSource {
    fn in_file(&self, part: &'static str, key: &str, dtype: DType) -> Result<Option<FileTensor>, String> {
        let form = self.form.filter(|form| form.dtype() == dtype);
        Ok(form.map_or(Ok(None), |form| self.quantized(part, key, form))?.map(|weight| weight.codes))
    }

    fn quantized(&self, _: &'static str, key: &str, form: QuantizedForm) -> Result<Option<QuantizedTensor>, String> {
        if self.form != Some(form) {
            return Ok(None);
        }
        let (stored, read) = (quantize(form, DType::F32, 256, &values(key)), self.codes.clone());
        let copy = move |offset: usize, into: &mut [u8]| {
            read.fetch_add(into.len(), Ordering::Relaxed);
            into.copy_from_slice(&stored.codes[offset..][..into.len()]);
            Ok(())
        };
        let codes = FileTensor { dtype: form.dtype(), shape: vec![256, 256], read: Box::new(copy) };
        Ok(Some(QuantizedTensor { codes, scales: Box::new(move || Ok(stored.scales.clone())) }))
    }

    fn tensor(&self, _: &'static str, key: &str) -> Result<StoredTensor, String> {
        self.wholes.fetch_add(1, Ordering::Relaxed);
        let (dtype, shape, bytes) = (DType::F32, vec![256, 256], SharedBytes::from(values(key)));
        Ok(StoredTensor { dtype, shape, bytes, scales: None, file: "weights".into(), key: key.into() })
    }
}

/// Loads `layers` weights of the form `form` and compares their scales with those of [`values`].
fn load(layers: usize, form: QuantizedForm, engine: &Engine, source: &CountingSource) {
    let quantization = match form {
        QuantizedForm::Fp8 => Quantization::Fp8,
        _ => Quantization::Int8 { activations: false, rotated: form == QuantizedForm::Int8Convrot },
    };
    let p = Params::new("layers", transformer::COMPONENT, &build(DType::BF16, quantization));
    let axes = [Axis::CfgBatch, Axis::VideoSequence, Axis::Replicated];
    let x = p.input("x", Type::new(DType::BF16, [1, 8, 256]), &axes);
    let layer = |p: &Params, x: &[_]| vec![linear(&p.pp("to_q"), &x[0], 256, false, [Axis::Replicated; 2])];
    let y = p.each_layer_quantized("blocks", layers, |_| true, &[x], |p, _, x| layer(p, x));
    let network = Network::finish(&p, vec![p.output("y", &y[0], &axes, y[0].dims())]).expect("builds");
    let mut loaded = LoadedParameters::default();
    loaded.load(engine, &network.program, &network.params, source, &|_| true).expect("loads");
    for layer in 0..layers {
        let key = format!("blocks.{layer}.to_q.weight");
        let scales = loaded.get(&format!("transformer.{key}_scale")).expect("loaded").download().expect("floats");
        let want = quantize(form, DType::F32, 256, &values(&key)).scales;
        assert_eq!(scales.to_f32().into_raw_vec_and_offset().0, want, "{key}");
    }
}

/// Codes and scales come from the same conversion, except for weights that another thread converts at that time.
#[needs(cpu)]
fn weights_that_are_quantized_at_load_are_read_once() {
    let (layers, source) = (64, CountingSource::default());
    let engine = Engine::new(cpu(1), quick());
    load(layers, QuantizedForm::Int8Convrot, &engine, &source);
    // Each of at most 16 threads converts one weight, which takes at most 12 bytes per value.
    let peak = engine.peak_load_memory();
    assert!(peak > 0 && peak <= 16 * 12 * 256 * 256, "{peak}");
    let reads = source.wholes.into_inner();
    // At most 16 threads read.
    assert!((layers..layers + 16).contains(&reads), "{reads} reads of {layers} weights");
}

#[needs(cpu)]
fn stored_codes_are_read_once_and_their_scales_without_them() {
    let engine = Engine::new(cpu(1), quick());
    for form in [QuantizedForm::Fp8, QuantizedForm::Int8Convrot] {
        let source = CountingSource { form: Some(form), ..CountingSource::default() };
        load(4, form, &engine, &source);
        let read = (source.wholes.into_inner(), source.codes.load(Ordering::Relaxed));
        assert_eq!(read, (0, 4 * 256 * 256), "{form:?}");
    }
    // Staging memory of at most 16 threads.
    let peak = engine.peak_load_memory();
    assert!(peak > 0 && peak <= 16 << 25, "{peak}");
}
