"""A model as the planner and the engine see it: units of parameters, and the place of each parameter in its unit.

[Note: layouts] A unit owns up to four kinds of bytes, addressed by two layouts:

* *weights layout*: every parameter in its compute dtype. Trainable parameters come first, so that they are one flat
  piece. Each parameter is aligned to 256 bytes. The frozen ones begin at ``trainable_bytes``, a multiple of 4 KiB, so
  that the trainable piece can be written to disk alone. ``weight_bytes`` is the size of the whole. A *bucket* has the
  layout of the trainable piece and holds the gradients of one backward pass in the dtype in which autograd makes them.
  Where a pass sums several micro-batches, the bucket has the update layout instead.
* *update layout*: trainable parameters only, in the dtype in which they are updated (fp32 masters for bf16 weights).
  Accumulated gradients use it and take ``update_bytes``. A ``StateSpec`` (``spec.layout``) gives the size and layout of
  a state; master weights and the states of most optimizers use the update layout, too.

Sizes are padded to 4 KiB, so any of these bytes may rest on disk.

[Note: runs] With R ranks the trainable piece of the weights layout is padded and cut into R equal *runs* at page
borders. A rank sums gradients, keeps states and updates for its own run only. So its update layout holds only the
elements in that run; its sizes are those of the rank that needs most. Parameters begin at multiples of 256 bytes, or of
512 if some are float64. A cut inside a parameter then falls on a multiple of 64 elements, where an update may be cut
(``optim.blocks``). If some states share a scale among 256 elements, parameters begin at multiples of 256 elements.
If the update of a parameter must see all of it, or keeps states that do not belong to single elements, no parameter of
the unit is cut. Then parameters go one by one, the largest first, to the run that is emptiest so far. The frozen piece
is padded and cut into equal parts, for plans under which ranks home weights together (``spec.layout``).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple

from outcore.core.quantities import PAGE_BYTES, PARAM_ALIGN_BYTES, align_up, unaliased
from outcore.core.strides import is_dense, outermost_first, row_major

Precision = Literal["fp32", "bf16", "pure_bf16", "fp16", "fp64"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "pure_bf16", "fp16", "fp64")
TRAINED_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Dtypes of parameters that are not quantised."""
STORED_DTYPES = (*TRAINED_DTYPES, "uint8", "int8", "int16")
"""Dtypes in which states are stored."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "uint8": 1, "int8": 1, "int16": 2}
DTYPE_BYTES |= {"int32": 4, "int64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}
WITH_MASTERS: tuple[Precision, ...] = ("bf16", "fp16")
"""Precisions whose weights have fp32 masters."""
Sharing = Literal["replicate", "copy", "cut", "node"]
StateFormat = Literal["fp32", "bf16", "8bit"]
MasterFormat = Literal["fp32", "compact"]
WIDE: Final = "wide"
"""Format of fp32 states of a bf16 weight without an fp32 master, which is updated in fp32. Users call it ``fp32``."""
StoredFormat = StateFormat | MasterFormat | Literal["wide"]


class Part(NamedTuple):
    """Place of one parameter's elements in a layout, as a flat tensor in memory order."""

    dtype: str
    """A key of DTYPE_BYTES."""
    numel: int
    offset: int
    """Position of its first byte in the layout."""

    @property
    def nbytes(self) -> int:
        """Size, without padding."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateForm:
    """One state of one parameter."""

    name: str
    """Torch's name of the state, or ``master``."""
    dtype: str
    """A key of DTYPE_BYTES."""
    shape: tuple[int, ...] | None = None
    """None: the parameter's shape and strides. ``()``: a single number, which a step reads before it begins."""
    shared_by: int = 1
    """Number of neighbouring elements of the parameter that share one element of the state."""
    initial: float = 0.0
    """Initial value of every element."""
    format: StoredFormat = "fp32"
    """Storage format; fp32: as it is updated, whatever its dtype. Otherwise the update is in fp32."""
    is_unsigned: bool = False
    """True if it is never negative."""

    @property
    def is_number(self) -> bool:
        """Whether it is a single number, whatever the parameter's shape."""
        return self.shape == ()


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter. Tied parameters share one ParamSpec under their first name."""

    name: str
    """Fully qualified name in the model."""
    shape: tuple[int, ...]
    dtype: str
    """Compute dtype, a key of DTYPE_BYTES."""
    update_dtype: str
    """Dtype of its accumulated gradient, its master and its states."""
    requires_grad: bool
    strides: tuple[int, ...] | None = None
    """Strides as ``torch.Tensor.stride()`` gives them; None: row-major. See [Note: strides] in ``core.strides``."""
    states: tuple[StateForm, ...] | None = None
    """States that its optimizer keeps. None: all of ``ModelSpec.state_names``, with its shape and the update dtype."""
    master_format: MasterFormat = "fp32"
    """Format of its master while its weights live off the device. With weights on the device the master is fp32."""
    temporary_bytes: int = 0
    """Bytes of temporary tensors in its update. On the host they count only for parameters with ``is_whole``."""
    is_whole: bool = False
    """True if an update must not cut it."""
    stands_for: int | None = None
    """Number of elements that it counts for: of a quantised weight those in full precision, of the other tensors of
    that weight 0. None: its own number."""
    update_cost: float = 1.0
    """Time of its update on the host with an fp32 master, relative to AdamW with fp32 moments."""
    update_flops: float = 0.0
    """FLOP of matrix products in its update; on the device they take time in addition to AdamW's."""

    def __post_init__(self) -> None:
        if self.strides is not None and not is_dense(self.shape, self.strides):
            raise AssertionError(f"'{self.name}': strides {self.strides} of shape {self.shape} leave gaps or overlap")

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Dimensions in memory order, the outermost first."""
        return outermost_first(self.strides or row_major(self.shape))

    @property
    def is_indivisible(self) -> bool:
        """Whether one rank must update all of it."""
        forms = self.states or ()
        return self.is_whole or any(form.shape is not None and form.shared_by == 1 for form in forms)

    @property
    def is_coded(self) -> bool:
        """Whether a state is stored in another form than it is updated in, or beside a weight of fewer bytes."""
        return any(form.format != "fp32" for form in self.states or ())

    @property
    def draws_noise(self) -> bool:
        """Whether a state is rounded at random."""
        return any(form.format == "bf16" for form in self.states or ())

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def parameters(self) -> int:
        """Number of parameters as people count them."""
        return self.numel if self.stands_for is None else self.stands_for

    @property
    def weight_bytes(self) -> int:
        """Bytes in the compute dtype, without padding."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def update_bytes(self) -> int:
        """Bytes in the update dtype, without padding."""
        return self.numel * DTYPE_BYTES[self.update_dtype]


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """A piece of the model that moves as a whole.

    Unit "" is the root: it has all parameters that belong to no other unit, and its weights stay resident.
    """

    name: str
    """Fully qualified name of the module; "" for the root."""
    params: tuple[ParamSpec, ...]
    """Trainable parameters first, then frozen ones; module order within each."""
    buffer_bytes: int = 0
    """Bytes of module buffers; they live on the device and never move."""
    is_cut: bool = False
    """True if a call runs in several micro-batches; one backward pass sums their gradients in the update dtype."""
    num_ranks: int = 1
    """Number of processes that share the update of the unit. See [Note: runs]."""
    rank: int = 0
    """Rank whose run this process updates."""
    ranks_per_node: int = 1
    """Number of ranks on one machine; the first machine has the lowest ranks, and so on."""
    keeps_bucket: bool = False
    """True if its bucket holds gradients of several backward passes until the ranks exchange them."""

    def __post_init__(self) -> None:
        flags = [p.requires_grad for p in self.params]
        if flags != sorted(flags, reverse=True):
            raise AssertionError(f"unit '{self.name}': trainable parameters must come first")

    def __hash__(self) -> int:  # hashing all fields would take as long as the computations that are cached by unit
        return hash((self.name, self.weight_bytes, self.update_bytes, self.rank))

    @cached_property
    def homes(self) -> dict[Hashable, Any]:
        """Cache of ``weights_home``."""
        return {}

    @cached_property
    def is_quantized(self) -> bool:
        """Whether some of its weights are quantised, so that each consists of several tensors."""
        return any(param.stands_for is not None for param in self.params)

    @cached_property
    def trainable(self) -> tuple[ParamSpec, ...]:
        """The trainable parameters."""
        return tuple(p for p in self.params if p.requires_grad)

    @cached_property
    def trainable_numel(self) -> int:
        """Number of elements that this rank updates."""
        return sum(numel for _, numel in self.own_ranges)

    @cached_property
    def compact_numel(self) -> int:
        """Number of elements that this rank updates whose masters are compact off the device."""
        owned = zip(self.own_ranges, self.trainable, strict=True)
        return sum(numel for (_, numel), param in owned if param.master_format == "compact")

    @cached_property
    def update_cost_numel(self) -> float:
        """Number of elements for which AdamW would take as long as this rank's update with fp32 masters."""
        owned = zip(self.own_ranges, self.trainable, strict=True)
        return sum(numel * param.update_cost for (_, numel), param in owned)

    @cached_property
    def update_flops(self) -> float:
        """FLOP of matrix products in this rank's updates."""
        owned = zip(self.own_ranges, self.trainable, strict=True)
        return sum(param.update_flops for (_, numel), param in owned if numel)

    @cached_property
    def weight_parts(self) -> tuple[Part, ...]:
        """Place of every parameter in the weights layout."""
        frozen = self.params[len(self.trainable) :]
        sizes = (align_up(param.weight_bytes, PARAM_ALIGN_BYTES) for param in frozen)
        starts = (*self._trained_starts, *accumulate(sizes, initial=self.trainable_bytes))
        return tuple(Part(param.dtype, param.numel, at) for param, at in zip(self.params, starts, strict=False))

    @cached_property
    def _trained_sizes(self) -> tuple[int, ...]:
        """Sizes of trainable parameters, padded so that a cut falls where an update may be cut. See [Note: runs]."""
        align = PARAM_ALIGN_BYTES
        if self.num_ranks > 1:
            numel = max((64, *(form.shared_by for param in self.trainable for form in param.states or ())))
            align = max((align, *(numel * DTYPE_BYTES[param.dtype] for param in self.trainable)))
        return tuple(align_up(param.weight_bytes, align) for param in self.trainable)

    @cached_property
    def _trained_starts(self) -> tuple[int, ...]:
        """First bytes of trainable parameters in the weights layout."""
        if self._dealt_out is None:
            return tuple(accumulate(self._trained_sizes, initial=0))[:-1]
        return tuple(rank * self.run_bytes + start for rank, start in self._dealt_out)

    @cached_property
    def _dealt_out(self) -> tuple[tuple[int, int], ...] | None:
        """Rank of every trainable parameter, and its first byte in that rank's run. None: runs cut parameters."""
        if self.num_ranks == 1 or not any(param.is_indivisible for param in self.trainable):
            return None
        ends, places, sizes = [0] * self.num_ranks, dict[int, tuple[int, int]](), self._trained_sizes
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            rank = min(range(self.num_ranks), key=ends.__getitem__)
            places[i] = rank, ends[rank]
            ends[rank] += sizes[i]
        return tuple(places[i] for i in range(len(sizes)))

    @cached_property
    def own_ranges(self) -> tuple[tuple[int, int], ...]:
        """First element and number of elements that this rank updates, of every trainable parameter."""
        return self.owned(self.rank)

    def owned(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return first element and number of elements in the run of a rank, of every trainable parameter."""
        return tuple(self.held(rank, i) for i in range(len(self.trainable)))

    def held(self, rank: int, index: int) -> tuple[int, int]:
        """Return first element and number of elements in the runs of a rank, of one parameter."""
        is_frozen, part = index >= len(self.trainable), self.weight_parts[index]
        begin, run = (self.trainable_bytes, self.frozen_run_bytes) if is_frozen else (0, self.run_bytes)
        size, start = DTYPE_BYTES[part.dtype], begin + rank * run
        first, stop = (min(max(at - part.offset, 0), part.nbytes) // size for at in (start, start + run))
        return first, stop - first

    @cached_property
    def own_parts(self) -> tuple[Part, ...]:
        """Place of this rank's own elements in the weights layout, by trainable parameter."""
        pairs = zip(self.weight_parts, self.own_ranges, strict=False)
        return tuple(Part(p.dtype, n, p.offset + first * DTYPE_BYTES[p.dtype]) for p, (first, n) in pairs)

    def received_parts(self, sender: int) -> tuple[Part, ...]:
        """Return where the gradients of ``own_parts`` from one sender lie in a ``received`` slot.

        The slot holds this rank's run from every rank's bucket, in rank order.
        """
        shift = (sender - self.rank) * self.run_bytes
        return tuple(part._replace(offset=part.offset + shift if part.numel else 0) for part in self.own_parts)

    @cached_property
    def update_parts(self) -> tuple[Part, ...]:
        """Place of every trainable parameter in the update layout."""
        parts, end = [], 0
        for param, (_, numel) in zip(self.trainable, self.own_ranges, strict=True):
            parts.append(Part(param.update_dtype, numel, end))
            end += align_up(parts[-1].nbytes, PARAM_ALIGN_BYTES)
        return tuple(parts)

    @cached_property
    def bucket_parts(self) -> tuple[Part, ...]:
        """Place of the gradient of every trainable parameter in a bucket."""
        return self.update_parts if self.is_cut else self.weight_parts[: len(self.trainable)]

    @cached_property
    def bucket_bytes(self) -> int:
        """Size of a bucket."""
        return self.update_bytes if self.is_cut else self.trainable_bytes

    @cached_property
    def trainable_bytes(self) -> int:
        """Size of the trainable piece of the weights layout."""
        return self.run_bytes * self.num_ranks

    @cached_property
    def run_bytes(self) -> int:
        """Size of one rank's run of the trainable piece."""
        if self._dealt_out is None:
            return align_up(sum(self._trained_sizes), PAGE_BYTES * self.num_ranks) // self.num_ranks
        ends = (start + size for (_, start), size in zip(self._dealt_out, self._trained_sizes, strict=True))
        return align_up(max(ends), PAGE_BYTES)

    @property
    def others_bytes(self) -> int:
        """Size of one run for each other rank: the bytes that this rank receives in an exchange of gradients."""
        return self.trainable_bytes - self.run_bytes

    @cached_property
    def frozen_run_bytes(self) -> int:
        """Size of one rank's run of the frozen piece."""
        nbytes = sum(align_up(p.weight_bytes, PARAM_ALIGN_BYTES) for p in self.params if not p.requires_grad)
        return align_up(nbytes, PAGE_BYTES * self.num_ranks) // self.num_ranks

    @cached_property
    def weight_bytes(self) -> int:
        """Size of the weights layout."""
        return self.trainable_bytes + self.frozen_run_bytes * self.num_ranks

    @cached_property
    def update_bytes(self) -> int:
        """Size of the update layout: of accumulated gradients, and of each state that uses it. See ``unaliased``."""
        sizes = [DTYPE_BYTES[param.update_dtype] for param in self.trainable]
        most = max(
            sum(align_up(n * size, PARAM_ALIGN_BYTES) for (_, n), size in zip(self.owned(rank), sizes, strict=True))
            for rank in range(self.num_ranks)
        )
        return unaliased(align_up(most, PAGE_BYTES))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All units of a model in module order, the root first."""

    units: tuple[UnitSpec, ...]
    state_names: tuple[str, ...]
    """Torch's names of the optimizer states, without master weights: ("exp_avg", "exp_avg_sq")."""
    precision: Precision
    micro_batches_in_unit: int = 1
    """Number of pieces in which every unit runs a batch."""
    sharing: Sharing = "replicate"
    """How ranks share weights in plans made for this model. See ``spec.layout.shared``."""

    def among(
        self, num_ranks: int, rank: int, ranks_per_node: int | None = None, *, keeps_buckets: bool = False
    ) -> ModelSpec:
        """Return the same model, updated by several ranks. See [Note: runs].

        Args:
            num_ranks: Number of processes.
            rank: Rank of this process.
            ranks_per_node: Ranks on one machine; None: all of them.
            keeps_buckets: See ``UnitSpec.keeps_bucket``.
        """
        ranks: Any = {"num_ranks": num_ranks, "rank": rank, "ranks_per_node": ranks_per_node or num_ranks}
        units = (replace(unit, **ranks, keeps_bucket=keeps_buckets) for unit in self.units)
        return replace(self, units=tuple(units))
