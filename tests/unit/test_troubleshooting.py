"""Every error that a user may see stands in docs/troubleshooting.md."""

import re
from pathlib import Path

from megatron_resilient import errors

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def test_every_error_is_explained_and_no_other():
    named = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ResilientError)
    } - {"ResilientError"}
    explained = set(re.findall(r"^\| `(\w+Error)", PAGE.read_text(), re.MULTILINE))
    assert explained == named
