//! Resolves a config on a machine: ranks, their devices and threads, and the division of batches.

use std::collections::BTreeMap;

use anyroll_config::error_chain::one_line;
use anyroll_config::{
    Config, DataConfig, Devices, FrozenWeights, ModelConfig, OffloadConfig, Paths, PipelineConfig,
    RewardConfig, RewardKind, RoleConfig, RolloutHostsConfig, RolloutRoleConfig, Section, StrategyConfig,
    list, suggestion,
};
use anyroll_data::files;

use super::steps::Length;
use super::{
    Purpose, answers, data, experts, expressed, frozen, layers, routing, sequence, shards, steps, tensor,
    weights,
};
use crate::opened::Opened;
use crate::run::{BackendFacts, Batches, Machine, Role, RolloutRole, Run};
use crate::train::MicroBatch;

/// Maximum number of ranks of one host on the cpu; a larger number is a typing mistake.
const MOST_HOST_RANKS: usize = 1024;

/// Resolves `config`, or reports the parts that are impossible on `machine`. If `opened` is `None`, that was reported
/// before, and there is no run. `purpose` decides which backends must be on this machine.
pub(super) fn resolve(
    config: &Config,
    at: &Section,
    machine: &Machine,
    opened: Option<&Opened>,
    purpose: Purpose,
) -> Option<Run> {
    let own_shift = match opened {
        Some(Opened::Images(images)) => images.model.folder.shift(),
        _ => 1.0,
    };
    let resolver = Resolver { at, config, machine, own_shift, purpose };
    let policy = resolver.role(POLICY, &config.roles.policy);
    let beside = |path: &str, role: &RoleConfig| {
        let role = resolver.role(path, role)?;
        policy.as_ref().is_none_or(|policy| resolver.is_beside(policy, path, &role)).then_some(role)
    };
    let has_reference = config.pipeline.has_reference() && at.is_read("pipeline");
    let reference = has_reference.then(|| beside("roles.reference", &config.roles.reference));
    let has_critic = config.pipeline.has_critic() && at.is_read("pipeline");
    let critic = has_critic.then(|| beside("roles.critic", &config.roles.critic));
    let policy = policy?;
    let local_ranks = policy.ordinals.len();
    let world_size = resolver.world_size(local_ranks);
    let rollout = config.roles.rollout.as_ref().map(|rollout| match rollout.hosts {
        Some(hosts) => resolver.rollout_hosts(rollout, hosts, world_size),
        None => resolver.rollout(&policy, rollout),
    });
    let samples_here =
        purpose != Purpose::Rollout || config.roles.rollout.as_ref().is_some_and(|it| it.hosts.is_some());
    at.ensure(
        samples_here,
        "roles.rollout",
        "its devices are those of the trainer's host",
        "write `hosts: {}` in it, on the trainer's host too",
    );
    resolver.check_strict(&policy, rollout.as_ref().and_then(Option::as_ref));
    sequence::check(config, opened, world_size, at);
    tensor::check(config, opened, world_size, at);
    layers::check(config, opened, (world_size, local_ranks), at);
    experts::check(config, opened, (world_size, local_ranks), at);
    weights::check(config, opened, at);
    routing::check(config, opened, at);
    frozen::check(config, opened, at);
    shards::check(config, world_size, at);
    expressed::check(config, opened, at);
    let threads = config.threads.unwrap_or_else(|| (machine.cores / local_ranks).max(1));
    let micro_batch = MicroBatch::of(&policy.strategy);
    let batches = world_size.and_then(|world_size| resolver.batches(world_size, micro_batch));
    let reward_models = resolver.reward_models(&policy);
    let memory_bytes = resolver.memory(local_ranks);
    let config = resolver.filled(threads);
    let (mut config, opened) = (config?, opened?);
    if !at.is_config_sound() {
        return None;
    }
    let Length { steps, reason: steps_reason } = steps::fill(&mut config.pipeline, opened);
    let evaluated = data::fill(&mut config.pipeline, opened);
    let completed = answers::fill(&mut config.pipeline, opened);
    let (shares_prompts, shift) = match &config.pipeline {
        PipelineConfig::Rlvr(rlvr) => (rlvr.share_prompts == Some(true), own_shift),
        PipelineConfig::Diffusion(diffusion) => (false, diffusion.sampler.shift.unwrap_or(own_shift)),
        PipelineConfig::Offline(_) => (false, own_shift),
    };
    Some(Run {
        config,
        world_size: world_size?,
        threads,
        reference: unless_failed(reference)?,
        critic: unless_failed(critic)?,
        reward_models: reward_models?,
        rollout: unless_failed(rollout)?,
        batches: batches?,
        policy,
        memory_bytes,
        steps,
        evaluated,
        completed,
        shares_prompts,
        shift,
        stage_reason: None,
        steps_reason,
    })
}

