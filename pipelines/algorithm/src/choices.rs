//! The list of a field's choices; each choice is a file with its section and its formula.

/// Declares the enum of a field's choices from a list of `file => Variant(Section)`, or `file => Variant` for a choice
/// without a section. `dyn Formula` is the trait that sections implement, or else the units `file::Variant`.
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
            /// Returns the choice's name in a config.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => stringify!($file),)*
                }
            }

            /// Returns every choice, with the defaults of its section.
            pub fn all() -> Vec<Self> {
                vec![$(Self::$variant $((<$section>::default()))?),*]
            }

            /// Returns the choice's formula, with the numbers of its section.
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
