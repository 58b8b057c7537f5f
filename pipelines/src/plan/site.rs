//! The devices of a run by what they hold: the policy's, and those that other roles have for themselves.

use std::collections::{BTreeMap, BTreeSet};

use anyroll_backends::BackendKind;
use anyroll_strategy::plan::Ranks;
use serde::Serialize;

use super::PhaseBytes;
use crate::config::Reduction;
use crate::run::{Role, RolloutRole, Run};

/// What lengths of memory that can leave a device are rounded up to: 2 MiB on every device so far, pages on a host.
const GRANULARITY_BYTES: [usize; 2] = [2 << 20, 4 << 10];

/// What a device may hold, reward models by their number.
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

/// Devices that hold the same.
pub(super) struct Site {
    backend: String,
    ordinals: BTreeSet<usize>,
    members: BTreeSet<Member>,
    pub(super) on_host: bool,
    pub(super) ranks: Ranks,
    /// What a rank has of a device's memory, where it is known.
    pub(super) memory_bytes: Option<usize>,
}

impl Site {
    /// The policy's devices, and all others; only a reference with weights of its own takes memory.
    pub(super) fn all(run: &Run) -> (Self, Vec<Self>) {
        let policys = |role: &Role, ordinal: &usize| {
            role.backend == run.policy.backend && run.policy.ordinals.contains(ordinal)
        };
        let mut here = BTreeSet::from([Member::Policy]);
        let mut others = BTreeMap::<(&str, usize), BTreeSet<Member>>::new();
        for rollout in run.rollout.iter().filter(|rollout| !is_host(&rollout.backend)) {
            for ordinal in rollout.ordinals.iter().flatten() {
                others.entry((&rollout.backend, *ordinal)).or_default().insert(Member::Rollout);
            }
        }
        for (member, role) in members(run) {
            for ordinal in &role.ordinals {
                if policys(role, ordinal) {
                    here.insert(member);
                } else {
                    others.entry((&role.backend, *ordinal)).or_default().insert(member);
                }
            }
        }
        let mut alike = BTreeMap::<(&str, BTreeSet<Member>), BTreeSet<usize>>::new();
        for ((backend, ordinal), members) in others {
            alike.entry((backend, members)).or_default().insert(ordinal);
        }
        let policys = run.policy.ordinals.iter().copied().collect();
        let here = Self::new(run, &run.policy.backend, policys, here);
        let site = |((backend, members), ordinals)| Self::new(run, backend, ordinals, members);
        (here, alike.into_iter().map(site).collect())
    }

    fn new(run: &Run, backend: &str, ordinals: BTreeSet<usize>, members: BTreeSet<Member>) -> Self {
        let on_host = is_host(backend);
        let ranks = Ranks {
            world_size: run.world_size,
            granularity_bytes: GRANULARITY_BYTES[usize::from(on_host)],
            // A host has no library that sums.
            sums_in_rank_order: on_host || run.policy.strategy.reduction == Reduction::Ordered,
        };
        let memory_bytes = run.memory_bytes.get(backend).copied();
        Self { backend: backend.to_owned(), ordinals, members, on_host, ranks, memory_bytes }
    }

    pub(super) fn holds(&self, member: Member) -> bool {
        self.members.contains(&member)
    }

    /// The ranks that have a communicator there; what samples has none.
    pub(super) fn connected(&self) -> usize {
        let only_samples = self.members.iter().all(|member| *member == Member::Rollout);
        if only_samples { 1 } else { self.ranks.world_size }
    }

    /// What it comes to with these phases.
    pub(super) fn plan(
        &self,
        generate: Option<PhaseBytes>,
        [reward, score, critic]: [Option<PhaseBytes>; 3],
    ) -> DevicePlan {
        DevicePlan {
            backend: self.backend.clone(),
            devices: self.ordinals.iter().copied().collect(),
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

/// What of `run` a plan leaves out, in words: rollout by threads of a host.
pub(super) fn not_counted(run: &Run) -> Vec<String> {
    run.rollout.iter().filter(|rollout| is_host(&rollout.backend)).map(RolloutRole::describe).collect()
}

/// All but the policy, what only samples, and what each rank has on the host for itself.
fn members(run: &Run) -> impl Iterator<Item = (Member, &Role)> {
    let fixed = [(Member::Reference, run.held_reference()), (Member::Critic, run.critic.as_ref())];
    let models = run.reward_models.iter().enumerate();
    let models = models.map(|(index, role)| (Member::RewardModel(index), role.as_ref()));
    fixed.into_iter().chain(models).filter_map(|(member, role)| Some((member, role?)))
}

/// What each of some devices holds that are not the policy's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DevicePlan {
    /// Their backend's name.
    pub backend: String,
    /// Their numbers.
    pub devices: Vec<usize>,
    /// The roles that they hold.
    pub roles: Vec<&'static str>,
    /// What a rank has of a device's memory, where it is known.
    pub memory_bytes: Option<usize>,
    /// Sampling, with the keys and values of the sequences that it is dealt.
    pub generate: Option<PhaseBytes>,
    /// Reward models, one after the other.
    pub reward: Option<PhaseBytes>,
    /// The reference's log-probs.
    pub score: Option<PhaseBytes>,
    /// The critic's turn.
    pub critic: Option<PhaseBytes>,
}

impl DevicePlan {
    /// The phases by name, in a step's order.
    pub fn phases(&self) -> impl Iterator<Item = (&'static str, PhaseBytes)> {
        let phases = [
            ("generate", self.generate),
            ("reward", self.reward),
            ("score", self.score),
            ("critic", self.critic),
        ];
        phases.into_iter().filter_map(|(name, phase)| Some((name, phase?)))
    }

    /// The phase that takes most, and how much.
    pub fn peak(&self) -> (&'static str, usize) {
        let totals = self.phases().map(|(name, phase)| (name, phase.total()));
        totals.max_by_key(|(_, total)| *total).expect("a role has a phase")
    }

    /// Whether it fits; `None` where the memory is not known.
    pub fn fits(&self) -> Option<bool> {
        Some(self.peak().1 <= self.memory_bytes?)
    }

    /// Where they are, in words.
    pub fn place(&self) -> String {
        format!("{} {:?}", self.backend, self.devices)
    }
}
