"""The first and the last training loss in a rank's log, as programs print it."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.client.logs import losses as logged


@pytest.mark.parametrize(
    ("log", "losses"),
    [
        ("step 0: train loss 10.9875, val loss 10.9821\niter 0: loss 10.9863, time 84ms\n", ("10.9875", "10.9863")),
        ("{'loss': 2.31, 'grad_norm': 4.1}\n{'eval_loss': 9.9}\n{'loss': 1.2e-05, 'epoch': 1.0}\n", ("2.31", "1.2e-05")),
        ("\rEpoch 0:  3%| | 2/9 [00:01<00:03, v_num=0, train_loss=0.693]\rEpoch 0: train_loss=nan]", ("0.693", "nan")),
        ("Epoch 1 Loss: 4\nTraining loss = -0.5\n", ("4", "-0.5")),
        ("val loss 1.0\nvalidation loss: 2.0\ntest/loss 3.0\nclosses 4\nloss function: MSE\nno loss\n", None),
        ("Training with focal loss\n  0%| | 0/1000\nUsing MSE loss\n2025-05-01 12:00:01 INFO\nStep  Training Loss\n10    2.3\n", None),
        ("loss1: 0.5 loss: 1,234.5 packet loss 0% loss 3/4 loss 2025-05-01 loss 12:00:01 loss_0: 3 loss 3x", None),
        ("valid_loss: 1 val-loss: 2 [val] loss 3 val_total_loss=4\nTest set: Average loss: 5\nValidation, epoch 1, loss=6", None),
        ("{'eval_wiki_loss': 9.9}\n{'loss': '0.91'}\n{'train_runtime': 9, 'train_loss': 0.01}\n", ("0.91", "0.91")),
        ("\x1b[32mloss: \x1b[1m1.25\x1b[0m lm loss: 1.04E+01 | loss scale: 65536 |", ("1.25", "1.04E+01")),
        ("loss tensor(2.5, grad_fn=<X>)\ntest loss 9, train loss 0.5.", ("2.5", "0.5")),
        ("loss" + 100_000 * " " + "\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_training_losses_of_log_are_read(tmp_path: Path, log: str, losses: tuple[str, str] | None) -> None:
    path = tmp_path / "rank.log"
    assert logged.read_losses(path) is None
    path.write_text(log)
    assert logged.read_losses(path) == losses


def test_last_line_of_long_log_counts_completely(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    cut = "validation " + (logged.TAIL_BYTES - 20) * "."
    path.write_text(f"loss 3\n{cut} loss 9\nloss 2\n")
    assert logged.read_losses(path) == ("3", "2")
