//! The `model` reward: a reward model from a folder, a sequence classifier with one label, or a process reward model,
//! a token classifier with two.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use anyroll_models::{
    Model as _, Output, PackedBatch, ParamSpec, Sequence, ValueHead, ValueModel, Weights, hf::ModelFolder,
    init::whole, targets_in,
};
use tch::{Device, Kind, Tensor};

use super::{Completion, Error, Failure, Reward, Takes};
use anyroll_config::error_chain::one_line;
use anyroll_config::{PerStep, RewardModelConfig};
use anyroll_data::{HfTokenizer, Record};

/// Name in metrics and errors.
pub(super) const NAME: &str = "model";

/// A reward model on the host.
#[derive(Debug)]
pub struct Model {
    reader: Reader,
    batch_size: NonZeroUsize,
    model: ValueModel,
    /// Complete weights, one list per unit. The lock makes batches run one at a time, each with all threads
    /// of the rank.
    weights: Mutex<Vec<Vec<Tensor>>>,
}

/// Tokenization of texts for a reward model, and their scores from the model's values.
#[derive(Debug)]
pub struct Reader {
    tokenizer: HfTokenizer,
    chat: bool,
    /// Maximum length of a text, in tokens.
    longest: usize,
    /// Steps of a process reward model; without them a text is scored at its end.
    steps: Option<Steps>,
}

/// Division of a completion into steps, and reduction of their probabilities.
#[derive(Debug)]
struct Steps {
    separator: String,
    per_step: PerStep,
}

/// A reward model whose folder was checked, except the weights' values.
#[derive(Debug)]
pub struct OpenModel {
    /// Folder of its weights.
    pub folder: ModelFolder,
    /// Tokenizer and limits of its inputs.
    pub reader: Reader,
}

/// A tokenized prompt with its completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    tokens: Vec<i64>,
    /// Numbers of tokens at which a value is read: all of them, or those up to the end of each step.
    ends: Vec<usize>,
}

/// Tokenized completions.
pub struct Texts<'a> {
    records: Vec<&'a Record>,
    /// The texts that the model reads.
    pub readable: Vec<Text>,
    /// For each text its score or problem, if the model does not read it.
    unread: Vec<Option<Result<f64, String>>>,
}

impl Model {
    /// Reads the weights of the folder that was `opened`.
    ///
    /// # Errors
    /// The part of the folder that cannot be used.
    pub fn new(config: &RewardModelConfig, opened: OpenModel) -> Result<Self, Failure> {
        let because = |error: anyroll_models::Error| one_line(&error);
        let model = opened.model(Device::Cpu).map_err(because)?;
        let OpenModel { folder, reader } = opened;
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
        let (path, is_of_steps) = (config.path.display(), folder.value_head() == Some(ValueHead::Classes));
        match config.per_step {
            None if is_of_steps => {
                let fix = "add `per_step: min` (or `mean`, `last`, `product`)";
                return Err(format!("{path} is a process reward model, which scores steps: {fix}").into());
            }
            Some(_) if !is_of_steps => {
                let fix = "leave `per_step` out, or name a token classifier with two labels";
                return Err(format!("{path} is a reward model of whole texts, not of steps: {fix}").into());
            }
            _ => {}
        }
        let tokenizer = HfTokenizer::open(&config.path).map_err(|error| one_line(&error))?;
        if config.chat && !tokenizer.has_chat_template() {
            return Err(format!("{path} has no chat template: set `chat: false`").into());
        }
        let longest = folder.decoder_config().max_position_embeddings as usize;
        let separator = config.separator().to_owned();
        let steps = config.per_step.map(|per_step| Steps { separator, per_step });
        let reader = Reader { tokenizer, chat: config.chat, longest, steps };
        Ok(OpenModel { folder, reader })
    }

