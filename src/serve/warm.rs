//! Orders that are compiled and run before a server is ready.

use std::sync::Arc;

use super::device::Order;
use super::fields::Fields;

/// An order for each warm shape.
///
/// # Errors
/// A shape that requests could not ask for.
pub(super) fn orders(fields: &Fields) -> Result<Vec<Order>, String> {
    let order = |shape: &super::fields::Shape| {
        let accepted = fields.warm(shape).map_err(|error| format!("--warm {shape}: {error}"))?;
        Ok(Order { jobs: vec![Arc::new(accepted)], steps: None, resume: false })
    };
    fields.warm_shapes()?.iter().map(order).collect()
}
