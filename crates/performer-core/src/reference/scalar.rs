//! The numbers that features are written in: plain `f64`, or a dual number that carries a
//! derivative along.

use std::ops::{Add, Mul, Sub};

/// The arithmetic that is needed to write every feature map once, for values and for derivatives.
pub(super) trait Scalar:
    Copy + From<f64> + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self>
{
    /// The number itself, without its derivative: branches look at this.
    fn value(self) -> f64;
    fn exp(self) -> Self;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    fn recip(self) -> Self;
}

impl Scalar for f64 {
    fn value(self) -> f64 {
        self
    }

    fn exp(self) -> Self {
        f64::exp(self)
    }

    fn sin(self) -> Self {
        f64::sin(self)
    }

    fn cos(self) -> Self {
        f64::cos(self)
    }

    fn recip(self) -> Self {
        f64::recip(self)
    }
}

/// A value and its derivative with respect to one chosen input: forward-mode differentiation.
#[derive(Clone, Copy)]
pub(super) struct Dual {
    pub(super) value: f64,
    pub(super) derivative: f64,
}

impl From<f64> for Dual {
    fn from(constant: f64) -> Self {
        Dual { value: constant, derivative: 0.0 }
    }
}

impl Add for Dual {
    type Output = Dual;

    fn add(self, other: Dual) -> Dual {
        Dual { value: self.value + other.value, derivative: self.derivative + other.derivative }
    }
}

impl Sub for Dual {
    type Output = Dual;

    fn sub(self, other: Dual) -> Dual {
        Dual { value: self.value - other.value, derivative: self.derivative - other.derivative }
    }
}

impl Mul for Dual {
    type Output = Dual;

    fn mul(self, other: Dual) -> Dual {
        Dual {
            value: self.value * other.value,
            derivative: self.derivative * other.value + self.value * other.derivative,
        }
    }
}

impl Scalar for Dual {
    fn value(self) -> f64 {
        self.value
    }

    fn exp(self) -> Self {
        Dual { value: self.value.exp(), derivative: self.value.exp() * self.derivative }
    }

    fn sin(self) -> Self {
        Dual { value: self.value.sin(), derivative: self.value.cos() * self.derivative }
    }

    fn cos(self) -> Self {
        Dual { value: self.value.cos(), derivative: -self.value.sin() * self.derivative }
    }

    fn recip(self) -> Self {
        let value = self.value.recip();
        Dual { value, derivative: -self.derivative * value * value }
    }
}
