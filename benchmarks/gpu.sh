#!/usr/bin/env bash
# What a GPU alone can show, by one command:
#
#     [WHEELS=DIR] [MODEL=DIR_OR_GGUF] [PYTHON=python3] [OUT=DIR] benchmarks/gpu.sh
#
# It makes a virtual environment, tests the compiled sums on the GPU, times the analysis beside a plain pass in two
# precisions, and analyses the model. With WHEELS, a folder of wheels, and MODEL, nothing is looked up on any network.
# OUT takes the logs, the timings as JSON and the run; record.statistics in its run.json must be "compiled".
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
out=$(realpath -m "${OUT:-$root/out/gpu}")
wheels=${WHEELS:+$(realpath "$WHEELS")}
model=${MODEL:-smollm2-135m}
[ ! -e "$model" ] || model=$(realpath "$model")
cd "$root"
mkdir -p "$out"
exec > >(tee "$out/gpu.log") 2>&1

[ -x "$out/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$out/venv"
python=$out/venv/bin/python
if [ -n "$wheels" ]; then
    # The build backend comes from the folder too: without isolation nothing else is asked for it.
    "$python" -m pip install --no-index --find-links "$wheels" "setuptools>=77"
    "$python" -m pip install --no-index --find-links "$wheels" --no-build-isolation -e . pytest pytest-timeout beartype
    export HF_HUB_OFFLINE=1
else
    "$python" -m pip install -e . pytest pytest-timeout beartype
fi

"$python" - <<'PYTHON'
import torch

assert torch.cuda.is_available(), "torch sees no GPU"
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), torch.cuda.mem_get_info())
try:
    import triton
    print("triton", triton.__version__)
except ImportError:
    print("no triton: sums are taken eagerly")
PYTHON

failed=0
"$python" -m pytest -m "not real or exhaustive" tests/analysis/test_kernel.py tests/analysis/test_compiled.py || failed=1
for dtype in float32 bfloat16; do
    "$python" -m benchmarks.overhead "$model" --device cuda --dtype "$dtype" --out "$out/overhead-$dtype.json" ||
        failed=1
done
"$python" run_analysis.py analyze "$model" --device cuda --out "$out/run" || failed=1
"$python" -c 'import json, sys; print("statistics:", json.load(open(sys.argv[1]))["record"]["statistics"])' \
    "$out/run/run.json" || failed=1
exit "$failed"
