#!/usr/bin/env bash
# compute-sanitizer over whole models on the host placement and over the kernels' own tests, JOBS
# (default 8) runs at a time: a watched process waits most for itself, not for the GPU.
# Usage, from the checkout's root: PYTHONPATH=.:runtime tests/gpu/sanitize.sh [models|kernels]...
# Each run's output goes to a file in SANITIZE_LOGS (default: a new folder).
# Graphs that launch graphs cannot be watched; their nodes are the same kernels. Errors of calls are
# left to the programs, which check each: cuda-python asks the driver for functions it may not have.
set -uo pipefail
python=${PYTHON:-python3}
jobs=${JOBS:-8}
logs=${SANITIZE_LOGS:-$(mktemp -d)}
if ! command -v compute-sanitizer > /dev/null; then
  echo "compute-sanitizer is not on the PATH: it comes with the CUDA toolkit" >&2
  exit 1
fi
mkdir -p "$logs" && echo "each run's output: $logs"
# Names of kernels that are not ours, which the kernels' tests leave unwatched: torch's, which make
# the references in float64, and cuBLAS's. Ours are extern "C". Models are watched whole: a pointer
# of ours may be what is wrong with a kernel of cuBLAS, and racecheck breaks off with an error of its
# own where nvjet kernels are left out.
foreign=(--kernel-name-exclude 'regex=^_Z|nvjet|cutlass|xmma|cublas')

check() { # tool part name command...
  local tool=$1 part=$2 name=$3 log status unwatched=("${foreign[@]}")
  shift 3
  log=$logs/$tool-${name// /-}.log
  if [ "$part" = models ]; then unwatched=(); fi
  timeout "${SANITIZE_TIMEOUT:-600}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
    --report-api-errors no --print-limit 5 "${unwatched[@]}" "$@" > "$log" 2>&1
  status=$?
  echo "$tool, $name: status $status, $SECONDS s:" \
    "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|passed|steps' "$log" | tr '\n' ' ')"
  if [ $status -ne 0 ]; then
    grep -E '^=========' "$log" | head -40
  fi
  return $status
}

# Without this, a filter that leaves nothing to watch would look like a clean run.
for tool in racecheck memcheck; do
  check $tool kernels "a kernel with faults" "$python" -m tests.gpu.sanitizer_canary > /dev/null
  if [ $? -ne 9 ]; then
    echo "$tool did not find the faults of tests/gpu/sanitizer_canary.py: it watches nothing" >&2
    exit 1
  fi
done

failed=0
running=0
start() { # as check, beside others
  if [ $running -ge "$jobs" ]; then
    wait -n || failed=1
    running=$((running - 1))
  fi
  check "$@" &
  running=$((running + 1))
}

# The slow tool first.
for part in "${@:-models kernels}"; do
  for name in $part; do
    case $name in
      models)
        for tool in racecheck memcheck synccheck; do
          for model in "llama bf16" "qwen3-moe fp16" "gemma2 bf16"; do
            # shellcheck disable=SC2086
            start $tool models "$model" "$python" -m tests.gpu.serve_once $model host
          done
        done
        ;;
      kernels)
        for tool in racecheck memcheck; do
          for kind in "long_prefill and bf16-16 and 130" "narrow and 137-1984" \
            "decode_attention and bf16-16-0 and 256" "prefill_attention and 80" "gemv and 137" \
            "greedy and 1000" "sampling_inverts and 300 and top_p" "experts and 160"; do
            start $tool kernels "$kind" "$python" -m pytest -v -p no:cacheprovider -o addopts= \
              tests/gpu/test_kernels.py tests/gpu/test_warpgroup_kernels.py -k "bf16 and $kind"
          done
        done
        ;;
      *)
        echo "no part is named $name: models, kernels" >&2
        failed=1
        ;;
    esac
  done
done
while [ $running -gt 0 ]; do
  wait -n || failed=1
  running=$((running - 1))
done
exit $failed
