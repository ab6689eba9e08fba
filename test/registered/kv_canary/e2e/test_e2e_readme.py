"""The test that docs/develop.md gives a reader to paste, as it stands. test_packaging.py runs docs/walkthrough.md."""

import re
import sys
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.checkout import DOCS

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="no source tree: docs/ is not here")


def documented_test() -> type:
    """The class of docs/develop.md, from its text."""
    page = DOCS / "develop.md"
    (text,) = re.findall(r"```python\n(from .*?)```", page.read_text(), re.DOTALL)
    module: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, str(page), "exec"), module)
    (found,) = (value for name, value in module.items() if name.startswith("Test"))
    return found


if DOCS.is_dir():
    TestOfTheDocuments = documented_test()  # pytest collects and runs it as one of ours


def test_the_documented_class_has_tests() -> None:
    assert len([name for name in vars(TestOfTheDocuments) if name.startswith("test_")]) == 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
