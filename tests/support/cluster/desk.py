"""How do tests submit jobs on the cluster in a box, and look at them? Through `orch` on login, and the job's folder.

Rules: jobs are trainer's, submitted on login; every wait has a limit and a name; what a job that is over has left
running, on any host, or has left in Slurm's queue, is found at the end of the test and fails it.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestrator.core.host.procfs import Proc
from orchestrator.core.jobdir.layout import JobDir
from tests.support.local import FAKE_TORCH, STEPPER, start_for

from .box import Box
from .host import TRAINER, USERS, Host, Running, User, running, wait_for
from .slurm import SlurmBox

__all__ = ["ENDED", "FAKE_TORCH", "LAUNCHED", "STEPPER", "TOGETHER", "WAIT_S_MAX", "Desk", "Job"]

WAIT_S_MAX = 150.0
"""How long anything may take on a machine that is busy with other things."""

GONE_S_MAX = 60.0
"""How long the processes of an ended job may take to leave all hosts."""

SILENCE_POLL_S = 0.1
"""Between two scans of /proc."""

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
WORK = "desk"
LISTER = "/packages.json"
"""Part of the command that lists the submitter's packages, some time after a submit."""

Json = dict[str, Any]

TOGETHER = (
    STEPPER
    + """
import socket

world_size = int(os.environ["WORLD_SIZE"])
port = int(os.environ["MASTER_PORT"])
peers = []


def meet():
    # Rank 0 listens where all expect it; a rank that is lost breaks the others, as it does with gloo.
    if rank == 0:
        with socket.create_server(("", port)) as listener:
            for _ in range(world_size - 1):
                peers.append(listener.accept()[0])
                peers[-1].sendall(b"!")
        return
    for _ in range(3000):
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], port))
            if peer.recv(1):  # as torch's store: who held the port until then does not answer
                peers.append(peer)
                return
        except (ConnectionRefusedError, ConnectionResetError):
            pass
        time.sleep(0.02)
    raise SystemExit("rank 0 never listened")


def together(word):
    # Wait for all ranks; all get what rank 0 says, True or False.
    if rank > 0:
        peers[0].sendall(b".")
    for peer in peers:
        said = peer.recv(1)
        if not said:
            raise RuntimeError("Connection closed by peer")
        word = said == b"1" if rank else word
    if rank == 0:
        for peer in peers:
            peer.sendall(b"1" if word else b"0")
    return word
"""
)
"""What `STEPPER` has, and `together(word)`: a sum over the ranks in small, after `meet()`.

Ranks that do not wait for one another go on when a host is cut off, and are rightly left alone.
"""


