"""Let a language model continue prompts, shared among the ranks, with Accelerate's `split_between_processes`.

As Accelerate's guide to distributed inference has it: every rank holds the whole model, takes its share of the prompts,
and `gather_object` brings the answers together. The model has random weights, so the answers are noise.
"""

from __future__ import annotations

import keyword

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, set_seed
from transformers import AutoModelForCausalLM, GPT2Config

PROMPTS = keyword.kwlist
"""Python's 35 keywords, which four ranks cannot share evenly."""


def main() -> None:
    """Answer this rank's share of the prompts, and print all answers from the main process."""
    state = PartialState(cpu=not torch.cuda.is_available())
    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=256, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config).to(state.device).eval()

    answers = []
    with state.split_between_processes(PROMPTS) as prompts:
        for prompt in prompts:
            tokens = torch.tensor([list(prompt.encode())], device=state.device)  # a byte is a token
            continued = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=128, pad_token_id=0
            )
            text = bytes(continued[0].tolist()).decode("utf-8", "replace")
            answers.append((state.process_index, text))
            print(f"rank {state.process_index} has answered {prompt!r}", flush=True)

    gathered = gather_object(answers)
    if state.is_main_process:
        for rank, text in gathered:
            print(f"answer of rank {rank}: {text!r}", flush=True)
        print(f"{len(gathered)} of {len(PROMPTS)} prompts were answered", flush=True)
    state.destroy_process_group()


if __name__ == "__main__":
    main()

# Accelerate and Transformers' `generate` come without types.
# mypy: disable-error-code="import-untyped, no-untyped-call"
