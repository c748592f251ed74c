"""Which of a folder's checkpoints count, and which of them are old? By the layouts that frameworks leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch
from tests.support.saved_files import (
    NOW_NS,
    SAVED_NS,
    STEPPED_NS,
    begun,
    metadata,
    safetensors,
    scan_twice,
    write,
    zipped,
)


def pruned(watch: CheckpointWatch, keep: int, step_between: bool = True) -> list[str]:
    return sorted(path.name for path in watch.prune(keep, lambda before_ns, after_ns: step_between))


def _save_steps(folder: Path, name: str, *steps: int) -> None:
    for step in steps:
        write(folder / name.format(step), zipped(), SAVED_NS + step)


def test_old_is_only_what_was_found_whole_and_has_newer_ones_in_its_series(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    write(folder / "step-0.pt", zipped(), SAVED_NS)
    watch = begun(folder, "*.pt")
    _save_steps(folder, "step-{}.pt", 1, 2, 3, 4, 5)
    _save_steps(folder, "best-{}.pt", 1, 2, 3)
    write(folder / "step-6.pt", zipped()[:3000], SAVED_NS + 6)
    write(folder / "last.pt", zipped())
    scan_twice(watch)
    write(folder / "step-1.pt", zipped() * 2, SAVED_NS + 9)  # being rewritten
    watch.scan(STEPPED_NS, NOW_NS)
    assert pruned(watch, 2) == ["best-1.pt", "step-2.pt", "step-3.pt"]
    assert pruned(watch, 2) == []


def test_what_one_save_wrote_and_what_is_newer_by_name_or_time_is_not_old(tmp_path: Path) -> None:
    watch = begun(tmp_path)
    _save_steps(tmp_path, "step-{}.pt", 1, 2)
    write(tmp_path / "step-9.pt", zipped(), SAVED_NS - 9)
    scan_twice(watch)
    assert pruned(watch, 1) == [], "of 9 and 2 it is not known which is newer"
    for rank in range(3):
        write(tmp_path / "ranks" / f"rank{rank}.pt", zipped(), SAVED_NS + rank)
        write(tmp_path / "numbers" / f"ckpt_{rank}.pt", zipped(), SAVED_NS + rank)
    for name in ("ranks", "numbers"):
        watch = begun(tmp_path / name, "nothing yet")
        watch.pattern = "*.pt"
        assert len(scan_twice(watch)) == 3
        assert pruned(watch, 1, step_between=name == "ranks") == []


def test_only_in_the_job_s_own_folder_and_never_behind_a_link_is_anything_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    watch = begun(folder)
    _save_steps(folder, "epoch=0-step={}.ckpt", 1, 2, 3, 4)
    (folder / "last.ckpt").symlink_to("epoch=0-step=2.ckpt")
    assert "last.ckpt" not in scan_twice(watch)
    assert pruned(watch, 1) == ["epoch=0-step=1.ckpt", "epoch=0-step=3.ckpt"]
    elsewhere = begun(folder, f"{tmp_path}/other/*.pt")
    _save_steps(tmp_path / "other", "step-{}.pt", 1, 2, 3)
    assert len(scan_twice(elsewhere)) == 3
    assert pruned(elsewhere, 1) == []


def test_a_link_to_what_does_not_match_is_a_checkpoint(tmp_path: Path) -> None:
    watch = begun(tmp_path, "last.ckpt")
    write(tmp_path / "epoch=0-step=2.ckpt", zipped())
    (tmp_path / "last.ckpt").symlink_to("epoch=0-step=2.ckpt")
    assert scan_twice(watch) == ["last.ckpt"]


HF_TRAINER = {
    **{f"checkpoint-{step}/model.safetensors": step for step in (500, 1000, 1500)},
    **{f"checkpoint-{step}/optimizer.pt": step for step in (500, 1000, 1500)},
    **{f"checkpoint-{step}/rng_state_0.pth": step for step in (500, 1000, 1500)},
    **{f"checkpoint-{step}/training_args.bin": step for step in (500, 1000, 1500)},
    **{f"checkpoint-{step}/trainer_state.json": step for step in (500, 1000, 1500)},
    "runs/Nov23/events.out.tfevents.1": 1600, "config.json": 1600, "training_args.bin": 1600,
    "model-00001-of-00002.safetensors": 1600, "model-00002-of-00002.safetensors": 1600, "tokenizer.model": 1600,
}  # fmt: skip
LIGHTNING = {f"epoch={epoch}-step={epoch * 100}.ckpt": epoch for epoch in (8, 9, 10)}
SHARDED = {f"{folder}/{name}": step for folder, step in (("epoch=0-step=4.ckpt", 4), ("epoch=0-step=8.ckpt", 8))
           for name in ("__0_0.distcp", "meta.pt")}  # fmt: skip
LAYOUTS = {
    "hf-trainer": (HF_TRAINER, ["checkpoint-500", "checkpoint-1000", "checkpoint-1500"], ["checkpoint-500"]),
    "lightning": (
        {**LIGHTNING, "last.ckpt": 11, "epoch=10-step=1000-v1.ckpt": 12, "weights.pt": 13},
        [*LIGHTNING, "last.ckpt", "epoch=10-step=1000-v1.ckpt"],
        ["epoch=8-step=800.ckpt", "epoch=9-step=900.ckpt"],
    ),
    "lightning-logs": (
        {"lightning_logs/version_0/hparams.yaml": 1,
         **{f"lightning_logs/version_0/checkpoints/{name}": at for name, at in LIGHTNING.items()}},
        [*LIGHTNING], ["epoch=8-step=800.ckpt"],
    ),
    "hf-trainer-below": (
        {f"llama-7b/{name}": step for name, step in HF_TRAINER.items()},
        ["checkpoint-500", "checkpoint-1000", "checkpoint-1500"], ["checkpoint-500"],
    ),
    "samples-below": ({"ckpt.pt": 2, "samples/sample_step_1.pt": 1}, ["ckpt.pt"], []),
    "lightning-sharded": (SHARDED, ["epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt"], []),
    "nanogpt": ({"ckpt.pt": 1, "loss.png": 2}, ["ckpt.pt"], []),
    "ddp-tutorial": ({"snapshot.pt": 1}, ["snapshot.pt"], []),
    "overwritten-in-place": ({"ckpt.pt": 3, "best.pt": 2, "resnet50.pth": 1}, ["resnet50.pth", "best.pt", "ckpt.pt"], []),
    "accelerate": (
        {f"checkpoint_{step}/{name}": step for step in (1, 2, 3, 10) for name in ("optimizer.bin", "random_states_0.pkl")},
        [f"checkpoint_{step}" for step in (1, 2, 3, 10)], ["checkpoint_1", "checkpoint_2"],
    ),
    "deepspeed": (
        {**{f"global_step{step}/mp_rank_00_model_states.pt": step for step in (1, 2, 3)}, "latest": 3, "zero_to_fp32.py": 3},
        ["global_step1", "global_step2", "global_step3"], ["global_step1"],
    ),
    "deepspeed-below": ({"run/global_step1/mp_rank_00_model_states.pt": 1, "run/latest": 1}, ["run"], []),
    "torchtitan": ({f"step-{step}/__0_0.distcp": step for step in (1, 2, 3)}, ["step-1", "step-2", "step-3"], ["step-1"]),
    "by-hand": (
        {**{f"step-{step}.pt": step for step in (9, 10, 11)}, **{f"ema-step-{step}.pt": step for step in (9, 10, 11)},
         "final.pt": 12, "metrics_epoch_1.pkl": 13, "samples/step-9.png": 9},
        ["step-9.pt", "step-10.pt", "step-11.pt"], ["step-9.pt"],
    ),
    "two-stages": (
        {"pretrain-step-900.pt": 1, "finetune-step-10.pt": 2, "finetune-step-20.pt": 3},
        ["finetune-step-10.pt", "finetune-step-20.pt"], [],
    ),
    "fairseq": (
        {"checkpoint_1_500.pt": 1, "checkpoint_1_1000.pt": 2, "checkpoint_2_1500.pt": 3, "checkpoint_best.pt": 4,
         "checkpoint_last.pt": 4},
        ["checkpoint_1_500.pt", "checkpoint_1_1000.pt", "checkpoint_2_1500.pt", "checkpoint_last.pt"],
        ["checkpoint_1_500.pt"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "counted", "old"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_by_default_one_series_counts_and_of_it_alone_something_is_deleted(
    tmp_path: Path, files: dict[str, int], counted: list[str], old: list[str]
) -> None:
    watch = begun(tmp_path)
    for name, step in files.items():
        write(tmp_path / name, safetensors() if name.endswith("safetensors") else zipped(), SAVED_NS + step)
        if name.endswith(".distcp"):
            write((tmp_path / name).with_name(".metadata"), metadata("__0_0.distcp"), SAVED_NS + step)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert scan_twice(watch) == counted
    assert pruned(watch, 2) == sorted(old)
    left = [path for path in before if not set(old).intersection(path.parts)]
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == left
