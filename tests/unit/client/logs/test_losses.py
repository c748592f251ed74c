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
        ("", None),
    ],
)  # fmt: skip
def test_the_losses_of_a_log(tmp_path: Path, log: str, losses: tuple[str, str] | None) -> None:
    path = tmp_path / "rank.log"
    assert logged.of_log(path) is None
    path.write_text(log)
    assert logged.of_log(path) == losses
