//! Scripts around OpenRLHF's command, and settings that OpenRLHF, TRL and trlx count or define differently
//! from us.

use super::*;

const PPO: &str = "python -m openrlhf.cli.train_ppo_ray --pretrain m --rollout_batch_size 128 --zero_stage 3";

/// Imports `text` as a config of `origin`, whatever its keys are.
#[track_caller]
pub(super) fn imported_from(text: &str, origin: Origin) -> Import {
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
fn openrlhfs_ring_becomes_a_split_of_heads() {
    let ring = imported_from(&format!("{PPO} --ring_attn_size 2 --ring_head_stride 2"), Origin::Openrlhf);
    check_lines(&ring, &["  sequence_parallel: 2\n"]);
    let layers = imported_from(&format!("{PPO} --ds_tensor_parallel_size 2"), Origin::Openrlhf);
    check_lines(&layers, &["  tensor_parallel: 2\n"]);
    let mut rows = ring.rows.iter().filter(|row| row.key.contains("ring"));
    assert!(rows.all(|row| !matches!(row.outcome, Outcome::Refused { .. })), "{:#?}", ring.rows);
}

#[test]
fn a_script_without_one_ppo_command_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    for (script, expected) in [
        (
            "python -m openrlhf.cli.train_kd --pretrain x",
            "`openrlhf.cli.train_sft`, `openrlhf.cli.train_dpo`",
        ),
        ("python -m openrlhf.cli.train_ppo --pretrain x", "calls `openrlhf.cli.train_ppo`"),
        ("# openrlhf.cli.train_ppo_ray --pretrain x", "has no command"),
        (&*format!("{PPO}\n{PPO}"), "2 times"),
        (&*format!("{PPO} --input_key 'question"), "quote ' in line 1 is never closed"),
        (&*format!("{PPO}\n  --seed 3"), "a line starts with `--seed`"),
        ("openrlhf.cli.train_ppo_ray stray", "`stray` does not follow a flag"),
    ] {
        fs::write(&path, script).unwrap();
        let error = import(&path, None).unwrap_err().to_string();
        assert!(error.contains(expected), "{script}: {error}");
    }
}

#[test]
fn openrlhfs_variables_are_those_that_the_script_assigns() {
    let script = "\
MODEL=models/actor
N=$((2 * 4))
if hostname; then SEED=3; fi
python -m openrlhf.cli.train_ppo_ray --pretrain $MODEL --actor_num_gpus_per_node ${N} --zero_stage ${ZERO:-3} \\
    --seed $SEED --generate_max_len $(cat length) --use_wandb ${TOKEN} \"$@\"
";
    let import = imported_from(script, Origin::Openrlhf);
    check_lines(&import, &["  path: models/actor\n", "devices: 8\n", "  zero_stage: 3\n"]);
    check_refused(&import, &["train.seed", "rollout.max_new_tokens"]);
    let unknown = "refused   train.seed: $SEED (the value of its `$` is unknown";
    check_rows(&import, &[("train.seed", unknown), ("use_wandb", "no effect")]);
    assert!(!import.yaml().contains('$'), "{}", import.yaml());
}

/// Equal except for the rate.
#[test]
fn openrlhfs_critic_has_the_policys_optimizer() {
    let import = imported_from(&format!("{PPO} --adam_betas 0.9 0.9 --l2 0.1"), Origin::Openrlhf);
    let yaml = import.yaml();
    for (line, count) in [
        ("weight_decay: 0.1\n", 2),
        ("final_ratio: 0.1\n", 2),
        ("max_grad_norm: 1\n", 2),
        ("learning_rate: 9.0e-6\n", 1),
    ] {
        assert_eq!(yaml.matches(line).count(), count, "{line}in\n{yaml}");
    }
}

