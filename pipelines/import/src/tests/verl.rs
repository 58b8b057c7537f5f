//! verl's commands and its YAML.

use super::*;

/// Commands as in its examples: lists of overrides, defaults of variables, sums.
pub(super) const SCRIPT: &str = r#"#!/usr/bin/env bash
set -xeuo pipefail
MODEL_PATH=${MODEL_PATH:-models/qwen}
train_batch_size=${TRAIN_BATCH_SIZE:-1024}
max_prompt_length=$((1024 * 1))
max_response_length=$((max_prompt_length * 2))
data_dir="data/gsm8k"
train_files="['$data_dir/train.parquet', 'data/math/train.parquet']"
DATA=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    data.train_files="$train_files"
    data.val_files=$data_dir/test.parquet
    data.train_batch_size=${train_batch_size} # prompts
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}
    data.filter_overlong_prompts=True
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.optim.lr=2e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.ref.fsdp_config.param_offload=True
)
TRAINER=(
    trainer.logger='["console","wandb"]'
    trainer.project_name=p
    trainer.experiment_name='qwen math/5'
    trainer.default_local_dir='out/${trainer.project_name}'
    trainer.save_freq=20
    trainer.total_training_steps=100
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then
    LAUNCH=(uv run python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    "${TRAINER[@]}" \
    "$@"
"#;

#[test]
fn a_script_with_lists_of_overrides() {
    let import = imported("run.sh", SCRIPT, Origin::Verl);
    check_refused(&import, &[]);
    assert_eq!(
        import.yaml(),
        "\
name: qwen_math_5
backend: auto
devices: 8
model:
  path: models/qwen
strategy:
  recompute: full
  zero_stage: 3
  precision: bf16
  micro_batch_size: 8
roles:
  reference:
    strategy:
      offload:
        params: between_steps
pipeline:
  rlvr:
    prompts_per_step: 1024
    group_size: 5
    mini_batches: 4
    epochs: 1
    steps: 100
    checkpoint:
      every: 20
    evaluation:
      every: 100
    optimizer:
      adamw:
        learning_rate: 2.0e-6
        weight_decay: 0.01
        decays: all
      max_grad_norm: 1
      schedule:
        constant:
          warmup_steps:
            share: 0.1
    rollout:
      max_new_tokens: 2048
      temperature: 1
      top_p: 1
      batch_size: 64
    algorithm:
      advantage:
        grpo:
          scale: group_std
          eps: 1.0e-6
      aggregation: token_mean
      loss:
        clipped:
          clip_low: 0.2
          clip_high: 0.28
          dual_clip: 3
      kl_in:
        loss:
          estimator: k3
      kl_coef: 0.001
    data:
      file:
        path:
        - data/gsm8k/train.parquet
        - data/math/train.parquet
        held_out: data/gsm8k/test.parquet
        columns: verl
        max_prompt_tokens: 1024
        long_prompts: leave_out
    reward:
    - math: {}
"
    );
    check_loads(&import);
    check_rows(
        &import,
        &[
            ("trainer.default_local_dir", "no effect trainer.default_local_dir: out/p"),
            (
                "trainer.experiment_name",
                "changed   trainer.experiment_name: qwen math/5 -> name: qwen_math_5",
            ),
            (
                "actor_rollout_ref.actor.grad_clip",
                "mapped    actor_rollout_ref.actor.grad_clip: 1.0 by default",
            ),
            ("reward.reward_manager.name", "changed   reward.reward_manager.name: naive by default"),
        ],
    );
}

/// A command with `overrides` and the keys that tests ignore.
#[track_caller]
fn command(overrides: &str) -> Import {
    let usual = "data.train_files=a.parquet actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo \
        trainer.total_training_steps=100";
    imported("run.sh", &format!("python3 -m verl.trainer.main_ppo {usual} {overrides}"), Origin::Verl)
}

#[track_caller]
fn check(overrides: &str, lines: &[&str]) {
    let import = command(overrides);
    check_refused(&import, &[]);
    check_loads(&import);
    for line in lines {
        assert!(import.yaml().contains(line), "{overrides}: no\n{line}in\n{}", import.yaml());
    }
}

#[test]
fn advantages() {
    for (estimator, lines) in [
        ("grpo algorithm.norm_adv_by_std_in_grpo=False", &["          scale: none\n"][..]),
        ("rloo", &["advantage: rloo\n"]),
        ("remax", &["advantage: remax\n"]),
        ("opo", &["advantage: opo\n"]),
        ("reinforce_plus_plus algorithm.gamma=0.9", &["whiten_advantages: true\n", "gamma: 0.9\n"]),
        ("reinforce_plus_plus_baseline", &["whiten_advantages: true\n", "scale: none\n"]),
    ] {
        check(&format!("algorithm.adv_estimator={estimator}"), lines);
    }
    check_refused(&command("algorithm.adv_estimator=grpo_passk"), &["algorithm.adv_estimator"]);
}

#[test]
fn a_critic_has_an_optimizer_of_its_own() {
    let overrides = "algorithm.adv_estimator=gae critic.optim.lr=3e-5 critic.optim.lr_warmup_steps=4 \
        critic.cliprange_value=0.2 critic.model.path=m critic.model.use_remove_padding=True trainer.critic_warmup=5";
    let critic = "    critic:\n      optimizer:\n        adamw:\n          learning_rate: 0.00003\n          weight_decay: 0.01\n          \
        decays: all\n        max_grad_norm: 1\n        schedule:\n          constant:\n            warmup_steps: 4\n      \
        value_clip: 0.2\n      warmup_steps: 5\n";
    check(overrides, &[critic, "          lambda: 1.0\n"]);
    let unused = command("critic.optim.lr=3e-5");
    check_rows(&unused, &[("critic.optim.lr", "no effect")]);
}

#[test]
fn losses_and_their_clips() {
    let actor =
        |keys: &str| keys.split(' ').map(|key| format!("actor_rollout_ref.actor.{key} ")).collect::<String>();
    for (keys, lines) in [
        ("clip_ratio=0.1 clip_ratio_c=10", &["clip_low: 0.1\n", "clip_high: 0.1\n", "dual_clip: 10\n"][..]),
        (
            "policy_loss.loss_mode=gspo clip_ratio_low=3e-4 clip_ratio_high=4e-4",
            &["        gspo:\n          clip_low: 0.0003\n", "aggregation: seq_mean_token_mean\n"],
        ),
        (
            "policy_loss.loss_mode=cispo clip_ratio_low=10 clip_ratio_high=0.2",
            &["        cispo:\n          min_ratio: 0\n          max_ratio: 1.2\n"],
        ),
        (
            "policy_loss.loss_mode=sapo",
            &[
                "sapo:\n          tau_positive: 1\n          tau_negative: 1.05\n",
                "aggregation: seq_mean_token_mean\n",
            ],
        ),
        (
            "policy_loss.loss_mode=geo_mean clip_ratio_low=0.4 clip_ratio_high=0.3",
            &[
                "gmpo:\n          clip_low: 0.4\n          clip_high: 0.3\n",
                "aggregation: seq_mean_token_mean\n",
            ],
        ),
        ("policy_loss.loss_mode=gpg", &["loss: reinforce\n"]),
        ("loss_agg_mode=seq-mean-token-sum-norm", &["seq_mean_token_sum_norm:\n          length: 512\n"]),
        ("tis_imp_ratio_cap=2", &["old_logprobs: recompute\n", "level: token\n          max: 2.0\n"]),
        ("strategy=fsdp2 fsdp_config.reshard_after_forward=False", &["zero_stage: 2\n"]),
        ("fsdp_config.offload_policy=True", &["    params: cpu\n", "    optimizer: cpu_step\n"]),
        (
            "use_dynamic_bsz=True ppo_max_token_len_per_gpu=8192 ppo_micro_batch_size_per_gpu=1",
            &["micro_batch_tokens: 8192\n"],
        ),
        ("use_dynamic_bsz=True ppo_max_token_len_per_gpu=8", &["micro_batch_tokens: 1024\n"]),
        ("ppo_micro_batch_size=64", &["micro_batch_size: 8\n"]),
        ("ulysses_sequence_parallel_size=2", &["  sequence_parallel: 2\n"]),
    ] {
        check(&actor(keys), lines);
    }
    for (keys, refused) in [
        ("policy_loss.loss_mode=clip_cov", &["policy_loss.loss_mode"][..]),
        ("loss_agg_mode=token-sum", &["loss_agg_mode"]),
        ("ppo_mini_batch_size=300", &["ppo_mini_batch_size"]),
        ("strategy=megatron megatron.context_parallel_size=2", &["megatron.context_parallel_size"]),
        ("strategy=veomni", &["strategy"]),
        ("use_kl_loss=True kl_loss_type=full", &["kl_loss_type"]),
        ("my_own=1", &["my_own"]),
    ] {
        let refused: Vec<String> =
            refused.iter().map(|key| format!("actor_rollout_ref.actor.{key}")).collect();
        check_refused(&command(&actor(keys)), &refused.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

/// Stages of layers are sharded instead, and biases are not decayed.
#[test]
fn megatrons_layers_are_split_as_there() {
    let check = |keys: &str, lines: &[&str]| {
        let keys = keys.replace('@', "actor_rollout_ref.actor.");
        check(&keys, lines);
        assert!(!command(&keys).yaml().contains("decays: all"), "{keys}");
    };
    let split = "model_engine=megatron @megatron.tensor_model_parallel_size=2 @megatron.pipeline_model_parallel_size=1 \
        @megatron.param_offload=True @megatron.optimizer_offload=True actor_rollout_ref.ref.megatron.param_offload=True \
        +@megatron.override_transformer_config.recompute_granularity=full";
    check(
        split,
        &[
            "zero_stage: 1\n",
            "tensor_parallel: 2\n",
            "recompute: full\n",
            "optimizer: between_steps\n",
            "precision: bf16\n",
        ],
    );
    check("model_engine=megatron @megatron.pipeline_model_parallel_size=2", &["zero_stage: 3\n"]);
    check("--config-name=ppo_megatron_trainer", &["zero_stage: 1\n", "decays: matrices\n"]);
    let host = "+@optim.override_optimizer_config.optimizer_cpu_offload=True @strategy=megatron";
    check(host, &["optimizer: cpu_step\n"]);
    check("model_engine=megatron @megatron.expert_model_parallel_size=8", &["  expert_parallel: 8\n"]);
    let both = "actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
        actor_rollout_ref.actor.megatron.expert_model_parallel_size=8";
    check_refused(&command(both), &["actor_rollout_ref.actor.megatron.expert_model_parallel_size"]);
}

#[test]
fn a_teacher_is_the_reference() {
    let teacher = "distillation.enabled=True distillation.n_gpus_per_node=4 \
        distillation.teacher_models.teacher_model.model_path=large \
        distillation.teacher_models.teacher_model.inference.name=vllm distillation.distillation_loss.loss_max_clamp=10.0";
    let loss = |keys: &str| {
        keys.split(' ').map(|key| format!(" distillation.distillation_loss.{key}")).collect::<String>()
    };
    let alone =
        format!("{teacher}{}", loss("loss_mode=k1 use_policy_gradient=True use_task_rewards=False topk=64"));
    check(
        &alone,
        &["    path: large\n", "      advantage: none\n", "      kl_in: advantage\n", "      kl_coef: 1\n"],
    );
    let clamp = "distillation.distillation_loss.loss_max_clamp";
    check_rows(&command(&alone), &[(clamp, "changed"), ("algorithm.adv_estimator", "changed")]);
    let beside = format!("{teacher}{}", loss("loss_mode=k3 distillation_loss_coef=0.1"));
    check(&beside, &["        grpo:\n", "          estimator: k3\n", "      kl_coef: 0.1\n"]);
    for (keys, refused) in [
        ("loss_mode=forward_kl_topk", "distillation.distillation_loss.loss_mode"),
        ("loss_mode=k3 use_policy_gradient=True", "distillation.distillation_loss.loss_mode"),
    ] {
        check_refused(&command(&format!("{teacher}{}", loss(keys))), &[refused]);
    }
    let two = format!("{alone} +distillation.teacher_models.other.model_path=larger");
    let paths =
        ["teacher_model", "other"].map(|name| format!("distillation.teacher_models.{name}.model_path"));
    check_refused(&command(&two), &[&*paths[0], &*paths[1]]);
    check_rows(&command("distillation.enabled=False"), &[("distillation.enabled", "no effect")]);
}

#[test]
fn verls_yaml_names_its_classes() {
    let text = "actor_rollout_ref:\n  actor:\n    _target_: verl.trainer.config.Actor\n  model: {path: m}\n\
                trainer: {experiment_name: 'math-$(date +%F)'}\n";
    let import = imported("trainer.yaml", text, Origin::Verl);
    check_rows(&import, &[("trainer.experiment_name", "no effect")]);
    assert!(import.yaml().contains("name: math\n"), "{}", import.yaml());
}

#[test]
fn kl_off_the_reward() {
    let kl = "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01";
    check(kl, &["kl_in:\n        reward: {}\n      kl_coef: 0.01\n"]);
    let adaptive = format!("{kl} algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2");
    check(&adaptive, &["adaptive:\n            target: 0.2\n            horizon: 10000.0\n"]);
    let both = format!("{kl} actor_rollout_ref.actor.use_kl_loss=True");
    check_refused(&command(&both), &["algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"]);
}

#[test]
fn the_command_of_dapo() {
    let import = imported(
        "dapo.sh",
        "ray job submit --runtime-env=e.yaml -- python3 -m recipe.dapo.main_dapo data.train_files=a.parquet \
         data.max_response_length=2048 data.truncation='left' data.gen_batch_size=1536 algorithm.adv_estimator=grpo \
         algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc actor_rollout_ref.model.path=m \
         algorithm.filter_groups.max_num_gen_batches=5 reward_model.reward_manager=dapo \
         +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True trainer.total_training_steps=9 \
         +reward_model.reward_kwargs.overlong_buffer_cfg.len=512 \
         ++reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
        Origin::Verl,
    );
    check_refused(&import, &[]);
    check_loads(&import);
    for line in [
        "      mixed_groups:\n        max_batches: 5\n",
        "    - math: {}\n    - length:\n        max_tokens: 2048\n        buffer_tokens: 512\n      weight: 0.5\n",
        "        long_prompts: leave_out\n",
    ] {
        assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
    }
}

#[test]
fn rewards_and_columns() {
    let own = "custom_reward_function.path=r.py custom_reward_function.name=f data.prompt_key=question";
    check(
        own,
        &[
            "    - python:\n        path: r.py\n        function: f\n        signature: verl\n",
            "          answer: reward_model.ground_truth\n          prompt: question\n          domain: data_source\n",
        ],
    );
    let model = "reward_model.enable=True reward_model.model.path=rm reward_model.micro_batch_size_per_gpu=4";
    check(model, &["    - model:\n        path: rm\n        chat: true\n"]);
    check_refused(&command("sandbox_fusion.url=http://a"), &["sandbox_fusion.url"]);
}

#[test]
fn weights_in_eight_bits() {
    check(
        "actor_rollout_ref.rollout.quantization=fp8",
        &["      weights: fp8\n", "      fp8_activations: true\n"],
    );
    check_loads(&command("actor_rollout_ref.rollout.quantization=fp8"));
    let [method, form] =
        ["quantization_config_file", "quantization"].map(|it| format!("actor_rollout_ref.rollout.{it}"));
    check_refused(&command(&format!("{method}=q.json {form}=torchao")), &[&method, &form]);
    check_refused(&command(&format!("{form}=null")), &[]);
}

#[test]
fn speculation_by_prompt_lookup() {
    let of_vllm = |settings: &str| {
        let at = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.";
        let words: Vec<String> = settings.split(' ').map(|setting| format!("+{at}{setting}")).collect();
        words.join(" ")
    };
    let lines = |tokens, most, least| {
        format!(
            "      speculation:\n        num_speculative_tokens: {tokens}\n        prompt_lookup_max: {most}\n        \
             prompt_lookup_min: {least}\n"
        )
    };
    for (settings, expected) in [
        ("method=ngram num_speculative_tokens=5 prompt_lookup_max=4 prompt_lookup_min=2", lines(5, 4, 2)),
        ("method=ngram num_speculative_tokens=3", lines(3, 5, 5)),
        ("method=ngram num_speculative_tokens=32 prompt_lookup_max=3", lines(15, 3, 3)),
    ] {
        check(&of_vllm(settings), &[&expected]);
        check_loads(&command(&of_vllm(settings)));
    }
    let other = command(&of_vllm("method=eagle num_speculative_tokens=3"));
    check_refused(&other, &[]);
    assert!(!other.yaml().contains("speculation"));
}

#[test]
fn adapters() {
    let lora = "actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.target_modules=[q_proj,v_proj]";
    check(lora, &["  lora:\n    rank: 32\n    alpha: 16\n    targets:\n    - q_proj\n    - v_proj\n"]);
    let merge = "actor_rollout_ref.model.lora.merge=True";
    check(&format!("{lora} {merge}"), &["    rank: 32\n", "merge_adapters: true\n"]);
    assert!(!command(&format!("actor_rollout_ref.model.lora_rank=0 {merge}")).yaml().contains("adapters"));
    assert!(!command("actor_rollout_ref.model.lora_rank=0").yaml().contains("lora"));
}

#[test]
fn what_the_command_does_not_say_is_refused() {
    let overrides = "--config-name=ppo_trainer $EXTRA trainer.experiment_name=$NAME trainer.nnodes=$NODES data.shuffle=False \
        data.seed=3 data.seed=4";
    let import = command(overrides);
    check_refused(&import, &["$EXTRA"]);
    check_rows(&import, &[("data.shuffle", "changed")]);
    assert!(import.yaml().starts_with("name: imported_from_verl\nseed: 4\n"), "{}", import.yaml());
    let moments = "actor_rollout_ref.actor.optim.optimizer=AdamW8bit \
                   actor_rollout_ref.actor.optim.optimizer_impl=bitsandbytes.optim";
    let import = command(moments);
    check_refused(&import, &[]);
    assert!(import.yaml().contains("  moments: 8bit\n"), "{}", import.yaml());
    check_refused(&command("--config-path=own --config-name=mine"), &["config-path", "config-name"]);
    check_refused(
        &command("actor_rollout_ref.rollout.multi_turn.enable=True"),
        &["actor_rollout_ref.rollout.multi_turn.enable"],
    );
}

#[test]
fn its_yaml() {
    let text = "\
defaults: [ppo_trainer, _self_]
actor_rollout_ref:
  actor:
    optim: {_target_: verl.workers.config.FSDPOptimizerConfig, lr: 3.0e-6}
    ppo_mini_batch_size: ${data.train_batch_size}
    rollout_n: ${oc.select:actor_rollout_ref.rollout.n,1}
    ulysses_sequence_parallel_size: ${oc.select:nowhere,1}
  rollout: {name: ???, n: 4, response_length: '${oc.select:data.max_response_length,512}'}
data: {train_batch_size: 32, max_response_length: 64, train_files: '${oc.env:DATA}'}
algorithm: {adv_estimator: rloo}
";
    let import = imported("verl.yaml", text, Origin::Verl);
    check_refused(&import, &["data.train_files"]);
    for line in
        ["    mini_batches: 1\n", "    group_size: 4\n", "learning_rate: 3.0e-6\n", "max_new_tokens: 64\n"]
    {
        assert!(import.yaml().contains(line), "no\n{line}in\n{}", import.yaml());
    }
}

#[test]
fn its_supervised_trainer() {
    let program = "torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer";
    let usual = "data.train_files=a.parquet data.val_files=b.parquet model.partial_pretrain=m optim.lr=1e-4";
    let import = |more: &str| imported("sft.sh", &format!("{program} {usual} {more}"), Origin::VerlSft);
    let parts = import(
        "data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question'] \
         +data.response_dict_keys=['answer'] model.lora_rank=32 model.target_modules=all-linear trainer.total_epochs=2",
    );
    check_refused(&parts, &[]);
    check_loads_as("offline", &parts);
    for line in [
        "        columns:\n          prompt: extra_info.question\n          answer: extra_info.answer\n",
        "    batch_size: 256\n",
        "        learning_rate: 0.0001\n",
        "        held_out: b.parquet\n",
        "        long_prompts: refuse\n",
        "  lora:\n    rank: 32\n    alpha: 16\n",
        "      data_epochs: 2\n",
    ] {
        assert!(parts.yaml().contains(line), "no\n{line}in\n{}", parts.yaml());
    }
    let turns = import("data.multiturn.enable=true data.multiturn.messages_key=talk data.truncation=left");
    check_refused(&turns, &[]);
    check_loads_as("offline", &turns);
    for line in ["    turns: all\n", "          answer: talk\n", "          truncate: keep_end\n"] {
        assert!(turns.yaml().contains(line), "no\n{line}in\n{}", turns.yaml());
    }
    let split = import("ulysses_sequence_parallel_size=2");
    check_refused(&split, &[]);
    assert!(split.yaml().contains("  sequence_parallel: 2\n"), "{}", split.yaml());
    check_refused(&import("data.my_own=2"), &["data.my_own"]);
}

#[test]
fn its_supervised_trainer_with_engines() {
    let program = "torchrun --standalone --nproc_per_node=1 -m verl.trainer.sft_trainer";
    let usual = "data.train_files=a.parquet model.path=m engine=fsdp";
    let import = |more: &str| imported("sft.sh", &format!("{program} {usual} {more}"), Origin::VerlSft);
    let few = import("data.messages_key=talk data.train_batch_size=64 optim.lr=1e-5 trainer.total_epochs=2");
    check_refused(&few, &[]);
    check_loads_as("offline", &few);
    for line in [
        "    turns: all\n",
        "          answer: talk\n",
        "        max_tokens: 1024\n",
        "        long_prompts: refuse\n",
        "    batch_size: 64\n",
        "  micro_batch_tokens: 8192\n",
        "  zero_stage: 3\n  precision: bf16\n",
        "  recompute: full\n",
        "        learning_rate: 0.00001\n",
        "        decays: all\n",
        "      data_epochs: 2\n",
        "      prompts: 0\n",
        "seed: 1\n",
    ] {
        assert!(few.yaml().contains(line), "no\n{line}in\n{}", few.yaml());
    }
    let more = import(
        "data.val_files=b.parquet data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2 data.truncation=left \
         engine.strategy=fsdp2 engine.reshard_after_forward=False engine.dtype=float16 engine.offload_policy=True \
         optim.lr_scheduler_type=cosine optim.lr_warmup_steps_ratio=0.1 optim.min_lr_ratio=0.1 optim.betas=[0.9,0.95] \
         model.lora_rank=8 model.target_modules=all-linear trainer.max_ckpt_to_keep=3 trainer.save_freq=50 trainer.test_freq=10",
    );
    check_refused(&more, &[]);
    for line in [
        "  micro_batch_size: 2\n",
        "  zero_stage: 2\n  precision: fp16\n",
        "    optimizer: cpu_step\n",
        "        held_out: b.parquet\n",
        "          truncate: keep_end\n",
        "        cosine:\n",
        "          final_ratio: 0.1\n",
        "      keep_last: 3\n",
        "    rank: 8\n    alpha: 16\n",
    ] {
        assert!(more.yaml().contains(line), "no\n{line}in\n{}", more.yaml());
    }
    for (more, key) in [
        ("engine.qat.enable=True", "engine.qat.enable"),
        ("model.lora_adapter_path=there", "model.lora_adapter_path"),
        ("optim.optimizer=SGD", "optim.optimizer"),
        ("data.my_own=2", "data.my_own"),
    ] {
        check_refused(&import(more), &[key]);
    }
    let rounded = import("optim.optimizer=AdamW8bit");
    assert!(rounded.yaml().contains("  moments: 8bit\n"), "{}", rounded.yaml());
    let megatron = imported(
        "sft.sh",
        &format!("{program} data.train_files=a.parquet model.path=m engine=megatron"),
        Origin::VerlSft,
    );
    check_refused(&megatron, &["engine"]);
}

#[test]
fn experts_of_sampling_are_replayed() {
    let command = |mode: &str| {
        format!(
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=a.parquet \
             actor_rollout_ref.rollout.enable_rollout_routing_replay=True {mode}\n"
        )
    };
    let replays = |import: &Import| import.yaml().contains("replay_routing: true");
    for section in ["", "megatron."] {
        let key = format!("actor_rollout_ref.actor.{section}router_replay.mode");
        let import = imported("run.sh", &command(&format!("{key}=R3")), Origin::Verl);
        assert!(replays(&import), "{}", import.yaml());
        check_rows(&import, &[(&key, "mapped")]);
        let import = imported("run.sh", &command(&format!("{key}=R2")), Origin::Verl);
        assert!(!replays(&import));
        check_rows(&import, &[(&key, "refused")]);
        let import = imported("run.sh", &command(&format!("{key}=disabled")), Origin::Verl);
        assert!(!replays(&import));
        check_rows(&import, &[(&key, "no effect")]);
    }
}
