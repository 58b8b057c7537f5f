//! Every key of every example config, changed: the YAML or the key's outcome must change, or the key has no
//! effect for a reason. Every section refuses a key that it does not know.

use std::collections::BTreeSet;

use super::*;
use crate::{document::Document, values};

/// Notation of an example after its mutation.
#[derive(Clone, Copy)]
enum Form {
    /// YAML or JSON.
    Mapping,
    /// Flags of the program.
    Flags(&'static str),
    /// Overrides of the program.
    Overrides(&'static str),
}

struct Example {
    origin: Origin,
    form: Form,
    keys: Vec<(String, Value)>,
}

impl Example {
    fn new(origin: Origin, form: Form, text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("example");
        fs::write(&path, text).unwrap();
        let document = Document::read(&path, Some(origin)).unwrap_or_else(|error| panic!("{text}: {error}"));
        Self { origin, form, keys: document.flat().into_iter().collect() }
    }

    fn text(&self, keys: &[(String, Value)]) -> String {
        let words = |value: &Value| match value {
            Value::Array(items) => items.iter().map(values::text).collect::<Vec<_>>().join(" "),
            value => values::text(value),
        };
        match self.form {
            Form::Mapping => {
                let mut root = serde_json::Map::new();
                keys.iter().for_each(|(key, value)| values::insert(&mut root, key, value.clone()));
                serde_json::to_string(&root).unwrap()
            }
            Form::Flags(program) => keys.iter().fold(program.to_owned(), |text, (key, value)| match value {
                Value::Bool(true) => format!("{text} --{key}"),
                value => format!("{text} --{key} {}", words(value)),
            }),
            Form::Overrides(program) => keys.iter().fold(program.to_owned(), |text, (key, value)| {
                format!("{text} '{key}={}'", values::text(value))
            }),
        }
    }

    fn import(&self, keys: &[(String, Value)]) -> Option<Import> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("example");
        fs::write(&path, self.text(keys)).unwrap();
        import(&path, Some(self.origin)).ok()
    }
}

/// Other values for a key.
fn mutations(value: &Value, form: Form) -> Vec<Option<Value>> {
    let mut changed = match value {
        Value::Bool(truth) => vec![json!(!truth)],
        value if values::number(value).is_some() => {
            let number = values::number(value).unwrap();
            [number + 1.0, number * 2.0, number + 0.25].map(values::json).to_vec()
        }
        Value::String(text) => vec![json!(format!("{text}x"))],
        Value::Array(items) => {
            let more = items.iter().cloned().chain([items.first().cloned().unwrap_or(json!(1))]);
            vec![more.collect(), items.iter().skip(1).cloned().collect()]
        }
        _ => vec![json!(1)],
    };
    changed.push(json!("another"));
    if matches!(form, Form::Mapping) {
        changed.push(Value::Null);
    }
    let mut mutations: Vec<_> = changed.into_iter().filter(|other| other != value).map(Some).collect();
    mutations.push(None);
    mutations
}

fn row<'a>(import: &'a Import, key: &str) -> Option<&'a crate::Row> {
    import.rows.iter().find(|row| row.key == key)
}

/// Checks that rows and YAML agree, and that each key has one row with a reason.
fn check_report(import: &Import, problems: &mut Vec<String>) {
    let keys: BTreeSet<&str> = import.rows.iter().map(|row| row.key.as_str()).collect();
    if keys.len() != import.rows.len() {
        problems.push("a key has two rows".to_owned());
    }
    for row in &import.rows {
        let (to, why) = match &row.outcome {
            Outcome::Mapped { to } => (to.as_str(), "mapped"),
            Outcome::Changed { to, why } => (to.as_str(), why.as_str()),
            Outcome::Idle { why } | Outcome::Refused { why } => ("", why.as_str()),
        };
        if why.is_empty() {
            problems.push(format!("no reason: {row}"));
        }
        if let Some((field, value)) = to.split_once(": ") {
            let written = import.draft.get(field).map(values::text);
            if written.as_deref() != Some(value) && !field.starts_with("pipeline.rlvr.data.file") {
                problems.push(format!("not in the YAML, but {written:?}: {row}"));
            }
        }
    }
}

