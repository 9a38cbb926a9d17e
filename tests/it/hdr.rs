//! HDR video compared with Lightricks' HDR pipeline (scripts/oracle/cases_hdr.py): its curves, every step of both stages,
//! the tiles of the second stage, and the values of the EXR files.

use half::f16;
use ltx2::media::{HdrFrames, HdrSignal, HdrTransform};
use ndarray::{Array4, Axis, Ix4, Ix5};

use crate::references::{Patterns, ready};
use crate::support::official::{cases_of, dumping_steps, limit_of};
use crate::support::thresholds::row;
use crate::support::{Case, cases, cpu, dumped, generate, needs};

fn values(case: &Case, name: &str) -> Vec<f32> {
    let tensor = case.outputs.get(name).or(case.inputs.get(name)).unwrap_or_else(|| panic!("{name}"));
    tensor.to_f32().iter().copied().collect()
}

fn halves(values: &[f32]) -> Vec<u16> {
    values.iter().map(|value| f16::from_f32(*value).to_bits()).collect()
}

/// Half-precision values, which EXR files contain, are equal bit for bit. Powers of torch's vector library differ in the
/// last bit of single-precision values.
#[needs(nothing)]
fn curves_match_lightricks() {
    let case = &cases("hdr_curves")[0];
    let codes = values(case, "codes");
    for transform in HdrTransform::ALL {
        let got: Vec<f32> = codes.iter().map(|code| transform.decompress(*code)).collect();
        let want = values(case, &format!("{}.decompress", transform.name()));
        assert_eq!(halves(&got), halves(&want), "{transform:?}");
        let ulps = |a: &f32, b: &f32| (a.to_bits() as i64 - b.to_bits() as i64).abs();
        let worst = got.iter().zip(&want).map(|(a, b)| ulps(a, b)).max().expect("values");
        let differ = got.iter().zip(&want).filter(|(a, b)| a != b).count();
        eprintln!("{transform:?}: {differ} of {} single-precision values differ, by at most {worst} ulp", got.len());
        assert!(worst <= 4, "{transform:?}: {worst} ulp");
        let got: Vec<f32> = codes.iter().map(|code| transform.compress(8.0 * code)).collect();
        let want = values(case, &format!("{}.compress", transform.name()));
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1.2e-7), "{transform:?}");
    }
}

/// Compares the 10-bit planes of the HLG video. Sums in another order may round to the neighboring value.
#[needs(nothing)]
fn hlg_planes_match_lightricks() {
    let case = &cases("hdr_curves")[0];
    let codes = values(case, "codes");
    let codes = Array4::from_shape_vec((1, 3, 16, 16), codes[codes.len() - 768..].to_vec()).expect("a frame");
    let frames = HdrFrames::decompress(codes, HdrTransform::LogC3).expect("a frame");
    let bytes = frames.planes(0, HdrSignal::Hlg);
    let got: Vec<f32> = bytes.chunks(2).map(|two| f32::from(u16::from_le_bytes([two[0], two[1]]))).collect();
    let want = ["hlg.y", "hlg.u", "hlg.v"].map(|name| values(case, name)).concat();
    assert_eq!(got.len(), want.len());
    let differ = got.iter().zip(&want).filter(|(a, b)| a != b).count();
    assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1.0) && differ <= 4, "{differ} of {}", got.len());
}

#[needs(cpu, full)]
fn hdr_steps_and_values_match_lightricks() {
    let (all, mut runner) = cases_of(&cpu(8), "hdr", "tiny_2_3");
    let case = &all[0];
    let patterns = Patterns::new();
    let request = ready(&mut runner, &patterns.config(case));
    let made = generate(&mut runner, &request, &dumping_steps());
    for name in case.outputs.keys().map(|name| name.trim_end_matches(".strided")).filter(|name| *name != "linear") {
        case.within(name, dumped(&made, name), limit_of(name, row(&case.name).f32()).min(1e-5));
    }
    let hdr = made.hdr.as_ref().expect("HDR frames");
    assert_eq!(made.audio.len(), 0, "no sound");
    // The curve amplifies relative differences of the codes by up to ln(10) / c = 9.3.
    let linear = hdr.linear().clone().insert_axis(Axis(0)).into_dyn();
    case.within("linear", &linear.into(), 1e-4);
    let [codes, linear] = ["video.strided", "linear.strided"].map(|name| values(case, name));
    let own: Vec<f32> = codes.iter().map(|code| HdrTransform::LogC3.decompress(*code).max(0.0)).collect();
    assert_eq!(halves(&own), halves(&linear), "the values of the EXR files");
    // The frames are the decompressed codes, and the preview shows them.
    let codes = dumped(&made, "video").to_f32().into_dimensionality::<Ix5>().expect("a video");
    let codes = codes.index_axis_move(Axis(0), 0).into_dimensionality::<Ix4>().expect("frames");
    let again = HdrFrames::decompress(codes, HdrTransform::LogC3).expect("frames");
    assert_eq!(again.sha256(), hdr.sha256());
    assert_eq!(again.preview(), made.frames);
}
