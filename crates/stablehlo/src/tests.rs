use super::*;
use crate::DType::{self, BF16, Bool, F32, I32};

fn builder() -> Builder {
    Builder::new("test").without_locations()
}

fn arg(b: &Builder, name: &str, dtype: DType, dims: &[usize]) -> Value {
    b.argument(name, Type::new(dtype, dims.to_vec()))
}

#[test]
fn program_text_matches_the_snapshot() {
    let b = builder();
    let x = arg(&b, "x", F32, &[2, 3]);
    let w = arg(&b, "w", F32, &[4, 3]);
    let y = (b.einsum("bi,oi->bo", &x, &w, F32) * 0.5).tanh();
    insta::assert_snapshot!(b.finish(&[("y", &y)]).expect("builds").text);
}

#[test]
fn loop_carries_captured_outer_values() {
    let b = builder();
    let x = arg(&b, "x", BF16, &[2, 4]);
    let stack = arg(&b, "w", BF16, &[3, 4, 4]);
    let y = b.repeat(3, &[x], |i, carried| vec![b.einsum("bi,oi->bo", &carried[0], &stack.index(i), BF16)]);
    insta::assert_snapshot!(b.finish(&[("y", &y[0])]).expect("builds").text);
}

#[test]
fn nested_loops_capture_outer_values_once() {
    let b = builder();
    let x = arg(&b, "x", F32, &[]);
    let step = arg(&b, "step", F32, &[]);
    let y = b.repeat(2, &[x], |_, outer| b.repeat(3, outer, |_, inner| vec![&inner[0] + &step]));
    let text = b.finish(&[("y", &y[0])]).expect("builds").text;
    assert_eq!(text.matches("stablehlo.while").count(), 2);
    assert_eq!(text.matches("%arg1").count(), 2, "declared once and captured once by the outer loop: {text}");
}

#[test]
fn case_in_loop_captures_its_values_and_counts_only_the_largest_branch() {
    let b = builder();
    let (x, w) = (arg(&b, "x", F32, &[2, 2]), arg(&b, "w", F32, &[2, 2]));
    let which = arg(&b, "which", I32, &[4]);
    let y = b.for_loop(&b.scalar(0.0, I32), &b.scalar(4.0, I32), &[x], |i, carried| {
        let product = |x: &Value| b.einsum("bi,oi->bo", x, &w, F32);
        b.case(&which.index(i), 3, |k| vec![(0..k).fold(carried[0].clone(), |x, _| product(&x))])
    });
    let program = b.finish(&[("y", &y[0])]).expect("builds");
    insta::assert_snapshot!(program.text);
    assert_eq!(program.dot_flops, 2.0 * 16.0);
}

#[test]
fn case_branches_must_return_the_same_types() {
    let b = builder();
    let x = arg(&b, "x", F32, &[2, 2]);
    let y = b.case(&b.scalar(0.0, I32), 2, |k| vec![if k == 0 { x.clone() } else { x.at(0, 0) }]);
    let e = b.finish(&[("y", &y[0])]).expect_err("branch types differ");
    assert_eq!(
        (e.op, &e.message[..]),
        ("case", "branch 1 returns tensor<2xf32>, but branch 0 returns tensor<2x2xf32>")
    );
    let wide = builder();
    let none = wide.case(&arg(&wide, "i", F32, &[]), 2, |_| Vec::new());
    assert_eq!((none.len(), wide.finish(&[]).expect_err("not an integer").op), (0, "case"));
}

#[test]
fn shape_error_has_operation_scope_and_both_shapes() {
    let b = builder();
    let (x, y) = (arg(&b, "x", F32, &[2, 3]), arg(&b, "y", F32, &[2, 4]));
    let z = {
        let _block = b.scope("block");
        let _attn = b.scope("attn1");
        &x + &y
    };
    // This second error is not reported.
    let z = z.reshape(vec![5]);
    let e = b.finish(&[("z", &z)]).expect_err("shapes differ");
    assert_eq!(
        e.to_string(),
        "add in scope 'block/attn1' of program 'test': shapes do not broadcast: tensor<2x3xf32> and tensor<2x4xf32>"
    );
}