fn check(example: &Example) {
    let base = example.import(&example.keys).unwrap();
    let mut problems = Vec::new();
    check_report(&base, &mut problems);
    for (index, (key, value)) in example.keys.iter().enumerate() {
        let Some(before) = row(&base, key) else {
            problems.push(format!("{key} has no row"));
            continue;
        };
        for mutation in mutations(value, example.form) {
            let mut keys = example.keys.clone();
            match &mutation {
                Some(other) => keys[index].1 = other.clone(),
                None => drop(keys.remove(index)),
            }
            let Some(import) = example.import(&keys) else { continue };
            check_report(&import, &mut problems);
            let is_same = import.yaml() == base.yaml();
            let after = row(&import, key);
            match (&before.outcome, after.map(|row| &row.outcome)) {
                (Outcome::Mapped { .. }, Some(Outcome::Mapped { .. }))
                    if is_same && mutation.is_some() && !after.unwrap().is_default =>
                {
                    problems.push(format!("lost: {} is {mutation:?}", after.unwrap()));
                }
                (Outcome::Idle { .. }, Some(Outcome::Idle { .. })) if !is_same => {
                    problems.push(format!("not idle: {before} is {mutation:?}"));
                }
                (Outcome::Idle { .. }, None) if !is_same => {
                    problems.push(format!("not idle: {before} is removed"));
                }
                (Outcome::Mapped { .. }, Some(Outcome::Idle { .. }))
                    if is_same && mutation != Some(Value::Null) =>
                {
                    problems.push(format!("idle and equal: {} is {mutation:?}", after.unwrap()));
                }
                _ => {}
            }
        }
    }
    check_strangers(example, &mut problems);
    problems.sort();
    problems.dedup();
    assert!(problems.is_empty(), "{:?}\n{}", example.origin, problems.join("\n"));
}

/// Sections whose keys belong to another program as a whole, or that are off in the examples.
const OTHERS: [&str; 14] = [
    "vllm",
    "ckpt",
    "activation_checkpointing",
    "tensorboard",
    "hydra",
    "dynamo_config",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
    "tokenizer",
    "actor_infer.strategy_args",
    "actor_infer.model_args",
    "validation.data_args",
    "actor_rollout_ref.ref.fsdp_config",
    "train.trainer_kwargs",
];

/// Checks that an unknown key in each section is refused by name.
fn check_strangers(example: &Example, problems: &mut Vec<String>) {
    let section =
        |key: &String| key.rsplit_once('.').map_or(String::new(), |(section, _)| format!("{section}."));
    let sections: BTreeSet<String> = example.keys.iter().map(|(key, _)| section(key)).collect();
    for section in sections.iter().filter(|section| !OTHERS.contains(&section.trim_end_matches('.'))) {
        let stranger = format!("{section}zz_stranger");
        let mut keys = example.keys.clone();
        keys.push((stranger.clone(), json!(3)));
        let Some(import) = example.import(&keys) else { continue };
        let is_refused =
            row(&import, &stranger).is_some_and(|row| matches!(row.outcome, Outcome::Refused { .. }));
        if !is_refused {
            problems.push(format!("a stranger passes: {:?}", row(&import, &stranger)));
        }
    }
}

const PPO_RAY: &str = "python3 -m openrlhf.cli.train_ppo_ray";

#[test]
fn accelerates_keys() {
    check(&Example::new(Origin::Accelerate, Form::Mapping, ACCELERATE_ZERO3));
    let fsdp = "\
distributed_type: FSDP
fsdp_config: {fsdp_activation_checkpointing: true, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP,
  fsdp_offload_params: true, fsdp_reshard_after_forward: true, fsdp_version: 2, fsdp_ignored_modules: null}
dynamo_config: {dynamo_backend: INDUCTOR}
megatron_lm_config: {}
command_file: null
gpu_ids: '0,2'
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
";
    check(&Example::new(Origin::Accelerate, Form::Mapping, fsdp));
}

