//! Prompt enhancement of jobs.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use super::super::device::Preparer;
use super::process_group::ServerProcesses;
use super::{AcceptedJob, JobBatch, ModelDevice, PipelineError, StopWatch, one_line};
use crate::config::Config;
use crate::models::tokenizer::Tokenizer;
use crate::pipeline::enhancement::{EnhancedPrompt, Enhancement, Enhancer};
use crate::pipeline::output::denoise_checkpoint::recorded_enhancement;
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::videos::Job;
use crate::pipeline::programs::configs::ModelConfigs;
use crate::runtime::RuntimeError;
use crate::serve::job::JobPhase;

/// Interval at which a batch that waits for a chat server is checked for cancellation.
const POLL: Duration = Duration::from_millis(200);

/// Largest number of enhanced prompts that are kept for batches that run again.
const MAX_KEPT: usize = 256;

/// Enhanced prompts of a batch.
#[derive(Default)]
pub(super) struct EnhancedBatch {
    /// `None`: the jobs request no enhancement.
    pub(super) record: Option<Enhancement>,
    /// Number of tokens of the longest prompt that the text encoder enhances, with the system prompt.
    pub(super) longest: usize,
}

/// Enhanced prompts of unfinished jobs, by the job's id. If a batch fails, its jobs run again one by one with the same
/// prompts, so that each prompt is enhanced once. All processes keep the same prompts.
#[derive(Default)]
pub(super) struct KeptAnswers(Vec<(String, EnhancedPrompt)>);

impl KeptAnswers {
    fn find(&self, job: &str, prompt: &str, seed: u64) -> Option<EnhancedPrompt> {
        let is_own = |(id, own): &&(String, EnhancedPrompt)| id == job && own.prompt == prompt && own.seed == seed;
        self.0.iter().find(is_own).map(|(_, own)| own.clone())
    }

    fn keep(&mut self, job: String, enhanced: EnhancedPrompt) {
        self.0.push((job, enhanced));
        // Jobs that are cancelled before they run again leave their prompts.
        let surplus = self.0.len().saturating_sub(MAX_KEPT);
        self.0.drain(..surplus);
    }

    /// Removes the prompts of the finished jobs of a batch.
    pub(super) fn finish(&mut self, order: &JobBatch) {
        let finished: Vec<String> = order.jobs.iter().map(|accepted| accepted.id.to_string()).collect();
        self.0.retain(|(id, _)| !finished.contains(id));
    }
}

/// Answer of the endpoint to a queued job.
struct EarlyAnswer {
    job: String,
    prompt: String,
    seed: u64,
    /// The enhanced prompt, or the error in one line.
    answer: Result<EnhancedPrompt, String>,
}

/// Answers of the endpoint to queued jobs, which the device uses instead of asking again. Only process 0 has them.
#[derive(Clone)]
pub(super) struct EarlyAnswers {
    all: Arc<Mutex<Vec<EarlyAnswer>>>,
    /// Maximum number of queued jobs.
    queue: usize,
}

impl EarlyAnswers {
    pub(super) fn new(queue: usize) -> Self {
        EarlyAnswers { all: Arc::default(), queue }
    }

    fn keep(&self, answer: EarlyAnswer) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(answer);
        // Jobs that are cancelled before they run leave their answers. The oldest answers may be those of queued jobs.
        let surplus = all.len().saturating_sub(self.queue.saturating_add(MAX_KEPT));
        all.drain(..surplus);
    }

    fn find(&self, job: &str, prompt: &str, seed: u64) -> Option<Result<EnhancedPrompt, String>> {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let found = all.iter().find(|own| own.job == job && own.prompt == prompt && own.seed == seed);
        found.map(|own| own.answer.clone())
    }

    /// Removes the answers to the finished jobs of a batch.
    pub(super) fn finish(&self, order: &JobBatch) {
        let finished: Vec<String> = order.jobs.iter().map(|accepted| accepted.id.to_string()).collect();
        self.all.lock().unwrap_or_else(PoisonError::into_inner).retain(|own| !finished.contains(&own.job));
    }
}

/// Asks the endpoint to enhance the prompts of queued jobs, so that the device does not wait for it.
pub(super) struct EndpointPreparer {
    pub(super) configs: ModelConfigs,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) answers: EarlyAnswers,
}

