"""Named nights break no oracle, and read as they did when a person last reviewed them. `ORCH_GOLDEN=1` writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sim import accounts
from tests.support.sim.named import NAMED
from tests.support.sim.night import random_night
from tests.support.sim.tale import tale
from tests.support.sim.world import World

FOLDER = Path(__file__).parent / "transcripts"
ROOT = Path(__file__).parents[2]
HASH_SEEDS = ("0", "1", "4242")
_NIGHTS = "from tests.sim.test_transcripts import tell; tell(range(40, 60))"


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_named_night_reads_as_reviewed(name: str) -> None:
    world = World(NAMED[name])
    world.play()
    accounts.check(world)
    told = "\n".join(tale(world)) + "\n"
    golden = FOLDER / f"{name}.txt"
    if "ORCH_GOLDEN" in os.environ:
        golden.write_text(told)
    assert golden.read_text() == told, f"{golden.name} differs; review it: ORCH_GOLDEN=1 writes it anew"


def test_no_transcript_is_left_over() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == sorted(NAMED)


def tell(seeds: range) -> None:
    """Print the nights of some seeds; run in a fresh interpreter for each hash seed."""
    for seed in seeds:
        world = World(random_night(seed))
        world.play()
        print("\n".join([f"night {seed}", *tale(world), *world.journal.lines]))


@pytest.mark.slow
def test_night_is_the_same_under_every_hash_seed() -> None:
    told = {
        subprocess.run(
            [sys.executable, "-c", _NIGHTS], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, check=True, timeout=60.0,
        ).stdout
        for seed in HASH_SEEDS
    }  # fmt: skip
    assert len(told) == 1 and len(told.pop()) > 10_000
