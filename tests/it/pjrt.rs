//! The PJRT layer with a real plugin: the CPU plugin, or the one in `LTX2_PJRT_PLUGIN`.

#![allow(clippy::unwrap_used)]

use crate::support::{cpu, needs};
use std::sync::{Arc, OnceLock};

use ltx2::pjrt::{
    AttributeValue, Attributes, Buffer, BufferType, Client, CompileOptions, CpuOptions, ExecuteOptions, HostBuffer,
    HostUse, LoadedExecutable, OptionValue, SharedBytes, SharedHostBuffer, Topology, TransferShape,
};

/// Returns a client with 8 virtual devices, shared by all tests.
fn client() -> &'static Client {
    static CLIENT: OnceLock<Client> = OnceLock::new();
    CLIENT.get_or_init(|| cpu(8))
}

fn upload(client: &Client, device: usize, values: &[f32], dims: &[usize]) -> Buffer {
    let bytes = bytemuck::cast_slice(values);
    client.upload(&client.devices()[device], HostBuffer::dense(bytes, BufferType::F32, dims)).unwrap()
}

fn values(buffer: &Buffer) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&buffer.to_host().unwrap())
}

const ADD: &str = r#"
module @add {
  func.func public @main(%x: tensor<2x3xf32>, %y: tensor<2x3xf32>) -> (tensor<2x3xf32>, tensor<3xf32>) {
    %s = stablehlo.add %x, %y : tensor<2x3xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %r = stablehlo.reduce(%s init: %zero) applies stablehlo.add across dimensions = [0]
        : (tensor<2x3xf32>, tensor<f32>) -> tensor<3xf32>
    return %s, %r : tensor<2x3xf32>, tensor<3xf32>
  }
}"#;

/// Returns [`ADD`] compiled for the first device of [`client`].
fn add() -> &'static LoadedExecutable {
    static ADDED: OnceLock<LoadedExecutable> = OnceLock::new();
    ADDED.get_or_init(|| client().compile(ADD, &CompileOptions::single()).unwrap())
}

#[needs(cpu)]
fn executable_runs_on_one_device() {
    let (client, exe) = (client(), add());
    assert_eq!(exe.name().unwrap(), "add");
    assert_eq!(exe.devices().len(), 1);
    assert_eq!(exe.outputs().unwrap(), [(BufferType::F32, vec![2, 3]), (BufferType::F32, vec![3])]);
    let x = upload(client, 0, &[1., 2., 3., 4., 5., 6.], &[2, 3]);
    let y = upload(client, 0, &[10., 20., 30., 40., 50., 60.], &[2, 3]);
    let out = exe.execute(&[vec![&x, &y]]).unwrap().remove(0);
    assert_eq!(values(&out[0]), [11., 22., 33., 44., 55., 66.]);
    assert_eq!(values(&out[1]), [55., 77., 99.]);
    assert_eq!((out[0].element_type().unwrap(), out[0].dims().unwrap()), (BufferType::F32, vec![2, 3]));
    assert_eq!(out[0].on_device_size().unwrap(), 24);
    assert_eq!(out[0].device().unwrap().id(), client.devices()[0].id());
    let moved = out[0].copy_to(&client.devices()[3]).unwrap();
    assert_eq!(moved.device().unwrap().id(), client.devices()[3].id());
    assert_eq!(values(&moved), [11., 22., 33., 44., 55., 66.]);
    out[0].delete().unwrap();
    assert!(out[0].is_deleted().unwrap() && out[0].to_host().is_err());
}

#[needs(cpu)]
fn plugin_reports_platform_and_devices() {
    let client = client();
    assert_eq!(client.platform_name(), "cpu");
    assert_eq!(client.devices().len(), 8);
    assert_eq!(client.all_devices().len(), 8);
    assert_eq!(client.process_index().unwrap(), 0);
    assert!(client.devices()[0].is_addressable().unwrap());
    assert!(client.devices()[0].memory().is_err_and(|e| e.is_unsupported()), "CPU reports no device memory");
    assert!(client.plugin().attributes().unwrap().contains_key("stablehlo_current_version"));
    assert!(client.plugin().version() >= (0, 81));
}

