"""Torn leftovers stay out of the way of scripts that choose by themselves, and what a framework still needs is kept: the
Trainer of Transformers with `resume_from_checkpoint=True`, Accelerate's `load_state()`, Lightning's best ones.
"""

from __future__ import annotations

import pytest

from tests.support.local import Desk, Sight, wait_until
from tests.support.packages import need

HEAD = """
torch.set_num_threads(1)
attempt = int(os.environ["ORCH_ATTEMPT"])
folder = pathlib.Path(os.environ["ORCH_CHECKPOINT_DIR"])


def ledger():
    path = folder / "ledger.jsonl"
    return path.read_text() if path.exists() else ""


def digest(model):
    import hashlib

    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
"""

TRAINER = (
    """
import os, pathlib, signal, sys, time
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
"""
    + HEAD
    + """

class Rows(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, number):
        torch.manual_seed(number)
        return {"x": torch.randn(8), "labels": torch.randn(1)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)

    def forward(self, x, labels=None):
        out = self.line(x)
        return {"loss": (out - labels).pow(2).mean(), "logits": out}


class Slowly(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        time.sleep(0.2)  # so that a save is seen before the next one


class Torn(Trainer):
    def _save_rng_state(self, output_dir):
        if attempt == 1 and self.state.global_step == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


def trainer_in(place, **more):
    torch.manual_seed(0)
    args = TrainingArguments(
        str(place), max_steps=40, save_steps=10, per_device_train_batch_size=8, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_steps=3, eval_strategy="steps", eval_steps=10, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True,  # so the first is the best
    )
    return Torn(Model(), args, train_dataset=Rows(), eval_dataset=Rows(), **more)


trainer = trainer_in(folder / "out", callbacks=[Slowly()])
args = trainer.args
last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
print("begins from", last, flush=True)
trainer.train(resume_from_checkpoint=bool(last))
print("best", trainer.state.best_model_checkpoint, flush=True)
calm = trainer_in("undisturbed")
calm.train()
print("ends with", digest(trainer.model), digest(calm.model), flush=True)
"""
)


def test_trainer_resumes_keeps_best_and_reports(
    desk: Desk,
) -> None:
    """Its callback for Kubeflow is what reports; orch sets the variables that turn it on."""
    need("transformers")
    job = desk.submit({"train.py": TRAINER}, procs_per_node=1, entrypoint="train.py", checkpoint={"keep": 1})
    wait_until(lambda: job.seen().get("total_steps") == 40, "its first report")
    status = job.wait()
    assert (status["state"], status["percent"]) == ("SUCCEEDED", 100.0), job.job.why()
    assert float(status["loss"]) > 0 and 0 < float(status["learning_rate"]) < 1e-4
    assert job.attempts()[1]["resumed_from"].endswith("out/checkpoint-20")
    assert "begins from" in job.log(0, 2)
    assert "out/checkpoint-20" in job.log(0, 2).split("begins from")[1].splitlines()[0]
    resumed, undisturbed = job.log(0, 2).split()[-2:]
    assert resumed == undisturbed
    folder = job.job.folder.checkpoints
    assert [path.name for path in folder.glob(".*torn*")] == [".checkpoint-30.torn-attempt-1"]
    left = sorted(path.name for path in (folder / "out").glob("checkpoint-*"))
    assert left == ["checkpoint-10", "checkpoint-40"]  # the best and the newest


ACCELERATE = (
    """
import os, pathlib, signal, sys, time
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
"""
    + HEAD
    + """
torch.manual_seed(0)
project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
number = 0
saved = sorted((folder / "checkpoints").glob("checkpoint_*"))
if saved:
    accelerator.load_state()  # the highest number
    project.iteration = int(saved[-1].name.rpartition("_")[2]) + 1
    number = 10 * project.iteration
print("begins at", number, "of", [path.name for path in saved], flush=True)
while number < 50:
    torch.manual_seed(number)
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(4, 8)).pow(2).mean())
    optimizer.step()
    number += 1
    time.sleep(0.15)
    if number % 10 == 0:
        if attempt == 1 and number == 30:
            import accelerate.checkpointing as checkpointing
            save = checkpointing.save

            def tear(state, path, **more):
                save(state, path, **more)
                if "optimizer" in str(path):
                    os.kill(os.getpid(), signal.SIGKILL)

            checkpointing.save = tear
        accelerator.save_state()
print("ends with", digest(model), flush=True)
"""
)


@pytest.mark.soak  # as the Trainer does
def test_accelerate_resumes_and_its_limit_ignores_torn_checkpoint(desk: Desk) -> None:
    """Accelerate resumes by itself, and its limit does not count a torn checkpoint."""
    job = desk.submit({"train.py": ACCELERATE}, procs_per_node=1, entrypoint="train.py")
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert "begins at 20 of ['checkpoint_1']" in job.log(0, 2)
    assert job.attempts()[1]["resumed_from"].endswith("checkpoints/checkpoint_1")
    left = sorted(path.name for path in (job.job.folder.checkpoints / "checkpoints").iterdir())
    assert left == ["checkpoint_3", "checkpoint_4"]


LIGHTNING = (
    """
import os, pathlib, signal, sys, time
import torch
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""
    + HEAD
    + """

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)

    def training_step(self, batch, index):
        time.sleep(0.15)
        self.log("badness", float(self.global_step))  # the first ones are the best
        return self.line(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


best = ModelCheckpoint(str(folder), monitor="badness", save_top_k=3, every_n_train_steps=10, save_last=True)
trainer = lightning.Trainer(
    max_steps=60, callbacks=[best], accelerator="cpu", logger=False, enable_progress_bar=False, devices=1
)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(400, 8)), batch_size=4))
print("best", best.best_model_path, sorted(best.best_k_models), flush=True)
"""
)


@pytest.mark.soak
def test_best_lightning_checkpoints_are_not_pruned(desk: Desk) -> None:
    job: Sight = desk.submit({"train.py": LIGHTNING}, procs_per_node=1, entrypoint="train.py", checkpoint={"keep": 1})
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    left = sorted(path.name for path in job.job.folder.checkpoints.glob("*.ckpt"))
    assert left == ["epoch=0-step=10.ckpt", "epoch=0-step=20.ckpt", "epoch=0-step=30.ckpt", "last.ckpt"]
