#!/bin/sh
# A C compiler whose code ends the process at its first error of memory and at undefined behaviour. For sanitized.sh.
exec gcc -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined "$@"
