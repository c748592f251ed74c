"""Lightning's launcher: `fabric run` (Lightning 2.6), and its older forms `fabric run model` and `lightning run model`."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.spec.launchers.launch_line import (
    ALL,
    DEVICE,
    NUMBERED,
    OF_JOB,
    OF_NODE,
    RANKS_EACH,
    RENDEZVOUS,
    Given,
    LaunchLine,
    Setting,
    counts,
    last,
    number,
    options,
    program,
    read,
    read_one,
    sorted_out,
)

_OPTIONS = options(
    "fabric run",
    {},
    {
        RENDEZVOUS: "--main-address= --main-port=",
        NUMBERED: "--node-rank=",
    },
    own="--accelerator= --strategy= --devices= --num-nodes= --precision=",
    abbreviates=False,
)


def fabric(words: Sequence[str], start: int) -> LaunchLine:
    """Return the launch line whose options begin at `start`. Options of the launcher may also stand behind the script."""
    given, at = read(words, start, _OPTIONS)
    kept = list(program(words, at, "fabric run")[:1])
    at += 1
    while at < len(words):
        if words[at].startswith("--") and _OPTIONS.find(words[at].partition("=")[0]) is not None:
            one, at = read_one(words, at, _OPTIONS)
            given.append(one)
        else:
            kept.append(at)
            at += 1
    settings, dropped = sorted_out(given)
    settings += counts(given, {"--num-nodes": "nodes"}, dropped)
    accelerator, devices = last(given, "--accelerator"), last(given, "--devices")
    if accelerator is not None:
        settings += _device(accelerator)
    settings.append(_ranks(devices))
    env = _env(given)
    return LaunchLine("fabric run", "script", tuple(kept), (*settings, *env), tuple(dropped))


def _device(option: Given) -> list[Setting]:
    if option.value in ("mps", "tpu"):
        raise ValueError(f"{option.text}: orch knows NVIDIA GPUs and CPU ranks only")
    device = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu"}.get(option.value)
    return [Setting(DEVICE, device, option.text)] if device else []


def _ranks(option: Given | None) -> Setting:
    """Return the ranks of a node: `--devices` has their number, the GPUs to use, or -1 for all."""
    if option is None:
        return Setting(RANKS_EACH, "1", "fabric run without --devices", yields=True)
    text = option.value.strip("[] ")
    if "," in text:
        return Setting(RANKS_EACH, str(len([word for word in text.split(",") if word.strip()])), option.text)
    return Setting(RANKS_EACH, ALL if text in ("-1", "auto") else str(number(option)), option.text)


def _env(given: Sequence[Given]) -> list[Setting]:
    env = {"LT_CLI_USED": "1", "LT_DEVICES": OF_NODE, "LT_NUM_NODES": OF_JOB}
    for name in ("--accelerator", "--strategy", "--precision"):
        if (one := last(given, name)) is not None:
            env[f"LT_{name[2:].upper()}"] = one.value
    return [Setting(f"env.{name}", value, "fabric run") for name, value in env.items()]
