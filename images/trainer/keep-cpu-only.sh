#!/bin/sh
# keep-cpu-only.sh SITE_PACKAGES: deletes what torch's CUDA build loads on a GPU only.
#
# libtorch itself is linked to some of CUDA's libraries and does not load without them; they stay. What is loaded by name
# when a GPU needs it goes: cuDNN's engines, the solvers, triton, device code, headers. What pip knows of the packages
# stays, so that a later installation does not bring them back.
set -eu
packages=$1
rm -rf "$packages/triton" "$packages/torch/lib/libtorch_cuda_linalg.so"
[ -d "$packages/nvidia" ] || exit 0 # a build of torch for CPUs, of TORCH_INDEX
kept=$(mktemp)
find "$packages/torch/lib" -name 'lib*.so*' -exec ldd {} + | sed -n 's,.* => \(/[^ ]*/nvidia/[^ ]*\) .*,\1,p' | xargs realpath | sort -u >"$kept"
[ -s "$kept" ] || { echo "keep-cpu-only.sh: ldd names no CUDA library of $packages/torch/lib; it is laid out in a new way." >&2; exit 1; }
find "$(realpath "$packages/nvidia")" -type f -not -name '*.py' | grep -vxFf "$kept" | xargs rm
rm "$kept"
