"""Post-mortem view on one screen: earlier failures in a line each, the last failure in full, and what to do.

Pure: the object of `orch why --json` in, lines out. The job's end comes last, since a terminal still shows that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from orchestrator.core import codec
from orchestrator.core.codec import Json
from orchestrator.core.status_types import Suspicion
from orchestrator.core.text import ranks_label as ranks_named
from orchestrator.views import checkpoint_table, goodput
from orchestrator.views.cells import (
    STYLES,
    Cell,
    Line,
    cut,
    disk_full,
    duration,
    line,
    name_list,
    shorten_paths,
    span,
)
from orchestrator.views.next_steps import PASSED_SHOWN, has_culprit, next_steps
from orchestrator.views.status import next_action_line, reason_lines, suspicion_lines

EARLIER_MAX = 6
"""How many lines of earlier attempts are shown; the first of them and the latest."""

EVIDENCE_LINES_MAX = 13
EVIDENCE_HEAD_LINES = 2
"""The number of first lines that are shown of longer evidence; a traceback's end matters most."""

LINE_CHARS_MAX = 300
SENTENCE_CHARS_MAX = 1000
"""A line of a traceback may be cut; evidence of one line has sentences and commands to copy."""

SHORT_CHARS_MAX = 60
"""Evidence of fewer characters shares its line with other such, as `/proc state · GPU use`."""

GROUPS_MAX = 16
"""How many groups of ranks with equal frames are shown as evidence."""

REMARKS_MAX = 4
"""How many remarks on ranks are shown of an attempt."""

PARTS_S_MIN = 2.0
"""How long a restart takes of which the parts are shown."""

STALLS_S_MIN = 1.0
"""For how long checkpoints must have stopped the ranks of an attempt to be mentioned."""

_PAD = "  "


def post_mortem(why: Json, reference: str = "") -> list[Line]:
    """Return what `orch why` shows. `reference`: the job in commands, by default its id."""
    folder, attempts = why.get("dir", ""), why["attempts"]
    judged = [number for number, attempt in enumerate(attempts) if attempt["verdict"]]
    last = judged[-1] if judged else 0
    state = Cell(why["state"], STYLES.get(why["state"], ""))
    lines = [line(Cell(why["id"], "bold"), _PAD, state)]
    summary = attempts[last]["verdict"]["summary"] if judged else ""
    before, _, after = why["reason"].partition(summary) if summary else ("", "", why["reason"])
    if reason := after.removeprefix("; ") if summary in why["reason"] else before:
        lines += reason_lines(reason, folder)
    if full_disk := why.get("full_disk"):
        lines.append(line(Cell(disk_full(full_disk), "yellow")))
    body = [*_earlier_lines(attempts[:last], attempts[last], folder)] if judged else []
    for number, attempt in enumerate(attempts[last:], last):
        body += ((), *_attempt_lines(attempt, folder, why["state"]))
        if number and attempt.get("losses"):
            body.append(_loss_line(attempt, attempts[number - 1]))
    if why.get("suspicion"):
        suspected = codec.unpack(Suspicion, why["suspected"]) if why.get("suspected") else None
        next_action = next_action_line(suspected, why.get("written_at", ""), reference or why["id"])
        body += [(), *suspicion_lines(shorten_paths(why["suspicion"], folder), next_action)]
    body += goodput.summary(why["goodput"])
    return [*lines, *body, *next_steps(why, reference or why["id"])]


def _earlier_lines(attempts: Sequence[Json], last: Json, folder: str) -> Iterator[Line]:
    """Yield a line for each run of attempts that ended alike; what the last one shows in full is left out."""
    runs = [list(run) for _, run in itertools.groupby(attempts, key=_failure_key)]
    hidden = len(runs) - EARLIER_MAX
    if runs:
        yield ()
    for number, run in enumerate(runs):
        if hidden > 0 and number == 1:
            yield line(Cell(f"… {hidden} more, all in --json …", "dim"))
        if hidden <= 0 or number == 0 or number > hidden:
            yield line(Cell(_run_name(run), "bold"), _PAD, shorten_paths(_run_summary(run, last), folder))


def _failure_key(attempt: Json) -> tuple[str, str]:
    verdict = attempt["verdict"]
    return (verdict["kind"], verdict["summary"]) if verdict else ("", "")


def _run_name(attempts: Sequence[Json]) -> str:
    """Return the numbers of consecutive attempts as text."""
    first, last = attempts[0]["attempt"], attempts[-1]["attempt"]
    return f"attempt {first}" if first == last else f"attempts {first} to {last}"


