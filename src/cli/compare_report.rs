//! HTML report of a comparison: one self-contained file.

use std::fmt::Write;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use ndarray::{Array4, ArrayView1, Axis};

use super::comparison::{ComparedClip, Scores, rows};
use crate::media::{Frames, png_bytes};
use crate::tune::escaped;

const GAIN: f32 = 8.0;
const POINTS: usize = 600;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#222}\
table{border-collapse:collapse}td,th{padding:.2rem 1rem .2rem 0;text-align:left}td+td{text-align:right;\
font-variant-numeric:tabular-nums}.row{display:grid;grid-template-columns:repeat(3,1fr);gap:.5rem}\
figure{margin:0}img,svg{width:100%;height:auto;background:#eee}figcaption{font-size:.85rem;color:#555}";

pub(super) fn page(scores: &Scores, a: &ComparedClip, b: &ComparedClip) -> Result<String, String> {
    let names = [escaped(&scores.a), escaped(&scores.b)];
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{} against {}</title><style>{STYLE}</style>\n\
         <h1>{} against {}</h1>\n<table><tr><th></th><th>all</th><th>worst frame</th></tr>\n",
        names[0], names[1], names[0], names[1]
    );
    for [name, value, worst] in rows(scores) {
        add(&mut page, format!("<tr><td>{}</td><td>{value}</td><td>{worst}</td></tr>\n", escaped(&name)));
    }
    page.push_str("</table>\n");
    for only in &scores.only_in_one {
        add(&mut page, format!("<p>Not compared, only in one result: {}</p>\n", escaped(only)));
    }
    if let (Some(a), Some(b), Some(video)) = (&a.video, &b.video, &scores.video) {
        let last = a.dim().0 - 1;
        let mut shown = vec![0, last / 2, last];
        shown.dedup();
        for i in shown {
            add(&mut page, format!("<h2>Frame {i}</h2>\n<div class=\"row\">"));
            let difference = (a - b).mapv(|v| (GAIN * v.abs()).min(1.0));
            let captions = [names[0].clone(), names[1].clone(), format!("difference, {GAIN} times")];
            for (video, caption) in [a, b, &difference].into_iter().zip(captions) {
                let image = frame_png(video, i)?;
                add(
                    &mut page,
                    format!("<figure><img src=\"{image}\" alt=\"\"><figcaption>{caption}</figcaption></figure>"),
                );
            }
            let (psnr, ssim) = (video.frame_psnr[i], video.frame_ssim[i]);
            add(&mut page, format!("</div>\n<p>PSNR {psnr:.2} dB, SSIM {ssim:.5}</p>\n"));
        }
    }
    if let (Some((a, _)), Some((b, _))) = (&a.audio, &b.audio) {
        for (channel, (x, y)) in a.outer_iter().zip(b.outer_iter()).enumerate() {
            let difference = &x - &y;
            add(&mut page, format!("<h2>Channel {channel}</h2>\n<div class=\"row\">"));
            let lines = [(x, names[0].as_str()), (y, names[1].as_str()), (difference.view(), "difference")];
            for (samples, caption) in lines {
                let wave = waveform(samples);
                add(&mut page, format!("<figure>{wave}<figcaption>{caption}</figcaption></figure>"));
            }
            page.push_str("</div>\n");
        }
    }
    page.push_str("</html>\n");
    Ok(page)
}

fn add(page: &mut String, text: String) {
    // Writing to a String cannot fail.
    let _ = page.write_str(&text);
}

/// Returns frame `index` as a PNG data URL.
fn frame_png(video: &Array4<f32>, index: usize) -> Result<String, String> {
    let one = video.index_axis(Axis(0), index).insert_axis(Axis(0)).to_owned();
    let frames = Frames::from_video(one.view()).map_err(|e| e.to_string())?;
    let rgb = frames.iter().next().expect("one frame");
    Ok(format!("data:image/png;base64,{}", BASE64_STANDARD.encode(png_bytes(rgb, frames.width(), frames.height())?)))
}

/// Draws the waveform as SVG: a vertical line per group of samples, from the smallest to the largest sample. The
/// vertical axis is -1 to 1.
fn waveform(samples: ArrayView1<f32>) -> String {
    let step = samples.len().div_ceil(POINTS).max(1);
    let mut path = String::new();
    for (x, part) in samples.axis_chunks_iter(Axis(0), step).enumerate() {
        let (low, high) = part.iter().fold((f32::MAX, f32::MIN), |(low, high), v| (low.min(*v), high.max(*v)));
        let y = |v: f32| 60.0 - 60.0 * v.clamp(-1.0, 1.0);
        add(&mut path, format!("M{x} {:.1}V{:.1}", y(high), y(low) + 0.5));
    }
    format!(
        "<svg viewBox=\"0 0 {POINTS} 121\" xmlns=\"http://www.w3.org/2000/svg\"><path d=\"{path}\" stroke=\"#246\" \
         fill=\"none\"/></svg>"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waveform_path_spans_sample_range() {
        let svg = waveform(ndarray::arr1(&[1.0f32, -1.0, 0.0]).view());
        assert!(svg.contains("M0 0.0V0.5M1 120.0V120.5M2 60.0V60.5"), "{svg}");
    }
}
