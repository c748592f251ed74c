"""Do programs that run jobs get what they need: one job for a key, one object when they must act, and JSON as its schema says?"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mcp import Client, StdioServerParameters

import orchestrator
from orchestrator.cli import app
from orchestrator.core.errors import UserError
from orchestrator.programs.json_schemas import make_schema
from tests.support.cluster import small_torch
from tests.support.local import FAKE_TORCH, STEPPER, Desk, wait_until

RUN_S_MAX = 120.0
ROOT = Path(__file__).parents[2]
FAILS = STEPPER + "run(20)\nif rank == 1:\n    raise ValueError('bad batch')\nrun(100000)\n"


def _ran(desk: Desk, *words: str) -> tuple[int, str]:
    """Return the exit code of a verb, and what it has printed."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("ORCH_HOME", desk.environ["ORCH_HOME"])
        patch.chdir(desk.folder)
        return app.run(list(words)), out.getvalue()


def _orch(desk: Desk, *words: str) -> tuple[int, Any]:
    """Return the exit code of a verb with `--json`, and its output, which is as its schema says."""
    code, text = _ran(desk, *words, "--json")
    return code, _checked(words[0], text)


def _checked(verb: str, text: str) -> Any:
    told = json.loads(text or "null")
    if told is not None:
        jsonschema.validate(told, make_schema(verb))
    return told


def test_json_outputs_match_schemas_and_wait_suggests_action(desk: Desk) -> None:
    fields: dict[str, Any] = {"procs_per_node": 2, "entrypoint": "train.py", "restart": {"max": 1}}
    job = desk.submit({**FAKE_TORCH, "train.py": FAILS}, **fields)
    wait_until(lambda: job.seen()["step"], "a step")
    assert _orch(desk, "stacks")[0] in (0, 2, 3)  # between two attempts no rank runs
    code, told = _orch(desk, "wait", "--timeout", "2m")
    assert (code, told["state"], told["ended"], told["needs"]) == (1, "FAILED", True, None)
    assert told["verdict"]["cause"] == "exception" and "ValueError: bad batch" in told["verdict"]["summary"]
    (culprit,) = told["culprits"]
    assert (culprit["rank"], culprit["node"]) == (1, "node-0")
    assert culprit["file"].endswith("train.py") and culprit["line"] == FAILS[: FAILS.index("raise")].count("\n") + 1
    assert f"orch resume {job.job.reference}" in [step["command"] for step in told["next"]]
    for words in (["status"], ["status", "--all"], ["why"], ["checkpoints"], ["nodes"], ["goodput"]):
        assert _orch(desk, *words)[0] == 0
    for verb in ("plan", "check"):
        (desk.folder / "train.py").write_text(FAILS)
        spec = {"name": "t", "env": small_torch.write(desk.folder / "small"), **fields}
        (desk.folder / "job.yaml").write_text(json.dumps(spec))
        assert _orch(desk, verb, "job.yaml")[1]


def test_wait_times_out_while_job_keeps_running(desk: Desk) -> None:
    """A wait ends with its time limit while the job keeps running."""
    desk.submit({**FAKE_TORCH, "train.py": STEPPER + "run(100000)"}, entrypoint="train.py")
    code, told = _orch(desk, "wait", "--timeout", "1s")
    assert (code, told["ended"], told["verdict"], told["culprits"]) == (124, False, None, [])


