#!/usr/bin/env bash
# Tests of the Triton kernels on a GPU, then their speed. Needs Python, torch, triton, numpy and
# pytest, nothing else: no SGLang, no network. Uses FlashInfer where it can be imported; wheels
# unpacked in benchmarks/gpu/wheels are found. Results go to $OUT, by default benchmarks/results.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-benchmarks/results}"
mkdir -p "$out"
export PYTHONPATH="kernels:tiers:tests:benchmarks/gpu:benchmarks/gpu/wheels${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python3}"

"$python" -c 'import torch, triton; print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)'
status=0
"$python" -m pytest -q -p no:cacheprovider -W ignore -m "not slow" --import-mode=importlib \
    tests/kernels/test_triton_decode.py tests/kernels/test_triton_quantize.py \
    tests/kernels/test_triton_extend.py tests/kernels/test_triton_flashinfer.py \
    tests/kernels/test_triton_events.py 2>&1 | tee "$out/gpu-tests.txt" || status=1
"$python" benchmarks/gpu/tiered_decode.py --json "$out/gpu-tiered-decode.json" "$@" || status=1
"$python" benchmarks/gpu/routing_events.py --json "$out/gpu-routing-events.json" || status=1
exit "$status"
