"""Generation beside transformers, on the same GPU in turn: `run.py [--python PYTHON] [--sizes 0.5b 1.5b 7b]`.

Prints a table of tokens a second. Build first: `cargo build --release -p anyroll-models --example bench_generate`.
"""

import argparse
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
BINARY = HERE.parent.parent / "target/release/examples/bench_generate"
BATCHES = {"0.5b": ["64", "256"], "1.5b": ["64", "256"], "7b": ["64"]}


def figures(command):
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(line["size"], line["batch"], line.get("way", "anyroll")): line["tokens_per_s"] for line in lines}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable, help="one with torch and transformers")
    parser.add_argument("--sizes", nargs="+", default=list(BATCHES), choices=BATCHES)
    parser.add_argument("--ways", nargs="+", default=["dynamic"], choices=["dynamic", "static"])
    args = parser.parse_args()
    print("| size | batch | anyroll, tok/s |", " | ".join(f"transformers, {way}" for way in args.ways), "|")
    print("|---|---|---|" + "---|" * len(args.ways))
    for size in args.sizes:
        found = figures([BINARY, size, *BATCHES[size]])
        found |= figures([args.python, HERE / "peer.py", size, *BATCHES[size], "--ways", *args.ways])
        for batch in map(int, BATCHES[size]):
            row = [found[(size, batch, way)] for way in ["anyroll", *args.ways]]
            print("|", size, "|", batch, "|", " | ".join(f"{value:,}" for value in row), "|", flush=True)


if __name__ == "__main__":
    main()
