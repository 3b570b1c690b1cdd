#!/usr/bin/env bash
# Everything that needs a GPU, in one command of 9 minutes: no network, builds nothing, resumable by section.
#
#   bash benchmarks/gpu.sh [section ...]
#
# Sections, the most valuable first: tests predict large_3b large_7b_24 large_7b_80 early deepspeed step update disk
# sanitizer.
# Each section writes to $OUT (default: benchmarks/reports/gpu): <section>.json or .txt, its messages in <section>.log,
# and pictures of steps as .svg. $OUT/done.txt lists the finished sections, which are not run again. $OUT/failed.txt
# lists those that began but did not finish: they come after all others. A section that might not end within $LIMIT_S
# (default: 540) is left for the next call; the first one always runs; stopping one takes a minute at most.
# TINY=1 runs the same commands at sizes for a CPU, all of them anew unless there is an $OUT. SIMULATED=1 does so on the
# simulated GPU (docs/internals/simulated-gpu.md): it rehearses all sections and measures nothing. Reports name what they ran on.
# The host tier's memory is touched and pinned before a large model can train: up to 114 GiB for 7b under 24 GiB, which
# alone takes a minute or more.
set -uo pipefail
cd "$(dirname "$0")/.."
[ -z "${SIMULATED:-}" ] || TINY=1
if [ -n "${TINY:-}" ]; then
  out=${OUT:-$(mktemp -d "${TMPDIR:-/tmp}/outcore-gpu.XXXXXX")}
else
  out=${OUT:-benchmarks/reports/gpu}
fi
python=("${PYTHON:-python3}")
[ -z "${SIMULATED:-}" ] || python+=(tests/simulated_gpu/run.py)
limit_s=${LIMIT_S:-540}
export PYTHONPATH="$PWD/src:$PWD/benchmarks:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Tests that also run on a CPU use this device.
[ -n "${TINY:-}" ] && [ -z "${SIMULATED:-}" ] || export OUTCORE_TEST_DEVICE=cuda
# The project's own pytest settings would fail on a machine that lacks a plugin, or whose libraries warn.
pytest=("${python[@]}" -m pytest -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider -q -m gpu
  -o "markers=gpu: needs a GPU" -o faulthandler_timeout=100)

workers=()
if [ -z "${TINY:-}" ] && "${python[@]}" -c 'import xdist' 2>/dev/null; then workers=(-n 4); fi

if [ -z "${TINY:-}" ] && ! "${python[@]}" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "expected a GPU, but torch of $python sees none; TINY=1 tries this script out on a CPU" >&2
  exit 2
fi
mkdir -p "$out"
out=$(realpath "$out")
echo "results in $out${SIMULATED:+, of a simulated GPU: no number here is one of a GPU}"
touch "$out/done.txt" "$out/failed.txt"
if [ -z "${TINY:-}" ]; then
  cap24=24GiB cap80=80GiB
  large=(--tokens 8192 32768 --steps 3 --recorded-steps 1 --svg "$out")
  short=(--tokens 8192 --steps 3 --recorded-steps 1 --svg "$out")
  middle=(--tokens 16384 --steps 3 --recorded-steps 1 --svg "$out")
  step=(--turns 3 --steps 2 --batch-size 8 --seq-len 1024)
  update=(--repeats 5 --rules lion adamw:8bit) disk=(--nbytes 4GiB)  # other rules take longer than the section may
  predict=(--layers 8 --hidden 1024 --batch-size 16 --lengths 512 2048 --steps 2)
  tests="" sanitized="delays and window or plain_bits and gpt2 and recompute"
else
  tiny=(--layers 2 --hidden 64 --intermediate 160 --heads 2 --kv-heads 1 --vocabulary 1000 --seq-len 32)
  cap24=1MiB cap80=8MiB
  # Measuring needs this much; a plan gets only so small a share of it that weights must move.
  [ -z "${SIMULATED:-}" ] || { cap24=257MiB cap80=512MiB tiny+=(--device-share 0.01); }
  large=("${tiny[@]}" --tokens 64 128 --steps 1 --recorded-steps 1 --svg "$out")
  short=("${tiny[@]}" --tokens 64 --steps 1 --recorded-steps 1 --svg "$out")
  middle=("${short[@]}")
  step=(--turns 1 --steps 1 --layers 2 --hidden 64 --vocabulary 97 --batch-size 1 --seq-len 16)
  update=(--repeats 2 --numel 300000) disk=(--nbytes 8MiB --extent 4MiB --repetitions 1)
  predict=(--layers 2 --hidden 64 --lengths 16 --steps 1 --quick)
  tests="not delays" sanitized="plain_bits and gpt2 and recompute"
