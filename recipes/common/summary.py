"""Summary of a recipe's runs, from their metrics.

    python recipes/common/summary.py FOLDER...     the curves of finished recipes, as a table in Markdown
"""

import json
import sys
from pathlib import Path

import files


def of_run(run):
    """Returns a run's curve of evaluations and its times."""
    rows = files.read(run / "metrics.jsonl")
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    steps = [row for row in rows if "time/step_s" in row]
    # Measures of a domain have a name of three parts.
    curve = [{"step": row["step"], **{k: v for k, v in row.items() if k.startswith("eval/") and k.count("/") == 1}}
             for row in evaluations]
    times = sorted(row["time/step_s"] for row in steps)
    return {
        "stage": run.name,
        "steps": max((row["step"] for row in steps), default=0),
        "curve": curve,
        "steps_s": round(sum(times), 2),
        "median_step_s": round(times[len(times) // 2], 4) if times else None,
        "evaluations_s": round(sum(row.get("time/eval_s", 0.0) for row in evaluations), 2),
    }


def table(whole):
    """Returns what a recipe prints at its end."""
    lines = ["", f"{whole['recipe']}, seed {whole['seed']}, {whole['backend']}"]
    for stage in whole["stages"]:
        steps, step_s, eval_s = stage["steps"], stage["steps_s"], stage["evaluations_s"]
        lines += ["", f"  {stage['stage']}: {steps} steps in {step_s} s, evaluations in {eval_s} s"]
        if stage["curve"]:
            before, after = stage["curve"][0], stage["curve"][-1]
            lines.append(f"    {'':<16}{'before':>9}{'after':>9}{'change':>9}")
            for name in [it for it in after if it != "step" and it in before]:
                change = after[name] - before[name]
                lines.append(f"    {name[5:]:<16}{before[name]:9.3f}{after[name]:9.3f}{change:+9.3f}")
    for name, value in whole["after"].items():
        lines.append(f"  {name:<18}{value:9.3f}")
    lines.append(f"\n  wall      {whole['wall_s']} s, with data and start")
    return "\n".join(lines)


def curves(folders):
    """Returns a table with a row for each evaluation of the last stages, and a column for each recipe's folder."""
    wholes = [json.loads((Path(it) / "summary.json").read_text(encoding="utf-8")) for it in folders]
    last = [it["stages"][-1]["curve"] for it in wholes]
    main_measure = next(it for it in ("eval/pass@1", "eval/accuracy", "eval/loss") if it in last[0][-1])
    lines = [f"| {main_measure[5:]} at step | " + " | ".join(f"seed {it['seed']}" for it in wholes) + " |"]
    lines.append("|---|" + "---|" * len(wholes))
    for rows in zip(*last):
        lines.append(f"| {rows[0]['step']} | " + " | ".join(f"{row[main_measure]:.3f}" for row in rows) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(curves(sys.argv[1:]))
