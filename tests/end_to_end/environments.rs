//! Rollouts of several turns, with a user's environment.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Map, Value};
use tempfile::TempDir;

use super::{
    DEADLINE, Process, anyroll, assert_same, assert_same_steps, asynchronous::assert_repeats, fail, finish,
    last_checkpoint, lasting_metrics, published_model::model, series, succeed, whole_lines,
};

const GUESS: &str = "configs/rlvr_guess_cpu.yaml";

/// Changes that make such a run take seconds.
const SMALL: [&str; 13] = [
    "pipeline.rlvr.warmup.steps=30",
    "pipeline.rlvr.warmup.optimizer.schedule.constant.warmup_steps=5",
    "pipeline.rlvr.steps=8",
    "pipeline.rlvr.prompts_per_step=8",
    "pipeline.rlvr.group_size=4",
    "pipeline.rlvr.mini_batches=2",
    "pipeline.rlvr.optimizer.schedule.linear.warmup_steps=2",
    "pipeline.rlvr.evaluation.every=4",
    "pipeline.rlvr.evaluation.prompts=20",
    "pipeline.rlvr.evaluation.samples=2",
    "pipeline.rlvr.checkpoint.every=4",
    "pipeline.rlvr.rollout.batch_size=12",
    "pipeline.rlvr.rollout.environment.workers=5",
];

/// The published game, and others with delays and random failures.
const MORE_GAMES: &str = r#"

class Slow(Guess):
    def step(self, text):
        import random, time
        time.sleep(random.random() * 0.02)
        return super().step(text)


class Moody(Guess):
    def reset(self, prompt, answer):
        if prompt[0] == "1":
            raise ValueError("a prompt that it does not like")
        self.prompt = prompt
        super().reset(answer)

    def step(self, text):
        import os, time
        if self.prompt[0] == "2":
            os._exit(7)
        if self.prompt[:2] == "30":
            time.sleep(600)
        return super().step(text)


class Paid(Guess):
    def step(self, text):
        said = super().step(text)
        return {"reward": 0.1 if said["observation"] == ">" else -0.1, **said} if "observation" in said else said


class Uneven:
    def reset(self):
        self.turns = 0

    def step(self, text):
        import os
        self.turns += 1
        last = 1 if os.environ["RANK"] == "0" else 100
        return {"observation": ">", "done": self.turns == last, "reward": len(text) % 2}


class Chat:
    def reset(self):
        self.turns = 0
        return "\nSay much."

    def step(self, text):
        self.turns += 1
        return {"observation": f"that was turn {self.turns}", "done": self.turns == 3, "reward": len(text) % 2}
"#;

fn command(config: &str, run: &Path, sets: &[&str]) -> Command {
    let mut command = anyroll(["run", config, "--output", run.to_str().unwrap()]);
    for set in SMALL.iter().chain(sets) {
        command.args(["--set", set]);
    }
    command
}

pub(super) fn run(folder: &TempDir, name: &str, sets: &[&str]) -> PathBuf {
    let run = folder.path().join(name);
    succeed(command(GUESS, &run, sets));
    run
}

/// Returns the `--set`s of an environment in a file of `folder`.
fn game(folder: &TempDir, class: &str) -> [String; 2] {
    let path = folder.path().join("games.py");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let published = fs::read_to_string(root.join("configs/environments/guess.py")).unwrap();
    fs::write(&path, published + MORE_GAMES).unwrap();
    let environment = "pipeline.rlvr.rollout.environment";
    [format!("{environment}.path={}", path.display()), format!("{environment}.class={class}")]
}

