"""A model described by a Hugging Face config.json, built by ``transformers``; weights are never read."""

# pyright: reportPrivateUsage=false
# transformers has no public name for the attention of a config that is built without weights.

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from planner.errors import ModelError
from planner.models.causal_masks import without_plain_masks
from planner.models.routed_experts import with_routed_experts
from planner.models.windowed_attention import WINDOWED_ATTENTION, takes_windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

UNMASKED_ATTENTION = "planner_sdpa"
# Makes a mask of its own out of the causal one: without that, positions see what follows. Doge is the only one of the
# 110 kinds of transformers 5.23 that were held against their own attention.
_ADDS_TO_ITS_MASK = ("doge",)
# Of scans and linear attention, by their packages. A causal convolution by itself takes little time either way.
_LIBRARIES = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}
DEFAULT_IMAGE_SIZE = 224  # as in ImageNet training

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]


def for_training(module: nn.Module) -> nn.Module:
    """``module``, whose models of transformers keep no keys and values for tokens that come later: they do unless told.

    No step of training reads them, and the object that holds them goes from block to block: ranks that have other
    blocks have no part in it. Masks that say nothing, and experts that no router chose, are left out as well.
    """
    if "transformers" in sys.modules:
        from transformers import PretrainedConfig

        for each in module.modules():
            config = getattr(each, "config", None)
            if isinstance(config, PretrainedConfig) and getattr(config, "use_cache", False):
                config.use_cache = False
    return _as_trained(module)


def _as_trained(module: nn.Module) -> nn.Module:
    return with_routed_experts(without_plain_masks(module))


def shifts_labels(module: nn.Module) -> bool:
    """Whether ``module`` is a causal model of transformers, to which labels are the tokens of their own positions."""
    if "transformers" not in sys.modules:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if any(getattr(getattr(each, "config", None), "is_encoder_decoder", False) for each in module.modules()):
        return False
    names = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(type(each).__name__ in names for each in module.modules())