/// `x` and `w` are sharded over rows: the product needs all of `w`.
const SHARDED: &str = r#"
module @sharded attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["rows"=8]>
  func.func public @main(
      %x: tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"rows"}, {}]>},
      %w: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"rows"}, {}]>})
      -> (tensor<16x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"rows"}, {}]>}) {
    %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<16x8xf32>, tensor<8x4xf32>) -> tensor<16x4xf32>
    return %y : tensor<16x4xf32>
  }
}"#;

#[needs(cpu)]
fn sharded_program_gathers_its_weights() {
    let client = client();
    let exe = client.compile(SHARDED, &CompileOptions::partitioned(8)).unwrap();
    assert_eq!((exe.num_partitions().unwrap(), exe.num_replicas().unwrap(), exe.devices().len()), (8, 1, 8));
    let x: Vec<f32> = (0..16 * 8).map(|i| (i % 7) as f32 - 3.0).collect();
    let w: Vec<f32> = (0..8 * 4).map(|i| (i % 5) as f32 * 0.5).collect();
    let part =
        |d: usize| [upload(client, d, &x[d * 16..][..16], &[2, 8]), upload(client, d, &w[d * 4..][..4], &[1, 4])];
    let parts: Vec<[Buffer; 2]> = (0..8).map(part).collect();
    let arguments: Vec<Vec<&Buffer>> = parts.iter().map(|pair| pair.iter().collect()).collect();
    let got: Vec<f32> = exe.execute(&arguments).unwrap().iter().flat_map(|out| values(&out[0])).collect();
    let product = |i: usize| (0..8).map(|k| x[i / 4 * 8 + k] * w[k * 4 + i % 4]).sum::<f32>();
    assert_eq!(got, (0..16 * 4).map(product).collect::<Vec<f32>>());

    let program = exe.optimized_program().unwrap();
    assert_eq!(program.format, "hlo_with_config");
    let text = String::from_utf8_lossy(&program.bytes);
    assert!(text.contains("all-gather"), "the optimized program gathers the weights");
}

#[needs(cpu)]
fn invalid_arguments_are_rejected() {
    let (client, exe) = (client(), add());
    let x = upload(client, 0, &[0.; 6], &[2, 3]);
    assert!(exe.execute(&[]).unwrap_err().to_string().contains("one argument list per device"));
    let error = exe.execute(&[vec![&x]]).unwrap_err();
    assert!(error.code().is_some(), "{error}");
    let error =
        client.upload(&client.devices()[0], HostBuffer::dense(&[0; 4], BufferType::F32, &[2])).unwrap_err().to_string();
    assert!(error.contains("PJRT_Client_BufferFromHostBuffer") && error.contains("f32[2] needs 8 bytes"), "{error}");
}

#[needs(cpu)]
fn strided_upload_copies_a_column_block() {
    let client = client();
    let matrix: Vec<f32> = (0..4 * 6).map(|i| i as f32).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&matrix);
    // Columns 2 and 3 of a row-major 4x6 matrix.
    let host = HostBuffer {
        byte_strides: Some(&[24, 4]),
        ..HostBuffer::dense(&bytes[8..8 + 3 * 24 + 8], BufferType::F32, &[4, 2])
    };
    let block = client.upload(&client.devices()[1], host).unwrap();
    assert_eq!(values(&block), [2., 3., 8., 9., 14., 15., 20., 21.]);
    // A transposed view arrives row-major.
    let host = HostBuffer { byte_strides: Some(&[4, 24]), ..HostBuffer::dense(bytes, BufferType::F32, &[6, 4]) };
    let transposed = client.upload(&client.devices()[0], host).unwrap();
    assert_eq!(values(&transposed)[..5], [0., 6., 12., 18., 1.]);
}

/// Memory that records when it is dropped.
struct Watched(Vec<u8>, Arc<std::sync::atomic::AtomicBool>);

