"""Train the GPT of tiny_gpt.py with DeepSpeed ZeRO: optimizer state and gradients are sharded over the ranks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from tiny_gpt import TinyGPT, batch_of, read_text

LOG_EVERY_STEPS = 10


def main() -> None:
    """Train, with a checkpoint every few steps, from the newest one if there is one."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with DeepSpeed.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--batch", type=int, default=32, help="windows in a batch, all ranks together")
    parser.add_argument("--context", type=int, default=64, help="bytes in a window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    checkpoints = os.environ.get("ORCH_CHECKPOINT_DIR") or "checkpoints"

    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = TinyGPT(width=64, layers=2, context=args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
    rank, world_size = engine.global_rank, engine.world_size

    # An empty folder has nothing to load; otherwise its file `latest` names the newest checkpoint.
    if resume_from := os.environ.get("ORCH_RESUME_FROM"):
        engine.load_checkpoint(checkpoints, tag=Path(resume_from).name)
        if rank == 0:
            print(f"resumed from {resume_from} at step {engine.global_steps}", flush=True)

    text, _ = read_text()
    while engine.global_steps < args.steps:
        inputs, targets = batch_of(text, engine.global_steps, rank, world_size, args)
        logits = engine(inputs.to(engine.device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(engine.device).flatten())
        engine.backward(loss)
        engine.step()
        if engine.global_steps % LOG_EVERY_STEPS == 0 and rank == 0:
            print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)
        if engine.global_steps % args.checkpoint_every == 0:
            engine.save_checkpoint(checkpoints)  # in global_step20, global_step40, …


if __name__ == "__main__":
    main()

# DeepSpeed comes without types.
# mypy: disable-error-code="import-untyped, no-untyped-call"
