"""Which answers of nvidia-smi make a GPU sick, and which say nothing? Answers as drivers give them, at the one place where it is
run."""

from __future__ import annotations

import subprocess
import time

import pytest

from orchestrator.agent.numbers import gpu_states, gpu_use
from orchestrator.agent.numbers.gpu_states import COLUMNS, LOST, REMARKS_S, GpuStates
from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus
from orchestrator.core.wire import reports

ACTION, FAILURE, PENDING, ERRORS, FABRIC, REGISTERED, CLOCKS, OLD_CLOCKS = COLUMNS
HEALTHY = {
    ACTION: "None",
    FAILURE: "No",
    PENDING: "No",
    ERRORS: "0",
    FABRIC: "N/A",
    REGISTERED: "N/A",
    CLOCKS: "0x0000000000000000",
}
Gpus = dict[str, dict[str, str]]
NEW_DRIVER = (ACTION, FAILURE, PENDING, ERRORS, FABRIC, REGISTERED, CLOCKS)
OLD_DRIVER = (ERRORS, OLD_CLOCKS)


class Driver:
    """An nvidia-smi of a driver that knows some columns, with two GPUs; `gpus` may be changed between answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *known: str, text: str | None = None) -> None:
        self.known = known or NEW_DRIVER
        self.text, self.calls, self.head = text, 0, ""
        self.links: list[str] = []
        self.gpus: dict[str, dict[str, str]] = {"0": {}, "3": {}}
        self.uuids = {number: f"GPU-{number}" for number in self.gpus}
        monkeypatch.setattr(gpus, "run_nvidia_smi", self.run)
        monkeypatch.setattr(gpu_states, "SECOND_LOOK_S", 0.0)

    def run(self, tool: str, query: str, *options: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        if query == "nvlink":
            return subprocess.CompletedProcess([tool], 0, self.links.pop(0) if self.links else "", "")
        self.calls += 1
        assert options == ("--format=csv,noheader,nounits",) and limit_s <= 5.0
        columns = query.removeprefix("--query-gpu=").split(",")
        unknown = [column for column in columns[3:] if column not in self.known]
        if self.text is not None:
            return subprocess.CompletedProcess([tool], 0, self.text, "")
        if unknown:
            return subprocess.CompletedProcess([tool], 2, f'Field "{unknown[0]}" is not a valid field to query.\n', "")
        rows = [
            [
                number,
                self.uuids[number],
                f"0000000{number}:3B:00.0",
                *({**HEALTHY, OLD_CLOCKS: "0x0", **cells}[column] for column in columns[3:]),
            ]
            for number, cells in self.gpus.items()
        ]
        return subprocess.CompletedProcess([tool], 0, self.head + "".join(", ".join(row) + "\n" for row in rows), "")


def asked(*devices: str) -> GpuStates:
    states = GpuStates()
    states.devices.update(devices or ("0", "3"))
    states.ask("nvidia-smi")
    return states


def told(states: GpuStates, now_s: float = 1000.0) -> list[tuple[str, str, tuple[str, ...]]] | None:
    news = states.take_news(now_s)
    return None if news is None else [(gpu.gpu, gpu.fault, gpu.remarks) for gpu in news]


def test_healthy_gpus_are_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    assert told(asked()) is None
    assert driver.calls == 2, "the former name of a column is asked for once"


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ({ACTION: "Reset"}, "wants a reset"),
        ({ACTION: "Reboot"}, "wants a reboot of its host"),
        ({ACTION: "Drain P2P"}, "wants its peer-to-peer traffic drained"),
        ({ACTION: "Drain and Reset"}, "wants to be drained and reset"),
        ({FAILURE: "Yes"}, "has failed to remap a row of its memory"),
        ({ERRORS: "[GPU is lost]", ACTION: "[GPU is lost]"}, LOST),
        ({ERRORS: "[GPU requires reset]"}, "wants a reset"),
    ],
)
def test_what_nvidia_smi_calls_a_fault_is_one(
    monkeypatch: pytest.MonkeyPatch, cells: dict[str, str], fault: str
) -> None:
    driver = Driver(monkeypatch)
    driver.gpus["3"] = cells
    states = asked()
    assert told(states) == [("3", fault, ())]
    assert told(states) is None, "once"
    driver.gpus["3"] = {}
    states.ask("nvidia-smi")
    assert told(states, 1001.0) == [], "healthy again"


@pytest.mark.parametrize(
    "cells",
    [
        dict.fromkeys(NEW_DRIVER, "[N/A]"),
        dict.fromkeys(NEW_DRIVER, "N/A"),
        dict.fromkeys(NEW_DRIVER, "[Not Supported]"),
        dict.fromkeys(NEW_DRIVER, "[Unknown Error]"),
        dict.fromkeys(NEW_DRIVER, "[Insufficient Permissions]"),
        dict.fromkeys(NEW_DRIVER, "无"),
        {ACTION: "Zurücksetzen", FAILURE: "Ja", PENDING: "Ja", ERRORS: "²", CLOCKS: "0xZZ"},
        {CLOCKS: "0x0000000000000004"},
    ],
)
def test_values_that_are_not_known_say_nothing(monkeypatch: pytest.MonkeyPatch, cells: dict[str, str]) -> None:
    driver = Driver(monkeypatch)
    driver.gpus["0"] = driver.gpus["3"] = cells
    assert told(asked()) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found\n",
        "Failed to initialize NVML: Driver/library version mismatch\n",
        "Unable to determine the device handle for GPU0000:5E:00.0: Unknown Error\n",
        "0, GPU-0, None\n",
        "NVIDIA-SMI ha fallado porque no pudo comunicarse con el controlador de NVIDIA\n",
    ],
)
def test_answer_that_is_no_table_says_nothing(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    driver = Driver(monkeypatch)
    driver.gpus["3"] = {ACTION: "Reset"}
    states = asked()
    before = states.take_news(0.0)
    driver.text = text
    states.ask("nvidia-smi")
    assert before and states.take_news(1e9) is None
    assert told(asked()) is None


def test_hanging_nvidia_smi_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(tool: str, *options: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        raise HostError(f"`{tool}` has not answered for {limit_s:g} s")

    monkeypatch.setattr(gpus, "run_nvidia_smi", hangs)
    assert told(asked()) is None


def test_old_driver_is_asked_without_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, *OLD_DRIVER)
    driver.gpus["3"] = {OLD_CLOCKS: "0x0000000000000040"}
    states = asked()
    assert told(states) == [("3", "", ("lower clocks: it is too hot",))]
    calls = driver.calls
    states.ask("nvidia-smi")
    assert driver.calls == calls + 1, "each column that is not known costs one call, once"


LINKS = "GPU {}: NVIDIA A100 (UUID: GPU-{})\n\t Link 0: 25 GB/s\n\t Link 1: {}\n"


@pytest.mark.parametrize(
    "first", ["", 'Invalid combination of input arguments. Please run "nvidia-smi -h" for help.\n', None]
)
def test_nvlinks_that_are_not_told_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch, first: str | None) -> None:
    driver, asks = Driver(monkeypatch), []

    def run(tool: str, query: str, *options: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        if query == "nvlink":
            asks.append(states.take_news(0.0))
            if first is None:
                raise HostError(f"`{tool}` has not answered for {limit_s:g} s")
        return driver.run(tool, query, *options, limit_s=limit_s)

    driver.links, driver.gpus["3"] = [first or "", *[LINKS.format(3, 3, "<inactive>")] * 3], {ACTION: "Reset"}
    monkeypatch.setattr(gpus, "run_nvidia_smi", run)
    states = GpuStates()
    states.devices.add("3")
    for _ in range(3):
        states.ask("nvidia-smi")
    (news,) = asks
    assert news and news[0].fault == "wants a reset", "the fault was known before links were asked for"


def test_nvlinks_of_gpus_of_other_jobs_are_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, up, down = Driver(monkeypatch), "25 GB/s", "<inactive>"
    driver.links = [
        LINKS.format(0, 0, up) + LINKS.format(3, 3, up),
        *[LINKS.format(0, 0, down) + LINKS.format(3, 3, up)] * 2,
    ]
    states = asked("3")
    states.ask("nvidia-smi")
    states.ask("nvidia-smi")
    assert told(states) is None and not driver.links
    states.devices.add("0")
    states.ask("nvidia-smi")
    assert told(states) == [("0", "", ("1 of 2 NVLinks have become inactive",))]


def test_driver_that_knows_no_column_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, "temperature.gpu")
    states = asked()
    calls = driver.calls
    states.ask("nvidia-smi")
    assert told(states) is None and driver.calls == calls == len(COLUMNS)


def test_gpu_that_is_no_longer_listed_has_left_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind it get other numbers then; each keeps the one that its rank knows."""
    driver = Driver(monkeypatch)
    states = asked()
    driver.gpus, driver.uuids = {"0": {ACTION: "Reset"}}, {"0": "GPU-3"}
    states.ask("nvidia-smi")
    assert told(states) == [("0", LOST, ()), ("3", "wants a reset", ())]


