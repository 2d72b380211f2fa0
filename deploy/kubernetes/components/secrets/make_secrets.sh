#!/bin/sh
# Write new secrets into generated/ beside this script, once, for kubectl apply -k. The script does not print them. Give
# each client the token or the key of its line in generated/keys.txt (docs/access.md).
set -eu
[ $# -eq 0 ] || { sed -n "2,3s/^# //p" "$0"; exit 2; } >&2
cd "$(dirname "$0")"
umask 077
[ ! -e generated ] || { echo "$PWD/generated exists: remove it first to make new secrets" >&2; exit 1; }
mkdir generated
hex() { od -An -N"$1" -tx1 /dev/urandom | tr -d ' \n'; }
password=$(hex 24)
admin=$(hex 24)
printf 'k0:%s' "$(hex 32)" > generated/session-keys
printf '%s' "$admin" > generated/admin-token
cat > generated/keys.txt <<END
key AKIA$(hex 8 | tr a-f A-F) $(hex 20)
token client $(hex 20)
admin $admin
END
cat > generated/users.conf <<END
# Disabled but with all rights: older servers need them to read their own file.
user default off ~* &* +@all
user torchmoor on >$password ~* &* +@all -@admin -@dangerous +info
user probe on >probe resetkeys resetchannels -@all +ping
END
printf 'valkey://torchmoor:%s@valkey.torchmoor.svc.cluster.local:6379/0' "$password" > generated/journal
printf 'valkey://torchmoor:%s@valkey.torchmoor.svc.cluster.local:6379/1' "$password" > generated/queue
echo "wrote $PWD/generated"
