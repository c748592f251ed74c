"""Do people's frameworks go on after a rank was killed, on hosts over SSH that share no disk?"""

from __future__ import annotations

import pytest

from tests.support.cluster import examples
from tests.support.cluster.desk import Desk


@pytest.mark.soak
@pytest.mark.parametrize("name", examples.FRAMEWORKS)
def test_framework_job_resumes_from_checkpoints_of_two_hosts(desk: Desk, name: str) -> None:
    examples.assert_goes_on(desk, name)
