#!/usr/bin/env bash
# fetch_prometheus.sh FOLDER: Debian's prometheus and promtool in FOLDER/2 (Debian 12) and FOLDER/3 (Debian testing).
# Fails where there is no 2; 3 is optional, because testing changes. See debian_packages.sh for what it needs.
set -euo pipefail
. "$(dirname "$0")/debian_packages.sh"
folder=$(mkdir -p "$1" && cd "$1" && pwd)

# fetch MAJOR SUITE PACKAGE...
fetch() {
    local target="$folder/$1" suite=$2 root
    shift 2
    if [ -x "$target/promtool" ]; then return; fi
    root=$(mktemp -d)
    unpack_debian "$suite" "$root" "$@" || return 1
    "$root/usr/bin/prometheus" --version || return 1  # built for this machine's libc
    mkdir -p "$target"
    mv "$root/usr/bin/prometheus" "$root/usr/bin/promtool" "$target/"
    rm -rf "$root"
}

fetch 2 bookworm prometheus || { echo "fetch_prometheus.sh: no Prometheus 2 from $mirror" >&2; exit 1; }
fetch 3 testing prometheus promtool || echo "fetch_prometheus.sh: no Prometheus 3 from $mirror; tests replay its header" >&2
