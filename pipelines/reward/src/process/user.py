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


def load(path, kind, name):
    """Loads the function or class `name` of the file `path`, whose folder comes first in the import path."""
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
    """The arguments for which `function` has a parameter; all if it has `**kwargs`."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    if any(it.kind is it.VAR_KEYWORD for it in parameters):
        return arguments
    names = {it.name for it in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def speaker():
    """Returns the function that writes a line. The user's prints go to standard error, so that they do not mix with lines."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(**message):
        out.write(json.dumps(message) + "\n")
        out.flush()

    return say


def one_line(error):
    """The error in the form of the last line of its traceback."""
    return "".join(traceback.format_exception_only(error)).strip()
