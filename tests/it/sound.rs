//! Input audio: files of every format, and the spectrogram and the encoder compared with Lightricks' package.

use std::f32::consts::TAU;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ltx2::hlo::DType;
use ltx2::media::{self, Audio, WavFormat, read_sound, read_sound_from, write_wav};
use ltx2::models::audio_vae::{AudioVaeConfig, log_mel, resample};
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pipeline::runner::Runner;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ltx2::weights::{ModelSource, Overrides};
use ndarray::{Array2, Axis};

use crate::support::{Case, cases, cpu, full, needs, plain, quick};

const RATE: u32 = 16000;
const NO_FFMPEG: &str = "/nowhere/ffmpeg";

fn samples(case: &Case) -> Array2<f32> {
    let samples = case.inputs["samples"].to_f32().index_axis_move(Axis(0), 0);
    samples.into_dimensionality().expect("[1, channels, samples]")
}

fn rate(case: &Case) -> u32 {
    case.scalars["rate"].as_u64().and_then(|rate| rate.try_into().ok()).expect("a rate")
}

#[needs(nothing)]
fn spectrograms_match_reference() {
    let all = cases("mel");
    assert_eq!(all.len(), 5);
    for case in all {
        let (given, rate) = (samples(&case), rate(&case));
        let resampled = resample(given.view(), rate, RATE);
        let mel = log_mel(&AudioVaeConfig::default(), given.view(), rate).expect("long enough");
        let want = case.outputs["resampled"].to_f32().index_axis_move(Axis(0), 0);
        let worst = resampled.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        eprintln!("{}: samples {worst:.1e}", case.name);
        assert_eq!(resampled.shape(), want.shape());
        assert!(worst <= 5e-7, "{}: {worst:e}", case.name);
        case.within("mel", &Tensor::from(mel), 1e-5);
    }
}

#[needs(cpu)]
fn audio_tokens_match_reference() {
    let client = cpu(8);
    let all = cases("given-sound");
    assert_eq!(all.len(), 2);
    for (number, case) in all.into_iter().enumerate() {
        let source = ModelSource::open(case.model.to_str().expect("UTF-8"), &Overrides::default());
        let source = Arc::new(source.expect("a model"));
        let executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
        let mut runner = Runner::new(OpenModel::open(&source).expect("complete"), executor, plain(DType::F32));
        let sound = Audio::new(samples(&case), rate(&case)).expect("stereo");
        let count = case.outputs["tokens"].shape()[1];
        let tokens = runner.encode_audio(&sound, count).expect("encodes");
        case.within("tokens", &Tensor::from(tokens), 1e-5);
        // Mono is copied to both channels, and short audio is padded with silence; this does not depend on the model.
        if number > 0 && !full() {
            continue;
        }
        let mono = Audio::new(Array2::from_elem((1, 10), 0.5), 8000).expect("mono");
        let stereo = mono.with_channels(2);
        let [one, two] = [mono, stereo].map(|sound| runner.encode_audio(&sound, 2).expect("encodes"));
        assert_eq!(one, two);
    }
}

/// Two decaying tones, the content of the test files.
fn tone() -> Array2<f32> {
    Array2::from_shape_fn((2, 2400), |(channel, i)| {
        let (t, loud, hertz) = (i as f32 / RATE as f32, [0.5, 0.25][channel], [500.0, 1000.0][channel]);
        loud * (TAU * hertz * t).sin() * (-20.0 * t).exp()
    })
}

fn sounds(name: &str) -> PathBuf {
    Path::new("tests/fixtures/sounds").join(name)
}

/// `|a - b| / |b|` over the samples that both have.
fn distance(got: &Array2<f32>, want: &Array2<f32>) -> f32 {
    let n = got.ncols().min(want.ncols());
    let both = got
        .outer_iter()
        .zip(want.outer_iter())
        .flat_map(|(a, b)| a.iter().zip(b).take(n).map(|(a, b)| ((a - b).powi(2), b.powi(2))).collect::<Vec<_>>());
    let (off, all) = both.fold((0.0, 0.0), |(off, all), (a, b)| (off + a, all + b));
    (off / all).sqrt()
}

