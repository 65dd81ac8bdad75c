"""Scripts are read as bash reads them, and what they leave open is refused or said."""

import subprocess
from contextlib import suppress

import pytest

from costmodels.vocabulary.choices import Precision
from planner.errors import InputError
from planner.formats.registry import read_config
from planner.formats.shell import command_of
from planner.formats.target import Read

MODEL = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 2048"
VALUED = ("--tensor-model-parallel-size", "--micro-batch-size", "--pipeline-model-parallel-size", "--fp8-format")
READ = {**dict.fromkeys(VALUED, True), "--bf16": False}
# Scripts without conditions: what they give to torchrun is what bash gives to it.
SCRIPTS = (
    'RUN=exp/llama\nHOSTS=(a b)\ntorchrun --name ${RUN##*/} --hosts ${#HOSTS[@]} \\\n  --micro-batch-size 2 #no\n',
    "torchrun --a b#c '#d' \\\n  --micro-batch-size 2 # --micro-batch-size 4 \\\n",
    "ARGS=(\n  --micro-batch-size 2\n  # --micro-batch-size 4 \\\n  --fp8-format x )\ntorchrun ${ARGS[@]}",
    "TP=8; MBS=2\ntorchrun --micro-batch-size $MBS --tensor-model-parallel-size $TP && echo it is done",
    "TP=3\nTP+=2\nA=(--micro-batch-size 1)\nA+=(--fp8-format 'hybrid e4m3')\ntorchrun \"${A[@]}\" --x=$TP",
    "cat <<EOF\ndon't --micro-batch-size 4\nEOF\ncat <<-'END' > f\n\tit's\n\tEND\ntorchrun --micro-batch-size 2",
    "TP=$((2*4)); DP=$(( (32 / TP) % 3 + 1 ))\ntorchrun --micro-batch-size $((DP*16)) --a ${1:-4} ${U-5} ${V:=6} $V",
    ": ${MBS:=4}\ntorchrun --micro-batch-size $MBS --b ${NO:-${NEITHER:-7}}",
    "A=\"--micro-batch-size 2\n   --fp8-format hybrid\"\ntorchrun $A '$A' \"a \\\"b\\\" \\$A\" > log.txt 2>&1",
    "A=('--fp8-format hybrid' --micro-batch-size)\ntorchrun --x y ${A[@]} 2",
    "bash -c 'torchrun --micro-batch-size 2 --tensor-model-parallel-size 4' &\nwait",
    "f() {\n  local X=4\n  torchrun --micro-batch-size $X\n}\nf",
    "A=1\nif [ $A = 1 ]; then M=2; else M=3; fi\ncase $A in 2) T=5;; 1) T=6 ;; *) T=7\nesac\n"
    "[ $A -eq 1 ] && F=x || F=y\n[[ $A == 2 ]] && F=z\n"
    "torchrun --micro-batch-size $M --tensor-model-parallel-size $T --fp8-format $F",
    "A=b\ncase $A in a|b) M=2;; *) M=3;; esac\ncase $A in\n  (b | c) T=2 ;;\n  d) T=3;;\nesac\n"
    "torchrun --micro-batch-size $M --tensor-model-parallel-size $T",
    "F=true\nif $F; then M=2; else M=3; fi\nN=1\nif [ -n \"$N\" ]; then T=4; else T=5; fi\nE=\n"
    "if [ -z \"$E\" ]; then P=1; else P=2; fi\n"
    "torchrun --micro-batch-size $M --tensor-model-parallel-size $T --pipeline-model-parallel-size $P",
    "export -p X M=2 Y\necho y|torchrun --micro-batch-size $M --bf16",
    "A='--bf16'\nA=\"$A --micro-batch-size 2\"\ndeclare -a B=(--fp8-format x)\ntorchrun $A ${B[@]}",
    "A=1\nif [ $A = 2 ]; then\n  if [ $A = 3 ]; then M=1; fi\nelif [ $A -lt 2 ]; then M=4\nelse M=5\nfi\n"
    "torchrun --micro-batch-size $M",
)  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_command_has_the_words_that_bash_gives_it(script: str) -> None:
    """A # within a word began a comment, a comment went on behind its backslash, ``TP=8;`` was the number ``8;``."""
    stub = "torchrun() { printf '%s\\0' torchrun \"$@\" >&3; }; export -f torchrun; exec 3>&1 1>/dev/null; cd /tmp; "
    said = subprocess.run(["bash", "-c", stub + script], capture_output=True, check=True, timeout=20).stdout.decode()
    found = command_of(script.replace("> log.txt", ">log.txt"), READ)
    words = ["llama" if word == "${RUN##*/}" else word for word in found.words]  # what is not known stays as it is
    assert words == said.replace("--fp8-format hybrid\0", "--fp8-format\0hybrid\0").split("\0")[:-1]
    assert found.conditional == ()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("if [ -n \"$BIG\" ]; then TP=8; else TP=2; fi\nx --tensor-model-parallel-size $TP", "is 8 or 2"),
        ("TP=2\n[ -n \"$BIG\" ] && TP=8\nx --tensor-model-parallel-size $TP", "is 8 or 2"),
        ("case $1 in\n a|b) TP=1;;\n c) TP=2 ;;\n *) TP=4;;\nesac\n"
         "x --tensor-model-parallel-size $TP", "is 1 or 2 or 4"),
        ("for MBS in 1 2; do\n x --micro-batch-size $MBS\ndone", "--micro-batch-size is 1 or 2"),
        ("A=(--micro-batch-size 1)\nif grep -q H100 f; then A+=(--tensor-model-parallel-size 2)\nelse\n"
         "A+=(--tensor-model-parallel-size 8)\nfi\nx ${A[@]}", "is 2 or 8"),
        ("x --micro-batch-size 1 --tensor-model-parallel-size 2;y --tensor-model-parallel-size 8", "2 or 8: several"),
        ("x --micro-batch-size 'a", "a ' is never closed"),
        ("x --micro-batch-size ${A", "is never closed"),
        ("A=(x --micro-batch-size 2", "is never closed"),
        ("A=(" + "a" * 60000 + ")\n" + "A=(${A[@]})\n" * 99 + "x ${A[@]}", "1,048,576"),
    ],
)  # fmt: skip
def test_what_a_script_says_in_two_ways_is_refused(script: str, says: str) -> None:
    """The last branch and the last command won."""
    with pytest.raises(InputError, match=says) as found:
        command_of(script, READ)
    assert found.value.hint


