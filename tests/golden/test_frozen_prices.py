"""A sample of the prices on record; all of them: ``python -m benchmarks.frozen_prices compare``."""

from benchmarks.frozen_prices import frozen

MODELS = (("gpt2-1.5b", 1024), ("llama3-8b", 4096), ("mixtral-8x7b", 4096))  # few, so that few are traced
STEP = 5  # every so many layouts of each setting


def test_prices_and_cuts_are_those_on_record() -> None:
    kept = frozen.read(frozen.SHIPPED)
    settings = [case["setting"] for case in kept["cases"]["prices"]]
    cheap = [i for i, s in enumerate(settings) if (s["model"], s["seq_len"]) in MODELS and s["precision"] == "bf16"]
    part = frozen.sample(kept, cheap[::3], STEP)
    layouts = [layout for setting in part["results"]["prices"] for layout in setting]
    assert sum(len(layout["prices"]) for layout in layouts) >= 50
    now = frozen.results_of(part["cases"])
    found = frozen.all_price_differences(part["cases"], part["results"], now)
    assert [each for each in found if each.relative > frozen.TOLERANCE] == []
