//! The order of jobs: first come first served, with those that can be made together.

use std::sync::Arc;

/// Jobs behind the first that are looked at.
pub const AHEAD: usize = 64;
/// Jobs that may overtake one because they need no new program and no other LoRA.
pub const OVERTAKING: usize = 4;

/// Properties of a job that its order depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Jobs of one shape run the same programs.
    pub shape: Arc<str>,
    /// Jobs of one batch key can be made together.
    pub batch_key: Arc<str>,
    /// The LoRAs that it is made with.
    pub loras: Arc<str>,
    /// Jobs that have overtaken it.
    pub overtaken: usize,
}

/// Programs and LoRAs that the device holds.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Shapes whose programs are loaded, the last used at the end.
    shapes: Vec<Arc<str>>,
    /// The LoRAs that are merged.
    loras: Option<Arc<str>>,
}

impl Loaded {
    /// Whether a job needs neither a new program nor other LoRAs.
    fn suits(&self, job: &Candidate) -> bool {
        // A device that has run nothing switches for any.
        self.shapes.contains(&job.shape) && self.loras.as_ref().is_none_or(|loras| *loras == job.loras)
    }

    /// Notes that a shape is used now; those that go for it, of which `most` stay.
    pub fn use_shape(&mut self, shape: &Arc<str>, most: usize) -> Vec<Arc<str>> {
        self.shapes.retain(|known| known != shape);
        self.shapes.push(Arc::clone(shape));
        let surplus = self.shapes.len().saturating_sub(most.max(1));
        self.shapes.drain(..surplus).collect()
    }

    /// Notes that a shape's programs are not there.
    pub fn forget(&mut self, shape: &str) {
        self.shapes.retain(|known| &**known != shape);
    }

    /// Notes the LoRAs that are merged now.
    pub fn use_loras(&mut self, loras: &Arc<str>) {
        self.loras = Some(Arc::clone(loras));
    }
}

/// The jobs to be made next, by their places in the queue, in order; nothing of an empty queue.
///
/// The first that waits decides, unless a few behind it need no new program and no other LoRA while it does. With the one that
/// decides go those of its batch key, up to `most`.
pub fn pick(waiting: &[Candidate], loaded: &Loaded, most: usize) -> Vec<usize> {
    let waiting = &waiting[..waiting.len().min(AHEAD + 1)];
    let Some(first) = waiting.first() else { return Vec::new() };
    let with = |leader: usize, most: usize| -> Vec<usize> {
        let key = &waiting[leader].batch_key;
        let others = (leader + 1..waiting.len()).filter(|n| waiting[*n].batch_key == *key);
        std::iter::once(leader).chain(others).take(most.max(1)).collect()
    };
    if !loaded.suits(first) {
        let suited = (1..waiting.len()).find(|n| loaded.suits(&waiting[*n]));
        // Every one of the batch overtakes each job before its leader.
        let room = |leader: usize| {
            OVERTAKING.saturating_sub(waiting[..leader].iter().map(|job| job.overtaken).max().unwrap_or(0))
        };
        if let Some(leader) = suited.filter(|leader| room(*leader) > 0) {
            return with(leader, most.min(room(leader)));
        }
    }
    with(0, most)
}

