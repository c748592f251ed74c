"""Can a rank tell that it was forked from its node's template, and what becomes of a start when the template cannot help?"""

from __future__ import annotations

import json
import signal
import textwrap

import pytest

from orchestrator.core.host import procfs
from orchestrator.core.host.procfs import Proc
from tests.integration.test_flight_nccl import has_gpu
from tests.support.local import Desk, Sight, kill, wait_until
from tests.support.packages import need
from tests.support.torch_script import WITHOUT_DYNAMO

need("torch")
pytestmark = pytest.mark.slow

PROBE = (
    """
import torch
import atexit, gc, json, locale, logging, multiprocessing, os, pickle, random, resource, signal, sys, threading, time

class Picked:
    def __init__(self, value): self.value = value

def seen():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    main = sys.modules["__main__"]
    own = {"ORCH_RANK_DIR", "ORCH_TAG", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT", "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN",
           "ORCH_JOB_ID", "TORCHELASTIC_RUN_ID",
           "ORCH_CHECKPOINT_DIR", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "PWD", "ORCH_JOB_NAME",
           "ORCH_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "NCCL_DEBUG_FILE", "TORCHINDUCTOR_CACHE_DIR", "WANDB_RUN_ID", "MLFLOW_RUN_NAME"}
    return {
        "argv": [word.replace(os.getcwd(), "CODE") for word in sys.argv], "orig_argv": [os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]],
        "path": [entry.replace(os.getcwd(), "CODE") for entry in sys.path],
        "executable": sys.executable, "flags": str(sys.flags), "options": sys.warnoptions, "x": str(sys._xoptions),
        "cmdline": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"), "comm": open("/proc/self/comm").read(),
        "environ": {name: value for name, value in os.environ.items() if name not in own and "CODE" not in value
                    and os.getcwd() not in value and "hook" not in value},
        "os_environ_class": type(os.environ).__name__,
        "cwd_is_code": os.path.basename(os.getcwd()), "umask": status["Umask"], "limits": [
            resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "signals": [str(signal.getsignal(number)).split(" of <")[0] for number in signal.valid_signals()],
        "masks": [status[name] for name in ("SigBlk", "SigIgn", "ShdPnd", "SigPnd")],
        "caps": [status[name] for name in status if name.startswith("Cap")], "nice": os.nice(0),
        "cpus": sorted(os.sched_getaffinity(0)), "oom": open("/proc/self/oom_score_adj").read(),
        "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getpid() == os.getpgid(0)],
        "parent": open(f"/proc/{os.getppid()}/comm").read(), "death": death(),
        "streams": [[s.fileno(), s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.name]
                    for s in (sys.stdin, sys.stdout, sys.stderr)],
        "stdin": os.readlink("/proc/self/fd/0"), "append": [fdflags(1) & os.O_APPEND, fdflags(2) & os.O_APPEND],
        "main": {name: str(type(value)) for name, value in vars(main).items() if name.startswith("__")},
        "name": main.__name__, "file": main.__file__.replace(os.getcwd(), "CODE"), "spec": main.__spec__ and [main.__spec__.name, main.__spec__.origin.replace(os.getcwd(), "CODE")],
        "threads": [thread.name for thread in threading.enumerate()],
        "handlers": [str(one) for one in logging.root.handlers], "level": logging.root.level,
        "hooks": [sys.excepthook.__module__, sys.displayhook.__name__, str(sys.gettrace()), str(sys.getprofile())],
        "recursion": sys.getrecursionlimit(), "interval": sys.getswitchinterval(), "gc": [gc.isenabled(), gc.get_threshold()],
        "locale": locale.setlocale(locale.LC_ALL), "encodings": [sys.getfilesystemencoding(), locale.getpreferredencoding()],
        "start": multiprocessing.get_start_method(allow_none=True), "finders": [
            getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype()),
            torch.get_num_interop_threads(), torch.is_grad_enabled()],
        "uid": [os.getuid(), os.getgid(), os.getgroups()], "tz": os.environ.get("TZ"), "python": sys.version,
        "forked": len(os.listdir("/proc/self/fd")) < 30, "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "hook": hasattr(sys, "_orch_hook"), "dunder_doc": main.__doc__,
        "picked": [pickle.loads(pickle.dumps(Picked(3))).value, main.Picked is Picked], "gang": torch.distributed.is_initialized(),
    }

def fdflags(fd):
    import fcntl
    return fcntl.fcntl(fd, fcntl.F_GETFL)

def death():
    import ctypes
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value

if __name__ == "__main__":
    attempt, rank = int(os.environ["ORCH_ATTEMPT"]), os.environ["RANK"]
    with open(os.environ["ORCH_CHECKPOINT_DIR"] + f"/seen-{attempt}-{rank}.json", "w") as file:
        json.dump({**seen(), "random": None}, file)
    print("random", random.random(), torch.rand(1).item())
"""
    + textwrap.indent(WITHOUT_DYNAMO, "    ")
    + """
    linear = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for _ in range(2 + attempt):  # to fail twice at the same step would be no progress
        linear(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    atexit.register(print, "at exit")
    while attempt < 3 and (rank == "1" or not os.path.exists(f"go-{attempt}")):
        time.sleep(0.05)
    sys.exit(3 - attempt)
"""
)


