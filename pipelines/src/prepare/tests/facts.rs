//! Facts that `anyroll check` tells, and checks for a machine that is another one.

use super::*;
use crate::data_facts::data_facts;

fn checked(sets: &[&str], machine: &Machine) -> Result<Prepared, Error> {
    read(SMALL, sets)?.draft.prepare(machine, Purpose::Check)
}

fn facts(sets: &[&str]) -> Vec<String> {
    let Prepared { run, opened } = checked(sets, &machine()).unwrap();
    data_facts(&run, &opened).unwrap()
}

/// A file of 40 sums with prompts of 4 or 5 characters.
fn sums(folder: &Path) -> String {
    let line = |number: u32| format!("{{\"prompt\": \"{number}+1=\", \"answer\": \"{}\"}}\n", number + 1);
    let path = folder.join("sums.jsonl");
    std::fs::write(&path, (0..40).map(line).collect::<String>()).unwrap();
    path.display().to_string()
}

#[test]
fn facts_on_data_are_those_of_the_records() {
    let folder = tempfile::tempdir().unwrap();
    let path = sums(folder.path());
    // The held-out file has 10 other prompts.
    let held = (50..60).map(|number| format!("{{\"prompt\": \"{number}+1=\", \"answer\": \"1\"}}\n"));
    let held_out = folder.path().join("held.jsonl");
    std::fs::write(&held_out, held.collect::<String>()).unwrap();
    let file = format!("{{file: {{path: {path}, held_out: {}}}}}", held_out.display());
    let data = format!("pipeline.rlvr.data={file}");
    // 10 prompts have 4 characters, 40 have 5; 20 steps of 4 prompts are 2 passes over 40.
    assert_eq!(
        facts(&[&data]),
        [
            "data: 40 prompts trained on, 10 held out",
            "tokens of a prompt: 4.8 on average, 5 at most",
            "20 steps of 4 prompts: 2 epochs",
        ]
    );
    let mixed = "pipeline.rlvr.selection.mixed_groups={}";
    assert_eq!(facts(&[&data, mixed])[2], "20 steps of 4 prompts: at least 2 epochs");
    assert_eq!(
        facts(&[]),
        ["data: prompts generated for each step", "tokens of a prompt: 7 on average, 7 at most"]
    );
    let mix = format!(
        "pipeline.rlvr.data={{mix: [{{domain: sums, weight: 3, data: {file}}}, {{domain: sort, data: {{sort: {{digits: 3}}}}}}]}}"
    );
    assert_eq!(
        facts(&[&mix])[..2],
        [
            "data of `sums`: 40 prompts trained on, 10 held out",
            "data of `sort`: prompts generated for each step"
        ]
    );
    assert_eq!(facts(&[&mix])[3], "20 steps of 4 prompts: 1.5 epochs of `sums`");
}

#[test]
fn a_published_models_prompts_are_counted_with_its_template() {
    let folder = tempfile::tempdir().unwrap();
    let model = std::path::absolute("../tests/golden/tiny_model").unwrap();
    let data = format!("pipeline.rlvr.data={{file: {{path: {}}}}}", sums(folder.path()));
    let model = format!("model={{path: {}}}", model.display());
    let evaluated = "pipeline.rlvr.evaluation.prompts=1";
    let loaded = read(SMALL, &[&model, &data, evaluated]).unwrap();
    let texts = loaded.opened.texts().unwrap();
    let lengths: Vec<usize> = texts
        .dataset
        .examples()
        .iter()
        .map(|record| {
            texts
                .base
                .tokenizer
                .encode_messages(&record.conversation(), None, &Default::default())
                .unwrap()
                .len()
        })
        .collect();
    let told = facts(&[&model, &data, evaluated])[1].clone();
    let longest = lengths.iter().max().unwrap();
    assert!(told.ends_with(&format!("{longest} at most")) && *longest > 5, "{told}");
}

