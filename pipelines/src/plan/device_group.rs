//! Devices of a run grouped by the roles that they hold: the policy's, and those of other roles.

use std::collections::{BTreeMap, BTreeSet};

use anyroll_backends::BackendKind;
use anyroll_config::Reduction;
use anyroll_strategy::plan::Ranks;
use serde::Serialize;

use super::PhaseBytes;
use crate::run::{Role, RolloutRole, Run};

/// Granularity of memory that can leave a device: 2 MiB on every device so far, a page on a host.
const GRANULARITY_BYTES: [usize; 2] = [2 << 20, 4 << 10];

/// A role that a device may hold; reward models by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Member {
    Policy,
    Reference,
    Critic,
    RewardModel(usize),
    Rollout,
}

impl Member {
    fn name(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Reference => "reference",
            Self::Critic => "critic",
            Self::RewardModel(_) => "reward model",
            Self::Rollout => "rollout",
        }
    }
}

/// Devices that hold the same roles.
pub(super) struct DeviceGroup {
    backend: String,
    ordinals: BTreeSet<usize>,
    /// True for devices of rollout hosts.
    is_elsewhere: bool,
    members: BTreeSet<Member>,
    pub(super) on_host: bool,
    pub(super) ranks: Ranks,
    /// Memory of a device per rank, if known.
    pub(super) memory_bytes: Option<usize>,
}

impl DeviceGroup {
    /// The policy's devices, then all others. A reference without weights of its own takes no memory.
    pub(super) fn all(run: &Run) -> (Self, Vec<Self>) {
        let policys = |role: &Role, ordinal: &usize| {
            role.backend == run.policy.backend && run.policy.ordinals.contains(ordinal)
        };
        let mut here = BTreeSet::from([Member::Policy]);
        let mut others = BTreeMap::<(&str, bool, usize), BTreeSet<Member>>::new();
        for rollout in run.rollout.iter().filter(|rollout| !is_host(&rollout.backend)) {
            for ordinal in rollout.ordinals.iter().flatten() {
                let place = (&*rollout.backend, rollout.hosts.is_some(), *ordinal);
                others.entry(place).or_default().insert(Member::Rollout);
            }
        }
        for (member, role) in members(run) {
            for ordinal in &role.ordinals {
                if policys(role, ordinal) {
                    here.insert(member);
                } else {
                    others.entry((&role.backend, false, *ordinal)).or_default().insert(member);
                }
            }
        }
        let mut alike = BTreeMap::<(&str, bool, BTreeSet<Member>), BTreeSet<usize>>::new();
        for ((backend, is_elsewhere, ordinal), members) in others {
            alike.entry((backend, is_elsewhere, members)).or_default().insert(ordinal);
        }
        let policys = run.policy.ordinals.iter().copied().collect();
        let here = Self::new(run, (&run.policy.backend, false), policys, here);
        let group = |((backend, is_elsewhere, members), ordinals)| {
            Self::new(run, (backend, is_elsewhere), ordinals, members)
        };
        (here, alike.into_iter().map(group).collect())
    }

    fn new(
        run: &Run,
        (backend, is_elsewhere): (&str, bool),
        ordinals: BTreeSet<usize>,
        members: BTreeSet<Member>,
    ) -> Self {
        let on_host = is_host(backend);
        let (shard_group, tensor) = (run.policy.strategy.shard_group, run.policy.strategy.tensor_parallel);
        let ranks = Ranks {
            world_size: run.world_size,
            shards: shard_group.ranks(run.world_size, run.policy.ordinals.len()),
            tensor,
            experts: run.policy.strategy.expert_parallel,
            granularity_bytes: GRANULARITY_BYTES[usize::from(on_host)],
            // A host has no communication library that sums.
            sums_in_rank_order: on_host || run.policy.strategy.reduction == Reduction::Ordered,
        };
        let memory_bytes = run.memory_bytes.get(backend).copied();
        let backend = backend.to_owned();
        Self { backend, ordinals, is_elsewhere, members, on_host, ranks, memory_bytes }
    }

