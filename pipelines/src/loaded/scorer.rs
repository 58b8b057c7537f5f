//! A reward model loaded from a folder on one device.

use std::path::Path;
use std::sync::Arc;

use anyroll_config::{Config, FolderConfig, ModelConfig};
use anyroll_data::{HfTokenizer, Record, Tokenizer, TokenizerError};
use anyroll_models::{Model as _, ValueModel, hf::ModelFolder, init::WeightSource};
use anyroll_reward::{Text, pack, scores_of};
use anyroll_strategy::Zero;

use super::{Options, place, strategy};
use crate::{
    Result,
    base_model::BaseModel,
    export::{Trained, open_checkpoint},
    train::{Place, hold},
};

/// A reward model for inference on one device.
#[derive(Debug)]
pub struct LoadedScorer {
    /// Tokenizer of its texts.
    pub reader: Arc<ScoredTexts>,
    zero: Zero<ValueModel>,
}

/// Tokenization of texts for a reward model.
#[derive(Debug)]
pub struct ScoredTexts {
    tokenizer: ScorerTokenizer,
    /// Maximum length of a text.
    longest: usize,
}

#[derive(Debug)]
enum ScorerTokenizer {
    /// The run's characters.
    Characters(Arc<Tokenizer>),
    /// A folder's tokenizer; with `chat`, texts are conversations in its template.
    Folder { tokenizer: Box<HfTokenizer>, chat: bool },
}

impl LoadedScorer {
    /// Texts of a forward pass, as many as by default in the reward `model`, so that scores are bitwise equal.
    pub const BATCH_SIZE: usize = 8;

    /// Returns true if the model folder `path` has a sequence classifier.
    pub(super) fn is_at(path: &Path) -> bool {
        let text = std::fs::read_to_string(path.join("config.json")).unwrap_or_default();
        let file: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let class = file["architectures"][0].as_str();
        class.is_some_and(|class| class.ends_with("ForSequenceClassification"))
    }

    /// Loads a sequence classifier with one label. It reads conversations if the folder has a chat template.
    pub(super) fn of_folder(path: &Path, options: &Options) -> Result<Self> {
        let folder = ModelFolder::open_scorer(path).map_err(anyroll_models::Error::from)?;
        let tokenizer = Box::new(HfTokenizer::open(path)?);
        let chat = tokenizer.has_chat_template();
        let tokenizer = ScorerTokenizer::Folder { tokenizer, chat };
        let longest = folder.decoder_config().max_position_embeddings as usize;
        let place = place(options)?;
        let model = ValueModel::new(folder.decoder_config().clone(), place.torch_device()?)?;
        Self::new(ScoredTexts { tokenizer, longest }, model, &folder, &place, options)
    }

    /// Loads the reward model of a run from the checkpoint `saved`. It reads texts as the run did.
    pub(super) fn of_run(config: &Config, base: &BaseModel, saved: &Path, options: &Options) -> Result<Self> {
        let tokenizer = match &config.model {
            ModelConfig::Folder(FolderConfig { path, chat, .. }) => {
                ScorerTokenizer::Folder { tokenizer: Box::new(HfTokenizer::open(path)?), chat: *chat }
            }
            _ => ScorerTokenizer::Characters(base.tokenizer.clone()),
        };
        let longest = base.config.max_position_embeddings as usize;
        let place = place(options)?;
        let model = ValueModel::new(base.config.clone(), place.torch_device()?)?;
        let weights = Trained { checkpoint: open_checkpoint(saved, model.units())?, base: &*base.weights };
        Self::new(ScoredTexts { tokenizer, longest }, model, &weights, &place, options)
    }

    fn new(
        reader: ScoredTexts,
        model: ValueModel,
        weights: &dyn WeightSource,
        place: &Place,
        options: &Options,
    ) -> Result<Self> {
        let strategy = strategy(options.device.precision(&*place.device));
        let zero = hold(Arc::new(model), &strategy, place, None, weights)?;
        Ok(Self { reader: Arc::new(reader), zero })
    }

    /// Scores of up to [`Self::BATCH_SIZE`] texts by [`ScoredTexts::encode`], in one forward pass.
    ///
    /// # Errors
    /// If the device fails.
    pub fn scores(&mut self, texts: &[Vec<i64>]) -> Result<Vec<f64>> {
        let texts: Vec<Text> = texts.iter().cloned().map(Text::whole).collect();
        let batch = pack(&texts, self.zero.torch_device())?;
        Ok(scores_of(&self.zero.score(&batch)?)?)
    }
}

impl ScoredTexts {
    /// Maximum length of a text.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Tokens of a record's prompt with a completion, and its end if it is `finished`.
    ///
    /// # Errors
    /// A character that the model lacks, or messages that its template refuses.
    pub fn encode(
        &self,
        record: &Record,
        completion: &str,
        finished: bool,
    ) -> std::result::Result<Vec<i64>, TokenizerError> {
        match &self.tokenizer {
            ScorerTokenizer::Folder { tokenizer, chat } => {
                tokenizer.encode_whole(record, completion, *chat, finished)
            }
            ScorerTokenizer::Characters(tokenizer) => {
                let (prompt, answer) = (record.prompt.clone(), completion.to_owned());
                let record = Record { prompt, answer, ..Record::default() };
                let mut tokens = tokenizer.encode_whole(&record)?;
                tokens.truncate(tokens.len() - usize::from(!finished));
                Ok(tokens)
            }
        }
    }

    /// Returns true if the record's prompt is in the model's chat template already.
    pub fn is_rendered(&self, record: &Record) -> bool {
        match &self.tokenizer {
            ScorerTokenizer::Folder { tokenizer, chat: true } => {
                record.messages.is_empty() && tokenizer.has_special_token(&record.prompt)
            }
            _ => false,
        }
    }

    /// Tokens of a whole text. If the model reads conversations, the text is one in its template.
    ///
    /// # Errors
    /// A character that the model lacks.
    pub fn encode_text(&self, text: &str, finished: bool) -> std::result::Result<Vec<i64>, TokenizerError> {
        match &self.tokenizer {
            ScorerTokenizer::Folder { tokenizer, chat: true } => tokenizer.encode(text, false),
            _ => self.encode(&Record::default(), text, finished),
        }
    }
}
