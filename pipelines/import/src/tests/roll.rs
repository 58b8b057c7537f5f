//! ROLL's configs.

use super::*;

#[test]
fn roll_with_its_defaults_list() {
    let text = "\
defaults:
  - ../config/deepspeed_zero2@_here_
  - ../config/deepspeed_zero3_cpuoffload@_here_
hydra: {output_subdir: null}
exp_name: qwen-${pg_variant}
pg_variant: ppo
max_steps: 100
rollout_batch_size: 16
prompt_length: 2048
response_length: 8192
num_return_sequences_in_group: 8
adv_estimator: reinforce
reward_clip: 10
dual_clip_loss: true
whiten_advantages: true
max_len_mask: true
pretrain: models/qwen
actor_train:
  model_args: {flash_attn: fa2, disable_gradient_checkpointing: false, dtype: bf16}
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 8, warmup_steps: 20}
  data_args: {template: qwen3, file_name: [data/math.jsonl], messages: messages}
  strategy_args:
    strategy_name: deepspeed_train
    strategy_config: ${deepspeed_zero3_cpuoffload}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: '${response_length}', top_p: 0.99, top_k: 100, temperature: 0.99}
  strategy_args: {strategy_name: vllm}
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    world_size: 8
";
    let import = imported("rlvr.yaml", text, Origin::Roll);
    let keys = "adv_estimator: gae\ncritic_warmup: 3\nasync_generation_ratio: 1.5";
    let text_ppo = text.replace("adv_estimator: reinforce", keys);
    let ppo = imported("ppo.yaml", &text_ppo, Origin::Roll);
    check_refused(&ppo, &[]);
    check_loads(&ppo);
    let rows = [("async_generation_ratio", "changed   async_generation_ratio: 1.5")];
    check_rows(&ppo, &rows);
    for line in [
        "          lambda: 0.95\n",
        "      warmup_steps: 3\n",
        "    critic:\n",
        "      async:\n        ahead: 2\n",
    ] {
        assert!(ppo.yaml().contains(line), "no\n{line}in\n{}", ppo.yaml());
    }
    check_elsewhere(text);
    check_refused(&import, &[]);
    check_loads(&import);
    let yaml = import.yaml();
    for line in [
        "name: qwen-ppo\n",
        "devices: 8\n",
        "  zero_stage: 3\n",
        "    optimizer: cpu_step\n",
        "    params: cpu\n",
        "      leave_out_cut: true\n",
        "    prompts_per_step: 16\n",
        "    mini_batches: 2\n",
        "      max_new_tokens: 8192\n",
        "      reward_clip: 10\n",
        "          dual_clip: 1.4\n",
        "    - math: {}\n",
        "        columns:\n          prompt: messages\n          answer: ground_truth\n",
    ] {
        assert!(yaml.contains(line), "no\n{line}in\n{yaml}");
    }
}

/// ROLL's sampling on devices that do not train, and a reward for each tag of the records.
#[track_caller]
fn check_elsewhere(text: &str) {
    let text = text
        .replace("list(range(0,8))", "list(range(0,4))")
        .replace("actor_infer:\n", "async_generation_ratio: 2\nactor_infer:\n  device_mapping: list(range(4,8))\n")
        .replace("    world_size: 8\n", "    tag_included: [gsm8k, math]\n  choices:\n    worker_cls: a.MultipleChoiceBoxedRuleRewardWorker\n    tag_included: [mmlu]\n");
    let import = imported("elsewhere.yaml", &text, Origin::Roll);
    check_refused(&import, &[]);
    check_loads(&import);
    check_rows(&import, &[("async_generation_ratio", "changed   async_generation_ratio: 2")]);
    let yaml = import.yaml();
    for line in [
        "devices:\n- 0\n- 1\n- 2\n- 3\n",
        "  rollout:\n    devices:\n    - 4\n    - 5\n    - 6\n    - 7\n",
        "        ahead: 2\n",
        "      domains:\n      - gsm8k\n      - math\n",
        "      domains:\n      - mmlu\n",
        "          domain: tag\n",
    ] {
        assert!(yaml.contains(line), "no\n{line}in\n{yaml}");
    }
    let uneven = text.replace("list(range(4,8))", "list(range(4,7))");
    check_refused(&imported("uneven.yaml", &uneven, Origin::Roll), &["actor_infer.device_mapping"]);
    let endless = text.replace("list(range(0,4))", "list(range(0,1000000000000))");
    let refused = ["actor_train.device_mapping", "actor_infer.device_mapping"];
    check_refused(&imported("endless.yaml", &endless, Origin::Roll), &refused);
    let shared = text.replace("list(range(4,8))", "list(range(0,8))");
    let shared = imported("shared.yaml", &shared, Origin::Roll);
    check_refused(&shared, &[]);
    assert!(shared.yaml().contains("devices: 4\n") && !shared.yaml().contains("roles:"), "{}", shared.yaml());
}

