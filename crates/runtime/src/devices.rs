//! The devices of a run: the devices of this process and, in a multi-process run, those of the other processes.

use std::collections::BTreeSet;

use ltx2_pjrt::{AttributeValue, Client, Device};

/// The devices from which meshes are built.
pub(super) struct Devices {
    all: Vec<Device>,
    own: Vec<Device>,
}

impl Devices {
    /// Returns the devices that a client knows: those of its own process and those of the other processes.
    pub(crate) fn from_client(client: &Client) -> Self {
        let own = client.devices().to_vec();
        let mut all = client.all_devices().to_vec();
        if all.len() <= own.len() {
            // A single process keeps the client's order.
            return Devices { all: own.clone(), own };
        }
        // The devices of a slice must be adjacent, and all processes must use the same order, even if their plugins
        // list the devices differently.
        all.sort_by_key(|device| (slice(device), device.id()));
        Devices { all, own }
    }

    /// Returns all devices in mesh order.
    pub(crate) fn all(&self) -> &[Device] {
        &self.all
    }

    pub(crate) fn own(&self) -> &[Device] {
        &self.own
    }

    /// Returns whether some devices belong to other processes.
    pub(crate) fn have_peers(&self) -> bool {
        self.all.len() > self.own.len()
    }

    /// Returns the number of device groups with fast interconnects: TPU slices or GPU hosts.
    pub(crate) fn slices(&self) -> usize {
        self.all.iter().map(slice).collect::<BTreeSet<_>>().len()
    }

    /// Returns the devices of a program over `count` devices: the first ones, or this process's own device if `count`
    /// is 1.
    pub(crate) fn of_program(&self, count: usize) -> &[Device] {
        let devices = if self.have_peers() && count == 1 { &self.own } else { &self.all };
        &devices[..count.min(devices.len())]
    }

    /// Returns the devices of this process that a program over `count` devices uses, with their mesh indices.
    pub(crate) fn addressable(&self, count: usize) -> Vec<(usize, &Device)> {
        let own = |device: &Device| self.own.iter().any(|own| own.id() == device.id());
        self.of_program(count).iter().enumerate().filter(|(_, device)| own(device)).collect()
    }
}

fn slice(device: &Device) -> i64 {
    match device.description().attributes.get("slice_index") {
        Some(AttributeValue::Int(slice)) => *slice,
        _ => 0,
    }
}