LAUNCHED = {
    "steps.py": TOGETHER
    + """
meet()
def at_step(step):
    together(True)
    if (attempt, rank, step, sys.argv[1]) == (1, 3, 5, "second"):
        os.kill(os.getpid(), 9)
run(10, 0.02, at_step)
print("call", sys.argv[1:], flush=True)
""",
    "go.sh": 'for call in first second; do torchrun --nnodes "$NNODES" --nproc_per_node="$1" steps.py $call; done\n',
    **FAKE_TORCH,
}
"""A script of two launcher calls: in the second a rank is lost."""


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted job. `inside` is its folder as login sees it."""

    desk: Desk
    id: str
    inside: str
    user: User = TRAINER

    @property
    def folder(self) -> JobDir:
        """The job's folder on login, as this process sees it."""
        return JobDir(self.desk.box.login.path(self.inside))

    # --- how it is

    def seen(self) -> Json:
        """Return the status file as it stands, without reviving anybody."""
        try:
            known: Json = json.loads(self.folder.state.read_bytes())
        except FileNotFoundError:
            return {
                "state": "",
                "step": None,
                "attempt": 0,
                "restarts": 0,
                "nodes": [],
                "ranks": [],
                "reason": "",
            }
        return known

    def status(self) -> Json:
        """Return what `orch status --json` says."""
        (known,) = json.loads(self.desk.orch("status", self.id, "--json", user=self.user.name).stdout)
        return dict(known)

    def why(self) -> list[Json]:
        """Return the attempts as `orch why --json` tells them."""
        known = json.loads(self.desk.orch("why", self.id, "--json", user=self.user.name).stdout)
        return list(known["attempts"])

    def kinds(self) -> list[str | None]:
        """Return the kinds of the attempts' verdicts."""
        return [one["verdict"]["kind"] if one["verdict"] else None for one in self.why()]

    def note(self, node: str) -> str:
        """Return what the status says about a host, and how to mend that."""
        return next(
            (f"{one['note']}; {one['fix']}" for one in self.seen()["nodes"] if one["name"] == node and one["note"]),
            "",
        )

    def placed(self) -> list[str]:
        """Return the hosts that have ranks, in the order of their ranks."""
        return [str(one["name"]) for one in self.seen()["nodes"] if one["ranks"]]

    # --- waiting

    def wait(self, limit_s: float = WAIT_S_MAX) -> Json:
        """Wait for the job's end and return its status."""
        self.until(lambda seen: seen["state"] in ENDED, "the end of the job", limit_s)
        return self.status()

    def wait_for_state(self, state: str) -> Json:
        return self.until(lambda seen: seen["state"] == state, f"state {state}")

    def wait_for_step(self, step: int, attempt: int = 1) -> Json:
        return self.until(
            lambda seen: seen["attempt"] >= attempt and (seen["step"] or 0) >= step,
            f"step {step} of attempt {attempt}",
        )

    def wait_for_line(self, text: str, rank: int = 0, attempt: int = 1) -> None:
        self.wait_until(lambda: text in self.log(rank, attempt), f"{text!r} in the log of rank {rank}")

    def until(self, holds: Any, what: str, limit_s: float = WAIT_S_MAX) -> Json:
        """Wait until the status file fulfils a condition, and return it."""

        def met() -> Json | None:
            seen = self.seen()
            return seen if holds(seen) else None

        found = self.wait_until(met, what, limit_s)
        assert found is not None
        return dict(found)

    def wait_until(self, condition: Any, what: str, limit_s: float = WAIT_S_MAX) -> Any:
        """Return the first true value of `condition`; fail with the job's story when none comes in time."""
        try:
            return wait_for(condition, what, limit_s)
        except TimeoutError as err:
            raise AssertionError(f"{err}\n{self.story()}") from None

    def story(self) -> str:
        """Return what one wants to read when a test has failed."""
        seen = self.seen()
        parts = [json.dumps({key: seen.get(key) for key in ("state", "attempt", "step", "reason", "nodes")}, indent=1)]
        for path in (self.folder.supervisor_log, *sorted(self.folder.logs.glob("attempt-*/*"))):
            if path.suffix == ".log" and path.exists():  # a job in Slurm's queue has none yet
                parts.append(f"--- {path.name}\n{_tail(path)}")
        return "\n".join(parts)

    # --- its logs

    def log(self, rank: int = 0, attempt: int = 1) -> str:
        """Return what has arrived at home of a rank's log."""
        path = self.folder.rank_log(attempt, rank)
        return path.read_text() if path.exists() else ""

    def steps_logged(self, rank: int = 0, attempt: int = 1) -> list[int]:
        """Return the steps that a rank of `STEPPER` has printed, in order."""
        lines = self.log(rank, attempt).splitlines()
        return [int(line.rpartition(" ")[2]) for line in lines if line.startswith("attempt ")]

    # --- its processes

    def supervisor(self) -> Proc:
        """Return the process that supervises: on login, or on the first node that Slurm has given."""
        return self._supervisor()[1]

    def kill_supervisor(self) -> None:
        """Kill the supervisor and before it its guard, which would start another, and wait until both are gone."""
        host, proc = self._supervisor()
        guards = [one.proc for one in host.processes() if f"guard {self.inside}" in one.command]
        host.kill([*guards, proc])

    def _supervisor(self) -> tuple[Host, Proc]:
        box, words = self.desk.box, f"supervise {self.inside}"
        hosts = list(box.hosts.values()) if isinstance(box, SlurmBox) else [box.login]

        def find() -> list[tuple[Host, Proc]]:  # the batch script has these words too, behind those of its shell
            found = [(host, one) for host, one in running(hosts) if words in one.command]
            return [(host, one.proc) for host, one in found if Path(one.program).name.startswith("python")]

        ((host, proc), *_) = self.wait_until(find, "a supervisor")
        return host, proc

    def slurm_id(self) -> str:
        """Return Slurm's number of the job."""
        return str(json.loads(self.folder.slurm.read_bytes())[-1])

    def on_host(self, name: str) -> JobDir:
        """Return the job's folder on a host, as this process sees it; `ssh.remote_dir` is the default."""
        if isinstance(self.desk.box, SlurmBox):
            return self.folder
        return JobDir(self.desk.box.hosts[name].path(f"{self.user.home}/.orch/jobs/{self.id}"))


