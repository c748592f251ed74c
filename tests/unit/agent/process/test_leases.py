"""Are a host's GPUs and slots never given twice, and is it told who has them? Real sockets, under names of the test's own."""

from __future__ import annotations

import os
import select
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orchestrator.agent.process import leases
from orchestrator.agent.process.leases import LeaseCapacity, LeaseHolder, Leases
from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus, procfs
from orchestrator.core.host.gpus import Gpu
from orchestrator.core.wire.agent_config import LeaseNeeds
from orchestrator.core.wire.bootstrap import Failed, RequestFailed

ME = leases.this_holder("job-a", "host-1")
OTHER = LeaseHolder("job-b", "host-1", "eve", 4711)
WAIT_S_MAX = 20.0

EQUAL = (
    "GPU 0: NVIDIA H200 (UUID: GPU-aaaaaaaa-0000-0000-0000-000000000000)\n"
    "GPU 1: NVIDIA H200 (UUID: GPU-bbbbbbbb-0000-0000-0000-000000000000)\n"
)
UNEQUAL = EQUAL.replace("GPU 1: NVIDIA H200", "GPU 1: NVIDIA T4")
CUT = (
    "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaaaaaa-0000-0000-0000-000000000000)\n"
    "  MIG 3g.20gb     Device  0: (UUID: MIG-cccccccc-0000-0000-0000-000000000000)\n"
    "  MIG 3g.20gb     Device  1: (UUID: MIG-dddddddd-0000-0000-0000-000000000000)\n"
    "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbbbbbb-0000-0000-0000-000000000000)\n"
)


def stock(count: int = 0, cores: int = 4, prefix: str = "") -> LeaseCapacity:
    """Return a host of the test's own, with so many GPUs."""
    mine = prefix or f"orch-test-{uuid.uuid4().hex}"
    return LeaseCapacity(lambda: [Gpu(str(n), f"GPU-{n}", "H200") for n in range(count)], cores, mine)


@pytest.fixture
def held() -> Iterator[list[Leases]]:
    """What the test leases, given back at its end; somebody answers for it meanwhile."""
    kept: list[Leases] = []
    yield kept
    for one in kept:
        one.close()


def _refusal(needs: LeaseNeeds, of: LeaseCapacity, who: LeaseHolder = OTHER) -> Failed:
    with pytest.raises(RequestFailed) as found:
        leases.acquire(needs, who, of)
    return found.value.reply


class _Answering:
    """Answers those who ask, as keepers do in their loops."""

    def __init__(self, *held: Leases) -> None:
        self._held = {fd: one for one in held for fd in one.fds}
        self._left, self._leave = os.pipe()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while True:
            for fd in select.select([self._left, *self._held], [], [], WAIT_S_MAX)[0]:
                if fd == self._left:
                    return
                self._held[fd].answer(fd)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        os.close(self._leave)
        self._thread.join(WAIT_S_MAX)
        os.close(self._left)


def test_gpus_are_leased_once_and_in_order(held: list[Leases]) -> None:
    """No GPU is leased twice, and free ones are leased in order."""
    here = stock(4)
    held.append(leases.acquire(LeaseNeeds(2, 0, 0), ME, here))
    held.append(leases.acquire(LeaseNeeds(1, 0, 0), OTHER, here))
    assert [one.gpus for one in held] == [("0", "1"), ("2",)]


def test_released_gpus_can_be_leased_again(held: list[Leases]) -> None:
    here = stock(2)
    leases.acquire(LeaseNeeds(2, 0, 0), ME, here).close()
    held.append(leases.acquire(LeaseNeeds(2, 0, 0), OTHER, here))
    assert held[0].gpus == ("0", "1")


def test_leases_are_visible_without_taking_one(held: list[Leases]) -> None:
    gpus, slots = stock(3), stock()
    held += [leases.acquire(LeaseNeeds(2, 0, 0), ME, gpus), leases.acquire(LeaseNeeds(0, 3, 0), ME, slots)]
    table = Path("/proc/net/unix").read_text()
    with _Answering(*held):
        seen = [
            *leases.list_held(gpus, table),
            *leases.list_held(slots, table),
            *leases.list_held(stock(), table),
        ]
    assert [(one.count, str(one)) for one in seen] == [
        (2, f"GPUs 0, 1 held by {ME}"),
        (3, f"slots 0-2 held by {ME}"),
    ]


def test_refused_request_keeps_nothing(held: list[Leases]) -> None:
    here = stock(3)
    held.append(leases.acquire(LeaseNeeds(2, 0, 0), ME, here))
    with _Answering(*held):
        assert _refusal(LeaseNeeds(2, 0, 0), here).trouble == "busy"
    held.append(leases.acquire(LeaseNeeds(1, 0, 0), OTHER, here))
    assert held[1].gpus == ("2",)


def test_holder_of_missing_gpus_is_reported(held: list[Leases]) -> None:
    here = stock(3)
    held.append(leases.acquire(LeaseNeeds(2, 0, 0), ME, here))
    with _Answering(held[0]):
        reason = _refusal(LeaseNeeds(3, 0, 0), here).reason
    assert reason == f"3 GPUs wanted, 1 of 3 free; GPUs 0, 1 held by job job-a of {ME.user}, pid {os.getpid()}"


def test_silent_holder_is_known_by_user_and_pid(held: list[Leases], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "ASK_S_MAX", 0.05)
    here = stock(200)
    held.append(leases.acquire(LeaseNeeds(200, 0, 0), ME, here))
    began_s = time.monotonic()
    reason = _refusal(LeaseNeeds(1, 0, 0), here).reason
    assert time.monotonic() - began_s < 200 * leases.ASK_S_MAX, "it is asked once, not for each thing it has"
    assert f"a process that does not answer of {ME.user}, pid {os.getpid()}" in reason