#[test]
fn deepspeeds_keys() {
    check(&Example::new(Origin::Deepspeed, Form::Mapping, DEEPSPEED));
    let fp16 = r#"{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 0.5,
  "communication_data_type": "fp16",
  "seq_parallel_communication_data_type": "fp32",
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1},
  "zero_optimization": {
    "stage": 3, "contiguous_gradients": true, "sub_group_size": 1e9, "zero_hpz_partition_size": 1,
    "offload_param": {"device": "cpu", "pin_memory": true}, "offload_optimizer": {"device": "cpu"},
    "stage3_gather_16bit_weights_on_model_save": true
  },
  "optimizer": {"type": "Adam", "params": {"lr": 2e-5, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.1, "bias_correction": true, "adam_w_mode": true}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 20, "total_num_steps": 200, "cos_min_ratio": 0.1, "warmup_type": "linear", "warmup_min_ratio": 0.0}},
  "wall_clock_breakdown": false
}"#;
    check(&Example::new(Origin::Deepspeed, Form::Mapping, fp16));
}

const TRL_COMMON: &str = "\
model_name_or_path: models/small
model_revision: main
dataset_name: data/records.jsonl
dataset_config: all
learning_rate: 2.0e-6
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.05
adam_beta1: 0.9
adam_beta2: 0.95
adam_epsilon: 1.0e-7
weight_decay: 0.1
max_grad_norm: 0.5
gradient_checkpointing: false
bf16: true
use_peft: true
lora_r: 8
lora_alpha: 24
lora_dropout: 0.1
lora_target_modules: [q_proj, k_proj]
use_rslora: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
num_processes: 2
num_train_epochs: 2
save_steps: 50
save_total_limit: 3
seed: 7
logging_steps: 5
output_dir: out
trust_remote_code: true
shuffle_dataset: true
";

#[test]
fn trls_keys() {
    let grpo = "\
num_generations: 8
steps_per_generation: 16
num_iterations: 2
max_completion_length: 256
max_prompt_length: 128
temperature: 0.9
top_p: 0.95
top_k: 40
min_p: 0.05
repetition_penalty: 1.1
beta: 0.04
epsilon: 0.2
epsilon_high: 0.28
delta: 4.0
loss_type: dr_grpo
scale_rewards: batch
importance_sampling_level: token
mask_truncated_completions: true
top_entropy_quantile: 0.4
reward_funcs: [accuracy_reward, think_format_reward]
reward_weights: [1.0, 0.5]
use_vllm: true
vllm_gpu_memory_utilization: 0.4
eval_steps: 100
";
    check(&Example::new(Origin::Trl, Form::Mapping, &format!("{TRL_COMMON}{grpo}")));
    let offline = |more: &str, origin| {
        check(&Example::new(origin, Form::Mapping, &format!("{TRL_COMMON}max_length: 512\n{more}")))
    };
    offline(
        "packing: true\nassistant_only_loss: true\neval_strategy: steps\neval_steps: 10\n",
        Origin::TrlSft,
    );
    offline("dataset_text_field: body\nloss_type: nll\n", Origin::TrlSft);
    offline(
        "beta: 0.2\nlabel_smoothing: 0.1\nrpo_alpha: 0.5\nloss_type: sigmoid\ntruncation_mode: keep_end\n",
        Origin::TrlDpo,
    );
    offline("center_rewards_coefficient: 0.01\n", Origin::TrlReward);
    offline("step_separator: '##'\ntrain_on_last_step_only: true\nmax_prompt_length: 64\n", Origin::TrlPrm);
    offline("beta: 0.2\ndesirable_weight: 1.5\nundesirable_weight: 0.5\nloss_type: kto\n", Origin::TrlKto);
    offline(
        "teacher_model_name_or_path: models/large\nlmbda: 0.0\nbeta: 0.4\ntemperature: 0.8\nseq_kd: false\n",
        Origin::TrlGkd,
    );
}

