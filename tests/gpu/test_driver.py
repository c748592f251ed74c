"""Does the driver of this machine answer what orch asks, or refuse it by name?"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from orchestrator.agent.host import gpu_health
from orchestrator.agent.numbers import gpu_states, gpu_use
from orchestrator.core.host import gpus
from tests.gpu.machine import ON_GPU

pytestmark = [pytest.mark.gpu, ON_GPU]

ASK_S_MAX = 30.0
USE_COLUMNS = ("utilization.gpu", "utilization.memory", "memory.used", "power.draw", "pstate")


def _ask(*options: str) -> subprocess.CompletedProcess[str]:
    tool = gpus.find_nvidia_smi()
    assert tool is not None
    return gpus.run_nvidia_smi(tool, *options, limit_s=ASK_S_MAX)


def test_each_column_is_answered_or_refused_by_name(say: Callable[[str], None]) -> None:
    """What orch does not know to be refused would make it blind for all columns."""
    columns = dict.fromkeys(
        [*gpu_states.COLUMNS, "pci.bus_id", *gpu_health._BASICS, *gpu_health._SLOWDOWNS, *USE_COLUMNS]
    )
    count = len({gpu.uuid for gpu in gpus.list_gpus() if gpu.uuid.startswith("GPU-")})
    odd = []
    for column in columns:
        done = _ask(f"--query-gpu={column}", "--format=csv,noheader,nounits")
        if done.returncode in gpus.GOOD_CODES:
            cells = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            say(f"nvidia-smi: {column}: {', '.join(dict.fromkeys(cells))}")
            odd += [] if len(cells) >= count else [column]
        else:
            say(f"nvidia-smi: {column}: code {done.returncode}: {gpus.output_line(done)}")
            odd += [] if f'"{column}"' in done.stdout + done.stderr else [column]
    done = _ask("--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv")
    say(f"nvidia-smi: processes: code {done.returncode}: {gpus.output_line(done)}")
    assert not odd and done.returncode in gpus.GOOD_CODES


def test_answers_are_read_as_meant(say: Callable[[str], None]) -> None:
    """A table of all GPUs comes of them, in each of the three places that ask."""
    tool = gpus.find_nvidia_smi()
    assert tool is not None
    states = gpu_states.GpuStates()
    rows = states._query(tool)
    assert rows, "no table"
    assert all(uuid.startswith("GPU-") for uuid in rows)
    say(f"driver: columns that it knows: {', '.join(states._columns)}")
    states.devices.update(rows)
    states.ask(tool)
    told = states.take_news(0.0) or ()
    say(
        f"driver: what is said of the GPUs: {'; '.join(gpu.fault_text or ', '.join(gpu.remarks) for gpu in told) or 'nothing'}"
    )
    assert all(one.devices for one in [gpu_use.read_gpu_use()])
    health = gpu_health.read()
    assert not health.fault and len(health.gpus) == len(rows)
