//! Memory of language-model runs, following the steps of [`crate::rlvr`] and [`crate::offline`]. Every
//! sequence counts with the longest possible length.

use anyroll_config::{
    KvCacheConfig, OfflineConfig, OldLogprobs, PipelineConfig, RolloutWeights, SpeculationConfig, Turns,
    WarmupConfig,
};
use anyroll_data::{Dataset, Tokenizer};
use anyroll_models::{
    Decoder, ExpertParts, KeptSteps, KvCache, Model, PackedSize, Runs, Unit, ValueModel, absent,
    generation::{Limits, Speculation},
};
use anyroll_strategy::{
    ZeroConfig,
    plan::{
        Held, driver_bytes, held, scoring_activations, training_activations, weights_made, whole_weights,
    },
};

use super::{
    DevicePlan, MemoryPlan, PhaseBytes, Strategies, away,
    device_group::{DeviceGroup, Member},
    kept, on_host,
    reward::{RewardHeld, RewardModel},
    runs,
};
use crate::{
    Error, Result, offline,
    offline::Tokenized,
    opened,
    rlvr::sampled_bytes,
    run::{Run, Strategy},
    train::zero_config,
};

/// Plans the memory of a run of a language model.
pub struct Texts {
    /// The policy.
    whole: Decoder,
    /// A rank's part of it, like all models below.
    pub(super) model: Decoder,
    /// The policy with kept logits.
    pub(super) keeping_logits: Decoder,
    /// The model that samples, if it is not the policy's: without adapters that are merged, or a rank's part.
    sampled: Option<Decoder>,
    /// True if adapters are merged for sampling.
    merges: bool,
    /// True if it samples with weights in 8 bits.
    in_eight_bits: bool,
    /// True if it rounds activations to 8 bits.
    rounds_rows: bool,
    /// Number of ranks that sample together.
    pub(super) together: usize,
    /// The reference or teacher.
    pub(super) reference: Decoder,
    pub(super) critic: Option<ValueModel>,
    reward_models: Vec<RewardModel>,
    pub(super) work: Workload,
    /// The policy's devices.
    here: DeviceGroup,
    others: Vec<DeviceGroup>,
    rollout: Option<Rollout>,
    pub(super) samples_per_rank: usize,
    pub(super) scores_itself: bool,
    /// True if the reference is a teacher whose head the policy's head reads in the loss.
    is_taught: bool,
    /// True if the policy's states are offloaded in every step, false if only for an evaluation.
    states_leave: bool,
}

