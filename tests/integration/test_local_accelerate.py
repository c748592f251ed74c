"""Do ranks find what `accelerate launch` would put into their environment, by the Accelerate that is installed?

Each script runs by `accelerate launch` itself and by orch, with the same configuration, and says what it found.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.local import Desk
from tests.support.packages import need

need("accelerate")

LAUNCH_S_MAX = 120.0

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_offload_params: false
mixed_precision: bf16
dynamo_config:
  dynamo_backend: AOT_EAGER
debug: true
num_machines: 1
num_processes: 2
"""

TRAIN = """
import json, os
import torch
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState

# Accelerate shards only on accelerators: for it these CPU ranks have one each, and meet over gloo.
torch.cuda.is_available = lambda: True
torch.cuda.is_bf16_supported = lambda *given, **named: True
PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
plugin = accelerator.state.fsdp_plugin
found = {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_", "FSDP_", "OMP_"))}
state = [accelerator.distributed_type, accelerator.mixed_precision, accelerator.num_processes, plugin.fsdp_version]
state += [plugin.state_dict_type, plugin.mixed_precision_policy, accelerator.state.dynamo_plugin.backend]
print("found " + json.dumps({"rank": accelerator.process_index, "state": [str(one) for one in state], "env": found}))
accelerator.end_training()
"""


def _found(text: str) -> list[dict[str, Any]]:
    starts = [one.end() for one in re.finditer("found (?={)", text)]  # of two ranks perhaps on one line
    said = [json.JSONDecoder().raw_decode(text, at)[0] for at in starts]
    return sorted(said, key=lambda one: int(one["rank"]))


def _launched(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks find that `accelerate launch` starts."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "fsdp.yaml").write_text(FSDP)
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "fsdp.yaml",
         "--main_process_port", "0", "train.py"],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LAUNCH_S_MAX,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return _found(done.stdout)


@pytest.mark.soak
def test_fsdp_bf16_configuration_matches_accelerate_launch(desk: Desk, tmp_path: Path) -> None:
    """A configuration with FSDP and bf16 gives the same environment as accelerate launch."""
    theirs = _launched(tmp_path)
    job = desk.submit(
        {"train.py": TRAIN, "fsdp.yaml": FSDP}, entrypoint=None, nodes=2, procs_per_node=1,
        launch="accelerate launch --config_file fsdp.yaml --num_machines 2 train.py",
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.log(0) + job.log(1)
    ours = [*_found(job.log(0)), *_found(job.log(1))]
    assert ours == theirs
    assert ours[0]["state"][:4] == ["DistributedType.FSDP", "bf16", "2", "2"]
    assert ours[0]["env"]["FSDP_AUTO_WRAP_POLICY"] == "SIZE_BASED_WRAP"


def test_accelerate_args_override_env_and_env_overrides_configuration(desk: Desk) -> None:
    """The job file's env overrides the configuration, and args override both."""
    script = "import os\nprint({name: os.environ.get(name) for name in ('ACCELERATE_MIXED_PRECISION', 'FSDP_VERSION', 'MASTER_PORT', 'ACCELERATE_DEBUG_MODE')})"
    job = desk.submit(
        {"train.py": script, "fsdp.yaml": FSDP}, entrypoint=None, nodes=1, procs_per_node=2, env={"FSDP_VERSION": "1"},
        launch="accelerate launch --config_file fsdp.yaml --mixed_precision no train.py",
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.log(0)
    found = job.log(0)
    assert "'ACCELERATE_MIXED_PRECISION': 'no', 'FSDP_VERSION': '1'" in found
    assert "'ACCELERATE_DEBUG_MODE': 'true'" in found
    assert "'MASTER_PORT': '29500'" not in found


@pytest.mark.soak
def test_accelerate_refusal_ends_the_job_with_reason(desk: Desk) -> None:
    """A configuration that accelerate refuses ends the job with its reason."""
    job = desk.submit(
        {"train.py": "", "new.yaml": f"{FSDP}key_of_tomorrow: 1\n"}, entrypoint=None, nodes=1, restart={"max": 0},
        procs_per_node=2, launch="accelerate launch --config_file new.yaml train.py",
    )  # fmt: skip
    assert job.wait()["state"] == "FAILED"
    said = json.dumps(job.verdict())
    assert "The config file at new.yaml had unknown keys (['key_of_tomorrow'])" in said
