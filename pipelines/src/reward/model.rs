//! A reward model in a folder: a sequence classifier with one label, on the host.

use std::sync::{Mutex, PoisonError};

use anyroll_models::{
    Model as _, Output, PackedBatch, ParamSpec, Sequence, ValueModel, Weights, hf::ModelFolder,
    init::WeightSource,
};
use serde_json::{Map, json};
use tch::{Device, Tensor};

use super::{Completion, Error, Failure, Reward};
use crate::config::RewardModelConfig;
use crate::data::{Conversation, HfTokenizer, Record, TokenizerError};
use crate::error_chain::one_line;

/// What a reward model says of a completion: the score that it gives at the end of the text.
#[derive(Debug)]
pub struct Model {
    config: RewardModelConfig,
    tokenizer: HfTokenizer,
    model: ValueModel,
    /// Whole, fp32, one list a unit. One completion is scored at a time, with all of the rank's threads.
    weights: Mutex<Vec<Vec<Tensor>>>,
}

impl Model {
    /// Reads the folder's weights.
    ///
    /// # Errors
    /// What of the folder cannot be used.
    pub fn new(config: &RewardModelConfig) -> Result<Self, Failure> {
        let (folder, tokenizer) = Self::open(config)?;
        let because = |error: anyroll_models::Error| one_line(&error);
        let model = ValueModel::new(folder.decoder_config().clone(), Device::Cpu).map_err(because)?;
        let weights =
            model.units().iter().map(|unit| unit.params.iter().map(|spec| read(&folder, spec)).collect());
        let weights = weights.collect::<anyroll_models::Result<_>>().map_err(because)?;
        Ok(Self { config: config.clone(), tokenizer, model, weights: Mutex::new(weights) })
    }

    /// Checks all of the folder but the weights' values.
    ///
    /// # Errors
    /// What of it cannot be used.
    pub fn open(config: &RewardModelConfig) -> Result<(ModelFolder, HfTokenizer), Failure> {
        let folder = ModelFolder::open_scorer(&config.path).map_err(|error| one_line(&error))?;
        let tokenizer = HfTokenizer::open(&config.path).map_err(|error| one_line(&error))?;
        if config.chat && !tokenizer.has_chat_template() {
            let path = config.path.display();
            return Err(format!("{path} has no chat template: read texts as they are, `chat: false`").into());
        }
        Ok((folder, tokenizer))
    }

    /// The text that is scored: the conversation in the model's template, or prompt and completion as they are, with the
    /// end that the completion has.
    fn tokens(&self, record: &Record, completion: &Completion) -> Result<Vec<i64>, TokenizerError> {
        if self.config.chat {
            let mut messages = record.conversation();
            messages.push(json!({"role": "assistant", "content": completion.text}));
            let conversation =
                Conversation { messages: &messages, tools: None, add_generation_prompt: false };
            return self.tokenizer.encode_chat(conversation, &Map::new());
        }
        let mut tokens = self.tokenizer.encode(&format!("{}{}", record.prompt, completion.text), true)?;
        tokens.extend(self.tokenizer.eos().filter(|_| completion.finished));
        Ok(tokens)
    }

    fn evaluate(&self, mut tokens: Vec<i64>) -> anyroll_models::Result<f64> {
        // The number of a token is read before the token: that of one behind the last has seen the whole text.
        let prompt_len = tokens.len();
        tokens.push(0);
        let batch = PackedBatch::new(&[Sequence { tokens: &tokens, prompt_len }], 1.0, Device::Cpu)?;
        let weights = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let mut x = None;
        for block in 0..self.model.blocks() {
            let units: Vec<&[Tensor]> =
                self.model.units_of(block).iter().map(|&unit| &weights[unit][..]).collect();
            let (output, _) = self.model.forward(block, &Weights::new(&units), x.as_ref(), &batch, false)?;
            match output {
                Output::Hidden(hidden) => x = Some(hidden),
                Output::Scores(values) => return Ok(values.f_double_value(&[0])?),
            }
        }
        unreachable!("the last block has scores")
    }
}

impl Reward for Model {
    fn name(&self) -> &'static str {
        "model"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        let failed = |why: String| Error::new(self.name(), record, why);
        let tokens = self.tokens(record, completion).map_err(|error| failed(one_line(&error)))?;
        let shape = self.model.decoder().config();
        let most = shape.max_position_embeddings.min(shape.sliding_window.unwrap_or(i64::MAX));
        if tokens.is_empty() || tokens.len() as i64 > most {
            return Err(failed(format!(
                "the text is {} tokens, and the model reads 1 to {most}",
                tokens.len()
            )));
        }
        let score = self.evaluate(tokens).map_err(|error| failed(one_line(&error)))?;
        if score.is_finite() { Ok(score) } else { Err(failed(format!("the score is {score}"))) }
    }
}

fn read(folder: &ModelFolder, spec: &ParamSpec) -> anyroll_models::Result<Tensor> {
    let mut values = vec![0.0; spec.elements()];
    folder.read(spec, 0..values.len(), &mut values)?;
    Ok(Tensor::f_from_slice(&values)?.f_reshape(&spec.shape)?)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn golden(name: &str) -> RewardModelConfig {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
        RewardModelConfig { path, chat: true }
    }

    fn score(model: &Model, prompt: &str, text: &str, finished: bool) -> Result<f64, Error> {
        let record = Record { id: "1".into(), prompt: prompt.into(), ..Record::default() };
        model.score(&record, &Completion { text, tokens: None, finished })
    }

    /// `tests/python/make_reward_model_golden.py` wrote them.
    #[test]
    fn scores_equal_those_of_transformers() {
        let file = golden("reward_model").path.join("scores.json");
        let cases: Vec<serde_json::Value> =
            serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let chat = Model::new(&golden("reward_model")).unwrap();
        let plain = Model::new(&RewardModelConfig { chat: false, ..golden("reward_model") }).unwrap();
        for case in &cases {
            let (prompt, text) = (case["prompt"].as_str().unwrap(), case["completion"].as_str().unwrap());
            for (model, finished, name) in
                [(&chat, true, "chat"), (&plain, true, "ended"), (&plain, false, "cut")]
            {
                let (found, expected) =
                    (score(model, prompt, text, finished).unwrap(), case[name].as_f64().unwrap());
                assert!((found - expected).abs() < 1e-4, "{name} of {case}: {found}");
            }
        }
        assert!(cases.len() > 2);
    }

    #[test]
    fn what_cannot_be_scored_is_told() {
        let model = Model::new(&golden("reward_model")).unwrap();
        let error = score(&model, "sort", &"1 ".repeat(100), true).unwrap_err();
        assert!(one_line(&error).contains("and the model reads 1 to 128"), "{}", one_line(&error));
        for (name, expected) in [
            ("nowhere", "config.json"),
            (
                "tiny_model",
                "the architecture is Qwen2ForCausalLM, and there is only Qwen2ForSequenceClassification",
            ),
        ] {
            let failure = Model::open(&golden(name)).unwrap_err().to_string();
            assert!(failure.contains(expected), "{failure}");
        }
    }
}
