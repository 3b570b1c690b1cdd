"""All private entry points of torch that outcore uses.

They are checked on import. So if a torch release has changed one, this shows at once, and not in the middle of a
backward. Only the kernels of updates are checked elsewhere (``optim.kernels``), since each has a public alternative.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from operator import call, methodcaller
from typing import Any, TypeVar, cast

import torch
from torch import distributed, nn
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outcore.core.errors import UnsupportedError

pytree, NormWithStatistics = _pytree, _NormBase
FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""Where fake tensors write the traceback of every operation that fails, besides raising the error."""
_torch: Any = torch
_PRIVATE = (
    "_C._current_graph_task_id",
    "_C._will_engine_execute_node",
    "_C._are_functorch_transforms_active",
    "_C._disabled_torch_function_impl",
    "_C._get_fp32_precision_getter",
    "_C._get_sdp_priority_order",
    "_C._set_fp32_precision_setter",
    "_C.DisableTorchFunctionSubclass",
    "_C._autograd._get_current_graph_task_keep_graph",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_disable_dynamo",
    "_foreach_copy_",
    "autograd.Variable._execution_engine.queue_callback",
    "autograd.Variable._execution_engine.run_backward",
    "autograd.forward_ad._current_level",
    "autograd.function.BackwardCFunction._sequence_nr",
    "autograd.function.BackwardCFunction._set_sequence_nr",
    "nn.Module._compiled_call_impl",
    "nn.Module._load_from_state_dict",
    "nn.Module._save_to_state_dict",
    "ops.aten.add.Tensor._schema",
    "Tensor._backward_hooks",
    "Tensor._base",
    "Tensor._indices",
    "Tensor._make_subclass",
    "Tensor._make_wrapper_subclass",
    "Tensor._post_accumulate_grad_hooks",
    "Tensor._values",
    "Tensor._version",
    "UntypedStorage._cdata",
)
_OF_MODULES = ("_buffers", "_non_persistent_buffers_set", "_parameters")


def missing_names() -> list[str]:
    """Return the private names that this torch lacks."""
    missing = [f"torch.{name}" for name in _PRIVATE if not _has(_torch, name.split("."))]
    return missing + [f"torch.nn.Module().{name}" for name in _OF_MODULES if not hasattr(nn.Module(), name)]


def _has(module: Any, path: Sequence[str]) -> bool:
    *way, last = path
    for part in way:
        module = getattr(module, part, None)
    return hasattr(module, last)


def _unknown(names: Sequence[str]) -> str:
    return (
        f"expected a torch that outcore knows, but torch {torch.__version__} has no {', '.join(names)}; install an "
        "older torch, or a newer outcore"
    )


if _missing := missing_names():
    raise UnsupportedError(_unknown(_missing))

_Function = TypeVar("_Function", bound=Callable[..., Any])
_torch_c, _engine = _torch._C, _torch.autograd.Variable._execution_engine

without_torch_function: Any = _torch_c.DisableTorchFunctionSubclass
"""Context manager in which tensor subclasses are not asked: their ``__torch_function__`` is not called."""
plain_torch_function: Any = _torch_c._disabled_torch_function_impl
"""``__torch_function__`` for a subclass that needs no override, as in torch's own Parameter."""
current_task: Callable[[], int] = _torch_c._current_graph_task_id
"""Returns the number of the backward that runs on this thread; negative outside of one."""
keeps_graph: Callable[[], bool] = _torch_c._autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs now may run again."""
copy_each: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = _torch._foreach_copy_
"""Copies the tensors of the second list into those of the first in one call."""
subclassed: Callable[[type, torch.Tensor, bool], Any] = _torch.Tensor._make_subclass
"""Returns a tensor of another class over the same memory; the flag says whether it requires gradients."""
is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass
"""Whether a tensor's class can take it apart into plain tensors and rebuild it (a traceable wrapper subclass)."""
without_memory: Callable[..., Any] = _torch.Tensor._make_wrapper_subclass
"""Returns a tensor without memory of its own; its class knows where the values are."""


