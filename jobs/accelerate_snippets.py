"""Tell from a snippet of source code which package of the standard library it is from, with Hugging Face Accelerate.

The usual Accelerate training script, as its own examples have it: `prepare`, `accumulate`, `backward`, clipping when
gradients are in sync, a tracker, a batch size that shrinks when memory is short, a trigger by which one rank stops all, a
folder of state every few steps, and `--resume_from_checkpoint` to go on from one. It knows nothing of orch;
accelerate.yaml connects the two. The texts are on every machine that has Python.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    find_executable_batch_size,
    set_seed,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

PACKAGES = ("asyncio", "ctypes", "email", "http", "importlib", "multiprocessing", "unittest", "xml")
SNIPPET_BYTES = 96
SNIPPETS_A_PACKAGE = 2048
LOG_EVERY_STEPS = 10

logger = get_logger(__name__)


def read_snippets(first: int, every: int) -> TensorDataset:
    """Return snippets, as bytes, with the number of their package, from every `every`-th file on from `first`."""
    generator = torch.Generator().manual_seed(first)
    stdlib = Path(sysconfig.get_path("stdlib"))
    snippets, labels = [], []
    for label, package in enumerate(PACKAGES):
        files = sorted((stdlib / package).rglob("*.py"))[first::every]
        text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        starts = torch.randint(len(text) - SNIPPET_BYTES, (SNIPPETS_A_PACKAGE, 1), generator=generator)
        snippets.append(text[starts + torch.arange(SNIPPET_BYTES)])
        labels.append(torch.full((SNIPPETS_A_PACKAGE,), label))
    return TensorDataset(torch.cat(snippets), torch.cat(labels))


class SnippetClassifier(nn.Module):
    """A convolution over the bytes, its strongest answers, and a linear layer: (batch, bytes) in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.convolution = nn.Conv1d(32, 128, kernel_size=7)
        self.head = nn.Linear(128, len(PACKAGES))

    def forward(self, snippets: Tensor) -> Tensor:
        features = F.relu(self.convolution(self.embedding(snippets.long()).transpose(1, 2)))
        logits: Tensor = self.head(features.amax(dim=-1))
        return logits


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Return the share of unseen snippets whose package is guessed right."""
    model.eval()
    right = []
    for snippets, labels in loader:
        guesses = model(snippets).argmax(dim=-1)
        right.append(accelerator.gather_for_metrics(guesses == labels))
    return torch.cat(right).float().mean().item()


def train(args: argparse.Namespace, accelerator: Accelerator, batch_size: int) -> nn.Module:
    """Train up to `max_train_steps`, with a checkpoint every few of them; return the model."""
    set_seed(args.seed)
    train_loader = DataLoader(read_snippets(0, every=2), batch_size=batch_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(read_snippets(1, every=2), batch_size=batch_size)
    model: nn.Module = SnippetClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=args.max_train_steps * accelerator.num_processes
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    steps_an_epoch = math.ceil(len(train_loader) / accelerator.gradient_accumulation_steps)
    done = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        done = int(Path(args.resume_from_checkpoint).name.removeprefix("step_"))
        accelerator.print(f"resumed from {args.resume_from_checkpoint} at step {done}")

    progress = tqdm(total=args.max_train_steps, initial=done, disable=not accelerator.is_main_process)
    while done < args.max_train_steps:
        model.train()
        epoch, seen_steps = divmod(done, steps_an_epoch)
        train_loader.set_epoch(epoch)
        seen_batches = seen_steps * accelerator.gradient_accumulation_steps
        for snippets, labels in accelerator.skip_first_batches(train_loader, seen_batches):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(snippets), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not loss.isfinite():
                accelerator.set_trigger()  # this rank wants all ranks to stop
            if not accelerator.sync_gradients:
                continue
            done += 1
            progress.update(1)
            if accelerator.check_trigger():
                raise SystemExit(f"a rank's loss at step {done} is not a number")
            if done % LOG_EVERY_STEPS == 0:
                mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()
                accelerator.print(f"step {done} loss {mean_loss:.4f}", flush=True)
                accelerator.log({"loss": mean_loss, "lr": scheduler.get_last_lr()[0]}, step=done)
            if done % args.checkpointing_steps == 0:
                accelerator.save_state(Path(args.output_dir) / f"step_{done}")
            if done == args.max_train_steps:
                break
    progress.close()

    accuracy = evaluate(accelerator, model, eval_loader)
    accelerator.print(f"step {done} accuracy {accuracy:.3f}")
    accelerator.log({"accuracy": accuracy}, step=done)
    return model


def main() -> None:
    """Read the command line, train, and save the final weights from the main process."""
    parser = argparse.ArgumentParser(description="Classify source code with Hugging Face Accelerate.")
    parser.add_argument("--max_train_steps", type=int, default=120)
    parser.add_argument("--checkpointing_steps", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=32, help="snippets a rank and forward pass")
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report_to", default="tensorboard", help="a tracker that is installed, or all")
    parser.add_argument("--output_dir", default=os.environ.get("ORCH_CHECKPOINT_DIR", "checkpoints"))
    parser.add_argument("--resume_from_checkpoint", help="a step_N folder of an earlier run")
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    accelerator = Accelerator(
        # Accelerate must be told that there is no GPU, or each rank trains a model of its own.
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        log_with=args.report_to,
        project_config=ProjectConfiguration(project_dir=args.output_dir),
        # Without it a resumed epoch is shuffled differently, and `skip_first_batches` skips the wrong batches.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    logger.info(
        f"rank {accelerator.process_index} of {accelerator.num_processes}, {accelerator.device}",
        main_process_only=False,
    )
    accelerator.init_trackers("snippets", config={"learning_rate": args.learning_rate, "seed": args.seed})

    @find_executable_batch_size(starting_batch_size=args.batch_size)
    def train_within_memory(batch_size: int) -> nn.Module:
        accelerator.free_memory()
        return train(args, accelerator, batch_size)

    model = train_within_memory()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        final = Path(args.output_dir) / "final.pt"
        accelerator.save(accelerator.unwrap_model(model).state_dict(), final)
        print(f"final weights sha256 {hashlib.sha256(final.read_bytes()).hexdigest()}", flush=True)
    time.sleep(0.1)  # gloo's threads let go of the last step first: see tiny_gpt.py
    accelerator.end_training()


if __name__ == "__main__":
    main()

# Accelerate, tqdm and PyTorch's `backward` come without types.
# mypy: disable-error-code="import-untyped, no-untyped-call, untyped-decorator"
