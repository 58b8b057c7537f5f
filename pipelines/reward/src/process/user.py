"""The start of each of anyroll's Python processes: loads the user's file, and exchanges lines with one JSON object each.
The code of the process follows below.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import traceback

LONGEST_MESSAGE, MOST_FRAMES = 2000, 8


def load(path, kind, name):
    """Loads the function or class `name` of the file `path`, whose folder comes first in the import path."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("anyroll_user_file", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        own = [f"`{it}`" for it, value in vars(module).items() if getattr(value, "__module__", None) == spec.name]
        raise AttributeError(f"there is no {kind} `{name}` in {path}" + (f", only {', '.join(own)}" if own else ""))
    return found


def accepted(function, arguments):
    """The arguments for which `function` has a parameter; all if it has `**kwargs`."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    if any(it.kind is it.VAR_KEYWORD for it in parameters):
        return arguments
    names = {it.name for it in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def needed(function, bound=0):
    """Names of the parameters of `function` that have no default, after the `bound` first ones."""
    try:
        parameters = list(inspect.signature(inspect.unwrap(function)).parameters.values())[bound:]
    except (TypeError, ValueError):
        return []  # a function in C
    return [it.name for it in parameters if it.default is it.empty and it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD)]


def messages():
    """Returns the messages that come in, and the function that writes one.

    The user's code has an empty standard input, and its prints go to standard error, so that neither mixes with messages."""
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    def say(**message):
        out.write(json.dumps(message) + "\n")
        out.flush()

    return map(json.loads, lines), say


def described(error, path, function=None):
    """The error, as the last line of its traceback has it, with the frames from the user's file `path` on, or else the
    place of the user's `function`."""
    text = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        text = f"it called sys.exit({error.code!r})"
    if len(text) > LONGEST_MESSAGE:
        text = text[: LONGEST_MESSAGE // 2] + " ... " + text[-LONGEST_MESSAGE // 2 :]
    frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    first = next((index for index, frame in enumerate(frames) if frame[0] == path), len(frames))
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    own = frames[first:] or ([(code.co_filename, code.co_firstlineno, code.co_name)] if code else [])
    told = [f'File "{file}", line {line}, in {name}' for file, line, name in own[-MOST_FRAMES:]]
    return "; ".join([text, *told])
