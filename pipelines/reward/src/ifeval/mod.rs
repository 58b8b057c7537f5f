//! The `ifeval` reward: verifiable instructions of the 25 kinds of IFEval (Zhou et al., 2023,
//! "Instruction-Following Evaluation for Large Language Models").

mod edges;
mod instruction;
mod words;

#[cfg(test)]
mod tests;

use anyroll_config::{Credit, IfevalConfig};
use anyroll_data::Record;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Completion, Error, Failure, Reward};
use instruction::{Instruction, Rules};

/// The fraction of a record's instructions that the completion follows, or 1 only if it follows all of them.
///
/// The instructions are in the published columns `instruction_id_list` and `kwargs`, or in the answer as a
/// JSON object with both.
#[derive(Clone, Copy, Debug)]
pub struct Ifeval {
    config: IfevalConfig,
}

#[derive(Deserialize)]
struct Listed {
    instruction_id_list: Vec<String>,
    #[serde(default)]
    kwargs: Vec<Option<Map<String, Value>>>,
}

impl Ifeval {
    /// Creates the reward of `config`.
    pub fn new(config: IfevalConfig) -> Self {
        Self { config }
    }
}

impl Reward for Ifeval {
    fn name(&self) -> &'static str {
        "ifeval"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        let failed = |failure: Failure| Error::new(self.name(), record, failure);
        let instructions = instructions(record).map_err(|why| failed(why.into()))?;
        let text = completion.text.rsplit("</think>").next().unwrap_or(completion.text);
        let rules = match self.config.like_published {
            true => Rules::Published,
            false => Rules::Corrected,
        };
        let mut followed = 0;
        for instruction in &instructions {
            let follows = !text.trim().is_empty()
                && instruction.is_followed(text, rules).map_err(|why| failed(why.into()))?;
            followed += usize::from(follows);
        }
        Ok(match self.config.credit {
            Credit::All => f64::from(u8::from(followed == instructions.len())),
            Credit::Share => followed as f64 / instructions.len() as f64,
        })
    }

    fn check(&self, record: &Record) -> Result<(), Error> {
        instructions(record).map(drop).map_err(|why| Error::new(self.name(), record, why))
    }
}

/// Instructions of a record, at least one.
fn instructions(record: &Record) -> Result<Vec<Instruction>, String> {
    let listed: Result<Listed, _> = match record.columns.contains_key("instruction_id_list") {
        true => serde_json::from_value(Value::Object(record.columns.clone())),
        false => serde_json::from_str(&record.answer),
    };
    let Listed { instruction_id_list: ids, kwargs } =
        listed.map_err(|error| format!("it has no instructions: {error}"))?;
    if ids.is_empty() {
        return Err("it has an empty list of instructions".into());
    }
    if !kwargs.is_empty() && kwargs.len() != ids.len() {
        return Err(format!("it has {} instructions but {} `kwargs`", ids.len(), kwargs.len()));
    }
    let with_kwargs = ids.iter().enumerate().map(|(index, id)| {
        let kwargs = kwargs.get(index).cloned().flatten().unwrap_or_default();
        Instruction::read(id, &kwargs).map_err(|why| format!("`{id}`: {why}"))
    });
    with_kwargs.collect()
}
