"""What does a rank find in its environment, and does a secret stay one?"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from tests.support.local import Desk, wait_until

DUMP = """
import json, os
from pathlib import Path
print(json.dumps(dict(os.environ)), flush=True)
if os.environ["ORCH_ATTEMPT"] == "1" and os.environ["RANK"] == "0":
    os.kill(os.getpid(), 9)
"""

SECRET = "s3cr3t/with+signs=42"


def _environment(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[0])
    return found


def test_rank_environment_is_complete_and_user_values_win(desk: Desk) -> None:
    desk.environ |= {"OUTER": "outer", "SLURM_PROCID": "7", "RANK": "9", "MASTER_PORT": "1", "PET_NNODES": "3",
                     "ORCH_RESUME_FROM": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    job = desk.submit(
        {"train.py": DUMP}, nodes=2, entrypoint="train.py", nccl={"debug": "INFO"},
        env={"OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "mine", "PYTHONPATH": "/mine", "CUDA_VISIBLE_DEVICES": "0,1"},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED"
    for rank in range(4):
        env = _environment(job.log(rank, 2))
        node, local = divmod(rank, 2)
        run = job.job.folder.rank_run(f"node-{node}", 2, rank)
        owned = {
            "RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": 2, "NODE_RANK": node, "ROLE_RANK": rank, "ROLE_NAME": "default", "ROLE_WORLD_SIZE": 4,
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": job.job.id, "TORCHELASTIC_RESTART_COUNT": 1,
            "TORCHELASTIC_MAX_RESTARTS": 3, "TORCHELASTIC_ERROR_FILE": run / "torchelastic-error.json",
            "ORCH_JOB_ID": job.job.id, "ORCH_JOB_NAME": "t", "ORCH_ATTEMPT": 2, "ORCH_RESUME_FROM": "",
            "ORCH_CHECKPOINT_DIR": job.job.folder.checkpoints, "ORCH_RANK_DIR": run,
        }  # fmt: skip
        assert {name: env.get(name) for name in owned} == {name: str(value) for name, value in owned.items()}
        assert 1024 < int(env["MASTER_PORT"]) < 32768
        chosen = {"OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "mine", "NCCL_DEBUG": "INFO", "OUTER": "outer",
                  "CUDA_VISIBLE_DEVICES": "0,1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}  # fmt: skip
        assert {name: env[name] for name in chosen} == chosen
        assert env["PYTHONPATH"].split(":") == [str(job.job.folder.node(f"node-{node}") / "hook"), "/mine"]
        assert not [name for name in env if name.startswith(("SLURM_", "PET_"))]
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env
        assert env.get("PWD", str(job.job.folder.code)) == str(job.job.folder.code)
    ports = {_environment(job.log(rank, 2))["MASTER_PORT"] for rank in range(4)}
    assert len(ports) == 1
    assert ports != {_environment(job.log(0, 1))["MASTER_PORT"]}


RAISE = """
import os
print("the secret is", os.environ["TOKEN_OF_MINE"], flush=True)
raise RuntimeError("refused: " + os.environ["TOKEN_OF_MINE"])
"""


def test_secret_reaches_ranks_and_is_stored_nowhere_else(desk: Desk) -> None:
    desk.environ["TOKEN_OF_MINE"] = SECRET
    job = desk.submit(
        {"train.py": RAISE}, procs_per_node=1, entrypoint="train.py", secrets=["TOKEN_OF_MINE"],
        setup=['echo "setup sees ${#TOKEN_OF_MINE} characters"', "export MORE=1"],
    )  # fmt: skip
    assert job.wait()["state"] == "FAILED"
    wait_until(job.job.folder.ended.exists, "the supervisor's last word: files come and go before it")
    assert f"the secret is {SECRET}" in job.log()
    setup = job.job.folder.node_log(1, "node-0").read_text()
    assert f"setup sees {len(SECRET)} characters" in setup
    assert "refused: ***" in job.verdict()["summary"]
    assert SECRET not in json.dumps(job.job.why())

    secrets = job.job.folder.secrets
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()} == {0o600}
    assert _holders(job.root) == {
        secrets / "secrets.json",
        *job.job.folder.logs.glob("attempt-*/rank-00000.log"),
    }
    assert not any(SECRET.encode() in command for command in job.commands())


def _holders(root: Path) -> set[Path]:
    """Return the files that hold the secret."""
    files = [Path(folder) / name for folder, _, names in os.walk(root) for name in names]
    return {path for path in files if SECRET.encode() in path.read_bytes()}


SAVER = """
import os
from pathlib import Path
import helper
folder = Path(os.environ["ORCH_CHECKPOINT_DIR"]) / "step-1"
folder.mkdir(exist_ok=True)
(folder / f"{os.environ['RANK']}.pt").write_text("x")
Path(f"made-{os.environ['RANK']}").mkdir()
"""


def test_job_folder_is_not_writable_under_any_umask(desk: Desk) -> None:
    """Code, scripts and checkpoints are executed or loaded, and so is what Python keeps beside them."""
    before = os.umask(0)
    try:
        job = desk.submit(
            {"train.py": SAVER, "helper.py": "", "data/few.bin": "x"}, entrypoint="train.py", setup=["touch setup-was-here"],
        )  # fmt: skip
        assert job.wait()["state"] == "SUCCEEDED"
        assert os.umask(0) == 0, "what the caller makes himself is his own matter"
    finally:
        os.umask(before)
    assert (job.root / "code" / "made-1").is_dir()
    open_to_others = []
    for path in (job.root, *job.root.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # its supervisor still leaves
            if path.lstat().st_mode & 0o022 and not path.is_symlink():
                open_to_others.append(f"{path.relative_to(job.root)} {stat.S_IMODE(path.lstat().st_mode):o}")
    assert open_to_others == []
