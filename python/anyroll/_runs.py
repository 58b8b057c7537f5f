"""Runs of anyroll: started, followed to their end, and read."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyroll._programs import LAUNCHER, environment
from anyroll._reward import Reward

if TYPE_CHECKING:
    import pandas

# Name of a file that a reward's process has loaded.
USER_FILE = "anyroll_user_file"
# Lines of output that an error repeats.
LAST_LINES = 40


class Error(RuntimeError):
    """A run failed; the text is its output's end."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run(
    config: str | os.PathLike[str] | Mapping[str, Any], *, output: str | os.PathLike[str] | None = None, **overrides: Any
) -> Path:
    """Trains, prints the run's output, and returns the run folder.

    `config` is a YAML file, or a config as a dict. `overrides` are changes as with `--set`: `seed=1`, and for a field of a
    section `pipeline__rlvr__steps=50` or `**{"pipeline.rlvr.steps": 50}`. A reward of `@anyroll.reward` may stand where a
    term of `pipeline.rlvr.reward` does. `output` is the run folder; by default `runs/NAME-TIME`.

    Raises `Error` if the run fails, and `KeyboardInterrupt` after an interrupt, which saves a checkpoint first.
    """
    refuse_in_reward()
    sets = [f"{name.replace('__', '.')}={as_json(value)}" for name, value in overrides.items()]
    with tempfile.TemporaryDirectory(prefix="anyroll-") as scratch:
        if isinstance(config, Mapping):
            # JSON is YAML.
            path = Path(scratch) / "config.yaml"
            path.write_text(as_json(config, indent=2), encoding="utf-8")
        else:
            path = Path(config)
        folder = Path(output) if output is not None else new_folder(name_of(path, overrides))
        arguments = [argument for it in sets for argument in ("--set", it)]
        call("run", str(path), *arguments, "--output", str(folder))
    return folder


def resume(run: str | os.PathLike[str]) -> Path:
    """Continues a run from its last checkpoint, and returns its folder."""
    refuse_in_reward()
    call("run", "--resume", os.fspath(run))
    return Path(run)


def metrics(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns a run's metrics, a dict for each step, also while the run continues."""
    lines = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    # The last line may be half written.
    return [json.loads(line) for line in lines if line.endswith("\n")]


def frame(run: str | os.PathLike[str]) -> "pandas.DataFrame":
    """Returns a run's metrics as a table of pandas, with the step as its index."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("a table needs pandas: pip install pandas, or use anyroll.metrics") from error
    return pandas.DataFrame(metrics(run)).set_index("step")


def as_json(value: Any, indent: int | None = None) -> str:
    """Returns a value of a config as JSON, with rewards as terms."""

    def other(value: Any) -> Any:
        if isinstance(value, Reward):
            return value.term()
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        raise TypeError(f"a config has no values of the type {type(value).__name__}: {value!r}")

    return json.dumps(value, default=other, indent=indent)


def name_of(path: Path, overrides: Mapping[str, Any]) -> str:
    """Returns the name of a run, for its folder."""
    if name := overrides.get("name"):
        return str(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        # The program reports it.
        return path.stem
    found = re.search(r"""(?m)^(?:\s*"name"|name)\s*:\s*["']?([A-Za-z0-9][\w.-]*)""", text)
    return found[1] if found else path.stem


def new_folder(name: str) -> Path:
    """Returns a folder in `runs` that does not exist."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, 1000))
    return next(path for path in (Path("runs") / it for it in names) if not path.exists())


def refuse_in_reward() -> None:
    """Refuses a run in a process of a reward, which has loaded a script for its function."""
    if USER_FILE in sys.modules:
        raise RuntimeError("a reward's process loads this file: put anyroll.run below `if __name__ == '__main__':`")


def call(*arguments: str) -> None:
    """Runs the program to its end, and prints its lines as they come."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        [LAUNCHER, *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        # A terminal's Ctrl-C reaches only this process, which sends one signal: a second one would end the run at once.
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        lines = iter(program.stdout.readline, "")
        try:
            follow(lines, last)
        except KeyboardInterrupt:
            program.send_signal(signal.SIGINT)
            follow(lines, last)
            raise
        except BaseException:
            program.send_signal(signal.SIGTERM)
            raise
    if program.returncode != 0:
        raise Error("".join(last).strip() or f"anyroll ended with {program.returncode}", program.returncode)


def follow(lines: Any, last: deque[str]) -> None:
    for line in lines:
        print(line, end="", flush=True)
        last.append(line)
