//! Runs of language models, as [`crate::rlvr`] and [`crate::offline`] go through a step. Every sequence counts as the longest
//! that there can be.

use anyroll_models::{Decoder, KvCache, Model, PackedSize, Runs, ValueModel, generation::Limits};
use anyroll_strategy::plan::{
    Held, driver_bytes, held, scoring_activations, training_activations, whole_weights,
};

use super::{
    DevicePlan, MemoryPlan, PhaseBytes, Strategies, away, kept, on_host,
    reward::{RewardHeld, RewardModel},
    runs,
    site::{Member, Site},
};
use crate::{
    Error, Result,
    config::{KvCacheConfig, OfflineConfig, OldLogprobs, PipelineConfig, Turns, WarmupConfig},
    data::{Dataset, Tokenizer},
    offline,
    offline::Written,
    opened,
    run::{Run, Strategy},
    train::zero_config,
};

/// Plans the memory of a run of a language model.
pub struct Texts {
    model: Decoder,
    /// The same, which keeps logits.
    keeping_logits: Decoder,
    /// The same without adapters, if they are merged to sample.
    merged: Option<Decoder>,
    /// What the policy is compared with.
    reference: Decoder,
    critic: Option<ValueModel>,
    reward_models: Vec<RewardModel>,
    work: Work,
    /// The policy's devices.
    here: Site,
    others: Vec<Site>,
    rollout: Option<Rollout>,
    samples_per_rank: usize,
    scores_itself: bool,
    /// Whether the reference is a teacher that the policy's head reads beside its own.
    is_taught: bool,
    /// Whether the policy's states leave with every step, and not for evaluation alone.
    states_leave: bool,
}

