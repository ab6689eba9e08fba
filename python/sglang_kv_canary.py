"""The import name that holds beside every SGLang release; in this tree the package is `sglang.srt.kv_canary`."""

from sglang.srt.kv_canary.import_alias import alias_package

alias_package(__name__, "sglang.srt.kv_canary")
