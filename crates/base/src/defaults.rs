//! A macro for structs with inline field defaults, until Rust's default field values are stable.

/// Defines a struct with a default for each field (`field: Type = value`), and implements `Default` with these values.
#[macro_export]
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