impl Texts {
    /// For `run`, whose stages may be open still, and what it has `opened`.
    ///
    /// # Errors
    /// Those of shapes that make no model.
    pub fn new(run: &Run, opened: &opened::Texts) -> Result<Self> {
        let opened::Texts { dataset, base, reference, reward_models } = opened;
        let model = |keep| {
            let strategy = Strategy { keep_logits: keep, ..run.policy.strategy.clone() };
            base.policy(tch::Device::Cpu, &strategy)
        };
        let reference =
            reference.as_ref().map(|folder| Decoder::new(folder.decoder_config().clone(), tch::Device::Cpu));
        let critic = run.critic.as_ref().map(|_| ValueModel::new(base.config.clone(), tch::Device::Cpu));
        let rlvr = if let PipelineConfig::Rlvr(rlvr) = &run.config.pipeline { Some(rlvr) } else { None };
        let configs = rlvr.into_iter().flat_map(|rlvr| rlvr.reward.models());
        let reward_models =
            configs.zip(reward_models).map(|(config, opened)| RewardModel::new(config, opened));
        let estimates_kl = matches!(
            &run.config.pipeline, PipelineConfig::Offline(offline) if offline.objective.estimates_kl()
        );
        let is_taught = matches!(
            &run.config.pipeline, PipelineConfig::Offline(offline) if offline.objective.distills().is_some()
        );
        let asks_itself = rlvr.is_some_and(|rlvr| rlvr.algorithm.old_logprobs == OldLogprobs::Recompute);
        let (here, others) = Site::all(run);
        let samples_per_rank = run.batches.sequences_per_step / run.world_size;
        let rollout = rlvr.zip(run.rollout.as_ref()).map(|(rlvr, role)| {
            let ahead = rlvr.rollout.asynchronous.ahead;
            let under_way = (samples_per_rank * ahead.max(1) as usize).div_ceil(role.ordinals[0].len());
            let sequences = rlvr.rollout.batch_size.min(under_way);
            let sampling = Sampling { sequences, memory: rlvr.rollout.kv_cache.memory };
            Rollout { sampling, runs_ahead: ahead > 0 }
        });
        let merges = rlvr.is_some_and(|rlvr| rlvr.rollout.merge_adapters);
        let with_adapters = model(false)?;
        Ok(Self {
            merged: merges.then(|| with_adapters.merged()),
            model: with_adapters,
            keeping_logits: model(true)?,
            reference: reference.transpose()?.map_or_else(|| model(false), Ok)?,
            critic: critic.transpose()?,
            reward_models: reward_models.collect::<Result<_>>()?,
            here,
            others,
            work: Work::new(run, &base.tokenizer, dataset)?,
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
        self.model.units().iter().flat_map(|unit| &unit.params).map(|param| param.elements()).sum()
    }

    /// Tokens of the longest prompt, and of the longest completion.
    pub fn longest(&self) -> (usize, usize) {
        (self.work.prompt, self.work.completion)
    }

    /// Whether there is a frozen copy on the policy's devices.
    pub fn has_reference(&self) -> bool {
        self.here.holds(Member::Reference)
    }

    /// What these strategies come to.
    pub fn plan(&self, strategies: &Strategies) -> MemoryPlan {
        let (policy, site) = (&strategies.policy, &self.here);
        let held = self.held(site, strategies);
        let away = held.away();
        let between = self.between(site, strategies, &held);
        let [_, frozen_away, valued_away] = away;
        let own = held.own.as_ref().map(|(_, held)| *held);
        let activations = self.training(policy) + self.taught(strategies);
        let train = self.phase(site, activations, &[own, frozen_away, valued_away], &held);
        let generate = self.phase(site, 0, &away, &held);
        let passes = between.iter().flatten().chain([&train]);
        let busiest = passes.map(|phase| phase.activations).max().unwrap_or(0);
        let (generate, least_kv_cache) = self.generating(policy, generate, busiest);
        let kept = kept(site.on_host, generate.activations.max(busiest));
        let [reward, score, critic] = between.map(|phase| phase.map(&kept));
        let host = self.host_bytes(strategies);
        let others = self.others.iter().map(|site| self.device(site, strategies)).collect();
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

    /// What devices come to that are not the policy's.
    fn device(&self, site: &Site, strategies: &Strategies) -> DevicePlan {
        let held = self.held(site, strategies);
        let mut phases = self.between(site, strategies, &held);
        let busiest = phases.iter().flatten().map(|phase| phase.activations).max().unwrap_or(0);
        let rollout = self.rollout.filter(|_| site.holds(Member::Rollout));
        let generate = rollout.map(|Rollout { sampling, runs_ahead }| {
            let runs = runs(&strategies.policy, site.on_host);
            let phase = self.phase(site, 0, &held.away(), &held);
            let (generate, _) = self.sampling(site, sampling, runs, phase, busiest);
            if runs_ahead {
                phases.iter_mut().flatten().for_each(|phase| phase.kv_cache = generate.kv_cache);
            }
            generate
        });
        let most = generate.map_or(busiest, |generate| generate.activations);
        site.plan(generate, phases.map(|phase| phase.map(kept(site.on_host, most))))
    }

    /// Host memory of all roles for a rank.
    fn host_bytes(&self, strategies: &Strategies) -> usize {
        let sites = || std::iter::once(&self.here).chain(&self.others);
        // A role that is on several kinds of devices is so for different ranks.
        let at = |member| sites().find(|site| site.holds(member)).unwrap_or(&self.here);
        let roles = [Member::Policy, Member::Reference, Member::Critic].map(|member| {
            let SiteHeld { own, frozen, valued, .. } = self.held(at(member), strategies);
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

    /// What of each role a device of `site` holds while it has its turn.
    fn held<'a>(&'a self, site: &Site, strategies: &'a Strategies) -> SiteHeld<'a> {
        let Strategies { policy, reference, critic, reward_models } = strategies;
        let decoder = |it: &'a Strategy, model: &Decoder, trained| {
            (it, held(model, zero_config(it), trained, site.ranks))
        };
        let here = |role: &'a Option<Strategy>, member| role.as_ref().filter(|_| site.holds(member));
        let valued = here(critic, Member::Critic).zip(self.critic.as_ref());
        let models = self.reward_models.iter().zip(reward_models).enumerate();
        let models = models.filter(|(index, _)| site.holds(Member::RewardModel(*index)));
        SiteHeld {
            own: site.holds(Member::Policy).then(|| decoder(policy, &self.model, true)),
            copied: match site.holds(Member::Rollout) {
                true => self.parameters() * zero_config(policy).precision.dtype().size_bytes(),
                false => 0,
            },
            frozen: here(reference, Member::Reference).map(|it| decoder(it, &self.reference, false)),
            valued: valued.map(|(it, model)| (it, held(model, zero_config(it), true, site.ranks))),
            reward_models: models
                .filter_map(|(_, (model, strategy))| {
                    Some((model, model.held(strategy.as_ref()?, site.ranks)))
                })
                .collect(),
        }
    }

    /// The phases between sampling and training: what rewards, what scores, and the critic's turn.
    fn between(&self, site: &Site, strategies: &Strategies, held: &SiteHeld) -> [Option<PhaseBytes>; 3] {
        let SiteHeld { own, frozen, valued, .. } = held;
        let [own_away, frozen_away, valued_away] = held.away();
        let its = |role: &Option<(&Strategy, Held)>| role.as_ref().map(|(_, held)| *held);

        // Before a critic's turn the policy's states are still away, and after it the critic's.
        let asks_itself = own.as_ref().filter(|_| self.scores_itself);
        let while_scored = match (its(own), own_away) {
            (Some(own), Some(away)) if valued.is_none() => Some(Held { reducing: away.reducing, ..own }),
            _ => own_away,
        };
        let of_reference = frozen.as_ref().map(|(it, _)| self.scoring(&self.reference, it, site));
        let of_itself = asks_itself.map(|(it, _)| self.scoring(&self.model, it, site));
        let score = of_reference.max(of_itself).map(|activations| {
            self.phase(site, activations, &[while_scored, its(frozen), valued_away], held)
        });
        let critic = valued.as_ref().map(|(it, valued)| {
            self.phase(site, self.valuing(it, site), &[own_away, frozen_away, Some(*valued)], held)
        });
        let while_rewarded = if self.states_leave { own_away } else { its(own) };
        let reward = self.rewarding(site, strategies, &[while_rewarded, frozen_away, valued_away], held);
        [reward, score, critic]
    }

    /// What these hold together, and what reward models hold at all times, beside so many bytes of activations.
    fn phase(&self, site: &Site, activations: usize, roles: &[Option<Held>], held: &SiteHeld) -> PhaseBytes {
        let driver = if site.on_host { 0 } else { driver_bytes(site.connected()) };
        let mut phase = PhaseBytes { weights: held.copied, driver, activations, ..PhaseBytes::default() };
        let models = held.reward_models.iter().map(|(_, held)| &held.stays);
        roles.iter().flatten().chain(models).for_each(|held| phase.add(held));
        phase
    }

    /// The phase of the reward model that takes most, beside what else is held then: the cache is gone, and the policy's
    /// whole weights are not. The activations are the most of all of them.
    fn rewarding(
        &self,
        site: &Site,
        strategies: &Strategies,
        roles: &[Option<Held>],
        held: &SiteHeld,
    ) -> Option<PhaseBytes> {
        let Work { prompt, completion, .. } = self.work;
        let size = (self.samples_per_rank, prompt, completion);
        let activations = |model: &RewardModel| model.activations(size, site.on_host);
        let whole = match site.holds(Member::Policy) {
            true => self.whole(&strategies.policy, site),
            false => 0,
        };
        let phase = |activations, comes: &Held| {
            let mut phase = self.phase(site, activations, roles, held);
            phase.add(comes);
            phase.buffers += whole;
            phase
        };
        let models = held.reward_models.iter().map(|(model, held)| phase(activations(model), &held.comes));
        // Those that each rank has on the host compute where a policy on the host does.
        let hosts = self.reward_models.iter().zip(&strategies.reward_models);
        let hosts =
            hosts.filter(|(_, strategy)| strategy.is_none() && site.on_host && site.holds(Member::Policy));
        let hosts = hosts.map(|(model, _)| phase(activations(model), &Held::default()));
        models.chain(hosts).max_by_key(PhaseBytes::total)
    }

    /// What is made of the policy's weights to sample with them.
    fn whole(&self, policy: &Strategy, site: &Site) -> usize {
        let is_own = |unit, param| self.merged.is_some() && self.model.merges_into(unit, param);
        whole_weights(&self.model, zero_config(policy), site.ranks, is_own)
    }

    /// Activations of the critic's turn.
    fn valuing(&self, critic: &Strategy, site: &Site) -> usize {
        let model = self.critic.as_ref().expect("it has a turn");
        let size = self.micro_batch(critic);
        let runs = runs(critic, site.on_host);
        let training = training_activations(model, &size, zero_config(critic), runs);
        training.max(scoring_activations(model, &size, runs))
    }

    /// The largest micro-batch of samples.
    fn micro_batch(&self, strategy: &Strategy) -> PackedSize {
        let sequences = strategy.micro_batch_size.min(self.samples_per_rank);
        let Work { prompt, completion, sharing, .. } = self.work;
        PackedSize::of_groups(sequences, sharing, prompt, completion)
    }

    fn training(&self, policy: &Strategy) -> usize {
        let Work { prompt, answer, .. } = self.work;
        let config = zero_config(policy);
        let micro_batch = policy.micro_batch_size;
        let is_taught = self.is_taught;
        let rl = PackedSize { is_taught, ..self.micro_batch(policy) };
        let warmup = self.work.warmup.as_ref().filter(|warmup| warmup.steps > 0).map(|warmup| {
            let own = warmup.batch_size / self.here.ranks.world_size;
            PackedSize::uniform(warmup.micro_batch_size.unwrap_or(micro_batch).min(own), prompt, answer)
        });
        let sizes = [Some(rl), warmup].into_iter().flatten();
        let model = if policy.keep_logits { &self.keeping_logits } else { &self.model };
        let peaks =
            sizes.map(|size| training_activations(model, &size, config, runs(policy, self.here.on_host)));
        peaks.max().unwrap_or(0)
    }

    /// What a teacher has said of a step's tokens, for the policy's head to read: its own head's rows, and their matrix.
    fn taught(&self, strategies: &Strategies) -> usize {
        let Some(reference) = strategies.reference.as_ref().filter(|_| self.is_taught) else { return 0 };
        let shape = self.reference.config();
        let rows = self.samples_per_rank * self.work.completion + shape.vocab_size as usize;
        rows * shape.hidden_size as usize * zero_config(reference).precision.dtype().size_bytes()
    }

    fn scoring(&self, model: &Decoder, scorer: &Strategy, site: &Site) -> usize {
        scoring_activations(model, &self.micro_batch(scorer), runs(scorer, site.on_host))
    }

    /// Sampling by the policy, from what is held then, and the cache of one sequence. `busiest` are the activations of the
    /// other phases.
    fn generating(&self, policy: &Strategy, mut generate: PhaseBytes, busiest: usize) -> (PhaseBytes, usize) {
        let Some(sampling) = self.work.sampling else { return (generate, 0) };
        generate.buffers += self.whole(policy, &self.here);
        self.sampling(&self.here, sampling, runs(policy, self.here.on_host), generate, busiest)
    }

    /// An engine on `site`, likewise.
    fn sampling(
        &self,
        site: &Site,
        Sampling { sequences, memory }: Sampling,
        runs: Runs,
        mut generate: PhaseBytes,
        busiest: usize,
    ) -> (PhaseBytes, usize) {
        let (shape, dtype) = (self.model.config(), runs.dtype);
        let sequences = sequences.max(1);
        let (prompt, longest) = (self.work.prompt, self.work.prompt + self.work.completion);
        let limits = Limits::new(sequences);
        let prompts = limits.prefill_tokens.min(sequences * prompt);
        let model = self.merged.as_ref().unwrap_or(&self.model);
        let sampling = model.sampling_bytes(sequences, prompts, prompt, runs);
        generate.activations = if runs.on_host { sampling } else { sampling.max(busiest) };

        // As `inference::Room` shares out what is free.
        let cache = |blocks| KvCache::bytes_of(shape, dtype, blocks);
        let (wanted, least) = (KvCache::blocks_for(sequences, longest), KvCache::blocks_for(1, longest));
        let room = site.memory_bytes.map_or(wanted, |memory_bytes| {
            let free = memory_bytes.saturating_sub(generate.total()) as f64 * memory;
            KvCache::blocks_in(shape, dtype, free as usize)
        });
        generate.kv_cache = cache(wanted.min(room).max(least));
        (generate, cache(least))
    }
}

/// What of each role one device holds, with its strategy.
struct SiteHeld<'a> {
    own: Option<(&'a Strategy, Held)>,
    /// The weights of rollout, which are there at all times.
    copied: usize,
    frozen: Option<(&'a Strategy, Held)>,
    valued: Option<(&'a Strategy, Held)>,
    reward_models: Vec<(&'a RewardModel, RewardHeld)>,
}

impl SiteHeld<'_> {
    /// What is left of the policy, its reference and its critic while they have nothing to do.
    fn away(&self) -> [Option<Held>; 3] {
        let Self { own, frozen, valued, .. } = self;
        [own, frozen, valued].map(|role| role.as_ref().map(|(strategy, held)| away(strategy, held)))
    }
}

/// What a step takes sequences through.
struct Work {
    /// Tokens of the longest prompt, of the longest gold answer with its end, and of the longest completion to train on.
    prompt: usize,
    answer: usize,
    completion: usize,
    /// Sequences in a row whose prompt is computed once; 1 where each is by itself.
    sharing: usize,
    warmup: Option<WarmupConfig>,
    /// What is sampled; `None` if nothing is.
    sampling: Option<Sampling>,
}

/// What an engine samples.
#[derive(Clone, Copy)]
struct Sampling {
    /// Sequences at a time.
    sequences: usize,
    /// The part of free memory that their cache may take.
    memory: f64,
}

/// What each device samples that does nothing else.
#[derive(Clone, Copy)]
struct Rollout {
    sampling: Sampling,
    /// Whether it does so while others compute.
    runs_ahead: bool,
}

impl Work {
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
                    sequences: rlvr.rollout.batch_size.min(per_rank),
                    memory: rlvr.rollout.kv_cache.memory,
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
                        memory: KvCacheConfig::default().memory,
                    }),
                }
            }
            PipelineConfig::Diffusion(_) => return Err(Error::NoPlan),
        })
    }
}

/// Of conversations of which every turn is learnt, and of records that are cut: the most tokens that are learnt, behind as
/// many as make them the longest one.
fn longest_read(tokenizer: &Tokenizer, offline: &OfflineConfig, dataset: &Dataset) -> Result<(usize, usize)> {
    let read = offline::read(tokenizer, &offline.objective, offline.turns, &dataset.examples())?;
    let most = |tokens: fn(&Written) -> usize| read.iter().map(tokens).max().unwrap_or(0);
    let (all, answers) = (most(|it| it.tokens.len()), most(Written::answer_len));
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
