//! Prints an attention program whose queries are sharded over four devices. Run `cargo run --example attention`.

use ltx2_stablehlo::{Argument, BuildError, Builder, DType, DeviceMesh, Sharding, Type};

fn main() -> Result<(), BuildError> {
    let b = Builder::new("attention").with_mesh(DeviceMesh::new(&[("context", 4)]));
    let input = |name: &str, split: &[&[&str]]| {
        let ty = Type::new(DType::BF16, [8, 256, 64]);
        b.argument_with(Argument { sharding: Some(Sharding::new(split)), ..Argument::new(name, ty) })
    };
    let q = input("q", &[&[], &["context"], &[]]);
    let (k, v) = (input("k", &[&[], &[], &[]]), input("v", &[&[], &[], &[]]));
    let scores = {
        let _scope = b.scope("scores");
        b.einsum("hqd,hkd->hqk", &q, &k, DType::F32) * 0.125
    };
    let _scope = b.scope("softmax");
    let weights = (&scores - scores.max_keep(&[-1])).exp();
    let weights = &weights / weights.sum_keep(&[-1]);
    let y = b.einsum("hqk,hkd->hqd", &weights.to(DType::BF16), &v, DType::BF16);
    print!("{}", b.finish(&[("y", &y)])?.text);
    Ok(())
}
