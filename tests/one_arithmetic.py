"""Updates and norms by the CPU's kernels on a real GPU.

A GPU's fused optimizers and norms round otherwise than the CPU's (``docs/reference/exceptions.md``). So a plan that
updates on the host could not be compared bit for bit with a plain loop on the device. With the CPU's kernels on both
sides it can: forward, backward, copies, streams and memory are the GPU's, and any mistake of a plan shows, to the last
bit.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import adagrad, sgd
from torch.utils import _pytree as pytree

UPDATES = ("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_")
NORMS = ("linalg_vector_norm", "linalg_vector_norm.out", "_foreach_norm.Scalar")


@functools.cache
def install() -> torch.library.Library:
    """Replace the kernels, once per process; they stay until it ends."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it overrides kernels
        for name in (*UPDATES, *(f"{name}.tensor_lr" for name in UPDATES), *NORMS):
            packet, _, overload = name.partition(".")
            kernel = getattr(getattr(torch.ops.aten, packet), overload or "default")
            run = functools.partial(_sgd, kernel) if packet == "_fused_sgd_" else kernel
            library.impl(name, functools.partial(_on_host, kernel, run), "CUDA")
    _let_adagrad_be_fused()
    return library


def is_installed() -> bool:
    """Return whether the kernels are replaced: norms and updates then wait for the device."""
    return install.cache_info().currsize > 0


def _on_host(kernel: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the CPU's kernel on copies and copy back what it wrote, in the current stream's order. The host waits."""
    arguments = kernel._schema.arguments
    given = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs}
    device = next(t.device for t in pytree.tree_leaves(given) if isinstance(t, Tensor) and t.is_cuda)
    mode = torch.cuda.get_sync_debug_mode()
    if mode:
        torch.cuda.set_sync_debug_mode("default")
    try:
        copies = pytree.tree_map_only(Tensor, lambda t: t.cpu(), given)
        named = {a.name: copies.pop(a.name) for a in arguments if a.kwarg_only and a.name in copies}
        result = run(*copies.values(), **named)
        for argument in arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            # The schema marks gradients as written, but only ``grad_scale`` makes a kernel write them.
            if is_written and (argument.name != "grads" or given.get("grad_scale") is not None):
                _come_back(given[argument.name], {**copies, **named}[argument.name])
        if "out" in given:
            return given["out"]
        return pytree.tree_map_only(Tensor, lambda t: t.to(device), result)
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


def _sgd(kernel: Any, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], **options: Any) -> None:
    """Do without the CPU's kernel where it skips elements, as outcore does in host memory: see ``trains_fused``."""
    if trains_fused(torch.optim.SGD, params[0].dtype, "cpu"):
        kernel(params, grads, buffers, **options)
        return
    made = [None] * len(params) if options.pop("is_first_step") else list(buffers) or [None] * len(params)
    scaling = (options.pop("grad_scale", None), options.pop("found_inf", None))  # nothing in bf16 is scaled
    sgd._single_tensor_sgd(params, grads, made, *scaling, has_sparse_grad=False, **options)
    for buffer, new in zip(buffers, made, strict=False):
        if buffer is not new:
            buffer.copy_(new)


def _come_back(targets: Any, copies: Any) -> None:
    for target, copy in zip(pytree.tree_leaves(targets), pytree.tree_leaves(copies), strict=True):
        if target is not copy:
            target.resize_(copy.shape).copy_(copy)


def _let_adagrad_be_fused() -> None:
    """Skip a check: torch 2.11 has a fused Adagrad on CUDA, and refuses to call it."""
    check = adagrad._device_dtype_check_for_fused
    adagrad._device_dtype_check_for_fused = lambda p, cuda_unsupported=False: check(p)


@functools.cache
def trains_fused(kind: type[torch.optim.Optimizer], dtype: torch.dtype, device: str) -> bool:
    """Return whether ``fused=True`` updates all elements: on the CPU torch 2.11 to 2.13 skip most of bf16 with SGD."""
    param = torch.nn.Parameter(torch.ones(199, dtype=dtype, device=device))
    param.grad = torch.ones_like(param)
    kind([param], lr=0.5, fused=True).step()
    return bool((param != 1).all())
