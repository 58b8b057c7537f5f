//! Choice of the matrices that have an adapter.

use std::collections::BTreeMap;

use super::super::expressed::ExpressedBlock;
use super::super::{DecoderConfig, ExpertNames};
use crate::Result;
use crate::error::check_config;

/// A matrix of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraTarget {
    /// Projection to queries.
    Q,
    /// Projection to keys.
    K,
    /// Projection to values.
    V,
    /// Fused projection to queries, keys and values, if files have one tensor for them.
    Qkv,
    /// Projection of attention's output.
    O,
    /// The MLP's gate.
    Gate,
    /// The MLP's up projection.
    Up,
    /// Fused gate and up projection, if files have one tensor for them.
    GateUp,
    /// The MLP's down projection.
    Down,
    /// A matrix of a layer that libtorch differentiates, by its name in the layer.
    Named(&'static str),
}

impl LoraTarget {
    /// All matrices of a layer whose files are not fused.
    pub const ALL: [LoraTarget; 7] = [
        LoraTarget::Q,
        LoraTarget::K,
        LoraTarget::V,
        LoraTarget::O,
        LoraTarget::Gate,
        LoraTarget::Up,
        LoraTarget::Down,
    ];
    /// All matrices of a layer whose files are fused ([`DecoderConfig::fused_projections`]).
    pub const FUSED: [LoraTarget; 4] = [LoraTarget::Qkv, LoraTarget::O, LoraTarget::GateUp, LoraTarget::Down];

    /// Returns all matrices of a layer of this model.
    pub fn of_layer(config: &DecoderConfig, layer: usize) -> Vec<LoraTarget> {
        match &config.expressed {
            Some(of) => {
                ExpressedBlock::layout(config, of, layer).1.modules().map(LoraTarget::Named).collect()
            }
            None if config.fused_projections && config.experts_of(layer).is_some() => {
                vec![LoraTarget::Qkv, LoraTarget::O]
            }
            None if config.fused_projections => LoraTarget::FUSED.to_vec(),
            None => LoraTarget::ALL.to_vec(),
        }
    }

    /// Returns the matrices that some layer of this model has.
    pub fn all_of(config: &DecoderConfig) -> Vec<LoraTarget> {
        let mut all = Vec::new();
        for target in (0..config.num_hidden_layers).flat_map(|layer| LoraTarget::of_layer(config, layer)) {
            if !all.contains(&target) {
                all.push(target);
            }
        }
        all
    }

    /// Returns the matrices that only models of another kind have.
    pub(crate) fn foreign_to(config: &DecoderConfig) -> impl Iterator<Item = LoraTarget> {
        let own: Vec<&str> = LoraTarget::all_of(config).into_iter().map(LoraTarget::name).collect();
        let all = LoraTarget::ALL.into_iter().chain(LoraTarget::FUSED);
        all.filter(move |target| !own.contains(&target.name()))
    }

    /// Returns the name in a layer, such as `self_attn.q_proj`.
    pub fn name(self) -> &'static str {
        match self {
            LoraTarget::Q => "self_attn.q_proj",
            LoraTarget::K => "self_attn.k_proj",
            LoraTarget::V => "self_attn.v_proj",
            LoraTarget::Qkv => "self_attn.qkv_proj",
            LoraTarget::O => "self_attn.o_proj",
            LoraTarget::Gate => "mlp.gate_proj",
            LoraTarget::Up => "mlp.up_proj",
            LoraTarget::GateUp => "mlp.gate_up_proj",
            LoraTarget::Down => "mlp.down_proj",
            LoraTarget::Named(name) => name,
        }
    }

    /// Returns true if each expert of this layer has such a matrix.
    pub fn is_of_experts(self, config: &DecoderConfig, layer: usize) -> bool {
        let experts = config.experts_of(layer).filter(|_| config.expressed.is_none());
        experts.is_some_and(|experts| self.in_expert(experts.names).is_some())
    }

    /// Returns the name in the model, such as `model.layers.0.self_attn.q_proj`: of an expert's matrix without the expert.
    pub fn module(self, layer: usize) -> String {
        format!("model.layers.{layer}.{}", self.name())
    }

    /// Returns the names of the matrices in files: of one, or of each expert's.
    pub fn modules_in(self, config: &DecoderConfig, layer: usize) -> Vec<String> {
        let experts = config.experts_of(layer).filter(|_| self.is_of_experts(config, layer));
        let Some(experts) = experts else { return vec![self.module(layer)] };
        let mixture = experts.names.modules().0;
        let which = self.in_expert(experts.names).expect("it is of experts");
        let of_expert = |expert: i64| format!("model.layers.{layer}.{mixture}.experts.{expert}.{which}");
        (0..experts.num_experts).map(of_expert).collect()
    }

    /// Returns true if `name`, a matrix in a layer's files such as `mlp.experts.3.up_proj`, is this one or that of an expert.
    pub(crate) fn is_named(self, name: &str) -> bool {
        let of_expert = |names: ExpertNames| {
            let expert = name.strip_prefix(names.modules().0).and_then(|rest| rest.strip_prefix(".experts."));
            let matrix = expert.and_then(|rest| rest.split_once('.')).map(|(_, matrix)| matrix);
            matrix.is_some() && matrix == self.in_expert(names)
        };
        name == self.name() || [ExpertNames::Usual, ExpertNames::Mixtral].into_iter().any(of_expert)
    }

    /// Returns the name of the matrix in an expert; `None` for one that experts do not have.
    fn in_expert(self, names: ExpertNames) -> Option<&'static str> {
        let [gate, up, down] = names.modules().1;
        match self {
            LoraTarget::Gate => Some(gate),
            LoraTarget::Up => Some(up),
            LoraTarget::Down => Some(down),
            _ => None,
        }
    }
}