#[test]
fn openrlhfs_reward_model() {
    let flags = "--reward_pretrain models/rm --normalize_reward --reward_clip_range -5 5 --apply_chat_template \
        --prompt_max_len 512 --generate_max_len 1024 --freezing_actor_steps 3 --value_clip 0.3 \
        --overlong_buffer_len 256 --overlong_penalty_factor 0.5 --max_norm 0 --prompt_data a.jsonl --max_samples 1280";
    let import = imported_from(&format!("{PPO} {flags}"), Origin::Openrlhf);
    check_refused(&import, &[]);
    check_loads(&import);
    check_lines(
        &import,
        &[
            "    reward:\n    - model:\n        path: models/rm\n        chat: true\n    - length:\n",
            "        max_tokens: 1024\n        buffer_tokens: 256\n      weight: 0.5\n",
            "      reward_norm:\n        mean: running\n        std: running\n",
            "      reward_clip: 5\n",
            "        max_prompt_tokens: 512\n",
            "      value_clip: 0.3\n",
            "      warmup_steps: 3\n",
            "      max_grad_norm: 0\n",
            "          prompt: input\n",
        ],
    );
    let lines = [("prompt_max_len", "changed   prompt_max_len: 512"), ("reward.normalize_enable", "changed")];
    check_rows(&import, &lines);
    let plain = imported_from(PPO, Origin::Openrlhf);
    let clip = "mapped    reward.clip_range: [-10,10] by default -> pipeline.rlvr.algorithm.reward_clip: 10";
    check_rows(&plain, &[("reward.clip_range", clip)]);
    let remote = format!("{PPO} {flags} --remote_rm_url a.py --advantage_estimator group_norm");
    let remote = imported_from(&remote, Origin::Openrlhf);
    check_refused(&remote, &["critic.freezing_steps"]);
    let lines = [("reward.normalize_enable", "no effect"), ("reward.clip_range", "changed")];
    check_rows(&remote, &lines);
    let url = "http://127.0.0.1:8000/v1/rewards";
    let served = format!("{PPO} {flags} --remote_rm_url {url} --advantage_estimator group_norm");
    let served = imported_from(&served, Origin::Openrlhf);
    check_refused(&served, &["critic.freezing_steps"]);
    assert!(served.yaml().contains("- remote:") && served.yaml().contains(url), "{}", served.yaml());
    check_rows(&served, &[("reward.remote_url", "changed")]);
}

#[test]
fn what_openrlhf_says_and_we_have_not_is_refused() {
    for (flags, keys) in [
        ("--reward_clip_range -1 5", &["reward.clip_range"][..]),
        ("--reward_pretrain a,b", &["reward.model_name_or_path"]),
        ("--overlong_buffer_len 64 --generate_max_len 128", &["reward.overlong_buffer_len"]),
        ("--train_batch_size 48", &["train.batch_size"]),
        ("--n_samples_per_prompt -3", &["rollout.n_samples_per_prompt"]),
    ] {
        let import = imported_from(&format!("{PPO} {flags}"), Origin::Openrlhf);
        check_refused(&import, keys);
        assert!(!import.yaml().contains("reward:\n    - length"), "{}", import.yaml());
    }
}

const TRLX: &str = "\
train: {epochs: 100, total_steps: 1000, batch_size: 32, checkpoint_interval: 100, eval_interval: 8, minibatch_size: null}
model: {model_path: models/gpt}
optimizer: {name: adamw, kwargs: {lr: 2.0e-4}}
method: {name: PPOConfig, num_rollouts: 128, chunk_size: 32, ppo_epochs: 4, init_kl_coef: 0.2,
  scale_reward: running, gen_kwargs: {max_new_tokens: 8}}
";

