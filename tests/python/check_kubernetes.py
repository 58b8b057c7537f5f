"""Checks the files of deploy/kubernetes without a cluster, and runs their commands.

    python tests/python/check_kubernetes.py --anyroll target/release/anyroll

It needs kubernetes-validate, which has Kubernetes' schemas, and torch, which has torchrun; `ci/kubernetes` installs them.
It starts in the root of the checkout. Checked are:

1. each resource against its schema, and names that resources have in common;
2. the job's command as two pods of one rank and as one of two, each against one host's run, bitwise;
3. the command of the operator's job as two pods, with the variables that the operator sets;
4. after a pod was asked to end, or a rank was killed, the next pods continue, bitwise.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml
from short_runs import arguments, assert_same, free_port, metrics, on_one_host, processes_of, rank_of, wait_until

FOLDER = Path("deploy/kubernetes")
OLDEST, NEWEST = "1.31", kubernetes_validate.latest_version()


def main():
    parser = argparse.ArgumentParser(description="Checks the files of deploy/kubernetes without a cluster")
    parser.add_argument("--anyroll", type=Path, required=True)
    anyroll = parser.parse_args().anyroll
    job = check_job()
    pytorch_job = check_pytorch_job()
    check_mistakes(job, pytorch_job)
    print("ok: schemas")
    with tempfile.TemporaryDirectory() as scratch:
        check_runs(anyroll, job, pytorch_job, Path(scratch))


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def validate(resource):
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(resource, version, strict=True)


def check_job():
    """Validates the job with its service and volume, and returns its container."""
    (claim,), (service, job) = documents("runs.yaml"), documents("job.yaml")
    for resource in (claim, service, job):
        validate(resource)
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    values = {it["name"]: it["value"] for it in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(values["PODS"])
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert values["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    ports = [it["port"] for it in service["spec"]["ports"]], [it["containerPort"] for it in container["ports"]]
    assert ports == ([int(values["MASTER_PORT"])], [int(values["MASTER_PORT"])])
    check_pod(pod, claim, int(values["RANKS_PER_POD"]))
    return container


def check_pytorch_job():
    """Validates the operator's job, and returns it."""
    (claim,), (job,) = documents("runs.yaml"), documents("pytorchjob.yaml")
    validate_pytorch_job(job)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        check_pod(replica["template"]["spec"], claim, int(job["spec"]["nprocPerNode"]))
    return job


def validate_pytorch_job(job):
    schema = json.loads((Path(__file__).parent / "pytorchjob.schema.json").read_text())
    jsonschema.validate(job, schema)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        validate({"apiVersion": "v1", "kind": "Pod", **replica["template"]})


def check_pod(pod, claim, ranks):
    """Checks names within a pod, and that it has a device for each rank."""
    (container,) = pod["containers"]
    assert list(container["resources"]["limits"].values()) == [ranks]
    assert {it["name"] for it in container["volumeMounts"]} == {it["name"] for it in pod["volumes"]}
    claims = [it["persistentVolumeClaim"]["claimName"] for it in pod["volumes"] if "persistentVolumeClaim" in it]
    assert claims == [claim["metadata"]["name"]]
    assert "--auto-resume" in container["args"]


