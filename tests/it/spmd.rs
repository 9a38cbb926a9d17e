//! The builder's shardings, manual regions and collectives on eight virtual devices.

use crate::support::cpu;
use crate::support::needs;
use ltx2::hlo::DType::F32;
use ltx2::hlo::{Argument, Builder, DeviceMesh, Program, ProgramOutput, Sharding, Type, Value};
use ltx2::pjrt::{Buffer, BufferType, CompileOptions, HostBuffer};

const ROWS: usize = 8;
const COLUMNS: usize = 16;

fn mesh() -> DeviceMesh {
    DeviceMesh::new(&[("fsdp", 2), ("context", 4)])
}

/// Rows over `context`, replicated columns; the same on both halves of `fsdp`.
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

fn result(name: &str, y: &Value, sharding: Sharding) -> (ProgramOutput, Value) {
    (ProgramOutput { sharding: Some(sharding), ..ProgramOutput::new(name, y.ty().clone()) }, y.clone())
}

/// Returns the value of element (row, column).
fn element(row: usize, column: usize) -> f32 {
    (row * 100 + column) as f32
}

/// Runs a program with one row-sharded argument on all devices and returns each device's shard of each result.
fn run(program: &Program) -> Vec<Vec<Vec<f32>>> {
    assert_eq!(program.devices(), 8);
    let client = cpu(8);
    let executable = client.compile(&program.text, &CompileOptions::partitioned(8)).expect("compiles");
    let rows = ROWS / 4;
    let buffers: Vec<Buffer> = (0..8)
        .map(|device| {
            // Device d is at mesh position (d / 4, d % 4).
            let first = device % 4 * rows;
            let part: Vec<f32> = (first..first + rows).flat_map(|r| (0..COLUMNS).map(move |c| element(r, c))).collect();
            let dims = [rows, COLUMNS];
            let host = HostBuffer::dense(bytemuck::cast_slice(&part), BufferType::F32, &dims);
            client.upload(&client.devices()[device], host).expect("uploads")
        })
        .collect();
    let arguments: Vec<Vec<&Buffer>> = buffers.iter().map(|b| vec![b]).collect();
    let results = executable.execute(&arguments).expect("runs");
    let of =
        |n: usize| results.iter().map(|r| bytemuck::pod_collect_to_vec(&r[n].to_host().expect("a result"))).collect();
    (0..program.results.len()).map(of).collect()
}

fn grid(rows: impl Iterator<Item = usize> + Clone, columns: std::ops::Range<usize>) -> Vec<f32> {
    rows.flat_map(|r| columns.clone().map(move |c| element(r, c))).collect()
}

#[needs(cpu)]
fn collectives_return_the_expected_shards() {
    let groups = mesh().groups(&["context"]);
    let around: Vec<(usize, usize)> = (0..8).map(|d| (d, d / 4 * 4 + (d + 1) % 4)).collect();
    let scattered = Sharding::new(&[&["context"], &["fsdp"]]);
    let shardings = [by_columns(), whole(), by_rows(), by_rows(), scattered, by_rows()];
    let b = Builder::new("manual").with_mesh(mesh());
    let results = b.manual(&[(&argument(&b), by_rows())], &shardings, |p| {
        let x = &p[0];
        vec![
            x.all_to_all(1, 0, &groups),
            x.all_gather(0, &groups),
            x.all_reduce_sum(&groups),
            x.all_reduce_max(&groups),
            x.reduce_scatter_sum(1, &mesh().groups(&["fsdp"])),
            x.collective_permute(&around),
        ]
    });
    let results = results.iter().zip(shardings).enumerate();
    let results = results.map(|(n, (y, sharding))| result(&format!("y{n}"), y, sharding)).collect();
    let got = run(&b.finish_with(results).expect("builds"));
    let [columns, all, sums, largest, halves, passed] = &got[..] else { panic!("six results") };
    for device in 0..8 {
        let (half, of_columns, of_rows) = (device / 4 * 8, device % 4 * 4, device % 4 * 2);
        assert_eq!(columns[device], grid(0..ROWS, of_columns..of_columns + 4), "all-to-all, device {device}");
        assert_eq!(all[device], grid(0..ROWS, 0..COLUMNS), "all-gather, device {device}");
        // Row r of every shard: rows r, r+2, r+4, r+6 of the tensor.
        let sum = |r: usize, c: usize| (0..4).map(|k| element(r + 2 * k, c)).sum();
        let want: Vec<f32> = (0..2).flat_map(|r| (0..COLUMNS).map(move |c| sum(r, c))).collect();
        assert_eq!(sums[device], want, "sum, device {device}");
        assert_eq!(largest[device], grid(6..8, 0..COLUMNS), "largest, device {device}");
        // Both halves of fsdp hold the same rows.
        let twice: Vec<f32> = grid(of_rows..of_rows + 2, half..half + 8).iter().map(|v| v * 2.0).collect();
        assert_eq!(halves[device], twice, "reduce-scatter, device {device}");
        let from = (device + 3) % 4 * 2;
        assert_eq!(passed[device], grid(from..from + 2, 0..COLUMNS), "permute, device {device}");
    }
}

#[needs(cpu)]
fn sharding_constraints_reshard_inside_loops() {
    let b = Builder::new("constrained").with_mesh(mesh());
    let x = argument(&b);
    // Reshards to columns and back twice, adding one each time.
    let y = b.repeat(2, &[x], |_, carried| vec![(carried[0].constrain(&by_columns()) + 1.0).constrain(&by_rows())]);
    let program = b.finish_with(vec![result("y", &y[0], by_rows())]).expect("builds");
    for (device, got) in run(&program)[0].iter().enumerate() {
        let first = device % 4 * 2;
        let want: Vec<f32> = grid(first..first + 2, 0..COLUMNS).iter().map(|v| v + 2.0).collect();
        assert_eq!(*got, want, "device {device}");
    }
}
