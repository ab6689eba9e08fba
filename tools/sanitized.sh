#!/bin/sh
# Runs a command in which host_code.c is compiled with AddressSanitizer and UndefinedBehaviorSanitizer:
#   tools/sanitized.sh python -m pytest FILE
# Python's objects come from malloc there, so that one that is used after its end is found, too. Leaks are not looked
# for: Python itself leaves memory behind. Ends with 3 where gcc has no sanitizers.
set -eu
tools=$(cd "$(dirname "$0")" && pwd)
libraries=
for name in asan ubsan; do
    path=$(gcc -print-file-name=lib$name.so 2>/dev/null || true)
    [ -e "$path" ] || { echo "gcc has no lib$name.so: install gcc and its sanitizers (Debian: gcc, libgcc-12-dev)" >&2; exit 3; }
    libraries="$libraries${libraries:+:}$path"
done
exec env CC="$tools/sanitizing_cc.sh" TRITON_CACHE_DIR="${SANITIZED_CACHE:-$tools/../build/sanitized}" \
    LD_PRELOAD="$libraries" ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 PYTHONMALLOC=malloc "$@"