impl Preparer for EndpointPreparer {
    /// Does nothing if the job is invalid, which the device reports, or if its checkpoint records the enhanced prompt.
    fn prepare(&self, job: &AcceptedJob, steps: &Path, is_wanted: &dyn Fn() -> bool) {
        let Ok(config) = job.config.parse::<Config>() else { return };
        let enhancer = Enhancer::new(&config, &self.configs, Some(&*self.tokenizer)).ok().flatten();
        let Some(enhancer) = enhancer.filter(|enhancer| !enhancer.needs_devices()) else { return };
        let (prompt, seed) = (job.prompt(), config.enhance.seed.unwrap_or(job.config.summary().seed));
        let known = recorded_enhancement(steps).filter(|known| enhancer.has_same_keys(known));
        if known.is_some_and(|known| known.find(prompt, seed).is_some())
            || enhancer.check_served(&self.tokenizer, prompt).is_err()
        {
            return;
        }
        let asked = ask_until_stopped(&enhancer, prompt, seed, || match is_wanted() {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        });
        if let ControlFlow::Continue(answer) = asked {
            self.answers.keep(EarlyAnswer { job: job.id.to_string(), prompt: prompt.into(), seed, answer });
        }
    }
}

impl ModelDevice {
    /// Enhances the prompts of a batch's jobs, each with the seed of its job. A resumed batch uses the prompts that its
    /// checkpoint records. A warm-up does not ask an endpoint.
    pub(super) fn enhance(
        &mut self,
        order: &JobBatch,
        config: &Config,
        jobs: &mut [Job],
        is_warm_up: bool,
        watch: &mut StopWatch,
    ) -> Result<EnhancedBatch, PipelineError> {
        self.session.runner.enhancing = None;
        let model = &self.session.runner.model;
        let enhancer = Enhancer::new(config, &model.configs, Some(&*model.tokenizer)).map_err(in_field)?;
        let Some(enhancer) = enhancer.filter(|enhancer| enhancer.needs_devices() || !is_warm_up) else {
            return Ok(EnhancedBatch::default());
        };
        for job in &*jobs {
            let refuse = |source| PipelineError::Given { key: "request.prompt", source: Box::new(source) };
            enhancer.check_served(&model.tokenizer, &job.prompt).map_err(refuse)?;
        }
        let prompts: Vec<String> = jobs.iter().map(|job| job.prompt.clone()).collect();
        let longest = enhancer.longest(&model.tokenizer, &prompts)?;
        self.plan_enhancer(order, config, longest, watch)?;
        // Only process 0 has the checkpoint of a resumed batch.
        let is_recorded = order.resume && !self.process_group.are_several();
        let known = order.steps.as_ref().filter(|_| is_recorded).and_then(|path| recorded_enhancement(path));
        let known = known.filter(|known| enhancer.has_same_keys(known));
        let mut enhanced: Vec<EnhancedPrompt> = Vec::new();
        for (job, accepted) in jobs.iter().zip(&order.jobs) {
            let seed = config.enhance.seed.unwrap_or(job.seed);
            let id = accepted.id.to_string();
            let found = known.as_ref().and_then(|known| known.find(&job.prompt, seed)).cloned();
            let own = match found.or_else(|| self.answers.find(&id, &job.prompt, seed)) {
                Some(own) => own,
                None => {
                    let own = self.enhance_one(&enhancer, &id, &job.prompt, seed, watch)?;
                    if !is_warm_up {
                        self.answers.keep(id, own.clone());
                    }
                    own
                }
            };
            enhanced.push(own);
        }
        for (job, own) in jobs.iter_mut().zip(&enhanced) {
            job.prompt.clone_from(&own.enhanced);
        }
        Ok(EnhancedBatch { record: Some(enhancer.record(enhanced)), longest })
    }

    /// Plans the memory of a batch with the program that enhances its prompts. A predicted number of frames is not known
    /// yet; such a batch is planned after its prompts are enhanced.
    fn plan_enhancer(
        &mut self,
        order: &JobBatch,
        config: &Config,
        longest: usize,
        watch: &mut StopWatch,
    ) -> Result<(), PipelineError> {
        let Some(first) = order.jobs.first().filter(|_| longest > 0 && config.request.num_frames.count().is_some())
        else {
            return Ok(());
        };
        let rows = self.rows_of(order);
        let mut plan = RunPlan::of_model(config, &self.session.runner.model)?;
        plan.programs = plan.programs.enhancing(longest).of_rows(rows);
        if !self.shapes.is_planned(&first.shape, &plan, rows) {
            watch.check(JobPhase::Compiling)?;
        }
        let group = self.process_group.group().cloned();
        self.shapes.plan(&first.shape, &plan, rows, &mut self.session.runner, group.as_ref())
    }

