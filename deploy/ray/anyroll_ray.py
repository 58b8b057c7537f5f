#!/usr/bin/env python3
"""Trains on a Ray cluster: a rank for each GPU of each bundle of a placement group.

    python deploy/ray/anyroll_ray.py --bundles 4 --gpus 8 run CONFIG --output /shared/runs/first --auto-resume

What follows the options is the command line of `anyroll`, which every host has under the same name, in the current folder,
which all hosts share. `devices` of the config are the GPUs of one bundle, usually those of a host. Bundles without GPUs
have one rank each, for the CPU backend.

The output of rank 0 is printed as it is, that of the others with their number. A rank that fails ends the others. Ctrl-C
and SIGTERM go to all ranks, which save a checkpoint; a second one kills them. The exit code is that of the first rank
that failed, and 130 after a signal. With `--auto-resume` the same command continues the run.
"""

import argparse
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# Time for ranks that lost another one to end by themselves, with their own message.
GRACE_S = 10
# Time for the last output of a rank that has ended. A background process of it may keep the pipe open.
DRAIN_S = 1
INTERRUPTED = 130
PR_SET_PDEATHSIG = 1


class Bundle:
    """The ranks of a bundle, on its host. Calls of `stop` overlap `run`."""

    def __init__(self):
        self.lock = threading.Lock()
        self.ranks = []
        self.signals = []

    def address(self):
        """Returns this host's address, and a port on it that nobody has."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, command, folder, places):
        """Starts a rank for the variables in each of `places`. Yields lists of what came: output as (rank, is_error, line),
        and ends as (rank, code)."""
        came = queue.Queue()
        libc = ctypes.CDLL(None)
        with self.lock:
            for place in places:
                self.ranks.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        # As `anyroll` itself starts ranks: they share the cores of a host.
                        env={"OMP_WAIT_POLICY": "passive"} | dict(os.environ) | place,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        # Ray may kill this process, and its ranks must not stay.
                        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
                    )
                )
            # `stop` may have come first.
            for number in self.signals:
                self.send(number)
        for place, rank in zip(places, self.ranks):
            threading.Thread(target=watch, args=(int(place["RANK"]), rank, came), daemon=True).start()
        left = len(places)
        while left > 0:
            items = [came.get()]
            while not came.empty():
                items.append(came.get())
            left -= sum(len(item) == 2 for item in items)
            yield items

    def stop(self, number):
        """Sends a signal to the ranks, also to those that start later."""
        with self.lock:
            self.signals.append(number)
            self.send(number)

    def send(self, number):
        for rank in self.ranks:
            rank.send_signal(number)


def watch(number, rank, came):
    """Puts a rank's lines into a queue, and then its exit code."""

    def read(pipe, is_error):
        for line in pipe:
            came.put((number, is_error, line.decode(errors="replace").rstrip("\n")))

    readers = [threading.Thread(target=read, args=it, daemon=True) for it in ((rank.stdout, False), (rank.stderr, True))]
    for reader in readers:
        reader.start()
    code = rank.wait()
    for reader in readers:
        reader.join(DRAIN_S)
    came.put((number, code if code >= 0 else 128 - code))


def tell(text):
    print(f"anyroll_ray: {text}", file=sys.stderr, flush=True)


