#!/usr/bin/env bash
# `unpacked.sh FOLDER PACKAGE…`: unpack Debian's packages, and what they need and is not installed, into FOLDER/root.
#
# Nothing is installed, and nobody has to be root. The lists of packages are the folder's own.
set -euo pipefail
mkdir -p "$1"/{lists,cache/archives}/partial "$1/root"
folder=$(realpath "$1")
shift
apt() {
    apt-get --quiet=2 -o Debug::NoLocking=1 -o Dir::State::Lists="$folder/lists" -o Dir::Cache="$folder/cache" \
        -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 "$@"
}
apt update
apt --yes --no-install-recommends --download-only install "$@" >/dev/null
for package in "$folder"/cache/archives/*.deb; do
    dpkg -x "$package" "$folder/root"
done
rm -rf "${folder:?}"/{lists,cache}
