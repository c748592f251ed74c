"""What if a host cannot be used? It is told which host, how far it came, and what to do; the others go on without it."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.cluster.box import Box
from tests.support.cluster.desk import FAKE_TORCH, STEPPER, Desk, Job
from tests.support.cluster.host import USERS, wait_for
from tests.support.cluster.small_torch import install

SHORT = {**FAKE_TORCH, "train.py": STEPPER + "run(20)\n"}
FOREVER = {**FAKE_TORCH, "train.py": STEPPER + "run(10**9, each_s=0.05)\n"}


def assert_goes_on_without_node2(job: Job, *words: str) -> None:
    """The job runs on node1 and node3, and its status says about node2 what it must."""
    status = job.wait()
    assert status["state"] == "SUCCEEDED"
    assert job.placed() == ["node1", "node3"]
    for word in words:
        assert re.search(word, job.note("node2"), re.IGNORECASE), (word, job.note("node2"))
    (node2,) = (one for one in status["nodes"] if one["name"] == "node2")
    assert node2["state"] == "excluded"


def three(desk: Desk, **ssh: object) -> Job:
    """Submit a short job for two of three hosts."""
    return desk.submit(SHORT, ssh={"hosts": "node[1-3]", **ssh})


@pytest.mark.soak
def test_changed_host_key_is_refused(desk: Desk, box: Box) -> None:
    box.change_host_key("node2")
    assert_goes_on_without_node2(three(desk), "host key", "ssh-keygen .*-R", "known_hosts")


@pytest.mark.soak
def test_unknown_host_key_is_learnt_if_allowed(desk: Desk, box: Box) -> None:
    box.forget_host_key("node2")
    job = desk.submit(SHORT, ssh={"hosts": "node[1-2]", "host_keys": "accept-new"})
    assert job.wait()["state"] == "SUCCEEDED"
    box.login.run(["ssh-keygen", "-F", "node2"], user="trainer")  # ends with 1 where it is not known


def test_job_needing_refused_host_fails_with_reason(desk: Desk, box: Box) -> None:
    box.change_host_key("node2")
    job = desk.submit(SHORT)
    status = job.wait()
    assert status["state"] == "FAILED"
    assert "node2" in status["reason"] and "host key" in status["reason"]
    shown = desk.orch("status", job.id).stdout
    assert "node2" in shown and "host key" in shown
    planned = desk.orch("plan", desk.write(SHORT), check=False)
    assert planned.returncode == 3 and "1 host can be used, 2 needed" in planned.stdout


def test_missing_or_hanging_hosts_do_not_delay_others(desk: Desk, box: Box) -> None:
    """Hosts that do not exist, or that answer and then hang, do not delay the others."""
    box.hang_sshd("node2")
    job = desk.submit(SHORT, ssh={"hosts": ["nosuch", "node[1-3]"]})
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.placed() == ["node1", "node3"]
    assert job.note("nosuch")


@pytest.mark.soak
def test_any_login_shell_works(desk: Desk, box: Box) -> None:
    passwd = box.host("node2").path("/etc/passwd")
    before = passwd.read_text()
    passwd.write_text(before.replace("/home/trainer:/bin/bash", "/home/trainer:/bin/dash"))
    try:
        assert desk.submit(SHORT).wait()["state"] == "SUCCEEDED"
    finally:
        passwd.write_text(before)


def test_hosts_behind_a_bastion_are_reached_through_it(desk: Desk, box: Box) -> None:
    box.bastion("node1")
    box.login.write("/home/trainer/.ssh/config", "Host node2 node3\n  ProxyJump node1\n", user="trainer")
    try:
        job = desk.submit(SHORT, ssh={"hosts": "node[2-3]"})
        assert job.wait()["state"] == "SUCCEEDED"
        assert job.placed() == ["node2", "node3"]
    finally:
        box.login.path("/home/trainer/.ssh/config").unlink()


# --- two jobs


def test_jobs_of_all_users_queue_for_hosts(desk: Desk, box: Box) -> None:
    """Jobs that want the same hosts run one after another, whichever user they belong to."""
    homes = {user: f"{USERS[user].home}/desk/hosts" for user in ("trainer", "root")}
    for user, path in homes.items():
        box.login.write(path, "node[1-2] slots=2\n", user=user)
    ssh = {"hosts": [], "hosts_file": homes["trainer"]}
    first = desk.submit(FOREVER, ssh=ssh, name="first")
    first.wait_for_step(5)
    held = rf"slots 0, 1 held by job {first.id} of trainer, pid \d+"
    path = desk.write(SHORT, ssh=ssh, name="checked", env=install(box.nodes[:2]))
    assert re.search(held, desk.orch("plan", path).stdout)
    checked = desk.orch("check", path).stdout
    assert re.search(held, checked) and "warn  free" in checked

    second = desk.submit(SHORT, ssh=ssh, name="second")
    others = desk.submit(SHORT, user="root", ssh={"hosts": [], "hosts_file": homes["root"]}, name="others")
    for job in (second, others):
        assert not job.wait_for_state("QUEUED")["step"]
        job.until(lambda seen: "trainer" in str(seen) and first.id in str(seen), "the name of the holder")
    told = desk.orch("nodes", "--free").stdout
    assert re.search(rf"node1 +0 of 2 slots +slots 0, 1 by job {first.id} of trainer, pid \d+, since 20", told), told
    assert f"waiting  {second.id}: " in told
    third = desk.submit(SHORT, ssh=ssh, name="third")
    third.until(lambda seen: second.id in str(seen), "the name of the job before it")
    desk.orch("cancel", third.id)
    desk.orch("cancel", first.id)
    assert first.wait()["state"] == "CANCELLED"
    for job in (second, others):
        assert job.wait()["state"] == "SUCCEEDED"


@pytest.mark.soak
def test_two_jobs_share_hosts_with_enough_gpus(desk: Desk) -> None:
    desk.box.login.write("/home/trainer/desk/hosts", "node[1-4] slots=2\n", user="trainer")
    ssh = {"hosts": [], "hosts_file": "/home/trainer/desk/hosts"}
    first = desk.submit(FOREVER, ssh=ssh, name="first")
    first.wait_for_step(5)
    second = desk.submit(SHORT, ssh=ssh, name="second")
    assert second.wait()["state"] == "SUCCEEDED"
    assert (first.placed(), second.placed()) == (["node1", "node2"], ["node3", "node4"])
    desk.orch("cancel", first.id)
    assert first.wait()["state"] == "CANCELLED"


# --- what is left, and what is told before


def test_job_leaves_only_folder_that_clean_removes(desk: Desk, box: Box) -> None:
    """A job leaves nothing on a host but its folder, and orch clean removes that."""
    host = box.host("node1")

    def files() -> set[str]:
        found = host.run(["find", "/home", "/tmp", "/dev/shm", "/run", "/var/tmp/nosuch", "-xdev"], check=False)
        return set(found.stdout.splitlines())

    before = files()
    job = desk.submit(SHORT)
    assert job.wait()["state"] == "SUCCEEDED"
    job.wait_until(job.folder.ended.exists, "its supervisor's leave")
    own = f"/home/trainer/.orch/jobs/{job.id}"
    extra = {path for path in files() - before if not path.startswith(f"{own}/")}
    assert extra <= {"/home/trainer/.orch", "/home/trainer/.orch/jobs", own}
    desk.orch("clean", "--yes")
    assert not job.on_host("node1").root.exists() and not job.on_host("node2").root.exists()


def test_check_names_faults_of_each_host_without_starting(desk: Desk, box: Box) -> None:
    """orch check names each host's faults and starts nothing."""
    box.change_host_key("node2")
    box.no_forwarding("node3")
    path = desk.write(SHORT, nodes=3, ssh={"hosts": "node[1-3]"}, env=install(box.nodes[:3]))
    done = desk.orch("check", path, check=False)
    told = done.stdout + done.stderr
    assert done.returncode == 3
    assert re.search("host key.*node2", told) and re.search("forward.*node3", told)
    wait_for(lambda: not desk.at_work(), "silence on all hosts")
    assert not box.host("node1").path("/home/trainer/.orch").exists()