#[test]
fn openrlhfs_keys() {
    let common = "--actor.model_name_or_path m --actor.num_gpus_per_node 4 --actor.num_nodes 1 --ds.zero_stage 3 \
        --ds.param_dtype bf16 --ds.adam_offload --actor.gradient_checkpointing_enable --actor.adam.lr 2e-6 \
        --actor.adam.betas 0.9 0.98 --actor.adam.weight_decay 0.1 --actor.lr_scheduler cosine_with_min_lr \
        --actor.lr_warmup_ratio 0.05 --actor.max_norm 0.5 --actor.eps_clip 0.2 --actor.entropy_coef 0.01 \
        --rollout.batch_size 64 --rollout.n_samples_per_prompt 4 --train.batch_size 128 --train.micro_batch_size 2 \
        --train.max_epochs 2 --train.num_episodes 3 --train.seed 5 --rollout.temperature 0.9 --rollout.top_p 0.8 \
        --rollout.max_new_tokens 128 --data.max_len 256 --data.prompt_dataset a.jsonl --data.input_key q --data.label_key gold \
        --data.apply_chat_template --ckpt.save_steps 20 --ckpt.max_num 2 --eval.dataset held.jsonl --eval.steps 10 \
        --eval.temperature 0.6 --eval.n_samples_per_prompt 2 --vllm.num_engines 2 --ds.packing_samples --ds.lora.rank 8 \
        --ds.lora.alpha 16 --ds.lora.dropout 0.1 --ds.lora.target_modules q_proj v_proj --ref.offload";
    for more in [
        "--algo.advantage.estimator gae --algo.advantage.gamma 0.99 --algo.advantage.lambd 0.9 --critic.adam.lr 1e-5 \
         --critic.value_clip 0.3 --reward.model_name_or_path rm --reward.clip_range -5 5 --reward.normalize_enable \
         --algo.kl.init_coef 0.02 --algo.kl.target 6 --algo.kl.horizon 1000 --critic.freezing_steps 2 --critic.model_name_or_path m",
        "--algo.advantage.estimator group_norm --reward.remote_url r.py --algo.kl.init_coef 0.02 --algo.kl.use_loss \
         --algo.kl.estimator k3 --actor.dual_clip 3 --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop \
         --algo.advantage.is_correction_threshold 0.5 4 --reward.overlong_buffer_len 32 --reward.overlong_penalty_factor 0.5",
    ] {
        let text = format!("{PPO_RAY} {common} {more}");
        check(&Example::new(Origin::Openrlhf, Form::Flags(PPO_RAY), &text));
    }
    let offline = "--model.model_name_or_path m --data.max_len 512 --train.batch_size 64 --train.micro_batch_size 2 \
        --train.max_epochs 3 --adam.lr 1e-5 --adam.betas 0.9 0.98 --max_norm 0.5 --lr_warmup_ratio 0.1 --ds.zero_stage 2 \
        --ds.param_dtype bf16 --train.seed 3 --data.dataset a.jsonl --ckpt.save_steps 10 --model.gradient_checkpointing_enable \
        --data.max_samples 100 --data.apply_chat_template";
    for (name, origin, more) in [
        ("sft", Origin::OpenrlhfSft, "--data.input_key q --data.output_key a --data.multiturn"),
        (
            "dpo",
            Origin::OpenrlhfDpo,
            "--model.beta 0.2 --model.label_smoothing 0.1 --model.nll_loss_coef 0.2 --data.prompt_key p --data.chosen_key c --data.rejected_key r --ref.offload",
        ),
        (
            "rm",
            Origin::OpenrlhfRm,
            "--model.loss_type sigmoid --data.prompt_key p --data.chosen_key c --data.rejected_key r",
        ),
        (
            "prm",
            Origin::OpenrlhfPrm,
            "--data.input_key q --data.label_key l --placeholder_token @@ --reward_tokens + -",
        ),
    ] {
        let program = match name {
            "sft" => "deepspeed --module openrlhf.cli.train_sft",
            "dpo" => "deepspeed --module openrlhf.cli.train_dpo",
            "prm" => "deepspeed --module openrlhf.cli.train_prm",
            _ => "deepspeed --module openrlhf.cli.train_rm",
        };
        check(&Example::new(origin, Form::Flags(program), &format!("{program} {offline} {more}")));
    }
}

