//! Training methods, each with the numbers that it starts with and their sources.

use std::fmt;

use clap::ValueEnum;

use super::facts::DataFacts;

/// A training method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Method {
    /// Reinforcement learning from a reward, relative to the mean of a group
    Grpo,
    /// The same, relative to the mean of the other completions
    Rloo,
    /// Supervised training on answers, conversations or texts
    Sft,
    /// Preference pairs
    Dpo,
    /// Answers that are labelled true or false
    Kto,
    /// A model that scores answers, from preference pairs
    RewardModel,
}

/// A number with the source of it.
pub(super) struct Sourced {
    pub value: &'static str,
    pub source: &'static str,
}

/// Weights up to which the recipes of this repository, with a model of 135 million, are the nearest.
const SMALL: usize = 300_000_000;
/// Weights up to which published recipes for 7 to 8 billion are too cautious.
const MEDIUM: usize = 3_000_000_000;

impl Method {
    /// The method that fits the columns of the data.
    pub fn of_columns(data: &DataFacts) -> Self {
        match data {
            _ if data.has("chosen") && data.has("rejected") => Self::Dpo,
            _ if data.has("label") && data.has("completion") => Self::Kto,
            _ if data.has("messages") && !data.has("ground_truth") => Self::Sft,
            _ if data.has("text") && data.prompt().is_none() => Self::Sft,
            _ => Self::Grpo,
        }
    }

    /// The question for it.
    pub fn question() -> String {
        let names: Vec<String> = Self::value_variants().iter().map(Self::to_string).collect();
        format!("method, one of {}", names.join(", "))
    }

    /// The method of this name.
    pub fn read(name: &str) -> Result<Self, String> {
        <Self as ValueEnum>::from_str(name, true).map_err(|_| format!("there is no method `{name}`"))
    }

    /// Returns true if completions are sampled and scored.
    pub fn has_reward(self) -> bool {
        matches!(self, Self::Grpo | Self::Rloo)
    }

    /// Returns true if its memory is planned.
    pub fn is_planned(self) -> bool {
        self != Self::RewardModel
    }

    /// Sequences of a record.
    pub fn sequences(self) -> usize {
        if matches!(self, Self::Dpo | Self::RewardModel) { 2 } else { 1 }
    }

    /// The learning rate for a model of this many weights.
    pub fn learning_rate(self, weights: usize) -> Sourced {
        let of = |value, source| Sourced { value, source };
        match self {
            Self::Grpo | Self::Rloo if weights < SMALL => {
                of("2.0e-5", "measured in recipes/smollm2_arithmetic with 135 million weights")
            }
            Self::Grpo | Self::Rloo => of(
                "1.0e-6",
                "the default of verl and of TRL's GRPO and RLOO, and DAPO's for 32 billion weights",
            ),
            Self::Sft if weights < SMALL => {
                of("1.0e-4", "measured in recipes/smollm2_sft_then_grpo with 135 million weights")
            }
            Self::Sft if weights < MEDIUM => of("2.0e-5", "TRL's default for SFT"),
            Self::Sft => of("5.0e-6", "as Tülu 3 for 8 billion weights"),
            Self::Dpo if weights < SMALL => {
                of("1.0e-5", "measured in recipes/smollm2_dpo with 135 million weights")
            }
            Self::Dpo if weights < MEDIUM => of("1.0e-6", "TRL's default for DPO"),
            Self::Dpo => of("5.0e-7", "as Zephyr and Tülu 3 for 7 and 8 billion weights"),
            Self::Kto if weights < MEDIUM => of("1.0e-6", "TRL's default for KTO"),
            Self::Kto => of("5.0e-7", "the lower end of TRL's advice for KTO, 5e-7 to 5e-6"),
            Self::RewardModel if weights < SMALL => {
                of("2.0e-5", "measured in recipes/smollm2_reward_model with 135 million weights")
            }
            Self::RewardModel => of("9.0e-6", "as InstructGPT's reward model of 6 billion weights"),
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}
