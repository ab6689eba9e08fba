"""Tests that take turns in `.ci/run`, which has no time for all of them on each release. `make test` alone runs all."""

from __future__ import annotations

import os

import pytest

from sglang_kv_canary.wiring.releases import release

__all__ = [
    "EVERY_SECOND_RUN",
    "ON_EITHER_RELEASE",
    "TURN",
    "leave_to_the_next_run",
    "turn",
    "waits",
]

TURN = "KV_CANARY_TEST_TURN"

# Both lists go by what the tests cost, so that any two neighbours, and so both turns, cost about the same.
# On the first release in one run, on newer ones in the next.
ON_EITHER_RELEASE = (
    "e2e/test_e2e_swa.py::TestSWAFaults",
    "e2e/test_e2e_pipeline.py::TestPipeline",
    "e2e/test_e2e_dp_attention.py::TestDPAttention",
    "e2e/test_e2e_mha_faults.py::TestMHAFaults",
    "e2e/test_e2e_clean_servers.py::TestFeatures",
    "e2e/test_e2e_hicache.py::TestTwoRanks",
    "pools/test_dsv4_pool.py",
    "e2e/test_e2e_containment_pairs.py::TestPair",
    "e2e/test_e2e_hicache_storage.py::TestRaise",
    "e2e/test_e2e_weight_update.py::TestWeightUpdates",
    "e2e/test_e2e_disaggregation.py::TestMha",
    "e2e/test_speculative_e2e.py::TestEagleV2",
    "e2e/test_e2e_disaggregation_ranks.py::TestDpAttention",
    "e2e/test_e2e_mla.py::TestMLAFaults",
    "e2e/test_speculative_dsa_e2e.py::TestMtpV2",
    "e2e/test_speculative_ngram_e2e.py::TestNgram",
    "e2e/test_e2e_disaggregation_lora.py::TestLora",
    "e2e/test_speculative_hicache_e2e.py::TestEagleV2",
    "e2e/test_speculative_swa_e2e.py::TestFrozenKv",
    "e2e/test_e2e_sessions.py::TestStreamingSessions",
    "e2e/test_e2e_sweep.py::TestSweepAndMetrics",
    "e2e/test_e2e_clean_servers.py::TestPage16WithPriorities",
    "e2e/test_e2e_mha_variants.py::TestTwoRanks",
    "e2e/test_e2e_disaggregation.py::TestRetraction",
    "e2e/test_e2e_disaggregation_dsa.py::TestDsa",
    "e2e/test_e2e_disaggregation_dsa.py::TestMtp",
    "e2e/test_e2e_disaggregation_hybrid.py::TestHybrid",
    "e2e/test_e2e_disaggregation_nixl.py::TestPrefixCacheOnTheDecodeServer",
    "e2e/test_e2e_disaggregation_images.py::TestImages",
    "e2e/test_e2e_hicache_storage.py::TestDamage",
    "e2e/test_e2e_dp_attention.py::TestReplicas",
    "e2e/test_e2e_context_parallel.py::TestContextParallel",
    "e2e/test_speculative_grammar_e2e.py::TestNgramOnPages",
    "e2e/test_e2e_hicache.py::TestDamage",
    "e2e/test_e2e_hicache_dsa.py::TestDsa",
    "e2e/test_e2e_clean_servers.py::TestPage64WithLora",
    "e2e/test_speculative_e2e.py::TestEagle3",
    "e2e/test_e2e_swa.py::TestSWASweep",
    "e2e/test_speculative_grammar_e2e.py::TestNgram",
    "e2e/test_e2e_clean_servers.py::TestImages",
    "e2e/test_speculative_ngram_e2e.py::TestNgramChains",
    "wiring/test_plugin_startup.py",
)
EVERY_SECOND_RUN = (
    "kernels/test_compile_server.py",
    "runner/test_host_code_sanitized.py",
    "kernels/test_kernels_content.py",
    "project/test_packaging.py::test_the_walk_through_works_as_it_stands",
    "e2e/test_fault_table.py",
    "kernels/test_model.py",
    "kernels/test_kernels_forward.py",
    "kernels/test_kernels_strided.py",
    "wiring/test_compile_server_launch.py",
    "e2e/test_e2e_containment_hicache.py::TestStorage",
    "e2e/test_e2e_two_batch_overlap.py::TestTwoBatchOverlap",
    "e2e/test_e2e_hicache_dsa.py::TestMtp",
    "e2e/test_e2e_hicache_dsa.py::TestStorage",
    "e2e/test_e2e_containment.py::TestTwoRanks",
    "e2e/test_e2e_disaggregation.py::TestAbort",
    "project/test_packaging.py::test_a_newer_sglang_stays_bit_for_bit_as_it_is",
    "project/test_packaging.py::test_old_name_gives_the_same_modules",
    "e2e/test_speculative_swa_e2e.py::TestEagleSwaV2",
    "e2e/test_e2e_disaggregation_eagle.py::TestEagle",
    "e2e/test_e2e_disaggregation.py::TestSwa",
    "project/test_packaging.py::test_installs_beside_an_untouched_sglang",
    "e2e/test_e2e_disaggregation_layouts.py::TestTensorParallelPrefill",
    "e2e/test_e2e_disaggregation_layouts.py::TestPipelinePrefill",
    "e2e/test_speculative_dp_e2e.py::TestMtpTrees",
    "e2e/test_e2e_disaggregation.py::TestTwoRanks",
    "e2e/test_e2e_disaggregation_ranks.py::TestReplicas",
    "e2e/test_speculative_hicache_e2e.py::TestStandalone",
    "e2e/test_speculative_hicache_e2e.py::TestPages",
    "e2e/test_e2e_containment.py::TestWithoutTheAction",
    "e2e/test_e2e_disaggregation_hicache.py::TestOnThePrefillServer",
    "e2e/test_e2e_disaggregation_ranks.py::TestDpAttentionToOneRank",
    "e2e/test_e2e_disaggregation_nixl.py::TestMha",
    "e2e/test_e2e_disaggregation_dsa.py::TestNixl",
    "e2e/test_e2e_disaggregation.py::TestMlaPages",
    "e2e/test_e2e_nsa.py::TestNSAFaults",
    "kernels/test_kernels_compile.py",
    "kernels/test_kernels_loads.py",
    "e2e/test_e2e_memory_saver.py::TestMemorySaver",
    "e2e/test_e2e_disaggregation_ranks.py::TestOneRankToDpAttention",
    "e2e/test_e2e_disaggregation_hicache.py::TestOnBothServers",
    "e2e/test_e2e_disaggregation.py::TestLateWrites",
    "e2e/test_speculative_dsa_e2e.py::TestMtpRaise",
    "e2e/test_e2e_disaggregation_nixl.py::TestSwa",
    "e2e/test_e2e_disaggregation_combinations.py::TestEagleWithDpAttention",
    "e2e/test_e2e_token_oracle.py::TestSWA",
    "e2e/test_e2e_containment_sessions.py::TestSessions",
    "e2e/test_e2e_hicache.py::TestSelective",
    "e2e/test_speculative_dsa_e2e.py::TestMtpV1",
    "e2e/test_e2e_hicache.py::TestMla",
    "e2e/test_speculative_hicache_e2e.py::TestNgram",
    "e2e/test_speculative_hicache_e2e.py::TestStorage",
    "e2e/test_speculative_hicache_e2e.py::TestMtp",
    "e2e/test_speculative_hicache_e2e.py::TestEagleV1",
    "e2e/test_speculative_e2e.py::TestAdaptiveV2",
    "e2e/test_speculative_e2e.py::TestAdaptiveV1Pages",
    "e2e/test_speculative_swa_e2e.py::TestEagleSwaV1",
    "e2e/test_e2e_disaggregation_combinations.py::TestNgram",
    "e2e/test_e2e_hicache.py::TestPage16",
    "e2e/test_speculative_unchecked_drafts_e2e.py::TestDflash",
    "e2e/test_e2e_disaggregation.py::TestDecodeRadixCache",
    "e2e/test_e2e_disaggregation_hybrid.py::TestLostStates",
    "e2e/test_speculative_grammar_e2e.py::TestEagle",
    "e2e/test_e2e_pipeline.py::TestPipelineAsyncDepthClean",
    "e2e/test_e2e_hicache.py::TestTraffic",
    "e2e/test_e2e_hicache_dsa.py::TestWriteBack",
    "e2e/test_e2e_hicache_dsa.py::TestLargeLoad",
    "e2e/test_e2e_hicache_dsa.py::TestSweep",
    "e2e/test_e2e_disaggregation_nixl.py::TestUncheckedPrefill",
    "e2e/test_e2e_hicache.py::TestWriteBack",
    "e2e/test_e2e_hicache.py::TestPartialWithoutOverlap",
    "e2e/test_e2e_hicache_storage.py::TestPage16",
    "e2e/test_speculative_e2e.py::TestStandalone",
    "e2e/test_e2e_mha_variants.py::TestMixedChunkOverlap",
    "e2e/test_speculative_unchecked_drafts_e2e.py::TestLayers",
    # On newer releases only.
    "wiring/test_seam.py::test_a_server_whose_processes_do_not_load_the_plugin_does_not_start",
    "pools/test_pools_of_newer_releases.py",
    "e2e/test_e2e_torch_compile.py::TestTorchCompile",
    "e2e/test_e2e_disaggregation_dsa.py::TestRetraction",
    "e2e/test_e2e_disaggregation_dsa.py::TestPrefixCacheOnTheDecodeServer",
    "e2e/test_speculative_dp_e2e.py::TestEagle3",
    "e2e/test_speculative_dp_e2e.py::TestEagle3BesidePrefills",
    "e2e/test_e2e_nsa_context_parallel.py::TestFaults",
    "e2e/test_e2e_prefill_graphs.py::TestPrefillGraphs",
    "e2e/test_e2e_prefill_graphs.py::TestPrefillGraphFaults",
    "e2e/test_e2e_lmcache_server.py::TestGivenUp",
    "e2e/test_speculative_hybrid_e2e.py::TestTrees",
    "e2e/test_e2e_prefill_graphs.py::TestStandaloneWithPrefillGraphs",
    "e2e/test_speculative_dp_e2e.py::TestDflash",
    "e2e/test_speculative_hybrid_e2e.py::TestHybrid",
    "e2e/test_e2e_prefill_graphs.py::TestEagleWithPrefillGraphs",
    "e2e/test_e2e_unified_memory.py::TestUnifiedSwaFaults",
    "e2e/test_e2e_prefill_graphs.py::TestPrefillGraphsOnSlidingWindows",
    "e2e/test_speculative_e2e.py::TestEagleV2Trees",
    "e2e/test_speculative_mixed_chunks_e2e.py::TestDflash",
    "e2e/test_e2e_nsa_context_parallel.py::TestRaise",
    "e2e/test_speculative_e2e.py::TestDraftWindow",
    "e2e/test_speculative_e2e.py::TestAdaptiveNone",
    "e2e/test_e2e_containment.py::TestEagleV2",
    "e2e/test_e2e_hicache_swa.py::TestSwa",
    "e2e/test_e2e_hicache_swa.py::TestTraffic",
    "e2e/test_e2e_hicache_hybrid.py::TestRaise",
    "e2e/test_speculative_hicache_e2e.py::TestSlidingWindows",
    # On the first release only.
    "analysis/test_report.py",
    "project/test_warm_processes.py",
    "monitors/test_alert_rules.py",
    "project/test_selftest.py",
)


