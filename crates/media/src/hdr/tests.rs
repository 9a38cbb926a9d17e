use ndarray::{Array4, s};

use super::*;
use crate::exr::{exr_frame_path, exr_frames_in, remove_exr_frames, write_exr_archive, write_exr_frames};

fn codes() -> Array4<f32> {
    Array4::from_shape_fn((2, 3, 4, 6), |(f, c, y, x)| (f * 72 + c * 24 + y * 6 + x) as f32 / 143.0)
}

#[test]
fn curves_invert_each_other() {
    for transform in HdrTransform::ALL {
        assert_eq!(HdrTransform::named(transform.name()), Some(transform));
        let black = transform.compress(0.0);
        for step in 0..=1000 {
            let code = black + (1.0 - black) * step as f32 / 1000.0;
            let back = transform.compress(transform.decompress(code));
            assert!((back - code).abs() < 2e-6, "{transform:?} {code}: {back}");
        }
        assert_eq!([transform.compress(-1.0), transform.compress(f32::MAX)], [black, 1.0]);
        assert_eq!(transform.decompress(2.0), transform.decompress(1.0));
    }
    assert_eq!(HdrTransform::named("pq"), None);
}

#[test]
fn decompressed_pixels_are_rec709_and_not_negative() {
    let linear = HdrFrames::decompress(codes(), HdrTransform::LogC3).unwrap();
    assert_eq!((linear.count(), linear.height(), linear.width()), (2, 4, 6));
    assert_eq!(linear.frame(0)[[0, 0, 0]], 0.0, "the code 0 is below black");
    assert_eq!(linear.frame(1)[[2, 3, 5]], HdrTransform::LogC3.decompress(1.0));
    // The rows of the matrix sum to 1, so that grey stays grey.
    let grey = Array4::from_elem((1, 3, 2, 2), 0.5);
    let linear = HdrFrames::decompress(grey, HdrTransform::AcesCct).unwrap();
    let want = HdrTransform::AcesCct.decompress(0.5);
    assert!(linear.linear().iter().all(|value| (value / want - 1.0).abs() < 1e-5));
    // Pure AP1 green is outside of Rec. 709.
    let mut green = Array4::from_elem((1, 3, 1, 1), 0.1);
    green[[0, 1, 0, 0]] = 0.6;
    let linear = HdrFrames::decompress(green, HdrTransform::AcesCct).unwrap();
    assert_eq!(linear.linear()[[0, 0, 0, 0]], 0.0);
    assert!(HdrFrames::decompress(Array4::zeros((1, 4, 2, 2)), HdrTransform::LogC3).is_err());
}

#[test]
fn joined_parts_equal_the_whole_video() {
    let whole = HdrFrames::decompress(codes(), HdrTransform::LogC3).unwrap();
    let part =
        |at: usize| HdrFrames::decompress(codes().slice(s![at..=at, .., .., ..]).to_owned(), HdrTransform::LogC3);
    let joined = HdrFrames::joined(&[part(0).unwrap(), part(1).unwrap()]);
    assert_eq!((joined.sha256(), joined.preview()), (whole.sha256(), whole.preview()));
    assert_ne!(part(0).unwrap().sha256(), whole.sha256());
}

#[test]
fn preview_clips_highlights_and_applies_srgb() {
    let code = |linear: f32| HdrTransform::LogC3.compress(linear);
    let values = [0.0, 0.002, 0.18, 0.5, 1.0, 8.0];
    let codes = Array4::from_shape_fn((1, 3, 1, 6), |(_, _, _, x)| code(values[x]));
    let preview = HdrFrames::decompress(codes, HdrTransform::LogC3).unwrap().preview();
    let bytes: Vec<u8> = preview.data().slice(s![0, 0, .., 1]).to_vec();
    assert_eq!(bytes, [0, 7, 118, 188, 255, 255]);
}

/// The files are read back by the same crate; `tests/it/hdr.rs` also reads them with ffmpeg.
#[test]
fn exr_files_hold_half_precision_values_and_tags() {
    use exr::prelude::{ReadChannels, ReadLayers};
    let folder = tempfile::tempdir().unwrap();
    let frames = HdrFrames::decompress(codes(), HdrTransform::LogC3).unwrap();
    write_exr_frames(folder.path(), &frames, false).unwrap();
    assert_eq!(exr_frames_in(folder.path()).unwrap().len(), 2);
    let read = exr::prelude::read().no_deep_data().largest_resolution_level();
    let image = read.all_channels().first_valid_layer().all_attributes();
    let image = image.from_file(exr_frame_path(folder.path(), 1)).unwrap();
    let white = image.attributes.chromaticities.unwrap().white;
    assert_eq!((white.0, white.1), (0.3127, 0.329));
    let layer = &image.layer_data;
    assert_eq!(layer.encoding.compression, exr::prelude::Compression::ZIP16);
    for (name, channel) in [("B", 2), ("G", 1), ("R", 0)] {
        let found = layer.channel_data.list.iter().find(|own| own.name == *name).unwrap();
        let exr::prelude::FlatSamples::F16(samples) = &found.sample_data else { panic!("not half precision") };
        let want: Vec<f16> =
            frames.frame(1).index_axis(ndarray::Axis(0), channel).iter().map(|v| f16::from_f32(*v)).collect();
        assert_eq!(*samples, want, "{name}");
    }
    let exists = write_exr_frames(folder.path(), &frames, false).unwrap_err().to_string();
    assert!(exists.contains("frame_0000"), "{exists}");
    remove_exr_frames(folder.path()).unwrap();
    assert_eq!(exr_frames_in(folder.path()).unwrap(), [""; 0].map(std::path::PathBuf::from));
}

#[test]
fn exr_archive_contains_the_files_of_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let frames = HdrFrames::decompress(codes(), HdrTransform::LogC3).unwrap();
    write_exr_frames(folder.path(), &frames, false).unwrap();
    let path = folder.path().join("video_exr.zip");
    write_exr_archive(&path, &frames, false).unwrap();
    let mut archive = zip::ZipArchive::new(std::fs::File::open(&path).unwrap()).unwrap();
    assert_eq!(archive.len(), 2);
    for file in exr_frames_in(folder.path()).unwrap() {
        let mut entry = archive.by_name(file.file_name().unwrap().to_str().unwrap()).unwrap();
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
        assert_eq!(bytes, std::fs::read(file).unwrap());
    }
    let exists = write_exr_archive(&path, &frames, false).unwrap_err().to_string();
    assert!(exists.contains("video_exr.zip"), "{exists}");
    assert!(write_exr_archive(&path, &frames, true).is_ok());
}
