"""The options of Megatron-LM's command line that are read, refused or told, out of a script that somebody wrote.

Read in NVIDIA/Megatron-LM at core_v0.19.0: megatron/training/arguments.py and the configs that it makes options of.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

from planner.errors import InputError
from planner.formats.shell import Command, command_of
from planner.formats.shell_values import is_unknown

_NUMBERS = (
    "nnodes nproc-per-node nproc_per_node tensor-model-parallel-size pipeline-model-parallel-size "
    "context-parallel-size expert-model-parallel-size expert-tensor-parallel-size "
    "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank "
    "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers "
    "num-distributed-optimizer-instances micro-batch-size global-batch-size seq-length recompute-num-layers num-layers "
    "hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels vocab-size num-experts "
    "moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size q-lora-rank kv-lora-rank qk-head-dim "
    "qk-pos-emb-head-dim v-head-dim max-position-embeddings"
)
_WORDS = (
    "pipeline-model-parallel-layout data-parallel-sharding-strategy recompute-granularity recompute-method optimizer "
    "fp8-format moe-layer-freq moe-router-score-function normalization position-embedding-type rotary-base "
    "norm-epsilon hidden-dropout attention-dropout cp-comm-type recompute-modules rampup-batch-size "
    "sgd-momentum"
)
_LISTS = ("cp-comm-type", "recompute-modules", "rampup-batch-size")
_SWITCHES = (
    "sequence-parallel use-distributed-optimizer use-megatron-fsdp overlap-grad-reduce "
    "overlap-param-gather tp-comm-overlap bf16 fp16 swiglu squared-relu untie-embeddings-and-output-weights "
    "group-query-attention optimizer-cpu-offload use-precision-aware-optimizer recompute-activations "
    "disable-bias-linear qk-layernorm "
    "multi-latent-attention use-rotary-position-embeddings grad-reduce-in-bf16"
)
# What changes a step and has no price: an import says no rather than pricing something else.
_REFUSED_SWITCHES = (
    "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split use-torch-fsdp2 is-hybrid-model "
    "fp4-param-gather"
)
_REFUSED_WORDS = "hybrid-override-pattern hybrid-layer-pattern fp4-format mtp-num-layers optimizer-offload-fraction"
_HARMLESS_VALUES = {"mtp-num-layers": "0", "optimizer-offload-fraction": "1.0"}
_TOLD = {
    "grad-reduce-in-bf16": "--grad-reduce-in-bf16 halves the bytes of gradients, which is not priced: the reduction is "
    "priced as of 32 bits",
    "rampup-batch-size": "--rampup-batch-size: priced is a step after the ramp, of the whole global batch",
}
# Options of an import that say the same: a value that the script takes from its environment is left to them.
_SAID_BY = {
    "nnodes": "--gpus", "nproc_per_node": "--gpus", "micro_batch_size": "--micro-batch",
    "global_batch_size": "--global-batch", "seq_length": "--seq-len", "optimizer": "--optimizer",
}  # fmt: skip
# Every option, and whether a value stands behind it.
_OPTIONS = {
    f"--{name}": names not in (_SWITCHES, _REFUSED_SWITCHES)
    for names in (_NUMBERS, _WORDS, _REFUSED_WORDS, _SWITCHES, _REFUSED_SWITCHES)
    for name in names.split()
}
# The model's sizes, which --model replaces all together.
SIZES = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "vocab_size", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "position_embedding_type",
    "moe_layer_freq", "moe_router_score_function",
})  # fmt: skip
# Read, and nothing of the price: whatever the script makes of them.
_IDLE = frozenset({
    "rotary_base", "norm_epsilon", "hidden_dropout", "attention_dropout", "max_position_embeddings",
    "rampup_batch_size",
})  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """The options by name, None where they are not given; and those whose value the script does not say."""

    given: dict[str, object]
    open_names: frozenset[str]
    notes: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"the command line of Megatron-LM is wrong: {message}", hint="correct it")


def arguments(text: str) -> Arguments:
    """What the training command in ``text`` gives; InputError where that is not clear, or has no price."""
    command = command_of(text, _OPTIONS)
    words, open_words = _known_words(command)
    known, rest = _parser().parse_known_args(words)
    given: dict[str, object] = vars(known)
    _check_priced(given)
    return Arguments(given, frozenset(open_words), (*_notes(command, given, rest), *_open_notes(open_words)))


def _known_words(command: Command) -> tuple[list[str], dict[str, str]]:
    """The words without options whose value the script takes from elsewhere, and those; InputError where one counts."""
    found: list[str] = []
    left: dict[str, str] = {}
    words = [*command.words]
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        key = _key(name.removeprefix("--"))
        if not equals and words and not words[0].startswith("--"):
            value = words[0]
        if not name.startswith("--") or not _OPTIONS.get(name) or not is_unknown(value):
            found.append(word)
            continue
        left[key] = value
        if not equals:
            words.pop(0)
        if key not in _SAID_BY and key not in SIZES and key not in _IDLE:
            raise InputError(
                f"{name} is {value[:60]}, which the script does not say itself",
                hint="write its value into the script, or give the command alone, as `set -x` or echo prints it",
            )
    return found, left


def _open_notes(left: dict[str, str]) -> list[str]:
    said = {name: option for name in left if (option := _SAID_BY.get(name)) is not None}
    notes = [
        f"--{name.replace('_', '-')} is {left[name][:60]}, which the script does not say itself: {option} says it"
        for name, option in said.items()
    ]
    sizes = [f"--{name.replace('_', '-')} is {left[name][:60]}" for name in left if name in SIZES]
    if sizes:
        notes.append(f"{', '.join(sizes)}, which the script does not say itself: --model says all sizes")
    return notes


def _check_priced(given: dict[str, object]) -> None:
    """InputError for what changes a step and has no price."""
    refused = [name for name in _REFUSED_SWITCHES.split() if given[_key(name)]]
    refused += [
        f"{name} {value}"
        for name in _REFUSED_WORDS.split()
        if (value := given[_key(name)]) is not None and not _is_harmless(name, str(value))
    ]
    modules = given["recompute_modules"]
    others = [str(each) for each in modules if each != "core_attn"] if isinstance(modules, list) else []
    if others and (given["recompute_granularity"] == "selective" or given["recompute_activations"]):
        refused.append(f"recompute-modules {' '.join(others)[:80]}")
    if refused:
        raise InputError(
            f"layouts with {', '.join('--' + name[:80] for name in refused)} are not priced", hint="leave these out"
        )


def _is_harmless(name: str, value: str) -> bool:
    """Whether the value is what a run has without the option."""
    try:
        return float(value) == float(_HARMLESS_VALUES[name])
    except (KeyError, ValueError):
        return False


def _notes(command: Command, given: dict[str, object], rest: list[str]) -> list[str]:
    notes = [said for name, said in _TOLD.items() if given[_key(name)]]
    if command.conditional:
        notes.append(f"taken as given, though under a condition of the script: {', '.join(command.conditional)}")
    unread = sorted({word.partition("=")[0] for word in rest if word.startswith("--")})
    if unread:
        notes.append(f"not read: {', '.join(unread)}")
    return notes


def _key(name: str) -> str:
    return name.replace("-", "_")


@cache
def _parser() -> _Parser:
    parser = _Parser(prog="pretrain_gpt.py", add_help=False, allow_abbrev=False)
    for name in dict.fromkeys(_NUMBERS.split()):
        parser.add_argument(f"--{name}", type=int, dest=_key(name))
    for name in (*_WORDS.split(), *_REFUSED_WORDS.split()):
        parser.add_argument(f"--{name}", nargs="+" if name in _LISTS else None, dest=_key(name))
    for name in (*_SWITCHES.split(), *_REFUSED_SWITCHES.split()):
        parser.add_argument(f"--{name}", action="store_true", dest=_key(name))
    return parser
