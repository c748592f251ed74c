"""Train the model of lightning_text.py with Lightning Fabric: a training loop of one's own, with Fabric under it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning_text import LOG_EVERY_STEPS, NextByte, Windows
from torch.utils.data import DataLoader


def main() -> None:
    """Train, with a checkpoint every few steps, from the newest one if there is one."""
    parser = argparse.ArgumentParser(description="Foresee the next byte of Python source with Fabric.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--batch", type=int, default=32, help="windows a rank")
    args = parser.parse_args()
    checkpoints = Path(os.environ.get("ORCH_CHECKPOINT_DIR") or "checkpoints")

    fabric = L.Fabric(accelerator="auto", devices=2, num_nodes=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = NextByte(width=48, learning_rate=5e-3)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=model.learning_rate))
    loader: Any = fabric.setup_dataloaders(DataLoader(Windows(), batch_size=args.batch, shuffle=True))

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if resume_from := os.environ.get("ORCH_RESUME_FROM"):
        fabric.load(resume_from, state)
        fabric.print(f"resumed from {resume_from} at step {state['step']}", flush=True)

    batches = iter(loader)
    while state["step"] < args.steps:
        batch = next(batches)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % LOG_EVERY_STEPS == 0:
            fabric.print(f"step {state['step']} loss {loss.item():.4f}", flush=True)
        if state["step"] % args.checkpoint_every == 0:
            fabric.save(checkpoints / f"step-{state['step']:06d}.ckpt", state)


if __name__ == "__main__":
    main()