/// Under ZeRO-3 each token needs the shards of all ranks, so the rank that is done keeps serving its own.
#[test]
fn a_rank_that_samples_a_hundred_times_longer_changes_nothing_under_zero_3() {
    let folder = tempfile::tempdir().unwrap();
    let [path, class] = game(&folder, "Uneven");
    let run = |stage: usize| {
        let stage = format!("strategy.zero_stage={stage}");
        let sets = [
            &path,
            &class,
            &stage,
            "devices=2",
            "model.decoder.max_length=816",
            "pipeline.rlvr.steps=3",
            "pipeline.rlvr.rollout.max_new_tokens=800",
            // A turn without an end would end its episode.
            "pipeline.rlvr.rollout.environment.max_turn_tokens=40",
            "pipeline.rlvr.rollout.environment.max_turns=100",
        ];
        run(&folder, &stage, &sets)
    };
    let [replicated, sharded] = [0, 3].map(run);
    for step in 0..3 {
        assert_eq!(["min", "max"].map(|of| series(&sharded, &format!("turns/{of}"))[step]), [1.0, 100.0]);
    }
    let [a, b] = [&replicated, &sharded].map(|run| without_memory(run));
    assert_same_steps(&a, &b);
}

/// Metrics that do not depend on the stage.
fn without_memory(run: &Path) -> Vec<Map<String, Value>> {
    let mut steps = lasting_metrics(run);
    steps.iter_mut().for_each(|step| step.retain(|name, _| !name.starts_with("memory/")));
    steps
}

