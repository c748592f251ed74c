"""Data of a report page: read once from the job's folder, with secrets masked and sizes bounded."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.client.job import Job
from orchestrator.client.logs import reader
from orchestrator.core import placeholders
from orchestrator.core.codec import Json
from orchestrator.core.jobdir import ownership, series
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.series import Measurement
from orchestrator.core.jobdir.status_file import ENDED, Status, parse_iso
from orchestrator.core.secret_mask import Mask
from orchestrator.core.settings.rank_settings import Setting, parse_setting
from orchestrator.core.wire import reports
from orchestrator.journal import facts_file, journal_file
from orchestrator.journal.job_record import Record
from orchestrator.report.charts import TimeScale
from orchestrator.views import logs as log_view

SAMPLES_MAX = 1200
"""How many samples are read of a job's series, about; a chart shows fewer."""

FAILED_ATTEMPTS_MAX = 12
"""How many attempts have logs and stacks on the page: the last that failed."""

LOG_LINES = 60
LOG_RANKS_MAX = 8
STACK_FILES_MAX = 8
STACK_BYTES_MAX = 32 << 10
"""The last bytes of a file of stacks: it grows with each inspection."""

NODE_LOGS_MAX = 4
TEXT_BYTES_MAX = 96 << 10
LINE_CHARS_MAX = 1000
MASK_BYTES = 64 << 10
"""How much more is read than shown, so that a secret is whole when it is masked."""


@dataclass(frozen=True, slots=True)
class Text:
    """A file, or a part of one, as the page shows it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FailureFiles:
    """Logs and stacks of a failed attempt."""

    logs: str
    stacks: tuple[Text, ...]


@dataclass(frozen=True, slots=True)
class NodeSetting:
    """A setting of the ranks of some nodes; no nodes: of all that are shown."""

    setting: Setting
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PageData:
    """Data that the page of a job shows. `faults`: by attempt."""

    reference: str
    plan: Plan
    status: Status
    why: Json
    record: Record
    news: tuple[News, ...]
    samples: tuple[Measurement, ...]
    scale: TimeScale
    faults: dict[int, FailureFiles]
    command: str
    files: tuple[Text, ...]
    node_logs: tuple[Text, ...]
    settings: tuple[NodeSetting, ...]
    versions: dict[str, str]
    mask: Mask

    @property
    def is_running(self) -> bool:
        """Whether the job has not ended."""
        return self.status.state not in ENDED


def load_page_data(job: Job) -> PageData:
    """Read the data of a job's page. Raises OrchError when its plan, status or journal is damaged."""
    folder, plan, mask, status = job.folder, job.plan(), job.mask(), job.source.status()
    record = facts_file.load_record(folder)
    why = job.why(record)
    end_s = parse_iso(status.ended_at) if status.ended_at else time.time()
    begin_s = parse_iso(status.started_at or status.created_at)
    scale = TimeScale(begin_s, max(end_s, begin_s + 1.0))
    node_logs = _read_node_logs(folder, mask)
    return PageData(
        reference=job.reference,
        plan=plan,
        status=status,
        why=why,
        record=record,
        news=tuple(journal_file.read_kinds(folder.journal, e.CheckpointChanged, reports.Exited, d.Notice)),
        samples=tuple(series.read(folder.series, (scale.end_s - scale.begin_s) / SAMPLES_MAX)),
        scale=scale,
        faults=_failure_files(folder, why["attempts"], mask),
        command=plan.argv[-1] if plan.shell else placeholders.quote_command(plan.argv),
        files=_read_job_files(folder, mask),
        node_logs=node_logs,
        settings=_parse_settings(node_logs),
        versions=_load_versions(folder),
        mask=mask,
    )


def _failure_files(folder: JobDir, attempts: Sequence[Json], mask: Mask) -> dict[int, FailureFiles]:
    failed = [one for one in attempts if one["verdict"]][-FAILED_ATTEMPTS_MAX:]
    return {
        one["attempt"]: FailureFiles(_read_logs(folder, one, mask), _read_stacks(folder, one, mask)) for one in failed
    }


