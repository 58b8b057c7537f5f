"""What each of anyroll's Python processes begins with: it loads the user's file, and speaks one JSON object a line. What the
process is for follows below.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import traceback


def load(path, kind, name):
    """The function or class `name` of the file `path`, whose folder is where its imports are looked for first."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("anyroll_user_file", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise AttributeError(f"there is no {kind} `{name}` in {path}")
    return found


def accepted(function, arguments):
    """The arguments that `function` has a parameter for: all of them if it takes any."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    if any(it.kind is it.VAR_KEYWORD for it in parameters):
        return arguments
    names = {it.name for it in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def speaker():
    """What writes a line. What the user's code prints goes to standard error: it must not get between the lines."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(**message):
        out.write(json.dumps(message) + "\n")
        out.flush()

    return say


def one_line(error):
    """The error as the last line of its traceback has it."""
    return "".join(traceback.format_exception_only(error)).strip()
