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
from orchestrator.core.invisible_characters import escape_harmful
from orchestrator.core.jobdir.status_file import iso, parse_iso
from orchestrator.core.secret_mask import Mask
from orchestrator.core.version import VERSION
from orchestrator.report import charts, page_data, timeline
from orchestrator.report.page_data import PageData
from orchestrator.views import cells, next_steps, post_mortem
from orchestrator.views.status import headline

TEMPLATES = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class TimeShare:
    """A share of the ranks' time: its kind, percent, and duration as text."""

    kind: str
    percent: float
    text: str


def page(job: Job, root: str = "") -> str:
    """Return the page of a job as it is now. `root`: the server's address of the overview page; empty for a file.
    Raises OrchError when its plan, status or journal is damaged."""
    return render(page_data.load_page_data(job), root)


def render(data: PageData, root: str = "") -> str:
    """Render the page from the data of a job."""
    return environment(data.mask, data.why["dir"]).get_template("page.html.j2").render(
        root=root,
        job=data.plan,
        material=data,
        status=data.status,
        why=data.why,
        version=VERSION,
        written=iso(time.time()),
        headline=headline(data.status),
        happened=summarize_failure(data.why),
        next_steps=[line for line in next_steps.next_steps(data.why, data.reference) if line],
        shares=shares(data.why),
        timeline=_timeline(data),
        row_px=timeline.ROW_PX,
        time_ticks=data.scale.ticks,
        training=charts.charts(data.samples, charts.TRAINING, data.scale),
        usage=charts.charts(data.samples, charts.USAGE, data.scale),
        verdicts=list(_verdict_ticks(data)),
    )  # fmt: skip


def _timeline(data: PageData) -> timeline.Timeline | None:
    if not data.record.attempts:
        return None
    suspicion, suspected = data.status.suspected, None
    if suspicion is not None:
        suspected = timeline.Suspected(suspicion.ranks, parse_iso(data.status.written_at) - suspicion.for_s)
    return timeline.timeline(
        data.record.attempts,
        data.news,
        data.plan.world_size,
        data.scale,
        is_running=data.is_running,
        suspected=suspected,
    )


def environment(mask: Mask, folder: str) -> jinja2.Environment:
    """Return the templates' environment for texts of a job, of which `mask` hides the secrets; the filter `short` cuts its
    folder off the paths of its code and checkpoints."""

    def shown(value: object) -> object:
        """Return what a template prints; numbers and markup stay as they are."""
        return escape_harmful(mask.apply(value)) if isinstance(value, str) and not isinstance(value, Markup) else value

    jinja_env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, autoescape=True, finalize=shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    jinja_env.filters |= {
        "duration": cells.duration,
        "size": cells.size,
        "short": lambda text: cells.shorten_paths(text, folder),
        "source": post_mortem.resume_source_text,
    }
    return jinja_env


def summarize_failure(why: Json) -> str:
    """Return one sentence: the failure that ended the job, or the last one that it survived."""
    judged = [attempt for attempt in why["attempts"] if attempt["verdict"]]
    if why.get("suspicion"):
        return str(cells.shorten_paths(why["suspicion"], why["dir"]))
    if not judged:
        return str(why["reason"])
    last = judged[-1]
    verdict = last["verdict"]
    at = f" at step {verdict['step']:,}" if verdict["step"] is not None else ""
    failure = f"{verdict['kind']}{at} in attempt {last['attempt']}: {verdict['culprit'] or verdict['head']}"
    if why["state"] == "FAILED":
        return str(cells.shorten_paths(failure if last is why["attempts"][-1] else why["reason"], why["dir"]))
    times = f" after {len(judged)} failures" if len(judged) > 1 else ""
    outcome = {"SUCCEEDED": "succeeded", "CANCELLED": "cancelled"}.get(why["state"], "running again")
    return str(cells.shorten_paths(f"{outcome}{times}; the last failure was a {failure}", why["dir"]))


def shares(why: Json) -> list[TimeShare]:
    """Return the ranks' time by kind; empty where it is not known."""
    spent: dict[str, float] = (why.get("goodput") or {}).get("rank_seconds", {})
    whole_s = sum(spent.values())
    return [
        TimeShare(kind, round(100 * rank_s / whole_s, 2), cells.duration(rank_s))
        for kind, rank_s in spent.items()
        if rank_s > 0
    ]


def _verdict_ticks(data: PageData) -> Iterator[charts.Tick]:
    """Yield the position of each verdict on the time axis."""
    for attempt in data.record.attempts:
        if (judged := attempt.judged) is not None:
            yield charts.Tick(data.scale.x(attempt.wall_s(judged.at)), judged.verdict.kind.value)
