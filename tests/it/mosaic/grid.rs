//! Runs a kernel over its grid, as strictly as the documentation allows: elements outside an array are NaN, a new
//! output block holds NaN, scratch is NaN wherever a core may start, and an output block may not be revisited after
//! leaving it.

use std::collections::{BTreeSet, HashMap};

use super::body::{Body, Memory};
use super::text::{self, Element, Function, Result, Type, attribute, numbers, pieces};
use super::values::{Tensor, each_index, rounded};

struct Window<'a> {
    map: &'a Function,
    block: Vec<usize>,
    element: Element,
    name: String,
}

/// Returns for each axis of a kernel's grid whether it is parallel.
fn parallel_axes(main: &Function, rank: usize) -> Result<Vec<bool>> {
    let semantics = pieces(attribute(&main.attributes, "dimension_semantics")?.trim_matches(['[', ']']));
    let parallel: Vec<bool> = semantics
        .iter()
        .map(|s| match s.as_str() {
            "#tpu.dimension_semantics<parallel>" => Ok(true),
            "#tpu.dimension_semantics<arbitrary>" => Ok(false),
            other => Err(format!("unknown {other}")),
        })
        .collect::<Result<_>>()?;
    let ordered = parallel.windows(2).all(|w| w[0] || !w[1]);
    match parallel.len() == rank && ordered {
        true => Ok(parallel),
        false => Err("axes that run in any order (parallel) must come first".into()),
    }
}

/// Runs the only function with a grid on `arrays`; arrays after the first `operands` are outputs and are overwritten.
pub fn run(source: &str, arrays: &mut [Tensor], operands: usize) -> Result<()> {
    let module = text::module(source)?;
    let main = module.values().find(|f| f.attributes.contains("iteration_bounds")).ok_or("no kernel")?;
    let grid = numbers(attribute(&main.attributes, "iteration_bounds")?)?;
    let parallel = parallel_axes(main, grid.len())?;
    let blocks = &main.arguments[grid.len()..];
    let parameters =
        pieces(attribute(&main.attributes, "window_params")?.trim_start_matches('[').trim_end_matches(']'));
    if parameters.len() != arrays.len() {
        return Err(format!("{} windows of {} arrays", parameters.len(), arrays.len()));
    }
    let mut windows = Vec::new();
    for ((parameter, (name, ty)), array) in parameters.iter().zip(blocks).zip(arrays.iter()) {
        let Type::Block(element, dims) = ty else { return Err("a window of no block".into()) };
        let block = numbers(attribute(parameter, "window_bounds")?)?;
        let map = attribute(parameter, "transform_indices")?.trim_start_matches('@');
        aligned(*element, &block, &array.dims)?;
        if block != *dims || *element != array.element {
            return Err(format!("window {block:?} of {:?}, block {ty:?}", array.element));
        }
        let map = module.get(map).ok_or("no such map")?;
        windows.push(Window { map, block, element: *element, name: name.clone() });
    }
    let (mut memory, mut scratch) = (Memory::new(), Vec::new());
    for (name, ty) in &blocks[windows.len()..] {
        let Type::Block(element, dims) = ty else { return Err("scratch that is no block".into()) };
        memory.insert(name.clone(), Tensor::full(&Type::Vector(*element, dims.clone()), f64::NAN)?);
        scratch.push(name.clone());
    }
    for array in &mut arrays[operands..] {
        array.data.fill(f64::NAN);
    }
    let mut before: Option<Vec<usize>> = None;
    let mut held: HashMap<usize, Vec<i64>> = HashMap::new();
    let mut left: BTreeSet<(usize, Vec<i64>)> = BTreeSet::new();
    let mut points = Vec::new();
    each_index(&grid, |at| points.push(at.to_vec()));
    for at in points {
        // Another core may run this point.
        let apart = before.as_ref().is_none_or(|b| b.iter().zip(&at).zip(&parallel).any(|((b, a), p)| *p && a != b));
        if apart {
            for name in &scratch {
                memory.get_mut(name).ok_or("no scratch")?.data.fill(f64::NAN);
            }
        }
        let ids: Vec<i64> = at.iter().map(|&i| i as i64).collect();
        for (n, window) in windows.iter().enumerate() {
            let place = Body::run(window.map, &ids, &mut Memory::new())?;
            if n < operands {
                memory.insert(window.name.clone(), read(&arrays[n], window, &place)?);
                continue;
            }
            if held.get(&n) == Some(&place) {
                if apart {
                    return Err(format!("window {n}: two cores would write block {place:?}"));
                }
                continue;
            }
            if let Some(old) = held.insert(n, place.clone()) {
                write(&mut arrays[n], window, &old, &memory)?;
                left.insert((n, old));
            }
            if left.contains(&(n, place.clone())) {
                return Err(format!("window {n}: block {place:?} is come back to"));
            }
            let ty = Type::Vector(window.element, window.block.clone());
            memory.insert(window.name.clone(), Tensor::full(&ty, f64::NAN)?);
        }
        Body::run(main, &ids, &mut memory)?;
        before = Some(at);
    }
    for (n, place) in held {
        write(&mut arrays[n], &windows[n], &place, &memory)?;
    }
    Ok(())
}

/// Checks that blocks are complete registers in their last two dimensions, or as large as the array.
fn aligned(element: Element, block: &[usize], array: &[usize]) -> Result<()> {
    let n = block.len();
    if array.len() != n || n < 2 {
        return Err(format!("a window {block:?} of {array:?}"));
    }
    let rows = if element == Element::BF16 { 16 } else { 8 };
    let fine = |axis: usize, unit: usize| block[axis].is_multiple_of(unit) || block[axis] == array[axis];
    match fine(n - 1, 128) && fine(n - 2, rows) {
        true => Ok(()),
        false => Err(format!("a window {block:?} of {array:?} is not aligned")),
    }
}

/// Visits the elements of a block: index in the block, and index in the array if inside it.
fn each_element(
    array: &[usize],
    window: &Window,
    place: &[i64],
    mut f: impl FnMut(usize, Option<usize>),
) -> Result<()> {
    let starts: Vec<usize> = place.iter().zip(&window.block).map(|(&p, &b)| p as usize * b).collect();
    if place.len() != array.len() || place.iter().any(|&p| p < 0) || starts.iter().zip(array).any(|(s, d)| s >= d) {
        return Err(format!("block {place:?} of {:?} lies beyond {array:?}", window.block));
    }
    let mut n = 0;
    each_index(&window.block, |at| {
        let inside =
            at.iter().zip(&starts).zip(array).try_fold(0, |all, ((&i, &s), &d)| (s + i < d).then_some(all * d + s + i));
        f(n, inside);
        n += 1;
    });
    Ok(())
}

fn read(array: &Tensor, window: &Window, place: &[i64]) -> Result<Tensor> {
    let mut data = vec![f64::NAN; window.block.iter().product()];
    each_element(&array.dims, window, place, |own, there| {
        if let Some(there) = there {
            data[own] = array.data[there];
        }
    })?;
    Ok(Tensor::new(window.element, window.block.clone(), data))
}

fn write(array: &mut Tensor, window: &Window, place: &[i64], memory: &Memory) -> Result<()> {
    let block = memory.get(&window.name).ok_or("no such block")?;
    let (dims, element) = (array.dims.clone(), window.element);
    each_element(&dims, window, place, |own, there| {
        if let Some(there) = there {
            array.data[there] = rounded(element, block.data[own]);
        }
    })
}
