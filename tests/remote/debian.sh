#!/usr/bin/env bash
# The tests of remote tiers on Debian's servers: `debian.sh FOLDER PYTEST…` has Valkey, Redis and Ceph's object gateway.
#
# It downloads their packages and unpacks them under FOLDER, without root and beside what is installed. PYTEST is the
# command that runs tests. A server that is not to be had is skipped, and the last lines say so.
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1")
shift
pytest=("$@")
here=$(dirname "${BASH_SOURCE[0]}")
libraries=$(for part in usr/lib lib; do printf '%s/%s/%s-linux-gnu:' "$folder/root" "$part" "$(uname -m)"; done)
told=() failed=0

apt() {
    apt-get -q -o Debug::NoLocking=1 -o Dir::Etc::SourceParts=/dev/null -o Dir::Etc::SourceList="$folder/sources.list" \
        -o Dir::State::Lists="$folder/lists" -o Dir::Cache="$folder/cache" "$@"
}

prepared() {
    [[ ! -e $folder/prepared ]] || return 0
    mkdir -p "$folder"/{lists,cache/archives}/partial "$folder/root" "$folder/bin"
    # shellcheck source=/dev/null
    . /etc/os-release
    for suite in "$VERSION_CODENAME" "$VERSION_CODENAME-backports"; do
        echo "deb http://deb.debian.org/debian $suite main"
    done >"$folder/sources.list"
    apt update && touch "$folder/prepared"
}

unpacked() { # NAME PACKAGE…: with what they need and is not installed.
    local name=$1
    shift
    [[ ! -e $folder/unpacked-$name ]] || return 0
    rm -f "$folder"/cache/archives/*.deb
    apt --yes --no-install-recommends --download-only install "$@" || return 1
    for package in "$folder"/cache/archives/*.deb; do
        [[ ! -e $package ]] || dpkg -x "$package" "$folder/root"
    done
    touch "$folder/unpacked-$name"
}

skipped() { told+=("SKIPPED $*"); }

tested() { # WHAT TESTS…
    local what=$1
    shift
    printf '\n==> %s\n' "$what"
    if "${pytest[@]}" "$@"; then told+=("passed  $what"); else told+=("FAILED  $what") failed=1; fi
}

redis_like() { # PROGRAM: one that Debian's package of the same name has.
    unpacked "$1" "$1" >"$folder/$1.log" 2>&1 || { skipped "$1: no such package here, see $folder/$1.log"; return; }
    local program=$folder/root/usr/bin/$1
    [[ -x $program ]] || program=$(command -v "$1") || { skipped "$1: its package has no such program"; return; }
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec %q "$@"\n' "$libraries" "$program" >"$folder/bin/$1"
    chmod +x "$folder/bin/$1"
    KVTIER_REDIS_SERVER=$folder/bin/$1 tested "$("$folder/bin/$1" --version)" tests/redis tests/remote/test_remotes.py::TestRedis
}

three_ports() { # The first of three in a row that nobody listens on.
    python3 - <<'PYTHON'
import socket, sys
for first in range(20_480, 32_000, 4):
    try:
        for port in range(first, first + 3):
            with socket.socket() as one:
                one.bind(("127.0.0.1", port))
    except OSError:
        continue
    sys.exit(print(first))
PYTHON
}

ceph() {
    unpacked ceph radosgw ceph-mon ceph-osd ceph-common curl >"$folder/ceph.log" 2>&1 ||
        { skipped "Ceph: no such packages here, see $folder/ceph.log"; return; }
    export AWS_ACCESS_KEY_ID=kvtier-test AWS_SECRET_ACCESS_KEY=not-a-secret
    coproc gateway { "$here/ceph.sh" "$folder/ceph" "$(three_ports)" "$folder/root" 2>"$folder/gateway.log"; }
    local endpoint='' ends=${gateway[1]} gateway_pid=$gateway_PID
    read -r endpoint <&"${gateway[0]}" || { skipped "Ceph: the gateway does not start here, see $folder/gateway.log"; return; }
    KVTIER_S3_ENDPOINT=$endpoint tested "Ceph's object gateway" tests/object tests/remote/test_remotes.py::TestObject
    exec {ends}>&-
    wait "$gateway_pid" || true
}

if ! command -v apt-get dpkg >/dev/null; then
    skipped "all of Debian's servers: apt-get and dpkg are not here"
elif ! prepared >"$folder/apt.log" 2>&1; then
    skipped "all of Debian's servers: no packages are to be had, see $folder/apt.log"
else
    redis_like valkey-server
    redis_like redis-server
    ceph
fi
printf '\n'
printf '==> %s\n' "${told[@]}"
exit "$failed"