def _read_logs(folder: JobDir, attempt: Json, mask: Mask) -> str:
    """Return the last lines of the ranks at fault, else of their node, else of all ranks; as `orch logs` prints them."""
    verdict = attempt["verdict"]
    ranks = tuple(verdict["ranks"][:LOG_RANKS_MAX])
    nodes = (verdict["node"],) if verdict["node"] and not ranks else ()
    query = reader.LogQuery(ranks, nodes, attempt["attempt"], tail=LOG_LINES)
    view = log_view.LogView(log_view.choose_style(query, terminal=False, environ={}), mask)
    texts = [*view.add(reader.blocks(folder, query, time.time_ns(), mask)), view.flush()]
    return _cut_lines("".join(texts))


def _read_stacks(folder: JobDir, attempt: Json, mask: Mask) -> tuple[Text, ...]:
    """Return the pages of stacks, those of the ranks at fault first."""
    place = folder.evidence(attempt["attempt"])
    at_fault = {f"rank-{rank:05d}-stacks.txt" for rank in attempt["verdict"]["ranks"]}
    paths = sorted(place.glob("rank-*-stacks.txt"), key=lambda path: (path.name not in at_fault, path.name))
    return _read_texts(paths[:STACK_FILES_MAX], mask, STACK_BYTES_MAX, ends=True)


def _read_job_files(folder: JobDir, mask: Mask) -> tuple[Text, ...]:
    paths = (folder.spec, folder.overrides, folder.dirty_diff)
    return tuple(text for text in _read_texts(paths, mask) if text.text.strip() not in ("", "[]"))


def _read_node_logs(folder: JobDir, mask: Mask) -> tuple[Text, ...]:
    """Return what some nodes wrote in the last attempt: it has the settings of their ranks with reasons."""
    attempts = reader.attempts(folder)
    paths = sorted(folder.attempt_logs(attempts[-1]).glob("node-*.log"))[:NODE_LOGS_MAX] if attempts else []
    return _read_texts(paths, mask)


def _parse_settings(node_logs: Sequence[Text]) -> tuple[NodeSetting, ...]:
    """Return the settings that agents logged; those that nodes share are listed once."""
    nodes: dict[Setting, list[str]] = {}
    for log in node_logs:
        for line in log.text.splitlines():
            setting = parse_setting(line.partition(" agent: setting ")[2])
            if setting is not None and log.name not in nodes.setdefault(setting, []):
                nodes[setting].append(log.name)
    return tuple(
        NodeSetting(
            setting,
            () if len(of) == len(node_logs) else tuple(name[len("node-") : -len(".log")] for name in of),
        )
        for setting, of in nodes.items()
    )


def _read_texts(
    paths: Sequence[Path], mask: Mask, bytes_max: int = TEXT_BYTES_MAX, *, ends: bool = False
) -> tuple[Text, ...]:
    """Return the beginnings of files as text, or their ends; files that cannot be read are left out."""
    texts = []
    for path in paths:
        try:
            data = ownership.read_regular(path)
        except OSError:
            continue
        # Masked, then cut: half a secret would stay.
        room = bytes_max + MASK_BYTES
        whole = mask.apply((data[-room:] if ends else data[:room]).decode("utf-8", "replace"))
        cut = f"… {len(data):,} bytes in all …\n" if len(whole) > bytes_max else ""
        texts.append(Text(path.name, _cut_lines(cut + whole[-bytes_max:] if ends else whole[:bytes_max] + cut)))
    return tuple(texts)


def _cut_lines(text: str) -> str:
    """Return a masked text with its longest lines cut."""
    return "".join(
        f"{line[:LINE_CHARS_MAX]}…\n" if len(line) > LINE_CHARS_MAX else line for line in text.splitlines(keepends=True)
    )


def _load_versions(folder: JobDir) -> dict[str, str]:
    """Return the versions of commit, Python and packages, without those that are unknown."""
    versions: dict[str, str] = {}
    for path in (folder.provenance, folder.root / "packages.json"):
        try:
            data = json.loads(ownership.read_regular(path))
            versions |= {name: str(value) for name, value in data.items() if isinstance(value, (str, int)) and value}
            versions |= (
                {name: str(value) for name, value in data.get("packages", {}).items()} if "python" in data else {}
            )
        except (OSError, ValueError, AttributeError):
            continue
    versions.pop("packages", None)
    return versions
