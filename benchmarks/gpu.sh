#!/usr/bin/env bash
# Conversion against attention kernels' prefill at the cache geometry of Qwen3-14B -> Qwen3-32B, 1k to 128k tokens, with
# random weights: nothing is downloaded. Ten minutes at most, on any CUDA GPU with 16 GiB or more:
#
#     bash benchmarks/gpu.sh                 # table, and outputs/gpu.json
#     bash benchmarks/gpu.sh --small         # on a CPU, in seconds, to see that it runs
set -euo pipefail
cd "$(dirname "$0")/.."
exec timeout 600 "${PYTHON:-python3}" -m benchmarks.gpu "$@"