/// Jobs that `picked` overtakes, by their places in the queue.
pub fn overtaken(picked: &[usize]) -> std::ops::Range<usize> {
    0..picked.first().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job(text: &str) -> Candidate {
        let mut words = text.split(' ');
        let mut word = || Arc::from(words.next().unwrap_or_default());
        Candidate { shape: word(), batch_key: word(), loras: word(), overtaken: 0 }
    }

    fn jobs(texts: &[&str]) -> Vec<Candidate> {
        texts.iter().map(|text| job(text)).collect()
    }

    fn loaded(shapes: &[&str], loras: &str) -> Loaded {
        Loaded { shapes: shapes.iter().map(|shape| Arc::from(*shape)).collect(), loras: Some(Arc::from(loras)) }
    }

    #[test]
    fn the_first_decides_and_its_like_go_with_it() {
        let all = loaded(&["s", "t"], "");
        let nothing = Loaded::default();
        let cases: [(&[&str], &Loaded, usize, &[usize]); 9] = [
            (&[], &all, 4, &[]),
            (&["s a ", "s b "], &all, 4, &[0]),
            (&["s a ", "s b ", "s a ", "t c ", "s a "], &all, 4, &[0, 2, 4]),
            (&["s a ", "s a ", "s a "], &all, 2, &[0, 1]),
            (&["s a ", "s a "], &all, 0, &[0]),
            // A device that holds nothing takes the first.
            (&["s a ", "t b "], &nothing, 1, &[0]),
            // What needs no new program goes first.
            (&["x a ", "s b ", "s b "], &all, 4, &[1, 2]),
            // Nor another LoRA.
            (&["s a lora", "s b ", "s c "], &all, 4, &[1]),
            // Where none does without, the first.
            (&["x a ", "y b "], &all, 4, &[0]),
        ];
        for (waiting, loaded, most, expected) in cases {
            assert_eq!(pick(&jobs(waiting), loaded, most), expected, "{waiting:?}, {most} at most");
        }
    }

    #[test]
    fn a_job_is_overtaken_four_times_at_most() {
        let loaded = loaded(&["s"], "");
        let mut waiting = jobs(&["x a ", "s b ", "s b ", "s b "]);
        for (overtaken, expected) in [(0, &[1, 2, 3][..]), (2, &[1, 2]), (3, &[1]), (4, &[0])] {
            waiting[0].overtaken = overtaken;
            assert_eq!(pick(&waiting, &loaded, 4), expected, "overtaken by {overtaken}");
        }
        assert_eq!(overtaken(&[2, 3]), 0..2);
    }

    #[test]
    fn only_the_next_64_are_looked_at() {
        let mut waiting = jobs(&["s a "]);
        waiting.extend((0..100).map(|_| job("s b ")));
        waiting[AHEAD] = job("s a ");
        waiting[AHEAD + 1] = job("s a ");
        assert_eq!(pick(&waiting, &loaded(&["s"], ""), 4), [0, AHEAD]);
    }

    #[test]
    fn the_shape_that_was_not_used_longest_goes() {
        let mut loaded = Loaded::default();
        let names = |shapes: Vec<Arc<str>>| shapes.iter().map(ToString::to_string).collect::<Vec<_>>();
        for shape in ["a", "b", "a"] {
            assert!(loaded.use_shape(&Arc::from(shape), 2).is_empty());
        }
        assert_eq!(names(loaded.use_shape(&Arc::from("c"), 2)), ["b"]);
        assert_eq!(names(loaded.use_shape(&Arc::from("d"), 1)), ["a", "c"]);
        // One that did not fit leaves its place, and is no reason to overtake.
        loaded.use_shape(&Arc::from("e"), 2);
        loaded.forget("e");
        assert!(!loaded.suits(&job("e  ")) && loaded.suits(&job("d  ")));
        assert!(loaded.use_shape(&Arc::from("f"), 2).is_empty());
    }

    proptest! {
        /// Whatever comes behind it, a job runs once those before it have, and at most four more.
        #[test]
        fn no_job_starves(
            first in prop::collection::vec((0..5usize, 0..3usize, 0..2usize), 1..20),
            later in prop::collection::vec((0..5usize, 0..3usize, 0..2usize), 0..300),
            most in 1..6usize,
            shapes in 1..4usize,
        ) {
            let candidate = |(shape, key, lora): (usize, usize, usize)| {
                let (shape, lora) = (format!("s{shape}"), format!("l{lora}"));
                Candidate { batch_key: Arc::from(format!("{shape} {key} {lora}")), shape: Arc::from(shape), loras: Arc::from(lora), overtaken: 0 }
            };
            let mut loaded = Loaded::default();
            let mut arriving = later.into_iter();
            let mut waiting: Vec<(usize, Candidate)> = first.into_iter().map(candidate).enumerate().collect();
            let (mut number, mut orders) = (waiting.len(), 0);
            // Orders that had run, and jobs that waited, when a job came.
            let mut came: Vec<[usize; 2]> = (0..number).map(|before| [0, before]).collect();
            while !waiting.is_empty() {
                let queue: Vec<Candidate> = waiting.iter().map(|(_, job)| job.clone()).collect();
                let picked = pick(&queue, &loaded, most);
                prop_assert!(!picked.is_empty() && picked.len() <= most);
                prop_assert!(picked.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(picked.iter().all(|n| queue[*n].batch_key == queue[picked[0]].batch_key));
                for n in overtaken(&picked) {
                    waiting[n].1.overtaken += picked.len();
                    prop_assert!(waiting[n].1.overtaken <= OVERTAKING);
                }
                loaded.use_shape(&queue[picked[0]].shape, shapes);
                loaded.use_loras(&queue[picked[0]].loras);
                orders += 1;
                for n in picked.into_iter().rev() {
                    let (id, _) = waiting.remove(n);
                    // Each before it leads one order at most, and four may overtake.
                    let [since, before] = came[id];
                    prop_assert!(orders - since <= before + OVERTAKING + 1, "job {id}");
                }
                // More come than are made: two for each order.
                for new in arriving.by_ref().take(2) {
                    waiting.push((number, candidate(new)));
                    came.push([orders, waiting.len() - 1]);
                    number += 1;
                }
            }
        }
    }
}
