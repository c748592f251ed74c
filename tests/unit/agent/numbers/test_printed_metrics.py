"""What a rank's log tells: the last progress bar, loss and learning rate."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from orchestrator.agent.numbers.printed_metrics import (
    TAIL_BYTES,
    PrintedMetrics,
    last_bar,
    last_learning_rate,
    last_losses,
)
from orchestrator.core.status_types import ReportedNumber


@pytest.mark.parametrize(
    ("tail", "shown"),
    [
        (b"loading\n", ""),
        (b"\r  3%|\xe2\x96\x8d     | 37/1200 [00:03<01:55, 10.1it/s]", "37/1200 (tqdm)"),
        (b"\rGenerating:   0%|     | 0/7 [00:00<?, ?it/s]", "0/7 (tqdm)"),
        (b"\r 1/9 [00:01<00:09, 1it/s]\r 2/9 [00:02<00:07, 1it/s]\nsaved 3/9 files\n", "2/9 (tqdm)"),
        (b"\r100%|##| 1200/1200 [1:02:03<00:00, 1it/s]\n", "1200/1200 (tqdm)"),
        (b"\r41it [00:03, 10.1it/s]", "41 (tqdm)"),
        (b"epoch 3/90 [train] loss 0.1\n2024/05/01 [12:00] started\n", ""),
        (b"model.bin:  3%| | 1.2M/4.6G [00:03<01:55, 10MB/s]", ""),
    ],
)
def test_last_progress_bar_of_log(tail: bytes, shown: str) -> None:
    bar = last_bar(tail)
    assert (bar.text if bar else "") == shown


LIGHTNING = "Epoch 0:  45%|████▌     | 45/100 [00:01<00:01, 30.00it/s, v_num=0, train_loss=0.107]".encode()


@pytest.mark.parametrize(
    ("tail", "loss", "learning_rate"),
    [
        (b"step 3 loss 1.23\n", 1.23, None),
        (b"iter 10: loss=1.5, lr=3e-4, 12 ms\n", 1.5, 3e-4),
        (b"train_loss: 1.2e-3\n", 1.2e-3, None),
        (b"{'loss': 1.23, 'grad_norm': 0.4, 'learning_rate': 5e-05, 'epoch': 0.1}\n", 1.23, 5e-5),
        (b"{'loss': '2.5', 'learning_rate': '5e-05', 'epoch': '0.1'}\n", 2.5, 5e-5),
        (b'{"step": 3, "train/loss": 0.5, "lr": [0.01]}\n', 0.5, 0.01),
        (b" 7%| | 7/100 [00:01<00:10, 9it/s, loss=0.25]\r", 0.25, None),
        (LIGHTNING, 0.107, None),
        (b" iteration 5/ 100 | learning rate: 1.5E-04 | lm loss: 6.543210E+00 | loss scale: 1.0 |\n", 6.54321, 1.5e-4),
        (b"loss: tensor(0.6931, grad_fn=<NllLossBackward0>)\n", 0.6931, None),
        (b"Loss: 0\n", 0.0, None),
        (b"loss is 5\n", None, None),
        (b"val_loss: 0.4\n", None, None),
        (b"train loss 0.3, val loss 0.4\n", 0.3, None),
        (b"Val loss: 0.4\n{'eval_loss': 2.0}\ntest/loss=1.0 [eval] step 3 loss 0.4\n", None, None),
        (b"loss 0.3 aux_loss 0.1 gloss 7.0\n", 0.3, None),
        (b"loss 0.3\n{'train_runtime': 1.2, 'train_loss': 0.9, 'epoch': 1.0}\n", 0.3, None),
        (b"loss 1.2", None, None),  # more digits may follow
        (b"loss 0.3\nloss information\n", 0.3, None),
        (b"loss -inf\n", -math.inf, None),
    ],
)  # fmt: skip
def test_last_loss_and_learning_rate_of_log(tail: bytes, loss: float | None, learning_rate: float | None) -> None:
    assert (next(iter(last_losses(tail)), None), last_learning_rate(tail)) == (loss, learning_rate)


def test_consecutive_non_finite_printed_losses_are_counted(tmp_path: Path) -> None:
    log, counts = tmp_path / "rank.log", []
    numbers = PrintedMetrics(log)
    with log.open("a") as file:
        for loss in ("nan", "0.3", "nan", "step 7", "inf"):
            file.write(f"loss {loss}\n" if " " not in loss else f"{loss}\n")
            file.flush()
            numbers.training()
            counts.append(numbers.nonfinite_losses)
    assert counts == [1, 0, 1, 1, 2]


def test_non_finite_loss_is_reported_as_such(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_bytes(b"loss 0.3\n{'loss': nan, 'learning_rate': 0.0}\n")
    told = PrintedMetrics(log).training()
    assert told.loss is not None
    assert math.isnan(told.loss)
    assert told.learning_rate == ReportedNumber(0)


@pytest.mark.parametrize(
    "line",
    [b"loss" * 3000, b"1" * 9000, b"loss 1." * 1500, b"1/1 [" * 2000, b"loss   :   " * 900, b"lr=[-" * 2000,
     b"_" * 9000 + b"loss 1 ", b"step  " * 1500, b"step 1/1" * 1100, b"eta : " * 1500, b"9" * 18 + b"/" + b"9" * 18 + b" [" + b"9" * 9000, b"loss 1 \r" * 1200],
)  # fmt: skip
def test_hostile_line_is_parsed_fast(line: bytes, tmp_path: Path) -> None:
    """A hostile line takes no time."""
    (tmp_path / "rank.log").write_bytes(line)
    began_s = time.process_time()
    PrintedMetrics(tmp_path / "rank.log").training()
    assert time.process_time() - began_s < 0.2


def test_bar_stays_until_next_and_yields_to_steps(tmp_path: Path) -> None:
    """A bar that was seen stays until the next one and gives way to steps."""
    log = tmp_path / "rank.log"
    printed = PrintedMetrics(log)
    assert printed.progress(0) == ""
    log.write_bytes(b"\r 5/9 [00:01<00:09, 1it/s]")
    assert printed.progress(0) == "5/9 (tqdm)"
    with log.open("ab") as file:
        file.write(b"x" * 2 * TAIL_BYTES)
    assert printed.progress(0) == "5/9 (tqdm)"
    assert printed.progress(1) == ""


def test_bar_of_whole_training_gives_progress(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    printed = PrintedMetrics(log)

    def told(text: str) -> tuple[float | None, float | None, int | None]:
        with log.open("a") as file:
            file.write(text)
        training = printed.training()
        return training.percent, training.eta_s, training.total_steps

    assert told("Loading weights: 50%| | 5/10 [00:01<00:09, 1it/s]\n") == (None, None, None)
    assert told("\r 25%| | 50/200 [00:01<01:01:05, 1it/s]") == (25.0, 3665.0, 200)
    assert told("\n 50%| | 4/8 [00:01<00:09, 1it/s]") == (25.0, 3665.0, 200)  # an evaluation
    assert told("\r 50%| | 100/200 [00:01<?, 1it/s]") == (50.0, None, 200)
    assert told("\r  1%| | 1/200 [00:01<00:05, 1it/s]") == (None, None, None)  # the next epoch


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("step 00150/00300 (50.00%) | loss: 7.6 | eta: 0.4m", (50.0, 24.0, 300)),
        ("Epoch(train) [1][10/300] lr: 1e-3 eta: 0:00:12 loss: 5.2", (None, 12.0, None)),
        ("loss train: 5.54, remaining time: 0:04:39 (of 0:09:00)", (None, 279.0, None)),
        (" iteration      100/     400 | consumed samples: 80", (25.0, None, 400)),
        ("iter: [10/40] eta: 1 day, 2:03:04 time: 0.1", (25.0, 93784.0, 40)),
        ("Epoch [1/5], Step [100/600], Loss: 1.0", (None, None, None)),  # of an epoch
        ("beta: 0.9, theta: 3s, eta: 0.1, step 1/2.5", (None, None, None)),
    ],
)
def test_step_count_and_time_left_are_read(
    line: str, told: tuple[float | None, float | None, int | None], tmp_path: Path
) -> None:
    log = tmp_path / "rank.log"
    log.write_text(f"{line}\n")
    training = PrintedMetrics(log).training()
    assert (training.percent, training.eta_s, training.total_steps) == told
    assert "(tqdm)" not in PrintedMetrics(log).progress(0)
