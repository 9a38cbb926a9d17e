use std::ops::Deref;
use std::sync::Arc;

/// Reference-counted value that requests share. Equality compares the pointer, because the value may be gigabytes.
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

    /// NaN is never equal to itself, so equality of clones shows that values are not compared.
    #[test]
    fn shared_values_compare_by_pointer() {
        let [one, other] = [f32::NAN; 2].map(Shared::from);
        assert!(one == one.clone() && one != other);
    }
}
