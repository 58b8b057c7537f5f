//! The fields that count steps, by a number or by what it follows from.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::schema::PipelineConfig;

/// A number of steps, or what it follows from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Steps<T> {
    /// So many.
    Count(u64),
    /// As many as this comes to.
    By(T),
}

/// What steps may be counted by, in a mapping of its own.
pub trait Measure {
    /// How it may look in YAML.
    const EXAMPLE: &'static str;
}

/// The steps of a run by passes over the records that are trained on, which are neither held out nor left out; resolved
/// before anything starts.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DataEpochs {
    /// So many, above 0; a part of one as well. A step may end one pass and begin the next, and the last one is filled up
    /// with records of a further pass: `ceil(data_epochs x records / records of a step)` steps.
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
    /// How long it is, and the prompts or records of a step over all ranks.
    pub fn steps_and_their_size(&self) -> (Steps<DataEpochs>, usize) {
        match self {
            Self::Rlvr(rlvr) => (rlvr.steps, rlvr.prompts_per_step),
            Self::Offline(offline) => (offline.steps, offline.batch_size),
            Self::Diffusion(diffusion) => (Steps::Count(diffusion.steps), diffusion.prompts_per_step),
        }
    }
}

/// `steps` rounded up. 1.1 x 10 is a little more than 11, and no step more.
pub fn whole_steps(steps: f64) -> u64 {
    (steps * (1.0 - 1e-12)).ceil() as u64
}
