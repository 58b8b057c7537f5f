#!/usr/bin/env bash
# What the vulkan backend does on a real GPU: the devices, the contract on 1 to 4 ranks, and the kernels' tests.
# Needs the vendor's Vulkan driver; in a container of NVIDIA's, NVIDIA_DRIVER_CAPABILITIES has to have `graphics`.
# Prints which device ran, and fails if it was a processor.
#
#     tests/gpu/vulkan.sh [REPORT.json]
set -euo pipefail
cd "$(dirname "$0")/../.."
report=${1:-target/vulkan.json}

cargo build --release --workspace --quiet
anyroll=target/release/anyroll
devices=$("$anyroll" doctor | sed -n '/^vulkan /,/^[a-z]/p')
echo "$devices"
if ! grep -q "kind: GPU" <<<"$devices"; then
    echo "no GPU has a Vulkan driver here: nothing was checked" >&2
    exit 1
fi
"$anyroll" conformance --backend vulkan --report "$report"
# GPUs come before processors, so that the tests' vulkan:0 is one.
cargo test --release -p anyroll-backends --lib -- vulkan reductions