/// ffmpeg is not available in this test. Encoder priming is removed, so the samples are aligned in time.
#[needs(nothing)]
fn builtin_decoders_read_every_format() {
    for (name, limit) in
        [("tone.flac", 1e-4), ("tone_u8.wav", 0.03), ("tone.mp3", 0.2), ("tone.m4a", 0.25), ("tone.ogg", 0.2)]
    {
        let sound = read_sound(&sounds(name), Path::new(NO_FFMPEG), None).expect(name).expect("a sound");
        let off = distance(sound.samples(), &tone());
        eprintln!("{name}: {} samples at {}, {off:.1e}", sound.len(), sound.rate());
        assert_eq!((sound.channels(), sound.rate()), (2, RATE), "{name}");
        assert!(off < limit, "{name}: {off}");
        let start = read_sound(&sounds(name), Path::new(NO_FFMPEG), Some(0.05)).expect(name).expect("a sound");
        assert!((800..2400).contains(&start.len()), "{name}: {}", start.len());
    }
}

/// The remaining samples equal those of the complete file.
#[needs(nothing)]
fn reading_from_a_start_time_skips_earlier_samples() {
    for name in ["tone.flac", "tone.mp3", "tone.m4a", "tone.ogg"] {
        let whole = read_sound(&sounds(name), Path::new(NO_FFMPEG), None).expect(name).expect("a sound");
        for start in [0.0, 0.01, 0.1, 0.149] {
            let part = read_sound_from(&sounds(name), Path::new(NO_FFMPEG), start, None).expect(name).expect("a sound");
            let left = whole.len() - (start * f64::from(RATE)).round_ties_even() as usize;
            assert_eq!(part.sound, whole.span(start, left), "{name} from {start}");
            assert_eq!(part.length, whole.len() as f64 / f64::from(RATE), "{name} from {start}");
        }
        let behind = read_sound_from(&sounds(name), Path::new(NO_FFMPEG), 1e6, Some(1e6 + 1.0)).expect(name);
        let behind = behind.expect("a sound");
        assert!(behind.sound.is_empty() && behind.length > 0.149, "{name}: {behind:?}");
    }
}

#[needs(ffmpeg)]
fn unknown_formats_are_read_by_ffmpeg() {
    let path = sounds("tone.opus");
    let sound = read_sound(&path, Path::new("ffmpeg"), Some(0.1)).expect("read").expect("a sound");
    assert_eq!((sound.channels(), sound.rate(), sound.len()), (2, 48000, 4800));
    let off = distance(&resample(sound.samples().view(), 48000, RATE), &tone());
    assert!(off < 0.35, "{off}");
}

/// Returns a PCM WAV file with `bits` per sample and, if extended, a speaker mask.
fn wav(channels: u16, bits: u16, mask: Option<u32>, data: &[u8]) -> Vec<u8> {
    let block = channels * bits / 8;
    let tag = if mask.is_some() { 0xfffe } else { 1u16 };
    let mut form = [&tag.to_le_bytes()[..], &channels.to_le_bytes(), &RATE.to_le_bytes()].concat();
    form.extend((RATE * u32::from(block)).to_le_bytes());
    form.extend([block.to_le_bytes(), bits.to_le_bytes()].concat());
    if let Some(mask) = mask {
        form.extend([&22u16.to_le_bytes()[..], &bits.to_le_bytes(), &mask.to_le_bytes()].concat());
        form.extend([1, 0, 0, 0, 0, 0, 0x10, 0, 0x80, 0, 0, 0xaa, 0, 0x38, 0x9b, 0x71]);
    }
    let chunk = |name: &[u8], body: &[u8]| [name, &(body.len() as u32).to_le_bytes(), body].concat();
    let body = [&b"WAVE"[..], &chunk(b"fmt ", &form), &chunk(b"data", data)].concat();
    chunk(b"RIFF", &body)
}

