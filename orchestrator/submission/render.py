"""Rendered scripts of a job: a plan and the templates in, files (name, text, mode) out. Pure."""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core import placeholders
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.slurm import sbatch_options

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parents[1] / "templates"

_PATTERN = re.compile(r"%(?:%|\d*[AabJjNnstux])")
"""Patterns that slurmd replaces in the path of a log, the job's folder included (man sbatch, filename pattern)."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """A file of the job's `scripts/`."""

    name: str
    text: str
    mode: int


def render(plan: Plan, job: JobDir, python: str) -> tuple[RenderedFile, ...]:
    """Return the launch script of every node; on Slurm the batch script, and the launch script of any node.

    `python` runs the agents; the plan holds the interpreter of the ranks. Over SSH and on Slurm it is only the first
    Python to be tried, since hosts have their own.
    """
    values = _values(plan, python)
    if plan.slurm is not None:
        return _render_slurm(plan, job, values)
    if plan.ssh is not None:
        return host_scripts(plan, f"{plan.ssh.remote_dir.rstrip('/')}/jobs/{plan.id}", python)
    template = _template("node.sh.j2")
    values["world_size"] = plan.world_size
    return tuple(
        RenderedFile(name=f"{node.name}.sh", text=template.render(node=node, **values), mode=0o755)
        for node in plan.nodes
    )


def host_scripts(plan: Plan, root: str, python: str) -> tuple[RenderedFile, ...]:
    """Return for every node of a plan with a pool the script that starts a bootstrap session there."""
    template = _template("host.sh.j2")
    values = {**_values(plan, python), "pool": plan.pool, "root": root}
    return tuple(
        RenderedFile(name=f"{node.name}.sh", text=template.render(node=node, **values), mode=0o755)
        for node in plan.nodes
    )


def _values(plan: Plan, python: str) -> dict[str, object]:
    command = plan.argv[-1] if plan.shell else placeholders.quote_command(plan.argv)
    return {"id": plan.id, "command": command, "setup": plan.setup, "python": python}


def _render_slurm(plan: Plan, job: JobDir, values: dict[str, object]) -> tuple[RenderedFile, ...]:
    """Return the batch script, and the script that srun starts. Raises UserError for a folder that sbatch cannot take."""
    assert plan.slurm is not None
    root = str(job.root)
    unfit = _slurm_path_fault(root)
    if unfit:
        what = f"the job folder has {unfit} in its path"
        fix = "set ORCH_HOME to a folder without such characters"
        raise UserError(what, root if root.isprintable() else repr(root), fix)
    options = (*plan.slurm.options, f"--chdir={root}", "--output=logs/slurm.log")
    more = {**values, "pool": plan.pool, "root": root, "options": options}
    return tuple(
        RenderedFile(name=name, text=_template(f"{name}.j2").render(more), mode=0o755)
        for name in ("slurm.sh", "agent.sh")
    )


def _slurm_path_fault(root: str) -> str:
    """Return what in a path keeps a Slurm job from writing its log there; empty for nothing."""
    if not root.isprintable():
        return "a character that sbatch cannot take"
    if "\\" in root:
        return "a backslash, which Slurm removes,"
    pattern = _PATTERN.search(root)
    return f"{pattern.group()}, which Slurm replaces," if pattern else ""


def _template(name: str) -> jinja2.Template:
    """Return a template. Raises ClusterError where the installation lacks it: jinja2's own error is an OSError without a
    reason."""
    import jinja2

    try:
        return template_environment().get_template(name)
    except jinja2.TemplateNotFound as err:
        raise ClusterError(f"orch has no {name}", str(TEMPLATES), "install orch again") from err


@functools.cache
def template_environment() -> jinja2.Environment:
    """Return the templates' environment: undefined names are errors, the filter `q` quotes for a shell, `comment` makes one
    line, `directive` writes an option for sbatch."""
    import jinja2  # slow to load, and not every process that imports this renders scripts

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters["q"] = lambda text: shlex.quote(str(text))
    env.filters["directive"] = sbatch_options.directive
    env.filters["comment"] = lambda text: _CONTROL.sub(" ", str(text))
    return env