/// The matrices with an adapter, which may differ between layers.
#[derive(Clone, Debug, PartialEq)]
pub enum LoraTargets {
    /// The same matrices in every layer: at least one, each once.
    Everywhere(Vec<LoraTarget>),
    /// Matrices by layer index, at least one for each; other layers have none.
    ByLayer(BTreeMap<usize, Vec<LoraTarget>>),
}

impl LoraTargets {
    /// Creates targets from the matrices of each layer, which may be empty. Equal choices compare as equal.
    pub fn of_layers(layers: Vec<Vec<LoraTarget>>) -> LoraTargets {
        match layers.split_first() {
            Some((first, others)) if !first.is_empty() && others.iter().all(|it| it == first) => {
                LoraTargets::Everywhere(first.clone())
            }
            _ => {
                let numbered = layers.into_iter().enumerate();
                LoraTargets::ByLayer(numbered.filter(|(_, targets)| !targets.is_empty()).collect())
            }
        }
    }

    /// Returns the matrices of a layer, in the order of their parameters.
    pub fn of(&self, layer: usize) -> &[LoraTarget] {
        match self {
            LoraTargets::Everywhere(targets) => targets,
            LoraTargets::ByLayer(layers) => layers.get(&layer).map_or(&[], Vec::as_slice),
        }
    }

    /// Returns the name of the first target that is of a layer's experts, if any.
    pub fn first_of_experts(&self, config: &DecoderConfig) -> Option<String> {
        (0..config.num_hidden_layers)
            .flat_map(|layer| self.of(layer).iter().map(move |target| (layer, target)))
            .find(|(layer, target)| target.is_of_experts(config, *layer))
            .map(|(layer, target)| target.modules_in(config, layer).swap_remove(0))
    }

    /// Returns the name of the first target that this model does not have, if any: part of a fused tensor, or
    /// a fusion of separate ones. Adapters apply to tensors in files, like PEFT's.
    pub fn first_foreign(&self, config: &DecoderConfig) -> Option<String> {
        (0..config.num_hidden_layers).find_map(|layer| {
            let own = LoraTarget::of_layer(config, layer);
            let foreign = self.of(layer).iter().find(|target| !own.contains(target))?;
            Some(foreign.module(layer))
        })
    }

    /// Returns the names as PEFT's files and ours have them: matrices such as `q_proj`, and the layers if not
    /// all. If layers differ, full names such as `model.layers.0.self_attn.q_proj`.
    pub fn names(&self, config: &DecoderConfig) -> (Vec<String>, Option<Vec<usize>>) {
        let names = config.experts.as_ref().map_or(ExpertNames::Usual, |experts| experts.names);
        let end = |target: &LoraTarget| match target {
            // A shared expert's matrix has the same end as those of the experts beside it.
            LoraTarget::Named(name) => *name,
            written => written
                .in_expert(names)
                .unwrap_or_else(|| written.name().rsplit('.').next().unwrap_or_default()),
        };
        let of_all =
            |targets: &Vec<LoraTarget>| targets.iter().map(|target| end(target).to_owned()).collect();
        match self {
            LoraTargets::Everywhere(targets) => (of_all(targets), None),
            LoraTargets::ByLayer(layers) => {
                let mut lists = layers.values();
                let first = lists.next();
                match first.filter(|first| lists.all(|it| it == *first)) {
                    Some(targets) => (of_all(targets), Some(layers.keys().copied().collect())),
                    None => {
                        let of_layer = |(&layer, targets): (&usize, &Vec<LoraTarget>)| {
                            let modules = targets.iter().map(|target| target.modules_in(config, layer));
                            modules.flatten().collect::<Vec<_>>()
                        };
                        (layers.iter().flat_map(of_layer).collect(), None)
                    }
                }
            }
        }
    }

    /// Checks that a model of this shape can have these adapters.
    pub(super) fn validate(&self, config: &DecoderConfig) -> Result<()> {
        let is_empty = match self {
            LoraTargets::Everywhere(targets) => targets.is_empty(),
            LoraTargets::ByLayer(layers) => layers.is_empty() || layers.values().any(Vec::is_empty),
        };
        check_config(!is_empty, "lora.targets", || "is empty, must name a matrix".to_owned())?;
        let foreign = self.first_foreign(config);
        check_config(foreign.is_none(), "lora.targets", || {
            let names: Vec<_> = LoraTarget::all_of(config).iter().map(|target| target.name()).collect();
            let module = foreign.unwrap_or_default();
            format!("has `{module}`, which this model does not have: choose from {}", names.join(", "))
        })?;
        let layers = config.num_hidden_layers;
        let LoraTargets::ByLayer(of) = self else { return Ok(()) };
        let last = of.keys().max().copied().unwrap_or(0);
        check_config(last < layers, "lora.targets", || {
            format!("has layer {last}, but the model has layers 0 to {}", layers - 1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_a_shared_expert_from_those_beside_it() {
        let targets = vec![LoraTarget::Named("mlp.shared_experts.up_proj"), LoraTarget::O];
        let names = ["mlp.shared_experts.up_proj", "o_proj"].map(str::to_owned).to_vec();
        let config = DecoderConfig::plain(1, 8, 2);
        assert_eq!(LoraTargets::Everywhere(targets).names(&config), (names, None));
    }
}
