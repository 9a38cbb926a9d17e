//! Device layouts: the order of dimensions, and tiling.

use std::ffi::c_void;
use std::fmt;
use std::str::FromStr;

use super::abi::{BufferMemoryLayout, BufferMemoryLayoutTiled, Struct, memory_layout_type};
use super::attributes::list;

/// A device layout. In XLA's notation, `{2,1,0:T(16,128)(2,1)}`, the order of the dimensions from minor to major
/// precedes the tiles.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceLayout {
    /// Dimensions, from the fastest varying to the slowest.
    pub minor_to_major: Vec<i64>,
    /// Dimensions of each tile. Each tile subdivides the result of the previous one.
    pub tiles: Vec<Vec<i64>>,
}

impl DeviceLayout {
    /// Returns the dense row-major layout for `rank` dimensions.
    pub fn row_major(rank: usize) -> DeviceLayout {
        DeviceLayout { minor_to_major: (0..rank as i64).rev().collect(), tiles: Vec::new() }
    }

    /// Copies a layout that the plugin returned; `None` if the plugin describes it by strides.
    ///
    /// # Safety
    /// The lists of a tiled layout are readable.
    pub(super) unsafe fn read(raw: &BufferMemoryLayout) -> Option<DeviceLayout> {
        if raw.kind != memory_layout_type::TILED {
            return None;
        }
        let tiled = &raw.tiled;
        // SAFETY: guaranteed by the caller; the dimensions of all tiles are concatenated.
        unsafe {
            let minor_to_major = list(tiled.minor_to_major.cast::<i64>(), tiled.minor_to_major_size).to_vec();
            let sizes = list(tiled.tile_dim_sizes.cast::<usize>(), tiled.num_tiles);
            let mut dims = list(tiled.tile_dims.cast::<i64>(), sizes.iter().sum());
            let tiles = sizes.iter().map(|&size| dims.split_off(..size).expect("sizes add up").to_vec()).collect();
            Some(DeviceLayout { minor_to_major, tiles })
        }
    }
}

/// The C form of a layout, together with the lists to which the C struct points.
pub(super) struct RawLayout {
    pub raw: BufferMemoryLayout,
    _lists: (Vec<i64>, Vec<i64>, Vec<usize>),
}

impl RawLayout {
    pub(super) fn new(layout: &DeviceLayout) -> RawLayout {
        let order = layout.minor_to_major.clone();
        let dims = layout.tiles.concat();
        let sizes: Vec<usize> = layout.tiles.iter().map(Vec::len).collect();
        let tiled = BufferMemoryLayoutTiled {
            minor_to_major: pointer(&order),
            minor_to_major_size: order.len(),
            tile_dims: pointer(&dims),
            tile_dim_sizes: pointer(&sizes),
            num_tiles: sizes.len(),
            ..Struct::new()
        };
        // Moving the vectors into the struct does not move their heap memory, so the pointers stay valid.
        let raw = BufferMemoryLayout { tiled, kind: memory_layout_type::TILED, ..Struct::new() };
        RawLayout { raw, _lists: (order, dims, sizes) }
    }
}

/// Returns a slice's address as an untyped pointer, the type of pointers in argument structs.
pub(super) fn pointer<T>(slice: &[T]) -> *mut c_void {
    slice.as_ptr().cast_mut().cast()
}

impl fmt::Display for DeviceLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |list: &[i64]| list.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
        write!(f, "{{{}", join(&self.minor_to_major))?;
        if !self.tiles.is_empty() {
            f.write_str(":T")?;
        }
        for tile in &self.tiles {
            write!(f, "({})", join(tile))?;
        }
        f.write_str("}")
    }
}

impl FromStr for DeviceLayout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || format!("invalid layout {text:?}: expected a form like {{1,0}} or {{2,1,0:T(8,128)(2,1)}}");
        let numbers = |list: &str| {
            let list = list.split(',').map(str::trim).filter(|part| !part.is_empty());
            list.map(|part| part.parse::<i64>().map_err(|_| bad())).collect::<Result<Vec<_>, _>>()
        };
        let inner = text.trim().strip_prefix('{').and_then(|t| t.strip_suffix('}')).ok_or_else(bad)?;
        let (order, tiles) = inner.split_once(':').unwrap_or((inner, ""));
        let minor_to_major = numbers(order)?;
        let mut sorted = minor_to_major.clone();
        sorted.sort_unstable();
        if sorted.iter().enumerate().any(|(i, &dim)| dim != i as i64) {
            return Err(bad());
        }
        let mut parsed = Vec::new();
        if !tiles.is_empty() {
            let tiles = tiles.strip_prefix("T(").and_then(|t| t.strip_suffix(')')).ok_or_else(bad)?;
            for tile in tiles.split(")(") {
                parsed.push(numbers(tile)?);
            }
        }
        Ok(DeviceLayout { minor_to_major, tiles: parsed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_round_trips_through_text_and_c() {
        for text in ["{}", "{0}", "{1,0}", "{2,1,0:T(16,128)(2,1)}"] {
            let layout: DeviceLayout = text.parse().unwrap();
            assert_eq!(layout.to_string(), text);
            // SAFETY: the temporary `RawLayout` owns the lists during the call.
            assert_eq!(unsafe { DeviceLayout::read(&RawLayout::new(&layout).raw) }, Some(layout));
        }
        for text in ["1,0", "{0,2}", "{1,0:S(3)}", "{a}"] {
            assert!(text.parse::<DeviceLayout>().is_err(), "{text}");
        }
    }
}
