//! Values that requests share.

use std::ops::Deref;
use std::sync::Arc;

/// A value that requests share. Two are equal where they share one: what it holds, which may be gigabytes, is not compared.
#[derive(Debug)]
pub struct Shared<T>(Arc<T>);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Shared(self.0.clone())
    }
}

impl<T> PartialEq for Shared<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T> From<T> for Shared<T> {
    fn from(value: T) -> Self {
        Shared(Arc::new(value))
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value that is never equal to itself shows that nobody looks.
    #[test]
    fn what_is_shared_is_not_compared() {
        let [one, other] = [f32::NAN; 2].map(Shared::from);
        assert!(one == one.clone() && one != other);
    }
}
