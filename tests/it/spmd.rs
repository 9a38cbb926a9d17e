//! The builder's shardings, manual regions and collectives on eight virtual devices.

use crate::support::cpu;
use crate::support::needs;
use ltx2::hlo::DType::F32;
use ltx2::hlo::{Argument, Builder, Mesh, Output, Program, Sharding, Type, Value};
use ltx2::pjrt::{Buffer, BufferType, Client, CompileOptions, HostBuffer};

const ROWS: usize = 8;
const COLUMNS: usize = 16;

fn mesh() -> Mesh {
    Mesh::new(&[("fsdp", 2), ("context", 4)])
}

/// Rows over `context`, columns whole; the same on both halves of `fsdp`.
fn by_rows() -> Sharding {
    Sharding::new(&[&["context"], &[]])
}

fn by_columns() -> Sharding {
    Sharding::new(&[&[], &["context"]])
}

fn whole() -> Sharding {
    Sharding::new(&[&[], &[]])
}

fn argument(b: &Builder) -> Value {
    let ty = Type::new(F32, [ROWS, COLUMNS]);
    b.argument_with(Argument { sharding: Some(by_rows()), ..Argument::new("x", ty) })
}

fn result(y: &Value, sharding: Sharding) -> (Output, Value) {
    (Output { sharding: Some(sharding), ..Output::new("y", y.ty().clone()) }, y.clone())
}

/// The value of element (row, column).
fn element(row: usize, column: usize) -> f32 {
    (row * 100 + column) as f32
}

/// Runs a program of one row-sharded argument on all devices; each device's result.
fn run(client: &Client, program: &Program) -> Vec<Vec<f32>> {
    assert_eq!(program.devices(), 8);
    let executable = client.compile(&program.text, &CompileOptions::partitioned(8)).expect("compiles");
    let rows = ROWS / 4;
    let buffers: Vec<Buffer> = (0..8)
        .map(|device| {
            // Device d is at (d / 4, d % 4) of the mesh.
            let first = device % 4 * rows;
            let part: Vec<f32> = (first..first + rows).flat_map(|r| (0..COLUMNS).map(move |c| element(r, c))).collect();
            let dims = [rows, COLUMNS];
            let host = HostBuffer::dense(bytemuck::cast_slice(&part), BufferType::F32, &dims);
            client.upload(&client.devices()[device], host).expect("uploads")
        })
        .collect();
    let arguments: Vec<Vec<&Buffer>> = buffers.iter().map(|b| vec![b]).collect();
    let results = executable.execute(&arguments).expect("runs");
    results.iter().map(|r| bytemuck::pod_collect_to_vec(&r[0].to_host().expect("a result"))).collect()
}

/// A program that does `body` to each device's rows.
fn manual(out: Sharding, body: impl FnOnce(&Value, &Mesh) -> Value) -> Program {
    let b = Builder::new("manual").with_mesh(mesh());
    let x = argument(&b);
    let y = b.manual(&[(&x, by_rows())], std::slice::from_ref(&out), |p| vec![body(&p[0], &mesh())]);
    b.finish_with(vec![result(&y[0], out)]).expect("builds")
}

fn grid(rows: impl Iterator<Item = usize> + Clone, columns: std::ops::Range<usize>) -> Vec<f32> {
    rows.flat_map(|r| columns.clone().map(move |c| element(r, c))).collect()
}

#[needs(cpu)]
fn all_to_all_turns_rows_into_columns() {
    let client = cpu(8);
    let program = manual(by_columns(), |x, mesh| x.all_to_all(1, 0, &mesh.groups(&["context"])));
    for (device, got) in run(&client, &program).iter().enumerate() {
        let first = device % 4 * 4;
        assert_eq!(*got, grid(0..ROWS, first..first + 4), "device {device}");
    }
}

#[needs(cpu)]
fn all_gather_joins_the_parts_in_mesh_order() {
    let client = cpu(8);
    let program = manual(whole(), |x, mesh| x.all_gather(0, &mesh.groups(&["context"])));
    for got in run(&client, &program) {
        assert_eq!(got, grid(0..ROWS, 0..COLUMNS));
    }
}

#[needs(cpu)]
fn reductions_sum_scatter_and_take_the_largest() {
    let client = cpu(8);
    let groups = mesh().groups(&["context"]);
    let sum = manual(Sharding::new(&[&["context"], &[]]), |x, _| x.all_reduce_sum(&groups));
    let largest = manual(Sharding::new(&[&["context"], &[]]), |x, _| x.all_reduce_max(&groups));
    let scattered =
        manual(Sharding::new(&[&["context"], &["fsdp"]]), |x, m| x.reduce_scatter_sum(1, &m.groups(&["fsdp"])));
    for got in run(&client, &sum) {
        // Row r of every part: rows r, r+2, r+4, r+6 of the whole.
        let want: Vec<f32> =
            (0..2).flat_map(|r| (0..COLUMNS).map(move |c| (0..4).map(|k| element(r + 2 * k, c)).sum())).collect();
        assert_eq!(got, want);
    }
    for got in run(&client, &largest) {
        assert_eq!(got, grid(6..8, 0..COLUMNS));
    }
    for (device, got) in run(&client, &scattered).iter().enumerate() {
        let (half, first) = (device / 4 * 8, device % 4 * 2);
        let want: Vec<f32> = grid(first..first + 2, half..half + 8).iter().map(|v| v * 2.0).collect();
        assert_eq!(*got, want, "device {device}: both halves of fsdp hold the same rows");
    }
}

#[needs(cpu)]
fn a_permute_passes_rows_around() {
    let client = cpu(8);
    let pairs: Vec<(usize, usize)> = (0..8).map(|d| (d, d / 4 * 4 + (d + 1) % 4)).collect();
    let program = manual(by_rows(), |x, _| x.collective_permute(&pairs));
    for (device, got) in run(&client, &program).iter().enumerate() {
        let from = (device + 3) % 4 * 2;
        assert_eq!(*got, grid(from..from + 2, 0..COLUMNS), "device {device}");
    }
}

#[needs(cpu)]
fn a_constraint_moves_what_it_must_inside_a_loop_too() {
    let client = cpu(8);
    let b = Builder::new("constrained").with_mesh(mesh());
    let x = argument(&b);
    // Twice: to columns and back, one added each time.
    let y = b.repeat(2, &[x], |_, carried| vec![(carried[0].constrain(&by_columns()) + 1.0).constrain(&by_rows())]);
    let program = b.finish_with(vec![result(&y[0], by_rows())]).expect("builds");
    for (device, got) in run(&client, &program).iter().enumerate() {
        let first = device % 4 * 2;
        let want: Vec<f32> = grid(first..first + 2, 0..COLUMNS).iter().map(|v| v + 2.0).collect();
        assert_eq!(*got, want, "device {device}");
    }
}
