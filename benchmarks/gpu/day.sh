#!/bin/bash
# Measure everything that is claimed about a GPU, in the order of its worth, within a number of seconds.
#
#   OUT=results bash benchmarks/gpu/day.sh SECONDS [PART...]
#
# PART is one of the names below, by default all. Results come to OUT as they are measured: PART.json,
# log.txt, summary.md. A second call with the same OUT continues where the first one ended.
#
# PYTHON   the interpreter (python3)
# WHEELS   a folder of wheels that the interpreter lacks; they are installed next to it, not into it
# SMOKE    set: the smallest sizes, also without a GPU
# TOKENS   length of the long sequence (32768)
set -u
cd "$(dirname "$0")/../.." || exit 1

budget=${1:?usage: day.sh SECONDS [PART...]}
shift
wanted=" ${*:-tests correctness planner attention ceilings gemm choices loss host layers dw speed trainer offload float8 conv lora long} "
OUT=${OUT:-outputs/gpu}
PYTHON=${PYTHON:-python3}
started=$SECONDS
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
log=$OUT/log.txt
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export XDG_CACHE_HOME=$OUT # choices are measured today

say() { echo "[$((SECONDS - started)) s] $*" | tee -a "$log"; }

if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl 2>&1 | tee -a "$log"
  export PYTHONPATH=$PYTHONPATH:$site
fi
command -v nvidia-smi >/dev/null && nvidia-smi --format=csv,noheader \
  --query-gpu=name,memory.total,driver_version,clocks.sm,clocks.max.sm,power.limit 2>&1 | tee -a "$log"

# measure SCRIPT SECONDS PART...: those of the parts that are wanted, never longer than what is left.
# A case that broke the process (any status but done, faults, killed by `timeout`) is left out, and the rest resumed.
measure() {
  local script=$1 limit=$2 parts="" part left status attempt
  shift 2
  for part in "$@"; do
    [[ $wanted == *" $part "* ]] && parts+=" $part"
  done
  [ -n "$parts" ] || return
  for attempt in 1 2 3; do
    left=$((budget - SECONDS + started - 5))
    if ((left < 10)); then
      say "$script$parts: no time left"
      return
    fi
    ((limit > left)) && limit=$left
    say "$script$parts: at most $limit s"
    # shellcheck disable=SC2086 # parts are words
    timeout -k 5 "$limit" "$PYTHON" "benchmarks/gpu/$script.py" $parts --out "$OUT" --resume \
      --seconds $((limit - 5)) --tokens "${TOKENS:-32768}" ${SMOKE:+--smoke} >>"$log" 2>&1
    status=$?
    say "$script$parts: exit code $status"
    case $status in 0 | 2 | 4 | 124 | 137) return ;; esac
  done
}

# tests/test_gpu.py, each technique once; it needs pytest and none of its plugins.
if [[ $wanted == *" tests "* ]] && "$PYTHON" -c "import pytest" 2>/dev/null; then
  timeout -k 5 90 "$PYTHON" -m pytest -o addopts= -o filterwarnings= --noconftest -p no:cacheprovider \
    --import-mode=importlib -q tests/test_gpu.py 2>&1 | tail -n 30 | tee -a "$log"
fi
# What is only checked, or only counts its own bytes, shares the GPU.
measure kernels 150 correctness &
measure training 180 planner &
wait
# What is timed has it alone.
measure models 40 attention
measure gemm 130 ceilings gemm
measure gemm 60 choices
measure layers 70 loss
measure layers 60 host layers
measure layers 30 dw
measure training 120 speed
measure models 30 trainer
measure models 30 offload
measure models 80 float8
measure models 20 conv
measure models 40 lora
measure models 90 long
"$PYTHON" benchmarks/gpu/claims.py "$OUT" 2>&1 | tee -a "$log"
say "done: $OUT/summary.md"
