"""Is what could never run refused at submit and at resume, with its place and its remedy, and is nothing else?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.client.job import Job
from orchestrator.core import codec, host_facts
from orchestrator.core.errors import UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan, PlannedSsh
from orchestrator.spec.load import load
from orchestrator.submission import submit, submit_checks
from tests.support import folders, jobs

SPEC = "name: gpt\nprocs_per_node: 2\n"


def _submit(tmp_path: Path, *overrides: str, entry: str = "entrypoint: train.py") -> None:
    """Submit a job; it must be refused, and leave nothing in its home."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(f"{SPEC}{entry}\n")
    home = tmp_path / "home"
    environ = {"ORCH_HOME": str(home), "PATH": "/usr/bin:/bin"}
    try:
        submit.submit(load(tmp_path / "job.yaml", overrides=overrides), environ)
    finally:
        assert not home.exists()


def test_more_ranks_than_machine_can_start_need_oversubscribe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"8192 ranks in 4096 agents on the \d+ cores? of this") as told:
        _submit(tmp_path, "nodes=4096")
    assert told.value.where == "--set nodes=4096" and "--oversubscribe" in told.value.fix


@pytest.mark.parametrize(
    "override",
    ["rendezvous.interface=^docker0", "env.GLOO_SOCKET_IFNAME=^docker0,lo", "rendezvous.interface==eth0"],
)
def test_interface_in_nccl_syntax_is_invalid_for_gloo(tmp_path: Path, override: str) -> None:
    """An interface in NCCL's own syntax is not valid for gloo."""
    with pytest.raises(UserError, match="gloo does not know") as told:
        _submit(tmp_path, override)
    assert told.value.where == f"--set {override}" and told.value.fix


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("python=/no/such/python",), r"--set python=/no/such/python: there is no /no/such/python on this"),
        (("python=pithon3",), r"--set python=pithon3: there is no pithon3 on this"),
        (("python=train.py",), r"there is no train\.py on this"),  # it is no program
        (("entrypoint={command: [nosuch, -x]}",), r"--set entrypoint=.*: there is no nosuch on this"),
        (("rendezvous.interface=eth99",), r"--set rendezvous\.interface=eth99: there is no interface eth99; available: .*lo"),
    ],
)  # fmt: skip
def test_missing_local_requirements_are_refused_at_submit(
    tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    """Requirements that this machine lacks are refused at submit."""
    with pytest.raises(UserError, match=said) as told:
        _submit(tmp_path, *overrides)
    assert told.value.fix


def test_requirements_setup_may_install_are_not_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(f"{SPEC}entrypoint: train.py\npython: venv/bin/python\nsetup: make venv\n")
    file = load(tmp_path / "job.yaml")
    submit_checks.refuse_missing(file, submit.make_plan(file, {}, "gpt-1", 0.0), {})


@pytest.mark.parametrize(
    ("named", "is_missing"),
    [
        (None, False), ("eth0", False), ("eth", False), ("=eth0", False), ("ib0,eth0", False), ("^docker", False),
        ("eth9", True), ("ib", True), ("ETH0", True),
    ],
)  # fmt: skip
def test_interface_is_named_in_nccl_form(named: str | None, is_missing: bool) -> None:
    assert bool(submit_checks.missing_interface(named, ["lo", "eth0"])) == is_missing


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"entrypoint": "train.py --load_best_model_at_end True"}, "save_total_limit"),
        ({"entrypoint": "train.py --load-best-model-at-end"}, "save_total_limit"),
        ({"entrypoint": None, "command": "python train.py --load_best_model_at_end=true"}, "save_total_limit"),
        ({"entrypoint": "train.py --callback.save_top_k=3"}, "save_top_k"),
        ({"entrypoint": "train.py --load_best_model_at_end False"}, ""), ({"entrypoint": "train.py --save_top_k -1"}, ""),
        ({"entrypoint": "train.py"}, ""),
    ],
)  # fmt: skip
def test_age_retention_with_best_keeping_script_warns(fields: dict[str, Any], limit: str) -> None:
    assert submit_checks.submit_warnings(jobs.plan(**fields)) == ()
    said = submit_checks.submit_warnings(jobs.plan(checkpoint={"keep": 3}, **fields))
    assert len(said) == bool(limit)
    if limit:
        assert said[0].fix == f"leave checkpoint.keep out, and limit them in the script by {limit}"