#[test]
fn invalid_operands_are_reported_by_their_operation() {
    type Case = (&'static str, fn(&Builder, &Value) -> Value);
    let cases: [Case; 12] = [
        ("dot_general", |b, x| b.einsum("ab,cb->ac", x, &x.reshape(vec![3, 2]), F32)),
        ("reshape", |_, x| x.reshape(vec![7])),
        ("transpose", |_, x| x.transpose(&[0, 0])),
        ("slice", |_, x| x.slice(1, 2, 9)),
        ("concatenate", |b, x| b.concat(&[x, &x.reshape(vec![3, 2])], 0)),
        ("broadcast_in_dim", |_, x| x.broadcast_to(&[2, 4])),
        ("reduce", |_, x| x.sum(&[0, 0])),
        ("select", |_, x| x.select(x, x)),
        ("convolution", |b, x| b.convolution(x, x, &Conv::new(1))),
        ("dynamic_slice", |_, x| x.dynamic_slice(0, &x.like(0.0), 1)),
        ("gather", |_, x| x.gather_rows(x)),
        ("pad", |_, x| x.pad_reflect(1, 3, 0)),
    ];
    for (op, build) in cases {
        let b = builder();
        let x = arg(&b, "x", F32, &[2, 3]);
        let y = build(&b, &x);
        let e = b.finish(&[("y", &y)]).expect_err(op);
        assert_eq!(e.op, op, "{e}");
        assert!(e.message.contains("tensor<2x3xf32>") || e.message.contains("3"), "{e}");
    }
}

#[test]
fn functions_cannot_capture_outer_values() {
    let b = builder();
    let (x, y) = (arg(&b, "x", F32, &[2]), arg(&b, "y", F32, &[2]));
    let z = b.call("f", std::slice::from_ref(&x), |p| vec![&p[0] + &y]);
    assert_eq!(b.finish(&[("z", &z[0])]).expect_err("captures").op, "capture");
}

#[test]
fn function_is_defined_once_per_argument_types() {
    let b = builder();
    let x = arg(&b, "x", F32, &[2]);
    let twice = |v: &Value| b.call("double", std::slice::from_ref(v), |p| vec![&p[0] + &p[0]]).remove(0);
    let z = twice(&twice(&x));
    let text = b.finish(&[("z", &z)]).expect("builds").text;
    assert_eq!((text.matches("func.func private").count(), text.matches("func.call").count()), (1, 2));
}

#[test]
fn constant_literals_preserve_bits() {
    let b = builder();
    let values =
        [b.scalar(f64::NEG_INFINITY, F32), b.scalar(0.1, F32), b.scalar(1e-6, F32), b.scalar(f64::INFINITY, BF16)];
    let flag = b.scalar(1.0, Bool);
    let z = flag.select(&values[0], &values[1]) + &values[2];
    let text = b.finish(&[("z", &z), ("w", &values[3])]).expect("builds").text;
    for literal in ["dense<0xFF800000>", "dense<1.0e-1>", "dense<1.0e-6>", "dense<0x7F80>", "dense<true>"] {
        assert!(text.contains(literal), "{literal} in {text}");
    }
}

#[test]
fn sharding_constraint_must_divide_the_dimension() {
    let b = builder().with_mesh(DeviceMesh::new(&[("fsdp", 2), ("context", 4)]));
    let x = arg(&b, "x", F32, &[6, 8]);
    let y = x.constrain(&Sharding::new(&[&["context"], &[]]));
    let e = b.finish(&[("y", &y)]).expect_err("6 is not divisible by 4");
    assert_eq!(e.message, "dimension 0 of tensor<6x8xf32> is not divisible by mesh axis 'context' of size 4");
}

#[test]
fn manual_region_operates_on_shards() {
    let mesh = DeviceMesh::new(&[("fsdp", 2), ("context", 4)]);
    let groups = mesh.groups(&["context"]);
    assert_eq!(groups, Groups(vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]]));
    assert_eq!(mesh.groups(&["fsdp"]).0[1], [1, 5]);
    let b = builder().with_mesh(mesh);
    let x = arg(&b, "x", F32, &[8, 16]);
    let rows = Sharding::new(&[&["context"], &[]]);
    let columns = Sharding::new(&[&[], &["context"]]);
    let y = b.manual(&[(&x, rows)], &[columns], |p| {
        assert_eq!(p[0].dims(), [2, 16]);
        vec![p[0].all_to_all(1, 0, &groups)]
    });
    assert_eq!(y[0].dims(), [8, 16]);
    insta::assert_snapshot!(b.finish(&[("y", &y[0])]).expect("builds").text);
}

