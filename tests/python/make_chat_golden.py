"""Writes tests/golden/chat/golden.json: conversations as `transformers` renders them by the templates beside it,
and snippets.json: what it renders for each template in that file, or null if it raises an exception.

    python tests/python/make_chat_golden.py

Needs transformers 4.57 and jinja2. The templates are in the style of published ones: the same features, shorter texts.
"""

import json
import pathlib

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place; <b>now</b> & \"here\"",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "enum": [1, 2]}},
            "required": ["place"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "description": "The time", "parameters": {}, "strict": True}}
USER = {"role": "user", "content": "  What is 2 + 2?\n"}
SYSTEM = {"role": "system", "content": "Be brief. Grüße, 你好."}
ANSWER = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n 4 "}


def call(*names):
    calls = [
        {"id": f"call{i:05}", "type": "function", "function": {"name": name, "arguments": {"place": "Köln", "days": i}}}
        for i, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(text, number=0):
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05}", "name": "weather"}


CASES = {
    "one turn": ([USER], None, {}),
    "system": ([SYSTEM, USER], None, {}),
    "two turns": ([SYSTEM, USER, ANSWER, {"role": "user", "content": "And 3?"}], None, {}),
    "ends with the assistant": ([USER, ANSWER], None, {}),
    "no thinking": ([USER], None, {"enable_thinking": False}),
    "two users": ([USER, USER], None, {}),
    "tools": ([USER], [WEATHER, TIME], {}),
    "tools and system": ([SYSTEM, USER], [WEATHER], {"tools_in_user_message": False}),
    "a call": ([SYSTEM, USER, call("weather"), result("7 °C")], [WEATHER], {}),
    "two calls": ([USER, call("weather", "time"), result("7 °C"), result("noon", 1)], [WEATHER, TIME], {}),
}


def cases(template):
    for name, (messages, tools, variables) in CASES.items():
        for add_generation_prompt in (False, True):
            case = dict(
                name=name,
                messages=messages,
                tools=tools,
                variables=variables,
                add_generation_prompt=add_generation_prompt,
                rendered=None,
                raised=None,
            )
            try:
                (case["rendered"],), _ = render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=add_generation_prompt,
                    bos_token="<s>",
                    eos_token="</s>",
                    **variables,
                )
            except jinja2.exceptions.TemplateError as error:
                case["raised"] = str(error)
            yield case


folder = pathlib.Path(__file__).parent.parent / "golden" / "chat"
golden = {path.stem: list(cases(path.read_text())) for path in sorted(folder.glob("*.jinja"))}
(folder / "golden.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")

MESSAGES = [
    {"role": "user", "content": "hi a"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "ok"},
]


def snippet(template):
    try:
        (rendered,), _ = render_jinja_template([MESSAGES], chat_template=template, bos_token="<s>", eos_token="</s>")
    except Exception:
        rendered = None
    return dict(template=template, rendered=rendered)


snippets = [snippet(case["template"]) for case in json.loads((folder / "snippets.json").read_text())]
(folder / "snippets.json").write_text(json.dumps(snippets, ensure_ascii=False, indent=1) + "\n")