impl Texts {
    /// Creates the planner of `run`, whose stages may be unresolved, from its `opened` files.
    ///
    /// # Errors
    /// If no model has the shape.
    pub fn new(run: &Run, opened: &opened::Texts) -> Result<Self> {
        let opened::Texts { dataset, base, reference, reward_models } = opened;
        let ranks = &run.policy.strategy;
        let whole = |keep| {
            let strategy = Strategy { keep_logits: keep, ..run.policy.strategy.clone() };
            base.policy(tch::Device::Cpu, &strategy)
        };
        let model = |keep| part(whole(keep)?, ranks);
        let reference =
            reference.as_ref().map(|folder| Decoder::new(folder.decoder_config().clone(), tch::Device::Cpu));
        let critic = run.critic.as_ref().map(|_| ValueModel::new(base.config.clone(), tch::Device::Cpu));
        let rlvr = if let PipelineConfig::Rlvr(rlvr) = &run.config.pipeline { Some(rlvr) } else { None };
        let configs = rlvr.into_iter().flat_map(|rlvr| rlvr.reward.models());
        let reward_models =
            configs.zip(reward_models).map(|(config, opened)| RewardModel::new(config, opened, ranks));
        let estimates_kl = matches!(
            &run.config.pipeline, PipelineConfig::Offline(offline) if offline.objective.estimates_kl()
        );
        let is_taught = matches!(
            &run.config.pipeline, PipelineConfig::Offline(offline) if offline.objective.distills().is_some()
        );
        let asks_itself = rlvr.is_some_and(|rlvr| rlvr.old_logprobs() == OldLogprobs::Recompute);
        let (here, others) = DeviceGroup::all(run);
        let samples_per_rank = run.batches.sequences_per_step / run.world_size;
        let rollout = rlvr.zip(run.rollout.as_ref()).map(|(rlvr, role)| {
            let ahead = rlvr.rollout.asynchronous.ahead;
            let under_way = (samples_per_rank * ahead.max(1) as usize)
                .div_ceil(role.devices_of(run.world_size - 1, run.world_size));
            let sequences = rlvr.rollout.batch_size.min(under_way);
            let sampling = Sampling {
                sequences,
                completion: rlvr.rollout.max_new_tokens,
                memory: rlvr.rollout.kv_cache.memory,
                speculation: rlvr.rollout.speculation.map(SpeculationConfig::speculation),
            };
            Rollout { sampling, runs_ahead: ahead > 0 }
        });
        let merges = rlvr.is_some_and(|rlvr| rlvr.rollout.merge_adapters);
        let together = rlvr.map_or(1, |rlvr| rlvr.rollout.tensor_parallel);
        let policy = whole(false)?;
        Ok(Self {
            sampled: match (together, ranks.tensor_parallel * ranks.expert_parallel) {
                (1, 1) => merges.then(|| policy.merged()),
                (1, _) => Some(if merges { policy.merged() } else { whole(false)? }),
                (ranks, _) => {
                    let parts = rlvr.map_or(ExpertParts::Columns, |rlvr| rlvr.rollout.expert_parts());
                    Some(Decoder::new(policy.config().part(ranks as i64, parts), tch::Device::Cpu)?)
                }
            },
            whole: policy,
            merges,
            in_eight_bits: rlvr.is_some_and(|rlvr| rlvr.rollout.weights == RolloutWeights::Fp8),
            rounds_rows: rlvr.is_some_and(|rlvr| rlvr.rollout.fp8_activations),
            together,
            model: model(false)?,
            keeping_logits: model(true)?,
            reference: match reference.transpose()? {
                Some(published) => part(published, ranks)?,
                None => model(false)?,
            },
            critic: critic.transpose()?.map(|critic| part(critic, ranks)).transpose()?,
            reward_models: reward_models.collect::<Result<_>>()?,
            here,
            others,
            work: Workload::new(run, &base.tokenizer, dataset)?,
            rollout,
            samples_per_rank,
            scores_itself: asks_itself
                || estimates_kl
                || (run.reference.is_some() && run.held_reference().is_none()),
            is_taught,
            states_leave: run.rollout.is_none() || run.critic.is_some(),
        })
    }

    /// The number of parameters.
    pub fn parameters(&self) -> usize {
        parameters(&self.whole)
    }

    /// Tokens of the longest prompt, and of the longest completion.
    pub fn longest(&self) -> (usize, usize) {
        (self.work.prompt, self.work.completion)
    }

    /// Returns true if a frozen reference is on the policy's devices.
    pub fn has_reference(&self) -> bool {
        self.here.holds(Member::Reference)
    }

    /// Memory under `strategies`.
    pub fn plan(&self, strategies: &Strategies) -> MemoryPlan {
        let (policy, group) = (&strategies.policy, &self.here);
        let held = self.held(group, strategies);
        let away = held.away();
        let between = self.between(group, strategies, &held);
        let [_, frozen_away, valued_away] = away;
        let own = held.own.as_ref().map(|(_, held)| *held);
        let activations = self.training(policy) + self.taught(strategies);
        let train = self.phase(group, activations, &[own, frozen_away, valued_away], &held);
        let generate = self.phase(group, 0, &away, &held);
        let passes = between.iter().flatten().chain([&train]);
        let busiest = passes.map(|phase| phase.activations).max().unwrap_or(0);
        let (generate, least_kv_cache) = self.generating(policy, generate, busiest);
        let kv_cache = self.kept_cache(group, self.work.sampling, runs(policy, group.on_host), &generate);
        let kept = kept(group.on_host, generate.activations.max(busiest));
        let kept = |phase| PhaseBytes { kv_cache, ..kept(phase) };
        let [reward, score, critic] = between.map(|phase| phase.map(kept));
        let host = self.host_bytes(strategies);
        let others = self.others.iter().map(|group| self.device(group, strategies)).collect();
        MemoryPlan {
            encode: None,
            train: kept(train),
            critic,
            score,
            reward,
            generate,
            host,
            least_kv_cache,
            others,
        }
    }

