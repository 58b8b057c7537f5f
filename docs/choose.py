"""Draws which strategy fits a model on some cards, by `anyroll plan`, as an SVG.

    python3 docs/choose.py target/release/anyroll docs/images/choose.svg

No device is opened: a plan reads a model's config.json, a tokenizer and data. The shapes are those of Qwen2.5.
"""

import argparse
import concurrent.futures
import html
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "tests/golden/tiny_model"

# hidden, intermediate, layers, heads, heads of keys, vocabulary, tied
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "72B": (8192, 29568, 80, 64, 8, 152064, False),
}
CARDS_GIB = [24, 48, 80, 141]
WORLDS = [1, 2, 4, 8]
PROMPT_CHARACTERS = 450  # About 512 tokens of this tokenizer with its template.

OFFLINE = """    data: {file: {path: data.jsonl}}
    objective: sft
    steps: 10
    batch_size: 64
    optimizer: {adamw: {learning_rate: 1.0e-6}}
    evaluation: {prompts: 0}
"""
RLVR = """    data: {file: {path: data.jsonl}}
    reward: exact
    steps: 10
    prompts_per_step: 64
    group_size: 8
    rollout: {max_new_tokens: 1536, batch_size: 64}
    optimizer: {adamw: {learning_rate: 1.0e-6}}
    evaluation: {prompts: 1}
"""
METHODS = {
    "SFT, all weights": ("offline", OFFLINE, ""),
    "GRPO, all weights": ("rlvr", RLVR, ""),
    "GRPO, LoRA of rank 32": ("rlvr", RLVR, ", lora: {rank: 32}"),
}

# Fastest first, as docs/results/training.md has it: name, color, and the fields of a choice of a plan.
STRATEGIES = [
    ("zero_stage: 1", "#2b8a3e", (1, "between_steps", "none", "none")),
    ("zero_stage: 3", "#8fce97", (3, "between_steps", "none", "none")),
    ("zero_stage: 1, recompute: full", "#1b6ca8", (1, "between_steps", "none", "full")),
    ("zero_stage: 3, recompute: full", "#8ec3e6", (3, "between_steps", "none", "full")),
    ("4 and offload.optimizer: cpu_step", "#e0a63a", (3, "cpu_step", "none", "full")),
    ("5 and offload.params: cpu", "#d1682c", (3, "cpu_step", "cpu", "full")),
]
NOTHING = ("does not fit", "#e3e5e9")
CELL, ROW, LEFT, TOP, PANEL_GAP = 40, 24, 60, 62, 58


def model(folder, shape):
    hidden, intermediate, layers, heads, key_heads, vocabulary, tied = shape
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((TOKENIZER / name).read_bytes())
    config = json.loads((TOKENIZER / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "layer_types": ["full_attention"] * layers,
    }
    (folder / "config.json").write_text(json.dumps(config))


def plan(anyroll, folder, size, method, world):
    """{(stage, optimizer, params, recompute): (GiB of a card, GiB of the host)}"""
    pipeline, body, more = METHODS[method]
    path = folder / f"{size}_{world}_{list(METHODS).index(method)}.yaml"
    strategy = "{precision: bf16, micro_batch_size: 4}"
    path.write_text(
        f"name: plan\nbackend: cuda\ndevices: 1\nmodel: {{path: {size}, chat: true{more}}}\n"
        f"strategy: {strategy}\npipeline:\n  {pipeline}:\n{body}"
    )
    command = [anyroll, "plan", path, "--memory", f"{max(CARDS_GIB)}GiB", "--world", str(world), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    peaks = {}
    for choice in json.loads(done.stdout)["choices"]:
        phases = {name: phase for name, phase in choice["plan"].items() if isinstance(phase, dict)}
        # A cache takes what is left. It works with the least that one sequence needs.
        least = choice["plan"]["least_kv_cache"]
        peak = max(phase["total"] - phase["kv_cache"] + (least if phase["kv_cache"] else 0) for phase in phases.values())
        key = (choice["zero_stage"], choice["optimizer"], choice["params"], choice["recompute"])
        peaks[key] = min(peak / 2**30, peaks.get(key, float("inf")))
    return peaks


def chosen(peaks, world, card_gib):
    """Index of the fastest strategy that fits, or None."""
    for index, (_, _, (stage, *others)) in enumerate(STRATEGIES):
        # One card has nothing to shard: a stage of 3 differs by streaming weights from the host.
        key = (0 if world == 1 and others[1] == "none" else stage, *others)
        if peaks[key] <= card_gib:
            return index
    return None


def text(x, y, content, anchor="middle", weight="normal", color="#222"):
    content = html.escape(content)
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{color}">{content}</text>'


def panel(top, method, peaks):
    parts = [text(LEFT, top - 36, method, "start", "bold")]
    left = LEFT
    for world in WORLDS:
        parts.append(text(left + CELL * len(CARDS_GIB) / 2, top - 18, f"{world} card{'s' * (world > 1)} of"))
        for column, card in enumerate(CARDS_GIB):
            x = left + column * CELL
            parts.append(text(x + CELL / 2, top - 4, f"{card}"))
            for row, size in enumerate(SHAPES):
                index = chosen(peaks[size, method, world], world, card)
                name, color = NOTHING if index is None else STRATEGIES[index][:2]
                mark = "-" if index is None else str(index + 1)
                y = top + row * ROW
                title = html.escape(f"{size}, {world} x {card} GiB: {name}")
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{ROW - 2}" fill="{color}"><title>{title}</title></rect>'
                )
                dark = color in ("#2b8a3e", "#1b6ca8", "#d1682c")
                parts.append(text(x + CELL / 2 - 1, y + 16, mark, color="#fff" if dark else "#222"))
        left += CELL * len(CARDS_GIB) + 14
    for row, size in enumerate(SHAPES):
        parts.append(text(LEFT - 8, top + row * ROW + 16, size, "end"))
    return parts


def draw(peaks):
    height = TOP + len(METHODS) * (len(SHAPES) * ROW + PANEL_GAP)
    width = LEFT + len(WORLDS) * (CELL * len(CARDS_GIB) + 14)
    parts = []
    for index, method in enumerate(METHODS):
        parts += panel(TOP + index * (len(SHAPES) * ROW + PANEL_GAP), method, peaks)
    y = height - 30
    for index, (name, color, _) in enumerate([*STRATEGIES, (*NOTHING, None)]):
        x, line = LEFT + (0, 150, 370, 610)[index // 2], y + (index % 2) * 22
        label = name if index == len(STRATEGIES) else f"{index + 1}: {name}"
        parts.append(f'<rect x="{x}" y="{line}" width="12" height="12" fill="{color}"/>')
        parts.append(text(x + 17, line + 11, label, "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 24}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{width}" height="{height + 24}" fill="#fff"/>', *parts, "</svg>\n"])


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("anyroll", help="the program")
    options.add_argument("svg", type=Path, help="the picture")
    options = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        prompt = "x" * PROMPT_CHARACTERS
        lines = [json.dumps({"prompt": f"{number} {prompt}", "answer": "1" * 1500}) for number in range(40)]
        (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
        for size, shape in SHAPES.items():
            model(folder / size, shape)
        asked = [(size, method, world) for size in SHAPES for method in METHODS for world in WORLDS]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = pool.map(lambda case: plan(options.anyroll, folder, *case), asked)
            peaks = dict(zip(asked, found))
    options.svg.write_text(draw(peaks))


if __name__ == "__main__":
    main()
