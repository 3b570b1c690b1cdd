"""Whether compact masters are exact: random weights, and every bit pattern of fp32, stored and read back.

Prints one JSON object. ``normal`` are weights as they occur (deviations from 0.001 to 10), ``uniform`` are random bits,
``every`` are all 4,294,967,296 patterns. Bits are compared. ``other`` counts patterns that came back changed; all of
them must be ``signalling``: NaNs whose upper half would be an infinity, which come back quiet.

    python benchmarks/compact_masters.py --numbers 100_000_000 --every
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator

import torch
from measuring import context

from outcore.optim.compact import HAS_NAN, close_masters, masters_of
from outcore.spec.layout import ROW_NUMEL

PIECE = 2**22


def normal(count: int) -> Iterator[torch.Tensor]:
    """Weights with deviations from 0.001 to 10."""
    for seed, size in enumerate(pieces(count)):
        generator = torch.Generator().manual_seed(seed)
        yield (torch.randn(size, generator=generator) * 10.0 ** (seed % 5 - 3)).view(torch.int32)


def uniform(count: int) -> Iterator[torch.Tensor]:
    """Random bits."""
    for seed, size in enumerate(pieces(count)):
        yield torch.randint(-(2**31), 2**31, (size,), generator=torch.Generator().manual_seed(seed)).int()


def every() -> Iterator[torch.Tensor]:
    """All bit patterns."""
    for start in range(-(2**31), 2**31, PIECE):
        yield torch.arange(start, start + PIECE, dtype=torch.int64).int()


def pieces(count: int) -> list[int]:
    """Sizes of the pieces that ``count`` numbers are cut into."""
    return [PIECE] * (count // PIECE) + ([count % PIECE] if count % PIECE else [])


def compare(numbers: Iterable[torch.Tensor]) -> dict[str, int]:
    """Store numbers, and compare what is read back."""
    found = dict.fromkeys(("numbers", "other", "signalling", "weights_other_than_rounded", "rows", "rows_with_ties"), 0)
    for bits in numbers:
        size, value = len(bits), bits.view(torch.float32)
        weights, lower = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16)
        codes = torch.empty(-(-size // ROW_NUMEL), dtype=torch.uint8)
        close_masters(value.clone(), weights, lower, codes)
        got = masters_of(weights, lower, codes).view(torch.int32)
        is_signalling = ((bits & 0x7FFF0000) == 0x7F800000) & ((bits & 0xFFFF) != 0)
        is_other = got != bits
        if bool((is_other & ~(is_signalling & (got == bits | 0x400000))).any()):
            raise AssertionError("a number came back as another one")
        rounded, is_number = value.bfloat16(), ~value.isnan()
        found["numbers"] += size
        found["other"] += int(is_other.sum())
        found["signalling"] += int(is_signalling.sum())
        differ = (weights.view(torch.int16) != rounded.view(torch.int16)) & is_number
        found["weights_other_than_rounded"] += int(differ.sum())
        found["rows"] += len(codes)
        found["rows_with_ties"] += int((codes < HAS_NAN).sum())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--numbers", type=int, default=100_000_000, help="of each random kind (default: 1e8)")
    parser.add_argument("--every", action="store_true", help="and all patterns of fp32")
    args = parser.parse_args()
    kinds = {"normal": normal(args.numbers), "uniform": uniform(args.numbers)}
    if args.every:
        kinds |= {"every": every()}
    results = {name: compare(numbers) for name, numbers in kinds.items()}
    print(json.dumps({"benchmark": "compact_masters", **context(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
