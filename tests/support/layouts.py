"""Checkpoints as frameworks lay them out in folders, with what a person would say of them; and all layouts."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.core.checkpoints.checkpoint import Content, Format
from tests.support.file_layouts import FILE_LAYOUTS, Layout, Saved, state_of
from tests.support.saved_files import (
    Model,
    adam,
    distributed,
    safetensors,
    torch_save,
    trainer_state,
    weights_index,
)


def _litgpt() -> Layout:
    def save(top: str, step: int | None) -> Saved:
        files = {
            f"{top}/lit_model.pth": torch_save(
                state_of(train_dataloader={}, iter_num=8 * (step or 0), step_count=step or 9)
            ),
            f"{top}/model_config.yaml": b"n_layer: 2\n",
            f"{top}/hyperparameters.yaml": b"seed: 1\n",
            f"{top}/tokenizer.json": b"{}",
        }
        return Saved(top, files, step=step)

    saves = (save("out/pretrain/step-00001000", 1000), save("out/pretrain/step-00002000", 2000))
    return Layout(saves, "out/pretrain/step-00002000", {"out/pretrain/logs/csv/version_0/metrics.csv": b"a,b\n"})


def _litgpt_sharded() -> Layout:
    def save(step: int) -> Saved:
        top = f"out/step-{step:08}"
        files = {
            **distributed(f"{top}/lit_model.pth"),
            f"{top}/lit_model.pth/meta.pt": torch_save({"iter_num": 8 * step, "step_count": step}),
            f"{top}/model_config.yaml": b"n_layer: 2\n",
        }
        return Saved(top, files, step=step, format=Format.LIGHTNING)

    return Layout((save(10), save(20)), "out/step-00000020", ranks=2)


def _torchtitan() -> Layout:
    saves = tuple(
        Saved(f"checkpoint/step-{step}", distributed(f"checkpoint/step-{step}", 4), step=step, format=Format.DCP)
        for step in (500, 1000)
    )
    others = {"tb/20261123/events.out.tfevents.1.host": b"x", "comm_traces/rank_0": b"x"}
    return Layout(saves, "checkpoint/step-1000", others, ranks=4)


def _trainer(top: str, ranks: int, *, shards: int = 1, best: int | None = None) -> Layout:
    def save(step: int) -> Saved:
        own = f"{top}checkpoint-{step}"
        pieces = [f"model-{part:05}-of-{shards:05}.safetensors" for part in range(1, shards + 1)] * (shards > 1)
        model = {f"{own}/{piece}": safetensors() for piece in pieces or ["model.safetensors"]}
        if pieces:
            model[f"{own}/model.safetensors.index.json"] = weights_index(pieces)
        random = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
        cited = f"{top}checkpoint-{best}" if best else None
        files = {
            f"{own}/config.json": b"{}", **model, f"{own}/training_args.bin": torch_save({"max_steps": 9}),
            f"{own}/optimizer.pt": torch_save(adam()), f"{own}/scheduler.pt": torch_save({"last_epoch": step}),
            **{f"{own}/{name}": torch_save({"python": (3, [1])}) for name in random},
            f"{own}/trainer_state.json": trainer_state(step, cited),
        }  # fmt: skip
        return Saved(own, files, step=step, format=Format.TRAINER)

    final = Saved(
        f"{top}model.safetensors", {f"{top}model.safetensors": safetensors(), f"{top}config.json": b"{}",
        f"{top}training_args.bin": torch_save({"max_steps": 9})}, format=Format.SAFETENSORS, content=Content.WEIGHTS
    )  # fmt: skip
    others = {f"{top}runs/Nov23/events.out.tfevents.1": b"x", f"{top}tokenizer.json": b"{}", **final.files}
    del others[f"{top}model.safetensors"]
    only = Saved(final.main, {final.main: safetensors()}, format=Format.SAFETENSORS, content=Content.WEIGHTS)
    return Layout((save(8), save(500), only), f"{top}checkpoint-500", others, ranks=ranks)


def _accelerate(name: str, steps: Mapping[str, int | None], ranks: int) -> Layout:
    def save(number: str, step: int | None) -> Saved:
        own = name.format(number)
        files = {
            f"{own}/model.safetensors": safetensors(), f"{own}/optimizer.bin": torch_save(adam(7)),
            f"{own}/scheduler.bin": torch_save({"last_epoch": 7, "_step_count": 8}), f"{own}/sampler.bin": torch_save({"epoch": 0}),
            **{f"{own}/random_states_{rank}.pkl": torch_save({"step": 3, "random_state": (3,)}) for rank in range(ranks)},
            f"{own}/custom_checkpoint_0.pkl": torch_save({"epoch": 1}),
        }  # fmt: skip
        return Saved(own, files, step=step, format=Format.ACCELERATE)

    saves = tuple(save(number, step) for number, step in steps.items())
    return Layout(saves, saves[-1].main, ranks=ranks)


def _latest() -> Layout:
    return Layout((Saved("latest", distributed("latest"), format=Format.DCP),), "latest", ranks=2)


def _deepspeed() -> Layout:
    def save(step: int) -> Saved:
        top = f"run/global_step{step}"
        files = {
            f"{top}/mp_rank_00_model_states.pt": torch_save(
                {"module": Model(), "global_steps": step, "dp_world_size": 2}
            ),
            **{
                f"{top}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": torch_save(
                    {"optimizer_state_dict": adam(step), "ds_version": "0.19"}
                )
                for rank in range(2)
            },
        }
        return Saved(top, files, step=step, format=Format.DEEPSPEED, fits_any_size=False)

    others = {"run/latest": b"global_step1000", "run/zero_to_fp32.py": b"#!/usr/bin/env python\n"}
    return Layout((save(500), save(1000)), "run/global_step1000", others, ranks=2)


def _megatron() -> Layout:
    def save(step: int) -> Saved:
        top = f"iter_{step:07}"
        files = {}
        for rank in range(2):
            state = {"args": {"iteration": 0}, "checkpoint_version": 3.0, "iteration": step, "model": Model()}
            files[f"{top}/mp_rank_{rank:02}/model_optim_rng.pt"] = torch_save(state)
            files[f"{top}/mp_rank_{rank:02}/distrib_optim.pt"] = torch_save(adam())
        return Saved(top, files, step=step, format=Format.MEGATRON, fits_any_size=False)

    return Layout((save(500), save(1000)), "iter_0001000", {"latest_checkpointed_iteration.txt": b"1000"}, ranks=2)


def _megatron_dist() -> Layout:
    def save(step: int) -> Saved:
        top = f"iter_{step:07}"
        about = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
        common = torch_save({"args": {"lr": 1}, "iteration": step, "optimizer": {"param_state": {}}})
        files = {f"{top}/common.pt": common, **distributed(top), f"{top}/metadata.json": about}
        return Saved(top, files, step=step, format=Format.DCP)

    return Layout((save(500), save(1000)), "iter_0001000", {"latest_checkpointed_iteration.txt": b"1000"}, ranks=2)


def _lightning_sharded() -> Layout:
    def save(step: int) -> Saved:
        top = f"epoch=0-step={step}.ckpt"
        state = {"global_step": step, "pytorch-lightning_version": "2.6.1", "loops": {}}
        files = {**distributed(top), f"{top}/meta.pt": torch_save(state)}
        return Saved(top, files, step=step, format=Format.LIGHTNING)

    return Layout((save(4), save(8)), "epoch=0-step=8.ckpt", ranks=2)


def _many_places() -> Layout:
    """Two runs beside each other, one of them in folders whose names are numbers."""
    saves = tuple(
        Saved(f"run_{run}/{step:06}", {f"run_{run}/{step:06}/pretrained_model/model.safetensors": safetensors(),
                                      f"run_{run}/{step:06}/training_state/optimizer_state.safetensors": safetensors(),
                                      f"run_{run}/{step:06}/training_state/training_step.json": b'{"step": 20000}'},
              format=Format.SAFETENSORS)
        for run, step in ((1, 10000), (1, 20000), (2, 20000))
    )  # fmt: skip
    return Layout(saves, "run_2/020000", links={"run_2/last": "020000"})


LAYOUTS = {
    **FILE_LAYOUTS,
    "litgpt": _litgpt(),
    "litgpt-fsdp": _litgpt_sharded(),
    "torchtitan": _torchtitan(),
    "trainer": _trainer("", 1),
    "trainer-ranks": _trainer("llama-7b/", 2, shards=2, best=8),
    "accelerate": _accelerate("checkpoints/checkpoint_{}", {"0": None, "1": None, "10": None}, 1),
    "accelerate-steps": _accelerate("step_{}", {"8": 8, "20": 20}, 2),
    "accelerate-epochs": _accelerate("epoch_{}", {"0": None, "1": None}, 1),
    "accelerate-numbers": _accelerate("{}", {"010000": None, "020000": None}, 1),
    "dcp-latest": _latest(),
    "deepspeed": _deepspeed(),
    "megatron": _megatron(),
    "megatron-dist": _megatron_dist(),
    "lightning-fsdp": _lightning_sharded(),
    "lerobot": _many_places(),
}
