#!/usr/bin/env bash
# The rocm and ascend backends on NVIDIA GPUs, by way of the shims that forward to CUDA, NVRTC and NCCL: the contract, ZeRO 0
# to 3 and the quickstart. Needs NVIDIA's driver and a torch 2.11 for it; nothing is built here:
#
#     cargo build --release --workspace --examples --bins && tests/shims/forward/build target/shims-forward
#     tests/gpu/forward.sh [GPUS] [PROGRAMS] [SHIMS] [LOGS]
#
# GPUS is how many ranks, 1 by default; PROGRAMS the folder of anyroll, anyroll-engine and stages (target/release); SHIMS
# what tests/shims/forward/build has filled (target/shims-forward). Each step has a log, and FORWARD_LIMIT_S, 120 by default.
# FORWARD_BACKENDS and FORWARD_STEPS choose among them.
set -uo pipefail
cd "$(dirname "$0")/../.."
gpus=${1:-1}
programs=$(realpath "${2:-target/release}")
shims=$(realpath "${3:-target/shims-forward}")
logs=${4:-${OUT:-target/forward}}
mkdir -p "$logs"
logs=$(realpath "$logs")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
stages=$programs/stages
[ -x "$stages" ] || stages=$programs/examples/stages

torch=$(realpath "${ANYROLL_TORCH_LIB:-$(python3 -c 'import torch; print(torch.__path__[0] + "/lib")')}")
export ANYROLL_TORCH_LIB=$torch ANYROLL_SHIM=1 NCCL_NVLS_ENABLE=0
LD_LIBRARY_PATH=$torch$(printf ':%s' "$torch"/../../nvidia/*/lib)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH

# step NAME COMMAND...: runs it, with its output in NAME's log, and says how it went.
step() {
    local name=$1 start=$SECONDS
    shift
    if timeout --kill-after 5 "${FORWARD_LIMIT_S:-120}" "$@" >"$logs/$name.log" 2>&1; then
        echo "passed  $name, $((SECONDS - start)) s" >>"$scratch/passed"
    else
        echo "FAILED  $name, code $?, $((SECONDS - start)) s" >>"$scratch/failed"
        tail -n 25 "$logs/$name.log" | sed "s/^/$name: /"
    fi
}

# All ranks of a check that ZeRO's stages train alike to the bit, and as a CPU does, to rounding.
ranks_of_stages() {
    local backend=$1 port=$2 rank ranks=() bad=0
    for ((rank = 0; rank < gpus; rank++)); do
        "$stages" "$backend" "$rank" "$gpus" "$port" "$shims/$backend" &
        ranks+=($!)
    done
    for rank in "${ranks[@]}"; do wait "$rank" || bad=1; done
    return $bad
}
# The quickstart, held to what its config promises.
quickstart() {
    local backend=$1
    "$programs/anyroll" run "configs/rlvr_sort_$backend.yaml" --set "devices=$gpus" --output "$scratch/$backend" || return 1
    python3 - "$scratch/$backend/metrics.jsonl" <<'PYTHON'
import json, sys
steps = [json.loads(line) for line in open(sys.argv[1])]
found = [step for step in steps if "eval/pass@1" in step]
first, last = found[0], found[-1]
for name in ("eval/pass@1", "eval/greedy"):
    print(f"{name}: {first[name]:.3f} to {last[name]:.3f}")
sys.exit(last["eval/pass@1"] < 0.85)
PYTHON
}
export -f ranks_of_stages quickstart
export stages shims gpus programs scratch

# One vendor's libraries alone, and kernels that are nobody else's.
backend() {
    export ANYROLL_LIBRARIES=$shims/$1 XDG_CACHE_HOME=$scratch/cache-$1
    for what in ${FORWARD_STEPS:-doctor quickstart stages conformance}; do
        case $what in
            doctor) step "$1-doctor" "$programs/anyroll" doctor ;;
            conformance) step "$1-conformance" env ANYROLL_LOG=info "$programs/anyroll" conformance --backend "$1" --world-size "$gpus" ;;
            stages) step "$1-stages" bash -c "ranks_of_stages $1 $2" ;;
            quickstart) step "$1-quickstart" bash -c "quickstart $1" ;;
        esac
    done
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
backends=()
for name in ${FORWARD_BACKENDS:-rocm ascend}; do
    backend "$name" "$(free_port)" &
    backends+=($!)
done
wait "${backends[@]}"

for log in "$logs"/*-{conformance,stages,quickstart}.log; do
    [ ! -e "$log" ] || { echo "--- $(basename "$log" .log)"; tail -n 4 "$log"; }
done
touch "$scratch/passed" "$scratch/failed"
cat "$scratch/passed" "$scratch/failed"
[ ! -s "$scratch/failed" ]