def _how(job: Sight, attempt: int = 1) -> str:
    """Return the agent's line of its log on how it started ranks."""
    log = job.job.folder.node_log(attempt, "node-0").read_text()
    return next(line for line in log.splitlines() if "is pid" in line)


@pytest.mark.parametrize(
    "entry", ["probe.py --lr 0.1 'two words'", pytest.param("-m pack.probe --lr 0.1", marks=pytest.mark.soak)]
)
def test_forked_rank_matches_new_interpreter_and_falls_back(desk: Desk, entry: str) -> None:
    """A forked rank sees what a new interpreter sees; one starts if the template does not answer."""
    files = {"probe.py": PROBE, "pack/__init__.py": "", "pack/probe.py": PROBE}
    job = desk.submit(files, name="probe", entrypoint=entry)
    for attempt in (1, 2):
        steps = [2 + attempt] * 2
        wait_until(lambda: [rank["step"] for rank in job.seen()["ranks"]] == steps, "the steps")  # noqa: B023
        if attempt == 2:
            template = _template(job)
            kill(template, signal.SIGSTOP)
            wait_until(lambda: getattr(procfs.stat(template.pid), "state", "") == "T", "the template's stop")  # noqa: B023
        (job.job.folder.code / f"go-{attempt}").touch()
    status = job.wait()
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 2), job.job.why()
    assert "forks of a process" in _how(job, 1) and "forks of a process" in _how(job, 2)
    assert "new interpreters" in _how(job, 3) and "did not answer" in _how(job, 3)
    for rank in (0, 1):
        files_seen = [job.job.folder.checkpoints / f"seen-{attempt}-{rank}.json" for attempt in (1, 2, 3)]
        *forked, new = [json.loads(file.read_text()) for file in files_seen]
        for one in forked:
            different = {key for key in new if one[key] != new[key]}
            assert not different, [(key, one[key], new[key]) for key in different]
    assert job.log(0).splitlines()[-1] == "at exit"
    drawn = [job.log(rank).splitlines()[0].split()[1:] for rank in (0, 1)]
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1], "each rank has its own random numbers"


