//! The program that replicates tensors sharded over several processes.

use ltx2_stablehlo::{Argument, BuildError, Builder, DeviceMesh, Program, ProgramOutput, Sharding, Type};

/// Name of the program's only argument, and of its result.
pub(super) const TENSOR: &str = "tensor";

/// Builds a program that all-gathers every sharded dimension.
pub(super) fn program(
    ty: &Type,
    logical_dims: &[usize],
    mesh: &DeviceMesh,
    sharding: Option<&Sharding>,
) -> Result<Program, BuildError> {
    let b = Builder::new("gather").without_locations().with_mesh(mesh.clone());
    let argument = Argument { sharding: sharding.cloned(), ..Argument::new(TENSOR, ty.clone()) };
    let replicated = Sharding(vec![Vec::new(); ty.rank()]);
    let gathered = b.argument_with(Argument { logical_dims: logical_dims.to_vec(), ..argument }).constrain(&replicated);
    let output = ProgramOutput {
        sharding: Some(replicated),
        logical_dims: logical_dims.to_vec(),
        ..ProgramOutput::new(TENSOR, ty.clone())
    };
    b.finish_with(vec![(output, gathered)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use ltx2_stablehlo::DType;

    #[test]
    fn program_gathers_all_sharded_dimensions() {
        // Four devices with one shard each; five of the six columns are logical, the last one is padding.
        let mesh = DeviceMesh::new(&[("cfg", 2), ("context", 2)]);
        let (split, ty, content) = (Sharding::new(&[&["cfg"], &["context"]]), Type::new(DType::F32, [4, 6]), [4, 5]);
        let program = program(&ty, &content, &mesh, Some(&split)).unwrap();
        insta::assert_snapshot!(program.text);
        assert_eq!(program.results[0].logical_dims, content);
    }
}
