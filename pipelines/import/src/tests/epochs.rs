//! Run lengths given as epochs.

use super::{openrlhf_trl::imported_from, *};

/// Checks that `import` is a run of this many epochs, and the row of its key.
#[track_caller]
fn check_epochs(import: &Import, pipeline: &str, epochs: &str, row: (&str, &str)) {
    check_refused(import, &[]);
    check_loads_as(pipeline, import);
    let steps = format!("    steps:\n      data_epochs: {epochs}\n");
    assert!(import.yaml().contains(&steps), "no\n{steps}in\n{}", import.yaml());
    check_rows(import, &[row]);
}

/// Checks that the number of steps takes precedence, or is left to the user.
#[track_caller]
fn check_no_epochs(import: &Import, refused: &[&str], row: (&str, &str)) {
    check_refused(import, refused);
    assert!(!import.yaml().contains("data_epochs"), "{}", import.yaml());
    check_rows(import, &[row]);
}

#[test]
fn verls_epochs() {
    let verl = |overrides: &str| {
        let usual = "data.train_files=a.parquet actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo";
        imported("run.sh", &format!("python3 -m verl.trainer.main_ppo {usual} {overrides}"), Origin::Verl)
    };
    let key = "trainer.total_epochs";
    let told = "changed   trainer.total_epochs: 15 -> pipeline.rlvr.steps: {\"data_epochs\":15} (a step may span two epochs";
    let own = verl("trainer.total_epochs=15 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05");
    check_epochs(&own, "rlvr", "15", (key, told));
    let share = "          warmup_steps:\n            share: 0.05\n";
    assert!(own.yaml().contains(share), "{}", own.yaml());
    check_epochs(&verl(""), "rlvr", "30", (key, "changed   trainer.total_epochs: 30 by default ->"));
    // "Only at the end" is not a number of steps.
    check_rows(&own, &[("trainer.save_freq", "changed   trainer.save_freq: -1 by default (set ")]);

    let steps = verl("trainer.total_epochs=15 trainer.total_training_steps=100");
    check_no_epochs(&steps, &[], (key, "no effect trainer.total_epochs: 15 (total_training_steps is set"));
    let filter = "algorithm.filter_groups.enable=True";
    let dapo = verl(&format!("{filter} trainer.total_epochs=15"));
    check_no_epochs(
        &dapo,
        &[key],
        (key, "refused   trainer.total_epochs: 15 (with `selection.mixed_groups`"),
    );
    check_refused(&verl(filter), &[]);
    check_refused(&verl("trainer.total_epochs=-1"), &[key]);
}

#[test]
fn trls_epochs() {
    let key = "num_train_epochs";
    let grpo = "model_name_or_path: m\ndataset_name: a/b\nreward_funcs: [accuracy_reward]\n";
    let trl = |more: &str| imported_from(&format!("{grpo}{more}"), Origin::Trl);
    check_epochs(
        &trl(""),
        "rlvr",
        "3",
        (key, "changed   num_train_epochs: 3 by default -> pipeline.rlvr.steps"),
    );
    let told = "changed   num_train_epochs: 0.5 -> pipeline.rlvr.steps: {\"data_epochs\":0.5} (";
    check_epochs(&trl("num_train_epochs: 0.5\nmax_steps: -1\n"), "rlvr", "0.5", (key, told));
    let steps = trl("num_train_epochs: 2\nmax_steps: 100\n");
    check_no_epochs(&steps, &[], (key, "no effect num_train_epochs: 2 (max_steps is set)"));
    assert!(steps.yaml().contains("    steps: 100\n"), "{}", steps.yaml());
    check_refused(&trl("num_train_epochs: few\n"), &[key]);
    for origin in [Origin::TrlSft, Origin::TrlDpo, Origin::TrlReward] {
        let text =
            "model_name_or_path: m\nnum_train_epochs: 2.0\nwarmup_ratio: 0.1\nlr_scheduler_type: cosine\n";
        let import = imported_from(text, origin);
        check_epochs(
            &import,
            "offline",
            "2",
            (key, "changed   num_train_epochs: 2.0 -> pipeline.offline.steps"),
        );
        let share = "        cosine:\n          warmup_steps:\n            share: 0.1\n";
        assert!(import.yaml().contains(share), "{}", import.yaml());
    }
}

#[test]
fn openrlhfs_episodes() {
    let key = "train.num_episodes";
    let openrlhf = |more: &str| {
        let usual =
            "--pretrain m --rollout_batch_size 128 --advantage_estimator group_norm --generate_max_len 64";
        imported_from(&format!("python -m openrlhf.cli.train_ppo_ray {usual} {more}"), Origin::Openrlhf)
    };
    let told = "changed   train.num_episodes: 3 -> pipeline.rlvr.steps: {\"data_epochs\":3} (";
    let own = openrlhf("--num_episodes 3 --max_epochs 2");
    check_epochs(&own, "rlvr", "3", (key, told));
    let ratio = "mapped    actor.lr_warmup_ratio: 0.03 by default -> pipeline.rlvr.optimizer.schedule.cosine.warmup_steps";
    check_rows(&openrlhf(""), &[("actor.lr_warmup_ratio", ratio)]);
    assert!(own.yaml().contains("    epochs: 2\n"), "passes over a step's completions: {}", own.yaml());
    check_epochs(&openrlhf(""), "rlvr", "1", (key, "changed   train.num_episodes: 1 by default"));
    let samples = openrlhf("--num_episodes 3 --max_samples 1280");
    check_epochs(&samples, "rlvr", "3", (key, told));
    assert!(samples.yaml().contains("        max_records: 1280\n"), "{}", samples.yaml());
    let filter = "--dynamic_filtering --dynamic_filtering_reward_range 0 1";
    let filtered = openrlhf(&format!("--num_episodes 3 {filter}"));
    check_no_epochs(
        &filtered,
        &[key],
        (key, "refused   train.num_episodes: 3 (with `selection.mixed_groups`"),
    );
    check_refused(&openrlhf(filter), &[]);
}
