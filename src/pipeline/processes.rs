//! A run of several processes, from the point of view of one: it meets the others, asks the same of the devices as they
//! do, and ends with them.

use std::fmt::Display;
use std::io::Write;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::differences::difference;
use super::error::PipelineError;
use super::options::GenerateOptions;
use crate::config::{Config, Job};
use crate::interrupts;
use crate::pjrt::end_process;
use crate::runtime::processes::{Group, Launch, LaunchOptions, Timeouts};
use crate::temporaries;

/// Keys that may differ between processes: places on their hosts, and the processes' numbers and addresses.
const OWN: [&str; 12] = [
    "/output",
    "/runtime/distributed",
    "/runtime/visible_devices",
    "/runtime/compile_cache",
    "/runtime/watchdog",
    "/model/path",
    "/model/text_encoder",
    "/model/tokenizer",
    "/model/vae",
    "/model/audio_vae",
    "/model/vocoder",
    "/model/upsampler",
];

/// How long an interrupted process waits for the others to be told.
const TOLD_WITHIN: Duration = Duration::from_millis(500);

/// Runs `run` as one of the processes that the configuration or the environment speaks of, or alone. When another process
/// is lost or fails, this one says so and ends at once with exit code 1, what it was writing removed.
///
/// # Errors
/// Those of `run`, which the other processes learn; processes that do not come together.
pub fn together<T, E: Display + From<PipelineError>>(
    config: &Config,
    run: impl FnOnce(Option<&Arc<Group>>) -> Result<T, E>,
) -> Result<T, E> {
    let asked = &config.runtime.distributed;
    let launch = Launch::detect(
        &LaunchOptions {
            coordinator: asked.coordinator.clone(),
            process_id: asked.process_id,
            num_processes: asked.num_processes,
        },
        |name| std::env::var(name).ok(),
    );
    let Some(launch) = launch.map_err(PipelineError::from)? else { return run(None) };
    let timeouts =
        Timeouts { start: Duration::from_secs(asked.start_timeout), lost: Duration::from_secs(asked.timeout) };
    let end = |message: &str| {
        last_words(message);
        end_process(1)
    };
    let group = Arc::new(Group::join(&launch, timeouts, Box::new(end)).map_err(PipelineError::from)?);
    tracing::info!("{}", group.describe());
    let others = Arc::clone(&group);
    let told = interrupts::keeper(move || tell_others(&others));
    let done = run(Some(&group));
    drop(told);
    match &done {
        Ok(_) => group.finish(),
        Err(error) => group.fail(&format!("failed: {error}")),
    }
    done
}

/// Tells the other processes that this one was interrupted, and waits for the answer no longer than [`TOLD_WITHIN`].
fn tell_others(group: &Arc<Group>) -> Option<String> {
    let (send, told) = mpsc::channel();
    let group = Arc::clone(group);
    let tell = move || {
        group.fail("was interrupted");
        // Nobody waits any longer.
        let _ = send.send(());
    };
    if thread::Builder::new().name("interrupt".into()).spawn(tell).is_ok() {
        let _ = told.recv_timeout(TOLD_WITHIN);
    }
    None
}

/// Says why this process ends at once, and removes what it was writing.
pub(super) fn last_words(message: &str) {
    // A full disk below stderr does not keep the process from its end.
    let _ = writeln!(std::io::stderr(), "error: {message}");
    temporaries::remove_all();
}

/// Compares what is asked for with the other processes.
///
/// # Errors
/// The first process that differs and the key in which it does; the same in every process.
pub(crate) fn compare(group: &Group, config: &Config, options: &GenerateOptions) -> Result<(), PipelineError> {
    let mut own = json!({
        "config": config,
        "jobs": options.jobs.iter().map(|Job { prompt, seed, .. }| json!({"prompt": prompt, "seed": seed})).collect::<Vec<_>>(),
        "dump": options.dump.is_some(),
        "dump_steps": options.dump_steps,
        "progress_every": options.progress_every,
    });
    for key in OWN {
        if let Some(value) = own.pointer_mut(&format!("/config{key}")) {
            *value = Value::Null;
        }
    }
    let differ = |name: &str, its: &str, first: &str| {
        let read = |text: &str| serde_json::from_str(text).unwrap_or(Value::Null);
        match difference(&read(its), &read(first), "") {
            Some((key, its, first)) => {
                let key = key.strip_prefix("config.").unwrap_or(&key);
                format!("{name} has {key} = {its}, process 0 has {first}")
            }
            None => format!("{name} is asked for something else than process 0"),
        }
    };
    Ok(group.ensure_equal(&own.to_string(), differ)?)
}

/// Waits until all have done their part, files included: a process that gave its devices back earlier would be a lost peer
/// to the others' communicators.
pub(crate) fn wait_for_all(group: &Group) -> Result<(), PipelineError> {
    Ok(group.all_gather("done").map(drop)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_that_differs_is_named() {
        let tree = |seed: u64| json!({"config": {"request": {"width": 64, "seed": seed}}, "dump": false});
        assert_eq!(difference(&tree(1), &tree(1), ""), None);
        let (key, its, first) = difference(&tree(2), &tree(1), "").unwrap();
        assert_eq!((key.as_str(), its.as_str(), first.as_str()), ("config.request.seed", "2", "1"));
        let more = json!({"config": {"request": {"width": 64, "seed": 1}}, "dump": false, "jobs": []});
        assert_eq!(difference(&tree(1), &more, "").unwrap().0, "jobs");
    }

    #[test]
    fn what_may_differ_is_in_the_schema() {
        let config = serde_json::to_value(Config::default()).unwrap();
        assert!(OWN.iter().all(|key| config.pointer(key).is_some()));
    }
}
