//! One process of a multi-process run: joins the other processes, checks that all run the same request, and exits when
//! another process fails.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::Write;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::error::PipelineError;
use super::output::differences::difference;
use super::plan::videos::{Job, RunVideos};
use crate::config::{Config, Distributed, model_paths};
use crate::interrupts;
use crate::pjrt::end_process;
use crate::runtime::processes::{Group, Launch, LaunchOptions, Timeouts};
use crate::temporaries;
use crate::weights::lora::lora_fingerprint;

/// Config keys whose values may differ between processes, in addition to the [`model_paths`]: paths on the processes'
/// hosts, process ids and addresses.
const OWN: [&str; 5] =
    ["/output", "/runtime/distributed", "/runtime/visible_devices", "/runtime/compile_cache", "/runtime/watchdog"];

/// Returns the JSON pointers of all config keys whose values may differ between processes.
fn own_keys() -> impl Iterator<Item = String> {
    OWN.into_iter().map(String::from).chain(model_paths().map(|key| format!("/model/{key}")))
}

/// Maximum time that an interrupted process waits until the other processes are notified.
const NOTIFY_TIMEOUT: Duration = Duration::from_millis(500);

/// Calls `run`. If `asked` or the launcher's environment describes several processes, joins them first;
/// otherwise, this process runs alone. If another process is lost or fails, this process prints why, removes partially
/// written files and exits immediately with code 1.
///
/// # Errors
/// Returns the error of `run`, after reporting it to the other processes, or an error if the processes cannot be
/// joined.
pub fn together<T, E: Display + From<PipelineError>>(
    asked: &Distributed,
    run: impl FnOnce(Option<&Arc<Group>>) -> Result<T, E>,
) -> Result<T, E> {
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
        report_exit(message);
        end_process(1)
    };
    let group = Arc::new(Group::join(&launch, timeouts, Box::new(end)).map_err(PipelineError::from)?);
    tracing::info!("{}", group.describe());
    let others = Arc::clone(&group);
    let told = interrupts::keeper(move || notify_others(&others));
    let done = run(Some(&group));
    drop(told);
    match &done {
        Ok(_) => group.finish(),
        Err(error) => group.fail(&format!("failed: {error}")),
    }
    done
}

/// Notifies the other processes that this process was interrupted. Waits for at most [`NOTIFY_TIMEOUT`].
fn notify_others(group: &Arc<Group>) -> Option<String> {
    let (send, told) = mpsc::channel();
    let group = Arc::clone(group);
    let tell = move || {
        group.fail("was interrupted");
        // Sending fails if the receiver has timed out.
        let _ = send.send(());
    };
    if thread::Builder::new().name("interrupt".into()).spawn(tell).is_ok() {
        let _ = told.recv_timeout(NOTIFY_TIMEOUT);
    }
    None
}

/// Prints why this process exits, and removes the files that are partially written.
pub(super) fn report_exit(message: &str) {
    // The process must exit even if stderr cannot be written.
    let _ = writeln!(std::io::stderr(), "error: {message}");
    temporaries::remove_all();
}

/// Checks that all processes have the same configuration and videos.
///
/// # Errors
/// Returns an error with the first process that differs from process 0, and the key in which it differs. All processes
/// return the same error.
pub(crate) fn compare(group: Option<&Arc<Group>>, config: &Config, videos: &RunVideos) -> Result<(), PipelineError> {
    let Some(group) = group else { return Ok(()) };
    let mut own = json!({
        "config": config,
        "jobs": videos.jobs.iter().map(|Job { prompt, seed, .. }| json!({"prompt": prompt, "seed": seed})).collect::<Vec<_>>(),
        "dump": videos.dump.is_some(),
        "dump_steps": videos.dump_steps,
        "progress_every": videos.progress_every,
    });
    for key in own_keys() {
        if let Some(value) = own.pointer_mut(&format!("/config{key}")) {
            *value = Value::Null;
        }
    }
    let differ = |name: &str, its: &str, first: &str| {
        let read = |text: &str| serde_json::from_str(text).unwrap_or(Value::Null);
        match difference(&read(its), &read(first), "") {
            Some((key, its, first)) => {
                let key = key.strip_prefix("config.").unwrap_or(&key);
                format!("{name} has {key} = {its}, process 0 has {first}; use the same value in all processes")
            }
            None => format!("{name} and process 0 have different requests; use the same request in all processes"),
        }
    };
    Ok(group.ensure_equal(&own.to_string(), differ)?)
}

/// Checks that the LoRA files of all processes have the same contents, by the fingerprints that sidecars record. A process
/// that cannot read a file differs from those that can. `paths`: equal in all processes.
///
/// # Errors
/// Returns an error with the file and the first process that differs from process 0. All processes return the same error.
pub(crate) fn compare_loras<'a>(
    group: Option<&Arc<Group>>,
    paths: impl Iterator<Item = &'a str>,
) -> Result<(), PipelineError> {
    let Some(group) = group else { return Ok(()) };
    let paths: BTreeSet<&str> = paths.collect();
    if paths.is_empty() {
        return Ok(());
    }
    let own: Vec<_> = paths.iter().map(|path| lora_fingerprint(path).unwrap_or_else(|e| e.to_string())).collect();
    let differ = |name: &str, its: &str, first: &str| {
        let [its, first] = [its, first].map(|text| serde_json::from_str::<Vec<String>>(text).ok());
        let mut all = paths.iter().zip(its.iter().flatten().zip(first.iter().flatten()));
        match all.find(|(_, (its, first))| its != first) {
            Some((path, (its, first))) => format!(
                "{path}: the LoRA file of {name} ({its}) differs from that of process 0 ({first}); copy the same file to all \
                 hosts"
            ),
            None => format!("{name} and process 0 have different LoRAs; use the same LoRAs in all processes"),
        }
    };
    Ok(group.ensure_equal(&json!(own).to_string(), differ)?)
}

/// Waits until all processes have finished, including writing their files. If a process released its devices earlier,
/// the communicators of the others would report it as lost.
pub(crate) fn wait_for_all(group: Option<&Arc<Group>>) -> Result<(), PipelineError> {
    Ok(group.map_or(Ok(()), |group| group.all_gather("done").map(drop))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_difference_is_reported_with_key() {
        let tree = |seed: u64| json!({"config": {"request": {"width": 64, "seed": seed}}, "dump": false});
        assert_eq!(difference(&tree(1), &tree(1), ""), None);
        let (key, its, first) = difference(&tree(2), &tree(1), "").unwrap();
        assert_eq!((key.as_str(), its.as_str(), first.as_str()), ("config.request.seed", "2", "1"));
        let more = json!({"config": {"request": {"width": 64, "seed": 1}}, "dump": false, "jobs": []});
        assert_eq!(difference(&tree(1), &more, "").unwrap().0, "jobs");
    }

    #[test]
    fn keys_that_may_differ_exist_in_the_schema() {
        let config = serde_json::to_value(Config::default()).unwrap();
        for key in own_keys() {
            assert!(config.pointer(&key).is_some(), "{key}");
        }
    }
}
