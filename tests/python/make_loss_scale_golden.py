"""The loss scales of torch.amp.GradScaler over steps some of which overflow: strategy/tests/strategy/fp16.rs has what
this prints. Needs torch."""

import torch

INITIAL, GROWTH_INTERVAL = 1024.0, 3
OVERFLOWS = {0, 1, 6, 12}
STEPS = 18

weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.AdamW([weight])
scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL, growth_interval=GROWTH_INTERVAL)
scales = []
for step in range(STEPS):
    scales.append(scaler.get_scale())
    loss = weight.sum() * (float("inf") if step in OVERFLOWS else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print("scales", scales)
print("steps taken", int(optimizer.state[weight]["step"]))
