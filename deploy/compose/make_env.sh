#!/bin/sh
# Write new keys into .env and generated/ beside this script, once. The script does not print them. Clients use the access
# key or the token in .env (docs/access.md).
set -eu
[ $# -eq 0 ] || { sed -n "2,3s/^# //p" "$0"; exit 2; } >&2
cd "$(dirname "$0")"
umask 077
for each in generated .env; do
  [ ! -e "$each" ] || { echo "$PWD/$each exists: remove it first to make new keys" >&2; exit 1; }
done
mkdir generated
hex() { od -An -N"$1" -tx1 /dev/urandom | tr -d ' \n'; }
admin=$(hex 24)
secret=$(hex 20)
cat > .env <<END
TORCHMOOR_SESSION_KEYS=k0:$(hex 32)
TORCHMOOR_ACCESS_KEYS=AKIA$(hex 8 | tr a-f A-F):$(hex 20)
TORCHMOOR_TOKENS=client:$(hex 20)
TORCHMOOR_ADMIN_TOKEN=$admin
VALKEY_PASSWORD=$(hex 24)
S3_SECRET=$secret
GRAFANA_PASSWORD=$(hex 12)
END
printf '%s' "$admin" > generated/admin-token
cat > generated/s3.json <<END
{"identities": [{"name": "torchmoor", "credentials": [{"accessKey": "torchmoor", "secretKey": "$secret"}], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
END
# The containers' users read these files; the folder keeps other users of this machine out.
chmod 644 generated/*
echo "wrote $PWD/.env and $PWD/generated"
