//! Determines the device groups of a collective and the mesh axes to which they correspond.

use std::collections::BTreeSet;

use super::proto::{InstructionProto, IotaGroupsProto};

/// Returns the device groups of a collective. If the instruction lists no groups, all devices form one group.
fn groups(i: &InstructionProto, devices: usize) -> Vec<Vec<i64>> {
    let listed = |groups: &[super::proto::ReplicaGroupProto]| -> Vec<Vec<i64>> {
        groups.iter().map(|g| g.ids.clone()).filter(|g| !g.is_empty()).collect()
    };
    let list = i.device_list.as_ref();
    let found = match (i.iota_groups.as_ref().or(list.and_then(|l| l.iota.as_ref())), &i.mesh_axes_groups) {
        (Some(iota), _) => iota_groups(iota),
        (None, Some(axes)) => mesh_axes_groups(axes),
        (None, None) => match list.map(|l| listed(&l.groups)) {
            Some(groups) if !groups.is_empty() => groups,
            _ => listed(&i.replica_groups),
        },
    };
    if found.is_empty() { vec![(0..devices as i64).collect()] } else { found }
}

fn iota_groups(iota: &IotaGroupsProto) -> Vec<Vec<i64>> {
    let transpose: Vec<i64> = match iota.transpose.is_empty() {
        true => (0..iota.reshape.len() as i64).collect(),
        false => iota.transpose.iter().map(|&t| i64::from(t)).collect(),
    };
    let ids = transposed(&iota.reshape, &transpose).unwrap_or_default();
    ids.chunks(usize::try_from(iota.per_group).unwrap_or(1).max(1)).map(<[i64]>::to_vec).collect()
}

/// Maximum accepted number of devices; larger numbers are a sign of a damaged file.
const MOST: i64 = 1 << 20;

/// Numbers the elements of an array of shape `dims` from 0, transposes it to the axis order `order`, and returns the
/// numbers in row-major order. `None`: `order` is not a permutation or the array is too large.
fn transposed(dims: &[i64], order: &[i64]) -> Option<Vec<i64>> {
    let all = dims.iter().try_fold(1i64, |all, d| all.checked_mul(*d).filter(|_| *d > 0))?;
    let order: Vec<usize> = order.iter().filter_map(|&d| usize::try_from(d).ok()).collect();
    let mut axes = order.clone();
    axes.sort_unstable();
    (all <= MOST && axes.into_iter().eq(0..dims.len())).then_some(())?;
    let strides: Vec<i64> = (0..dims.len()).map(|d| dims[d + 1..].iter().product()).collect();
    Some(order.into_iter().fold(vec![0], |at, d| {
        at.iter().flat_map(|base| (0..dims[d]).map(move |k| (base, k))).map(|(b, k)| b + k * strides[d]).collect()
    }))
}

fn mesh_axes_groups(list: &super::proto::MeshAxesGroupsProto) -> Vec<Vec<i64>> {
    let Some(mesh) = &list.mesh else { return Vec::new() };
    // Split axes into the sub-axes that the groups refer to, so that each sub-axis becomes a separate axis.
    let mut dims = Vec::new();
    let mut picked = Vec::new();
    for (n, axis) in mesh.axes.iter().enumerate() {
        let part = list.axes.iter().find(|a| a.index == n as i64);
        match part.map(|p| &p.part) {
            None => dims.push(axis.size),
            Some(None) => {
                picked.push(dims.len() as i64);
                dims.push(axis.size);
            }
            Some(Some(sub)) => {
                let rest = axis.size / sub.pre_size.saturating_mul(sub.size).max(1);
                picked.push(dims.len() as i64 + 1);
                dims.extend([sub.pre_size, sub.size, rest]);
            }
        }
    }
    let order: Vec<i64> =
        (0..dims.len() as i64).filter(|d| !picked.contains(d)).chain(picked.iter().copied()).collect();
    let Some(ids) = transposed(&dims, &order) else { return Vec::new() };
    let size: i64 = picked.iter().filter_map(|&d| dims.get(usize::try_from(d).ok()?)).product();
    let device = |id: &i64| usize::try_from(*id).ok().and_then(|n| mesh.device_ids.get(n)).copied().unwrap_or(*id);
    let ids: Vec<i64> = ids.iter().map(device).collect();
    ids.chunks(usize::try_from(size).unwrap_or(1).max(1)).map(<[i64]>::to_vec).collect()
}

/// The devices that a collective connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceGroups {
    /// Number of devices of the largest group.
    pub size: usize,
    /// Mesh axes along which the devices of a group differ, outermost first.
    pub axes: Vec<String>,
    /// Device ids of each group; for a permute, the source and the target of each pair.
    pub devices: Vec<Vec<i64>>,
}

