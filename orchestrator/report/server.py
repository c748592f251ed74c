"""Web server of `orch report --serve`: an overview of all jobs and hosts, each job's page, and buttons to cancel, restart or resume.

Rules:
1. The server listens on 127.0.0.1. Every address begins with a token; a request without it is refused.
2. A request for another host name, or from the page of another origin, is refused, so that a foreign page in the same browser, or a
   name that resolves to this machine, cannot act. Only a POST from a page of this server changes a job.
3. Each action is confirmed on a page of its own.
4. Updates are sent as server-sent events, as HTML that the server has escaped. Pages also work without script: then the
   user reloads them.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.client.job import Job
from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir import home
from orchestrator.core.secret_mask import Mask
from orchestrator.report import page
from orchestrator.report.overview import OverviewReader

HOST = "127.0.0.1"
OVERVIEW_S, JOB_S = 2.0, 10.0
"""How often the content is read again: the overview, and a job's page."""

STOP_S_MAX = 1

ACTIONS: dict[str, tuple[str, Callable[[Job], object]]] = {
    "cancel": ("The job will be stopped. You can resume it later.", Job.cancel),
    "restart": (
        "The current attempt will be stopped, and the next one will start from the newest checkpoint.",
        Job.restart,
    ),
    "resume": ("The job will continue from its newest checkpoint.", Job.resume),
}
"""For each button: the text that asks for confirmation, and the action."""

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class RequestFilter:
    """ASGI middleware that enforces rules 1 and 2."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._hosts = (f"{HOST}:{port}", f"localhost:{port}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refused = self._refusal(Request(scope))
        answer: ASGIApp = self._app if refused is None else PlainTextResponse(refused, 403, HEADERS)
        return await answer(scope, receive, send)

    def _refusal(self, request: Request) -> str | None:
        """Return why a request is refused; None if it is not."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self._hosts:
            return "this server only answers requests to 127.0.0.1 and localhost"
        if origin != f"http://{host}" and (origin is not None or request.method not in ("GET", "HEAD")):
            return "the request comes from a page of another origin"
        given = request.url.path.split("/")[1].encode()
        return None if hmac.compare_digest(given, self._token.encode()) else "the address has no valid token"


class Site:
    """The pages of a job home."""

    def __init__(self, home_folder: Path, token: str) -> None:
        """`place`: the job home."""
        self._place, self._root = home_folder, f"/{token}"
        self._overlook = OverviewReader(home_folder)

    def app(self) -> Starlette:
        """Return the pages as an application, without the request filter."""
        job = f"{self._root}/jobs/{{job}}"
        return Starlette(
            routes=[
                Route(f"{self._root}/", self._overview),
                Route(f"{self._root}/events", self._overview_events),
                Route(job, self._job),
                Route(f"{job}/events", self._job_events),
                Route(f"{job}/{{action}}", self._confirm_page),
                Route(f"{job}/{{action}}", self._run_action, methods=["POST"]),
            ],
            exception_handlers={OrchError: self._error_page},
        )

    async def _overview(self, request: Request) -> Response:
        return HTMLResponse(self._render("live.html.j2", table=await self._table()), headers=HEADERS)

    async def _overview_events(self, request: Request) -> Response:
        return _event_stream(self._table, OVERVIEW_S)

    async def _table(self) -> str:
        return self._render("jobs.html.j2", seen=await run_in_threadpool(self._overlook.current), actions=_actions)

    async def _job(self, request: Request) -> Response:
        found = await run_in_threadpool(self._find_job, request)
        return HTMLResponse(await run_in_threadpool(page.page, found, self._root), headers=HEADERS)

    async def _job_events(self, request: Request) -> Response:
        found = await run_in_threadpool(self._find_job, request)

        async def stamp() -> str:
            return str(await run_in_threadpool(_changed_ns, found))

        return _event_stream(stamp, JOB_S)

    async def _confirm_page(self, request: Request) -> Response:
        found = await run_in_threadpool(self._find_job, request)
        action = _action(request)
        text = self._render("ask.html.j2", job=found.id, action=action, told=ACTIONS[action][0])
        return HTMLResponse(text, headers=HEADERS)

    async def _run_action(self, request: Request) -> Response:
        found = await run_in_threadpool(self._find_job, request)
        await run_in_threadpool(ACTIONS[_action(request)][1], found)
        return RedirectResponse(f"{self._root}/", 303, HEADERS)

    async def _error_page(self, request: Request, err: Exception) -> Response:
        return HTMLResponse(self._render("ask.html.j2", job="", action="", told=str(err)), 409, HEADERS)

    def _find_job(self, request: Request) -> Job:
        return Job(home.find_job(self._place, request.path_params["job"]))

    def _render(self, name: str, **values: object) -> str:
        return page.environment(Mask(()), "").get_template(name).render(root=self._root, **values)


def _action(request: Request) -> str:
    action: str = request.path_params["action"]
    if action not in ACTIONS:
        raise OrchError(f"unknown action: {action}")
    return action


def _actions(state: str) -> tuple[str, ...]:
    """Return the actions for a job in a state."""
    match state:
        case "FAILED" | "CANCELLED":
            return ("resume",)
        case "SUCCEEDED":
            return ()
        case "STARTING" | "RUNNING":
            return ("restart", "cancel")
        case _:
            return ("cancel",)


def _changed_ns(job: Job) -> int:
    try:
        return job.folder.state.stat().st_mtime_ns
    except OSError:
        return 0


def _event_stream(read_content: Callable[[], Awaitable[str]], every_s: float) -> Response:
    """Return a function's text as a stream: an event when it has changed, else a comment, which shows whether the reader
    has left."""

    async def stream() -> AsyncIterator[str]:
        last = None
        while True:
            if (now := await read_content()) != last:
                yield "".join(f"data: {line}\n" for line in now.splitlines()) + "\n"
            else:
                yield ": nothing new\n\n"
            last = now
            await asyncio.sleep(every_s)

    return StreamingResponse(stream(), media_type="text/event-stream", headers=HEADERS)


def serve(home_folder: Path, port: int, started: Callable[[str], None]) -> None:
    """Serve a job home until Ctrl-C; `started` receives the address. `port` 0: a free one. Raises OSError when the port is taken."""
    token = secrets.token_urlsafe(32)
    with socket.create_server((HOST, port)) as listener:
        at = listener.getsockname()[1]
        app = RequestFilter(Site(home_folder, token).app(), token, at)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_S_MAX, lifespan="off"
        )
        started(f"http://{HOST}:{at}/{token}/")
        uvicorn.Server(config).run([listener])
