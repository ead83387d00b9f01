#!/usr/bin/env bash
# All that docs/gpu_results.md holds, on one GPU host with the real DeepEP: tests and measurements, each with a limit.
#
#   bash scripts/gpu_checks.sh [FOLDER]     # results go to FOLDER (gpu_checks)
#   SECONDS_LEFT=600 PARTS=checks bash scripts/gpu_checks.sh    # no longer than that, without the timings
#   ONLY='bench2|validate-.' bash scripts/gpu_checks.sh         # these jobs, by the names of their files
#
# Timings come first, alone on their GPUs; then tests, several at once on each GPU. From four GPUs on the first two are
# the timings' own and the tests run beside them. With one GPU the measurements of two ranks are left out.
set -u
cd "$(dirname "$0")/.." || exit
out=${1:-gpu_checks}
mkdir -p "$out"
limit=${SECONDS_LEFT:-900}
gpus=$(nvidia-smi -L | wc -l)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" NCCL_MULTI_RANK_GPU_ENABLE=1 EP_DISABLE_GIN=1
pytest=(python3 -m pytest --noconftest -q -s -p no:cacheprovider)
two=(python3 -m torch.distributed.run --standalone --nproc-per-node 2)

# run SECONDS NAME COMMAND...: into NAME.txt, within what is left of the whole
run() {
    local most=$1 file=$out/$2.txt left=$((limit - SECONDS)) begin=$SECONDS
    shift 2
    [[ ${file##*/} =~ ^(${ONLY:-.*})\.txt$ ]] || return
    if [ "$left" -lt 10 ]; then echo "[no time left for: $*]" >"$file"; return; fi
    timeout "$((left < most ? left : most))" "$@" >"$file" 2>&1
    echo "[status $? after $((SECONDS - begin)) s: $*]" >>"$file"
}

on() { export CUDA_VISIBLE_DEVICES=$1; }
small() {
    export MCORE_DEEPEP_V2_MODE=direct MCORE_DEEPEP_V2_NUM_SMS=8 MCORE_DEEPEP_V2_NUM_QPS=17
    export MCORE_DEEPEP_V2_CPU_TIMEOUT_SECS=20 MCORE_DEEPEP_V2_GPU_TIMEOUT_SECS=20 MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK=512
}

# From four GPUs on, with both parts: the first two for timings, the others for tests
parts=${PARTS:-timings checks}
apart=$([ "$gpus" -gt 3 ] && [ "$parts" = "timings checks" ] && echo 2 || echo 0)
last=$(((apart > 0 ? apart : gpus) - 1))
timings() {
    if [ "$gpus" -gt 1 ]; then (
        on 0,1
        export MCORE_DEEPEP_V2_MODE=direct MCORE_DEEPEP_V2_NUM_SMS=tune
        run 180 layouts2 "${two[@]}" scripts/gpu_layouts.py
        for shape in 0 1; do
            run 90 "megatron2-$shape" "${two[@]}" scripts/gpu_megatron.py --shape "$shape" --seconds 85
        done
        export MCORE_DEEPEP_V2_NUM_SMS=24
        run 120 fp8_dispatch2 "${two[@]}" scripts/gpu_fp8_dispatch.py
        run 90 bench2 "${two[@]}" -m megatron_moe_v2 bench --device cuda --tokens 4096 --experts 128 --report "$out/bench2.md"
    ); fi
    (on 0; run 120 layouts1 python3 scripts/gpu_layouts.py --profile; run 40 doctor python3 -m megatron_moe_v2 doctor) &
    [ "$gpus" -gt 1 ] || wait
    (
        on "$last"
        run 60 fp8_slabs python3 scripts/gpu_fp8_slabs.py
        run 120 fp8_dispatch1 python3 scripts/gpu_fp8_dispatch.py
        for shape in 0 1; do
            run 90 "megatron1-$shape" python3 scripts/gpu_megatron.py --shape "$shape" --seconds 85
        done
    ) &
    wait
}

# The GPU of a stream of tests: the first has one to itself
of() { on $((apart + ($1 > 0 && gpus > 1 ? 1 + ($1 - 1) % (gpus - apart - 1) : 0))); }

checks() {
    # What the first measures is the device's free memory
    (of 0; run 300 sleep "${pytest[@]}" tests/test_gpu_sleep.py; run 400 gpu "${pytest[@]}" tests/test_gpu.py) &
    [ "$gpus" -gt 1 ] || wait
    (of 1; run 400 graphs "${pytest[@]}" tests/test_gpu_graphs.py tests/test_gpu_fp8.py) &
    (of 2; run 400 fp8 "${pytest[@]}" tests/test_gpu_fp8_dispatch.py) &
    (of 3; run 400 faults "${pytest[@]}" tests/test_gpu_faults.py) &
    (of 4; run 400 megatron "${pytest[@]}" -m "gpu and megatron" tests/test_gpu_megatron.py) &
    (of 5; run 400 tools "${pytest[@]}" -m gpu tests/test_plan_gpu.py tests/test_telemetry.py tests/test_bench_report.py
        run 100 kernels "${pytest[@]}" tests/test_kernels.py) &
    (of 6; small; for ranks in 1 2 4; do
        run 90 "validate-$ranks" python3 -m torch.distributed.run --standalone --nproc-per-node "$ranks" examples/validate.py \
            --expect-backend deepep_v2 --hidden 1024 --experts 32 --steps 10 --timeout 80
    done) &
    wait
}

for part in $parts; do
    "$part" &
    [ "$apart" -gt 0 ] || wait
done
wait
tail -qn 1 "$out"/*.txt
