//! One server of several processes: process 0 has the jobs, and the others make the same calls beside it.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde::{Deserialize, Serialize};

use super::super::job::Accepted;
use super::files::Inputs;
use super::{Config, ModelDevice, Order, PipelineError, RunError, Stop, one_line};
use crate::config::Serve;
use crate::pipeline::options::GenerateOptions;
use crate::pipeline::processes::{compare, wait_for_all};
use crate::runtime::processes::Group;

/// A call that all processes make next.
#[derive(Serialize, Deserialize)]
pub(super) enum Call {
    /// One step of each pass, of so many videos.
    Warm(Sent, usize),
    Run(Sent),
    Evict(String),
    End,
}

/// An order on its way to the others.
#[derive(Serialize, Deserialize)]
pub(super) struct Sent {
    jobs: Vec<Accepted>,
    /// Steps of a call.
    chunk: usize,
    /// Given files by their names: only the first process has the store.
    files: BTreeMap<String, String>,
}

impl Sent {
    pub(super) fn of(order: &Order, chunk: usize, inputs: &Inputs) -> Result<Self, PipelineError> {
        let mut files = BTreeMap::new();
        for name in order.jobs.iter().flat_map(|job| &job.inputs) {
            files.insert(name.clone(), BASE64_STANDARD.encode(inputs.read(name)?));
        }
        Ok(Sent { jobs: order.jobs.iter().map(|job| Accepted::clone(job)).collect(), chunk, files })
    }

    /// Makes a call with the order and the steps of a call. Its files are there for as long.
    fn with_files<D>(
        self,
        device: &mut D,
        inputs: impl Fn(&D) -> &Inputs,
        call: impl FnOnce(&mut D, &Order, usize) -> Result<(), PipelineError>,
    ) -> Result<(), PipelineError> {
        for (name, text) in &self.files {
            let bytes = BASE64_STANDARD.decode(text).map_err(|e| PipelineError::Input(format!("{name}: {e}")))?;
            inputs(device).write(name, &bytes)?;
        }
        let jobs = self.jobs.into_iter().map(Arc::new).collect();
        let called = call(device, &Order { jobs, steps: None, resume: false }, self.chunk);
        let removed = self.files.keys().try_for_each(|name| inputs(device).remove(name));
        called.and(removed)
    }
}

/// The processes of a server, or this one alone.
#[derive(Clone, Default)]
pub(super) struct Together(Option<Arc<Group>>);

impl Together {
    /// Meets the other processes, which have to be asked for the same.
    ///
    /// # Errors
    /// The first that differs, and in what.
    pub(super) fn meet(group: Option<&Arc<Group>>, config: &Config) -> Result<Self, PipelineError> {
        if let Some(group) = group {
            // What every process decides for itself; the rest of a server is the first one's.
            let Serve { max_batch, max_frames, .. } = config.serve;
            let same = Config { serve: Serve { max_batch, max_frames, ..Serve::default() }, ..config.clone() };
            compare(group, &same, &GenerateOptions::default())?;
        }
        Ok(Together(group.cloned()))
    }

    pub(super) fn group(&self) -> Option<&Arc<Group>> {
        self.0.as_ref()
    }

    /// Whether it is one of several.
    pub(super) fn are_several(&self) -> bool {
        self.0.is_some()
    }

    fn is_first(&self) -> bool {
        self.0.as_ref().is_some_and(|group| group.id() == 0)
    }

    /// Has the others make a call, as the first process.
    pub(super) fn publish(&self, call: impl FnOnce() -> Result<Call, PipelineError>) -> Result<(), PipelineError> {
        let Some(group) = self.0.as_ref().filter(|_| self.is_first()) else { return Ok(()) };
        let text = serde_json::to_string(&call()?).map_err(|e| PipelineError::Bug(e.to_string()))?;
        group.all_gather(&text)?;
        Ok(())
    }

    fn next(&self) -> Result<Call, PipelineError> {
        let Some(group) = &self.0 else { return Ok(Call::End) };
        let texts = group.all_gather("")?;
        serde_json::from_str(&texts[0]).map_err(|e| PipelineError::Bug(format!("an order of process 0: {e}")))
    }

    /// The first process' decision, for all: they stop behind the same call.
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
            // A store that cannot be reached ends this process soon.
            Ok(_) | Err(_) => ControlFlow::Break(Stop::Draining),
        }
    }

    /// Whether all ended a call alike; else nothing that follows would be common.
    pub(super) fn agree(&self, outcome: &str) -> Result<(), PipelineError> {
        let Some(group) = &self.0 else { return Ok(()) };
        let differ = |name: &str, its: &str, first: &str| format!("{name}: {its}; process 0: {first}");
        Ok(group.ensure_equal(outcome, differ)?)
    }

    /// The first process ends: so do the others.
    pub(super) fn end(&self) {
        if !self.is_first() {
            return;
        }
        let ended = self.publish(|| Ok(Call::End)).and_then(|()| self.wait());
        if let Err(error) = ended {
            tracing::warn!("{}", one_line(&error));
        }
    }

    fn wait(&self) -> Result<(), PipelineError> {
        self.0.as_ref().map_or(Ok(()), |group| wait_for_all(group))
    }
}

/// Makes the calls of process 0 beside it, until the server ends.
///
/// # Errors
/// What is wrong with model or device, in one line.
pub fn follow(config: &Config, group: &Arc<Group>) -> Result<(), String> {
    follow_all(config, group).map_err(|error| one_line(&error))
}

fn inputs_of(device: &ModelDevice) -> &Inputs {
    &device.inputs
}

fn follow_all(config: &Config, group: &Arc<Group>) -> Result<(), PipelineError> {
    let fail = |e: std::io::Error| PipelineError::Input(format!("no folder for given files: {e}"));
    let folder = tempfile::tempdir().map_err(fail)?;
    let mut own = config.clone();
    own.serve.state = Some(folder.path().to_string_lossy().into_owned());
    std::fs::create_dir(folder.path().join("inputs")).map_err(fail)?;
    let mut device = ModelDevice::open(&own, None, Some(group))?;
    let ended = |outcome: Result<(), RunError>| match outcome {
        Err(RunError::Device(error)) => Err(PipelineError::Input(error)),
        // Process 0 tells its clients.
        _ => Ok(()),
    };
    loop {
        match device.together.next()? {
            Call::Run(sent) => sent.with_files(&mut device, inputs_of, |device, order, chunk| {
                let made = device.run_chunks(order, chunk, &mut |_| ControlFlow::Continue(()));
                ended(made.map(drop))
            })?,
            Call::Warm(sent, size) => {
                sent.with_files(&mut device, inputs_of, |device, order, _| ended(device.warm_one(order, size)))?;
            }
            Call::Evict(shape) => device.forget(&shape),
            Call::End => return device.together.wait(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A follower keeps no file longer than the call that it is of.
    #[test]
    fn files_of_an_order_go_with_its_call() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("inputs")).expect("a folder");
        let mut config = Config::default();
        config.serve.state = Some(folder.path().to_string_lossy().into_owned());
        let mut inputs = Inputs::of(&config).expect("a folder");
        let kept = || std::fs::read_dir(folder.path().join("inputs")).expect("a folder").count();
        for refused in [false, true] {
            let files = ["a.png", "b.sound"].map(|name| (name.to_string(), BASE64_STANDARD.encode(name)));
            let sent = Sent { jobs: Vec::new(), chunk: 3, files: files.into() };
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
