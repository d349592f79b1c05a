#!/bin/sh
# Random secrets into the volumes under /secrets, one for each reader; what is there stays. Nobody has to invent one,
# and no service sees another's.
set -eu
umask 077

# make FILE COMMAND...: FILE appears whole or not at all.
make() {
    file=$1
    shift
    [ -s "$file" ] && return
    "$@" >"$file.new"
    mv "$file.new" "$file"
    echo "made $file"
}

hex() { od -An -vtx1 -N "$1" /dev/urandom | tr -d ' \n'; }
raw() { head -c "$1" /dev/urandom; }
nats_variables() { printf 'JETSTREAM_KEY: "%s"\n' "$(hex 32)"; }

make /secrets/nats/variables.conf nats_variables
make /secrets/site/variables.conf nats_variables
python /opt/pdq/share/make_site.py edge /secrets/nats /secrets/site
make /secrets/kv/key raw 32
make /secrets/grafana/admin_password hex 16
# Grafana's own user reads it; its volume is mounted nowhere else.
chmod 0755 /secrets/grafana
chmod 0444 /secrets/grafana/admin_password
