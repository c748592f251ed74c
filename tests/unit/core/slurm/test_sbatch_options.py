"""Is a job file's wish what sbatch is asked for, and does no text of it become another option, or two?"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.core.jobdir.plan import PlannedSlurm
from orchestrator.core.plan_types import QueueTerms
from orchestrator.core.slurm import sbatch_options
from orchestrator.submission import planner
from tests.support import jobs

RUN_S_MAX = 20.0


def _slurm(**fields: Any) -> PlannedSlurm:
    plan = jobs.plan(backend="slurm", **fields)
    assert plan.slurm is not None
    return plan.slurm


def test_plain_job_requests_nodes_and_core_per_rank() -> None:
    assert _slurm(spares=1).options == (
        "--job-name=gpt", "--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=2", "--signal=B:USR1@90", "--requeue",
        "--no-kill", "--open-mode=append",
    )  # fmt: skip


def test_every_field_becomes_its_option() -> None:
    words = (
        "partition",
        "account",
        "qos",
        "constraint",
        "exclude",
        "mem",
    )
    slurm = {
        **{name: f"my {name}" for name in words},
        "cpus_per_task": 8,
        "exclusive": True,
    }
    options = _slurm(
        procs_per_node=None, gpus_per_node=4, time_limit="25h30s", slurm={**slurm, "extra": ["--nice=5"]},
        checkpoint={"on_preempt": {"signal": "SIGUSR2", "grace": "90.5s"}}, time_limit_action="requeue",
    ).options  # fmt: skip
    assert {f"--{name}=my {name}" for name in words} < set(options)
    assert {"--cpus-per-task=32", "--gpus-per-node=4", "--time=1-01:01:00", "--signal=B:USR1@121"} < set(options)
    assert "--exclusive" in options
    assert options[-1] == "--nice=5"


def test_gres_replaces_gpus_per_node() -> None:
    """gres takes the place of gpus-per-node."""
    options = _slurm(procs_per_node=None, gpus_per_node=2, slurm={"extra": ["--gres=gpu:a100:2"]}).options
    assert "--gres=gpu:a100:2" in options and not any("gpus-per-node" in one for one in options)


@pytest.mark.parametrize("slurm", [{"exclusive": True}, {"extra": ["--cpus-per-gpu=4"]}], ids=["whole nodes", "by GPU"])
def test_cores_are_not_added_if_requested_otherwise(slurm: dict[str, Any]) -> None:
    """Cores are not requested for a user who requests them in another way."""
    assert not any("cpus-per-task" in one for one in _slurm(slurm=slurm).options)


def test_rank_signal_and_limit_action_are_in_plan() -> None:
    warned: dict[str, Any] = {"on_preempt": {"signal": "USR1", "grace": 5}}
    told = jobs.plan(backend="slurm", time_limit_action="requeue", checkpoint=warned)
    assert told.slurm is not None and told.slurm.signal == "USR1"
    assert told.pool is not None and told.pool.queue == QueueTerms(True, 5.0)
    plain = jobs.plan(backend="slurm")
    assert plain.slurm is not None and plain.slurm.signal == "TERM"
    assert plain.pool is not None and plain.pool.queue == QueueTerms(False, 60.0)


def test_user_defaults_count_where_job_file_is_silent() -> None:
    """Defaults of the user count where the job file says nothing."""
    environ = {
        "SBATCH_ACCOUNT": "lab",
        "SBATCH_PARTITION": "gpu",
        "SBATCH_WAIT": "1",
        "SBATCH_NO_REQUEUE": "1",
    }
    assert sbatch_options.submitter_defaults({**environ, "SBATCH_QOS": "", "SBATCH_WCKEY": "a\nb"}) == (
        ("account", "lab"),
        ("partition", "gpu"),
    )
    plan = jobs.plan(backend="slurm", slurm={"partition": "cpu"})
    assert plan.pool is not None
    spec = jobs.spec_file(backend="slurm", slurm={"partition": "cpu"}).spec
    options = planner.sbatch_args(spec, plan.pool, sbatch_options.submitter_defaults(environ))
    assert "--account=lab" in options and "--partition=cpu" in options and "--partition=gpu" not in options


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        ("--licenses=foo", ""), ("-Lfoo", ""), ("--mem-per-cpu=3G", ""), ("--wait-all-nodes=1", ""), ("-H", ""),
        ("--dependency=afterok:3", ""), ("--gres-flags=enforce-binding", ""), ("--reboot", ""),
        ("--nodes=3", "write `nodes` and `spares`"), ("--node=3", "write `nodes` and `spares`"), ("-N3", "-N is not allowed"),
        ("-Ht5", "-t is not allowed here: write `time_limit`"), ("--output=x", "logs are orch's own"),
        ("--no-requeue", "batch script"), ("--requeue", "batch script"), ("--requeue=expedite", ""), ("--array=1-3", "job arrays"), ("--wrap=ls", "write its text"),
        ("--comment=try --lr 3", ""), ("--exclude=x", "slurm.exclude"), ("-L foo", "must be one option"), ("--a=b --nice=3", "must be one option"),
        ("--", "names no option"), ("--test-only", "no job would be queued"), ("--export=NONE", "write `env`"),
    ],
)  # fmt: skip
def test_extra_option_owned_by_orch_is_refused(option: str, fault: str) -> None:
    assert fault in sbatch_options.find_option_fault(option) and bool(fault) == bool(
        sbatch_options.find_option_fault(option)
    )


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("gpu", 1), ("gpu:4", 4), ("gpu:a100:2,shard:3", 2), ("gres/gpu:a:1,gpu:b:2", 3), ("shard:2", 0), ("gpu:2(S:0)", 2)],
)  # fmt: skip
def test_gpus_of_gres_are_counted(gres: str, gpus: int) -> None:
    assert sbatch_options.count_gpus(gres) == gpus


# What sbatch makes of a line

texts = st.text(st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"], include_characters=" "), max_size=40)
hetero = st.sampled_from(["hetjob", "PackJob", "x hetjob=", "hethetjobjob"])
EVIL = 'x\'y"z $(touch EVIL) `touch EVIL` \\ \\" #no; \\hetjob é 日本 ${HOME} --wrap=ls %j'


def read_as_sbatch_does(line: str) -> list[str]:
    """Return the words of an `#SBATCH` line, as get_argument() in Slurm's src/sbatch/opt.c takes it apart."""
    assert "hetjob" not in line.lower() and "packjob" not in line.lower(), "the line would begin another component"
    words, word, quote, escaped = [], "", "", False
    rest = line.removeprefix("#SBATCH")
    for char in f"{rest} ":
        if char.isspace() and not quote:
            words += [word] if word else []
            word, escaped = "", False
        elif escaped:
            word, escaped = word + char, False
        elif char == "\\":
            escaped = True
        elif char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        elif not quote and char == "#":
            break
        else:
            word += char
    assert not quote, "an open quote"
    return words


