"""Feeds the `math` reward with random pieces of mathematics, and with noise, and looks for crashes and slow ones.

    python3 tests/python/fuzz_math_reward.py target/release/anyroll 1000000

Each string goes through `anyroll reward math --file -` on its own. None may take more than 50 ms of processor time, which
the kernel counts: on a busy machine the clock tells nothing.
"""

import json
import random
import subprocess
import sys

MOST_S = 0.050

PIECES = (
    r"\frac \dfrac \sqrt \sqrt[3] \pi \infty \left( \right) \{ \} \cup \cap \pm \cdot \times \div ^ _ { } ( ) [ ] | , ; ="
    r" < > \le \ge \ne \in \text \mathrm \sin \cos \tan \log \ln \exp ! ^\circ \% $ \binom \begin{pmatrix} \end{pmatrix}"
    r" & \\ \boxed{ } + - * / . x y z e i n 0 1 2 3 7 10 100 1,000 0.5 1e9 99999999999999999999 - \overline \lfloor \rfloor"
    r" \mathbb{R} \emptyset cm km \mu <answer> </answer> maybe or not #### answer is ~ ` ' \n é 数 𝟙 \u0000"
).split(" ")


def text(rng):
    """Mathematics mostly, deep or long at times, and bytes of any kind now and then."""
    kind = rng.random()
    if kind < 0.80:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 40)))
    if kind < 0.88:
        return " ".join(rng.choice(PIECES) for _ in range(rng.randrange(40, 400)))
    if kind < 0.94:
        piece, depth = rng.choice(["(", "{", r"\sqrt{", r"\frac{1}{", "-", "2^", r"\left(", "x+", "9", "(1+"]), rng.randrange(1, 2000)
        return piece * depth + "1" + "".join({"(": ")", "{": "}"}.get(c, "") for c in reversed(piece)) * depth
    return "".join(chr(rng.randrange(1, 0xD7FF)) for _ in range(rng.randrange(1, 200)))


def main():
    program, count = sys.argv[1], int(sys.argv[2])
    rng = random.Random(1)
    child = subprocess.Popen(
        [program, "reward", "math", "--file", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # an answer that is no answer is told there
        text=True,
        bufsize=1,
    )

    def processor_s():
        with open(f"/proc/{child.pid}/schedstat") as file:
            return int(file.read().split()[0]) * 1e-9

    def ask(case):
        before_s = processor_s()
        child.stdin.write(case)
        child.stdin.flush()
        if not child.stdout.readline():
            sys.exit(f"it ended with {child.wait()} on {case}")
        return processor_s() - before_s

    ask('{"completion": "1", "answer": "1"}\n')  # starting is not counted

    slowest, total_s = 0.0, 0.0
    for _ in range(count):
        answer = text(rng).strip() or "0"
        # Half of them compare a thing with itself, or with a part of it, where the most work is done.
        other = answer if rng.random() < 0.5 else text(rng)
        case = json.dumps({"completion": f"\\boxed{{{other}}}" if rng.random() < 0.7 else other, "answer": answer}) + "\n"
        took_s = ask(case)
        total_s += took_s
        if took_s > MOST_S:
            sys.exit(f"{took_s:.3f} s of processor time: {case}")
        slowest = max(slowest, took_s)
    print(f"{count} strings, no crash; the slowest took {slowest * 1e3:.1f} ms, the mean {total_s / count * 1e6:.0f} us")


main()
