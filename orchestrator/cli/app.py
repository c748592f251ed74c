"""Entry of the command line `orch`: runs one verb and picks the exit code.

0 done, 1 the job failed or was cancelled, 2 the user's mistake, 3 the cluster's fault, 130 interrupted while the job
keeps running; of `wait` 4 the job needs a person, 124 timeout. Every verb loads what it needs when it runs: `orch status` must not wait for what `orch submit` uses.
"""

from __future__ import annotations

import io
import os
import signal
import sys

import click

from orchestrator.cli import terminal
from orchestrator.cli.group import EXIT_CLUSTER_FAULT, cli
from orchestrator.core.errors import EXIT_INTERRUPTED, OrchError, UserError
from orchestrator.core.jobdir import home
from orchestrator.submission.supervisor_process import restart_supervisor

_VERBS_WITHOUT_JOBS = frozenset({"init", "schema", "render", "check", "plan", "submit", "run", "metrics"})


def _revive_all() -> None:
    """Restart supervisors that died, and continue stopped ones: every verb does so for all of the user's jobs."""
    for folder in home.unfinished_jobs(home.job_home(os.environ)):
        try:
            if done := restart_supervisor(folder):
                terminal.say(f"the supervisor of {folder.id} {done}", err=True)
        except OrchError as err:
            terminal.print_error(f"{folder.id}: its supervisor died and cannot be restarted: {err}")
        except OSError as err:  # such as a disk without locks, where a dead supervisor looks like a live one
            terminal.print_error(
                f"{folder.id}: the state of its supervisor is unknown: {err.filename or folder.root}: {err.strerror or err}"
            )


def main() -> None:
    """Run the command line and end the process with its exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    terminal.open_streams()
    code = run(sys.argv[1:])
    terminal.drop_unwritten()
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command and return its exit code; nothing that a user or a cluster can cause escapes it."""
    try:
        for word in argv:
            os.fsencode(word)
        if argv and argv[0] in cli.commands and argv[0] not in _VERBS_WITHOUT_JOBS:
            _revive_all()
        code = cli.main(argv, prog_name="orch", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except OrchError as err:
        terminal.print_error(str(err))
        return err.exit_code
    except click.ClickException as err:
        message = io.StringIO()
        err.show(message)
        terminal.say(terminal.shorten(message.getvalue().rstrip("\n")), err=True)
        return err.exit_code if err.exit_code != 1 else 2
    except UnicodeEncodeError as err:
        terminal.print_error(f"an argument is not text: {err.object!a}")
        return UserError.exit_code
    except (KeyboardInterrupt, click.Abort) as err:
        new_line = "" if isinstance(err, click.Abort) else "\n"  # click has started one
        what = str(err) or ("jobs keep running" if argv[:1] in (["wait"], ["logs"], ["metrics"]) else "")
        terminal.say(f"{new_line}interrupted{f': {what}' if what else ''}", err=True)
        return EXIT_INTERRUPTED
    except terminal.ReaderGone:
        is_awaited = argv[0] in ("run", "wait", "check") or (argv[0] in ("submit", "resume") and "--follow" in argv)
        return EXIT_INTERRUPTED if is_awaited else 0  # 0 would mean success
    except OSError as err:
        terminal.print_error(f"{err.filename or 'orch'}: {err.strerror or err}")
        return EXIT_CLUSTER_FAULT
