python3 -m openrlhf.cli.train_ppo_ray \
   --actor.num_gpus_per_node 4 --actor.model_name_or_path Qwen/Qwen3-4B \
   --ds.zero_stage 2 --ds.param_dtype bf16 --ds.enable_sleep --ds.packing_samples \
   --vllm.num_engines 4 --vllm.enable_sleep \
   --train.micro_batch_size 2 --train.batch_size 256 --train.colocate_all \
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 2048 \
   --actor.adam.lr 1e-6 --actor.adam.betas 0.9 0.98 --actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4 \
   --algo.advantage.estimator rloo --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop \
   --algo.kl.init_coef 0.01 --algo.kl.target 0.1 --algo.dynamic_filtering_enable \
   --eval.steps 10 --logger.wandb.run_name qwen3_gspo
