//! Resolution of `zero_stage: auto`.

use anyroll_config::{Recompute, RewardConfig, RolesConfig, Section, ZeroStage, error_chain::one_line};

use crate::{
    format::gib,
    opened::Opened,
    plan::{Planner, Stages, Tightest, Unsettled, settle as fastest},
    run::Run,
};

/// Writes the stages that `auto` chooses into `run`, or reports why there are none.
pub(super) fn settle(run: &mut Run, opened: &Opened, at: &Section) {
    if run.roles().any(|role| role.has_open_stage) && !choose(run, opened, at) {
        return;
    }
    write_down(run);
}

/// Chooses the unresolved stages and sets them in the roles. Returns false, with a problem, if there are none.
fn choose(run: &mut Run, opened: &Opened, at: &Section) -> bool {
    let field = &open_field(run);
    let planner = Planner::new(run, opened);
    let Some(planner) = at.take(planner, field, |error| one_line(error), "write the number of a stage")
    else {
        return false;
    };
    let settled = match fastest(&planner, run) {
        Ok(settled) => settled.expect("a stage is open"),
        Err(unsettled) => {
            refuse(unsettled, field, at);
            return false;
        }
    };
    let Stages { policy, reference, critic, reward_models } = settled.stages;
    let keeps_logits = settled.keep_logits == Some(true);
    run.policy.choose(policy);
    run.policy.strategy.keep_logits = keeps_logits;
    run.config.strategy.keep_logits = settled.keep_logits;
    for (role, stage) in [(&mut run.reference, reference), (&mut run.critic, critic)] {
        if let (Some(role), Some(stage)) = (role, stage) {
            role.choose(stage);
            role.strategy.keep_logits = keeps_logits;
        }
    }
    for model in run.reward_models.iter_mut().flatten().filter(|model| model.has_open_stage) {
        reward_models.into_iter().for_each(|stage| model.choose(stage));
    }
    run.stage_reason = run.policy_memory_bytes().map(|memory_bytes| settled.reason(memory_bytes));
    true
}

/// The field that is `auto`.
fn open_field(run: &Run) -> String {
    let RolesConfig { policy, reference, critic, rollout: _ } = &run.config.roles;
    let of_roles =
        [("policy", &policy.strategy), ("reference", &reference.strategy), ("critic", &critic.strategy)];
    let of_roles = of_roles.into_iter().map(|(name, says)| (format!("roles.{name}"), says.zero_stage));
    let of_models = run.config.pipeline.reward().into_iter().flat_map(RewardConfig::numbered_models);
    let of_models = of_models.map(|(index, model)| {
        let stage = model.strategy.as_ref().map(|strategy| strategy.zero_stage);
        (format!("pipeline.rlvr.reward[{index}].model"), stage)
    });
    let top = [(String::new(), Some(run.config.strategy.zero_stage))].into_iter();
    let mut all = of_roles.chain(top).chain(of_models);
    let open = all.find(|(_, stage)| *stage == Some(ZeroStage::Auto)).expect("a stage is open");
    format!("{}.strategy.zero_stage", open.0).trim_start_matches('.').to_owned()
}

fn refuse(unsettled: Unsettled, field: &str, at: &Section) {
    match unsettled {
        Unsettled::NoMemory => at.refuse(
            field,
            "`auto` needs to know how much memory the devices have, and their driver does not say",
            "write the number of a stage; `anyroll plan --memory 80GiB` says what fits",
        ),
        Unsettled::TooLarge { tightest: Tightest { phase, needs, memory_bytes }, recompute } => {
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
            at.refuse(field, message, help);
        }
    }
}

