"""Is a job's page whole, bounded and harmless: does it tell what happened first, and show no secret and no markup of others?"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.client.job import Job
from orchestrator.core.jobdir import series
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.series import Measurement, RankMeasurement
from orchestrator.core.settings.rank_settings import SetBy, Setting
from orchestrator.core.status_types import Usage
from orchestrator.report import page
from tests.support import folders, jobs

HOSTILE = "<script>alert(1)</script> <img src=http://example.com/x.png> \x1b]0;title\x07 \u202eevil & more\n"


@pytest.fixture
def failed(tmp_path: Path) -> JobDir:
    """A job whose rank 1 crashed and printed hostile lines."""
    job = folders.failed(tmp_path)
    folders.write_log(job, 1, HOSTILE + f"token {folders.SECRET}\n")
    return job


def measure(job: JobDir, ranks: int, seconds: int, apart_s: int = 60) -> None:
    """Write a series in which the last rank is slow."""
    writer = series.SeriesWriter(job.series)
    for at in range(0, seconds, apart_s):
        of = tuple(
            RankMeasurement(
                n,
                at,
                7.0 + n % 3,
                0.14 if n < ranks - 1 else 0.5,
                2.0 / (1 + at),
                None,
                Usage(1.0, 3 << 30, 0.9, 60 << 30),
            )
            for n in range(ranks)
        )
        writer.add(Measurement(jobs.BEGAN_S + at, 1, of))


def test_page_starts_with_outcome_and_action(failed: JobDir) -> None:
    """The page shows what happened and what to do before everything else."""
    text = page.page(Job(failed))
    order = [
        text.index(part)
        for part in (
            "crash at step 8 in attempt 1",
            "orch resume",
            'id="timeline"',
            'id="verdicts"',
            'id="settings"',
        )
    ]
    assert order == sorted(order)


def test_job_output_stays_text_with_secrets_hidden(failed: JobDir) -> None:
    text = page.page(Job(failed))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script>alert" not in text
    assert "\\u202eevil &amp; more" in text
    assert "token ***" in text
    assert folders.SECRET not in text


def test_rank_variables_have_origin_and_reason(
    failed: JobDir,
) -> None:
    """Each variable of the ranks is shown with its origin and reason; those that nodes share once."""
    same, other = (
        Setting("A", "<b> (1)", SetBy.YOU, "job.yaml:3"),
        Setting("B", None, SetBy.LATER, "by (the) port"),
    )
    for node, settings in (("n0", [same, other]), ("n1", [same])):
        lines = [f"07:00:00 agent: setting {one.text}\n" for one in settings]
        failed.node_log(1, node).write_text("07:00:00 agent: preparing attempt 1\n" + "".join(lines))
    text = page.page(Job(failed))
    row = text[text.index("2 environment variables of the ranks") :]
    assert row.count('&lt;b&gt; (1)</code></td><td>you</td><td class="long">job.yaml:3</td>') == 1
    assert 'not set</code></td><td>orch, at the start</td><td class="long">by (the) port <span class="dim">on n0' in row


def test_page_needs_no_external_files(failed: JobDir) -> None:
    """The page needs nothing from elsewhere."""
    measure(failed, 4, 600)
    text = page.page(Job(failed))
    assert re.findall(r"<[^>]+ (?:src|href)=[^>]*>|url\(|@import", text) == ['<link rel="icon" href="data:,">']
    assert "default-src 'none'" in text


def test_job_that_just_began_has_a_page(tmp_path: Path) -> None:
    job = folders.make(tmp_path, jobs.submitted())
    assert job.id in page.page(Job(job))


@pytest.mark.slow
def test_curves_of_many_ranks_make_a_small_page(tmp_path: Path) -> None:
    """Curves of many ranks and days make a page of few bytes."""
    days_s = 3 * 86_400
    news = [*jobs.submitted(), *jobs.running(1, 1.0, 7), *jobs.crash(1, days_s, 8, 8)]
    job = folders.make(tmp_path, [*news, jobs.end(1, days_s + 1.0, d.JobEnd.FAILED, "crash: rank 1")])
    measure(job, 64, days_s)
    began_s = time.process_time()
    text = page.page(Job(job))
    assert time.process_time() - began_s < 10  # 2 on a free machine
    assert len(text) < 1_000_000
    assert "all ranks" in text
    assert "rank 63" in text