def test_submit_key_makes_one_job_of_many_submits(desk: Desk) -> None:
    """A key makes one job of many submits, also at once and after its end."""
    spec = desk.folder / "job.yaml"
    (desk.folder / "train.py").write_text("print('hi')")
    spec.write_text(json.dumps({"name": "t", "procs_per_node": 1, "entrypoint": "train.py"}))
    argv = [sys.executable, "-m", "orchestrator.cli", "submit", str(spec), "--key", "night-7", "--json"]
    at_once = [subprocess.Popen(argv, env=desk.environ, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [_checked("submit", one.communicate(timeout=RUN_S_MAX)[0]) for one in at_once]
    assert len({one["id"] for one in told}) == 1
    assert sorted(one["new"] for one in told) == [False, False, True]
    job = orchestrator.find(environ=desk.environ)
    job.wait(RUN_S_MAX)
    assert orchestrator.submit(spec, environ=desk.environ, key="night-7").id == job.id
    wait_until(job.folder.ended.exists, "the supervisor's last line")
    shutil.rmtree(job.folder.root)
    with pytest.raises(UserError, match=r"the job of this key, .*, was deleted"):
        orchestrator.submit(spec, environ=desk.environ, key="night-7")
    for key in ("../x", ""):
        with pytest.raises(UserError, match="is not a valid key"):
            orchestrator.submit(spec, environ=desk.environ, key=key)


def test_prometheus_scrapes_metrics_beside_damaged_job_folder(desk: Desk) -> None:
    for name in ("good", "bad"):
        job = desk.submit({**FAKE_TORCH, "train.py": FAILS}, entrypoint="train.py", name=name, procs_per_node=2)
        assert job.wait()["state"] == "FAILED"
    wait_until(job.job.folder.ended.exists, "the supervisor's last line")
    state = job.job.folder.state.read_text()
    job.job.folder.state.write_text("{")
    (desk.folder / "out").mkdir()
    path = desk.folder / "out" / "orch.prom"
    (code, shown), silent = _ran(desk, "metrics"), _ran(desk, "metrics", "--textfile", "out")
    job.job.folder.state.write_text(state)
    assert code == 0 and "orch_job_state" in shown and silent == (0, "")
    assert path.stat().st_mode & 0o777 == 0o644
    lines = path.read_text().splitlines()
    good = f'job_id="{desk.jobs[0].job.id}"'
    assert f'orch_job_state{{{good},state="FAILED"}} 1.0' in lines and "orch_unreadable_jobs 1.0" in lines
    assert f'orch_job_restarts_total{{cause="crash",{good}}} 1.0' in lines
    seconds = [
        float(line.split()[-1]) for line in lines if line.startswith("orch_job_time_seconds_total{") and good in line
    ]
    assert len(seconds) == 9 and sum(seconds) > 0
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (apt-get install prometheus)")
    for text, words in (
        (path.read_text(), ["metrics"]),
        ("", ["rules", str(ROOT / "docs/prometheus/alerts.yaml")]),
    ):
        subprocess.run([promtool, "check", *words], input=text, text=True, timeout=RUN_S_MAX, check=True)
    dashboard = (ROOT / "docs/prometheus/dashboard.json").read_text()
    named = set(re.findall(r"orch_[a-z_]+", dashboard))
    assert named <= set(re.findall(r"`?(orch_[a-z_]+)", (ROOT / "docs/metrics.md").read_text())) | {
        "orch_checkpoint_age_seconds"
    }
    with _prometheus(desk) as query:
        failed = wait_until(lambda: query('orch_job_state{state="FAILED"} == 1'), "a scrape")
        assert {one["metric"]["job_id"] for one in failed} == {one.job.id for one in desk.jobs}
        for panel in json.loads(dashboard)["panels"]:
            for target in panel["targets"]:
                query(target["expr"].replace("$job_id", ".*"))
        wait_until(lambda: query('ALERTS{alertname="OrchJobFailed",alertstate="firing"}'), "an alert")


@contextlib.contextmanager
def _prometheus(desk: Desk) -> Iterator[Callable[[str], list[Any]]]:
    """Run a Prometheus that scrapes the desk's jobs, with the alert rules of the docs; yield what answers a query."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        metrics, port = one.getsockname()[1], other.getsockname()[1]
    (desk.folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(ROOT / "docs/prometheus/alerts.yaml")],
                "scrape_configs": [{"job_name": "orch", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]}],
            }
        )
    )
    place = ("--config.file=prometheus.yml", "--storage.tsdb.path=data")
    commands = (
        [sys.executable, "-m", "orchestrator.cli", "metrics", "--listen", str(metrics)],
        ["prometheus", *place, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
    )

    def query(text: str) -> list[Any]:
        words = urllib.parse.urlencode({"query": text})
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{words}", timeout=RUN_S_MAX) as answer:
                found: list[Any] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.HTTPError as err:
            if err.code == 503:  # it comes up
                return []
            raise AssertionError(f"{text}: {err.read()!r}") from err
        except urllib.error.URLError:  # it does not listen yet
            return []

    with contextlib.ExitStack() as stack:
        for command in commands:
            process = stack.enter_context(
                subprocess.Popen(command, cwd=desk.folder, env=desk.environ, stdout=subprocess.DEVNULL)
            )
            stack.callback(process.terminate)
        yield query


def test_mcp_client_submits_waits_and_reads_cause(desk: Desk) -> None:
    """An MCP client submits a job, waits for it and learns why it failed."""
    for name, text in {**FAKE_TORCH, "train.py": FAILS}.items():
        (desk.folder / name).parent.mkdir(exist_ok=True, parents=True)
        (desk.folder / name).write_text(text)
    fields: dict[str, Any] = {"procs_per_node": 2, "entrypoint": "train.py", "restart": {"max": 0}}
    (desk.folder / "job.yaml").write_text(json.dumps({"name": "t", **fields}))
    words = ["-m", "orchestrator.cli", "mcp"]
    server = StdioServerParameters(command=sys.executable, args=words, env=dict(desk.environ), cwd=desk.folder)

    async def talk() -> None:
        async with Client(server, read_timeout_seconds=RUN_S_MAX) as client:

            async def call(name: str, verb: str = "", **arguments: Any) -> Any:
                answer = await client.call_tool(name, arguments)
                assert not answer.is_error, answer.content
                found: Any = answer.structured_content
                found = found.get("result", found)
                jsonschema.validate(found, make_schema(verb)) if verb else None
                return found

            async def refusal(name: str, **arguments: Any) -> str:
                answer = await client.call_tool(name, arguments)
                assert answer.is_error
                return str(getattr(answer.content[0], "text", ""))

            hints = {tool.name: tool.annotations for tool in (await client.list_tools()).tools}
            reads = {name for name, hint in hints.items() if hint is not None and hint.read_only_hint}
            ends = {name for name, hint in hints.items() if hint is not None and hint.destructive_hint}
            assert reads == {"status", "why", "logs", "stacks", "wait"} and ends == {"cancel", "restart"}
            assert hints.keys() - reads - ends == {"submit", "resume"}
            made = [await call("submit", "submit", spec="job.yaml", key="night-8") for _ in range(2)]
            assert made[0]["id"] == made[1]["id"] and [one["new"] for one in made] == [True, False]
            job = made[0]["id"]
            assert (await call("wait", "wait", job=job, timeout_s=0))["id"] == job
            ended = await call("wait", "wait", job=job, timeout_s=RUN_S_MAX)
            assert (ended["state"], ended["culprits"][0]["rank"]) == ("FAILED", 1)
            for arguments in ({"job": job}, {"all_jobs": True}):
                assert [one["state"] for one in await call("status", "status", **arguments)] == ["FAILED"]
            assert "bad batch" in (await call("why", "why"))["attempts"][0]["verdict"]["summary"]
            shown = await call("logs", job=job, ranks=[1], tail=1)
            assert shown["text"].endswith("ValueError: bad batch\n") and shown["lines"] == 1
            assert "no job has the id or name 'other'" in await refusal("cancel", job="other")
            found = await refusal("cancel", job=job)
            assert "there is nothing to cancel" in found and "fix: orch resume" in found
            assert "is not a regular expression" in await refusal("logs", grep="(")
            assert "less than or equal to" in await refusal("logs", tail=10_000_000)

    asyncio.run(talk())
