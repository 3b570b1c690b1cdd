#!/usr/bin/env bash
# Everything that needs a GPU, in one command of less than 9 minutes: no network, builds nothing, resumable by section.
#
#   bash benchmarks/gpu.sh [section ...]          sections: tests sanitizer update disk step large
#
# Results go to $OUT (default: benchmarks/reports/gpu): one file per section. A section whose file is complete is skipped.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/reports/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="src:benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
scratch=$(mktemp -d ./gpu-disk.XXXXXX)
trap 'rm -rf "$scratch"' EXIT

run() { # run SECTION SECONDS COMMAND...
  local name=$1 limit=$2 file="$out/$1.txt"
  shift 2
  if [ -e "$out/$name.done" ]; then echo "== $name: done before"; return; fi
  echo "== $name"
  if timeout "$limit" "$@" 2>&1 | tee "$file"; then touch "$out/$name.done"; else echo "== $name failed" | tee -a "$file"; fi
}

wanted=("$@")
[ ${#wanted[@]} -gt 0 ] || wanted=(tests sanitizer update disk step large)
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null | tee "$out/gpu.txt" || true
for section in "${wanted[@]}"; do
  case $section in
    tests) run tests 120 "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider ;;
    sanitizer) TORCH_CUDA_SANITIZER=1 run sanitizer 90 "$python" -m pytest -q -m gpu tests/gpu/test_engine_cuda.py -k "delays or plain_bits and gpt2" -p no:cacheprovider ;;
    update) run update 40 "$python" benchmarks/cpu_update.py --repeats 5 ;;
    disk) run disk 60 "$python" benchmarks/disk_io.py --nbytes 4GiB --folder "$scratch" ;;
    step) run step 100 "$python" benchmarks/step.py --turns 5 --steps 4 --batch-size 8 --seq-len 1024 --disk "$scratch" ;;
    # 1.3 billion parameters, every state in host memory: what a 24 GiB card could not hold
    large) run large 120 "$python" benchmarks/step.py --turns 2 --steps 2 --layers 24 --hidden 2048 --batch-size 8 --seq-len 1024 --plans host --disk "$scratch" ;;
    *) echo "unknown section '$section'" >&2; exit 2 ;;
  esac
done