/// `bf16` and `fp16` set the compute precision; `dtype` is that of the weights.
#[test]
fn trls_precision_and_optimizer() {
    for (text, line) in [
        ("", "precision: bf16\n"),
        ("dtype: float32\n", "precision: bf16\n"),
        ("torch_dtype: null\n", "precision: bf16\n"),
        ("bf16: true\ndtype: float32\n", "precision: bf16\n"),
        ("bf16: false\n", "precision: fp32\n"),
        ("bf16: false\ntorch_dtype: bfloat16\n", "precision: bf16\n"),
        ("fp16: true\n", "precision: fp16\n"),
        ("optim: adamw_torch_fused\n", "recompute: full\n"),
        ("optim: paged_adamw_32bit\n", "recompute: full\n"),
        ("optim: adamw_8bit\n", "  moments: 8bit\n"),
        ("optim: paged_adamw_8bit\n", "  moments: 8bit\n"),
        ("system_prompt: Think.\n", "  system_prompt: Think.\n"),
    ] {
        let import = imported_from(&format!("{TRL}{text}"), Origin::Trl);
        check_refused(&import, &[]);
        check_lines(&import, &[line]);
    }
    for (text, key) in
        [("optim: adafactor\n", "optim"), ("normalize_advantages: true\n", "normalize_advantages")]
    {
        check_refused(&imported_from(&format!("{TRL}{text}"), Origin::Trl), &[key]);
    }
    let pairs = imported_from("loss_type: [sigmoid]\n", Origin::TrlDpo);
    check_refused(&pairs, &[]);
    check_lines(&pairs, &["      dpo:\n        beta: 0.1\n"]);
    let whole = imported_from("loss_type: chunked_nll\nmax_seq_length: 256\n", Origin::TrlSft);
    check_refused(&whole, &[]);
    check_lines(&whole, &["    turns: all\n", "        max_tokens: 256\n"]);
    check_rows(&whole, &[("assistant_only_loss", "changed   assistant_only_loss: false by default")]);
}

#[test]
fn what_openrlhf_says_since_its_flags_have_dots() {
    let check = |flags: &str, lines: &[&str]| {
        let text = format!(
            "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset a.jsonl \
             --reward.remote_url r.py --algo.advantage.estimator reinforce {flags}\n"
        );
        let import = imported("ppo.sh", &text, Origin::Openrlhf);
        check_lines(&import, lines);
        import
    };
    let own = check("--data.max_len 512", &["      max_new_tokens: 512\n", "        signature: openrlhf\n"]);
    check_rows(&own, &[("data.max_len", "changed")]);
    let bounded = "--data.max_len 9216 --rollout.max_new_tokens 8192";
    check(bounded, &["      max_new_tokens: 8192\n", "        max_prompt_tokens: 1024\n"]);
    let correction = "--algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.4 4.0";
    let clamped = check(correction, &["        truncate:\n          level: token\n          max: 4.0\n"]);
    check_rows(&clamped, &[("algo.advantage.is_correction_enable", "changed")]);
    let masked = format!("{correction} --algo.advantage.is_correction_type icepop");
    check(&masked, &["        mask:\n          level: token\n          min: 0.4\n          max: 4.0\n"]);
    let other = check(&format!("{correction} --algo.advantage.is_correction_type seq-mask-tis"), &[]);
    check_refused(&other, &["algo.advantage.is_correction_enable"]);
    check("--actor.policy_loss_type gspo", &["      aggregation: seq_mean_token_mean\n"]);
    let evaluated =
        "--eval.dataset b.jsonl --eval.n_samples_per_prompt 8 --eval.temperature 0.6 --eval.split test";
    let evaluated = check(evaluated, &["        held_out: b.jsonl\n", "      samples: 8\n"]);
    check_refused(&evaluated, &[]);
    let off = check("--algo.kl.init_coef 0 --critic.adam.lr 9e-6", &["      kl_coef: 0\n"]);
    check_refused(&off, &[]);
    assert!(!off.yaml().contains("kl_in"), "{}", off.yaml());
    let cut = check("--reward.stop_properly_penalty_coef 0.5", &[]);
    check_refused(&cut, &["reward.stop_properly_penalty_coef"]);
}

#[test]
fn trlxs_updates_become_steps() {
    let import = imported("ppo.yml", TRLX, Origin::Trlx);
    check_refused(&import, &[]);
    check_loads(&import);
    check_lines(
        &import,
        &[
            "  micro_batch_size: 32\n",
            "    mini_batches: 4\n",
            "    steps: 63\n",
            "      every: 7\n",
            "      every: 1\n",
            "      reward_norm:\n        std: running\n",
        ],
    );
    let why = "(16 updates are one step here)";
    check_rows(
        &import,
        &[
            (
                "train.total_steps",
                format!("changed   train.total_steps: 1000 -> pipeline.rlvr.steps: 63 {why}").as_str(),
            ),
            (
                "train.batch_size",
                "changed   train.batch_size: 32 -> pipeline.rlvr.mini_batches: 4 (128 rollouts",
            ),
            ("train.epochs", "no effect"),
            ("train.checkpoint_interval", "changed"),
        ],
    );
    let epochs = imported("ppo.yml", &TRLX.replace("total_steps: 1000", "total_steps: 10000"), Origin::Trlx);
    check_lines(&epochs, &["    steps: 100\n"]);
    check_rows(&epochs, &[("train.epochs", "changed"), ("train.total_steps", "no effect")]);
    let clipped = TRLX.replace("ppo_epochs: 4", "ppo_epochs: 4, cliprange_reward: 10");
    check_rows(&imported("ppo.yml", &clipped, Origin::Trlx), &[("method.scale_reward", "changed")]);
    let uneven = imported("ppo.yml", &TRLX.replace("batch_size: 32, ch", "batch_size: 48, ch"), Origin::Trlx);
    check_refused(&uneven, &["train.batch_size"]);
}

