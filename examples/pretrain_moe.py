"""Pretrain a GPT with Mixture-of-Experts layers: Megatron's pretrain() with the plugin enabled.

Takes every flag of Megatron's GPT pretraining and the --resilient-* flags. The model comes from
the flags, or from `--spec MODULE FUNCTION`; there is no model code here. The three lines marked
`resilient` are all that a script of your own needs.

    torchrun --nproc-per-node 4 examples/pretrain_moe.py --num-experts 8 ...
"""

from dataclasses import fields
from functools import partial

import megatron_resilient  # resilient 1/3

megatron_resilient.enable()  # resilient 2/3: before the first megatron import

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def get_batch(data_iterator, vp_stage):
    """Returns one microbatch as a dict of BATCH_KEYS, each [mbs, seq] or None.

    The first tensor-parallel rank reads it and broadcasts it; context-parallel ranks keep their
    part of the sequence. Pipeline stages in the middle need nothing.
    """
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    batch = dict.fromkeys(BATCH_KEYS)
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)
        batch.update({k: v.cuda(non_blocking=True) for k, v in sample.items() if k in batch})
    if args.tensor_model_parallel_size > 1:
        batch = broadcast_batch(batch)
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def broadcast_batch(batch):
    """Sends the microbatch of tensor-parallel rank 0 to the other ranks of its group."""
    args = get_args()
    shape = (args.micro_batch_size, args.seq_length)
    types = {"loss_mask": torch.float32}
    for key in BATCH_KEYS:
        if key == "attention_mask":
            if not args.create_attention_mask_in_dataloader:
                continue
            mask_shape = (args.micro_batch_size, 1, args.seq_length, args.seq_length)
            empty = partial(torch.empty, mask_shape, dtype=torch.bool, device="cuda")
        else:
            empty = partial(torch.empty, shape, dtype=types.get(key, torch.int64), device="cuda")
        if batch[key] is None:
            batch[key] = empty()
        torch.distributed.broadcast(
            batch[key],
            mpu.get_tensor_model_parallel_src_rank(),
            group=mpu.get_tensor_model_parallel_group(),
        )
    return batch


def loss_func(loss_mask, token_losses):
    """Sums the token losses that count.

    Returns:
        (loss summed over tokens, number of tokens, {"lm loss": [loss, tokens]} for the log).
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(token_losses.reshape(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for is_bad, name in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"{name} loss in the forward pass",
                tolerance=0.0,
                fatal=True,
            )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def forward_step(data_iterator, model, return_schedule_plan=False):
    """Runs the model on one microbatch; with the 1F1B all-to-all overlap, plans it only."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def dataset_config(args):
    """Builds the dataset configuration from the flags of the same names."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    values = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": get_tokenizer(),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
    }
    config_class = GPTDatasetConfig
    if args.fim_data:
        config_class = GPTFIMDatasetConfig
        values["fim_extra_tokens"] = {
            name: getattr(args, f"fim_{name}_token")
            for name in ("prefix", "middle", "suffix", "pad", "eod")
        }
    for field in fields(config_class):
        if field.init and field.name not in values and hasattr(args, field.name):
            values[field.name] = getattr(args, field.name)
    return config_class(**values)


def datasets_provider(num_samples, vp_stage=None):
    """Builds the (train, valid, test) datasets with at least `num_samples` samples each."""
    args = get_args()
    config = dataset_config(args)
    if args.sft:
        dataset_class = SFTDataset
    elif args.mock_data:
        dataset_class = MockGPTDataset
    else:
        dataset_class = GPTFIMDataset if args.fim_data else GPTDataset
    print_rank_0(f"> building {dataset_class.__name__} for {num_samples} samples")

    def built_here():
        first_tp_rank = mpu.get_tensor_model_parallel_rank() == 0
        return first_tp_rank and is_first_or_last_pipeline_stage(vp_stage)

    return BlendedMegatronDatasetBuilder(dataset_class, num_samples, built_here, config).build()


datasets_provider.is_distributed = True


def main():
    """Parses the command line and trains."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    megatron_resilient.run(main)  # resilient 3/3
