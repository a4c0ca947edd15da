#!/usr/bin/env bash
# Makes what only engines and servers may know, as files in ./secrets, or in the folder that is given:
#
#   seal-keys         the key that chunks are encrypted with before they leave a machine
#   valkey-password   what engines show to Valkey
#   valkey-users      Valkey's users: the engines' may do what a tier needs, below its prefix; `watch` may look at figures
#
# Needs bash and coreutils. It replaces nothing: with other keys, all that is stored would be misses.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$here/secrets}

random_hex() { od -An -vtx1 -N32 /dev/urandom | tr -d ' \n'; }

mkdir -m 700 "$folder" || { echo "secrets that are there already are kept: remove $folder first" >&2; exit 1; }
umask 077
random_hex >"$folder/seal-keys"
random_hex >"$folder/valkey-password"
hash=$(sha256sum "$folder/valkey-password" | cut -d ' ' -f 1)
umask 022 # Valkey is not root in its container; of the password there is only the hash.
cat >"$folder/valkey-users" <<USERS
user default off
user watch on nopass -@all +ping +info
user kvtier on #$hash ~kvtier/* -@all +ping +exists +get +set +unlink
USERS