class Job:
    """The ranks of all bundles, and what became of them."""

    def __init__(self, bundles, outputs):
        self.bundles = bundles
        # Output that is still read, with the index of its bundle.
        self.outputs = {output: index for index, output in enumerate(outputs)}
        self.code = 0
        self.signals = 0
        self.kill_at = None

    def supervise(self):
        """Prints output until all ranks have ended, and returns the exit code."""
        sent = 0
        while self.outputs:
            if self.signals > sent:
                self.stop(signal.SIGTERM if sent == 0 else signal.SIGKILL)
                sent = self.signals
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                self.stop(signal.SIGKILL)
                self.kill_at = time.monotonic() + GRACE_S
            ready, _ = ray.wait(list(self.outputs), timeout=0.2)
            for output in ready:
                self.read(output)
        return self.code

    def read(self, output):
        """Takes what one bundle said."""
        bundle = self.outputs[output]
        try:
            items = ray.get(next(output))
        except StopIteration:
            del self.outputs[output]
            return
        except ray.exceptions.RayError as error:
            del self.outputs[output]
            cause = getattr(error, "cause", None) or error
            tell(f"bundle {bundle} failed: {str(cause).strip().splitlines()[0]}")
            self.end(1)
            return
        for item in items:
            if len(item) == 2:
                rank, code = item
                if code != 0 and self.code == 0:
                    tell(f"rank {rank} ended with exit code {code}")
                self.end(code)
            else:
                rank, is_error, line = item
                print(line if rank == 0 else f"[rank {rank}] {line}", file=sys.stderr if is_error else sys.stdout, flush=True)

    def end(self, code):
        """Takes an exit code. The first other than 0 is that of the job, whose other ranks end then."""
        self.code = self.code or code
        # After a signal the ranks still write a checkpoint.
        if code not in (0, INTERRUPTED) and self.kill_at is None:
            self.kill_at = time.monotonic() + GRACE_S

    def stop(self, number):
        for index in self.outputs.values():
            self.bundles[index].stop.remote(number)


def reserve(given):
    """Returns a placement group, or ends with the resources that are missing."""
    needed = {"CPU": given.cpus, "GPU": given.gpus}
    bundle = {name: count for name, count in needed.items() if count > 0}
    group = placement_group([bundle] * given.bundles)
    if not group.wait(given.wait):
        has = {name: ray.cluster_resources().get(name, 0) for name in bundle}
        free = {name: ray.available_resources().get(name, 0) for name in bundle}
        remove_placement_group(group)
        sys.exit(f"anyroll_ray: no {given.bundles} bundles of {bundle} within {given.wait} s: the cluster has {has}, free are {free}")
    return group


def start(given, group):
    """Starts the ranks in the bundles of the group."""
    actor = ray.remote(num_cpus=given.cpus, num_gpus=given.gpus, max_concurrency=2)(Bundle)
    places = (PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in range(given.bundles))
    bundles = [actor.options(scheduling_strategy=place).remote() for place in places]
    address, port = ray.get(bundles[0].address.remote(), timeout=given.wait)
    ranks = max(given.gpus, 1)
    shared = {"WORLD_SIZE": str(given.bundles * ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def place(bundle, local):
        return shared | {"RANK": str(bundle * ranks + local), "LOCAL_RANK": str(local)}

    run = [given.anyroll, *given.command]
    outputs = [
        it.run.options(num_returns="streaming").remote(run, os.getcwd(), [place(index, local) for local in range(ranks)])
        for index, it in enumerate(bundles)
    ]
    return Job(bundles, outputs)


def parse():
    parser = argparse.ArgumentParser(description="Trains on a Ray cluster", usage="%(prog)s [OPTIONS] run CONFIG --output DIR ...")
    parser.add_argument("--address", default="auto", help="of the cluster [default: the one of this host, or RAY_ADDRESS]")
    parser.add_argument("--bundles", type=int, default=1, help="usually the number of hosts [default: 1]")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of a bundle, with a rank each [default: 0, one rank]")
    parser.add_argument("--cpus", type=int, help="CPUs of a bundle [default: one a rank]")
    parser.add_argument("--wait", type=float, default=600, help="seconds to wait for the bundles [default: 600]")
    parser.add_argument("--anyroll", default="anyroll", help="the program on each host [default: anyroll]")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command line of anyroll")
    given = parser.parse_args()
    if given.command[:1] != ["run"]:
        parser.error("write `run CONFIG --output DIR` after the options")
    if given.bundles < 1 or given.gpus < 0:
        parser.error("--bundles must be 1 or above, --gpus 0 or above")
    if given.cpus is None:
        given.cpus = max(given.gpus, 1)
    return given


def main():
    given = parse()
    # The ranks' output comes through `Bundle.run`, where no line is left out.
    ray.init(address=given.address, log_to_driver=False)
    group = reserve(given)
    try:
        job = start(given, group)

        def interrupt(*_):
            job.signals += 1

        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, interrupt)
        return job.supervise()
    finally:
        remove_placement_group(group)
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