NO_HANDLE = [
    "Unable to determine the device handle for GPU3: 0003:3B:00.0: Unknown Error\n",
    "Unable to determine the device handle for GPU0003:3B:00.0: Unknown Error\n",
    "Unable to determine the device handle for GPU 0003:3b:00.0: GPU is lost.  Reboot the system to recover this GPU\n",
]


@pytest.mark.parametrize("line", NO_HANDLE)
@pytest.mark.parametrize("is_alone", [False, True])
def test_gpu_without_handle_has_left_the_bus(monkeypatch: pytest.MonkeyPatch, line: str, is_alone: bool) -> None:
    """New drivers list the others behind the line, older ones print the line alone; GPU 0 has the same bus in another domain."""
    driver = Driver(monkeypatch)
    states = asked()
    if is_alone:
        driver.text = line
    else:
        driver.head, driver.gpus = line, {"0": {}}
    states.ask("nvidia-smi")
    assert told(states) == [("3", LOST, ())]


@pytest.mark.parametrize("line", ["", *NO_HANDLE])
@pytest.mark.parametrize("is_alone", [False, True])
def test_gpu_that_one_look_misses_is_not_sick(monkeypatch: pytest.MonkeyPatch, line: str, is_alone: bool) -> None:
    """It may be in a reset, or cut into parts, or its driver is loaded anew. Nor is it if the second look says nothing."""
    for second in (None, "No devices were found\n"):
        driver = Driver(monkeypatch)
        states = asked()
        whole, driver.text = driver.gpus, line if is_alone else None
        driver.head, driver.gpus = line, {"0": {}}

        def passes(_: float, driver: Driver = driver, second: str | None = second, whole: Gpus = whole) -> None:
            driver.head, driver.text, driver.gpus = "", second, whole

        monkeypatch.setattr(time, "sleep", passes)
        states.ask("nvidia-smi")
        assert told(states) is None


