//! Structs whose defaults stand at their fields, as Rust's own default field values will.

/// A struct with named fields, each with the value that its `Default` gives it: `field: Type = value`.
macro_rules! with_defaults {
    (
        $(#[$struct_attribute:meta])*
        $struct_vis:vis struct $name:ident {
            $($(#[$attribute:meta])* $vis:vis $field:ident: $type:ty = $value:expr,)*
        }
    ) => {
        $(#[$struct_attribute])*
        $struct_vis struct $name {
            $($(#[$attribute])* $vis $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: $value,)* }
            }
        }
    };
}

pub(crate) use with_defaults;
