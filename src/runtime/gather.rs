//! Tensors whose parts lie with several processes, brought whole to each of them.

use super::distributed::Distributed;
use super::engine::{Engine, RuntimeError};
use crate::hlo::{Argument, Builder, Mesh, Output, Program, Sharding, Type};

/// The one argument of such a program, and its result.
const TENSOR: &str = "tensor";

/// How a program's result becomes whole.
pub struct Whole {
    engine: Engine,
    mesh: Mesh,
    sharding: Option<Sharding>,
}

impl Whole {
    /// Of a result of a program over `mesh`.
    pub fn new(engine: &Engine, mesh: &Mesh, sharding: Option<&Sharding>) -> Self {
        Whole { engine: engine.clone(), mesh: mesh.clone(), sharding: sharding.cloned() }
    }

    /// The tensor with all of it on every device. A program of all processes: each has to call this.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn of(&self, tensor: &Distributed) -> Result<Distributed, RuntimeError> {
        let program = program(tensor.ty(), tensor.dims(), &self.mesh, self.sharding.as_ref())?;
        let executable = self.engine.compile_once("gather", &program)?;
        let mut outputs = self.engine.run(&executable, |name| (name == TENSOR).then_some(tensor))?;
        outputs.take(TENSOR).ok_or_else(|| RuntimeError::Parameter("nothing was gathered".into()))
    }
}

/// The program: what is split becomes whole.
fn program(ty: &Type, content: &[usize], mesh: &Mesh, sharding: Option<&Sharding>) -> Result<Program, RuntimeError> {
    let b = Builder::new("gather").without_locations().with_mesh(mesh.clone());
    let argument = Argument { sharding: sharding.cloned(), ..Argument::new(TENSOR, ty.clone()) };
    let whole = Sharding(vec![Vec::new(); ty.rank()]);
    let gathered = b.argument_with(Argument { content: content.to_vec(), ..argument }).constrain(&whole);
    let output = Output { sharding: Some(whole), content: content.to_vec(), ..Output::new(TENSOR, ty.clone()) };
    Ok(b.finish_with(vec![(output, gathered)])?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlo::DType;

    #[test]
    fn what_is_split_becomes_whole() {
        // Four devices, a tensor in four parts, of whose columns callers see five.
        let mesh = Mesh::new(&[("cfg", 2), ("context", 2)]);
        let (split, ty, content) = (Sharding::new(&[&["cfg"], &["context"]]), Type::new(DType::F32, [4, 6]), [4, 5]);
        let program = program(&ty, &content, &mesh, Some(&split)).unwrap();
        insta::assert_snapshot!(program.text);
        assert_eq!(program.results[0].content, content);
    }
}