    pub(super) fn holds(&self, member: Member) -> bool {
        self.members.contains(&member)
    }

    /// Number of ranks with a communicator on these devices; rollout devices have none.
    pub(super) fn connected(&self) -> usize {
        let only_samples = self.members.iter().all(|member| *member == Member::Rollout);
        if only_samples { 1 } else { self.ranks.world_size }
    }

    /// Plan of these devices with the given phases.
    pub(super) fn plan(
        &self,
        generate: Option<PhaseBytes>,
        [reward, score, critic]: [Option<PhaseBytes>; 3],
    ) -> DevicePlan {
        DevicePlan {
            backend: self.backend.clone(),
            devices: self.ordinals.iter().copied().collect(),
            on_rollout_hosts: self.is_elsewhere,
            roles: self.members.iter().map(|member| member.name()).collect(),
            memory_bytes: self.memory_bytes,
            generate,
            reward,
            score,
            critic,
        }
    }
}

pub(super) fn is_host(backend: &str) -> bool {
    backend.parse().is_ok_and(BackendKind::is_host)
}

/// Descriptions of the parts of `run` that a plan leaves out: rollout by threads of a host.
pub(super) fn not_counted(run: &Run) -> Vec<String> {
    run.rollout.iter().filter(|rollout| is_host(&rollout.backend)).map(RolloutRole::describe).collect()
}

/// All roles except the policy, rollout, and reward models that each rank keeps on the host.
fn members(run: &Run) -> impl Iterator<Item = (Member, &Role)> {
    let fixed = [(Member::Reference, run.held_reference()), (Member::Critic, run.critic.as_ref())];
    let models = run.reward_models.iter().enumerate();
    let models = models.map(|(index, role)| (Member::RewardModel(index), role.as_ref()));
    fixed.into_iter().chain(models).filter_map(|(member, role)| Some((member, role?)))
}

/// Memory of devices that are not the policy's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DevicePlan {
    /// Name of their backend.
    pub backend: String,
    /// Ordinals of the devices.
    pub devices: Vec<usize>,
    /// True for devices of rollout hosts.
    pub on_rollout_hosts: bool,
    /// Names of the roles that they hold.
    pub roles: Vec<&'static str>,
    /// Memory of a device per rank, if known.
    pub memory_bytes: Option<usize>,
    /// Sampling, with the KV cache of the sequences assigned to the device.
    pub generate: Option<PhaseBytes>,
    /// Reward models, one after the other.
    pub reward: Option<PhaseBytes>,
    /// The reference's log-probs.
    pub score: Option<PhaseBytes>,
    /// The critic's phase.
    pub critic: Option<PhaseBytes>,
}

impl DevicePlan {
    /// Phases by name, in the order of a step.
    pub fn phases(&self) -> impl Iterator<Item = (&'static str, PhaseBytes)> {
        let phases = [
            ("generate", self.generate),
            ("reward", self.reward),
            ("score", self.score),
            ("critic", self.critic),
        ];
        phases.into_iter().filter_map(|(name, phase)| Some((name, phase?)))
    }

    /// The largest phase and its bytes.
    pub fn peak(&self) -> (&'static str, usize) {
        let totals = self.phases().map(|(name, phase)| (name, phase.total()));
        totals.max_by_key(|(_, total)| *total).expect("a role has a phase")
    }

    /// Returns true if it fits; `None` if the memory is unknown.
    pub fn fits(&self) -> Option<bool> {
        Some(self.peak().1 <= self.memory_bytes?)
    }

    /// Backend and ordinals as text.
    pub fn place(&self) -> String {
        let of_hosts = if self.on_rollout_hosts { " of rollout hosts" } else { "" };
        format!("{} {:?}{of_hosts}", self.backend, self.devices)
    }
}
