//! Random choices by seed, and the enum values in the configuration schema.

use ltx2::config::json_schema;
use serde_json::Value;

/// Random numbers of a seed. Each choice has a name, so that adding one does not change the others.
#[derive(Clone, Copy)]
pub struct Draws {
    seed: u64,
}

impl Draws {
    pub fn new(seed: u64) -> Self {
        Draws { seed }
    }

    /// Returns a number from 0 to `count - 1`: SplitMix64 of the seed and the FNV-1a hash of the name.
    pub fn below(self, name: &str, count: usize) -> usize {
        let hash = |h: u64, byte: u8| (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        let name = name.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
        let mut x = name.wrapping_add(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for multiplier in [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb] {
            x = (x ^ (x >> 30)).wrapping_mul(multiplier);
        }
        ((x ^ (x >> 31)) % count as u64) as usize
    }

    /// Returns true for one in `count` seeds.
    pub fn one_in(self, name: &str, count: usize) -> bool {
        self.below(name, count) == 0
    }

    pub fn pick<'a, T: ?Sized>(self, name: &str, choices: &[&'a T]) -> &'a T {
        choices[self.below(name, choices.len())]
    }
}

/// Follows a schema's reference to its definition.
fn resolved(schema: &Value) -> &Value {
    let target = schema["$ref"].as_str().and_then(|path| json_schema().pointer(path.trim_start_matches('#')));
    target.map_or(schema, resolved)
}

/// Returns the alternatives of a schema: those of `anyOf`, or the schema itself.
fn alternatives(schema: &Value) -> Vec<&Value> {
    let schema = resolved(schema);
    match schema["anyOf"].as_array() {
        Some(all) => all.iter().flat_map(alternatives).collect(),
        None => vec![schema],
    }
}

/// Returns the enum values of a schema.
fn words_of(schema: &Value) -> Vec<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let all = alternatives(schema);
    let one = |schema: &&Value| [&list(&schema["enum"])[..], &list(&schema["oneOf"]), &[(*schema).clone()]].concat();
    let words = all.iter().flat_map(one).flat_map(|value| {
        let several = list(&value["enum"]);
        [&several[..], &[value["const"].clone(), value]].concat()
    });
    words.filter_map(|word| word.as_str().map(String::from)).collect()
}

/// Adds the keys below a schema that have enum values.
fn add_keys(schema: &Value, path: &str, keys: &mut Vec<(String, Vec<String>)>) {
    for schema in alternatives(schema) {
        for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
            let key = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            let words = words_of(inner);
            match words.is_empty() {
                true => add_keys(inner, &key, keys),
                false => keys.push((key, words)),
            }
        }
    }
}

/// Returns all configuration keys of a run with enum values, and these values.
pub fn keys_with_words() -> Vec<(String, Vec<String>)> {
    let mut keys = Vec::new();
    add_keys(json_schema(), "", &mut keys);
    // Keys that are not used in a run, that are chosen separately, or that need devices which the tests do not have.
    let excluded = ["pipeline", "model.weights", "runtime.watchdog"];
    keys.retain(|(key, _)| !key.starts_with("serve.") && !excluded.contains(&key.as_str()));
    keys
}

/// Returns the enum values of a key.
pub fn words(key: &str) -> Vec<String> {
    let own = keys_with_words().into_iter().find(|(name, _)| name == key);
    own.unwrap_or_else(|| panic!("{key} takes no word")).1
}
