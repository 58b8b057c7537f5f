"""Process of an environment: runs episodes of the user's class in sequence, with one JSON object per line in and out.

Started with FILE CLASS. It writes {"ready": true, "needs": names} once, with the parameters of `reset` that
have no default. {"reset": {"prompt", "answer", "messages", "columns"}} starts an
episode, and is answered with {"observation": text or null}; {"step": text} is the model's turn, and is answered with
{"observation": text or null, "done": bool, "reward": number or null}. Both may be answered with {"error": text}.
"""

import asyncio
import math

ANSWER = {"observation": None, "done": False, "reward": None}


def load_class(path, name):
    """Loads the class and checks that it has both methods."""
    found = load(path, "class", name)
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            raise AttributeError(f"`{name}` in {path} has no method `{method}`")
    return found


def needed_to_reset(found):
    """Names of the parameters of `reset` that have no default."""
    is_bound = isinstance(inspect.getattr_static(found, "reset"), (classmethod, staticmethod))
    return needed(found.reset, 0 if is_bound or not inspect.isclass(found) else 1)


def text(observation):
    """Checks an observation, which is a string or None."""
    if observation is not None and not isinstance(observation, str):
        raise TypeError(f"the observation is {observation!r}, must be a string or None")
    return observation


def answer(said):
    """Result of `step`, with defaults for missing keys."""
    if not isinstance(said, dict) or not said.keys() <= ANSWER.keys():
        raise TypeError(f"`step` returned {said!r}: return a dict with {', '.join(ANSWER)}, or some of these")
    said = {**ANSWER, **said}
    if said["reward"] is not None and not math.isfinite(said["reward"]):
        raise ValueError(f"the reward is {said['reward']}")
    if not said["done"] and said["observation"] is None:
        raise ValueError("the episode is not done, but there is no observation")
    reward = None if said["reward"] is None else float(said["reward"])
    return {"observation": text(said["observation"]), "done": bool(said["done"]), "reward": reward}


def main():
    path, name = sys.argv[1:3]
    requests, say = messages()
    try:
        episode_class = load_class(path, name)
    except BaseException as error:
        say(error=described(error, path))
        return
    say(ready=True, needs=needed_to_reset(episode_class))
    loop = asyncio.new_event_loop()

    def result(value):
        return loop.run_until_complete(value) if inspect.isawaitable(value) else value

    episode = None
    for said in requests:
        try:
            if "reset" in said:
                episode, record = episode_class(), said["reset"]
                arguments = {**record.pop("columns"), **record}
                say(observation=text(result(episode.reset(**accepted(episode.reset, arguments)))))
            else:
                say(**answer(result(episode.step(said["step"]))))
        except BaseException as error:
            say(error=described(error, path))


main()