    /// Plan of devices that are not the policy's.
    fn device(&self, group: &DeviceGroup, strategies: &Strategies) -> DevicePlan {
        let held = self.held(group, strategies);
        let mut phases = self.between(group, strategies, &held);
        let busiest = phases.iter().flatten().map(|phase| phase.activations).max().unwrap_or(0);
        let rollout = self.rollout.filter(|_| group.holds(Member::Rollout));
        let generate = rollout.map(|Rollout { sampling, runs_ahead }| {
            let runs = runs(&strategies.policy, group.on_host);
            let phase = self.phase(group, 0, &held.away(), &held);
            let (generate, _) = self.sampling(group, sampling, runs, phase, busiest);
            let kv_cache = match runs_ahead {
                true => generate.kv_cache,
                false => self.kept_cache(group, Some(sampling), runs, &generate),
            };
            phases.iter_mut().flatten().for_each(|phase| phase.kv_cache = kv_cache);
            generate
        });
        let most = generate.map_or(busiest, |generate| generate.activations);
        group.plan(generate, phases.map(|phase| phase.map(kept(group.on_host, most))))
    }

    /// Host memory per rank of all roles.
    fn host_bytes(&self, strategies: &Strategies) -> usize {
        let groups = || std::iter::once(&self.here).chain(&self.others);
        // A role on several kinds of devices has different ranks on each.
        let at = |member| groups().find(|group| group.holds(member)).unwrap_or(&self.here);
        let roles = [Member::Policy, Member::Reference, Member::Critic].map(|member| {
            let GroupHeld { own, frozen, valued, .. } = self.held(at(member), strategies);
            let role = match member {
                Member::Policy => own,
                Member::Reference => frozen,
                _ => valued,
            };
            role.map_or(0, |(strategy, held)| on_host(strategy, &held))
        });
        let models = self.reward_models.iter().zip(&strategies.reward_models).enumerate();
        let models = models.map(|(index, (model, strategy))| {
            model.host_bytes(strategy.as_ref(), at(Member::RewardModel(index)).ranks)
        });
        roles.into_iter().chain(models).sum()
    }