@dataclass(slots=True)
class Desk:
    """Submits jobs from login, and clears up after them: over Slurm where the box has one, else over SSH.

    `loads`: each verb is a process that loads what it needs; else those of trainer are forks of one that has.
    """

    box: Box
    loads: bool = True
    jobs: list[Job] = field(default_factory=list)

    @property
    def backend(self) -> str:
        """The backend of jobs that name none."""
        return "slurm" if isinstance(self.box, SlurmBox) else "ssh"

    def orch(
        self,
        *words: str,
        user: str = "trainer",
        check: bool = True,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a verb on login."""
        environ = {**_environ(user), **(env or {})}
        if user == TRAINER.name and self.box.verbs and not self.loads:
            return self.box.verbs.run(words, cwd, environ, check=check)
        argv = [sys.executable, "-m", "orchestrator.cli", *words]
        return self.box.login.run(argv, user=user, cwd=cwd, env=environ, check=check)

    def write(self, files: Mapping[str, str], user: str = "trainer", **spec: object) -> str:
        """Write a job's files on login, and return the path of its job file; sections are merged into the tests'.

        `backend="ssh"` is possible where the box has a Slurm too.
        """
        home = USERS[user].home
        work = f"{home}/{WORK}/work-{len(list(self.box.login.path(f'{home}/{WORK}').glob('work-*')))}"
        for name, text in files.items():
            self.box.login.write(f"{work}/{name}", text, user=user)
        whole: Json = {
            "name": "t", "backend": self.backend, "nodes": 2, "procs_per_node": 2, "entrypoint": "train.py",
            "monitor": {"heartbeat_s": 0.2, "stop_grace": 5, "node_timeout": 8, "start_timeout": 120},
            "restart": {"backoff": 0}, "start": start_for(files),
        }  # fmt: skip
        if spec.get("backend", self.backend) == "ssh":
            whole["ssh"] = {"hosts": "node[1-2]"}
        for key, value in spec.items():
            here = whole.get(key)
            whole[key] = {**here, **value} if isinstance(value, dict) and isinstance(here, dict) else value
        self.box.login.write(f"{work}/job.yaml", yaml.safe_dump(whole), user=user)
        return f"{work}/job.yaml"

    def submit(self, files: Mapping[str, str], *, user: str = "trainer", **spec: object) -> Job:
        """Submit a job made of these files, with the given fields of the job file."""
        path = self.write(files, user, **spec)
        told = json.loads(self.orch("submit", path, "--json", user=user).stdout)
        job = Job(self, told["id"], told["dir"], USERS[user])
        self.jobs.append(job)
        return job

    def at_work(self, users: Sequence[str] = ("trainer",)) -> list[str]:
        """Return the processes that jobs have on the hosts, sessions of sshd among them, in words."""
        return [f"{host.name}: {one.command}" for host, one in _of(self.box, users)]

    def clear_up(self) -> list[str]:
        """End what is not over, and return what ended jobs have left running."""
        self.box.heal()
        users = sorted({job.user.name for job in self.jobs} | {"trainer"})
        over = all(job.seen()["state"] in ENDED for job in self.jobs)
        left: list[str] = []
        if over:
            try:
                wait_for(lambda: not self._left(users), "silence", GONE_S_MAX, SILENCE_POLL_S)
            except TimeoutError:
                left = self._left(users)
        if isinstance(self.box, SlurmBox):
            self.box.clear()
        busy = _of(self.box, users)
        for host, one in busy:
            host.signal([one.proc], signal.SIGSTOP)  # nobody starts anything anew meanwhile
        for name in {host.name for host, _ in busy}:
            for user in users:
                self.box.kill_all(name, user)
        for host in self.box.hosts.values():
            for user in users:
                for name in (WORK, ".orch"):
                    shutil.rmtree(host.path(f"{USERS[user].home}/{name}"), ignore_errors=True)
        self.jobs.clear()
        return left

    def _left(self, users: Sequence[str]) -> list[str]:
        """Return what is there of jobs: processes, and, once there are none of these, entries in Slurm's queue."""
        found = self.at_work(users)
        if found or not isinstance(self.box, SlurmBox):
            return found
        entries = self.box.queue.entries()
        return [f"Slurm's job {one.id} is {one.state}: {one.reason}" for one in entries if one.user in users]


def _of(box: Box, users: Sequence[str]) -> list[tuple[Host, Running]]:
    """Return what the users have running on all hosts; root has sshd itself, and its part of everybody's sessions."""
    uids = [USERS[user].uid for user in users]
    return [
        (host, one)
        for host, one in running(box.hosts.values())
        if one.uid in uids and not (one.uid == 0 and one.is_sshd) and LISTER not in one.command
    ]


def _environ(user: str) -> dict[str, str]:
    return {"ORCH_HOME": f"{USERS[user].home}/{WORK}/home"}


def _tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
