//! Tensors whose parts lie with several processes, brought whole to each of them.

use super::distributed::Distributed;
use super::engine::{Engine, RuntimeError};
use crate::hlo::{Argument, Builder, Mesh, Output, Program, Sharding, Type};

/// The one argument of such a program, and its result.
const TENSOR: &str = "tensor";

/// How a program's result becomes whole.
pub(super) struct Whole {
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
    use ndarray::Array2;

    use super::*;
    use crate::dtype::DType;
    use crate::pjrt::discover::{self, Kind};
    use crate::pjrt::{Client, ClientOptions, CpuOptions, Plugin};
    use crate::runtime::EngineOptions;
    use crate::tensor::Tensor;

    /// Four devices, a tensor in four parts, of whose columns callers see five.
    fn split() -> (Mesh, Sharding, Type, [usize; 2]) {
        let mesh = Mesh::new(&[("cfg", 2), ("context", 2)]);
        (mesh, Sharding::new(&[&["cfg"], &["context"]]), Type::new(DType::F32, [4, 6]), [4, 5])
    }

    #[test]
    fn what_is_split_becomes_whole() {
        let (mesh, split, ty, content) = split();
        let program = program(&ty, &content, &mesh, Some(&split)).unwrap();
        insta::assert_snapshot!(program.text);
        assert_eq!(program.results[0].content, content);
    }

    #[test]
    fn a_gathered_tensor_is_the_tensor() {
        let Some(found) = discover::find(Kind::Cpu, None).found.into_iter().next() else {
            assert!(std::env::var_os("LTX2_REQUIRE_PLUGIN").is_none(), "no CPU plugin: run `ltx2 plugin install cpu`");
            return eprintln!("SKIPPED, NOTHING WAS TESTED: no CPU plugin found; run `ltx2 plugin install cpu`");
        };
        let options = ClientOptions::Cpu(CpuOptions { devices: Some(4), ..CpuOptions::default() });
        let client = Client::new(&Plugin::load(&found.path).unwrap(), &options).unwrap();
        let engine = Engine::new(client, EngineOptions::default());
        let (mesh, split, ty, content) = split();

        let b = Builder::new("double").with_mesh(mesh.clone());
        let x = Argument { sharding: Some(split.clone()), content: content.into(), ..Argument::new("x", ty.clone()) };
        let x = b.argument_with(x);
        let y = Output { sharding: Some(split.clone()), content: content.into(), ..Output::new("y", ty) };
        let program = b.finish_with(vec![(y, (&x + &x).constrain(&split))]).unwrap();
        let double = engine.compile("double", &program).unwrap();
        let values = Array2::from_shape_fn((4, 5), |(i, j)| (5 * i + j) as f32);
        let input = engine.upload(&double, "x", &Tensor::from(values.clone())).unwrap();
        let outputs = engine.run(&double, |name| (name == "x").then_some(&input)).unwrap();

        let whole = Whole::new(&engine, &mesh, Some(&split)).of(outputs.get("y").unwrap()).unwrap();
        assert!(whole.parts().iter().all(|part| part.size == [4, 6]));
        assert_eq!(whole.download().unwrap().to_f32(), (values * 2.0).into_dyn());
    }
}
