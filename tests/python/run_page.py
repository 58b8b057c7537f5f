"""Runs docs/first_model.md as a reader does: writes its files, runs its commands, and checks what they print and leave.

    python tests/python/run_page.py --anyroll target/release/anyroll [--model DIR] [--replace OLD=NEW ...]

A fenced block is `sh NAME`, a command with checks here, or `LANGUAGE FILE`, a file. `sh serve` runs until the command
after it ends. `--model` is a folder in place of the block `sh model`. `--replace` changes text that the page has.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/first_model.md"
BLOCK = re.compile(r"^```(\w+) (\S+)\n(.*?)^```$", re.M | re.S)
START_S, COMMAND_S = 120, 3600


def steps():
    return [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]


def is_data(printed):
    return len(printed.splitlines()) == 2 and len(Path("sums.jsonl").read_text().splitlines()) == 400


def is_trained(_):
    return len([step for step in steps() if "grad_norm" in step]) == number_of_steps()


def number_of_steps():
    return int(re.search(r"^    steps: (\d+)$", Path("first.yaml").read_text(), re.M)[1])


PRINTED = {}


def is_answer(printed):
    """The server's greedy answer is the text that `generate` printed for the same question."""
    answer = json.loads(printed)
    return answer["model"] == "trained" and answer["choices"][0]["message"]["content"] == PRINTED["generate"][:-1]


# Every command of the page, and the check of what it prints and leaves.
CHECKS = {
    "model": lambda _: Path("model/model.safetensors").is_file(),
    "data": is_data,
    "reward": lambda printed: [json.loads(line)["score"] for line in printed.splitlines() if line[0] == "{"] == [1.0, 0.0],
    "before": lambda printed: "pass@4" in printed and "of 27 prompts" in printed,
    "check": lambda printed: "python" in printed and "learning_rate" in printed and "27 held out" in printed,
    "train": is_trained,
    "watch": lambda printed: json.loads(printed.splitlines()[-1])["step"] == number_of_steps(),
    "after": lambda printed: "of 24 prompts" in printed and Path("trained/model.safetensors").is_file(),
    "generate": lambda printed: printed.endswith("\n"),
    "client": is_answer,
}


def main():
    arguments = argparse.ArgumentParser(description="Runs docs/first_model.md")
    arguments.add_argument("--anyroll", required=True, type=Path)
    arguments.add_argument("--model", type=Path, help="a model's folder, in place of the page's")
    arguments.add_argument("--replace", action="append", default=[], metavar="OLD=NEW")
    given = arguments.parse_args()
    anyroll, model = given.anyroll.resolve(), given.model and given.model.resolve()
    port = free_port()
    page = PAGE.read_text()
    for old, new in [*(text.split("=", 1) for text in given.replace), ("8000", str(port))]:
        assert old in page, f"the page has no {old!r}"
        page = page.replace(old, new)
    blocks = BLOCK.findall(page)
    fences = page.count("\n```")
    assert fences == 2 * len(blocks), f"{fences} fences, and {len(blocks)} blocks with a name"
    commands = [name for language, name, _ in blocks if language == "sh"]
    assert sorted(commands) == sorted([*CHECKS, "serve"]), f"commands without a check, or checks without one: {commands}"
    environment = {**os.environ, "PATH": f"{anyroll.parent}:{os.environ['PATH']}", "CHECKOUT": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for language, name, text in blocks:
            if language != "sh":
                Path(name).write_text(text)
            elif name == "model" and model:
                shutil.copytree(model, "model")
            elif name == "serve":
                serve(text, port, environment)
            else:
                run(name, text, environment)
        os.chdir(ROOT)
    print(f"{PAGE.name}: {len(blocks)} blocks")


def run(name, text, environment):
    started = time.monotonic()
    done = subprocess.run(shell(text), env=environment, stdout=subprocess.PIPE, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{text}"
    PRINTED[name] = done.stdout
    assert CHECKS[name](done.stdout), f"{name} printed:\n{done.stdout}"
    print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    if SERVERS and name == "client":
        server = SERVERS.pop()
        server.terminate()
        assert server.wait(START_S) == 0, "the server did not end by itself"


SERVERS = []


def serve(text, port, environment):
    """Starts the server, and waits until it listens."""
    server = subprocess.Popen(shell("exec " + text), env=environment)
    SERVERS.append(server)
    started = time.monotonic()
    while True:
        assert server.poll() is None, f"the server ended with {server.returncode}"
        assert time.monotonic() - started < START_S, f"the server does not listen after {START_S} s"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            break
        except OSError:
            time.sleep(0.05)
    print(f"serve: listens after {time.monotonic() - started:.1f} s", flush=True)


def shell(text):
    return ["bash", "-euo", "pipefail", "-c", text]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    try:
        main()
    finally:
        for server in SERVERS:
            server.kill()
            server.wait()