#[needs(nothing)]
fn sample_formats_and_channels_convert_to_stereo_floats() {
    let folder = tempfile::tempdir().expect("a folder");
    let read = |bytes: Vec<u8>| {
        let path = folder.path().join("sound.wav");
        fs::write(&path, bytes).expect("written");
        let sound = read_sound(&path, Path::new(NO_FFMPEG), None).expect("read").expect("a sound");
        sound.samples().clone().reversed_axes().as_standard_layout().into_owned()
    };
    let near = |got: Array2<f32>, want: &[[f32; 2]]| {
        assert_eq!(got.nrows(), want.len());
        assert!(got.iter().zip(want.iter().flatten()).all(|(a, b)| (a - b).abs() < 1e-6), "{got}");
    };
    // 8-bit samples are unsigned: 128 is silence.
    near(read(wav(2, 8, None, &[128, 255, 0, 192])), &[[0.0, 127.0 / 128.0], [-1.0, 0.5]]);
    near(read(wav(2, 24, None, &[0, 0, 0x40, 0, 0, 0x80])), &[[0.5, -1.0]]);
    assert_eq!(read(wav(1, 16, None, &[0, 0x40])), ndarray::array![[0.5]]);
    // 5.1: left, right, centre, low frequencies, both surrounds.
    let channel = |loud: usize| (0..6).flat_map(move |c| if c == loud { [0xff, 0x7f] } else { [0, 0] });
    let frames: Vec<u8> = (0..6).flat_map(channel).collect();
    let (full, root) = (32767.0 / 32768.0 / (1.0 + 2f32.sqrt()), 0.5f32.sqrt());
    let want = [[1.0, 0.0], [0.0, 1.0], [root, root], [0.0, 0.0], [root, 0.0], [0.0, root]];
    near(read(wav(6, 16, Some(0x3f), &frames)), &want.map(|pair| pair.map(|v| v * full)));
}

#[needs(nothing)]
fn unreadable_audio_error_has_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let said = |name: &str| read_sound(&path(name), Path::new(NO_FFMPEG), None).expect_err(name).to_string();
    assert!(said("none.wav").starts_with("cannot read ") && said("none.wav").contains("none.wav"));
    fs::write(path("text.wav"), "no sound at all").expect("written");
    let text = said("text.wav");
    assert!(text.contains("text.wav") && text.contains("install ffmpeg, or convert the file to WAV"), "{text}");
    fs::copy(sounds("tone.opus"), path("tone.opus")).expect("copied");
    assert!(said("tone.opus").contains("install ffmpeg"), "{}", said("tone.opus"));
    let mut flac = fs::read(sounds("tone.flac")).expect("read");
    let middle = flac.len() / 2;
    flac[middle..middle + 40].fill(0x55);
    fs::write(path("damaged.flac"), flac).expect("written");
    let damaged = said("damaged.flac");
    assert!(damaged.contains("damaged.flac: the file is damaged: "), "{damaged}");
    // 65535 channels: the bytes per frame exceed the decoder's 16 bits.
    let mut many = wav(1, 16, None, &[0; 8]);
    many[22..24].fill(0xff);
    fs::write(path("many.wav"), many).expect("written");
    assert!(said("many.wav").contains("many.wav: the file is damaged: "), "{}", said("many.wav"));
    let odd = Audio::new(ndarray::array![[0.0, f32::NAN]], 8000).expect("mono");
    write_wav(&path("nan.wav"), &odd, WavFormat::Float32).expect("written");
    assert!(said("nan.wav").contains("non-finite"), "{}", said("nan.wav"));
    let plain = wav(1, 16, None, &[0; 16]);
    for rate in [7999u32, 384_001, 999_983, 4_294_967_291] {
        fs::write(path("odd.wav"), [&plain[..24], &rate.to_le_bytes(), &plain[28..]].concat()).expect("written");
        let odd = said("odd.wav");
        assert!(odd.contains("odd.wav") && odd.contains("a rate from 8000 to 384000"), "{odd}");
    }
    let empty = Audio::new(Array2::zeros((1, 0)), 8000).expect("mono");
    write_wav(&path("empty.wav"), &empty, WavFormat::Pcm16).expect("written");
    assert!(
        media::read_sound(&path("empty.wav"), Path::new(NO_FFMPEG), None).expect("read").is_none_or(|s| s.is_empty())
    );
}
