#!/usr/bin/env bash
# A whole Ceph object gateway on loopback, with its objects in memory: `ceph.sh DIR PORT [ROOT]`.
#
# It prints the gateway's address when that answers, and goes on until its standard input ends: so it ends with whoever
# started it, however that ends. DIR is emptied first, and holds all its files. It takes PORT, PORT + 1 and PORT + 2 of
# 127.0.0.1. ROOT is where Debian's packages were unpacked; without it, those of the system are used.
# AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY say who may use the gateway.
set -euo pipefail
: "${AWS_ACCESS_KEY_ID:?}" "${AWS_SECRET_ACCESS_KEY:?}"
port=$2 root=${3:+$(realpath "$3")}
rm -rf "$1"
mkdir -p "$1"
dir=$(realpath "$1")
libraries=usr/lib/$(uname -m)-linux-gnu
if [[ -n $root ]]; then
    export PATH=$root/usr/bin:$root/usr/sbin:/usr/bin:$PATH
    export LD_LIBRARY_PATH=$root/$libraries:$root/lib/$(uname -m)-linux-gnu:$root/$libraries/ceph
    export PYTHONPATH=$root/usr/lib/python3/dist-packages
fi

within() { # SECONDS COMMAND…: try until it succeeds.
    local ends=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < ends)) || { echo "ceph.sh: not in time: $*" >&2; tail -n 5 "$dir"/log/*.log >&2; return 1; }
        sleep 0.1
    done
}

ceph() { timeout 10 python3 "$root/usr/bin/ceph" "$@"; }

osd_is_up() { ceph osd stat | grep -q '1 up'; }

configure() {
    mkdir -p "$dir"/{mon,osd,rgw,run,log}
    cat >"$dir/ceph.conf" <<CONF
[global]
fsid = $1
mon initial members = a
mon host = [v2:127.0.0.1:$((port + 1)),v1:127.0.0.1:$((port + 2))]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
ms bind ipv6 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = $dir/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail warn = 0
osd objectstore = memstore
memstore device bytes = 4294967296
run dir = $dir/run
admin socket = $dir/run/\$name.asok
log file = $dir/log/\$name.log
mon cluster log file = $dir/log/cluster.log
crash dir = $dir/log
mon data = $dir/mon
osd data = $dir/osd
rgw data = $dir/rgw
osd class dir = $root/$libraries/rados-classes
erasure code dir = $root/$libraries/ceph/erasure-code
plugin dir = $root/$libraries/ceph
rgw frontends = beast endpoint=127.0.0.1:$port tcp_nodelay=1
rgw dns name = 127.0.0.1
rgw thread pool size = 32
CONF
}

key_of() { # NAME CAPABILITY…
    local name=$1
    shift
    ceph-authtool "$dir/keyring" --gen-key -n "$name" "$@"
}

start() {
    local fsid osd
    fsid=$(cat /proc/sys/kernel/random/uuid) osd=$(cat /proc/sys/kernel/random/uuid)
    configure "$fsid"
    export CEPH_CONF=$dir/ceph.conf
    ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *'
    key_of client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
    key_of osd.0 --cap mon 'allow profile osd' --cap osd 'allow *'
    key_of client.rgw.a --cap mon 'allow rw' --cap osd 'allow rwx'
    monmaptool --create --clobber --fsid "$fsid" --addv a "[v2:127.0.0.1:$((port + 1)),v1:127.0.0.1:$((port + 2))]" "$dir/monmap"
    ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
    serves ceph-mon -i a
    within 30 ceph -s
    ceph osd new "$osd"
    ceph-osd -i 0 --mkfs --osd-uuid "$osd"
    serves ceph-osd -i 0
    within 30 osd_is_up
    serves radosgw -n client.rgw.a
    within 60 curl --silent --output /dev/null "http://127.0.0.1:$port"
    radosgw-admin -n client.rgw.a user create --uid=tests --display-name=tests \
        --access-key="$AWS_ACCESS_KEY_ID" --secret="$AWS_SECRET_ACCESS_KEY"
}

serves() { # COMMAND…: run it for as long as this script runs.
    setpriv --pdeathsig KILL -- "$@" -f &
    daemons+=($!)
}

ended() {
    kill -KILL "${daemons[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$dir"
}

daemons=()
trap ended EXIT
start >"$dir/start.log" 2>&1 </dev/null || { tail -n 20 "$dir/start.log" >&2; exit 1; }
echo "http://127.0.0.1:$port"
cat >/dev/null
