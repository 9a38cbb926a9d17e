//! Denoising loops of earlier requests, with what requests alike share: the program as it is written, and tables and scales
//! on the devices.

use std::collections::HashMap;
use std::rc::Rc;

use super::calls::{Loop, OfStage};
use super::error::Result;
use super::models::Models;
use super::stages::Stages;
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
    models: &Models,
    stages: &mut Stages,
    name: &'static str,
    of: OfStage,
    build: &Build,
) -> Result<Rc<Loop>> {
    let (request, shape, _, frames) = of;
    // Frames that are given are files, which may hold another picture by now.
    let reusable = frames.is_none() && stages.keeps_all();
    let negative = |r: &Request| Request { negative_prompt: String::new(), ..r.clone() };
    let known = stages.loops.0.get(name).filter(|_| reusable);
    let known =
        known.filter(|k| k.shape == *shape && k.build == *build && negative(&k.request).goes_with(&negative(request)));
    if let Some(known) = known.map(|k| k.steps_loop.clone()) {
        known.load(stages, name)?;
        return Ok(known);
    }
    let steps_loop = Rc::new(Loop::new(models, stages, name, of, build)?);
    if reusable {
        let (request, shape, build) = (request.clone(), shape.clone(), build.clone());
        stages.loops.0.insert(name, Kept { request, shape, build, steps_loop: steps_loop.clone() });
    }
    Ok(steps_loop)
}