/// trlx hands `max_length` to `generate`, which counts the prompt's tokens too.
#[test]
fn trlxs_max_length_bounds_the_completion_alone() {
    let with = |lengths: &str| {
        let text = TRLX.replace("max_new_tokens: 8", lengths);
        imported("ppo.yml", &text, Origin::Trlx)
    };
    let import = with("max_length: 64");
    check_refused(&import, &[]);
    check_lines(&import, &["      max_new_tokens: 64\n"]);
    let told = "changed   method.gen_kwargs.max_length: 64 -> pipeline.rlvr.rollout.max_new_tokens: 64 \
                (limits the completion only, where trlx counts its prompt too)";
    check_rows(&import, &[("method.gen_kwargs.max_length", told)]);
    let import = with("max_length: 64, max_new_tokens: 8");
    check_lines(&import, &["      max_new_tokens: 8\n"]);
    check_rows(&import, &[("method.gen_kwargs.max_length", "no effect")]);
    check_refused(&with("max_length: 6.5"), &["method.gen_kwargs.max_length"]);
}

#[test]
fn trlxs_adapters_are_pefts() {
    let peft = "model: {model_path: models/gpt, peft_config: {peft_type: LORA, r: 4, use_dora: true, \
                layers_to_transform: 1, bias: all}}";
    let import = imported("ppo.yml", &TRLX.replace("model: {model_path: models/gpt}", peft), Origin::Trlx);
    check_refused(&import, &["model.peft_config.bias"]);
    let lora = "  lora:\n    rank: 4\n    alpha: 8\n    dora: true\n    targets:\n    - q_proj\n    - v_proj\n    \
                layers:\n    - 1\n";
    check_lines(&import, &[lora]);
    let told = "mapped    model.peft_config.target_modules: [\"q_proj\",\"v_proj\"] by default -> model.lora.targets";
    check_rows(&import, &[("model.peft_config.target_modules", told)]);
    let unset =
        imported("grpo.yaml", "num_generations: 8\nuse_peft: true\nlora_target_modules: null\n", Origin::Trl);
    check_lines(&unset, &["    targets:\n    - q_proj\n    - v_proj\n"]);
}

#[test]
fn frozen_weights_in_four_bits() {
    const LINE: &str = "  frozen_weights: nf4\n";
    let trl = |text: &str| imported("grpo.yaml", &format!("num_generations: 8\n{text}"), Origin::Trl);
    let given = "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\nbnb_4bit_compute_dtype: bfloat16\n\
                 use_bnb_nested_quant: true\n";
    let import = trl(given);
    check_refused(&import, &[]);
    check_lines(&import, &[LINE]);
    check_rows(&import, &[("load_in_4bit", "changed"), ("use_bnb_nested_quant", "no effect")]);
    check_refused(&trl(&given.replace("type: nf4", "type: fp4")), &["bnb_4bit_quant_type"]);
    check_refused(&trl(&given.replace("use_peft: true", "use_peft: false")), &["load_in_4bit"]);
    check_refused(&trl(&format!("{given}use_dora: true\n")), &["load_in_4bit"]);
    check_refused(&trl(&given.replace("in_4bit: true", "in_4bit: false")), &[]);
    let openrlhf = |flags: &str| imported_from(&format!("{PPO} {flags}"), Origin::Openrlhf);
    let import = openrlhf("--lora_rank 8 --load_in_4bit");
    check_refused(&import, &[]);
    check_lines(&import, &[LINE]);
    check_refused(&openrlhf("--load_in_4bit"), &["ds.load_in_4bit"]);
}