fn samples(run: &Path) -> Vec<Value> {
    let lines = whole_lines(&run.join("samples.jsonl"));
    lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn who_listens_learns_more_than_can_be_had_without() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = anyroll(["run", GUESS, "--output", run.to_str().unwrap()]);
    command.args(["--set", "pipeline.rlvr.steps=80"]);
    let ended = Process::start(command).finish_within(2 * DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let pass_at_1 = series(&run, "eval/pass@1");
    let (before, after) = (pass_at_1[0], *pass_at_1.last().unwrap());
    assert!(before < 0.3, "the warm-up alone reaches {before}");
    assert!(after > 0.45, "four blind guesses are right in 0.4 of the games, and it is in {after}");
    let turns = series(&run, "turns/mean");
    assert!(turns.iter().all(|&turns| turns > 1.0 && turns <= 4.0), "{turns:?}");
    // Each turn was received, and recorded as it was.
    let samples = samples(&run);
    let several = samples.iter().filter(|sample| sample["turns"].as_array().unwrap().len() > 1);
    assert!(several.count() > samples.len() / 4);
    for sample in &samples {
        let turns = sample["turns"].as_array().unwrap();
        let told = |turn: &Value| {
            let said = turn["observation"].as_str().unwrap_or_default();
            format!("{}{said}", turn["text"].as_str().unwrap())
        };
        assert_eq!(turns.iter().map(told).collect::<String>(), sample["completion"].as_str().unwrap());
        let earned: f64 = turns.iter().filter_map(|turn| turn["reward"].as_f64()).sum();
        assert_eq!(Some(earned), sample["reward"].as_f64());
    }
    let report = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(report.contains("\"observation\":\""), "the report shows no turns");
}

/// The time of an environment's answer depends on the clock, but its results do not.
#[test]
fn neither_the_clock_nor_a_resume_changes_a_bit() {
    let folder = tempfile::tempdir().unwrap();
    let [path, quick] = game(&folder, "Guess");
    let [_, slow] = game(&folder, "Slow");
    let whole = run(&folder, "quick", &[&path, &quick]);
    let again = run(&folder, "slow", &[&path, &slow]);
    assert_repeats(&whole, &again);
    let workers = "pipeline.rlvr.rollout.environment.workers=12";
    assert_same(&whole, &run(&folder, "many", &[&path, &slow, workers]));
    // In a cache with room for one sample, kept samples must be freed now and then.
    let tight = run(&folder, "tight", &[&path, &slow, "pipeline.rlvr.rollout.kv_cache.memory=1.0e-9"]);
    assert_same(&whole, &tight);
    let [kept, of_tight] = [&whole, &tight].map(|run| series(run, "perf/kept_tokens"));
    assert!(kept.iter().zip(&of_tight).all(|(all, some)| some < all), "{kept:?} and {of_tight:?}");
}

/// Episodes sent to other ranks, and greedy ones next to the groups.
#[test]
fn groups_that_are_picked_keep_their_episodes() {
    let folder = tempfile::tempdir().unwrap();
    for (name, sets) in [
        ("mixed", "pipeline.rlvr.selection={mixed_groups: {max_batches: 4}}"),
        ("remax", "pipeline.rlvr.algorithm.advantage=remax"),
    ] {
        let one = run(&folder, &format!("{name}-one"), &[sets]);
        let two = run(&folder, &format!("{name}-two"), &[sets, "devices=2"]);
        for metric in ["reward/mean", "turns/mean", "response_length/mean", "loss/policy", "grad_norm"] {
            let [one, two] = [&one, &two].map(|run| series(run, metric)[0]);
            assert!((one - two).abs() <= 1e-5 * one.abs().max(1.0), "{name}, {metric}: {one} and {two}");
        }
        assert!(series(&one, "grad_norm").iter().any(|&norm| norm > 0.0), "{name}: nothing was learned");
    }
}

/// Credit of each turn: its rewards from that turn on, on any rank.
#[test]
fn turns_have_credit_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let credit = "pipeline.rlvr.algorithm.credit=turns";
    let algorithm = |field: &str| format!("pipeline.rlvr.algorithm.{field}");
    // If only the last turn has a reward, values see no difference.
    let gae = [
        &*algorithm("advantage={gae: {gamma: 0.9}}"),
        "pipeline.rlvr.critic={optimizer: {adamw: {learning_rate: 1.0e-3}}}",
    ];
    let last = run(&folder, "gae", &gae);
    assert_same(&last, &run(&folder, "gae-turns", &[&gae[..], &[credit]].concat()));

    let [path, paid] = game(&folder, "Paid");
    // Only the first step is compared.
    let short = ["pipeline.rlvr.steps=3", "pipeline.rlvr.evaluation.prompts=4"];
    let compare = |name: &str, sets: &[&str], other: &[&str]| {
        let sets = [&[&*path, &paid], &short[..], sets].concat();
        let one = run(&folder, name, &[&sets[..], &[credit]].concat());
        let other = run(&folder, &format!("{name}-other"), &[&sets[..], other].concat());
        ["reward/mean", "loss/policy", "grad_norm"]
            .map(|metric| [&one, &other].map(|run| series(run, metric)[0]))
    };
    let kl = [&*algorithm("kl_coef=0.05"), &algorithm("kl_in={reward: {}}")];
    let mixed = "pipeline.rlvr.selection={mixed_groups: {max_batches: 2}}";
    for (name, sets) in [
        ("rloo", vec![&*algorithm("advantage=rloo"), kl[0], kl[1], mixed]),
        ("reinforce", vec![&*algorithm("advantage=reinforce"), "pipeline.rlvr.scoring.random=true"]),
    ] {
        for [one, two] in compare(name, &sets, &[credit, "devices=2"]) {
            assert!((one - two).abs() <= 1e-5 * one.abs().max(1.0), "{name}: {one} and {two}");
        }
    }
    for (name, sets) in [("grpo-paid", &[][..]), ("gae-paid", &gae)] {
        let [[earned, as_much], _, [norm, of_sums]] = compare(name, sets, &[]);
        assert!(earned == as_much && norm != of_sums, "{name}: {earned}, {as_much}, {norm}, {of_sums}");
    }
    // Rewards one turn later may weigh less.
    let discounted = algorithm("credit={turns: {gamma: 0.5}}");
    for (name, sets) in [("grpo-less", &[][..]), ("gae-less", &gae)] {
        let [[earned, as_much], _, [norm, less]] = compare(name, sets, &[&discounted]);
        assert!(earned == as_much && norm != less, "{name}: {earned}, {as_much}, {norm}, {less}");
    }
}

