//! Replication of tensors that are sharded over several processes.

use super::engine::{Engine, RuntimeError};
use super::sharded_tensor::ShardedTensor;
use crate::hlo::{Argument, Builder, Mesh, Output, Program, Sharding, Type};

/// The one argument of such a program, and its result.
const TENSOR: &str = "tensor";

/// Replicates a sharded result of a program over all of its devices.
pub struct Replicator {
    engine: Engine,
    mesh: Mesh,
    sharding: Option<Sharding>,
}

impl Replicator {
    /// Replicator of a result of a program over `mesh`.
    pub fn new(engine: &Engine, mesh: &Mesh, sharding: Option<&Sharding>) -> Self {
        Replicator { engine: engine.clone(), mesh: mesh.clone(), sharding: sharding.cloned() }
    }

    /// The tensor replicated on every device. This runs a program of all processes: each has to call it.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn replicate(&self, tensor: &ShardedTensor) -> Result<ShardedTensor, RuntimeError> {
        let program = program(tensor.ty(), tensor.dims(), &self.mesh, self.sharding.as_ref())?;
        let executable = self.engine.compile_once("gather", &program)?;
        let mut outputs = self.engine.run(&executable, |name| (name == TENSOR).then_some(tensor))?;
        outputs.take(TENSOR).ok_or_else(|| RuntimeError::Parameter("nothing was gathered".into()))
    }
}

/// The program: an all-gather of every sharded dimension.
fn program(
    ty: &Type,
    logical_dims: &[usize],
    mesh: &Mesh,
    sharding: Option<&Sharding>,
) -> Result<Program, RuntimeError> {
    let b = Builder::new("gather").without_locations().with_mesh(mesh.clone());
    let argument = Argument { sharding: sharding.cloned(), ..Argument::new(TENSOR, ty.clone()) };
    let replicated = Sharding(vec![Vec::new(); ty.rank()]);
    let gathered = b.argument_with(Argument { logical_dims: logical_dims.to_vec(), ..argument }).constrain(&replicated);
    let output =
        Output { sharding: Some(replicated), logical_dims: logical_dims.to_vec(), ..Output::new(TENSOR, ty.clone()) };
    Ok(b.finish_with(vec![(output, gathered)])?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlo::DType;

    #[test]
    fn what_is_split_becomes_whole() {
        // Four devices, a tensor in four shards, of whose columns callers see five.
        let mesh = Mesh::new(&[("cfg", 2), ("context", 2)]);
        let (split, ty, content) = (Sharding::new(&[&["cfg"], &["context"]]), Type::new(DType::F32, [4, 6]), [4, 5]);
        let program = program(&ty, &content, &mesh, Some(&split)).unwrap();
        insta::assert_snapshot!(program.text);
        assert_eq!(program.results[0].logical_dims, content);
    }
}
