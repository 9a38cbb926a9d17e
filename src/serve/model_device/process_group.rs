//! Servers with several processes: process 0 owns the jobs, and the other processes make the same device calls.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::job::AcceptedJob;
use super::files::InputFolder;
use super::{Config, JobBatch, ModelDevice, PipelineError, RunError, Stop, one_line};
use crate::config::Serve;
use crate::pipeline::plan::videos::RunVideos;
use crate::pipeline::processes::{compare, compare_loras, wait_for_all};
use crate::runtime::processes::Group;

/// A device call that process 0 broadcasts to the other processes.
#[derive(Serialize, Deserialize)]
pub(super) enum DeviceCall {
    /// Warms up a shape with this batch size and one step per denoising pass.
    Warm(SentBatch, usize),
    Run(SentBatch),
    Evict(String),
    End,
}

/// A batch as process 0 sends it to the other processes.
#[derive(Serialize, Deserialize)]
pub(super) struct SentBatch {
    jobs: Vec<AcceptedJob>,
    /// Number of denoising steps per device call.
    chunk: usize,
    /// Contents of the input files in base64, by file name. They are sent because only process 0 has the files.
    files: BTreeMap<String, String>,
}

impl SentBatch {
    pub(super) fn from_batch(order: &JobBatch, chunk: usize, inputs: &InputFolder) -> Result<Self, PipelineError> {
        let mut files = BTreeMap::new();
        for name in order.jobs.iter().flat_map(|job| &job.inputs) {
            files.insert(name.clone(), BASE64_STANDARD.encode(inputs.read(name)?));
        }
        Ok(SentBatch { jobs: order.jobs.iter().map(|job| AcceptedJob::clone(job)).collect(), chunk, files })
    }

    /// Writes the input files to the folder that `inputs` returns, passes the batch and its number of steps per device
    /// call to `call`, and then removes the files.
    fn with_files<D>(
        self,
        device: &mut D,
        inputs: impl Fn(&D) -> &InputFolder,
        call: impl FnOnce(&mut D, &JobBatch, usize) -> Result<(), PipelineError>,
    ) -> Result<(), PipelineError> {
        for (name, text) in &self.files {
            let bytes = BASE64_STANDARD.decode(text).map_err(|e| PipelineError::Input(format!("{name}: {e}")))?;
            inputs(device).write(name, &bytes)?;
        }
        let jobs = self.jobs.into_iter().map(Arc::new).collect();
        let called = call(device, &JobBatch { jobs, steps: None, resume: false }, self.chunk);
        let removed = self.files.keys().try_for_each(|name| inputs(device).remove(name));
        called.and(removed)
    }
}

/// What process 0 sends to the other processes while they wait for another server.
#[derive(Serialize, Deserialize)]
enum SharedAnswer<T> {
    Answer(Result<T, String>),
    Cancelled,
    Draining,
}

/// The processes of a server; `None` if there is only one.
#[derive(Clone, Default)]
pub(super) struct ServerProcesses(Option<Arc<Group>>);

impl ServerProcesses {
    /// Returns the processes of `group`. Fails if their configurations differ; the error describes the first difference.
    pub(super) fn meet(group: Option<&Arc<Group>>, config: &Config) -> Result<Self, PipelineError> {
        if let Some(group) = group {
            // Compare only the `serve` keys that every process uses. Only process 0 uses the others.
            let Serve { max_batch, max_frames, .. } = config.serve;
            let same = Config { serve: Serve { max_batch, max_frames, ..Serve::default() }, ..config.clone() };
            compare(Some(group), &same, &RunVideos::default())?;
        }
        Ok(ServerProcesses(group.cloned()))
    }

    /// Checks that the LoRA files of all processes have the same contents. `paths`: those of process 0 count, but an error
    /// of any process, which has not found a file, is that of all.
    ///
    /// # Errors
    /// Returns an error with the file and the first process that differs from process 0, in all processes.
    pub(super) fn compare_loras(&self, paths: Result<Vec<String>, PipelineError>) -> Result<(), PipelineError> {
        let Some(group) = &self.0 else { return paths.map(|_| ()) };
        let shared = paths.as_ref().map_err(|error| one_line(error));
        let all = group.all_gather(&serde_json::json!(shared).to_string())?;
        // The own error keeps its type.
        paths?;
        let first = first_paths(&all)?;
        compare_loras(Some(group), first.iter().map(String::as_str))
    }

    pub(super) fn group(&self) -> Option<&Arc<Group>> {
        self.0.as_ref()
    }