/// The minimum of a ROLL config that loads, with `more` at the top level and `rewards`.
#[track_caller]
fn roll(more: &str, rewards: &str) -> Import {
    let text = format!(
        "rollout_batch_size: 8\nresponse_length: 64\nnum_return_sequences_in_group: 4\npretrain: models/qwen\n\
         adv_estimator: reinforce\n{more}rewards:\n{rewards}"
    );
    let import = imported("roll.yaml", &text, Origin::Roll);
    check_loads(&import);
    import
}

const MATH: &str = "  math: {worker_cls: a.MathRuleRewardWorker}\n";

#[test]
fn rolls_rewards_that_score_otherwise() {
    for (worker, why) in [
        ("GeneralRuleRewardWorker", "`instruction_id_list`"),
        ("LLMJudgeRewardWorker", "your own template"),
        ("VideoR1RewardWorker", "docs/guides/rewards.md"),
    ] {
        let import = roll("", &format!("  some: {{worker_cls: a.{worker}, reward_type: soft}}\n"));
        check_refused(&import, &["rewards.some.worker_cls"]);
        let row = import.rows.iter().find(|row| row.key == "rewards.some.worker_cls").unwrap().to_string();
        assert!(row.contains(why), "{row}");
        check_rows(&import, &[("rewards.some.reward_type", "no effect")]);
    }
    let fields =
        "reward_type: soft, response_length_penalty_coef: 0.5, query_filter_config: {type: mean_filter}";
    let import = roll("", &format!("  qa: {{worker_cls: a.CrossThinkQARuleRewardWorker, {fields}}}\n"));
    check_refused(
        &import,
        &["rewards.qa.response_length_penalty_coef", "rewards.qa.query_filter_config.type"],
    );
    check_rows(&import, &[("rewards.qa.worker_cls", "changed"), ("rewards.qa.reward_type", "changed")]);
    let import = roll("validation: {data_args: {file_name: [data/aime.jsonl]}}\n", MATH);
    check_refused(&import, &[]);
    check_rows(&import, &[("validation.data_args.file_name", "mapped")]);
}

#[test]
fn rolls_sandbox_is_this_machines_or_a_services() {
    let code =
        |fields: &str| roll("", &format!("  code: {{worker_cls: a.CodeSandboxRewardWorker{fields}}}\n"));
    let local = code(", use_local: true, code_url: http://here");
    check_refused(&local, &[]);
    let rows = [
        ("rewards.code.worker_cls", "changed"),
        ("rewards.code.use_local", "changed"),
        ("rewards.code.code_url", "no effect"),
    ];
    check_rows(&local, &rows);
    assert!(local.yaml().contains("    - code:\n        timeout_s: 20\n"), "{}", local.yaml());
    let service = code(", use_local: false, code_url: 'http://here:8080/run_code'");
    check_refused(&service, &[]);
    assert!(service.yaml().contains("          url: http://here:8080/run_code\n"), "{}", service.yaml());
    check_refused(&code(", use_local: false"), &["rewards.code.worker_cls"]);
}

