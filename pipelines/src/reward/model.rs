//! A reward model in a folder: a sequence classifier with one label.

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

use anyroll_models::{
    Model as _, Output, PackedBatch, ParamSpec, Sequence, ValueModel, Weights, hf::ModelFolder, init::whole,
};
use tch::{Device, Kind, Tensor};

use super::{Completion, Error, Failure, Reward, Takes};
use crate::config::RewardModelConfig;
use crate::data::{HfTokenizer, Record};
use crate::error_chain::one_line;

/// What a reward model says of a completion: the score that it gives at the end of the text.
#[derive(Debug)]
pub struct Model {
    config: RewardModelConfig,
    tokenizer: HfTokenizer,
    model: ValueModel,
    device: Device,
    /// Whole, on the host, one list a unit. One batch is scored at a time, with all of the rank's threads.
    weights: Mutex<Vec<Vec<Tensor>>>,
}

impl Model {
    /// Reads the folder's weights; `device` is the policy's.
    ///
    /// # Errors
    /// What of the folder cannot be used.
    pub fn new(config: &RewardModelConfig, device: Device) -> Result<Self, Failure> {
        let (folder, tokenizer) = Self::open(config)?;
        let device = if config.is_on_host() { Device::Cpu } else { device };
        let because = |error: anyroll_models::Error| one_line(&error);
        let model = ValueModel::new(folder.decoder_config().clone(), device).map_err(because)?;
        let kind = config.dtype.dtype().kind();
        let unit = |params: &[ParamSpec]| {
            params.iter().map(|spec| whole(&folder, spec, kind, Device::Cpu)).collect()
        };
        let weights = model.units().iter().map(|of| unit(&of.params));
        let weights = weights.collect::<anyroll_models::Result<_>>().map_err(because)?;
        Ok(Self { config: config.clone(), tokenizer, model, device, weights: Mutex::new(weights) })
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

    /// The text that is scored, with the end that the completion has, if the model can read it.
    fn text(&self, record: &Record, completion: &Completion) -> Result<Vec<i64>, String> {
        let Completion { text, finished, .. } = *completion;
        let tokens = self.tokenizer.encode_whole(record, text, self.config.chat, finished);
        let tokens = tokens.map_err(|error| one_line(&error))?;
        let most = self.model.decoder().config().max_position_embeddings;
        match tokens.is_empty() || tokens.len() as i64 > most {
            true => Err(format!("the text is {} tokens, and the model reads 1 to {most}", tokens.len())),
            false => Ok(tokens),
        }
    }

    /// The score of each text. The weights are on the device while this lasts.
    fn evaluate(&self, texts: &[Vec<i64>]) -> anyroll_models::Result<Vec<f64>> {
        let weights = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let there = |tensor: &Tensor| tensor.f_to_device(self.device);
        let units = weights.iter().map(|unit| unit.iter().map(there).collect());
        let units = units.collect::<Result<Vec<Vec<Tensor>>, _>>()?;
        let mut scores = Vec::with_capacity(texts.len());
        for batch in texts.chunks(self.config.batch_size) {
            scores.extend(self.forward(&units, batch)?);
        }
        Ok(scores)
    }

    /// One forward pass over texts back to back.
    fn forward(&self, weights: &[Vec<Tensor>], texts: &[Vec<i64>]) -> anyroll_models::Result<Vec<f64>> {
        // The number of a token is read before the token: that of one behind the last has seen the whole text.
        let with_end: Vec<Vec<i64>> = texts.iter().map(|tokens| [&tokens[..], &[0]].concat()).collect();
        let sequence = |tokens| Sequence { tokens, prompt_len: tokens.len() - 1 };
        let sequences: Vec<Sequence> = with_end.iter().map(|tokens| sequence(tokens)).collect();
        let batch = PackedBatch::new(&sequences, 1.0, self.device)?;
        let mut x = None;
        for block in 0..self.model.blocks() {
            let units: Vec<&[Tensor]> =
                self.model.units_of(block).iter().map(|&unit| &weights[unit][..]).collect();
            let (output, _) = self.model.forward(block, &Weights::new(&units), x.as_ref(), &batch, false)?;
            match output {
                Output::Hidden(hidden) => x = Some(hidden),
                Output::Scores(values) => {
                    let values = values.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
                    return Ok(Vec::try_from(values)?);
                }
            }
        }
        unreachable!("the last block has scores")
    }
}

impl Reward for Model {
    fn name(&self) -> &'static str {
        "model"
    }