TRAIN = (
    "import os, signal, time\n"
    + WITHOUT_DYNAMO
    + """
linear = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
attempt = int(os.environ["ORCH_ATTEMPT"])
for step in range(40):
    linear(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
    if step == 10 * attempt and attempt < 3 and os.environ["RANK"] == "1":
        while not os.path.exists(f"go-{attempt}"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


def _template(job: Sight) -> Proc:
    """Return the node's template."""
    (one,) = (
        proc for proc in job.processes() if b"template.py" in (procfs.PROC / str(proc.pid) / "cmdline").read_bytes()
    )
    return one


GANG = """
import datetime, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""

KILLS = 100


@pytest.mark.soak
def test_gang_survives_hundred_kills_without_leftovers(desk: Desk) -> None:
    """A gang comes back after each of a hundred kills and leaves nothing behind."""
    job = desk.submit({"gang.py": GANG}, entrypoint="gang.py", procs_per_node=2, restart={"max": 1000})
    figures = []
    for attempt in range(1, KILLS + 1):
        _await_steps(job, attempt)
        figures.append(_figures(job))
        kill(job.rank_procs()[attempt % 2])  # twice the same rank at the same step would be no progress
    _await_steps(job, KILLS + 1)
    early, late = figures[5], _figures(job)
    assert job.kinds() == ["crash"] * KILLS + [None]
    assert {how for one in job.attempts() for how in one["starts"]} == {"forks of a process that has imported torch"}
    assert late["template"] == early["template"], "one template served all"
    assert late["agent_fds"] <= early["agent_fds"] + 1 and late["template_fds"] == early["template_fds"]
    assert late["zombies"] == 0 and late["processes"] == early["processes"]
    assert late["template_kib"] < 1.05 * early["template_kib"]
    took_s = sorted(one["restart_s"] for one in job.attempts()[:-1])
    print(f"restarts took {took_s[KILLS // 2]:.2f} s, at most {took_s[-1]:.2f} s; {early}, then {late}")
    job.job.cancel()
    job.wait()


def _await_steps(job: Sight, attempt: int) -> None:
    def are_made() -> bool:
        seen = job.seen()
        return seen["attempt"] == attempt and min(rank["step"] or 0 for rank in seen["ranks"]) > 2

    wait_until(are_made, f"steps of attempt {attempt}")


def _figures(job: Sight) -> dict[str, int]:
    """Return what must not grow from attempt to attempt."""
    template, agent = procfs.PROC / str(_template(job).pid), procfs.PROC / str(job.agent().pid)
    below = [procfs.stat(pid) for pid in procfs.children().get(int(agent.name), [])]
    return {
        "template": int(template.name),
        "template_kib": int((template / "smaps_rollup").read_text().partition("Rss:")[2].split()[0]),
        "template_fds": len(list((template / "fd").iterdir())),
        "agent_fds": len(list((agent / "fd").iterdir())),
        "zombies": sum(1 for stat in below if stat is not None and stat.state == "Z"),
        "processes": len(job.processes()),
    }


@pytest.mark.soak
def test_ranks_fork_again_after_template_is_killed(desk: Desk) -> None:
    job = desk.submit({"train.py": TRAIN}, entrypoint="train.py")
    for attempt in (1, 2):
        wait_until(lambda: job.seen()["attempt"] == attempt and (job.seen()["step"] or 0) > 5, "steps")  # noqa: B023
        if attempt == 2:
            kill(_template(job))
        (job.job.folder.code / f"go-{attempt}").touch()
    status = job.wait()
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 2), job.job.why()
    assert all("forks" in _how(job, attempt) for attempt in (1, 2, 3))


ON_GPU = """
import os, time
import torch
print(torch.ones(2, device="cuda").sum().item(), torch.cuda.is_initialized(), flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
"""


def test_gpu_contexts_are_created_in_ranks_only(desk: Desk) -> None:
    if not has_gpu():
        pytest.skip("needs a CUDA device")
    job = desk.submit({"train.py": ON_GPU}, entrypoint="train.py", procs_per_node=1, gpus_per_node=1)
    wait_until(lambda: "True" in job.log(), "a context in the rank")
    opened = [str(fd.readlink()) for fd in (procfs.PROC / str(_template(job).pid) / "fd").iterdir()]
    assert [path for path in opened if path.startswith("/dev/nvidia")] == []
    (job.job.folder.code / "go").touch()
    assert job.wait()["state"] == "SUCCEEDED" and job.log().startswith("2.0 True")
