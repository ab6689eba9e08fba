"""The harness under its name in SGLang's tree, beside the rigs, oracle and histories of KV-canary's own tests."""

from sglang_kv_canary.testing import *  # noqa: F403
from sglang_kv_canary.testing import __all__ as __all__