impl AsRef<[u8]> for Watched {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.1.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

#[needs(cpu)]
fn shared_host_memory_is_released_after_the_transfer() {
    let client = client();
    for usage in [HostUse::UntilTransferred, HostUse::ZeroCopy] {
        let dropped = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let memory: Vec<f32> = (0..1 << 16).map(|i| i as f32).collect();
        let bytes = SharedBytes::new(Arc::new(Watched(bytemuck::cast_slice(&memory).to_vec(), dropped.clone())));
        let host =
            SharedHostBuffer { bytes, ty: BufferType::F32, dims: vec![1 << 16], byte_strides: None, layout: None };
        let buffer = client.upload_shared(&client.devices()[0], &host, usage).unwrap();
        drop(host);
        assert_eq!(values(&buffer), memory);
        drop(buffer);
        let freed = (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(2));
            dropped.load(std::sync::atomic::Ordering::SeqCst)
        });
        assert!(freed, "{usage:?}: the owner is released once the device is done");
    }
}

#[needs(cpu)]
fn device_buffers_can_be_filled_in_chunks() {
    let client = client();
    let shapes = [
        TransferShape { ty: BufferType::F32, dims: vec![3, 4], layout: None },
        TransferShape { ty: BufferType::S32, dims: vec![2], layout: None },
    ];
    let transfer = client.transfer(&client.devices()[2], None, &shapes).unwrap();
    assert_eq!(transfer.sizes(), [48, 8]);
    let (stack, pair) = (transfer.buffer(0).unwrap(), transfer.buffer(1).unwrap());
    let layers: Vec<f32> = (0..12).map(|i| i as f32).collect();
    let bytes: SharedBytes = bytemuck::cast_slice::<f32, u8>(&layers).to_vec().into();
    transfer.write(1, 0, bytemuck::cast_slice(&[7i32, 8]), true).unwrap();
    for layer in [2, 0, 1] {
        let piece = bytes.slice(layer * 16..layer * 16 + 16).unwrap();
        transfer.write_shared(0, layer * 16, &piece, layer == 1).unwrap();
    }
    assert_eq!(values(&stack), layers);
    assert_eq!(bytemuck::pod_collect_to_vec::<u8, i32>(&pair.to_host().unwrap()), [7, 8]);
    let error = transfer.write(1, 4, &[0; 8], true).unwrap_err().to_string();
    assert!(error.contains("8 bytes at byte 4 exceed buffer 1 of 8 bytes"), "{error}");
    assert!(transfer.buffer(2).is_err());
}

const DONATE: &str = r#"
module @donate {
  func.func public @main(%x: tensor<1024xf32> {tf.aliasing_output = 0 : i32}, %y: tensor<1024xf32>) -> tensor<1024xf32> {
    %s = stablehlo.add %x, %y : tensor<1024xf32>
    return %s : tensor<1024xf32>
  }
}"#;

#[needs(cpu)]
fn donated_arguments_are_reused() {
    let client = client();
    let exe = client.compile(DONATE, &CompileOptions::single()).unwrap();
    let memory = exe.memory().unwrap();
    assert_eq!((memory.arguments, memory.outputs, memory.aliased), (8192, 4096, 4096));
    assert!(memory.peak > 0);
    let x = upload(client, 0, &[1.; 1024], &[1024]);
    let y = upload(client, 0, &[2.; 1024], &[1024]);
    let keep = ExecuteOptions { keep: vec![0], ..Default::default() };
    let kept = exe.execute_with(&[vec![&x, &y]], &keep).unwrap();
    assert_eq!(values(&kept[0][0]), [3.; 1024]);
    assert!(!x.is_deleted().unwrap(), "kept, although the program donates it");
    let out = exe.execute(&[vec![&x, &y]]).unwrap();
    assert_eq!(values(&out[0][0]), [3.; 1024]);
    assert!(x.is_deleted().unwrap() && !y.is_deleted().unwrap());
    assert!(exe.execute(&[vec![&x, &y]]).is_err(), "a donated argument cannot be used again");
}

