"""What an SGLang release changes in the functions that the canary hooks. Reads source only.

`make hooks SGLANG=FOLDER` compares the SGLang in FOLDER, which holds `sglang/`, with what the newest family has
recorded. `--record` writes the record of the installed release's family anew; a test fails until that is done.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_kv_canary.wiring import collect_hooks, releases
from sglang_kv_canary.wiring.hook_targets import moved_targets, record_of, recorded_targets


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", nargs="?", type=Path, help="folder that holds sglang/")
    what.add_argument("--record", action="store_true", help="record the installed release")
    parser.add_argument(
        "--family", choices=sorted(set(releases.FAMILIES.values())), default=releases.NEWEST_FAMILY
    )
    args = parser.parse_args(argv)
    if args.record:
        return record()
    if not (args.folder / "sglang" / "srt").is_dir():
        parser.error(f"expected a folder that holds sglang/srt, got {args.folder}")
    return compare(args.folder, args.family)


def compare(folder: Path, family: str) -> int:
    recorded = recorded_targets(family)
    moved = moved_targets(folder, recorded)
    for target in moved:
        print(f"{'gone' if target.found is None else 'changed':<8} {target.target}")
        if target.found is not None:
            print(f"         was {target.recorded}\n         is  {target.found}")
    gone = sum(target.found is None for target in moved)
    print(
        f"{len(recorded.signatures)} targets of {recorded.release}: {len(recorded.signatures) - len(moved)} the same, "
        f"{len(moved) - gone} changed, {gone} gone"
    )
    return 0


def record() -> int:
    import sglang.version

    version = sglang.version.__version__
    family = releases.FAMILIES[version]
    root = Path(sglang.version.__file__).parents[1]
    text = record_of(version, root, (hook.target for hook in collect_hooks()))
    file = Path(releases.__file__).parent / family / "hook_targets.json"
    file.write_text(text)
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
