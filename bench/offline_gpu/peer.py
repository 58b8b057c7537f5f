"""DPO by TRL on the pairs that `run.py` wrote: `peer.py MODEL_FOLDER PAIRS`. Prints one JSON object: the seconds of each
step, the most memory that torch had allocated, and a prompt's tokens."""

import argparse
import json
import statistics
import tempfile
import time

import datasets
import torch
import transformers
import trl


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
    parser.add_argument("pairs")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="pairs of a step")
    parser.add_argument("--micro-batch", type=int, default=8, help="pairs")
    parser.add_argument("--dtype", default="float32", help="of the weights; the passes are in bf16 with either")
    arguments = parser.parse_args()
    config = trl.DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=arguments.batch // arguments.micro_batch,
        beta=0.1,
        max_length=1024,
        bf16=True,
        model_init_kwargs={"dtype": arguments.dtype},
        logging_steps=1,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        max_steps=arguments.steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    # AutoTokenizer takes Qwen2's own class for the folder's, which splits texts otherwise and knows none of these words.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(arguments.folder)
    data = datasets.load_dataset("json", data_files=arguments.pairs, split="train")
    prompt_tokens = statistics.mean(len(tokenizer(prompt).input_ids) for prompt in data["prompt"])
    clock = Clock()
    trainer = trl.DPOTrainer(
        model=arguments.folder,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"seconds": clock.seconds, "peak_gib": peak, "prompt_tokens": prompt_tokens, "losses": losses}))


if __name__ == "__main__":
    main()
