"""Is what scripts save in their working folder seen, and nothing else taken for it?"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from orchestrator.agent.outputs import saved_outside
from orchestrator.agent.outputs.saved_outside import SavedOutside

BEGAN_NS = 1_000_000_000_000


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "job" / "code"
    folder.mkdir(parents=True)
    return folder


def save(code: Path, *names: str, at_s: float = 1.0) -> None:
    """Write files so long after the beginning of the attempt."""
    for name in names:
        path = code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
        at_ns = BEGAN_NS + int(at_s * 1e9)
        os.utime(path, ns=(at_ns, at_ns))


def seen(code: Path, *known: Path, steps: int = 0) -> dict[str, str]:
    """Return what a first walk finds: the `checkpoint.path` to add, by path."""
    watch = SavedOutside(code)
    watch.begin(BEGAN_NS)
    found = watch.walk(known, lambda _: steps, time.monotonic)
    return {file.path: file.pattern for file, _ in found}


@pytest.mark.parametrize(
    ("saved", "path", "pattern"),
    [
        ("snapshot.pt", "snapshot.pt", "snapshot.pt"),
        ("out/ckpt.pt", "out/ckpt.pt", "out/ckpt.pt"),
        ("step-100.pt", "step-100.pt", "step-*.pt"),
        ("model-1.pt", "model-1.pt", "model-*.pt"),
        ("gpt2.pt", "gpt2.pt", "gpt2.pt"),
        ("rank-0.pt", "rank-0.pt", "rank-0.pt"),
        ("gpt2/checkpoint-500/optimizer.pt", "gpt2/checkpoint-500", "gpt2/checkpoint-*"),
        ("dcp/.metadata", "dcp", "dcp"),
        (
            "lightning_logs/version_0/checkpoints/epoch=0-step=10.ckpt",
            "lightning_logs/version_0/checkpoints/epoch=0-step=10.ckpt",
            "lightning_logs/version_*/checkpoints/epoch=*-step=*.ckpt",
        ),
        ("a[1]/last.ckpt", "a[1]/last.ckpt", "a[[]*]/last.ckpt"),
    ],
)
def test_what_looks_like_a_checkpoint_is_seen_with_the_path_that_finds_it(
    code: Path, saved: str, path: str, pattern: str
) -> None:
    save(code, saved)
    assert seen(code, steps=1) == {f"code/{path}": f"{{job_dir}}/code/{pattern}"}
    assert code / path in code.glob(pattern)


@pytest.mark.parametrize(
    "name", ["data/processed.pt", "vocab.pkl", "out/model.safetensors", ".cache/ckpt.pt", "ckpt.pt.tmp", "log.txt"]
)  # fmt: skip
def test_other_files_are_no_checkpoints(code: Path, name: str) -> None:
    save(code, name)
    assert seen(code) == {}


def test_any_name_counts_once_the_ranks_make_steps(code: Path) -> None:
    save(code, "model.pt")
    assert seen(code, steps=3).keys() == {"code/model.pt"}
    save(code, "out/checkpoint-5/optimizer.pt")
    assert seen(code, steps=3).keys() == {"code/out/checkpoint-5"}, "a better one is there"


def test_files_of_before_and_those_of_the_jobs_own_path_are_left_out(code: Path) -> None:
    save(code, "pretrained/ckpt.pt", at_s=-1.0)
    save(code, "own/ckpt.pt")
    (code / "linked").symlink_to(code / "own")
    assert seen(code, code / "linked" / "ckpt.pt") == {}


def test_of_a_series_the_last_one_is_reported_and_again_only_after_a_while(code: Path) -> None:
    ticks = itertools.count(0.0, 0.001)
    clock_s = [0.0]
    watch = SavedOutside(code)
    watch.begin(BEGAN_NS)

    def walk(*, is_last: bool = False) -> list[str]:
        found = watch.walk((), lambda _: 0, lambda: clock_s[0] + next(ticks), is_last=is_last)
        return [file.path for file, _ in found]

    save(code, "step-1.pt", at_s=1.0)
    save(code, "step-2.pt", at_s=2.0)
    assert walk() == ["code/step-2.pt"]
    save(code, "step-3.pt", at_s=3.0)
    assert walk() == []
    assert walk(is_last=True) == ["code/step-3.pt"]
    save(code, "step-4.pt", at_s=4.0)
    clock_s[0] += saved_outside.REPORT_S + 1
    assert walk() == ["code/step-4.pt"]
    assert walk() == []
    assert not watch.is_due(clock_s[0])
    assert watch.is_due(clock_s[0] + saved_outside.WALK_S + 1)


def test_a_walk_reads_few_entries(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_outside, "ENTRIES_MAX", 10)
    monkeypatch.setattr(saved_outside, "FOLDER_ENTRIES_MAX", 5)
    save(code, *(f"images/{number}.jpg" for number in range(50)), "out/snapshot.pt")
    os.utime(code / "images", (1, 1))  # it is older
    assert seen(code).keys() == {"code/out/snapshot.pt"}
