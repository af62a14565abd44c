#!/usr/bin/env bash
# Everything that is to be known of a GPU, in under eight minutes on one of 80 GB; arguments in its place try it out:
#   benchmarks/gpu.sh                 writes results/gpu_*.json
#   DEVICE=cpu TINY=1 benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
python=${PYTHON:-python}
if [ -n "${TINY:-}" ]; then
  runs=("bert-tiny 4 float32" "llama-tiny 2 bfloat16")
  adapters=(--adapters 3 --rank 4 --width 64 --repeats 2)
  repeats=2
else
  runs=("ViT-B-32 256 float32" "ViT-B-32 256 tf32" "ViT-B-32 256 bfloat16" "bert-base 128 tf32" "bert-base 128 bfloat16"
        "llama-1b 8 tf32" "llama-1b 8 bfloat16")
  adapters=()
  repeats=3
fi
for run in "${runs[@]}"; do
  read -r model batch precision <<< "$run"
  length=$([[ $model == llama* ]] && echo 512 || echo 128)
  [ -n "${TINY:-}" ] && length=16
  $python -W ignore -m benchmarks.iteration_cost --device "$device" --model "$model" --batch "$batch" --length "$length" \
    --precision "$precision" --repeats "$repeats" --steps 3 --name "gpu_${model}_${precision}"
done
$python -W ignore -m benchmarks.lora_step_cost --device "$device" "${adapters[@]}" --name gpu_lora_step_cost
