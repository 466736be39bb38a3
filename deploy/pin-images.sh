#!/bin/sh
# Pin third-party images by digest, in .env: the images that the tags name now are used from then on. Run it again to
# update them. It queries the registries through Docker with buildx.
set -eu
cd "$(dirname "$0")/.."
if [ ! -e .env ]; then
    echo "there is no .env: 'sh deploy/new-env.sh' makes one" >&2
    exit 1
fi
umask 077
for name in PYTHON_IMAGE PROMETHEUS_IMAGE GRAFANA_IMAGE; do
    image=$(sed -n "s/^$name=//p" .env | tail -n 1)
    [ -n "$image" ] || image=$(sed -n "s/^#$name=//p" .env.example)
    image=${image%@sha256:*}
    digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
    case $digest in
        sha256:*) ;;
        *) echo "the registry gave no digest of $image: $digest" >&2 && exit 1 ;;
    esac
    sed "/^#*$name=/d" .env >.env.new
    printf '%s=%s@%s\n' "$name" "$image" "$digest" >>.env.new
    mv .env.new .env
    echo "$name=$image@$digest"
done
