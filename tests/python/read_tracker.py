"""Reads a run back from wandb's offline file, trackio's database or MLflow's store, each as far as possible by its own package.

    read_tracker.py KIND RUN STORE

Prints {"steps": {step: {metric: value}}, "name": name of the config} as JSON; STORE is MLflow's.
"""

import glob
import json
import os
import sqlite3
import sys

BLOCK_BYTES = 1 << 15


def records(path):
    """Records of wandb's file: a header of 7 bytes, then LevelDB's log, in blocks, of checksum, length and type."""
    with open(path, "rb") as file:
        data = file.read()
    assert data[:4] == b":W&B", data[:8]
    at, part = 7, b""
    while at + 7 <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield part
            part = b""


def of_wandb(run, _):
    from wandb.proto.wandb_internal_pb2 import Record

    # Each start has a file with all steps so far; the last one is complete.
    path = sorted(glob.glob(f"{run}/wandb/offline-run-*/run-*.wandb"))[-1]
    steps, config = {}, {}
    for data in records(path):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config.update({it.key: json.loads(it.value_json) for it in record.run.config.update})
        if kind == "history":
            row = {it.key: json.loads(it.value_json) for it in record.history.item if not it.nested_key}
            row.update({"/".join(it.nested_key): json.loads(it.value_json) for it in record.history.item if it.nested_key})
            steps[row.pop("_step")] = row
    return steps, config["name"]


def of_trackio(run, _):
    (path,) = glob.glob(os.environ["TRACKIO_DIR"] + "/sorting.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    assert len(rows) == len(dict(rows)), "a step is there twice"
    return {step: json.loads(metrics) for step, metrics in rows}, json.loads(config)["name"]


def of_mlflow(run, store):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("sorting")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED", found.info.status
    steps = {}
    for name in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, name):
            steps.setdefault(metric.step, {})[name] = metric.value
    return steps, found.data.params["name"]


kind, run, store = sys.argv[1:]
steps, name = {"wandb": of_wandb, "trackio": of_trackio, "mlflow": of_mlflow}[kind](run, store)
print(json.dumps({"steps": steps, "name": name}))
