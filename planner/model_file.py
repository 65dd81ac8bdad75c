"""What a user names as MODEL: found, read and made ready to build, on whatever device is current.

The tracer builds it on the meta device, the executor on a real one; both use the same ``LoadedModel``.
Resolving imports no torch; loading does.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pydantic import ValidationError

from costmodels.vocabulary.bounds import MOST_TEXT
from planner.errors import ModelError, PlanError, UntrustedModelError
from planner.json_file import listed, read_content, read_object, violations_of
from planner.models.catalog import find_preset, list_presets
from planner.models.config import FamilyConfig, usual_seq_len
from planner.models.config_only import family_of
from planner.models.own_code import file_digest
from planner.plan.schema import ModelSection as PlannedModel

if TYPE_CHECKING:
    import torch
    from torch import nn

    from planner.models.loss import TrainingLoss

    Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
    ExampleInputs = Callable[[int, int], object] | Batch | torch.Tensor

HELD = "module:"
MOST_CONFIG_BYTES = 2**20  # of a model's config; those of public models have a few thousand
SEARCH_AGAIN = "put the file back, or search again: planner search MODEL -o plan.json"


class ModelKind(StrEnum):
    """The forms MODEL may have."""

    PYTHON = "python"
    HUGGINGFACE = "huggingface"
    PRESET = "preset"
    GRAPH = "graph"
    MODULE = "module"  # held in Python: what a plan calls ``module:`` and the name of its class


@dataclass(frozen=True)
class ModelSource:
    """Which model, before anything of it is executed."""

    name: str  # as the user named it
    kind: ModelKind
    path: Path | None = None
    factory: str | None = None  # of a Python file
    recorded: Mapping[str, str] | None = None  # of the files that its code is made of, as a plan has them


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be built, with the inputs and the loss it is trained with.

    ``loss_fn(output, batch)`` takes what the module returned and the batch: the inputs, and for
    token models ``labels`` (int64, already shifted by one, -100 where nothing is to be learned). It
    is the loss of a whole batch; ``training_loss`` is the same loss as it is put together of parts.
    """

    source: ModelSource
    digest: str  # of the content, not of the path
    default_seq_len: int
    vocab_size: int | None  # None: not a token model, or not known
    build: Callable[[], nn.Module]
    example_inputs: Callable[[int, int], Batch]  # (batch_size, seq_len) -> inputs of the module
    loss_fn: Callable[[object, Batch], torch.Tensor]
    training_loss: TrainingLoss
    left_out: str | None = None  # what the published model has and this one has not
    training_notes: tuple[str, ...] = ()  # why what it learns under ``training_loss`` is not what it is made for
    stands_for: str | None = None  # set where this is not the model itself but one of the same sizes: why


def resolve_model(name: str) -> ModelSource:
    """Decides what ``name`` is by looking at the file system and the presets; ModelError if nothing."""
    if name.startswith(HELD):
        return ModelSource(name, ModelKind.MODULE)
    file_name, _, factory = name.rpartition(":")
    if factory.isidentifier() and file_name.endswith(".py"):
        return ModelSource(name, ModelKind.PYTHON, _existing(Path(file_name)), factory)
    path = Path(name)
    if len(name) > MOST_TEXT:
        raise ModelError(f"no model has a name of {len(name):,} characters", hint="name a file or a preset")
    if name.endswith(".py"):
        return ModelSource(name, ModelKind.PYTHON, _existing(path))
    if name and os.path.isdir(name):
        if not (path / "config.json").is_file():
            raise ModelError(f"folder {name} holds no config.json", hint="name a model.py, a config.json or a preset")
        return ModelSource(name, ModelKind.HUGGINGFACE, _existing(path / "config.json"))
    if name.endswith(".json"):
        return ModelSource(name, _kind_of_json(_existing(path)), path)
    if find_preset(name) is not None:
        return ModelSource(name, ModelKind.PRESET)
    if name and os.path.isfile(name):
        raise ModelError(f"{name} is no model", hint="give a model.py, a config.json, a traced graph.json or a preset")
    raise ModelError(f"no model {name!r}: neither a file nor a preset", hint=_nearest(name))


