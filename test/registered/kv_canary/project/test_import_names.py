"""The package and the rigs answer to two import names each, with one copy of every module."""

import sys
from importlib import import_module

import pytest

import sglang_kv_canary
import sglang_kv_canary_rigs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


@pytest.mark.parametrize(
    ("alias", "package", "name"),
    [
        ("sglang_kv_canary", sglang_kv_canary, "kernels.reference.check"),
        ("sglang_kv_canary_rigs", sglang_kv_canary_rigs, "oracle"),
    ],
)
def test_both_names_give_the_same_module(alias, package, name):
    by_alias = import_module(f"{alias}.{name}")
    assert by_alias is import_module(f"{package.__name__}.{name}")
    # Relative imports, pickles and `python -m` go by these.
    assert by_alias.__spec__.name == by_alias.__name__ == f"{package.__name__}.{name}"
    assert by_alias.__spec__.loader is by_alias.__loader__


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"no_such_module"):
        import_module("sglang_kv_canary.no_such_module")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
