"""Evaluate a model that is larger than the device's memory, with Accelerate's `device_map="auto"`.

As Accelerate's guide to big models has it: an empty model, weights in a file, and `load_checkpoint_and_dispatch` to spread
the layers over the device, the host's memory and the disk. The limits are those of a toy: on a GPU 1 MB of it, the rest
on the CPU; without a GPU 1 MB of the host's memory, the rest on disk.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import PartialState, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import gather_object
from tiny_gpt import TinyGPT, read_text, windows

WEIGHTS = Path("offload.pt")
BATCHES = 201
BATCH_WINDOWS = 16


def main() -> None:
    """Evaluate this rank's share of the batches, and print the mean loss from the main process."""
    state = PartialState(cpu=not torch.cuda.is_available())
    with state.main_process_first():
        if not WEIGHTS.exists():  # in real life these come from a training
            torch.manual_seed(0)
            torch.save(TinyGPT(width=96, layers=4, context=64).state_dict(), WEIGHTS)

    with init_empty_weights():
        model = TinyGPT(width=96, layers=4, context=64)
    small, rest = (state.device.index, "cpu") if state.device.type == "cuda" else ("cpu", "disk")
    model = load_checkpoint_and_dispatch(
        model,
        str(WEIGHTS),
        device_map="auto",
        max_memory={small: "1MB", "cpu": "1MB" if small == "cpu" else "1GB"},
        no_split_module_classes=["Block"],
        offload_folder=f"offload-{state.process_index}",
    )
    places = {str(place) for place in model.hf_device_map.values()}
    print(f"rank {state.process_index} has layers on {', '.join(sorted(places))}", flush=True)
    assert str(rest) in places

    _, unseen = read_text()
    losses = []
    with state.split_between_processes(list(range(BATCHES))) as mine, torch.no_grad():
        for number in mine:
            inputs, targets = windows(unseen, BATCH_WINDOWS, 64, seed=number)
            logits = model(inputs.to(state.device))
            losses.append(F.cross_entropy(logits.flatten(0, 1), targets.to(state.device).flatten()).item())
    gathered = gather_object(losses)
    if state.is_main_process:
        print(f"mean loss of {len(gathered)} batches: {sum(gathered) / len(gathered):.4f}", flush=True)
    state.destroy_process_group()


if __name__ == "__main__":
    main()

# Accelerate comes without types.
# mypy: disable-error-code="import-untyped, no-untyped-call"
