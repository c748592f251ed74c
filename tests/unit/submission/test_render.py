"""Do the scripts say what is meant, and does no text of a spec ever run or break a line? Golden files, and real shells."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan, PlannedSsh
from orchestrator.core.plan_types import PlannedPool
from orchestrator.submission import render as render_module
from orchestrator.submission.render import render
from tests.support import fake_host, golden, jobs

RUN_S_MAX = 20.0
KEPT_SCRIPTS = sorted(Path(golden.__file__).parents[1].rglob("*.sh"))
"""Golden files, and what brings up the hosts of a cluster in a box."""

JOB = JobDir.at(jobs.ROOT)
FAKE_PYTHON = '#!/bin/sh\nprintf "%s\\0" "$0" "$@" >"$SAW"\nexit "$END"\n'
EVIL = "x'y\"z $(touch EVIL) `touch EVIL` \\\n\r\n; touch EVIL # & | > EVIL \t\x07 é 日本 \u2028 ${HOME} -e"

PLANS = {
    "node-cpu.sh": jobs.plan(),
    "node-gpus-setup.sh": jobs.plan(
        gpus=range(4), procs_per_node=None, gpus_per_node=2, setup=["module load cuda", "source 'my env/bin/activate'"],
        entrypoint="-m pkg.train --name 'a b'",
    ),
    "node-command.sh": jobs.plan(entrypoint=None, command='echo "$RANK" && make train'),
}  # fmt: skip


SSH_PLANS = {
    "host-cpu.sh": fake_host.plan(),
    "host-gpus-setup.sh": dataclasses.replace(
        fake_host.plan(), pool=PlannedPool(2, 8, 8, 1), setup=("module load cuda", "source 'my env/bin/activate'"),
        ssh=PlannedSsh("ml", None, "strict", "/scratch/my jobs/", (), None),
    ),
}  # fmt: skip


SLURM_PLANS = {
    "slurm-cpu": jobs.plan(backend="slurm"),
    "slurm-gpus": jobs.plan(
        backend="slurm", procs_per_node=None, gpus_per_node=8, spares=1, setup=["module load cuda"], time_limit="2d",
        time_limit_action="requeue", checkpoint={"on_preempt": {"signal": "USR1", "grace": "2m"}},
        slurm={"partition": "gpu", "account": "lab", "constraint": "a100&ib", "exclude": "gpu[07,12-13]",
               "mem": "0", "extra": ['--comment=the "big" run, #3', "--licenses=sim:2", "--nice=5"]},
    ),
}  # fmt: skip


def _script(plan: Plan, job: JobDir = JOB, python: str = "/usr/bin/python3") -> str:
    return render(plan, job, python)[0].text


@pytest.mark.parametrize("name", PLANS | SSH_PLANS)
def test_launch_script_matches_golden_file(name: str) -> None:
    """The launch script is the one that was reviewed."""
    golden.check(name, _script((PLANS | SSH_PLANS)[name]))


@pytest.mark.parametrize("name", SLURM_PLANS)
def test_slurm_scripts_match_golden_files(name: str) -> None:
    """The scripts for Slurm are those that were reviewed."""
    batch, agent = render(SLURM_PLANS[name], JOB, "/usr/bin/python3")
    assert (batch.name, agent.name, batch.mode, agent.mode) == ("slurm.sh", "agent.sh", 0o755, 0o755)
    golden.check(f"{name}.sh", batch.text)
    golden.check(f"{name}-agent.sh", agent.text)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS | SSH_PLANS)
def test_shells_and_shellcheck_accept_launch_scripts(name: str, tmp_path: Path) -> None:
    """Shells and shellcheck find no fault in the launch scripts."""
    _check(_script((PLANS | SSH_PLANS)[name]), tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLURM_PLANS)
@pytest.mark.parametrize("number", [0, 1])
def test_shells_and_shellcheck_accept_slurm_scripts(name: str, number: int, tmp_path: Path) -> None:
    """Shells and shellcheck find no fault in the scripts for Slurm."""
    _check(render(SLURM_PLANS[name], JOB, "/usr/bin/python3")[number].text, tmp_path / name)


def _check(text: str, script: Path, shells: Sequence[str] = ("sh", "bash")) -> None:
    script.write_text(text)
    checks = [[shell, "-n"] for shell in shells] + [[_shellcheck(), "-s", shells[0]]]
    for words in checks:
        done = subprocess.run([*words, script], capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def _shellcheck() -> str:
    """Return the shellcheck of this environment, which the dev extra brings, or the machine's."""
    places = (str(Path(sys.executable).parent), os.environ["PATH"])
    found = shutil.which("shellcheck", path=os.pathsep.join(places))
    assert found is not None, "there is no shellcheck; install the dev extra: pip install -e '.[dev]'"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT_SCRIPTS, ids=lambda path: path.name)