#[test]
fn a_backend_that_is_not_here_is_assumed_in_a_check_only() {
    let absent = |name: &str| BackendFacts {
        unavailable: Some("libgone.so is not there".to_owned()),
        memory_bytes: None,
        ..facts_of(name, Some(0))
    };
    let machine = Machine { backends: vec![absent("npu"), facts_of("cpu", None)], ..machine() };
    for (devices, ranks) in [("2", 2), ("[1, 3, 5, 7]", 4), ("all", 1)] {
        let devices = format!("devices={devices}");
        let sets = ["backend=npu", &devices, "strategy.zero_stage=auto"];
        let run = checked(&sets, &machine).unwrap().run;
        assert_eq!(run.world_size, ranks);
        assert_eq!(machine.missing(&run).map(|facts| &*facts.name).collect::<Vec<_>>(), ["npu"]);
        assert!(run.to_yaml().contains("zero_stage: auto"), "its memory is not known here");
        assert_eq!(run.config.devices == Devices::All, devices.ends_with("all"));
        let refused = only_problem(read(SMALL, &sets).unwrap().resolve(&machine).unwrap_err());
        assert_eq!(refused.field, "backend");
        assert!(refused.message.contains("libgone.so is not there"), "{refused}");
    }
    // All else is checked, on another role's backend too, and `auto` takes what is here.
    let refused = only_problem(checked(&["backend=npu", "devices=3"], &machine).err().unwrap());
    assert!(refused.message.contains("cannot be shared evenly"), "{refused}");
    let critic = [
        "roles.critic.backend=npu",
        "pipeline.rlvr.algorithm={advantage: {gae: {lambda: 0.9}}}",
        "pipeline.rlvr.critic={optimizer: {adamw: {learning_rate: 1}}}",
        "pipeline.rlvr.group_size=1",
    ];
    let run = checked(&critic, &machine).unwrap().run;
    assert_eq!(machine.missing(&run).count(), 1);
    let run = checked(&["backend=auto"], &machine).unwrap().run;
    assert_eq!((&*run.policy.backend, machine.missing(&run).count()), ("cpu", 0));
}

fn facts_of(name: &str, devices: Option<usize>) -> BackendFacts {
    super::facts(name, true, devices)
}

/// A parameter without a default needs a column: of a reward's function, and of an environment's `reset`.
#[test]
fn a_parameter_that_no_column_gives_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let data = format!("pipeline.rlvr.data={{file: {{path: {}}}}}", sums(folder.path()));
    let file = folder.path().join("mine.py");
    std::fs::write(
        &file,
        "def wants(completions, bonus): return [1.0]\n\
         def has(completions, answer, finished, bonus=1, **columns): return [1.0]\n\
         class Wants:\n    def reset(self, prompt, level): pass\n    def step(self, text): pass\n\
         class Has:\n    @staticmethod\n    def reset(prompt, answer, level=1): pass\n    def step(self, text): pass\n",
    )
    .unwrap();
    let path = file.display();
    let reward =
        |name: &str| format!("pipeline.rlvr.reward=[{{python: {{path: {path}, function: {name}}}}}]");
    let environment = |class: &str| {
        let fields = format!("{{path: {path}, class: {class}, max_turns: 2, max_turn_tokens: 2}}");
        format!("pipeline.rlvr.rollout={{max_new_tokens: 8, batch_size: 16, environment: {fields}}}")
    };
    let earned = "pipeline.rlvr.reward=[{environment: {}}]";
    let evaluated = "pipeline.rlvr.evaluation.prompts=1";
    checked(&[&data, evaluated, &reward("has")], &machine()).unwrap();
    checked(&[&data, evaluated, &environment("Has"), earned], &machine()).unwrap();
    for (sets, field, missing) in [
        ([&*reward("wants"), "seed=0"], "pipeline.rlvr.reward[0].python", "`bonus`"),
        ([&*environment("Wants"), earned], "pipeline.rlvr.rollout.environment.class", "`level`"),
    ] {
        let sets = [&[&*data, evaluated][..], &sets].concat();
        let problem = only_problem(checked(&sets, &machine()).err().unwrap());
        assert_eq!(problem.field, field);
        assert!(problem.message.contains(missing) && problem.message.contains("`answer`"), "{problem}");
    }
    // Without code it is not known.
    let draft = read(SMALL, &[&data, evaluated, &reward("wants")]).unwrap().draft;
    draft.prepare(&machine(), Purpose::CheckWithoutCode).unwrap();
}
