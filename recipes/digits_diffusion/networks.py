"""Networks that read digits: one is the reward, and the other judges its results without a part in training."""

import torch
from torch import nn
from torch.nn import functional

import digits

STEPS, BATCH = 1200, 64


def of_reward():
    """Returns small convolutions with pooling."""
    layers, width = [], 1
    for wide in (16, 32, 64):
        layers += [nn.Conv2d(width, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        width = wide
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))


def of_judge():
    """Returns another architecture: patches of 4 pixels, then layers over all of them."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=4), nn.GELU(), nn.Conv2d(32, 64, 3, padding=1), nn.GELU(), nn.Flatten(),
        nn.Linear(64 * 8 * 8, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, 10),
    )  # fmt: skip


class Score(nn.Module):
    """Probability that a picture `[B, 3, H, W]` shows the digit that was asked for."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, pictures: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(self.network(pictures.mean(1, keepdim=True)), 1)
        return probabilities.gather(1, asked[:, None])[:, 0]


def train(network, part, seed, device):
    """Trains on a part, with moved pictures."""
    pictures, labels = digits.part(part)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network = network.to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        rows = torch.randint(len(pictures), (BATCH,), generator=generator)
        seen = digits.moved(pictures[rows], generator).to(device)
        loss = functional.cross_entropy(network(seen), labels[rows].to(device), label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval().cpu()


@torch.no_grad()
def right(network, pictures, labels):
    """Returns the share of pictures `[N, 1, H, W]` whose digit the network reads."""
    return (network(pictures).argmax(1) == labels).float().mean().item()


def write(network, path):
    """Saves the score as TorchScript, aside and renamed."""
    aside = path.with_name(path.name + ".new")
    torch.jit.script(Score(network)).save(str(aside))
    aside.rename(path)


def ensure(folder, device):
    """Makes `reward.pt` and `judge.pt`, each of its own part, unless they are there."""
    for name, make, seed in (("reward", of_reward, 1), ("judge", of_judge, 2)):
        path = folder / f"{name}.pt"
        if not path.exists():
            torch.manual_seed(seed)
            network = train(make(), name, seed, device)
            accuracy = right(network, *digits.part("model"))
            write(network, path)
            print(f"{path}: reads {accuracy:.3f} of the 3,000 pictures that it has not seen", flush=True)
