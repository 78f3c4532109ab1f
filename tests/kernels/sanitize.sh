#!/usr/bin/env bash
# Builds the C++ kernels with AddressSanitizer and UndefinedBehaviorSanitizer and runs their tests on that build, and the
# thread pool, sampling and the progress of attention under ThreadSanitizer. The build emulates the instruction that
# AVX-VNNI adds to AVX2, so that any processor tests that level. Needs g++ (or $CXX) and the environment's python (or
# $PYTHON).
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
CXX=${CXX:-g++}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

flags=(-std=c++17 -fPIC -DPJ_EMULATE_AVX_VNNI -ffp-contract=off -fno-math-errno -w -g1 -pthread)
# -O1: the register tiles need inlining, and the tests must end within a minute.
for source in kernels/cpu/*.cpp; do
  "$CXX" "${flags[@]}" -O1 -fsanitize=address,undefined -fno-sanitize-recover=all \
    -c "$source" -o "$work/$(basename "$source").o" &
done
"$CXX" "${flags[@]}" -O1 -fsanitize=thread -Ikernels/cpu tests/kernels/pool_race.cpp \
  kernels/cpu/{pool,sample,memory,ops_scalar}.cpp -o "$work/race" &
"$CXX" "${flags[@]}" -O1 -fsanitize=thread -Ikernels/cpu tests/kernels/progress_race.cpp -o "$work/progress" &
for job in $(jobs -p); do wait "$job"; done
"$CXX" -shared -fsanitize=address,undefined -pthread "$work"/*.o -o "$work/_cpu.so"

"$work/race"
"$work/progress"

# Python itself is not instrumented: its runtime goes first, and what it never frees is not our leak.
runtime=$("$CXX" -print-file-name=libasan.so):$("$CXX" -print-file-name=libubsan.so)
LD_PRELOAD=$runtime ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PENJING_CPU_LIBRARY=$work/_cpu.so \
  "$PYTHON" -m pytest -q -n 2 -p no:cacheprovider -m "" \
  tests/kernels/test_cpu_linear.py tests/kernels/test_cpu_attention.py tests/kernels/test_decoder_step.py \
  tests/kernels/test_kv_cache_int8.py tests/kernels/test_kv_cache_float16.py tests/kernels/test_kv_cache_bfloat16.py tests/kernels/test_int4_linear.py tests/kernels/test_half_int4.py \
  tests/kernels/test_stepped.py tests/kernels/test_levels_agree.py \
  tests/kernels/test_turned_pages.py tests/kernels/test_key_blocks.py tests/kernels/test_choice_of_blocks.py tests/kernels/test_low_rank.py tests/kernels/test_row_pages.py tests/kernels/test_activation.py tests/kernels/test_attention_gate.py \
  tests/serve/sampling/test_choice.py tests/serve/sampling/test_hostile_logits.py \
  --deselect tests/kernels/test_cpu_attention.py::test_pages_beyond_two_billion_elements "$@"
