"""Table and plot of a recipe by two programs, from the rows that `run.py` kept: `python3 bench/recipes/report.py FOLDER`."""

import html
import json
import statistics
import sys
from pathlib import Path

AIM = 0.70
NAMES = {"anyroll": "anyroll", "trl": "TRL"}
COLORS = {"anyroll": "#1b6ca8", "trl": "#d1682c"}
WIDTH, HEIGHT, PANEL, LEFT, TOP, BOTTOM, GAP = 780, 300, 330, 44, 34, 70, 62


class Run:
    """A run's evaluations, and the times of its steps without evaluations."""

    def __init__(self, path):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        self.end = rows[-1]
        self.program, self.seed = self.end["program"], self.end["seed"]
        self.evaluations = {row["step"]: row for row in rows if "eval/pass@1" in row}
        taken = {row["step"]: row.get("time/step_s", row.get("step_s")) for row in rows if "time/step_s" in row or "step_s" in row}
        self.step_s = [taken[step] for step in sorted(taken)]

    def training_s(self, step):
        """Returns the seconds of the first `step` training steps."""
        return sum(self.step_s[:step])

    def reached(self):
        """Returns the first evaluated step whose pass@1 is at the aim, or None."""
        return next((step for step, row in sorted(self.evaluations.items()) if row["eval/pass@1"] >= AIM), None)


def read(folder):
    found = [Run(path) for path in sorted(folder.glob("*_seed*.jsonl"))]
    runs = {program: [run for run in found if run.program == program] for program in NAMES}
    return {program: many for program, many in runs.items() if many}


def band(runs, step, measure="eval/pass@1"):
    """Returns the least, mean and greatest value of the runs that were evaluated after `step`."""
    values = [run.evaluations[step][measure] for run in runs if step in run.evaluations]
    return (min(values), statistics.mean(values), max(values)) if values else None


def curve_table(runs):
    steps = sorted({step for many in runs.values() for run in many for step in run.evaluations})
    lines = ["| step | " + " | ".join(f"{NAMES[it]}: pass@1, least to greatest | mean" for it in runs) + " | bands |"]
    lines.append("|---|" + "---|" * (2 * len(runs) + 1))
    for step in steps:
        bands = [band(many, step) for many in runs.values()]
        cells = [f"{it[0]:.3f} to {it[2]:.3f} | {it[1]:.3f}" if it else " | " for it in bands]
        complete = len(bands) == 2 and all(bands)
        apart = max(it[0] for it in bands) - min(it[2] for it in bands) if complete else 0
        lines.append(f"| {step} | " + " | ".join(cells) + f" | {'' if not complete else 'overlap' if apart <= 0 else f'{apart:.3f} apart'} |")
    return lines


def time_table(runs):
    lines = [f"| run | steps made | pass@1 of {AIM:.2f} at step | training until then, s | median step, s | all steps, s | whole run, s |"]
    lines.append("|---|" + "---|" * 6)
    for program, many in runs.items():
        for run in many:
            step, made = run.reached(), len(run.step_s)
            until = f"{run.training_s(step):.1f}" if step is not None else ""
            median = f"{statistics.median(run.step_s):.3f}" if made else ""
            failed = "" if run.end["exit_code"] == 0 else f", ended with code {run.end['exit_code']}"
            cells = [f"{NAMES[program]}, seed {run.seed}{failed}", made, "never" if step is None else step, until, median]
            cells += [f"{run.training_s(made):.1f}", f"{run.end['all_s']:.1f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def text(x, y, content, anchor="middle", weight="normal"):
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">{html.escape(content)}</text>'


def panel(left, title, runs, position, limit, unit):
    """Returns a panel: bands, means and runs of pass@1 over `position(run, step)`."""
    height = HEIGHT - TOP - BOTTOM
    place = lambda at, value: f"{left + PANEL * at / limit:.1f},{TOP + height * (1 - value):.1f}"
    parts = [text(left + PANEL / 2, TOP - 12, title, weight="bold")]
    for tick in (0, 0.25, 0.5, AIM, 1):
        y = TOP + height * (1 - tick)
        dash = ' stroke-dasharray="3 3"' if tick == AIM else ""
        parts.append(f'<path d="M{left} {y:.1f}h{PANEL}" stroke="#d9dce1"{dash}/>')
        parts.append(text(left - 5, y + 4, f"{tick:g}", "end"))
    for share in (0, 0.5, 1):
        parts.append(text(left + PANEL * share, TOP + height + 16, f"{limit * share:.0f}"))
    parts.append(text(left + PANEL / 2, TOP + height + 32, unit))
    for program, many in runs.items():
        for run in many:
            points = " ".join(place(position(run, step), row["eval/pass@1"]) for step, row in sorted(run.evaluations.items()))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[program]}" stroke-width="1.6"/>')
    return parts


def shades(left, runs, limit):
    """Returns the area between the least and the greatest seed of each program, over steps."""
    height, parts = HEIGHT - TOP - BOTTOM, []
    for program, many in runs.items():
        steps = sorted(set.intersection(*(set(run.evaluations) for run in many)))
        bands = [band(many, step) for step in steps]
        place = lambda step, value: f"{left + PANEL * step / limit:.1f},{TOP + height * (1 - value):.1f}"
        edge = [place(step, it[2]) for step, it in zip(steps, bands)] + [place(step, it[0]) for step, it in zip(steps[::-1], bands[::-1])]
        parts.append(f'<polygon points="{" ".join(edge)}" fill="{COLORS[program]}" fill-opacity="0.15"/>')
    return parts


def plot(runs):
    every = [run for many in runs.values() for run in many]
    steps = max(max(run.evaluations) for run in every) or 1
    seconds = max(run.training_s(len(run.step_s)) for run in every) or 1.0
    second = LEFT + PANEL + GAP
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *shades(LEFT, runs, steps)]
    parts += panel(LEFT, "pass@1 by step", runs, lambda run, step: step, steps, "training steps")
    parts += panel(second, "pass@1 by time", runs, lambda run, step: run.training_s(step), seconds, "seconds of training, without evaluations")
    for index, program in enumerate(runs):
        x, y = LEFT + 110 * index, HEIGHT - 14
        parts.append(f'<path d="M{x} {y - 4}h20" stroke="{COLORS[program]}" stroke-width="1.8"/>')
        parts.append(text(x + 26, y, NAMES[program], "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" font-family="sans-serif"'
    return f'{head} font-size="12" fill="#333">\n' + "\n".join(parts) + "\n</svg>\n"


def write(folder):
    """Writes `table.md` and `curves.svg`, and returns the table."""
    runs = read(folder)
    complete = {program: [run for run in many if run.evaluations] for program, many in runs.items()}
    complete = {program: many for program, many in complete.items() if many}
    table = "\n".join([*time_table(runs), "", *curve_table(complete)]) + "\n"
    (folder / "table.md").write_text(table, encoding="utf-8")
    if complete:
        (folder / "curves.svg").write_text(plot(complete), encoding="utf-8")
    return table


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