def leave_to_the_next_run(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take those out of `items` that have their turn in the next run."""
    of_turn = turn()
    if of_turn is None:
        return
    newer = release().has_own_canary
    waiting = {item for item in items if waits(_below_our_tests(item), of_turn, newer)}
    config.hook.pytest_deselected(items=[item for item in items if item in waiting])
    items[:] = [item for item in items if item not in waiting]


def _below_our_tests(item: pytest.Item) -> str:
    return item.nodeid.partition("kv_canary/")[2]


def turn() -> int | None:
    """0 or 1, as the environment says. None: all tests run. Raises `pytest.UsageError` for anything else."""
    found = os.environ.get(TURN, "")
    if found not in ("", "0", "1"):
        raise pytest.UsageError(f"{TURN} is {found!r}: expected 0 or 1, or nothing for all tests")
    return int(found) if found else None


def waits(test: str, of_turn: int, on_newer_release: bool) -> bool:
    """Whether `test` has its turn in the next run. It begins with its path below `test/registered/kv_canary`."""
    for i, name in enumerate(ON_EITHER_RELEASE):
        if _is_of(test, name):
            return (i + of_turn + on_newer_release) % 2 == 1
    for i, name in enumerate(EVERY_SECOND_RUN):
        if _is_of(test, name):
            return (i + of_turn) % 2 == 1
    return False


def _is_of(test: str, name: str) -> bool:
    """A test of the file, the class or the function `name`. `TestSwa` is not of `TestSwaPages`."""
    return test.startswith(name) and test[len(name) : len(name) + 1] in ("", ":", "[")
