"""Megatron's code that ours counts on without changing it: locked like a patch's target.

Named here is what we know of the inside of a function, not what we merely call.
"""

from megatron_resilient.patching.registry import Reliance

PATCHES = ()


def _of(file: str, *known: tuple[str, str]) -> tuple[Reliance, ...]:
    """Returns what `file` relies on, given as (target below megatron, what is known of it)."""
    return tuple(Reliance(f"megatron.{target}", f"`{file}`: {what}") for target, what in known)


RELIES_ON = (
    *_of(
        "mcore/arguments.py",
        (
            "training.arguments:parse_args",
            "the provider of extra arguments gets the whole parser, which parses right after it; "
            "our checks run inside that call.",
        ),
        (
            "core.parallel_state:initialize_model_parallel",
            "the world is a multiple of TP x PP x CP, and of expert TP x EP x PP.",
        ),
    ),
    *_of(
        "mcore/train_hooks.py",
        (
            "training.training:pretrain",
            "initialize_megatron comes first, then setup_model_and_optimizer, then training.",
        ),
        (
            "training.training:train",
            "train_step gets `iteration` by keyword and the optimizer as fourth argument; a step "
            "that returns should_exit is not counted.",
        ),
    ),
    *_of(
        "mcore/run_record.py",
        ("training.global_vars:_set_tensorboard_writer", "the writer is on the last rank only."),
        (
            "training.global_vars:_set_wandb_writer",
            "the writer is on the last rank only, and is the module wandb.",
        ),
        (
            "core.num_microbatches_calculator:get_current_running_global_batch_size",
            "after a step it still is the batch of that step.",
        ),
        (
            "training.async_utils:is_empty_async_queue",
            "True when no save is being written, also where there is no queue.",
        ),
    ),
    *_of(
        "mcore/reset.py",
        (
            "training.training:set_startup_timestamps",
            "where `program_start` is noted before pretrain(), that calls one collective more; a "
            "script that notes it notes `main_entry` too.",
        ),
        (
            "training.training:destroy_global_state",
            "it leaves process groups, the model and the metrics of MoE layers to us.",
        ),
        (
            "core.transformer.moe.moe_logging:destroy_moe_metrics_tracker",
            "the tracker is one global object that keeps groups of the old world.",
        ),
    ),
    *_of(
        "mcore/expert_load.py",
        (
            "core.transformer.moe.router:TopKRouter.forward",
            "the output begins with (probabilities, routing map); the map is bool, "
            "[tokens, experts].",
        ),
        (
            "core.transformer.moe.router:Router.set_layer_number",
            "layers count from 1 over all pipeline stages.",
        ),
        (
            "core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss",
            "layers of multi-token prediction count from 1 again and stand after the model's own.",
        ),
        (
            "core.tensor_parallel.random:CheckpointFunction",
            "a recomputed layer runs first without and then with gradients.",
        ),
        (
            "core.tensor_parallel.random:CheckpointWithoutOutputFunction",
            "a recomputed layer runs first without and then with gradients.",
        ),
        (
            "core.parallel_state:get_tensor_and_data_parallel_group",
            "it holds the ranks of one pipeline stage, which share its layers.",
        ),
    ),
    *_of(
        "mcore/empty_microbatches.py",
        (
            "core.pipeline_parallel.schedules:forward_step",
            "each model chunk's microbatches come in their order, one call each.",
        ),
        (
            "core.pipeline_parallel.combined_1f1b:combined_forward_backward_step",
            "the schedule plan that is made by a call runs before the next call.",
        ),
        (
            "core.pipeline_parallel.schedules:forward_step_calc_loss",
            "the loss function returns (loss, tokens, logged) or (loss, logged); the first is "
            "divided by its tokens and the number of microbatches.",
        ),
        (
            "core.transformer.moe.router:TopKRouter.routing",
            "losses are attached and biases counted here and nowhere else in the router; "
            "probabilities have the type of the logits.",
        ),
        (
            "core.transformer.moe.router:TopKRouter.apply_z_loss",
            "the name and the group under which it is logged.",
        ),
        (
            "core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss",
            "the number of the layer under which it is logged.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess",
            "without dropping, num_out_tokens is top-k times the tokens, whatever the map says.",
        ),
        (
            "core.transformer.multi_token_prediction:process_mtp_loss",
            "with a mask of zeros there is no loss and nothing is logged.",
        ),
    ),
    *_of(
        "mcore/uneven.py",
        (
            "training.training:train",
            "the samples of all microbatches are added to consumed_train_samples after train_step.",
        ),
        (
            "core.pipeline_parallel.schedules:_get_moe_loss_scale",
            "moe_grad_scale_func stands for the loss scale; the result is divided by the number of "
            "microbatches, unless the loss is per token.",
        ),
        (
            "core.pipeline_parallel.schedules:_get_mtp_loss_scale",
            "mtp_grad_scale_func stands for the loss scale.",
        ),
        (
            "core.transformer.moe.moe_utils:MoEAuxLossAutoScaler",
            "one scale for all microbatches, set in forward and read in backward passes.",
        ),
        (
            "core.transformer.moe.moe_logging:MoEMetricsTracker.report",
            "it reports sums over a step, divided by the number of microbatches, and clears them.",
        ),
        (
            "core.transformer.multi_token_prediction:MTPLossLoggingHelper",
            "loss_values is the sum over the microbatches of a step.",
        ),
        (
            "training.datasets.data_samplers:MegatronPretrainingSampler.__iter__",
            "microbatch k of rank r is number k x ranks + r of the data; ours goes on from there.",
        ),
        (
            "core.num_microbatches_calculator:ConstantNumMicroBatchesCalculator",
            "its four fields are all its state.",
        ),
    ),
    *_of(
        "mcore/uneven_arguments.py",
        (
            "training.arguments:validate_args",
            "of eval_global_batch_size it only demands that the ranks divide it.",
        ),
        (
            "core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
            "it takes no fewer microbatches than a group has, and no last group smaller than the "
            "number of stages.",
        ),
    ),
    *_of(
        "mcore/expert_rng.py",
        (
            "core.tensor_parallel.random:CudaRNGStatesTracker",
            "states by name, handed out and set as a whole.",
        ),
        (
            "core.tensor_parallel.random:get_expert_parallel_rng_tracker_name",
            "the stream of a rank's experts has one name on all ranks.",
        ),
        (
            "core.tensor_parallel.random:model_parallel_cuda_manual_seed",
            "that stream is seeded by expert tensor- and expert model-parallel rank.",
        ),
    ),
    *_of(
        "mcore/checkpointing/consolidation.py",
        (
            "training.checkpointing:generate_state_dict",
            "it is all of a checkpoint but the count of floating-point operations; `args` is kept "
            "as it is given.",
        ),
        (
            "training.checkpointing:_build_sharded_state_dict_metadata",
            "what save_checkpoint stores as content metadata, without the group in it.",
        ),
        (
            "training.models.dist_utils:unimodal_build_distributed_models",
            "pre_wrap_hooks see the model before DDP sorts its parameters by `allreduce`.",
        ),
        (
            "core.distributed.param_and_grad_buffer:group_params_for_buffers",
            "`allreduce` False marks parameters of experts, whatever the size of EP.",
        ),
    ),
    *_of(
        "mcore/checkpointing/stock_form.py",
        (
            "core.optimizer.distrib_optimizer:DistributedOptimizer"
            ".sharded_param_state_fully_reshardable",
            "fp32 copies are optimizer.state.param.NAME, moments optimizer.state.MOMENT.NAME.",
        ),
        (
            "core.optimizer.optimizer:FP32Optimizer.sharded_state_dict",
            "moments are optimizer.state.MOMENT.NAME; common_step stands under `state`.",
        ),
        (
            "core.optimizer.optimizer:Float16OptimizerWithFloat16Params.sharded_state_dict",
            "fp32 copies are optimizer.state.fp32_param.NAME; the rest stands under `optimizer`.",
        ),
        (
            "core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
            "it does not look at `state`, nor at entries that it does not know.",
        ),
    ),
    *_of(
        "mcore/optimizer_layout.py",
        (
            "core.optimizer.optimizer:param_group_identifier_keys",
            "a group finds its counterpart by them, but for is_expert_parallel.",
        ),
        (
            "core.optimizer.optimizer:MegatronOptimizer._filter_and_reorder_param_groups",
            "it takes `params` by position and the rest by those keys; a key may be called "
            "pre_<key>, and a missing one equals None.",
        ),
        (
            "core.optimizer.optimizer:ChainedOptimizer.state_dict",
            "a list with one state per optimizer, or the state of the only one.",
        ),
        (
            "core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict",
            "a dict with the optimizers' numbers as keys, or the state of the only one.",
        ),
        (
            "core.optimizer:get_megatron_optimizer",
            "parameters of experts get an optimizer of their own if EP > 1, and only then.",
        ),
    ),
    *_of(
        "patches/distrib_optimizer.py",
        (
            "core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict",
            "loading asks for state_dict() first; the common part stands under `optimizer`.",
        ),
        (
            "core.optimizer.distrib_optimizer:DistributedOptimizer"
            ".sharded_param_state_dp_reshardable",
            "it cuts every tensor that _get_main_param_and_optimizer_states hands out.",
        ),
        (
            "core.optimizer.distrib_optimizer:DistributedOptimizer"
            ".load_parameter_state_from_dp_reshardable",
            "what was loaded goes to _set_main_param_and_optimizer_states.",
        ),
        (
            "core.optimizer.distrib_optimizer:DistributedOptimizer"
            ".load_parameter_state_from_fully_reshardable",
            "what was loaded goes to _set_main_param_and_optimizer_states.",
        ),
    ),
    *_of(
        "mcore/tracker_file.py",
        ("training.checkpointing:get_checkpoint_tracker_filename", "the name of the file."),
        (
            "training.checkpointing:get_checkpoint_name",
            "folders are called iter_ and seven digits; `mcore/run_record.py` too.",
        ),
        (
            "training.checkpointing:_load_base_checkpoint",
            "what --ckpt-step, --pretrained-checkpoint and a missing tracker file lead to.",
        ),
    ),
    *_of(
        "mcore/indexed_dataset.py",
        (
            "core.datasets.indexed_dataset:IndexedDatasetBuilder",
            "a document is one sequence; `data_file` is the open .bin file.",
        ),
        (
            "core.datasets.indexed_dataset:DType",
            "the integer type of a vocabulary, and its code.",
        ),
        (
            "core.datasets.blended_megatron_dataset_config:parse_and_normalize_split",
            "a --split as Megatron reads it.",
        ),
        (
            "core.datasets.blended_megatron_dataset_config:convert_split_vector_to_split_matrix",
            "a --split as Megatron reads it.",
        ),
        (
            "core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder"
            "._build_megatron_dataset_splits",
            "the bounds of the parts are rounded as here.",
        ),
        (
            "core.datasets.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices",
            "caches are known by path, not by content, and lie in PREFIX/cache/*_indices.",
        ),
    ),
    *_of(
        "patches/training_async_utils.py",
        ("training.async_utils:_get_async_calls_queue", "it hands out the queue that we set."),
        (
            "core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue",
            "with persistent=False every save gets a TemporalAsyncCaller.",
        ),
        (
            "core.dist_checkpointing.strategies.async_utils:TemporalAsyncCaller",
            "it forks the writer and joins it before results are read.",
        ),
    ),
    *_of(
        "patches/filesystem_async.py",
        (
            "core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync",
            "of the queue of results it uses put and get_nowait.",
        ),
    ),
    *_of(
        "patches/torch_norm.py",
        (
            "core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
            "it sums the gradients of parameters that are marked `sequence_parallel`.",
        ),
    ),
    *_of(
        "patches/torch_cuda.py",
        (
            "core.tensor_parallel.random:_get_cuda_rng_state",
            "it reads the state through torch.cuda's own function.",
        ),
        (
            "core.tensor_parallel.random:_set_cuda_rng_state",
            "it sets the state through _lazy_call and default_generators.",
        ),
        (
            "training.initialize:_initialize_distributed",
            "it builds groups only where device_count() is not 0.",
        ),
    ),
    *_of(
        "plugin.py",
        (
            "core.fusions.fused_bias_swiglu:swiglu",
            "compiled at import, it tells whether Megatron was imported too early.",
        ),
    ),
    *_of(
        "mcore/moe_layer.py",
        (
            "core.transformer.moe.moe_layer:MoELayer.__init__",
            "it builds router, dispatcher and experts, in this order, from `submodules` and from "
            "the configuration that it is given; the router takes `config` by keyword.",
        ),
        (
            "core.transformer.moe.moe_layer:MoELayer.preprocess",
            "router's output goes in, dispatcher's out: the routing map is widened before it.",
        ),
        (
            "core.transformer.moe.moe_layer:BaseMoELayer.__init__",
            "local experts are `num_moe_experts / EP`, contiguous by rank.",
        ),
        (
            "core.transformer.moe.moe_layer:MoELayer.forward",
            "training goes through route, preprocess, dispatch, routed_experts_compute, combine.",
        ),
    ),
    *_of(
        "mcore/parted_layer.py",
        (
            "core.transformer.moe.moe_layer:MoELayer.forward",
            "a part's output goes to the next part and nowhere else; shared experts see the input.",
        ),
        (
            "core.transformer.moe.moe_layer:MoELayer.route",
            "the router is called once, before preprocess.",
        ),
        (
            "core.transformer.moe.moe_layer:MoELayer.preprocess",
            "nothing of the input but the dispatcher's rows goes on from here.",
        ),
        (
            "core.transformer.moe.moe_layer:MoELayer.dispatch",
            "the dispatcher's communication and nothing else.",
        ),
        (
            "core.transformer.moe.moe_layer:MoELayer.routed_experts_compute",
            "outputs are weighed by probabilities, as rows of the dispatched ones.",
        ),
        (
            "core.transformer.moe.moe_layer:MoELayer.combine",
            "the dispatcher's communication and nothing else.",
        ),
        (
            "core.transformer.moe.moe_layer:MoELayer.postprocess",
            "the output of shared experts may be None and is added last.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess",
            "without dropping, num_out_tokens is top-k times the tokens, whatever the map says.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_preprocess",
            "num_out_tokens is read after preprocess, and may be a tensor.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
            "._maybe_update_cuda_sync_point",
            "the earliest point that was asked for holds.",
        ),
        (
            "core.models.gpt.fine_grained_callables:build_transformer_layer_callables",
            "the 1F1B overlap calls a layer's parts, and not its forward.",
        ),
    ),
    *_of(
        "mcore/overlap/counts.py",
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_preprocess",
            "of what preprocess finds it reads num_out_tokens; splits are for the communication.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess",
            "rank (expert-parallel r, tensor-parallel t) is r T + t of the joint group.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
            "._maybe_dtoh_and_synchronize",
            "what is no tensor on a GPU is left alone.",
        ),
    ),
    *_of(
        "mcore/overlap/routed.py",
        (
            "core.transformer.moe.moe_layer:MoELayer.forward",
            "dispatch, routed_experts_compute and combine follow each other.",
        ),
        (
            "core.transformer.moe.moe_layer:MoELayer.routed_experts_compute",
            "between dispatch and combine there is nothing but the dispatcher and the experts.",
        ),
        (
            "core.transformer.moe.moe_utils:permute",
            "rows are sorted by expert, those of one expert by token.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.combine_postprocess",
            "rows come back in the order in which they were sorted.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_postprocess",
            "rows are gathered from tensor-parallel ranks, then sorted by expert, rank and sender.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.combine_preprocess",
            "outputs of tensor-parallel ranks are added up in the type of probabilities.",
        ),
        (
            "core.transformer.moe.experts:SequentialMLP.forward",
            "a row's output depends on the row, its expert and its probability alone.",
        ),
        (
            "core.transformer.moe.experts:TEGroupedMLP.forward",
            "a row's output depends on the row, its expert and its probability alone.",
        ),
        (
            "core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint",
            "it refuses a backward pass for chosen inputs.",
        ),
        (
            "core.distributed.distributed_data_parallel:DistributedDataParallel"
            "._make_backward_post_hook",
            "a parameter's gradient is added to main_grad where autograd accumulates it.",
        ),
    ),
    *_of(
        "mcore/wire.py",
        (
            "core.tensor_parallel.mappings:_AllToAll",
            "rows are moved as they are, forward and backward; of one rank, left alone.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.token_dispatch",
            "rows go through one all-to-all; shared experts take of them only their place in the "
            "order.",
        ),
        (
            "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.token_combine",
            "rows go through one all-to-all.",
        ),
    ),
    *_of(
        "mcore/gates/routers.py",
        (
            "core.transformer.moe.router:Router.__init__",
            "weight and bias are there afterwards; subclasses may put others in their place.",
        ),
        (
            "core.transformer.moe.router:Router.reset_parameters",
            "parameters have params_dtype and the mark `sequence_parallel`; ours are made alike.",
        ),
        (
            "core.transformer.moe.router:Router.gating",
            "logits from input and weight, in the type that moe_router_dtype says.",
        ),
        (
            "core.transformer.moe.router:TopKRouter.routing",
            "z-loss, choice, dropping, auxiliary losses, bias, in this order; ours does the same "
            "around another choice, without a bias.",
        ),
        (
            "core.transformer.moe.router:TopKRouter._apply_aux_loss",
            "nothing is done for a loss with coefficient 0.",
        ),
        (
            "core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
            "nothing is done for a loss with coefficient 0.",
        ),
        (
            "core.transformer.moe.router:TopKRouter._apply_global_aux_loss",
            "nothing is done for a loss with coefficient 0.",
        ),
        (
            "core.transformer.moe.moe_utils:compute_routing_scores_for_aux_loss",
            "the k largest scores, as ours are chosen.",
        ),
        (
            "core.transformer.moe.moe_utils:apply_router_token_dropping",
            "map and probabilities of the same shape go in and come out.",
        ),
        (
            "core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
            "it sums the gradients of parameters that are marked `sequence_parallel`.",
        ),
    ),
    *_of(
        "mcore/gates/soft_router.py",
        (
            "core.transformer.moe.router:TopKRouter.forward",
            "jitter, logits, choice; ours does the first itself and has no choice.",
        ),
    ),
    *_of(
        "mcore/experts.py",
        (
            "core.transformer.moe.experts:SequentialMLP.__init__",
            "its experts stand in `local_experts`.",
        ),
        (
            "core.transformer.moe.experts:TEGroupedMLP.__init__",
            "its weights are called weight0, weight1, ... by local expert.",
        ),
    ),
    *_of(
        "mcore/sharded_slots.py",
        (
            "core.transformer.moe.experts:SequentialMLP.sharded_state_dict",
            "experts are stacked along axis len(sharded_offsets), numbered by rank and position; "
            "replica_id is (PP, TP, expert DP).",
        ),
        (
            "core.transformer.moe.experts:TEGroupedMLP.sharded_state_dict",
            "the same for grouped experts.",
        ),
    ),
    *_of(
        "mcore/replica_gradients.py",
        (
            "core.distributed.finalize_model_grads:finalize_model_grads",
            "after it, gradients of experts are final but for the sum over replicas; nothing in it "
            "is not linear in them, and without a loss per token nothing but DDP changes them.",
        ),
        (
            "core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
            "multiplies gradients by gradient_scaling_factor once a step, when it sets "
            "grad_reduce_handle or in finalize_model_grads; in a group of one rank nothing else.",
        ),
        (
            "core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync",
            "where it clears grad_reduce_handle it sets grad_reduce_finished until the next step.",
        ),
        (
            "core.distributed.distributed_data_parallel:DistributedDataParallel"
            "._make_backward_post_hook",
            "gradients are in main_grad when autograd has accumulated them.",
        ),
        (
            "core.transformer.transformer_layer:TransformerLayer._forward_mlp",
            "it calls an MoE layer once a microbatch, with hidden states first, or several times "
            "with mlp_chunks_for_training.",
        ),
        (
            "training.training:train_step",
            "it runs get_num_microbatches() microbatches, each forward and backward.",
        ),
    ),
    *_of(
        "mcore/overlap/auto.py",
        (
            "core.distributed.distributed_data_parallel:DistributedDataParallel"
            ".enable_forward_pre_hook",
            "it puts a hook that gathers parameters on every module, and notes the handles.",
        ),
        (
            "core.distributed.distributed_data_parallel:DistributedDataParallel"
            ".disable_forward_pre_hook",
            "it takes the hooks back, and gathers nothing with param_sync=False.",
        ),
    ),
    *_of(
        "mcore/overlap/gradient_slices.py",
        (
            "core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync",
            "without overlap_grad_reduce it calls start_grad_sync once a step, and nothing else "
            "that sends.",
        ),
        (
            "core.distributed.distributed_data_parallel:DistributedDataParallel"
            "._make_backward_post_hook",
            "gradients are in main_grad when autograd has accumulated them.",
        ),
        (
            "training.training:train_step",
            "it runs get_num_microbatches() microbatches, and sets force_all_reduce before them.",
        ),
        (
            "core.distributed.finalize_model_grads:finalize_model_grads",
            "sums over other groups than the data-parallel one, and the division by tokens, come "
            "after finish_grad_sync.",
        ),
    ),
    *_of(
        "mcore/overlap/sliced_bucket.py",
        (
            "core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.check_grads",
            "of the group it reads grad_data of its buckets, and of that the norm, nothing else.",
        ),
        (
            "core.distributed.param_and_grad_buffer:shard_buffer",
            "rank r keeps the r-th of equal shards of a bucket.",
        ),
    ),
    *_of(
        "mcore/overlap/final_gradients.py",
        (
            "core.models.gpt.gpt_model:GPTModel.__init__",
            "embedding, decoder, output_layer and mtp; an output layer that shares the embedding's "
            "weights has none of its own.",
        ),
        (
            "core.transformer.transformer_block:TransformerBlock",
            "its layers stand in `layers`, the norm after them in `final_layernorm`; layer numbers "
            "count over all pipeline stages.",
        ),
    ),
    *_of(
        "mcore/optimizer_state.py",
        (
            "core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
            "a parameter's fp32 copy is its attribute `main_param`.",
        ),
        (
            "core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
            "model_param_group_index_map leads from a parameter to the tensor that is stepped.",
        ),
        (
            "core.transformer.module:param_is_not_shared",
            "norms leave out what has a true attribute `shared`.",
        ),
    ),
)
