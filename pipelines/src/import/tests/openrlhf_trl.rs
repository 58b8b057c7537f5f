//! Scripts around OpenRLHF's command, and what OpenRLHF, TRL and trlx count and mean otherwise than we do.

use super::*;

const PPO: &str = "python -m openrlhf.cli.train_ppo_ray --pretrain m --rollout_batch_size 128 --zero_stage 3";

/// Imports `text` as what `origin` has, whatever its keys are.
#[track_caller]
fn imported_from(text: &str, origin: Origin) -> Import {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, text).unwrap();
    import(&path, Some(origin)).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[track_caller]
fn check_lines(import: &Import, lines: &[&str]) {
    let yaml = import.yaml();
    for line in lines {
        assert!(yaml.contains(line), "no\n{line}in\n{yaml}");
    }
}

#[test]
fn openrlhfs_command_is_found_in_a_script() {
    let alone = imported_from(PPO, Origin::Openrlhf).yaml();
    for script in [
        format!("{PPO} 2>&1 | tee log"),
        format!("{PPO} &> 'a log' && echo --zero_stage 1; exit"),
        format!("{PPO}\npython -m openrlhf.cli.train_sft --zero_stage 1"),
        format!("deepspeed --module openrlhf.cli.train_sft --learning_rate 1 \\\n --x 2 && {PPO}"),
        format!("# don't\nread -r commands <<EOF\n{}\nEOF\n", PPO.replace(" --", " \\\n   --")),
        format!(
            "srun bash -c \\\n\"pip install 'ray[default]' && ray job submit --a='{{}}' -- {PPO}\" &>> $LOG"
        ),
        format!("CODE=$(cd \"$(dirname x)\" && pwd) # here's where\r\n{PPO} \\\r\n\r\n"),
    ] {
        assert_eq!(imported_from(&script, Origin::Openrlhf).yaml(), alone, "{script}");
    }
    let quoted = imported_from(&format!("{PPO} --prompt_data 'my data/a b.jsonl'"), Origin::Openrlhf);
    check_lines(&quoted, &["path: my data/a b.jsonl\n"]);
}

#[test]
fn a_script_without_one_ppo_command_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    for (script, expected) in [
        ("python -m openrlhf.cli.train_sft --pretrain x", "calls `openrlhf.cli.train_sft`"),
        ("python -m openrlhf.cli.train_ppo --pretrain x", "calls `openrlhf.cli.train_ppo`"),
        ("# openrlhf.cli.train_ppo_ray --pretrain x", "has no command"),
        (&*format!("{PPO}\n{PPO}"), "2 times"),
        (&*format!("{PPO} --input_key 'question"), "quote ' in line 1 is never closed"),
        (&*format!("{PPO}\n  --seed 3"), "a line begins with `--seed`"),
        ("openrlhf.cli.train_ppo_ray $@", "`$@` belongs to no flag"),
    ] {
        fs::write(&path, script).unwrap();
        let error = import(&path, None).unwrap_err().to_string();
        assert!(error.contains(expected), "{script}: {error}");
    }
}