def planned_source(model: PlannedModel) -> ModelSource:
    """Which model a plan names, found to be what the plan was made for where it is code; none of it is executed.

    UntrustedModelError where code lies outside the folder of the plan, PlanError where it is not what is recorded.
    """
    check_in_a_file(model)
    source = resolve_model(model.source)
    if source.kind is not ModelKind.PYTHON:
        return source
    assert source.path is not None
    file, origin = source.path.resolve(), model.origin
    if origin is not None and not origin.is_trusted and not file.is_relative_to(origin.folder):
        raise UntrustedModelError(
            f"the model of this plan is code outside the plan's own folder: {file} is not in {origin.folder}",
            hint="add --trust where you trust that file as a program of your own, or move it beside the plan",
        )
    if not model.files:
        _check_alone(source, model)
        return source
    if file.name not in model.files:
        raise PlanError(
            f"{model.source} is not the model that this plan was made for: it records no file {file.name}",
            hint=SEARCH_AGAIN,
        )
    for name, digest in model.files.items():
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or file_digest(str(file.parent / place)) != digest:
            raise PlanError(
                f"{model.source} is not the model that this plan was made for: {name} is not the file it records",
                hint=SEARCH_AGAIN,
            )
    return replace(source, recorded=model.files)


def _check_alone(source: ModelSource, model: PlannedModel) -> None:
    """PlanError where a plan that records no files was made for something else than this one file."""
    assert source.path is not None
    content = read_content(source.path, ModelError)
    if model.origin is not None and model.origin.is_trusted:
        return
    if digest_of("python", source.factory or "build_model", content) != model.digest:
        raise PlanError(
            f"{model.source} is not the model that this plan was made for, or it imports other files of its folder, "
            "which plans of earlier versions do not record",
            hint=f"{SEARCH_AGAIN}; --trust runs it as it is now",
        )


def check_num_params(model: PlannedModel, found: int) -> None:
    """PlanError where a plan's model, which has ``found`` parameters, is not as large as the plan says.

    0: of a plan by hand, for which nobody has counted them.
    """
    if model.num_params not in (0, found):
        raise PlanError(
            f"model.num_params is {model.num_params:,}, and {model.source} has {found:,} parameters",
            hint="was the plan made for another model, or edited? search again: planner search MODEL -o plan.json",
        )


def load_model(source: ModelSource) -> LoadedModel:
    """Reads and, for a Python file, executes the user's code. ModelError says what is wrong and where."""
    match source.kind:
        case ModelKind.PYTHON:
            return _load_python(source)
        case ModelKind.HUGGINGFACE:
            return _load_huggingface(source)
        case ModelKind.PRESET:
            return _load_preset(source)
        case ModelKind.MODULE:
            raise _not_in_a_file(source)
        case ModelKind.GRAPH:
            raise ModelError(
                f"{source.name} is a traced graph: it can be planned for, but holds no module to build",
                hint="name the model file, config or preset that it was traced from",
            )


def check_in_a_file(model: PlannedModel) -> None:
    """ModelError where a plan was made for a module that was held in Python."""
    if model.source.startswith(HELD):
        raise _not_in_a_file(resolve_model(model.source))


def _not_in_a_file(source: ModelSource) -> ModelError:
    return ModelError(
        f"{source.name} is a module that was held in Python, not a file: it cannot be built again",
        hint="train it with planner.parallelize(model, plan) in a script of your own; or put a build_model() that "
        "returns it into a model.py and search again",
    )


