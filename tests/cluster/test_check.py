"""Does a check of all hosts find what was broken, exactly that, on the right host, and nothing on healthy ones?

Real sshd and real wires, real torch and gloo in the first test; nvidia-smi is a fake, since there is no GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster.box import Box
from tests.support.cluster.desk import FAKE_TORCH, STEPPER, Desk
from tests.support.cluster.host import wait_for
from tests.support.cluster.small_torch import EXTRA, TORCH, install

SCRIPT = {"train.py": "import torch\nimport model\n", "model.py": "import json\n"}
SMI = """#!/bin/sh
case "$*" in
*--query-gpu*) printf '%s\\n' "0, GPU-a, {model}, 535.1, 40960, {ecc}, Not Active, Not Active, {hot}" ;;
*--query-compute-apps*) {users} ;;
*) echo "GPU 0: {model} (UUID: GPU-a)" ;;
esac
"""


def check(desk: Desk, files: dict[str, str] = SCRIPT, **spec: object) -> tuple[int, list[dict[str, Any]]]:
    """Check a job for 3 of 4 hosts; return the exit code, and the findings that are not in order."""
    whole: dict[str, Any] = {"nodes": 3, "ssh": {"hosts": "node[1-4]"}, "env": {"PYTHONPATH": EXTRA}, **spec}
    before = [host.path("/home/trainer/.orch").exists() for host in desk.box.nodes]
    done = desk.orch("check", desk.write(files, **whole), "--json", check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    for one in found:
        print(one["severity"], one["what"], one["nodes"], one["found"], "|", one["fix"])
    assert all(one["fix"] for one in found if one["severity"] in ("error", "warning"))
    wait_for(lambda: not desk.at_work(), "the end of what a check has started")
    assert before == [host.path("/home/trainer/.orch").exists() for host in desk.box.nodes], "nor any folder"
    return done.returncode, [one for one in found if one["severity"] != "ok"]


@pytest.fixture
def small(desk: Desk) -> Iterator[Desk]:
    """Give a desk whose hosts have a small torch."""
    install(desk.box.nodes)
    yield desk
    for host in desk.box.nodes:
        shutil.rmtree(host.path(EXTRA))


def only(found: list[dict[str, Any]], what: str, severity: str, *nodes: str) -> str:
    """Return the words of the only finding, which must be this one."""
    assert [(one["what"], one["severity"], one["nodes"]) for one in found] == [(what, severity, list(nodes))]
    return str(found[0]["found"])


def test_healthy_hosts_have_no_finding(desk: Desk) -> None:
    done = desk.orch("check", desk.write(SCRIPT, nodes=2, ssh={"hosts": "node[1-2]"}))
    print(done.stdout)
    lines = done.stdout.splitlines()
    assert all(line.startswith("ok ") for line in lines) and len(lines) <= 12
    assert (
        "1 pair of nodes reach each other" in done.stdout and "all-reduce over 2 nodes with gloo works" in done.stdout
    )


HOT = "runs at lowered clocks: the driver keeps it from getting too hot"


def break_gpus(box: Box) -> None:
    """Give each host a GPU: of another model and with errors on node3, in use on node2, too hot on node1."""
    for host in box.nodes:
        is_odd = host.name == "node3"
        model = "Tesla V100-SXM2-32GB" if is_odd else "NVIDIA A100-SXM4-40GB"
        users = "echo '1, GPU-a, 30000'" if host.name == "node2" else "true"
        text = SMI.format(
            model=model,
            ecc=2 if is_odd else 0,
            hot="Active" if host.name == "node1" else "Not Active",
            users=users,
        )
        host.write("/home/trainer/bin/nvidia-smi", text, user="trainer", mode=0o755)
        host.write("/home/trainer/.bashrc", "PATH=$HOME/bin:$PATH\n", user="trainer")


def break_disks(box: Box) -> None:
    """Give node2 a small /dev/shm, and node3 a checkpoint store that is closed."""
    box.mount_small("node2", "/dev/shm", "1m")
    box.mount_small("node3", "/saved", "1m", "ro")
    for name in ("node1", "node2", "node4"):
        box.mount_small(name, "/saved", "64m")


def test_check_reports_gpus_imports_versions_disks_by_host(small: Desk, box: Box) -> None:
    break_gpus(box)
    break_disks(box)
    for host in box.nodes[:3]:
        host.write(f"{EXTRA}/tokens_of_ours.py", "", user="trainer")
    older = TORCH["torch/__init__.py"].replace("2.13.0", "2.6.0")
    box.host("node4").write(f"{EXTRA}/torch/__init__.py", older, user="trainer")
    guarded = "try:\n    import no_such\nexcept ImportError:\n    pass\n"
    files = {
        "train.py": f"import torch\n{guarded}import model\n",
        "model.py": "import json\nimport tokens_of_ours\n",
    }
    try:
        code, found = check(small, files, nodes=2, checkpoint={"path": "/saved/run/*.pt"})
    finally:
        for host in box.nodes:
            host.path("/home/trainer/.bashrc").unlink()
    user = next(one["found"] for one in found if " uses " in one["found"])
    assert user.startswith("node2: GPU 0: pid 1 (") and user.endswith(" uses 30000 MiB")
    assert sorted((one["what"], one["severity"], one["found"]) for one in found if one["found"] != user) == [
        ("folder", "error", "node3: /saved/run cannot be written to: /saved: read-only file system"),
        ("gpu", "warning", "node3: Tesla V100-SXM2-32GB, the other 3 NVIDIA A100-SXM4-40GB"),
        ("gpus", "warning", f"node1: GPU 0 (NVIDIA A100-SXM4-40GB) {HOT}"),
        ("gpus", "warning", "node3: GPU 0 (Tesla V100-SXM2-32GB) has 2 uncorrected ECC errors since its driver was loaded"),
        ("import", "error", "node4: model.py:2: no module named tokens_of_ours"),
        ("shm", "warning", "node2: /dev/shm has 1 MiB: workers of a DataLoader hand batches over there"),
        ("torch", "error", "node4: torch 2.6.0, the other 3 2.13.0"),
    ]  # fmt: skip
    assert code == 0, "two hosts are enough"


def test_code_that_does_not_compile_fails_the_check(small: Desk) -> None:
    code, found = check(small, {"train.py": "import torch\nx = (\n"})
    assert {one["what"] for one in found} == {"script", "hosts"} and code == 3
    assert found[0]["found"].startswith("node1: train.py:2: SyntaxError")


def test_check_names_two_hosts_without_connection(small: Desk, box: Box) -> None:
    box.cut_between("node2", "node4")
    code, found = check(small)
    assert only(found, "network", "error", "node2", "node4").startswith(
        "node2 and node4 do not reach each other: 10.77"
    )
    assert "timed out" in found[0]["found"] and "rendezvous.interface" in found[0]["fix"]
    assert code == 0, "three hosts are enough"


def test_check_closed_port_range_gets_a_fix(small: Desk, box: Box) -> None:
    box.block_ports(20000, 29999)
    code, found = check(small, ssh={"hosts": "node[1-2]"}, nodes=2)
    assert only(found, "network", "error", "node1", "node2").startswith(
        "node1 and node2 do not reach each other on the port of the rendezvous: 10.77"
    )
    assert "rendezvous.port" in found[0]["fix"] and code == 3


def test_check_names_slow_network_and_failing_host(small: Desk, box: Box) -> None:
    box.slow_wire("node4", 50)
    broken = "import torch.distributed as d\n\ndef fail(*args):\n    raise RuntimeError('ring is broken')\n\nd.all_reduce = fail\n"
    box.host("node3").write(f"{EXTRA}/sitecustomize.py", broken, user="trainer")
    code, found = check(small)
    assert [(one["what"], one["severity"], one["nodes"]) for one in found] == [
        ("network", "warning", ["node4"]),
        ("reduce", "error", ["node3"]),
    ]
    assert found[0]["found"].startswith("every link of node4 is slow: ")
    assert (
        found[1]["found"]
        == "all-reduce over 4 nodes with gloo fails when node3 takes part: RuntimeError: ring is broken"
    )
    assert code == 0, "three hosts are enough"


def test_check_skips_all_reduce_on_gpus_in_use(small: Desk, box: Box) -> None:
    """No all-reduce runs on GPUs that another job holds."""
    break_gpus(box)
    seen = TORCH["torch/__init__.py"].replace("device_count = staticmethod(lambda: 0)", "device_count = lambda: 1")
    for host in box.nodes:
        host.write(f"{EXTRA}/torch/__init__.py", seen, user="trainer")
    spec: dict[str, Any] = {"gpus_per_node": 1, "procs_per_node": 1, "ssh": {"hosts": "node[1-2]"}}
    try:
        job = small.submit({**FAKE_TORCH, "train.py": STEPPER + "run(100_000)\n"}, nodes=1, **spec)
        job.wait_for_step(1)
        done = small.orch("check", small.write(SCRIPT, nodes=2, env={"PYTHONPATH": EXTRA}, **spec), check=False)
    finally:
        for host in box.nodes:
            host.path("/home/trainer/.bashrc").unlink()
    print(done.stdout)
    assert "note  reduce   node1: another job uses GPUs, so the all-reduce runs on CPUs" in done.stdout
    assert "all-reduce over 2 nodes with gloo works" in done.stdout


@pytest.mark.soak
def test_lost_host_is_avoided_until_check_passes(small: Desk, box: Box) -> None:
    """A lost host is remembered and avoided, and used again after it passes a check."""
    files = {**FAKE_TORCH, "train.py": STEPPER + "run(60, each_s=0.05)\n"}
    job = small.submit(files, nodes=2, ssh={"hosts": "node[1-4]"}, restart={"max": 3})
    job.wait_for_step(5)
    box.power_off("node1")
    assert job.wait()["state"] == "SUCCEEDED"
    box.power_on("node1")
    listed = {one["host"]: one for one in json.loads(small.orch("nodes", "--json").stdout)}
    assert "node_lost" in listed["node1"]["why"] and listed["node1"]["failed_job"] == job.id
    assert all(listed[name]["why"] is None for name in ("node2", "node3") if name in listed)
    print(small.orch("nodes").stdout)

    path = small.write({**FAKE_TORCH, "train.py": STEPPER + "run(3)\n"}, nodes=2, ssh={"hosts": "node[1-4]"})
    told = small.orch("submit", path, "--follow").stdout
    assert "avoids  node1, which failed " in told and "a passed orch check clears that" in told
    (last,) = json.loads(small.orch("status", told.split()[1], "--json").stdout)
    assert [one["name"] for one in last["nodes"] if one["ranks"]] == ["node2", "node3"]

    code, found = check(small, nodes=4)
    assert code == 0 and found == [], "with no others it is used, and not called set aside"
    assert json.loads(small.orch("nodes", "--json").stdout)[0] | {"seen_at": ""} == {
        "host": "node1", "state": "passed its check", "seen_at": "", "job": None, "failed_at": None,
        "failed_job": None, "why": None,
    }  # fmt: skip
    box.cut("node2")
    check(small, nodes=2)
    listed = {one["host"]: one for one in json.loads(small.orch("nodes", "--json").stdout)}
    assert listed["node2"]["why"].startswith("connect: ") and listed["node2"]["failed_job"] is None
