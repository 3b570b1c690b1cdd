"""The names in other libraries that the mixin overrides, calls or reads: an upgrade that changes one fails here."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import transformers
import trl
from accelerate import Accelerator
from transformers import Trainer

from outcore.integrations import refusals
from outcore.integrations.streamed_checkpoints import StreamedCheckpoints
from outcore.integrations.transformers import _ACCELERATE_PREPARED, OutcoreMixin

from .rig import CHECKPOINTING, ON_CPU, WARNINGS, llama

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]

VERSIONS = f"transformers {transformers.__version__}, trl {trl.__version__}: adapt outcore/integrations"
OWN = {"__init__", "train", "compute_ref_log_probs"}
OVERRIDDEN = sorted(
    name
    for kind in (OutcoreMixin, StreamedCheckpoints)
    for name, value in vars(kind).items()
    if inspect.isfunction(value) and name not in OWN and not name.startswith("_outcore_")
)

READ = {"_run_epoch": {"epoch", "resume_from_checkpoint", "epochs_trained", "steps_trained_in_current_epoch"}}
"""Methods that pass all arguments on -> those that they read."""


def parameters(function):
    return [p.name for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden_methods(name):
    theirs = getattr(Trainer, name, None)
    assert theirs is not None, f"Trainer.{name} is gone; {VERSIONS}"
    assert f"self.{name}(" in inspect.getsource(transformers.trainer), f"nobody calls Trainer.{name}; {VERSIONS}"
    mine = parameters(getattr(OutcoreMixin, name))
    passes_on = mine == ["self", "args", "kwargs"] and READ[name] <= {*parameters(theirs)}
    assert passes_on or mine == parameters(theirs), f"Trainer.{name} takes {parameters(theirs)}; {VERSIONS}"


@pytest.mark.parametrize("kind", [trl.DPOTrainer, trl.KTOTrainer])
def test_reference_log_probabilities(kind):
    theirs = getattr(kind, "compute_ref_log_probs", None)
    assert theirs is not None, f"{kind.__name__}.compute_ref_log_probs is gone; {VERSIONS}"
    assert parameters(theirs) == parameters(OutcoreMixin.compute_ref_log_probs), VERSIONS
    assert "self.compute_ref_log_probs(model, " in inspect.getsource(kind), VERSIONS


@pytest.mark.parametrize(
    "name",
    """accelerator args callback_handler data_collator lr_scheduler model optimizer processing_class state train_dataset
    """.split(),
)
def test_attributes_of_a_trainer(name):
    assert f"self.{name} = " in inspect.getsource(Trainer) or f"self.{name}, self." in inspect.getsource(Trainer), (
        VERSIONS
    )


def test_arguments_that_are_refused():
    known = {field.name for field in dataclasses.fields(trl.DPOConfig)}
    assert set(refusals._ARGUMENTS) <= known, f"{set(refusals._ARGUMENTS) - known} are gone; {VERSIONS}"
    assert isinstance(transformers.TrainingArguments.n_gpu, property)


@pytest.mark.parametrize("kind", [trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, trl.GRPOConfig, trl.RewardConfig])
def test_settings_of_models_that_are_read_by_trl(kind):
    assert "model_init_kwargs" in {field.name for field in dataclasses.fields(kind)}, VERSIONS


def test_prepared_optimizers_are_left_alone():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    setattr(optimizer, _ACCELERATE_PREPARED, True)
    optimizer.step_was_skipped = False
    accelerator = Accelerator(cpu=ON_CPU)
    assert accelerator.prepare(optimizer) is optimizer, f"accelerate wraps prepared optimizers; {VERSIONS}"
    assert accelerator.optimizer_step_was_skipped is False
    assert (accelerator.distributed_type, accelerator.mixed_precision) == ("NO", "no")
    assert accelerator.state.dynamo_plugin.backend == "NO"


def test_prepared_models_are_left_alone():
    """On several ranks Accelerate would wrap other models in DDP."""
    source = inspect.getsource(Accelerator.prepare_model)
    prepared, wraps = source.index(f'"{_ACCELERATE_PREPARED}"'), source.index("DistributedDataParallel(")
    assert prepared < source.index("if not evaluation_mode:") < wraps, VERSIONS


def test_activation_checkpointing_is_an_attribute_of_modules():
    model = llama()
    getattr(model, f"{CHECKPOINTING}_enable")()
    assert any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()), VERSIONS


@pytest.mark.parametrize("name", ["hf_device_map", "quantization_method"])
def test_attributes_of_models(name):
    assert f'"{name}"' in inspect.getsource(transformers.trainer), VERSIONS
