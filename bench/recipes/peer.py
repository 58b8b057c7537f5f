"""GRPO by TRL with transformers' generation, on a recipe's model, data, reward and settings: one line of JSON a step and
an evaluation.

    PYTHON bench/recipes/peer.py SETTINGS.json OUT.jsonl --seed N --anyroll FILE [--cpu]

`run.py` writes the settings and starts this. Rewards are those of `anyroll reward`, in training and in evaluation; the
time that they take is in `reward_s`, and is part of `step_s`. Needs torch, transformers, TRL and datasets.
"""

import argparse
import json
import math
import statistics
import subprocess
import tempfile
import time

import datasets
import torch
import transformers
import trl


class Lines:
    """Lines of JSON in a file, each with the seconds since the start."""

    def __init__(self, path):
        self.file, self.began = open(path, "w", encoding="utf-8"), time.monotonic()

    def add(self, **row):
        row["wall_s"] = round(time.monotonic() - self.began, 3)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()


class Reward:
    """The recipe's reward, by anyroll's command line."""

    def __init__(self, anyroll, name):
        self.command, self.seconds = [anyroll, "reward", name, "--file", "-"], 0.0

    def scores(self, questions, texts, answers, finished):
        began = time.monotonic()
        rows = zip(questions, texts, answers, finished)
        lines = "".join(json.dumps({"prompt": q, "completion": t, "answer": a, "finished": bool(f)}) + "\n" for q, t, a, f in rows)
        done = subprocess.run(self.command, input=lines, text=True, stdout=subprocess.PIPE, check=True)
        found = [json.loads(line)["score"] for line in done.stdout.splitlines()]
        if len(found) != len(texts):
            raise SystemExit(f"{len(found)} scores of {len(texts)} completions")
        self.seconds += time.monotonic() - began
        return found


class Evaluation:
    """Greedy completions and samples at temperature 1 of the held-out questions, as anyroll evaluates."""

    def __init__(self, settings, tokenizer, reward, is_cpu):
        self.settings, self.tokenizer, self.reward, self.is_cpu = settings, tokenizer, reward, is_cpu
        self.rows = read(settings["test"])[: settings["eval_prompts"]]

    @torch.no_grad()
    def completions(self, model, rows, greedy):
        end = self.tokenizer.eos_token_id
        chats = [self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
        batch = self.tokenizer(chats, padding=True, add_special_tokens=False, return_tensors="pt").to(model.device)
        how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=not self.is_cpu):
            ids = model.generate(**batch, max_new_tokens=self.settings["max_new_tokens"], pad_token_id=end, eos_token_id=end, **how)
        found = ids[:, batch["input_ids"].shape[1] :].tolist()
        finished = [end in line for line in found]
        return [self.tokenizer.decode(line[: line.index(end)] if end in line else line) for line in found], finished

    def right(self, model, samples, greedy):
        rows = [row for row in self.rows for _ in range(samples)]
        texts, finished = self.completions(model, rows, greedy)
        scores = self.reward.scores([row["prompt"][0]["content"] for row in rows], texts, [row["answer"] for row in rows], finished)
        return [score >= 1 for score in scores]

    def measure(self, model):
        was_training = model.training
        model.eval()
        samples = self.settings["eval_samples"]
        greedy, sampled = self.right(model, 1, True), self.right(model, samples, False)
        any_right = [any(sampled[at : at + samples]) for at in range(0, len(sampled), samples)]
        model.train(was_training)
        mean = lambda values: statistics.mean(map(float, values))
        return {"eval/greedy": mean(greedy), "eval/pass@1": mean(sampled), f"eval/pass@{samples}": mean(any_right)}


class Watch(transformers.TrainerCallback):
    """Times steps without evaluations, evaluates, and ends a run whose gradient is not finite."""

    def __init__(self, settings, lines, evaluation, reward):
        self.settings, self.lines, self.evaluation, self.reward = settings, lines, evaluation, reward
        self.model = None

    def evaluate(self, step):
        began = time.monotonic()
        measured = self.evaluation.measure(self.model)
        self.lines.add(step=step, **measured, eval_s=round(time.monotonic() - began, 3))

    def begin_step(self):
        self.clock, self.reward.seconds = time.monotonic(), 0.0

    def on_train_begin(self, args, state, control, **_):
        self.evaluate(0)
        self.begin_step()

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.step_s, self.reward_s = time.monotonic() - self.clock, self.reward.seconds

    def on_log(self, args, state, control, logs=None, **_):
        if not logs or "reward" not in logs:
            return
        kept = {name: logs[name] for name in ("reward", "grad_norm", "entropy", "completions/mean_length") if name in logs}
        step = state.global_step
        self.lines.add(step=step, step_s=round(self.step_s, 4), reward_s=round(self.reward_s, 4), **kept)
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            raise SystemExit(f"step {step}: the gradient is not a finite number")
        if step % self.settings["eval_every"] == 0 or step == self.settings["steps"]:
            self.evaluate(step)
        self.begin_step()


def read(path):
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]


def grpo(settings, seed, is_cpu):
    """Returns TRL's form of the recipe's settings."""
    completions = settings["prompts"] * settings["group"]
    return trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), seed=seed, max_steps=settings["steps"],
        per_device_train_batch_size=settings["micro_batch"], gradient_accumulation_steps=completions // settings["micro_batch"],
        num_generations=settings["group"], max_completion_length=settings["max_new_tokens"],
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, epsilon=0.2, num_iterations=1,
        loss_type="dapo", scale_rewards="group", mask_truncated_completions=False,
        learning_rate=settings["learning_rate"], lr_scheduler_type="constant", warmup_steps=0,
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0, max_grad_norm=1.0,
        bf16=not is_cpu, use_cpu=is_cpu, gradient_checkpointing=False,
        # Weights in float32, passes in bf16. A run with SDPA ended in a gradient that was not a number.
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("settings")
    arguments.add_argument("out")
    arguments.add_argument("--seed", type=int, required=True)
    arguments.add_argument("--anyroll", required=True)
    arguments.add_argument("--cpu", action="store_true")
    given = arguments.parse_args()
    with open(given.settings, encoding="utf-8") as file:
        settings = json.load(file)
    lines, reward = Lines(given.out), Reward(given.anyroll, settings["reward"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"], padding_side="left")

    def score(prompts, completions, completion_ids, answer, **_):
        finished = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        return reward.scores([it[-1]["content"] for it in prompts], [it[0]["content"] for it in completions], answer, finished)

    watch = Watch(settings, lines, Evaluation(settings, tokenizer, reward, given.cpu), reward)
    trainer = trl.GRPOTrainer(
        model=settings["model"], reward_funcs=score, args=grpo(settings, given.seed, given.cpu),
        train_dataset=datasets.Dataset.from_list(read(settings["train"])), processing_class=tokenizer, callbacks=[watch],
    )  # fmt: skip
    watch.model = trainer.model
    lines.add(trl=trl.__version__, transformers=transformers.__version__, torch=torch.__version__, seed=given.seed)
    trainer.train()


if __name__ == "__main__":
    main()