def test_shells_and_shellcheck_accept_repository_scripts(path: Path, tmp_path: Path) -> None:
    """Shells and shellcheck find no fault in the scripts of this repository."""
    text = path.read_text()
    shells = ("sh", "bash") if text.startswith("#!/bin/sh\n") else ("bash",)
    _check(text, tmp_path / path.name, shells)


def test_every_node_has_own_executable_script() -> None:
    files = render(jobs.plan(nodes=3), JOB, "/usr/bin/python3")
    assert [(file.name, file.mode) for file in files] == [(f"node-{n}.sh", 0o755) for n in range(3)]
    assert "Ranks 4, 5 of 6" in files[2].text


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda name: name not in (".", "..")
)

lines = names.filter(lambda name: "\n" not in name)  # as the field `python` takes them


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(texts, st.lists(texts, max_size=3), st.lists(texts, min_size=1, max_size=3), lines, names)
@example(EVIL, [EVIL], [EVIL], EVIL.replace("/", "_"), "$(touch EVIL)")
@example("", ["exec false"], ["a\nexec false"], "-x", "'")
def test_spec_text_neither_runs_nor_breaks_lines(
    text: str, setup: list[str], argv: list[str], python: str, folder: str
) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / folder
        root.mkdir()
        job = JobDir(root)
        job.bundle.touch()
        interpreter = Path(place) / f"py{python}"
        interpreter.write_text(FAKE_PYTHON)
        interpreter.chmod(0o755)
        node = dataclasses.replace(jobs.plan().nodes[0], name=text or "n", host=text)
        plan = dataclasses.replace(
            jobs.plan(), id=text, nodes=(node,), setup=tuple(setup), argv=tuple(argv), env={"A": text}
        )
        script = _script(plan, job, str(interpreter))
        job.scripts.mkdir()
        assert _argv_seen(script, Path(place), end=0, file=job.scripts / "node-0.sh") == [
            str(interpreter),
            "-I",
            "-S",
            str(job.bundle),
            "agent",
        ]
        over_ssh = dataclasses.replace(
            plan, pool=fake_host.plan().pool, ssh=dataclasses.replace(_ssh(), remote_dir=text)
        )
        argv_seen = _argv_seen(_script(over_ssh, job, str(interpreter)), Path(place), end=85)
        assert argv_seen == [str(interpreter), "-I", "-S", "-X", "utf8", "-c", argv_seen[-2], "mark"]
        assert sorted(path.name for path in Path(place).iterdir()) == sorted(
            {folder, interpreter.name, "script", "saw"}
        )


def _ssh() -> PlannedSsh:
    ssh = fake_host.plan().ssh
    assert ssh is not None
    return ssh


def _argv_seen(script: str, place: Path, end: int, file: Path | None = None) -> list[str]:
    """Run a script in `place`, as this file; return the words that the fake python, which ends with `end`, was started with."""
    file = file or place / "script"
    file.write_text(script, newline="")
    env = {"PATH": os.environ["PATH"], "SAW": str(place / "saw"), "END": str(end)}
    done = subprocess.run(
        ["/bin/sh", file, "mark"], cwd=place, env=env, capture_output=True, timeout=RUN_S_MAX, check=False
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return [word.decode() for word in (place / "saw").read_bytes().split(b"\0")[:-1]]


@given(texts, st.lists(texts, max_size=3), st.lists(texts, min_size=1, max_size=3))
def test_text_stays_on_its_script_line(text: str, setup: list[str], argv: list[str]) -> None:
    node = dataclasses.replace(jobs.plan().nodes[0], host=text)
    plan = dataclasses.replace(jobs.plan(), id=text, nodes=(node,), setup=tuple(setup), argv=tuple(argv))
    script = _script(plan)
    plain = _script(dataclasses.replace(plan, id="id", setup=("true",) * len(setup), argv=("a",)))
    assert len(script.splitlines()) == len(plain.splitlines())


def test_script_has_neither_secrets_nor_environment() -> None:
    plan = jobs.plan(secrets=["HF_TOKEN"], env={"WANDB_MODE": "offline"})
    assert all(word not in _script(plan) for word in ("HF_TOKEN", "WANDB_MODE", "offline"))


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "code"), [("python", 127), ("bundle", 66)])
def test_missing_node_requirement_is_reported_in_one_line(missing: str, code: int, tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    if missing != "bundle":
        job.bundle.touch()
    script = job.scripts / "node-0.sh"
    job.scripts.mkdir()
    script.write_text(_script(jobs.plan(), job, "/no/such/python" if missing == "python" else "/bin/true"))
    done = subprocess.run(["sh", script], capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    assert done.returncode == code
    assert done.stderr.startswith(f"{missing}: ") and done.stderr.count("\n") == 1


def test_missing_template_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_module, "TEMPLATES", tmp_path)
    render_module.template_environment.cache_clear()
    try:
        with pytest.raises(ClusterError) as told:
            render(jobs.plan(), JOB, "python3")
    finally:
        render_module.template_environment.cache_clear()
    assert (told.value.what, told.value.where) == ("orch has no node.sh.j2", str(tmp_path))