const TRLX_ILQL: &str = "\
train: {epochs: 100, total_steps: 1000, batch_size: 128, checkpoint_interval: 500, eval_interval: 50, seq_length: 64,
  trainer: AccelerateILQLTrainer, pipeline: PromptPipeline, tracker: null}
model: {model_path: models/gpt, num_layers_unfrozen: -1}
optimizer: {name: adamw, kwargs: {lr: 5.0e-5, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 1.0e-6}}
scheduler: {name: cosine_annealing, kwargs: {T_max: 1000, eta_min: 5.0e-5}}
method: {name: ilqlconfig, tau: 0.7, gamma: 0.99, cql_scale: 0.1, awac_scale: 1, alpha: 0.001, beta: 0,
  steps_for_target_q_sync: 5, two_qs: true, gen_kwargs: {max_new_tokens: 56, top_k: 20, beta: 4, temperature: 1.0}}
";

#[test]
fn trlxs_ilql_is_offline() {
    let import = imported("ilql.yml", TRLX_ILQL, Origin::Trlx);
    check_refused(&import, &[]);
    check_loads_as("offline", &import);
    check_lines(
        &import,
        &[
            "  micro_batch_size: 128\n",
            "    steps: 1000\n",
            "    batch_size: 128\n",
            "        tau: 0.7\n        gamma: 0.99\n        cql_scale: 0.1\n        awac_scale: 1\n        beta: 0\n        \
             alpha: 0.001\n        steps_for_target_q_sync: 5\n        two_qs: true\n        guidance: 4\n",
            "      max_grad_norm: 0\n",
        ],
    );
    check_rows(&import, &[("train.epochs", "no effect"), ("method.gen_kwargs.top_k", "no effect")]);
    let epochs = imported("ilql.yml", &TRLX_ILQL.replace("total_steps: 1000, ", ""), Origin::Trlx);
    check_lines(&epochs, &["    steps:\n      data_epochs: 100\n"]);
    let swept = imported("ilql.yml", &TRLX_ILQL.replace("beta: 4", "beta: [1, 4]"), Origin::Trlx);
    check_refused(&swept, &["method.gen_kwargs.beta"]);
}

#[test]
fn trlxs_other_methods_are_no_ppo() {
    let text = TRLX.replace("train: {", "train: {trainer: AccelerateILQLTrainer, ");
    let import = imported("mixed.yml", &text, Origin::Trlx);
    check_refused(&import, &["train.trainer"]);
    assert!(!import.yaml().contains("rlvr"), "{}", import.yaml());
    let import = imported("rft.yml", &TRLX.replace("PPOConfig", "RFTConfig"), Origin::Trlx);
    check_refused(&import, &["method.name"]);
}

const TRL: &str = "model_name_or_path: m\ndataset_name: a/b\nreward_funcs: [accuracy_reward]\n";

#[test]
fn trls_values_that_are_none_are_refused() {
    for (text, keys) in [
        ("num_generations: -3\n", &["num_generations"][..]),
        ("use_peft: maybe\nlora_r: 4\n", &["use_peft"]),
        ("max_steps: 1.5\n", &["max_steps"]),
        ("per_device_train_batch_size: 2\n", &["num_generations"]),
        ("per_device_train_batch_size: 16\nnum_generations: 7\n", &["num_generations"]),
        ("steps_per_generation: 2\nnum_generations: 16\n", &["steps_per_generation"]),
        ("gradient_accumulation_steps: 2\nsteps_per_generation: 3\n", &["steps_per_generation"]),
        ("save_steps: 0.1\n", &["save_steps"]),
    ] {
        check_refused(&imported_from(&format!("{TRL}{text}"), Origin::Trl), keys);
    }
    for (text, origin) in
        [("per_device_train_batch_size: -3", Origin::TrlDpo), ("max_steps: 1.5", Origin::TrlSft)]
    {
        let import = imported_from(text, origin);
        check_refused(&import, &[text.split(':').next().unwrap()]);
    }
    let maybe = imported_from("assistant_only_loss: maybe\n", Origin::TrlSft);
    check_refused(&maybe, &["assistant_only_loss"]);
}

