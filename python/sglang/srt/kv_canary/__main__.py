"""`python -m sglang_kv_canary`: the same as `kv-canary`."""

import sys

if __name__ == "__main__":  # scheduler processes are spawned and also import this file
    from kv_canary_cli import main

    sys.exit(main())
