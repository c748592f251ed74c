"""Is a secret hidden also where a text that bears it was cut by who does not know it?"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from orchestrator.agent.ranks.hook import errors
from orchestrator.client.logs import job_mask
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.secret_mask import CUT_CHARS_MIN, CUT_MARK, HIDDEN, Mask

SECRET = "qZ7-Wv9_Kx2+Jm4"
FILL = "." * CUT_CHARS_MIN
MASK = Mask([SECRET, "Jm4-other-secret"])


@pytest.mark.parametrize("chars", range(4, len(SECRET)))
def test_partial_secret_at_end_is_hidden(chars: int) -> None:
    """The part of a secret at an end of a long text is hidden."""
    before = MASK.apply(FILL + SECRET[:chars])
    assert before.endswith("." + HIDDEN) and set(before) == {".", "*"}
    behind = MASK.apply(SECRET[-chars:] + FILL)
    assert behind.startswith(HIDDEN + ".") and set(behind) == {".", "*"}
    middle = f"{FILL}{SECRET[:chars]}{CUT_MARK}{SECRET[-chars:]}{FILL}"
    assert MASK.apply(middle) == before + CUT_MARK + behind


def test_overlapping_secrets_are_hidden_completely() -> None:
    """A secret that ends as another begins is hidden completely."""
    shown = [
        Mask([SECRET, SECRET[-6:] + "-and-more"]).apply(FILL + SECRET),
        Mask([SECRET, "more-and-" + SECRET[:6]]).apply(SECRET + FILL),
    ]
    assert [set(text) for text in shown] == [{".", "*"}] * 2


@pytest.mark.parametrize("seed", range(50))
def test_cut_shows_no_part_of_secret(seed: int) -> None:
    """No part of a secret is shown, wherever a text was cut."""
    dice = random.Random(seed)
    for _ in range(50):
        secrets = ["".join(dice.choices("abc", k=dice.randrange(8, 20))) for _ in range(3)]
        before, behind = ("".join(dice.choices([*secrets, ".", "--"], k=4)) for _ in range(2))
        begin, end = dice.randrange(len(before)), dice.randrange(len(behind))
        shown = Mask(secrets).apply(before[begin:] + FILL + behind[:end])
        assert not any(secret in shown for secret in secrets)
        for at in range(4, 20):
            assert not any(secret.endswith(shown[:at]) or secret.startswith(shown[-at:]) for secret in secrets)


def test_short_text_is_whole_without_partial_secrets() -> None:
    """A short text is whole, and a word of it is no part of a secret."""
    assert MASK.apply(f"by {SECRET[:6]}") == f"by {SECRET[:6]}"


def test_long_text_without_secret_is_unchanged() -> None:
    assert MASK.apply(FILL + "q") == FILL + "q"
    assert Mask(()).apply(FILL + SECRET) == FILL + SECRET


@pytest.mark.parametrize("seed", range(50))
def test_masked_parts_are_found_in_many_lines(seed: int) -> None:
    """Parts that a mask may change are found in many lines at once."""
    dice = random.Random(seed)
    for _ in range(200):
        fill = [FILL, FILL[:-1], FILL[: dice.randrange(CUT_CHARS_MIN)], "", SECRET[: dice.randrange(16)]]
        parts = [*fill, SECRET[dice.randrange(16) :], *dice.choice(([], [SECRET]))]
        lines = ["".join(dice.choices(parts, k=dice.randrange(4))) for _ in range(dice.randrange(4))]
        if any(MASK.apply(line) != line for line in lines):
            assert MASK.may_change("\n".join(lines))
    assert not MASK.may_change(f"{FILL}\n{FILL}\n{SECRET[:6]}\n")


def test_hook_marks_truncation_as_mask_expects() -> None:
    assert CUT_MARK in errors.cut_middle("x" * 30_000)


@pytest.mark.parametrize("at", range(20, 20 + len(SECRET)))
def test_cut_is_placed_beside_a_secret(at: int) -> None:
    """The place to cut is beside a secret."""
    raw = ("." * 20 + SECRET + "." * 20).encode()
    assert MASK.find_safe_cut(raw, at) == (20 if at < 20 + len(SECRET) else at)


def test_unreadable_secrets_are_not_shown(tmp_path: Path) -> None:
    """Secrets that cannot be read are no reason to show them."""
    job = JobDir(tmp_path)
    assert job_mask.load_mask(job).apply("x") == "x"  # another user's
    (job.secrets / "secrets.json").mkdir(parents=True)
    with pytest.raises(ValueError, match="cannot be read"):
        job_mask.load_mask(job)
