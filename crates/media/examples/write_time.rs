//! Measures the parts of writing an MP4 from raw RGB frames, with sound: the host's work after the last program.
//!
//! Run `ffmpeg -f lavfi -i mandelbrot=size=768x512:rate=24 -frames:v 121 -f rawvideo -pix_fmt rgb24 clip.rgb`, then
//! `cargo run --release -p ltx2-media --example write_time clip.rgb 768 512`.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use ltx2_media::{Audio, EncoderChoice, Frames, Mp4Options, VideoStream, write_encoded_mp4, write_mp4};
use ndarray::{Array2, Array4};

const RATE: u32 = 48_000;
const FPS: f64 = 24.0;

fn timed<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let since = Instant::now();
    let result = work();
    println!("{what:<40}{:>8.3} s", since.elapsed().as_secs_f64());
    result
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file, width, height] = &arguments[..] else { return Err("usage: write_time FRAMES.rgb WIDTH HEIGHT".into()) };
    let (bytes, width, height) = (std::fs::read(file)?, width.parse::<usize>()?, height.parse::<usize>()?);
    let count = bytes.len() / (width * height * 3);
    let frames = Frames::new(Array4::from_shape_vec((count, height, width, 3), bytes)?)?;
    let samples = (count as f64 / FPS * f64::from(RATE)) as usize;
    let tone = |(channel, i): (usize, usize)| (i as f32 * (0.03 + 0.01 * channel as f32)).sin() * 0.3;
    let sound = Audio::new(Array2::from_shape_fn((2, samples), tone), RATE)?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("out.mp4");
    println!("{count} frames of {width}x{height}, {} cores", std::thread::available_parallelism()?);

    timed("SHA-256 of the frames", || frames.sha256());
    let [embedded, ffmpeg] =
        [EncoderChoice::Embedded, EncoderChoice::Ffmpeg].map(|encoder| Mp4Options { encoder, ..Mp4Options::default() });
    let write = |sound: Option<&Audio>, options: &Mp4Options| write_mp4(&path, &frames, FPS, sound, options);
    timed("built-in encoders, frames", || write(None, &embedded))?;
    timed("built-in encoders, frames and sound", || write(Some(&sound), &embedded))?;
    let whole = std::fs::read(&path)?;
    timed("the same, encoded in the background", || -> Result<(), Box<dyn Error>> {
        let stream = VideoStream::start(&frames, FPS, &embedded)?.ok_or("the built-in encoder was requested")?;
        stream.push(frames.clone());
        write_encoded_mp4(&path, &frames, Some(stream), FPS, Some(&sound), &embedded)?;
        Ok(())
    })?;
    if std::fs::read(&path)? != whole {
        return Err("encoding in the background gave different bytes".into());
    }
    println!("{:<40}{:>8} bytes", "file", whole.len());
    match timed("ffmpeg, frames and sound", || write(Some(&sound), &ffmpeg)) {
        Ok(_) => println!("{:<40}{:>8} bytes", "file", Path::new(&path).metadata()?.len()),
        Err(error) => println!("ffmpeg: {error}"),
    }
    Ok(())
}
