"""The facts that an agent gathers before a start: by a process of its own, once, and never waited for too long."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from orchestrator.agent.checks import launch
from orchestrator.agent.checks.launch import Gathering
from orchestrator.core.host_facts import GpuFacts, GpuUser
from orchestrator.core.wire.bootstrap import GatherFacts
from orchestrator.submission import bundle

pytestmark = pytest.mark.slow  # each starts a process


def question(folder: Path) -> GatherFacts:
    return GatherFacts(sys.executable, {}, (), (), (str(folder),), (), counts_gpus=False, imports_torch=False)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "orch.pyz"
    path.write_bytes(bundle.build())
    return path


def reaped(gathering: Gathering) -> None:
    pid, _ = os.waitpid(gathering.pid, 0)
    assert gathering.ended(pid)
    assert not gathering.ended(pid)


def test_facts_are_gathered_once_with_the_version_of_the_torch_that_is_installed(
    archive: Path, tmp_path: Path
) -> None:
    gathering = Gathering()
    gathering.begin(archive, question(tmp_path), dict(os.environ))
    assert gathering.is_awaited
    reaped(gathering)
    assert not gathering.is_awaited
    facts = gathering.take(())
    assert facts is not None and facts.program is not None
    assert facts.program.torch.startswith("2.")
    assert [folder.fault for folder in facts.folders] == [""]
    assert gathering.take(()) is None
    gathering.begin(archive, question(tmp_path), dict(os.environ))
    assert gathering.pid == 0, "an agent gathers once"


def test_without_a_bundle_or_an_answer_there_are_no_facts_and_none_are_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathering = Gathering()
    gathering.begin(tmp_path / "orch.pyz", question(tmp_path), {})
    assert (gathering.pid, gathering.is_awaited, gathering.take(())) == (0, False, None)
    (tmp_path / "orch.pyz").write_text("import time; time.sleep(60)")
    gathering.begin(tmp_path / "orch.pyz", question(tmp_path), {})
    assert gathering.is_awaited
    monkeypatch.setattr(launch, "GATHER_S_MAX", 0.0)
    assert not gathering.is_awaited
    gathering.give_up()
    reaped(gathering)
    assert gathering.take(()) is None


def test_only_the_gpus_that_ranks_see_are_told_of(archive: Path, tmp_path: Path) -> None:
    gathering = Gathering()
    gathering.begin(archive, question(tmp_path), {})
    reaped(gathering)
    assert gathering._facts is not None
    gpus = tuple(GpuFacts(str(n), f"GPU-{n}", "A100", "535", 1, 0, ()) for n in range(3))
    users = (GpuUser(1, "GPU-0", 5, ""), GpuUser(2, "GPU-2", 5, ""))
    gathering._facts = dataclasses.replace(gathering._facts, gpus=gpus, gpu_users=users)
    facts = gathering.take(("1", "GPU-2"))
    assert facts is not None
    assert ([gpu.index for gpu in facts.gpus], [user.pid for user in facts.gpu_users]) == (["1", "2"], [2])
