"""`python -m sglang.srt.kv_canary`."""

import sys

if __name__ == "__main__":  # scheduler processes are spawned and import this file, too
    from sglang.srt.kv_canary.cli import main

    sys.exit(main())
