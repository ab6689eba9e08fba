#!/usr/bin/env bash
# fetch_prometheus.sh FOLDER: Debian's prometheus and promtool in FOLDER/2 (Debian 12) and FOLDER/3 (Debian testing).
# Needs apt-get and Debian's archive keyring, not root; installs nothing. Fails where there is no 2; 3 is optional,
# because testing changes. DEBIAN_MIRROR replaces http://deb.debian.org/debian.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# fetch MAJOR SUITE PACKAGE...: apt with lists of its own, so that signatures are checked and the system's stay as they are
fetch() {
    local target="$folder/$1" suite=$2 work
    shift 2
    if [ -x "$target/promtool" ]; then return; fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' RETURN
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$work/root" "$target"
    echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/sources.list"
    local apt=(apt-get -qq -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o Debug::NoLocking=1
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none -o Acquire::Retries=3)
    "${apt[@]}" update && (cd "$work/debs" && "${apt[@]}" download "$@") || return 1
    for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root" || return 1; done
    "$work/root/usr/bin/prometheus" --version || return 1  # built for this machine's libc
    mv "$work/root/usr/bin/prometheus" "$work/root/usr/bin/promtool" "$target/"
}

fetch 2 bookworm prometheus || { echo "fetch_prometheus.sh: no Prometheus 2 from $mirror" >&2; exit 1; }
fetch 3 testing prometheus promtool || echo "fetch_prometheus.sh: no Prometheus 3 from $mirror; tests replay its header" >&2