#[test]
fn what_trl_means_by_what_it_leaves_out() {
    let text = "loss_type: cispo\nmax_grad_norm: 0\nmax_prompt_length: 300\nmax_steps: 100\nsave_steps: 100\n\
        steps_per_generation: 4\nnum_generations: 4\neval_steps: null\nuse_peft: null\n";
    let import = imported_from(&format!("{TRL}{text}"), Origin::Trl);
    check_refused(&import, &[]);
    check_loads(&import);
    check_lines(
        &import,
        &[
            "          max_ratio: 0.2\n",
            "      max_grad_norm: 0\n",
            "        path: a/b.jsonl\n        columns: trl\n        max_prompt_tokens: 300\n",
            "      every: 25\n",
        ],
    );
    let ratio =
        "changed   epsilon: 0.2 by default -> pipeline.rlvr.algorithm.loss.cispo.max_ratio: 0.2 (without";
    check_rows(
        &import,
        &[
            ("epsilon", ratio),
            ("max_grad_norm", "mapped"),
            ("max_steps", "changed   max_steps: 100 -> pipeline.rlvr.steps: 25 (4 updates"),
            ("save_steps", "changed   save_steps: 100 -> pipeline.rlvr.checkpoint.every: 25 (4 updates"),
        ],
    );
    check_rows(&imported_from("max_steps: -1\n", Origin::Trl), &[("max_steps", "no effect")]);
    let bounded = imported_from(&format!("{TRL}loss_type: cispo\nepsilon_high: 5\n"), Origin::Trl);
    check_lines(&bounded, &["          max_ratio: 5\n"]);
    let file = imported_from("dataset_name: data/a.parquet\nmax_grad_norm: 0.0\n", Origin::TrlDpo);
    check_lines(&file, &["        path: data/a.parquet\n", "      max_grad_norm: 0\n"]);
}

#[test]
fn trls_losses_of_sequences_and_masks() {
    let by_sequence = "importance_sampling_level: sequence\n";
    for (text, lines) in [
        ("loss_type: sapo\n", &["aggregation: seq_mean_token_mean\n"][..]),
        (
            "loss_type: vespo\nvespo_k_neg: 4\n",
            &["        vespo:\n          k_negative: 4\n", "aggregation: token_mean\n"],
        ),
        (
            &format!("loss_type: luspo\n{by_sequence}epsilon: 2e-3\n"),
            &["        gspo:\n          clip_low: 0.002\n", "aggregation: seq_mean_token_sum\n"],
        ),
        ("off_policy_mask_threshold: 0.2\n", &["      off_policy_mask: 0.2\n"]),
        ("off_policy_mask_threshold: null\ntop_entropy_quantile: 1.0\n", &[]),
        ("top_entropy_quantile: 0.2\n", &["      top_entropy: 0.2\n", "      old_logprobs: recompute\n"]),
        (
            "beta: 0.01\nuse_bias_correction_kl: true\n",
            &["      kl_in:\n        loss:\n          weighted: true\n"],
        ),
        (
            "multi_objective_aggregation: normalize_then_sum\n",
            &["      advantage:\n        gdpo:\n          eps: 0.0001\n"],
        ),
        ("multi_objective_aggregation: sum_then_normalize\n", &["      advantage:\n        grpo:\n"]),
        (&format!("use_bias_correction_kl: false\n{by_sequence}"), &["        gspo:\n"]),
    ] {
        let import = imported_from(&format!("{TRL}{text}"), Origin::Trl);
        check_refused(&import, &[]);
        check_loads(&import);
        check_lines(&import, lines);
    }
    for (text, key) in [
        ("loss_type: luspo\n", "loss_type"),
        (&format!("use_bias_correction_kl: true\n{by_sequence}"), "use_bias_correction_kl"),
        ("multi_objective_aggregation: sum\n", "multi_objective_aggregation"),
    ] {
        check_refused(&imported_from(&format!("{TRL}{text}"), Origin::Trl), &[key]);
    }
}
