"""Train a recurrent network to predict the next byte of Python source, with Lightning.

The usual Lightning script: a LightningModule, a Trainer over two nodes, a ModelCheckpoint every
few steps, and `ckpt_path` to go on from one. Lightning finds the ranks by itself, in the variables that torchrun
would set too. The text is on every machine that has Python.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # every byte is a token
TEXT_BYTES_MAX = 1_000_000
WINDOW_BYTES = 48
EPOCH_STEPS = 20
LOG_EVERY_STEPS = 10


class Windows(Dataset[Tensor]):
    """The text of the standard library, cut into windows of WINDOW_BYTES and the byte that follows."""

    def __init__(self) -> None:
        text = bytearray()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            if len(text) < TEXT_BYTES_MAX:
                text.extend(file.read_bytes())
        self.text = torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // WINDOW_BYTES

    def __getitem__(self, number: int) -> Tensor:
        start = number * WINDOW_BYTES
        return self.text[start : start + WINDOW_BYTES + 1].long()


class NextByte(L.LightningModule):
    """A GRU that reads bytes and predicts the next one."""

    def __init__(self, width: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.memory = nn.GRU(width, 2 * width, batch_first=True)
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next byte: (batch, length) byte values in, (batch, length, 256) out."""
        remembered, _ = self.memory(self.embedding(text))
        logits: Tensor = self.head(remembered)
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of one batch of windows, in nats per byte."""
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        step = self.global_step + 1
        if step % LOG_EVERY_STEPS == 0:
            self.print(f"step {step} loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    """Train, and save the final weights from rank 0."""
    parser = argparse.ArgumentParser(description="Foresee the next byte of Python source with Lightning.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32, help="windows a rank")
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="ddp", help="or, on GPUs only, fsdp")
    args = parser.parse_args()
    checkpoints = Path(os.environ.get("ORCH_CHECKPOINT_DIR") or "checkpoints")

    # The text is in memory already, worker processes would only cost; the other one is between Lightning and torch.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    L.seed_everything(args.seed, verbose=False)
    trainer = L.Trainer(
        strategy=args.strategy,
        num_nodes=2,
        devices=2,
        accelerator="auto",
        max_steps=args.steps,
        # Short epochs that end at a checkpoint: Lightning resumes exactly between two epochs, but within one it
        # starts over with the epoch's first batches.
        limit_train_batches=EPOCH_STEPS,
        callbacks=[
            ModelCheckpoint(
                dirpath=checkpoints,
                filename="step-{step:06d}",
                auto_insert_metric_name=False,
                every_n_train_steps=EPOCH_STEPS,
                save_top_k=-1,
                enable_version_counter=False,
            )
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = NextByte(args.width, args.learning_rate)
    loader = DataLoader(Windows(), batch_size=args.batch, shuffle=True)
    trainer.fit(model, loader, ckpt_path=os.environ.get("ORCH_RESUME_FROM") or None)

    if trainer.is_global_zero:
        final = checkpoints / "final.pt"
        torch.save(model.state_dict(), final)
        print(f"step {trainer.global_step} loss {trainer.callback_metrics['loss']:.4f}")
        print(f"final weights sha256 {hashlib.sha256(final.read_bytes()).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
