#!/usr/bin/env bash
# Builds the image of the Dockerfile without a daemon or a registry, and trains in it: the weights must have the hash that they have here. Then the pods of a
# manifest run in it, as processes in namespaces (small_kubelet.py), and one of them is lost.
#
#   tests/launch/kubernetes/build_image.sh FOLDER [OPTION OF BUILDAH...]
#   tests/launch/kubernetes/build_image.sh FOLDER --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu      # small
#
# Needs root on a Debian with buildah and mmdebstrap, the network for Debian's packages and PyPI's, and 5 GB in FOLDER (torch for CPUs; 15 with CUDA). In the place
# of python:3.11-slim-bookworm, which only a registry has, stands a Debian 12 of the smallest variant with its own Python 3.11: the same release of the
# same system, another build of the interpreter. Options are for machines of their own kind, as --volume for certificates or a pip.conf.
# PYTHON names the interpreter whose environment the hash is compared with (.venv/bin/python).
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd); shift
root=$(cd "$(dirname "$0")/../../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
name=docker.io/library/python:3.11-slim-bookworm
# Layers are whole copies (vfs): overlays are not allowed everywhere.
build() { command=$1; shift; buildah --storage-driver vfs --root "$folder/images" --runroot "$folder/run" "$command" "$@"; }

if ! build inspect --type image "$name" > /dev/null 2>&1; then
    # shellcheck disable=SC2016
    mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-pip,python-is-python3 \
        --customize-hook='rm "$1"/usr/lib/python3.11/EXTERNALLY-MANAGED' bookworm "$folder/base.tar"
    base=$(build from scratch)
    build add --quiet "$base" "$folder/base.tar" /
    build commit --quiet --rm "$base" "$name"
    rm "$folder/base.tar"
fi

# What is sent to the build is what git would send: the Dockerfile, the pinned packages, and the wheel of this tree.
context=$folder/context
rm -rf "$context" && mkdir -p "$context/requirements"
cp "$root/Dockerfile" "$root/.dockerignore" "$context"
cp "$root/requirements/base.txt" "$context/requirements"
(cd "$root" && "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$context/dist" .)
build bud --isolation chroot --pull-never --tag phalanx:built "$@" "$context"

pod=$(build from --pull-never phalanx:built)
trap 'build rm "$pod" > /dev/null' EXIT
in_image() { build run --isolation chroot "$pod" -- "$@"; }
in_image python -m phalanx pod --help > /dev/null
in_image sh -c 'test "$(id -u):$(id -g)" = 1000:1000 && test "$PWD" = /home/phalanx'

# The same three steps there and here.
# shellcheck disable=SC2016
train='set -e; mkdir "$0"; cd "$0"; seq 40000 > words.txt
    $1 -m phalanx data prepare words.txt --out words > /dev/null
    printf "%s\n" "[model]" layers=2 dim=32 heads=4 kv_heads=2 ffn_dim=64 "[data]" path=\"words\" "[train]" steps=3 batch_size=8 seq_len=32 \
        "[runtime]" device=\"cpu\" > tiny.toml
    $1 -m phalanx train tiny.toml --ranks 2 --json --run-dir tiny'
hash_of() { sed -n 's/.*"weights_sha256": *"\([0-9a-f]*\)".*/\1/p'; }
here=$(cd "$folder" && rm -rf trained && OMP_NUM_THREADS=1 bash -c "$train" trained "$python" | hash_of)
there=$(in_image env OMP_NUM_THREADS=1 sh -c "$train" trained python | hash_of)
echo "weights in the image: ${there:-none}; here: ${here:-none}"
test -n "$there" && test "$there" = "$here"

PHALANX_IMAGE_ROOT=$(build mount "$pod") "$python" -m pytest -q -p no:cacheprovider \
    "$root/tests/launch/kubernetes/test_replaced_pods.py" -k "lost_pod or wrong"
