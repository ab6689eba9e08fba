"""What is mutated, and which tests look for it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/sglang/srt/kv_canary"
CACHE = ROOT / ".mutants"
TESTING_DOC = ROOT / "docs/testing.md"

# File names, wherever they lie in the package.
TARGETS = (
    # the reference kernels
    "kernels/reference/check.py",
    "kernels/reference/content.py",
    "kernels/reference/forward.py",
    "kernels/reference/hashing.py",
    "kernels/reference/next_tokens.py",
    "kernels/reference/rows.py",
    "kernels/reference/slots.py",
    "kernels/reference/spans.py",
    "kernels/reference/strided.py",
    "kernels/reference/sweep.py",
    # the sweep's walk, the ledger, and what becomes of a finding
    "sweep/chunk.py",
    "radix_cache_walker.py",
    "sweep_plan_builder.py",
    "cause.py",
    "flight_recorder.py",
    "health.py",
    "known_findings.py",
    "slot_ledger.py",
    "violation.py",
    "violation_manager.py",
)

# Needs a GPU: nothing here is run on CPU.
GPU_ONLY = frozenset({"_SourceKeeper.__init__", "_SourceKeeper.keep"})

# Tests with servers and interpreters of their own, which no mutant reaches, and those that compare interpreted kernels.
NOT_USED = (
    "*e2e*",
    "test_cli*",
    "test_config*",
    "test_docs*",
    "test_farewell*",
    "test_kernels_compile*",
    "test_kernels_content*",
    "test_kernels_forward*",
    "test_kernels_slots*",
    "test_packaging*",
    "test_plugin_startup*",
    "test_server_args*",
    "test_warm_processes*",
)
NOT_USED_NAMES = "not triton"


def target_files() -> dict[str, Path]:
    """Name -> file. Raises FileNotFoundError where a target is not there, or is there twice."""
    found = {}
    for target in TARGETS:
        paths = [p for p in PACKAGE.rglob(Path(target).name) if p.as_posix().endswith(f"/{target}")]
        if len(paths) != 1:
            raise FileNotFoundError(f"expected one {target} in {PACKAGE}, found {len(paths)}")
        found[paths[0].name] = paths[0]
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "python").with_suffix("").parts)