/// Every feature of a step, on two ranks.
#[test]
fn every_zero_stage_computes_the_same_and_so_does_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let full = [
        "pipeline.rlvr.algorithm.advantage={gae: {}}",
        "pipeline.rlvr.critic={optimizer: {adamw: {learning_rate: 1.0e-3}}}",
        "pipeline.rlvr.algorithm.kl_coef=0.05",
        "pipeline.rlvr.algorithm.entropy_coef=0.01",
        "pipeline.rlvr.algorithm.old_logprobs=recompute",
        "pipeline.rlvr.algorithm.rollout_correction={truncate: {level: sequence, max: 2.0}}",
        "pipeline.rlvr.epochs=2",
        "strategy.micro_batch_size=3",
    ];
    let run = |name: &str, sets: &[&str]| run(&folder, name, &[&full[..], sets].concat());
    let one = run("one", &[]);
    let whole = run("whole", &["devices=2", "strategy.zero_stage=0"]);
    let sharded = run("sharded", &["devices=2", "strategy.zero_stage=3"]);
    assert_same_steps(&lasting_metrics(&whole), &lasting_metrics(&sharded));
    assert!(last_checkpoint(&whole) == last_checkpoint(&sharded), "the checkpoints differ");
    for name in
        ["reward/mean", "turns/mean", "loss/policy", "entropy", "critic/vf_loss", "response_length/mean"]
    {
        let [one, two] = [&one, &whole].map(|run| series(run, name)[0]);
        assert!((one - two).abs() <= 1e-5 * one.abs().max(1.0), "{name}: {one} and {two}");
    }
    // Observations between turns are not sampled tokens: their log-probs are not compared.
    let apart = series(&one, "rollout/logprob_diff_max");
    assert!(apart.iter().all(|&difference| difference < 1e-4), "{apart:?}");
}

#[test]
fn strict_rollouts_of_several_turns_have_the_log_probs_of_training() {
    let folder = tempfile::tempdir().unwrap();
    let strict = ["pipeline.rlvr.rollout.strict=true", "strategy.micro_batch_size=3"];
    let run = run(&folder, "strict", &strict);
    assert_eq!(series(&run, "rollout/logprob_diff_max"), [0.0; 8]);
    assert!(series(&run, "turns/max").iter().all(|&turns| turns > 1.0));
    assert!(series(&run, "perf/kept_tokens").iter().all(|&tokens| tokens > 0.0));
}

#[test]
fn what_goes_wrong_costs_its_samples_and_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let [path, moody] = game(&folder, "Moody");
    let timeout = "pipeline.rlvr.rollout.environment.timeout_s=0.5";
    let patient = "pipeline.rlvr.reward=[{environment: {}, max_error_rate: 0.9}]";
    let sets = [
        &*path,
        &moody,
        timeout,
        patient,
        // Samples without tokens, alone in their batch.
        "strategy.micro_batch_size=1",
        "pipeline.rlvr.algorithm.kl_coef=0.01",
        "pipeline.rlvr.algorithm.kl_in={reward: {}}",
    ];
    let moody_run = run(&folder, "moody", &sets);
    let errors = series(&moody_run, "reward/environment/errors");
    assert!(errors.len() > 4, "{errors:?}");
    let timeouts: f64 = series(&moody_run, "reward/environment/timeouts").iter().sum();
    assert!(timeouts > 0.0 && timeouts < errors.iter().sum(), "{timeouts} of {errors:?}");
    assert_eq!(series(&moody_run, "selection/left_out"), series(&moody_run, "reward/error_rate"));
    for name in ["loss/policy", "kl/reference", "reward/mean"] {
        assert_eq!(series(&moody_run, name).len(), 8, "{name} is not a number");
    }

    let ended = finish(command(GUESS, &folder.path().join("strict"), &[&path, &moody]));
    for words in ["`environment` failed on", "max_error_rate"] {
        assert!(ended.error().contains(words), "{ended:#?}");
    }
}

