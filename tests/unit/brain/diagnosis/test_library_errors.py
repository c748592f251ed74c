"""Is what NCCL, gloo and the store say as they give up told in plain words?"""

from __future__ import annotations

import pytest

from orchestrator.brain.diagnosis.library_errors import explain
from orchestrator.core.observations import Failure

NCCL = (
    "[rank3]:[E1121 02:14:07.312345678 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=9655, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000) ran for "
    "600069 milliseconds before timing out."
)
GLOO = (
    "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation "
    "to complete"
)
STORE = "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 3/4 clients joined."
KEYS = "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/rank_3"
MONITORED = "Rank 0: Ranks 2, 3 failed to pass monitoredBarrier in 30000 ms"
# torch 2.11 with NCCL 2.28
DUPLICATE = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for \
details), NCCL version 2.28.3
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NCCL, "NCCL gave up allreduce #9,655 after 600 s: this rank waited in it, and is a victim"),
        (GLOO, "gloo gave up waiting for data from another rank after 1800 s"),
        (STORE, "only 3 of 4 ranks connected to the store within 301 s: 1 never called init_process_group"),
        (KEYS, "a rank waited 300 s for another to write /default_pg/0//cpu//0/rank_3"),
        (MONITORED, "ranks 2, 3 did not arrive after 30 s"),
        (
            "what():  [enforce fail] op.preamble.length <= op.nbytes. 100 vs 52. Received data size doesn't match",
            "gloo received 100 bytes where 52 were expected, and aborted this rank: ranks have entered different",
        ),
        (
            "RuntimeError: Distributed package doesn't have NCCL built in",
            "the script chose NCCL, and the rank has no GPU: let it choose gloo",
        ),
        (
            "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4495.",
            "gloo lost its connection to another rank: its process ended or the network broke",
        ),
        ("ncclRemoteError: A call failed possibly due to a network error", "NCCL lost a peer"),
        ("torch.distributed.DistBackendError: NCCL error ..., unhandled system error", "/dev/shm"),
        ("unable to write to file </torch_12_345_0>: No space left on device (28)", "--shm-size=8g"),
        ("RuntimeError: CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING=1"),
        ("RuntimeError: CUDA error: invalid device ordinal", "set the device by LOCAL_RANK"),
        (DUPLICATE, "set the device by LOCAL_RANK"),
    ],
)
def test_library_message_is_explained_in_plain_words(text: str, words: str) -> None:
    assert words in explain(f"some lines\n{text}\nmore")


def test_script_text_is_not_explained() -> None:
    assert explain("ValueError: loss is nan") == ""


@pytest.mark.parametrize(
    ("message", "headline"),
    [
        (DUPLICATE, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"),
        (
            DUPLICATE.partition("Duplicate")[0],
            "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94",
        ),
    ],
    ids=["with a last error", "without one"],
)
def test_nccl_exception_is_reported_by_its_last_error(message: str, headline: str) -> None:
    failure = Failure("torch.distributed.DistBackendError", message, "", None)
    assert failure.text.startswith(f"torch.distributed.DistBackendError: {headline}")
