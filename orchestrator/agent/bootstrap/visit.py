"""Visit of a check: steps come in, a line each, after the survey; each is answered, until the input ends."""

from __future__ import annotations

from orchestrator.agent.bootstrap.replies import Replies
from orchestrator.agent.host import steps
from orchestrator.core import codec
from orchestrator.core.wire import bootstrap as w

_STEPS = codec.by_kind(w.Step)


def serve(replies: Replies) -> None:
    """Answer steps until the launcher closes; what they have opened is closed."""
    here = steps.here()
    try:
        while line := replies.next_line(w.STEP_S_MAX):
            step: w.Step = codec.loads_kind(_STEPS, line)
            replies.send(here.run(step))
    finally:
        here.close()
