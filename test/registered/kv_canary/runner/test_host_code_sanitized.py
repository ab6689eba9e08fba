"""The C code under AddressSanitizer and UndefinedBehaviorSanitizer: an error of memory there would end a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.consts import PROCESS_TIMEOUT_S
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")

ROOT = Path(__file__).resolve().parents[4]
SANITIZED = ROOT / "tools" / "sanitized.sh"
EXAMPLES = volume(5, 100)
MISSING = 77  # what the script ends with where gcc has no sanitizers
# The tests need SGLang's folder, and not what it imports at its own start: that takes 40 s here.
TESTS = f"""
import sys
from importlib.util import find_spec
from types import ModuleType
import pytest
from hypothesis import settings

package = ModuleType("sglang")
package.__path__ = find_spec("sglang").submodule_search_locations
sys.modules["sglang"] = package
settings.register_profile("here", deadline=None, max_examples={EXAMPLES})
settings.load_profile("here")
sys.exit(pytest.main(sys.argv[1:]))
"""
BEYOND = """
from triton.runtime.build import compile_module_from_src
SOURCE = '''
#include <Python.h>
static PyObject *read_beyond(PyObject *self, PyObject *size) {
  Py_ssize_t n = PyLong_AsSsize_t(size);
  char *bytes = malloc(n);
  long found = bytes[n];
  free(bytes);
  return PyLong_FromLong(found);
}
static PyObject *add_one(PyObject *self, PyObject *number) { return PyLong_FromLong(1 + (int)PyLong_AsLong(number)); }
static PyObject *read_freed(PyObject *self, PyObject *number) {
  PyObject *freed = PyLong_FromLong(1000 + PyLong_AsLong(number));
  Py_DECREF(freed);
  return PyLong_FromSsize_t((Py_ssize_t)Py_TYPE(freed));
}
static PyMethodDef methods[] = {
  {"read_freed", read_freed, METH_O, NULL},
  {"read_beyond", read_beyond, METH_O, NULL},
  {"add_one", add_one, METH_O, NULL},
  {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "beyond", NULL, -1, methods};
PyMODINIT_FUNC PyInit_beyond(void) { return PyModule_Create(&definition); }
'''
module = compile_module_from_src(SOURCE, "beyond")
print(module.add_one(1), flush=True)
"""


def _run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [SANITIZED, sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        cwd=ROOT,
        env={**os.environ, "SANITIZED_CACHE": str(cache)},
    )
    if done.returncode == MISSING and not os.environ.get("KV_CANARY_REQUIRE_SANITIZERS"):
        pytest.skip(done.stderr.strip())
    return done


def test_its_own_tests_find_no_error(tmp_path: Path) -> None:
    file = str(Path(__file__).with_name("test_host_code.py"))
    without = "not a_process and not a_compiler"  # those compile again, in other processes
    options = "-q", "-p", "no:cacheprovider", "--noconftest"
    done = _run(tmp_path, "-c", TESTS, *options, file, "-k", without)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


def test_what_is_right_is_let_through(tmp_path: Path) -> None:
    clean = _run(tmp_path, "-c", BEYOND)
    assert (clean.returncode, clean.stdout) == (0, "2\n"), clean.stderr


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("module.read_beyond(40)", "heap-buffer-overflow"),
        ("module.read_freed(5)", "heap-use-after-free"),
        ("module.add_one(2**31 - 1)", "signed integer overflow"),
    ],
)
def test_an_error_is_noticed(tmp_path: Path, call: str, named: str) -> None:
    broken = _run(tmp_path, "-c", f"{BEYOND}\n{call}")
    assert broken.returncode != 0
    assert broken.stdout == "2\n", broken.stderr  # what came before
    assert named in broken.stderr
