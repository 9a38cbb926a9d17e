//! Detects this machine's hardware without loading a plugin.

#![allow(unsafe_code)] // Calls the CUDA driver.

use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::path::Path;

use ltx2_pjrt::discover::Platform;
use ltx2_pjrt::with_sources;

/// Describes a platform's hardware; the error says why there is none. Loads no plugin, so it neither hangs nor crashes
/// on a machine without the hardware.
pub fn hardware(platform: Platform) -> Result<String, String> {
    match platform {
        Platform::Cpu => Ok("always available".into()),
        Platform::Cuda => cuda_devices().map(|names| format!("{} NVIDIA device(s)", names.len())),
        Platform::Tpu => match tpu_chips(Path::new("/")) {
            0 => Err("no TPU chip (no /dev/accel0, no Google PCI device under /dev/vfio)".into()),
            count => Ok(format!("{count} TPU chip(s)")),
        },
    }
}

/// Counts the TPU chips below `root` (`/` outside of tests). Chips up to v4 are numbered `/dev/accel` nodes; chips
/// since v5e are Google PCI devices bound to vfio. The directory `/dev/accel/` belongs to another kernel subsystem, and
/// Google's other PCI devices use other drivers.
fn tpu_chips(root: &Path) -> usize {
    let entries = |folder: &str| fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
    let numbered = |name: &str, prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    let count = |folder: &str, prefix: &str| {
        entries(folder).filter(|entry| numbered(&entry.file_name().to_string_lossy(), prefix)).count()
    };
    let accel = count("dev", "accel");
    if accel > 0 || count("dev/vfio", "") == 0 {
        return accel;
    }
    let is_tpu = |device: &Path| {
        let google = fs::read_to_string(device.join("vendor")).is_ok_and(|vendor| vendor.trim() == "0x1ae0");
        google && fs::read_link(device.join("driver")).is_ok_and(|driver| driver.ends_with("vfio-pci"))
    };
    entries("sys/bus/pci/devices").filter(|entry| is_tpu(&entry.path())).count()
}

/// Returns the names of the NVIDIA devices that the driver lists, which are the same as the device kinds that the CUDA
/// plugin reports.
pub fn cuda_devices() -> Result<Vec<String>, String> {
    // Without a device node an installed driver library has no driver to talk to. WSL has /dev/dxg instead.
    if !["/dev/nvidiactl", "/dev/dxg"].iter().any(|node| Path::new(node).exists()) {
        return Err("no NVIDIA driver (no /dev/nvidiactl)".into());
    }
    // SAFETY: this is the NVIDIA driver's library; loading it runs only its initializers.
    let library = unsafe { libloading::Library::new("libcuda.so.1") };
    let library = library.map_err(|e| format!("cannot load the NVIDIA driver library: {}", with_sources(&e)))?;
    let missing = |_| "libcuda.so.1 is not a valid NVIDIA driver library (missing CUDA functions)".to_owned();
    let mut names = Vec::new();
    // SAFETY: these are the signatures of the CUDA driver API; the length passed with `name` is within its buffer.
    let status = unsafe {
        let init = library.get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit\0").map_err(missing)?;
        let devices =
            library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDeviceGetCount\0").map_err(missing)?;
        let name_of = library
            .get::<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int>(b"cuDeviceGetName\0")
            .map_err(missing)?;
        let mut count: c_int = 0;
        let mut status = init(0);
        if status == 0 {
            status = devices(&mut count);
        }
        for device in 0..count {
            let mut name: [c_char; 256] = [0; 256];
            if status == 0 {
                status = name_of(name.as_mut_ptr(), 255, device);
            }
            names.push(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned());
        }
        status
    };
    // After cuInit the driver has threads and state, so it stays loaded; the plugin needs it anyway.
    std::mem::forget(library);
    match status {
        0 if !names.is_empty() => Ok(names),
        0 => Err("the NVIDIA driver found no device".into()),
        status => Err(format!("the NVIDIA driver returned CUDA error {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tpu_chips_are_distinguished_from_other_devices() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        fs::create_dir_all(path("dev/accel")).unwrap();
        fs::create_dir_all(path("dev/vfio")).unwrap();
        fs::write(path("dev/vfio/vfio"), "").unwrap();
        assert_eq!(tpu_chips(root.path()), 0, "the accel subsystem's folder and vfio's control node are no chips");
        fs::write(path("dev/vfio/0"), "").unwrap();
        for (name, vendor, driver) in
            [("tpu", "0x1ae0\n", "vfio-pci"), ("net", "0x1ae0\n", "gvnic"), ("gpu", "0x10de\n", "vfio-pci")]
        {
            let device = path("sys/bus/pci/devices").join(name);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("vendor"), vendor).unwrap();
            std::os::unix::fs::symlink(Path::new("../../drivers").join(driver), device.join("driver")).unwrap();
        }
        assert_eq!(tpu_chips(root.path()), 1);
        fs::write(path("dev/accel0"), "").unwrap();
        fs::write(path("dev/accel1"), "").unwrap();
        assert_eq!(tpu_chips(root.path()), 2);
    }
}
