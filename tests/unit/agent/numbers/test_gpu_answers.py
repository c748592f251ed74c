"""Which answers of nvidia-smi make a GPU sick, and in which words? A table of hosts; and are ranks started on all that work?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.agent.host import gpu_health
from orchestrator.agent.numbers import gpu_states
from orchestrator.agent.numbers.gpu_states import COLUMNS, LOST, GpuStates
from orchestrator.agent.numbers.gpu_use import GpuPoller, parse_tables
from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus
from orchestrator.submission.inventory import local_inventory
from tests.support import fake_nvidia_smi as smi

TOO_HOT, POWER = "lower clocks: it is too hot", "lower clocks: its power supply slows it down"
REMAPS = "a row of its memory is remapped at its next reset"
ECC = "ecc.errors.uncorrected.volatile.total"

Told = tuple[str, tuple[str, ...]]
"""The fault of GPU 1 and the remarks on it."""

NO_ROOM = "Insufficient Resources"


def fabric(state: str, status: str = "N/A") -> dict[str, str]:
    return {"fabric.state": state, "fabric.status": status}


SICK: dict[str, tuple[smi.Host, str]] = {
    "recovery action reset": (smi.sick({"gpu_recovery_action": "Reset"}), "wants a reset"),
    "recovery action reboot": (smi.sick({"gpu_recovery_action": "Reboot"}), "wants a reboot of its host"),
    "recovery action drain": (smi.sick({"gpu_recovery_action": "Drain P2P"}), "wants its peer-to-peer traffic drained"),
    "recovery action drain and reset": (
        smi.sick({"gpu_recovery_action": "Drain and Reset"}),
        "wants to be drained and reset",
    ),
    "lost, in its row": (smi.every_cell("[GPU is lost]"), LOST),
    "lost, in its row, old driver": (smi.every_cell("[GPU is lost]", 470), LOST),
    "lost, and without a number": (smi.LOST_ROW, LOST),
    "lost, without a handle, and a row of errors": (smi.LOST_LINE_AND_ROW, LOST),
    "lost, in one cell": (smi.sick({ECC: "[GPU is lost]"}), LOST),
    "lost, without a handle": (smi.without_handle("Unknown Error"), LOST),
    "lost, not found": (smi.without_handle("Not Found"), LOST),
    "lost, without a handle, alone": (smi.ALL_WITHOUT_HANDLE, LOST),
    "lost, no row": (smi.UNLISTED, LOST),
    "requires a reset": (smi.every_cell("[GPU requires reset]"), "wants a reset"),
    "requires a reset, old driver": (smi.every_cell("[GPU requires reset]", 450), "wants a reset"),
    "row remap failed": (smi.sick({"remapped_rows.failure": "Yes"}), "has failed to remap a row of its memory"),
    "row remap failed, old driver": (
        smi.sick({"remapped_rows.failure": "Yes"}, 470),
        "has failed to remap a row of its memory",
    ),
}

NOT_SICK: dict[str, tuple[smi.Host, tuple[str, ...]]] = {
    "healthy": (smi.Host(), ()),
    "row remap pending": (smi.sick({"remapped_rows.pending": "Yes"}), (REMAPS,)),
    "uncorrected ECC": (smi.sick({ECC: "3"}), ("3 uncorrected memory errors since the job began",)),
    "uncorrected ECC, old driver": (smi.sick({ECC: "1"}, 390), ("1 uncorrected memory errors since the job began",)),
    "corrected ECC": (smi.sick({"ecc.errors.corrected.volatile.total": "70231"}), ()),
    "registers with the NVLink fabric again": (smi.sick(fabric("In Progress")), ("NVLink fabric: In Progress",)),
    "is no longer registered with the NVLink fabric": (
        smi.sick(fabric("Not Started")),
        ("NVLink fabric: Not Started",),
    ),
    "registration failed": (smi.sick(fabric("Completed", NO_ROOM)), (f"NVLink fabric: {NO_ROOM}",)),
    "registration failed, not known why": (
        smi.sick(fabric("Completed", "Unknown Error")),
        ("NVLink fabric: Unknown Error",),
    ),
    "status of a registration that goes on": (
        smi.sick(fabric("In Progress", NO_ROOM)),
        ("NVLink fabric: In Progress",),
    ),
    "no NVLink fabric": (smi.sick(fabric("N/A")), ()),
    "no NVLink fabric, in brackets": (smi.sick(fabric("[N/A]", "[N/A]")), ()),
    "no NVLink fabric, GB200 alone": (smi.sick(fabric("Not Supported", "Success")), ()),
    "status of the NVLink fabric of newer drivers": (smi.sick(fabric("Completed", "Somehow")), ()),
    "an error in place of a status": (smi.sick(fabric("Completed", "[Unknown Error]")), ()),
    "NVLinks down": (smi.sick({"NVLinks": "AAAIAAAAAAIAAAAAAA"}), ("2 of 18 NVLinks have become inactive",)),
    "all NVLinks down": (smi.sick({"NVLinks": "I" * 18}), ("18 of 18 NVLinks have become inactive",)),
    "NVLinks are not told": (smi.sick({"NVLinks": ""}), ()),
    "NVLinks in sleep": (smi.sick({"NVLinks": "\t Link 0: <sleep>"}), ()),
    "NVLinks in another language": (smi.sick({"NVLinks": "\t Enlace 0: <inactivo>"}), ()),
    "hardware slowdown by heat": (smi.clocks(0x48), (TOO_HOT,)),
    "hardware slowdown by power brake": (smi.clocks(0x88), (POWER,)),
    "hardware slowdown by heat, old driver": (smi.clocks(0x48, 470), (TOO_HOT,)),
    "slowdown by the driver": (smi.clocks(0x20), ("lower clocks: the driver keeps it from getting too hot",)),
    "power cap": (smi.clocks(0x4), ()),
    "idle": (smi.clocks(0x1), ()),
    "clocks for a reason of newer drivers": (smi.clocks(0x400), ()),
    "recovery action of newer drivers": (smi.sick({"gpu_recovery_action": "Recover IMEX Domain"}), ()),
    "driver 535": (smi.Host(535), ()),
    "driver 450": (smi.Host(450), ()),
    "driver 390": (smi.Host(390), ()),
    "driver 340": (smi.Host(340), ()),
    "MIG": (smi.every_cell("[N/A]"), ()),
    "MIG, new driver": (smi.every_cell("N/A"), ()),
    "errors of the driver itself": (smi.every_cell("[Unknown Error]"), ()),
    "errors of the driver itself, in all cells": (smi.Host(cards=(smi.Card(error="[Unknown Error]"),) * 2), ()),
    "a container without rights": (smi.every_cell("[Insufficient Permissions]"), ()),
    "another language": (smi.sick({"gpu_recovery_action": "Restablecer", "remapped_rows.failure": "Sí"}), ()),
    "text in another language": (smi.SPANISH, ()),
    "no devices": (smi.NO_DEVICES, ()),
    "no driver": (smi.NO_DRIVER, ()),
    "driver and library differ": (smi.MISMATCH, ()),
    "damaged infoROM": (smi.CORRUPTED, ()),
    "hangs": (smi.HANGS, ()),
}


def told(monkeypatch: pytest.MonkeyPatch, *looks: smi.Host) -> Told:
    """Return what is known of GPU 1 after these looks, and one more like the last; its neighbour is healthy."""
    left = [*looks, looks[-1]]

    def run(tool: str, *options: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        assert limit_s <= 15.0
        try:
            return smi.run(left[0], tool, *options)
        except subprocess.TimeoutExpired as err:
            raise HostError("has not answered") from err

    monkeypatch.setattr(gpus, "run_nvidia_smi", run)
    monkeypatch.setattr(gpu_states, "SECOND_LOOK_S", 0.0)
    states = GpuStates()
    states.devices.update(("0", "1"))
    while left:
        states.ask("nvidia-smi")
        del left[0]
    found = {gpu.gpu: (gpu.fault, gpu.remarks) for gpu in states.take_news(0.0) or ()}
    assert found.keys() <= {"1"}
    return found.get("1", ("", ()))


@pytest.mark.parametrize("name", SICK)
def test_answer_that_makes_a_gpu_sick(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    host, fault = SICK[name]
    assert told(monkeypatch, smi.Host(host.driver), host) == (fault, ())


@pytest.mark.parametrize("name", NOT_SICK)
def test_answer_that_makes_no_gpu_sick(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    host, remarks = NOT_SICK[name]
    assert told(monkeypatch, smi.Host(host.driver), host) == ("", remarks)


@pytest.mark.parametrize("name", ["healthy", "MIG", "driver 390", "damaged infoROM"])
def test_first_answer_that_makes_no_gpu_sick(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    host, remarks = NOT_SICK[name]
    assert told(monkeypatch, host) == ("", remarks)


FIRST: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no fabric manager": (fabric("In Progress"), ()),
    "fabric not started": (fabric("Not Started"), ()),
    "registration failed": (fabric("Completed", NO_ROOM), (f"NVLink fabric: {NO_ROOM}",)),
    "a bridge to one other GPU": ({"NVLinks": "AAAAIIIIIIII"}, ()),
    "no bridge": ({"NVLinks": "IIIIIIIIIIII"}, ()),
    "no NVLinks": ({"NVLinks": ""}, ()),
}
"""Of a host that was so when the job began."""


@pytest.mark.parametrize("name", FIRST)
def test_nvlinks_that_were_so_before_are_no_news(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cells, remarks = FIRST[name]
    assert told(monkeypatch, smi.sick(cells)) == ("", remarks)


def test_nvlinks_that_are_back_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    down = smi.sick({"NVLinks": "AAAIAAAAAAAAAAAAAA", **fabric("In Progress")})
    assert told(monkeypatch, smi.Host(), down, down, smi.Host()) == ("", ())


def test_bridge_that_comes_up_later_is_none_that_goes_down(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = smi.sick({"NVLinks": "AAII"}), smi.sick({"NVLinks": "AAAA"})
    assert told(monkeypatch, before, after, after, before) == ("", ())
    assert told(monkeypatch, before, after, smi.sick({"NVLinks": "AIII"})) == (
        "",
        ("1 of 2 NVLinks have become inactive",),
    )


def test_only_gpu_of_a_host_that_is_lost_has_left_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [smi.Host(cards=(smi.Card(),)), smi.Host(cards=(smi.Card(error="[GPU is lost]"),))]
    monkeypatch.setattr(gpus, "run_nvidia_smi", lambda tool, *options, limit_s: smi.run(said[0], tool, *options))
    monkeypatch.setattr(gpu_states, "SECOND_LOOK_S", 0.0)
    states = GpuStates()
    states.devices.add("0")
    states.ask("nvidia-smi")
    del said[0]
    states.ask("nvidia-smi")
    assert [(gpu.gpu, gpu.fault) for gpu in states.take_news(0.0) or ()] == [("0", LOST)]


@pytest.mark.parametrize("lost", [smi.LOST_ROW, smi.LOST_LINE_AND_ROW, smi.without_handle("Unknown Error")])
def test_gpu_of_another_job_that_is_lost_hides_no_fault(monkeypatch: pytest.MonkeyPatch, lost: smi.Host) -> None:
    """It was lost before the job began, so that nothing is known of it."""
    dead = lost.cards[1]
    host = smi.Host(cards=(smi.Card({"gpu_recovery_action": "Reset"}), smi.Card(), dead), code=lost.code)
    monkeypatch.setattr(gpus, "run_nvidia_smi", lambda tool, *options, limit_s: smi.run(host, tool, *options))
    states = GpuStates()
    states.devices.update(("0", "1"))
    states.ask("nvidia-smi")
    assert [(gpu.gpu, gpu.fault) for gpu in states.take_news(0.0) or ()] == [("0", "wants a reset")]


@pytest.mark.parametrize("driver", [340, 390, 450, 535])
def test_old_driver_refuses_each_column_by_name(driver: int) -> None:
    columns = ",".join(COLUMNS)
    refused: list[str] = []
    while True:
        text, code = smi.answer(smi.Host(driver), f"--query-gpu={columns}", "--format=csv,noheader") or ("", 0)
        if code == 0:
            break
        assert code == 2 and text.startswith('Field "')
        refused.append(text.split('"')[1])
        columns = ",".join(one for one in columns.split(",") if one != refused[-1])
    assert len(refused) == {340: 7, 390: 6, 450: 4, 535: 1}[driver]


def test_use_of_gpus_is_read_where_it_is_told() -> None:
    query = "--query-gpu=index,uuid,name,utilization.gpu,utilization.memory,memory.used,power.draw,pstate"
    used = {}
    for name, host in (("healthy", smi.Host()), ("MIG", smi.every_cell("[N/A]")), ("lost", smi.without_handle("Lost"))):
        text, _ = smi.answer(host, query, "--format=csv") or ("", 0)
        used[name] = parse_tables(text, "").devices.get("1")
    assert used == {"healthy": (0.97, 512 << 20), "MIG": (None, None), "lost": None}


def test_host_of_another_maker_has_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_nvidia_smi", lambda *_: None)
    poller = GpuPoller()
    poller.states.devices.add("0")
    assert poller.latest(0.0).text == "" and poller.states.take_news(0.0) is None and poller._thread is None
    assert local_inventory({}).gpus == ()


@pytest.mark.slow
def test_damaged_inforom_keeps_no_gpu_from_being_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi warns, lists all GPUs and ends with 14: a warning, and the GPUs compute as ever."""
    smi.install(tmp_path, smi.CORRUPTED)
    path = f"{tmp_path}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    assert [gpu.id for gpu in gpus.list_gpus()] == ["0", "1"]
    assert local_inventory({"PATH": path}).gpus == (0, 1)
    health = gpu_health.read()
    assert (len(health.gpus), health.fault) == (2, "")


@pytest.mark.slow
def test_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = smi.install(tmp_path, smi.HANGS)
    monkeypatch.setattr(gpu_states, "NVIDIA_SMI_S_MAX", 1.0)
    states = GpuStates()
    states.devices.add("1")
    states.ask(str(tool))
    assert states.take_news(0.0) is None
    smi.write(tmp_path, smi.sick({"gpu_recovery_action": "Reset"}))
    monkeypatch.setattr(gpu_states, "NVIDIA_SMI_S_MAX", 15.0)
    states.ask(str(tool))
    assert [gpu.fault for gpu in states.take_news(0.0) or ()] == ["wants a reset"]