/// Converts an optional part: `None` if it was requested and failed.
fn unless_failed<T>(part: Option<Option<T>>) -> Option<Option<T>> {
    match part {
        None => Some(None),
        Some(part) => part.map(Some),
    }
}

/// Quantities of a step that are divided among the ranks.
struct Step {
    /// The field that sets the number of prompts.
    field: &'static str,
    warmup_batch_size: Option<usize>,
    prompts: usize,
    group_size: usize,
    mini_batches: usize,
}

impl Step {
    fn of(pipeline: &PipelineConfig) -> Self {
        match pipeline {
            PipelineConfig::Rlvr(rlvr) => Self {
                field: "prompts_per_step",
                warmup_batch_size: rlvr.warmup.as_ref().map(|warmup| warmup.batch_size),
                prompts: rlvr.prompts_per_step,
                group_size: rlvr.group_size,
                mini_batches: rlvr.mini_batches,
            },
            PipelineConfig::Offline(offline) => Self {
                field: "batch_size",
                warmup_batch_size: offline.warmup.as_ref().map(|warmup| warmup.batch_size),
                prompts: offline.batch_size,
                group_size: offline.objective.answers(),
                mini_batches: 1,
            },
            PipelineConfig::Diffusion(diffusion) => Self {
                field: "prompts_per_step",
                warmup_batch_size: diffusion.warmup.as_ref().map(|warmup| warmup.batch_size),
                prompts: diffusion.prompts_per_step,
                group_size: diffusion.group_size,
                mini_batches: diffusion.mini_batches,
            },
        }
    }
}

/// The role whose model is trained.
const POLICY: &str = "roles.policy";

pub(super) struct Resolver<'a> {
    pub(super) at: &'a Section<'a>,
    pub(super) config: &'a Config,
    machine: &'a Machine,
    /// The shift of the model's own scheduler; 1 without one.
    own_shift: f64,
    purpose: Purpose,
}