def test_what_is_not_the_command_does_not_count() -> None:
    script = (
        "python tools/convert.py --fp8-format e4m3\n"
        "if [ -n \"$FAST\" ]; then A=(--pipeline-model-parallel-size 4); fi\n"
        "srun sh -c \"torchrun x --micro-batch-size 1 --micro-batch-size 2 --tensor-model-parallel-size=4 ${A[*]}\""
    )  # fmt: skip
    found = command_of(script, READ)
    assert "--fp8-format" not in found.words
    assert found.words[-2:] == ["--pipeline-model-parallel-size", "4"]
    assert found.conditional == ("--pipeline-model-parallel-size",)
    assert command_of("x --bf16 $MORE --micro-batch-size 1\ny --bf16 z", READ).words[1:3] == ["--bf16", "$MORE"]
    assert command_of("x \\\r\n --micro-batch-size 1\r\n", READ).words == ["x", "--micro-batch-size", "1"]
    # in one command the last one counts, as argparse has it, and lines of options need no command
    assert command_of("--micro-batch-size 1\n--fp8-format e4m3", READ).words == [
        "--micro-batch-size", "1", "--fp8-format", "e4m3",
    ]  # fmt: skip
    assert command_of("A='--micro-batch-size 1'\nB=(--fp8-format x)", READ).words[-1] == "x"
    assert command_of("sbatch <<EOF\nx --micro-batch-size 1\nEOF", READ).words == ["x", "--micro-batch-size", "1"]
    assert command_of("x --tensor-model-parallel-size 2 --stages Et*3|(tt|)*2L", READ).words[-1] == "Et*3|(tt|)*2L"


