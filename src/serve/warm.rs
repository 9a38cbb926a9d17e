//! Orders that are compiled and run before a server is ready.

use serde_json::{Map, json};

use super::device::Order;
use super::fields::{Endpoint, Fields};
use super::form::Form;
use super::jobs::Caller;
use std::sync::Arc;

/// Prompt of a video that nobody sees.
const PROMPT: &str = "warm-up";

/// An order for each warm shape.
///
/// # Errors
/// A shape that requests could not ask for.
pub(super) fn orders(fields: &Fields) -> Result<Vec<Order>, String> {
    let caller = Caller { name: String::new(), sees_all: true };
    let order = |shape: &super::fields::Shape| {
        let fields_of_it = json!({
            "prompt": PROMPT,
            "seed": 0,
            "width": shape.width,
            "height": shape.height,
            "num_frames": shape.num_frames,
            "pipeline": shape.pipeline,
        });
        let form = Form { fields: fields_of_it.as_object().cloned().unwrap_or_else(Map::new), ..Form::default() };
        let accepted =
            fields.accept(form, Endpoint::Create, &caller).map_err(|error| format!("--warm {shape}: {error}"))?;
        Ok(Order { jobs: vec![Arc::new(accepted)], steps: None, resume: false })
    };
    fields.warm_shapes()?.iter().map(order).collect()
}
