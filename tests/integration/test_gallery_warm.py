"""Do the example jobs end with the same weights, bit for bit, whether their ranks are forks or new interpreters?"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.client import job_checkpoints
from orchestrator.client.job import Job
from tests.integration.test_gallery import RUN_S_MAX, TRAININGS, Training, submit
from tests.support.packages import need

need("torch")

EQUAL = (
    Training(
        "tiny_gpt.yaml",
        r"step-\d{6}\.pt",
        "",
        overrides=("entrypoint=tiny_gpt.py --steps 60 --checkpoint-every 20",),
    ),
    *TRAININGS,
)


@pytest.mark.soak
@pytest.mark.parametrize("example", EQUAL, ids=lambda one: one.title)
def test_forked_training_matches_weights_of_new_interpreters(example: Training, tmp_path: Path) -> None:
    """A training with forked ranks ends with the same weights as one with new interpreters."""
    need(example.needs)
    warm, fresh = (submit(example.file, tmp_path, *example.overrides, f"start={start}") for start in ("auto", "fresh"))
    for job, start in ((warm, "forks of"), (fresh, "new interpreters")):
        status = job.wait(RUN_S_MAX)
        assert (status["state"], status["restarts"]) == ("SUCCEEDED", 0), status["reason"]
        assert all(how.startswith(start) for how in job.why()["attempts"][0]["starts"])
    ours, theirs = weights(warm), weights(fresh)
    assert ours and ours.keys() == theirs.keys()
    assert [name for name in ours if not is_same(ours[name], theirs[name])] == []


def weights(job: Job) -> dict[str, object]:
    """Return what each file of the last checkpoint holds: tensors where torch reads it, else bytes."""
    whole = [one for one in job_checkpoints.list_checkpoints(job.folder, job.plan(), verify=False) if one["complete"]]
    last = Path(whole[-1]["path"])
    files = [last] if last.is_file() else sorted(path for path in last.rglob("*") if path.is_file())
    return {str(path.relative_to(last)): contents(path) for path in files if path.name != ".metadata"}


def contents(path: Path) -> object:
    if path.suffix not in (".pt", ".ckpt", ".bin", ".pth"):
        return path.read_bytes()
    import torch  # it takes seconds, and most runs leave these tests out

    return torch.load(path, weights_only=False, map_location="cpu")


def is_same(one: object, other: object) -> bool:
    """Tell whether two values hold bitwise the same tensors; other leaves, such as times and paths, may differ."""
    import torch

    match one, other:
        case torch.Tensor(), torch.Tensor():
            return bool(torch.equal(one, other))
        case dict(), dict():
            return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
        case ((list() | tuple()), (list() | tuple())):
            return len(one) == len(other) and all(map(is_same, one, other))
        case bytes(), bytes():
            return one == other
        case _:
            return type(one) is type(other)
