//! The adapters of a language model.

use std::fmt::Debug;

use anyroll_config::error_chain::one_line;
use anyroll_config::{LoraConfig, Section, list};
use anyroll_models::hf::{AdapterFolder, ModelFolder};
use anyroll_models::{DecoderConfig, LoraTarget, ModulePattern};

/// Adapters that fit a model.
pub(super) struct Adapters {
    pub(super) shape: anyroll_models::LoraConfig,
    /// Folder of the initial values; `None` for new adapters.
    pub(super) folder: Option<AdapterFolder>,
}

/// Opens the adapters of the model in `folder`; `None` and a problem if they do not fit. `at` is the adapters'
/// section.
pub(super) fn open(lora: &LoraConfig, folder: &ModelFolder, at: &Section) -> Option<Adapters> {
    let model = folder.decoder_config();
    let names: Vec<&str> = LoraTarget::all_of(model).iter().map(|target| target.name()).collect();
    let help = format!("write names, or patterns of the end of one; in a layer there is {}", list(&names));
    at.ensure(!lora.targets.is_empty(), "targets", "the list is empty", help.clone());
    check_layers(lora, model.num_hidden_layers, at);
    for (field, is_set) in [("dora", lora.dora), ("dropout", lora.dropout > 0.0)] {
        let message = "libtorch differentiates this model's layers, which have plain adapters only";
        at.ensure(model.expressed.is_none() || !is_set, field, message, "leave it out");
    }
    let of_shape = ["rank", "targets", "layers", "rank_pattern", "alpha_pattern"];
    if !of_shape.iter().all(|field| at.is_sound(field)) {
        return None;
    }
    let shape = match lora.shape(model) {
        Ok(shape) => shape,
        Err((field, entry)) => {
            at.refuse(field, format!("`{entry}` names no matrix of a layer"), help);
            return None;
        }
    };
    check_experts(&shape, folder, at);
    check_patterns(&shape, model, at);
    let Some(path) = &lora.path else { return Some(Adapters { shape, folder: None }) };
    let help = "give the folder of an adapter for this model, as PEFT saves it";
    let opened = AdapterFolder::open(path, model);
    let adapter = at.take(opened, "path", |error| one_line(error), help)?;
    // Dropout belongs to training, and the file has the value of the training that wrote it.
    let found = anyroll_models::LoraConfig { dropout: shape.dropout, ..adapter.lora_config().clone() };
    at.ensure(
        found == shape,
        "path",
        "the adapter there has another shape",
        format!("write its own: {}", fields_of(&found, model)),
    );
    Some(Adapters { shape, folder: Some(adapter) })
}

/// Reports options that adapters of experts do not have.
fn check_experts(shape: &anyroll_models::LoraConfig, folder: &ModelFolder, at: &Section) {
    let Some(module) = shape.targets.first_of_experts(folder.decoder_config()) else { return };
    for (field, is_set) in [("dora", shape.dora), ("dropout", shape.dropout > 0.0)] {
        let message = format!("`targets` has {module}, and adapters of experts are plain ones");
        let help = "leave it out, or write matrices of attention: [q_proj, k_proj, v_proj, o_proj]";
        at.ensure(!is_set, field, message, help);
    }
    if let Some([one, other]) = shape.unequal_experts(folder.decoder_config()) {
        let field = if shape.rank_pattern.is_empty() { "alpha_pattern" } else { "rank_pattern" };
        let message = format!("a pattern tells `{one}` from `{other}`, and all experts have one shape");
        at.refuse(field, message, "write patterns of all experts, such as `up_proj`");
    }
}

/// Reports layers with adapters that the model does not have.
fn check_layers(lora: &LoraConfig, layers: usize, at: &Section) {
    let Some(chosen) = &lora.layers else { return };
    let unknown = chosen.iter().find(|&&layer| layer >= layers);
    let message = match unknown {
        Some(layer) => format!("there is no layer {layer}"),
        None => "the list is empty".to_owned(),
    };
    let help = format!("write some of 0 to {}, or leave it out for all", layers - 1);
    at.ensure(!chosen.is_empty() && unknown.is_none(), "layers", message, help);
}

/// Reports a pattern that matches no matrix with an adapter.
fn check_patterns(shape: &anyroll_models::LoraConfig, model: &DecoderConfig, at: &Section) {
    let modules = shape.modules(model);
    let ranks = shape.rank_pattern.iter().map(|(pattern, _)| ("rank_pattern", pattern));
    let alphas = shape.alpha_pattern.iter().map(|(pattern, _)| ("alpha_pattern", pattern));
    for (field, pattern) in ranks.chain(alphas) {
        at.ensure(
            modules.iter().any(|module| pattern.matches(module)),
            field,
            format!("`{}` matches no matrix that has an adapter", pattern.as_str()),
            format!("write a pattern of the end of a name, such as {}", modules[0]),
        );
    }
}

/// The shape of an adapter as YAML fields.
fn fields_of(lora: &anyroll_models::LoraConfig, model: &DecoderConfig) -> String {
    let anyroll_models::LoraConfig { rank, alpha, rank_pattern, alpha_pattern, .. } = lora;
    let (targets, layers) = lora.targets.names(model);
    let mut fields = format!("rank: {rank}, alpha: {alpha:?}, targets: [{}]", targets.join(", "));
    for (field, is_set) in [("rslora", lora.rslora), ("dora", lora.dora)] {
        if is_set {
            fields += &format!(", {field}: true");
        }
    }
    if let Some(layers) = layers {
        fields += &format!(", layers: {layers:?}");
    }
    fields + &entries("rank_pattern", rank_pattern) + &entries("alpha_pattern", alpha_pattern)
}

/// Patterns as a YAML field that follows other fields.
fn entries<T: Debug>(field: &str, patterns: &[(ModulePattern, T)]) -> String {
    if patterns.is_empty() {
        return String::new();
    }
    let entries: Vec<String> =
        patterns.iter().map(|(pattern, value)| format!("'{}': {value:?}", pattern.as_str())).collect();
    format!(", {field}: {{{}}}", entries.join(", "))
}
