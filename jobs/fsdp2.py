"""Train the GPT of tiny_gpt.py with FSDP2 (`fully_shard`), saved by torch.distributed.checkpoint.

Every rank holds a shard of each layer and of the optimizer's state, and writes its own file of a checkpoint. With
--async-save the next steps go on while the last checkpoint is written.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from tiny_gpt import TinyGPT, batch_of, read_text
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

LOG_EVERY_STEPS = 10


class TrainingState(Stateful):
    """Model, optimizer and step, as torch.distributed.checkpoint saves and loads them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved; of a sharded tensor, this rank's shard."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what was loaded."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Resume from the newest checkpoint, if there is one, and run the remaining steps."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoints = Path(os.environ.get("ORCH_CHECKPOINT_DIR") or "checkpoints")
    text, _ = read_text()
    torch.manual_seed(args.seed)
    model = TinyGPT(args.width, args.layers, args.context).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    state = TrainingState(model, optimizer)
    if resume_from := os.environ.get("ORCH_RESUME_FROM"):
        dcp.load({"app": state}, checkpoint_id=resume_from)
        if rank == 0:
            print(f"resumed from {resume_from} at step {state.step}", flush=True)

    # Saving in the background has collectives of its own, so it needs a group of its own.
    background = dist.new_group(backend="gloo") if args.async_save else None
    saving = None
    while state.step < args.steps:
        inputs, targets = batch_of(text, state.step, rank, world_size, args)
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1

        if state.step % LOG_EVERY_STEPS == 0 and rank == 0:
            print(f"step {state.step} loss {loss.item():.4f}", flush=True)
        if state.step % args.checkpoint_every == 0:
            folder = checkpoints / f"step-{state.step:06d}"
            if background is None:
                dcp.save({"app": state}, checkpoint_id=folder)
                continue
            if saving is not None:
                saving.result()  # one checkpoint at a time
            saving = dcp.async_save({"app": state}, checkpoint_id=folder, process_group=background)
    if saving is not None:
        saving.result()


def main() -> None:
    """Meet the other ranks and train."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with FSDP2.")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps in all")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--async-save", action="store_true", help="train on while a checkpoint is written")
    parser.add_argument("--batch", type=int, default=32, help="windows in a batch, all ranks together")
    parser.add_argument("--context", type=int, default=64, help="bytes in a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, device)
    time.sleep(0.1)  # gloo's threads let go of the last step first: see tiny_gpt.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# PyTorch leaves `backward` without types, and does not say that dcp.save, dcp.load and dcp.async_save are public.
# mypy: disable-error-code="no-untyped-call, attr-defined, union-attr"
