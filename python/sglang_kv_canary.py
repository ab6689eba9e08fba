"""The import name that holds beside every SGLang release; in this tree the package is `sglang.srt.kv_canary`.

Only an editable install beside an SGLang without a canary of its own uses this file, see setup.py.
"""

import sys

if __name__ == "sglang_kv_canary":
    from sglang.srt.kv_canary.import_alias import alias_package

    alias_package(__name__, "sglang.srt.kv_canary")
elif (
    __name__ == "__main__"
):  # `python -m`; processes that it spawns import this file under another name
    from kv_canary_cli import main

    sys.exit(main())