impl Resolver<'_> {
    fn role(&self, path: &str, role: &RoleConfig) -> Option<Role> {
        let is_here = self.purpose != Purpose::Rollout;
        let (facts, ordinals) = self.place(path, (role.backend.as_ref(), role.devices.as_ref()), is_here)?;
        let (top, own) = (&self.config.strategy, &role.strategy);
        let strategy = StrategyConfig {
            zero_stage: own.zero_stage.unwrap_or(top.zero_stage),
            precision: own.precision.unwrap_or(top.precision),
            // Only the policy has adapters.
            frozen_weights: if path == POLICY { top.frozen_weights } else { FrozenWeights::Precision },
            moments: top.moments,
            recompute: own.recompute.unwrap_or(top.recompute),
            deterministic: top.deterministic,
            keep_logits: top.keep_logits,
            offload: OffloadConfig {
                optimizer: own.offload.optimizer.unwrap_or(top.offload.optimizer),
                params: own.offload.params.unwrap_or(top.offload.params),
            },
            micro_batch_size: own.micro_batch_size.unwrap_or(top.micro_batch_size),
            // A role's own number of sequences is not limited by the tokens of all roles.
            micro_batch_tokens: match own.micro_batch_size {
                Some(_) => own.micro_batch_tokens,
                None => own.micro_batch_tokens.or(top.micro_batch_tokens),
            },
            sequence_parallel: top.sequence_parallel,
            tensor_parallel: top.tensor_parallel,
            expert_parallel: top.expert_parallel,
            shard_group: top.shard_group,
            reduction: top.reduction,
            collective_timeout_s: own.collective_timeout_s.unwrap_or(top.collective_timeout_s),
        };
        Some(Role::new(facts.name.clone(), ordinals, strategy))
    }

    /// The backend and devices of a role, from its own fields or the top level's. Devices that are not `is_here` are on
    /// another host, which has every one asked for.
    fn place(
        &self,
        path: &str,
        (backend, devices): (Option<&String>, Option<&Devices>),
        is_here: bool,
    ) -> Option<(&BackendFacts, Vec<usize>)> {
        let (backend_field, backend) = match backend {
            Some(backend) => (format!("{path}.backend"), backend),
            None => ("backend".to_owned(), &self.config.backend),
        };
        let (devices_field, devices) = match devices {
            Some(devices) => (format!("{path}.devices"), devices),
            None => ("devices".to_owned(), &self.config.devices),
        };
        let facts = self.backend_at(&backend_field, backend, is_here)?;
        Some((facts, self.ordinals_at(&devices_field, devices, facts, is_here)?))
    }

    /// Returns true if every rank has a device for the role: the policy's, or the same number of other devices.
    /// Otherwise reports a problem.
    pub(super) fn is_beside(&self, policy: &Role, path: &str, role: &Role) -> bool {
        let (own, ranks) = (role.ordinals.len(), policy.ordinals.len());
        let is_shared = self.at.ensure(
            own == ranks,
            &format!("{path}.devices"),
            format!("they are {own}, and there are {ranks} ranks here, each with a part of every role"),
            format!("write {ranks} of them, or leave it out for the policy's"),
        );
        if !is_shared || role.is_with(policy) {
            return is_shared;
        }
        self.at.when(self.at.is_read("pipeline")).ensure(
            !matches!(self.config.pipeline, PipelineConfig::Diffusion(_)),
            path,
            "models of images are held together, on the policy's devices",
            "leave its `backend`, `devices` and `collective_timeout_s` out",
        )
    }

    /// Devices for rollout that are not the policy's.
    fn rollout(&self, policy: &Role, config: &RolloutRoleConfig) -> Option<RolloutRole> {
        let path = "roles.rollout";
        if !self.samples() {
            return None;
        }
        let (facts, ordinals) = self.place(path, (config.backend.as_ref(), config.devices.as_ref()), true)?;
        let ranks = policy.ordinals.len();
        let is_even = self.at.ensure(
            ordinals.len().is_multiple_of(ranks),
            &format!("{path}.devices"),
            format!("{} devices cannot be shared evenly by {ranks} ranks", ordinals.len()),
            format!("write a multiple of {ranks}"),
        );
        let is_policys = |ordinal: &&usize| facts.devices.is_some() && policy.ordinals.contains(ordinal);
        let shared = ordinals.iter().find(is_policys).filter(|_| facts.name == policy.backend);
        if let Some(shared) = shared {
            let help = "write devices that the policy has not, or leave `roles.rollout` out: sampling and training then take turns";
            let message = format!("device {shared} is the policy's");
            self.at.refuse(&format!("{path}.devices"), message, help);
        }
        let of_ranks = || ordinals.chunks(ordinals.len() / ranks).map(<[usize]>::to_vec).collect();
        let is_own = is_even && shared.is_none();
        is_own.then(|| RolloutRole { backend: facts.name.clone(), ordinals: of_ranks(), hosts: None })
    }

    /// Devices of rollout hosts, of which this is one or none.
    fn rollout_hosts(
        &self,
        config: &RolloutRoleConfig,
        hosts: RolloutHostsConfig,
        world_size: Option<usize>,
    ) -> Option<RolloutRole> {
        let path = "roles.rollout";
        if !self.samples() {
            return None;
        }
        let is_here = self.purpose == Purpose::Rollout;
        let place = self.place(path, (config.backend.as_ref(), config.devices.as_ref()), is_here);
        let ((facts, ordinals), world_size) = (place?, world_size?);
        let devices = hosts.min.saturating_mul(ordinals.len());
        // A rollout host does not know the number of ranks.
        let holds = self.at.ensure(
            is_here || devices >= world_size,
            &format!("{path}.hosts.min"),
            format!("the {} hosts have {devices} devices, and there are {world_size} ranks", hosts.min),
            format!("write {} or more, so that each rank has a device", world_size.div_ceil(ordinals.len())),
        );
        holds.then(|| RolloutRole {
            backend: facts.name.clone(),
            ordinals: vec![ordinals],
            hosts: Some(hosts),
        })
    }

    /// Returns true if the pipeline can have devices of its own for rollout. Otherwise reports a problem.
    fn samples(&self) -> bool {
        self.at.when(self.at.is_read("pipeline")).ensure(
            matches!(self.config.pipeline, PipelineConfig::Rlvr(_)),
            "roles.rollout",
            "only `rlvr` samples on devices of its own",
            "leave it out",
        )
    }

    /// The backend of this name, or the one that `auto` chooses.
    pub(super) fn backend(&self, field: &str, name: &str) -> Option<&BackendFacts> {
        self.backend_at(field, name, self.purpose != Purpose::Rollout)
    }

    /// The same for a backend that must be usable on this machine if it `is_here`.
    fn backend_at(&self, field: &str, name: &str, is_here: bool) -> Option<&BackendFacts> {
        if !self.at.is_read(field) {
            return None;
        }
        let backends = &self.machine.backends;
        if name == "auto" {
            let usable = |facts: &&BackendFacts| facts.runs_models && facts.unavailable.is_none();
            let found = backends.iter().find(usable);
            let help = "see `anyroll doctor` for the reasons";
            self.at.ensure(found.is_some(), field, "no backend is usable here", help);
            return found;
        }
        let Some(facts) = backends.iter().find(|facts| facts.name == name) else {
            let names: Vec<&str> = backends.iter().map(|facts| facts.name.as_str()).chain(["auto"]).collect();
            let help = match name {
                // The suggestion would be `cpu`, one letter away, which is surely not meant.
                "gpu" => format!("choose from {}", list(&names)),
                _ => suggestion(name, &names),
            };
            self.at.refuse(field, format!("there is no backend `{name}`"), help);
            return None;
        };
        if !facts.runs_models {
            let models: Vec<&str> =
                backends.iter().filter(|facts| facts.runs_models).map(|facts| facts.name.as_str()).collect();
            let message = format!("`{name}` has memory and collectives, but not the math of a model");
            self.at.refuse(field, message, format!("train on one of {}", models.join(", ")));
            return None;
        }
        let assumes = !is_here || matches!(self.purpose, Purpose::Check | Purpose::CheckWithoutCode);
        if let Some(reason) = facts.unavailable.as_ref().filter(|_| !assumes) {
            let message = format!("`{name}` cannot be used on this machine: {reason}");
            self.at.refuse(field, message, "see `anyroll doctor`; `auto` takes what is usable");
            return None;
        }
        Some(facts)
    }

    /// Reports `rollout.strict` on devices without it.
    fn check_strict(&self, policy: &Role, rollout: Option<&RolloutRole>) {
        if !matches!(&self.config.pipeline, PipelineConfig::Rlvr(rlvr) if rlvr.rollout.strict) {
            return;
        }
        self.strict("pipeline.rlvr.rollout.strict", &policy.backend);
        let Some(rollout) = rollout else { return };
        self.strict("roles.rollout.backend", &rollout.backend);
        self.at.ensure(
            policy.backend == rollout.backend,
            "roles.rollout.backend",
            format!("`rollout.strict` wants the bits of the policy's, which is on `{}`", policy.backend),
            "leave it out, or leave `strict` out",
        );
    }

    /// Reports devices without strict sampling. Sampling and training are bitwise equal only if each token is
    /// computed by itself.
    fn strict(&self, field: &str, backend: &str) {
        let able = self.machine.backends.iter().filter(|facts| facts.adds_by_rows);
        if !able.clone().any(|facts| facts.name == backend) {
            let names: Vec<&str> = able.map(|facts| facts.name.as_str()).collect();
            self.at.refuse(
                field,
                format!("`{backend}` has no products of matrices that add in one order for every number of rows"),
                format!(
                    "leave it out, or train on one of {}; `rollout/logprob_diff_max` says how far sampling and training are apart",
                    names.join(", ")
                ),
            );
        }
    }

    fn memory(&self, local_ranks: usize) -> BTreeMap<String, usize> {
        let of = |facts: &BackendFacts| {
            let shares = if facts.devices.is_none() { local_ranks } else { 1 };
            Some((facts.name.clone(), facts.memory_bytes? / shares))
        };
        self.machine.backends.iter().filter_map(of).collect()
    }

    /// Ordinals of the devices of a backend that `devices` names.
    pub(super) fn ordinals(
        &self,
        field: &str,
        devices: &Devices,
        facts: &BackendFacts,
    ) -> Option<Vec<usize>> {
        self.ordinals_at(field, devices, facts, self.purpose != Purpose::Rollout)
    }

    /// The same for devices that this machine must have if they are `is_here`.
    fn ordinals_at(
        &self,
        field: &str,
        devices: &Devices,
        facts: &BackendFacts,
        is_here: bool,
    ) -> Option<Vec<usize>> {
        if !self.at.is_read(field) {
            return None;
        }
        let Some(available) = facts.available_devices(is_here) else {
            return self.host_ranks(field, devices, facts);
        };
        let ordinals: Vec<usize> = match devices {
            // The check below refuses one too many; a huge count is not expanded first.
            Devices::Count(count) => (0..(*count).min(available + 1)).collect(),
            // The machine that runs the config has at least one.
            Devices::All if facts.unavailable.is_some() || !is_here => vec![0],
            Devices::All => (0..available).collect(),
            Devices::List(list) => list.clone(),
        };
        let mut holds =
            self.at.ensure(!ordinals.is_empty(), field, "no device is left", "write at least one");
        for (index, ordinal) in ordinals.iter().enumerate() {
            holds &= self.at.ensure(
                *ordinal < available,
                field,
                format!("device {ordinal} is asked for, and `{}` has {available} here", facts.name),
                format!("ordinals are 0 to {}", available.saturating_sub(1)),
            );
            let first = ordinals.iter().position(|other| other == ordinal);
            let message = format!("device {ordinal} is given twice");
            holds &=
                self.at.ensure(first == Some(index), field, message, "give each rank a device of its own");
        }
        holds.then_some(ordinals)
    }

    /// Ordinals for ranks on the host, which is one device, 0, for any number of ranks.
    fn host_ranks(&self, field: &str, devices: &Devices, facts: &BackendFacts) -> Option<Vec<usize>> {
        match devices {
            Devices::Count(count @ 1..=MOST_HOST_RANKS) => return Some(vec![0; *count]),
            Devices::Count(count) => self.at.refuse(
                field,
                format!("there cannot be {count} ranks on a host"),
                format!("write a number of ranks, 1 to {MOST_HOST_RANKS}"),
            ),
            Devices::All | Devices::List(_) => self.at.refuse(
                field,
                format!("`{}` has no devices to choose from", facts.name),
                "write a number of ranks, such as 2",
            ),
        }
        None
    }

    /// The world size. The launcher or the command sets the number of hosts, and the config the ranks of each host.
    fn world_size(&self, local_ranks: usize) -> Option<usize> {
        let Some(rank) = &self.machine.rank else { return Some(self.machine.hosts * local_ranks) };
        let holds = self.at.ensure(
            rank.local_rank < local_ranks && rank.world_size.is_multiple_of(local_ranks),
            "devices",
            format!(
                "each host has {local_ranks} ranks by this, and the launcher started local rank {} of a world of {}",
                rank.local_rank, rank.world_size
            ),
            "start as many ranks on every host as it has `devices`",
        );
        holds.then_some(rank.world_size)
    }

    /// Division of a step into ranks, mini-batches and micro-batches.
    fn batches(&self, world_size: usize, micro_batch: MicroBatch) -> Option<Batches> {
        let at = self.at.below("pipeline").below(self.config.pipeline.name());
        let step = Step::of(&self.config.pipeline);
        let shared = |at: &Section, field: &str, value: usize, parts: usize, what: &str, by: &str| {
            at.ensure(
                value.is_multiple_of(parts),
                field,
                format!("{value} {what} cannot be shared evenly by {parts} {by}"),
                format!(
                    "write a multiple of {parts}, such as {}, or other `devices`",
                    value.next_multiple_of(parts.max(1))
                ),
            )
        };
        let of_warmup = step.warmup_batch_size.is_none_or(|batch_size| {
            shared(&at, "warmup.batch_size", batch_size, world_size, "records", "ranks")
        });
        let parts = world_size.saturating_mul(step.mini_batches);
        let of_parts = at.given(&["mini_batches"]);
        if !shared(&of_parts, step.field, step.prompts, parts, "prompts", "ranks x mini-batches")
            || !of_warmup
        {
            return None;
        }
        let is_sound = [step.field, "mini_batches", "group_size"].iter().all(|field| at.is_sound(field));
        if !is_sound || micro_batch.sequences == 0 {
            return None;
        }
        let prompts_per_rank = step.prompts / world_size;
        let sequences = prompts_per_rank * step.group_size;
        let sequences_per_update = sequences / step.mini_batches;
        Some(Batches {
            prompts_per_rank,
            sequences_per_step: sequences * world_size,
            sequences_per_update,
            micro_batches_per_update: match micro_batch.tokens {
                Some(_) => None,
                None => Some(sequences_per_update.div_ceil(micro_batch.sequences)),
            },
        })
    }

    /// Sets the path of every file. A run that resumes in another folder then reads the same files, even if
    /// a pattern matches new ones.
    fn fill_data(&self, data: &mut DataConfig) -> Option<()> {
        match data {
            DataConfig::File(file) => {
                for paths in [Some(&mut file.path), file.held_out.as_mut()].into_iter().flatten() {
                    let field = format!("pipeline.{}.data", self.config.pipeline.name());
                    let at = self.at.given(&[&field]);
                    let files =
                        at.take(files(paths), &field, |error| one_line(error), "leave files where they are")?;
                    *paths = Paths(files);
                }
                Some(())
            }
            DataConfig::Mix(sources) => {
                sources.iter_mut().try_for_each(|source| self.fill_data(&mut source.data))
            }
            DataConfig::Sort(_) | DataConfig::Addition(_) | DataConfig::Countdown(_) => Some(()),
        }
    }

    /// The config with every value that the machine decides.
    fn filled(&self, threads: usize) -> Option<Config> {
        let mut config = self.config.clone();
        let facts = self.backend("backend", &config.backend)?;
        config.backend = facts.name.clone();
        if config.devices == Devices::All && facts.unavailable.is_none() {
            config.devices = Devices::Count(facts.devices.unwrap_or(1));
        }
        config.threads = Some(threads);
        match &mut config.model {
            ModelConfig::Decoder(decoder) => {
                decoder.kv_heads.get_or_insert(decoder.heads);
                decoder.norm_topk_prob = decoder.num_experts.map(|_| decoder.norm_topk_prob.unwrap_or(true));
            }
            ModelConfig::Folder(_) | ModelConfig::Dit(_) | ModelConfig::Diffusers(_) => {}
        }
        if let PipelineConfig::Diffusion(diffusion) = &mut config.pipeline {
            diffusion.sampler.shift.get_or_insert(self.own_shift);
        }
        if let PipelineConfig::Offline(offline) = &mut config.pipeline {
            self.fill_data(&mut offline.data)?;
        }
        if let PipelineConfig::Rlvr(rlvr) = &mut config.pipeline {
            rlvr.share_prompts.get_or_insert(!config.model.drops());
            let (old_logprobs, correction) = (rlvr.old_logprobs(), rlvr.rollout_correction());
            rlvr.algorithm.old_logprobs.get_or_insert(old_logprobs);
            rlvr.algorithm.rollout_correction.get_or_insert(correction);
            self.fill_data(&mut rlvr.data)?;
            if let RewardConfig::Sum(terms) = &mut rlvr.reward {
                for (index, term) in terms.iter_mut().enumerate() {
                    let field = format!("pipeline.rlvr.reward[{index}].model.backend");
                    if let RewardKind::Model(model) = &mut term.kind {
                        model.backend = self.backend(&field, &model.backend)?.name.clone();
                    }
                }
            }
        }
        Some(config)
    }
}
