"""A reward worker of anyroll: the user's function in a process of its own, one JSON object a line in and out.

Started as `python -c <this file> FILE FUNCTION SIGNATURE IMAGES`. It says {"ready": true} once, then answers each
{"prompt", "completion", "finished", "answer", "columns"} with {"score": number} or {"error": text}. A case with an
"image" is of that and not of the completion, and may also be answered with {"refused": true}. An image is {"frames",
"shape", "is_video"}: its one frame, or those of a video, in base64 as IMAGES says, PNG files or the values of arrays of this
dtype; and height, width and channels.
"""

import base64
import functools
import math


def load_function(path, name):
    """The function `name` of the file `path`, to be called as one that is not `async`."""
    function = load(path, "function", name)
    if inspect.iscoroutinefunction(function):
        # `wraps` keeps the parameters that it is asked for.
        return functools.wraps(function)(lambda *args, **kwargs: asyncio.run(function(*args, **kwargs)))
    return function


def image_reader(form):
    """What makes of a case's image what the function gets."""
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
        # Of a bytearray, since nobody can write to an array of bytes.
        values = bytearray().join(base64.b64decode(frame) for frame in image["frames"])
        shape = [len(image["frames"]), *image["shape"]] if image["is_video"] else image["shape"]
        return numpy.frombuffer(values, form).reshape(shape)

    return array


def call_trl(function, case, read_image):
    """TRL's: lists of prompts, of completions or images and of each column, and a list of scores back."""
    columns = {"answer": case["answer"], "finished": case["finished"], **case["columns"]}
    lists = {name: [value] for name, value in columns.items()}
    lists.update(prompts=[case["prompt"]])
    if "image" in case:
        lists.update(images=[read_image(case["image"])])
    else:
        lists.update(completions=[case["completion"]])
    scores = function(**accepted(function, lists))
    if not hasattr(scores, "__len__"):
        raise ValueError(f"it returned {scores!r}: return a list with a score for each completion")
    if len(scores) != 1:
        raise ValueError(f"it returned {len(scores)} scores for one completion")
    return scores[0]


def call_verl(function, case, _):
    """verl's: compute_score(data_source, solution_str, ground_truth, extra_info), and a number or a dict back."""
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


def call_openrlhf(function, case, _):
    """OpenRLHF's: reward_func(queries, prompts, labels), lists of one by place, and as many rewards back, or a dict with them."""
    prompt = case["prompt"]
    rewards = function([prompt + case["completion"]], [prompt], [case["answer"]])
    if isinstance(rewards, dict):
        rewards = rewards["rewards"]
    try:
        count = len(rewards)
    except TypeError:
        return rewards  # A number, or a tensor without dimensions.
    if count != 1:
        raise ValueError(f"it returned {count} rewards for one completion")
    return rewards[0]


def number(score):
    """The score as a float; what is none is an error."""
    if score is None:
        raise ValueError("it returned None; give the term the `domains` that the function is for")
    if not math.isfinite(score):
        raise ValueError(f"it returned {score}")
    return float(score)


def main():
    path, name, signature, images = sys.argv[1:5]
    say = speaker()
    try:
        function, read_image = load_function(path, name), image_reader(images)
    except BaseException as error:
        say(error=one_line(error))
        return
    say(ready=True)
    call = {"trl": call_trl, "verl": call_verl, "openrlhf": call_openrlhf}[signature]
    for line in sys.stdin:
        try:
            case = json.loads(line)
            score = call(function, case, read_image)
            if score is None and "image" in case:
                say(refused=True)
            else:
                say(score=number(score))
        except Exception as error:
            say(error=one_line(error))


main()
