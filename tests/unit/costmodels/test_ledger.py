"""The ledger of a rank's memory: rows that add up, what software takes besides, and the fullest phase."""

import pytest

from costmodels.ledger import MemoryLedger, RankMemory, SoftwareBytes
from costmodels.vocabulary.terms import MemoryTerm, Phase

SOFTWARE = SoftwareBytes(reserve_fraction=0.1, communicator_bytes=0.5e9, context_bytes=1e9)


def test_a_ledger_adds_up_and_keeps_its_rows() -> None:
    ledger = MemoryLedger().plus(MemoryTerm.PARAMETERS, 10e9).plus(MemoryTerm.ACTIVATIONS, 20e9)
    assert ledger.total_bytes == 30e9
    whole = ledger.with_reserve(SOFTWARE, num_communicators=3, waiting=4e9, stranded=0.5e9)
    assert dict(whole.rows) == {
        "parameters": 10e9,
        "activations": 20e9,
        "waiting_collectives": 4e9,
        "stranded_copies": 0.5e9,
        "allocator_reserve": pytest.approx(2e9),  # a tenth of what comes and goes: what lasts leaves no gaps
        "communicators": 1.5e9,
        "context": 1e9,
    }
    assert whole.total_bytes == pytest.approx(39e9)
    assert whole.reserved_bytes == pytest.approx(36.5e9)
    assert whole.allocated_bytes == pytest.approx(30e9)
    assert whole.bytes_of(MemoryTerm.ACTIVATIONS) == 20e9
    assert whole.bytes_of(MemoryTerm.WORKING_SET) == 0


def test_a_row_is_entered_once_and_is_not_negative() -> None:
    ledger = MemoryLedger().plus(MemoryTerm.PARAMETERS, 1.0)
    with pytest.raises(ValueError, match="already has a row parameters"):
        ledger.plus(MemoryTerm.PARAMETERS, 2.0)
    with pytest.raises(ValueError, match="memory of gradients must not be negative, got -1"):
        ledger.plus(MemoryTerm.GRADIENTS, -1.0)


def test_each_term_is_specified_fitted_or_measured() -> None:
    ledger = MemoryLedger().plus(MemoryTerm.ACTIVATIONS, 1.0).with_reserve(SOFTWARE, 1)
    assert {name: name.provenance for name, _ in ledger.rows} == {
        "activations": "specified",
        "waiting_collectives": "fitted",
        "stranded_copies": "specified",
        "allocator_reserve": "fitted",
        "communicators": "measured",
        "context": "measured",
    }


def test_the_peak_is_that_of_the_fullest_phase() -> None:
    small, large = MemoryLedger().plus(MemoryTerm.PARAMETERS, 1.0), MemoryLedger().plus(MemoryTerm.PARAMETERS, 2.0)
    memory = RankMemory(((Phase.INITIALISATION, small), (Phase.BACKWARD, large), (Phase.OPTIMIZER, small)))
    assert memory.peak is large
    assert memory.ledger(Phase.OPTIMIZER) is small