def held_model(
    module: nn.Module,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[[object, Batch], torch.Tensor] | None = None,
) -> LoadedModel:
    """A module held in Python, on meta or with weights, as a model file with the same inputs and loss would be.

    ``example_inputs``: as in a model file, or one micro-batch; None: token ids. ModelError where that cannot be traced.
    """
    from planner.models.held import HeldModule, as_batch, inputs_like, nest_of, own_seq_len, seq_len_of
    from planner.models.inputs import taken_by_loss, taken_in_float32
    from planner.models.loss import NEXT_TOKEN, TrainingLoss, next_token_loss
    from planner.models.python_file import max_seq_len_of

    longest = usual_seq_len(max_seq_len_of(module))
    if example_inputs is None:
        inputs, seq_len, nest = token_inputs, longest, None
    elif callable(example_inputs):
        makes = example_inputs
        inputs, seq_len = lambda b, s: as_batch(makes(b, s)), own_seq_len(makes, longest)
        nest = nest_of(makes(2, seq_len))
    else:
        inputs, seq_len = inputs_like(example_inputs), seq_len_of(as_batch(example_inputs))
        nest = nest_of(example_inputs)
    held = HeldModule.of(module, nest)
    return LoadedModel(
        source=ModelSource(HELD + type(module).__name__, ModelKind.MODULE),
        digest="",  # that of its graph, which is the only content there is
        default_seq_len=seq_len,
        vocab_size=None,
        build=held.build,
        example_inputs=inputs,
        loss_fn=next_token_loss if loss_fn is None else taken_in_float32(nest, loss_fn),
        training_loss=NEXT_TOKEN if loss_fn is None else taken_by_loss(nest, TrainingLoss(loss_fn)),
    )


def _existing(path: Path) -> Path:
    if os.path.isdir(path):
        raise ModelError(f"{path} is a folder", hint="name the file in it")
    if not os.path.isfile(path):  # unlike Path's, it answers for any name
        raise ModelError(f"no such file: {path}", hint="check the path; `planner models` lists what needs no file")
    real = os.path.realpath(path)
    if real.encode(errors="ignore").decode() != real:
        raise ModelError(f"the path {real} is not UTF-8, as plans are", hint="rename the file, or the folder it is in")
    return path


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), [preset.name for preset in list_presets()], n=3, cutoff=0.5)
    return (f"nearest presets: {', '.join(near)}; " if near else "") + "`planner models` lists all presets"


def _kind_of_json(path: Path) -> ModelKind:
    keys = read_object(path, ModelError).keys()
    if {"nodes", "units"} & keys:
        return ModelKind.GRAPH
    if path.stat().st_size > MOST_CONFIG_BYTES:
        raise ModelError(
            f"{path} is larger than the {MOST_CONFIG_BYTES:,} bytes that a model's config may have",
            hint="is it the right file?",
        )
    if {"model_type", "architectures"} & keys:
        return ModelKind.HUGGINGFACE
    if "family" in keys:
        return ModelKind.PRESET
    raise ModelError(
        f"{path} is neither a traced graph, nor a Hugging Face config (no model_type), nor a family config (no family)",
        hint="`planner trace MODEL -o graph.json` writes a graph",
    )


