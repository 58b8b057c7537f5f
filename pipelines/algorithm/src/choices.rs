//! The list of a field's choices, each of which is a file with its section and its formula.

/// Declares the enum of a field's choices from a list of `file => Variant(Section)`, or `file => Variant` for a choice without
/// a section; `dyn Formula` is the trait that sections, or else the units `file::Variant`, implement.
macro_rules! choices {
    (
        $(#[$outer:meta])*
        enum $name:ident: dyn $formula:ident {
            $($(#[$meta:meta])* $file:ident => $variant:ident $(($section:ident))?,)*
        }
    ) => {
        $(mod $file;)*

        /// Sections that a config writes.
        pub mod sections {
            pub use super::$name;
            $($(pub use super::$file::$section;)?)*
        }
        use sections::*;

        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $name {
            $($(#[$meta])* $variant $(($section))?,)*
        }

        impl $name {
            /// Its name in a config.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => stringify!($file),)*
                }
            }

            /// One of each, with its defaults.
            pub fn all() -> Vec<Self> {
                vec![$(Self::$variant $((<$section>::default()))?),*]
            }

            /// Its formula, with the numbers of its section.
            pub fn formula(&self) -> &dyn $formula {
                match self {
                    $(Self::$variant $((bound!($section, section)))? => formula_of!($file, $variant, section $(, $section)?),)*
                }
            }
        }
    };
}

macro_rules! bound {
    ($section:ident, $name:ident) => {
        $name
    };
}

macro_rules! formula_of {
    ($file:ident, $variant:ident, $name:ident, $section:ident) => {
        $name
    };
    ($file:ident, $variant:ident, $name:ident) => {
        &$file::$variant
    };
}

pub(crate) use {bound, choices, formula_of};
