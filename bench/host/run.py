"""All that one host of N GPUs is measured by, in one run: `run.py --gpus 8 OUT [PART ...] [--python PYTHON]`.

    cargo build --release --workspace --examples
    python3 bench/host/run.py --gpus 4 OUT                      # every part, in the order below
    python3 bench/host/run.py --gpus 2 --backend cpu OUT        # tries the script: tiny shapes, no peer

Each part has a limit in seconds; what exceeds it is ended, and the others go on. OUT/results.jsonl has a line for each
command: its part, name, seconds, exit status, and the JSON objects that it printed. OUT/logs has its output.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Host:
    """Runs commands, and keeps what they print."""

    def __init__(self, options):
        self.options, self.gpus, self.is_gpu = options, options.gpus, options.backend != "cpu"
        self.out = options.out.resolve()
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        self.environment = {"OMP_WAIT_POLICY": "passive", "NCCL_NVLS_ENABLE": "0", **os.environ}
        self.failed = []

    def shape(self, name):
        return name if self.is_gpu else "tiny"

    def counts(self):
        """1, 2, 4, ... up to all GPUs."""
        return [count for count in (1, 2, 4, 8, 16) if count <= self.gpus]

    def command(self, part, name, command, limit_s):
        """Runs a command in a process group of its own. Returns its JSON objects."""
        log, started = self.out / "logs" / f"{part}_{name}.txt", time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                                       env=self.environment, start_new_session=True)
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = f"more than {limit_s} s"
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        lines = log.read_text(errors="replace").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        row = {"part": part, "name": name, "seconds": round(time.monotonic() - started, 1), "status": status, "found": found}
        with (self.out / "results.jsonl").open("a") as results:
            results.write(json.dumps(row) + "\n")
        if status != 0:
            self.failed.append(f"{part} {name}")
            print("\n".join(lines[-8:]))
        print(f"{part} {name}: {status} after {row['seconds']} s", flush=True)
        return found

    def train(self, part, name, run, count=None, limit_s=150):
        """A run of bench/train: tokens a second, memory, losses and a digest of the weights."""
        program = self.options.programs / "examples/train"
        command = [sys.executable, ROOT / "bench/train/run.py", "--world-size", count or self.gpus, "--backend", self.options.backend,
                   "--program", program, "--python", self.options.python, "--timeout-s", limit_s - 5, run]
        found = self.command(part, name, command, limit_s)
        for one in found:
            keys = ("tokens_per_s_per_device", "tokens_per_s", "step_ms", "weights_s", "used_gib", "planned_gib")
            print("   ", ", ".join(f"{key} {one[key]:.4g}" for key in keys if key in one), flush=True)
        return found

    def anyroll(self, part, name, config, sets, limit_s):
        """A run of anyroll. Returns the rows of its steps."""
        run = self.out / "runs" / f"{part}_{name}"
        sets = [word for one in sets for word in ("--set", one)]
        self.command(part, name, [self.options.programs / "anyroll", "run", config, "--output", run, *sets], limit_s)
        rows = run / "metrics.jsonl"
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def conformance(host):
    command = [host.options.programs / "anyroll", "conformance", "--backend", host.options.backend]
    host.command("conformance", "all", [*command, "--world-size", ",".join(map(str, host.counts()))], 240)


def kills(host):
    command = [sys.executable, ROOT / "tests/gpu/kills.py", "--backend", host.options.backend, "--ranks", host.gpus]
    host.command("kills", "random", [*command, "--times", 16, "--endure", host.options.programs / "examples/endure"], 240)


def quickstart(host):
    """Twice the same, and once with all ranks together in sampling: learned, and equal to the bit."""
    config = ROOT / f"configs/rlvr_sort_{host.options.backend}.yaml"
    few = [] if host.is_gpu else ["pipeline.rlvr.steps=12", "pipeline.rlvr.warmup.steps=32", "pipeline.rlvr.evaluation.prompts=64"]
    sets = [f"devices={host.gpus}", *few]
    digests = []
    for name, more in (("first", []), ("again", []), ("sharded", ["strategy.zero_stage=3"])):
        rows = host.anyroll("quickstart", name, config, sets + more, 240)
        kept = [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]
        digests.append(hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16] if kept else None)
        passes = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
        print(f"    digest {digests[-1]}, pass@1 {passes[:1]} to {passes[-1:]}", flush=True)
    if None in digests or len(set(digests)) > 1:
        host.failed.append("quickstart: runs differ")


TIMES = ("time/", "perf/", "throughput/", "memory/", "device/")


def stages(host):
    """ZeRO 0 to 3 of 1.5B: ten steps with the same losses, norms and weights."""
    run = f"ours:model={host.shape('1.5b')},steps=10,digest=true" + ("" if host.is_gpu else ",seq=64")
    found = [host.train("stages", f"zero{stage}", f"{run},stage={stage}") for stage in range(4)]
    ends = [(one[0]["losses"], one[0]["norms"], one[0]["weights"]) if one else None for one in found]
    if None in ends or any(end != ends[0] for end in ends):
        host.failed.append("stages: they differ")


def scaling(host):
    """7B at ZeRO-3 on ever more GPUs, beside FSDP2 and DeepSpeed on all."""
    keys = f"model={host.shape('7b')},stage=3,steps=5" + ("" if host.is_gpu else ",seq=64")
    for count in host.counts():
        if count > 1 or not host.is_gpu:  # 7B's states do not fit on one
            host.train("scaling", f"ours{count}", f"ours:{keys}", count)
    if host.is_gpu and not host.options.skip_peers:
        for name, more in (("fsdp2", ""), ("deepspeed", ",deepspeed=3")):
            host.train("scaling", name, f"peer:model=7b,steps=5{more}", limit_s=240)


def together(host):
    """Sampling by 1, 2, 4, ... ranks together: 7B, and what no single GPU has room for."""
    few = "" if host.is_gpu else ",prompt=16,tokens=8"
    for count in host.counts() if host.is_gpu else (1, 2):
        host.train("together", f"7b_{count}", f"ours:mode=generate,stage=3,model={host.shape('7b')},batch=64,together={count}{few}")
    if host.is_gpu:
        for model, least in (("32b", 2), ("72b", 4)):
            for count in (count for count in host.counts() if count >= least):
                run = f"ours:mode=generate,stage=3,model={model},batch=64,together={count}"
                host.train("together", f"{model}_{count}", run, limit_s=240)


def sequence(host):
    """Long sequences by all GPUs together: 7B at 16K, 64K and 128K tokens."""
    model, lengths = (host.shape("7b"), (16_384, 65_536, 131_072)) if host.is_gpu else ("tiny", (64, 128))
    for tokens in lengths:
        for count in (1, host.gpus if host.is_gpu else 2):
            if count == 1 and tokens > 65_536:
                continue
            run = f"ours:model={model},stage=3,recompute=full,steps=3,micro_batch=1,seq={tokens},sequence={count}"
            host.train("sequence", f"{tokens}_{count}", run, limit_s=240)


def grpo(host, names=()):
    """A step of GRPO on models that bench/rlvr_gpu/setup.py writes: 1.5B and 7B, and 32B with adapters."""
    together = f"pipeline.rlvr.rollout.tensor_parallel={host.gpus}"
    adapters = ["strategy.recompute=full", "strategy.micro_batch_size=8", "model.lora={rank: 16}"]
    for name, size, sets in (
        ("1.5b_zero2", "1.5b", ["strategy.zero_stage=2"]),
        ("1.5b_zero3", "1.5b", ["strategy.zero_stage=3"]),
        ("7b_zero3", "7b", ["strategy.zero_stage=3"]),
        ("7b_together", "7b", ["strategy.zero_stage=3", together]),
        ("32b_adapters", "32b", ["strategy.zero_stage=3", *adapters, together]),
    ):
        if names and name not in names:
            continue
        folder = host.out / "models" / (size if host.is_gpu else "tiny-large")
        if not (folder / "prompts.jsonl").exists():
            write = [host.options.python, ROOT / "bench/rlvr_gpu/setup.py", folder, "--size", folder.name]
            host.command("grpo", f"write_{folder.name}", write, 400)
        common = [f"model.path={folder}", f"pipeline.rlvr.data.file.path={folder / 'prompts.jsonl'}", f"devices={host.gpus}",
                  f"backend={host.options.backend}", *([] if host.is_gpu else ["pipeline.rlvr.rollout.max_new_tokens=8", "pipeline.rlvr.steps=3"])]
        config = ROOT / "bench/rlvr_gpu/rlvr.yaml"
        plan = [host.options.programs / "anyroll", "plan", config, *(word for one in common + sets for word in ("--set", one))]
        host.command("grpo", f"plan_{name}", plan, 60)
        rows = host.anyroll("grpo", name, config, common + sets, 400)
        steps = [row for row in rows if "time/step_s" in row][2:]
        if steps:
            keys = [key for key in steps[0] if key.startswith(("time/", "memory/"))]
            medians = {key: sorted(step.get(key, 0.0) for step in steps)[len(steps) // 2] for key in keys}
            print("   ", json.dumps(medians), flush=True)


PARTS = {part.__name__: part for part in (conformance, kills, quickstart, stages, scaling, together, sequence, grpo)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--backend", default="cuda", choices=["cuda", "rocm", "cpu"])
    parser.add_argument("--programs", type=Path, default=ROOT / "target/release", help="the folder with anyroll and examples/")
    parser.add_argument("--python", default=sys.executable, help="one with torch and transformers, and deepspeed for the peer")
    parser.add_argument("--skip-peers", action="store_true")
    host = Host(parser.parse_args())
    for name in host.options.parts or PARTS:
        PARTS[name](host)
    print(f"failed: {', '.join(host.failed)}" if host.failed else "all passed")
    sys.exit(bool(host.failed))


if __name__ == "__main__":
    main()
