"""Environment that SGLang reads at import: the CPU engine where there is no GPU. Failures are told at once."""

import faulthandler
import gc
import json
import logging
import os
import re
import signal
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # More of them would start threads at import, which no fork survives.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

PYTEST_OWN = "PYTEST_CURRENT_TEST"

# hypothesis draws some integers from the source of what is imported by then, which depends on the tests before.
# That of a GPU machine may be another version than the pinned one, and draw other examples anyway.
if hasattr(providers, "_local_constants"):
    providers._get_local_constants = lambda constants=providers._local_constants: constants

# How long an example takes says how busy the machine is, and a failure for it is shrunk for minutes.
settings.register_profile("untimed", deadline=None)
settings.register_profile("few", deadline=None, max_examples=5)  # where each takes long
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def kernels_stay_in_bounds() -> Iterator[None]:
    """Compiled kernels have compute-sanitizer for this."""
    from sglang_kv_canary.kernels.triton.jit import INTERPRET

    if not INTERPRET:
        yield
        return
    from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
    from sglang_kv_canary_rigs.bounds_guard import BoundsGuard

    quick_interpreter()
    with pytest.MonkeyPatch.context() as monkeypatch:
        BoundsGuard().install(monkeypatch)
        yield


@pytest.fixture(autouse=True)
def process_context_is_fresh() -> Iterator[None]:
    """What one test installs in the process is gone in the next."""
    from sglang_kv_canary.wiring.context import context

    root, level = logging.getLogger(), logging.getLogger().level
    environment = dict(os.environ)
    yield
    context.reset()
    root.setLevel(level)  # commands make it quiet, and what they start, too
    for name in {*environment, *os.environ} - {PYTEST_OWN}:
        if (value := environment.get(name)) is None:
            del os.environ[name]
        elif os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture(autouse=True, scope="session")
def servers_are_forked() -> Iterator[None]:
    """CanaryServer costs milliseconds instead of three starts of SGLang; `FreshServer` is one that does not."""
    if torch.cuda.is_available():  # a forked process cannot use CUDA
        yield
        return
    from sglang_kv_canary.testing import CanaryServer
    from sglang_kv_canary_rigs.warm import shared

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(CanaryServer, "popen", shared().popen)
        yield


@pytest.fixture
def sweeps_never_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a tree that lists its slots at once, a sweep rests longer than tests wait."""
    from sglang_kv_canary.sweep import orchestrator

    monkeypatch.setattr(orchestrator, "LISTING_SHARE", 1e9)


@pytest.fixture(autouse=True)
def events_follow_their_schema(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every line that a test writes to an event file, and every event that it reads from a server's."""
    from sglang_kv_canary.reports.event_file import EventFile
    from sglang_kv_canary.testing import serving
    from sglang_kv_canary_rigs.event_schema import problems_of

    wrong: list[str] = []
    read_before: set[tuple[str, int]] = set()
    append, events = EventFile.append, serving.Serving.events

    def appended(file: EventFile, line: str) -> None:
        wrong.extend(problems_of(json.loads(line)))
        append(file, line)

    def read(server: serving.Serving, kind: str | None = None) -> list[dict[str, Any]]:
        found = events(server, kind)
        for event in found:
            if (key := (event["run"], event["line"])) not in read_before:
                read_before.add(key)
                wrong.extend(problems_of(event))
        return found

    monkeypatch.setattr(EventFile, "append", appended)
    monkeypatch.setattr(serving.Serving, "events", read)
    yield
    assert wrong[:4] == []


