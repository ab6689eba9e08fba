#!/bin/sh
# Runs a command in which host_code.c is compiled with AddressSanitizer and UndefinedBehaviorSanitizer:
#   tools/sanitized.sh python -m pytest FILE
# Python's objects come from malloc there, so that most that are used after their end are found, too. Leaks are not
# looked for: Python itself leaves memory behind. Ends with 77 where gcc has no sanitizers.
set -eu
tools=$(cd "$(dirname "$0")" && pwd)
libraries=
for name in asan ubsan; do
    path=$(gcc -print-file-name=lib$name.so 2>/dev/null || true)
    # Some distributions have a text for the linker there, which names the library.
    if [ ! -e "$path" ] || [ "$(head -c 4 "$path" | tail -c 3)" != ELF ]; then
        echo "gcc has no lib$name.so: install gcc and its sanitizers (Debian: gcc, libgcc-12-dev)" >&2
        exit 77
    fi
    libraries="$libraries${libraries:+:}$path"
done
# Triton's cache knows neither the compiler nor its flags.
cache=${SANITIZED_CACHE:-$tools/../build/sanitized/$({ gcc --version; cat "$tools/sanitizing_cc.sh"; } | cksum | cut -d' ' -f1)}
exec env CC="$tools/sanitizing_cc.sh" TRITON_CACHE_DIR="$cache" \
    LD_PRELOAD="$libraries" ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 PYTHONMALLOC=malloc "$@"