    /// Each role's part on a device of `group` during its own phase.
    fn held<'a>(&'a self, group: &DeviceGroup, strategies: &'a Strategies) -> GroupHeld<'a> {
        let Strategies { policy, reference, critic, reward_models } = strategies;
        let decoder = |it: &'a Strategy, model: &Decoder, trained| {
            (it, held(model, zero_config(it), trained, group.ranks))
        };
        let here = |role: &'a Option<Strategy>, member| role.as_ref().filter(|_| group.holds(member));
        let valued = here(critic, Member::Critic).zip(self.critic.as_ref());
        let models = self.reward_models.iter().zip(reward_models).enumerate();
        let models = models.filter(|(index, _)| group.holds(Member::RewardModel(*index)));
        GroupHeld {
            own: group.holds(Member::Policy).then(|| decoder(policy, &self.model, true)),
            copied: match group.holds(Member::Rollout) {
                true => {
                    let element = zero_config(policy).precision.dtype().size_bytes();
                    let narrow = if self.in_eight_bits { self.narrowed(element) } else { 0 };
                    self.parameters() * element + narrow
                }
                false => 0,
            },
            frozen: here(reference, Member::Reference).map(|it| decoder(it, &self.reference, false)),
            valued: valued.map(|(it, model)| (it, held(model, zero_config(it), true, group.ranks))),
            reward_models: models
                .filter_map(|(_, (model, strategy))| {
                    Some((model, model.held(strategy.as_ref()?, group.ranks)))
                })
                .collect(),
            kept_steps: self.kept_steps(group, policy),
        }
    }

    /// The model that samples.
    fn sampler(&self) -> &Decoder {
        self.sampled.as_ref().unwrap_or(&self.model)
    }

    /// Bytes of the steps that a device which samples records, and keeps from one step of training to the next.
    fn kept_steps(&self, group: &DeviceGroup, policy: &Strategy) -> usize {
        let rollout = self.rollout.filter(|_| group.holds(Member::Rollout)).map(|rollout| rollout.sampling);
        let own = self.work.sampling.filter(|_| group.holds(Member::Policy) && self.together == 1);
        rollout.or(own).map_or(0, |sampling| {
            KeptSteps::most_bytes(self.sampler(), sampling.limits(), runs(policy, group.on_host))
        })
    }

    /// Bytes of the KV cache that stay between two samplings: of a small one, if all sequences have room in it.
    fn kept_cache(
        &self,
        group: &DeviceGroup,
        sampling: Option<Sampling>,
        runs: Runs,
        generate: &PhaseBytes,
    ) -> usize {
        let bytes = generate.kv_cache;
        let is_whole = sampling.is_some_and(|sampling| self.cache_bytes(sampling, runs) == bytes);
        let keeps = |total_bytes| KeptSteps::keeps_cache(bytes, total_bytes);
        let is_kept =
            is_whole && !group.on_host && self.together == 1 && group.memory_bytes.is_some_and(keeps);
        if is_kept { bytes } else { 0 }
    }

    /// Bytes of a KV cache for all sequences.
    fn cache_bytes(&self, Sampling { sequences, completion, .. }: Sampling, runs: Runs) -> usize {
        let blocks = KvCache::blocks_for(sequences.max(1), self.work.prompt + completion);
        KvCache::bytes_of(self.sampler().config(), runs.dtype, blocks)
    }

    /// Phases between sampling and training: reward, score and critic.
    fn between(
        &self,
        group: &DeviceGroup,
        strategies: &Strategies,
        held: &GroupHeld,
    ) -> [Option<PhaseBytes>; 3] {
        let GroupHeld { own, frozen, valued, .. } = held;
        let [own_away, frozen_away, valued_away] = held.away();
        let its = |role: &Option<(&Strategy, Held)>| role.as_ref().map(|(_, held)| *held);

        // Before the critic's phase the policy's states are still offloaded, and after it the critic's.
        let asks_itself = own.as_ref().filter(|_| self.scores_itself);
        let while_scored = match (its(own), own_away) {
            (Some(own), Some(away)) if valued.is_none() => Some(Held { reducing: away.reducing, ..own }),
            _ => own_away,
        };
        let of_reference = frozen.as_ref().map(|(it, _)| self.scoring(&self.reference, it, group));
        let of_itself = asks_itself.map(|(it, _)| self.scoring(&self.model, it, group));
        let score = of_reference.max(of_itself).map(|activations| {
            self.phase(group, activations, &[while_scored, its(frozen), valued_away], held)
        });
        let critic = valued.as_ref().map(|(it, valued)| {
            self.phase(group, self.valuing(it, group), &[own_away, frozen_away, Some(*valued)], held)
        });
        let while_rewarded = if self.states_leave { own_away } else { its(own) };
        let reward = self.rewarding(group, strategies, &[while_rewarded, frozen_away, valued_away], held);
        [reward, score, critic]
    }

    /// A phase of these roles, with the permanent part of reward models and `activations` bytes.
    fn phase(
        &self,
        group: &DeviceGroup,
        activations: usize,
        roles: &[Option<Held>],
        held: &GroupHeld,
    ) -> PhaseBytes {
        let driver = if group.on_host { 0 } else { driver_bytes(group.connected()) };
        let buffers = held.kept_steps;
        let mut phase =
            PhaseBytes { weights: held.copied, driver, activations, buffers, ..PhaseBytes::default() };
        let models = held.reward_models.iter().map(|(_, held)| &held.stays);
        roles.iter().flatten().chain(models).for_each(|held| phase.add(held));
        phase
    }

    /// The largest phase of a reward model. The KV cache is freed by then, the policy's whole weights are
    /// not. Activations are the maximum over all models.
    fn rewarding(
        &self,
        group: &DeviceGroup,
        strategies: &Strategies,
        roles: &[Option<Held>],
        held: &GroupHeld,
    ) -> Option<PhaseBytes> {
        let Workload { prompt, completion, .. } = self.work;
        let size = (self.samples_per_rank, prompt, completion);
        let activations = |model: &RewardModel| model.activations(size, group.on_host);
        let whole = match group.holds(Member::Policy) {
            true => self.whole(&strategies.policy, group),
            false => 0,
        };
        let phase = |activations, comes: &Held| {
            let mut phase = self.phase(group, activations, roles, held);
            phase.add(comes);
            phase.buffers += whole;
            phase
        };
        let models = held.reward_models.iter().map(|(model, held)| phase(activations(model), &held.comes));
        // Reward models that each rank keeps on the host compute where a policy on the host does.
        let hosts = self.reward_models.iter().zip(&strategies.reward_models);
        let hosts =
            hosts.filter(|(_, strategy)| strategy.is_none() && group.on_host && group.holds(Member::Policy));
        let hosts = hosts.map(|(model, _)| phase(activations(model), &Held::default()));
        models.chain(hosts).max_by_key(PhaseBytes::total)
    }

    /// Bytes of the copy of the policy's weights used for sampling.
    fn whole(&self, policy: &Strategy, group: &DeviceGroup) -> usize {
        let (model, config) = (&self.whole, zero_config(policy));
        let ranks = (self.together > 1).then_some(self.together);
        if ranks.is_none() && !self.in_eight_bits {
            let is_own = |unit, param| self.merges && model.merges_into(unit, param);
            return whole_weights(model, config, group.ranks, is_own);
        }
        // Ranks that sample together round their parts once all adapters are merged.
        let how = (ranks, self.in_eight_bits && !(self.merges && ranks.is_some()));
        let made = |unit, whole, element| sampled_bytes(model, how, unit, [whole, element]);
        let merged = if self.merges && ranks.is_none() { self.largest_merged(&config) } else { 0 };
        weights_made(model, config, group.ranks, made) + merged
    }

    /// Bytes of the layers' weights in 8 bits.
    fn narrowed(&self, element: usize) -> usize {
        let units = 0..self.whole.units().len();
        units.filter_map(|unit| self.whole.eight_bit_bytes(unit, element)).sum()
    }

    /// Bytes of the matrices that one layer's adapters are merged into, of the layer with the most.
    fn largest_merged(&self, config: &ZeroConfig) -> usize {
        let model = &self.whole;
        let of_unit = |(index, unit): (usize, &Unit)| {
            let params = unit.params.iter().enumerate().filter(|(param, _)| model.merges_into(index, *param));
            params.map(|(_, spec)| spec.elements()).sum::<usize>()
        };
        let largest = model.units().iter().enumerate().map(of_unit).max().unwrap_or(0);
        largest * config.precision.dtype().size_bytes()
    }

    /// Activations of the critic's phase.
    fn valuing(&self, critic: &Strategy, group: &DeviceGroup) -> usize {
        let model = self.critic.as_ref().expect("it has a turn");
        let size = self.micro_batch(critic);
        let runs = runs(critic, group.on_host);
        let training = training_activations(model, &size, zero_config(critic), runs);
        training.max(scoring_activations(model, &size, runs))
    }

    /// The largest micro-batch of samples.
    fn micro_batch(&self, strategy: &Strategy) -> PackedSize {
        let Workload { prompt, completion, sharing, .. } = self.work;
        let size = match strategy.micro_batch_tokens {
            None => {
                let sequences = strategy.micro_batch_size.min(self.samples_per_rank);
                PackedSize::of_groups(sequences, sharing, prompt, completion)
            }
            // The shortest completions give the most sequences, the longest the most targets.
            Some(tokens) => PackedSize::uniform(self.samples_per_rank, prompt, completion).within(tokens),
        };
        size.over(strategy.sequence_parallel)
    }

    fn training(&self, policy: &Strategy) -> usize {
        let Workload { prompt, answer, .. } = self.work;
        let config = zero_config(policy);
        let micro_batch = policy.micro_batch_size;
        let is_taught = self.is_taught;
        let rl = PackedSize { is_taught, ..self.micro_batch(policy) };
        let warmup = self.work.warmup.as_ref().filter(|warmup| warmup.steps > 0).map(|warmup| {
            let own = warmup.batch_size / self.here.ranks.world_size;
            let size = match (warmup.micro_batch_size, policy.micro_batch_tokens) {
                (None, Some(tokens)) => PackedSize::uniform(own, prompt, answer).within(tokens),
                (size, _) => PackedSize::uniform(size.unwrap_or(micro_batch).min(own), prompt, answer),
            };
            size.over(policy.sequence_parallel)
        });
        let sizes = [Some(rl), warmup].into_iter().flatten();
        let model = if policy.keep_logits { &self.keeping_logits } else { &self.model };
        let peaks =
            sizes.map(|size| training_activations(model, &size, config, runs(policy, self.here.on_host)));
        peaks.max().unwrap_or(0)
    }

    /// A teacher's output for a step's tokens, read by the policy's head: the teacher's hidden rows and its
    /// head matrix.
    fn taught(&self, strategies: &Strategies) -> usize {
        let Some(reference) = strategies.reference.as_ref().filter(|_| self.is_taught) else { return 0 };
        let shape = self.reference.config();
        let rows = self.samples_per_rank * self.work.completion + shape.vocab_size as usize;
        rows * shape.hidden_size as usize * zero_config(reference).precision.dtype().size_bytes()
    }

    fn scoring(&self, model: &Decoder, scorer: &Strategy, group: &DeviceGroup) -> usize {
        scoring_activations(model, &self.micro_batch(scorer), runs(scorer, group.on_host))
    }

    /// The policy's sampling phase on top of `generate`, and the KV cache of one sequence. `busiest` is the
    /// largest activations of the other phases.
    fn generating(&self, policy: &Strategy, mut generate: PhaseBytes, busiest: usize) -> (PhaseBytes, usize) {
        let Some(sampling) = self.work.sampling else { return (generate, 0) };
        generate.buffers += self.whole(policy, &self.here);
        self.sampling(&self.here, sampling, runs(policy, self.here.on_host), generate, busiest)
    }

    /// The sampling phase of an engine on `group`; arguments and result as in `generating`.
    fn sampling(
        &self,
        group: &DeviceGroup,
        sampling: Sampling,
        runs: Runs,
        mut generate: PhaseBytes,
        busiest: usize,
    ) -> (PhaseBytes, usize) {
        let model = self.sampler();
        let (shape, dtype) = (model.config(), runs.dtype);
        let limits @ Limits { sequences, .. } = sampling.limits();
        let (prompt, longest) = (self.work.prompt, self.work.prompt + sampling.completion);
        let prompts = limits.prefill_tokens.min(sequences * prompt);
        // A pass over prompts widens one matrix in 8 bits at a time, here and where kernels do not multiply with it, or rounds
        // the inputs of one product.
        let widened = if self.in_eight_bits { model.widest_matrix_bytes(dtype.size_bytes()) } else { 0 };
        let rounded = if self.rounds_rows { prompts.max(limits.rows()) * model.widest_row() } else { 0 };
        let sampled = model.sampling_bytes(limits.rows(), prompts, prompt, runs) + widened.max(rounded);
        generate.activations = if runs.on_host { sampled } else { sampled.max(busiest) };

        // Divides free memory as `inference::Room` does.
        let cache = |blocks| KvCache::bytes_of(shape, dtype, blocks);
        let (wanted, least) = (KvCache::blocks_for(sequences, longest), KvCache::blocks_for(1, longest));
        let room = group.memory_bytes.map_or(wanted, |memory_bytes| {
            let free = memory_bytes.saturating_sub(generate.total()) as f64 * sampling.memory;
            KvCache::blocks_in(shape, dtype, free as usize)
        });
        generate.kv_cache = cache(wanted.min(room).max(least));
        (generate, cache(least))
    }
}

