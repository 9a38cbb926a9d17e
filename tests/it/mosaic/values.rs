//! Values of the interpreter and operations on them. Floats are stored as f32, rounded to bf16 if the type requires it;
//! sums of products are exact before they are rounded to f32.

use half::bf16;
use ndarray::ArrayView2;

use super::text::{Element, Result, Type};

#[derive(Clone, Debug)]
pub struct Tensor {
    pub element: Element,
    /// Empty for a scalar.
    pub dims: Vec<usize>,
    /// Integers and booleans are whole numbers, which f64 represents exactly.
    pub data: Vec<f64>,
}

/// Rounds a number to its type.
pub fn rounded(element: Element, x: f64) -> f64 {
    match element {
        Element::F32 => f64::from(x as f32),
        Element::BF16 => f64::from(bf16::from_f32(x as f32)),
        _ => x,
    }
}

impl Tensor {
    pub fn new(element: Element, dims: Vec<usize>, data: Vec<f64>) -> Self {
        debug_assert_eq!(dims.iter().product::<usize>(), data.len());
        Tensor { element, dims, data }
    }

    pub fn scalar(element: Element, x: f64) -> Self {
        Tensor::new(element, Vec::new(), vec![x])
    }

    pub fn full(ty: &Type, x: f64) -> Result<Self> {
        match ty {
            Type::Scalar(element) => Ok(Tensor::scalar(*element, x)),
            Type::Vector(element, dims) => Ok(Tensor::new(*element, dims.clone(), vec![x; dims.iter().product()])),
            Type::Block(..) => Err("a block is no value".into()),
        }
    }

    pub fn is(&self, ty: &Type) -> Result<()> {
        let own = match self.dims.is_empty() {
            true => Type::Scalar(self.element),
            false => Type::Vector(self.element, self.dims.clone()),
        };
        if own == *ty { Ok(()) } else { Err(format!("{own:?} where {ty:?} is declared")) }
    }

    /// Returns the value as an integer.
    pub fn int(&self) -> Result<i64> {
        match self.data[..] {
            [x] if self.dims.is_empty() => Ok(x as i64),
            _ => Err("not a number".into()),
        }
    }

    pub fn map(&self, element: Element, f: impl Fn(f64) -> f64) -> Tensor {
        Tensor::new(element, self.dims.clone(), self.data.iter().map(|&x| rounded(element, f(x))).collect())
    }

    pub fn zip(&self, other: &Tensor, element: Element, f: impl Fn(f64, f64) -> f64) -> Result<Tensor> {
        if self.dims != other.dims || self.element != other.element {
            return Err(format!("{:?} {:?} with {:?} {:?}", self.element, self.dims, other.element, other.dims));
        }
        let data = self.data.iter().zip(&other.data).map(|(&a, &b)| rounded(element, f(a, b))).collect();
        Ok(Tensor::new(element, self.dims.clone(), data))
    }

    pub fn reshaped(&self, dims: &[usize]) -> Result<Tensor> {
        if dims.iter().product::<usize>() != self.data.len() {
            return Err(format!("{:?} to {dims:?}", self.dims));
        }
        Ok(Tensor::new(self.element, dims.to_vec(), self.data.clone()))
    }

    pub fn broadcast(&self, dims: &[usize]) -> Result<Tensor> {
        let lead = dims.len().checked_sub(self.dims.len()).ok_or("a broadcast to fewer dimensions")?;
        if self.dims.iter().zip(&dims[lead..]).any(|(&own, &to)| own != to && own != 1) {
            return Err(format!("{:?} to {dims:?}", self.dims));
        }
        let mut data = Vec::with_capacity(dims.iter().product());
        each_index(dims, |at| {
            let own = self.dims.iter().zip(&at[lead..]).fold(0, |n, (&d, &i)| n * d + if d == 1 { 0 } else { i });
            data.push(self.data[own]);
        });
        Ok(Tensor::new(self.element, dims.to_vec(), data))
    }

    /// Reduces the last of two dimensions.
    pub fn reduced(&self, start: &Tensor, f: impl Fn(f64, f64) -> f64) -> Result<Tensor> {
        let [rows, columns] = self.dims[..] else { return Err("a sum of no matrix".into()) };
        if start.dims != [rows] {
            return Err("the start of a sum is of another shape".into());
        }
        let of_row = |r: usize| self.data[r * columns..(r + 1) * columns].iter().fold(start.data[r], |a, &x| f(a, x));
        let data = (0..rows).map(|r| rounded(self.element, of_row(r))).collect();
        Ok(Tensor::new(self.element, vec![rows], data))
    }

    /// Multiplies `[n, k]` with `[k, m]`, or with `[m, k]` if `turned`, and adds `start`.
    pub fn product(&self, other: &Tensor, start: &Tensor, turned: bool) -> Result<Tensor> {
        let ([n, k], [a, b]) = (pair(self)?, pair(other)?);
        let (depth, m) = if turned { (b, a) } else { (a, b) };
        if depth != k || start.dims != [n, m] || self.element != other.element || start.element != Element::F32 {
            return Err(format!("product of {:?}, {:?} on {:?}", self.dims, other.dims, start.dims));
        }
        let columns = ArrayView2::from_shape([a, b], &other.data).map_err(|e| e.to_string())?;
        let columns = if turned { columns.reversed_axes() } else { columns };
        let sums = ArrayView2::from_shape([n, k], &self.data).map_err(|e| e.to_string())?.dot(&columns);
        let data = sums.iter().zip(&start.data).map(|(sum, start)| rounded(Element::F32, start + sum)).collect();
        Ok(Tensor::new(Element::F32, vec![n, m], data))
    }
}

fn pair(x: &Tensor) -> Result<[usize; 2]> {
    x.dims[..].try_into().map_err(|_| "not a matrix".to_string())
}

/// Visits every index of a shape, the last dimension fastest.
pub fn each_index(dims: &[usize], mut f: impl FnMut(&[usize])) {
    let mut at = vec![0; dims.len()];
    for _ in 0..dims.iter().product::<usize>() {
        f(&at);
        for (i, &d) in at.iter_mut().zip(dims).rev() {
            *i += 1;
            if *i < d {
                break;
            }
            *i = 0;
        }
    }
}
