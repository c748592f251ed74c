"""Train a small GPT-2 on Python source with the Trainer of Hugging Face Transformers.

The usual Trainer script: its options are those of `TrainingArguments`. A byte is a token, and the weights are random at
first, so nothing is downloaded.
"""

from __future__ import annotations

import torch
from tiny_gpt import VOCABULARY, read_text
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed

WINDOW_BYTES = 64


class Windows(Dataset[dict[str, Tensor]]):
    """A text, cut into windows that are input and label at once: the model shifts the labels itself."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text) // WINDOW_BYTES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        window = self.text[number * WINDOW_BYTES :][:WINDOW_BYTES].long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train, evaluate, and save the final weights."""
    parser = HfArgumentParser(TrainingArguments)
    # The Trainer must be told that there is no GPU, or each rank trains a model of its own.
    parser.set_defaults(use_cpu=not torch.cuda.is_available())
    (args,) = parser.parse_args_into_dataclasses()
    set_seed(args.seed)  # the Trainer does it after the model has its first weights

    text, unseen = read_text()
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=WINDOW_BYTES,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=Windows(text),
        eval_dataset=Windows(unseen[:20_000]),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
