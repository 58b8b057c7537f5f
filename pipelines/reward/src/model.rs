//! The `model` reward: a reward model from a folder, a sequence classifier with one label.

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

use anyroll_models::{
    Model as _, Output, PackedBatch, ParamSpec, Sequence, ValueModel, Weights, hf::ModelFolder, init::whole,
};
use tch::{Device, Kind, Tensor};

use super::{Completion, Error, Failure, Reward, Takes};
use anyroll_config::RewardModelConfig;
use anyroll_config::error_chain::one_line;
use anyroll_data::{HfTokenizer, Record};

/// Name in metrics and errors.
pub(super) const NAME: &str = "model";

/// A reward model on the host: its score at the end of the text.
#[derive(Debug)]
pub struct Model {
    reader: Reader,
    batch_size: NonZeroUsize,
    model: ValueModel,
    /// Complete weights, one list per unit. The lock makes batches run one at a time, each with all threads
    /// of the rank.
    weights: Mutex<Vec<Vec<Tensor>>>,
}

/// Tokenization of texts for a reward model.
#[derive(Debug)]
pub struct Reader {
    tokenizer: HfTokenizer,
    chat: bool,
    /// Maximum length of a text, in tokens.
    longest: usize,
}

/// A reward model whose folder was checked, except the weights' values.
#[derive(Debug)]
pub struct OpenModel {
    /// Folder of its weights.
    pub folder: ModelFolder,
    /// Tokenizer and limits of its inputs.
    pub reader: Reader,
}

/// Tokenized completions.
pub struct Texts<'a> {
    records: Vec<&'a Record>,
    /// Tokens of the texts that the model can read.
    pub readable: Vec<Vec<i64>>,
    /// For each text the reason why the model cannot read it, if any.
    problems: Vec<Option<String>>,
}

impl Model {
    /// Reads the weights of the folder that was `opened`.
    ///
    /// # Errors
    /// The part of the folder that cannot be used.
    pub fn new(config: &RewardModelConfig, opened: OpenModel) -> Result<Self, Failure> {
        let OpenModel { folder, reader } = opened;
        let because = |error: anyroll_models::Error| one_line(&error);
        let model = ValueModel::new(folder.decoder_config().clone(), Device::Cpu).map_err(because)?;
        let kind = config.dtype.dtype().kind();
        let unit = |params: &[ParamSpec]| {
            params.iter().map(|spec| whole(&folder, spec, kind, Device::Cpu)).collect()
        };
        let weights = model.units().iter().map(|of| unit(&of.params));
        let weights = weights.collect::<anyroll_models::Result<_>>().map_err(because)?;
        let batch_size = NonZeroUsize::new(config.batch_size).expect("a config that was checked");
        Ok(Self { reader, batch_size, model, weights: Mutex::new(weights) })
    }

    /// Checks everything in the folder except the weights' values.
    ///
    /// # Errors
    /// The part of it that cannot be used.
    pub fn open(config: &RewardModelConfig) -> Result<OpenModel, Failure> {
        let folder = ModelFolder::open_scorer(&config.path).map_err(|error| one_line(&error))?;
        let tokenizer = HfTokenizer::open(&config.path).map_err(|error| one_line(&error))?;
        if config.chat && !tokenizer.has_chat_template() {
            let path = config.path.display();
            return Err(format!("{path} has no chat template: set `chat: false`").into());
        }
        let longest = folder.decoder_config().max_position_embeddings as usize;
        let reader = Reader { tokenizer, chat: config.chat, longest };
        Ok(OpenModel { folder, reader })
    }

    /// Scores each text.
    fn evaluate(&self, texts: &[Vec<i64>]) -> anyroll_models::Result<Vec<f64>> {
        let weights = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scores = Vec::with_capacity(texts.len());
        for texts in texts.chunks(self.batch_size.get()) {
            scores.extend(scores_of(&self.forward(&weights, &pack(texts, Device::Cpu)?)?)?);
        }
        Ok(scores)
    }

    fn forward(&self, weights: &[Vec<Tensor>], batch: &PackedBatch) -> anyroll_models::Result<Tensor> {
        let mut x = None;
        for block in 0..self.model.blocks() {
            let units: Vec<&[Tensor]> =
                self.model.units_of(block).iter().map(|&unit| &weights[unit][..]).collect();
            let (output, _) = self.model.forward(block, &Weights::new(&units), x.as_ref(), batch, false)?;
            match output {
                Output::Hidden(hidden) => x = Some(hidden),
                Output::Scores(values) => return Ok(values),
            }
        }
        unreachable!("the last block has scores")
    }
}

