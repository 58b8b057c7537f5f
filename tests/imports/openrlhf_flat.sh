set -x
# GRPO on one node
python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \
   --colocate_all_models \
   --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
   --remote_rm_url "/openrlhf/examples/python/reward_func.py" \
   --micro_train_batch_size 8 --train_batch_size 128 \
   --micro_rollout_batch_size 16 --rollout_batch_size 128 --n_samples_per_prompt 8 \
   --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 \
   --zero_stage 3 --bf16 --adam_offload \
   --actor_learning_rate 5e-7 \
   --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \
   --advantage_estimator group_norm \
   --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages \
   --eps_clip_low_high 0.2 0.27 \
   --gradient_checkpointing --packing_samples \
   --vllm_enable_sleep --deepspeed_enable_sleep \
   --save_steps -1
