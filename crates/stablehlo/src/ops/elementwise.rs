//! Elementwise arithmetic with numpy broadcasting.

use std::borrow::Borrow;
use std::ops;

use crate::DType;
use crate::builder::{Builder, Value};
use crate::counting::merged;
use crate::types::{Type, broadcast};

/// The direction of a comparison, as in StableHLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// `==`
    Eq,
    /// `!=`
    Ne,
    /// `<`
    Lt,
    /// `<=`
    Le,
    /// `>`
    Gt,
    /// `>=`
    Ge,
}

impl Builder {
    /// Broadcasts both operands to a common shape. If their shapes are incompatible or their element types differ,
    /// records an error and returns `None`.
    fn align(&self, op: &'static str, a: &Value, b: &Value) -> Option<(Value, Value)> {
        if a.dtype() != b.dtype() {
            self.fail(op, format!("element types differ: {} and {}", a.ty, b.ty));
            return None;
        }
        match broadcast(&a.ty.dims, &b.ty.dims) {
            Some(dims) => Some((a.broadcast_to(&dims), b.broadcast_to(&dims))),
            None => {
                self.fail(op, format!("shapes do not broadcast: {} and {}", a.ty, b.ty));
                None
            }
        }
    }

    fn binary(&self, op: &'static str, a: &Value, b: &Value) -> Value {
        match self.align(op, a, b) {
            Some((a, b)) => {
                let ty = a.ty.clone();
                let sharding = merged(&[&a, &b]);
                self.op(op, format!("stablehlo.{op} {}, {} : {ty}", a.local(), b.local()), ty).with_sharding(sharding)
            }
            None => self.value("%poison".into(), a.ty.clone()),
        }
    }
}

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident = $op:literal, $needs:expr;)*) => {
        impl Value {
            $($(#[$doc])*
            pub fn $name(&self) -> Value {
                let needs: fn(DType) -> bool = $needs;
                if !needs(self.dtype()) {
                    return self.b.poison($op, format!("not supported for {}", self.ty), self.ty.clone());
                }
                let ty = self.ty.clone();
                let result = self.b.op($op, format!("stablehlo.{} {} : {ty}", $op, self.local()), ty);
                result.with_sharding(self.sharding.clone())
            })*
        }
    };
}

unary! {
    /// Returns the absolute value.
    abs = "abs", |d| d != DType::Bool;
    /// Returns the cosine of an angle in radians.
    cos = "cosine", DType::is_float;
    /// Returns the sine of an angle in radians.
    sin = "sine", DType::is_float;
    /// Returns `e^x`.
    exp = "exponential", DType::is_float;
    /// Returns the natural logarithm.
    log = "log", DType::is_float;
    /// Returns `1 / (1 + e^-x)`.
    logistic = "logistic", DType::is_float;
    /// Returns `-x`.
    negate = "negate", |d| d != DType::Bool;
    /// Returns `1 / sqrt(x)`.
    rsqrt = "rsqrt", DType::is_float;
    /// Returns the square root.
    sqrt = "sqrt", DType::is_float;
    /// Returns the hyperbolic tangent.
    tanh = "tanh", DType::is_float;
    /// Returns the sign: -1, 0 or 1.
    sign = "sign", |d| d != DType::Bool;
    /// Rounds down to an integer.
    floor = "floor", DType::is_float;
    /// Rounds to the nearest integer, ties to even.
    round = "round_nearest_even", DType::is_float;
    /// Returns the logical or bitwise negation.
    not = "not", |d| !d.is_float();
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident = $op:literal;)*) => {
        impl Value {
            $($(#[$doc])*
            pub fn $name(&self, other: &Value) -> Value {
                self.b.binary($op, self, other)
            })*
        }
    };
}

binary! {
    /// Returns the elementwise maximum.
    maximum = "maximum";
    /// Returns the elementwise minimum.
    minimum = "minimum";
    /// Raises `self` to the power `other`.
    power = "power";
    /// Returns the remainder of a division, with the sign of the dividend.
    remainder = "remainder";
    /// Returns the logical or bitwise AND.
    and = "and";
    /// Returns the logical or bitwise OR.
    or = "or";
    /// Returns the logical or bitwise XOR.
    xor = "xor";
    /// Shifts the bits right by `other` and fills with zeros.
    shift_right = "shift_right_logical";
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:literal;)*) => {
        $(
            impl<V: Borrow<Value>> ops::$trait<V> for &Value {
                type Output = Value;
                fn $method(self, other: V) -> Value { self.b.binary($op, self, other.borrow()) }
            }
            impl<V: Borrow<Value>> ops::$trait<V> for Value {
                type Output = Value;
                fn $method(self, other: V) -> Value { self.b.binary($op, &self, other.borrow()) }
            }
            impl ops::$trait<f64> for &Value {
                type Output = Value;
                fn $method(self, other: f64) -> Value { self.b.binary($op, self, &self.like(other)) }
            }
            impl ops::$trait<f64> for Value {
                type Output = Value;
                fn $method(self, other: f64) -> Value { self.b.binary($op, &self, &self.like(other)) }
            }
        )*
    };
}