    /// Returns whether the server has several processes.
    pub(super) fn are_several(&self) -> bool {
        self.0.is_some()
    }

    fn is_first(&self) -> bool {
        self.0.as_ref().is_some_and(|group| group.id() == 0)
    }

    /// Broadcasts a call to the other processes. Does nothing if there are none, or if this is not process 0.
    pub(super) fn publish(
        &self,
        call: impl FnOnce() -> Result<DeviceCall, PipelineError>,
    ) -> Result<(), PipelineError> {
        let Some(group) = self.0.as_ref().filter(|_| self.is_first()) else { return Ok(()) };
        let text = serde_json::to_string(&call()?).map_err(|e| PipelineError::Bug(e.to_string()))?;
        group.all_gather(&text)?;
        Ok(())
    }

    fn next(&self) -> Result<DeviceCall, PipelineError> {
        let Some(group) = &self.0 else { return Ok(DeviceCall::End) };
        let texts = group.all_gather("")?;
        serde_json::from_str(&texts[0]).map_err(|e| PipelineError::Bug(format!("invalid call from process 0: {e}")))
    }

    /// Returns the decision of process 0 instead of this process's own, so that all processes stop after the same
    /// device call.
    pub(super) fn decide(&self, own: ControlFlow<Stop>) -> ControlFlow<Stop> {
        let Some(group) = &self.0 else { return own };
        let word = match own {
            ControlFlow::Continue(()) => "go",
            ControlFlow::Break(Stop::Cancelled) => "cancelled",
            ControlFlow::Break(Stop::Draining) => "draining",
        };
        match group.all_gather(word).as_ref().map(|all| all[0].as_str()) {
            Ok("go") => ControlFlow::Continue(()),
            Ok("cancelled") => ControlFlow::Break(Stop::Cancelled),
            // If the coordination store is unreachable, this process will exit soon.
            Ok(_) | Err(_) => ControlFlow::Break(Stop::Draining),
        }
    }

    /// Returns whether this process sends the requests of all processes to other servers.
    pub(super) fn asks(&self) -> bool {
        !self.are_several() || self.is_first()
    }

    /// Returns the answer of process 0, or its decision to stop, in all processes.
    ///
    /// # Errors
    /// Returns an error if the coordination store is unreachable.
    pub(super) fn share<T: Serialize + DeserializeOwned>(
        &self,
        own: ControlFlow<Stop, Result<T, String>>,
    ) -> Result<ControlFlow<Stop, Result<T, String>>, PipelineError> {
        let Some(group) = &self.0 else { return Ok(own) };
        let bug = |error: serde_json::Error| PipelineError::Bug(error.to_string());
        let own = match own {
            ControlFlow::Continue(answer) => SharedAnswer::Answer(answer),
            ControlFlow::Break(Stop::Cancelled) => SharedAnswer::Cancelled,
            ControlFlow::Break(Stop::Draining) => SharedAnswer::Draining,
        };
        let all = group.all_gather(&serde_json::to_string(&own).map_err(bug)?)?;
        Ok(match serde_json::from_str(&all[0]).map_err(bug)? {
            SharedAnswer::Answer(answer) => ControlFlow::Continue(answer),
            SharedAnswer::Cancelled => ControlFlow::Break(Stop::Cancelled),
            SharedAnswer::Draining => ControlFlow::Break(Stop::Draining),
        })
    }

    /// Fails unless all processes completed a call with the same outcome. If they differed, the next calls would differ
    /// too.
    pub(super) fn agree(&self, outcome: &str) -> Result<(), PipelineError> {
        let Some(group) = &self.0 else { return Ok(()) };
        let differ = |name: &str, its: &str, first: &str| {
            format!("{name} ended the call with '{its}', but process 0 with '{first}'")
        };
        Ok(group.ensure_equal(outcome, differ)?)
    }

    /// Tells the other processes to exit. Does nothing if there are none, or if this is not process 0.
    pub(super) fn end(&self) {
        if !self.is_first() {
            return;
        }
        let ended = self.publish(|| Ok(DeviceCall::End)).and_then(|()| self.wait());
        if let Err(error) = ended {
            tracing::warn!("{}", one_line(&error));
        }
    }

    fn wait(&self) -> Result<(), PipelineError> {
        wait_for_all(self.group())
    }
}

/// Makes the same device calls as process 0 until the server shuts down.
///
/// # Errors
/// Returns the error of the model or the device, on one line.
pub fn follow(config: &Config, group: &Arc<Group>) -> Result<(), String> {
    follow_all(config, group).map_err(|error| one_line(&error))
}