/// Returns the group size, mesh axes and device groups of a collective.
pub(super) fn span(i: &InstructionProto, mesh: &[(String, usize)]) -> DeviceGroups {
    let devices = match i.source_target_pairs.is_empty() {
        false => i.source_target_pairs.iter().map(|p| vec![p.source, p.target]).collect(),
        true => groups(i, mesh.iter().map(|(_, size)| size).product()),
    };
    let mut moved = BTreeSet::new();
    for group in &devices {
        let coordinates: Vec<Vec<usize>> = group.iter().map(|&d| position(mesh, d)).collect();
        for axis in 0..mesh.len() {
            if coordinates.iter().any(|c| c[axis] != coordinates[0][axis]) {
                moved.insert(axis);
            }
        }
    }
    let axes = moved.into_iter().map(|a| mesh[a].0.clone()).collect();
    let size = devices.iter().map(Vec::len).max().unwrap_or(1);
    DeviceGroups { size, axes, devices }
}

/// Returns the coordinates of a device in the mesh.
fn position(mesh: &[(String, usize)], device: i64) -> Vec<usize> {
    let mut rest = usize::try_from(device).unwrap_or(0);
    let mut at = vec![0; mesh.len()];
    for (n, (_, size)) in mesh.iter().enumerate().rev() {
        at[n] = rest % size;
        rest /= size;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::super::proto::{
        AxisRefProto, DeviceListProto, MeshAxesGroupsProto, MeshAxisProto, MeshProto, PairProto, ReplicaGroupProto,
        SubAxisProto,
    };
    use super::*;

    fn mesh() -> [(String, usize); 2] {
        [("cfg".into(), 2), ("context".into(), 4)]
    }

    fn axes(i: &InstructionProto) -> (usize, Vec<String>) {
        let s = span(i, &mesh());
        (s.size, s.axes)
    }

    #[test]
    fn all_group_forms_map_to_mesh_axes() {
        let groups = [vec![0, 1, 2, 3], vec![4, 5, 6, 7]];
        let listed_groups = groups.map(|ids| ReplicaGroupProto { ids }).to_vec();
        let list = DeviceListProto { groups: listed_groups.clone(), iota: None };
        let modern = InstructionProto { device_list: Some(list), ..Default::default() };
        let older = InstructionProto { replica_groups: listed_groups, ..Default::default() };
        for plain in [modern, older] {
            assert_eq!(axes(&plain), (4, vec!["context".into()]));
        }

        let iota = |reshape: &[i64], transpose: &[i32], per_group| {
            let iota = IotaGroupsProto {
                groups: 8 / per_group,
                per_group,
                reshape: reshape.to_vec(),
                transpose: transpose.to_vec(),
            };
            InstructionProto { iota_groups: Some(iota), ..Default::default() }
        };
        assert_eq!(axes(&iota(&[2, 4], &[0, 1], 4)), (4, vec!["context".into()]));
        assert_eq!(axes(&iota(&[2, 4], &[1, 0], 2)), (2, vec!["cfg".into()]));
        assert_eq!(axes(&iota(&[8], &[0], 8)), (8, vec!["cfg".into(), "context".into()]));

        let of_mesh = |index, part| {
            let axis = |name: &str, size| MeshAxisProto { name: name.into(), size };
            let mesh = MeshProto { axes: vec![axis("a", 2), axis("b", 4)], device_ids: vec![] };
            let list = MeshAxesGroupsProto { mesh: Some(mesh), axes: vec![AxisRefProto { index, part }] };
            InstructionProto { mesh_axes_groups: Some(list), ..Default::default() }
        };
        assert_eq!(axes(&of_mesh(0, None)), (2, vec!["cfg".into()]));
        let half = span(&of_mesh(1, Some(SubAxisProto { pre_size: 2, size: 2 })), &mesh());
        assert_eq!(half.devices, [[0, 1], [2, 3], [4, 5], [6, 7]]);
        // With an invalid permutation or an impossible size, all devices form one group, as if no groups were listed.
        let all = [(0..8).collect::<Vec<i64>>()];
        let of_axis = |size| {
            let axes = vec![MeshAxisProto { name: "a".into(), size }];
            let list = MeshAxesGroupsProto { mesh: Some(MeshProto { axes, device_ids: vec![] }), axes: vec![] };
            InstructionProto { mesh_axes_groups: Some(list), ..Default::default() }
        };
        let damaged = [
            iota(&[2, 4], &[0, 2], 4),
            iota(&[2, 4], &[0, 0], 4),
            iota(&[2, 4], &[-1], 4),
            iota(&[2, 0], &[0, 1], 4),
            iota(&[-1, -8], &[0, 1], 4),
            iota(&[i64::MAX, 4], &[0, 1], 4),
            iota(&[1 << 30], &[0], 4),
            of_axis(1 << 40),
            of_mesh(1, Some(SubAxisProto { pre_size: i64::MAX, size: i64::MAX })),
        ];
        for i in damaged {
            assert_eq!(span(&i, &mesh()).devices, all, "{i:?}");
        }

        let pairs = (0..8).map(|d| PairProto { source: d, target: d / 4 * 4 + (d + 1) % 4 }).collect();
        let permute = InstructionProto { source_target_pairs: pairs, ..Default::default() };
        assert_eq!(axes(&permute), (2, vec!["context".into()]));
        assert_eq!(axes(&InstructionProto::default()), (8, vec!["cfg".into(), "context".into()]));
    }
}
