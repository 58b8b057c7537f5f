"""Rewards as plain functions of one completion."""

import asyncio
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Parameters that are not columns of a record.
PROMPT, COMPLETION = "prompt", "completion"
LOG_METRIC, LOG_EXTRA = "log_metric", "log_extra"
# Kinds of parameters that are passed by name.
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Reward:
    """A function of one completion, which is called as anyroll and TRL call rewards: with lists.

    `score` is the function itself.
    """

    def __init__(self, score: Callable[..., Any]) -> None:
        self.score = score
        self.__name__ = score.__name__
        self.__doc__ = score.__doc__
        parameters = inspect.signature(score).parameters.values()
        if COMPLETION not in {it.name for it in parameters}:
            raise TypeError(f"`{self.__name__}` has no parameter `{COMPLETION}`: the text to score")
        for parameter in parameters:
            if parameter.kind not in (*BY_NAME, inspect.Parameter.VAR_KEYWORD):
                raise TypeError(f"parameter `{parameter.name}` of `{self.__name__}` cannot be given by name")
        self._parameters = [it.name for it in parameters if it.kind in BY_NAME]
        self._takes_all = any(it.kind is it.VAR_KEYWORD for it in parameters)
        own = [it for it in parameters if it.name not in (PROMPT, COMPLETION)]
        lists = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("prompts", "completions")]
        # What anyroll reads to choose the columns to pass.
        others = [it.replace(kind=it.KEYWORD_ONLY) if it.kind in BY_NAME else it for it in own]
        self.__signature__ = inspect.Signature([*lists, *others])

    def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Sequence[Any],
    ) -> list[float]:
        """Returns a score for each completion."""
        cases = []
        logged = [Extra() for _ in completions]
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            case = {PROMPT: prompt, COMPLETION: text_of(completion)}
            case.update((name, values[index]) for name, values in columns.items())
            case.update({LOG_METRIC: log_metric or ignore, LOG_EXTRA: logged[index]})
            cases.append({name: it for name, it in case.items() if self._takes_all or name in self._parameters})
        if inspect.iscoroutinefunction(self.score):
            scores = asyncio.run(self._gather(cases))
        else:
            scores = [self.score(**case) for case in cases]
        for name in dict.fromkeys(name for extra in logged for name in extra.values) if log_extra else ():
            log_extra(name, [extra.values.get(name) for extra in logged])
        return scores

    async def _gather(self, cases: list[dict[str, Any]]) -> list[float]:
        return list(await asyncio.gather(*(self.score(**case) for case in cases)))

    def term(self, **fields: Any) -> dict[str, Any]:
        """Returns the term of this function for `pipeline.rlvr.reward`, with `weight` or `domains` if given."""
        path = inspect.getsourcefile(self.score)
        if path is None or not Path(path).is_file():
            raise TypeError(f"`{self.__name__}` is in no file, which the reward's processes could load: write it to one")
        python = {"path": str(Path(path).resolve()), "function": self.__name__, "python": sys.executable}
        return {"python": python, **fields}


class Extra:
    """`log_extra` of one completion: keeps its value of each column."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __call__(self, column: str, value: Any) -> None:
        if column in self.values:
            raise ValueError(f"the column {column!r} has a value for this completion already")
        self.values[column] = value


def ignore(name: str, value: float) -> None:
    """`log_metric` where nobody records metrics."""


def text_of(completion: Any) -> str:
    """Returns the text of a completion, which is a list of messages where the prompt is one."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def reward(function: Callable[..., Any]) -> Reward:
    """Makes a reward of a function of one completion.

    The function's parameters are `completion` (a text), and any of `prompt` (a text or messages), `answer`, `finished` (true
    if the completion ended by itself) and the record's columns. It returns a number, and may be `async`. With the parameter
    `log_metric` it may call `log_metric(name, number)`, with `log_extra` `log_extra(column, value)`.

        @anyroll.reward
        def brevity(completion: str, answer: str) -> float:
            return 1.0 / (1 + abs(len(completion) - len(answer)))
    """
    return Reward(function)
