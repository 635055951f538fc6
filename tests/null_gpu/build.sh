#!/bin/sh
# Build the null GPU (nullgpu.c) with the CUDA headers of a virtual environment:   build.sh ENVIRONMENT
set -e
here=$(cd "$(dirname "$0")" && pwd)
site=$(echo "$1"/lib/python3*/site-packages)
out="$1/null-gpu"
mkdir -p "$out/include"
for header in cuda_fp16.h cuda_bf16.h cuda_fp8.h; do : > "$out/include/$header"; done # these are C++, and not needed
gcc -O2 -w -shared -fPIC -fvisibility=hidden -Wl,-soname,libcuda.so.1 -I"$out/include" -I"$site/nvidia/cu13/include" -I"$site/nvidia/nccl/include" \
    "$here/nullgpu.c" -o "$out/libcuda.so.1" -ldl -lpthread
ln -sf libcuda.so.1 "$out/libcuda.so"
