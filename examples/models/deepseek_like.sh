#!/usr/bin/env bash
# A model like DeepSeek-V3 (arXiv 2412.19437): latent attention, a shared expert beside many small
# ones, sigmoid scores whose bias balances the load, routing limited to some groups of experts, and
# first layers without experts.
#
#   SMALL=1 examples/models/deepseek_like.sh RUN_DIR [FLAGS, which win]
#
# launch.sh says what the full size needs. That was validated by Megatron's and our own checks of
# flags, and never run. For 32 to 64 nodes of 8 GPUs. Left out: multi-token prediction, whose experts
# no elastic run can refill, and FP8, with which there are no replicas.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

model=(
    --rotary-base 10000
    --norm-epsilon 1e-6
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-topk-scaling-factor 2.5
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --no-gradient-accumulation-fusion # chunks of overlap add gradients up themselves
)
if [[ -n "${SMALL:-}" ]]; then
    # Plain attention: without a GPU Megatron has no latent attention.
    size=(
        --num-layers 3
        --moe-layer-freq "([0]+[1]*2)"
        --hidden-size 64
        --ffn-hidden-size 192
        --num-attention-heads 4
        --num-experts 16
        --moe-router-topk 4
        --moe-router-num-groups 4
        --moe-router-group-topk 2
        --moe-ffn-hidden-size 32
        --moe-shared-expert-intermediate-size 32
        --resilient-slots-per-rank 8
        --resilient-checkpoint-experts 4
        --resilient-overlap fixed
    )
else
    # 61 layers in eight stages, with fewer where the output layer is. At 64 nodes a stage has eight
    # of them, and its 64 ranks hold 512 slots for 256 experts: two of each.
    size=(
        --num-layers 61
        --moe-layer-freq "([0]*3+[1]*58)"
        --hidden-size 7168
        --ffn-hidden-size 18432
        --num-attention-heads 128
        --multi-latent-attention
        --qk-layernorm
        --rope-type rope # YaRN comes after pretraining
        --q-lora-rank 1536
        --kv-lora-rank 512
        --qk-head-dim 128
        --qk-pos-emb-head-dim 64
        --v-head-dim 128
        --num-experts 256
        --moe-router-topk 8
        --moe-router-num-groups 8
        --moe-router-group-topk 4
        --moe-ffn-hidden-size 2048
        --moe-shared-expert-intermediate-size 2048
        --init-method-std 0.006
        --pipeline-model-parallel-size 8
        --decoder-first-pipeline-num-layers 8
        --decoder-last-pipeline-num-layers 5
        --global-batch-size 15360
        --lr 2.2e-4
        --min-lr 2.2e-5
        --recompute-granularity full
        --recompute-method uniform
        --recompute-num-layers 1
        --resilient-slots-per-rank 8
        # A save has a quarter of the experts: all of them in four saves.
        --resilient-checkpoint-experts 64
        --resilient-overlap auto
    )
fi
launch "${1:?folder of the run}" "${model[@]}" "${size[@]}" "${@:2}"
