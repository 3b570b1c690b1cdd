"""Every architecture of Transformers, tiny: two steps of a plain loop, and two steps with the least device memory.

An architecture is left out and counted if it cannot be made tiny from its configuration alone, or if its plain loop
fails with such sizes. The others must have the plain loop's losses, weights and buffers bit for bit; where
docs/reference/exceptions.md says that the order of a sum is not defined, they must have them up to rounding.

python research/outside/architectures.py --report report.md
python research/outside/architectures.py --task image --kinds beit vit
"""

from __future__ import annotations

import argparse
import collections
import copy
import logging
import random
import signal
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import outcore

TASKS: Mapping[str, Mapping[str, Any]] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "audio": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}
USED_ELSEWHERE = frozenset({"flaubert", "funnel", "inkling2_text", "xlm"})
"""Kinds whose blocks use an argument more than once that is also used outside of them."""
MOST_PARAMETERS, ROUNDING, MOST_S = 20_000_000, 2e-5, 180
SHARES = (0.5, 0.7, 0.9, 1.2, 2.0, 4.0, 10.0)
"""Device budgets as shares of the bytes of weights; the least that fits is used."""

SIZES = {
    32: "hidden_size n_embd d_model dim embedding_size word_embed_proj_dim attention_hidden_size emb_dim embed_dim "
    "lru_width",
    64: "intermediate_size n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim hidden_dim ffn_hidden_size mlp_dim "
    "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions",
    4: "num_hidden_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_experts num_local_experts n_routed_experts time_step_rank conv_kernel mamba_n_heads mamba_num_heads",
    3: "n_layer n_layers num_layers num_channels num_labels",
    2: "num_key_value_heads encoder_layers decoder_layers num_decoder_layers num_experts_per_tok eos_token_id expand",
    8: "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim state_size patch_size "
    "relative_attention_num_buckets mamba_d_state rotary_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim "
    "attention_window_size sliding_window",
    1: "n_group topk_group bos_token_id decoder_start_token_id",
    0: "pad_token_id",
    128: "vocab_size",
}
TINY = {name: size for size, names in SIZES.items() for name in names.split()} | {"image_size": 32}
LATENT = ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "esmc", "glm4_moe_lite", "glm_moe_dsa")
WINDOWS = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 2}
MORE: dict[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4} for kind in (*LATENT, "minicpm3", "youtu")},
    **{kind: {"head_dim": 8} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{kind: {"decoder_start_token_id": 0} for kind in ("t5", "longt5", "switch_transformers")},
    **{kind: dict(WINDOWS) for kind in ("swin", "swinv2")},
    "bamba": {"attn_layer_indices": [1, 3]},
    "bit": {"hidden_sizes": [16, 32], "depths": [2, 2], "embedding_size": 8, "num_groups": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "resnet": {"hidden_sizes": [16, 32], "depths": [2, 2], "embedding_size": 8, "layer_type": "basic"},
}
LESS = {
    "falcon": ("head_dim",),
    "funnel": ("num_hidden_layers",),
    "prophetnet": ("num_hidden_layers",),
    "swin": ("hidden_size",),
    "swinv2": ("hidden_size",),
    "xlnet": ("max_seq_len", "max_position_embeddings"),
}


class Outcome(NamedTuple):
    """The outcome of one architecture: equal, rounding, different, refused, failed or left out."""

    verdict: str
    why: str = ""


class _TooLongError(BaseException):
    """An architecture takes too long."""


def config_of(kind: str) -> Any:
    """The smallest configuration that most blocks accept."""
    usual = CONFIG_MAPPING[kind]()
    sizes = {name: size for name, size in TINY.items() if name not in LESS.get(kind, ())}
    if hasattr(usual, "qk_rope_head_dim"):
        sizes.pop("head_dim", None)
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
    taken = {
        name: size
        for name, size in sizes.items()
        if hasattr(usual, name)
        and not isinstance(getattr(usual, name), list | tuple | dict)
        and (getattr(usual, name) is not None or name in tokens)
    }
    return type(usual)(**{**taken, **MORE.get(kind, {})})


def batch_for(task: str, config: Any) -> dict[str, torch.Tensor]:
    """A batch of two rows."""
    generator = torch.Generator().manual_seed(1)
    if task == "audio":
        return {"input_values": torch.randn(2, 4000, generator=generator), "labels": torch.tensor([0, 1])}
    if task == "image":
        side = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
        pixels = torch.randn(2, getattr(config, "num_channels", 3), side, side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 100, (2, 16), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def train(model: nn.Module, optimizer: Any, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Train two steps. Returns their losses."""
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        np.random.seed(step)  # noqa: NPY002 (models of audio use it)
        random.seed(step)
        loss = model(**batch).loss.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for all parameters of a model."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def compare(task: str, kind: str) -> Outcome:
    """Compare both loops on one architecture."""
    try:
        model = model_of(task, kind)
        if isinstance(model, Outcome):
            return model
        batch, plain = batch_for(task, model.config), copy.deepcopy(model)
        losses = train(plain, adamw(plain), batch)
    except Exception as error:  # from any library
        text = str(error).splitlines()[0][:100] if str(error) else ""
        return Outcome("left out", f"{type(error).__name__}: {text}")
    try:
        mine = _trained(model, batch)
    except Exception as error:
        verdict = "refused" if isinstance(error, outcore.UnsupportedError) else "failed"
        return Outcome(verdict, f"{type(error).__name__}: {error}")
    pairs = [
        *zip(losses, mine, strict=True),
        *zip(plain.state_dict().values(), model.state_dict().values(), strict=True),
    ]
    apart = max([float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()])
    verdict = "rounding" if kind in USED_ELSEWHERE and apart < ROUNDING else "different"
    return Outcome(verdict, f"{apart:.1e}") if apart else Outcome("equal")


def model_of(task: str, kind: str) -> Any:
    """Return a tiny model in training mode, or the reason why it is left out."""
    config, name = config_of(kind), TASKS[task][kind]
    build = getattr(transformers, name if isinstance(name, str) else name[0])
    with torch.device("meta"):
        count = sum(p.numel() for p in build(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        return Outcome("left out", f"{count / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    return build(config).train()


def _trained(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    for share in SHARES:
        try:
            with outcore.prepare(
                model, adamw(model), budget=outcore.Budget(device=int(nbytes * share), host="2GiB")
            ) as (model, optimizer):
                return train(model, optimizer, batch)
        except outcore.PlanInfeasibleError:
            if share == SHARES[-1]:
                raise
    raise AssertionError


def _stop(_signum: int, _frame: FrameType | None) -> None:
    raise _TooLongError


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: The number of architectures that are different or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--kinds", nargs="*", help="by default all")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _stop)
    found: dict[str, dict[str, Outcome]] = {}
    for task in [args.task] if args.task else TASKS:
        for kind in args.kinds or TASKS[task]:
            if kind not in TASKS[task]:
                continue
            signal.alarm(MOST_S)
            try:
                outcome = compare(task, kind)
            except _TooLongError:
                outcome = Outcome("left out", f"more than {MOST_S} s")
            finally:
                signal.alarm(0)
            found.setdefault(task, {})[kind] = outcome
            print(task, kind, *outcome, flush=True)
    if args.report is not None:
        args.report.write_text(report(found))
    return sum(o.verdict in ("different", "failed") for kinds in found.values() for o in kinds.values())


def report(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Write the report as Markdown."""
    verdicts = ("equal", "rounding", "different", "failed", "refused", "left out")
    lines = [f"| task | {' | '.join(verdicts)} |", "|---" * (len(verdicts) + 1) + "|"]
    for task, kinds in found.items():
        counts = collections.Counter(outcome.verdict for outcome in kinds.values())
        lines.append(f"| {task} | {' | '.join(str(counts[v]) for v in verdicts)} |")
    for verdict in verdicts:
        kinds = [
            f"{kind} ({task})" for task, all_of in found.items() for kind, o in all_of.items() if o.verdict == verdict
        ]
        lines += ["", f"*{verdict.capitalize()}*: {', '.join(kinds) or 'none'}."]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return "\n".join(["# Architectures of Transformers", "", versions, "", *lines, ""])


if __name__ == "__main__":
    raise SystemExit(main())