#[test]
fn manual_region_captures_are_replicated_operands() {
    let b = builder().with_mesh(DeviceMesh::new(&[("context", 4)]));
    let (x, w) = (arg(&b, "x", F32, &[8, 2]), arg(&b, "w", F32, &[2, 2]));
    let rows = Sharding::new(&[&["context"], &[]]);
    let y = b.manual(&[(&x, rows.clone())], std::slice::from_ref(&rows), |p| {
        b.repeat(3, &p[..1], |i, state| {
            // This argument of `main` is declared inside the region.
            let stack = arg(&b, "stack", F32, &[3, 2]);
            vec![b.einsum("rc,co->ro", &state[0], &w, F32) + stack.index(i).constrain(&rows)]
        })
    });
    let text = b.finish(&[("y", &y[0])]).expect("builds").text;
    let whole = "<@mesh, [{}, {}]>";
    let operands = format!("(%arg0, %arg1, %arg2) in_shardings=[<@mesh, [{{\"context\"}}, {{}}]>, {whole}, {whole}]");
    assert!(text.contains(&operands), "{text}");
    // Constraints are ignored inside a manual region.
    assert!(!text.contains("sharding_constraint"), "{text}");
}

#[test]
fn nested_manual_regions_are_rejected() {
    let b = builder().with_mesh(DeviceMesh::new(&[("context", 4)]));
    let x = arg(&b, "x", F32, &[8]);
    let rows = Sharding::new(&[&["context"]]);
    let region = |x: &Value, body: &dyn Fn(&Value) -> Value| {
        b.manual(&[(x, rows.clone())], std::slice::from_ref(&rows), |p| vec![body(&p[0])]).remove(0)
    };
    let y = region(&x, &|x| region(x, &|x| x + x));
    assert_eq!(b.finish(&[("y", &y)]).expect_err("nested").message, "manual regions cannot be nested");
}

#[test]
fn scopes_become_mlir_locations() {
    let b = Builder::new("test");
    let x = arg(&b, "x", I32, &[2]);
    let y = {
        let _outer = b.scope("blocks");
        let _inner = b.scope("ff");
        &x + &x
    };
    let text = b.finish(&[("y", &y)]).expect("builds").text;
    assert!(text.contains("loc(\"blocks/ff/add\")"), "{text}");
}

proptest::proptest! {
    #[test]
    fn einsum_infers_the_product_shape(dims in proptest::collection::vec(1usize..5, 5)) {
        let b = builder();
        let (n, h, q, k, d) = (dims[0], dims[1], dims[2], dims[3], dims[4]);
        let x = arg(&b, "x", BF16, &[n, q, h, d]);
        let y = arg(&b, "y", BF16, &[n, k, h, d]);
        let z = b.einsum("bqhd,bkhd->bhqk", &x, &y, F32);
        proptest::prop_assert_eq!(z.dims(), &[n, h, q, k][..]);
        proptest::prop_assert!(b.finish(&[("z", &z)]).is_ok());
    }
}

#[test]
fn work_counts_one_device_and_loop_iterations() {
    let mesh = || DeviceMesh::new(&[("context", 2), ("tensor", 3)]);
    let run = |rows: &[&str], inner: &[&str]| {
        let b = builder().with_mesh(mesh());
        let x = arg(&b, "x", BF16, &[4, 6]).constrain(&Sharding::new(&[rows, inner]));
        let w = arg(&b, "w", BF16, &[9, 6]).constrain(&Sharding::new(&[&[], inner]));
        let y = b.repeat(5, &[x], |_, c| vec![b.einsum("bi,oi->bo", &c[0], &w, BF16).slice(1, 0, 6)]);
        b.finish(&[("y", &y[0])]).expect("builds").work
    };
    let flops = 5.0 * 2.0 * (4 * 6 * 9) as f64;
    assert_eq!((run(&[], &[]).flops(), run(&[], &[]).transfers.len()), (flops, 0));
    // Sharding the rows over two devices halves the work of a device. Sharding the contracting dimension over three
    // devices divides it by three, and each of the five iterations all-reduces the partial sums.
    let rows = run(&["context"], &[]);
    assert_eq!((rows.flops(), rows.transfers.len()), (flops / 2.0, 0));
    assert_eq!((rows.matmuls[0].bytes, rows.matmuls[0].times), ([24.0, 108.0, 36.0], 5.0));
    let summed = run(&[], &["tensor"]);
    assert_eq!(summed.flops(), flops / 3.0);
    let sums: Vec<_> = summed.transfers.iter().filter(|t| t.pattern == Pattern::AllReduce).collect();
    assert_eq!((sums.len(), sums[0].bytes, sums[0].times), (1, 72.0, 5.0));
    assert_eq!(sums[0].groups, mesh().groups(&["tensor"]));
}
