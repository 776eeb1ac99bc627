#!/usr/bin/env bash
# compute-sanitizer over whole models on the host placement and over the kernels' own tests.
# Usage, from the checkout's root: PYTHONPATH=.:runtime tests/gpu/sanitize.sh [models|kernels]...
# Graphs that launch graphs cannot be watched; their nodes are the same kernels.
set -uo pipefail
python=${PYTHON:-python3}
failed=0

check() { # tool command...
  local tool=$1
  shift
  local log
  log=$(timeout "${SANITIZE_TIMEOUT:-600}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
    --print-limit 5 "$@" 2>&1)
  local status=$?
  echo "$tool: status $status: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|passed|steps' <<<"$log" | tr '\n' ' ')"
  if [ $status -ne 0 ]; then
    grep -E '^=========' <<<"$log" | head -40
    failed=1
  fi
}

for part in "${@:-models kernels}"; do
  for name in $part; do
    case $name in
      models)
        for model in "llama bf16" "qwen3-moe fp16" "gemma2 bf16"; do
          for tool in memcheck racecheck synccheck; do
            # shellcheck disable=SC2086
            check $tool "$python" -m tests.gpu.serve_once $model host
          done
        done
        ;;
      kernels)
        for tool in memcheck racecheck; do
          check $tool "$python" -m pytest -q -p no:cacheprovider -o addopts= tests/gpu/test_kernels.py \
            -k "bf16 and ((decode_attention and 16-False and 256) or (prefill_attention and 80) or (gemv and 137) or (greedy and 1000) or (experts and 160))"
        done
        ;;
    esac
  done
done
exit $failed
