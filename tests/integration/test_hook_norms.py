"""Norms of gradients that the hook watches, under real torch: which count as not finite, and that nothing waits for them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from orchestrator.agent.ranks.hook import layout
from tests.integration.test_hook_torch import FSDP2, LIGHTNING
from tests.support.forked import Forge
from tests.support.hooked import Rank, gang, lay_out

STEPS = 6

HEAD = """
import math, sys, torch
torch.manual_seed(1)
torch._dynamo  # is there before the script
def make():
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)
def clip(model, odd=1.0):
    model.zero_grad()
    (model(torch.ones(2, 4)).square().sum() * odd).backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
model, optimizer = make()
odd = {4: math.nan, 5: math.inf}
"""
PLAIN = f"""{HEAD}
for step in range(1, 6 + len(sys.argv)):
    clip(model, odd.get(step, 1.0))
    optimizer.step()
    if len(sys.argv) > 1 and step == 5:
        model, optimizer = make()
        odd = {{}}
"""
BY_NAME = PLAIN.replace("import math", "from torch.nn.utils import clip_grad_norm_\nimport math").replace(
    "torch.nn.utils.clip", "clip"
)
SCRIPT_SKIPS = f"""{HEAD}
for step in range(1, 8):
    if torch.isfinite(clip(model, odd.get(step, 1.0))):
        optimizer.step()
"""
SCALER = f"""{HEAD}
if sys.argv[1:] == ["fused"]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu")
for step in range(1, 7):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).sum() * (math.inf if step > 3 else 1.0)).backward()
    scaler.unscale_(optimizer)
    print(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    scaler.step(optimizer)
    scaler.update()
"""
ONE_OF_TWO_SKIPPED = f"""{HEAD}
other, second = make()
for step in range(1, 7):
    clip(other)
    norm = clip(model, odd.get(step, 1.0))
    if torch.isfinite(norm):
        optimizer.step()
    second.step()
"""
BOTH_OF_TWO_STEP = f"""{HEAD}
other, second = make()
for step in range(1, 6):
    clip(model, odd.get(step, 1.0))
    optimizer.step()
    second.step()
"""
COMPILED = f"""{HEAD}
@torch.compile(backend="eager", fullgraph=True)
def clip_compiled(parameters):
    return torch.nn.utils.clip_grad_norm_(parameters, 1.0)
for _ in range(3):
    (model(torch.ones(2, 4)).sum() * math.nan).backward()
    assert clip_compiled(list(model.parameters())).isnan()
    optimizer.step()
"""


def norms(rank: Rank) -> tuple[int, list[tuple[int, float]]]:
    notes = rank.dir / layout.NOTES_FILE
    assert not notes.exists(), notes.read_text()
    count, known = rank.reader().nonfinite_norms()
    return count, [(step, float(norm)) for step, norm in known]


def run(forge: Forge, folder: Path, text: str, *argv: str) -> tuple[int, list[tuple[int, float]]]:
    rank = lay_out(folder)
    ((code, log),) = forge.run([rank], text, *argv)
    assert code == 0, log.decode()
    return norms(rank)


@pytest.mark.parametrize("text", [PLAIN, BY_NAME], ids=["attribute", "name"])
def test_norms_that_are_not_finite_are_counted(torch_forge: Forge, tmp_path: Path, text: str) -> None:
    count, ((step, norm), (finite_step, finite)) = run(torch_forge, tmp_path, text)
    assert (count, step, finite_step) == (2, 4, 3)  # the last norm is not looked at
    assert math.isnan(norm)
    assert 0 < finite < math.inf


def test_finite_norm_ends_count(torch_forge: Forge, tmp_path: Path) -> None:
    assert run(torch_forge, tmp_path, PLAIN, "again") == (0, [])


@pytest.mark.parametrize(
    "text", [SCRIPT_SKIPS, SCALER, ONE_OF_TWO_SKIPPED], ids=["script", "scaler", "one of two optimizers"]
)
def test_step_skipped_on_purpose_is_none(torch_forge: Forge, tmp_path: Path, text: str) -> None:
    assert run(torch_forge, tmp_path, text) == (0, [])


def test_step_that_fused_optimizer_skips_is_none(torch_forge: Forge, tmp_path: Path) -> None:
    """A GradScaler lets such an optimizer step, and leaves it to that."""
    assert run(torch_forge, tmp_path, SCALER, "fused") == (0, [])


def test_norm_counts_where_all_optimizers_step(torch_forge: Forge, tmp_path: Path) -> None:
    count, ((step, norm), _) = run(torch_forge, tmp_path, BOTH_OF_TWO_STEP)
    assert (count, step) == (1, 4)  # the last norm is not looked at
    assert math.isnan(norm)


def test_compiled_clipping_stays_one_graph(torch_forge: Forge, tmp_path: Path) -> None:
    """Its norm is not looked at."""
    assert run(torch_forge, tmp_path, COMPILED) == (0, [])


FSDP2_CLIPS = FSDP2.replace(
    "    optimizer.step()",
    "    for parameter in model[0].parameters() if _ == 3 and dist.get_rank() else ():\n"
    "        parameter.grad._local_tensor.fill_(float('nan'))\n"
    "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    "    optimizer.step()",
)


def test_part_of_sharded_gradients_shows_norm(torch_forge: Forge, tmp_path: Path) -> None:
    """The one norm of all shards, which FSDP2 would have to sum up, is not asked for."""
    ranks = gang(tmp_path)
    for code, log in torch_forge.run(ranks, FSDP2_CLIPS, str(STEPS)):
        assert code == 0, log.decode()
    (_, one), (_, other) = norms(ranks[0]), norms(ranks[1])
    assert other[0][0] == 4
    assert one[0][0] in (4, 5)


LIGHTNING_CLIPS = LIGHTNING.replace("max_steps=steps", "gradient_clip_val=1.0, max_steps=steps").replace(
    "return self.model(batch).sum()", "return self.model(batch).sum() * (1.0 if number < 3 else float('nan'))"
)


@pytest.mark.soak
def test_lightning_clips_through_watched_function(torch_forge: Forge, tmp_path: Path) -> None:
    ranks = gang(tmp_path)
    for code, log in torch_forge.run(ranks, LIGHTNING_CLIPS, str(STEPS)):
        assert code == 0, log.decode()
    for rank in ranks:
        count, known = norms(rank)
        assert (count, known[0][0]) == (2, 4)