fn inputs_of(device: &ModelDevice) -> &InputFolder {
    &device.inputs
}

fn follow_all(config: &Config, group: &Arc<Group>) -> Result<(), PipelineError> {
    let fail = |e: std::io::Error| PipelineError::Input(format!("cannot create a folder for input files: {e}"));
    let folder = tempfile::tempdir().map_err(fail)?;
    let mut own = config.clone();
    own.serve.state = Some(folder.path().to_string_lossy().into_owned());
    std::fs::create_dir(folder.path().join("inputs")).map_err(fail)?;
    let mut device = ModelDevice::open(&own, None, Some(group))?;
    let ended = |outcome: Result<(), RunError>| match outcome {
        Err(RunError::Device(error)) => Err(PipelineError::Input(error)),
        // Process 0 reports the failure of a job to its client, so the other processes continue.
        _ => Ok(()),
    };
    loop {
        match device.process_group.next()? {
            DeviceCall::Run(sent) => sent.with_files(&mut device, inputs_of, |device, order, chunk| {
                let made = device.run_chunks(order, chunk, &mut |_| ControlFlow::Continue(()));
                ended(made.map(drop))
            })?,
            DeviceCall::Warm(sent, size) => {
                sent.with_files(&mut device, inputs_of, |device, order, _| ended(device.warm_one(order, size)))?;
            }
            DeviceCall::Evict(shape) => device.forget(&shape),
            DeviceCall::End => return device.process_group.wait(),
        }
    }
}

/// Returns the paths that process 0 sent. `all`: paths or error of each process.
///
/// # Errors
/// Returns the first error of a process.
fn first_paths(all: &[String]) -> Result<Vec<String>, PipelineError> {
    let mut first = None;
    for (id, text) in all.iter().enumerate() {
        let sent: Result<Vec<String>, String> = serde_json::from_str(text)
            .map_err(|error| PipelineError::Bug(format!("invalid paths from process {id}: {error}")))?;
        let paths = sent.map_err(|error| PipelineError::Usage(format!("process {id}: {error}")))?;
        first.get_or_insert(paths);
    }
    Ok(first.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::super::files::lora_paths;
    use super::*;

    #[test]
    fn error_of_any_process_about_its_loras_is_that_of_all() {
        let sent = |paths: Result<Vec<&str>, &str>| serde_json::json!(paths).to_string();
        let two = [sent(Ok(vec!["a", "b"])), sent(Ok(vec!["c", "d"]))];
        assert_eq!(first_paths(&two).expect("paths"), ["a", "b"]);
        let error = first_paths(&[sent(Ok(vec!["a"])), sent(Err("deblur is missing"))]).expect_err("an error");
        assert_eq!(error.to_string(), "process 1: deblur is missing");
    }

    #[test]
    fn compared_loras_include_served_ones() {
        let text = "{loras: {style: {path: a.safetensors}}, ic_loras: []}";
        let mut config = Config { serve: serde_saphyr::from_str(text).expect("YAML"), ..Config::default() };
        assert_eq!(lora_paths(&config).expect("paths"), ["a.safetensors"]);
        config.serve.ic_loras = vec!["sharpen".into()];
        let error = lora_paths(&config).expect_err("an unknown name").to_string();
        assert!(error.contains("serve.ic_loras = sharpen"), "{error}");
    }

    /// A process other than process 0 has the input files only during a call.
    #[test]
    fn input_files_are_removed_after_the_call() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("inputs")).expect("a folder");
        let mut config = Config::default();
        config.serve.state = Some(folder.path().to_string_lossy().into_owned());
        let mut inputs = InputFolder::from_config(&config).expect("a folder");
        let kept = || std::fs::read_dir(folder.path().join("inputs")).expect("a folder").count();
        for refused in [false, true] {
            let files = ["a.png", "b.sound"].map(|name| (name.to_string(), BASE64_STANDARD.encode(name)));
            let sent = SentBatch { jobs: Vec::new(), chunk: 3, files: files.into() };
            let called = sent.with_files(
                &mut inputs,
                |inputs| inputs,
                |inputs, _, chunk| {
                    assert_eq!((chunk, kept(), inputs.read("a.png")?), (3, 2, b"a.png".to_vec()));
                    if refused { Err(PipelineError::Input("no".into())) } else { Ok(()) }
                },
            );
            assert_eq!((called.is_err(), kept()), (refused, 0));
        }
    }
}
