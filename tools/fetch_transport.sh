#!/usr/bin/env bash
# fetch_transport.sh FOLDER: the libraries of Debian 12 that the Mooncake transport links to, in FOLDER.
# Tests of prefill-decode disaggregation load them from there. See debian_packages.sh for what it needs.
set -euo pipefail
. "$(dirname "$0")/debian_packages.sh"
if [ -e "$1/libibverbs.so.1" ]; then exit 0; fi
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
unpack_debian bookworm "$root" libibverbs1 librdmacm1 libnuma1 libnl-3-200 libnl-route-3-200
mkdir -p "$1"
find "$root" -name '*.so.*' -path '*lib*' -exec cp -P {} "$1/" \;
ls "$1/libibverbs.so.1" >/dev/null