/// The part of a model that a rank holds under `strategy`, of the ranks that hold it together.
pub(super) fn part<M: Model>(whole: M, strategy: &Strategy) -> Result<M> {
    match (strategy.tensor_parallel, strategy.expert_parallel) {
        (1, 1) => Ok(whole),
        (1, experts) => Ok(whole.spread_experts(&absent(experts))?.unwrap_or(whole)),
        (tensor, _) => Ok(whole.split_over(&absent(tensor))?),
    }
}

/// The number of parameters.
pub(super) fn parameters(model: &impl Model) -> usize {
    model.units().iter().flat_map(|unit| &unit.params).map(|param| param.elements()).sum()
}

/// Each role's part on one device, with its strategy.
struct GroupHeld<'a> {
    own: Option<(&'a Strategy, Held)>,
    /// Rollout's copy of the weights, held at all times.
    copied: usize,
    frozen: Option<(&'a Strategy, Held)>,
    valued: Option<(&'a Strategy, Held)>,
    reward_models: Vec<(&'a RewardModel, RewardHeld)>,
    /// Bytes of recorded steps that stay between two samplings.
    kept_steps: usize,
}

impl GroupHeld<'_> {
    /// Parts of the policy, its reference and its critic that stay on the device outside their phases.
    fn away(&self) -> [Option<Held>; 3] {
        let Self { own, frozen, valued, .. } = self;
        [own, frozen, valued].map(|role| role.as_ref().map(|(strategy, held)| away(strategy, held)))
    }
}

/// Sequence lengths and sampling of a step.
pub(super) struct Workload {
    /// Tokens of the longest prompt, of the longest gold answer with its end token, and of the longest
    /// trained completion.
    pub(super) prompt: usize,
    answer: usize,
    pub(super) completion: usize,
    /// Adjacent sequences that compute their prompt once; 1 if prompts are not shared.
    pub(super) sharing: usize,
    warmup: Option<WarmupConfig>,
    /// Sampling of a step; `None` if nothing is sampled.
    sampling: Option<Sampling>,
}

/// Load of a sampling engine.
#[derive(Clone, Copy)]
struct Sampling {
    /// Sequences in flight.
    sequences: usize,
    /// Tokens of the longest completion, of the rollout or of an evaluation.
    completion: usize,
    /// Fraction of free memory for the KV cache.
    memory: f64,
    speculation: Option<Speculation>,
}

impl Sampling {
    fn limits(self) -> Limits {
        Limits { speculation: self.speculation, ..Limits::new(self.sequences.max(1)) }
    }
}

/// Load of a device that only does rollout.
#[derive(Clone, Copy)]
struct Rollout {
    sampling: Sampling,
    /// True if it samples while other devices train.
    runs_ahead: bool,
}

impl Workload {
    fn new(run: &Run, tokenizer: &Tokenizer, dataset: &Dataset) -> Result<Self> {
        let (prompt, answer) = longest(tokenizer, dataset)?;
        let per_rank = run.batches.sequences_per_step / run.world_size;
        Ok(match &run.config.pipeline {
            PipelineConfig::Rlvr(rlvr) => Self {
                prompt,
                answer,
                completion: rlvr.rollout.max_new_tokens,
                sharing: if run.shares_prompts { rlvr.group_size } else { 1 },
                warmup: rlvr.warmup.clone(),
                sampling: Some(Sampling {
                    sequences: rlvr.rollout.batch_size.min(per_rank) * rlvr.rollout.tensor_parallel,
                    completion: {
                        let rollout = rlvr.rollout.max_new_tokens;
                        rollout.max(rlvr.evaluation.max_new_tokens(rollout))
                    },
                    memory: rlvr.rollout.kv_cache.memory,
                    speculation: rlvr.rollout.speculation.map(SpeculationConfig::speculation),
                }),
            },
            PipelineConfig::Offline(offline) => {
                let completed = run.completed.div_ceil(run.world_size);
                let is_plain = offline.turns == Turns::Last && !dataset.is_cut();
                let (prompt, answer) =
                    if is_plain { (prompt, answer) } else { longest_read(tokenizer, offline, dataset)? };
                Self {
                    prompt,
                    answer,
                    completion: answer,
                    sharing: if run.config.model.drops() { 1 } else { offline.objective.answers() },
                    warmup: offline.warmup.clone(),
                    sampling: (completed > 0).then(|| Sampling {
                        sequences: completed.min(offline::MOST_AT_A_TIME),
                        completion: answer,
                        memory: KvCacheConfig::default().memory,
                        speculation: None,
                    }),
                }
            }
            PipelineConfig::Diffusion(_) => return Err(Error::NoPlan),
        })
    }
}

/// Longest context and longest trained span of conversations with several trained turns and of truncated
/// records. The context is the rest of the longest sequence.
fn longest_read(tokenizer: &Tokenizer, offline: &OfflineConfig, dataset: &Dataset) -> Result<(usize, usize)> {
    let read = offline::read(tokenizer, &offline.objective, offline.turns, &dataset.examples())?;
    let most = |tokens: fn(&Tokenized) -> usize| read.iter().map(tokens).max().unwrap_or(0);
    let (all, answers) = (most(|it| it.tokens.len()), most(Tokenized::answer_len));
    Ok((all - answers, answers))
}

/// Tokens of the longest prompt and of the longest gold answer.
fn longest(tokenizer: &Tokenizer, dataset: &Dataset) -> Result<(usize, usize)> {
    if let Tokenizer::Characters(_) = tokenizer {
        return Ok((dataset.longest_prompt(), dataset.longest_answer() + 1));
    }
    let (mut prompt, mut answer) = (0, 0);
    for record in dataset.examples() {
        prompt = prompt.max(tokenizer.encode_prompt(&record)?.len());
        for record in [Some(record.clone()), record.rejected()].into_iter().flatten() {
            answer = answer.max(tokenizer.encode_answer(&record)?.len());
        }
    }
    Ok((prompt, answer))
}
