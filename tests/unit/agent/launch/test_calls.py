"""What do ranks of a launcher call run, and in which environment?"""

from __future__ import annotations

from pathlib import Path

from orchestrator.agent.launch import calls
from orchestrator.agent.ranks.hook.launch import find_launcher
from orchestrator.agent.ranks.rank_start import LauncherCall, RankCall
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.settings.rank_env import NodePlan
from tests.support import jobs

OWN = {"GROUP_RANK": "0", "MASTER_PORT": "29500"}


def test_ranks_get_script_environment_without_its_private_part() -> None:
    given = {"PATH": "/usr/bin", "PYTHONPATH": "lib", "BASH_ENV": "/own", "A": "1"}
    env = calls.script_env(OWN, given, Path("/job/launch"), "/job/hook")
    assert env["PATH"] == "/job/launch:/job/launch/slurm:/usr/bin" and env["PYTHONPATH"] == "/job/hook:lib"
    changed = {
        **env,
        "PATH": f"/conda/bin:{env['PATH']}",
        "A": "2",
        "MASTER_PORT": "1",
        "_": "x",
        "SHLVL": "2",
    }
    request = calls.ShimRequest("torchrun", (), "/w", changed, "", "python")
    assert calls.rank_env(request, LauncherCall("torchrun", ("t.py",), env={"B": "3"}), OWN, "/job/hook") == {
        "PATH": "/conda/bin:/job/launch/slurm:/usr/bin",
        "PYTHONPATH": "lib",
        "BASH_ENV": "/own",
        "A": "2",
        "MASTER_PORT": "1",
        "B": "3",
    }


def test_local_rank_is_placed_as_by_launcher() -> None:
    """The local rank is put where the launcher puts it."""
    call = LauncherCall(
        "l", ("-m", "pkg", "${local_rank}", "$$"), True, local_rank="--local-rank", local_rank_at=2, has_macros=True
    )  # fmt: skip
    argv = RankCall(1, call, ("python", *call.words), Path(), {}).rank_argv(1, ("--resume", "x"))
    assert argv == ("python", "-m", "pkg", "--local-rank=1", "1", "$", "--resume", "x")


def test_srun_and_mpirun_ranks_are_numbered_as_theirs() -> None:
    at = NodePlan(jobs.plan(), JobDir(Path()), "node-1", 1, ("node-0", "node-1"))

    def env(launcher: str) -> dict[str, str]:
        return RankCall(1, LauncherCall(launcher, ("x",), False), ("x",), Path(), {}).rank_variables(3, at)

    assert {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}.items() <= env("srun").items()
    assert env("mpirun")["OMPI_COMM_WORLD_RANK"] == "3" and env("torchrun") == {}


def test_python_running_launcher_is_recognised_by_command() -> None:
    """A Python that runs a launcher is recognised by its command line."""
    for flags in (
        ["-u", "-m", "torch.distributed.run"],
        ["-mtorch.distributed.run"],
        ["-W", "x", "-um", "torch.distributed.run"],
    ):
        assert find_launcher(["python", *flags, "a"]) == ("torchrun", ["a"])
    assert find_launcher(["/p/python3", "/p/accelerate", "launch", "t.py"]) == ("accelerate", ["launch", "t.py"])  # fmt: skip
    for words in (
        ["python", "t.py", "torchrun"],
        ["python", "-uc", "x", "torchrun"],
        ["python", "-m"],
        ["python", "-m", "pkg"],
        ["python"],
    ):
        assert find_launcher(words)[0] == ""