@pytest.mark.slow
def test_lease_ends_with_its_last_process() -> None:
    here = stock(1)
    mine = leases.acquire(LeaseNeeds(1, 0, 0), ME, here)
    wait_fd, go_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_fd)
        os.read(wait_fd, 1)
        os._exit(0)
    mine.close()
    assert leases._bind(["gpu-GPU-0"], 1, here.prefix) == ({}, ["gpu-GPU-0"])
    os.close(go_fd)
    os.waitpid(pid, 0)
    os.close(wait_fd)
    leases.acquire(LeaseNeeds(1, 0, 0), OTHER, here).close()


def test_more_gpus_than_exist_are_never_free() -> None:
    refusal = _refusal(LeaseNeeds(8, 0, 0), stock(4))
    assert refusal.trouble == "permanent" and refusal.reason == "8 GPUs wanted, the host has 4"


def test_failing_driver_is_reported() -> None:
    def broken() -> Sequence[Gpu]:
        raise HostError("there is no nvidia-smi on this host")

    refusal = _refusal(LeaseNeeds(1, 0, 0), LeaseCapacity(broken, 4, "orch-test"))
    assert refusal.trouble == "permanent" and "there is no nvidia-smi" in refusal.reason and "driver" in refusal.fix


def test_slots_are_counted_and_leased_once(held: list[Leases]) -> None:
    """Slots are counted and never leased twice."""
    here = stock(cores=64)
    for _ in range(2):
        held.append(leases.acquire(LeaseNeeds(0, 2, 5), ME, here))
    with _Answering(*held):
        refusal = _refusal(LeaseNeeds(0, 2, 5), here)
    assert refusal.trouble == "busy" and "2 slots wanted, 1 of 5 free; slots 0-3 held by" in refusal.reason
    held.append(leases.acquire(LeaseNeeds(0, 1, 5), OTHER, here))


def test_lease_is_reported_with_holder_and_age(held: list[Leases]) -> None:
    here = stock(2)
    held.append(leases.acquire(LeaseNeeds(2, 0, 0), ME, here))
    with _Answering(*held):
        [one] = leases.list_held(here, procfs.read_text(Path("/proc/net/unix")))
    assert (one.count, one.names, one.holder) == (2, "GPUs 0, 1", str(ME))
    assert one.for_s == pytest.approx(procfs.age_s(os.getpid()), abs=60.0)


def test_job_exceeding_cores_gets_whole_machine(held: list[Leases]) -> None:
    """A job with more ranks than cores has the machine to itself."""
    here = stock(cores=2)
    held.append(leases.acquire(LeaseNeeds(0, 8, 0), ME, here))
    with _Answering(*held):
        assert _refusal(LeaseNeeds(0, 1, 0), here).trouble == "busy"


def test_slots_set_by_user_are_a_limit() -> None:
    refusal = _refusal(LeaseNeeds(0, 8, 4), stock(cores=64))
    assert refusal.trouble == "permanent" and refusal.reason == "8 slots wanted, the host has 4"


def test_hosts_on_one_machine_share_its_slots(held: list[Leases]) -> None:
    """Two hosts of a job that are one machine share its slots."""
    here = stock(cores=2)
    held.append(leases.acquire(LeaseNeeds(0, 2, 0), ME, here))
    with _Answering(held[0]):
        held.append(leases.acquire(LeaseNeeds(0, 2, 0), leases.this_holder("job-a", "host-2"), here))
        assert _refusal(LeaseNeeds(0, 2, 0), here).trouble == "busy"


def test_hosts_on_one_machine_do_not_share_gpus(held: list[Leases]) -> None:
    """Two hosts of a job that are one machine do not share GPUs."""
    here = stock(2)
    held.append(leases.acquire(LeaseNeeds(2, 0, 0), ME, here))
    with _Answering(held[0]):
        refusal = _refusal(LeaseNeeds(2, 0, 0), here, leases.this_holder("job-a", "host-2"))
    assert refusal.reason.endswith("holds them as host-1: name each machine once in the list of hosts")


@pytest.mark.slow
def test_concurrent_requests_get_all_or_nothing() -> None:
    """Four want three of six GPUs: two have them, two have none."""
    here = stock(6)
    had: list[Leases] = []
    refused: list[RequestFailed] = []

    def want() -> None:
        try:
            had.append(leases.acquire(LeaseNeeds(3, 0, 0), ME, here))
        except RequestFailed as err:
            refused.append(err)

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S_MAX)
    assert (len(had), len(refused)) == (2, 2)
    assert sorted(gpu for one in had for gpu in one.gpus) == ["0", "1", "2", "3", "4", "5"]
    for one in had:
        one.close()


def test_request_for_nothing_leases_nothing() -> None:
    assert leases.acquire(LeaseNeeds(0, 0, 0), ME, stock()).fds == ()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (EQUAL, ["0", "1"]),
        (UNEQUAL, ["GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"]),
        (
            CUT,
            [
                "MIG-cccccccc-0000-0000-0000-000000000000",
                "MIG-dddddddd-0000-0000-0000-000000000000",
                "GPU-bbbbbbbb-0000-0000-0000-000000000000",
            ],
        ),
        ("No devices found.\n", []),
    ],
)
def test_gpus_are_named_as_cuda_expects(text: str, ids: list[str]) -> None:
    assert [gpu.id for gpu in gpus.parse_gpu_list(text)] == ids
