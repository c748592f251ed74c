"""Job files of SkyPilot, dstack and Kubeflow: known by their keys, as the fields of orch that they stand for. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.spec.foreign import launchers


@dataclass(frozen=True, slots=True)
class Answer:
    """What a job file of another system means here: fields, and what it says that has no equal."""

    system: str
    fields: Mapping[str, Any]
    missing: tuple[str, ...]


_HOSTS = "orch rents no machines: name them as ssh.hosts with backend: ssh, or write backend: slurm"
_IMAGE = "ranks run in no container: give the image's Python as `python`, or an environment in `setup`"
_DATA = "orch brings no data: mount or copy it on the nodes before"

_SKYPILOT = {
    "name": "name",
    "nodes": "num_nodes",
    "workdir": "workdir",
    "env": "envs",
    "setup": "setup",
    "launch": "run",
}
_DSTACK = {"name": "name", "nodes": "nodes", "env": "env", "launch": "commands"}
_PYTORCH_JOB = {"name": "metadata.name", "procs": "spec.nprocPerNode"}
_TRAIN_JOB = {
    "name": "metadata.name", "nodes": "spec.trainer.numNodes", "procs": "spec.trainer.numProcPerNode",
    "env": "spec.trainer.env",
}  # fmt: skip
_VARIABLES = {
    "SKYPILOT_NODE_RANK": "$GROUP_RANK", "SKYPILOT_NUM_NODES": "$NNODES", "SKYPILOT_NODE_IPS": "$MASTER_ADDR",
    "DSTACK_NODE_RANK": "$GROUP_RANK", "DSTACK_NODES_NUM": "$NNODES", "DSTACK_MASTER_NODE_IP": "$MASTER_ADDR",
}  # fmt: skip
"""Variables of these systems, and what a launch line has in their place; of the list of addresses its first."""


def answer(data: Mapping[str, Any]) -> Answer | None:
    """Return what a job file means that is one of another system; None for any other."""
    if not isinstance(data, dict) or {"entrypoint", "command", "launch"} & data.keys():
        return None
    if "run" in data and data.keys() & {"resources", "num_nodes", "file_mounts", "envs"}:
        return _skypilot(data)
    if data.get("type") in ("task", "service", "dev-environment"):
        return _dstack(data)
    kind = data.get("kind") if "apiVersion" in data else ""
    return _pytorch_job(data) if kind == "PyTorchJob" else _train_job(data) if kind == "TrainJob" else None


def _skypilot(data: Mapping[str, Any]) -> Answer:
    missing = [
        text for path, text in (("file_mounts", _DATA), ("resources.image_id", _IMAGE)) if _at(data, path)
    ]
    return Answer(
        "SkyPilot", _fields(data, _SKYPILOT, _gpus(_at(data, "resources.accelerators"))), (_HOSTS, *missing)
    )


def _dstack(data: Mapping[str, Any]) -> Answer:
    missing = [_IMAGE] if "image" in data else []
    if data["type"] != "task":
        missing.append(f"type: {data['type']} has no equal: a job ends when its training has")
    return Answer("dstack", _fields(data, _DSTACK, _gpus(_at(data, "resources.gpu"))), (_HOSTS, *missing))


def _pytorch_job(data: Mapping[str, Any]) -> Answer:
    specs = _at(data, "spec.pytorchReplicaSpecs")
    replicas = list(specs.values()) if isinstance(specs, dict) else []
    counts = [str(_at(one, "replicas") or 1) for one in replicas]
    container = _first(_at(replicas[0], "template.spec.containers")) if replicas else {}
    fields = _fields(data, _PYTORCH_JOB, _gpus(_at(container, "resources.limits.nvidia*com/gpu")))
    if all(count.isdecimal() for count in counts) and counts:
        fields["nodes"] = str(sum(map(int, counts)))
    return Answer("Kubeflow", _with_container(fields, container), (_IMAGE, _HOSTS))


def _train_job(data: Mapping[str, Any]) -> Answer:
    trainer = _at(data, "spec.trainer")
    gpus = _gpus(_at(trainer, "resourcesPerNode.limits.nvidia*com/gpu"))
    return Answer("Kubeflow", _with_container(_fields(data, _TRAIN_JOB, gpus), trainer), (_IMAGE, _HOSTS))


def _fields(data: Mapping[str, Any], table: Mapping[str, str], gpus: str) -> dict[str, Any]:
    """Return the fields of a table that have a value, and the GPUs of a node."""
    found = {field: _at(data, path) for field, path in table.items()}
    fields = {field: value for field, value in found.items() if value not in (None, "", {}, [])}
    fields["name"] = launchers.as_job_name(str(fields.get("name", "")))
    procs = fields.pop("procs", "")
    if each := gpus or (procs if isinstance(procs, str) and (procs.isdecimal() or procs == "auto") else ""):
        fields["gpus_per_node"] = each
    if isinstance(fields.get("env"), list):
        fields["env"] = dict(map(_pair, fields["env"]))
    if isinstance(fields.get("launch"), list):
        fields["launch"] = "\n".join(map(str, fields["launch"]))
    if (launch := fields.get("launch")) is not None:
        of_node = dict.fromkeys(("SKYPILOT_NUM_GPUS_PER_NODE", "DSTACK_GPUS_PER_NODE"), gpus or "1")
        values = {**_VARIABLES, **of_node}
        used = [f"{name}={value}" for name, value in values.items() if name in str(launch)]
        fields["launch"] = "\n".join([*([f"export {' '.join(used)}"] if used else []), str(launch)])
    return fields


def _with_container(fields: dict[str, Any], container: object) -> dict[str, Any]:
    """Add what a container runs: its words as a line, or the text that they give to a shell."""
    words = [str(word) for key in ("command", "args") for word in (_at(container, key) or [])]
    if env := _at(container, "env"):
        fields["env"] = dict(map(_pair, env if isinstance(env, list) else []))
    is_text = (
        len(words) == 3 and launchers.SHELL.fullmatch(words[0].rpartition("/")[2]) and words[1].endswith("c")
    )
    line = words[2] if is_text else launchers.joined(words)
    is_launch = is_text or launchers.is_launch(line)
    return {**fields, "launch" if is_launch else "entrypoint": line or "train.py"}


def _at(data: object, path: str) -> Any:
    """Return what stands at a dotted path, in which `*` stands for a dot; None for nothing."""
    for key in path.split("."):
        data = data.get(key.replace("*", ".")) if isinstance(data, dict) else None
    return data


def _first(items: object) -> object:
    return items[0] if isinstance(items, list) and items else {}


def _pair(item: object) -> tuple[str, str]:
    """Return a variable that is written as `A=b` or as a map of `name` and `value`."""
    name, _, value = str(item).partition("=")
    return (
        (str(item.get("name", "")), str(item.get("value", ""))) if isinstance(item, dict) else (name, value)
    )


def _gpus(value: object) -> str:
    """Return the GPUs of a node of `8`, `A100:8`, `{A100: 8}` or `{name: A100, count: 8}`; empty for none."""
    if isinstance(value, dict):
        value = value.get("count") or next(iter(value.values()), "")
    value = _first(value) if isinstance(value, list) else value
    numbers = [part for part in str(value or "").split(":") if re.fullmatch(r"[1-9][0-9]{0,3}", part)]
    return numbers[-1] if numbers else "1" if isinstance(value, str) and value else ""
