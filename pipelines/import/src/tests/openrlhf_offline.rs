//! OpenRLHF's commands that train on given texts.

use super::{openrlhf_trl::imported_from, *};

/// Commands as in OpenRLHF's examples, recognized by their program.
const SFT: &str = "set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft --max_len 4096 --dataset data/orca.jsonl --input_key question --output_key response \\
    --train_batch_size 256 --micro_train_batch_size 2 --pretrain models/llama --save_path ./ckpt --save_steps -1 \\
    --zero_stage 2 --max_epochs 3 --packing_samples --bf16 --learning_rate 2e-6 --gradient_checkpointing
EOF
deepspeed --module $training_commands
";

const DPO: &str = "deepspeed --module openrlhf.cli.train_dpo --pretrain models/llama --dataset data/pairs.jsonl \
    --apply_chat_template --beta 0.2 --train_batch_size 256 --micro_train_batch_size 1 --zero_stage 3 --ref_offload";

const RM: &str = "torchrun -m openrlhf.cli.train_rm --model.model_name_or_path models/llama --data.dataset a.jsonl \
    --eval.dataset b.jsonl --adam.lr 1e-5 --ds.zero_stage 3 --ds.param_dtype bf16 --model.loss_type sigmoid \
    --ds.value_head_prefix score";

#[track_caller]
fn check(import: &Import, lines: &[&str]) {
    check_refused(import, &[]);
    check_loads_as("offline", import);
    for line in lines {
        assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
    }
}

#[test]
fn supervised_fine_tuning() {
    let import = imported("sft.sh", SFT, Origin::OpenrlhfSft);
    check(
        &import,
        &[
            "  path: models/llama\n  chat: false\n",
            "  zero_stage: 2\n",
            "  recompute: full\n",
            "  micro_batch_size: 2\n",
            "    batch_size: 256\n",
            "    steps:\n      data_epochs: 3\n",
            "        learning_rate: 2.0e-6\n",
            "        cosine:\n          warmup_steps:\n            share: 0.03\n          final_ratio: 0.1\n",
            "    objective: sft\n",
            "        path: data/orca.jsonl\n        columns:\n          answer: response\n          prompt: question\n",
            "        max_tokens: 4096\n        long_prompts:\n          truncate: keep_start\n",
            "    evaluation:\n      prompts: 0\n",
        ],
    );
    let told = "mapped    eval.dataset: null by default -> pipeline.offline.evaluation.prompts: 0";
    check_rows(&import, &[("eval.dataset", told)]);
    let whole = imported_from(
        "openrlhf.cli.train_sft --dataset a.jsonl --multiturn --apply_chat_template --pretrain m",
        Origin::OpenrlhfSft,
    );
    check(&whole, &["    turns: all\n", "          answer: input\n", "      data_epochs: 2\n"]);
    let told = "changed   train.max_epochs: 2 by default -> pipeline.offline.steps: {\"data_epochs\":2}";
    check_rows(&whole, &[("train.max_epochs", told)]);
}

#[test]
fn pairs() {
    let dpo = imported("dpo.sh", DPO, Origin::OpenrlhfDpo);
    let offload = "  reference:\n    strategy:\n      offload:\n        params: between_steps\n";
    check(
        &dpo,
        &[
            offload,
            "  path: models/llama\n  chat: true\n",
            "  micro_batch_size: 2\n",
            "      dpo:\n        beta: 0.2\n",
            "      data_epochs: 1\n",
            "          answer: chosen\n          rejected: rejected\n",
        ],
    );
    let ipo = imported("ipo.sh", &format!("{DPO} --ipo --max_samples 2560"), Origin::OpenrlhfDpo);
    check(
        &ipo,
        &["      ipo:\n        beta: 0.2\n", "      data_epochs: 1\n", "        max_records: 2560\n"],
    );
    let told = "mapped    max_samples: 2560 -> pipeline.offline.data.file.max_records: 2560";
    check_rows(&ipo, &[("max_samples", told)]);
    let rpo = format!("{DPO} --nll_loss_coef 0.3 --ref_pretrain models/llama");
    check(&imported("rpo.sh", &rpo, Origin::OpenrlhfDpo), &["        sft_weight: 0.3\n"]);

    let rm = imported("rm.sh", RM, Origin::OpenrlhfRm);
    check(
        &rm,
        &[
            "      reward_model:\n        center: 0.0\n",
            "        learning_rate: 0.00001\n",
            "        held_out: b.jsonl\n",
            "  micro_batch_size: 2\n",
        ],
    );
    assert!(!rm.yaml().contains("evaluation:") && !rm.yaml().contains("truncate"), "{}", rm.yaml());
}

