"""Published, measured training runs: reading them, pricing them as they were run, and judging the predictions."""
