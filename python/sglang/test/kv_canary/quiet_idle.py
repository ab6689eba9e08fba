"""A plugin for tests of the end of a server: while it idles, nothing that waits is named."""


def names_nothing_while_idle() -> None:
    from sglang_kv_canary.reports import violation_reporter

    violation_reporter.IDLE_INTERVAL_S = 1e9
