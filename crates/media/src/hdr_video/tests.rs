use ndarray::Array4;

use super::*;
use crate::HdrTransform;

#[test]
fn signals_of_known_light_are_those_of_the_standards() {
    let near = |value: f32, want: f32| assert!((value - want).abs() < 1e-4, "{value} instead of {want}");
    near(HdrSignal::Hlg.encode(0.0), 0.0);
    near(HdrSignal::Hlg.encode(1.0), 0.75);
    near(HdrSignal::Hlg.encode(1e4), 1.0);
    // BT.2408: 203 nits are 58 % of the PQ signal. ST 2084: 100 nits are 50.8 %.
    near(HdrSignal::Pq.encode(1.0), 0.5807);
    near(HdrSignal::Pq.encode(100.0 / 203.0), 0.5081);
    near(HdrSignal::Pq.encode(1e4), 1.0);
    let rises = |signal: HdrSignal| (0..4000).map(|i| signal.encode(i as f32 / 100.0)).is_sorted();
    assert!(rises(HdrSignal::Hlg) && rises(HdrSignal::Pq));
}

#[test]
fn grey_and_white_have_neutral_chroma_in_limited_range() {
    let linear = |value: f32| {
        let code = HdrTransform::LogC3.compress(value);
        HdrFrames::decompress(Array4::from_elem((1, 3, 2, 4), code), HdrTransform::LogC3).unwrap()
    };
    let words = |value: f32, signal| {
        let bytes = planes(&linear(value).frame(0), signal);
        bytes.chunks(2).map(|two| u16::from_le_bytes([two[0], two[1]])).collect::<Vec<u16>>()
    };
    let of = |luma: u16| [vec![luma; 8], vec![512; 4]].concat();
    assert_eq!(words(0.0, HdrSignal::Hlg), of(64));
    assert_eq!(words(1.0, HdrSignal::Hlg), of(721));
    assert_eq!(words(1.0, HdrSignal::Pq), of(573));
}

#[test]
fn light_levels_are_those_of_the_brightest_pixel_and_frame() {
    let mut codes = Array4::from_elem((2, 3, 2, 2), HdrTransform::LogC3.compress(0.5));
    codes[[1, 1, 0, 0]] = 1.0;
    let frames = HdrFrames::decompress(codes, HdrTransform::LogC3).unwrap();
    let levels = LightLevels::of(&frames);
    // Rec. 709 green contributes 92 % to BT.2020 green.
    assert_eq!(levels.brightest_pixel, 10_000);
    assert!((2500..2700).contains(&levels.brightest_frame), "{}", levels.brightest_frame);
}

#[test]
fn missing_encoder_and_odd_sizes_are_errors() {
    let frames = |width| HdrFrames::decompress(Array4::zeros((1, 3, 2, width)), HdrTransform::LogC3).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |width, program: &str| {
        let (path, program) = (folder.path().join("a.mp4"), Path::new(program));
        write_hdr_video(&path, &frames(width), 24.0, HdrSignal::Pq, HdrCodec::Av1, program, true)
            .unwrap_err()
            .to_string()
    };
    let missing = write(2, "/nowhere/ffmpeg");
    assert!(missing.contains("/nowhere/ffmpeg is not installed; install ffmpeg with libsvtav1"), "{missing}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
