"""How soon is each hang of the gallery named and ended, and is every innocent left alone? `python -m bench.hang_gallery [NAME…]`

Each job runs alone, so that the figures are those of a machine that has nothing else to do: all of it takes about
half an hour. `--side-by-side N` runs so many at once. Nothing is asserted; the aim is printed beside what was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from orchestrator.brain.model import decisions as d
from orchestrator.core.wire import orders
from tests.hangs.gallery import CASES, Case
from tests.hangs.innocents import INNOCENTS, Deed
from tests.hangs.innocents_busy import BUSY
from tests.hangs.innocents_waits import WAITS
from tests.hangs.runs import Entry, Runs
from tests.hangs.unlike import UNLIKE
from tests.support.local import Desk, Sight

END_S_MAX = 180.0


def main(words: Sequence[str]) -> int:
    """Run the named jobs, or all but those to which a test must do something."""
    parser = argparse.ArgumentParser(prog="python -m bench.hang_gallery")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--side-by-side", type=int, default=1)
    asked = parser.parse_args(words)
    everything: list[Entry] = [
        *CASES,
        *(one for one in (*INNOCENTS, *BUSY, *UNLIKE, *WAITS) if one.deed is Deed.NOTHING),
    ]
    unknown = set(asked.names) - {one.name for one in everything}
    if unknown:
        print(f"there is no {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    entries = [one for one in everything if one.name in asked.names or not asked.names]
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder), {**os.environ, "ORCH_HOME": f"{folder}/home"})
        try:
            runs = Runs(desk, entries, asked.side_by_side, _limit_s)
            print(f"{'':62}{'named':>8}{'ended':>8}{'at most':>9}  verdict")
            for entry in entries:
                print(_row(entry, runs.result(entry.name)), flush=True)
        finally:
            left = desk.clear_up()
    print("\n".join(left))
    return 0


def _limit_s(entry: Entry) -> float:
    return (entry.found_s_max if isinstance(entry, Case) else entry.lasts_s) + END_S_MAX


def _row(entry: Entry, job: Sight) -> str:
    judged, suspects = job.news(d.Judge), job.notices(d.NoticeTopic.SUSPECT)
    limit = f"{entry.found_s_max:.0f} s" if isinstance(entry, Case) else "never"
    if not judged:
        looks = len({(one.attempt, one.inspection) for one in job.news(orders.Inspect)})
        return f"{entry.name:62}{'-':>8}{'-':>8}{limit:>9}  none; {looks} looks; {job.seen()['state']}"
    verdict: d.Verdict = judged[0].verdict
    told = verdict.culprit or verdict.summary
    named_s, ended_s = ((suspects or judged)[0].at - verdict.since_s, judged[0].at - verdict.since_s)
    return f"{entry.name:62}{named_s:6.1f} s{ended_s:6.1f} s{limit:>9}  {verdict.kind.value}: {told[:120]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