@pytest.mark.parametrize(
    "text", ["${" * 30_000, "$((" * 20_000, "${A:-" * 20_000 + "}" * 20_000, "'\"" * 9, "((((", "`"]
)
def test_no_text_breaks_the_reader(text: str) -> None:
    for wrong in (text, f"x --micro-batch-size {text}", f"x=$(({text}))"):
        with suppress(InputError):
            command_of(wrong, READ)


def read(script: str) -> Read:
    return read_config("train.sh", script)[1]


def test_what_the_environment_says_is_left_to_the_options_that_say_it() -> None:
    """It was an invalid int value, whatever --gpus and --global-batch said."""
    found = read(f"NNODES=$SLURM_NNODES\nx --nnodes $NNODES --nproc_per_node 8 --global-batch-size $((8*D)) "
                 f"--micro-batch-size 1 {MODEL} --tensor-model-parallel-size 2 --optimizer=$O")  # fmt: skip
    said = found.settings
    assert (said.num_devices, said.global_batch_size, said.num_microbatches, said.optimizer) == (None,) * 4
    assert said.tp == 2
    notes = " / ".join(found.notes)
    for note in ("--nnodes is $SLURM_NNODES, which the script does not say itself: --gpus", "--global-batch says it"):
        assert note in notes
    more = read(f"x --tensor-model-parallel-size 2 --micro-batch-size 1 {MODEL} --bf16 $EXTRA")
    assert (more.settings.precision, more.settings.tp) == (Precision.BF16, 2)
    open_size = read(f"x --tensor-model-parallel-size 2 --micro-batch-size 1 {MODEL} --ffn-hidden-size $F")
    assert open_size.shape is None
    assert "--model says all sizes" in " / ".join(open_size.notes)
    with pytest.raises(InputError, match=r"--tensor-model-parallel-size is \$4, which the script does not say"):
        read(f"x --tensor-model-parallel-size $4 {MODEL}")


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ("--hybrid-override-pattern M-M-M*", "hybrid-override-pattern"),
        ("--mtp-num-layers 1", "mtp-num-layers 1"),
        ("--fp4-format e2m1", "fp4-format"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "optimizer-offload-fraction 0.5"),
        ("--recompute-granularity selective --recompute-modules core_attn mlp", "recompute-modules mlp"),
        ("--num-experts 8 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1024", "1024 .* of 1408"),
    ],
)
def test_options_that_change_a_step_and_have_no_price_are_refused(options: str, refused: str) -> None:
    """They were in the list of what is not read, and a shared expert narrower than one expert vanished."""
    with pytest.raises(InputError, match=refused):
        read(f"x --tensor-model-parallel-size 2 {MODEL} {options}")


def test_what_is_priced_otherwise_is_said_by_itself() -> None:
    options = "--grad-reduce-in-bf16 --rampup-batch-size 32 32 100 --mtp-num-layers 0 --recompute-modules core_attn"
    notes = " / ".join(read(f"x --tensor-model-parallel-size 2 {MODEL} {options} --recompute-activations").notes)
    assert "--grad-reduce-in-bf16 halves the bytes" in notes
    assert "a step after the ramp" in notes
    assert "not read" not in notes


def test_without_a_global_batch_it_is_a_micro_batch_of_every_replica() -> None:
    """Megatron-LM's default."""
    found = read(f"torchrun --nproc-per-node 8 x --tensor-model-parallel-size 2 --micro-batch-size 3 {MODEL}").settings
    assert (found.micro_batch_size, found.num_microbatches, found.global_batch_size) == (3, 1, None)
