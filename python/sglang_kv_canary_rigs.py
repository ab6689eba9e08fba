"""The import name of the tests' rigs beside every SGLang release; in this tree they are `sglang.test.kv_canary`.

Only an editable install beside an SGLang without a canary of its own uses this file, see setup.py.
"""

from sglang.srt.kv_canary.import_alias import alias_package

alias_package(__name__, "sglang.test.kv_canary")
