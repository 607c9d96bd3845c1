"""The private names of torch that `src/shardwise` uses; a test keeps this list complete."""

import importlib
from typing import Any

NAMES = (
    "torch.Tensor._make_wrapper_subclass",
    "torch.Tensor._version",
    "torch.UntypedStorage._cdata",
    "torch._C.DisableTorchFunction",
    "torch._C.DispatchKey.AutocastCPU",
    "torch._C.DispatchKey.CompositeImplicitAutograd",
    "torch._C.DispatchKeySet",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._saved_tensors_hooks_is_enabled",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._disabled_torch_function_impl",
    "torch._C._distributed_c10d.HashStore",
    "torch._C._distributed_c10d.PrefixStore",
    "torch._C._distributed_c10d.TCPStore",
    "torch._C._distributed_c10d.Store",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._storage_Use_Count",
    "torch._C._will_engine_execute_node",
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch._check",
    "torch._decomp.get_decompositions",
    "torch._disable_dynamo",
    "torch._dynamo.trace_rules.add",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._guards.detect_fake_mode",
    "torch._higher_order_ops.scan",
    "torch._neg_view",
    "torch._ops.OpOverload",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd._engine_run_backward",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter",
    "torch.distributed._composable.contract",
    "torch.distributed._functional_collectives.all_to_all_single_autograd",
    "torch.distributed._functional_collectives.wait_tensor",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.utils._create_file_view",
    "torch.distributed.device_mesh.DeviceMesh._concatenate",
    "torch.distributed.distributed_c10d._coalescing_manager",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._world.pg_coalesce_state",
    "torch.distributed.distributed_c10d._world.pg_group_ranks",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor.placement_types._StridedShard",
    "torch.library._scoped_library",
    "torch.nn.modules.module._IncompatibleKeys",
    "torch.nn.utils.stateless._reparametrize_module",
    "torch.ops.aten._local_scalar_dense",
    "torch.ops.aten._local_scalar_dense.default",
    "torch.ops.aten._log_softmax",
    "torch.ops.aten._log_softmax_backward_data",
    "torch.ops.aten._scaled_dot_product_efficient_attention",
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "torch.ops.aten._softmax",
    "torch._foreach_copy_",
    "torch._foreach_zero_",
    "torch.ops.aten._softmax_backward_data",
    "torch.ops.aten._to_copy.default",
    "torch.optim.optimizer._foreach_supported_types",
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch.utils._foreach_utils._get_fused_kernels_supported_devices",
    "torch.utils._foreach_utils._group_tensors_by_device_and_dtype",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
)


def missing() -> list[str]:
    """Those that this torch lacks."""
    return [name for name in NAMES if not _exists(name)]


def _exists(name: str) -> bool:
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:depth]))
        except ImportError:
            return False
    return True