operators! {
    Add add "add";
    Sub sub "subtract";
    Mul mul "multiply";
    Div div "divide";
}

impl Value {
    /// Returns a scalar constant with this value's element type.
    pub fn like(&self, value: f64) -> Value {
        self.b.scalar(value, self.dtype())
    }

    /// Returns the square.
    pub fn square(&self) -> Value {
        self * self
    }

    /// Converts to an element type. Returns the value itself if it already has that type.
    pub fn to(&self, dtype: DType) -> Value {
        if dtype == self.dtype() {
            return self.clone();
        }
        let ty = self.ty.with_dtype(dtype);
        let text = format!("stablehlo.convert {} : ({}) -> {ty}", self.local(), self.ty);
        self.b.op("convert", text, ty).with_sharding(self.sharding.clone())
    }

    /// Reinterprets the bits of each element as an element of `dtype`, which has the same size.
    pub fn bitcast(&self, dtype: DType) -> Value {
        let ty = self.ty.with_dtype(dtype);
        if dtype.size() != self.dtype().size() {
            return self.b.poison("bitcast_convert", format!("{} and {ty} differ in size", self.ty), ty);
        }
        let text = format!("stablehlo.bitcast_convert {} : ({}) -> {ty}", self.local(), self.ty);
        self.b.op("bitcast_convert", text, ty).with_sharding(self.sharding.clone())
    }

    /// Compares elementwise, with broadcasting. The result is boolean.
    pub fn compare(&self, direction: Comparison, other: &Value) -> Value {
        let Some((a, b)) = self.b.align("compare", self, other) else {
            return self.b.value("%poison".into(), self.ty.with_dtype(DType::Bool));
        };
        let kind = match a.dtype() {
            d if d.is_float() => "FLOAT",
            d if d.is_unsigned() || d == DType::Bool => "UNSIGNED",
            _ => "SIGNED",
        };
        let ty = a.ty.with_dtype(DType::Bool);
        let text = format!(
            "stablehlo.compare {}, {}, {}, {kind} : ({}, {}) -> {ty}",
            format!("{direction:?}").to_uppercase(),
            a.local(),
            b.local(),
            a.ty,
            b.ty
        );
        self.b.op("compare", text, ty).with_sharding(merged(&[&a, &b]))
    }

    /// Returns `self ? on_true : on_false` elementwise, with broadcasting; `self` must be boolean.
    pub fn select(&self, on_true: &Value, on_false: &Value) -> Value {
        if self.dtype() != DType::Bool {
            let message = format!("the condition must be boolean, got {}", self.ty);
            return self.b.poison("select", message, on_true.ty.clone());
        }
        let Some((t, f)) = self.b.align("select", on_true, on_false) else {
            return self.b.value("%poison".into(), on_true.ty.clone());
        };
        let Some(dims) = broadcast(&self.ty.dims, &t.ty.dims) else {
            let message = format!("shapes do not broadcast: {} and {}", self.ty, t.ty);
            return self.b.poison("select", message, t.ty.clone());
        };
        let (p, t, f) = (self.broadcast_to(&dims), t.broadcast_to(&dims), f.broadcast_to(&dims));
        let text = format!("stablehlo.select {}, {}, {} : {}, {}", p.local(), t.local(), f.local(), p.ty, t.ty);
        self.b.op("select", text, t.ty.clone()).with_sharding(merged(&[&t, &f, &p]))
    }

    /// Clamps the values to `low..=high`.
    pub fn clamp(&self, low: f64, high: f64) -> Value {
        self.maximum(&self.like(low)).minimum(&self.like(high))
    }

    /// Returns the error function of the values.
    pub fn erf(&self) -> Value {
        if !self.dtype().is_float() {
            return self.b.poison("erf", format!("not supported for {}", self.ty), self.ty.clone());
        }
        let ty = self.ty.clone();
        let text = format!("chlo.erf {} : {ty} -> {ty}", self.local());
        self.b.op("erf", text, ty).with_sharding(self.sharding.clone())
    }

    /// Returns true for each element that is neither infinite nor NaN.
    pub fn is_finite(&self) -> Value {
        let ty = self.ty.with_dtype(DType::Bool);
        self.b.op("is_finite", format!("stablehlo.is_finite {} : ({}) -> {ty}", self.local(), self.ty), ty)
    }

    /// Rounds to the precision of `dtype` (ties to even) without changing the element type. The compiler may remove a
    /// pair of conversions, but not this operation.
    pub fn round_to(&self, dtype: DType) -> Value {
        let (exponent, mantissa) = match dtype {
            DType::BF16 => (8, 7),
            DType::F16 => (5, 10),
            _ => return self.clone(),
        };
        let ty: Type = self.ty.clone();
        let text = format!("stablehlo.reduce_precision {}, format = e{exponent}m{mantissa} : {ty}", self.local());
        self.b.op("reduce_precision", text, ty).with_sharding(self.sharding.clone())
    }
}