# What runs on releases other than the first: the files that depend on SGLang and whose paths are covered there.
ON_NEWER_RELEASES = (
    "action/test_owned_slots.py",
    "e2e/test_e2e_clean_servers.py",
    "e2e/test_e2e_containment.py",
    "e2e/test_e2e_containment_hicache.py",
    "e2e/test_e2e_containment_pairs.py",
    "e2e/test_e2e_containment_pairs_features.py",
    "e2e/test_e2e_context_parallel.py",
    "e2e/test_e2e_disaggregation.py",
    "e2e/test_e2e_disaggregation_dsa.py",
    "e2e/test_e2e_disaggregation_hybrid.py",
    "e2e/test_e2e_disaggregation_images.py",
    "e2e/test_e2e_disaggregation_lora.py",
    "e2e/test_e2e_disaggregation_nixl.py",
    "e2e/test_e2e_disaggregation_pause.py",
    "e2e/test_e2e_disaggregation_ranks.py",
    "e2e/test_e2e_disaggregation_roles.py",
    "e2e/test_e2e_dp_attention.py",
    "e2e/test_e2e_dsv4.py",
    "e2e/test_e2e_dsv4_ranks.py",
    "e2e/test_e2e_dsv4_stages.py",
    "e2e/test_e2e_farewell.py",
    "e2e/test_e2e_hicache.py",
    "e2e/test_e2e_hicache_dsa.py",
    "e2e/test_e2e_hicache_hybrid.py",
    "e2e/test_e2e_hicache_storage.py",
    "e2e/test_e2e_hicache_swa.py",
    "e2e/test_e2e_live_questions.py",
    "e2e/test_e2e_lmcache_server.py",
    "e2e/test_e2e_mha_faults.py",
    "e2e/test_e2e_mha_raise.py",
    "e2e/test_e2e_mha_variants.py",
    "e2e/test_e2e_mla.py",
    "e2e/test_e2e_no_sync.py",
    "e2e/test_e2e_nsa.py",
    "e2e/test_e2e_nsa_context_parallel.py",
    "e2e/test_e2e_pipeline.py",
    "e2e/test_e2e_prefill_graphs.py",
    "e2e/test_e2e_raise_at_the_end.py",
    "e2e/test_e2e_sessions.py",
    "e2e/test_e2e_states.py",
    "e2e/test_e2e_swa.py",
    "e2e/test_e2e_sweep.py",
    "e2e/test_e2e_torch_compile.py",
    "e2e/test_e2e_two_batch_overlap.py",
    "e2e/test_e2e_unified_memory.py",
    "e2e/test_e2e_weight_update.py",
    "e2e/test_speculative_dp_e2e.py",
    "e2e/test_speculative_dsa_e2e.py",
    "e2e/test_speculative_e2e.py",
    "e2e/test_speculative_grammar_e2e.py",
    "e2e/test_speculative_hicache_e2e.py",
    "e2e/test_speculative_hybrid_e2e.py",
    "e2e/test_speculative_mixed_chunks_e2e.py",
    "e2e/test_speculative_ngram_e2e.py",
    "e2e/test_speculative_states_e2e.py",
    "e2e/test_speculative_swa_e2e.py",
    "host_tier/test_host_tier.py",
    "host_tier/test_host_windows.py",
    "host_tier/test_indexer_pages.py",
    "host_tier/test_page_store.py",
    "monitors/test_health.py",
    "monitors/test_metrics.py",
    "monitors/test_statistics.py",
    "monitors/test_swa_divergence.py",
    "pools/test_dsv4_faults.py",
    "pools/test_dsv4_pool.py",
    "pools/test_pools_of_newer_releases.py",
    "pools/test_unified_pools.py",
    "pools/test_unified_swa_pools.py",
    "project/test_doctor.py",
    "project/test_plain_attention.py",
    "project/test_sglang_parts.py",
    "reports/test_guesses.py",
    "reports/test_scene.py",
    "reports/test_scene_facts.py",
    "reports/test_slot_history.py",
    "runner/test_internal_errors.py",
    "runner/test_live_answers.py",
    "runner/test_manager.py",
    "runner/test_moot_swa.py",
    "runner/test_outbox.py",
    "runner/test_row_memory.py",
    "states/test_state_batches.py",
    "states/test_states_unified.py",
    "states/test_states_verified.py",
    "sweep/test_staged_list.py",
    "sweep/test_core_walks.py",
    "sweep/test_walks_of_cores.py",
    "sweep/test_sweep.py",
    "wiring/test_after_layers.py",
    "wiring/test_allocator_hooks.py",
    "wiring/test_allocator_methods.py",
    "wiring/test_anchors.py",
    "wiring/test_compile_server_launch.py",
    "wiring/test_dflash_tokens.py",
    "wiring/test_direct_hooks.py",
    "wiring/test_expected_tokens.py",
    "wiring/test_farewell.py",
    "wiring/test_forward_stream.py",
    "wiring/test_hicache_eviction.py",
    "wiring/test_hook_targets.py",
    "wiring/test_kv_checksum.py",
    "wiring/test_late_content.py",
    "wiring/test_late_head.py",
    "wiring/test_late_patches.py",
    "wiring/test_live_questions.py",
    "wiring/test_log_reach.py",
    "wiring/test_model_forward.py",
    "wiring/test_moved_mappings.py",
    "wiring/test_namespaces.py",
    "wiring/test_nixl_settling.py",
    "wiring/test_pairs_of_newer_releases.py",
    "wiring/test_patch_scan.py",
    "wiring/test_paused.py",
    "wiring/test_plugin_startup.py",
    "wiring/test_prefix_caches.py",
    "wiring/test_record_sender.py",
    "wiring/test_records_out_of_date.py",
    "wiring/test_replayed_tokens.py",
    "wiring/test_reused_pages.py",
    "wiring/test_row_owners.py",
    "wiring/test_sampled_tokens.py",
    "wiring/test_scheduler_steps.py",
    "wiring/test_seam.py",
    "wiring/test_small_pool.py",
    "wiring/test_swa_location.py",
    "wiring/test_swept_slots.py",
    "wiring/test_token_oracle.py",
    "wiring/test_unseen_forwards.py",
    "wiring/test_unused_hooks.py",
    "wiring/test_weights.py",
    "wiring/test_without_scheduler.py",
    "wiring/test_wrong_settings.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    from sglang_kv_canary.wiring.releases import release

    if not release().has_own_canary:
        return None
    return None if str(collection_path).endswith(ON_NEWER_RELEASES) else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """SGLang is imported once for all test processes and for all servers."""
    if not torch.cuda.is_available():
        import forked_workers

        forked_workers.install()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collection: imports free next to nothing. What they leave is passed over from then on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files come first, so that short ones fill the cores at the end. The order in a file stays."""
    from sglang_kv_canary_rigs.by_turns import leave_to_the_next_run

    leave_to_the_next_run(config, items)
    items.sort(key=lambda item: -_estimated_seconds(item.path))


@cache
def _estimated_seconds(path: Path) -> int:
    """What the file registers for SGLang's CI; 0 if it does not."""
    found = re.search(r"^register_cpu_ci\(\s*est_time=(\d+)", path.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


class FailuresAtOnce:
    """Prints each failure when it comes: a run that is ended from outside tells what it has found so far."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_sep("!", f"{report.when} of {report.nodeid} failed")
            self._terminal.write_line(report.longreprtext)


@pytest.hookimpl(trylast=True)  # the terminal is there by then
def pytest_configure(config: pytest.Config) -> None:
    """Failures are printed in the process that has the terminal; workers of pytest-xdist have none."""
    # The limit of .ci/run is the one that says that a test hangs: any other dumps stacks of slow ones.
    faulthandler.register(signal.SIGTERM, file=os.dup(2), chain=True)
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(terminal), "kv_canary_failures_at_once")
