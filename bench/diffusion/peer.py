"""Flow-GRPO on a folder of `make_model.py` in diffusers and PyTorch, as a good engineer would write it on a page.

    peer.py FOLDER SETTINGS

SETTINGS is a JSON object; see `run.py`. Prints one JSON object: seconds of sampling, of decoding and scoring and of
training over the median step. The transformer is in bf16, its adapters in fp32; log-probs are in fp32.
Under torchrun each rank has its share of the prompts, a whole transformer, and the mean of all ranks' gradients.
"""

import json
import math
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from safetensors.torch import load_file

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


class Adapted(torch.nn.Module):
    """A frozen linear layer with an adapter beside it."""

    on = True

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        factory = dict(device=linear.weight.device, dtype=torch.float32)
        self.a = torch.nn.Parameter(torch.empty(rank, linear.in_features, **factory))
        self.b = torch.nn.Parameter(torch.zeros(linear.out_features, rank, **factory))
        torch.nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x):
        out = self.linear(x)
        if not Adapted.on:
            return out
        inner = torch.nn.functional.linear(x, self.a.to(x.dtype)) * self.scale
        return out + torch.nn.functional.linear(inner, self.b.to(x.dtype))


def adapt(model, rank, alpha):
    model.requires_grad_(False)
    for block in model.transformer_blocks:
        for name in TARGETS:
            parent, _, last = name.rpartition(".")
            owner = block.attn.get_submodule(parent) if parent else block.attn
            linear = owner[int(last)] if parent else getattr(owner, last, None)
            if linear is not None:
                adapted = Adapted(linear, rank, alpha)
                owner.__setitem__(int(last), adapted) if parent else setattr(owner, last, adapted)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Loop:
    def __init__(self, folder, settings, device):
        self.settings, self.device = settings, device
        bf16 = dict(torch_dtype=torch.bfloat16)
        self.model = SD3Transformer2DModel.from_pretrained(folder / "transformer", **bf16).to(device)
        self.vae = AutoencoderKL.from_pretrained(folder / "vae", **bf16).to(device).requires_grad_(False)
        self.scorer = torch.jit.load(str(folder / "scorer.pt"), map_location=device)
        self.parameters = adapt(self.model, settings["rank"], settings["alpha"])
        if settings["checkpointing"]:
            self.model.enable_gradient_checkpointing()
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-4, weight_decay=1e-4, fused=fused)
        self.texts = {name: tensor.to(device) for name, tensor in load_file(folder / "prompts.safetensors").items()}
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
        scheduler.set_timesteps(settings["denoising_steps"])
        self.sigmas = scheduler.sigmas.tolist()

    def velocity(self, x, sigma, prompts):
        """Guided: both halves in one batch."""
        texts, both = self.texts, torch.cat([x, x]).to(torch.bfloat16)
        none = texts["negative_prompt_embeds"].expand(len(prompts), -1, -1)
        context = torch.cat([texts["prompt_embeds"][prompts], none])
        none = texts["negative_pooled_prompt_embeds"].expand(len(prompts), -1)
        pooled = torch.cat([texts["pooled_prompt_embeds"][prompts], none])
        timestep = torch.full((len(both),), sigma * 1000, device=self.device)
        text, none = self.model(both, context, pooled, timestep, return_dict=False)[0].float().chunk(2)
        return none + self.settings["guidance"] * (text - none)

    def step_of(self, index):
        sigma, after = self.sigmas[index], self.sigmas[index + 1]
        dt = after - sigma
        std = 0.7 * math.sqrt(sigma / (1 - (self.sigmas[1] if sigma == 1 else sigma)))
        x_coef = 1 + std**2 / (2 * sigma) * dt
        return x_coef, (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt, std * math.sqrt(-dt), std

    def logprob(self, after, mean, deviation):
        square = ((after - mean) ** 2).mean(dim=(1, 2, 3))
        return -square / (2 * deviation**2) - math.log(deviation) - 0.5 * math.log(2 * math.pi)

    @torch.no_grad()
    def sample(self, prompts):
        side = self.settings["pixels"] // 8
        x = torch.randn(len(prompts), 16, side, side, device=self.device)
        points, logprobs = [x], []
        for index in range(self.settings["denoising_steps"]):
            x_coef, v_coef, deviation, _ = self.step_of(index)
            mean = x_coef * x + v_coef * self.velocity(x, self.sigmas[index], prompts)
            x = mean + deviation * torch.randn_like(mean)
            points.append(x)
            logprobs.append(self.logprob(x, mean, deviation))
        return points, logprobs

    @torch.no_grad()
    def score(self, latents):
        scores = []
        for part in latents.split(self.settings["decode_batch_size"]):
            part = part / self.vae.config.scaling_factor + self.vae.config.shift_factor
            images = self.vae.decode(part.to(torch.bfloat16), return_dict=False)[0].float()
            scores.append(self.scorer(images * 0.5 + 0.5))
        return torch.cat(scores)

    def train(self, prompts, points, logprobs, advantages):
        settings = self.settings
        timesteps = torch.randperm(settings["denoising_steps"])[: settings["trained_steps"]].tolist()
        for part in torch.arange(len(prompts), device=self.device).split(settings["micro_batch_size"]):
            for index in timesteps:
                x_coef, v_coef, deviation, std = self.step_of(index)
                x, after = points[index][part], points[index + 1][part]
                with torch.no_grad():
                    Adapted.on = False
                    reference = x_coef * x + v_coef * self.velocity(x, self.sigmas[index], prompts[part])
                    Adapted.on = True
                mean = x_coef * x + v_coef * self.velocity(x, self.sigmas[index], prompts[part])
                ratio = (self.logprob(after, mean, deviation) - logprobs[index][part]).exp()
                gain = advantages[part] * ratio
                policy = -torch.minimum(gain, advantages[part] * ratio.clamp(1 - 1e-4, 1 + 1e-4))
                kl = ((mean - reference) ** 2).mean(dim=(1, 2, 3)) / (2 * std**2)
                ((policy + 0.04 * kl).sum() / (len(prompts) * len(timesteps))).backward()
        if dist.is_initialized():
            grads = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
            dist.all_reduce(grads, dist.ReduceOp.AVG)
            for parameter, grad in zip(self.parameters, grads.split([p.numel() for p in self.parameters])):
                parameter.grad.copy_(grad.view_as(parameter))
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self):
        settings = self.settings
        prompts = torch.randint(len(self.texts["prompt_embeds"]), (settings["prompts"] // settings["devices"],))
        prompts = prompts.repeat_interleave(settings["group_size"]).to(self.device)
        clock = [self.now()]
        walks = [self.sample(part) for part in prompts.split(settings["sample_batch_size"])]
        points = [torch.cat(parts) for parts in zip(*(walk[0] for walk in walks))]
        logprobs = [torch.cat(parts) for parts in zip(*(walk[1] for walk in walks))]
        clock.append(self.now())
        scores = self.score(points[-1])
        groups = scores.view(-1, settings["group_size"])
        advantages = ((groups - groups.mean(1, keepdim=True)) / (scores.std() + 1e-4)).flatten().clamp(-5, 5)
        clock.append(self.now())
        self.train(prompts, points, logprobs, advantages)
        clock.append(self.now())
        return [after - before for before, after in zip(clock, clock[1:])]

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        return time.perf_counter()


def main():
    folder, settings = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if settings["devices"] > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group()
        torch.manual_seed(rank)
    loop = Loop(folder, settings, device)
    steps = [loop.step() for _ in range(settings["steps"])][1:]
    generate, score, train = (statistics.median(times) for times in zip(*steps))
    if rank == 0:
        print(json.dumps(dict(generate_s=generate, reward_s=score, train_s=train)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
