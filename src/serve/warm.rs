//! Warm-up batches, which run before the server is ready.

use std::sync::Arc;

use super::device::Order;
use super::fields::Fields;

/// Returns a warm-up batch for each shape in `serve.warm`, or an error if no request can have one of the shapes.
pub(super) fn orders(fields: &Fields) -> Result<Vec<Order>, String> {
    let order = |shape: &super::fields::Shape| {
        let accepted = fields.warm(shape).map_err(|error| format!("--warm {shape}: {error}"))?;
        Ok(Order { jobs: vec![Arc::new(accepted)], steps: None, resume: false })
    };
    fields.warm_shapes()?.iter().map(order).collect()
}
