"""Train the GPT of tiny_gpt.py with whatever the Accelerate config file says: FSDP, DeepSpeed, bf16, or nothing of it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from tiny_gpt import TinyGPT, read_text, windows
from torch.utils.data import DataLoader, TensorDataset

LOG_EVERY_STEPS = 10


def main() -> None:
    """Train, with a checkpoint every few steps, from the one that is given."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with Hugging Face Accelerate.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--checkpoint_every", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=8, help="windows a rank")
    parser.add_argument("--output_dir", default=os.environ.get("ORCH_CHECKPOINT_DIR", "checkpoints"))
    parser.add_argument("--resume_from_checkpoint", help="a step_N folder of an earlier run")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    accelerator.print(accelerator.state)
    set_seed(0)
    text, _ = read_text()
    data = TensorDataset(*windows(text, args.steps * args.batch_size * accelerator.num_processes, 64, seed=0))
    model = TinyGPT(width=64, layers=2, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, args.batch_size))

    done = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        done = int(Path(args.resume_from_checkpoint).name.removeprefix("step_"))
        accelerator.print(f"resumed from {args.resume_from_checkpoint} at step {done}")
    for inputs, targets in accelerator.skip_first_batches(loader, done):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done % LOG_EVERY_STEPS == 0:
            accelerator.print(f"step {done} loss {loss.item():.4f}", flush=True)
        if done % args.checkpoint_every == 0:
            accelerator.save_state(Path(args.output_dir) / f"step_{done}")
    time.sleep(0.1)  # gloo's threads let go of the last step first: see tiny_gpt.py
    accelerator.end_training()


if __name__ == "__main__":
    main()

# Accelerate comes without types.
# mypy: disable-error-code="import-untyped, no-untyped-call"
