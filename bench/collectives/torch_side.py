"""What torch.distributed's NCCL does in the measurements of `anyroll doctor --bench`, as JSON: {what: seconds}.

    CUDA_VISIBLE_DEVICES=0,1 NCCL_NVLS_ENABLE=0 python3 torch_side.py

One process a visible GPU. Sizes, repetitions and names are those of pipelines/src/measure.rs; a figure is that of the
slowest rank.
"""

import json
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [1_000_000, 64_000_000, 1_000_000_000]


def seconds(work, repetitions):
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    dist.barrier()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repetitions):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repetitions


def rank(rank, world_size, port):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    figures = {}
    for size in SIZES:
        part = size // 2 // world_size // 128 * 128
        whole = torch.zeros(part * world_size, dtype=torch.bfloat16, device="cuda")
        other, mine = torch.zeros_like(whole), whole[:part]
        calls = {
            "all_gather": lambda: dist.all_gather_into_tensor(other, mine),
            "all_to_all": lambda: dist.all_to_all_single(other, whole),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(other[:part], whole),
            "all_reduce": lambda: dist.all_reduce(whole),
        }
        for name, call in calls.items():
            slowest = torch.tensor(seconds(call, 200 if size < 10_000_000 else 20), device="cuda")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            figures[f"{name}, {size // 1_000_000} MB"] = slowest.item()
    if rank == 0:
        print(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank, args=(torch.cuda.device_count(), port), nprocs=torch.cuda.device_count())
