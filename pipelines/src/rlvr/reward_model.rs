//! A reward model sharded over the ranks, or replicated on their devices.

use std::sync::Arc;

use anyroll_models::ValueModel;
use anyroll_strategy::{State, Zero};
use tch::Tensor;

use anyroll_data::Record;
use anyroll_reward::{Completion, Error as RewardError, JointModel, OpenModel, Reader, Text, pack};

use crate::{
    Error, Result,
    launch::Rank,
    run::{Role, Run},
    train::{Exchange, Place, hold, offloaded},
};

/// A reward model on the devices of a [`Place`]. All ranks score with it together, and its weights are loaded
/// for that time only if they are offloaded.
#[derive(Debug)]
pub struct ShardedModel {
    reader: Reader,
    model: Zero<ValueModel>,
    /// Texts that a rank scores in a batch.
    batch_size: usize,
    /// States that are on the device only during scoring.
    offloaded: Vec<State>,
    exchange: Exchange,
}

/// Divides the `opened` models of a reward, in the order of its terms, by their `roles`: the models that the ranks hold
/// together, and the models on the host, with `None` in place of each of the former.
pub fn divide(opened: Vec<OpenModel>, roles: &[Option<Role>]) -> (Vec<OpenModel>, Vec<Option<OpenModel>>) {
    let (mut held, mut on_host) = (Vec::new(), Vec::new());
    for (model, role) in opened.into_iter().zip(roles) {
        match role {
            Some(_) => {
                held.push(model);
                on_host.push(None);
            }
            None => on_host.push(Some(model)),
        }
    }
    (held, on_host)
}

impl ShardedModel {
    /// The models that the ranks of `run` hold, in the order of the reward's terms; the policy is at `place`. Every rank
    /// must call this.
    pub fn all(held: Vec<OpenModel>, run: &Run, place: &Place, rank: &Rank) -> Result<Vec<Self>> {
        let held = held.into_iter().zip(run.reward_models.iter().flatten());
        let model = |(opened, role)| Self::new(opened, role, &place.beside("reward model", role, run, rank)?);
        held.map(model).collect()
    }

    /// Loads an `opened` model on `place` under the strategy of `role`; each rank reads its part of the weights. Every
    /// rank must call this.
    ///
    /// # Errors
    /// If the device fails, or weights cannot be read.
    pub fn new(opened: OpenModel, role: &Role, place: &Place) -> Result<Self> {
        let model = opened.model(place.torch_device()?)?;
        let OpenModel { folder, reader } = opened;
        let mut model = hold(Arc::new(model), &role.strategy, place, None, &folder)?;
        let offloaded = offloaded(&role.strategy);
        model.offload_states(&offloaded)?;
        let exchange = Exchange::new(model.group())?;
        Ok(Self { reader, model, batch_size: role.strategy.micro_batch_size, offloaded, exchange })
    }

    fn forward(&mut self, texts: &[Text]) -> Result<Tensor> {
        let batch = pack(texts, self.model.torch_device())?;
        Ok(self.model.score(&batch)?)
    }
}

impl JointModel for ShardedModel {
    type Error = Error;

