"""A small model of Stable Diffusion 3's form that paints digits: an autoencoder and a transformer, trained from nothing.

The folder is what diffusers' pipeline saves: `transformer`, `vae`, `scheduler`. Texts have fixed random embeddings in
place of a text encoder.
"""

import shutil

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch.nn import functional

import digits

WIDTH, TOKENS = 32, 2
AUTOENCODER_STEPS, TRANSFORMER_STEPS, BATCH = 1500, 4000, 128
CLASS_DROPOUT = 0.1


def autoencoder():
    return AutoencoderKL(
        block_out_channels=(16, 32, 32), down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3, layers_per_block=1, latent_channels=4, norm_num_groups=8,
        sample_size=digits.SIDE, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0, scaling_factor=1.0,
    )  # fmt: skip


def transformer():
    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=4, num_attention_heads=4,
        attention_head_dim=32, joint_attention_dim=WIDTH, caption_projection_dim=128, pooled_projection_dim=WIDTH,
        pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip


def texts():
    """Returns embeddings of ten texts and of the empty one, under diffusers' names."""
    draw = torch.Generator().manual_seed(0)
    return {
        "prompt_embeds": torch.randn(10, TOKENS, WIDTH, generator=draw),
        "pooled_prompt_embeds": torch.randn(10, WIDTH, generator=draw),
        "negative_prompt_embeds": torch.zeros(1, TOKENS, WIDTH),
        "negative_pooled_prompt_embeds": torch.zeros(1, WIDTH),
    }


def batches(steps, device, pictures, labels):
    """Yields moved pictures `[B, 3, H, W]` of -1 to 1 and their digits."""
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        rows = torch.randint(len(pictures), (BATCH,), generator=draw)
        seen = digits.moved(pictures[rows], draw) * 2 - 1
        yield seen.expand(-1, 3, -1, -1).to(device), labels[rows].to(device)


def train_autoencoder(device):
    """Returns an autoencoder whose scaled latents have mean 0 and variance 1."""
    torch.manual_seed(4)
    vae = autoencoder().to(device).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, AUTOENCODER_STEPS)
    pictures, labels = digits.part("model")
    for step, (seen, _) in enumerate(batches(AUTOENCODER_STEPS, device, pictures, labels)):
        posterior = vae.encode(seen).latent_dist
        painted = vae.decode(posterior.sample()).sample
        loss = functional.mse_loss(painted, seen) + 1e-4 * posterior.kl().mean() / 256
        advance(vae, optimizer, schedule, loss)
        tell("autoencoder", step, AUTOENCODER_STEPS, loss)
    vae.eval()
    latents = latents_of(vae, pictures, device)
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    return vae


def advance(model, optimizer, schedule, loss):
    """Takes one step down the gradient of `loss`, of norm 1 at most."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()


@torch.no_grad()
def latents_of(vae, pictures, device):
    seen = (pictures * 2 - 1).expand(-1, 3, -1, -1)
    return torch.cat([vae.encode(part.to(device)).latent_dist.mean for part in seen.split(250)])


def train_transformer(vae, device):
    """Returns a transformer trained by supervised flow matching."""
    torch.manual_seed(5)
    model = transformer().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, TRANSFORMER_STEPS, pct_start=0.05)
    said = {name: tensor.to(device) for name, tensor in texts().items()}
    pictures, labels = digits.part("model")
    for step, (seen, digit) in enumerate(batches(TRANSFORMER_STEPS, device, pictures, labels)):
        with torch.no_grad():
            clean = (vae.encode(seen).latent_dist.mean - vae.config.shift_factor) * vae.config.scaling_factor
        noise = torch.randn_like(clean)
        sigma = torch.sigmoid(torch.randn(len(clean), device=device))
        at = sigma.view(-1, 1, 1, 1)
        silent = (torch.rand(len(clean), device=device) < CLASS_DROPOUT).float()
        hidden = said["prompt_embeds"][digit] * (1 - silent.view(-1, 1, 1))
        pooled = said["pooled_prompt_embeds"][digit] * (1 - silent.view(-1, 1))
        velocity = model((1 - at) * clean + at * noise, hidden, pooled, sigma * 1000).sample
        loss = functional.mse_loss(velocity, noise - clean)
        advance(model, optimizer, schedule, loss)
        tell("transformer", step, TRANSFORMER_STEPS, loss)
    return model.eval()


def tell(name, step, steps, loss):
    if (step + 1) % (steps // 5) == 0:
        print(f"{name}: step {step + 1} of {steps}, loss {loss.item():.4f}", flush=True)


def ensure(folder, prompts, device):
    """Makes the model's folder and the file of embeddings unless they are there."""
    if not prompts.exists():
        aside = prompts.with_name(prompts.name + ".new")
        save_file(texts(), aside)
        aside.rename(prompts)
    if folder.is_dir():
        return
    aside = folder.with_name(folder.name + ".new")
    shutil.rmtree(aside, ignore_errors=True)
    vae = train_autoencoder(device)
    train_transformer(vae, device).save_pretrained(aside / "transformer")
    vae.save_pretrained(aside / "vae")
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(aside / "scheduler")
    aside.rename(folder)


@torch.no_grad()
def paint(folder, prompts, count, steps, device):
    """Returns `count` pictures `[N, 3, H, W]` of 0 to 1 of each digit by Euler's method, and their digits."""
    model = SD3Transformer2DModel.from_pretrained(folder / "transformer").to(device).eval()
    vae = AutoencoderKL.from_pretrained(folder / "vae").to(device).eval()
    said = load_file(prompts, device=str(device))
    asked = torch.arange(10).repeat_interleave(count)
    latents = torch.randn(len(asked), 4, 8, 8, generator=torch.Generator().manual_seed(6)).to(device)
    sigmas = torch.linspace(1, 0, steps + 1, device=device)
    for now, then in zip(sigmas, sigmas[1:]):
        hidden, pooled = said["prompt_embeds"][asked], said["pooled_prompt_embeds"][asked]
        velocity = model(latents, hidden, pooled, (now * 1000).expand(len(asked))).sample
        latents = latents + (then - now) * velocity
    latents = latents / vae.config.scaling_factor + vae.config.shift_factor
    pictures = torch.cat([vae.decode(part).sample for part in latents.split(200)])
    return (pictures.cpu() / 2 + 0.5).clamp(0, 1), asked
