//! Job scheduling: jobs run in the order of arrival, except that compatible jobs run as one batch and jobs whose
//! programs are loaded may overtake a few others.

use std::sync::Arc;

/// Maximum number of queued jobs, after the first one, that the scheduler considers.
pub(crate) const AHEAD: usize = 64;
/// Maximum number of jobs that may overtake a job because they need no new program and no LoRA merge.
pub(crate) const MAX_OVERTAKEN: usize = 4;

/// Properties of a job that determine when it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScheduleCandidate {
    /// Shape key: jobs with equal keys run the same programs.
    pub(crate) shape: Arc<str>,
    /// Batch key: jobs with equal keys can run in one batch.
    pub(crate) batch_key: Arc<str>,
    /// The merged LoRAs of the job, as text. Added LoRAs are switched too fast to matter.
    pub(crate) loras: Arc<str>,
    /// Number of jobs that have overtaken this one.
    pub(crate) overtaken: usize,
}

/// Programs and LoRAs that are loaded on the device.
#[derive(Clone, Debug, Default)]
pub(crate) struct LoadedPrograms {
    /// Shapes whose programs are loaded. The most recently used shape is last.
    shapes: Vec<Arc<str>>,
    /// LoRAs that are merged into the weights; `None` until the device has run a job.
    loras: Option<Arc<str>>,
}

impl LoadedPrograms {
    /// Returns whether a job needs neither a new program nor a LoRA merge.
    fn suits(&self, job: &ScheduleCandidate) -> bool {
        // Before the first run, it is unknown which job needs a merge, so merges give no job an advantage.
        self.shapes.contains(&job.shape) && self.loras.as_ref().is_none_or(|loras| *loras == job.loras)
    }

    /// Marks a shape as the most recently used one. Keeps the `most` shapes that were used last; returns the others,
    /// which must be evicted.
    pub(crate) fn use_shape(&mut self, shape: &Arc<str>, most: usize) -> Vec<Arc<str>> {
        self.shapes.retain(|known| known != shape);
        self.shapes.push(Arc::clone(shape));
        let surplus = self.shapes.len().saturating_sub(most.max(1));
        self.shapes.drain(..surplus).collect()
    }

    /// Records that the programs for a shape are not loaded.
    pub(crate) fn forget(&mut self, shape: &str) {
        self.shapes.retain(|known| &**known != shape);
    }

    /// Records which LoRAs are merged into the weights.
    pub(crate) fn use_loras(&mut self, loras: &Arc<str>) {
        self.loras = Some(Arc::clone(loras));
    }
}

/// Returns the queue indices of the jobs in the next batch, in ascending order; empty if the queue is empty.
///
/// The first job leads the batch, unless it needs a new program or a LoRA merge and a later job, which needs neither,
/// may still overtake it. Jobs with the leader's batch key join the batch, which has at most `most` jobs.
pub(crate) fn pick(waiting: &[ScheduleCandidate], loaded: &LoadedPrograms, most: usize) -> Vec<usize> {
    let waiting = &waiting[..waiting.len().min(AHEAD + 1)];
    let Some(first) = waiting.first() else { return Vec::new() };
    let with = |leader: usize, most: usize| -> Vec<usize> {
        let key = &waiting[leader].batch_key;
        let others = (leader + 1..waiting.len()).filter(|n| waiting[*n].batch_key == *key);
        std::iter::once(leader).chain(others).take(most.max(1)).collect()
    };
    if !loaded.suits(first) {
        let suited = (1..waiting.len()).find(|n| loaded.suits(&waiting[*n]));
        // Every job of the batch overtakes all jobs before the leader.
        let room = |leader: usize| {
            MAX_OVERTAKEN.saturating_sub(waiting[..leader].iter().map(|job| job.overtaken).max().unwrap_or(0))
        };
        if let Some(leader) = suited.filter(|leader| room(*leader) > 0) {
            return with(leader, most.min(room(leader)));
        }
    }
    with(0, most)
}