@dataclass(frozen=True)
class HuggingFaceModel:
    """A config and the class of ``transformers`` that it names."""

    path: Path
    config: PretrainedConfig

    @staticmethod
    def from_file(path: Path) -> HuggingFaceModel:
        """Reads a config.json; ModelError where transformers is missing or does not know it."""
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise ModelError(
                f"{path} is a Hugging Face config, and transformers is not installed", hint="pip install 'planner[hf]'"
            ) from error
        try:
            with contextlib.redirect_stdout(sys.stderr):
                config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        except Exception as error:  # its configs check themselves, each in its own way
            told = " ".join(str(error).strip().split("\n\n")[0].split()) or type(error).__name__
            raise ModelError(
                f"{path}: transformers cannot read it: {told}", hint="check model_type, and the config against its docs"
            ) from error
        try:
            return HuggingFaceModel(path, _of_its_class(config))
        except ValueError as error:  # which of its configs is that of the text
            raise ModelError(
                f"{path}: {config.model_type} has several models of text", hint="wrap the one to train in a model.py"
            ) from error

    @property
    def max_seq_len(self) -> int | None:
        """Positions the model is made for, where the config says."""
        config = self.config.get_text_config()
        names = ("max_position_embeddings", "max_target_positions")  # the latter of a decoder of sound
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids."""
        value = getattr(self.config.get_text_config(), "vocab_size", None)
        return value if isinstance(value, int) and value > 0 else None

    def build(self) -> nn.Module:
        """The module with fresh weights, on the current default device, attention by SDPA where it can be."""
        config = copy.deepcopy(self.config)
        config.use_cache = False
        construct = self._constructor()
        kinds = _attention_kinds(config)
        drawn = torch.get_rng_state()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                for kind in kinds[:-1]:
                    with contextlib.suppress(ValueError, KeyError):  # what a model without such an attention raises
                        return _as_trained(construct(_with_attention(config, kind)))
                    torch.set_rng_state(drawn)  # so that initial values are those of the first try
                return _as_trained(construct(_with_attention(config, kinds[-1])))
        except Exception as error:
            raise ModelError(
                f"{self.path}: transformers cannot build this model: {type(error).__name__}: {error}",
                hint="check the config against the model's documentation",
            ) from error

    def example_inputs(self, batch_size: int, seq_len: int) -> Batch:
        """Tokens, int64 (batch_size, seq_len); images or sound of the config's size where the model takes those."""
        constructor = self._constructor()
        main = getattr(constructor, "main_input_name", "input_ids")
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
        inputs = {main: tokens if main == "input_ids" else _media(self.config, main, batch_size)}
        if getattr(self.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = tokens.clone()
        if main == "input_ids" and _takes_plain_images(constructor, self.config):
            inputs["pixel_values"] = _media(self.config, "pixel_values", batch_size)
            _put_image_tokens(tokens, self.config)
        return inputs

    def left_out(self, content: Mapping[str, object]) -> str | None:
        """What a training of the published model, whose config.json holds ``content``, may have besides what is built.

        The libraries' kernels are known to no trace, and are not on every machine that plans.
        """
        num_predicting = content.get("num_nextn_predict_layers")
        found = [f"{num_predicting} layers of multi-token prediction"] if num_predicting else []
        libraries = _libraries_of_kernels(self._constructor())
        if libraries:
            found.append(f"the kernels of {' and '.join(libraries)}: planned is transformers' own code for the same, "
                         "and steps are several times faster where these are installed")  # fmt: skip
        model_class = _named_class(self.config)
        has_kernel = getattr(model_class, "_supports_sdpa", True) or WINDOWED_ATTENTION in _attention_kinds(self.config)
        if hasattr(self.config, "num_attention_heads") and not has_kernel:
            found.append("a fused kernel of attention: transformers has none for this model that the planner can run, "
                         "and long sequences take several times as long as with one")  # fmt: skip
        return ", and without ".join(found) or None

    @property
    def training_notes(self) -> tuple[str, ...]:
        """What the planner's loss, the cross entropy of next tokens, is not for this model."""
        notes: list[str] = []
        constructor = self._constructor()
        name = getattr(constructor, "__name__", "")
        if name.endswith("ForMaskedLM"):
            notes.append(f"{name} sees what is on both sides of a token, and is trained here to name the next one: "
                         "step time and memory come true, but it learns to copy")  # fmt: skip
        if name and _returns_hidden_states(constructor):
            notes.append(f"{name} has no head: what it returns is taken for logits, and what it learns is of no use")
        text = self.config.get_text_config()
        balance = getattr(text, "router_aux_loss_coef", None)
        if balance and getattr(text, "output_router_logits", False):
            notes.append(f"its config adds a balance loss of the routers (router_aux_loss_coef = {balance:g}), which "
                         "is not added here")  # fmt: skip
        return tuple(notes)

    def _constructor(self) -> Callable[[PretrainedConfig], nn.Module]:
        """The class that the config names, or else the causal language model of its type."""
        import transformers

        named = _named_class(self.config)
        return named or functools.partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=False)


