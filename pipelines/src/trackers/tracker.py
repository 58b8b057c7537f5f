"""A tracker of a run: follows the files of its folder, and sends their lines to Weights & Biases, trackio or MLflow through
the package's own interface.

Started as `python -c <this file>`. The first message says everything that it needs:
{"kind", "fields", "name", "id", "config", "folder", "notes"}. Another, {"end": state}, comes when the files have all their lines.
It writes {"told": text} for lines worth showing, {"error": text} if it gives up, and {"done": null} last. "notes" is a prefix of
files: PREFIX.json has the run's id and the last step that was sent, PREFIX.log all output; null for neither.
"""

import posixpath
import re
import threading
import time
import uuid

POLL_S = 1.0


class Wandb:
    """Weights & Biases."""

    def __init__(self, asked, notes):
        import wandb

        self.wandb, self.folder = wandb, asked["folder"]
        fields = {name: value for name, value in asked["fields"].items() if value}
        fields.setdefault("name", asked["name"])
        notes.remember(id=notes.id or asked["id"] or uuid.uuid4().hex[:8])
        # A resumed run may have other values, such as more steps.
        self.run = wandb.init(
            **fields,
            id=notes.id,
            resume="allow",
            dir=asked["folder"],
            config=asked["config"],
            allow_val_change=True,
            settings={"console": "off"},
        )
        self.url = getattr(self.run, "url", None)
        self.is_offline = getattr(self.run, "offline", False)
        if self.is_offline:
            # An offline run is complete in itself: which of its folders `wandb sync` takes does not matter.
            notes.remember(step=-1, advice=[])

    def step(self, step, metrics, samples):
        # JSON has null for numbers that are not finite.
        row = {name: float("nan") if value is None else value for name, value in metrics.items()}
        for name, records in samples.items():
            columns, rows = table(records)
            row[name] = self.wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self.run.log(row, step=step, commit=True)

    def advice(self, step, rule, text):
        self.run.alert(title=f"{rule} at step {step}", text=text, level=self.wandb.AlertLevel.WARN)

    def end(self, state):
        self.run.summary["ended"] = state
        self.run.finish(exit_code=int(state == "failed"))
        return f"send it with `wandb sync {self.folder}/wandb/offline-run-*`" if self.is_offline else None


class Trackio:
    """trackio, whose runs have a name and no id."""

    def __init__(self, asked, notes):
        import trackio

        self.trackio = trackio
        resume = "allow" if notes.id else "never"
        notes.remember(id=notes.id or asked["id"] or os.path.basename(asked["folder"]))
        trackio.init(**asked["fields"], name=notes.id, resume=resume, config=asked["config"], embed=False)
        self.url = None

    def step(self, step, metrics, samples):
        row = {name: float("nan") if value is None else value for name, value in metrics.items()}
        for name, records in samples.items():
            columns, rows = table(records)
            row[name] = self.trackio.Table(columns=columns, data=rows)
        self.trackio.log(row, step=step)

    def advice(self, step, rule, text):
        self.trackio.alert(title=f"{rule} at step {step}", text=text)

    def end(self, state):
        if state == "failed":
            self.trackio.alert(title="the run failed", text="its last lines are in its log")
        self.trackio.finish()


class Mlflow:
    """MLflow, through its client, which has no global state."""

    def __init__(self, asked, notes):
        from mlflow import MlflowClient, entities
        from mlflow.utils import validation

        self.entities = entities
        experiment, uri = asked["fields"]["experiment"], asked["fields"]["tracking_uri"]
        self.client = MlflowClient(tracking_uri=uri)
        found = self.client.get_experiment_by_name(experiment)
        self.url = None
        if notes.id:
            self.id = notes.id
            self.client.update_run(self.id, status="RUNNING")
            return
        experiment = found.experiment_id if found else self.client.create_experiment(experiment)
        self.id = self.client.create_run(experiment, run_name=asked["name"]).info.run_id
        notes.remember(id=self.id)
        limit = getattr(validation, "MAX_PARAM_VAL_LENGTH", 500)
        flat = [(self.key(name), text[:limit]) for name, text in flattened("", asked["config"])]
        for first in range(0, len(flat), 100):
            params = [entities.Param(*pair) for pair in flat[first : first + 100]]
            self.client.log_batch(self.id, params=params)

    def step(self, step, metrics, samples):
        now_ms = int(time.time() * 1000)
        values = [
            self.entities.Metric(self.key(name), float("nan") if value is None else float(value), now_ms, step)
            for name, value in metrics.items()
        ]
        for first in range(0, len(values), 500):
            self.client.log_batch(self.id, metrics=values[first : first + 500])
        for name, records in samples.items():
            text = json.dumps(records, ensure_ascii=False, indent=1)
            self.client.log_text(self.id, text, f"{name}/step_{step:06}.json")

    def advice(self, step, rule, text):
        self.client.set_tag(self.id, self.key(f"advice.{rule}"), f"step {step}: {text}")

    def end(self, state):
        self.client.set_tag(self.id, "ended", state)
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[state]
        self.client.set_terminated(self.id, status=status)

    @staticmethod
    def key(name):
        """The name in MLflow's alphabet: `eval/pass@1` becomes `eval/pass_at_1`."""
        return posixpath.normpath(re.sub(r"[^A-Za-z0-9_\-./ ]", "_", name.replace("@", "_at_")))