/// Trainer that was removed in mid 2025.
#[test]
fn judged_answers() {
    let kto = "deepspeed --module openrlhf.cli.train_kto --pretrain models/llama --dataset data/judged.jsonl \
        --input_key instruction --output_key response --label_key score --desirable_loss_weight 1.2 --eval_steps 10";
    let import = imported("kto.sh", kto, Origin::OpenrlhfKto);
    check(
        &import,
        &[
            "      kto:\n        beta: 0.01\n        desirable_weight: 1.2\n",
            "          answer: response\n          prompt: instruction\n          label: score\n",
            "        max_tokens: 2048\n",
            "  micro_batch_size: 8\n",
            "      prompts: 0\n",
        ],
    );
    check_rows(&import, &[("eval.steps", "no effect eval.steps: 10 (evaluation is off)")]);
}

/// Trainer that was removed with the flat flags.
#[test]
fn steps_are_judged() {
    let prm = "deepspeed --module openrlhf.cli.train_prm --pretrain models/mistral --dataset data/math_shepherd.jsonl \
        --input_key input --label_key value --placeholder_token ки --reward_tokens + - --max_len 4096 --bf16 \
        --train_batch_size 256 --micro_train_batch_size 8 --learning_rate 1e-6 --zero_stage 3 --packing_samples";
    let import = imported("prm.sh", prm, Origin::OpenrlhfPrm);
    check(
        &import,
        &[
            "      prm:\n        step_separator: ки\n",
            "          steps: completions\n          step_labels: value\n",
            "        max_tokens: 4096\n        long_prompts:\n          truncate: keep_start\n",
            "  micro_batch_size: 8\n",
            "    batch_size: 256\n",
            "      data_epochs: 1\n",
        ],
    );
    let told = "changed   placeholder_token: ки -> pipeline.offline.objective.prm.step_separator: ки (the model has a";
    check_rows(&import, &[("placeholder_token", told)]);
    let least = imported_from("openrlhf.cli.train_prm --dataset a.jsonl --pretrain m", Origin::OpenrlhfPrm);
    check(
        &least,
        &["          step_labels: label\n", "        learning_rate: 1.0e-6\n", "        max_tokens: 2048\n"],
    );
}

#[test]
fn texts_to_go_on_pretraining_with() {
    let sft = "openrlhf.cli.train_sft --dataset a.jsonl --pretrain m --pretrain_mode --input_key body";
    check(&imported_from(sft, Origin::OpenrlhfSft), &["        columns:\n          text: body\n"]);
    let answers = imported_from(&format!("{sft} --output_key more"), Origin::OpenrlhfSft);
    check_refused(&answers, &["model.pretrain_mode_enable"]);
}

#[test]
fn what_they_say_and_we_have_not_is_refused() {
    for (command, keys) in [
        (format!("{DPO} --ref_pretrain models/other"), &["ref.model_name_or_path"][..]),
        (format!("{DPO} --ipo --label_smoothing 0.1"), &["model.label_smoothing"]),
        (format!("{RM} --model.margin_loss_enable --optim muon"), &["model.margin_loss_enable", "optim"]),
        (
            format!("{RM} --ds.load_in_4bit --data.dataset_probs 0.5,0.5"),
            &["ds.load_in_4bit", "data.dataset_probs"],
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.sh");
        fs::write(&path, &command).unwrap();
        check_refused(&import(&path, None).unwrap(), keys);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    fs::write(&path, DPO).unwrap();
    let error = import(&path, Some(Origin::OpenrlhfSft)).unwrap_err().to_string();
    assert!(error.contains("calls `openrlhf.cli.train_dpo`, not `openrlhf.cli.train_sft`"), "{error}");
}

const PPO: &str = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --aux_loss_coef 0.01\n";

#[test]
fn the_weight_of_the_loss_that_balances_experts() {
    for (import, pipeline) in [
        (imported("dpo.sh", &format!("{DPO} --aux_loss_coef 0.01\n"), Origin::OpenrlhfDpo), "  offline:\n"),
        (imported("ppo.sh", PPO, Origin::Openrlhf), "    algorithm:\n"),
        (
            imported("grpo.yaml", "num_generations: 8\nrouter_aux_loss_coef: 0.01\n", Origin::Trl),
            "    algorithm:\n",
        ),
    ] {
        let yaml = import.yaml();
        assert!(yaml.contains("router_aux_loss_coef: 0.01\n") && yaml.contains(pipeline), "{yaml}");
    }
}