def _named_class(config: PretrainedConfig) -> type[nn.Module] | None:
    """The class of ``transformers`` that the config names; None where there is none."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, nn.Module):
            return model_class
    return None


def _libraries_of_kernels(model_class: Any) -> tuple[str, ...]:
    """Those that transformers calls in the code of ``model_class`` where they are installed."""
    defined = vars(sys.modules[model_class.__module__]).values()
    functions = [each for each in defined if inspect.isfunction(each) and hasattr(each, "__wrapped__")]
    packages = [inspect.getclosurevars(each).nonlocals.get("package") for each in functions]
    return tuple(sorted({_LIBRARIES[package] for package in packages if package in _LIBRARIES}))


def _of_its_class(config: PretrainedConfig) -> PretrainedConfig:
    """``config``, or its part for text where the class that it names takes that alone, as Qwen3_5ForCausalLM does.

    ValueError where it has several such parts.
    """
    text, named = config.get_text_config(), _named_class(config)
    wanted = getattr(named, "config_class", None)
    if wanted is None or isinstance(config, wanted) or not isinstance(text, wanted):
        return config
    text.architectures = config.architectures
    return text


def _returns_hidden_states(model_class: Any) -> bool:
    """Whether a class of ``transformers`` says that it returns hidden states and no logits."""
    returned = inspect.signature(model_class.forward).return_annotation
    kinds = [kind for kind in get_args(returned) or (returned,) if dataclasses.is_dataclass(kind)]
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    return "last_hidden_state" in names and "logits" not in names


def _with_attention(config: PretrainedConfig, attention: str) -> PretrainedConfig:
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    return config


def _media(config: PretrainedConfig, name: str, batch_size: int) -> torch.Tensor:
    """An input that is no text: pixels (batch, channels, height, width), or sound (batch, mel bins, frames)."""
    vision = getattr(config, "vision_config", config)
    if name == "pixel_values":
        size = getattr(vision, "image_size", None) or DEFAULT_IMAGE_SIZE
        height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        return torch.zeros(batch_size, getattr(vision, "num_channels", 3), height, width)
    if name == "input_features" and hasattr(config, "max_source_positions"):
        # Whisper's second convolution halves the number of frames.
        return torch.zeros(batch_size, config.num_mel_bins, 2 * config.max_source_positions)
    raise ModelError(
        f"no example of the input {name!r} of model_type {config.model_type!r}", hint="wrap it in a model.py"
    )


def _takes_plain_images(constructor: Callable[..., nn.Module], config: PretrainedConfig) -> bool:
    """Whether the model sees one image of fixed size beside each text."""
    if not isinstance(constructor, type) or getattr(config, "vision_config", None) is None:
        return False
    names = inspect.signature(constructor.forward).parameters.keys()
    return "pixel_values" in names and not any("grid" in name for name in names)


def _put_image_tokens(tokens: torch.Tensor, config: PretrainedConfig) -> None:
    """Marks where the image goes: at the start of each text, a token for each of its features."""
    token = getattr(config, "image_token_id", None)
    if not isinstance(token, int):
        return
    count = getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", None)
    count = count or _patches(config)
    if tokens.shape[1] <= count:
        raise ModelError(
            f"an image takes {count} tokens of {tokens.shape[1]}: none are left for the text",
            hint=f"give --seq-len above {count}",
        )
    tokens[:, :count] = token


def _patches(config: PretrainedConfig) -> int:
    """Of one image. ModelError where its size, or that of a patch, is not one number."""
    vision = config.vision_config
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if not isinstance(size, int) or not isinstance(patch, int):
        raise ModelError(
            f"how many tokens an image takes is not known: image_size {size!r}, patch_size {patch!r} in vision_config",
            hint="wrap it in a model.py, whose example_inputs gives text and image",
        )
    return (size // patch) ** 2


def _attention_kinds(config: PretrainedConfig) -> tuple[str, ...]:
    """The attentions to build with, best first: SDPA, its masks left to ``is_causal`` where no layer looks at a window.

    Models with windows or sinks have an attention that takes these, where they hand it all that they are.

    Training data has no padding and one document a row, so a full causal mask says nothing that
    ``is_causal`` does not; transformers finds that out by reading the mask, which a trace cannot.
    An attention function that is registered without a mask function is given no mask.
    """
    if config.model_type in _ADDS_TO_ITS_MASK:
        return "sdpa", "eager"
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ())
    has_windows = bool(layer_types - {"full_attention"}) or (
        not layer_types and getattr(text, "sliding_window", None) is not None
    )
    if has_windows:
        return (WINDOWED_ATTENTION, "sdpa", "eager") if takes_windows(config) else ("sdpa", "eager")
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(UNMASKED_ATTENTION, sdpa_attention_forward)
    return UNMASKED_ATTENTION, "sdpa", "eager"


def from_pretrained(module: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """The weights in ``folder`` under the names of ``module``, a model of ``transformers``; never pickled ones.

    ModelError where ``transformers`` cannot read them, or some are missing.
    """
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        raise ModelError(f"{folder} holds weights for transformers, the model is a {type(module).__name__}",
                         hint="name a .safetensors file whose names are the model's own")  # fmt: skip
    try:
        with contextlib.redirect_stdout(sys.stderr):
            loaded: Any = type(module).from_pretrained(
                str(folder), config=module.config, dtype=torch.float32, use_safetensors=True, local_files_only=True,
                output_loading_info=True,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{folder}: transformers cannot read the weights: {first}",
                         hint="name a folder with config.json and .safetensors files") from error  # fmt: skip
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} tensors of the model, the first {missing[0]}",
                         hint="name the weights of this model")  # fmt: skip
    return dict(model.state_dict())
