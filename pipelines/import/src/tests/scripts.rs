//! Forms of scripts, and bounds on what a script or a file may expand to.

use std::time::{Duration, Instant};

use super::openrlhf_trl::imported_from;
use super::*;

const CALL: &str =
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo";

/// Error of a file that must be refused at once.
#[track_caller]
fn refused_quickly(name: &str, text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    let start = Instant::now();
    let error = import(&path, None).unwrap_err().to_string();
    assert!(start.elapsed() < Duration::from_secs(20), "{name} took {:?}", start.elapsed());
    error
}

#[test]
fn what_doubles_is_refused_by_its_name() {
    let doubled = |first: &str, more: &str| format!("{first}\n{}{CALL} data.seed=$grows\n", more.repeat(40));
    for script in [
        doubled("grows=x", "grows=$grows$grows$grows\n"),
        doubled("grows=x", "grows=\"${grows}${grows}\"\n"),
        doubled("grows=x", "grows+=$grows\n"),
        doubled("grows=(x)", "grows=(\"${grows[@]}\" \"${grows[@]}\")\n"),
        doubled("grows=(x)", "grows+=(\"${grows[@]}\")\n"),
        doubled("grows=x", "export grows=${other:-$grows$grows}\n"),
    ] {
        let error = refused_quickly("run.sh", &script);
        assert!(error.contains("`grows` grows too long"), "{error}");
    }
    let list = ["${x}"; 12].join("\", \"");
    let error = refused_quickly("roll.yaml", &format!("rollout_batch_size: 1\nx: [\"{list}\"]\n"));
    assert!(error.contains("`${x}` grows too long"), "{error}");
    let keys: String = (0..20_000).map(|key| format!("k{key}: 1\n")).collect();
    let error = refused_quickly("roll.yaml", &format!("rollout_batch_size: 1\n{keys}"));
    assert!(error.contains("20001 keys"), "{error}");
}

#[test]
fn what_contains_itself_ends() {
    let script = "a='x \"$b\" verl.trainer.'\nb='x \"$a\" verl.trainer.'\nbash -c \"$a\"\n";
    let error = refused_quickly("run.sh", script);
    assert!(error.contains("nested too deeply"), "{error}");
    let error = refused_quickly("run.sh", &format!("{CALL}\n{}", "a=(".repeat(100_000)));
    assert!(error.contains("nested too deeply"), "{error}");
}

#[test]
fn arms_of_case_are_no_commands() {
    let script = format!(
        "while [[ $# -gt 0 ]]; do\n  case $1 in\n    --model) MODEL=$2; shift 2 ;;\n    -n|--name)\n      NAME=$2 ;;\n    \
         (--flag) ;;\n    *) break ;;\n  esac\ndone\nN=4\ncase a in --x) N=5 ;; esac\n{CALL} data.seed=3 \
         trainer.n_gpus_per_node=$N data.train_files=$MODEL\n"
    );
    let import = imported_from(&script, Origin::Verl);
    check_refused(&import, &["data.train_files", "trainer.n_gpus_per_node"]);
    assert!(import.yaml().contains("seed: 3\n"), "{}", import.yaml());
}

#[test]
fn a_comment_within_a_command_ends_it() {
    let script = format!(
        "{CALL} \\\n  data.train_batch_size=256 \\\n  # data.seed=1 \\\n  actor_rollout_ref.rollout.n=8 \\\n  \
         trainer.n_gpus_per_node=1\n"
    );
    let import = imported_from(&script, Origin::Verl);
    check_refused(&import, &["actor_rollout_ref.rollout.n", "trainer.n_gpus_per_node"]);
    assert!(import.yaml().contains("    group_size: 1\n"), "as the shell: {}", import.yaml());
}

#[test]
fn programs_by_their_paths() {
    let by_path = CALL.replace("-m verl.trainer.main_ppo", "/w/verl/trainer/main_ppo.py");
    assert_eq!(imported_from(&by_path, Origin::Verl).yaml(), imported_from(CALL, Origin::Verl).yaml());
    for (script, expected) in [
        (
            "ray job submit -- python3 /w/examples/train_ppo_ray.py \\\n --pretrain policy\n",
            "calls `/w/examples/train_ppo_ray.py`, not `-m openrlhf.cli.train_ppo_ray`",
        ),
        ("python3 main_ppo_split.py a=b\n", "a script that calls `main_ppo_split.py`"),
        ("docker run image\n", "has no command that calls"),
    ] {
        let error = refused_quickly("run.sh", script);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn folders_of_the_script_and_the_shell() {
    let folder = tempfile::tempdir().unwrap();
    let here = std::env::current_dir().unwrap();
    let path = folder.path().join("run.sh");
    let script = format!(
        "#!/bin/bash\nDIR=\"$(cd \"$(dirname \"${{BASH_SOURCE[0]}}\")\" >/dev/null 2>&1 && pwd)\"\nROOT=$(pwd)\n{CALL} \
         data.train_files=$DIR/../a.parquet data.val_files=$ROOT/b.parquet trainer.default_local_dir=$PWD/out\n"
    );
    fs::write(&path, script).unwrap();
    let import = import(&path, None).unwrap();
    check_refused(&import, &[]);
    for line in [
        format!("path: {}/../a.parquet\n", folder.path().display()),
        format!("held_out: {}/b.parquet\n", here.display()),
    ] {
        assert!(import.yaml().contains(&line), "no {line} in {}", import.yaml());
    }
}

#[test]
fn here_documents_are_read() {
    let program = "openrlhf.cli.train_sft --pretrain m --dataset a.jsonl --max_len 512";
    let alone = imported_from(&format!("deepspeed --module {program}"), Origin::OpenrlhfSft).yaml();
    let lines = program.replace(" --", "\n   --");
    for script in [
        format!(
            "read -r -d '' training <<EOF\n{lines}\nEOF\nif [[ $1 != slurm ]]; then\n    deepspeed --module $training\nfi"
        ),
        format!(
            "L=512\nread -r -d '' training <<-EOF\n\t{}\n\tEOF\ndeepspeed --module $training\n",
            lines.replace("512", "$L")
        ),
        format!("srun bash <<'EOF'\ndeepspeed --module {program}\nEOF\n"),
        format!("cat > note.txt <<END\n--x 'a\nEND\ndeepspeed --module {program}\n"),
    ] {
        assert_eq!(imported_from(&script, Origin::OpenrlhfSft).yaml(), alone, "{script}");
    }
}

#[test]
fn lists_and_backquotes() {
    let script = format!("A=(4 7)\n{CALL} trainer.n_gpus_per_node=${{A[0]}} data.seed=`date +%s`\n");
    let import = imported_from(&script, Origin::Verl);
    check_refused(&import, &["data.seed"]);
    assert!(import.yaml().contains("devices: 4\n"), "{}", import.yaml());
}
