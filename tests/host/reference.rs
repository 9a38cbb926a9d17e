//! The generated pages of docs/reference; `make reference` regenerates them.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use clap::{CommandFactory, ValueEnum};
use serde_json::Value;

use crate::support::needs;
use ltx2::cli::Cli;
use ltx2::config::ic_loras::{ALIASES, IC_LORAS, IcLoraInput, PublishedIcLora};
use ltx2::config::{Pipeline, Support, VideoUse, experiment_schema, json_schema};
use ltx2::tune::{diagnosis_schema, report_schema};
use ltx2::weights::Version;
use ltx2::weights::published::{self, MODELS};

const GENERATED: &str = "Generated from the code by `make reference`; do not edit.";

/// Writes the help of a command and its subcommands, 100 columns wide.
fn help(command: &clap::Command, name: &str, page: &mut String) {
    let shown = command.clone().bin_name(name).term_width(100).render_long_help().to_string();
    let shown: Vec<&str> = shown.lines().map(str::trim_end).collect();
    writeln!(page, "\n## {name}\n\n```text\n{}\n```", shown.join("\n").trim_end()).unwrap();
    for below in command.get_subcommands().filter(|c| c.get_name() != "help") {
        help(below, &format!("{name} {}", below.get_name()), page);
    }
}

fn command_line() -> String {
    let mut page = format!("# Command line\n\n{GENERATED}\n");
    help(&Cli::command(), "ltx2", &mut page);
    page
}

