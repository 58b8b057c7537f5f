"""Draws the evaluations of runs as an SVG: a panel a measure, a line a run.

    python3 docs/curves.py docs/images/sort.svg runs/sort_seed{0,1,2} --control runs/random_seed{0,1,2}
    python3 docs/curves.py docs/images/ppo.svg --named PPO runs/ppo_seed{0,1,2} --named GRPO runs/grpo_seed{0,1,2}

Reads each run folder's metrics.jsonl; needs nothing but Python.
"""

import argparse
import html
import json
from pathlib import Path

MEASURES = {"eval/greedy": "greedy", "eval/pass@1": "pass@1", "eval/pass@4": "pass@4"}
COLORS = ["#1b6ca8", "#d1682c", "#3f8f4f"]
CONTROL_COLOR = "#8a8f98"
WIDTH, HEIGHT, PANEL, GAP, LEFT, TOP, BOTTOM = 780, 270, 210, 44, 36, 34, 66


def evaluations(folder):
    """{measure: [(step, value), ...]}"""
    curves = {measure: [] for measure in MEASURES}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for measure, points in curves.items():
            if measure in row:
                points.append((row["step"], row[measure]))
    return curves


def text(x, y, content, anchor="middle", weight="normal"):
    content = html.escape(content)
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">{content}</text>'


def panel(left, measure, lines, steps):
    height = HEIGHT - TOP - BOTTOM

    def place(step, value):
        return f"{left + PANEL * step / steps:.1f},{TOP + height * (1 - value):.1f}"

    parts = [text(left + PANEL / 2, TOP - 12, MEASURES[measure], weight="bold")]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = TOP + height * (1 - tick)
        parts.append(f'<path d="M{left} {y:.1f}h{PANEL}" stroke="#d9dce1"/>')
        parts.append(text(left - 5, y + 4, f"{tick:g}", "end"))
    for tick in (0, steps // 2, steps):
        parts.append(text(left + PANEL * tick / steps, TOP + height + 16, str(tick)))
    for curves, color, dash in lines:
        points = " ".join(place(*point) for point in curves[measure])
        style = f'fill="none" stroke="{color}" stroke-width="1.8" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{points}" {style}/>')
    return parts


def legend(entries):
    parts, x, y = [], LEFT, HEIGHT - 14
    for name, color, dash in entries:
        parts.append(
            f'<path d="M{x} {y - 4}h20" stroke="{color}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
        )
        parts.append(text(x + 26, y, name, "start"))
        x += 50 + 7 * len(name)
    return parts


def draw(groups, controls):
    """Groups of runs, each with a name and a color."""
    lines, entries = [], []
    for (name, runs), color in zip(groups, COLORS):
        lines += [(evaluations(run), color, "none") for run in runs]
        entries.append((name, color, "none"))
    for control in controls:
        lines.append((evaluations(control), CONTROL_COLOR, "4 3"))
    if controls:
        entries.append(("control: random reward, same seeds", CONTROL_COLOR, "4 3"))
    steps = max(step for curves, _, _ in lines for step, _ in curves["eval/greedy"])
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for index, measure in enumerate(MEASURES):
        parts += panel(LEFT + index * (PANEL + GAP), measure, lines, steps)
    parts += legend(entries)
    parts.append(text(WIDTH - 16, HEIGHT - 14, "RL step", "end"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    return f'{head} font-family="sans-serif" font-size="12" fill="#333">\n' + "\n".join(parts) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path)
    parser.add_argument("runs", type=Path, nargs="*", help="run folders of seeds 0, 1, ...")
    parser.add_argument("--named", nargs="+", action="append", default=[], help="a name, and run folders in one color")
    parser.add_argument("--control", type=Path, nargs="*", default=[], help="run folders drawn in grey")
    args = parser.parse_args()
    groups = [(f"seed {index}", [run]) for index, run in enumerate(args.runs)]
    groups += [(name, [Path(run) for run in runs]) for name, *runs in args.named]
    if not 0 < len(groups) <= len(COLORS):
        parser.error(f"give one to {len(COLORS)} runs or names")
    args.image.write_text(draw(groups, args.control))


if __name__ == "__main__":
    main()