DUMP = "import json, os\nprint(json.dumps(dict(os.environ)), flush=True)\n"


def test_plan_of_hosts_matches_what_ranks_get(desk: Desk, box: Box) -> None:
    """Ranks get exactly what orch plan says about their hosts."""
    box.change_host_key("node2")
    path = desk.write({"train.py": DUMP}, ssh={"hosts": "node[1-3]"}, env={"NCCL_DEBUG": "INFO"})
    data = json.loads(desk.orch("plan", path, "--json").stdout)
    node1, node2, node3 = data["nodes"]
    assert "host key" in node2["fault"] and node2["fix"] and not node2["ranks"]
    assert (node1["ranks"], node3["ranks"]) == ([0, 1], [2, 3])
    later = {one["name"] for one in node1["settings"] if one["set_by"] == "orch, at the start"}
    assert later == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    mine = next(one for one in node1["settings"] if one["name"] == "NCCL_DEBUG")
    assert mine["value"] == "INFO" and mine["set_by"] == "you" and "job.yaml:" in mine["reason"]
    shown = desk.orch("plan", path).stdout
    assert "node2: fix: " in shown and "OMP_NUM_THREADS=1" in shown

    job = desk.submit({"train.py": DUMP}, ssh={"hosts": "node[1-3]"}, env={"NCCL_DEBUG": "INFO"})
    assert job.wait()["state"] == "SUCCEEDED"
    for node in (node1, node3):
        planned = {one["name"]: one["value"] for one in node["settings"] if one["value"] is not None}
        plain = {name: value for name, value in planned.items() if "{" not in value}
        for rank in node["ranks"]:
            found = json.loads(job.log(rank).splitlines()[0])
            assert {name: found[name] for name in plain} == plain
            assert found["NCCL_SOCKET_IFNAME"] == f"={found['GLOO_SOCKET_IFNAME']}" != "=lo"
