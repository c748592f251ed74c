"""The command line `orch`: one module for each kind of verb, exit codes, terminal."""

import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ctrl-C during the imports ends it silently: nothing has started yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from orchestrator.cli import app

    app.main()
