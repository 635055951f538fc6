#!/bin/sh
# Run Python with the null GPU in place of a real one:   with.sh ENVIRONMENT -m pytest tests/null_gpu
root=$(cd "$(dirname "$0")/../.." && pwd)
environment=$(cd "$1" && pwd)
shift
export LD_PRELOAD="$environment/null-gpu/libcuda.so.1" LD_LIBRARY_PATH="$environment/null-gpu" TRITON_LIBCUDA_PATH="$environment/null-gpu"
export OMP_NUM_THREADS=1 PYTHONPATH="$root/src:$root/tests:$root"
exec "$environment/bin/python" "$@"