def parts_of_coo(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return coordinates and values of a sparse tensor. The public names are for sorted coordinates alone."""
    return tensor._indices(), tensor._values()


order_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Returns the sequence number of a node. It is larger the later the node was made on its thread."""


def set_order(node: Any, number: int) -> None:
    """Change the sequence number of a node. Of the nodes that can run, backward takes the one with the largest."""
    node._set_sequence_nr(number)


def at_end_of_task(callback: Callable[[], object]) -> None:
    """Call something when the backward that runs now is over. It is not called if that ends in an exception."""
    _engine.queue_callback(callback)


def is_executed(node: Any) -> bool:
    """Whether the backward that runs now will reach a node.

    Raises:
        RuntimeError: ``torch.autograd.grad`` captures this very leaf.
    """
    return bool(_torch_c._will_engine_execute_node(node))


def run_backward(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    keeps_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """Walk a graph to get the gradients of ``sources``; None for sources that are not reached.

    ``torch.autograd.grad`` does the same after checks of every tensor, which the engine repeats. No graph of the
    gradients is made, and nothing is accumulated.
    """
    found = _engine.run_backward(outputs, grads, keeps_graph, False, tuple(sources), True, False)  # noqa: FBT003
    return cast("Sequence[torch.Tensor | None]", found)


_ATTENTION = "cudnn", "flash", "math", "mem_efficient", "overrideable"
_KERNELS = (
    *("math_sdp_allow_fp16_bf16_reduction", "sdp_priority_order", "cublas_allow_fp16_accumulation"),
    *("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction"),
    *("cpu_allow_fp16_reduced_precision_reduction", "blas_preferred_backend", "linalg_preferred_backend"),
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_depthwise_kernel"),
    *("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled"),
)
_PRECISIONS = [(library, work) for work in ("matmul", "conv", "rnn") for library in ("cuda", "mkldnn")]
_read_precision, _set_precision = _torch_c._get_fp32_precision_getter, _torch_c._set_fp32_precision_setter


def _named_switches() -> Sequence[tuple[Callable[[], Any], Callable[..., object]]]:
    names = [(f"_get_{kind}_sdp_enabled", f"_set_sdp_use_{kind}") for kind in _ATTENTION]
    names += [(f"_get_{name}", f"_set_{name}") for name in _KERNELS]
    # A torch that lacks one has no such choice.
    found = [(getattr(_torch_c, read), getattr(_torch_c, change)) for read, change in names if hasattr(_torch_c, read)]
    modes = torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    return *found, modes, (torch.get_default_dtype, torch.set_default_dtype)


_SWITCHES = _named_switches()
_READ: list[Any] = [*(read for read, _ in _SWITCHES), *(partial(_read_precision, *place) for place in _PRECISIONS)]


def switches() -> list[Any]:
    """Return torch's global switches: those that choose kernels, and so how results round, and the default dtype."""
    return list(map(call, _READ))


def set_switches(values: Sequence[Any]) -> None:
    """Set switches to what ``switches`` returned."""
    for (read, change), value in zip(_SWITCHES, values, strict=False):
        if read() != value:
            change(*value) if type(value) is tuple else change(value)
    wanted, now = values[len(_SWITCHES) :], switches()[len(_SWITCHES) :]
    if wanted[:2] != now[:2]:
        # An older setting, which torch refuses to read if it does not fit these two.
        name = "medium" if wanted[1] == "bf16" else "high" if wanted[0] == "tf32" else "highest"
        torch.set_float32_matmul_precision(name)
        now[:2] = [None, None]  # set by the name, perhaps to other values
    for place, value, before in zip(_PRECISIONS, wanted, now, strict=True):
        if value != before:
            _set_precision(*place, "none")  # so that a more general setting may give the value
            if _read_precision(*place) != value:
                _set_precision(*place, value)


def is_packing() -> bool:
    """Whether hooks for saved tensors are active. Those of a checkpoint run its function again to unpack."""
    return _torch_c._autograd._top_saved_tensors_default_hooks(False) is not None  # noqa: FBT003


def is_transformed() -> bool:
    """Whether transforms of torch.func, or forward-mode AD, are active."""
    return bool(_torch_c._are_functorch_transforms_active()) or torch.autograd.forward_ad._current_level >= 0


def as_it_is(function: _Function) -> _Function:
    """Decorate a function that ``torch.compile`` should not trace, with everything that it calls."""
    return cast("_Function", _torch._disable_dynamo(function))


def store_of_ranks() -> Any:
    """Return the key-value store of all ranks. Checked here and not on import: one process alone needs none.

    Raises:
        UnsupportedError: This torch offers it in another way.
    """
    get = getattr(cast("Any", distributed).distributed_c10d, "_get_default_store", None)
    if get is None:
        raise UnsupportedError(_unknown(["torch.distributed.distributed_c10d._get_default_store"]))
    return get()
