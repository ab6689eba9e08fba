# To be sourced. unpack_debian SUITE ROOT PACKAGE...: Debian packages, unpacked into ROOT, with apt's signature check.
# Needs apt-get and Debian's archive keyring, not root; installs nothing. DEBIAN_MIRROR replaces the default mirror.
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

unpack_debian() {
    local suite=$1 root=$2 work
    shift 2
    work=$(mktemp -d)
    trap 'rm -rf "$work"; trap - RETURN' RETURN  # once: it would run for the caller, too
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$root"
    echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/sources.list"
    # apt with lists of its own, so that signatures are checked and the system's stay as they are
    local apt=(apt-get -qq -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o Debug::NoLocking=1
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none -o Acquire::Retries=3)
    "${apt[@]}" update && (cd "$work/debs" && "${apt[@]}" download "$@") || return 1
    for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$root" || return 1; done
}
