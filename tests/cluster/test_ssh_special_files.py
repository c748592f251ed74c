"""What ranks leave on hosts is brought or named, whatever it is; nothing that exists once is deleted without --discard."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.cluster import verbs
from tests.support.cluster.box import Box
from tests.support.cluster.desk import FAKE_TORCH, STEPPER, Desk, Job
from tests.support.cluster.host import TRAINER

HEAD = (
    STEPPER
    + """
import shutil
os.makedirs("out")


def put(name, data=b"x"):
    with open(name, "wb") as file:
        file.write(data)


run(5)
"""
)

ODD = """
put("out/a name\\n with lines ' $(rm -rf x)")
put("out/-rf")
put("out/empty", b"")
shutil.copy2("train.py", "out/copy of train.py")
put("out/old.csv", b"results of a night")
os.utime("out/old.csv", (0, 0))
os.symlink("old.csv", "out/latest")
os.mkfifo("out/pipe")
"""


def _run(desk: Desk, script: str) -> Job:
    job = desk.submit(
        {**FAKE_TORCH, "train.py": HEAD + script}, entrypoint="train.py", nodes=1, procs_per_node=1, ssh={"hosts": "node2"}
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    return job


def test_odd_named_files_are_copied_and_special_named(desk: Desk, box: Box) -> None:
    """Files without a time and with odd names are copied, and what is not a regular file is named."""
    job = _run(desk, ODD)
    place = f"{TRAINER.home}/copy-{job.id}"
    told = desk.orch("collect", job.id, "--to", place).stderr
    assert sorted(path.name for path in box.login.path(f"{place}/code/out").iterdir()) == [
        "-rf", "a name\n with lines ' $(rm -rf x)", "copy of train.py", "empty", "old.csv",
    ]  # fmt: skip
    assert [line.split(": ")[2] for line in told.splitlines()] == [
        f"code/out/{name} is a link, a pipe or another special file, and was not copied" for name in ("latest", "pipe")
    ]
    desk.orch("clean", job.id)
    assert not job.on_host("node2").root.exists()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "put('out/one.csv')\nos.mkdir('out/a')\nput(b'out/a/caf\\xe9.csv')\n",
            "code/out/a of the job cannot be listed: an entry has a name that is not UTF-8",
        ),
        (
            "put('out/one.csv')\nos.makedirs('out/' + 20 * 'd/')\nput('out/' + 20 * 'd/' + 'two.csv')\n",
            f"code/out{19 * '/d'} is more than 20 folders deep",
        ),
    ],
    ids=["name", "deep"],
)
def test_unreadable_file_keeps_host_but_not_other_files(desk: Desk, script: str, why: str) -> None:
    """An unreadable file keeps its host from being cleaned, but other files are copied."""
    job = _run(desk, script)
    for verb in ("collect", "clean"):
        done = desk.orch(verb, job.id, check=False)
        assert done.returncode == 3 and f"node2: {why}; copy it by hand" in done.stderr, done
        assert (job.folder.code / "out/one.csv").read_bytes() == b"x"
        assert job.on_host("node2").root.exists()
    desk.orch("clean", job.id, "--discard")
    assert not job.on_host("node2").root.exists()


@pytest.mark.soak  # three minutes
def test_fifty_thousand_small_files_are_copied(desk: Desk, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    assert box.verbs is not None
    box.verbs.close()  # the next one waits for as long
    monkeypatch.setattr(verbs, "RUN_S_MAX", 900.0)
    job = _run(desk, "for number in range(50_000):\n    put(f'out/sample_{number:06d}.txt', b'%d' % number)\n")
    done = desk.orch("collect", job.id)
    assert "fetched 50000 files" in done.stdout
    paths = list((job.folder.code / "out").iterdir())
    assert len(paths) == 50_000
    assert all(path.read_bytes() == b"%d" % int(path.stem.removeprefix("sample_")) for path in paths)
    desk.orch("clean", job.id)
    assert not job.on_host("node2").root.exists()


def test_unreachable_host_keeps_its_files_and_is_named(desk: Desk, box: Box) -> None:
    script = HEAD + "put(f'out/rank_{rank}.csv')\n"
    job = desk.submit(
        {**FAKE_TORCH, "train.py": script}, entrypoint="train.py", nodes=2, procs_per_node=1, ssh={"hosts": "node[2-3]"}
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    box.power_off("node3")
    for words in (["collect"], ["clean"], ["clean", "--discard"]):
        done = desk.orch(*words, job.id, check=False)
        assert done.returncode == 3 and "node3" in done.stderr, done
    assert (job.folder.code / "out/rank_0.csv").exists() and not job.on_host("node2").root.exists()
    assert job.on_host("node3").root.exists()
    box.power_on("node3")
    desk.orch("clean", job.id)
    assert (job.folder.code / "out/rank_1.csv").exists() and not job.on_host("node3").root.exists()


GROWING = """
block = bytes(range(256)) * 4096


def grow(step):
    print("words of step", step, flush=True)
    with open("out/train.log", "ab") as file:
        file.write(b"%08d" % step + block)


run(205, 0.05, grow, start=5)
"""


def test_growing_file_is_copied_whole_at_the_end(desk: Desk, box: Box) -> None:
    """It has 200 MB in the end."""
    job = desk.submit(
        {**FAKE_TORCH, "train.py": HEAD + GROWING}, entrypoint="train.py", nodes=1, procs_per_node=1, ssh={"hosts": "node2"}
    )  # fmt: skip
    job.wait_for_step(20)
    for number in range(3):
        place = f"{TRAINER.home}/grown-{number}"
        done = desk.orch("collect", job.id, "--to", place)
        assert "the job is still running: only logs and checkpoints are here" in done.stderr, done
        part = box.login.path(f"{place}/logs/attempt-001/rank-00000.log").read_bytes()
        assert part and job.folder.rank_log(1, 0).read_bytes().startswith(part)
    assert job.seen()["state"] == "RUNNING"
    status = job.wait()
    assert (status["state"], status["step"], status["restarts"]) == ("SUCCEEDED", 205, 0), job.story()
    theirs = job.on_host("node2").code / "out/train.log"
    assert theirs.stat().st_size == 200 * (8 + (1 << 20))
    # Something else on the host still writes to it
    words = [
        "sh",
        "-c",
        f"for i in $(seq 100); do echo more >>{TRAINER.home}/.orch/jobs/{job.id}/code/out/train.log; sleep 0.05; done",
    ]
    writer = subprocess.Popen(box.host("node2").argv(words, user="trainer"))
    done = desk.orch("collect", job.id, check=False)
    assert "Traceback" not in done.stderr and done.returncode in (0, 3), done
    assert writer.wait(60) == 0
    ours = job.folder.code / "out/train.log"
    assert theirs.read_bytes().startswith(ours.read_bytes()) and ours.stat().st_size >= 200 << 20
    again = desk.orch("collect", job.id)
    came = [ours, *job.folder.from_hosts.rglob("train.log")]
    assert any(one.read_bytes() == theirs.read_bytes() for one in came), again
