//! `roles.reference`: the frozen model of the KL term, a copy of the policy or a published model such as a teacher.

use anyroll_config::error_chain::one_line;
use anyroll_config::{Advantage, AlgorithmConfig, Config, PipelineConfig, Section};
use anyroll_data::{CharTokenizer, Dataset, HfTokenizer, Tokenizer};
use anyroll_models::hf::ModelFolder;

use super::texts::{Policy, open_folder};

const FIELD: &str = "roles.reference.path";

/// Opens the published reference: `Some(None)` if there is none, and `None` with a problem if it cannot be used. The
/// reference must score the tokens that the policy `own` reads and writes, at most `longest` of them. Unknown
/// properties of the policy are not compared.
pub(super) fn open(
    config: &Config,
    own: Option<(&Policy, &Dataset)>,
    longest: Option<usize>,
    at: &Section,
    reads_weights: bool,
) -> Option<Option<ModelFolder>> {
    let Some(path) = &config.roles.reference.path else {
        check_taught(config, at);
        return Some(None);
    };
    if !at.is_sound(FIELD) {
        return None;
    }
    let help =
        "give the folder of a model as Hugging Face publishes it; `anyroll export` writes one of a run";
    let folder = at.take(open_folder(path, reads_weights), FIELD, |error| one_line(error), help)?;
    let help = "give a model of the policy's family, which has the same tokenizer";
    let theirs = at.take(HfTokenizer::open(path), FIELD, |error| one_line(error), help)?;
    let (policy, dataset) = own?;
    let made;
    let own = match policy.tokenizer() {
        Some(tokenizer) => tokenizer,
        None => {
            made = Tokenizer::Characters(CharTokenizer::new(&dataset.characters()));
            &made
        }
    };
    if let Some((text, token)) = own.vocabulary().find(|(text, token)| theirs.token(text) != Some(*token)) {
        let there = theirs.token(&text).map_or("does not have".to_owned(), |it| format!("calls {it}"));
        let message = format!("it reads other tokens: the policy's {token}, {text:?}, it {there}");
        at.refuse(FIELD, message, help);
        return None;
    }
    let model = folder.decoder_config();
    let (most, why, longest) = (model.max_position_embeddings, model.why_no_longer(), longest?);
    let fits = at.ensure(
        longest as i64 <= most,
        FIELD,
        format!("it has room for {most} tokens{why}, and the policy's sequences have up to {longest}"),
        "give one with more room, or allow fewer tokens",
    );
    fits.then_some(Some(folder))
}

/// Reports a policy that learns only from a reference equal to itself: without advantages or a teacher it would not
/// change.
fn check_taught(config: &Config, at: &Section) {
    let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { return };
    let AlgorithmConfig { advantage, entropy_coef, .. } = rlvr.algorithm;
    let given = ["pipeline.rlvr.algorithm.advantage", "pipeline.rlvr.algorithm.entropy_coef"];
    at.given(&given).ensure(
        advantage != Advantage::None || entropy_coef > 0.0,
        FIELD,
        "it is missing, and with `advantage: none` the model there is all that there is to learn from",
        "name the folder of a teacher: `roles: {reference: {path: DIR}}`; or write another advantage",
    );
}
