"""Report page of a job, one HTML file without network or script: what happened, what to do next, and the evidence.

All texts of the page are escaped, masked, and made harmless at one place, where the template prints them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from orchestrator.client.job import Job
from orchestrator.core.codec import Json
from orchestrator.core.invisible_characters import harmless
from orchestrator.core.jobdir.status_file import iso, seconds
from orchestrator.core.mask import Mask
from orchestrator.core.version import VERSION
from orchestrator.report import charts, material, timeline
from orchestrator.report.material import Material
from orchestrator.views import cells, next_steps, post_mortem
from orchestrator.views.status import headline

TEMPLATES = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the ranks' time: its kind, percent, and duration as text."""

    kind: str
    percent: float
    text: str


def page(job: Job, root: str = "") -> str:
    """Return the page of a job as it is now. `root`: the server's address of the overview page; empty for a file.
    Raises OrchError when its plan, status or journal is damaged."""
    return render(material.gather(job), root)


def render(seen: Material, root: str = "") -> str:
    """Render the page from the data of a job."""
    return environment(seen.mask, seen.why["dir"]).get_template("page.html.j2").render(
        root=root,
        job=seen.plan,
        material=seen,
        status=seen.status,
        why=seen.why,
        version=VERSION,
        written=iso(time.time()),
        headline=headline(seen.status),
        happened=happened(seen.why),
        next_steps=[line for line in next_steps.next_steps(seen.why, seen.called) if line],
        shares=shares(seen.why),
        timeline=_timeline(seen),
        row_px=timeline.ROW_PX,
        time_ticks=seen.scale.ticks,
        training=charts.charts(seen.samples, charts.TRAINING, seen.scale),
        usage=charts.charts(seen.samples, charts.USAGE, seen.scale),
        verdicts=list(_verdicts(seen)),
    )  # fmt: skip


def _timeline(seen: Material) -> timeline.Timeline | None:
    if not seen.record.attempts:
        return None
    suspicion, suspected = seen.status.suspected, None
    if suspicion is not None:
        since_s = seconds(seen.status.written_at) - suspicion.for_s
        suspected = timeline.Suspected(suspicion.ranks, since_s)
    return timeline.timeline(
        seen.record.attempts,
        seen.news,
        seen.plan.world_size,
        seen.scale,
        goes_on=seen.goes_on,
        suspected=suspected,
    )


def environment(mask: Mask, folder: str) -> jinja2.Environment:
    """Return the templates' environment for texts of a job, of which `mask` hides the secrets; the filter `short` cuts its
    folder off the paths of its code and checkpoints."""

    def shown(value: object) -> object:
        """Return what a template prints; numbers and markup stay as they are."""
        return (
            harmless(mask.apply(value)) if isinstance(value, str) and not isinstance(value, Markup) else value
        )

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, autoescape=True, finalize=shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters |= {
        "duration": cells.duration,
        "size": cells.size,
        "short": lambda text: cells.short(text, folder),
        "source": post_mortem.source,
    }
    return found


def happened(why: Json) -> str:
    """Return one sentence: the failure that ended the job, or the last one that it survived."""
    judged = [attempt for attempt in why["attempts"] if attempt["verdict"]]
    if why.get("suspicion"):
        return str(cells.short(why["suspicion"], why["dir"]))
    if not judged:
        return str(why["reason"])
    last = judged[-1]
    verdict = last["verdict"]
    at = f" at step {verdict['step']:,}" if verdict["step"] is not None else ""
    failure = f"{verdict['kind']}{at} in attempt {last['attempt']}: {verdict['culprit'] or verdict['head']}"
    if why["state"] == "FAILED":
        return str(cells.short(failure if last is why["attempts"][-1] else why["reason"], why["dir"]))
    times = f" after {len(judged)} failures" if len(judged) > 1 else ""
    course = {"SUCCEEDED": "succeeded", "CANCELLED": "cancelled"}.get(why["state"], "running again")
    return str(cells.short(f"{course}{times}; the last failure was a {failure}", why["dir"]))


def shares(why: Json) -> list[Share]:
    """Return the ranks' time by kind; empty where it is not known."""
    spent: dict[str, float] = (why.get("goodput") or {}).get("rank_seconds", {})
    whole_s = sum(spent.values())
    return [
        Share(kind, round(100 * rank_s / whole_s, 2), cells.duration(rank_s))
        for kind, rank_s in spent.items()
        if rank_s > 0
    ]


def _verdicts(seen: Material) -> Iterator[charts.Tick]:
    """Yield the position of each verdict on the time axis."""
    for attempt in seen.record.attempts:
        if (judged := attempt.judged) is not None:
            yield charts.Tick(seen.scale.x(attempt.wall_s(judged.at)), judged.verdict.kind.value)
