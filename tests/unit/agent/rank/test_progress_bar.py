"""The last progress bar in a log, as tqdm prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.agent.rank.progress_bar import TAIL_BYTES, ProgressBar, last_bar


@pytest.mark.parametrize(
    ("tail", "bar"),
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
def test_the_last_bar_of_a_log(tail: bytes, bar: str) -> None:
    assert last_bar(tail) == bar


def test_a_bar_that_was_seen_stays_until_the_next_and_gives_way_to_steps(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    bar = ProgressBar(log)
    assert bar.text(0) == ""
    log.write_bytes(b"\r 5/9 [00:01<00:09, 1it/s]")
    assert bar.text(0) == "5/9 (tqdm)"
    with log.open("ab") as file:
        file.write(b"x" * 2 * TAIL_BYTES)
    assert bar.text(0) == "5/9 (tqdm)"
    assert bar.text(1) == ""