/// Writes the stages into the resolved config.
fn write_down(run: &mut Run) {
    let (config, policy) = (&mut run.config, ZeroStage::Stage(run.policy.strategy.zero_stage));
    let is_open = |stage: Option<ZeroStage>| stage == Some(ZeroStage::Auto);
    let top_is_open = is_open(Some(config.strategy.zero_stage));
    if top_is_open {
        config.strategy.zero_stage = policy;
    }
    let roles = &mut config.roles;
    if is_open(roles.policy.strategy.zero_stage) {
        roles.policy.strategy.zero_stage = Some(policy);
    }
    let (reference, critic) = (&mut roles.reference.strategy, &mut roles.critic.strategy);
    for (role, says) in [(&run.reference, reference), (&run.critic, critic)] {
        let stage = role.as_ref().map_or(policy, |role| ZeroStage::Stage(role.strategy.zero_stage));
        let says = &mut says.zero_stage;
        let follows = says.is_none() && top_is_open && stage != policy;
        if is_open(*says) || follows {
            *says = Some(stage);
        }
    }
    let models = config.pipeline.reward_mut().into_iter().flat_map(RewardConfig::models_mut);
    for (model, role) in models.zip(&run.reward_models) {
        if let (Some(says), Some(role)) = (&mut model.strategy, role) {
            says.zero_stage = ZeroStage::Stage(role.strategy.zero_stage);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;
    use crate::{
        plan::Planner,
        prepare::tests::{Loaded, SMALL, machine, only_problem, read},
        run::Machine,
    };
    use anyroll_config::Error;

    /// Two ranks, and a model that is deep enough for stage 3 to be smaller.
    const SETS: [&str; 3] = ["model.decoder.layers=12", "devices=2", "strategy.micro_batch_size=1"];
    /// A width at which training memory dominates.
    const WIDE: &str =
        "model.decoder={hidden_size: 64, layers: 12, heads: 2, intermediate_size: 128, max_length: 16}";
    const REFERENCE: &str = "pipeline.rlvr.algorithm.kl_coef=0.1";

    fn loaded(sets: &[&str]) -> Loaded {
        read(SMALL, &[&SETS[..], sets].concat()).unwrap()
    }

    fn with_memory(memory_bytes: Option<usize>) -> Machine {
        let mut machine = machine();
        machine.backends.iter_mut().for_each(|facts| facts.memory_bytes = memory_bytes);
        machine
    }

    /// The policy's stage, and no other role.
    fn only(policy: u8) -> Stages {
        Stages { policy, reference: None, critic: None, reward_models: None }
    }

    /// Bytes that a rank needs at these stages.
    fn needs(sets: &[&str], stages: Stages) -> usize {
        let loaded = loaded(sets);
        let run = loaded.resolve_but_stage(&with_memory(None)).unwrap();
        // Without a memory limit the plan has the largest cache; this takes the smallest one.
        let plan = Planner::new(&run, &loaded.opened).unwrap().plan_at(&run, stages);
        let phases = plan
            .phases()
            .map(|(_, phase)| phase.total() - phase.kv_cache.saturating_sub(plan.least_kv_cache));
        phases.max().unwrap()
    }

    /// Stages of policy and reference on two ranks with `memory_bytes` each.
    fn settled(sets: &[&str], memory_bytes: usize) -> Result<(u8, u8, Run), Error> {
        let run = loaded(&[&[REFERENCE], sets].concat()).resolve(&with_memory(Some(2 * memory_bytes)))?;
        let reference = run.reference.as_ref().unwrap().strategy.zero_stage;
        Ok((run.policy.strategy.zero_stage, reference, run))
    }

    #[test]
    fn auto_is_the_fastest_stage_that_fits() {
        const AUTO: &str = "strategy.zero_stage=auto";
        let candidates = [(1, 1), (1, 3), (3, 1), (3, 3)];
        let needs = candidates.map(|(policy, reference)| {
            needs(&[REFERENCE], Stages { reference: Some(reference), ..only(policy) })
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
            // The resolved config has the same stages without `auto`.
            let again = read(&yaml, &[]).unwrap().resolve(&with_memory(None)).unwrap();
            assert_eq!((&again.policy, &again.reference), (&run.policy, &run.reference));
        }
        let reason = settled(&[AUTO], needs[3]).unwrap().2.stage_reason.unwrap();
        assert!(reason.starts_with("auto is 3: ") && reason.contains("the fastest stage needs"), "{reason}");

        // A stage in the config is kept.
        let sets = [AUTO, "roles.reference.strategy.zero_stage=2"];
        assert_eq!(settled(&sets, 1 << 30).map(|(own, its, _)| (own, its)).unwrap(), (1, 2));
        let sets = ["roles.reference.strategy.zero_stage=auto"];
        assert_eq!(settled(&sets, 1 << 30).map(|(own, its, _)| (own, its)).unwrap(), (0, 1));
        // A single rank has nothing to shard.
        assert_eq!(settled(&[AUTO, "devices=1"], 1 << 30).map(|(own, its, _)| (own, its)).unwrap(), (0, 0));
    }

    #[test]
    fn auto_keeps_logits_where_nothing_is_said() {
        const AUTO: &str = "strategy.zero_stage=auto";
        let kept = |sets: &[&str]| {
            let run = settled(sets, 1 << 30).unwrap().2;
            let says = run.stage_reason.is_some_and(|reason| reason.contains("and logits kept"));
            let keeps = run.config.strategy.keep_logits;
            assert_eq!((says, run.policy.strategy.keep_logits), (keeps == Some(true), says));
            keeps
        };
        assert_eq!(kept(&[AUTO]), Some(true));
        assert_eq!(kept(&[AUTO, "strategy.keep_logits=false"]), Some(false));
        assert_eq!(kept(&["roles.reference.strategy.zero_stage=auto"]), None);
    }

    #[test]
    fn the_reason_names_what_was_left_open() {
        let reason = |sets: &[&str]| settled(sets, 1 << 30).unwrap().2.stage_reason.unwrap();
        let said = "roles.reference.strategy.zero_stage=0";
        for (sets, starts) in [
            (&["strategy.zero_stage=auto"][..], "auto is 1, the fastest: "),
            (&["strategy.zero_stage=auto", said], "auto is 1, the fastest: "),
            (&["roles.reference.strategy.zero_stage=auto"], "auto is 1 for the reference, the fastest: "),
        ] {
            assert!(reason(sets).starts_with(starts), "{sets:?}: {}", reason(sets));
        }
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
        let at = |policy, critic| Stages { critic: Some(critic), ..only(policy) };
        // While one role computes, the other's states are offloaded, and its weights are not.
        let (both, one, none) = (needs(&sets, at(1, 1)), needs(&sets, at(1, 3)), needs(&sets, at(3, 3)));
        assert!(both > one && one > none, "{both}, {one}, {none}");
        assert_eq!(settled(&auto, both).0, at(1, 1));
        let (stages, reason) = settled(&auto, one);
        assert_eq!(stages, at(1, 3));
        let reason = reason.unwrap();
        assert!(reason.starts_with("auto is 1 for the policy, 3 for the critic: "), "{reason}");
        assert_eq!(settled(&auto, none).0, at(3, 3));
        // A stage in the config is kept, and its memory counts.
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
        let stage_in = |sets: &[&str], memory_bytes| {
            let sets = [&["strategy.zero_stage=auto", WIDE], sets].concat();
            let run = loaded(&sets).resolve(&with_memory(Some(2 * memory_bytes))).unwrap();
            run.policy.strategy.zero_stage
        };
        let one = only(1);
        let (without, with) = (needs(&[WIDE], one), needs(&[WIDE, &reward], one));
        assert!(with > without, "{with} and {without}");
        assert_eq!((stage_in(&[], without), stage_in(&[&reward], with)), (1, 1));
        assert_eq!(stage_in(&[&reward], without), 3);
    }

    /// Writes the reward model of the tests to `folder`, with its second layer 16 times, so that stage 3 is smaller.
    fn deep_reward_model(folder: &Path) {
        let golden = Path::new("../tests/golden/reward_model");
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(golden.join(name), folder.join(name)).unwrap();
        }
        let read = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
        let mut config = read(&fs::read(golden.join("config.json")).unwrap());
        config["num_hidden_layers"] = 16.into();
        config.as_object_mut().unwrap().remove("layer_types");
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let file = fs::read(golden.join("model.safetensors")).unwrap();
        let (length, rest) = file.split_first_chunk().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let (mut header, mut data) = (read(header), data.to_vec());
        for (name, tensor) in header.clone().as_object().unwrap() {
            let Some(name) = name.strip_prefix("model.layers.1.") else { continue };
            let [start, end] = [0, 1].map(|side| tensor["data_offsets"][side].as_u64().unwrap() as usize);
            for layer in 2..16 {
                let mut copied = tensor.clone();
                copied["data_offsets"] = vec![data.len(), data.len() + end - start].into();
                data.extend_from_within(start..end);
                header[format!("model.layers.{layer}.{name}")] = copied;
            }
        }
        let header = header.to_string().into_bytes();
        let file = [&(header.len() as u64).to_le_bytes(), &header[..], &data].concat();
        fs::write(folder.join("model.safetensors"), file).unwrap();
    }

    #[test]
    fn auto_finds_a_reward_models_stage() {
        let folder = tempfile::tempdir().unwrap();
        deep_reward_model(folder.path());
        let fields = "strategy: {zero_stage: auto, offload: {params: none}}";
        let auto = format!(
            "pipeline.rlvr.reward=[{{exact: {{}}}}, {{model: {{path: {}, {fields}}}}}]",
            folder.path().display()
        );
        let field = "pipeline.rlvr.reward[1].model.strategy.zero_stage";
        let settled = |sets: &[&str], memory_bytes| {
            let run = loaded(sets).resolve(&with_memory(Some(2 * memory_bytes))).unwrap();
            let yaml = run.to_yaml();
            let again = read(&yaml, &[]).unwrap().resolve(&with_memory(None)).unwrap();
            assert_eq!((&again.policy, &again.reward_models), (&run.policy, &run.reward_models), "{yaml}");
            let stage = run.reward_models[0].as_ref().unwrap().strategy.zero_stage;
            (run.policy.strategy.zero_stage, stage, run.stage_reason.unwrap())
        };
        // Training needs the most memory, and the reward model is resident then: sharding it leaves more room.
        let own = "strategy.zero_stage=1";
        let at = |reward_models| {
            needs(&[WIDE, own, &auto], Stages { reward_models: Some(reward_models), ..only(1) })
        };
        assert!(at(0) > at(3), "{} and {}", at(0), at(3));
        let (policy, stage, reason) = settled(&[WIDE, own, &auto], at(0));
        assert_eq!((policy, stage), (1, 0));
        assert!(reason.starts_with("auto is 0 for reward models, the fastest: "), "{reason}");
        let (policy, stage, reason) = settled(&[WIDE, own, &auto], at(0) - 1);
        assert_eq!((policy, stage), (1, 3));
        assert!(
            reason.contains("3 for reward models: ") && reason.contains("fastest stage needs"),
            "{reason}"
        );
        // A single rank has nothing to shard.
        assert_eq!(settled(&["devices=1", &auto], 1 << 30).1, 0);
        let refused = only_problem(loaded(&[&auto]).resolve(&with_memory(Some(1000))).unwrap_err());
        assert_eq!(refused.field, field);
        assert!(refused.message.contains("no stage fits"), "{refused}");
    }

    /// Memory of other devices decides the stage of the roles on them, and of no other role.
    #[test]
    fn auto_knows_devices_of_other_roles() {
        let sets = [
            "backend=gpu",
            "roles.critic.backend=cpu",
            "roles.critic.strategy.zero_stage=auto",
            "pipeline.rlvr.algorithm={advantage: {gae: {lambda: 0.9}}}",
            "pipeline.rlvr.critic={optimizer: {adamw: {learning_rate: 1}}}",
            "pipeline.rlvr.group_size=1",
        ];
        let host = |memory_bytes: usize| {
            let mut machine = with_memory(Some(1 << 40));
            let hosts = machine.backends.iter_mut().filter(|facts| facts.devices.is_none());
            hosts.for_each(|facts| facts.memory_bytes = Some(2 * memory_bytes));
            machine
        };
        let loaded = loaded(&sets);
        let run = loaded.resolve(&host(1 << 30)).unwrap();
        assert_eq!(run.critic.as_ref().unwrap().strategy.zero_stage, 1);
        let planner = Planner::new(&run, &loaded.opened).unwrap();
        let needs = |critic| {
            let plan = planner.plan_at(&run, Stages { critic: Some(critic), ..only(0) });
            assert_eq!((plan.critic, plan.others.len()), (None, 1));
            let device = &plan.others[0];
            assert_eq!((device.place().as_str(), &*device.roles), ("cpu [0]", &["critic"][..]));
            assert_eq!(device.fits(), Some(true));
            device.peak()
        };
        let ((phase, one), (_, three)) = (needs(1), needs(3));
        assert!(phase == "critic" && one > three, "{one} and {three}");
        for (memory_bytes, stage) in [(one, 1), (one - 1, 3), (three, 3)] {
            let run = loaded.resolve(&host(memory_bytes)).unwrap();
            assert_eq!(run.critic.unwrap().strategy.zero_stage, stage);
            assert_eq!(run.policy.strategy.zero_stage, 0);
        }
        let error = loaded.resolve(&host(three - 1)).unwrap_err().to_string();
        assert!(error.contains("roles.critic.strategy.zero_stage: no stage fits"), "{error}");
        assert!(error.contains("in critic on cpu [0]"), "{error}");
    }

    #[test]
    fn auto_that_finds_nothing_names_the_field() {
        let refused = |set: &str, memory| {
            let invalid = only_problem(loaded(&[set]).resolve(&with_memory(memory)).unwrap_err());
            (invalid.field, invalid.message, invalid.help)
        };
        let (field, message, help) = refused("strategy.zero_stage=auto", Some(1000));
        assert_eq!(field, "strategy.zero_stage");
        assert!(message.contains("no stage fits") && help.contains("anyroll plan"), "{message}, {help}");
        let (field, message, _) = refused("roles.policy.strategy.zero_stage=auto", None);
        assert_eq!(field, "roles.policy.strategy.zero_stage");
        assert!(message.contains("how much memory"), "{message}");
    }
}
