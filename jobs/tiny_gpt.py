"""Train a small byte-level GPT with plain PyTorch DDP, on the source code of Python's own standard library.

Needs only torch: the text is on every machine that has Python, and a byte is a token. It runs on CPUs (gloo)
or GPUs (nccl), and survives being killed at any moment: started again with a checkpoint, it ends with the very same
weights, on CPUs bit for bit, as a run that was never stopped. Three rules ensure that:

1. The data of a step is a function of (seed, step, rank); so the step number alone is the position in the data.
2. A checkpoint appears whole or not at all, and holds everything that the next step depends on.
3. Nothing else is kept between two steps, not even by DDP (see `rehearse`).

Two variables connect it to orch: ORCH_CHECKPOINT_DIR, where to save (default: ./checkpoints), and
ORCH_RESUME_FROM, the checkpoint to resume from (unset or empty: start from step 0).
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import socket
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 256  # every byte is a token
TEXT_BYTES_MAX = 4_000_000
LOG_EVERY_STEPS = 10
VALIDATE_EVERY_STEPS = 100
VALIDATION_WINDOWS = 256
WARMUP_STEPS = 40
SAMPLE_BYTES = 300


# --- the data -----------------------------------------------------------------------------------------------------


def read_text() -> tuple[Tensor, Tensor]:
    """Return the training and the validation text as bytes; every tenth file is kept for validation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    train, validation = bytearray(), bytearray()
    for number, file in enumerate(files):
        if len(train) < TEXT_BYTES_MAX:
            (validation if number % 10 == 0 else train).extend(file.read_bytes())
    if not validation:
        raise SystemExit("this Python has no source code in its standard library to train on")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def windows(text: Tensor, count: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `count` random windows of `text` and, for each byte of them, the byte that follows."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    window = text[starts + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


def batch_of(text: Tensor, step: int, rank: int, world_size: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return this rank's share of the batch of `step`: all ranks draw the same windows, each takes its own."""
    inputs, targets = windows(text, args.batch, args.context, seed=args.seed * 1_000_003 + step)
    return inputs[rank::world_size], targets[rank::world_size]


# --- the model ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One transformer layer: attention to earlier positions, then a feed-forward block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        thought: Tensor = self.mlp(self.norm_mlp(x))
        return x + thought


class TinyGPT(nn.Module):
    """A GPT over bytes: (batch, length) byte values in, (batch, length, 256) logits of the next byte out."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.byte_embedding = nn.Embedding(VOCABULARY, width)
        self.place_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads=max(1, width // 32)) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.byte_embedding(tokens) + self.place_embedding(places))
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, device: torch.device) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    logits = model(inputs.to(device))
    return F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())


@torch.no_grad()
def validation_loss(model: TinyGPT, text: Tensor, device: torch.device) -> float:
    """Return the loss on the same windows of unseen files each time, in nats per byte; the ranks share the work."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = windows(text, VALIDATION_WINDOWS, model.context, seed=0)
    loss = loss_of(model, inputs[rank::world_size], targets[rank::world_size], device)
    dist.all_reduce(loss)
    return loss.item() / world_size


@torch.no_grad()
def sample(model: TinyGPT, prompt: str, device: torch.device) -> str:
    """Return `prompt` and the text with which the model continues it."""
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor(list(prompt.encode()))
    for _ in range(SAMPLE_BYTES):
        logits = model(text[None, -model.context :].to(device))[0, -1].cpu()
        following = torch.multinomial(F.softmax(logits / 0.7, dim=-1), 1, generator=generator)
        text = torch.cat([text, following])
    return bytes(text.tolist()).decode("utf-8", "replace")


# --- the checkpoint -----------------------------------------------------------------------------------------------


def save(state: object, path: Path) -> None:
    """Write `state` to `path` so that `path` is never half a file: under another name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> int:
    """Load the checkpoint at `path`, if there is one, and return the number of steps already done."""
    if not path:
        return 0
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


# --- the training -------------------------------------------------------------------------------------------------


def rehearse(model: DistributedDataParallel, context: int, device: torch.device) -> None:
    """Run one forward and one backward pass without a step, so that DDP has settled before the first real step.

    DDP sums gradients in buckets, and arranges these again after its first backward pass. The last bit of a sum over
    the ranks depends on the place in a bucket, so without a rehearsal the first step after a restart would differ from
    the same step of a run that was never stopped.
    """
    tokens = torch.zeros(1, context, dtype=torch.long)
    loss_of(model, tokens, tokens, device).backward()
    model.zero_grad()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the rate of `step`: a short climb, then half a cosine down to a tenth."""
    climb = min(1.0, (step + 1) / WARMUP_STEPS)
    fall = 0.55 + 0.45 * math.cos(math.pi * step / args.steps)
    return float(args.learning_rate * climb * fall)


def train(args: argparse.Namespace, checkpoints: Path, resume_from: str, device: torch.device) -> TinyGPT:
    """Run the remaining steps and return the trained model."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text, unseen = read_text()
    torch.manual_seed(args.seed)
    model = TinyGPT(args.width, args.layers, args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    first_step = resume(model, optimizer, resume_from)
    parallel = DistributedDataParallel(model)
    rehearse(parallel, args.context, device)
    if rank == 0:
        source = f"resumed from {resume_from}" if resume_from else "from the start"
        print(f"{len(text):,} bytes to learn from, {len(unseen):,} unseen; {source}", flush=True)

    for step in range(first_step, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        inputs, targets = batch_of(text, step, rank, world_size, args)
        loss = loss_of(parallel, inputs, targets, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        done = step + 1
        if done % LOG_EVERY_STEPS == 0 and rank == 0:
            print(f"step {done} loss {loss.item():.4f}", flush=True)
        if done % VALIDATE_EVERY_STEPS == 0 or done == args.steps:
            unseen_loss = validation_loss(model, unseen, device)
            if rank == 0:
                print(f"step {done} validation loss {unseen_loss:.4f} nats per byte", flush=True)
        if done % args.checkpoint_every == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            save(state, checkpoints / f"step-{done:06d}.pt")
    return model


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's standard library.")
    parser.add_argument("--steps", type=int, default=700, help="optimizer steps in all")
    parser.add_argument("--batch", type=int, default=64, help="windows in a batch, all ranks together")
    parser.add_argument("--context", type=int, default=64, help="bytes in a window")
    parser.add_argument("--width", type=int, default=96, help="width of the model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--out", type=Path, help="the final weights (default: final.pt next to the checkpoints)")
    return parser.parse_args()


def main() -> None:
    """Meet the other ranks, train, and let rank 0 save and show the result."""
    args = arguments()
    checkpoints = Path(os.environ.get("ORCH_CHECKPOINT_DIR") or "checkpoints")
    resume_from = os.environ.get("ORCH_RESUME_FROM", "")

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size} on {socket.gethostname()}, {device}, pid {os.getpid()}", flush=True)
    if args.batch % world_size:
        raise SystemExit(f"--batch {args.batch} cannot be shared evenly by {world_size} ranks")

    model = train(args, checkpoints, resume_from, device)
    if rank == 0:
        final = args.out or checkpoints / "final.pt"
        save(model.state_dict(), final)
        print(sample(model, "def ", device))
        print(f"final weights sha256 {hashlib.sha256(final.read_bytes()).hexdigest()}", flush=True)
    # Not out of the door right after a sum over the ranks: a gloo thread may still be letting go of its tensors, and
    # when Python ends under it, it aborts the whole process (pytorch/pytorch#179291). Idle, this rank lets it finish.
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# PyTorch leaves `backward` without types.
# mypy: allow-untyped-calls