#[test]
fn verls_keys() {
    let program = "python3 -m verl.trainer.main_ppo";
    let overrides = |text: &str| Example::new(Origin::Verl, Form::Overrides(program), text);
    check(&overrides(verl::SCRIPT));
    let common = "data.train_files=a.parquet data.val_files=b.parquet data.train_batch_size=64 data.max_prompt_length=128 \
        data.max_response_length=256 data.filter_overlong_prompts=True data.shuffle=False data.seed=3 data.train_max_samples=-1 \
        actor_rollout_ref.model.path=m actor_rollout_ref.model.enable_gradient_checkpointing=False \
        actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.optim.weight_decay=0.1 \
        actor_rollout_ref.actor.optim.betas=[0.9,0.95] actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
        actor_rollout_ref.actor.optim.lr_scheduler_type=cosine actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \
        actor_rollout_ref.actor.grad_clip=0.5 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_epochs=2 \
        actor_rollout_ref.actor.entropy_coeff=0.01 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
        actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
        actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.temperature=0.9 actor_rollout_ref.rollout.top_p=0.8 \
        actor_rollout_ref.rollout.top_k=20 actor_rollout_ref.rollout.gpu_memory_utilization=0.5 actor_rollout_ref.rollout.name=vllm \
        trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.total_epochs=3 trainer.save_freq=10 trainer.test_freq=5 \
        trainer.experiment_name=run trainer.val_before_train=False trainer.max_actor_ckpt_to_keep=2";
    let sft = "torchrun -m verl.trainer.fsdp_sft_trainer";
    let text = "data.train_files=a.parquet data.val_files=b.parquet model.partial_pretrain=m optim.lr=1e-4 optim.betas=[0.9,0.99] \
        optim.weight_decay=0.1 optim.lr_warmup_steps_ratio=0.2 optim.clip_grad=0.5 optim.lr_scheduler=cosine data.prompt_key=q \
        data.response_key=a data.prompt_dict_keys=[b] data.train_batch_size=64 data.micro_batch_size_per_gpu=2 data.max_length=512 \
        data.truncation=right model.lora_rank=8 model.lora_alpha=32 model.target_modules=[q_proj] trainer.total_epochs=2 \
        trainer.save_freq=10 trainer.test_freq=5 trainer.seed=4 trainer.experiment_name=run model.enable_gradient_checkpointing=False";
    check(&Example::new(Origin::VerlSft, Form::Overrides(sft), &format!("{sft} {text}")));
    for more in [
        "algorithm.adv_estimator=gae algorithm.gamma=0.99 algorithm.lam=0.9 critic.model.path=m critic.optim.lr=3e-5 \
         critic.ppo_mini_batch_size=32 critic.cliprange_value=0.3 critic.ppo_micro_batch_size_per_gpu=4 trainer.critic_warmup=2 \
         algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_ctrl.target_kl=0.2 \
         algorithm.kl_ctrl.horizon=5000 reward.reward_model.enable=True reward.reward_model.model_path=rm reward_model.micro_batch_size_per_gpu=4",
        "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
         actor_rollout_ref.actor.clip_ratio_low=0.1 actor_rollout_ref.actor.clip_ratio_high=0.3 reward.custom_reward_function.path=r.py \
         reward.custom_reward_function.name=f algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3 \
         reward.sandbox_fusion.max_concurrent=8 data.prompt_key=question",
    ] {
        check(&overrides(&format!("{program} {common} {more}")));
    }
}

#[test]
fn trlxs_keys() {
    let text = "\
train: {seq_length: 64, epochs: 100, total_steps: 1000, batch_size: 16, minibatch_size: 8, seed: 7, tracker: wandb,
  checkpoint_interval: 100, eval_interval: 8, trainer: AcceleratePPOTrainer}
model: {model_path: models/gpt, num_layers_unfrozen: -1,
  peft_config: {peft_type: LORA, task_type: CAUSAL_LM, r: 8, lora_alpha: 16, lora_dropout: 0.1, target_modules: [q_proj]}}
tokenizer: {tokenizer_path: models/gpt, padding_side: left}
optimizer: {name: adamw, kwargs: {lr: 2.0e-4, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 1.0e-6}}
scheduler: {name: cosine_annealing, kwargs: {T_max: 1000, eta_min: 2.0e-5}}
method: {name: ppoconfig, num_rollouts: 128, chunk_size: 32, ppo_epochs: 4, init_kl_coef: 0.2, target: 6, horizon: 9000,
  gamma: 0.99, lam: 0.9, vf_coef: 1.2, cliprange: 0.2, cliprange_value: 0.3, cliprange_reward: 5, scale_reward: running,
  gen_kwargs: {max_new_tokens: 40, top_k: 0, top_p: 1.0, temperature: 0.9, do_sample: true}}
