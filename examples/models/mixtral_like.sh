#!/usr/bin/env bash
# A model like Mixtral 8x7B: eight large experts, two for each token, grouped-query attention.
#
#   SMALL=1 examples/models/mixtral_like.sh RUN_DIR [FLAGS, which win]
#
# launch.sh says what the full size needs. That was validated by Megatron's and our own checks of
# flags, and never run. For 4 to 8 nodes of 8 GPUs.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

model=(
    --group-query-attention
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.02
    --rotary-base 1000000
    --norm-epsilon 1e-5
)
if [[ -n "${SMALL:-}" ]]; then
    size=(
        --num-layers 2
        --hidden-size 64
        --ffn-hidden-size 224
        --num-attention-heads 4
        --num-query-groups 2
        # Twice the slots that eight experts need: each is on two nodes at least.
        --resilient-slots-per-rank 4
    )
else
    # Every pipeline stage has two nodes of eight: an expert whose replicas are on both survives the
    # loss of either. Expert parallelism follows the nodes: 16 ranks of 64 share the 8 experts.
    size=(
        --num-layers 32
        --hidden-size 4096
        --ffn-hidden-size 14336
        --num-attention-heads 32
        --num-query-groups 8
        --pipeline-model-parallel-size 4
        --global-batch-size 256
        --lr 1.2e-4
        --min-lr 1.2e-5
        --recompute-granularity selective
        --recompute-modules moe
        --resilient-slots-per-rank 2
    )
fi
launch "${1:?folder of the run}" "${model[@]}" "${size[@]}" "${@:2}"