#[test]
fn rolls_judge_is_asked_at_an_endpoint() {
    const PROMPT: &str = "judge_prompt: Qwen2.5-7B-Instruct-RLVR-prompt";
    let judge = |more: &str, fields: &str| {
        roll(more, &format!("  judge: {{worker_cls: a.LLMJudgeRewardWorker, {fields}}}\n"))
    };
    let api = judge(
        "",
        &format!(
            "{PROMPT}, judge_model_type: api, judge_api_url: 'http://here/v1', judge_model_name: big, judge_api_key: sk-1234"
        ),
    );
    check_refused(&api, &[]);
    let told: String = api.rows.iter().map(|row| format!("{row}\n")).collect();
    assert!(told.contains("export it as JUDGE_API_KEY") && !told.contains("sk-1234"), "{told}");
    let yaml = api.yaml();
    assert!(!yaml.contains("sk-1234"), "{yaml}");
    for line in
        ["        url: http://here/v1\n", "        model: big\n", "        key_variable: JUDGE_API_KEY\n"]
    {
        assert!(yaml.contains(line), "no\n{line}in\n{yaml}");
    }
    let own = format!(
        "{PROMPT}, judge_model_type: inference, model_args: {{model_name_or_path: some/judge}}, generating_args: {{max_new_tokens: 100, top_p: 0.8}}"
    );
    let own = judge("", &own);
    check_refused(&own, &[]);
    check_rows(
        &own,
        &[
            ("rewards.judge.judge_model_type", "changed"),
            ("rewards.judge.generating_args.top_p", "no effect"),
        ],
    );
    for line in [
        "        url: http://127.0.0.1:8000/v1\n",
        "        model: some/judge\n",
        "        max_tokens: 100\n",
    ] {
        assert!(own.yaml().contains(line), "no\n{line}in\n{}", own.yaml());
    }
    let shared = "reward_model: {model_args: {model_name_or_path: shared/judge}, strategy_args: {strategy_name: vllm}}\n";
    let shared = judge(shared, &format!("{PROMPT}, judge_model_type: cluster"));
    check_refused(&shared, &[]);
    assert!(shared.yaml().contains("        model: shared/judge\n"), "{}", shared.yaml());
    let half = judge(
        "",
        &format!("{PROMPT}, judge_model_type: api, judge_api_url: 'http://here/v1', judge_api_key: sk-1234"),
    );
    check_refused(&half, &["rewards.judge.worker_cls"]);
    assert!(half.rows.iter().all(|row| !row.to_string().contains("sk-1234")));
}

/// Only `ActorPGWorker` reads a variant, and it has its own bounds.
#[test]
fn rolls_losses() {
    let check = |worker: &str, lines: &[&str]| {
        let import = roll(&format!("pg_variant: topr\npg_clip: 0.1\nactor_train: {{{worker}}}\n"), MATH);
        check_refused(&import, &[]);
        check_rows(&import, &[("pg_variant", "no effect")]);
        for line in lines {
            assert!(import.yaml().contains(line), "{worker}: no\n{line}in\n{}", import.yaml());
        }
    };
    check("pg_variant: topr", &["        clipped:\n          clip_high: 0.1\n"]);
    let pg = |more: &str| format!("worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker{more}");
    check(&pg(""), &["      loss: reinforce\n"]);
    check(&pg(", pg_variant: ppo"), &["          clip_low: 0.1\n"]);
    check(&pg(", pg_variant: tis"), &["        cispo:\n          min_ratio: 0\n          max_ratio: 1\n"]);
    check(&pg(", pg_variant: cispo"), &["          min_ratio: 0.9\n          max_ratio: 1.1\n"]);
    check(
        &pg(", pg_variant: cispo, cispo_epsilon_low: 1, cispo_epsilon_high: 4"),
        &["          min_ratio: 0\n          max_ratio: 5\n"],
    );
    check(&pg(", pg_variant: topr, topr_negative_weight: 0.5"), &["          negative_weight: 0.5\n"]);
    let other = roll(&format!("actor_train: {{{}}}\n", pg(", pg_variant: kimi15")), MATH);
    check_refused(&other, &["actor_train.pg_variant"]);

    let weights =
        "train_infer_correction: {is_weight: {enabled: true, weight_type: sequence, upper_bound: 1.5}}\n";
    let weighted = roll(weights, MATH);
    check_refused(&weighted, &[]);
    for line in ["old_logprobs: recompute\n", "          level: sequence\n          max: 1.5\n"] {
        assert!(weighted.yaml().contains(line), "no\n{line}in\n{}", weighted.yaml());
    }
    let filter = "train_infer_correction: {filters: [{enabled: true, ratio_low: 0.5}]}\n";
    check_refused(&roll(filter, MATH), &["train_infer_correction.filters"]);
}

