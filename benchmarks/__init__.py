"""What is measured, and not tested: see `docs/quality.md`."""
