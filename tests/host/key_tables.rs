//! The published tensor names and shapes of all generations: every name in Lightricks' files maps to its diffusers name,
//! and the programs read exactly these tensors.

use std::collections::{BTreeMap, BTreeSet};

use crate::support::needs;
use ltx2::models::presets::Preset;
use ltx2::pipeline::programs::configs::ModelConfigs;
use ltx2::pipeline::programs::parameters::parameters;
use ltx2::weights::keys::SingleFileKeys;
use ltx2::weights::{Component, is_inert};
use sha2::{Digest, Sha256};

/// A table row: Lightricks' name, folder, diffusers' name, dimensions.
type Row = [String; 4];

/// Expands number ranges `{a-b,c}` in a row; both names contain the same range.
fn written_out(row: Row) -> Vec<Row> {
    let Some((before, rest)) = row[0].split_once('{') else { return vec![row] };
    let (range, _) = rest.split_once('}').expect("a closed range");
    let (group, mut all) = (format!("{{{range}}}"), vec![]);
    assert!(row[2].contains(&group) && !before.contains('}'), "{row:?}");
    for part in range.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        for number in first.parse::<usize>().expect("a number")..=last.parse().expect("a number") {
            let one = |name: &String| name.replacen(&group, &number.to_string(), 1);
            all.extend(written_out([one(&row[0]), row[1].clone(), one(&row[2]), row[3].clone()]));
        }
    }
    all
}

/// Returns every row of a table, after checking the hash that the table states.
fn rows(table: &str) -> Vec<Row> {
    let lines = table.lines().filter(|l| !l.starts_with('#')).skip(1);
    let split = |l: &str| -> Row { l.split('\t').map(String::from).collect::<Vec<_>>().try_into().expect("4 columns") };
    let mut rows: Vec<Row> = lines.flat_map(|l| written_out(split(l))).collect();
    rows.sort_unstable();
    let text = rows.iter().map(|row| row.join("\t")).collect::<Vec<_>>().join("\n");
    let hash = hex::encode(Sha256::digest(text));
    assert!(table.contains(&format!("have the sha256 {hash}.")), "the rows have the sha256 {hash}");
    rows
}

/// The components of LTX-2.0's and LTX-2.3's tables.
const WHOLE: [Component; 6] = [
    Component::Transformer,
    Component::Connectors,
    Component::Vae,
    Component::AudioVae,
    Component::Vocoder,
    Component::LatentUpsampler,
];

/// Checks that each name of a file maps like in the reference, and that the preset declares exactly these tensors of
/// `parts` with their shapes, except tensors whose names contain `elsewhere`, which are in other files. The upsampler is a
/// separate file. Returns the number of tensors of both.
fn check(table: &str, preset: &str, parts: &[Component], elsewhere: Option<&str>) -> [usize; 2] {
    let rows = rows(table);
    let (upsampler, whole): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|r| r[1].starts_with("latent_upsampler"));
    let keys = SingleFileKeys::new(whole.iter().map(|r| &r[0][..]));
    for row in &whole {
        let (component, name) = keys.map(&row[0]).unwrap_or_else(|| panic!("{} is dropped", row[0]));
        assert_eq!((component.folder(), &name), (&row[1][..], &row[2]), "{}", row[0]);
    }
    let configs = ModelConfigs::of_preset(Preset::named(preset).expect("a preset"));
    for &part in parts {
        let of_part = rows.iter().filter(|r| r[1].split('(').next() == Some(part.folder()));
        let listed: BTreeMap<&str, &str> = of_part.map(|r| (&r[2][..], &r[3][..])).collect();
        let mut read = BTreeSet::new();
        for param in parameters(&configs, part).expect("a preset's configuration") {
            let in_file = |(name, _): &(&str, &[usize])| !elsewhere.is_some_and(|other| name.contains(other));
            for (name, shape) in param.source.tensors().into_iter().filter(in_file) {
                let dims = shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("x");
                assert_eq!(Some(&&dims[..]), listed.get(name), "{part}: {name}");
                read.insert(name.to_string());
            }
        }
        let unread: Vec<_> = listed.keys().filter(|name| !read.contains(**name) && !is_inert(part, name)).collect();
        assert!(unread.is_empty(), "{part}: nothing declares {unread:?}");
    }
    [whole.len(), upsampler.len()]
}

#[needs(nothing)]
fn single_file_keys_match_the_published_tables() {
    assert_eq!(check(include_str!("../fixtures/keys_2.0.tsv"), "ltx2", &WHOLE, None), [4049, 73]);
    assert_eq!(check(include_str!("../fixtures/keys_2.3.tsv"), "ltx2_3", &WHOLE, None), [5947, 72]);
    // The text projections are in the text encoder's file.
    let transformer = check(include_str!("../fixtures/keys_2.5.tsv"), "ltx2_5", &WHOLE[..2], Some("text_proj_in."));
    assert_eq!(transformer, [4349, 0]);
}
