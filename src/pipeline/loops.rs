//! Denoising loops of earlier requests, with what requests alike share: the program as it is written, and tables and scales
//! on the devices.

use std::collections::HashMap;
use std::rc::Rc;

use super::calls::{Loop, PassSpec};
use super::error::Result;
use super::executor::Executor;
use super::model::Model;
use super::text_to_video::Request;
use crate::nn::Build;
use crate::sampling::denoise::DenoiseShape;

/// The last loop of each name.
#[derive(Default)]
pub struct Loops(HashMap<&'static str, Kept>);

struct Kept {
    request: Request,
    shape: DenoiseShape,
    build: Build,
    steps_loop: Rc<Loop>,
}

/// The loop of a stage, ready to run: the one of an earlier request where that differs in prompts and seed only.
///
/// # Errors
/// As [`Loop::new`].
pub fn steps_loop(
    models: &Model,
    executor: &mut Executor,
    name: &'static str,
    of: PassSpec,
    build: &Build,
) -> Result<Rc<Loop>> {
    let (request, shape, _, frames) = of;
    // Frames that are given are files, which may hold another picture by now.
    let reusable = frames.is_none() && executor.keeps_all();
    let negative = |r: &Request| Request { negative_prompt: String::new(), ..r.clone() };
    let known = executor.loops.0.get(name).filter(|_| reusable);
    let known = known
        .filter(|k| k.shape == *shape && k.build == *build && negative(&k.request).can_batch_with(&negative(request)));
    if let Some(known) = known.map(|k| k.steps_loop.clone()) {
        known.load(executor, name)?;
        return Ok(known);
    }
    let steps_loop = Rc::new(Loop::new(models, executor, name, of, build)?);
    if reusable {
        let (request, shape, build) = (request.clone(), shape.clone(), build.clone());
        executor.loops.0.insert(name, Kept { request, shape, build, steps_loop: steps_loop.clone() });
    }
    Ok(steps_loop)
}