/// Ranks that share a model have the same records: two of four count as one.
#[test]
fn rolls_fsdp_and_megatron() {
    let import = |strategy: &str, config: &str| {
        let train = format!(
            "device_mapping: '[0,1,2,3]', training_args: {{per_device_train_batch_size: 1, gradient_accumulation_steps: 4}}, \
             strategy_args: {{strategy_name: {strategy}, strategy_config: {{{config}}}}}"
        );
        roll(&format!("actor_train: {{{train}}}\n"), MATH)
    };
    let check = |import: &Import, lines: &[&str]| {
        check_refused(import, &[]);
        for line in lines {
            assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
        }
    };
    let fsdp = "fsdp_size: 4, param_dtype: bf16, reduce_dtype: float32, reshard_after_forward: true, offload_policy: false";
    check(&import("fsdp2_train", fsdp), &["zero_stage: 3\n", "decays: all\n", "mini_batches: 2\n"]);
    let gathered = "reshard_after_forward: false, offload_policy: true";
    check(&import("fsdp2_train", gathered), &["zero_stage: 2\n", "optimizer: cpu_step\n"]);
    check(&import("fsdp2_train", "fsdp_size: 2"), &["  shard_group: 2\n"]);
    check(&import("fsdp2_train", "ep_size: 4"), &["  expert_parallel: 4\n"]);
    check(&import("megatron_train", "expert_model_parallel_size: 4"), &["  expert_parallel: 4\n"]);
    let whole = "tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, expert_model_parallel_size: 1, \
                 use_distributed_optimizer: true, recompute_granularity: full";
    check(&import("megatron_train", whole), &["zero_stage: 1\n", "recompute: full\n", "mini_batches: 2\n"]);
    let split = "tensor_model_parallel_size: 2, sequence_parallel: true, use_distributed_optimizer: true";
    check(
        &import("megatron_train", split),
        &["zero_stage: 1\n", "  tensor_parallel: 2\n", "mini_batches: 4\n"],
    );
    let shared = "device_mapping: '[0,1,2,3]', model_args: {ulysses_size: 2}, strategy_args: {strategy_name: fsdp2_train}, \
                  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 4}";
    let shared = roll(&format!("actor_train: {{{shared}}}\n"), MATH);
    check(&shared, &["  sequence_parallel: 2\n", "mini_batches: 4\n"]);
}

#[test]
fn rolls_completions_keep_what_they_stop_at() {
    let kept = |keeps: bool| {
        let texts = format!("stop_strings: ['</a>'], include_stop_str_in_output: {keeps}");
        roll(&format!("actor_infer: {{generating_args: {{{texts}}}}}\n"), MATH)
    };
    check_refused(&kept(true), &[]);
    assert!(kept(true).yaml().contains("      stop:\n      - </a>\n"), "{}", kept(true).yaml());
    let cut = roll("actor_infer: {generating_args: {stop_strings: ['</a>'], seed: 3}}\n", MATH);
    check_refused(&cut, &["actor_infer.generating_args.seed"]);
}

/// An agentic run's environments become a user's class; other settings stay.
#[test]
fn rolls_agents() {
    let text = "exp_name: a-${now:%Y}\nrollout_batch_size: 128\nresponse_length: 64\npretrain: models/qwen\n\
        adv_estimator: grpo\nmax_actions_per_traj: 10\nmax_tokens_per_step: 64\naction_pattern: x\n\
        reward_normalization: {grouping: traj_group_id, method: mean_std}\n\
        train_env_manager: {num_env_groups: 16, group_size: 8, tags: [Sokoban]}\n\
        custom_envs: {Sokoban: {env_type: sokoban, env_config: {dim_room: [6, 6]}}}\n";
    let import = imported("agents.yaml", text, Origin::Roll);
    check_refused(&import, &["train_env_manager.tags"]);
    check_rows(&import, &[("custom_envs.Sokoban.env_type", "no effect"), ("rollout_batch_size", "changed")]);
    for line in [
        "name: a-now\n",
        "    prompts_per_step: 16\n",
        "    group_size: 8\n",
        "        max_turns: 10\n        max_turn_tokens: 64\n",
        "      reward_norm:\n        mean: group\n        std: group\n",
        "      advantage:\n        reinforce:\n",
        "    - environment: {}\n",
    ] {
        assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
    }
}

#[test]
fn rolls_other_pipelines_are_no_runs_of_this_one() {
    let keys = "sft_train: {training_args: {learning_rate: 1.0e-5}}\n";
    let import = imported("other.yaml", &format!("rollout_batch_size: 8\n{keys}"), Origin::Roll);
    check_refused(&import, &["sft_train.training_args.learning_rate"]);
    assert!(!import.yaml().contains("rlvr"), "{}", import.yaml());
}