";
    check(&Example::new(Origin::Trlx, Form::Mapping, text));
}

#[test]
fn trlxs_keys_of_ilql() {
    let text = "\
train: {seq_length: 64, epochs: 100, total_steps: 1000, batch_size: 16, minibatch_size: 8, seed: 7, tracker: wandb,
  checkpoint_interval: 100, eval_interval: 8, trainer: AccelerateILQLTrainer}
model: {model_path: models/gpt, num_layers_unfrozen: -1}
tokenizer: {tokenizer_path: models/gpt, padding_side: left}
optimizer: {name: adamw, kwargs: {lr: 2.0e-4, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 1.0e-6}}
scheduler: {name: cosine_annealing, kwargs: {T_max: 1000, eta_min: 2.0e-5}}
method: {name: ilqlconfig, tau: 0.7, gamma: 0.99, cql_scale: 0.1, awac_scale: 1, alpha: 0.001, beta: 0.5,
  steps_for_target_q_sync: 5, two_qs: true, gen_kwargs: {max_new_tokens: 56, top_k: 20, beta: 4, temperature: 1.0}}
";
    check(&Example::new(Origin::Trlx, Form::Mapping, text));
}

#[test]
fn rolls_keys() {
    let text = "\
exp_name: run
seed: 3
max_steps: 100
save_steps: 20
eval_steps: 5
logging_steps: 1
rollout_batch_size: 16
num_return_sequences_in_group: 8
prompt_length: 256
response_length: 512
ppo_epochs: 2
max_grad_norm: 0.5
reward_clip: 10
advantage_clip: 2.0
dual_clip_loss: true
pg_clip: 0.3
whiten_advantages: true
max_len_mask: true
entropy_loss_coef: 0.01
loss_agg_mode: seq-mean-token-sum
val_batch_size: 64
pretrain: models/qwen
reward_pretrain: models/qwen
global_template: qwen3
actor_train:
  model_args: {flash_attn: fa2, disable_gradient_checkpointing: false, dtype: bf16, lora_rank: 8, lora_alpha: 16, lora_target: 'q_proj,v_proj'}
  training_args: {learning_rate: 1.0e-6, weight_decay: 0.1, adam_beta1: 0.9, adam_beta2: 0.95, per_device_train_batch_size: 1,
    gradient_accumulation_steps: 8, warmup_steps: 20, lr_scheduler_type: cosine, min_lr_ratio: 0.1}
  data_args: {template: qwen3, file_name: [data/math.jsonl], messages: messages}
  strategy_args: {strategy_name: deepspeed_train, strategy_config: {zero_optimization: {stage: 3, overlap_comm: true}}}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {top_p: 0.99, top_k: 100, temperature: 0.99, num_beams: 1}
  strategy_args: {strategy_name: vllm}
  device_mapping: list(range(0,8))
rewards: {math_rule: {worker_cls: a.MathRuleRewardWorker, world_size: 8, tag_included: [math]}}
";
    for more in [
        "adv_estimator: gae\ngamma: 0.99\nlambd: 0.9\nvalue_clip: 0.3\ncritic_warmup: 2\nadd_token_level_kl: true\n\
         init_kl_coef: 0.02\ntarget_kl: 0.1\nkl_horizon: 5000\ncritic: {training_args: {learning_rate: 1.0e-5}}\n",
        "adv_estimator: reinforce\ngamma: 0.9\nnorm_mean_type: batch\nnorm_std_type: group\nuse_kl_loss: true\nkl_loss_coef: 0.01\n\
         difficulty_mask: true\ndifficulty_low_threshold: 0.1\ndifficulty_high_threshold: 0.9\nasync_generation_ratio: 1\n",
        "adv_estimator: grpo\nimportance_sampling: seq\nuse_pg_clip_range: true\npg_clip_low: 0.1\npg_clip_high: 0.3\n\
         train_infer_correction: {is_weight: {enabled: true, weight_type: sequence, upper_bound: 2.0}}\n",
    ] {
        let text =
            if more.contains("seq") { text.replace("dual_clip_loss: true\n", "") } else { text.to_owned() };
        check(&Example::new(Origin::Roll, Form::Mapping, &format!("{text}{more}")));
    }
}