KINDS = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


def flattened(prefix, value):
    """The leaves of a config with their dotted names, as texts."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    leaves = [leaf for name, part in parts for leaf in flattened(f"{prefix}.{name}".lstrip("."), part)]
    return leaves or [(prefix, value if isinstance(value, str) else json.dumps(value))]


def table(records):
    """Columns and rows of samples: the facts of training, the reward's terms, and what reward functions logged, are columns of their own."""
    rows = []
    for record in records:
        training = record.get("training") or {}
        row = {name: record[name] for name in ("phase", "prompt", "completion", "answer", "reward")}
        row.update({name: value for name, value in training.items() if not isinstance(value, dict)})
        for facts in training.values():
            if isinstance(facts, dict):
                row.update(facts)
        for term, logged in record.get("columns", {}).items():
            row.update({f"{term}/{name}": value for name, value in logged.items()})
        rows.append(row)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


def by_phase(records):
    """Samples of a step, as `samples/training` and `samples/evaluation`."""
    parts = {}
    for record in records:
        name = "samples/training" if record["phase"] == "train" else "samples/evaluation"
        parts.setdefault(name, []).append(record)
    return parts


class Lines:
    """The lines of a file that grows, each an object."""

    def __init__(self, folder, name):
        self.path, self.offset = os.path.join(folder, name), 0

    def new(self):
        """The lines since the last call; the last one may be incomplete, and comes with the next call."""
        if not os.path.exists(self.path):
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                yield json.loads(line)


class Notes:
    """The run's id, and its last step and the advice that were sent, for a resumed run."""

    def __init__(self, prefix):
        self.path = prefix and prefix + ".json"
        self.id, self.step, self.advice = None, -1, []
        if self.path and os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                vars(self).update(json.load(file))

    def remember(self, **notes):
        vars(self).update(notes)
        if self.path:
            with open(self.path + ".part", "w", encoding="utf-8") as file:
                json.dump({name: value for name, value in vars(self).items() if name != "path"}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self.path + ".part", self.path)


class Follower:
    """Sends what the files of a run get."""

    def __init__(self, folder, board, notes):
        self.board, self.notes = board, notes
        self.metrics, self.samples, self.advice = (
            Lines(folder, name) for name in ("metrics.jsonl", "samples.jsonl", "advice.jsonl")
        )
        self.waiting = {}

    def send(self):
        """Sends what is new. Each step is noted at once, so that it is not sent again after a kill."""
        # A step's metrics are written after its samples: whoever reads them first has all samples of these steps.
        rows = list(self.metrics.new())
        for sample in self.samples.new():
            if sample["step"] > self.notes.step:
                self.waiting.setdefault(sample["step"], []).append(sample)
        for row in rows:
            step = row.pop("step")
            # Steps that a resumed run repeats are there already.
            if step > self.notes.step:
                self.board.step(step, row, by_phase(self.waiting.pop(step, [])))
                self.notes.remember(step=step)
        for advice in self.advice.new():
            if advice["rule"] not in self.notes.advice:
                self.board.advice(advice["step"], advice["rule"], advice["text"])
                self.notes.remember(advice=[*self.notes.advice, advice["rule"]])


def log_to(path):
    """Sends all output to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def main():
    incoming, say = messages()
    asked = next(incoming)
    ended, state = threading.Event(), []

    def hear():
        for message in incoming:
            state.append(message["end"])
            ended.set()

    threading.Thread(target=hear, daemon=True).start()
    try:
        if asked["notes"]:
            log_to(asked["notes"] + ".log")
        notes = Notes(asked["notes"])
        board = KINDS[asked["kind"]](asked, notes)
        if board.url:
            say(told=board.url)
        follower = Follower(asked["folder"], board, notes)
        while not ended.wait(POLL_S):
            follower.send()
        follower.send()
        told = board.end(state[0])
        if told:
            say(told=told)
        say(done=None)
    except BaseException as error:
        traceback.print_exc()
        say(error=described(error, ""))
        sys.exit(1)


main()
