#!/bin/sh
# Builds a release from this clone's commit: the wheels of all members, the same bit for bit each time; where a
# Docker engine answers, the images; and an SBOM of each (CycloneDX). docs/operations/releasing.md.
#
#   deploy/release.sh [--wheels] [OUT]   --wheels: nothing else. OUT: a new folder, default dist/VERSION
#
#   TRIPTYCH_PYTHON   Python that makes the tools' environment (default: python3), of the packages in
#                     deploy/release-tools.txt; it serves itself where it has hatchling and only wheels are wanted
#   TRIPTYCH_ENGINE   cpu (default) or cuda: the engine in the image
#   TRIPTYCH_WHEELS   an image of wheels for the images' build, as in docs/guide/docker.md
set -eu
umask 022
LC_ALL=C
export LC_ALL
root=$(cd -- "$(dirname -- "$(readlink -f -- "$0")")/.." && pwd -P)
only_wheels=
[ "${1-}" != --wheels ] || { only_wheels=1; shift; }
version=$("$root/triptych" --version)
version=${version#triptych }
revision=$(git -C "$root" rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct)
export SOURCE_DATE_EPOCH
mkdir -p -- "${1:-$root/dist/$version}"
out=$(cd -- "${1:-$root/dist/$version}" && pwd -P)
[ -z "$(ls -A "$out")" ] || { echo "release: $out is not empty" >&2; exit 1; }
git -C "$root" diff --quiet HEAD || echo "release: changes that are not committed are left out" >&2

python=${TRIPTYCH_PYTHON:-python3}
case $python in */*) python=$(cd -- "$(dirname -- "$python")" && pwd)/$(basename -- "$python") ;; esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
mkdir "$work/source"
git -C "$root" archive "$revision" | tar -x -C "$work/source"
cd "$work/source"

if [ -z "$only_wheels" ] || ! "$python" -c 'import hatchling' 2>/dev/null; then
    "$python" -m venv "$work/tools"
    python=$work/tools/bin/python
    "$python" -m pip install -q --disable-pip-version-check -r deploy/release-tools.txt
fi
for member in libs/* services/*; do
    (cd "$member" && "$python" -m hatchling build -t wheel -d "$out" >/dev/null)
done
(cd "$out" && sha256sum ./*.whl >SHA256SUMS && cat SHA256SUMS)
[ -z "$only_wheels" ] || exit 0

sbom() { "$python" -m cyclonedx_py "$@" --output-reproducible --validate; }
# What the members may install: of the images, which hold a part of it, more is known.
sbom requirements --pyproject libs/common/pyproject.toml -o "$out/triptych.cdx.json" constraints.txt
if ! docker version >/dev/null 2>&1; then
    echo "release: no Docker engine answers, so no images are built" >&2
    exit 0
fi
# For the images' Python, which lists its own packages.
"$python" -m pip install -q --disable-pip-version-check --target "$work/sbom" --python-version 3.11 \
    --only-binary :all: -r deploy/release-tools.txt
engine=${TRIPTYCH_ENGINE:-cpu}
for target in gateway cache_store engine demo_model; do
    image=triptych-$target:$version
    docker build -q --target "$target" -f deploy/docker/Dockerfile -t "$image" \
        --build-arg ENGINE="$engine" --build-arg WHEELS="${TRIPTYCH_WHEELS:-scratch}" \
        --build-arg SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" \
        --label org.opencontainers.image.title="triptych-$target" \
        --label org.opencontainers.image.version="$version" \
        --label org.opencontainers.image.revision="$revision" \
        --label org.opencontainers.image.created="$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)" \
        --label org.opencontainers.image.licenses=Apache-2.0 .
    # Triton compiles while a CUDA engine runs. Nothing else needs a compiler, or root.
    [ "$target-$engine" = engine-cuda ] || docker run --rm --network none --entrypoint sh "$image" -c \
        '! command -v cc gcc g++ c++ clang' || { echo "release: $image holds a compiler" >&2; exit 1; }
    [ "$(docker run --rm --network none --entrypoint id "$image" -u)" != 0 ] \
        || { echo "release: $image runs as root" >&2; exit 1; }
    docker run --rm --network none --entrypoint python -v "$work/sbom:/sbom:ro" -e SOURCE_DATE_EPOCH "$image" -c '
import runpy, sys
sys.path.insert(0, "/sbom")
sys.argv[1:] = ["environment", "--output-reproducible", "--validate", sys.executable]
runpy.run_module("cyclonedx_py", run_name="__main__")' \
        >"$out/triptych-$target.cdx.json"
    docker image inspect -f "$image {{.Id}} {{.Size}} bytes, {{len .RootFS.Layers}} layers" "$image" \
        | tee -a "$out/IMAGES"
done
