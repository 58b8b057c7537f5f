//! [`ZeroStage`], and how `auto` is put into numbers.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, Visitor},
};

use super::{Recompute, RolesConfig, Run, check::Check, error::Problem};
use crate::{
    data::Dataset,
    error_chain::one_line,
    format::gib,
    plan::{Planner, Stages, Unsettled, settle as fastest},
};

/// What is sharded over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroStage {
    /// As the stage of this number, 0 to 3.
    Stage(u8),
    /// As the fastest stage that fits the devices; resolved before anything starts. Not for `diffusion`.
    Auto,
}

impl Default for ZeroStage {
    fn default() -> Self {
        Self::Stage(0)
    }
}

impl ZeroStage {
    /// The number of a stage that is resolved.
    pub fn number(self) -> u8 {
        match self {
            Self::Stage(number) => number,
            Self::Auto => unreachable!("a resolved config has no `auto`"),
        }
    }
}

impl<'de> Deserialize<'de> for ZeroStage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StageVisitor;

        impl Visitor<'_> for StageVisitor {
            type Value = ZeroStage;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a stage, 0 to 3, or `auto`")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<ZeroStage, E> {
                // What no stage has is refused with the field's name.
                Ok(ZeroStage::Stage(u8::try_from(number).unwrap_or(u8::MAX)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ZeroStage, E> {
                match text {
                    "auto" => Ok(ZeroStage::Auto),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
        }

        deserializer.deserialize_any(StageVisitor)
    }
}

impl Serialize for ZeroStage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Stage(number) => number.serialize(serializer),
            Self::Auto => "auto".serialize(serializer),
        }
    }
}

/// Writes the stages that `auto` stands for into `run`, wherever it stands.
pub(super) fn settle(run: &mut Run, dataset: &Dataset, check: &Check) -> Result<(), Problem> {
    if run.roles().any(|role| role.strategy.zero_stage == ZeroStage::Auto) {
        let field = open_field(run);
        let planner = Planner::new(run, dataset)
            .map_err(|error| check.problem(field, one_line(&error), "write a stage, 0 to 3"))?;
        let settled = fastest(&planner, run).map_err(|unsettled| refused(check, field, unsettled))?;
        let settled = settled.expect("a stage is open");
        let Stages { policy, reference, critic } = settled.stages;
        run.policy.strategy.zero_stage = ZeroStage::Stage(policy);
        run.policy.strategy.keep_logits = settled.keep_logits;
        for (role, stage) in [(&mut run.reference, reference), (&mut run.critic, critic)] {
            if let (Some(role), Some(stage)) = (role, stage) {
                role.strategy.zero_stage = ZeroStage::Stage(stage);
                role.strategy.keep_logits = settled.keep_logits;
            }
        }
        run.stage_reason = run.memory_bytes.map(|memory_bytes| settled.reason(memory_bytes));
    }
    write_down(run);
    Ok(())
}

/// The field that says `auto`.
fn open_field(run: &Run) -> &'static str {
    let RolesConfig { policy, reference, critic, rollout: _ } = &run.config.roles;
    let of_roles = [
        ("roles.policy.strategy.zero_stage", policy),
        ("roles.reference.strategy.zero_stage", reference),
        ("roles.critic.strategy.zero_stage", critic),
    ];
    let open = of_roles.iter().find(|(_, role)| role.strategy.zero_stage == Some(ZeroStage::Auto));
    open.map_or("strategy.zero_stage", |(field, _)| field)
}

fn refused(check: &Check, field: &str, unsettled: Unsettled) -> Problem {
    match unsettled {
        Unsettled::NoMemory => check.problem(
            field,
            "`auto` needs to know how much memory the devices have, and their driver does not say",
            "write a stage, 0 to 3; `anyroll plan --memory 80GiB` says what fits",
        ),
        Unsettled::TooLarge { phase, needs, memory_bytes, recompute } => {
            let message = format!(
                "no stage fits: the smallest needs {} GiB of {} in {phase}",
                gib(needs),
                gib(memory_bytes)
            );
            let help = match recompute {
                Some(Recompute::Selective) => "write `recompute: selective`, with which it fits",
                Some(_) => "write `recompute: full`, with which it fits",
                None => {
                    "`anyroll plan` shows every choice; more devices or a smaller `micro_batch_size` may do"
                }
            };
            check.problem(field, message, help)
        }
    }
}