def digest_of(*parts: bytes | str) -> str:
    """SHA-256 over ``parts``, each with its length, so that no two lists of parts collide."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def token_inputs(batch_size: int, seq_len: int) -> Batch:
    """The default inputs: ``input_ids``, int64 (batch_size, seq_len)."""
    import torch

    return {"input_ids": torch.zeros(batch_size, seq_len, dtype=torch.int64)}


def _load_preset(source: ModelSource) -> LoadedModel:
    config = _family_config(source)
    preset = find_preset(source.name) if source.path is None else None
    loaded = family_model(source, config)
    return replace(loaded, left_out=preset.left_out if preset else None)


def _family_config(source: ModelSource) -> FamilyConfig:
    if source.path is None:
        preset = find_preset(source.name)
        if preset is None:
            raise ModelError(f"no preset {source.name!r}", hint=_nearest(source.name))
        return preset.config
    try:
        return FamilyConfig.model_validate(read_object(source.path, ModelError))
    except ValidationError as error:
        problems = listed(violations_of(error))
        raise ModelError(f"{source.path}: {problems}", hint="see `planner models --json`") from error


# Hugging Face's model types that are members of the generic families, to the last matrix and norm.
FAMILY_TYPES = ("gpt2", "llama", "mixtral")
BIASES = ("attention_bias", "mlp_bias")  # which our family of Llamas has none of, and a Llama's config may ask for


def family_config_of(name: str) -> FamilyConfig | None:
    """The shape of MODEL where a file or preset tells all of it; None where it does not, or cannot be found."""
    try:
        source = resolve_model(name)
        if source.kind is ModelKind.PRESET:
            return _family_config(source)
        if source.kind is not ModelKind.HUGGINGFACE or source.path is None:
            return None
        content = read_object(source.path, ModelError)
    except ModelError:
        return None
    is_member = content.get("model_type") in FAMILY_TYPES and not any(map(content.get, BIASES))
    return family_of(content) if is_member else None


def content_digest(source: ModelSource) -> str:
    """Of what the user named, without running any of it: of a Python file its content, its path and the factory."""
    match source.kind:
        case ModelKind.PRESET:
            return _family_digest(_family_config(source))
        case ModelKind.HUGGINGFACE:
            assert source.path is not None
            return _huggingface_digest(read_object(source.path, ModelError))
        case ModelKind.MODULE:
            raise _not_in_a_file(source)
        case ModelKind.PYTHON | ModelKind.GRAPH:
            assert source.path is not None
            content = read_content(source.path, ModelError)
            return digest_of("file", str(source.path.resolve()), source.factory or "", content)


def _family_digest(config: FamilyConfig) -> str:
    return digest_of("family", config.model_dump_json())


def _huggingface_digest(content: dict[str, object]) -> str:
    return digest_of("huggingface", json.dumps(content, sort_keys=True))


def family_model(source: ModelSource, config: FamilyConfig) -> LoadedModel:
    """The model that ``config`` describes, whoever wrote the config."""
    from planner.models.family import build_family
    from planner.models.loss import NEXT_TOKEN, next_token_loss

    return LoadedModel(
        source=source,
        digest=_family_digest(config),
        default_seq_len=config.usual_seq_len,
        vocab_size=config.vocab,
        build=lambda: build_family(config),
        example_inputs=token_inputs,
        loss_fn=next_token_loss,
        training_loss=NEXT_TOKEN,
    )


def _load_huggingface(source: ModelSource) -> LoadedModel:
    from planner.models.held import own_seq_len
    from planner.models.huggingface import HuggingFaceModel
    from planner.models.loss import NEXT_TOKEN, next_token_loss

    if source.path is None:
        raise ModelError(f"{source.name} names no config file")
    content = read_object(source.path, ModelError)
    try:
        model = HuggingFaceModel.from_file(source.path)
    except ModelError as error:
        family = family_of(content)
        if family is None:
            raise
        stand_in = family_model(source, family)
        return replace(stand_in, digest=_huggingface_digest(content), stands_for=error.message)
    return LoadedModel(
        source=source,
        left_out=model.left_out(content),
        digest=_huggingface_digest(content),
        default_seq_len=own_seq_len(model.example_inputs, usual_seq_len(model.max_seq_len)),
        vocab_size=model.vocab_size,
        build=model.build,
        example_inputs=model.example_inputs,
        loss_fn=next_token_loss,
        training_loss=NEXT_TOKEN,
        training_notes=model.training_notes,
    )


def _load_python(source: ModelSource) -> LoadedModel:
    from planner.models.loss import NEXT_TOKEN, next_token_loss
    from planner.models.python_file import PythonModel

    if source.path is None:
        raise ModelError(f"{source.name} names no file")
    model = PythonModel.from_file(source.path, source.factory, source.recorded)
    return LoadedModel(
        source=source,
        digest=digest_of("python", model.factory_name, *model.contents),
        default_seq_len=model.seq_len,
        vocab_size=model.vocab_size,
        build=model.build,
        example_inputs=model.example_inputs or token_inputs,
        loss_fn=model.loss_fn or next_token_loss,
        training_loss=model.training_loss or NEXT_TOKEN,
    )
