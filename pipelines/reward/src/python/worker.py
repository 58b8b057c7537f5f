"""Worker of the `python` reward: runs the user's function in a separate process, with one JSON object per line in and out.

Started as `python -c <this file> FILE FUNCTION SIGNATURE IMAGES`. It writes {"ready": true, "needs": names} once, with the
names of the parameters that have no default, then answers each
{"prompt", "messages", "completion", "finished", "answer", "columns"} with {"score", "metrics", "columns"} or {"error": text}.
"messages" is the prompt as messages, empty if it is a text. The answer's "metrics" are pairs of a name and a number, and its
"columns" an object of values. A case with an "image" scores the image instead of the completion, and may also be answered with
{"refused": true}. An image is {"frames", "shape", "is_video"}: the single frame of an image or the frames of a video, in base64,
and height, width and channels. IMAGES is the format of a frame: PNG files, or the dtype of arrays.
"""

import base64
import functools
import math


def load_function(path, name):
    """Loads the function `name` of the file `path`, with an `async` one wrapped in a plain call."""
    function = load(path, "function", name)
    if inspect.iscoroutinefunction(function):
        # `wraps` keeps the signature, which `accepted` reads.
        return functools.wraps(function)(lambda *args, **kwargs: asyncio.run(function(*args, **kwargs)))
    return function


def image_reader(form):
    """Returns the function that decodes a case's image for the user's function."""
    if form == "png":

        def files(image):
            frames = [base64.b64decode(frame) for frame in image["frames"]]
            return frames if image["is_video"] else frames[0]

        return files
    try:
        import numpy
    except ImportError as error:
        raise ImportError(
            f"`images: {form}` needs numpy, and {sys.executable} does not have it ({error}): install it there, name an "
            "interpreter that has it in `python`, or write `images: png`"
        ) from error

    def array(image):
        # A bytearray, since an array of bytes would be read-only.
        values = bytearray().join(base64.b64decode(frame) for frame in image["frames"])
        shape = [len(image["frames"]), *image["shape"]] if image["is_video"] else image["shape"]
        return numpy.frombuffer(values, form).reshape(shape)

    return array


class Log:
    """Metrics and columns that the function logs for a case."""

    LONGEST_NAME = 200

    def __init__(self):
        self.metrics, self.columns = [], {}

    def metric(self, name, value):
        """TRL's `log_metric`: adds a value to the metric `name`, which is the mean over the step's calls."""
        self.check("log_metric", name)
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except Exception:  # of the value's own class
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {value!r:.100}): a metric is a finite number")
        self.metrics.append((name, number))

    def extra(self, column, values):
        """TRL's `log_extra`: a list with a value of the column `column` for each completion."""
        self.check("log_extra", column)
        if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__iter__"):
            raise TypeError(f"log_extra({column!r}, {values!r:.100}): give a list with a value for each completion")
        self.columns.setdefault(column, []).extend(values)

    def check(self, call, name):
        if not isinstance(name, str) or not 0 < len(name) <= self.LONGEST_NAME or not name.isprintable():
            raise ValueError(f"{call}({name!r:.300}, ...): a name is a text of 1 to {self.LONGEST_NAME} characters in a line")

    def answer(self):
        """The part of the answer that was logged; each column has a value for the one completion."""
        for column, values in self.columns.items():
            if len(values) != 1:
                raise ValueError(f"log_extra({column!r}, ...) was given {len(values)} values for one completion")
        return {"metrics": self.metrics, "columns": {column: plain(values[0]) for column, values in self.columns.items()}}


def plain(value):
    """The value as JSON has it: a text, a number, a flag or null; anything else as a text."""
    is_number = isinstance(value, (int, float)) and abs(value) < 2**53
    return value if value is None or is_number else str(value).encode("utf-8", "replace").decode()


def call_trl(function, case, read_image, log):
    """TRL's signature: lists of prompts, of completions or images and of each column; returns a list of scores.

    Of a conversation the prompt is a list of messages, and so is the completion. A function of texts may log."""
    columns = {"answer": case["answer"], "finished": case["finished"], **case["columns"]}
    lists = {name: [value] for name, value in columns.items()}
    prompt, completion = case["prompt"], case["completion"]
    if case["messages"]:
        prompt, completion = case["messages"], [{"role": "assistant", "content": completion}]
    lists.update(prompts=[prompt])
    if "image" in case:
        lists.update(images=[read_image(case["image"])])
    else:
        lists.update(completions=[completion], log_metric=log.metric, log_extra=log.extra)
    scores = function(**accepted(function, lists))
    if not hasattr(scores, "__len__") or isinstance(scores, (str, bytes, dict)):
        raise ValueError(f"it returned {scores!r}: return a list with a score for each completion")
    if len(scores) != 1:
        raise ValueError(f"it returned {len(scores)} scores for one completion: return as many as there are completions")
    return scores[0]


def call_verl(function, case, *_):
    """verl's signature: compute_score(data_source, solution_str, ground_truth, extra_info); returns a number or a dict."""
    columns = case["columns"]
    score = function(
        **accepted(
            function,
            {
                "data_source": columns.get("data_source"),
                "solution_str": case["completion"],
                "ground_truth": case["answer"],
                "extra_info": columns.get("extra_info"),
                "finished": case["finished"],
            },
        )
    )
    return score["score"] if isinstance(score, dict) else score


def call_openrlhf(function, case, *_):
    """OpenRLHF's signature: reward_func(queries, prompts, labels), lists; returns as many rewards, or a dict with them."""
    prompt = case["prompt"]
    rewards = function([prompt + case["completion"]], [prompt], [case["answer"]])
    if isinstance(rewards, dict):
        rewards = rewards["rewards"]
    try:
        count = len(rewards)
    except TypeError:
        return rewards  # A number, or a tensor without dimensions.
    if count != 1:
        raise ValueError(f"it returned {count} rewards for one completion: return as many as there are queries")
    return rewards[0]


def number(score):
    """The score as a finite float, or an error."""
    if score is None:
        raise ValueError("it returned None; give the term the `domains` that the function is for")
    if not math.isfinite(score):
        raise ValueError(f"it returned {score}: return a finite number")
    return float(score)


def main():
    path, name, signature, images = sys.argv[1:5]
    cases, say = messages()
    try:
        function, read_image = load_function(path, name), image_reader(images)
    except BaseException as error:
        say(error=described(error, path))
        return
    # openrlhf's three arguments have no names.
    say(ready=True, needs=[] if signature == "openrlhf" else needed(function))
    call = {"trl": call_trl, "verl": call_verl, "openrlhf": call_openrlhf}[signature]
    for case in cases:
        # `sys.exit` is a failure like any other.
        try:
            log = Log()
            score = call(function, case, read_image, log)
            if score is None and "image" in case:
                say(refused=True)
            else:
                say(score=number(score), **log.answer())
        except BaseException as error:
            say(error=described(error, path, function))


main()