    fn score(&mut self, cases: &[(&Record, Completion)]) -> Result<Vec<Result<f64, RewardError>>> {
        let texts = self.reader.read(cases);
        let passes = texts.readable.len().div_ceil(self.batch_size);
        let of_ranks = self.exchange.gather(&passes)?;
        let most = of_ranks.into_iter().max().unwrap_or(0);
        let mut scores = Vec::with_capacity(texts.readable.len());
        if most > 0 {
            self.model.load_states(&self.offloaded)?;
            for batch in texts.readable.chunks(self.batch_size) {
                let values = self.forward(batch)?;
                scores.extend(self.reader.scores(batch, &values)?.into_iter().map(Ok));
            }
            // A forward pass gathers sharded weights, so a rank that is done joins the passes of the others.
            for _ in passes..most {
                drop(self.forward(&[Text::any()])?);
            }
            self.model.offload_states(&self.offloaded)?;
        }
        Ok(texts.scored(scores))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use anyroll_reward::{Model, Reward};

    use super::*;
    use crate::{run::Strategy, train::ranks};
    use anyroll_config::{
        FrozenWeights, Moments, Offload, OffloadConfig, OptimizerOffload, Precision, Recompute, Reduction,
        RewardDtype, RewardModelConfig, ShardGroup,
    };

    /// Config of the model in the folder `name` of the golden files.
    fn golden(name: &str) -> RewardModelConfig {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
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

    fn role(dtype: RewardDtype, stage: u8, params: Offload) -> Role {
        let strategy = Strategy {
            zero_stage: stage,
            precision: if dtype == RewardDtype::Fp32 { Precision::Fp32 } else { Precision::Bf16 },
            frozen_weights: FrozenWeights::Precision,
            moments: Moments::Fp32,
            recompute: Recompute::None,
            deterministic: true,
            keep_logits: false,
            offload: OffloadConfig { optimizer: OptimizerOffload::None, params },
            micro_batch_size: 2,
            micro_batch_tokens: None,
            sequence_parallel: 1,
            tensor_parallel: 1,
            expert_parallel: 1,
            shard_group: ShardGroup::All,
            reduction: Reduction::Ordered,
            collective_timeout_s: 60.0,
        };
        Role { backend: "cpu".into(), ordinals: vec![0, 0], strategy, has_open_stage: false }
    }

    /// Each rank scores twice, with the weights offloaded in between. Returns the bits of all scores, and
    /// `None` for texts that are too long.
    fn scores(config: &RewardModelConfig, role: &Role, cases: &[&[(Record, String)]]) -> Vec<Option<u64>> {
        let of_ranks = ranks(cases.len(), |place| {
            let own = cases[place.group().rank()];
            let own: Vec<(&Record, Completion)> =
                own.iter().map(|(record, text)| (record, ended(text))).collect();
            let mut model = ShardedModel::new(Model::open(config).unwrap(), role, &place).unwrap();
            let mut bits = || {
                let scores = model.score(&own).unwrap().into_iter();
                scores.map(|score| score.ok().map(f64::to_bits)).collect::<Vec<_>>()
            };
            let first = bits();
            assert_eq!(bits(), first);
            first
        });
        of_ranks.concat()
    }

    fn ended(text: &str) -> Completion<'_> {
        Completion { text, tokens: None, finished: true }
    }

    /// The cases scored by transformers, with one more that the model cannot read.
    fn cases() -> Vec<(Record, String)> {
        let file = golden("reward_model").path.join("scores.json");
        let cases: Vec<serde_json::Value> =
            serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let record = |prompt: &str| Record { id: "1".into(), prompt: prompt.into(), ..Record::default() };
        let text = |case: &serde_json::Value, name: &str| case[name].as_str().unwrap().to_owned();
        let case = |it: &serde_json::Value| (record(&text(it, "prompt")), text(it, "completion"));
        let mut cases: Vec<_> = cases.iter().map(case).collect();
        cases.insert(1, (record("sort"), "1 ".repeat(100)));
        cases
    }

    /// The model on the host is compared with the golden scores.
    #[test]
    fn neither_ranks_nor_stages_nor_offload_change_a_bit() {
        let cases = cases();
        for dtype in [RewardDtype::Fp32, RewardDtype::Bf16] {
            let config = RewardModelConfig { dtype, batch_size: 2, ..golden("reward_model") };
            let on_host: Vec<(&Record, Completion)> =
                cases.iter().map(|(record, text)| (record, ended(text))).collect();
            let on_host =
                Model::new(&config, Model::open(&config).unwrap()).unwrap().score_many(&on_host).into_iter();
            let on_host: Vec<Option<u64>> = on_host.map(|score| score.ok().map(f64::to_bits)).collect();
            assert_eq!(on_host.iter().filter(|score| score.is_none()).count(), 1);
            // Passes of the two ranks: two and none, one and one, none and two.
            for split in [5, 3, 0] {
                let (first, second) = cases.split_at(split);
                for (stage, params) in [
                    (0, Offload::None),
                    (0, Offload::BetweenSteps),
                    (3, Offload::None),
                    (3, Offload::BetweenSteps),
                    (3, Offload::Cpu),
                ] {
                    let role = role(dtype, stage, params);
                    let what = format!("{dtype:?}, {split} and the rest, {stage}, {params:?}");
                    assert_eq!(scores(&config, &role, &[first, second]), on_host, "{what}");
                }
            }
            assert_eq!(scores(&config, &role(dtype, 3, Offload::BetweenSteps), &[&cases]), on_host);
        }
    }
}
