"""Does a tool refuse what it does not know?"""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from orchestrator.programs import mcp_server


def test_unknown_argument_is_an_error() -> None:
    for action, about in mcp_server.TOOLS.items():
        tool = mcp_server._make_tool(action, *about)
        assert tool.parameters["additionalProperties"] is False
        with pytest.raises(ValidationError, match="rank\n  Extra inputs are not permitted"):
            tool.fn_metadata.arg_model.model_validate({"job": "t", "spec": "s", "key": "k", "rank": 1})