def test_lines_that_are_no_rows_hide_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    driver.head, driver.gpus["3"] = "WARNING: infoROM is corrupted at gpu 0003:3B:00.0\n\n", {ACTION: "Reset"}
    assert told(asked()) == [("3", "wants a reset", ())]


def test_gpu_of_another_job_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    driver.gpus["3"] = {ACTION: "Reset"}
    assert told(asked("0")) is None
    assert told(asked("GPU-3")) == [("3", "wants a reset", ())]


def test_ranks_without_gpus_and_those_on_mig_parts_ask_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    driver.gpus["3"] = {ACTION: "Reset"}
    assert told(asked("MIG-5c8e")) is None
    states, calls = GpuStates(), driver.calls
    states.ask("nvidia-smi")
    assert driver.calls == calls and told(states) is None


def test_remarks_are_told_rarely_and_faults_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    driver.gpus["0"] = {ERRORS: "7", PENDING: "Yes"}
    states = asked()
    assert told(states) == [("0", "", ("a row of its memory is remapped at its next reset",))]
    driver.gpus["0"] = {ERRORS: "9"}
    states.ask("nvidia-smi")
    assert told(states, 1001.0) is None
    assert told(states, 1000.0 + REMARKS_S) == [("0", "", ("2 uncorrected memory errors since the job began",))]
    driver.gpus["0"] = {ERRORS: "9", ACTION: "Reset"}
    states.ask("nvidia-smi")
    assert told(states, 1001.0 + REMARKS_S) == [
        ("0", "wants a reset", ("2 uncorrected memory errors since the job began",))
    ]


def test_fault_has_the_time_at_which_it_was_first_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, times = Driver(monkeypatch), iter(("14:02:11 UTC", "14:02:31 UTC"))
    monkeypatch.setattr(time, "strftime", lambda *_: next(times))
    driver.gpus["3"] = {ACTION: "Reset"}
    states = asked("3")
    driver.gpus["3"] = {ACTION: "Reset", PENDING: "Yes"}
    monkeypatch.setattr(time, "strftime", lambda *_: "later")
    states.ask("nvidia-smi")
    news = states.take_news(0.0)
    assert news is not None and [(gpu.fault, gpu.since) for gpu in news] == [("wants a reset", "14:02:11 UTC")]


def test_poller_asks_at_once_when_a_rank_ends_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    """And else once in `POLL_S`, in a thread."""
    driver = Driver(monkeypatch)
    monkeypatch.setattr(gpus, "find_nvidia_smi", lambda: "nvidia-smi")
    monkeypatch.setattr(gpu_use, "_read_use", lambda _: gpu_use.NO_USE)
    poller = gpu_use.GpuPoller()
    said: list[reports.GpusChanged] = []
    poller.states.devices.add("3")

    def pass_to(now_s: float) -> int:
        before = driver.calls
        poller.latest(now_s)
        poller.report_states(now_s, 1, said.append)
        if poller._thread is not None:
            poller._thread.join(10)
        poller.report_states(now_s, 1, said.append)
        return driver.calls - before

    assert pass_to(0.0) == 2
    assert [pass_to(one) for one in (1.0, 5.0, 19.0)] == [0, 0, 0] and not said
    driver.gpus["3"] = {ACTION: "Reset"}
    poller.note_bad_exit()
    assert pass_to(19.5) == 1
    assert [(one.attempt, one.gpus[0].fault) for one in said] == [(1, "wants a reset")]
    assert [pass_to(one) for one in (19.6, 39.0, 39.6)] == [0, 0, 1] and len(said) == 1
