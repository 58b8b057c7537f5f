"""Runs a recipe: its data, its stages, and a summary.

    python recipes/common/run.py NAME --anyroll FILE [--config FILE] [--backend NAME] [--seed N] [--set FIELD=VALUE]...

`cargo xtask recipe` builds the program and calls this in the root of the checkout. A recipe's stages are `config.yaml`,
or `1_*.yaml`, `2_*.yaml` and so on. Each stage after the first trains the model that the stage before it ended with.
`--config lora` runs `lora.yaml` in place of `config.yaml`. On the backend `cpu` a recipe's `cpu.yaml` is the default.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import summary

RECIPES = Path(os.path.relpath(Path(__file__).parents[1]))


def main():
    given = parse()
    recipe = RECIPES / given.name
    if not (recipe / "data.py").is_file():
        known = sorted(it.parent.name for it in RECIPES.glob("*/data.py"))
        raise SystemExit(f"no recipe {given.name}; there are {', '.join(known)}")
    stages = stages_of(recipe, given)
    anyroll = str(Path(given.anyroll).resolve())
    began = time.monotonic()
    call([sys.executable, recipe / "data.py"], {"ANYROLL": anyroll, "ANYROLL_BACKEND": given.backend})

    name = "-".join(part for part in (given.name, given.config, f"seed{given.seed}", time.strftime("%Y%m%d-%H%M%S")) if part)
    output = given.output or Path("runs") / name
    results, model = [], None
    for stage in stages:
        run = output / stage.stem
        changes = [f"backend={given.backend}", f"seed={given.seed}", *given.set]
        if given.backend == "cpu":
            changes.insert(0, "strategy.precision=fp32")
        if model:
            changes.insert(0, f"model.path={model}")
        options = [part for change in changes for part in ("--set", change)]
        call([anyroll, "run", stage, "--output", run, *options])
        results.append(summary.of_run(run))
        if stage is not stages[-1]:
            model = run / "model"
            call([anyroll, "export", run, "--to", model])
    after = recipe / "after.py"
    measured = {}
    if after.is_file():
        found = call([sys.executable, after, run], {"ANYROLL": anyroll, "ANYROLL_BACKEND": given.backend}, subprocess.PIPE)
        measured = json.loads(found)
    whole = {"recipe": given.name, "config": given.config, "seed": given.seed, "backend": given.backend, "set": given.set, "stages": results}
    whole |= {"after": measured, "wall_s": round(time.monotonic() - began, 1)}
    (output / "summary.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    print(summary.table(whole))
    print(f"\n  folder    {output}")


def parse():
    arguments = argparse.ArgumentParser(description="Runs a recipe: its data, its stages, and a summary")
    arguments.add_argument("name", help="a folder of recipes/")
    arguments.add_argument("--anyroll", required=True, help="the program")
    arguments.add_argument("--config", help="a variant: the name of a config of the folder, without .yaml")
    arguments.add_argument("--backend", default="cuda")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="changes a field of each stage")
    arguments.add_argument("--output", type=Path, help="the folder; default: a new one in runs")
    return arguments.parse_args()


def stages_of(recipe, given):
    """Returns the configs to run, in order."""
    if given.config:
        chosen = recipe / f"{given.config}.yaml"
        if not chosen.is_file():
            raise SystemExit(f"{chosen} is not there; {recipe} has {', '.join(it.stem for it in sorted(recipe.glob('*.yaml')))}")
        return [chosen]
    if given.backend == "cpu" and (recipe / "cpu.yaml").is_file():
        return [recipe / "cpu.yaml"]
    if (recipe / "config.yaml").is_file():
        return [recipe / "config.yaml"]
    return sorted(recipe.glob("[0-9]_*.yaml"))


def call(command, variables=(), stdout=None):
    """Runs a command, ends with its exit code if it fails, and returns what it printed into a pipe."""
    command = [str(part) for part in command]
    print(f"recipe: {' '.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, env={**os.environ, **dict(variables)}, stdout=stdout, text=True)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    main()