#[test]
fn rolls_shares_of_domains_are_a_mix() {
    let rewards = "  math: {worker_cls: a.MathRuleRewardWorker, tag_included: [gsm8k, aime]}\n  \
                   letters: {worker_cls: a.MultipleChoiceBoxedRuleRewardWorker, tag_included: [mmlu]}\n";
    let shares = |shares: &str| {
        let data =
            "prompt_length: 512\nactor_train: {data_args: {file_name: [all.jsonl], messages: messages, ";
        roll(&format!("{data}domain_interleave_probs: {shares}}}}}\n"), rewards)
    };
    let import = shares("{math: 0.75, letters: 0.25}");
    check_refused(&import, &[]);
    let key = "actor_train.data_args.domain_interleave_probs.math";
    check_rows(&import, &[(key, "changed"), ("rewards.math.tag_included", "changed")]);
    let yaml = import.yaml();
    for lines in [
        "      mix:\n      - domain: math\n        weight: 0.75\n        data:\n          file:\n",
        "            path: all.jsonl\n            max_prompt_tokens: 512\n            domains:\n            - gsm8k\n            - aime\n",
        "      - domain: letters\n        weight: 0.25\n",
        "              domain: tag\n",
        "      domains:\n      - math\n",
        "      domains:\n      - letters\n",
    ] {
        assert!(yaml.contains(lines), "no\n{lines}in\n{yaml}");
    }
    // A share for only one of them cannot be kept.
    let import = shares("{math: 1.0}");
    check_refused(&import, &[key]);
    assert!(!import.yaml().contains("mix:"), "{}", import.yaml());
    check_refused(&shares("~"), &[]);
    // A single domain has all prompts.
    let alone = "actor_train: {data_args: {domain_interleave_probs: {math: 1.0}}}\n";
    let import = roll(alone, "  math: {worker_cls: a.MathRuleRewardWorker, tag_included: [gsm8k]}\n");
    check_rows(&import, &[(key, "no effect")]);
}

#[test]
fn rolls_statistics_of_rewards_and_its_moving_coefficient() {
    let norms = "norm_mean_type: batch\nnorm_std_type: group\n";
    let import = roll(norms, MATH);
    check_refused(&import, &[]);
    let lines = "      reward_norm:\n        mean: batch\n        std: group\n";
    assert!(import.yaml().contains(lines), "{}", import.yaml());
    let domains = "  math: {worker_cls: a.MathRuleRewardWorker, tag_included: [a]}\n  \
                   more: {worker_cls: a.MathRuleRewardWorker, tag_included: [b]}\n";
    let rows = [("norm_mean_type", "changed"), ("norm_std_type", "mapped")];
    check_rows(&roll(norms, domains), &rows);
    let off = roll("norm_mean_type: ~\ntarget_kl: ~\n", MATH);
    check_refused(&off, &[]);
    assert!(!off.yaml().contains("reward_norm") && !off.yaml().contains("kl_in"), "{}", off.yaml());

    let import = roll("add_token_level_kl: true\ninit_kl_coef: 0.1\ntarget_kl: 0.05\n", MATH);
    check_refused(&import, &[]);
    let lines = "      kl_in:\n        reward:\n          adaptive:\n            target: 0.05\n            horizon: 10000";
    assert!(import.yaml().contains(lines), "{}", import.yaml());
    check_rows(&roll("target_kl: 0.05\n", MATH), &[("target_kl", "no effect")]);
}

/// `start_onpolicy_distill_pipeline.py` reads `student_train`; `use_opd` has rewards in addition to the
/// teacher.
#[test]
fn rolls_teachers() {
    let text = "\
exp_name: opd
max_steps: 100
rollout_batch_size: 16
prompt_length: 2048
response_length: 8192
num_return_sequences_in_group: 4
adv_estimator: reinforce
pretrain: models/qwen
student_train:
  model_args: {dtype: bf16}
  training_args: {learning_rate: 5.0e-7, per_device_train_batch_size: 16, gradient_accumulation_steps: 1}
  data_args: {file_name: [data/math.jsonl], messages: messages}
  strategy_args: {strategy_name: fsdp2_train}
student_infer:
  generating_args: {max_new_tokens: 8192, top_p: 0.99, top_k: 100, temperature: 0.99}
  strategy_args: {strategy_name: vllm}
teacher:
  model_args: {model_name_or_path: models/large, dtype: bf16}
  strategy_args: {strategy_name: megatron_infer}
  device_mapping: list(range(0,8))
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
";
    let check = |text: &str, lines: &[&str]| {
        let import = imported("opd.yaml", text, Origin::Roll);
        check_refused(&import, &[]);
        check_loads(&import);
        for line in lines.iter().chain(&["    path: models/large\n", "      kl_in: advantage\n"]) {
            assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
        }
    };
    check(text, &["      advantage: none\n", "      kl_coef: 1\n", "        learning_rate: 5.0e-7\n"]);
    let mixed = text
        .replace("student_", "actor_")
        .replace("teacher:\n", "use_opd: true\nteacher:\n  opd_kl_coef: 0.2\n");
    check(&mixed, &["        reinforce:\n          gamma: 1.0\n", "      kl_coef: 0.2\n"]);
}

