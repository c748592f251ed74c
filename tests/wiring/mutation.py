"""A mutation of the product: one line broken on purpose where parts are joined, and the test that notices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """In `file`, a path in the checkout, `before` stands exactly once; once it reads `after`, the test `killed_by` fails.

    `killed_by` is the cheapest test that does: one without processes where there is one, then one with them.
    """

    name: str
    file: str
    before: str
    after: str
    killed_by: str

    @property
    def test_file(self) -> str:
        """Where the test stands."""
        return self.killed_by.partition("::")[0]

    @property
    def test_name(self) -> str:
        """The test's function, without its parameters."""
        return self.killed_by.partition("::")[2].partition("[")[0]