/// Resolves a schema's `$ref`. All schemas must define a name identically.
fn followed(schema: &'static Value) -> &'static Value {
    match schema["$ref"].as_str() {
        Some(name) => {
            let name = name.trim_start_matches("#/$defs/");
            let roots = [json_schema(), report_schema(), diagnosis_schema()];
            let mut all = roots.into_iter().filter_map(|root| root["$defs"].get(name));
            let one = all.next().unwrap_or_else(|| panic!("{name} is not defined"));
            assert!(all.all(|other| other == one), "{name} is defined in two ways");
            one
        }
        None => schema,
    }
}

/// Describes the accepted values of a key: choices by name, or types.
fn accepted(schema: &'static Value) -> String {
    let schema = followed(schema);
    let quoted = |v: &Value| format!("`{}`", v.as_str().map_or_else(|| v.to_string(), String::from));
    let all = |list: &'static Value| list.as_array().into_iter().flatten();
    let any: Vec<String> = ["oneOf", "anyOf"].iter().flat_map(|of| all(&schema[of])).map(accepted).collect();
    if !any.is_empty() {
        return any.join(", ");
    }
    if !schema["const"].is_null() {
        return quoted(&schema["const"]);
    }
    if schema["enum"].is_array() {
        return all(&schema["enum"]).map(quoted).collect::<Vec<_>>().join(", ");
    }
    match &schema["type"] {
        Value::String(one) if one == "array" => format!("list of {}", accepted(&schema["items"])),
        Value::String(one) if one == "object" => "map".into(),
        Value::String(one) => one.clone(),
        Value::Array(_) => all(&schema["type"]).filter_map(Value::as_str).collect::<Vec<_>>().join(" or "),
        _ => "any".into(),
    }
}

/// Writes table rows for the keys of a definition, depth first.
fn keys(schema: &'static Value, path: &str, page: &mut String) {
    for (key, inner) in followed(schema)["properties"].as_object().into_iter().flatten() {
        let name = format!("{path}{key}");
        let about = inner["description"].as_str().or(followed(inner)["description"].as_str()).unwrap_or_default();
        let items = followed(&inner["items"]);
        // A map that may be null.
        let some = inner["anyOf"].as_array().into_iter().flatten().map(followed).find(|s| s["properties"].is_object());
        let inside = [("", followed(inner)), ("[]", items)].into_iter().chain(some.map(|s| ("", s)));
        let below = inside.into_iter().find(|(_, s)| s["properties"].is_object());
        let default = match (&inner["default"], below.is_some()) {
            (Value::Null, _) | (_, true) => String::new(),
            // The default negative prompt is a long line of text.
            (Value::String(text), _) if text.len() > 40 => "see the presets".into(),
            (Value::String(text), _) => format!("`{text:?}`").replace("\"", if text.is_empty() { "\"" } else { "" }),
            (value, _) => format!("`{value}`"),
        };
        let about = about.replace('\n', " ").replace('|', "\\|");
        writeln!(page, "| `{name}` | {} | {default} | {about} |", accepted(inner)).unwrap();
        if let Some((suffix, below)) = below {
            keys(below, &format!("{name}{suffix}."), page);
        }
    }
}

fn yaml() -> String {
    let head = "| key | accepts | default | meaning |\n|---|---|---|---|\n";
    let mut page = format!("# YAML\n\n{GENERATED}\n\n## A run\n\n`ltx2 schema` prints its JSON Schema.\n\n{head}");
    keys(json_schema(), "", &mut page);
    page += "\n## An experiment\n\n`ltx2 schema --of experiment` prints its JSON Schema.\n\n";
    page += head;
    keys(&json_schema()["$defs"]["Experiment"], "", &mut page);
    page
}

/// Returns the table of pipelines.
fn pipelines() -> String {
    let mut page = format!(
        "# Pipelines\n\n{GENERATED}\n\nA pipeline rejects inputs that it neither requires nor accepts. The [guide](../guides/pipelines.md) \
         describes stages and steps.\n\n| pipeline | result | requires | accepts | presets |\n|---|---|---|---|---|\n"
    );
    for pipeline in Pipeline::value_variants() {
        let spec = pipeline.spec();
        let help = pipeline.to_possible_value().and_then(|value| value.get_help().map(ToString::to_string));
        let inputs = |support| {
            let of_video = |video_use| spec.video == Some(video_use) && support == Support::Required;
            let found = [
                ("images", spec.images == support),
                ("audio", spec.audio == support),
                ("reference videos", spec.reference_videos == support),
                ("a video", spec.video.is_some() && support == Support::Required),
                ("a time span", of_video(VideoUse::Span)),
                ("a duration", of_video(VideoUse::Overlap)),
                ("`--chain`", spec.chain && support == Support::Optional),
                ("`--motion-speed`", spec.motion_speed && support == Support::Optional),
                ("`--num-generated-keyframes`", spec.generated_keyframes && support == Support::Optional),
            ];
            found.into_iter().filter(|(_, is_in)| *is_in).map(|(name, _)| name).collect::<Vec<_>>().join(", ")
        };
        let versions = [Version::V2_0, Version::V2_3, Version::V2_5];
        let mut presets: Vec<String> = versions.map(|version| format!("`{}`", pipeline.preset(version))).into();
        presets.dedup();
        let [requires, accepts] = [Support::Required, Support::Optional].map(inputs);
        let (help, presets) = (help.unwrap_or_default(), presets.join(", "));
        writeln!(page, "| `{}` | {help} | {requires} | {accepts} | {presets} |", spec.name).unwrap();
    }
    page
}

/// Returns the files that `ltx2 pull` downloads for each preset.
fn downloads() -> String {
    let mut page = format!(
        "# Downloads\n\n{GENERATED}\n\n`ltx2 pull PRESET` downloads these files. Names come from public listings and Lightricks' code, sizes \
         (decimal GB) from third-party records; `ltx2 pull PRESET --dry-run` shows the hub's own sizes.\n\n\
         | repository | licence |\n|---|---|\n"
    );
    for repository in published::repositories() {
        let licence = published::licence(repository).unwrap();
        writeln!(page, "| [{repository}](https://huggingface.co/{repository}) | {licence} |").unwrap();
    }
    for model in &MODELS {
        let presets = model.presets.iter().map(|preset| format!("`{preset}`")).collect::<Vec<_>>().join(", ");
        writeln!(page, "\n## {presets}\n\n| repository | file | contents | GB |\n|---|---|---|---|").unwrap();
        for file in model.files {
            let path = if file.path.is_empty() { "all".to_string() } else { format!("`{}`", file.path) };
            let size = file.megabytes.map_or(String::new(), |size| format!("{:.2}", f64::from(size) / 1e3));
            writeln!(page, "| {} | {path} | {} | {size} |", file.repository, file.purpose).unwrap();
        }
        if let Some((lora, value)) = model.loras {
            writeln!(page, "\nSet the LoRA: `--set 'model.loras={}'`.", value.replace("{}", lora)).unwrap();
        }
    }
    page
}

/// Returns the table of published IC-LoRAs.
fn ic_lora_table() -> String {
    let mut page = format!(
        "# IC-LoRAs\n\n{GENERATED}\n\n`--ic-lora NAME` selects the IC-LoRA of this name that was published for the model's \
         generation; `ltx2 pull NAME` downloads it. The spatial scale in the file's header has precedence over that of the table. \
         `preprocess` is the conversion of reference videos that do not set one. Trigger words are not listed: the model cards were not read, and may \
         state some.\n\n\
         | name | model | reference video | `preprocess` | mask | spatial scale | strength | file | source |\n\
         |---|---|---|---|---|---|---|---|---|\n"
    );
    for row in &IC_LORAS {
        let scale = row.downscale.map_or("in the header".to_string(), |scale| scale.to_string());
        let strength = row.strength.map_or("not published; 1 is used".to_string(), |strength| strength.to_string());
        let file = row.file.map_or("name unknown".to_string(), |file| format!("`{file}`"));
        let mask = match row.input {
            IcLoraInput::Videos => "no".to_string(),
            IcLoraInput::Masked => "required, painted into the reference video".to_string(),
            IcLoraInput::Pipeline(pipeline) => format!("no; only in the pipeline `{}`", pipeline.name()),
        };
        let base = row.also.map_or(row.base.to_string(), |also| format!("{}, LTX-{also}", row.base));
        let alias = ALIASES.iter().find(|(_, name)| *name == row.name);
        let name = alias.map_or(format!("`{}`", row.name), |(alias, name)| format!("`{name}`, `{alias}`"));
        let PublishedIcLora { repository, reference, source, .. } = row;
        let (preprocess, link) =
            (row.preprocess.name(), format!("[{repository}](https://huggingface.co/{repository})"));
        writeln!(
            page,
            "| {name} | LTX-{base} | {reference} | `{preprocess}` | {mask} | {scale} | {strength} | {link}: {file} | {source} |"
        )
        .unwrap();
    }
    page + UPSCALERS
}

/// Recipe of the upscalers.
const UPSCALERS: &str = r#"
## Enlarge a video

```sh
ltx2 generate -m Lightricks/LTX-2.3/ltx-2.3-22b-distilled-1.1.safetensors --ic-lora pixel-spatial-upscaler-x2 \
    --reference-video small.mp4 --pipeline text_to_video --width 1536 --height 1024 -p "a stone bridge at dawn" \
    --guidance-scale 1 --stg-scale 0 --modality-scale 1 --guidance-rescale 0 \
    --set 'sampler.sigmas=[1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0]'
```

This runs one stage, as Lightricks' workflow does. The reference is encoded at 1/2 (`-x4`: 1/4) of the video's size, which
`small.mp4` should have; width and height must be multiples of 64 (`-x4`: 128). The workflow uses the sampler `euler_cfg_pp` and
the dev model with the distilled LoRA at strength 0.5; this command uses the distilled model. Without `--pipeline`, `in_context`
follows the reference in a first stage of half the size. A lower strength keeps the video closer to the reference.
"#;

fn report(command: &str, schema: &'static Value) -> String {
    let mut page = format!(
        "# The report of `ltx2 {command} --json`\n\n{GENERATED}\n\n`ltx2 schema --of {command}` prints its JSON Schema. Figures are \
         of one device; a *step* is one iteration of the program's loop, or the whole run of a program without one.\n\n\
         | key | type | | meaning |\n|---|---|---|---|\n"
    );
    keys(schema, "", &mut page);
    page
}

/// The compiler does not check the report keys that scripts use.
#[needs(nothing)]
fn scripts_use_only_existing_report_keys() {
    let mut known = BTreeSet::new();
    let mut page = String::new();
    keys(report_schema(), "", &mut page);
    for name in page.lines().filter_map(|line| line.split('`').nth(1)) {
        known.extend(name.split('.').map(|part| part.trim_end_matches("[]").to_string()));
    }
    // pods.py's own key.
    known.insert("error".to_string());
    let mut all = 0;
    let scripts = ["layouts/ablations.py", "layouts/pods.py"];
    for script in scripts.map(|name| format!("scripts/{name}")) {
        let text = fs::read_to_string(&script).unwrap();
        for name in ["f", "figures", "memory", "ms", "c", "report"] {
            let name = format!("{name}[");
            let starts = text.match_indices(&name).map(|(at, found)| (at, at + found.len() - 1));
            for (at, mut end) in starts.collect::<Vec<_>>() {
                if text[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_') {
                    continue;
                }
                while let Some(rest) = text[end..].strip_prefix(['[']).filter(|rest| rest.starts_with(['"', '\''])) {
                    let key: String = rest[1..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                    assert!(known.contains(&key), "{script} reads '{key}', which no report has");
                    end += key.len() + 4;
                    all += 1;
                }
            }
        }
    }
    assert!(all > 20, "{all} keys are read");
}

#[needs(nothing)]
fn generated_reference_pages_are_up_to_date() {
    let schema = |schema: &Value| format!("{}\n", serde_json::to_string_pretty(schema).unwrap());
    let pages = [
        ("cli.md", command_line()),
        ("yaml.md", yaml()),
        ("pipelines.md", pipelines()),
        ("downloads.md", downloads()),
        ("ic-loras.md", ic_lora_table()),
        ("run.schema.json", schema(json_schema())),
        ("experiment.schema.json", schema(&experiment_schema())),
        ("compile.md", report("compile", report_schema())),
        ("compile.schema.json", schema(report_schema())),
        ("why.md", report("why", diagnosis_schema())),
        ("why.schema.json", schema(diagnosis_schema())),
    ];
    let write = std::env::var_os("LTX2_WRITE_REFERENCE").is_some();
    for (name, page) in pages {
        let path = Path::new("docs/reference").join(name);
        if write {
            fs::write(&path, &page).unwrap();
        }
        let kept = fs::read_to_string(&path).unwrap_or_default();
        let differs = kept.lines().zip(page.lines()).position(|(a, b)| a != b);
        assert!(kept == page, "{} is not current from line {differs:?} on: run `make reference`", path.display());
    }
}
