#!/bin/sh
# Make .env: .env.example with fresh secrets, readable by you alone. An existing .env is not changed.
set -eu
cd "$(dirname "$0")/.."
if [ -e .env ]; then
    echo ".env is there already: delete it first to have new secrets" >&2
    exit 1
fi
umask 077
while IFS= read -r line; do
    case $line in
        BATON_*= | *_PASSWORD=) printf '%s%s\n' "$line" "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')" ;;
        *) printf '%s\n' "$line" ;;
    esac
done <.env.example >.env
echo "made .env: docker compose up --build"