def _run_summary(attempts: Sequence[Json], last: Json) -> str:
    first, verdict = attempts[0], attempts[0]["verdict"]
    if verdict is None:
        return _outcome(first, "")
    steps = [step for attempt in attempts if (step := _end_step(attempt)) is not None]
    at = f" at {_step_range(steps[0], steps[-1])}" if steps else ""
    cost = _restart_cost(first) if len(attempts) == 1 else _restart_costs(attempts)
    what = verdict["culprit"] or verdict["head"]
    if verdict["signature"] == last["verdict"]["signature"] and (who := _ranks_at_fault(verdict)):
        what = f"{who}, as in attempt {last['attempt']}"
    return f"{verdict['kind']}{at}{cost}: {what}"


def _ranks_at_fault(verdict: Json) -> str:
    """Return the ranks at fault and their node, `rank 2 on gpu03`; empty where no rank is to blame."""
    ranks = ranks_named(verdict["ranks"]) if verdict["ranks"] else ""
    return " on ".join(part for part in (ranks, verdict["node"]) if part)


def _end_step(attempt: Json) -> int | None:
    """Return the step at which an attempt ended; one whose nodes are taken away makes some more steps after its verdict."""
    step: int | None = attempt["verdict"].get("step")
    last: int | None = attempt.get("last_step")
    if attempt["verdict"]["kind"] in ("preempted", "time_limit") and step is not None and last is not None:
        return max(step, last)
    return step


def _restart_costs(attempts: Sequence[Json]) -> str:
    took_s = [attempt["restart_s"] for attempt in attempts if attempt["restart_s"] is not None]
    return f", restarted in {duration(min(took_s))} to {duration(max(took_s))}" if took_s else ""


def _restart_cost(attempt: Json) -> str:
    """Return what a restart cost: time and repeated steps."""
    if attempt["restart_s"] is None:
        return ""
    repeated_steps = attempt.get("repeated_steps")
    repeated = f", {repeated_steps:,} step{'s' if repeated_steps != 1 else ''} repeated" if repeated_steps else ""
    waited_s = attempt.get("queued_s")
    queued = f" ({duration(waited_s)} of it in the queue)" if waited_s else ""
    took = (span if has_culprit(attempt["verdict"]) else duration)(attempt["restart_s"])
    return f", restarted in {took}{queued}{repeated}"


def _time_range(began: str, ended: str | None) -> str:
    """Return the time range in UTC; the end's date only where it differs."""
    day, time = began[:10], began[11:19]
    if ended is None:
        return f"since {day} {time} UTC"
    if ended < began:
        return f"{day} {time} UTC; the clock was set back meanwhile"
    until = ended[11:19] if ended[:10] == day else f"{ended[:10]} {ended[11:19]}"
    return f"{day} {time} to {until} UTC"


def _outcome(attempt: Json, state: str) -> str:
    """Return how an attempt without a verdict ended; a cancelled job may have been resumed since."""
    if attempt["ended_at"] is None:
        is_starting = state in ("STARTING", "RESTARTING") and attempt["first_step"] is None
        return "waiting for nodes" if state == "QUEUED" else "starting" if is_starting else "running"
    if attempt.get("job_end") == "CANCELLED":
        return "stopped by orch cancel"
    if attempt.get("job_end") == "FAILED" and attempt.get("ended_why"):
        return f"ended: {attempt['ended_why']}"
    return f"ended by {attempt['ended_why']}" if attempt["ending"] == "restart" else "ended without a fault"


SCRIPT_CHOICE = " (the script's choice)"


def resume_source_text(attempt: Json) -> str:
    """Say where an attempt resumed from; a script may have resumed by itself from its own checkpoint."""
    given, first, began = attempt.get("resumed_step"), attempt["first_step"], attempt.get("began_from")
    if began is not None and began["path"] is None:
        return f"from the beginning: no rank had read {attempt['resumed_from']} before its first step"
    if began is not None and began["save"] is None:
        either = "" if (first or 0) > 1 else "the beginning, or from "
        return f"from {either}{began['path']}, which the script read and this job did not write"
    if began is not None:
        return f"from {began['path']}{SCRIPT_CHOICE if began['chosen_by'] == 'script' else ''}"
    if given is not None and first is not None and first < given + 1:
        ignored = f"{attempt['resumed_from']} was given, but the script started at step {first:,}"
        return f"{ignored} (does it read ORCH_RESUME_FROM?)"
    return f"from {attempt['resumed_from'] or 'the beginning'}"


def _passed_texts(attempt: Json) -> list[str]:
    """Return the newer checkpoints that an attempt skipped, each with the reason."""
    passed_over = attempt.get("passed", ())
    texts = [checkpoint_table.passed_text(one["path"], one["step"], one["why"]) for one in passed_over[:PASSED_SHOWN]]
    return [*texts, *([f"{len(passed_over) - PASSED_SHOWN} more"] if len(passed_over) > PASSED_SHOWN else [])]