/// A published model's words are sent to its environment as text, and return as messages of its chat
/// template.
#[test]
fn a_chat_model_hears_messages() {
    let folder = tempfile::tempdir().unwrap();
    let [path, class] = game(&folder, "Chat");
    let model = format!("model={{path: {}, chat: true}}", model().display());
    let sets = [
        &*path,
        &class,
        &model,
        "pipeline.rlvr.warmup.steps=0",
        "pipeline.rlvr.rollout.max_new_tokens=300",
        "pipeline.rlvr.rollout.environment.max_turn_tokens=60",
        // The model is random and would rarely end otherwise; only some turns have an end token.
        "pipeline.rlvr.rollout.stop=[a, e, i, o, t, n]",
    ];
    let run = run(&folder, "chat", &sets);
    assert!(series(&run, "turns/max").contains(&3.0), "{:?}", series(&run, "turns/mean"));
    let samples = samples(&run);
    let longest = samples.iter().max_by_key(|sample| sample["turns"].as_array().unwrap().len()).unwrap();
    let said = longest["turns"][0]["observation"].as_str().unwrap();
    assert_eq!(said.split_whitespace().collect::<Vec<_>>().join(" "), "user that was turn 1 assistant");
}

#[test]
fn what_an_environment_cannot_be_with_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [path, half] = game(&folder, "Half");
    let check = |sets: &[&str], words: [&str; 2]| {
        let mut command = anyroll(["check", GUESS]);
        for set in sets {
            command.args(["--set", set]);
        }
        let told = finish(command);
        assert_eq!(told.code, Some(1), "{told:#?}");
        assert!(words.iter().all(|words| told.stderr.contains(words)), "{told:#?}");
    };
    const ENVIRONMENT: &str = "pipeline.rlvr.rollout.environment";
    let set = |field: &str| format!("{ENVIRONMENT}.{field}");
    check(&["pipeline.rlvr.rollout.async={ahead: 1}"], ["rollout.async.ahead", "write `ahead: 0`"]);
    check(&["devices=1", "roles.rollout={devices: 1}"], ["roles.rollout", "leave one of the two out"]);
    check(&["pipeline.rlvr.reward=exact"], ["pipeline.rlvr.reward", "add `- environment: {}`"]);
    check(&[&format!("{ENVIRONMENT}=null")], ["reward[0].environment", "there is no environment"]);
    check(&[&set("role=tool")], [".environment.role", "write `none`"]);
    let credit = "pipeline.rlvr.algorithm.credit=turns";
    let algorithm = |field: &str| format!("pipeline.rlvr.algorithm.{field}");
    let alone = ["pipeline.rlvr.reward=exact", credit, &format!("{ENVIRONMENT}=null")];
    check(&alone, ["algorithm.credit", "without `rollout.environment`"]);
    for (field, words) in [
        ("advantage=remax", ["algorithm.advantage", "a greedy episode"]),
        ("advantage=opo", ["algorithm.advantage", "write `grpo`, `rloo`"]),
        ("advantage=gpg", ["algorithm.advantage", "write `grpo`, `rloo`"]),
        ("reward_norm={std: batch}", ["algorithm.reward_norm", "leave it out"]),
        ("reward_clip=1.0", ["algorithm.reward_clip", "leave it out"]),
        ("loss=gspo", ["algorithm.loss", "one ratio a sequence"]),
        ("credit={turns: {gamma: 1.5}}", ["algorithm.credit.turns.gamma", "from 0 to 1"]),
    ] {
        check(&[credit, &algorithm(field)], words);
    }
    check(&[&set("max_turns=0")], [".environment.max_turns", "1 or above"]);
    check(
        &[&set("max_turn_tokens=13")],
        [".environment.max_turn_tokens", "at most `rollout.max_new_tokens`, 12"],
    );
    check(&[&set("path=configs/none.py")], [".environment.path", "there is no file configs/none.py"]);
    check(&[&path, &half], [".environment.path", "no class `Half`"]);
    let error = fail(command(GUESS, &folder.path().join("half"), &[&path, &half]));
    assert!(error.contains("rollout.environment") && error.contains("no class `Half`"), "{error}");
    let error = fail(anyroll(["reward", "environment", "--file", "none.jsonl"]));
    assert!(error.contains("it is of episodes, and here is none"), "{error}");
}