/// Puts the stages into the config that the run leaves behind.
fn write_down(run: &mut Run) {
    let (config, policy) = (&mut run.config, run.policy.strategy.zero_stage);
    let is_open = |stage: Option<ZeroStage>| stage == Some(ZeroStage::Auto);
    let top_is_open = is_open(Some(config.strategy.zero_stage));
    config.strategy.keep_logits = run.policy.strategy.keep_logits;
    if top_is_open {
        config.strategy.zero_stage = policy;
    }
    let roles = &mut config.roles;
    if is_open(roles.policy.strategy.zero_stage) {
        roles.policy.strategy.zero_stage = Some(policy);
    }
    for (role, says) in [(&run.reference, &mut roles.reference), (&run.critic, &mut roles.critic)] {
        let stage = role.as_ref().map_or(policy, |role| role.strategy.zero_stage);
        let says = &mut says.strategy.zero_stage;
        let follows = says.is_none() && top_is_open && stage != policy;
        if is_open(*says) || follows {
            *says = Some(stage);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{
            Error, Loaded, Machine,
            tests::{SMALL, machine, read},
        },
        plan::Planner,
    };

    /// Two ranks, and a model that is deep enough for stage 3 to be smaller.
    const SETS: [&str; 3] = ["model.decoder.layers=12", "devices=2", "strategy.micro_batch_size=1"];
    const REFERENCE: &str = "pipeline.rlvr.algorithm.kl_coef=0.1";

    fn loaded(sets: &[&str]) -> Loaded {
        read(SMALL, &[&SETS[..], sets].concat()).unwrap()
    }

    fn with_memory(memory_bytes: Option<usize>) -> Machine {
        let mut machine = machine();
        machine.backends.iter_mut().for_each(|facts| facts.memory_bytes = memory_bytes);
        machine
    }

    /// What a rank needs at these stages.
    fn needs(sets: &[&str], stages: Stages) -> usize {
        let loaded = loaded(sets);
        let run = loaded.resolve(&with_memory(None)).unwrap();
        // Without memory to plan for, the cache is as large as it may be; here it is as small.
        let plan = Planner::new(&run, loaded.dataset.as_ref().unwrap()).unwrap().plan_at(&run, stages);
        let phases = plan
            .phases()
            .map(|(_, phase)| phase.total() - phase.kv_cache.saturating_sub(plan.least_kv_cache));
        phases.max().unwrap()
    }

    /// The stages of policy and reference on two ranks with so many bytes each.
    fn settled(sets: &[&str], memory_bytes: usize) -> Result<(u8, u8, Run), Error> {
        let run = loaded(&[&[REFERENCE], sets].concat()).resolve(&with_memory(Some(2 * memory_bytes)))?;
        let reference = run.reference.as_ref().unwrap().strategy.zero_stage.number();
        Ok((run.policy.strategy.zero_stage.number(), reference, run))
    }

    #[test]
    fn auto_is_the_fastest_stage_that_fits() {
        const AUTO: &str = "strategy.zero_stage=auto";
        let candidates = [(1, 1), (1, 3), (3, 1), (3, 3)];
        let needs = candidates.map(|(policy, reference)| {
            needs(&[REFERENCE], Stages { policy, reference: Some(reference), critic: None })
        });
        assert!(needs[0] > needs[1] && needs[1] > needs[3], "{needs:?}");
        for (index, &(policy, reference)) in candidates.iter().enumerate() {
            let first = needs.iter().position(|&it| it <= needs[index]).unwrap();
            let (own, its, run) = settled(&[AUTO], needs[index]).unwrap();
            assert_eq!((own, its), candidates[first], "with what {policy} and {reference} need");
            let yaml = run.to_yaml();
            assert!(
                yaml.starts_with("# strategy.zero_stage: auto is ") && !yaml.contains(": auto\n"),
                "{yaml}"
            );
            // What it leaves behind says the same without `auto`.
            let again = read(&yaml, &[]).unwrap().resolve(&with_memory(None)).unwrap();
            assert_eq!((&again.policy, &again.reference), (&run.policy, &run.reference));
        }
        let reason = settled(&[AUTO], needs[3]).unwrap().2.stage_reason.unwrap();
        assert!(reason.starts_with("auto is 3: ") && reason.contains("the fastest stage needs"), "{reason}");

        // One that is said stays.
        let sets = [AUTO, "roles.reference.strategy.zero_stage=2"];
        assert_eq!(settled(&sets, 1 << 30).map(|(own, its, _)| (own, its)).unwrap(), (1, 2));
        let sets = ["roles.reference.strategy.zero_stage=auto"];
        assert_eq!(settled(&sets, 1 << 30).map(|(own, its, _)| (own, its)).unwrap(), (0, 1));
        // One rank has nothing to share.
        assert_eq!(settled(&[AUTO, "devices=1"], 1 << 30).map(|(own, its, _)| (own, its)).unwrap(), (0, 0));
    }

    #[test]
    fn auto_keeps_logits_where_nothing_is_said() {
        const AUTO: &str = "strategy.zero_stage=auto";
        let kept = |sets: &[&str]| {
            let run = settled(sets, 1 << 30).unwrap().2;
            let says = run.stage_reason.is_some_and(|reason| reason.contains("and logits kept"));
            let keeps = run.policy.strategy.keep_logits;
            assert_eq!(says, keeps == Some(true));
            keeps
        };
        assert_eq!(kept(&[AUTO]), Some(true));
        assert_eq!(kept(&[AUTO, "strategy.keep_logits=false"]), Some(false));
        assert_eq!(kept(&["roles.reference.strategy.zero_stage=auto"]), None);
    }

    #[test]
    fn auto_knows_a_critic() {
        let sets = [
            "pipeline.rlvr.algorithm={advantage: {gae: {lambda: 0.9}}}",
            "pipeline.rlvr.critic={optimizer: {adamw: {learning_rate: 1}}}",
            "pipeline.rlvr.group_size=1",
        ];
        let auto = [&sets[..], &["strategy.zero_stage=auto"]].concat();
        let settled = |sets: &[&str], memory_bytes| {
            let run = loaded(sets).resolve(&with_memory(Some(2 * memory_bytes))).unwrap();
            let yaml = run.to_yaml();
            let again = read(&yaml, &[]).unwrap().resolve(&with_memory(None)).unwrap();
            assert_eq!((&again.policy, &again.critic), (&run.policy, &run.critic), "{yaml}");
            (Stages::of(&run), run.stage_reason)
        };
        let at = |policy, critic| Stages { policy, reference: None, critic: Some(critic) };
        // As long as one of them has its turn the other's states are away, and its weights are not.
        let (both, one, none) = (needs(&sets, at(1, 1)), needs(&sets, at(1, 3)), needs(&sets, at(3, 3)));
        assert!(both > one && one > none, "{both}, {one}, {none}");
        assert_eq!(settled(&auto, both).0, at(1, 1));
        let (stages, reason) = settled(&auto, one);
        assert_eq!(stages, at(1, 3));
        let reason = reason.unwrap();
        assert!(reason.starts_with("auto is 1 for the policy, 3 for its critic: "), "{reason}");
        assert_eq!(settled(&auto, none).0, at(3, 3));
        // One that is said stays, and its memory counts.
        let said = [&auto[..], &["roles.critic.strategy.zero_stage=0"]].concat();
        assert_eq!(settled(&said, 1 << 30).0, at(1, 0));
        let open = [&sets[..], &["roles.critic.strategy.zero_stage=auto"]].concat();
        assert_eq!(settled(&open, 1 << 30).0, at(0, 1));
    }

    #[test]
    fn auto_knows_a_reward_model_on_the_policys_devices() {
        let path = std::path::absolute("../tests/golden/reward_model").unwrap();
        let fields = "strategy: {offload: {params: none}}";
        let reward = format!(
            "pipeline.rlvr.reward=[{{exact: {{}}}}, {{model: {{path: {}, {fields}}}}}]",
            path.display()
        );
        // So wide that stage 3 makes room for it.
        let wide =
            "model.decoder={hidden_size: 64, layers: 12, heads: 2, intermediate_size: 128, max_length: 16}";
        let stage_in = |sets: &[&str], memory_bytes| {
            let sets = [&["strategy.zero_stage=auto", wide], sets].concat();
            let run = loaded(&sets).resolve(&with_memory(Some(2 * memory_bytes))).unwrap();
            run.policy.strategy.zero_stage.number()
        };
        let one = Stages { policy: 1, reference: None, critic: None };
        let (without, with) = (needs(&[wide], one), needs(&[wide, &reward], one));
        assert!(with > without, "{with} and {without}");
        assert_eq!((stage_in(&[], without), stage_in(&[&reward], with)), (1, 1));
        assert_eq!(stage_in(&[&reward], without), 3);
    }

    #[test]
    fn auto_that_finds_nothing_names_the_field() {
        let refused = |set: &str, memory| match loaded(&[set]).resolve(&with_memory(memory)) {
            Err(Error::Invalid(invalid)) => (invalid.field, invalid.message, invalid.help),
            other => panic!("{other:?}"),
        };
        let (field, message, help) = refused("strategy.zero_stage=auto", Some(1000));
        assert_eq!(field, "strategy.zero_stage");
        assert!(message.contains("no stage fits") && help.contains("anyroll plan"), "{message}, {help}");
        let (field, message, _) = refused("roles.policy.strategy.zero_stage=auto", None);
        assert_eq!(field, "roles.policy.strategy.zero_stage");
        assert!(message.contains("how much memory"), "{message}");
    }
}
