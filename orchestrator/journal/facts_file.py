"""Facts file of a job folder: the record at one position of the journal, so that only later entries are replayed.

Rules: only the supervisor writes it, as a whole and durably, and never for more than is on disk of the journal. It saves
time, and adds what heartbeats have reported since the journal's last line; without it the journal is replayed from the
beginning. So a file that is damaged, of another version of orch, or does not match its journal is ignored. A journal
that is shorter than the recorded position was cut: see `journal_integrity`.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.durable import replace_bytes
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.version import VERSION
from orchestrator.journal import journal_file, journal_integrity
from orchestrator.journal.job_record import Record
from orchestrator.journal.journal_integrity import JournalError

BODY_BYTES_MAX = 256 << 20
"""A larger file is not read: it would not fit into memory."""

MARK_BYTES = 4096
"""How much of the journal before its place is compared, to see whether it is the same journal."""


def read(job: JobDir) -> Record:
    """Return the record of a job's journal. Raises JournalError, with the line, when it is damaged, and when the folder has
    later attempts."""
    last_on_disk = journal_integrity.last_attempt_on_disk(job)  # first, since a journal grows
    record, offset = _read_facts(job) or (Record(), 0)
    with journal_file.checked_replay(job.journal):
        for entry in journal_file.read(job.journal, offset, record.last_n):
            record.learn(entry)
    last_journaled = record.attempts[-1].begun.attempt if record.attempts else 0
    if last_journaled < last_on_disk:
        raise JournalError(
            job.journal,
            f"the journal was cut: its last attempt is {last_journaled}, and the folder has attempt {last_on_disk}",
        )
    return record


def load_record(job: JobDir) -> Record:
    """Return the record of a job's journal. Raises JournalError when it is incomplete or damaged."""
    journal_integrity.require_journal(job)
    return read(job)


def write(job: JobDir, record: Record, offset: int) -> None:
    """Write the record of a journal up to byte `offset`, which is on disk. Raises OSError."""
    mark = _checksum_before(job.journal, offset)
    if mark is None:  # the journal was cut or deleted
        return
    body = pack_record(record).encode()
    head = journal_integrity.FactsHead(VERSION, offset, mark, zlib.crc32(body))
    replace_bytes(job.facts, codec.dumps(head).encode() + b"\n" + body)


def _read_facts(job: JobDir) -> tuple[Record, int] | None:
    """Return the saved record and its position in the journal; None if there is no valid one."""
    try:
        with os.fdopen(ownership.open_regular(job.facts), "rb") as file:
            head = codec.loads(journal_integrity.FactsHead, file.readline(journal_integrity.HEAD_BYTES_MAX))
            if head.version != VERSION or head.journal_sum != _checksum_before(job.journal, head.offset):
                return None
            body = file.read(BODY_BYTES_MAX)
        if zlib.crc32(body) != head.body_sum:
            return None
        return unpack_record(body), head.offset
    except (OSError, ValueError, OverflowError, RecursionError):
        return None


def pack_record(record: Record) -> str:
    """Return the record as one line of JSON."""
    return codec.dumps(record)


def unpack_record(text: str | bytes) -> Record:
    """Return the record that was packed. Raises CodecError."""
    record = codec.loads(Record, text)
    past, attempt = record.facts.past_attempts, record.facts.attempt
    if past and attempt is not None and past[-1].number == attempt.number:
        # The same object: it has ended, and later events may still be about it.
        record.facts.attempt = past[-1].attempt
    return record


def _checksum_before(path: Path, offset: int) -> int | None:
    """Return the sum of the bytes before `offset`; None if no line ends there."""
    begin = max(0, offset - MARK_BYTES)
    with os.fdopen(ownership.open_regular(path), "rb") as file:
        block = os.pread(file.fileno(), offset - begin, begin)
    is_end = len(block) == offset - begin and block[-1:] in (b"\n", b"")
    return zlib.crc32(block) if is_end else None