@given(st.one_of(texts, hetero))
@example(EVIL)
def test_option_is_one_argument_for_sbatch_unchanged(text: str) -> None:
    for option in (f"--comment={text}", f"--job-name={text}", f"--{text or 'x'}"):
        assert read_as_sbatch_does(sbatch_options.directive(option)) == [option]
        assert len(sbatch_options.directive(option).splitlines()) == 1


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(texts.filter(lambda text: text.strip() == text and text != ""))
@example(EVIL)
def test_real_sbatch_parses_the_same(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    if shutil.which("sbatch") is None:
        return
    folder = tmp_path_factory.mktemp("sbatch")
    conf = (
        "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nAuthType=auth/none\nMessageTimeout=1\n"
        "CredType=cred/none\nNodeName=n1\nPartitionName=p Nodes=n1\n"
    )
    (folder / "slurm.conf").write_text(conf)
    options = [f"--comment={text}", "--nodes=3"]
    (folder / "job.sh").write_text("\n".join(["#!/bin/sh", *map(sbatch_options.directive, options), "true\n"]))
    read = _sbatch(folder)
    assert [f'"{option}"' in read for option in options] == [True, True], read


def _sbatch(folder: Path) -> str:
    """Return what sbatch says of the options in a script; there is no controller that could take it."""
    process = subprocess.Popen(
        ["sbatch", "-vvv", folder / "job.sh"], env={"PATH": "/usr/bin:/bin", "SLURM_CONF": f"{folder}/slurm.conf"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if "end of defined options" in line or "fatal" in line:
                break
    finally:
        process.kill()
        process.wait(RUN_S_MAX)
    return "".join(line for line in said if "Found in script" in line)