def _resume_lines(attempt: Json) -> Iterator[Line]:
    """Yield why the checkpoint of an attempt is complete, and which newer ones were skipped."""
    if checkpoint := attempt.get("resumed_save"):
        known = checkpoint_table.step_text(checkpoint.get("step", attempt["resumed_step"]), checkpoint["step_source"])
        compared = f"; verified by {checkpoint['compared']}" if checkpoint["compared"] else ""
        yield line(Cell(f"{_PAD * 2}checkpoint {checkpoint['save']}, {known}{compared}", "dim"))
        yield from (line(Cell(f"{_PAD * 2}complete: {why}", "dim")) for why in filter(None, [checkpoint["closed_by"]]))
    yield from (line(f"{_PAD * 2}skipped: ", Cell(loser, "yellow")) for loser in _passed_texts(attempt))


def transition(why: Json, number: int, last_text: str = "") -> str:
    """Return in a line where an attempt resumed from and why the previous one ended, if what was `last_text` last does not say
    that; empty where it is unknown."""
    attempts = {attempt["attempt"]: attempt for attempt in why["attempts"]}
    ended, begun = attempts.get(number - 1), attempts.get(number)
    if ended is None or begun is None:
        return ""
    verdict = ended["verdict"]
    failure = shorten_paths(f"{verdict['kind']}: {verdict['head']}", why["dir"]) if verdict else ""
    end = f"; attempt {number - 1} {f'ended: {failure}' if verdict else _outcome(ended, why['state'])}"
    text = f"{resume_source_text(begun)}{'' if failure and failure in last_text else end}"
    return cut(shorten_paths(text, why["dir"]), SENTENCE_CHARS_MAX)


def _attempt_lines(attempt: Json, folder: str, state: str) -> Iterator[Line]:
    """Yield an attempt in full."""
    name, verdict = Cell(f"attempt {attempt['attempt']}", "bold"), attempt["verdict"]
    if verdict is None:
        last = attempt["last_step"]
        steps = f", {_step_range(attempt['first_step'], last)}" if last is not None else ""
        yield line(name, f"{_PAD}{_outcome(attempt, state)}{steps}")
    elif has_culprit(verdict):
        yield from _culprit_lines(attempt, folder)
    else:
        at = f" at step {step:,}" if (step := _end_step(attempt)) is not None else ""
        found = f", found in {duration(verdict['detected_s'])}{_restart_cost(attempt)}"
        yield line(name, _PAD, Cell(f"{verdict['kind']}{at}", "bold red"), found)
        yield line(Cell(f"{_PAD}{shorten_paths(verdict['head'], folder)}", "red"))
    when = _time_range(attempt["started_at"], attempt["ended_at"])
    yield line(f"{_PAD}{shorten_paths(resume_source_text(attempt), folder)}, {when}")
    yield from _resume_lines(attempt)
    parts = attempt.get("restart_parts")
    if parts and attempt["restart_s"] >= PARTS_S_MIN:
        end, start, first = (duration(parts[name]) for name in ("end_s", "start_s", "first_step_s"))
        formed = f"process group after {duration(parts['group_s'])}, " if "group_s" in parts else ""
        yield line(
            f"{_PAD}the restart: old ranks ended in {end}, new ones started in {start}, {formed}first step after {first}"
        )
    stalls_s = attempt.get("checkpoint_stalls_s") or [0.0]
    if sum(stalls_s) >= STALLS_S_MIN:
        yield line(
            f"{_PAD}checkpoints: no steps for {duration(sum(stalls_s))} in all, for {max(stalls_s):,.1f} s at most"
        )
    for told in attempt.get("told", ()):
        kind = f"{told['kind']}: " if told["kind"] else ""
        yield line(f"{_PAD}{told['what']} at {told['at'][11:19]} UTC: {kind}{shorten_paths(told['text'], folder)}")
        if told["fix"]:
            yield line(f"{_PAD}  fix: {told['fix']}")
    if starts := attempt["fresh_starts"]:
        yield line(Cell(f"{_PAD}ranks were started as {'; '.join(starts)}", "dim"))
    yield from _remark_lines(attempt.get("remarks", ()))
    if verdict is not None and not has_culprit(verdict):
        for names, piece in _group_evidence(_own_evidence(verdict)):
            yield from _evidence_lines(names, piece, folder)


def _loss_line(attempt: Json, previous: Json) -> Line:
    """Return the losses that an attempt and the one before it logged: they show whether the script resumed."""
    earlier = previous.get("losses")
    was = f"; in attempt {previous['attempt']} from {earlier[0]} to {earlier[1]}" if earlier else ""
    return line(f"{_PAD}loss in the log of rank 0: from {attempt['losses'][0]} to {attempt['losses'][1]}{was}")


