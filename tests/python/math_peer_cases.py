"""Scores the cases that Math-Verify's tests publish with the `math` reward, and prints how many agree. Needs the peer's folder
`tests`, from https://github.com/huggingface/Math-Verify (Apache-2.0).

    python3 tests/python/math_peer_cases.py target/release/anyroll MATH_VERIFY/tests

A case is a gold answer, a completion and the peer's verdict. `JUDGED` has a person's verdict on the cases where the reward and
the peer differ, by the CRC-32 of both texts. Cases of a policy run once more with the option that asks for it.
"""

import ast
import json
import pathlib
import subprocess
import sys
import tempfile
import zlib

WRONG, RIGHT = "the reward is right", "the peer is right"

# Option of the reward, or a prompt that asks for percent.
COMMA, PERCENT = ["--set", "decimal_comma=true"], "percent"

JUDGED = {
    "79297b71": WRONG,  # says that 1/2 is 10/9
    "3e9fae1f": WRONG,  # sides of an equation that differ: 5+5+1 = 7 = 11
    "02b2c1cf": WRONG,
    "c137cb46": WRONG,
    "32231b5a": WRONG,
    "b18af44a": WRONG,  # an integer that is only near x
    "ee45b705": WRONG,  # says that 1/3 is about 1.3
    "787b880d": WRONG,  # rounded to two and to four decimals
    "22fd0a92": WRONG,
    "9d539311": WRONG,  # a set where a point is asked for
    "9f31f6f6": WRONG,  # plus signs between two boxes
    "e8b8b6c0": WRONG,  # a gold answer that is cut, and another variable
    "fddf375a": WRONG,  # f(y) for f(x)
    "f0bf9f40": WRONG,  # plus for minus
    "49b6470f": RIGHT,  # dollars inside of a box
    "ec3b6182": WRONG,  # accepted: a formula over several lines
    "9b52007b": WRONG,
    "aab9051d": WRONG,  # accepted: doubled backslashes
    "ebef26e8": WRONG,  # accepted: a number in \text
}

POLICIES = {
    "e325ceb1": COMMA,
    "58375424": COMMA,
    "4dcce922": COMMA,
    "3b53d89e": COMMA,
    "8978086d": PERCENT,
}


def key(case):
    return f"{zlib.crc32((case['answer'] + chr(0) + case['completion']).encode()):08x}"


def parameters(function):
    """The names and rows of a test's `parametrize`, as far as they are literals."""
    for mark in function.decorator_list:
        if not (isinstance(mark, ast.Call) and getattr(mark.func, "attr", "") == "parametrize"):
            continue
        names, rows = mark.args[:2]
        if isinstance(names, ast.Constant) and isinstance(rows, ast.List):
            yield [name.strip() for name in names.value.split(",")], rows.elts


def cases(folder):
    for path in sorted(folder.glob("test_*.py")):
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        for names, rows in (found for function in functions for found in parameters(function)):
            verdict = next((name for name in ("expected", "result") if name in names), None)
            if verdict is None or not {"gold", "pred"} <= set(names):
                continue
            for row in rows:
                try:
                    values = dict(zip(names, ast.literal_eval(row), strict=True))
                except (ValueError, TypeError):
                    continue  # it is no literal
                yield {"answer": values["gold"], "completion": values["pred"], "expected": bool(values[verdict])}


def scores(program, cases, options=()):
    """One score per case; `False` where the reward failed, as for an empty gold answer."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for case in cases:
            file.write(json.dumps({name: case[name] for name in case if name != "expected"}) + "\n")
        file.flush()
        command = [program, "reward", "math", "--file", file.name, *options]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    found = {line["line"]: line["score"] == 1.0 for line in map(json.loads, lines)}
    if not found:
        sys.exit(f"no score came from: {' '.join(command)}")
    return [found.get(number, False) for number in range(1, len(cases) + 1)]


def with_policy(program, case):
    """The score with the option, or the prompt, that asks for the case's policy."""
    policy = POLICIES[key(case)]
    if policy == PERCENT:
        return scores(program, [case | {"prompt": "How many percent?"}])[0]
    return scores(program, [case], policy)[0]


def main():
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    found = list(cases(folder))
    if not found:
        sys.exit(f"no cases in {folder}; name the folder with the peer's test_*.py")
    agree, by_policy, counts, lines = 0, 0, {}, []
    for case, is_right in zip(found, scores(program, found), strict=True):
        if is_right == case["expected"]:
            agree += 1
        elif case["expected"] and key(case) in POLICIES and with_policy(program, case):
            by_policy += 1
        else:
            verdict = JUDGED.get(key(case), "not judged")
            kind = "missed" if case["expected"] else "accepted"
            counts[kind, verdict] = counts.get((kind, verdict), 0) + 1
            lines.append(f"{key(case)} {kind}, {verdict}: {case['answer'][-60:]!r} | {case['completion'][-60:]!r}")
    print(f"{len(found)} cases: {agree} agree, {by_policy} more with an option")
    for (kind, verdict), count in sorted(counts.items()):
        print(f"{kind}, {verdict}: {count}")
    refused = counts.get(("missed", WRONG), 0)
    wrongly_missed = sum(count for (kind, verdict), count in counts.items() if kind == "missed") - refused
    acceptable = sum(case["expected"] for case in found) - refused + counts.get(("accepted", WRONG), 0)
    print(f"right of those that a person accepts: {acceptable - wrongly_missed} of {acceptable}")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
