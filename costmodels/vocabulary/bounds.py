"""The largest numbers that are taken from an option or a file: above any training's, small enough to compute with."""

MOST_DEVICES = 1_000_000  # as hardware_profiles.catalog; the largest clusters announced in 2025 have 200,000 GPUs
MOST_STAGES_A_RANK = 10_000  # no published model has as many layers
# Tokens. The longest context a published model claims is 10 M (Llama 4 Scout, 2025); attention's scores of a longer one
# have no number of elements that 64 bits hold once heads and a batch multiply them.
MOST_SEQ_LEN = 2**24
MOST_SEQUENCES = 2**24  # of a global batch: sixteen for each of the most devices
# Micro-batches times stages of one pipeline's step, each of which is simulated. A search for four ranks took 30 s and
# 3 GB where a million micro-batches had to pass, and 3 s and 0.3 GB for 65,537.
MOST_PASSES = 2**20
MOST_TOKENS = 10**18  # of a whole run: 15e12 for Llama 3 (Grattafiori et al. 2024)
MOST_BYTES = 2**63 - 1  # of anything, and its elements: 64 bits
MOST_FLOPS = 10**30  # a step of 10^13 parameters over 10^16 tokens takes 6 * 10^29
MOST_TEXT = 4096  # characters of a name: as long as a path of Linux may be
MOST_ITEMS = 100_000  # of a list in a plan
