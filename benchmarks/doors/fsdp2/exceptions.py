"""Why tests of FSDP2's are not run, need what shardwise does not have, or expect something else, by their names.

Tests that are in none of these pass, or a defect is to be mended.
"""

_INTERNALS = "FSDP2's private functions, objects or hooks, not what they do for a user"
_CUDA = "measures CUDA streams or the CUDA allocator"

NOT_RUN_FILES = {
    "compile": "torch.compile through FSDP2's hooks: private switches, graphs and passes",
    "logging": _INTERNALS,
    "memory": _CUDA,
    "overlap": _CUDA,
}
NOT_RUN = {
    "comm.test_all_gather_fp32": _INTERNALS,
    "comm.test_reduce_scatter_fp16": _INTERNALS,
    "comm.test_reduce_scatter_fp32": _INTERNALS,
    "comm.test_fully_shard_backward_prefetch": _INTERNALS,
    "comm.test_fully_shard_multi_module_backward_prefetch": _INTERNALS,
    "comm.test_fully_shard_multi_module_unused_module": _INTERNALS,
    "comm.test_set_modules_to_backward_prefetch": _INTERNALS,
    "comm.test_set_modules_to_forward_prefetch": _INTERNALS,
    "comm.test_backward_misprefetch": _INTERNALS,
    "init.test_move_states_to_device_tensor": _INTERNALS,
    "init.test_move_states_to_device_dtensor_valid": _INTERNALS,
    "init.test_move_states_to_device_dtensor_invalid": _INTERNALS,
    "init.test_managed_modules_single": _INTERNALS,
    "init.test_managed_modules_nested": _INTERNALS,
    "init.test_managed_modules_nested_fully_shard_and_replicate": _INTERNALS,
    "init.test_managed_modules_duplicate": _INTERNALS,
    "init.test_managed_modules_list_of_mlps": _INTERNALS,
    "init.test_managed_states_shared_params_and_buffers": _INTERNALS,
    "init.test_managed_states_nested_fully_shard": _INTERNALS,
    "init.test_managed_states_list_of_mlps": _INTERNALS,
    "init.test_get_param_module_infos_shared_params": _INTERNALS,
    "init.test_get_param_module_infos_duplicates": _INTERNALS,
    "init.test_get_param_module_infos_list_of_mlps": _INTERNALS,
    "init.test_fully_shard_is_root": _INTERNALS,
    "init.test_fully_shard_module_and_param_fqns": _INTERNALS,
    "init.test_fully_shard_double_lazy_init": _INTERNALS,
    "init.test_fully_shard_multi_module_root": _INTERNALS,
}
"""Whatever the engine; the others are run with both."""

_SHARD = "placements by dim, DTensor's private spec"
NEEDS_DTENSOR = {
    "clip_grad_norm_.test_clip_grad_norm_1d": "the norm is to be a DTensor; here it is a plain tensor",
    "clip_grad_norm_.test_clip_grad_norm_2d": "the norm is to be a DTensor; FSDP2 fails on CPU ranks",
    "grad_scaler.test_gradient_scaler": "gradients are read as DTensors, by a private name; FSDP2 fails on CPU ranks",
    "init.test_shard_dtensor_parameters": _SHARD,
    "init.test_shard_tensor_parameters": _SHARD,
    "init.test_rank0_broadcast_meta_device_init": "state dicts made with distribute_tensor",
    "init.test_init_1d_transformer_shard_largest_dim": _SHARD,
    "init.test_init_2d_transformer_shard_diff_dim": _SHARD,
}

_SUBCLASS = "tensor subclasses with an all-gather of their own around two tensors: refused"
_PATCHED = "an all-gather of their own, given to a tensor after fully_shard: not looked for"
_WORKS = "expects an error for what works here"
_ELSEWHERE = "rank 0 is to hold a piece of every parameter; of small ones it may be another rank"
DIFFERENT = {
    "extensions.test_all_gather_extensions_train_parity": _SUBCLASS,
    "extensions.test_all_gather_extensions_end_to_end": _SUBCLASS,
    "extensions.test_all_gather_extensions_monkey_patch": _PATCHED,
    "extensions.test_all_gather_extension_hsdp_mesh": _PATCHED,
    "init.test_2d_mesh_without_mesh_dim_names": f"{_WORKS}: a mesh of two axes without names",
    "init.test_raise_noncontiguous_parameter": f"{_WORKS}: parameters in channels_last",
    "init.test_raise_scalar_parameter": f"{_WORKS}: 0-d parameters",
    "state.test_fully_shard_deepcopy": f"{_WORKS}: copy.deepcopy gives a second sharded model",
    "init.test_reset_sharded_param_in_lazy_init": "norms of rows of a sharded parameter outside forward, and a "
    "parameter that is exchanged for another after fully_shard, which wants it written in place",
    "init.test_hsdp_broadcast_across_replicas": "replicas are to differ after fully_shard; here all get rank 0's",
    "mixed_precision.test_reduce_dtype": "sums of bf16 are to be rounded to bf16; here pieces travel in bf16 and are "
    "summed in fp32",
    "state_dict.test_dp_state_dict_save_load": _ELSEWHERE,
    "state_dict.test_dp_tp_state_dict_save_load": _ELSEWHERE,
    "state_dict.test_hsdp_tp_state_dict_save_load": _ELSEWHERE,
    "training.test_to_float64_after_init": "model.to(dtype) after fully_shard: refused",
    "training.test_gradient_accumulation": "counts all_gathers: there are fewer here from the second micro-batch on",
}

WITHIN = "passes; what it asserts within FSDP2's own functions is not reached"


def why_not_run(name: str) -> str | None:
    return NOT_RUN_FILES.get(name.split(".")[0]) or NOT_RUN.get(name)
