"""Trains on two hosts of one machine whose links have a rate, and compares the time of a step with `anyroll plan`.

    python3 bench/network/run.py [--rates 50 100 200] [--stages 1 3] [--steps 6] [--json FILE]
    python3 bench/network/run.py --bytes [--stages 0 1 2 3]

Hosts are network namespaces, and a token bucket (`tc tbf`) limits what each sends, in Mb/s. A decoder of 2.6 million
weights in fp32 takes part. The plan's products are as fast as makes the measured training of links without a limit. The
time that a limit adds then follows from the plan. `--bytes` compares what a host sends in a step, which no other work on
the machine disturbs. Needs `ip`, `tc` and user namespaces.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "target/release/anyroll"
CONFIG = ROOT / "configs/rlvr_sort_cpu.yaml"
MAKE = """
set -e
exec 3<&0
echo $$ > "$1"
ip link set lo up
ip link add name there type veth peer name here
ip addr add 10.77.0.1/24 dev here && ip link set here up
unshare --net sh -c 'echo $$ > "$0"; exec cat' "$2" <&3 > /dev/null &
while ! [ -s "$2" ]; do sleep 0.01; done
ip link set there netns "$(cat "$2")"
nsenter --net=/proc/$(cat "$2")/ns/net sh -c \
    'ip link set lo up && ip addr add 10.77.0.2/24 dev there && ip link set there up'
if [ -n "$3" ]; then
  tc qdisc add dev here root tbf rate "$3mbit" burst 64kb latency 5s
  nsenter --net=/proc/$(cat "$2")/ns/net tc qdisc add dev there root tbf rate "$3mbit" burst 64kb latency 5s
fi
echo ready
exec cat
"""
SHAPE = "{hidden_size: 256, layers: 4, heads: 4, kv_heads: 4, intermediate_size: 512, max_length: 32, rope_theta: 30.0}"


def sets(stage, steps):
    values = {
        "model": f"{{decoder: {SHAPE}}}",
        "strategy": f"{{zero_stage: {stage}, precision: fp32, micro_batch_size: 64, offload: {{optimizer: none}}}}",
        "pipeline.rlvr.warmup.steps": 0,
        "pipeline.rlvr.steps": steps,
        "pipeline.rlvr.prompts_per_step": 16,
        "pipeline.rlvr.mini_batches": 1,
        "pipeline.rlvr.evaluation.every": 1000,
        "pipeline.rlvr.evaluation.prompts": 16,
        "pipeline.rlvr.checkpoint.every": 1000,
        "pipeline.rlvr.optimizer.schedule": "{constant: {warmup_steps: 0}}",
    }
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def measured(stage, rate, steps):
    """Medians of `time/step_s` and `time/train_s` of the steps after the first, and the bytes that host 0 sent."""
    with tempfile.TemporaryDirectory() as folder:
        pids = [f"{folder}/here", f"{folder}/there"]
        make = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", MAKE, "sh", *pids, rate or ""]
        hosts = subprocess.Popen(list(map(str, make)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if hosts.stdout.readline() != "ready\n":
            sys.exit("namespaces, `ip` or `tc` are not to be had")
        command = [PROGRAM, "run", CONFIG, "--output", f"{folder}/run", "--set", "devices=1", *sets(stage, steps)]
        ranks = []
        for rank, pid in enumerate(pids):
            enter = ["nsenter", "--target", Path(pid).read_text().strip(), "--user", "--preserve-credentials", "--net"]
            place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29500}
            environment = os.environ | {name: str(value) for name, value in place.items()}
            ranks.append(subprocess.Popen([*enter, *command], env=environment, stderr=subprocess.PIPE, text=True))
        for rank in ranks:
            _, error = rank.communicate(timeout=600)
            if rank.returncode != 0:
                sys.exit(error)
        enter = ["nsenter", "--target", Path(pids[0]).read_text().strip(), "--user", "--preserve-credentials", "--net"]
        link = subprocess.run([*enter, "ip", "-s", "-j", "link", "show", "here"], check=True, capture_output=True)
        sent = json.loads(link.stdout)[0]["stats64"]["tx"]["bytes"]
        hosts.stdin.close()
        hosts.wait()
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        times = [(row["time/step_s"], row["time/train_s"]) for row in rows if "time/step_s" in row][1:]
        return [statistics.median(values) for values in zip(*times)], sent


def planned(stage, rate, flops):
    """Seconds of training, of the phases after sampling, and of bytes, of a device so fast in all but its products."""
    options = f"--hosts 2 --devices-per-host 1 --link {rate or 1e6}Mb/s --device-flops {flops / 1e9}GFLOP/s"
    figures = "--device-memory-rate 1TB/s --device-link 1TB/s --host-link 1TB/s --memory 80GiB --json"
    command = [PROGRAM, "plan", CONFIG, *sets(stage, 2), *options.split(), *figures.split()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    step = json.loads(done.stdout)["time"]["step"]
    phases = [it for it in step["phases"] if it["name"] != "sampling"]
    bytes_s = sum(it["demand"]["between_hosts_s"] for it in phases)
    return step["training_s"], sum(it["seconds"] for it in phases), bytes_s


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for stage in arguments.stages if arguments.bytes else []:
        few, many = (measured(stage, None, steps)[1] for steps in (4, 8))
        sent, plan = (many - few) / 4 / 1e6, planned(stage, 8, 1e9)[2]  # 8 Mb/s are a megabyte per second
        print(f"ZeRO {stage}: a host sends {sent:.2f} MB per step, planned {plan:.2f} ({plan / sent - 1:+.1%})", flush=True)
    for stage in [] if arguments.bytes else arguments.stages:
        (free, training), _ = measured(stage, None, arguments.steps)
        # Time and operations are proportional as long as nothing else takes time.
        flops = 1e9 * planned(stage, None, 1e9)[0] / training
        print(f"ZeRO {stage}: {free:.3f} s without a limit, of which {training:.3f} of training")
        for rate in arguments.rates:
            added = planned(stage, rate, flops)[1] - planned(stage, None, flops)[1]
            row = {"stage": stage, "rate_mbit": rate, "free_s": free, "planned_s": free + added}
            row["measured_s"] = measured(stage, rate, arguments.steps)[0][0]
            rows.append(row)
            error = row["planned_s"] / row["measured_s"] - 1
            print(f"  {rate:>4} Mb/s: {row['measured_s']:.3f} s, planned {row['planned_s']:.3f} ({error:+.1%})", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
