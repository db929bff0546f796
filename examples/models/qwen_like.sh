#!/usr/bin/env bash
# A model like Qwen3-30B-A3B (arXiv 2505.09388): many small experts, eight for each token, none that
# is shared, grouped-query attention with norms of queries and keys.
#
#   SMALL=1 examples/models/qwen_like.sh RUN_DIR [FLAGS, which win]
#
# launch.sh says what the full size needs. That was validated by Megatron's and our own checks of
# flags, and never run. For 2 to 4 nodes of 8 GPUs. Qwen3 balances the load over the global batch
# (global_aux_loss). Elastic runs refuse that, for it means another batch in every world; here each
# microbatch is balanced.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

model=(
    --group-query-attention
    --qk-layernorm
    --moe-router-topk 8
    --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --rotary-base 1000000
    --norm-epsilon 1e-6
    --no-gradient-accumulation-fusion # chunks of overlap add gradients up themselves
)
if [[ -n "${SMALL:-}" ]]; then
    size=(
        --num-layers 2
        --hidden-size 64
        --ffn-hidden-size 192
        --num-attention-heads 4
        --num-query-groups 2
        --kv-channels 32
        --num-experts 32
        --moe-ffn-hidden-size 24
        --resilient-slots-per-rank 20
        --resilient-checkpoint-experts 8
        --resilient-overlap fixed
    )
else
    # 32 ranks share 128 experts: four each without replicas, and room for three of every expert.
    size=(
        --num-layers 48
        --hidden-size 2048
        --ffn-hidden-size 6144
        --num-attention-heads 32
        --num-query-groups 4
        --kv-channels 128
        --num-experts 128
        --moe-ffn-hidden-size 768
        --global-batch-size 1024
        --lr 3e-4
        --min-lr 3e-5
        --recompute-granularity selective
        --recompute-modules moe
        --resilient-slots-per-rank 12
        --resilient-checkpoint-experts 32
        --resilient-overlap auto
    )
fi
launch "${1:?folder of the run}" "${model[@]}" "${size[@]}" "${@:2}"