    fn takes(&self) -> Takes {
        let size = NonZeroUsize::new(self.config.batch_size).expect("a config that was checked");
        // On the policy's device there is room for it, and for its streams, once nothing is sampled.
        if self.config.is_on_host() { Takes::Batches(size) } else { Takes::All }
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        self.score_many(&[(record, *completion)]).pop().expect("as many as there are cases")
    }

    fn score_many(&self, cases: &[(&Record, Completion)]) -> Vec<Result<f64, Error>> {
        let texts = cases.iter().map(|(record, completion)| self.text(record, completion));
        let (mut readable, mut unreadable) = (Vec::new(), Vec::new());
        for text in texts {
            unreadable.push(text.map(|text| readable.push(text)).err());
        }
        let mut scores = match self.evaluate(&readable) {
            Ok(scores) => scores.into_iter().map(score_of).collect::<Vec<_>>(),
            Err(error) => vec![Err(one_line(&error)); readable.len()],
        }
        .into_iter();
        let each = unreadable.into_iter().zip(cases).map(|(problem, (record, _))| {
            let score = match problem {
                Some(problem) => Err(problem),
                None => scores.next().expect("one for each readable text"),
            };
            score.map_err(|why| Error::new(self.name(), record, why))
        });
        each.collect()
    }
}

fn score_of(score: f64) -> Result<f64, String> {
    if score.is_finite() { Ok(score) } else { Err(format!("the score is {score}")) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::RewardDtype;

    fn golden(name: &str) -> RewardModelConfig {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
        RewardModelConfig { path, chat: true, backend: "cpu".into(), dtype: RewardDtype::Fp32, batch_size: 3 }
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
        let plain = RewardModelConfig { chat: false, ..golden("reward_model") };
        let chat = Model::new(&golden("reward_model"), Device::Cpu).unwrap();
        let plain = Model::new(&plain, Device::Cpu).unwrap();
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

    /// Batches, 16 bits, and the way of a policy's device, here the host itself.
    #[test]
    fn scores_hardly_depend_on_how_they_are_computed() {
        let words = ["sort 3 1 2", "1", "a b c d e f", "", "one two three", "3 2 1 0", "x"];
        let records: Vec<Record> = words
            .iter()
            .map(|prompt| Record { id: "1".into(), prompt: (*prompt).into(), ..Record::default() })
            .collect();
        let completion = |text| Completion { text, tokens: None, finished: true };
        let mut cases: Vec<(&Record, Completion)> = records
            .iter()
            .zip(words.iter().rev())
            .map(|(record, text)| (record, completion(*text)))
            .collect();
        let long = "1 ".repeat(100);
        cases.insert(2, (&records[0], completion(&long)));
        let scores = |config: &RewardModelConfig| {
            let model = Model::new(config, Device::Cpu).unwrap();
            let scores = model.score_many(&cases);
            let error = one_line(scores[2].as_ref().unwrap_err());
            assert!(error.contains("and the model reads 1 to 128"), "{error}");
            scores.into_iter().filter_map(Result::ok).collect::<Vec<f64>>()
        };
        let one = scores(&RewardModelConfig { batch_size: 1, ..golden("reward_model") });
        assert_eq!(one.len(), words.len());
        let spread = one.iter().fold(0.0f64, |most, score| most.max((score - one[0]).abs()));
        assert!(spread > 1e-2, "{one:?}");
        let check = |config: RewardModelConfig, tolerance: f64| {
            for (found, expected) in scores(&config).iter().zip(&one) {
                assert!((found - expected).abs() < tolerance, "{config:?}: {found} and {expected}");
            }
        };
        check(golden("reward_model"), 1e-5);
        check(RewardModelConfig { batch_size: 100, ..golden("reward_model") }, 1e-5);
        check(RewardModelConfig { backend: "other".into(), ..golden("reward_model") }, 1e-5);
        check(
            RewardModelConfig { dtype: RewardDtype::Bf16, ..golden("reward_model") },
            0.05 * (1.0 + spread),
        );
    }

    #[test]
    fn what_cannot_be_scored_is_told() {
        let model = Model::new(&golden("reward_model"), Device::Cpu).unwrap();
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