const PAIRS: &str = "\
exp_name: pairs
seed: 7
max_steps: 500
save_steps: 500
eval_steps: 100
sequence_length: 512
num_nodes: 1
num_gpus_per_node: 8
pretrain: Qwen/Qwen2.5-3B-Instruct
ipo: false
beta: 0.2
label_smoothing: 0.1
chosen_key: good
rejected_key: bad
global_template: qwen2_5
validation:
  data_args:
    file_name: held.json
actor_train:
  model_args:
    disable_gradient_checkpointing: false
    dtype: bf16
    model_type: ~
  training_args:
    lr_scheduler_type: constant
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 16
    gradient_accumulation_steps: 2
    warmup_steps: 20
    num_train_epochs: 10
  data_args:
    file_name:
      - pairs.json
    dataset_dir: data
    preprocessing_num_workers: 1
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      expert_model_parallel_size: 1
      use_distributed_optimizer: true
      recompute_granularity: full
  device_mapping: list(range(0,8))
  infer_batch_size: 16
reference:
  model_args:
    disable_gradient_checkpointing: true
    dtype: bf16
    model_type: ~
  strategy_args:
    strategy_name: megatron_infer
    strategy_config:
      tensor_model_parallel_size: 1
  device_mapping: list(range(0,8))
  infer_batch_size: 8
";

#[test]
fn its_pairs() {
    let import = imported("dpo.yaml", PAIRS, Origin::Roll);
    check_refused(&import, &[]);
    check_loads_as("offline", &import);
    for line in [
        "name: pairs\nseed: 7\n",
        "devices: 8\n",
        "  chat: true\n",
        "  micro_batch_size: 32\n",
        "    batch_size: 256\n",
        "      dpo:\n        beta: 0.2\n        label_smoothing: 0.1\n",
        "          prompt: instruction\n          answer: good\n          rejected: bad\n",
        "        path: pairs.json\n",
        "        held_out: held.json\n",
        "        max_tokens: 512\n",
        "        constant:\n          warmup_steps: 20\n",
        "    steps: 500\n",
        "      every: 100\n",
    ] {
        assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
    }
    let identity = imported("dpo.yaml", &PAIRS.replace("ipo: false", "ipo: true"), Origin::Roll);
    check_refused(&identity, &["ipo"]);
    let blind = PAIRS.replace("validation:\n  data_args:\n    file_name: held.json\n", "");
    let blind = imported("dpo.yaml", &blind, Origin::Roll);
    check_refused(&blind, &[]);
    assert!(blind.yaml().contains("      prompts: 0\n"), "{}", blind.yaml());
}

/// Rollout with weights in 8 bits, other forms of which are refused with the reason; other options of the engine have no effect.
#[test]
fn its_quantized_rollout() {
    let engine = |options: &str| {
        let text = format!(
            "rollout_batch_size: 64\nmax_steps: 9\nactor_infer:\n  strategy_args:\n    strategy_name: vllm\n    \
             strategy_config:\n      gpu_memory_utilization: 0.8\n{options}"
        );
        imported("roll.yaml", &text, Origin::Roll)
    };
    check_refused(&engine("      quantization: null\n"), &[]);
    let import = engine(
        "      quantization: fp8\n      hf_overrides:\n        quantization_config:\n          quant_method: fp8\n      \
         kv_cache_dtype: fp8\n",
    );
    let options = "actor_infer.strategy_args.strategy_config";
    let quantized = format!("{options}.quantization");
    let method = format!("{options}.hf_overrides.quantization_config.quant_method");
    check_refused(&import, &[&method, &format!("{options}.kv_cache_dtype")]);
    assert!(import.yaml().contains("      weights: fp8\n      fp8_activations: true\n"), "{}", import.yaml());
    let import = engine("      quantization: awq\n");
    check_refused(&import, &[&quantized]);
    let row = import.rows.iter().find(|row| row.key == quantized).unwrap().to_string();
    assert!(row.ends_with("(`rollout.weights` is `policy` or `fp8`)"), "{row}");
}