def test_imports_from_edited_folders_warn(tmp_path: Path) -> None:
    """A job of a workdir with a compiled module that git ignores, and of a Python with editable installs."""
    folder, work, site = (
        JobDir(tmp_path / "job"),
        tmp_path / "work",
        tmp_path / "venv/lib/python3.12/site-packages",
    )
    for place in (folder.code / "src", work / "src", work / "lib", site, tmp_path / "site-packages"):
        place.mkdir(parents=True)
    (tmp_path / "beside").mkdir()
    (tmp_path / "named").mkdir()
    environ = {"PYTHONPATH": f"{work}/lib:lib:{tmp_path}/gone:{tmp_path}/site-packages"}
    folder.provenance.write_text(json.dumps({"submitted_from": str(work)}))
    plan = replace(jobs.plan(), pythons=(str(tmp_path / "venv/bin/python"),))
    assert submit_checks.uncopied_imports_warning(folder, plan, environ) == ()

    (work / "src" / "_fast.so").write_text("")
    (folder.code / "src" / "_fast.so").symlink_to(work / "src" / "_fast.so")
    (site / "b.pth").write_text(f"{tmp_path}/beside\n{work}/src\nimport sys\n")
    environ["PYTHONPATH"] += f":{tmp_path}/named"
    (said,) = submit_checks.uncopied_imports_warning(folder, plan, environ)
    found = [f"{tmp_path}/{name}" for name in ("beside", "named", "work/src/_fast.so")]
    assert said.what == f"ranks import files that are not copied: {', '.join(found)}"
    on_hosts = PlannedSsh(None, None, "strict", "~/.orch", (), None)
    assert submit_checks.uncopied_imports_warning(folder, replace(plan, ssh=on_hosts), environ) == ()
    folder.provenance.write_text("")
    assert submit_checks.uncopied_imports_warning(folder, plan, environ) == (), (
        "a job that was submitted is not lost for a warning"
    )


@pytest.mark.parametrize("override", ["workdir=.", "snapshot.limit_mb=5", "ssh.sync=data/", " workdir = x"])
def test_override_without_effect_on_resume_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError, match="has no effect on a resume"):
        Job(folders.failed(tmp_path)).resume("", (override, "restart.max=1"))


def test_checkpoint_folder_of_other_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "link").symlink_to("shared")
    environ = {"ORCH_HOME": str(tmp_path)}

    def wanted(path: str, **fields: Any) -> Plan:
        return replace(jobs.plan(checkpoint={"path": path}, **fields), id="gpt-2")

    first = folders.make(tmp_path, [])
    first.plan.write_text(codec.dumps(jobs.plan(checkpoint={"path": f"{tmp_path}/shared/*"})))
    with pytest.raises(UserError, match=rf"{first.id} has not ended and .*/link/\*, too") as told:
        submit_checks.refuse_shared_checkpoints(wanted(f"{tmp_path}/link/*"), environ, "job.yaml:3")
    assert first.id in told.value.fix
    submit_checks.refuse_shared_checkpoints(wanted(f"{tmp_path}/elsewhere/*"), environ, "")
    submit_checks.refuse_shared_checkpoints(wanted("shared/*"), environ, "")
    on_hosts = PlannedSsh(None, None, "strict", "~/.orch", (), None)
    submit_checks.refuse_shared_checkpoints(replace(wanted(f"{tmp_path}/shared/*"), ssh=on_hosts), environ, "")
    first.ended.touch()
    submit_checks.refuse_shared_checkpoints(wanted(f"{tmp_path}/link/*"), environ, "")


@pytest.mark.parametrize(
    ("memory", "folder", "said"),
    [
        ("900T", "", r"checkpoint.memory is 900000.0 GB on each of 2 nodes, \S+ has \d+\.\d+ GB"),
        ("64M", "missing", "missing is not a folder"),
    ],
)
def test_memory_that_this_machine_lacks_is_refused(tmp_path: Path, memory: str, folder: str, said: str) -> None:
    place = f"checkpoint.memory_dir={tmp_path}/{folder}"
    setup = ("setup=[pip install torch]", "nodes=2")  # setup lines install no memory
    with pytest.raises(UserError, match=said) as told:
        _submit(tmp_path, "checkpoint.keep=3", f"checkpoint.memory={memory}", place, *setup)
    assert told.value.where == f"--set checkpoint.memory={memory}" and told.value.fix


def test_figures_of_free_memory_are_those_of_its_nodes() -> None:
    short = host_facts.find_memory_shortage
    gb = 10**9
    assert short(64 * gb, 1, "/dev/shm", 60 * 10**6, 99 * gb) == "checkpoint.memory is 64.0 GB, /dev/shm has 0.06 GB"
    assert short(64 * gb, 1, "/dev/shm", 70 * gb, 12 * gb).endswith("64.0 GB, free memory of the host is 12.0 GB")
    assert short(64 * gb, 2, "/dev/shm", 70 * gb, 99 * gb).startswith("checkpoint.memory is 64.0 GB on each of 2 nodes")
    assert short(64 * gb, 1, "/dev/shm", 64 * gb, host_facts.UNKNOWN) == ""