/// Returns the queue indices of the jobs that a batch overtakes. `picked` contains the queue indices of the batch's
/// jobs.
pub(crate) fn overtaken(picked: &[usize]) -> std::ops::Range<usize> {
    0..picked.first().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job(text: &str) -> ScheduleCandidate {
        let mut words = text.split(' ');
        let mut word = || Arc::from(words.next().unwrap_or_default());
        ScheduleCandidate { shape: word(), batch_key: word(), loras: word(), overtaken: 0 }
    }

    fn jobs(texts: &[&str]) -> Vec<ScheduleCandidate> {
        texts.iter().map(|text| job(text)).collect()
    }

    fn loaded(shapes: &[&str], loras: &str) -> LoadedPrograms {
        LoadedPrograms { shapes: shapes.iter().map(|shape| Arc::from(*shape)).collect(), loras: Some(Arc::from(loras)) }
    }

    #[test]
    fn first_job_leads_and_jobs_with_its_batch_key_join() {
        let all = loaded(&["s", "t"], "");
        let nothing = LoadedPrograms::default();
        let cases: [(&[&str], &LoadedPrograms, usize, &[usize]); 9] = [
            (&[], &all, 4, &[]),
            (&["s a ", "s b "], &all, 4, &[0]),
            (&["s a ", "s b ", "s a ", "t c ", "s a "], &all, 4, &[0, 2, 4]),
            (&["s a ", "s a ", "s a "], &all, 2, &[0, 1]),
            (&["s a ", "s a "], &all, 0, &[0]),
            // If no program is loaded, the first job runs.
            (&["s a ", "t b "], &nothing, 1, &[0]),
            // A job that needs no new program runs first.
            (&["x a ", "s b ", "s b "], &all, 4, &[1, 2]),
            // A job that needs no LoRA merge runs first.
            (&["s a lora", "s b ", "s c "], &all, 4, &[1]),
            // If every job needs a new program, the first job runs.
            (&["x a ", "y b "], &all, 4, &[0]),
        ];
        for (waiting, loaded, most, expected) in cases {
            assert_eq!(pick(&jobs(waiting), loaded, most), expected, "{waiting:?}, {most} at most");
        }
    }

    #[test]
    fn job_is_overtaken_at_most_four_times() {
        let loaded = loaded(&["s"], "");
        let mut waiting = jobs(&["x a ", "s b ", "s b ", "s b "]);
        for (overtaken, expected) in [(0, &[1, 2, 3][..]), (2, &[1, 2]), (3, &[1]), (4, &[0])] {
            waiting[0].overtaken = overtaken;
            assert_eq!(pick(&waiting, &loaded, 4), expected, "overtaken by {overtaken}");
        }
        assert_eq!(overtaken(&[2, 3]), 0..2);
    }

    #[test]
    fn scheduler_considers_only_the_next_64_jobs() {
        let mut waiting = jobs(&["s a "]);
        waiting.extend((0..100).map(|_| job("s b ")));
        waiting[AHEAD] = job("s a ");
        waiting[AHEAD + 1] = job("s a ");
        assert_eq!(pick(&waiting, &loaded(&["s"], ""), 4), [0, AHEAD]);
    }

    #[test]
    fn least_recently_used_shape_is_evicted() {
        let mut loaded = LoadedPrograms::default();
        let names = |shapes: Vec<Arc<str>>| shapes.iter().map(ToString::to_string).collect::<Vec<_>>();
        for shape in ["a", "b", "a"] {
            assert!(loaded.use_shape(&Arc::from(shape), 2).is_empty());
        }
        assert_eq!(names(loaded.use_shape(&Arc::from("c"), 2)), ["b"]);
        assert_eq!(names(loaded.use_shape(&Arc::from("d"), 1)), ["a", "c"]);
        // A shape that did not fit in memory frees its slot, and jobs of that shape do not overtake others.
        loaded.use_shape(&Arc::from("e"), 2);
        loaded.forget("e");
        assert!(!loaded.suits(&job("e  ")) && loaded.suits(&job("d  ")));
        assert!(loaded.use_shape(&Arc::from("f"), 2).is_empty());
    }

    proptest! {
        /// However many jobs arrive later, a job waits only for the jobs before it and for at most four jobs that
        /// overtake it.
        #[test]
        fn no_job_starves(
            first in prop::collection::vec((0..5usize, 0..3usize, 0..2usize), 1..20),
            later in prop::collection::vec((0..5usize, 0..3usize, 0..2usize), 0..300),
            most in 1..6usize,
            shapes in 1..4usize,
        ) {
            let candidate = |(shape, key, lora): (usize, usize, usize)| {
                let (shape, lora) = (format!("s{shape}"), format!("l{lora}"));
                ScheduleCandidate { batch_key: Arc::from(format!("{shape} {key} {lora}")), shape: Arc::from(shape), loras: Arc::from(lora), overtaken: 0 }
            };
            let mut loaded = LoadedPrograms::default();
            let mut arriving = later.into_iter();
            let mut waiting: Vec<(usize, ScheduleCandidate)> = first.into_iter().map(candidate).enumerate().collect();
            let (mut number, mut orders) = (waiting.len(), 0);
            // For each job when it arrived: the number of batches that had run, and the number of jobs before it in the
            // queue.
            let mut came: Vec<[usize; 2]> = (0..number).map(|before| [0, before]).collect();
            while !waiting.is_empty() {
                let queue: Vec<ScheduleCandidate> = waiting.iter().map(|(_, job)| job.clone()).collect();
                let picked = pick(&queue, &loaded, most);
                prop_assert!(!picked.is_empty() && picked.len() <= most);
                prop_assert!(picked.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(picked.iter().all(|n| queue[*n].batch_key == queue[picked[0]].batch_key));
                for n in overtaken(&picked) {
                    waiting[n].1.overtaken += picked.len();
                    prop_assert!(waiting[n].1.overtaken <= MAX_OVERTAKEN);
                }
                loaded.use_shape(&queue[picked[0]].shape, shapes);
                loaded.use_loras(&queue[picked[0]].loras);
                orders += 1;
                for n in picked.into_iter().rev() {
                    let (id, _) = waiting.remove(n);
                    // Each earlier job leads at most one batch, and at most four jobs overtake this one.
                    let [since, before] = came[id];
                    prop_assert!(orders - since <= before + MAX_OVERTAKEN + 1, "job {id}");
                }
                // Two jobs arrive during each batch, so the queue grows.
                for new in arriving.by_ref().take(2) {
                    waiting.push((number, candidate(new)));
                    came.push([orders, waiting.len() - 1]);
                    number += 1;
                }
            }
        }
    }
}
