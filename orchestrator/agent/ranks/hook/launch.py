"""Launchers that a node's script starts with its own Python: handed over to orch's stand-ins, which are programs of the node.

Where PATH does not lead to a stand-in, as in `python -m torch.distributed.run` or `/opt/env/bin/torchrun`, this process is
the launcher: it becomes the stand-in before it has imported anything.
"""

import os
import sys

FOLDER_ENV = "ORCH_LAUNCH_DIR"
"""The variable with the folder of the stand-ins; set for what a node's script starts, and not for ranks."""

REAL_ENV = "ORCH_LAUNCH_REAL"
"""Set for a real launcher that a stand-in has passed a call on to."""

PYTHON_ENV = "ORCH_LAUNCH_PYTHON"
"""The Python that would have run the launcher, for the stand-in that takes its place."""

NAMES = (
    "torchrun",
    "accelerate",
    "accelerate-launch",
    "deepspeed",
    "fabric",
    "lightning",
    "srun",
    "mpirun",
    "mpiexec",
)
"""The programs that have a stand-in."""

MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate-launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "lightning.fabric.cli": "lightning.fabric.cli",
    "lightning_fabric.cli": "lightning.fabric.cli",
}
"""The same as modules behind `python -m`, each with the name of its stand-in."""

_FLAGS = "bBdEhiIOPqRsStuvVx?"
"""Python's options without a value, which may stand in one word: -um MODULE."""


def launcher_of(argv: "list[str]") -> "tuple[str, list[str]]":
    """Return the stand-in for a Python process with this command line, and the words for it; "" for no launcher."""
    at = 1
    while at < len(argv) and argv[at].startswith("-"):
        option, at = argv[at][1:].lstrip(_FLAGS), at + 1
        if option.startswith("m"):
            words = [option[1:], *argv[at:]] if option[1:] else argv[at:]
            return MODULES.get("".join(words[:1]), ""), words[1:]
        if option.startswith("c") or argv[at - 1] in ("-", "--"):
            return "", []
        at += option in ("W", "X", "-check-hash-based-pycs")
    name = argv[at].rpartition("/")[2] if at < len(argv) else ""
    return (name if name in NAMES else ""), argv[at + 1 :]


def hand_over(argv: "list[str]") -> None:
    """Become the stand-in if this process is a launcher that a node's script has started."""
    folder = os.environ.get(FOLDER_ENV, "")
    name, words = launcher_of(argv)
    if not folder or not name or REAL_ENV in os.environ:
        return
    program = folder + "/" + name
    # The polyglot of a stand-in that Python itself runs has the same name, and starts no launcher.
    if os.path.exists(program) and not any(word.startswith(folder + "/") for word in argv[:3]):  # noqa: PTH110
        os.environ[PYTHON_ENV] = sys.executable
        os.execv(program, [program, *words])