    /// Scores each text.
    fn evaluate(&self, texts: &[Text]) -> anyroll_models::Result<Vec<f64>> {
        let weights = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scores = Vec::with_capacity(texts.len());
        for texts in texts.chunks(self.batch_size.get()) {
            let values = self.forward(&weights, &pack(texts, Device::Cpu)?)?;
            scores.extend(self.reader.scores(texts, &values)?);
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

impl OpenModel {
    /// Lays out the model on `device`.
    ///
    /// # Errors
    /// libtorch's error.
    pub fn model(&self, device: Device) -> anyroll_models::Result<ValueModel> {
        let head = self.folder.value_head().expect("a folder that was opened as a scorer");
        ValueModel::with_head(self.folder.decoder_config().clone(), head, device)
    }
}

impl Text {
    /// A text that is scored at its end. It has a token.
    pub fn whole(tokens: Vec<i64>) -> Self {
        let ends = vec![tokens.len()];
        Self { tokens, ends }
    }

    /// A text that any model reads.
    pub fn any() -> Self {
        Self::whole(vec![0])
    }
}

impl Reader {
    /// Tokenizes cases for the model.
    pub fn read<'a>(&self, cases: &[(&'a Record, Completion)]) -> Texts<'a> {
        let mut texts = Texts { records: Vec::new(), readable: Vec::new(), unread: Vec::new() };
        for (record, completion) in cases {
            texts.records.push(record);
            texts.unread.push(match (self.text(record, completion), &self.steps) {
                (Err(problem), _) => Some(Err(problem)),
                (Ok(Text { ends, .. }), Some(steps)) if ends.is_empty() => {
                    Some(Ok(steps.per_step.reduce(&[])))
                }
                (Ok(text), _) => {
                    texts.readable.push(text);
                    None
                }
            });
        }
        texts
    }

    /// Tokens of a prompt with its completion, and the end token if the completion has one; steps have none. An
    /// error means that the text is empty or too long.
    fn text(&self, record: &Record, completion: &Completion) -> Result<Text, String> {
        let Completion { text, finished, .. } = *completion;
        let read = match &self.steps {
            Some(Steps { separator, .. }) => {
                self.tokenizer.encode_in_steps(record, text, separator, self.chat)
            }
            None => {
                let tokens = self.tokenizer.encode_whole(record, text, self.chat, finished);
                tokens.map(|tokens| {
                    let end = tokens.len();
                    (tokens, vec![end])
                })
            }
        };
        let (tokens, ends) = read.map_err(|error| one_line(&error))?;
        let most = self.longest;
        match tokens.is_empty() || tokens.len() > most {
            true => Err(format!("the text has {} tokens, must have 1 to {most}", tokens.len())),
            false => Ok(Text { tokens, ends }),
        }
    }

    /// Scores of texts from the values of their batch: a value itself, or the reduced probabilities of steps.
    ///
    /// # Errors
    /// libtorch's error.
    pub fn scores(&self, texts: &[Text], values: &Tensor) -> anyroll_models::Result<Vec<f64>> {
        let values = scores_of(values)?;
        let Some(Steps { per_step, .. }) = &self.steps else { return Ok(values) };
        let probabilities: Vec<f64> = values.iter().map(|log_odds| 1.0 / (1.0 + (-log_odds).exp())).collect();
        let mut rest = &probabilities[..];
        let score = |text: &Text| {
            let (own, others) = rest.split_at(text.ends.len());
            rest = others;
            per_step.reduce(own)
        };
        Ok(texts.iter().map(score).collect())
    }
}

impl Texts<'_> {
    /// Results of all cases, given those of the readable texts.
    pub fn scored(self, scores: Vec<Result<f64, String>>) -> Vec<Result<f64, Error>> {
        let mut scores = scores.into_iter();
        let each = self.unread.into_iter().zip(self.records).map(|(unread, record)| {
            let score = unread.unwrap_or_else(|| scores.next().expect("one for each readable text"));
            score.and_then(finite).map_err(|why| Error::new(NAME, record, why))
        });
        each.collect()
    }
}

/// Values of a batch on the host.
///
/// # Errors
/// libtorch's error.
pub fn scores_of(values: &Tensor) -> anyroll_models::Result<Vec<f64>> {
    Ok(Vec::try_from(values.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?)?)
}

