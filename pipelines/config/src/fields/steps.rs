//! The fields that count steps, by a number or by a measure that the number follows from.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::schema::PipelineConfig;

/// A number of steps, or a measure that the number follows from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Steps<T> {
    /// The number of steps.
    Count(u64),
    /// A measure that the number of steps follows from.
    By(T),
}

/// A measure of steps, in its own mapping.
pub trait Measure {
    /// Example of the measure in YAML.
    const EXAMPLE: &'static str;
}

/// Number of a run's steps, by passes over the records that are trained on, which are neither held out nor left out.
/// The number is resolved before the run starts.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DataEpochs {
    /// Number of passes, above 0; fractions are allowed. A step may end one pass and begin the next, and records of a
    /// further pass fill the last step: `ceil(data_epochs x records / records of a step)` steps.
    pub data_epochs: f64,
}

impl Measure for DataEpochs {
    const EXAMPLE: &'static str = "{data_epochs: 3}";
}

impl<'de, T: Measure + Deserialize<'de>> Deserialize<'de> for Steps<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StepsVisitor<T>(PhantomData<T>);

        impl<'de, T: Measure + Deserialize<'de>> Visitor<'de> for StepsVisitor<T> {
            type Value = Steps<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a whole number, 0 or above, or {}", T::EXAMPLE)
            }

            fn visit_u64<E: de::Error>(self, steps: u64) -> Result<Steps<T>, E> {
                Ok(Steps::Count(steps))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Steps<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Steps::By)
            }
        }

        deserializer.deserialize_any(StepsVisitor(PhantomData))
    }
}

impl PipelineConfig {
    /// Returns the number of steps, and the prompts or records of a step over all ranks.
    pub fn steps_and_their_size(&self) -> (Steps<DataEpochs>, usize) {
        match self {
            Self::Rlvr(rlvr) => (rlvr.steps, rlvr.prompts_per_step),
            Self::Offline(offline) => (offline.steps, offline.batch_size),
            Self::Diffusion(diffusion) => (Steps::Count(diffusion.steps), diffusion.prompts_per_step),
        }
    }
}

/// Returns `steps` rounded up. In floating point, 1.1 x 10 is a little more than 11; that excess adds no step.
pub fn whole_steps(steps: f64) -> u64 {
    (steps * (1.0 - 1e-12)).ceil() as u64
}
