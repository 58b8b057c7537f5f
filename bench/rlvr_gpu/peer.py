"""GRPO by TRL on what `setup.py` wrote: `torchrun --nproc-per-node N peer.py FOLDER`, or one process without torchrun.

The rewards are random, as anyroll's `scoring: {random: true}`. Prints one JSON object: the seconds of
each step, the most memory that torch had allocated, and the tokens of a prompt and of a completion.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time

import datasets
import torch
import transformers
import trl

GROUP = 8


class Clock(transformers.TrainerCallback):
    def __init__(self):
        self.seconds, self.begin = [], None

    def on_step_begin(self, *_, **__):
        torch.cuda.synchronize()
        self.begin = time.perf_counter()

    def on_step_end(self, *_, **__):
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.begin)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--completions", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--deepspeed", type=int, metavar="STAGE", help="train under DeepSpeed's ZeRO")
    parser.add_argument("--dtype", default="float32", help="of the weights; the passes are in bf16 with either")
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    steps_apart = arguments.completions // ranks // arguments.micro_batch
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=steps_apart,
        num_generations=GROUP,
        max_completion_length=arguments.new_tokens,
        temperature=1.0,
        beta=0.0,
        bf16=True,
        model_init_kwargs={"dtype": arguments.dtype},
        logging_steps=1,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        max_steps=arguments.steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        deepspeed=None if arguments.deepspeed is None else dict(
            zero_optimization=dict(stage=arguments.deepspeed),
            bf16=dict(enabled=True),
            train_micro_batch_size_per_gpu="auto",
            gradient_accumulation_steps="auto",
            gradient_clipping="auto",
        ),
    )
    draw = random.Random(0)
    # AutoTokenizer takes Qwen2's own class for the folder's, which splits texts otherwise and knows none of these words.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(arguments.folder)
    data = datasets.load_dataset("json", data_files=os.path.join(arguments.folder, "prompts.jsonl"), split="train")
    prompt_tokens = statistics.mean(len(tokenizer(prompt).input_ids) for prompt in data["prompt"])
    clock = Clock()
    trainer = trl.GRPOTrainer(
        model=arguments.folder,
        reward_funcs=lambda completions, **_: [draw.random() for _ in completions],
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    lengths = [entry.get("completions/mean_length") for entry in trainer.state.log_history]
    if int(os.environ.get("RANK", "0")) == 0:
        peak = torch.cuda.max_memory_allocated() / 2**30
        mean = next((length for length in lengths if length), None)
        found = {"seconds": clock.seconds, "peak_gib": peak, "prompt_tokens": prompt_tokens, "mean_length": mean}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
