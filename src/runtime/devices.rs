//! The devices of a run: those of this process, and where there are several processes, those of all.

use std::collections::BTreeSet;

use crate::pjrt::{Client, Device, Value};

/// The devices that meshes are made of.
pub(super) struct Devices {
    all: Vec<Device>,
    own: Vec<Device>,
}

impl Devices {
    /// Of a client: its own, and those that it knows of other processes.
    pub(crate) fn of(client: &Client) -> Self {
        let own = client.devices().to_vec();
        let mut all = client.all_devices().to_vec();
        if all.len() <= own.len() {
            // Alone, the client's own order.
            return Devices { all: own.clone(), own };
        }
        // Those of a slice beside each other; in the same order in every process, whatever its plugin lists first.
        all.sort_by_key(|device| (slice(device), device.id()));
        Devices { all, own }
    }

    /// All of them, in the order in which meshes count them.
    pub(crate) fn all(&self) -> &[Device] {
        &self.all
    }

    pub(crate) fn own(&self) -> &[Device] {
        &self.own
    }

    /// Whether some are other processes'.
    pub(crate) fn have_peers(&self) -> bool {
        self.all.len() > self.own.len()
    }

    /// Groups of devices with links of their own: slices of a TPU, GPUs of a host.
    pub(crate) fn slices(&self) -> usize {
        self.all.iter().map(slice).collect::<BTreeSet<_>>().len()
    }

    /// Those that a program over `count` of them runs on: the first ones; of one device, each process its own.
    pub(crate) fn of_program(&self, count: usize) -> &[Device] {
        let devices = if self.have_peers() && count == 1 { &self.own } else { &self.all };
        &devices[..count.min(devices.len())]
    }

    /// This process's devices among those of a program over `count`, with their places in its mesh.
    pub(crate) fn addressable(&self, count: usize) -> Vec<(usize, &Device)> {
        let own = |device: &Device| self.own.iter().any(|own| own.id() == device.id());
        self.of_program(count).iter().enumerate().filter(|(_, device)| own(device)).collect()
    }
}

fn slice(device: &Device) -> i64 {
    match device.description().attributes.get("slice_index") {
        Some(Value::Int(slice)) => *slice,
        _ => 0,
    }
}
