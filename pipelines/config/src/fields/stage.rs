//! The `zero_stage` field.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, Visitor},
};

/// Stage of sharding over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroStage {
    /// The stage of this number, 0 to 3.
    Stage(u8),
    /// The fastest stage that fits the devices; resolved before the run starts.
    Auto,
}

impl Default for ZeroStage {
    fn default() -> Self {
        Self::Stage(0)
    }
}

impl<'de> Deserialize<'de> for ZeroStage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StageVisitor;

        impl Visitor<'_> for StageVisitor {
            type Value = ZeroStage;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a stage, 0 to 3, or `auto`")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<ZeroStage, E> {
                // A number without a stage is refused later, with the field's name.
                Ok(ZeroStage::Stage(u8::try_from(number).unwrap_or(u8::MAX)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ZeroStage, E> {
                match text {
                    "auto" => Ok(ZeroStage::Auto),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
        }

        deserializer.deserialize_any(StageVisitor)
    }
}

impl Serialize for ZeroStage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Stage(number) => number.serialize(serializer),
            Self::Auto => "auto".serialize(serializer),
        }
    }
}