def check_mistakes(container, pytorch_job):
    """Asserts that the schemas refuse mistakes: they might accept anything."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [container]}}
    validate(pod)
    for wrong in ({"image": 1}, {"comand": []}, {"ports": [{"containerPort": "a"}]}):
        refuses(validate, pod | {"spec": {"containers": [container | wrong]}})
    spec = pytorch_job["spec"]
    two = {**spec["pytorchReplicaSpecs"], "Master": {**spec["pytorchReplicaSpecs"]["Master"], "replicas": 2}}
    for wrong in ({"nprocPerNode": 8}, {"restarts": 1}, {"runPolicy": {"cleanPodPolicy": "all"}}, {"pytorchReplicaSpecs": two}):
        refuses(validate_pytorch_job, {**pytorch_job, "spec": spec | wrong})


def refuses(check, resource):
    try:
        check(resource)
    except (kubernetes_validate.ValidationError, jsonschema.ValidationError):
        return
    raise AssertionError(f"accepted: {resource}")


class Pods:
    """Runs the commands of pods on this machine."""

    def __init__(self, anyroll, scratch):
        self.anyroll, self.scratch = anyroll, scratch
        # The programs and torchrun, as in an image.
        path = [anyroll.resolve().parent, Path(sys.executable).parent, os.environ["PATH"]]
        self.variables = {"PATH": ":".join(map(str, path)), "HOME": str(scratch)}
        kept = ("OMP_WAIT_POLICY", "ONEDNN_MAX_CPU_ISA")
        self.variables |= {name: os.environ[name] for name in kept if name in os.environ}

    def reference(self, name, sets=None):
        """Returns the run of one host."""
        on_one_host(self.anyroll, self.scratch / name, sets)
        return self.scratch / name

    def start(self, command, variables, output):
        with open(f"{output}.log", "a") as log:
            return subprocess.Popen(command, env=self.variables | variables, stdout=log, stderr=subprocess.STDOUT)

    def of_job(self, container, output, places, sets=None):
        """Starts the job's pods: `places` are their number and the ranks of each."""
        count, ranks = places
        values = {it["name"]: it["value"] for it in container["env"]}
        values |= {"PODS": str(count), "RANKS_PER_POD": str(ranks)}
        values |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        command = [*container["command"], *arguments(output, {"devices": ranks} | (sets or {})), "--auto-resume"]
        return [self.start(command, values | {"JOB_COMPLETION_INDEX": str(index)}, output) for index in range(count)]

    def of_operator(self, job, output):
        """Starts two pods of the operator's job with one rank each, with the variables that the operator sets."""
        spec, port = job["spec"]["pytorchReplicaSpecs"], str(free_port())
        started = []
        for rank, replica in enumerate(("Master", "Worker")):
            (container,) = spec[replica]["template"]["spec"]["containers"]
            assert container["args"][:2] == ["anyroll", "run"]
            values = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
            values |= {"PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank), "PET_NNODES": "2"}
            # As Kubernetes replaces them.
            command = [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], part) for part in container["command"]]
            run = ["anyroll", *arguments(output, {"devices": 1}), "--auto-resume"]
            started.append(self.start([*command, *run], values, output))
        return started


def assert_ended(started, output, *codes):
    """Asserts that all pods ended, with one of these exit codes."""
    ended = [pod.wait(300) for pod in started]
    assert set(ended) <= set(codes), f"{ended}: {Path(f'{output}.log').read_text()}"


def check_runs(anyroll, container, pytorch_job, scratch):
    pods = Pods(anyroll, scratch)
    reference = pods.reference("reference")
    for places in ((2, 1), (1, 2)):
        run = scratch / f"{places[0]}_pods"
        assert_ended(pods.of_job(container, run, places), run, 0)
        assert_same(run, reference)
        print("ok: {} pods of {} ranks have the metrics of one host".format(*places), flush=True)
    run = scratch / "operator"
    assert_ended(pods.of_operator(pytorch_job, run), run, 0)
    assert_same(run, reference)
    print("ok: the operator's pods have the metrics of one host", flush=True)
    check_end(pods, container)


def check_end(pods, container):
    # Long enough that its end comes later.
    sets = {"pipeline.rlvr.steps": 300}
    longer = pods.reference("longer", sets)

    def check(name, end, codes):
        run = pods.scratch / name.replace(" ", "_")
        started = pods.of_job(container, run, (2, 1), sets)
        wait_until("a checkpoint", lambda: (run / "checkpoints").is_dir() and any((run / "checkpoints").glob("step_*")))
        end(started, run)
        assert_ended(started, run, *codes)
        assert len(metrics(run)) < 300
        wait_until("all ranks end", lambda: not processes_of(run))
        assert_ended(pods.of_job(container, run, (2, 1), sets), run, 0)
        assert_same(run, longer)
        print(f"ok: after pods were {name}, new ones continue with the metrics of one host", flush=True)

    # One host is drained: its ranks take the others with them.
    check("asked to end", lambda started, _: started[1].send_signal(signal.SIGTERM), [130])
    # The other rank says so.
    check("killed", lambda _, run: os.kill(rank_of(run, 1), signal.SIGKILL), [1, 137])


if __name__ == "__main__":
    main()
