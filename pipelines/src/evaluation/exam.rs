//! [`Exam`]: the records, the reward and the sampling of an evaluation, and taking it.

use std::{num::NonZeroUsize, path::Path, sync::Arc};

use anyroll_config::{EvaluationConfig, PipelineConfig, RewardConfig, RlvrConfig, ScoringConfig};
use anyroll_data::{Dataset, Reading, Record};
use anyroll_reward::{OpenModel, RewardSum, Scorer, StartError};

use super::{Completion, Prompt};
use crate::{
    Error, Result,
    inference::Sampling,
    loaded::LoadedModel,
    prepare::{Draft, read_evaluate},
    rlvr::{Answering, Answers, Asking, Engine, Grader, Measured},
    run_dir::RunDir,
    train::Exchange,
};

/// Default limit of a completion.
const NEW_TOKENS: usize = 256;

/// Wishes of the caller; `None` is the value of the evaluated run, or a default.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// `data` and `reward` in YAML, as in a pipeline, and `temperature` and `top_p`; fields may be missing.
    pub inputs: String,
    /// Number of prompts.
    pub prompts: Option<usize>,
    /// Completions of each prompt, in addition to the greedy one.
    pub samples: Option<usize>,
    /// Most tokens of a completion.
    pub max_new_tokens: Option<usize>,
    /// Texts that end a completion; empty for none but the run's.
    pub stop: Vec<String>,
    /// Seed.
    pub seed: Option<u64>,
    /// Completions that are scored at a time.
    pub workers: Option<usize>,
}

/// Capacity of the engine.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Sequences in flight.
    pub sequences: usize,
    /// Fraction of the device's free memory that the KV cache may take.
    pub memory: f64,
}

/// An evaluation that can be taken.
pub struct Exam {
    /// The prompts, with their answers.
    pub records: Vec<Arc<Record>>,
    /// Completions of each prompt, in addition to the greedy one.
    pub samples: usize,
    /// Sampling parameters of these.
    pub how: Sampling,
    /// Most tokens of a completion; `None` for the default, or as many as fit.
    pub max_new_tokens: Option<usize>,
    /// Seed.
    pub seed: u64,
    /// Texts that end a completion.
    pub stop: Vec<String>,
    sum: Arc<RewardSum>,
    workers: NonZeroUsize,
}

/// Inputs of the evaluation of a run of `rlvr`.
struct OfRun {
    rlvr: RlvrConfig,
    seed: u64,
    dataset: Dataset,
    models: Vec<OpenModel>,
}

impl Exam {
    /// Prepares the evaluation of the model at `path`. What `asked` leaves out is that of the run at `path`.
    ///
    /// # Errors
    /// Inputs that cannot be read or used, or that are missing where `path` is no run.
    pub fn prepare(path: &Path, asked: &Asked) -> Result<Self> {
        let (inputs, opened) = read_evaluate(&asked.inputs)?;
        let run = of_run(path)?;
        if let Some(run) = &run
            && run.rlvr.rollout.environment.is_some()
        {
            return Err(refused(
                "the model",
                "its run has an environment: evaluate it in a run with `steps: 0`",
            ));
        }
        let missing = |option, example: &str| {
            refused(
                option,
                &format!("pass it, as in `{option} {example}`: {} is no run of `rlvr`", path.display()),
            )
        };
        let (dataset, asked_prompts) = match (&inputs.data, &run) {
            (Some(data), _) => {
                let reading = Reading { tokens: &|_, _| Ok(0), holds_out: true, step_separator: "" };
                (Dataset::to_evaluate(data, reading)?, asked.prompts)
            }
            (None, Some(run)) => (run.dataset.clone(), asked.prompts.or(run.rlvr.evaluation.prompts)),
            (None, None) => return Err(missing("--data", "test.jsonl")),
        };
        let count = asked_prompts.unwrap_or_else(|| dataset.most_held_out(dataset.examples().len()));
        let records: Vec<Arc<Record>> = dataset.held_out(count)?.into_iter().map(Arc::new).collect();
        let own = run.as_ref().map(|run| &run.rlvr);
        let of_run = own.filter(|_| inputs.data.is_none()).map(|rlvr| &rlvr.evaluation);
        let EvaluationConfig { samples, temperature, top_p, max_new_tokens, .. } =
            of_run.cloned().unwrap_or_default();
        let max_new_tokens = match of_run.zip(own) {
            Some((evaluation, rlvr)) => Some(evaluation.max_new_tokens(rlvr.rollout.max_new_tokens)),
            None => max_new_tokens,
        };
        let mut stop = own.map_or_else(Vec::new, |rlvr| rlvr.rollout.stop.clone());
        stop.extend(asked.stop.iter().cloned());
        let scoring = own.map_or_else(ScoringConfig::default, |rlvr| rlvr.scoring);
        let seed = asked.seed.or(run.as_ref().map(|run| run.seed)).unwrap_or(0);
        let sum = match (inputs.reward, run) {
            (Some(reward), _) => sum(&reward, opened)?,
            (None, Some(run)) => sum(&run.rlvr.reward, run.models)?,
            (None, None) => return Err(missing("--reward", "math")),
        };
        let how = Sampling {
            temperature: inputs.temperature.unwrap_or(temperature),
            top_p: inputs.top_p.unwrap_or(top_p),
            ..Sampling::FREE
        };
        check_domains(&sum, &records)?;
        let workers = NonZeroUsize::new(asked.workers.unwrap_or(scoring.workers)).expect("a checked number");
        Ok(Self {
            records,
            samples: asked.samples.unwrap_or(samples),
            how,
            max_new_tokens: asked.max_new_tokens.or(max_new_tokens),
            seed,
            stop,
            sum: Arc::new(sum),
            workers,
        })
    }