def _remark_lines(remarks: Sequence[str]) -> Iterator[Line]:
    """Yield harmless remarks on single ranks, such as that one is slow."""
    yield from (line(_PAD, Cell(remark, "yellow")) for remark in remarks[:REMARKS_MAX])
    if len(remarks) > REMARKS_MAX:
        yield line(Cell(f"{_PAD}… {len(remarks) - REMARKS_MAX} more, all in --json …", "dim"))


def _culprit_lines(attempt: Json, folder: str) -> Iterator[Line]:
    """Yield a verdict with a culprit: the head, then culprit, waiting ranks and evidence, each with a label."""
    verdict = attempt["verdict"]
    at = f" at step {verdict['step']:,}" if verdict.get("step") is not None else ""
    since = "it began" if verdict["kind"] == "desync" else "the last step" if at else "the last heartbeat"
    found = f", found {span(verdict['detected_s'])} after {since}{_restart_cost(attempt)}"
    yield line(
        Cell(f"attempt {attempt['attempt']}", "bold"),
        _PAD,
        " ",
        Cell(f"{verdict['kind']}{at}", "bold red"),
        found,
    )
    if verdict["kind"] not in ("hang", "desync"):
        yield line(Cell(f"{_PAD}{shorten_paths(verdict['head'], folder)}", "red"))
    for label in ("culprit", "waiting"):
        if verdict.get(label):
            yield _labelled(label, shorten_paths(verdict[label], folder), "red" if label == "culprit" else "")
    pieces = _own_evidence(verdict)
    brief = [one for one in pieces if _is_brief(one)]
    if brief:
        yield _labelled("evidence", " · ".join(shorten_paths(one["text"], folder) for one in brief))
    longer = [shorten_paths(one["text"], folder) for one in pieces if not _is_brief(one)]
    for number, piece in enumerate(longer[:GROUPS_MAX]):
        label = "" if brief or number else "evidence"
        rows = _text_rows(piece)
        yield from (_labelled(label if not row else "", one, "dim") for row, one in enumerate(rows))
    if len(longer) > GROUPS_MAX:
        yield _labelled("", f"… {len(longer) - GROUPS_MAX} more, all in --json …", "dim")
    yield from (_labelled("fix", one["fix"]) for one in pieces if one["fix"])


def _is_brief(piece: Json) -> bool:
    """Return whether a piece of evidence is short enough to share its line."""
    is_short = len(piece["text"]) <= SHORT_CHARS_MAX and "\n" not in piece["text"]
    return piece["kind"] == "ways" or (piece["kind"] == "note" and is_short)


def _labelled(label: str, text: str, style: str = "") -> Line:
    return line(f"{_PAD}{label:<10}", Cell(cut(text, SENTENCE_CHARS_MAX), style))


def _own_evidence(verdict: Json) -> list[Json]:
    """Return the evidence without what the previous attempt's line already says."""
    return [piece for piece in verdict["proof"] if piece["kind"] != "likewise"]


def _group_evidence(evidence: Sequence[Json]) -> list[tuple[list[str], Json]]:
    pieces: dict[tuple[str, str], tuple[list[str], Json]] = {}
    for piece in evidence:
        names, _ = pieces.setdefault((piece["text"], piece["fix"]), ([], piece))
        names += [piece["node"]] if piece["node"] else []
    return list(pieces.values())


def _step_range(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _evidence_lines(names: Sequence[str], piece: Json, folder: str) -> Iterator[Line]:
    """Yield one piece of evidence without what the summary already says."""
    text = [] if piece["kind"] == "summary" else _text_rows(shorten_paths(piece["text"], folder))
    if len(text) == 1:
        who = f"{name_list(names)}: " if names else ""
        yield line(f"{_PAD}{cut(who + text[0], SENTENCE_CHARS_MAX)}")
    else:
        yield from _text_lines(text)
    if piece["fix"]:
        yield line(f"{_PAD}  fix: {cut(shorten_paths(piece['fix'], folder), SENTENCE_CHARS_MAX)}")


def _text_rows(text: str) -> list[str]:
    """Return the lines of a text without those of a traceback that only underline the line above."""
    return [row for row in text.rstrip().splitlines() if not row or row.strip(" ^~")]


def _text_lines(text: list[str]) -> Iterator[Line]:
    """Yield the first lines of a text, and as many of the last as there is room for."""
    hidden = len(text) - EVIDENCE_LINES_MAX
    if hidden > 0:
        tail = text[EVIDENCE_HEAD_LINES + hidden + 1 :]
        text = [*text[:EVIDENCE_HEAD_LINES], f"  … {hidden + 1} lines, all in --json …", *tail]
    for part in text:
        yield line(Cell(f"{_PAD}{cut(part, LINE_CHARS_MAX)}", "dim"))
