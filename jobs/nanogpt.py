"""Train a small GPT in the way of nanoGPT: settings are variables of this file, and `--name=value` changes one of them.

There is one checkpoint, `ckpt.pt` in `out_dir`, overwritten in place; `--init_from=resume` goes on from it. Started by
itself the script trains on one device; where RANK is set, it trains with the other ranks.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_gpt import TinyGPT, read_text, windows
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

out_dir = "out"
init_from = "scratch"  # or resume
eval_interval = 20
log_interval = 10
max_iters = 120
gradient_accumulation_steps = 4  # of all ranks together
batch_size = 8
block_size = 64
n_layer = 2
n_embd = 64
learning_rate = 3e-3
grad_clip = 1.0

for argument in sys.argv[1:]:
    name, equals, value = argument.removeprefix("--").partition("=")
    if not equals or name not in globals():
        raise SystemExit(f"{argument}: write --name=value, with the name of a setting in {__file__}")
    globals()[name] = type(globals()[name])(value)

rank, world_size = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", 1))
is_distributed, is_main = rank >= 0, rank <= 0
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)


def batch_of(text: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return a batch of random windows and what follows each of their bytes."""
    inputs, targets = windows(text, batch_size, block_size, seed)
    return inputs.to(device), targets.to(device)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch, in nats per byte."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(micro_steps: int) -> None:
    """Begin or resume, and run the remaining iterations of so many forward and backward passes each."""
    text, unseen = read_text()
    torch.manual_seed(1337)
    model = TinyGPT(n_embd, n_layer, block_size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    iter_num = 0
    if init_from == "resume":
        checkpoint = torch.load(Path(out_dir) / "ckpt.pt", map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num = checkpoint["iter_num"]
        print(f"resuming from {out_dir} at iter {iter_num}", flush=True)
    parallel = DistributedDataParallel(model) if is_distributed else model

    while iter_num < max_iters:
        for micro_step in range(micro_steps):
            if isinstance(parallel, DistributedDataParallel):
                # Gradients are summed over the ranks only in the last of the passes.
                parallel.require_backward_grad_sync = micro_step == micro_steps - 1
            seed = (iter_num * micro_steps + micro_step) * world_size + max(rank, 0)
            loss = loss_of(parallel, batch_of(text, seed)) / micro_steps
            loss.backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1

        if iter_num % log_interval == 0 and is_main:
            print(f"iter {iter_num}: loss {loss.item() * micro_steps:.4f}", flush=True)
        if iter_num % eval_interval == 0 and is_main:
            with torch.no_grad():
                unseen_loss = loss_of(model, batch_of(unseen, seed=0)).item()
            print(f"iter {iter_num}: unseen loss {unseen_loss:.4f}, saving to {out_dir}", flush=True)
            checkpoint = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num,
            }  # fmt: skip
            torch.save(checkpoint, Path(out_dir) / "ckpt.pt")


def main() -> None:
    """Meet the other ranks, if there are any, and train."""
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    if is_distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if gradient_accumulation_steps % world_size:
        raise SystemExit(f"gradient_accumulation_steps must be a multiple of the {world_size} ranks")
    train(gradient_accumulation_steps // world_size)
    if is_distributed:
        time.sleep(0.1)  # gloo's threads let go of the last step first: see tiny_gpt.py
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# PyTorch leaves `backward` without types.
# mypy: allow-untyped-calls