#[needs(cpu)]
fn serialized_program_runs_after_load() {
    let client = client();
    let bytes = add().serialize().unwrap();
    let exe = client.load(&bytes).unwrap();
    let x = upload(client, 0, &[1., 2., 3., 4., 5., 6.], &[2, 3]);
    let out = exe.execute(&[vec![&x, &x]]).unwrap().remove(0);
    assert_eq!(values(&out[1]), [10., 14., 18.]);
    let error = client.load(b"not a program").unwrap_err();
    assert!(error.code().is_some(), "{error}");
}

#[needs(cpu)]
fn errors_carry_call_code_and_message() {
    let client = client();
    let error = client.compile("module { func.func @main() { nonsense } }", &CompileOptions::single()).unwrap_err();
    let text = error.to_string();
    let code = error.code().unwrap();
    let path = client.plugin().path().display().to_string();
    assert!(text.starts_with(&path), "{text}");
    assert!(text.contains(&format!("PJRT_Client_Compile failed ({code}): ")) && text.contains("nonsense"), "{text}");
    assert!(!text.contains('\n'), "{text}");

    let options = CompileOptions::single().flag("xla_no_such_flag", OptionValue::Bool(true));
    let text = client.compile(ADD, &options).unwrap_err().to_string();
    assert!(text.contains("xla_no_such_flag"), "{text}");
    let options = Attributes::from([("no_such_option".into(), AttributeValue::Int(1))]);
    let text = Client::new(client.plugin(), &options).unwrap_err().to_string();
    assert!(text.contains("PJRT_Client_Create failed") && text.contains("no_such_option"), "{text}");
}

#[needs(cpu)]
fn flags_and_devices_are_passed_to_the_compiler() {
    let client = client();
    let devices = Some(vec![client.devices()[5].id().into()]);
    let options = CompileOptions { devices, ..CompileOptions::single() }
        .flag("xla_allow_excess_precision", OptionValue::Bool(false));
    let exe = client.compile(ADD, &options).unwrap();
    assert_eq!(exe.devices()[0].id(), client.devices()[5].id());
    let x = upload(client, 5, &[1.; 6], &[2, 3]);
    assert_eq!(values(&exe.execute(&[vec![&x, &x]]).unwrap()[0][0]), [2.; 6]);
}

#[needs(cpu)]
fn cost_analysis_reports_flops_or_is_unsupported() {
    match add().cost_analysis() {
        Ok(costs) => assert!(costs.contains_key("flops"), "{costs:?}"),
        Err(error) => assert!(error.is_unsupported(), "{error}"),
    }
}

#[needs(cpu)]
fn programs_compile_for_a_topology() {
    let client = client();
    let topology: Topology = client.topology().unwrap();
    assert_eq!(topology.platform_name().unwrap(), "cpu");
    assert_eq!(topology.devices().unwrap().len(), 8);
    match topology.compile(SHARDED, &CompileOptions::partitioned(8)) {
        Ok(exe) => {
            assert_eq!(exe.num_partitions().unwrap(), 8);
            assert!(exe.memory().unwrap().arguments > 0);
        }
        // Before 0.115 the CPU plugin cannot compile without a client.
        Err(error) => assert!(client.plugin().version() < (0, 115), "{error}"),
    }
}

#[needs(cpu)]
fn pjrt_objects_are_send_and_outlive_their_client() {
    fn shared<T: Send + Sync>() {}
    shared::<Client>();
    shared::<Buffer>();
    shared::<LoadedExecutable>();
    shared::<ltx2::pjrt::Plugin>();
    shared::<Topology>();
    let client = client();
    let own = Client::new(client.plugin(), &CpuOptions { devices: Some(1), asynchronous: None }.to_attributes());
    let own = own.unwrap();
    let exe = own.load(&add().serialize().unwrap()).unwrap();
    let x = upload(&own, 0, &[1.; 6], &[2, 3]);
    let foreign = upload(client, 0, &[1.; 6], &[2, 3]);
    assert!(exe.execute(&[vec![&x, &foreign]]).unwrap_err().to_string().contains("another client"));
    drop(own);
    let run = || values(&exe.execute(&[vec![&x, &x]]).unwrap()[0][0]);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), [2.; 6]);
        }
    });
}