    /// Names of the reward's terms.
    pub fn terms(&self) -> Vec<String> {
        self.sum.names().map(str::to_owned).collect()
    }

    /// Number of completions.
    pub fn completions(&self) -> usize {
        self.records.len() * (1 + self.samples)
    }

    /// Most tokens of a completion of `model`: the asked ones, or as many of the default as fit.
    ///
    /// # Errors
    /// A prompt that leaves no space.
    pub fn tokens_of(&self, model: &LoadedModel) -> Result<usize> {
        let (mut longest, mut of) = (0, "");
        for record in &self.records {
            let tokens = model.tokenizer.encode_prompt(record)?.len();
            if tokens == 0 {
                return Err(refused("--data", &format!("the prompt of {} has no tokens", record.id)));
            }
            if tokens > longest {
                (longest, of) = (tokens, &record.id);
            }
        }
        let room = model.max_length().saturating_sub(longest);
        let wanted = self.max_new_tokens.unwrap_or(NEW_TOKENS.min(room.max(1)));
        if wanted > room {
            let (most, why) = (model.max_length(), model.why_no_longer());
            let problem = format!(
                "the prompt of {of} has {longest} tokens, and with {wanted} new ones more than the model's {most}{why}"
            );
            return Err(refused("--max-new-tokens", &problem));
        }
        Ok(wanted)
    }

    /// Answers and scores all prompts with `model`. `progress` is called with the number of completions that have just
    /// ended.
    pub fn take(
        &self,
        model: &mut LoadedModel,
        place: Place,
        progress: &dyn Fn(usize),
    ) -> Result<Vec<Prompt>> {
        let max_new_tokens = self.tokens_of(model)?;
        let sampler = model.sampler(place.sequences, place.memory, &self.stop);
        let engine =
            Engine { sampler, environment: None, merged: None, in_eight_bits: false, together: None };
        let exchange = Exchange::new(model.group())?;
        let weights = model.weights()?;
        let mut grader = Grader {
            sum: self.sum.clone(),
            scorer: Scorer::start(self.sum.clone(), self.workers).map_err(Error::Thread)?,
            models: Vec::new(),
            tokenizer: model.tokenizer.clone(),
            stop: Arc::default(),
        };
        let mut answering = Answering {
            engine: &engine,
            weights: &weights,
            grader: &mut grader,
            exchange: &exchange,
            version: model.version(),
            progress,
        };
        let asking = Asking { samples: self.samples, how: self.how, max_new_tokens, seed: self.seed };
        let answers = answering.answers(&self.records, 0, &asking)?;
        Ok(self.prompts(&answers, &grader))
    }

    fn prompts(&self, answers: &Answers, grader: &Grader) -> Vec<Prompt> {
        let completion = |record: &Arc<Record>, of: &Measured, at: usize| {
            let case = grader.case(record, &of.samples[at]);
            let extracted = grader.sum.extracted(&case);
            let score = of.scores[at].clone();
            Completion { text: case.text, tokens: case.tokens, finished: case.finished, score, extracted }
        };
        let prompt = |(index, record): (usize, &Arc<Record>)| Prompt {
            record: record.clone(),
            greedy: completion(record, &answers.greedy, index),
            samples: (index * self.samples..(index + 1) * self.samples)
                .map(|at| completion(record, &answers.drawn, at))
                .collect(),
            verdicts: answers.verdicts(index, record, self.samples, grader),
        };
        self.records.iter().enumerate().map(prompt).collect()
    }
}

/// The run of `rlvr` at `path`, or above it; `None` if it is another folder.
fn of_run(path: &Path) -> Result<Option<OfRun>> {
    let (run, _) = RunDir::and_checkpoint(path);
    let Ok(dir) = RunDir::open(&run) else { return Ok(None) };
    let (config, opened) = Draft::read(&dir.resolved(), &[])?.open()?;
    let (PipelineConfig::Rlvr(rlvr), Some(texts)) = (config.pipeline, opened.into_texts()) else {
        return Ok(None);
    };
    Ok(Some(OfRun { rlvr: *rlvr, seed: config.seed, dataset: texts.dataset, models: texts.reward_models }))
}

/// The rewards of `config`, with its `models` on the host.
fn sum(config: &RewardConfig, models: Vec<OpenModel>) -> Result<RewardSum> {
    let started = RewardSum::new(config, models.into_iter().map(Some).collect());
    let started = started.map_err(|StartError { name, failure }| StartError {
        name: name.replace("pipeline.rlvr.reward", "--reward"),
        failure,
    });
    Ok(started?)
}

/// Refuses records without a reward.
fn check_domains(sum: &RewardSum, records: &[Arc<Record>]) -> Result<()> {
    match records.iter().find(|record| !sum.scores(&record.domain)) {
        None => Ok(()),
        Some(record) => {
            let problem = format!(
                "no term is for the records of the domain `{}`, such as {}",
                record.domain, record.id
            );
            Err(refused("--reward", &problem))
        }
    }
}

fn refused(what: &'static str, problem: &str) -> Error {
    anyroll_models::Error::Input { what, problem: problem.to_owned() }.into()
}