/// Packs texts into a batch, whose targets are at the ends.
///
/// # Errors
/// libtorch's error.
pub fn pack(texts: &[Text], device: Device) -> anyroll_models::Result<PackedBatch> {
    // The head's output at a position precedes its token, so the output at a token after the last one has
    // seen the whole text.
    let with_end: Vec<Vec<i64>> = texts.iter().map(|text| [&text.tokens[..], &[0]].concat()).collect();
    let sequence = |(tokens, text): (_, &Text)| Sequence { tokens, prompt_len: text.ends[0] };
    let tokens = with_end.iter().map(|tokens| &tokens[..]);
    let sequences: Vec<Sequence> = tokens.zip(texts).map(sequence).collect();
    let read: Vec<Vec<Range<usize>>> =
        texts.iter().map(|text| text.ends.iter().map(|&end| end..end + 1).collect()).collect();
    let kept = targets_in(sequences.iter().copied().zip(read.iter().map(|ends| &ends[..])));
    PackedBatch::new(&sequences, 1.0, device)?.keeping(&kept)
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
            per_step: None,
            step_separator: None,
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

    fn steps(per_step: PerStep) -> RewardModelConfig {
        RewardModelConfig { per_step: Some(per_step), chat: false, ..golden("prm") }
    }

    /// `tests/python/make_prm_golden.py` wrote the expected probabilities.
    #[test]
    fn steps_are_scored_as_by_transformers() {
        let file = golden("prm").path.join("steps.json");
        let file: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let numbers =
            |list: &serde_json::Value| -> Vec<f64> { serde_json::from_value(list.clone()).unwrap() };
        let by_hand = |per_step, probabilities: &[f64]| match per_step {
            PerStep::Min => probabilities.iter().fold(1.0, |least: f64, next| least.min(*next)),
            PerStep::Mean => probabilities.iter().sum::<f64>() / probabilities.len() as f64,
            PerStep::Last => probabilities[probabilities.len() - 1],
            PerStep::Product => probabilities.iter().fold(1.0, |product, next| product * next),
        };
        for per_step in [PerStep::Min, PerStep::Mean, PerStep::Last, PerStep::Product] {
            for (chat, name) in [(false, "probabilities"), (true, "chat")] {
                let model = host(&RewardModelConfig { chat, ..steps(per_step) });
                let (mut records, mut texts, mut expected) = (Vec::new(), Vec::new(), Vec::new());
                for case in file["records"].as_array().unwrap() {
                    let prompt = case["prompt"].as_str().unwrap().to_owned();
                    let parts = case["completions"].as_array().unwrap().iter().map(|it| it.as_str().unwrap());
                    let text = parts.collect::<Vec<_>>().join("\n");
                    // A separator at the end begins no step.
                    for text in [text.clone(), text + "\n"] {
                        records.push(Record { id: "1".into(), prompt: prompt.clone(), ..Record::default() });
                        texts.push(text);
                        expected.push(by_hand(per_step, &numbers(&case[name])));
                    }
                }
                let completion = |text| Completion { text, tokens: None, finished: false };
                let cases: Vec<_> = records.iter().zip(texts.iter().map(|text| completion(text))).collect();
                let found = model.score_many(&cases);
                for ((found, expected), text) in found.into_iter().zip(&expected).zip(&texts) {
                    let found = found.unwrap();
                    assert!(
                        (found - expected).abs() < 1e-5,
                        "{per_step:?} {text:?}: {found}, not {expected}"
                    );
                }
                assert_eq!(texts.len(), 8);
            }
        }
    }

    #[test]
    fn a_completion_without_steps_has_the_lowest_score() {
        let min = host(&steps(PerStep::Min));
        for (text, ends) in [("", 0), (" \n\n", 0), ("one", 1), ("one\n\ntwo", 2)] {
            let record = Record { id: "1".into(), prompt: "sort".into(), ..Record::default() };
            let completion = Completion { text, tokens: None, finished: true };
            let found = min.score(&record, &completion).unwrap();
            assert_eq!(found == 0.0, ends == 0, "{text:?}: {found}");
            assert_eq!(min.reader.text(&record, &completion).unwrap().ends.len(), ends, "{text:?}");
        }
        let divided = RewardModelConfig { step_separator: Some("##".into()), ..steps(PerStep::Mean) };
        let read = |config: &RewardModelConfig| {
            let record = Record { id: "1".into(), prompt: "sort".into(), ..Record::default() };
            let completion = Completion { text: "a##b\nc", tokens: None, finished: true };
            host(config).reader.text(&record, &completion).unwrap().ends.len()
        };
        assert_eq!((read(&divided), read(&steps(PerStep::Mean))), (2, 2));
        let error = score(&min, "sort", &"1\n".repeat(100), true).unwrap_err();
        assert!(one_line(&error).contains("must have 1 to 128"), "{}", one_line(&error));
    }

    #[test]
    fn steps_and_texts_need_models_of_their_own() {
        let of_texts = Model::open(&golden("prm")).unwrap_err().to_string();
        assert!(
            of_texts.contains("prm is a process reward model") && of_texts.contains("add `per_step: min`")
        );
        let config = RewardModelConfig { per_step: Some(PerStep::Last), ..golden("reward_model") };
        let of_steps = Model::open(&config).unwrap_err().to_string();
        assert!(
            of_steps.contains("reward model of whole texts") && of_steps.contains("leave `per_step` out")
        );
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
            ("nowhere", "there is no folder"),
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