fi

failed=0
run() { # run SECTION SECONDS EXTENSION COMMAND...
  local name=$1 limit=$2 file="$out/$1.$3"
  shift 3
  [ -z "${TINY:-}" ] || limit=$((limit < 180 ? limit : 180))
  if grep -qx "$name" "$out/done.txt"; then echo "== $name: done before"; return; fi
  if ((SECONDS > 20 && SECONDS + limit > limit_s)); then echo "== $name: left for the next call"; return; fi
  echo "== $name (at $SECONDS s, $limit s at most)"
  sed -i "/^$name\$/d" "$out/failed.txt"
  echo "$name" >>"$out/failed.txt"
  # A command that is told to stop prints its results, and then gives its memory back.
  if timeout -k 60 "$limit" "$@" 2>&1 >"$file" | tee "$out/$name.log"; then
    echo "$name" >>"$out/done.txt"
    sed -i "/^$name\$/d" "$out/failed.txt"
  else
    failed=1
    echo "== $name failed or was stopped after $limit s" | tee -a "$out/$name.log"
  fi
  case $file in *.txt) tail -n 12 "$file" ;; *) [ -s "$out/$name.log" ] || cut -c1-1500 "$file" | tail -n 30 ;; esac
}

wanted=("$@")
[ ${#wanted[@]} -gt 0 ] || wanted=(tests predict large_3b large_7b_24 large_7b_80 early deepspeed step update disk sanitizer)
mapfile -t wanted < <(
  printf '%s\n' "${wanted[@]}" | grep -vxFf "$out/failed.txt"
  printf '%s\n' "${wanted[@]}" | grep -xFf "$out/failed.txt"
)
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null | tee "$out/gpu.txt" || true
# On a disk, not in memory. A folder that no process has locked was left by a call that was killed.
for left in "$PWD"/gpu-disk.*; do [ ! -d "$left" ] || flock -n "$left" rm -rf "$left"; done
scratch=$(mktemp -d "$PWD/gpu-disk.XXXXXX")
exec 9<"$scratch"
flock 9
trap 'rm -rf "$scratch"' EXIT
for section in "${wanted[@]}"; do
  case $section in
    tests) run tests 200 txt "${pytest[@]}" "${workers[@]}" tests/gpu -k "$tests" ;;
    predict)
      run predict 170 json "${python[@]}" benchmarks/predict.py --what models --precision bf16 \
        --policies keep recompute "${predict[@]}" --disk "$scratch" ;;
    large_3b)
      run large_3b 320 json "${python[@]}" benchmarks/large.py --shape 3b "${large[@]}" --device-memory $cap24 $cap80 \
        --against plain --disk "$scratch" ;;
    large_7b_24)
      run large_7b_24 340 json "${python[@]}" benchmarks/large.py --shape 7b "${middle[@]}" --device-memory $cap24 --disk "$scratch" ;;
    large_7b_80)
      run large_7b_80 300 json "${python[@]}" benchmarks/large.py --shape 7b "${middle[@]}" --device-memory $cap80 --disk "$scratch" ;;
    # Separate, since it may compile its CPU Adam first; if it is not installed, the report says so.
    deepspeed)
      run deepspeed 300 json "${python[@]}" benchmarks/large.py --shape 3b "${large[@]}" --device-memory $cap80 \
        --against deepspeed --only-against ;;
    # Updates inside backward: nothing is clipped.
    early)
      run early 150 json "${python[@]}" benchmarks/large.py --shape 3b "${short[@]}" --device-memory $cap24 --disk "$scratch" \
        --early ;;
    step) run step 150 json "${python[@]}" benchmarks/step.py "${step[@]}" --disk "$scratch" ;;
    update) run update 40 json "${python[@]}" benchmarks/cpu_update.py "${update[@]}" ;;
    disk) run disk 60 json "${python[@]}" benchmarks/disk_io.py "${disk[@]}" --folder "$scratch" ;;
    sanitizer)
      TORCH_CUDA_SANITIZER=1 run sanitizer 120 txt "${pytest[@]}" tests/gpu/test_engine_cuda.py \
        -k "$sanitized" ;;
    *) echo "unknown section '$section'" >&2; exit 2 ;;
  esac
done
exit $failed