impl Reader {
    /// Tokenizes cases for the model.
    pub fn read<'a>(&self, cases: &[(&'a Record, Completion)]) -> Texts<'a> {
        let mut texts = Texts { records: Vec::new(), readable: Vec::new(), problems: Vec::new() };
        for (record, completion) in cases {
            texts.records.push(record);
            let text = self.text(record, completion);
            texts.problems.push(text.map(|text| texts.readable.push(text)).err());
        }
        texts
    }

    /// Tokens of a prompt with its completion, and the end token if the completion has one. An error means
    /// that the text is empty or too long.
    fn text(&self, record: &Record, completion: &Completion) -> Result<Vec<i64>, String> {
        let Completion { text, finished, .. } = *completion;
        let tokens = self.tokenizer.encode_whole(record, text, self.chat, finished);
        let tokens = tokens.map_err(|error| one_line(&error))?;
        let most = self.longest;
        match tokens.is_empty() || tokens.len() > most {
            true => Err(format!("the text has {} tokens, must have 1 to {most}", tokens.len())),
            false => Ok(tokens),
        }
    }
}

impl Texts<'_> {
    /// Results of all cases, given those of the readable texts.
    pub fn scored(self, scores: Vec<Result<f64, String>>) -> Vec<Result<f64, Error>> {
        let mut scores = scores.into_iter();
        let each = self.problems.into_iter().zip(self.records).map(|(problem, record)| {
            let score = match problem {
                Some(problem) => Err(problem),
                None => scores.next().expect("one for each readable text"),
            };
            score.and_then(finite).map_err(|why| Error::new(NAME, record, why))
        });
        each.collect()
    }
}

/// Packs texts into a batch.
pub fn pack(texts: &[Vec<i64>], device: Device) -> anyroll_models::Result<PackedBatch> {
    // The head's output at a position precedes its token, so the output at a token after the last one has
    // seen the whole text.
    let with_end: Vec<Vec<i64>> = texts.iter().map(|tokens| [&tokens[..], &[0]].concat()).collect();
    let sequence = |tokens| Sequence { tokens, prompt_len: tokens.len() - 1 };
    let sequences: Vec<Sequence> = with_end.iter().map(|tokens| sequence(tokens)).collect();
    PackedBatch::new(&sequences, 1.0, device)
}

/// Scores of a batch.
pub fn scores_of(values: &Tensor) -> anyroll_models::Result<Vec<f64>> {
    Ok(Vec::try_from(values.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?)?)
}

impl Reward for Model {
    fn name(&self) -> &'static str {
        NAME
    }

    fn takes(&self) -> Takes {
        Takes::Batches(self.batch_size)
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        self.score_many(&[(record, *completion)]).pop().expect("as many as there are cases")
    }

    fn score_many(&self, cases: &[(&Record, Completion)]) -> Vec<Result<f64, Error>> {
        let texts = self.reader.read(cases);
        let scores = match self.evaluate(&texts.readable) {
            Ok(scores) => scores.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(one_line(&error)); texts.readable.len()],
        };
        texts.scored(scores)
    }
}

fn finite(score: f64) -> Result<f64, String> {
    if score.is_finite() { Ok(score) } else { Err(format!("the score is {score}")) }
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;

    use super::*;
    use anyroll_config::RewardDtype;

    pub fn golden(name: &str) -> RewardModelConfig {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
        RewardModelConfig {
            path,
            chat: true,
            backend: "cpu".into(),
            devices: None,
            strategy: None,
            dtype: RewardDtype::Fp32,
            batch_size: 3,
        }
    }

    fn score(model: &Model, prompt: &str, text: &str, finished: bool) -> Result<f64, Error> {
        let record = Record { id: "1".into(), prompt: prompt.into(), ..Record::default() };
        model.score(&record, &Completion { text, tokens: None, finished })
    }

    /// Opens the model of `config` on the host.
    pub(in super::super) fn host(config: &RewardModelConfig) -> Model {
        Model::new(config, Model::open(config).unwrap()).unwrap()
    }

    /// `tests/python/make_reward_model_golden.py` wrote the expected scores.
    #[test]
    fn scores_equal_those_of_transformers() {
        let file = golden("reward_model").path.join("scores.json");
        let cases: Vec<serde_json::Value> =
            serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let plain = RewardModelConfig { chat: false, ..golden("reward_model") };
        let chat = host(&golden("reward_model"));
        let plain = host(&plain);
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

    /// Compares batch sizes and 16-bit dtypes.
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
            let model = host(config);
            let scores = model.score_many(&cases);
            let error = one_line(scores[2].as_ref().unwrap_err());
            assert!(error.contains("must have 1 to 128"), "{error}");
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
        check(
            RewardModelConfig { dtype: RewardDtype::Bf16, ..golden("reward_model") },
            0.05 * (1.0 + spread),
        );
    }

    #[test]
    fn what_cannot_be_scored_is_told() {
        let model = host(&golden("reward_model"));
        let error = score(&model, "sort", &"1 ".repeat(100), true).unwrap_err();
        assert!(one_line(&error).contains("must have 1 to 128"), "{}", one_line(&error));
        for (name, expected) in [
            ("nowhere", "config.json"),
            (
                "tiny_model",
                "the architecture Qwen2ForCausalLM is not supported, only Qwen2ForSequenceClassification",
            ),
        ] {
            let failure = Model::open(&golden(name)).unwrap_err().to_string();
            assert!(failure.contains(expected), "{failure}");
        }
    }
}