    fn enhance_one(
        &mut self,
        enhancer: &Enhancer,
        job: &str,
        prompt: &str,
        seed: u64,
        watch: &mut StopWatch,
    ) -> Result<EnhancedPrompt, PipelineError> {
        watch.check(JobPhase::PromptEnhancer)?;
        if !enhancer.needs_devices() {
            let early = self.early_answers.find(job, prompt, seed);
            return ask(enhancer, early, prompt, seed, &self.process_group, watch);
        }
        enhancer.generate(&mut self.session.runner, prompt, seed).map_err(|error| match error {
            PipelineError::Runtime(RuntimeError::OutOfMemory { .. }) => in_field(error),
            other => other,
        })
    }
}

fn in_field(source: PipelineError) -> PipelineError {
    PipelineError::Given { key: "request.enhance_prompt", source: Box::new(source) }
}

/// Asks the endpoint to enhance a prompt; only process 0 does. The other processes receive its answer, or that the batch
/// is stopped. `early`: the answer to the queued job; `None`: the endpoint has not been asked.
fn ask(
    enhancer: &Enhancer,
    early: Option<Result<EnhancedPrompt, String>>,
    prompt: &str,
    seed: u64,
    processes: &ServerProcesses,
    watch: &mut StopWatch,
) -> Result<EnhancedPrompt, PipelineError> {
    let own = match early {
        Some(answer) => ControlFlow::Continue(answer),
        None if processes.asks() => ask_until_stopped(enhancer, prompt, seed, || watch.poll(JobPhase::PromptEnhancer)),
        None => ControlFlow::Continue(Err(String::new())),
    };
    match processes.share(own)? {
        ControlFlow::Continue(answer) => answer.map_err(PipelineError::Enhancement),
        ControlFlow::Break(stop) => {
            watch.follow(ControlFlow::Break(stop))?;
            Err(PipelineError::Bug("a stopped batch continues".into()))
        }
    }
}

/// Asks the endpoint on another thread, and calls `poll` while it waits. The answer is discarded if `poll` returns
/// `Break`. Errors are texts, because all processes report the same one.
fn ask_until_stopped<S>(
    enhancer: &Enhancer,
    prompt: &str,
    seed: u64,
    mut poll: impl FnMut() -> ControlFlow<S>,
) -> ControlFlow<S, Result<EnhancedPrompt, String>> {
    let (send, answer) = mpsc::channel();
    let (own, text) = (enhancer.clone(), prompt.to_string());
    // Sending fails if the batch was stopped.
    let ask = move || drop(send.send(own.ask(&text, seed)));
    if let Err(error) = thread::Builder::new().name("enhance".into()).spawn(ask) {
        return ControlFlow::Continue(Err(format!("cannot start a thread: {error}")));
    }
    loop {
        match answer.recv_timeout(POLL) {
            Ok(Ok(enhanced)) => return ControlFlow::Continue(Ok(enhanced)),
            Ok(Err(PipelineError::Enhancement(why))) => return ControlFlow::Continue(Err(why)),
            Ok(Err(error)) => return ControlFlow::Continue(Err(one_line(&error))),
            Err(mpsc::RecvTimeoutError::Timeout) => poll()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return ControlFlow::Continue(Err("the thread that asked the chat server failed".into()));
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_to_a_full_queue_are_kept() {
        const QUEUE: usize = 2 * MAX_KEPT;
        let early = EarlyAnswers::new(QUEUE);
        for job in 0..QUEUE {
            early.keep(EarlyAnswer { job: job.to_string(), prompt: "a".into(), seed: 3, answer: Err("b".into()) });
        }
        assert_eq!(early.find("0", "a", 3), Some(Err("b".into())));
        assert_eq!([early.find("0", "b", 3), early.find("0", "a", 4), early.find("x", "a", 3)], [None, None, None]);
    }

    #[test]
    fn kept_answers_belong_to_their_job() {
        let mut kept = KeptAnswers::default();
        let order = JobBatch { jobs: Vec::new(), steps: None, resume: false };
        let answer = |prompt: &str| EnhancedPrompt { prompt: prompt.into(), enhanced: "A".into(), seed: 3 };
        kept.keep("one".into(), answer("a"));
        assert_eq!(kept.find("two", "a", 3), None);
        assert_eq!(kept.find("one", "b", 3), None);
        assert_eq!(kept.find("one", "a", 4), None);
        kept.finish(&order);
        assert_eq!(kept.find("one", "a", 3), Some(answer("a")));
        (0..=MAX_KEPT).for_each(|index| kept.keep(index.to_string(), answer("a")));
        assert_eq!(kept.find("0", "a", 3), None);
        assert_eq!(kept.find("1", "a", 3), Some(answer("a")));
    }
}
