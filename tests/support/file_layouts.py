"""Checkpoints as frameworks and scripts lay them out in files, with what a person would say of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core.checkpoints.checkpoint import Content, Format
from tests.support.saved_files import (
    SAVED_NS,
    Model,
    S,
    Tensor,
    adam,
    safetensors,
    torch_save,
    write_all,
    zipped,
)

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Saved:
    """A save: what a person names, its files in the order of writing, and what is true of it; `step`: what it states."""

    main: str
    files: Files
    step: int | None = None
    format: Format = Format.TORCH
    content: Content = Content.STATE
    fits_any_size: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """What several saves leave: the saves in the order of writing, files that are none, links, and the number of ranks.

    `resume`: the main file or folder that the framework's own resume goes on from.
    """

    saves: tuple[Saved, ...]
    resume: str
    others: Files = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1

    def write(self, root: Path) -> None:
        """Write all of it below a folder; each save is a second after the one before."""
        write_all(root, self.others, SAVED_NS)
        for number, save in enumerate(self.saves, 1):
            write_all(root, save.files, SAVED_NS + number * S)
        for name, target in self.links.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(target)


def state_of(**more: object) -> dict[str, object]:
    return {"model": Model(), "optimizer": adam(), **more}


def one_file(name: str, state: object, **about: object) -> Saved:
    return Saved(name, {name: torch_save(state)}, **about)  # type: ignore[arg-type]


def _nanogpt() -> Layout:
    args = {"n_layer": 12, "block_size": 1024, "vocab_size": 50304}
    config = {"out_dir": "out", "eval_interval": 2000, "warmup_iters": 2000, "max_iters": 600000, "iter": "x"}
    state = state_of(model_args=args, iter_num=4000, best_val_loss=Tensor(), config=config)
    return Layout((one_file("out-gpt2/ckpt.pt", state, step=4000),), "out-gpt2/ckpt.pt", {"out-gpt2/loss.png": b"PNG"})


def _nanochat() -> Layout:
    def save(step: int) -> Saved:
        top = "base_checkpoints/d20"
        meta = {"step": step, "val_bpb": 0.9, "model_config": {"n_layer": 20}, "user_config": {"run": "d20"}}
        files = {
            f"{top}/model_{step:06}.pt": torch_save(Model()),
            f"{top}/meta_{step:06}.json": json.dumps(meta).encode(),
            **{f"{top}/optim_{step:06}_rank{rank}.pt": torch_save(adam(step)) for rank in range(2)},
        }
        return Saved(f"{top}/model_{step:06}.pt", files, fits_any_size=False)

    others = {"tokenizer/tokenizer.pkl": b"\x80\x04.", "tokenizer/token_bytes.pt": torch_save(Tensor())}
    return Layout((save(0), save(500), save(1000)), "base_checkpoints/d20/model_001000.pt", others, ranks=2)


def _timm() -> Layout:
    top = "train/20261123-resnet50-224"
    args = {"epochs": 300, "log_interval": 50, "decay_epochs": 30, "warmup_epochs": 5}

    def save(name: str, epoch: int, content: Content = Content.STATE) -> Saved:
        state = {
            "epoch": epoch, "arch": "resnet50", "state_dict": Model(), "optimizer": adam(), "version": 2, "args": args,
            "metric": 70.1,
        }  # fmt: skip
        return one_file(f"{top}/{name}", state, content=content)

    saves = (
        save("checkpoint-7.pth.tar", 7), save("checkpoint-8.pth.tar", 8),
        save("model_best.pth.tar", 8, Content.BEST), save("recovery-9-250.pth.tar", 9), save("last.pth.tar", 9),
    )  # fmt: skip
    return Layout(saves, f"{top}/last.pth.tar", {f"{top}/args.yaml": b"a: 1\n", f"{top}/summary.csv": b"epoch\n"})


def _fairseq(shards: int) -> Layout:
    def save(name: str, updates: int, content: Content = Content.STATE) -> Saved:
        state = {
            "args": None, "cfg": {"common": {"seed": 1, "log_interval": 100}}, "model": Model(), "criterion": None,
            "optimizer_history": [{"criterion_name": "C", "optimizer_name": "A", "num_updates": updates}],
            "task_state": {}, "extra_state": {"epoch": 2, "val_loss": 3.5}, "last_optimizer_state": adam(),
        }  # fmt: skip
        ends = [f"-shard{shard}" for shard in range(shards)] if shards > 1 else [""]
        files = {f"checkpoints/{name}{end}.pt": torch_save(state) for end in ends}
        return Saved(next(iter(files)), files, updates, content=content, fits_any_size=shards == 1)

    saves = (
        save("checkpoint_1_500", 500), save("checkpoint1", 800), save("checkpoint_2_1000", 1000),
        save("checkpoint_best", 1000, Content.BEST), save("checkpoint_last", 1000),
    )  # fmt: skip
    end = "-shard0" if shards > 1 else ""
    return Layout(saves, f"checkpoints/checkpoint_last{end}.pt", ranks=max(1, shards))


def _espnet() -> Layout:
    top = "exp/asr_train"
    state = {
        "model": Model(),
        "reporter": {"epoch": 2},
        "optimizers": [adam()],
        "schedulers": [None],
        "scaler": None,
    }
    saves = (
        one_file(f"{top}/1epoch.pth", Model(), content=Content.WEIGHTS),
        one_file(f"{top}/checkpoint.pth", state),
        one_file(f"{top}/2epoch.pth", Model(), content=Content.WEIGHTS),
        one_file(f"{top}/valid.acc.ave_10best.pth", Model(), content=Content.BEST),
    )
    links = {f"{top}/latest.pth": "2epoch.pth", f"{top}/valid.acc.best.pth": "1epoch.pth"}
    return Layout(saves, f"{top}/checkpoint.pth", {f"{top}/config.yaml": b"a: 1\n"}, links)


def _composer(ranks: int) -> Layout:
    def save(batch: int) -> Saved:
        time = {"Timestamp": {"epoch": 0, "batch": batch}}
        state = {"state": {"model": Model(), "optimizers": {"AdamW": adam()}, "timestamp": time}, "rng": [1]}
        files = {f"run/ep0-ba{batch}-rank{rank}.pt": torch_save(state) for rank in range(ranks)}
        return Saved(f"run/ep0-ba{batch}-rank0.pt", files, step=batch, fits_any_size=ranks == 1)

    return Layout(
        (save(100), save(200)),
        "run/ep0-ba200-rank0.pt",
        {},
        {"run/latest-rank0.pt": "ep0-ba200-rank0.pt"},
        ranks,
    )


def _detectron2() -> Layout:
    def save(name: str, iteration: int) -> Saved:
        state = {
            "model": Model(),
            "optimizer": adam(),
            "scheduler": {"last_epoch": 9},
            "iteration": iteration,
        }
        return one_file(f"output/{name}.pth", state, step=iteration)

    saves = (save("model_0004999", 4999), save("model_0009999", 9999), save("model_final", 11999))
    return Layout(
        saves,
        "output/model_final.pth",
        {"output/last_checkpoint": b"model_final.pth", "output/metrics.json": b"{}\n"},
    )


def _lightning() -> Layout:
    top = "lightning_logs/version_0/checkpoints"

    def save(name: str, step: int, content: Content = Content.STATE) -> Saved:
        loops = {"fit_loop": {"epoch_progress": {"total": {"ready": 1}, "current": {"step": 1}}, "global_step": 1}}
        state = {
            "epoch": 0, "global_step": step, "pytorch-lightning_version": "2.6.1", "state_dict": Model(), "loops": loops,
            "callbacks": {"ModelCheckpoint{}": {"best_model_path": f"/x/{top}/epoch=0-step=100.ckpt", "current_score": 1}},
            "optimizer_states": [adam()], "lr_schedulers": [],
        }  # fmt: skip
        return one_file(f"{top}/{name}.ckpt", state, step=step, format=Format.LIGHTNING, content=content)

    saves = (
        save("epoch=0-step=100", 100), save("epoch=0-step=100-v1", 100), save("best-epoch=0-val_loss=0.32", 100, Content.BEST),
        save("epoch=1-val_loss=0.31", 200), save("epoch=2-val_loss=0.31", 300), save("last", 300), save("last-v1", 400),
    )  # fmt: skip
    others = {
        "lightning_logs/version_0/hparams.yaml": b"lr: 1\n",
        "lightning_logs/version_0/metrics.csv": b"a\n",
    }
    return Layout(saves, f"{top}/last-v1.ckpt", others)


def _sb3() -> Layout:
    def save(name: str, content: Content = Content.STATE, step: int | None = None, more: bool = True) -> Saved:
        archive = zipped({
            "data": b"{}", "policy.pth": torch_save(Model()), "policy.optimizer.pth": torch_save(adam()),
            "pytorch_variables.pth": b"", "_stable_baselines3_version": b"2.4.0",
        })  # fmt: skip
        files = {f"logs/{name}.zip": archive}
        if more:
            files[f"logs/{name.replace('_model', '_model_replay_buffer')}.pkl"] = b"\x80\x04N."
            files[f"logs/{name.replace('_model', '_model_vecnormalize')}.pkl"] = b"\x80\x04N."
        return Saved(f"logs/{name}.zip", files, step=step, format=Format.UNKNOWN, content=content)

    best = save("best_model", Content.BEST, more=False)
    saves = (save("rl_model_10000_steps", step=10000), save("rl_model_20000_steps", step=20000), best)
    return Layout(saves, "logs/rl_model_20000_steps.zip", {"logs/evaluations.npz": zipped({"results.npy": b"x"})})


def _other_endings() -> Layout:
    saves = (
        Saved(
            "a/weights.05-0.32.hdf5",
            {"a/weights.05-0.32.hdf5": b"\x89HDF"},
            format=Format.UNKNOWN,
            content=Content.WEIGHTS,
        ),
        Saved(
            "a/weights.06-0.31.hdf5",
            {"a/weights.06-0.31.hdf5": b"\x89HDF"},
            format=Format.UNKNOWN,
            content=Content.WEIGHTS,
        ),
        Saved("b/state_10.npy", {"b/state_10.npy": b"\x93NUMPY"}, format=Format.UNKNOWN),
        Saved("b/ckpt_20", {"b/ckpt_20": b"bytes"}, format=Format.UNKNOWN),
    )
    return Layout(saves, "b/ckpt_20")


def _by_ranks() -> Layout:
    def save(step: int) -> Saved:
        files = {f"step_{step}_rank_{rank}.pt": torch_save(state_of(step=step)) for rank in range(2)}
        return Saved(f"step_{step}_rank_0.pt", files, step=step, fits_any_size=False)

    return Layout((save(10), save(20)), "step_20_rank_0.pt", ranks=2)


def _by_kinds() -> Layout:
    def save(step: int) -> Saved:
        files = {f"step_{step}_model.pt": torch_save(Model()), f"step_{step}_optim.pt": torch_save(adam())}
        return Saved(f"step_{step}_model.pt", files, step=step)

    return Layout((save(10), save(20)), "step_20_model.pt")


def _flat() -> Layout:
    files = {
        "model.pt": torch_save(Model()), "optimizer.pt": torch_save(adam()), "scheduler.pt": torch_save({"last_epoch": 3}),
        "rng_state_0.pth": torch_save({"cpu": Tensor()}), "rng_state_1.pth": torch_save({"cpu": Tensor()}),
    }  # fmt: skip
    return Layout((Saved("model.pt", files),), "model.pt", ranks=2)


def _vocabulary() -> Layout:
    others = {"vocab.pt": torch_save(["a", "b"]), "tokenizer.model": b"\x0a\x0bsentences"}
    saves = tuple(one_file(f"run/ckpt_{step}.pt", state_of(step=step), step=step) for step in (20, 100))
    return Layout(saves, "run/ckpt_100.pt", others)


def _safetensors() -> Layout:
    def save(step: int) -> Saved:
        name = f"outputs/model_{step}.safetensors"
        return Saved(name, {name: safetensors()}, format=Format.SAFETENSORS, content=Content.WEIGHTS)

    return Layout((save(20), save(100)), "outputs/model_100.safetensors")


def _deep() -> Layout:
    top = "a/b/exp-3/2026-11-23/run_7/f/g"
    saves = tuple(one_file(f"{top}/ckpt_{step}.pt", state_of(step=step), step=step) for step in (20, 100))
    return Layout(saves, f"{top}/ckpt_100.pt")


FILE_LAYOUTS = {
    "nanogpt": _nanogpt(),
    "nanochat": _nanochat(),
    "timm": _timm(),
    "fairseq": _fairseq(1),
    "fairseq-shards": _fairseq(2),
    "espnet": _espnet(),
    "composer": _composer(1),
    "composer-ranks": _composer(2),
    "detectron2": _detectron2(),
    "lightning": _lightning(),
    "stable-baselines3": _sb3(),
    "other-endings": _other_endings(),
    "files-of-ranks": _by_ranks(),
    "files-by-kind": _by_kinds(),
    "flat": _flat(),
    "vocabulary": _vocabulary(),
    "safetensors": _safetensors(),
    "deep": _deep(),
}
